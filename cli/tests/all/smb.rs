//! Samba with the configuration of `docs/smb.md`: clients of others read and write images on the
//! share. The client of a kernel is in `guest.rs`.

use crate::common::Workshop;
use crate::guest_machine::find;
use std::{
    fs,
    io::Write,
    net::TcpListener,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// The user of the scratch server, who must be one of the system.
pub const USER: &str = "root";
pub const PASSWORD: &str = "a-password-of-the-test";

const PATIENCE: Duration = Duration::from_secs(30);

/// The blocks of configuration in the page.
fn blocks() -> Vec<String> {
    let page = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/smb.md")).unwrap();
    let (mut blocks, mut block) = (Vec::new(), String::new());
    for line in page.lines().chain(["end"]) {
        match line.strip_prefix("    ") {
            Some(inside) => block += &format!("{inside}\n"),
            None if line.is_empty() => block.push('\n'),
            None if block.trim().is_empty() => block.clear(),
            None => blocks.push(std::mem::take(&mut block)),
        }
    }
    blocks
}

/// A running Samba. It is killed with this.
pub struct Samba {
    child: Child,
    pub port: u16,
    config: PathBuf,
}

impl Drop for Samba {
    fn drop(&mut self) {
        // It ends its processes.
        let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        let _ = self.child.wait();
    }
}

impl Samba {
    /// Shares the folders `disks` and `view` of the scratch folder; `None` after a line that says
    /// what is missing.
    pub fn start(test: &str, dir: &Path) -> Option<Self> {
        if let Some(program) =
            ["smbd", "smbpasswd", "testparm", "smbclient"].into_iter().find(|program| find(program).is_none())
        {
            println!("skipped: {test}: {program} is not installed");
            return None;
        }
        if !Path::new("/usr/lib").read_dir().unwrap().flatten().any(|one| has_vfs_modules(&one.path())) {
            println!("skipped: {test}: samba-vfs-modules is not installed");
            return None;
        }
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: {test}: not root");
            return None;
        }
        let state = dir.join("samba");
        for folder in [&state, &dir.join("disks"), &dir.join("view")] {
            fs::create_dir_all(folder).unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let (place, own) = (state.display(), dir.display());
        // What a scratch server needs besides.
        let more = format!(
            "[global]\nsmb ports = {port}\ninterfaces = lo\nbind interfaces only = yes\n\
             lock directory = {place}\nstate directory = {place}\ncache directory = {place}\npid directory = {place}\n\
             private dir = {place}\nncalrpc dir = {place}/rpc\nlog file = {place}/log\n"
        );
        let [share, raw] = &blocks()[..] else { panic!("the page has two blocks of configuration") };
        let text = format!("{share}\n{raw}\n{more}").replace("/srv/", &format!("{own}/"));
        let config = state.join("smb.conf");
        fs::write(&config, text).unwrap();
        // A user of its own, instead of a domain.
        let mut add = Command::new("smbpasswd")
            .arg("-c")
            .arg(&config)
            .args(["-L", "-s", "-a", USER])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        add.stdin.take().unwrap().write_all(format!("{PASSWORD}\n{PASSWORD}\n").as_bytes()).unwrap();
        assert!(add.wait().unwrap().success(), "smbpasswd");
        let mut command = Command::new(find("smbd").unwrap());
        // A group of its own: when it ends, it ends its whole group.
        command.args(["-F", "--no-process-group", "-s"]).arg(&config).process_group(0);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let samba = Self { child: command.spawn().unwrap(), port, config };
        let began = Instant::now();
        while std::net::TcpStream::connect(("127.0.0.1", port)).is_err() {
            let log = fs::read_to_string(state.join("log")).unwrap_or_default();
            assert!(began.elapsed() < PATIENCE, "smbd does not listen: {log}");
            thread::sleep(Duration::from_millis(50));
        }
        Some(samba)
    }

    /// What `smbclient` says to commands.
    fn client(&self, share: &str, commands: &str) -> String {
        let output = Command::new("smbclient")
            .args([&format!("//127.0.0.1/{share}"), "-m", "SMB3_11", "-p", &self.port.to_string(), "-c", commands])
            .args(["-U", &format!("{USER}%{PASSWORD}"), "--client-protection=encrypt"])
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{commands}: {said}");
        said
    }
}

fn has_vfs_modules(dir: &Path) -> bool {
    dir.join("samba/vfs/acl_xattr.so").exists() && dir.join("samba/vfs/streams_xattr.so").exists()
}

#[test]
fn the_configuration_of_the_page_shares_images() {
    const TEST: &str = "the_configuration_of_the_page_shares_images";
    let shop = Workshop::new();
    let Some(samba) = Samba::start(TEST, &shop.path("")) else { return };
    let checked = Command::new("testparm").args(["-s"]).arg(&samba.config).output().unwrap();
    let said = String::from_utf8_lossy(&checked.stderr).into_owned();
    assert!(checked.status.success() && !said.contains("Unknown parameter") && !said.contains("WARNING"), "{said}");
    // A child, which is in the share with its parent.
    shop.ok("create disks/base.vhdx --size 64M");
    shop.ok("io disks/base.vhdx -c 'write -P 7 3M 1M' -c flush");
    shop.ok("create disks/child.vhdx --parent disks/base.vhdx");
    shop.ok("io disks/child.vhdx -c 'write -P 9 5M 64k' -c flush");
    let copies = shop.path("copies");
    fs::create_dir(&copies).unwrap();
    let place = copies.display();
    samba.client("disks", &format!("lcd {place}; get base.vhdx; get child.vhdx"));
    assert!(shop.ok("compare copies/child.vhdx disks/child.vhdx").contains("identical"));
    shop.ok("io copies/child.vhdx -c 'read -P 7 3M 1M' -c 'read -P 9 5M 64k'");
    shop.ok("create new.vhdx --size 64M");
    shop.ok("io new.vhdx -c 'write -P 5 1M 1M' -c flush");
    samba.client("disks", &format!("lcd {}; put new.vhdx", shop.path("").display()));
    shop.ok("check disks/new.vhdx");
    shop.ok("io disks/new.vhdx -c 'read -P 5 1M 1M'");
    if find("smbtorture").is_none() {
        println!("skipped: {TEST}, durable handles: smbtorture is not installed");
        return;
    }
    for test in ["open-lease", "reopen1", "reopen2"] {
        let output = Command::new("smbtorture")
            .args(["//127.0.0.1/disks", "-p", &samba.port.to_string(), "-U", &format!("{USER}%{PASSWORD}")])
            .arg(format!("smb2.durable-v2-open.{test}"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(said.contains(&format!("success: {test}")), "{test}: {said}");
    }
}
