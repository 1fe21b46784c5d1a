//! `diskwright serve` under the clients that others wrote, and on a file system that runs full.

use crate::common::Workshop;
use crate::serving;
use crate::serving::{Serving, said};
use crate::small_fs::{Small, eat_all};
use nix::sys::signal::Signal;
use std::fs;

const KINDS: [&str; 3] = ["disk.vhdx", "disk.vhd", "disk.raw"];

#[test]
fn qemus_programs_copy_write_and_compare() {
    for name in KINDS {
        let shop = Workshop::new();
        shop.ok(&format!("create {name} --size 32M"));
        let Some(server) = Serving::start(&shop, &format!("serve {name} --nbd ./s")) else { return };
        let uri = server.uri(name);
        let commands = ["write -P 0x5a 1M 3M", "write -z 2M 1M", "discard 3M 64k", "read -P 0x5a 1M 1M", "flush"];
        let mut args = vec!["-f", "raw"];
        commands.iter().for_each(|command| args.extend(["-c", command]));
        args.push(&uri);
        let Some(text) = said(&shop, "qemu-io", &args) else { return };
        assert!(!text.contains("failed"), "{text}");
        said(&shop, "qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &uri, "copy.qcow2"]);
        said(&shop, "qemu-img", &["compare", "-f", "raw", "-F", "qcow2", &uri, "copy.qcow2"]);
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        shop.ok(&format!("io {name} --read-only -c 'read -P 0x5a 1M 1M' -c 'read -P 0 2M 1M' -c 'read -P 0 3M 64k'"));
        let kind = if name == "disk.vhd" { "vpc" } else { name.rsplit('.').next().unwrap() };
        said(&shop, "qemu-img", &["compare", "-f", kind, "-F", "qcow2", name, "copy.qcow2"]);
    }
}

#[test]
fn nbdcopy_moves_a_disk_from_server_to_server() {
    let shop = Workshop::new();
    shop.ok("create from.vhdx --size 64M");
    shop.ok("create to.vhd --size 64M");
    shop.ok("io from.vhdx -c 'write -P 1 3M 5M' -c 'write -P 2 60M 100k' -c flush");
    let Some(server) = Serving::start(&shop, "serve from=from.vhdx to=to.vhd --nbd ./s") else { return };
    let Some(_) = said(&shop, "nbdcopy", &["--flush", &server.uri("from"), &server.uri("to")]) else { return };
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("compare from.vhdx to.vhd");
    shop.ok("check to.vhd");
}

#[test]
fn fio_finds_what_it_wrote_over_several_connections() {
    for name in KINDS {
        let shop = Workshop::new();
        shop.ok(&format!("create {name} --size 64M"));
        let Some(server) = Serving::start(&shop, &format!("serve {name} --nbd ./s --cache direct")) else { return };
        let uri = format!("--uri={}", server.uri(name));
        // Four connections, each with its own part of the disk.
        let args = [
            "--name=verify",
            "--ioengine=nbd",
            &uri,
            "--size=16m",
            "--numjobs=4",
            "--offset_increment=16m",
            "--bsrange=4k-64k",
            "--rw=randwrite",
            "--iodepth=16",
            "--verify=crc32c",
            "--verify_fatal=1",
            "--do_verify=1",
            "--verify_state_save=0",
        ];
        let Some(output) = serving::program(&shop, "fio", &args) else { return };
        let text = serving::text(&output);
        if text.contains("engine nbd not loadable") {
            return println!("skipped: this fio has no nbd engine");
        }
        assert!(output.status.success() && text.contains("err= 0"), "{text}");
        assert_eq!(server.stop(Signal::SIGTERM), Some(0));
        if name != "disk.raw" {
            shop.ok(&format!("check {name}"));
        }
    }
}

#[test]
fn a_full_file_system_is_told_and_survived() {
    let small = match Small::new("ext4", 64 << 20) {
        Ok(small) => small,
        Err(reason) => return println!("skipped: ext4: {reason}"),
    };
    let shop = Workshop::new();
    for (name, cache) in [("disk.vhdx", "page"), ("disk.vhdx", "direct"), ("disk.vhd", "page")] {
        let disk = small.mount.join(name);
        let ballast = small.mount.join("ballast");
        shop.ok(&format!("create {} --size 256M", disk.display()));
        fs::write(&ballast, vec![1; 8 << 20]).unwrap();
        let line = format!("serve disk={} --nbd ./s --cache {cache}", disk.display());
        let Some(mut server) = Serving::start(&shop, &line) else { return };
        let uri = server.uri("disk");
        shop.ok(&format!("io '{uri}' -c 'write -P 1 0 8M' -c flush"));
        eat_all(&small.mount.join("filler"));
        let error = shop.fails(1, &format!("io '{uri}' -c 'write -P 2 100M 60M'"));
        assert!(error.contains("ENOSPC"), "{error}");
        server.wait_for_log("a request failed");
        // What was there stays right, and the server serves.
        assert!(server.is_running());
        shop.ok(&format!("io '{uri}' -c 'read -P 1 0 8M'"));
        // With space again it goes on, also for who has seen the error.
        fs::remove_file(&ballast).unwrap();
        fs::remove_file(small.mount.join("filler")).unwrap();
        shop.ok(&format!("io '{uri}' -c 'write -P 3 200M 4M' -c flush -c 'read -P 3 200M 4M' -c 'read -P 1 0 8M'"));
        assert_eq!(server.stop(Signal::SIGTERM), Some(0), "{name}, {cache}");
        let checked = shop.run(&format!("check {}", disk.display()));
        assert!(matches!(checked.code, Some(0 | 3)), "{name}, {cache}: {checked:#?}");
        shop.ok(&format!("io {} --read-only -c 'read -P 1 0 8M' -c 'read -P 3 200M 4M'", disk.display()));
        fs::remove_file(&disk).unwrap();
    }
}
