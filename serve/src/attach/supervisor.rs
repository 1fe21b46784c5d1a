//! The supervisor: the process that manages one attached disk.
//!
//! It starts the server, then starts the server's ublk device or sets up a loop device on the
//! server's file, mounts, and answers `detach`. If the server dies, it takes everything apart.
//!
//! ```text
//!   attach: make the folder ─▶ server process ─▶ Ready ─▶ block device ─▶ partitions ─▶ mount
//!           ─▶ record ─▶ watch
//!
//!   events of watch: messages of the server, its end, a connection to `control`, a signal
//! ```
//!
//! Server and supervisor are two processes, so that the supervisor can clean up when the server is
//! killed (out of memory, a bug, an administrator). If both are killed, the kernel answers all
//! requests with errors, and the next command clears up ([`clear_stale`](super::clear_stale)).

use crate::attach::{
    AttachOptions, DeviceKind,
    control::{self, Answer},
    error::{AttachError, state_error},
    freezing,
    loop_device::{self, Found, LoopOptions},
    mounting,
    process::Process,
    record::{PartitionRecord, Record, RecordDir, Registry, ShownBy},
    release::{self, DetachOptions},
    run_dir::Kept,
    server::{ServeAs, ServerMessage, Shown, SupervisorMessage, now_seconds},
    usage,
};
use crate::ublk::{self, UblkError};
use std::{
    fs::File,
    io::{BufRead, BufReader, Write},
    os::unix::{
        net::{UnixListener, UnixStream},
        process::{CommandExt, ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    thread,
    time::{Duration, Instant},
};

/// How long programs may keep a lazily unmounted file system in use.
const HOLD_PATIENCE: Duration = Duration::from_secs(5);

/// Interval of the checks whether the user wants to stop.
const LOOK_EVERY: Duration = Duration::from_millis(250);

enum Event {
    Server(ServerMessage),
    /// The server's output has ended.
    ServerGone,
    Asked(UnixStream),
}

/// An attached disk that this process manages.
#[derive(Debug)]
pub struct Attached {
    registry: Registry,
    home: RecordDir,
    record: Record,
    child: Child,
    events: Receiver<Event>,
    /// When file systems were frozen for a snapshot.
    frozen_at: Option<Instant>,
    /// Sentences about file systems that were thawed without the server's asking.
    thawed_early: Vec<String>,
    /// Whether the server has said that no more requests can reach the disk.
    closing: bool,
    /// The server's last message: `Some(None)` if the disk was closed without an error.
    closed: Option<Option<String>>,
    /// Clients that asked for force while a detach was running. They get its result.
    force_waiters: Vec<UnixStream>,
    /// Keeps the folder of the records from being deleted as unused.
    _kept: Option<Kept>,
    /// Sentences for the user.
    warnings: Vec<String>,
}

/// Attaches a disk. `server` makes the command of the server process, which must run
/// [`serve_disk`](super::serve_disk) with its standard output as `out`.
///
/// # Errors
/// [`AttachError`]. Nothing is left attached then.
pub fn attach(
    registry: &Registry,
    options: &AttachOptions,
    server: &dyn Fn(&ServeAs) -> Command,
) -> Result<Attached, AttachError> {
    let file = options.file.canonicalize().map_err(|source| state_error("open", &options.file, source))?;
    if options.fuse_dir.is_none() && !rustix::process::geteuid().is_root() {
        return Err(AttachError::BadOptions {
            what: format!("{}: block devices need root", options.file.display()),
            hint: "run as root, or use `AttachOptions::fuse_dir`, which shows the disk as a file",
        });
    }
    let home = registry.dir_of(&file)?;
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

/// Starts the server, and the threads that read its messages and accept clients on `control`.
fn start(
    home: &RecordDir,
    record: &Record,
    server: &dyn Fn(&ServeAs) -> Command,
) -> Result<(Child, Receiver<Event>), AttachError> {
    let control = home.control();
    let _ = std::fs::remove_file(&control);
    let listener = UnixListener::bind(&control).map_err(|source| state_error("listen on", &control, source))?;
    let log = home.log();
    let log =
        File::options().create(true).append(true).open(&log).map_err(|source| state_error("write", &log, source))?;
    let at = record.ublk_mark.map_or_else(|| ServeAs::FuseFile(record.fuse_mount.clone()), ServeAs::Ublk);
    let mut child = server(&at)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(log)
        // Signals of the terminal go to the supervisor only.
        .process_group(0)
        .spawn()
        .map_err(|error| AttachError::Server(format!("cannot start the server process of the disk: {error}")))?;
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
    /// The record of the disk.
    pub fn record(&self) -> &Record {
        &self.record
    }

    /// Sentences for the user.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    fn complete(&mut self, options: &AttachOptions) -> Result<(), AttachError> {
        self.record.server = Process::of(self.child.id());
        let shown = self.wait_for_server()?;
        // From here on, a later command can clear up if this process dies.
        self.home.write(&self.record)?;
        if options.fuse_dir.is_none() {
            match shown {
                Shown::Ublk(number) => self.start_ublk_device(number)?,
                Shown::File(_) => self.set_up_loop_device()?,
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

    fn wait_for_server(&mut self) -> Result<Shown, AttachError> {
        loop {
            match self.events.recv() {
                Ok(Event::Server(ServerMessage::Ready { shown, size, sector_size, read_only, warnings })) => {
                    if let Shown::File(fuse_file) = &shown {
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

    /// The kernel reads the partition table while it starts the device. The server answers those
    /// reads.
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
    fn detect_content(&mut self) -> Result<(Vec<Found>, Option<&'static str>), AttachError> {
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

    /// Runs until the disk is detached. `should_stop` is polled. When it returns true, the disk is
    /// detached unless it is in use. `say` receives sentences for the user.
    ///
    /// # Errors
    /// The server ended unexpectedly, or data was lost.
    pub fn watch(mut self, should_stop: &dyn Fn() -> bool, say: &dyn Fn(&str)) -> Result<(), AttachError> {
        let mut stopped = false;
        loop {
            match self.events.recv_timeout(LOOK_EVERY) {
                Ok(Event::Server(says)) => self.handle(says),
                Ok(Event::ServerGone) | Err(RecvTimeoutError::Disconnected) => return self.server_died(),
                Ok(Event::Asked(mut stream)) => {
                    let Ok(detach) = control::question(&stream) else { continue };
                    match self.detach(detach) {
                        Ok(result) => {
                            self.force_waiters.push(stream);
                            return self.tell(result);
                        }
                        Err(error) => {
                            let _ = control::answer(&mut stream, &Answer::Refused(error.to_string()));
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.thaw_in_time();
            if !stopped && should_stop() {
                stopped = true;
                match self.detach(DetachOptions { unmount: true, force: false }) {
                    Ok(result) => return self.tell(result),
                    Err(error) => say(&error.to_string()),
                }
            }
        }
    }

    /// Sends the result to the clients that wait for it.
    fn tell(&mut self, result: Result<(), AttachError>) -> Result<(), AttachError> {
        let lost = result.as_ref().err().map(ToString::to_string);
        let said = lost.map_or(Answer::Detached, Answer::Lost);
        for mut stream in self.force_waiters.drain(..) {
            let _ = control::answer(&mut stream, &said);
        }
        result
    }

    /// Detaches. `Err`: the disk is still attached. `Ok(Err)`: the disk is detached, but data was
    /// lost.
    fn detach(&mut self, how: DetachOptions) -> Result<Result<(), AttachError>, AttachError> {
        let ours = [std::process::id(), self.child.id()];
        release::release(&self.home, &mut self.record, how, &ours)?;
        self.wait_for_end(how)?;
        let ended = match self.closed.take() {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(AttachError::Flush {
                place: self.record.file.clone(),
                what: format!("the disk was detached, but what was written last may be lost: {error}"),
            }),
            None => Err(AttachError::Flush {
                place: self.record.file.clone(),
                what: format!(
                    "the disk was detached, but the server process {} before it had closed the disk; what was written last may be lost",
                    self.exit_of_server()
                ),
            }),
        };
        self.registry.clear(&self.home)?;
        Ok(ended)
    }

    /// Updates a loop device to the disk's new size. The server of a ublk device does that itself.
    fn follow_size(&mut self, size: u64) {
        self.record.size = size;
        if let (ShownBy::Loop, Some(device)) = (self.record.by, &self.record.device)
            && let Err(error) = loop_device::follow_size(device, &self.record.fuse_file)
        {
            let (file, device) = (self.record.file.display(), device.display());
            tracing::warn!(
                "{file} now has {size} bytes, but {device} keeps its old size until the disk is attached again: {error}"
            );
        }
        if let Err(error) = self.home.write(&self.record) {
            tracing::warn!("the disk's new size of {size} bytes could not be recorded: {error}");
        }
    }

    /// Records the new file of the disk, so that it is found by that name. The folder of the record
    /// keeps the name that it has after the old file.
    fn follow_move(&mut self, file: std::path::PathBuf) {
        self.record.file = file;
        if let Err(error) = self.home.write(&self.record) {
            tracing::warn!("the disk's new file could not be recorded: {error}");
        }
    }

    fn handle(&mut self, says: ServerMessage) {
        match says {
            ServerMessage::Resized { size } => self.follow_size(size),
            ServerMessage::Moved { file } => self.follow_move(file),
            ServerMessage::Freeze => self.freeze(),
            ServerMessage::Thaw => {
                let mut warnings = std::mem::take(&mut self.thawed_early);
                warnings.extend(self.thaw());
                self.answer_server(&SupervisorMessage::Thawed { warnings });
            }
            ServerMessage::Closing => self.closing = true,
            ServerMessage::Closed { error } => self.closed = Some(error),
            ServerMessage::Ready { .. } | ServerMessage::Failed { .. } => {}
        }
    }

    /// Freezes the file systems on the disk. The record says so before, so that they are thawed
    /// whatever happens to this process.
    fn freeze(&mut self) {
        let dirs = freezing::folders_of(&self.record);
        self.record.frozen.clone_from(&dirs);
        let (frozen, warnings) = match self.home.write(&self.record) {
            Ok(()) => freezing::freeze(&dirs),
            Err(error) => (Vec::new(), vec![format!("no file system was frozen: {error}")]),
        };
        self.record.frozen.clone_from(&frozen);
        self.frozen_at = (!frozen.is_empty()).then(Instant::now);
        self.answer_server(&SupervisorMessage::Frozen { dirs: frozen, warnings });
    }

    /// Thaws what is frozen. Returns sentences about failures.
    fn thaw(&mut self) -> Vec<String> {
        self.frozen_at = None;
        let failed = freezing::thaw(&std::mem::take(&mut self.record.frozen));
        if let Err(error) = self.home.write(&self.record) {
            tracing::warn!("the end of a freeze could not be recorded: {error}");
        }
        failed
    }

    /// Thaws file systems whose snapshot takes too long.
    fn thaw_in_time(&mut self) {
        if self.frozen_at.is_some_and(|since| since.elapsed() > freezing::FROZEN_MAX) {
            let dirs: Vec<String> = self.record.frozen.iter().map(|dir| dir.display().to_string()).collect();
            self.thawed_early.push(format!(
                "{}: thawed after {} s, before the snapshot was taken: the frozen image is as after a power cut",
                dirs.join(", "),
                freezing::FROZEN_MAX.as_secs()
            ));
            let failed = self.thaw();
            self.thawed_early.extend(failed);
        }
    }

    /// A server that is gone needs no answer.
    fn answer_server(&mut self, answer: &SupervisorMessage) {
        if let (Some(input), Ok(mut line)) = (&mut self.child.stdin, serde_json::to_vec(answer)) {
            line.push(b'\n');
            let _ = input.write_all(&line).and_then(|()| input.flush());
        }
    }

    /// Waits for the server to close the disk and end. Closing may take as long as it needs. But
    /// the server does not begin to close while a program holds the unmounted file system: one in
    /// another mount namespace or, after force, one inside it. With force the server is killed
    /// after a time limit.
    fn wait_for_end(&mut self, how: DetachOptions) -> Result<(), AttachError> {
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
                    self.handle(says);
                    if self.closing && !was_closing {
                        deadline = Instant::now() + super::END_PATIENCE;
                    }
                }
                Ok(Event::Asked(mut stream)) => match control::question(&stream) {
                    Ok(DetachOptions { force: true, .. }) => {
                        self.force_waiters.push(stream);
                        if !force {
                            (force, deadline) = (true, Instant::now() + HOLD_PATIENCE);
                        }
                    }
                    Ok(_) => {
                        let refused = Answer::Refused(
                            "the disk is being detached; detach with `DetachOptions::force` to end it now".into(),
                        );
                        let _ = control::answer(&mut stream, &refused);
                    }
                    Err(_) => {}
                },
                // Everything that could be flushed was flushed before. Outstanding requests fail.
                Err(RecvTimeoutError::Timeout) if force => {
                    let _ = self.child.kill();
                    is_ended = true;
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(AttachError::Supervisor(format!(
                        "{}: unmounted here, but still in use: a container or another mount namespace has it mounted (lsns -t mnt lists them), or the server waits for a slow disk; it will be detached when that ends, or at once when it is detached with `DetachOptions::force`, which gives its users I/O errors",
                        self.record.file.display()
                    )));
                }
                Ok(Event::ServerGone) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        let _ = self.child.wait();
        Ok(())
    }

    fn exit_of_server(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => describe_exit(status),
            Err(error) => format!("could not be waited for ({error})"),
        }
    }

    /// The server has ended without a detach.
    fn server_died(mut self) -> Result<(), AttachError> {
        let how = self.exit_of_server();
        // The user has unmounted the FUSE file.
        if self.closed == Some(None) && self.record.device.is_none() {
            return self.registry.clear(&self.home);
        }
        let why = match self.closed.take().flatten() {
            Some(error) => error,
            None => format!("the server process {how}"),
        };
        let place = self.record.place().to_owned();
        let force = DetachOptions { unmount: true, force: true };
        let released = release::release(&self.home, &mut self.record, force, &[std::process::id()]);
        let mut what = format!("{why}; the disk was detached, and writes that were not flushed may be lost");
        if let Err(error) = released {
            what.push_str(&format!(" ({error})"));
        }
        self.record.lost = Some(what.clone());
        self.home.write(&self.record)?;
        Err(AttachError::Flush { place, what })
    }

    /// Undoes an attach that has failed half-way.
    fn roll_back(&mut self) {
        let force = DetachOptions { unmount: true, force: true };
        let _ = release::release(&self.home, &mut self.record, force, &[std::process::id()]);
        // If nothing was mounted yet, no unmount has told the server to end. Collects its exit
        // status if it has ended.
        if !release::is_mounted(&self.record).unwrap_or(false) && self.closed.is_none() {
            let _ = self.child.try_wait();
        }
        let _ = self.wait_for_end(force);
        let _ = self.registry.clear(&self.home);
    }
}

fn describe_exit(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(0), _) => "ended".into(),
        (Some(code), _) => format!("ended with code {code}"),
        (None, Some(signal)) => format!("was killed by signal {signal}"),
        (None, None) => "ended".into(),
    }
}
