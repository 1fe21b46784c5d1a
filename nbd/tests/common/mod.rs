//! Third-party servers, each on a unix socket in a folder of its own, stopped by its process id.

#![allow(dead_code)]

use diskwright_nbd::NbdUri;
use std::{
    fs,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

/// A running server.
pub struct Server {
    child: Child,
    /// The server's folder.
    pub dir: TempDir,
    /// The server's socket.
    pub socket: PathBuf,
}

impl Server {
    /// The URI of the default export.
    pub fn uri(&self) -> NbdUri {
        NbdUri::unix(&self.socket, "")
    }

    /// Kills the server, as a power cut would.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Whether a program is installed; otherwise prints a skip with its name.
pub fn has(program: &str) -> bool {
    let found = std::env::var_os("PATH")
        .is_some_and(|path| std::env::split_paths(&path).any(|dir| dir.join(program).is_file()));
    if !found {
        println!("skipped: {program} is not installed");
    }
    found
}

/// Starts a program that listens on `SOCKET` (replaced in the arguments, like `DIR`), and waits
/// until it listens.
pub fn start_in(dir: TempDir, program: &str, args: &[&str]) -> Option<Server> {
    if !has(program) {
        return None;
    }
    let socket = dir.path().join("nbd.sock");
    // A killed server leaves its socket behind.
    let _ = fs::remove_file(&socket);
    let place =
        |arg: &&str| arg.replace("SOCKET", &socket.to_string_lossy()).replace("DIR", &dir.path().to_string_lossy());
    let log = fs::File::create(dir.path().join("server.log")).unwrap();
    let child = Command::new(program)
        .args(args.iter().map(place))
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let mut server = Server { child, dir, socket };
    let started = Instant::now();
    // Not by connecting: some servers accept only one client.
    while !listens(&server.socket) {
        let ended = server.child.try_wait().unwrap();
        let said = fs::read_to_string(server.dir.path().join("server.log")).unwrap_or_default();
        assert!(ended.is_none(), "{program} {args:?} ended: {said}");
        assert!(started.elapsed() < Duration::from_secs(60), "{program} {args:?} does not listen: {said}");
        thread::sleep(Duration::from_millis(10));
    }
    Some(server)
}

/// Whether a process listens on the socket (`__SO_ACCEPTCON`).
fn listens(socket: &std::path::Path) -> bool {
    let table = fs::read_to_string("/proc/net/unix").unwrap();
    let path = socket.to_string_lossy();
    table.lines().any(|line| line.ends_with(&*path) && line.split_whitespace().nth(3) == Some("00010000"))
}

/// Starts nbdkit with a plugin, in the foreground.
pub fn nbdkit(args: &[&str]) -> Option<Server> {
    nbdkit_in(TempDir::new().unwrap(), args)
}

/// Starts nbdkit in a folder that may contain files.
pub fn nbdkit_in(dir: TempDir, args: &[&str]) -> Option<Server> {
    let mut all = vec!["-f", "-U", "SOCKET"];
    all.extend_from_slice(args);
    start_in(dir, "nbdkit", &all)
}

/// Starts qemu-nbd with a raw file of `size_bytes`, for one client at a time.
pub fn qemu_nbd(size_bytes: u64, args: &[&str]) -> Option<Server> {
    let dir = TempDir::new().unwrap();
    fs::File::create(dir.path().join("disk.raw")).unwrap().set_len(size_bytes).unwrap();
    let mut all = vec!["--persistent", "-k", "SOCKET", "-f", "raw", "DIR/disk.raw"];
    all.extend_from_slice(args);
    start_in(dir, "qemu-nbd", &all)
}
