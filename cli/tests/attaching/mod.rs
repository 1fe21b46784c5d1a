//! A folder in which disks are attached, with a list of attached disks of its own; at the end
//! nothing of it is left.

#![allow(dead_code, reason = "each test file uses its own part")]

use crate::common::{Ended, Running, Workshop, schemas};
use std::{
    fs,
    io::{BufRead, BufReader},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

/// How long something may take that other processes do.
const PATIENCE: Duration = Duration::from_secs(30);

/// A user without rights.
const NOBODY: &str = "65534";

pub struct Place {
    /// Removed at the end.
    _shop: Workshop,
    /// The path of the folder, links resolved.
    root: PathBuf,
    /// For a user without rights: a process in whose `/dev` everybody may open `/dev/fuse`, as is
    /// usual.
    user: Option<Child>,
}

impl Place {
    fn new(user: Option<Child>) -> Self {
        let shop = Workshop::new();
        let root = shop.path("").canonicalize().unwrap();
        let place = Self { _shop: shop, root, user };
        if place.user.is_some() {
            fs::set_permissions(&place.root, fs::Permissions::from_mode(0o777)).unwrap();
            // The program must be within the user's reach.
            let program = place.path("diskwright");
            if fs::hard_link(env!("CARGO_BIN_EXE_diskwright"), &program).is_err() {
                fs::copy(env!("CARGO_BIN_EXE_diskwright"), &program).unwrap();
            }
        }
        place
    }

    /// For commands that attach nothing.
    pub fn anywhere() -> Self {
        Self::new(None)
    }

    /// For root, with FUSE, loop devices and these programs; `None` after a line that says what is
    /// missing.
    pub fn as_root(programs: &[&str]) -> Option<Self> {
        if !nix::unistd::geteuid().is_root() {
            println!("skipped: attaching block devices: not root");
            return None;
        }
        for device in ["/dev/fuse", "/dev/loop-control"] {
            if fs::File::open(device).is_err() {
                println!("skipped: attaching block devices: no {device}");
                return None;
            }
        }
        for program in programs {
            if find(program).is_none() {
                println!("skipped: {program} is not installed");
                return None;
            }
        }
        Some(Self::new(None))
    }

    /// For somebody who is not root.
    pub fn as_user() -> Option<Self> {
        if !nix::unistd::geteuid().is_root() || fs::File::open("/dev/fuse").is_err() {
            println!("skipped: attaching as a user: not root, or no /dev/fuse");
            return None;
        }
        for program in ["fusermount3", "setpriv", "unshare", "nsenter"] {
            if find(program).is_none() {
                println!("skipped: {program} is not installed");
                return None;
            }
        }
        let nodes =
            "mount -t tmpfs -o mode=755 tmpfs /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 666 /dev/fuse c 10 229";
        let mut holder = Command::new("unshare")
            .args(["-m", "sh", "-c", &format!("{nodes} && echo ready && exec sleep 300")])
            .stdout(Stdio::piped())
            .spawn()
            .expect("unshare starts");
        if first_line(&mut holder) != "ready" {
            println!("skipped: attaching as a user: no mount namespace of its own");
            let _ = holder.wait();
            return None;
        }
        Some(Self::new(Some(holder)))
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.root.join(name)
    }

    /// A folder, made if need be.
    pub fn dir(&self, name: &str) -> String {
        let dir = self.path(name);
        fs::create_dir_all(&dir).unwrap();
        if self.user.is_some() {
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o777)).unwrap();
            run_ok("chown", &[NOBODY, dir.to_str().unwrap()]);
        }
        dir.to_str().unwrap().to_owned()
    }

    fn shell(&self, line: &str) -> Command {
        let mut command = match &self.user {
            Some(holder) => {
                let mut command = Command::new("nsenter");
                command.args(["-m", "-t", &holder.id().to_string(), "--"]);
                command.args(["setpriv", "--reuid", NOBODY, "--regid", NOBODY, "--clear-groups"]);
                command.args(["sh", "-c", &format!("cd {} && {line}", self.root.display())]);
                command
            }
            None => {
                let mut command = Command::new("sh");
                command.args(["-c", line]);
                command
            }
        };
        command
            .current_dir(&self.root)
            .env("DISKWRIGHT_SPACES", self.path(".spaces"))
            .env("DISKWRIGHT_CACHE", self.path(".cache"))
            .env("DISKWRIGHT_RUN_DIR", self.path("run"))
            .stdin(Stdio::null());
        command
    }

    pub fn sh_result(&self, line: &str) -> Ended {
        let output = self.shell(line).output().expect("sh starts");
        Ended {
            code: output.status.code(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }

    /// A line of the shell with `diskwright` in it, as it is typed.
    pub fn typed(&self, line: &str) -> Ended {
        let folder = Path::new(env!("CARGO_BIN_EXE_diskwright")).parent().expect("a folder");
        self.sh_result(&format!("PATH={}:$PATH; {line}", folder.display()))
    }

    /// A line of the shell as the user of this place.
    #[track_caller]
    pub fn user_sh(&self, line: &str) -> String {
        let ended = self.sh_result(line);
        assert_eq!(ended.code, Some(0), "{line}: {ended:?}");
        ended.stdout
    }

    fn program(&self) -> String {
        if self.user.is_some() { "./diskwright".into() } else { env!("CARGO_BIN_EXE_diskwright").into() }
    }

    pub fn run(&self, line: &str) -> Ended {
        let ended = self.sh_result(&format!("exec {} {line}", self.program()));
        if line.contains("--json") && !ended.stdout.is_empty() {
            schemas::validate(&ended.stdout);
        }
        ended
    }

    pub fn spawn(&self, line: &str) -> Running {
        Running::start(self.shell(&format!("exec {} {line}", self.program())).stdout(Stdio::piped()))
    }

    /// Runs a command that must succeed, and gives what it printed. mkfs of another test opens
    /// every loop device for a moment, and a `detach` is refused meanwhile.
    #[track_caller]
    pub fn ok(&self, line: &str) -> String {
        let is_scanned = |ended: &Ended| {
            let scanners = ["mke2fs", "mkfs.", "losetup", "blkid"];
            line.starts_with("detach")
                && scanners.iter().any(|name| ended.stderr.contains(&format!("is open in {name}")))
        };
        let mut ended = self.run(line);
        for _ in 0..50 {
            if !is_scanned(&ended) {
                break;
            }
            thread::sleep(Duration::from_millis(100));
            ended = self.run(line);
        }
        assert_eq!(ended.code, Some(0), "`diskwright {line}` failed: {ended:#?}");
        ended.stdout
    }

    #[track_caller]
    pub fn json(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).expect("one JSON document")
    }

    #[track_caller]
    pub fn fails(&self, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, Some(1), "`diskwright {line}`: {ended:#?}");
        assert!(ended.stderr.starts_with("diskwright: "), "{ended:#?}");
        ended.stderr
    }

    /// Attaches, and gives the device.
    #[track_caller]
    pub fn attach(&self, file: &str) -> String {
        let device = self.ok(&format!("attach {file}")).trim_end().to_owned();
        assert!(device.starts_with("/dev/loop") || device.starts_with("/dev/ublkb"), "{device}");
        device
    }

    /// How many disks are attached.
    #[track_caller]
    pub fn attached(&self) -> usize {
        self.json("attached")["disks"].as_array().expect("a list").len()
    }

    /// What is recorded of an attached disk.
    #[track_caller]
    pub fn record(&self, file: &str) -> serde_json::Value {
        let disks = self.json("attached")["disks"].clone();
        let whole = self.path(file);
        let found = disks.as_array().unwrap().iter().find(|disk| Path::new(disk["file"].as_str().unwrap()) == whole);
        found.expect("it is attached").clone()
    }

    /// Whether a disk is recorded as attached; without a command that would clear it away.
    pub fn record_exists_unlost(&self, file: &str) -> bool {
        let whole = self.path(file);
        fs::read_dir(self.path("run")).into_iter().flatten().flatten().any(|entry| {
            let text = fs::read_to_string(entry.path().join("record.json")).unwrap_or_default();
            text.contains(whole.to_str().unwrap()) && text.contains("\"lost\": null")
        })
    }

    pub fn size_on_disk(&self, file: &str) -> u64 {
        use std::os::unix::fs::MetadataExt;
        fs::metadata(self.path(file)).unwrap().blocks() * 512
    }

    #[track_caller]
    pub fn wait_until(&self, what: &str, mut is_so: impl FnMut() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "waited in vain until {what}");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Place {
    /// A test that failed leaves nothing attached, the youngest first.
    fn drop(&mut self) {
        let listed = self.sh_result(&format!("exec {} attached --json", self.program())).stdout;
        if let Ok(listed) = serde_json::from_str::<serde_json::Value>(&listed) {
            for disk in listed["disks"].as_array().into_iter().flatten().rev() {
                if let Some(file) = disk["file"].as_str() {
                    self.run(&format!("detach --force {file}"));
                }
            }
        }
        if let Some(holder) = &mut self.user {
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Where a program is.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(|found| found.is_file())
}

#[track_caller]
pub fn run_ok(program: &str, arguments: &[&str]) {
    let begun = Instant::now();
    loop {
        // Some leave files in the folder where they run.
        let output =
            Command::new(program).args(arguments).current_dir(std::env::temp_dir()).output().expect("it starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        // mkfs.btrfs looks at the files behind all loop devices, also at those of other tests.
        let disturbed = errors.contains("cannot check mount status") && begun.elapsed() < PATIENCE;
        if !disturbed {
            let printed = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success(), "{program} {arguments:?}: {printed}{errors}");
            return;
        }
        thread::sleep(Duration::from_millis(200));
    }
}

#[track_caller]
pub fn sh(line: &str) {
    run_ok("sh", &["-c", line]);
}

/// The file system that is mounted at a folder.
pub fn mountpoint_of(dir: &str) -> Option<String> {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
    mounts.lines().find_map(|line| {
        let mut words = line.split(' ').skip(1);
        (words.next() == Some(dir)).then(|| words.next().unwrap_or_default().to_owned())
    })
}

/// The result of something that may hang, or `None`.
pub fn within<T: Send + 'static>(patience: Duration, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (sender, receiver) = mpsc::channel();
    thread::spawn(move || sender.send(work()));
    receiver.recv_timeout(patience).ok()
}

pub fn first_line(child: &mut Child) -> String {
    let mut line = String::new();
    BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).unwrap();
    line.trim_end().to_owned()
}
