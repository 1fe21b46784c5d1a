//! A Samba server that shares one folder, for one access path.
//!
//! Its configuration, its user and its logs lie in the scratch folder. The user has a random
//! password. Neither signing nor encryption is demanded, because the other protocols of the
//! study have neither.

use crate::{LabError, Result, peer, server::Server};
use std::{
    fs::{self, File},
    io::{Read, Write},
    net::{SocketAddrV4, TcpStream},
    path::Path,
    process::{Command, Stdio},
};

/// Name of the share.
pub(super) const SHARE: &str = "disk";
/// The user, who must be one of the system: the one who owns the shared files.
pub(super) const USER: &str = "root";

/// The programs that are needed.
const PROGRAMS: [&str; 2] = ["smbd", "smbpasswd"];

/// Why this machine cannot have a Samba server; `None` if it can.
pub(super) fn missing() -> Option<String> {
    if !nix::unistd::geteuid().is_root() {
        return Some("Samba needs root (use sudo)".into());
    }
    PROGRAMS.into_iter().find(|name| peer::find(name).is_none()).map(|name| peer::missing(name, "samba"))
}

/// Where it listens, and how its user is known.
#[derive(Debug)]
pub(super) struct Share {
    pub(super) address: SocketAddrV4,
    pub(super) password: String,
}

/// Starts a server that shares `folder` at `address`. `dir` is a folder of its own.
pub(super) fn start(folder: &Path, address: SocketAddrV4, dir: &Path) -> Result<(Server, Share)> {
    fs::create_dir_all(dir).map_err(LabError::file("create", dir))?;
    let config = dir.join("smb.conf");
    fs::write(&config, configuration(folder, address, dir)).map_err(LabError::file("write", &config))?;
    let password = random_word()?;
    add_user(&config, &password)?;
    let mut command = Command::new(peer::find("smbd").unwrap_or_else(|| "smbd".into()));
    command.args(["-F", "--no-process-group", "-s"]).arg(&config);
    let mut server = Server::start(command, dir, "smbd")?;
    server.wait_until("it did not listen in time", || TcpStream::connect(address).is_ok())?;
    Ok((server, Share { address, password }))
}

fn configuration(folder: &Path, address: SocketAddrV4, dir: &Path) -> String {
    let (place, folder, port) = (dir.display(), folder.display(), address.port());
    let interface = address.ip();
    format!(
        "[global]\nserver min protocol = SMB3_00\nload printers = no\ndisable spoolss = yes\nkernel oplocks = no\n\
         smb ports = {port}\ninterfaces = {interface}\nbind interfaces only = yes\n\
         lock directory = {place}\nstate directory = {place}\ncache directory = {place}\npid directory = {place}\n\
         private dir = {place}\nncalrpc dir = {place}/rpc\nlog file = {place}/log\n\
         [{SHARE}]\npath = {folder}\nread only = no\nkernel share modes = no\nposix locking = no\n\
         strict sync = yes\nstrict allocate = no\n"
    )
}

/// 32 random digits.
fn random_word() -> Result<String> {
    let mut bytes = [0; 16];
    let read = File::open("/dev/urandom").and_then(|mut source| source.read_exact(&mut bytes));
    read.map_err(LabError::file("read", "/dev/urandom"))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Makes the user known to the server of this configuration.
fn add_user(config: &Path, password: &str) -> Result<()> {
    let program = peer::find("smbpasswd").unwrap_or_else(|| "smbpasswd".into());
    let mut command = Command::new(&program);
    command.arg("-c").arg(config).args(["-L", "-s", "-a", USER]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let failed = || LabError::file("run", &program);
    let mut child = peer::spawn(&mut command).map_err(failed())?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(format!("{password}\n{password}\n").as_bytes()).map_err(failed())?;
    }
    let output = child.wait_with_output().map_err(failed())?;
    if output.status.success() {
        return Ok(());
    }
    Err(LabError::Program {
        command: "smbpasswd".into(),
        status: output.status.to_string(),
        output: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
