//! The process that watches over one attached disk: it starts the server, then the ublk device of
//! that, or puts a loop device on the file that it shows, mounts, answers `detach`, and, when the
//! server dies, takes apart what would otherwise be left without it.
//!
//! ```text
//!   attach: claim a folder ─▶ server (own process) ─▶ Ready ─▶ block device ─▶ partitions ─▶ mount ─▶ record ─▶ watch
//!                                     │                                                                     │
//!   events:   its output, its end ────┘        a connection to `control`        a signal of the user ───────┘
//! ```
//!
//! Server and supervisor are two processes, so that the one which moves the bytes can be killed
//! (out of memory, a bug, an impatient administrator) and the other one is there to unwind. When
//! both are killed the kernel answers every request with an error, and whoever uses the command
//! next clears what is left ([`clear_stale`](super::clear_stale)).

use crate::attach::{
    AttachOptions, DeviceKind,
    control::{self, Answer},
    error::AttachError,
    loop_device::{self, Found, LoopOptions},
    mounting,
    process::Process,
    record::{Home, PartitionRecord, Record, Registry, ShownBy, state_error},
    release::{self, Detach},
    run_dir::Kept,
    server::{At, ServerSays, Shown, now_seconds},
    usage,
};
use crate::ublk::{self, UblkError};
use std::{
    fs::File,
    io::{BufRead, BufReader},
    os::unix::{
        net::{UnixListener, UnixStream},
        process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// How long those may take who hold what was unmounted.
const HOLD_PATIENCE: Duration = Duration::from_secs(5);

/// Between two looks at whether the user wants it to end.
const LOOK_EVERY: Duration = Duration::from_millis(250);

enum Event {
    Server(ServerSays),
    /// Its output has ended.
    ServerGone,
    Asked(UnixStream),
}

/// A disk that is attached, watched over by this process.
#[derive(Debug)]
pub struct Attached {
    registry: Registry,
    home: Home,
    record: Record,
    child: Child,
    events: Receiver<Event>,
    /// Whether the server has said that nobody can reach it any more.
    closing: bool,
    /// What the server has said of its end.
    closed: Option<Option<String>>,
    /// Those who asked for force while it was being detached already; they hear how that has ended.
    impatient: Vec<UnixStream>,
    /// Keeps the folder of the records from being cleaned away as unused.
    _kept: Option<Kept>,
    /// Sentences for the user.
    warnings: Vec<String>,
}

/// Attaches. `server` makes the command that will [`serve_disk`](super::serve_disk) at the place
/// that it is given, with what it has to say on its standard output.
///
/// # Errors
/// [`AttachError`]; nothing is left attached then.
pub fn attach(
    registry: &Registry,
    options: &AttachOptions,
    server: &dyn Fn(&At) -> Command,
) -> Result<Attached, AttachError> {
    let file = options.file.canonicalize().map_err(|source| state_error("open", &options.file, source))?;
    if options.fuse_dir.is_none() && !rustix::process::geteuid().is_root() {
        return Err(AttachError::BadOptions {
            what: format!("{}: only root can make it a block device", options.file.display()),
            hint: "be root, or take --fuse DIR, which shows the disk as a file",
        });
    }
    let home = registry.home_of(&file)?;
    let (by, no_ublk) = choose(options)?;
    let mut record = Record { by, ..Record::new(file, now_seconds()) };
    let warnings;
    {
        let lock = registry.lock()?;
        // What killed processes have left, of this disk or of another, may be in the way.
        warnings = super::clear_all_stale(registry, &lock)?;
        if let Some(other) = home.read()? {
            return Err(AttachError::AlreadyAttached { file: options.file.clone(), place: other.place().to_owned() });
        }
        refuse_taken(options)?;
        home.make(&lock)?;
        match (by, &options.fuse_dir) {
            (ShownBy::Ublk, _) => record.ublk_mark = Some(ublk::new_mark()),
            (_, Some(dir)) => {
                record.fuse_mount = dir.canonicalize().map_err(|source| state_error("mount on", dir, source))?;
            }
            (_, None) => record.fuse_mount = home.make_mount_point()?,
        }
        record.fuse_file = record.fuse_mount.clone();
        record.ephemeral = options.ephemeral;
        home.write(&record)?;
    }
    let started = start(&home, &record, server);
    let (child, events) = match started {
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
        closing: false,
        closed: None,
        impatient: Vec::new(),
        warnings,
    };
    match attached.complete(options) {
        Ok(()) => Ok(attached),
        Err(error) => {
            attached.take_apart();
            match (error, no_ublk) {
                (error @ (AttachError::Loop { .. } | AttachError::Machine(_)), Some(ublk)) => {
                    Err(AttachError::NoDevice { ublk, other: Box::new(error) })
                }
                (error, _) => Err(error),
            }
        }
    }
}

/// What is unmounted is the topmost at a place: so nothing is put over the mount of somebody else,
/// nor of another disk.
fn refuse_taken(options: &AttachOptions) -> Result<(), AttachError> {
    let mounts = usage::mounts().map_err(|source| state_error("read", "/proc/self/mountinfo".as_ref(), source))?;
    for dir in options.fuse_dir.iter().chain(&options.mount) {
        let place = dir.canonicalize().map_err(|source| state_error("mount on", dir, source))?;
        if let Some(there) = mounts.iter().rfind(|mount| mount.dir == place) {
            return Err(AttachError::BadOptions {
                what: format!(
                    "{} from {} is mounted at {} already",
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

/// By what the disk is to be shown, and, where that is not ublk for want of it, why.
fn choose(options: &AttachOptions) -> Result<(ShownBy, Option<UblkError>), AttachError> {
    if options.fuse_dir.is_some() {
        return Ok((ShownBy::Fuse, None));
    }
    match options.by {
        Some(DeviceKind::Loop) => Ok((ShownBy::Loop, None)),
        Some(DeviceKind::Ublk) => {
            ublk::control()?;
            Ok((ShownBy::Ublk, None))
        }
        None => Ok(match ublk::control() {
            Ok(_) => (ShownBy::Ublk, None),
            Err(error) => (ShownBy::Loop, Some(error)),
        }),
    }
}

/// Starts the server, and the threads that listen to it and to `control`.
fn start(
    home: &Home,
    record: &Record,
    server: &dyn Fn(&At) -> Command,
) -> Result<(Child, Receiver<Event>), AttachError> {
    let control = home.control();
    let _ = std::fs::remove_file(&control);
    let listener = UnixListener::bind(&control).map_err(|source| state_error("listen on", &control, source))?;
    let log = home.log();
    let log =
        File::options().create(true).append(true).open(&log).map_err(|source| state_error("write", &log, source))?;
    let at = record.ublk_mark.map_or_else(|| At::Mount(record.fuse_mount.clone()), At::Ublk);
    let mut child = server(&at)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log)
        // Signals of the terminal are for the supervisor.
        .process_group(0)
        .spawn()
        .map_err(|error| AttachError::Server(format!("cannot start the process that serves the disk: {error}")))?;
    let (sender, events) = channel();
    let asked = Sender::clone(&sender);
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
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            if asked.send(Event::Asked(stream)).is_err() {
                return;
            }
        }
    });
    Ok((child, events))
}

impl Attached {
    /// What there is.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// What the user should know, a sentence each.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn complete(&mut self, options: &AttachOptions) -> Result<(), AttachError> {
        self.record.server = Process::of(self.child.id());
        let shown = self.wait_for_server()?;
        // From here on there is something to clear away, should this process not live to do it.
        self.home.write(&self.record)?;
        if options.fuse_dir.is_none() {
            match shown {
                Shown::Ublk(number) => self.start_ublk_device(number)?,
                Shown::File(_) => self.put_loop_device()?,
            }
            self.home.write(&self.record)?;
            if let Some(dir) = &options.mount {
                let (partitions, whole) = self.look_inside()?;
                let file_systems: Vec<_> =
                    partitions.iter().map(|found| found.content.and_then(|it| it.file_system)).collect();
                mounting::mount(&mut self.record, &file_systems, whole, dir, options.partition, &mut self.warnings)?;
            } else {
                self.look_inside()?;
            }
        }
        self.home.write(&self.record)
    }

    fn wait_for_server(&mut self) -> Result<Shown, AttachError> {
        loop {
            match self.events.recv() {
                Ok(Event::Server(ServerSays::Ready { shown, size, sector_size, read_only, warnings })) => {
                    if let Shown::File(fuse_file) = &shown {
                        self.record.fuse_file.clone_from(fuse_file);
                    }
                    self.record.size = size;
                    self.record.sector_size = sector_size;
                    self.record.read_only = read_only;
                    self.warnings.extend(warnings);
                    return Ok(shown);
                }
                Ok(Event::Server(ServerSays::Failed { error, machine: true })) => {
                    return Err(AttachError::Machine(error));
                }
                Ok(Event::Server(ServerSays::Failed { error, .. })) => return Err(AttachError::Server(error)),
                // A size that it gets before it is there is in `Ready`.
                Ok(Event::Server(ServerSays::Resized { .. } | ServerSays::Closing | ServerSays::Closed { .. })) => {}
                Ok(Event::Asked(mut stream)) => {
                    let refused = Answer::Refused("it is just being attached; try again in a moment".into());
                    let _ = control::answer(&mut stream, &refused);
                }
                Ok(Event::ServerGone) | Err(_) => {
                    return Err(AttachError::Server(format!(
                        "the process that was to serve the disk {} before the disk was there",
                        self.how_it_ended()
                    )));
                }
            }
        }
    }

    /// The kernel reads the partitions of a device that it starts, and the server answers
    /// meanwhile.
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

    fn put_loop_device(&mut self) -> Result<(), AttachError> {
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

    /// Finds out what the disk holds, and records it.
    fn look_inside(&mut self) -> Result<(Vec<Found>, Option<&'static str>), AttachError> {
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

    /// Watches until the disk is detached. `should_stop` is asked now and then, and once it says
    /// yes the disk is detached, if it is not in use; `say` is told what the user should know
    /// meanwhile.
    ///
    /// # Errors
    /// The disk is attached no longer, but not because somebody wanted that, or something was lost.
    pub fn watch(mut self, should_stop: &dyn Fn() -> bool, say: &dyn Fn(&str)) -> Result<(), AttachError> {
        let mut stopped = false;
        loop {
            match self.events.recv_timeout(LOOK_EVERY) {
                Ok(Event::Server(says)) => self.hear(says),
                Ok(Event::ServerGone) | Err(RecvTimeoutError::Disconnected) => return self.server_is_gone(),
                Ok(Event::Asked(mut stream)) => {
                    let Ok(detach) = control::question(&stream) else { continue };
                    match self.detach(detach) {
                        Ok(result) => {
                            self.impatient.push(stream);
                            return self.tell(result);
                        }
                        Err(error) => {
                            let _ = control::answer(&mut stream, &Answer::Refused(error.to_string()));
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if !stopped && should_stop() {
                stopped = true;
                match self.detach(Detach { unmount: true, force: false }) {
                    Ok(result) => return self.tell(result),
                    Err(error) => say(&error.to_string()),
                }
            }
        }
    }

    /// Tells how it has ended to whoever waits for that.
    fn tell(&mut self, result: Result<(), AttachError>) -> Result<(), AttachError> {
        let lost = result.as_ref().err().map(ToString::to_string);
        let said = lost.map_or(Answer::Detached, Answer::Lost);
        for mut stream in self.impatient.drain(..) {
            let _ = control::answer(&mut stream, &said);
        }
        result
    }

    /// Detaches. `Err` says that the disk is still attached, `Ok(Err)` that it is not, but that
    /// something was lost.
    fn detach(&mut self, how: Detach) -> Result<Result<(), AttachError>, AttachError> {
        let ours = [std::process::id(), self.child.id()];
        release::release(&self.home, &mut self.record, how, &ours)?;
        self.wait_for_end(how)?;
        let ended = match self.closed.take() {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(AttachError::Flush {
                place: self.record.file.clone(),
                what: format!("it is detached, but what was written last may be lost: {error}"),
            }),
            None => Err(AttachError::Flush {
                place: self.record.file.clone(),
                what: format!(
                    "it is detached, but the process that served it {} before it had closed the disk; what was written last may be lost",
                    self.how_it_ended()
                ),
            }),
        };
        self.registry.clear(&self.home)?;
        Ok(ended)
    }

    /// The disk has another size: so has its loop device now. (The server of a ublk device sees to
    /// that itself.)
    fn follow_size(&mut self, size: u64) {
        self.record.size = size;
        if let (ShownBy::Loop, Some(device)) = (self.record.by, &self.record.device)
            && let Err(error) = loop_device::follow_size(device, &self.record.fuse_file)
        {
            let (file, device) = (self.record.file.display(), device.display());
            tracing::warn!(
                "{file} has {size} bytes now, and {device} keeps its size until the disk is attached anew: {error}"
            );
        }
        if let Err(error) = self.home.write(&self.record) {
            tracing::warn!("the disk's new size of {size} bytes is not recorded: {error}");
        }
    }

    fn hear(&mut self, says: ServerSays) {
        match says {
            ServerSays::Resized { size } => self.follow_size(size),
            ServerSays::Closing => self.closing = true,
            ServerSays::Closed { error } => self.closed = Some(error),
            ServerSays::Ready { .. } | ServerSays::Failed { .. } => {}
        }
    }

    /// Hears the server out. It takes the time that it needs to close the disk; but it does not
    /// begin with that as long as somebody holds a file system that is out of sight: from another
    /// mount namespace, or, after force, from within. By force it is ended in its turn.
    fn wait_for_end(&mut self, how: Detach) -> Result<(), AttachError> {
        let mut deadline = Instant::now() + HOLD_PATIENCE;
        let (mut force, mut is_ended) = (how.force, false);
        loop {
            let event = if is_ended || self.closing && !force {
                self.events.recv().map_err(RecvTimeoutError::from)
            } else {
                self.events.recv_timeout(deadline.saturating_duration_since(Instant::now()))
            };
            match event {
                Ok(Event::Server(says)) => {
                    let was_closing = self.closing;
                    self.hear(says);
                    if self.closing && !was_closing {
                        deadline = Instant::now() + super::END_PATIENCE;
                    }
                }
                Ok(Event::Asked(mut stream)) => match control::question(&stream) {
                    Ok(Detach { force: true, .. }) => {
                        self.impatient.push(stream);
                        if !force {
                            (force, deadline) = (true, Instant::now() + HOLD_PATIENCE);
                        }
                    }
                    Ok(_) => {
                        let refused = Answer::Refused("it is just being detached; --force would end it".into());
                        let _ = control::answer(&mut stream, &refused);
                    }
                    Err(_) => {}
                },
                // What was held could be synced by then. Whatever is still asked for fails.
                Err(RecvTimeoutError::Timeout) if force => {
                    let _ = self.child.kill();
                    is_ended = true;
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(AttachError::Supervisor(format!(
                        "{}: it is unmounted here, but still in use elsewhere: a container or another mount namespace has it mounted (lsns -t mnt lists them), or its server waits for a slow disk; it will be detached when that ends, or at once with detach --force, whose users then get I/O errors",
                        self.record.file.display()
                    )));
                }
                Ok(Event::ServerGone) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let _ = self.child.wait();
        Ok(())
    }

    fn how_it_ended(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => words_of(status),
            Err(error) => format!("was lost ({error})"),
        }
    }

    /// The server has ended though nobody had asked for it.
    fn server_is_gone(mut self) -> Result<(), AttachError> {
        let how = self.how_it_ended();
        // Somebody has unmounted it by hand.
        if self.closed == Some(None) && self.record.device.is_none() {
            return self.registry.clear(&self.home);
        }
        let why = match self.closed.take().flatten() {
            Some(error) => error,
            None => format!("the process that served it {how}"),
        };
        let place = self.record.place().to_owned();
        let force = Detach { unmount: true, force: true };
        let released = release::release(&self.home, &mut self.record, force, &[std::process::id()]);
        let mut what = format!("{why}; it was detached, and what was written and not flushed may be lost");
        if let Err(error) = released {
            what.push_str(&format!(" ({error})"));
        }
        self.record.lost = Some(what.clone());
        self.home.write(&self.record)?;
        Err(AttachError::Flush { place, what })
    }

    /// Attaching has failed half-way.
    fn take_apart(&mut self) {
        let force = Detach { unmount: true, force: true };
        let _ = release::release(&self.home, &mut self.record, force, &[std::process::id()]);
        // It has unmounted nothing where nothing was mounted, so the server may not know yet that
        // it is over.
        if !release::is_mounted(&self.record).unwrap_or(false) && self.closed.is_none() {
            let _ = self.child.try_wait();
        }
        let _ = self.wait_for_end(force);
        let _ = self.registry.clear(&self.home);
    }
}

fn words_of(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "ended".into(),
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
