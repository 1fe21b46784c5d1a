//! The supervisor: the process that manages one attached disk.
//!
//! `setup.rs` starts the server and makes the device. From then on the supervisor answers `detach`.
//! If the server dies, another one takes the device over, if that can be done without a loss
//! (`recovery.rs`). Otherwise the supervisor takes everything apart.
//!
//! ```text
//!   setup.rs ─▶ Attached ─▶ watch: messages of the server, its end, a connection to `control`,
//!                                  a signal
//! ```
//!
//! Server and supervisor are two processes, so that the supervisor can clean up when the server is
//! killed (out of memory, a bug, an administrator). If both are killed, the next command clears up
//! ([`clear_stale`](super::clear_stale)). Until then requests to a ublk device wait, and those to a
//! loop device fail.

use crate::attach::{
    control::{self, Answer},
    error::AttachError,
    freezing, loop_device,
    record::{AttachMethod, Record, RecordDir, Registry},
    release::{self, DetachOptions},
    run_dir::CleanupLock,
    server::{MakeServer, ServerMessage, SupervisorMessage},
};
use crate::control::FileId;
use diskwright_store::RateLimits;
use std::{
    fmt,
    io::Write,
    os::unix::{net::UnixStream, process::ExitStatusExt},
    process::{Child, ExitStatus},
    sync::mpsc::{Receiver, RecvTimeoutError, Sender},
    time::{Duration, Instant},
};

/// How long programs may keep a lazily unmounted file system in use.
const HOLD_PATIENCE: Duration = Duration::from_secs(5);

/// Interval of the checks whether the user wants to stop.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// What the supervisor waits for.
pub(super) enum Event {
    Server(ServerMessage),
    /// The server's output has ended.
    ServerGone,
    Asked(UnixStream),
}

/// An attached disk that this process manages.
pub struct Attached {
    pub(super) registry: Registry,
    pub(super) home: RecordDir,
    pub(super) record: Record,
    pub(super) child: Child,
    pub(super) events: Receiver<Event>,
    /// For the messages of a further server.
    pub(super) sender: Sender<Event>,
    pub(super) server: Box<MakeServer>,
    /// The identity of the image's file when it was attached.
    pub(super) identity: Option<FileId>,
    /// The limits that were set over the server's control channel, for the next server.
    pub(super) limits: Option<RateLimits>,
    /// When another server took the device over.
    pub(super) recovered_at: Option<Instant>,
    /// When file systems were frozen for a snapshot.
    pub(super) frozen_at: Option<Instant>,
    /// Sentences about file systems that were thawed without the server's asking.
    pub(super) thawed_early: Vec<String>,
    /// Whether the server has said that no more requests can reach the disk.
    pub(super) closing: bool,
    /// The server's last message: `Some(None)` if the disk was closed without an error.
    pub(super) closed: Option<Option<String>>,
    /// Clients that asked for force while a detach was running. They get its result.
    pub(super) force_waiters: Vec<UnixStream>,
    /// Keeps the folder of the records from being deleted as unused.
    pub(super) _kept: Option<CleanupLock>,
    /// Sentences for the user.
    pub(super) warnings: Vec<String>,
}

impl fmt::Debug for Attached {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Attached").field("record", &self.record).finish_non_exhaustive()
    }
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
                Ok(Event::ServerGone) => {
                    let how = self.exit_of_server();
                    match self.recover(&how) {
                        Ok(()) => say(&format!(
                            "{}: the server process {how}; another one serves the disk now, and nothing was lost",
                            self.record.file.display()
                        )),
                        Err(why) => return self.server_died(why),
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return self.server_died(None),
                Ok(Event::Asked(mut stream)) => {
                    let Ok(detach) = control::question(&stream) else { continue };
                    match self.detach(detach) {
                        Ok(result) => {
                            self.force_waiters.push(stream);
                            return self.answer(result);
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
                    Ok(result) => return self.answer(result),
                    Err(error) => say(&error.to_string()),
                }
            }
        }
    }

    /// Sends the result to the clients that wait for it.
    fn answer(&mut self, result: Result<(), AttachError>) -> Result<(), AttachError> {
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
        if let (AttachMethod::Loop, Some(device)) = (self.record.by, &self.record.device)
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
            ServerMessage::Limited { limits } => self.limits = Some(limits.into()),
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

    pub(super) fn exit_of_server(&mut self) -> String {
        match self.child.wait() {
            Ok(status) => describe_exit(status),
            Err(error) => format!("could not be waited for ({error})"),
        }
    }

    /// The server has ended without a detach. `why_not`: the phrase why no other one could take the
    /// device over.
    fn server_died(mut self, why_not: Option<String>) -> Result<(), AttachError> {
        let how = self.exit_of_server();
        // The user has unmounted the FUSE file.
        if self.closed == Some(None) && self.record.device.is_none() {
            return self.registry.clear(&self.home);
        }
        let why = match self.closed.take().flatten() {
            Some(error) => error,
            None => match why_not {
                Some(why_not) => format!("the server process {how}, and {why_not}"),
                None => format!("the server process {how}"),
            },
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
    pub(super) fn roll_back(&mut self) {
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
