//! The NBD client of another kernel, in a guest: it makes a file system on a disk that we serve,
//! writes, trims, unmounts and goes; then what the image holds is compared with what the guest
//! said.

use crate::common::Workshop;
use crate::guest_machine::{Guest, HOST, find};
use crate::serving::Serving;
use nix::sys::signal::Signal;
use std::{collections::BTreeMap, net::TcpListener, process::Command};

/// A virtio network card, NBD, ext4.
const MODULES: [&str; 6] = ["virtio_pci", "virtio_net", "nbd", "crc32c_generic", "crc32c_intel", "ext4"];

/// What the guest deletes and trims away.
const TRIMMED_BYTES: u64 = 48 << 20;

#[test]
fn a_file_system_made_by_the_kernels_client_in_a_guest_is_whole_in_the_image() {
    let Some(guest) = Guest::new(&MODULES, &["nbd-client", "mke2fs"]) else { return };
    for program in ["e2fsck", "debugfs", "sha256sum"] {
        if find(program).is_none() {
            println!("skipped: a guest: {program} is not installed");
            return;
        }
    }
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 256M");
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let line = format!("serve disk.vhdx --nbd 127.0.0.1:{port} --insecure-writes");
    let Some(server) = Serving::start(&shop, &line) else { return };

    let console = guest.run(&format!(
        "/programs/nbd-client -N disk.vhdx -C 2 -b 512 {HOST} {port} /dev/nbd0 >/tmp/nbd.log 2>&1 || {{ cat /tmp/nbd.log; false; }}\n\
         echo GUEST: size $(cat /sys/block/nbd0/size) discard $(cat /sys/block/nbd0/queue/discard_max_bytes)\n\
         /programs/mke2fs -q -t ext4 -b 4096 /dev/nbd0\n\
         mount -t ext4 /dev/nbd0 /mnt\n\
         mkdir /mnt/a /mnt/a/b\n\
         dd if=/dev/urandom of=/mnt/a/one bs=64k count=48 2>/dev/null\n\
         dd if=/dev/urandom of=/mnt/a/b/two bs=4097 count=99 2>/dev/null\n\
         i=0; while [ $i -lt 40 ]; do echo file $i of the guest > /mnt/a/small$i; i=$((i+1)); done\n\
         dd if=/dev/urandom of=/mnt/gone bs=1M count={mib} 2>/dev/null\n\
         sync\n\
         rm /mnt/gone; sync\n\
         fstrim /mnt\n\
         cd /mnt; find . -type f | sort | xargs sha256sum | sed 's/^/GUEST: sum /'; cd /\n\
         umount /mnt\n\
         /programs/nbd-client -d /dev/nbd0 >/dev/null\n",
        mib = TRIMMED_BYTES >> 20
    ));
    let Some(console) = console else { return };
    println!("{console}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    // The firmware leaves the cursor's orders before the first line.
    let said = |word: &str| -> Vec<Vec<String>> {
        let lines = console.lines().filter_map(|line| line.split_once("GUEST: ")?.1.strip_prefix(word));
        lines.map(|line| line.split_whitespace().map(str::to_owned).collect()).collect()
    };
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
    // What was trimmed is not in the image any more. The journal and the tables have been written,
    // and blocks are of 2 MiB.
    let map = shop.json("map disk.vhdx");
    let data_bytes: u64 = map["extents"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|extent| extent["data"] == true)
        .map(|extent| extent["length"].as_u64().unwrap())
        .sum();
    println!("{data_bytes} bytes of data in the image");
    assert!(data_bytes < TRIMMED_BYTES, "{data_bytes} bytes are stored; the trims did not reach the image");
}
