//! The side of the process that has the disks open: a socket, one thread that accepts, and one
//! short-lived thread for each client.
//!
//! ```text
//!   open ─▶ socket, a link for each disk ─▶ accept ─▶ peer's user, one request ─▶ operation
//!   drain:  request ─▶ Host::on_drain ─▶ the process ends as by a signal ─┐
//!   close_gate: no new operation, the running ones end, links go ◀────────┘
//!           ─▶ the process closes its disks ─▶ end: who asked for the drain gets the answer
//! ```

use super::{
    ControlError,
    folder::Folder,
    host::{Host, HostedDisk},
    message::{Done, Event, FileId, Request, VERSION, Versioned},
    operation::{self, refused},
    shared::{Entry, Shared, id_of, lock},
    stream::{Lines, PATIENCE},
};
use diskwright_store::{BlockDevice, ErrorCode};
use rustix::net::sockopt;
use std::{
    fs, io,
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Arc, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Maximum number of clients at a time.
const CLIENTS_MAX: usize = 16;

/// Pause after a failed accept, when descriptors or memory have probably run out.
const PAUSE: Duration = Duration::from_millis(200);

/// The control channel of this process. Dropping it closes the channel; clients that wait for a
/// drain get an error (see [`Channel::end`]).
#[derive(Debug)]
pub struct Channel {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Channel {
    /// Opens the channel for those of `disks` that are files open for writing; `None` if there is
    /// none. Call it after the disks are opened: their locks are what makes this process the one
    /// that answers for them.
    ///
    /// # Errors
    /// [`ControlError`]: the run-time folder cannot be used. The disks can be served all the same.
    pub fn open(disks: Vec<HostedDisk>, host: Host) -> Result<Option<Self>, ControlError> {
        let is_ours = |held: &HostedDisk| !held.disk.geometry().read_only && id_of(&held.disk.disk()).is_some();
        let disks: Vec<HostedDisk> = disks.into_iter().filter(is_ours).collect();
        if disks.is_empty() {
            return Ok(None);
        }
        Self::open_in(Folder::make()?, disks, host).map(Some)
    }

    pub(super) fn open_in(folder: Folder, disks: Vec<HostedDisk>, host: Host) -> Result<Self, ControlError> {
        static CHANNELS: AtomicU32 = AtomicU32::new(0);
        let (listener, socket) = folder.bind(CHANNELS.fetch_add(1, Ordering::Relaxed))?;
        let shared = Arc::new(Shared::new(disks, host, folder, socket.clone()));
        // From here on, dropping the channel removes its socket and links.
        let mut channel = Self { shared: Arc::clone(&shared), thread: None };
        for entry in shared.disks() {
            if let Some(id) = entry.id() {
                shared.folder.publish(id, &shared.socket)?;
            }
        }
        let accepting = thread::Builder::new().name("control".into()).spawn(move || accept(&shared, &listener));
        let failed = |source| ControlError::Socket { doing: "start the thread of", path: socket, source };
        channel.thread = Some(accepting.map_err(failed)?);
        Ok(channel)
    }

    /// Ends the operations: no new one begins, those that can be stopped are stopped, the others
    /// are waited for, and the files no longer lead to this process. Call it before the disks are
    /// closed.
    pub fn close_gate(&self) {
        let shared = &self.shared;
        let mut state = lock(&shared.state);
        state.is_closing = true;
        while state.changing > 0 {
            state = shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        drop(state);
        for entry in shared.disks() {
            if let Some(id) = entry.id() {
                shared.folder.withdraw(id, &shared.socket);
            }
        }
    }

    /// Reports to the clients that wait for a drain how the disks were closed, and ends the
    /// channel. `closed` is a sentence if data may be lost.
    pub fn end(mut self, closed: Result<(), String>) {
        self.finish(closed);
    }

    fn finish(&mut self, closed: Result<(), String>) {
        let Some(thread) = self.thread.take() else { return };
        self.close_gate();
        let shared = &self.shared;
        lock(&shared.state).ended = Some(closed);
        shared.changed.notify_all();
        // Connects once, so that the thread returns from `accept` and sees the end.
        if UnixStream::connect(&shared.socket).is_ok() {
            let _ = thread.join();
        }
        let _ = fs::remove_file(&shared.socket);
        // Answers are given up after a time, so this ends.
        let deadline = Instant::now() + PATIENCE;
        let mut state = lock(&shared.state);
        while state.answering > 0 && Instant::now() < deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            state = shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        self.finish(Err("the process ended before it had closed its disks".into()));
        // Without a thread, `finish` had nothing to do.
        let _ = fs::remove_file(&self.shared.socket);
    }
}

fn accept(shared: &Arc<Shared>, listener: &UnixListener) {
    loop {
        let accepted = listener.accept();
        if lock(&shared.state).ended.is_some() {
            return;
        }
        match accepted {
            Ok((stream, _)) => admit(shared, stream),
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client of the control channel");
                thread::sleep(PAUSE);
            }
        }
    }
}

/// Counts a client while it exists.
struct ClientGuard(Arc<Shared>);

impl Drop for ClientGuard {
    fn drop(&mut self) {
        lock(&self.0.state).clients -= 1;
    }
}

fn admit(shared: &Arc<Shared>, stream: UnixStream) {
    let is_full = {
        let mut state = lock(&shared.state);
        let is_full = state.clients >= CLIENTS_MAX;
        state.clients += usize::from(!is_full);
        is_full
    };
    if is_full {
        // The socket's buffer is empty, so this does not block.
        let busy = format!("the control channel has {CLIENTS_MAX} clients already; try again");
        let _ = Lines::new(stream).send(&Event::error(ErrorCode::Locked, busy));
        return;
    }
    let admitted = ClientGuard(Arc::clone(shared));
    let spawned = thread::Builder::new().name("control-client".into()).spawn(move || {
        if let Err(error) = converse(&admitted.0, stream) {
            tracing::debug!(%error, "a client of the control channel went away");
        }
    });
    if let Err(error) = spawned {
        tracing::warn!(%error, "cannot start a thread for a client of the control channel");
    }
}

/// One request and its answer.
fn converse(shared: &Shared, stream: UnixStream) -> io::Result<()> {
    let mut lines = Lines::new(stream);
    let user = sockopt::socket_peercred(lines.stream())?.uid;
    if !(user.is_root() || user == rustix::process::geteuid()) {
        let sentence = "only the user who runs this process, and root, may control its disks";
        return lines.send(&Event::error(ErrorCode::PermissionDenied, sentence));
    }
    let line = lines.receive(Some(PATIENCE))?;
    let _answering = AnswerGuard::begin(shared);
    let event = match answer(shared, &line, &mut lines) {
        Ok(done) => Event::Result(Box::new(done)),
        Err(error) => Event::error(error.code(), error.to_string()),
    };
    lines.send(&event)
}

/// Counts a client that waits for its answer.
struct AnswerGuard<'a>(&'a Shared);

impl<'a> AnswerGuard<'a> {
    fn begin(shared: &'a Shared) -> Self {
        lock(&shared.state).answering += 1;
        Self(shared)
    }
}

impl Drop for AnswerGuard<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).answering -= 1;
        self.0.changed.notify_all();
    }
}

fn answer(shared: &Shared, line: &[u8], lines: &mut Lines) -> Result<Done, ControlError> {
    let unreadable = |error| refused(ErrorCode::Protocol, format!("the request cannot be read: {error}"));
    let Versioned { version } = serde_json::from_slice(line).map_err(unreadable)?;
    if version != VERSION {
        let sentence = format!(
            "the request has version {version}, and this process (version {} of the program) answers version {VERSION}; use the program that the process runs",
            env!("CARGO_PKG_VERSION")
        );
        return Err(refused(ErrorCode::Unsupported, sentence));
    }
    let request: Request = serde_json::from_slice(line).map_err(|error| {
        let sentence = format!(
            "this process (version {} of the program) does not know the operation: {error}",
            env!("CARGO_PKG_VERSION")
        );
        refused(ErrorCode::Unsupported, sentence)
    })?;
    let rule = operation::rule(&request.operation);
    let disk = match (rule.needs_disk, request.disk) {
        (false, _) => None,
        (true, Some(id)) => Some(shared.disk_of(id)?),
        (true, None) => return Err(refused(ErrorCode::InvalidInput, format!("{} needs a disk", rule.name))),
    };
    let _changing = disk.as_ref().filter(|_| rule.changes_disk).map(|disk| ChangeGuard::begin(shared, disk, rule.name));
    let _changing = _changing.transpose()?;
    let mut is_there = true;
    operation::carry_out(shared, disk.as_ref(), request.operation, &mut |done, total| {
        is_there = is_there && lines.send(&Event::Progress { done, total }).is_ok();
        // The process that ends does not wait for a long operation that can be finished later.
        is_there && !lock(&shared.state).is_closing || !rule.ends_with_client
    })
}

impl Shared {
    /// The disk whose top is this file now.
    fn disk_of(&self, id: FileId) -> Result<Arc<Entry>, ControlError> {
        self.disks().into_iter().find(|entry| entry.id() == Some(id)).ok_or_else(|| {
            refused(
                ErrorCode::NotFound,
                format!("process {} does not write to that file (any more)", std::process::id()),
            )
        })
    }

    /// Asks the process to end, and waits until it has closed its disks.
    pub(super) fn drain(&self) -> Result<Done, ControlError> {
        match &self.host.on_drain {
            Ok(end) => end(),
            Err(sentence) => return Err(refused(ErrorCode::Unsupported, sentence.clone())),
        }
        let files = self.disks().iter().filter_map(|entry| entry.disk().file().map(Into::into)).collect();
        let mut state = lock(&self.state);
        loop {
            match &state.ended {
                Some(Ok(())) => return Ok(Done::Drained { files }),
                Some(Err(sentence)) => return Err(refused(ErrorCode::Io, sentence.clone())),
                None => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }
}

/// Excludes other operations on a disk while it exists.
struct ChangeGuard<'a> {
    shared: &'a Shared,
    entry: Arc<Entry>,
}

impl<'a> ChangeGuard<'a> {
    fn begin(shared: &'a Shared, entry: &Arc<Entry>, name: &'static str) -> Result<Self, ControlError> {
        let mut state = lock(&shared.state);
        if state.is_closing {
            let sentence = format!("{}: its process is ending", entry.held.name);
            return Err(refused(ErrorCode::Locked, sentence));
        }
        let mut busy = lock(&entry.busy);
        if let Some(other) = *busy {
            let sentence =
                format!("{}: {other} is under way on this disk; try again when it has ended", entry.held.name);
            return Err(refused(ErrorCode::Locked, sentence));
        }
        *busy = Some(name);
        state.changing += 1;
        drop(busy);
        Ok(Self { shared, entry: Arc::clone(entry) })
    }
}

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        let mut state = lock(&self.shared.state);
        *lock(&self.entry.busy) = None;
        state.changing -= 1;
        drop(state);
        self.shared.changed.notify_all();
    }
}
