//! Attaching a disk: starts its server and the device, mounts, and keeps the record. The result is
//! what the supervisor watches (`supervisor.rs`).
//!
//! ```text
//!   make the folder ─▶ server process ─▶ Ready ─▶ block device ─▶ partitions ─▶ mount ─▶ record
//! ```
//!
//! If a step fails, everything before it is taken apart again.

use crate::attach::{
    AttachOptions, DeviceKind,
    control::{self, Answer},
    error::{AttachError, state_error},
    loop_device::{self, AttachedPartition, LoopOptions},
    mounting,
    process::Process,
    record::{AttachMethod, PartitionRecord, Record, RecordDir, Registry},
    server::{MakeServer, ServeMethod, ServedDevice, ServerMessage, ServerStart, now_seconds},
    supervisor::{Attached, Event},
    usage,
};
use crate::{
    control::identity,
    ublk::{self, UblkError, UblkPlace},
};
use diskwright_store::{Files, RateLimits};
use std::{
    fs::File,
    io::{BufRead, BufReader},
    os::unix::{net::UnixListener, process::CommandExt},
    process::{Child, Stdio},
    sync::mpsc::{Sender, channel},
    thread,
};

/// Attaches a disk. `server` makes the command of the process that serves the image at a path,
/// which must run [`serve_disk`](super::serve_disk) with its standard output as `out`.
///
/// # Errors
/// [`AttachError`]. Nothing is left attached then.
pub fn attach(registry: &Registry, options: &AttachOptions, server: Box<MakeServer>) -> Result<Attached, AttachError> {
    let file = match Files::has_scheme(&options.file) {
        true => options.file.clone(),
        false => options.file.canonicalize().map_err(|source| state_error("open", &options.file, source))?,
    };
    if options.fuse_dir.is_none() && !rustix::process::geteuid().is_root() {
        return Err(AttachError::BadOptions {
            what: format!("{}: block devices need root", options.file.display()),
            hint: "run as root, or use `AttachOptions::fuse_dir`, which shows the disk as a file",
        });
    }
    let home = registry.dir_of(&file)?;
    let identity = identity(&file).ok();
    let (by, no_ublk) = choose(options)?;
    let mut record = Record { by, ..Record::new(file, now_seconds()) };
    let warnings;
    {
        let lock = registry.lock()?;
        // Leftovers of killed processes, of this disk or of others, may be in the way.
        warnings = super::clear_all_stale(registry, &lock)?;
        if let Some(other) = home.read()? {
            return Err(AttachError::AlreadyAttached { file: options.file.clone(), place: other.place().to_owned() });
        }
        refuse_mounted(options)?;
        home.make(&lock)?;
        match (by, &options.fuse_dir) {
            (AttachMethod::Ublk, _) => record.ublk_mark = Some(ublk::new_mark()),
            (_, Some(dir)) => {
                record.fuse_mount = dir.canonicalize().map_err(|source| state_error("mount on", dir, source))?;
            }
            (_, None) => record.fuse_mount = home.make_mount_point()?,
        }
        record.fuse_file = record.fuse_mount.clone();
        record.ephemeral = options.ephemeral;
        home.write(&record)?;
    }
    let (sender, events) = channel();
    let started = listen(&home, &sender).and_then(|()| start_server(&home, &record, Start::First, &server, &sender));
    let child = match started {
        Ok(started) => started,
        Err(error) => {
            let _ = registry.clear(&home);
            return Err(error);
        }
    };
    let registry = registry.clone();
    let mut attached = Attached {
        _kept: registry.keep(),
        registry,
        home,
        record,
        child,
        events,
        sender,
        server,
        identity,
        limits: None,
        recovered_at: None,
        frozen_at: None,
        thawed_early: Vec::new(),
        closing: false,
        closed: None,
        force_waiters: Vec::new(),
        warnings,
    };
    match attached.complete(options) {
        Ok(()) => Ok(attached),
        Err(error) => {
            attached.roll_back();
            match (error, no_ublk) {
                (error @ (AttachError::Loop { .. } | AttachError::Machine(_)), Some(ublk)) => {
                    Err(AttachError::NoDevice { ublk, other: Box::new(error) })
                }
                (error, _) => Err(error),
            }
        }
    }
}

/// Refuses mount points that are in use. Only the topmost mount of a directory can be unmounted, so
/// a mount over another one would block that one.
fn refuse_mounted(options: &AttachOptions) -> Result<(), AttachError> {
    let mounts = usage::mounts().map_err(|source| state_error("read", "/proc/self/mountinfo".as_ref(), source))?;
    for dir in options.fuse_dir.iter().chain(&options.mount) {
        let place = dir.canonicalize().map_err(|source| state_error("mount on", dir, source))?;
        if let Some(there) = mounts.iter().rfind(|mount| mount.dir == place) {
            return Err(AttachError::BadOptions {
                what: format!(
                    "{} from {} is already mounted at {}",
                    there.file_system,
                    there.source.display(),
                    dir.display()
                ),
                hint: "choose another folder",
            });
        }
    }
    Ok(())
}

/// How to make the disk available and, if ublk was preferred but is not available, why not.
fn choose(options: &AttachOptions) -> Result<(AttachMethod, Option<UblkError>), AttachError> {
    if options.fuse_dir.is_some() {
        return Ok((AttachMethod::Fuse, None));
    }
    match options.by {
        Some(DeviceKind::Loop) => Ok((AttachMethod::Loop, None)),
        Some(DeviceKind::Ublk) => {
            ublk::control()?;
            Ok((AttachMethod::Ublk, None))
        }
        None => Ok(match ublk::control() {
            Ok(_) => (AttachMethod::Ublk, None),
            Err(error) => (AttachMethod::Loop, Some(error)),
        }),
    }
}

/// Starts the thread that accepts clients on `control`.
fn listen(home: &RecordDir, events: &Sender<Event>) -> Result<(), AttachError> {
    let control = home.control();
    let _ = std::fs::remove_file(&control);
    let listener = UnixListener::bind(&control).map_err(|source| state_error("listen on", &control, source))?;
    let asked = Sender::clone(events);
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if asked.send(Event::Asked(stream)).is_err() {
                return;
            }
        }
    });
    Ok(())
}

/// Which server of a disk is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Start {
    /// The first one.
    First,
    /// One that takes over the ublk device of another one, and the limits that this one was given
    /// after its start.
    TakesOver(Option<RateLimits>),
}

/// Starts a server, and the thread that reads its messages.
pub(super) fn start_server(
    home: &RecordDir,
    record: &Record,
    start: Start,
    server: &MakeServer,
    events: &Sender<Event>,
) -> Result<Child, AttachError> {
    let log = home.log();
    let log =
        File::options().create(true).append(true).open(&log).map_err(|source| state_error("write", &log, source))?;
    let at = match record.ublk_mark {
        // What is dropped when the server ends cannot be served by the next one.
        Some(mark) => {
            let risk = (!record.ephemeral).then(|| home.risk());
            ServeMethod::Ublk(UblkPlace { mark, exists: start != Start::First, risk })
        }
        None => ServeMethod::FuseFile(record.fuse_mount.clone()),
    };
    let limits = match start {
        Start::First => None,
        Start::TakesOver(limits) => limits,
    };
    let mut child = server(ServerStart { method: &at, image: &record.file, limits })
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        // Signals of the terminal go to the supervisor only.
        .process_group(0)
        .spawn()
        .map_err(|error| AttachError::Server(format!("cannot start the server process of the disk: {error}")))?;
    let sender = Sender::clone(events);
    if let Some(output) = child.stdout.take() {
        thread::spawn(move || {
            for line in BufReader::new(output).lines() {
                let Ok(line) = line else { break };
                if let Ok(says) = serde_json::from_str(&line)
                    && sender.send(Event::Server(says)).is_err()
                {
                    return;
                }
            }
            let _ = sender.send(Event::ServerGone);
        });
    }
    Ok(child)
}

impl Attached {
    fn complete(&mut self, options: &AttachOptions) -> Result<(), AttachError> {
        self.record.server = Process::of(self.child.id());
        let shown = self.wait_for_server()?;
        // From here on, a later command can clear up if this process dies.
        self.home.write(&self.record)?;
        if options.fuse_dir.is_none() {
            match shown {
                ServedDevice::Ublk(number) => self.start_ublk_device(number)?,
                ServedDevice::File(_) => self.set_up_loop_device()?,
            }
            self.home.write(&self.record)?;
            if let Some(dir) = &options.mount {
                let (partitions, whole) = self.detect_content()?;
                let file_systems: Vec<_> =
                    partitions.iter().map(|found| found.content.and_then(|it| it.file_system)).collect();
                mounting::mount(&mut self.record, &file_systems, whole, dir, options.partition, &mut self.warnings)?;
            } else {
                self.detect_content()?;
            }
        }
        self.home.write(&self.record)
    }

    pub(super) fn wait_for_server(&mut self) -> Result<ServedDevice, AttachError> {
        loop {
            match self.events.recv() {
                Ok(Event::Server(ServerMessage::Ready { shown, size, sector_size, read_only, warnings })) => {
                    if let ServedDevice::File(fuse_file) = &shown {
                        self.record.fuse_file.clone_from(fuse_file);
                    }
                    self.record.size = size;
                    self.record.sector_size = sector_size;
                    self.record.read_only = read_only;
                    self.warnings.extend(warnings);
                    return Ok(shown);
                }
                Ok(Event::Server(ServerMessage::Failed { error, machine: true })) => {
                    return Err(AttachError::Machine(error));
                }
                Ok(Event::Server(ServerMessage::Failed { error, .. })) => return Err(AttachError::Server(error)),
                Ok(Event::Server(ServerMessage::Moved { file })) => self.record.file = file,
                // A size change before `Ready` is included in `Ready`.
                Ok(Event::Server(
                    ServerMessage::Resized { .. }
                    | ServerMessage::Limited { .. }
                    | ServerMessage::Freeze
                    | ServerMessage::Thaw
                    | ServerMessage::Closing
                    | ServerMessage::Closed { .. },
                )) => {}
                Ok(Event::Asked(mut stream)) => {
                    let refused = Answer::Refused("the disk is being attached; try again in a moment".into());
                    let _ = control::answer(&mut stream, &refused);
                }
                Ok(Event::ServerGone) | Err(_) => {
                    return Err(AttachError::Server(format!(
                        "the server process {} before the disk was available",
                        self.exit_of_server()
                    )));
                }
            }
        }
    }

    /// Before Linux 7.0 the kernel reads the partition table while it starts the device, and the
    /// server answers those reads. Partitions that the kernel does not know are added later, by our
    /// own reading of the table ([`loop_device::find_partitions`]).
    fn start_ublk_device(&mut self, number: u32) -> Result<(), AttachError> {
        let mut control = ublk::control()?;
        let started = control.start(number, self.child.id());
        started.map_err(|source| UblkError::Device { doing: "start", source })?;
        let device = ublk::block_device(number);
        if !loop_device::wait_until(loop_device::NODE_PATIENCE, || device.exists()) {
            return Err(UblkError::NoNode { path: device }.into());
        }
        self.record.device = Some(device);
        self.home.write(&self.record)
    }

    fn set_up_loop_device(&mut self) -> Result<(), AttachError> {
        let record = &mut self.record;
        record.device = Some(loop_device::set_up(&LoopOptions {
            file: &record.fuse_file,
            name: &record.file,
            offset_bytes: 0,
            len_bytes: 0,
            sector_bytes: record.sector_size,
            read_only: record.read_only,
            partitions: true,
        })?);
        Ok(())
    }

    /// Detects partitions and content of the disk, and records them.
    fn detect_content(&mut self) -> Result<(Vec<AttachedPartition>, Option<&'static str>), AttachError> {
        let record = &mut self.record;
        let Some(device) = &record.device else { return Ok((Vec::new(), None)) };
        let failed = |source| state_error("read", device, source);
        let partitions = loop_device::find_partitions(device, record.size, record.sector_size).map_err(failed)?;
        record.partitions = partitions
            .iter()
            .map(|found| PartitionRecord {
                number: found.partition.number,
                start: found.partition.start_bytes,
                length: found.partition.len_bytes,
                device: found.device.clone(),
                content: found.content.map(|content| content.name.into()),
            })
            .collect();
        if !partitions.is_empty() {
            return Ok((partitions, None));
        }
        let whole = File::open(device).and_then(|file| loop_device::probe(&file, 0, record.size)).map_err(failed)?;
        record.content = whole.map(|content| content.name.into());
        Ok((partitions, whole.and_then(|content| content.file_system)))
    }
}
