//! Servers as children: ours and the peers', each on a unix socket in the scratch folder, and what
//! they cost while they serve.
//!
//! A child is in a process group of its own: Ctrl-C is for the study or the row, which then takes
//! its servers down itself. It hears the signals that are blocked here, so a server that others
//! wrote ends by SIGTERM too.
//!
//! A server counts as up when the kernel lists its socket as listening.
//! Connecting would tell as well, but some servers take one client and go. The CPU time of a server
//! is that of its process with all its threads, io_uring's workers among them, read while it runs:
//! what it cost to start, and to end, is not in the difference of two readings.

use crate::{LabError, Result, peer};
use nix::{
    sys::signal::{Signal, kill},
    time::clock_getcpuclockid,
    unistd::Pid,
};
use std::{
    fs::{self, File},
    io,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// How long a server may take to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_PAUSE: Duration = Duration::from_millis(5);

/// A process that serves. Dropped, it is made to end.
#[derive(Debug)]
pub struct Server {
    child: Child,
    command: String,
    log: PathBuf,
}

impl Server {
    /// Starts a program in the folder `dir`, with its output in `NAME.log` there.
    ///
    /// # Errors
    /// [`LabError::File`] when it cannot be started.
    pub fn start(mut command: Command, dir: &Path, name: &str) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let failed = || LabError::file("create the log", &log);
        let out = File::create(&log).map_err(failed())?;
        command.current_dir(dir).stdin(Stdio::null()).process_group(0);
        command.stdout(out.try_clone().map_err(failed())?).stderr(out);
        let child = peer::spawn(&mut command).map_err(LabError::file("start", command.get_program()))?;
        Ok(Self { child, command: format!("{command:?}"), log })
    }

    /// Starts a program that listens on `socket`, and waits until it does.
    ///
    /// # Errors
    /// [`LabError::Program`] with what it said, when it ends instead, or does not listen in time.
    pub fn listening(command: Command, socket: &Path, name: &str) -> Result<Self> {
        let dir = socket.parent().unwrap_or(Path::new("."));
        let mut server = Self::start(command, dir, name)?;
        server.wait_until("it does not listen", || listens(socket))?;
        Ok(server)
    }

    /// Waits until it is so, and the server still runs.
    ///
    /// # Errors
    /// [`LabError::Program`].
    pub fn wait_until(&mut self, otherwise: &str, mut is_so: impl FnMut() -> bool) -> Result<()> {
        let start = Instant::now();
        while !is_so() {
            let ended = self.child.try_wait().map_err(LabError::file("wait for", &self.log))?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                return Err(self.failed(ended, otherwise));
            }
            std::thread::sleep(POLL_PAUSE);
        }
        Ok(())
    }

    /// CPU time that its process has used so far, in nanoseconds.
    ///
    /// # Errors
    /// [`LabError::Program`] when it has ended.
    pub fn cpu_ns(&self) -> Result<u64> {
        self.cpu_ns_of(self.child.id())
    }

    /// That of another process which works for it.
    ///
    /// # Errors
    /// As [`Server::cpu_ns`].
    pub fn cpu_ns_of(&self, pid: u32) -> Result<u64> {
        let read = clock_getcpuclockid(Pid::from_raw(pid as i32)).and_then(|clock| clock.now());
        let time = read.map_err(|errno| self.failed(None, &format!("its CPU time cannot be read ({errno})")))?;
        Ok(Duration::from(time).as_nanos() as u64)
    }

    /// Asks it to end, and waits until it has.
    ///
    /// # Errors
    /// [`LabError::Program`] when it does not, or ends badly.
    pub fn stop(mut self) -> Result<()> {
        match self.end().map_err(LabError::file("wait for", &self.log))? {
            // Some leave the signal to the system.
            Some(status) if status.success() || status.signal() == Some(Signal::SIGTERM as i32) => Ok(()),
            ended => Err(self.failed(ended, "it does not end")),
        }
    }

    /// Sends it SIGTERM, and waits: some have a device to let go of first.
    fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        // It cannot have gone: it is our child, and was not waited for.
        let _ = kill(self.pid(), Signal::SIGTERM);
        let start = Instant::now();
        loop {
            match self.child.try_wait()? {
                None if start.elapsed() < PATIENCE => std::thread::sleep(POLL_PAUSE),
                ended => return Ok(ended),
            }
        }
    }

    /// The file with what it prints.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    fn failed(&self, ended: Option<ExitStatus>, why: &str) -> LabError {
        LabError::Program {
            command: self.command.clone(),
            status: ended.map_or_else(|| why.to_owned(), |status| status.to_string()),
            output: fs::read_to_string(&self.log).unwrap_or_default().trim().to_owned(),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if !matches!(self.end(), Ok(Some(_))) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// What `work` cost a server, in nanoseconds of CPU time.
///
/// # Errors
/// Those of [`Server::cpu_ns`], and of the work.
pub fn cost_of<T>(server: &Server, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let before = server.cpu_ns()?;
    let value = work()?;
    Ok((value, server.cpu_ns()?.saturating_sub(before)))
}

/// Whether a socket is listening (`__SO_ACCEPTCON`).
fn listens(socket: &Path) -> bool {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let path = socket.to_string_lossy();
    table.lines().any(|line| line.ends_with(&*path) && line.split_whitespace().nth(3) == Some("00010000"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new(peer::find("sh").unwrap());
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_server_is_waited_for_watched_and_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let script = "until [ -e go ]; do sleep 0.01; done; n=0; while [ $n -lt 200000 ]; do n=$((n+1)); done; touch done; exec sleep 60";
        let mut server = Server::start(shell(script), dir.path(), "shell").unwrap();
        let before = server.cpu_ns().unwrap();
        fs::write(dir.path().join("go"), "").unwrap();
        server.wait_until("it is not done", || dir.path().join("done").exists()).unwrap();
        assert!(server.cpu_ns().unwrap() > before, "counting to 200,000 costs something");
        server.stop().unwrap();
    }

    #[test]
    fn one_that_ends_is_told_with_what_it_said() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("socket");
        let error = Server::listening(shell("echo no disk >&2; exit 3"), &socket, "shell").unwrap_err().to_string();
        assert!(error.contains("no disk") && error.contains('3'), "{error}");
        let script = "trap 'exit 4' TERM; touch ready; while :; do sleep 0.01; done";
        let mut bad = Server::start(shell(script), dir.path(), "shell").unwrap();
        bad.wait_until("it is not ready", || dir.path().join("ready").exists()).unwrap();
        assert!(bad.stop().unwrap_err().to_string().contains("exit status: 4"));
    }
}
