//! `track`, `snapshot --track`, and change tracking of disks in use: over the control channel, by
//! NBD's metadata contexts as other programs read them, and after `kill -9`.

use crate::control::Place;
use crate::serving::program;
use nix::sys::signal::Signal;
use std::fs;

/// Start and length of the ranges that have changed.
fn ranges(place: &Place, line: &str) -> Vec<(u64, u64)> {
    let told = place.json(line);
    assert_eq!(told["everything_because"], serde_json::Value::Null, "{told}");
    let range = |range: &serde_json::Value| (range["start"].as_u64().unwrap(), range["length"].as_u64().unwrap());
    told["ranges"].as_array().unwrap().iter().map(range).collect()
}

#[test]
fn points_are_started_listed_shown_and_stopped() {
    let place = Place::with(&["vm.vhdx"]);
    assert_eq!(place.ok("track list vm.vhdx"), "");
    assert_eq!(place.ok("track start vm.vhdx full"), "vm.vhdx: changes count since the point full\n");
    place.shop.ok("io vm.vhdx -c 'write -P 1 1M 64k' -c 'write -P 1 2M 512'");
    let listed = place.ok("track list vm.vhdx");
    assert!(listed.contains("full") && listed.contains("128 KiB") && listed.contains("UTC"), "{listed}");
    let shown = place.ok("track show vm.vhdx full");
    assert_eq!(
        shown,
        "   start    length\n 1048576     65536\n 2097152     65536\n128 KiB of 64 MiB (67108864 bytes) changed\n"
    );
    assert_eq!(ranges(&place, "track show vm.vhdx full"), [(1 << 20, 1 << 16), (2 << 20, 1 << 16)]);
    let error = place.fails("track show vm.vhdx other");
    assert!(error.contains("no point \"other\"") && error.contains("track list"), "{error}");
    assert!(place.fails("track start vm.vhdx full").contains("a point has this name"));
    assert_eq!(place.run("track start vm.vhdx a/b").0, Some(2));
    let error = place.fails("move vm.vhdx moved.vhdx");
    assert!(error.contains("points of change tracking"), "{error}");
    // As bytes, by another program.
    let image = fs::File::options().append(true).open(place.shop.path("vm.vhdx")).unwrap();
    std::io::Write::write_all(&mut &image, &[0; 4096]).unwrap();
    drop(image);
    for line in ["track list vm.vhdx", "track show vm.vhdx full"] {
        let told = place.ok(line);
        assert!(told.contains("everything has changed") && told.contains("another program has written"), "{told}");
    }
    assert_eq!(place.ok("track stop vm.vhdx full"), "vm.vhdx: the point full is gone\n");
    assert!(!place.shop.path("vm.vhdx.tracks").exists());
}

#[test]
fn a_snapshot_starts_a_point_and_the_points_go_on_in_the_child() {
    for image in ["vm.vhdx", "vm.vhd"] {
        let place = Place::with(&[image]);
        place.shop.ok(&format!("io {image} -c 'write -P 1 0 64k' -c flush"));
        place.ok(&format!("track start {image} old"));
        place.shop.ok(&format!("io {image} -c 'write -P 1 1M 64k' -c flush"));
        place.ok(&format!("snapshot {image} --name one --track new"));
        place.shop.ok(&format!("io {image} -c 'write -P 1 2M 64k' -c flush"));
        assert_eq!(ranges(&place, &format!("track show {image} new")), [(2 << 20, 1 << 16)], "{image}");
        assert_eq!(ranges(&place, &format!("track show {image} old")), [(1 << 20, 1 << 16), (2 << 20, 1 << 16)]);
        // Without --track the points stay, too. A revert changes everything.
        place.ok(&format!("snapshot {image} --name two"));
        assert_eq!(ranges(&place, &format!("track show {image} new")), [(2 << 20, 1 << 16)]);
        place.ok(&format!("snapshot revert {image} --discard"));
        assert!(place.json(&format!("track show {image} new"))["everything_because"].is_string());
    }
}

#[test]
fn a_disk_in_use_is_tracked_and_survives_a_kill() {
    let place = Place::with(&["vm.vhdx"]);
    let Some(server) = place.serve("vm=vm.vhdx --nbd ./s") else { return };
    let uri = server.uri("vm");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M'"));
    assert_eq!(place.ok("track start vm.vhdx full"), "vm.vhdx: changes count since the point full\n");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 2 8M 64k' -c 'discard 40M 64k'"));
    let expected = [(8 << 20, 1 << 16), (40 << 20, 1 << 16)];
    assert_eq!(ranges(&place, "track show vm.vhdx full"), expected);
    assert_eq!(place.json("track list vm.vhdx")["points"][0]["changed"], 2 << 16);
    place.ok("serve-ctl vm.vhdx snapshot one --track second");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 3 20M 512'"));
    assert_eq!(ranges(&place, "track show vm.vhdx second"), [(20 << 20, 1 << 16)]);
    server.stop(Signal::SIGKILL);
    // At most what was marked ahead is added, and the disk is small.
    for (name, at) in [("full", [8 << 20, 40 << 20]), ("second", [20 << 20, 20 << 20])] {
        let told = ranges(&place, &format!("track show vm.vhdx {name}"));
        let has = |at: u64| told.iter().any(|(start, length)| (*start..start + length).contains(&at));
        assert!(at.into_iter().all(has), "{told:?}");
    }
    // The next session goes on from there, and ends cleanly.
    let server = place.serve("vm=vm.vhdx --nbd ./t").unwrap();
    place.shop.ok(&format!("io '{}' -c 'write -P 3 60M 512' -c flush", server.uri("vm")));
    place.ok("track stop vm.vhdx full");
    server.stop(Signal::SIGTERM);
    let told = ranges(&place, "track show vm.vhdx second");
    assert!(told.iter().any(|(start, length)| (*start..start + length).contains(&(60 << 20))), "{told:?}");
}

#[test]
fn a_killed_server_of_a_disk_without_an_identity_leaves_everything_changed() {
    for image in ["vm.raw", "vm.vhd", "vm.qcow2", "vm.vdi"] {
        let place = Place::with(&[image]);
        place.ok(&format!("track start {image} full"));
        let Some(server) = place.serve(&format!("vm={image} --nbd ./s")) else { return };
        place.shop.ok(&format!("io '{}' -c 'write -P 1 0 1M' -c flush", server.uri("vm")));
        server.stop(Signal::SIGKILL);
        let told = place.json(&format!("track show {image} full"));
        let reason = told["everything_because"].as_str().unwrap();
        assert!(reason.contains("not closed cleanly"), "{reason}");
    }
}

#[test]
fn other_programs_read_the_points_as_metadata_contexts() {
    let place = Place::with(&["vm.vhdx"]);
    place.ok("track start vm.vhdx full");
    let Some(server) = place.serve("vm=vm.vhdx --nbd ./s") else { return };
    let uri = server.uri("vm");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 1M 128k' -c 'write -P 1 63M 1M'"));
    let run = |name: &str, arguments: &[&str]| {
        let output = program(&place.shop, name, arguments)?;
        assert!(output.status.success(), "{name}: {}", String::from_utf8_lossy(&output.stderr));
        Some(String::from_utf8(output.stdout).unwrap())
    };
    // Start and length of the runs in which a field has this value.
    let runs = |map: &str, field: &str, value: serde_json::Value, start: &str| -> Vec<(u64, u64)> {
        let map: serde_json::Value = serde_json::from_str(map).unwrap();
        let runs = map.as_array().unwrap().iter().filter(|run| run[field] == value);
        runs.map(|run| (run[start].as_u64().unwrap(), run["length"].as_u64().unwrap())).collect()
    };
    let expected = [(1 << 20, 128 << 10), (63 << 20, 1 << 20)];
    for context in ["qemu:dirty-bitmap:full", "diskwright:track:full"] {
        let Some(map) = run("nbdinfo", &["--json", &format!("--map={context}"), &uri]) else { continue };
        assert_eq!(runs(&map, "type", 1.into(), "offset"), expected, "{map}");
    }
    if let Some(listed) = run("nbdinfo", &[&uri]) {
        assert!(listed.contains("qemu:dirty-bitmap:full") && listed.contains("diskwright:track:full"), "{listed}");
    }
    // qemu shows a bitmap in the place of the allocation: changed ranges count as not data.
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},export=vm,x-dirty-bitmap=qemu:dirty-bitmap:full",
        place.shop.path("s").display()
    );
    if let Some(map) = run("qemu-img", &["map", "--output=json", "--image-opts", &options]) {
        assert_eq!(runs(&map, "data", false.into(), "start"), expected, "{map}");
    }
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

/// From one snapshot to the next of a disk in use, and later when it is not.
#[test]
fn what_has_changed_between_two_points_is_exported_while_the_disk_is_in_use() {
    let place = Place::with(&["vm.vhdx"]);
    let Some(server) = place.serve("vm=vm.vhdx --nbd ./s") else { return };
    let uri = server.uri("vm");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 1 0 1M'"));
    place.ok("serve-ctl vm.vhdx snapshot full --track full");
    let frozen = |name: &str| {
        let listed = place.json("info vm.vhdx --chain --force-share");
        let images = listed["chain"].as_array().unwrap().iter().map(|image| image["file"].as_str().unwrap().to_owned());
        images.into_iter().find(|file| file.contains(name)).unwrap_or_else(|| panic!("{name}: {listed}"))
    };
    fs::copy(frozen("full"), place.shop.path("copy.vhdx")).unwrap();
    place.shop.ok(&format!("io '{uri}' -c 'write -P 2 1M 64k' -c 'write -z 0 64k'"));
    place.ok("serve-ctl vm.vhdx snapshot monday --track monday");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 3 1M 64k' -c 'write -P 3 9M 64k'"));
    let error = place.fails("diff vm.vhdx --track full --to other --export out.dwdiff");
    assert!(error.contains("no point \"other\""), "{error}");
    let listed = place.run("diff vm.vhdx --track full --to monday --json");
    assert_eq!(listed.0, Some(1), "{listed:?}");
    let exported = place.json("diff vm.vhdx --track full --to monday --export out.dwdiff");
    assert_eq!((exported["data_bytes"].as_u64(), exported["zero_bytes"].as_u64()), (Some(64 << 10), Some(64 << 10)));
    place.ok("diff --apply out.dwdiff --onto copy.vhdx");
    place
        .shop
        .ok("io copy.vhdx -c 'read -P 0 0 64k' -c 'read -P 1 64k 960k' -c 'read -P 2 1M 64k' -c 'read -P 0 9M 64k'");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let again = place.json("diff vm.vhdx --track full --to monday --export again.dwdiff");
    assert_eq!(again["result_id"], exported["result_id"]);
    assert!(fs::read(place.shop.path("again.dwdiff")).unwrap() == fs::read(place.shop.path("out.dwdiff")).unwrap());
}
