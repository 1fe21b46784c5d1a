//! What commands print on a terminal of 80 columns: no line is longer, in tables, messages and
//! progress. The terminal is that of `script` (util-linux).

use crate::{common::Workshop, control::Place};
use nix::sys::signal::Signal;
use std::process::{Command, Stdio};

const COLUMNS: usize = 80;

/// What `diskwright LINE` prints on a terminal; `None` without `script`.
fn on_terminal(shop: &Workshop, line: &str) -> Option<String> {
    let typed = format!("stty cols {COLUMNS} rows 40; {} {line}", env!("CARGO_BIN_EXE_diskwright"));
    let mut command = Command::new("script");
    command.args(["-qefc", &typed, "/dev/null"]).current_dir(shop.path("")).stdin(Stdio::null());
    command.env_remove("NO_COLOR").env("TERM", "xterm-256color").env("DISKWRIGHT_RUN_DIR", shop.path("run"));
    match command.output() {
        Ok(output) => Some(String::from_utf8(output.stdout).expect("UTF-8")),
        Err(_) => {
            println!("skipped: a terminal of 80 columns: script is not installed");
            None
        }
    }
}

/// A line without colours and other escape sequences (`ESC [`, parameters, a letter).
fn plain(line: &str) -> String {
    let mut text = String::new();
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        if letter == '\x1b' {
            let _ = letters.by_ref().skip(1).find(char::is_ascii_alphabetic);
        } else if !letter.is_control() {
            text.push(letter);
        }
    }
    text
}

/// Runs each line, and returns those of their output that do not fit.
fn too_wide(shop: &Workshop, lines: &[&str]) -> Option<Vec<String>> {
    let mut wide = Vec::new();
    for line in lines {
        let printed = on_terminal(shop, line)?;
        assert!(!printed.is_empty(), "`diskwright {line}` has printed nothing");
        // A carriage return begins a line of progress again.
        let shown = printed.split(['\n', '\r']).map(plain).filter(|shown| shown.chars().count() > COLUMNS);
        // A command line and a path are copied as they stand: neither is broken.
        let may_be_broken = |shown: &String| !shown.starts_with("repeat with: ") && shown.trim().contains(' ');
        wide.extend(shown.filter(may_be_broken).map(|shown| format!("{line}: {shown}")));
    }
    Some(wide)
}

#[test]
fn a_line_of_a_disk_fits_a_terminal() {
    let shop = Workshop::new();
    for folder in ["base", "kids"] {
        std::fs::create_dir(shop.path(folder)).unwrap();
    }
    let lines = [
        "create golden-image-of-2026.vhdx --size 64T --block-size 256M",
        "io golden-image-of-2026.vhdx -c 'write -P 7 1M 1M' -c 'write 32T 64k' -c flush",
        "create accounting-department.vhdx --parent golden-image-of-2026.vhdx",
        "io accounting-department.vhdx -c 'write -P 8 1280k 64k' -c 'discard 2M 300M' -c 'read -v 1280k 64'",
        "info accounting-department.vhdx",
        "info accounting-department.vhdx --chain",
        "info accounting-department.vhdx --azure --windows --vmware",
        "map accounting-department.vhdx",
        "map accounting-department.vhdx --draw",
        "check accounting-department.vhdx --chain",
        "compare accounting-department.vhdx golden-image-of-2026.vhdx",
        "diff accounting-department.vhdx",
        "snapshot accounting-department.vhdx --name before-the-update",
        "snapshot list .",
        "track start accounting-department.vhdx full-backup-of-monday",
        "track list accounting-department.vhdx",
        "track show accounting-department.vhdx full-backup-of-monday",
        "merge accounting-department.vhdx --into golden-image-of-2026.vhdx --dry-run",
        "reconnect accounting-department.vhdx --search . --dry-run",
        "clone accounting-department_before-the-update.avhdx web-1.vhdx web-2.vhdx --dry-run",
        "create small.vhd --size 64M",
        "create kids/child-of-small.vhd --parent small.vhd",
        "create packed.vhdx --size 64M",
        "io packed.vhdx -c 'write 0 8M' -c 'discard 2M 4M'",
        "compact packed.vhdx --estimate",
        "resize packed.vhdx +10G --dry-run",
        "move packed.vhdx base/ --dry-run",
        "convert packed.vhdx appliance-of-the-month.ova --verify",
        "info appliance-of-the-month.ova --verify",
        "partitions packed.vhdx",
        "rescue packed.vhdx saved-from-packed.vhdx",
        "lab profiles",
        "info --help",
        "info -h",
    ];
    let Some(mut wide) = too_wide(&shop, &lines) else { return };
    // The parent is another one than the child was made from, by its time or altogether.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    std::fs::File::open(shop.path("small.vhd")).unwrap().set_modified(later).unwrap();
    let allowed = "--allow-parent-dir .";
    wide.extend(too_wide(&shop, &[&format!("info kids/child-of-small.vhd --chain {allowed}")]).unwrap());
    wide.extend(too_wide(&shop, &[&format!("check kids/child-of-small.vhd --chain {allowed}")]).unwrap());
    std::fs::remove_file(shop.path("golden-image-of-2026.vhdx")).unwrap();
    let told = too_wide(
        &shop,
        &[
            "info accounting-department.vhdx",
            "info accounting-department.vhdx --chain",
            "check accounting-department.vhdx",
            "map accounting-department.vhdx",
            "info kids/child-of-small.vhd",
            "convert kids/child-of-small.vhd copy.qcow2",
            "create new.xyz --size 1G",
            "create small.vhd --size 1G",
            "compare small.vhd nowhere-to-be-found.vhdx",
            "lab run small.vhd --duration 50ms --warm-up 0",
        ],
    );
    wide.extend(told.unwrap());
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}

#[test]
fn a_line_of_the_lab_fits_a_terminal() {
    let shop = Workshop::new();
    let lines = [
        "lab run null: --warm-up 0 --duration 200ms --threads 2 --output run-of-the-day.json",
        "lab sweep null: --vary queue-depth=1..4 --rounds 3 --warm-up 0 --duration 30ms --output sweep.json",
        "lab compare --live null: null:1G --rounds 3 --warm-up 0 --duration 30ms --output compared.json",
        "lab report run-of-the-day.json sweep.json compared.json -o report-of-the-day.html",
    ];
    let Some(wide) = too_wide(&shop, &lines) else { return };
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}

#[test]
fn a_line_of_a_server_fits_a_terminal() {
    let place = Place::with(&["accounting-department.vhdx"]);
    let serve = "accounting-department.vhdx --nbd ./socket-of-the-accounting-department --limit iops=5000,bytes=20M";
    let Some(server) = place.serve(serve) else { return };
    let uri = server.uri("accounting-department.vhdx");
    place.shop.ok(&format!("io '{uri}' -c 'write -P 9 5M 64k' -c 'read 5M 64k' -c flush"));
    let lines = ["serve-ctl list", "serve-ctl accounting-department.vhdx statistics", &format!("info '{uri}'")];
    let Some(mut wide) = too_wide(&place.shop, &lines) else { return };
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    // A server ends by a signal; its own lines are those before.
    let line = "serve accounting-department.vhdx --nbd ./s --metrics 127.0.0.1:0 & sleep 2; kill $!; wait";
    wide.extend(too_wide(&place.shop, &[line]).unwrap());
    assert!(wide.is_empty(), "{}", wide.join("\n"));
}
