//! A machine with another kernel than this one: a Debian kernel in QEMU, by emulation, and an
//! initramfs of programs from here.
//!
//! ```text
//!   fetch-kernel (by ./test) ─▶ vmlinuz, modules ─┐
//!   busybox, programs with their libraries ───────┼─▶ initramfs ─▶ qemu ─▶ console, line by line
//!   a script ─────────────────────────────────────┘
//! ```
//!
//! Programs lie in `/programs`, and are called by that path: busybox's shell takes its own applets
//! before any `PATH`. The guest reaches what listens on this machine's loopback as 10.0.2.2. It has
//! no disk unless it is given a raw file, which it sees as `/dev/vda`, and is gone when its script
//! ends or its time is over.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// This machine, seen by the guest.
pub const HOST: &str = "10.0.2.2";
/// How long a guest may take in all. On a quiet machine of two cores the longest of the tests takes
/// 115 s with its guests, and most take less than 30 s.
const PATIENCE: Duration = Duration::from_secs(600);
/// How long its kernel may take to come up. It takes 4 s on a quiet machine.
const READY_PATIENCE: Duration = Duration::from_secs(100);
const READY: &str = "GUEST: READY";
/// Guests run one after the other: two emulated machines at once have half a processor each.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
pub const QEMU: &str = "qemu-system-x86_64";

/// What a guest is made of.
pub struct Guest {
    /// With vmlinuz and lib/modules.
    kernel: PathBuf,
    dir: tempfile::TempDir,
    /// To be loaded, in this order.
    modules: Vec<String>,
    disk: Option<PathBuf>,
    vhost_user: Option<PathBuf>,
    /// Its context identifier for virtual sockets.
    vsock: Option<u32>,
}

impl Guest {
    /// A guest with these modules and their dependencies, and these programs; `None` after a line
    /// that says what is missing.
    pub fn new(modules: &[&str], programs: &[&str]) -> Option<Self> {
        Self::of_suite(None, modules, programs)
    }

    /// The same, with the kernel of a suite of Debian's, as `fetch-kernel SUITE` puts it there.
    pub fn of_suite(suite: Option<&str>, modules: &[&str], programs: &[&str]) -> Option<Self> {
        let mut kernel = kernel_dir().into_os_string();
        if let Some(suite) = suite {
            kernel.push(format!("-{suite}"));
        }
        let kernel = PathBuf::from(kernel);
        if !kernel.join("vmlinuz").exists() {
            println!(
                "skipped: a guest: no kernel in {} (cli/tests/guest_machine/fetch-kernel {} fetches one)",
                kernel.display(),
                suite.unwrap_or_default()
            );
            return None;
        }
        for program in ["busybox", QEMU, "ldd"].iter().chain(programs) {
            if find(program).is_none() {
                println!("skipped: a guest: {program} is not installed");
                return None;
            }
        }
        let mut guest = Self {
            kernel,
            dir: tempfile::tempdir().unwrap(),
            modules: Vec::new(),
            disk: None,
            vhost_user: None,
            vsock: None,
        };
        for folder in ["bin", "programs", "proc", "sys", "dev", "mnt", "modules", "etc", "tmp"] {
            fs::create_dir_all(guest.root().join(folder)).unwrap();
        }
        fs::copy(find("busybox").unwrap(), guest.root().join("bin/busybox")).unwrap();
        for program in programs {
            guest.add_program(program);
        }
        for module in modules {
            guest.add_module(module);
        }
        Some(guest)
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    /// A raw file that it sees as a disk. The module `virtio_blk` must be among the modules.
    pub fn give_disk(&mut self, disk: &Path) {
        self.disk = Some(disk.to_owned());
    }

    /// The socket of a vhost-user-blk device, which it sees as a disk, with two queues. The module
    /// `virtio_blk` must be among the modules.
    pub fn give_vhost_user(&mut self, socket: &Path) {
        self.vhost_user = Some(socket.to_owned());
    }

    /// A context identifier, by which this machine reaches it over virtual sockets. The module
    /// `vmw_vsock_virtio_transport` must be among the modules.
    pub fn give_vsock(&mut self, cid: u32) {
        self.vsock = Some(cid);
    }

    /// A program of this machine with the libraries that it needs.
    fn add_program(&self, name: &str) {
        let program = find(name).unwrap();
        fs::copy(&program, self.root().join("programs").join(name)).unwrap();
        self.add_libraries_of(&program);
    }

    /// The program that is tested, without what a debugger wants of it: the guest has little
    /// memory.
    pub fn add_own_program(&self) {
        let program = Path::new(env!("CARGO_BIN_EXE_diskwright"));
        let to = self.root().join("programs/diskwright");
        let stripped = Command::new("strip").arg("-o").arg(&to).arg(program).status();
        if !stripped.is_ok_and(|status| status.success()) {
            fs::copy(program, &to).unwrap();
        }
        self.add_libraries_of(program);
    }

    fn add_libraries_of(&self, program: &Path) {
        let output = Command::new("ldd").arg(program).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout);
        for library in text.split_whitespace().filter(|word| word.starts_with('/')) {
            let to = self.root().join(library.trim_start_matches('/'));
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            fs::copy(library, to).unwrap();
        }
    }

    /// A module and what it depends on, as depmod found out. One that is no module is built into
    /// the kernel, or its want will show.
    fn add_module(&mut self, name: &str) {
        let modules = self.kernel.join("lib/modules");
        let version = fs::read_dir(&modules).unwrap().flatten().next().expect("a version").path();
        let table = fs::read_to_string(version.join("modules.dep")).expect("modules.dep");
        let file_name = |path: &str| path.rsplit('/').next().unwrap().split(".ko").next().unwrap().replace('-', "_");
        let Some(line) = table.lines().find(|line| file_name(line.split(':').next().unwrap()) == name) else { return };
        let (module, needs) = line.split_once(':').unwrap();
        let loaded: BTreeSet<String> = self.modules.iter().cloned().collect();
        // The last that is named depends on nothing.
        for path in needs.split_whitespace().rev().chain([module]) {
            let plain = format!("{}.ko", file_name(path));
            if loaded.contains(&plain) {
                continue;
            }
            let to = self.root().join("modules").join(&plain);
            if path.ends_with(".xz") {
                let output = Command::new("xz").args(["-dc"]).arg(version.join(path)).output().expect("xz");
                fs::write(&to, output.stdout).unwrap();
            } else {
                fs::copy(version.join(path), &to).unwrap();
            }
            self.modules.push(plain);
        }
    }

    /// Boots, runs `script` by busybox's shell, with the network up where it has one (the module
    /// `virtio_net`), and gives the console; `None`, after a line that says so, when the kernel
    /// does not come up at all.
    ///
    /// # Panics
    /// When the time is over, or the script ends badly; with the console.
    #[track_caller]
    pub fn run(&self, script: &str) -> Option<String> {
        self.run_in_turn(|| script.to_owned())
    }

    /// As [`Guest::run`], with a script that is made when no other guest runs any more: what it
    /// needs may not wait for the guests of other tests.
    ///
    /// # Panics
    /// As [`Guest::run`].
    #[track_caller]
    pub fn run_in_turn(&self, script: impl FnOnce() -> String) -> Option<String> {
        let _turn = turn();
        let console = self.run_until(&script(), &mut |_| false)?;
        assert!(console.contains("GUEST: DONE"), "the guest did not come to its end:\n{console}");
        Some(console)
    }

    /// As [`Guest::run`], until the script says `mark`. Then the machine is killed. When it says
    /// `word`, `meanwhile` is called.
    ///
    /// # Panics
    /// When the time is over before.
    #[track_caller]
    pub fn run_and_kill(&self, script: &str, word: &str, meanwhile: impl FnOnce(), mark: &str) -> Option<String> {
        let _turn = turn();
        let mut meanwhile = Some(meanwhile);
        let console = self.run_until(script, &mut |said| {
            if said.contains(word)
                && let Some(meanwhile) = meanwhile.take()
            {
                meanwhile();
            }
            said.contains(mark)
        })?;
        assert!(console.contains(mark), "the guest did not come so far:\n{console}");
        Some(console)
    }

    /// The console until the machine ends or `is_enough` says so. An emulated machine hangs now and
    /// then before its kernel is up, so it is started twice. `None` after a line that says that
    /// both did.
    fn run_until(&self, script: &str, is_enough: &mut dyn FnMut(&str) -> bool) -> Option<String> {
        for attempt in 1..=2 {
            let console = finish(&mut self.boot(script), is_enough);
            if console.contains(READY) {
                return Some(console);
            }
            println!("attempt {attempt}: the kernel of a guest did not come up:\n{console}");
        }
        println!("skipped: a guest: its kernel did not come up here within {} s", READY_PATIENCE.as_secs());
        None
    }

    /// Starts the machine.
    fn boot(&self, script: &str) -> Child {
        let loads: String =
            self.modules.iter().map(|module| format!("insmod /modules/{module} || echo no {module}\n")).collect();
        let has_network = self.modules.iter().any(|module| module == "virtio_net.ko");
        let network = if has_network {
            "i=0; while [ $i -lt 100 ] && [ ! -e /sys/class/net/eth0 ]; do sleep 0.1; i=$((i+1)); done\n\
             ifconfig eth0 10.0.2.15 netmask 255.255.255.0 up\n"
        } else {
            ""
        };
        let init = format!(
            "#!/bin/busybox sh\n\
             export PATH=/bin HOME=/tmp\n\
             /bin/busybox --install -s /bin\n\
             mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev\n\
             ln -sf /proc/mounts /etc/mtab\n\
             {loads}\
             ifconfig lo up\n\
             {network}\
             echo GUEST: READY\n\
             sh -e /script && echo GUEST: DONE || {{ dmesg | tail -n 40; echo GUEST: FAILED; }}\n\
             sync; reboot -f\n"
        );
        fs::write(self.root().join("script"), script).unwrap();
        let path = self.root().join("init");
        fs::write(&path, init).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        let initrd = self.dir.path().join("initrd");
        let packed = Command::new("sh")
            .args(["-c", "cd root && find . | busybox cpio -o -H newc > ../initrd"])
            .current_dir(self.dir.path())
            .output()
            .unwrap();
        assert!(packed.status.success(), "{packed:?}");
        let mut command = Command::new(QEMU);
        if let Some(disk) = &self.disk {
            command.arg("-drive").arg(format!("file={},if=virtio,format=raw,cache=unsafe", disk.display()));
        }
        if let Some(socket) = &self.vhost_user {
            command.args(["-object", "memory-backend-memfd,id=mem,size=512M,share=on"]);
            command.args(["-machine", "q35,memory-backend=mem"]);
            // The machine goes on when its server is started again.
            command.arg("-chardev").arg(format!("socket,id=c0,path={},reconnect=1", socket.display()));
            command.args(["-device", "vhost-user-blk-pci,chardev=c0,num-queues=2"]);
        }
        if let Some(cid) = self.vsock {
            command.arg("-device").arg(format!("vhost-vsock-pci,guest-cid={cid}"));
        }
        command
            .args([
                "-accel",
                "tcg",
                "-cpu",
                "max,-cx16",
                "-smp",
                "2",
                "-m",
                "512",
                "-nographic",
                "-no-reboot",
                "-nodefaults",
            ])
            .args(["-serial", "stdio", "-nic", "user,model=virtio-net-pci"])
            .args(["-append", "console=ttyS0 panic=-1 no_timer_check quiet loglevel=3 random.trust_cpu=on"])
            .arg("-kernel")
            .arg(self.kernel.join("vmlinuz"))
            .arg("-initrd")
            .arg(&initrd)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("qemu starts")
    }
}

/// Waits until no other guest runs, and keeps others from starting.
pub fn turn() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What it says until it ends, it has said enough, or its time is over.
fn finish(child: &mut Child, is_enough: &mut dyn FnMut(&str) -> bool) -> String {
    let mut out = child.stdout.take().unwrap();
    let mut err = child.stderr.take().unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let reader = {
        let said = Arc::clone(&said);
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = out.read(&mut bytes) {
                said.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        })
    };
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        let so_far = String::from_utf8_lossy(&said.lock().unwrap()).into_owned();
        let patience = if so_far.contains(READY) { PATIENCE } else { READY_PATIENCE };
        if is_enough(&so_far) || start.elapsed() > patience {
            let _ = child.kill();
        }
        thread::sleep(Duration::from_millis(50));
    }
    let mut errors = String::new();
    let _ = err.read_to_string(&mut errors);
    reader.join().unwrap();
    let console = String::from_utf8_lossy(&said.lock().unwrap()).replace('\r', "");
    format!("{console}{errors}")
}

/// The folder of the release's kernel.
pub fn kernel_dir() -> PathBuf {
    let set = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let cache =
        || set("XDG_CACHE_HOME").or_else(|| Some(set("HOME")?.join(".cache"))).unwrap_or_else(std::env::temp_dir);
    set("DISKWRIGHT_GUEST_DIR").unwrap_or_else(|| cache().join("diskwright/guest"))
}

/// A program of this machine, those of administrators too.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin"].map(PathBuf::from));
    folders.map(|folder: PathBuf| folder.join(name)).find(|file| Path::is_file(file))
}
