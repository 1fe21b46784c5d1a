//! `lab study native-and-guest`, as the user types it, in moments: what it measures in a guest,
//! what it leaves, and what it says where it cannot measure.

use crate::{
    common::{Running, Workshop, schemas, without_summary},
    guest_machine::{self, find},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    process::Stdio,
};

const TINY: &str = "lab study native-and-guest --quick --accelerator tcg --dir scratch --size 32M";

/// Whether a guest can be started here. Says what is missing.
fn can_start() -> bool {
    let kernel = guest_machine::kernel_dir().join("vmlinuz");
    if !kernel.exists() {
        println!("skipped: the study native-and-guest: no kernel at {}", kernel.display());
    } else if find(guest_machine::QEMU).is_none() {
        println!("skipped: the study native-and-guest: {} is not installed", guest_machine::QEMU);
    } else {
        return true;
    }
    false
}

/// Nothing of the study is left: no scratch files, no machine.
fn assert_clean(shop: &Workshop) {
    let scratch = shop.path("scratch");
    let left: Vec<_> = fs::read_dir(&scratch).into_iter().flatten().flatten().map(|entry| entry.file_name()).collect();
    assert!(left.is_empty(), "{left:?}");
    let mark = scratch.to_string_lossy().into_owned();
    for process in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        assert!(!String::from_utf8_lossy(&line).contains(&mark), "{:?} still runs", String::from_utf8_lossy(&line));
    }
}

#[test]
fn every_disk_is_measured_on_the_host_and_in_the_guest() {
    if !can_start() {
        return;
    }
    let _turn = guest_machine::turn();
    let shop = Workshop::new();
    // In shorter cells none of 64 requests may end on a machine that is busy with other tests.
    let line = format!("{TINY} --rounds 1 --cell 1 --output r.json --json");
    let output = shop.command(&line.split(' ').collect::<Vec<_>>()).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).unwrap();
    let result: Value = serde_json::from_str(&printed).unwrap();
    assert_eq!(schemas::validate(&printed), "diskwright.study.native-and-guest/1");
    assert_eq!(result["guest"]["accelerator"], "tcg");
    assert!(result["guest"]["machine"]["cpu_model"].as_str().unwrap().contains("QEMU"), "{}", result["guest"]);
    let cells = result["cells"].as_array().unwrap();
    for disk in ["null", "raw file", "VHD fixed", "VHDX dynamic"] {
        for side in ["native", "guest"] {
            let of = cells.iter().filter(|cell| cell["part"] == disk && cell["subject"] == side);
            let of: Vec<&Value> = of.collect();
            assert_eq!(of.len(), 6, "{disk}, {side}");
            for cell in of {
                assert!(cell["rounds"][0]["iops"].as_f64().unwrap() > 0.0, "{cell}");
                let more = |name: &str| cell["more"][name][0].as_f64();
                assert_eq!(more("server_cpu_ns_per_io").is_some_and(|ns| ns > 0.0), side == "guest", "{cell}");
                if side == "guest" {
                    // The guest's kernel merges sequential requests, and no others. Beyond a tenth
                    // more, only the requests in flight at the end reach the server without being
                    // counted by the guest.
                    let round = &cell["rounds"][0];
                    let counted = round["reads"].as_f64().unwrap() + round["writes"].as_f64().unwrap();
                    let in_flight = cell["in_flight"].as_f64().unwrap();
                    let is_sequential = cell["load"].as_str().unwrap().contains("sequential");
                    let least = if is_sequential { 0.05 } else { 0.9 };
                    for (name, least) in [("server_requests_per_io", least), ("server_bytes_per_byte", 0.9)] {
                        let ratio = more(name).unwrap();
                        assert!(ratio >= least && (ratio - 1.1) * counted <= in_flight, "{name}: {cell}");
                    }
                }
            }
        }
    }
    assert!(result["verdict"].as_str().unwrap().starts_with("The guest’s processor is emulated"), "{result}");
    assert_clean(&shop);
    let saved: Value = serde_json::from_slice(&fs::read(shop.path("r.json")).unwrap()).unwrap();
    assert_eq!(saved, without_summary(result.clone()));
    shop.ok("lab report r.json -o r.html");
    assert!(fs::read_to_string(shop.path("r.html")).unwrap().contains("The server’s work"));
    assert!(shop.ok("lab report r.json --as md").contains("VHDX dynamic"));
}

#[test]
fn a_signal_ends_the_guest_too() {
    if !can_start() {
        return;
    }
    let _turn = guest_machine::turn();
    let shop = Workshop::new();
    let line = format!("{TINY} --rounds 500 --cell 2 --output r.json");
    let mut command = shop.command(&line.split(' ').collect::<Vec<_>>());
    let mut child = Running::start(command.stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let mut told = Vec::new();
    while told.last().is_none_or(|line: &String| !line.contains(", guest")) {
        let line = lines.next().unwrap_or_else(|| panic!("it ended before it measured in the guest: {told:#?}"));
        told.push(line.unwrap());
    }
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_clean(&shop);
}

#[test]
fn a_missing_kernel_is_named_before_anything_is_made() {
    let shop = Workshop::new();
    fs::create_dir(shop.path("empty")).unwrap();
    let said = shop.fails(1, "lab study native-and-guest --kernel empty");
    assert!(said.contains("empty has no kernel for the guest") && said.contains("vmlinuz"), "{said}");
    fs::remove_dir(shop.path("empty")).unwrap();
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 0);
}
