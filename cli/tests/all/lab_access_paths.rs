//! `lab study access-paths`, as the user types it, in moments: what it leaves, what it leaves out,
//! what its result becomes.

use crate::common::{Running, Workshop, schemas, without_summary};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

const TINY: &str = "lab study access-paths --quick --dir scratch --size 32M";
/// The same without virtual machines, which take most of the time.
const ON_HOST: &str = "lab study access-paths --quick --dir scratch --size 32M --no-guest";

/// The study, with a list of attached disks of its own.
fn command(shop: &Workshop, line: &str) -> Command {
    let words: Vec<&str> = line.split(' ').collect();
    let mut command = shop.command(&words);
    command.env("DISKWRIGHT_RUN_DIR", shop.path("run"));
    command
}

/// Nothing of the study is left: no scratch files, no servers, no devices.
fn assert_clean(shop: &Workshop) {
    let scratch = shop.path("scratch");
    let left: Vec<_> = fs::read_dir(&scratch).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    let records = fs::read_dir(shop.path("run")).into_iter().flatten().flatten().filter(|entry| entry.path().is_dir());
    assert_eq!(records.count(), 0, "something is still attached");
    let mark = scratch.to_string_lossy().into_owned();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains(&mark), "{:?} still runs", String::from_utf8_lossy(&line));
    }
    for device in fs::read_dir("/sys/block").unwrap().flatten() {
        let file = fs::read_to_string(device.path().join("loop/backing_file")).unwrap_or_default();
        assert!(!file.contains(shop.path("run").to_str().unwrap()), "{device:?} shows {file}");
    }
}

fn is_guest(way: &Value) -> bool {
    way.as_str().unwrap().starts_with("guest_")
}

#[test]
fn every_way_is_measured_or_left_out_by_name_and_nothing_stays() {
    let shop = Workshop::new();
    let output =
        command(&shop, &format!("{TINY} --rounds 1 --cell 0.25 --output r.json --json")).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schemas::validate(&result.to_string()), "diskwright.study.access-paths/3");
    let ways = result["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 18);
    for way in ways {
        if let Some(why) = way["skipped"].as_str() {
            println!("skipped: the way {}: {why}", way["way"]);
        }
    }
    let is_measured = |way: &str| ways.iter().any(|record| record["way"] == way && record["skipped"].is_null());
    assert!(["in_process", "raw_file", "nbd", "nbd_tcp", "nvme_tcp", "iscsi"].into_iter().all(is_measured), "{ways:?}");
    let cells = result["cells"].as_array().unwrap();
    for (load, in_flight) in [("light", 40), ("medium", 80), ("heavy", 120)] {
        let of_load: Vec<&Value> = cells.iter().filter(|cell| cell["part"] == load).collect();
        assert!(of_load.len() >= 3 && of_load.iter().all(|cell| cell["in_flight"] == in_flight), "{of_load:?}");
        // Host and guest are never on one scale.
        let in_guest: Vec<&Value> = cells.iter().filter(|cell| cell["part"] == format!("{load}, guest")).collect();
        let of_guest = ways.iter().filter(|record| is_guest(&record["way"]) && record["skipped"].is_null()).count();
        assert_eq!(in_guest.len(), of_guest);
        assert!(of_load.iter().all(|cell| !cell["subject"].as_str().unwrap().starts_with("guest")), "{of_load:?}");
    }
    for cell in cells {
        assert!(cell["rounds"][0]["iops"].as_f64().unwrap() > 0.0, "{cell}");
        let has_server = !["in process", "raw file"].contains(&cell["subject"].as_str().unwrap());
        let server_ns = cell["more"]["server_cpu_ns_per_io"][0].as_f64();
        assert_eq!(server_ns.is_some_and(|ns| ns > 0.0), has_server, "{cell}");
    }
    assert!(result["verdict"].as_str().unwrap().starts_with("Relative to 100 for the disk in process, NBD reaches "));
    assert_clean(&shop);

    let saved: Value = serde_json::from_slice(&fs::read(shop.path("r.json")).unwrap()).unwrap();
    assert_eq!(saved, without_summary(result.clone()));
    shop.ok("lab report r.json -o r.html");
    let page = fs::read_to_string(shop.path("r.html")).unwrap();
    assert!(
        page.contains("Relative to the disk in process") && page.contains("in process = 100"),
        "the page has no scale"
    );
    let csv = shop.ok("lab report r.json --as csv");
    assert_eq!(csv.lines().count(), 1 + cells.len());
    assert!(shop.ok("lab report r.json --as md").contains("| in process |"));
}

#[test]
fn a_signal_ends_it_and_takes_servers_and_devices_with_it() {
    let shop = Workshop::new();
    let mut command = command(&shop, &format!("{ON_HOST} --rounds 500 --cell 0.2 --output r.json"));
    let mut child = Running::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let measuring = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("measure")));
    assert!(measuring.is_some(), "it ended before it measured");
    std::thread::sleep(Duration::from_millis(700));
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let start = Instant::now();
    let status = child.wait().unwrap();
    assert_eq!(status.code(), Some(130), "{status} after {:?}", start.elapsed());
    assert_clean(&shop);
}

#[test]
fn what_cannot_be_studied_is_refused() {
    let shop = Workshop::new();
    assert!(shop.fails(2, "lab study access-paths --rounds 0").contains("above 0"));
    shop.fails(2, "lab study access-paths --disk vhdx-differencing");
    assert!(shop.fails(2, "lab study access-paths --network speed=1G").contains("rtt=1ms,rate=1G"));
    assert!(shop.fails(2, "lab study access-paths --only smb").contains("guest-smb"));
    shop.fails(2, "lab study access-paths --no-guest --kernel there");
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 0);
}

/// The guest's kernel has netem, whatever this one has.
#[test]
fn a_guest_over_the_network_waits_for_the_round_trip_and_the_rate() {
    let shop = Workshop::new();
    let line = format!("{TINY} --rounds 1 --cell 0.5 --only guest-nvme-network --network rtt=40ms,rate=20M --json");
    let output = command(&shop, &line).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ways = result["ways"].as_array().unwrap();
    let way = ways.iter().find(|record| record["way"] == "guest_nvme_network").unwrap();
    if let Some(why) = way["skipped"].as_str() {
        println!("skipped: a guest over the network: {why}");
        return;
    }
    assert_eq!(result["network"]["round_trip_ns"], 40_000_000);
    let cells = result["cells"].as_array().unwrap();
    let of_network: Vec<&Value> = cells
        .iter()
        .filter(|cell| cell["subject"] == "guest: NVMe/TCP, network")
        .map(|cell| &cell["rounds"][0])
        .collect();
    assert_eq!(of_network.len(), 3);
    for round in of_network {
        assert!(round["mean_ns"].as_f64().unwrap() >= 40e6, "{round}");
        // 2.5 MB/s in each direction, and a burst of 512 KiB at once.
        assert!(round["mb_per_s"].as_f64().unwrap() < 2.0 * 2.5 + 1.5, "{round}");
    }
}

#[test]
fn the_ways_that_are_asked_for_are_measured_with_their_base() {
    let shop = Workshop::new();
    let line = format!("{ON_HOST} --network none --only nvme-tcp,nvme-network --rounds 1 --cell 0.2 --json");
    let output = command(&shop, &line).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    let ways = result["ways"].as_array().unwrap();
    let measured: Vec<&str> =
        ways.iter().filter(|way| way["skipped"].is_null()).map(|way| way["way"].as_str().unwrap()).collect();
    assert_eq!(measured, ["in_process", "nvme_tcp"]);
    let why = |way: &str| ways.iter().find(|record| record["way"] == way).unwrap()["skipped"].as_str().unwrap();
    assert_eq!((why("nvme_network"), why("attach")), ("no network was wanted", "it was not asked for"));
    let warnings = result["warnings"].to_string();
    assert!(warnings.contains("NVMe/TCP, network") && !warnings.contains("attach"), "{warnings}");
    assert!(result["network"].is_null() && result["guest"].is_null());
}
