//! `merge` and `snapshot delete` of a disk that is served, while a client writes.

use crate::common::Running;
use crate::control::{Place, numbered_blocks, numbers_in};
use crate::serving::{said, wait_until};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::{
    process::Stdio,
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::Duration,
};

fn chain_of(place: &Place, name: &str) -> Vec<String> {
    let said = place.json(&format!("serve-ctl {name} statistics"));
    let images = said["chain"].as_array().unwrap().iter();
    images.map(|image| image.as_str().unwrap().rsplit('/').next().unwrap().to_owned()).collect()
}

#[test]
fn frozen_images_are_merged_while_a_client_writes() {
    let place = Place::with(&["disk.vhdx", "disk.vhd", "disk.vmdk"]);
    let Some(server) = place.serve("disk.vhdx disk.vhd disk.vmdk --nbd ./s") else { return };
    let stop = AtomicBool::new(false);
    let held: Vec<Vec<u64>> = thread::scope(|scope| {
        let clients = ["disk.vhdx", "disk.vhd", "disk.vmdk"].map(|name| {
            let (uri, stop) = (server.uri(name), &stop);
            scope.spawn(move || numbered_blocks(&uri, stop))
        });
        for extension in ["vhdx", "vhd", "vmdk"] {
            let disk = format!("disk.{extension}");
            let letter = if extension == "vmdk" { "" } else { "a" };
            let frozen = |number: u32| format!("disk_s{number}.{letter}{extension}");
            for number in 0..4 {
                thread::sleep(Duration::from_millis(150));
                place.ok(&format!("snapshot {disk} --name s{number}"));
            }
            // By the name of a frozen image.
            let dry = place.json(&format!("merge {} --dry-run", frozen(1)));
            assert_eq!((&dry["dry_run"], &dry["in_use"]), (&true.into(), &true.into()), "{dry}");
            assert_eq!(chain_of(&place, &disk).len(), 5);
            let done = place.json(&format!("merge {}", frozen(1)));
            assert_eq!(done["in_use"], true, "{done}");
            assert!(done["disk"].as_str().unwrap().ends_with(&frozen(0)), "{done}");
            assert!(done["data_bytes"].as_u64().unwrap() > 0, "{done}");
            assert_eq!(chain_of(&place, &disk), [disk.clone(), frozen(3), frozen(2), frozen(0)]);
            // A snapshot with a frozen child: the child keeps its name.
            let text = place.ok(&format!("snapshot delete {}", frozen(2)));
            assert!(text.starts_with(&format!("{} got", frozen(2))) && text.contains(&frozen(3)), "{text}");
            assert_eq!(chain_of(&place, &disk), [disk.clone(), frozen(3), frozen(0)]);
            // By the disk; the child of the merged image is the disk itself.
            let text = place.ok(&format!("serve-ctl {disk} merge {} --keep-name", frozen(3)));
            assert!(text.contains(&frozen(0)), "{text}");
            assert_eq!(chain_of(&place, &disk), [disk.clone(), frozen(3)]);
            for gone in 0..3 {
                assert!(!place.shop.path(&frozen(gone)).exists(), "{} is gone", frozen(gone));
            }
            // The image that the client writes: the disk keeps its name.
            let text = place.ok(&format!("merge {disk}"));
            assert!(
                text.starts_with(&format!("{} got", frozen(3))) && text.contains(&format!("is now {disk}")),
                "{text}"
            );
            assert_eq!(chain_of(&place, &disk), std::slice::from_ref(&disk));
            // The last snapshot, whose only child is the disk itself.
            place.ok(&format!("snapshot {disk} --name s4"));
            thread::sleep(Duration::from_millis(50));
            place.ok(&format!("snapshot delete {}", frozen(4)));
            assert_eq!(chain_of(&place, &disk), std::slice::from_ref(&disk));
            assert!(!place.shop.path(&frozen(3)).exists() && !place.shop.path(&frozen(4)).exists());
        }
        stop.store(true, Ordering::Relaxed);
        clients.map(|client| client.join().unwrap()).into()
    });
    place.ok("serve-ctl disk.vhdx drain");
    assert_eq!(server.wait(), Some(0));
    for (extension, held) in ["vhdx", "vhd", "vmdk"].into_iter().zip(&held) {
        let disk = format!("disk.{extension}");
        assert!(numbers_in(&place.shop.path(&disk)) == *held, "{extension}: all is there");
        place.shop.ok(&format!("check {disk} --chain"));
        // It can be written: a VHD's time stamps fit.
        place.shop.ok(&format!("io {disk} -c 'write 63M 4k'"));
        let merged = disk;
        let format = if extension == "vhd" { "vpc" } else { extension };
        place.shop.ok(&format!("convert {merged} ours-{extension}.raw"));
        let Some(_) = said(
            &place.shop,
            "qemu-img",
            &["convert", "-f", format, "-O", "raw", &merged, &format!("theirs-{extension}.raw")],
        ) else {
            continue;
        };
        place.shop.ok(&format!("compare ours-{extension}.raw theirs-{extension}.raw"));
        said(
            &place.shop,
            "qemu-img",
            &["compare", "-f", format, "-F", "raw", &merged, &format!("ours-{extension}.raw")],
        );
    }
}

#[test]
fn merges_of_disks_in_use_are_refused_where_data_would_be_lost() {
    let place = Place::with(&["disk.vhdx", "other.vhdx"]);
    let Some(server) = place.serve("disk.vhdx other.vhdx --nbd ./s") else { return };
    let uri = server.uri("disk.vhdx");
    for number in 0..3 {
        place.shop.ok(&format!("io '{uri}' -c 'write -P {} {number}M 1M' -c flush", number + 1));
        place.ok(&format!("snapshot disk.vhdx --name s{number}"));
    }
    place.ok("snapshot other.vhdx --name o0");
    // Another child of the parent would read other data afterwards.
    place.shop.ok("clone disk_s0.avhdx sibling.vhdx");
    for line in ["merge disk_s1.avhdx", "snapshot delete disk_s0.avhdx"] {
        let error = place.fails(line);
        assert!(error.contains("sibling.vhdx") && error.contains("also has"), "{error}");
    }
    std::fs::remove_file(place.shop.path("sibling.vhdx")).unwrap();
    // Another process reads the parent.
    let mut holder = place.command("io disk_s0.avhdx --read-only");
    let holder = Running::start(holder.stdin(Stdio::piped()).stdout(Stdio::null()));
    let named = format!("process {}", holder.id());
    wait_until("the reader has the image", || place.run("merge disk_s1.avhdx --dry-run").2.contains(&named));
    for line in ["merge disk_s1.avhdx", "snapshot delete disk_s0.avhdx"] {
        let error = place.fails(line);
        assert!(error.contains(&named) && error.contains("disk_s0.avhdx"), "{error}");
    }
    drop(holder);
    // An image of another disk, and what is no image of a chain at all.
    for other in ["other_o0.avhdx", "other.vhdx"] {
        let error = place.fails(&format!("serve-ctl disk.vhdx merge {other}"));
        assert!(error.contains("not in the chain of") && error.contains("disk.vhdx"), "{error}");
    }
    let error = place.fails("serve-ctl disk.vhdx merge nothing.avhdx");
    assert!(error.contains("nothing.avhdx"), "{error}");
    let error = place.fails("serve-ctl disk.vhdx merge disk_s0.avhdx");
    assert!(error.contains("no parent"), "{error}");
    let error = place.fails("merge disk_s0.avhdx --into disk_s1.avhdx");
    assert!(error.contains("not among its ancestors"), "{error}");
    // Nothing has changed, and everything still works.
    assert_eq!(chain_of(&place, "disk.vhdx"), ["disk.vhdx", "disk_s2.avhdx", "disk_s1.avhdx", "disk_s0.avhdx"]);
    place.shop.ok(&format!("io '{uri}' -c 'read -P 1 0 1M' -c 'read -P 2 1M 1M' -c 'read -P 3 2M 1M'"));
    place.ok("merge disk_s2.avhdx --into disk_s0.avhdx");
    assert_eq!(chain_of(&place, "disk.vhdx"), ["disk.vhdx", "disk_s0.avhdx"]);
    place.shop.ok(&format!("io '{uri}' -c 'read -P 1 0 1M' -c 'read -P 2 1M 1M' -c 'read -P 3 2M 1M'"));
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

/// Ctrl-C of the command, the end of the server and `kill -9` each leave a disk that reads the
/// same, and the same command finishes the merge.
#[test]
fn a_merge_that_was_stopped_is_finished_by_the_same_command() {
    let place = Place::with(&["disk.vhdx"]);
    place.shop.ok("resize disk.vhdx 1G");
    for (round, signal) in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL].into_iter().enumerate() {
        let Some(server) = place.serve(&format!("disk.vhdx --nbd ./s{round}")) else { return };
        let uri = server.uri("disk.vhdx");
        place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M' -c flush"));
        place.ok(&format!("snapshot disk.vhdx --name base{round}"));
        place.shop.ok(&format!("io '{uri}' -c 'write -P {} 1M 512M' -c flush", round + 2));
        let child = format!("disk_child{round}.avhdx");
        place.ok(&format!("snapshot disk.vhdx --name child{round}"));
        let stop = AtomicBool::new(false);
        let held = thread::scope(|scope| {
            // A client that always waits for something: the merge pauses for it.
            let client = (signal == Signal::SIGINT).then(|| {
                let (uri, stop) = (server.uri("disk.vhdx"), &stop);
                scope.spawn(move || numbered_blocks(&uri, stop))
            });
            let mut command = place.command(&format!("merge {child} --no-reflink"));
            let mut merging = command.stdin(Stdio::null()).stdout(Stdio::null()).spawn().unwrap();
            wait_until("the merge is under way", || {
                let said = place.run("serve-ctl disk.vhdx statistics --json").1;
                said.contains("\"merge\"") || merging.try_wait().unwrap().is_some()
            });
            thread::sleep(Duration::from_millis(40));
            let was_under_way = merging.try_wait().unwrap().is_none();
            assert!(was_under_way, "512 MiB cannot be copied so fast");
            match signal {
                Signal::SIGINT => kill(Pid::from_raw(merging.id() as i32), signal).unwrap(),
                signal => server.signal(signal),
            }
            let code = merging.wait().unwrap().code();
            assert_eq!(code, Some(if signal == Signal::SIGINT { 130 } else { 1 }), "{signal}");
            stop.store(true, Ordering::Relaxed);
            client.map(|client| client.join().unwrap())
        });
        if signal == Signal::SIGINT {
            wait_until("the merge has stopped", || place.run(&format!("merge {child}")).0 == Some(0));
            assert_eq!(server.stop(Signal::SIGTERM), Some(0));
            let found = numbers_in(&place.shop.path("disk.vhdx"));
            let written = held.unwrap().into_iter().enumerate().filter(|(_, number)| *number > 0);
            written.for_each(|(at, number)| assert_eq!(found[at], number, "block {at}"));
            place.shop.ok("io disk.vhdx -c 'write -P 1 0 1M'");
        } else {
            server.wait();
            wait_until("the kernel has closed its files", || place.run("io disk.vhdx -c flush").0 == Some(0));
            place.shop.ok(&format!("io disk.vhdx -c 'read -P 1 0 1M' -c 'read -P {} 1M 512M'", round + 2));
            // Half of the same in the next process that serves the disk, half without one.
            let next = (signal == Signal::SIGTERM).then(|| place.serve("disk.vhdx --nbd ./next").unwrap());
            place.ok(&format!("merge {child}"));
            if let Some(next) = next {
                assert_eq!(next.stop(Signal::SIGTERM), Some(0));
            }
            place.shop.ok(&format!("io disk.vhdx -c 'read -P 1 0 1M' -c 'read -P {} 1M 512M'", round + 2));
        }
        assert!(!place.shop.path(&child).exists());
        let checked = place.shop.run("check disk.vhdx --chain");
        assert!(matches!(checked.code, Some(0 | 3)), "{checked:?}");
    }
}
