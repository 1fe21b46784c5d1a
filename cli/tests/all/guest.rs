//! The clients of another kernel, in a guest: they make a file system on a disk that we serve,
//! write, trim, unmount and go; then what the image holds is compared with what the guest said.

use crate::common::Workshop;
use crate::control::Place;
use crate::guest_machine::{Guest, HOST, find};
use crate::serving::Serving;
use crate::smb::{PASSWORD, Samba, USER};
use nix::sys::signal::Signal;
use std::{
    collections::BTreeMap,
    net::TcpListener,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

/// A virtio network card, ext4.
const MODULES: [&str; 5] = ["virtio_pci", "virtio_net", "crc32c_generic", "crc32c_intel", "ext4"];

/// What the guest deletes and trims away.
const TRIMMED_BYTES: u64 = 48 << 20;

/// Who serves the disk.
enum Served<'a> {
    /// `serve` with these options, with `{port}`.
    Ours(&'a str),
    /// Samba shares the raw view.
    Samba,
}

/// What serves it, until it is stopped.
enum Server {
    Ours(Serving),
    Samba { samba: Samba, view: View },
}

/// The raw view of a disk. It is unmounted with this.
struct View {
    child: Child,
    dir: PathBuf,
}

impl View {
    /// Unmounts it, and returns whether the disk was closed cleanly.
    fn unmount(&mut self) -> bool {
        let unmounted = Command::new("fusermount3").arg("-u").arg(&self.dir).status();
        unmounted.is_ok_and(|status| status.success()) && self.child.wait().is_ok_and(|status| status.success())
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) && !self.unmount() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Server {
    fn stop(self) {
        match self {
            Self::Ours(server) => assert_eq!(server.stop(Signal::SIGTERM), Some(0)),
            Self::Samba { samba, mut view } => {
                drop(samba);
                assert!(view.unmount(), "the view is unmounted and the disk closed");
            }
        }
    }
}

/// A way from the guest to the disk.
struct Door<'a> {
    /// A suite with another kernel.
    suite: Option<&'a str>,
    modules: &'a [&'a str],
    programs: &'a [&'a str],
    served: Served<'a>,
    /// Lines of the guest's script, with `{port}`.
    attach: &'a str,
    device: &'a str,
    detach: &'a str,
}

#[test]
fn a_file_system_made_by_the_kernels_client_in_a_guest_is_whole_in_the_image() {
    whole_in_the_image(&Door {
        suite: None,
        modules: &["nbd"],
        programs: &["nbd-client"],
        served: Served::Ours("--nbd 127.0.0.1:{port} --insecure-writes"),
        attach: "/programs/nbd-client -N disk.vhdx -C 2 -b 512 {host} {port} /dev/nbd0 >/tmp/log 2>&1 || { cat /tmp/log; false; }",
        device: "nbd0",
        detach: "/programs/nbd-client -d /dev/nbd0 >/dev/null",
    });
}

#[test]
fn a_file_system_made_over_smb_in_a_guest_is_whole_in_the_image() {
    let mount = format!(
        "mkdir -p /share; mount -t cifs //{{host}}/raw /share -o ip={{host}},port={{port}},vers=3.1.1,sec=ntlmssp,seal,username={USER},password={PASSWORD} || dmesg | tail\n\
         losetup /dev/loop0 /share/disk"
    );
    whole_in_the_image(&Door {
        suite: None,
        modules: &["loop", "ccm", "ghash_generic", "gcm", "cmac", "cifs"],
        programs: &[],
        served: Served::Samba,
        attach: &mount,
        device: "loop0",
        detach: "losetup -d /dev/loop0; umount /share",
    });
}

const TARGET: &str = "iqn.2026-11.org.example:disks";
const HOST_NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef";
/// Keys as nvme gen-dhchap-key makes them: for SHA-256, and for SHA-384.
const HOST_KEY: &str = "DHHC-1:01:OLTmUuRNp/I3DZ4mDicTZVCko6bQf1wMMy+LEiQIP9LNA/CI:";
const SUBSYSTEM_KEY: &str = "DHHC-1:02:K5AviRHoGBj4yZ1dXZgxlXUE2Q6UXeLo9U7ngcx19jbYUJkJWqMAFlpnA2+bVA1rE4vjrw==:";
const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";

const NVME_LOOKS: &str = "\
    /programs/nvme discover -t tcp -a {host} -s {port} | sed 's/^/GUEST: discovered /'\n\
    /programs/nvme id-ctrl /dev/nvme0 | sed 's/^/GUEST: controller /'\n\
    /programs/nvme ns-descs /dev/nvme0 -n 1 | sed 's/^/GUEST: descriptors /'\n\
    /programs/nvme list-ns /dev/nvme0 | sed 's/^/GUEST: list /'\n\
    for page in smart-log error-log fw-log effects-log; do /programs/nvme $page /dev/nvme0 >/tmp/page 2>&1 || { cat /tmp/page; false; }; done\n\
    dd if=/dev/urandom of=/tmp/other bs=4096 count=1 2>/dev/null\n\
    /programs/nvme write /dev/nvme0n1 -s 0 -c 7 -z 4096 -d /tmp/other >/dev/null 2>&1\n\
    /programs/nvme compare /dev/nvme0n1 -s 0 -c 7 -z 4096 -d /tmp/other >/tmp/compare 2>&1 && echo GUEST: compared\n\
    /programs/nvme compare /dev/nvme0n1 -s 8 -c 7 -z 4096 -d /tmp/other >/tmp/compare 2>&1 || echo GUEST: differs\n\
    /programs/nvme ana-log /dev/nvme0 | sed 's/^/GUEST: access /'\n\
    /programs/nvme resv-register /dev/nvme0n1 --nrkey=0x11 --rrega=0 --cptpl=3 >/dev/null\n\
    /programs/nvme resv-acquire /dev/nvme0n1 --crkey=0x11 --rtype=1 --racqa=0 >/dev/null\n\
    /programs/nvme resv-report /dev/nvme0n1 --eds | sed 's/^/GUEST: reserved /'\n\
    /programs/nvme resv-notif-log /dev/nvme0 >/dev/null\n\
    /programs/nvme resv-release /dev/nvme0n1 --crkey=0x11 --rtype=1 --rrela=0 >/dev/null\n\
    /programs/nvme resv-register /dev/nvme0n1 --crkey=0x11 --rrega=1 >/dev/null\n\
    /programs/nvme resv-report /dev/nvme0n1 --eds | sed 's/^/GUEST: released /'";

#[test]
fn a_file_system_made_by_nvme_over_tcp_in_a_guest_is_whole_in_the_image() {
    let connect = format!(
        "mkdir -p /etc/nvme; echo nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef > /etc/nvme/hostnqn; echo 01234567-89ab-cdef-0123-456789abcdef > /etc/nvme/hostid\n\
         /programs/nvme connect -t tcp -a {{host}} -s {{port}} -n {SUBSYSTEM} -i 2 >/tmp/log 2>&1 || {{ cat /tmp/log; false; }}\n\
         {NVME_LOOKS}"
    );
    let serve = format!("--nvme 127.0.0.1:{{port}} --nvme-subsystem {SUBSYSTEM} --insecure-writes");
    let console = whole_in_the_image(&Door {
        suite: None,
        modules: &["nvme_tcp"],
        programs: &["nvme", "fio"],
        served: Served::Ours(&serve),
        attach: &connect,
        device: "nvme0n1",
        detach: "/programs/nvme disconnect -d nvme0 >/dev/null",
    });
    let Some(console) = console else { return };
    for words in [
        "GUEST: discovered subnqn:  nqn.2026-01.org.example:disks",
        "GUEST: controller mn        : Diskwright",
        "GUEST: list [   0]:0x1",
        "GUEST: compared",
        "GUEST: differs",
        "GUEST: access state\t:\toptimized",
        "GUEST: access \tnsid\t:\t1",
        "GUEST: reserved rtype     : 1",
        "GUEST: reserved   rkey       : 11",
        "GUEST: released regctl    : 0",
    ] {
        assert!(console.contains(words), "no {words:?}");
    }
}

/// Both digests, a newer kernel, and secrets in both directions.
#[test]
fn a_file_system_made_by_a_newer_kernel_with_secrets_is_whole_in_the_image() {
    let connect = format!(
        "echo transport=tcp,traddr={{host}},trsvcid={{port}},nqn={SUBSYSTEM},hostnqn={HOST_NQN},hostid=01234567-89ab-cdef-0123-456789abcdef,nr_io_queues=2,hdr_digest,data_digest,disable_sqflow,dhchap_secret={HOST_KEY},dhchap_ctrl_secret={SUBSYSTEM_KEY} > /dev/nvme-fabrics || {{ dmesg | tail -n 5; false; }}"
    );
    let secrets = format!(
        "[[client]]\nname = \"{HOST_NQN}\"\nsecret = \"{HOST_KEY}\"\n[server]\nname = \"disks\"\nsecret = \"{SUBSYSTEM_KEY}\"\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("secrets.toml");
    std::fs::write(&file, secrets).unwrap();
    std::fs::set_permissions(&file, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let serve = format!("--nvme 127.0.0.1:{{port}} --nvme-subsystem {SUBSYSTEM} --secrets {}", file.to_str().unwrap());
    whole_in_the_image(&Door {
        suite: Some("trixie-backports"),
        modules: &["nvme_tcp"],
        programs: &["fio"],
        served: Served::Ours(&serve),
        attach: &connect,
        device: "nvme0n1",
        detach: "echo 1 > /sys/class/nvme/nvme0/delete_controller",
    });
}

/// Both digests, by the kernel's iSCSI initiator.
#[test]
fn a_file_system_made_by_iscsi_in_a_guest_is_whole_in_the_image() {
    let digests = "-P node.conn[0].iscsi.HeaderDigest=CRC32C -P node.conn[0].iscsi.DataDigest=CRC32C";
    let connect = format!(
        "/programs/iscsistart -i iqn.2026-11.org.example:guest -t {TARGET} -g 1 -a {{host}} -p {{port}} {digests} >/tmp/log 2>&1 || {{ cat /tmp/log; false; }}"
    );
    whole_in_the_image(&Door {
        suite: None,
        modules: &["sd_mod", "iscsi_tcp"],
        programs: &["iscsistart", "fio"],
        served: Served::Ours(&format!("--iscsi 127.0.0.1:{{port}} --iscsi-target {TARGET} --insecure-writes")),
        attach: &connect,
        device: "sda",
        detach: "echo 1 > /sys/block/sda/device/delete",
    });
}

/// The kernel is told of a new size and of further disks, and asks for what has changed.
#[test]
fn a_kernel_follows_what_serve_ctl_does_to_the_disks_of_a_target() {
    let modules: Vec<&str> = MODULES.into_iter().chain(["nvme_tcp"]).collect();
    let Some(guest) = Guest::new(&modules, &[]) else { return };
    let place = Place::with(&[]);
    place.ok("create disk.vhdx --size 64M");
    place.ok("create more.vhdx --size 32M");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("disk.vhdx --nvme 127.0.0.1:{port} --nvme-subsystem {SUBSYSTEM} --insecure-writes");
    let Some(server) = place.serve(&line) else { return };
    let script = format!(
        "echo transport=tcp,traddr={HOST},trsvcid={port},nqn={SUBSYSTEM} > /dev/nvme-fabrics\n\
         wait_for() {{ i=0; while ! eval \"$1\" && [ $i -lt 300 ]; do sleep 0.1; i=$((i+1)); done; eval \"$1\"; }}\n\
         wait_for '[ \"$(cat /sys/block/nvme0n1/size 2>/dev/null)\" = 131072 ]'\n\
         echo GUEST: ATTACHED\n\
         wait_for '[ \"$(cat /sys/block/nvme0n1/size)\" = 196608 ]'\n\
         wait_for '[ \"$(cat /sys/block/nvme0n2/size 2>/dev/null)\" = 65536 ]'\n\
         dd if=/dev/zero of=/dev/nvme0n2 bs=64k count=1 seek=8 conv=fsync 2>/dev/null\n\
         dd if=/dev/urandom of=/dev/nvme0n1 bs=64k count=1 seek=1500 conv=fsync 2>/dev/null\n\
         echo GUEST: BOTH\n\
         wait_for '[ ! -e /sys/block/nvme0n2 ]'\n\
         echo GUEST: FOLLOWED\n\
         sleep 60\n"
    );
    let change = || {
        place.ok("serve-ctl disk.vhdx resize 96M");
        place.ok("serve-ctl disk.vhdx add more.vhdx");
        let log = || server.log();
        let start = Instant::now();
        // The guest's write to the further disk is answered before that goes.
        while place.json("serve-ctl more.vhdx statistics")["traffic"]["commands"][1]["requests"].as_u64() < Some(2) {
            assert!(start.elapsed() < crate::serving::PATIENCE, "{}", log());
            thread::sleep(Duration::from_millis(100));
        }
        place.ok("serve-ctl more.vhdx remove");
    };
    let Some(console) = guest.run_and_kill(&script, "GUEST: ATTACHED", change, "GUEST: FOLLOWED") else { return };
    assert!(console.contains("GUEST: BOTH"), "{console}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    place.ok("check disk.vhdx more.vhdx");
}

/// The line of a script that writes pieces of many lengths to a device by fio, which reads them
/// back and compares.
fn verify(device: &str) -> String {
    format!(
        "/programs/fio --name=verify --filename=/dev/{device} --size=16M --rw=randwrite --bsrange=512-64k \
         --blockalign=512 --direct=1 --ioengine=io_uring --iodepth=16 --verify=crc32c --verify_fatal=1 \
         >/tmp/fio 2>&1 && echo GUEST: VERIFIED || cat /tmp/fio"
    )
}

/// Returns the console, or `None` if there is no guest.
fn whole_in_the_image(door: &Door<'_>) -> Option<String> {
    let modules: Vec<&str> = MODULES.into_iter().chain(door.modules.iter().copied()).collect();
    let programs: Vec<&str> = ["mke2fs"].into_iter().chain(door.programs.iter().copied()).collect();
    let guest = Guest::of_suite(door.suite, &modules, &programs)?;
    for program in ["e2fsck", "debugfs", "sha256sum"] {
        if find(program).is_none() {
            println!("skipped: a guest: {program} is not installed");
            return None;
        }
    }
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 256M");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let filled = |text: &str, port: u16| text.replace("{port}", &port.to_string()).replace("{host}", HOST);
    let (server, port) = match door.served {
        Served::Ours(options) => {
            (Server::Ours(Serving::start(&shop, &format!("serve disk.vhdx {}", filled(options, port)))?), port)
        }
        Served::Samba => {
            let samba = Samba::start("a guest of Samba", &shop.path(""))?;
            let port = samba.port;
            let child = shop
                .command(&["attach", "disk.vhdx", "--fuse", "view", "--foreground"])
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let began = Instant::now();
            while !shop.path("view/disk").exists() {
                assert!(began.elapsed() < Duration::from_secs(30), "no view appears");
                thread::sleep(Duration::from_millis(50));
            }
            (Server::Samba { samba, view: View { child, dir: shop.path("view") } }, port)
        }
    };
    let filled = |text: &str| filled(text, port);
    // The kernel's SMB client passes no discards of a loop device to Samba.
    let trims = matches!(door.served, Served::Ours(_));

    let console = guest.run(&format!(
        "{attach}\n\
         i=0; while [ ! -b /dev/{device} ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done\n\
         echo GUEST: size $(cat /sys/block/{device}/size) discard $(cat /sys/block/{device}/queue/discard_max_bytes)\n\
         {verify}\n\
         /programs/mke2fs -q -t ext4 -b 4096 /dev/{device}\n\
         mount -t ext4 /dev/{device} /mnt\n\
         mkdir /mnt/a /mnt/a/b\n\
         dd if=/dev/urandom of=/mnt/a/one bs=64k count=48 2>/dev/null\n\
         dd if=/dev/urandom of=/mnt/a/b/two bs=4097 count=99 2>/dev/null\n\
         i=0; while [ $i -lt 40 ]; do echo file $i of the guest > /mnt/a/small$i; i=$((i+1)); done\n\
         dd if=/dev/urandom of=/mnt/gone bs=1M count={mib} 2>/dev/null\n\
         sync\n\
         rm /mnt/gone; sync\n\
         {trim}\n\
         cd /mnt; find . -type f | sort | xargs sha256sum | sed 's/^/GUEST: sum /'; cd /\n\
         umount /mnt\n\
         {detach}\n",
        attach = filled(door.attach),
        device = door.device,
        detach = door.detach,
        verify = if door.programs.contains(&"fio") { verify(door.device) } else { "true".into() },
        trim = if trims { "fstrim /mnt" } else { "true" },
        mib = TRIMMED_BYTES >> 20
    ))?;
    println!("{console}");
    server.stop();
    // The firmware leaves the cursor's orders before the first line.
    let said = |word: &str| -> Vec<Vec<String>> {
        let lines = console.lines().filter_map(|line| line.split_once("GUEST: ")?.1.strip_prefix(word));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
    assert_eq!(console.contains("GUEST: VERIFIED"), door.programs.contains(&"fio"), "{console}");
    let size = &said("size")[0];
    assert_eq!(size[0].parse::<u64>().unwrap() * 512, 256 << 20, "{console}");
    assert_ne!(size[2], "0", "the guest's kernel was not told that it may discard");
    let sums: BTreeMap<String, String> =
        said("sum").into_iter().map(|words| (words[1].clone(), words[0].clone())).collect();
    assert_eq!(sums.len(), 42, "{console}");

    // The image is sound, so is the file system in it, and every file is what the guest wrote.
    shop.ok("check disk.vhdx");
    shop.ok("convert disk.vhdx disk.raw");
    let raw = shop.path("disk.raw");
    let tool = |name: &str, args: &[&str]| {
        let output = Command::new(find(name).unwrap()).args(args).arg(&raw).output().unwrap();
        assert!(output.status.success(), "{name} {args:?}: {output:?}");
    };
    tool("e2fsck", &["-fn"]);
    for (name, sum) in &sums {
        let copy = shop.path("copy");
        let request = format!("dump {} {}", name.trim_start_matches('.'), copy.display());
        tool("debugfs", &["-R", &request]);
        let output = Command::new("sha256sum").arg(&copy).output().unwrap();
        let found = String::from_utf8_lossy(&output.stdout);
        assert_eq!(found.split_whitespace().next(), Some(sum.as_str()), "{name} differs");
        std::fs::remove_file(&copy).unwrap();
    }
    if !trims {
        return Some(console);
    }
    // What was trimmed is not in the image any more. The journal and the tables have been written,
    // and blocks are of 2 MiB.
    let data_bytes = shop.data_bytes("disk.vhdx");
    println!("{data_bytes} bytes of data in the image");
    assert!(data_bytes < TRIMMED_BYTES, "{data_bytes} bytes are stored; the trims did not reach the image");
    Some(console)
}
