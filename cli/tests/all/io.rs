//! `io`, as the user types it.

use crate::common::{Running, Workshop};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
};

fn disk() -> Workshop {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 64M");
    shop
}

#[test]
fn says_what_qemu_io_says() {
    let shop = disk();
    let said = shop.ok(
        "io disk.vhdx -c 'write -P 0xaa 1M 64k' -c 'write -z -f 1M 4k' -c 'discard 32M 2M' -c flush -c 'read 1M 64k'",
    );
    insta::assert_snapshot!(said, @r"
    wrote 65536/65536 bytes at offset 1048576
    wrote 4096/4096 bytes at offset 1048576
    discard 2097152/2097152 bytes at offset 33554432
    flush
    read 65536/65536 bytes at offset 1048576
    ");
    shop.ok("io disk.vhdx -c 'read -P 0 0 1028k' -c 'read -P 0xaa 1028k 60k' -c 'read -P 0 1088k 1M'");
}

#[test]
fn a_wrong_pattern_is_located_and_the_rest_goes_on() {
    let shop = disk();
    shop.ok("io disk.vhdx -c 'write -P 1 0 8k'");
    let ended = shop.run("io disk.vhdx -c 'read -P 1 4k 8k' -c 'read -P 1 0 4k'");
    assert_eq!(ended.code, Some(1));
    assert_eq!(ended.stdout, "read 4096/4096 bytes at offset 0\n");
    assert_eq!(
        ended.stderr,
        "diskwright: read -P 1 4k 8k: the pattern does not match: the first byte that differs is 0x00 at offset 8192\n"
    );
    let ended = shop.run("io disk.vhdx --json -c 'read -P 1 4k 8k' -c 'read -P 1 0 4k'");
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((ended.code, &json["results"][0]["first_difference"]), (Some(1), &8192.into()));
    assert_eq!(json["results"][1]["ok"], true);
}

#[test]
fn bytes_are_shown() {
    let shop = disk();
    shop.ok("io disk.vhdx -c 'write -P 0x41 0 512'");
    let said = shop.ok("io disk.vhdx -c 'read -v 0 1k'");
    let mut lines = said.lines();
    assert_eq!(lines.next(), Some("00000000:  41 41 41 41 41 41 41 41 41 41 41 41 41 41 41 41  AAAAAAAAAAAAAAAA"));
    assert_eq!(said.lines().count(), 65);
}

#[test]
fn ranges_that_cannot_be_are_refused_whole() {
    let shop = disk();
    for (command, word) in [
        ("write 1 512", "multiple of the disk's sector of 512 bytes"),
        ("write 0 100", "multiple of the disk's sector of 512 bytes"),
        ("write 63M 2M", "beyond the disk's end at 67108864"),
        ("read 64M 512", "beyond the disk's end"),
        ("discard 0 65M", "beyond the disk's end"),
    ] {
        let error = shop.fails(1, &format!("io disk.vhdx -c '{command}'"));
        assert!(error.contains(word), "{command}: {error}");
    }
    shop.ok("io disk.vhdx -c 'read -P 0 0 64M'");
    let error = shop.fails(2, "io disk.vhdx -c 'write 0 4k' -c 'scribble 0 4k'");
    assert!(error.contains("scribble"), "{error}");
    shop.ok("io disk.vhdx -c 'read -P 0 0 4k'");
}

#[test]
fn json_tells_what_was_asked_also_of_what_failed() {
    let shop = disk();
    let lines = "read 63M 2M\nwrite 1 512\nwrite 8k 4k\nflush\nnonsense\n";
    let ended = shop.run_with_stdin("io disk.vhdx --json", lines);
    let json: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let results = json["results"].as_array().unwrap();
    let told: Vec<_> =
        results.iter().map(|done| (done["ok"] == true, done["offset"].as_u64(), done["length"].as_u64())).collect();
    let (some, none) = (|bytes: u64| Some(bytes), None);
    assert_eq!(
        told,
        [
            (false, some(63 << 20), some(2 << 20)),
            (false, some(1), some(512)),
            (true, some(8192), some(4096)),
            (true, none, none),
            (false, none, none),
        ]
    );
}

#[test]
fn read_only_means_it() {
    let shop = disk();
    let before = std::fs::read(shop.path("disk.vhdx")).unwrap();
    shop.fails(1, "io disk.vhdx --read-only -c 'write 0 4k'");
    shop.ok("io disk.vhdx -c 'read 0 4k'");
    assert_eq!(std::fs::read(shop.path("disk.vhdx")).unwrap(), before);
}

#[test]
fn commands_come_from_standard_input() {
    let shop = disk();
    let ended = shop
        .run_with_stdin("io disk.vhdx", "# a remark\nwrite -P 7 0 4k\n\nnonsense\nread -P 7 0 4k\nquit\nread 0 4k\n");
    assert_eq!(ended.code, Some(1));
    assert_eq!(ended.stdout, "wrote 4096/4096 bytes at offset 0\nread 4096/4096 bytes at offset 0\n");
    assert!(ended.stderr.contains("nonsense"), "{}", ended.stderr);
}

#[test]
fn every_engine_and_cache_gives_the_same_bytes() {
    let shop = disk();
    for (pattern, options) in
        [(1, "--io-engine pread"), (2, "--io-engine auto --cache direct"), (3, "--io-engine pread --cache direct")]
    {
        shop.ok(&format!("io disk.vhdx {options} -c 'write -P {pattern} 4M 1M' -c flush -c 'read -P {pattern} 4M 1M'"));
        shop.ok(&format!("io disk.vhdx -c 'read -P {pattern} 4M 1M'"));
    }
}

#[test]
fn a_signal_ends_it_with_130_and_what_was_written_stays() {
    let shop = disk();
    let mut child = Running::start(shop.command(&["io", "disk.vhdx"]).stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    writeln!(stdin, "write -P 9 0 4k").unwrap();
    let mut line = String::new();
    stdout.read_line(&mut line).unwrap();
    assert_eq!(line, "wrote 4096/4096 bytes at offset 0\n");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    drop(stdin);
    shop.ok("io disk.vhdx -c 'read -P 9 0 4k'");
    shop.ok("check disk.vhdx");
}

#[test]
fn two_writers_exclude_each_other() {
    let shop = disk();
    let mut child = Running::start(shop.command(&["io", "disk.vhdx"]).stdin(Stdio::piped()).stdout(Stdio::piped()));
    let mut stdin = child.stdin.take().unwrap();
    let mut stdout = BufReader::new(child.stdout.take().unwrap());
    writeln!(stdin, "write 0 4k").unwrap();
    stdout.read_line(&mut String::new()).unwrap();
    let refused = shop.fails(1, "io disk.vhdx -c 'write 0 4k'");
    assert!(refused.contains("disk.vhdx") && refused.contains("in use"), "{refused}");
    drop(stdin);
    assert_eq!(child.wait().unwrap().code(), Some(0));
    shop.ok("io disk.vhdx -c 'write 0 4k'");
}
