//! The process that serves one attached disk. It has the disk open, makes it a ublk device or
//! mounts it as a FUSE file, and does its I/O until the device is stopped or the file is unmounted.
//!
//! It reports to the supervisor on its standard output, one line of JSON for each message
//! ([`ServerMessage`]): first that the disk is available (or why not), then each new size and file
//! of the disk, and at the end that the disk is closed (or what was lost). It ends when its device
//! is stopped or its file is unmounted. It does nothing else, so nothing else can crash it. If it
//! dies anyway, the supervisor sees the end of its output.

use crate::{
    attach::{error::AttachError, freezing},
    control::{self, Change, Channel, Host, HostedDisk, Limits, OnChange},
    fuse::{self, DISK_NAME, FuseError, MountOptions, Shape, View},
    ublk::{self, UblkPlace},
};
use diskwright_disk::{Disk, Movable};
use diskwright_store::{BlockDevice, EngineKind, LimitedDevice, RateLimiter, RateLimits, resize::SizeWatcher};
use serde::{Deserialize, Serialize};
use std::{
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc, Mutex, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{SystemTime, UNIX_EPOCH},
};

/// How the server makes the disk available.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServeMethod {
    /// As a FUSE file, at this mount point.
    FuseFile(PathBuf),
    /// As a ublk device.
    Ublk(UblkPlace),
}

/// What a server process is started for.
#[derive(Debug, Clone, Copy)]
pub struct ServerStart<'a> {
    /// How it makes the disk available.
    pub method: &'a ServeMethod,
    /// Where the image is.
    pub image: &'a Path,
    /// The limits that a former server was given over its control channel. `None`: those that the
    /// disk was attached with.
    pub limits: Option<RateLimits>,
}

/// Makes the command of a server.
pub(super) type MakeServer = dyn Fn(ServerStart<'_>) -> Command;

/// Where the disk is available.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServedDevice {
    /// As this file.
    File(PathBuf),
    /// As the ublk device with this number, which can now be started.
    Ublk(u32),
}

/// A message of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ServerMessage {
    /// The disk is available.
    Ready {
        /// Where.
        shown: ServedDevice,
        /// Size in bytes.
        size: u64,
        /// Logical sector size in bytes.
        sector_size: u32,
        /// Whether writes are refused.
        read_only: bool,
        /// Sentences for the user.
        warnings: Vec<String>,
    },
    /// The disk could not be opened or made available.
    Failed {
        /// The error, as a sentence.
        error: String,
        /// Whether the machine lacks something, rather than the disk being at fault.
        #[serde(default)]
        machine: bool,
    },
    /// The disk has a new size.
    Resized {
        /// Size in bytes.
        size: u64,
    },
    /// The disk is in another file.
    Moved {
        /// The file.
        file: PathBuf,
    },
    /// The rate at which the disk is served has a new limit.
    Limited {
        /// The limits.
        limits: Limits,
    },
    /// A snapshot is near: freeze the file systems. The answer is [`SupervisorMessage::Frozen`].
    Freeze,
    /// The snapshot was taken or has failed: thaw the file systems. The answer is
    /// [`SupervisorMessage::Thawed`].
    Thaw,
    /// The file was unmounted or the device stopped. No more requests can arrive, and the disk is
    /// being closed.
    Closing,
    /// The disk is closed. With an error, data that was written and not flushed may be lost.
    Closed {
        /// Why the close failed.
        error: Option<String>,
    },
}

/// An answer of the supervisor, on the server's standard input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SupervisorMessage {
    /// The file systems are frozen.
    Frozen {
        /// Where they are mounted.
        dirs: Vec<PathBuf>,
        /// Sentences about those that are not.
        warnings: Vec<String>,
    },
    /// No file system is frozen any more.
    Thawed {
        /// Sentences about those that were thawed too early or not at all.
        warnings: Vec<String>,
    },
}

impl ServerMessage {
    /// Writes the message. Errors are ignored: there is no one left to report them to.
    pub fn send(&self, out: &mut dyn Write) {
        if let Ok(mut line) = serde_json::to_vec(self) {
            line.push(b'\n');
            let _ = out.write_all(&line).and_then(|()| out.flush());
        }
    }
}

/// The time, in seconds since 1970.
pub(crate) fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

/// Makes `disk` available, serves it until it is unmounted or stopped, and closes it. All messages
/// go to `out`; the supervisor's answers come from `answers`. `limits` can be replaced over the
/// control channel.
///
/// # Errors
/// The error that the last message has already reported.
pub fn serve_disk(
    disk: Arc<Disk>,
    at: &ServeMethod,
    engine: EngineKind,
    limits: RateLimits,
    out: &mut (dyn Write + Send),
    answers: impl Read + Send + 'static,
) -> Result<(), AttachError> {
    // Memory reclaim must not wait for this process, because reclaim may write to this very disk.
    // Without the privilege (PR_SET_IO_FLUSHER), that deadlock remains possible, as for any disk in
    // user space.
    let _ = rustix::process::configure_io_flusher_behavior(true);
    let out = Mutex::new(out);
    let send = |message: ServerMessage| message.send(&mut **out.lock().unwrap_or_else(PoisonError::into_inner));
    let (tell, told) = channel();
    let freezer = Freezer { tell: tell.clone(), answers: Mutex::new(heard(answers)), frozen: Mutex::default() };
    let tell_change = tell.clone();
    let on_change: OnChange = Box::new(move |change| {
        let _ = tell_change.send(match change {
            Change::Moved(file) => ServerMessage::Moved { file },
            Change::Limited(limits) => ServerMessage::Limited { limits },
        });
    });
    let disk = Arc::new(Movable::new(disk));
    let limiter = Arc::new(RateLimiter::new(limits));
    let watcher: Arc<SizeWatcher> = Arc::new(move |size| {
        let _ = tell.send(ServerMessage::Resized { size });
    });
    disk.watch_size(&watcher);
    let channel = open_channel(&disk, &limiter, freezer, on_change);
    thread::scope(|scope| {
        scope.spawn(|| told.into_iter().for_each(&send));
        let result = serve_and_close(&disk, &limiter, at, engine, &send, channel.as_ref());
        if let Some(channel) = channel {
            channel.end(result.as_ref().copied().map_err(ToString::to_string));
        }
        // This drops the sender of the channel, so the thread ends.
        drop(watcher);
        result
    })
}

/// The control channel of a disk that is open for writing. Without it the disk is served all the
/// same.
fn open_channel(
    disk: &Arc<Movable>,
    limiter: &Arc<RateLimiter>,
    freezer: Freezer,
    on_change: OnChange,
) -> Option<Channel> {
    let opened = disk.disk();
    let file = opened.file()?;
    let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let hint = format!(
        "{}: an attached disk is closed by detaching it, which also unmounts it: `diskwright detach {}`",
        file.display(),
        file.display()
    );
    let host = Host {
        command: "attach",
        metrics: Box::new(Vec::new),
        doors: Err("an attached disk has no further doors: it is a device of this machine".into()),
        on_drain: Err(hint),
        freezer: Some(Box::new(freezer)),
        on_change: Some(on_change),
    };
    let hosted = HostedDisk { name, disk: Arc::clone(disk), limiter: Arc::clone(limiter) };
    Channel::open(vec![hosted], host).unwrap_or_else(|error| {
        tracing::warn!(%error, "there is no control channel, so the disk cannot be changed while it is attached");
        None
    })
}

/// The lines of the supervisor. The channel is closed when the supervisor is gone.
fn heard(answers: impl Read + Send + 'static) -> Receiver<SupervisorMessage> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(answers).lines() {
            let Ok(line) = line else { return };
            if let Ok(answer) = serde_json::from_str(&line)
                && sender.send(answer).is_err()
            {
                return;
            }
        }
    });
    receiver
}

/// Has the supervisor freeze the file systems on the disk.
struct Freezer {
    tell: Sender<ServerMessage>,
    answers: Mutex<Receiver<SupervisorMessage>>,
    /// What is frozen, for the case that the supervisor dies meanwhile.
    frozen: Mutex<Vec<PathBuf>>,
}

impl Freezer {
    fn ask(&self, question: ServerMessage) -> Option<SupervisorMessage> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        self.tell.send(question).ok()?;
        answers.recv().ok()
    }
}

impl control::Freezer for Freezer {
    fn freeze(&self) -> control::FrozenFileSystems {
        match self.ask(ServerMessage::Freeze) {
            Some(SupervisorMessage::Frozen { dirs, warnings }) => {
                self.frozen.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&dirs);
                control::FrozenFileSystems { file_systems: dirs, warnings }
            }
            _ => control::FrozenFileSystems {
                file_systems: Vec::new(),
                warnings: vec![
                    "file systems on the disk were not frozen, as the process that supervises it is gone: the frozen image is as after a power cut".into(),
                ],
            },
        }
    }

    fn thaw(&self) -> Vec<String> {
        let frozen = std::mem::take(&mut *self.frozen.lock().unwrap_or_else(PoisonError::into_inner));
        match self.ask(ServerMessage::Thaw) {
            Some(SupervisorMessage::Thawed { warnings }) => warnings,
            _ => freezing::thaw(&frozen),
        }
    }
}

fn serve_and_close(
    disk: &Arc<Movable>,
    limiter: &Arc<RateLimiter>,
    at: &ServeMethod,
    engine: EngineKind,
    send: &dyn Fn(ServerMessage),
    channel: Option<&Channel>,
) -> Result<(), AttachError> {
    let mut is_ready = false;
    let limited: Arc<dyn BlockDevice> = Arc::new(LimitedDevice::new(disk.clone(), Arc::clone(limiter)));
    let served = match at {
        ServeMethod::FuseFile(point) => serve_file(disk, limited, point, engine, &mut |message| {
            is_ready = true;
            send(message);
        }),
        ServeMethod::Ublk(place) => {
            let served = ublk::serve(limited, place, engine, |number| {
                is_ready = true;
                send(ready(disk, ServedDevice::Ublk(number)));
            });
            served.map_err(AttachError::Ublk)
        }
    };
    if let Err(error) = &served
        && !is_ready
    {
        let machine = matches!(error, AttachError::Fuse(FuseError::NoDevice { .. } | FuseError::Mount { .. }));
        send(ServerMessage::Failed { error: error.to_string(), machine });
        return served;
    }
    send(ServerMessage::Closing);
    channel.into_iter().for_each(Channel::close_gate);
    let closed = disk.close().map_err(|error| AttachError::Server(error.to_string()));
    let result = served.and(closed);
    send(ServerMessage::Closed { error: result.as_ref().err().map(ToString::to_string) });
    result
}

fn ready(disk: &Movable, shown: ServedDevice) -> ServerMessage {
    let geometry = disk.geometry();
    ServerMessage::Ready {
        shown,
        size: geometry.size_bytes,
        sector_size: geometry.logical_sector_bytes,
        read_only: geometry.read_only,
        warnings: disk.disk().warnings().to_vec(),
    }
}

fn serve_file(
    disk: &Arc<Movable>,
    limited: Arc<dyn BlockDevice>,
    point: &Path,
    engine: EngineKind,
    send: &mut dyn FnMut(ServerMessage),
) -> Result<(), AttachError> {
    let geometry = disk.geometry();
    let shape = fuse::shape_of(point)?;
    let fd = fuse::mount(point, &MountOptions { shape, read_only: geometry.read_only })?;
    let fuse_file = match shape {
        Shape::File => point.to_owned(),
        Shape::Directory => point.join(DISK_NAME),
    };
    send(ready(disk, ServedDevice::File(fuse_file)));
    let view = View {
        shape,
        size_bytes: geometry.size_bytes,
        unit_bytes: geometry.physical_sector_bytes.max(4096),
        read_only: geometry.read_only,
        uid: rustix::process::geteuid().as_raw(),
        gid: rustix::process::getegid().as_raw(),
        time_seconds: now_seconds(),
    };
    Ok(fuse::serve(fd, limited, view, engine)?)
}
