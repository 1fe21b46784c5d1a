//! Runs servers as child processes, ours and those of peers, each on a unix socket in the scratch
//! folder. Measures their CPU time.
//!
//! A server is in its own process group: Ctrl-C goes to the study, which then stops its servers. A
//! server starts with no signal blocked, so SIGTERM ends it.
//!
//! A server is ready when the kernel lists its socket as listening. A test connection would not do,
//! because some servers end after their first client. The CPU time of a server is that of its
//! process, with all threads and io_uring workers. It is read while the server runs, so the
//! difference of two readings excludes starting and ending.

use crate::{LabError, Result, peer};
use nix::{
    sys::signal::{Signal, kill},
    time::clock_getcpuclockid,
    unistd::Pid,
};
use std::{
    fs::{self, File},
    io,
    net::TcpListener,
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

/// Longest time for a server to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(60);
const POLL_PAUSE: Duration = Duration::from_millis(5);
/// Characters of a command line that an error shows.
const COMMAND_MAX: usize = 160;

/// A server process. Dropping it ends the process.
#[derive(Debug)]
pub struct Server {
    child: Child,
    command: String,
    log: PathBuf,
}

impl Server {
    /// Starts a program in the folder `dir`, with its output in `NAME.log` in that folder.
    ///
    /// # Errors
    /// [`LabError::File`] if it cannot be started.
    pub fn start(mut command: Command, dir: &Path, name: &str) -> Result<Self> {
        let log = dir.join(format!("{name}.log"));
        let failed = || LabError::file("create the log", &log);
        let out = File::create(&log).map_err(failed())?;
        command.current_dir(dir).stdin(Stdio::null()).process_group(0);
        command.stdout(out.try_clone().map_err(failed())?).stderr(out);
        let child = peer::spawn(&mut command).map_err(LabError::file("start", command.get_program()))?;
        Ok(Self { child, command: shown(&command), log })
    }

    /// Starts a program that listens on `socket`, and waits until it listens.
    ///
    /// # Errors
    /// [`LabError::Program`] with its output, if it ends or does not listen in time.
    pub fn listening(command: Command, socket: &Path, name: &str) -> Result<Self> {
        let dir = socket.parent().unwrap_or(Path::new("."));
        let mut server = Self::start(command, dir, name)?;
        server.wait_until("it did not listen in time", || listens(socket))?;
        Ok(server)
    }

    /// Waits until `is_so` returns true while the server runs. `otherwise` is the phrase for the
    /// error.
    ///
    /// # Errors
    /// [`LabError::Program`] if the server ends first, or after 60 s.
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

    /// CPU time of the server process so far, in nanoseconds.
    ///
    /// # Errors
    /// [`LabError::Program`] if it has ended.
    pub fn cpu_ns(&self) -> Result<u64> {
        self.cpu_ns_of(self.child.id())
    }

    /// CPU time of another process of the server so far, in nanoseconds.
    ///
    /// # Errors
    /// As [`Server::cpu_ns`].
    pub fn cpu_ns_of(&self, pid: u32) -> Result<u64> {
        let read = clock_getcpuclockid(Pid::from_raw(pid as i32)).and_then(|clock| clock.now());
        let time = read.map_err(|errno| self.failed(None, &format!("its CPU time cannot be read ({errno})")))?;
        Ok(Duration::from(time).as_nanos() as u64)
    }

    /// CPU time so far of the processes of the server's process group that run, in nanoseconds:
    /// for a server that has a process for each client.
    ///
    /// # Errors
    /// As [`Server::cpu_ns`].
    pub fn group_cpu_ns(&self) -> Result<u64> {
        let own_pid = self.child.id();
        let entries = fs::read_dir("/proc").map_err(LabError::file("list", "/proc"))?.flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let others = pids.filter(|pid| *pid != own_pid && process_group(*pid) == Some(own_pid));
        // One that has ended in the meantime is not counted.
        let others_ns: u64 = others.filter_map(|pid| self.cpu_ns_of(pid).ok()).sum();
        Ok(self.cpu_ns()? + others_ns)
    }

    /// Ends the server with SIGTERM, and waits for its end.
    ///
    /// # Errors
    /// [`LabError::Program`] if it does not end, or fails.
    pub fn stop(mut self) -> Result<()> {
        match self.end().map_err(LabError::file("wait for", &self.log))? {
            // Servers without a handler are ended by the signal itself.
            Some(status) if status.success() || status.signal() == Some(Signal::SIGTERM as i32) => Ok(()),
            ended => Err(self.failed(ended, "it did not end in time")),
        }
    }

    /// Ends a server that has no other end by SIGKILL.
    pub fn kill(mut self) {
        // It may have ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for a server that ends by itself.
    ///
    /// # Errors
    /// [`LabError::Program`] if it does not end within 60 s, or fails.
    pub fn wait_for_end(mut self) -> Result<()> {
        let mut ended = None;
        let start = Instant::now();
        while ended.is_none() && start.elapsed() < PATIENCE {
            ended = self.child.try_wait().map_err(LabError::file("wait for", &self.log))?;
            std::thread::sleep(POLL_PAUSE);
        }
        match ended {
            Some(status) if status.success() => Ok(()),
            ended => Err(self.failed(ended, "it did not end in time")),
        }
    }

    /// Sends SIGTERM and waits for the end: a server may have to detach a device first.
    fn end(&mut self) -> io::Result<Option<ExitStatus>> {
        if let Some(status) = self.child.try_wait()? {
            return Ok(Some(status));
        }
        // The process exists: it is our child, and we have not waited for it.
        let _ = kill(self.pid(), Signal::SIGTERM);
        let start = Instant::now();
        loop {
            match self.child.try_wait()? {
                None if start.elapsed() < PATIENCE => std::thread::sleep(POLL_PAUSE),
                ended => return Ok(ended),
            }
        }
    }

    /// The file with the server's output.
    pub fn log(&self) -> &Path {
        &self.log
    }

    fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id() as i32)
    }

    /// The error that the server has failed, with its output. `why` is a phrase if it has not
    /// ended.
    pub(crate) fn failed(&self, ended: Option<ExitStatus>, why: &str) -> LabError {
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

/// The process group of a process, from `/proc/PID/stat`.
fn process_group(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    // The name, in parentheses, may contain anything. State and parent follow it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(2)?.parse().ok()
}

/// A command line for an error. A virtual machine has a long one.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let line = words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ");
    if line.chars().count() <= COMMAND_MAX {
        return line;
    }
    line.chars().take(COMMAND_MAX).chain([' ', '…']).collect()
}

/// Runs `work`. Returns its value, and the CPU time of the server in the meantime in nanoseconds.
///
/// # Errors
/// Errors of [`Server::cpu_ns`] and of `work`.
pub fn cost_of<T>(server: &Server, work: impl FnOnce() -> Result<T>) -> Result<(T, u64)> {
    let before = server.cpu_ns()?;
    let value = work()?;
    Ok((value, server.cpu_ns()?.saturating_sub(before)))
}

/// Whether a unix socket is listening (`__SO_ACCEPTCON`).
fn listens(socket: &Path) -> bool {
    let table = fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let path = socket.to_string_lossy();
    table.lines().any(|line| line.ends_with(&*path) && line.split_whitespace().nth(3) == Some("00010000"))
}

/// A TCP port of loopback that nothing listens on now. Another program may take it first.
///
/// # Errors
/// Loopback cannot be used.
pub fn free_port() -> Result<u16> {
    let bound = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    bound.map(|address| address.port()).map_err(LabError::file("find a port at", "127.0.0.1"))
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
        assert_eq!(process_group(server.child.id()), Some(server.child.id()));
        server.stop().unwrap();
    }

    #[test]
    fn the_processes_of_a_server_are_counted_together() {
        let dir = tempfile::tempdir().unwrap();
        let count = "n=0; while [ $n -lt 200000 ]; do n=$((n+1)); done; touch done; sleep 60";
        let mut server = Server::start(shell(&format!("({count}) & wait")), dir.path(), "shell").unwrap();
        server.wait_until("it is not done", || dir.path().join("done").exists()).unwrap();
        let (own_ns, all_ns) = (server.cpu_ns().unwrap(), server.group_cpu_ns().unwrap());
        assert!(all_ns > 2 * own_ns, "{own_ns} of {all_ns}");
        server.stop().unwrap();
    }

    #[test]
    fn a_server_that_ends_is_reported_with_its_output() {
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
