//! `lab run` and `lab profiles`, as the user types them. What is measured here is said to be
//! measured, never how fast.

use crate::common::{Running, Workshop, flat, without_summary};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Read},
    process::{Command, Stdio},
};

const SHORT: &str = "--duration 200ms --warm-up 0";
const MIB: u64 = 1 << 20;

fn saved(shop: &Workshop, name: &str) -> Value {
    serde_json::from_slice(&fs::read(shop.path(name)).expect("a saved result")).expect("JSON")
}

fn ios(run: &Value) -> u64 {
    let threads = run["phases"][0]["threads"].as_array().expect("threads");
    threads
        .iter()
        .map(|thread| thread["reads"]["ios"].as_u64().unwrap() + thread["writes"]["ios"].as_u64().unwrap())
        .sum()
}

#[test]
fn the_generator_runs_against_nothing_and_the_saved_profile_repeats_it() {
    let shop = Workshop::new();
    let run =
        shop.json(&format!("lab run null: -b 8K --queue-depth 4 --threads 2 {SHORT} --output r.json --label host=a"));
    assert_eq!(run["schema"], "diskwright.lab.run/2");
    assert_eq!((&run["end"]["kind"], run["labels"][0][1].as_str()), (&"complete".into(), Some("a")));
    assert!(ios(&run) > 0);
    assert_eq!(saved(&shop, "r.json"), without_summary(run.clone()), "what is printed is what is saved");
    let again = shop.json("lab run null: --profile r.toml --no-save");
    assert_eq!(again["job"], run["job"]);
}

#[test]
fn a_count_is_exact() {
    let shop = Workshop::new();
    let run = shop.json("lab run null: --count 1000 --threads 3 --read-percent 50 --no-save");
    assert_eq!(ios(&run), 3000);
}

#[test]
fn the_verdict_comes_first_then_the_tables_then_how_to_repeat_it() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 16M");
    let text = shop.ok(&format!("lab run disk.vhdx --fill --read-percent 50 --per-thread {SHORT} --output r.json"));
    let words = flat(&text);
    assert!(words.starts_with("4K random 50 % read, 1 x 32 on disk.vhdx: ") && words.contains(" IOPS and "), "{text}");
    for part in ["reads", "writes", "p99", "CPU time per request", "vhdx dynamic, 16 MiB", "filled with 16 MiB"] {
        assert!(words.contains(part), "{part} is missing:\n{text}");
    }
    assert!(!words.contains("of the working set is allocated"), "it was filled:\n{text}");
    assert!(text.ends_with("saved to r.json\nrepeat with: diskwright lab run disk.vhdx --profile r.toml\n"), "{text}");
    assert_eq!(saved(&shop, "r.json")["targets"][0]["contents"]["allocated"], 1.0);
    // The disk is sound behind it.
    shop.ok("check disk.vhdx");
}

#[test]
fn a_sparse_target_is_told_in_the_first_line() {
    let shop = Workshop::new();
    File::create(shop.path("sparse.raw")).unwrap().set_len(16 * MIB).unwrap();
    shop.ok("create empty.vhdx --size 16M");
    for name in ["sparse.raw", "empty.vhdx"] {
        let text = shop.ok(&format!("lab run {name} {SHORT} --no-save"));
        assert!(text.starts_with(&format!("NOT STORAGE: {name}: only 0 % of the working set is allocated")), "{text}");
    }
    let text = shop.ok(&format!("lab run sparse.raw --read-percent 0 --contents zero {SHORT} --no-save"));
    assert!(text.contains("NOT STORAGE: zeros are written"), "{text}");
}

#[test]
fn data_are_overwritten_only_when_that_is_allowed() {
    let shop = Workshop::new();
    let precious: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8 + 1).collect();
    fs::write(shop.path("precious.raw"), &precious).unwrap();
    for options in ["--read-percent 50", "--read-percent 100 --fill", "--profile vhd-applications/oltp-db"] {
        let error = shop.fails(1, &format!("lab run precious.raw {options} {SHORT}"));
        assert!(error.contains("offset 0 is not zero") && error.contains("--destroy-data"), "{error}");
    }
    assert_eq!(fs::read(shop.path("precious.raw")).unwrap(), precious);
    shop.ok(&format!("lab run precious.raw {SHORT} --no-save"));
    assert_eq!(fs::read(shop.path("precious.raw")).unwrap(), precious, "reading changes nothing");
    shop.ok(&format!("lab run precious.raw --read-percent 0 --destroy-data {SHORT} --no-save"));
    assert_ne!(fs::read(shop.path("precious.raw")).unwrap(), precious);
    // In an image the guard looks at what the disk holds, not at the file.
    shop.ok("create disk.vhdx --size 16M");
    shop.ok("io disk.vhdx -c 'write -P 7 9M 4k'");
    let error = shop.fails(1, &format!("lab run disk.vhdx --read-percent 0 {SHORT}"));
    assert!(error.contains(&format!("offset {} is not zero", 9 * MIB)), "{error}");
    shop.ok(&format!("lab run disk.vhdx --read-percent 0 --working-set 8M {SHORT} --no-save"));
    shop.ok("io disk.vhdx -c 'read -P 7 9M 4k'");
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 2, "refused runs leave nothing behind");
}

#[test]
fn what_is_mounted_is_never_written() {
    let shop = Workshop::new();
    let image = shop.path("fs.img");
    File::create(&image).unwrap().set_len(32 * MIB).unwrap();
    let tool = |program: &str, words: &[&str]| {
        let output = Command::new(program).args(words).output().ok()?;
        output.status.success().then(|| String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let image = image.to_str().unwrap();
    if tool("mkfs.ext4", &["-q", "-F", image]).is_none() {
        println!("skipped: there is no mkfs.ext4");
        return;
    }
    let error = shop.fails(1, &format!("lab run fs.img --read-percent 50 {SHORT}"));
    assert!(error.contains("an ext2, ext3 or ext4 file system"), "{error}");
    let Some(device) = tool("losetup", &["--find", "--show", image]) else {
        println!("skipped: no loop device can be made here");
        return;
    };
    let folder = shop.path("mnt");
    fs::create_dir(&folder).unwrap();
    let folder = folder.to_str().unwrap();
    let mounted = tool("mount", &[&device, folder]).is_some();
    let by_file = shop.run(&format!("lab run fs.img --read-percent 50 --destroy-data {SHORT}"));
    let by_device = shop.run(&format!("lab run {device} --read-percent 50 --destroy-data {SHORT}"));
    if mounted {
        tool("umount", &[folder]).expect("it can be unmounted");
    }
    tool("losetup", &["--detach", &device]).expect("it can be detached");
    assert!(
        by_file.code == Some(1) && by_file.stderr.contains(&format!("{device} is a loop device on it")),
        "{by_file:?}"
    );
    if !mounted {
        println!("skipped: no file system can be mounted here");
        return;
    }
    assert!(by_device.code == Some(1) && by_device.stderr.contains("is mounted at"), "{by_device:?}");
}

#[test]
fn the_labs_own_file_is_made_filled_and_used_again() {
    let shop = Workshop::new();
    let line = format!("lab run own.dat --create-size 8M --read-percent 50 {SHORT} --no-save");
    let run = shop.json(&line);
    assert_eq!(run["targets"][0]["contents"]["filled_bytes"], 8 * MIB);
    let marked = rustix_has_mark(&shop);
    if !marked {
        println!("skipped: the temporary folder has no extended attributes");
        return;
    }
    let run = shop.json(&line);
    assert_eq!(run["targets"][0]["contents"]["filled_bytes"], 0);
}

fn rustix_has_mark(shop: &Workshop) -> bool {
    let mut value = [0_u8; 8];
    rustix::fs::getxattr(shop.path("own.dat"), "user.diskwright.lab", &mut value).is_ok()
}

#[test]
fn what_cannot_be_run_is_told_and_leaves_nothing_behind() {
    let shop = Workshop::new();
    File::create(shop.path("small.raw")).unwrap().set_len(MIB).unwrap();
    for (line, words) in [
        ("lab run nowhere.raw", vec!["nowhere.raw"]),
        ("lab run small.raw --working-set 1G", vec!["small.raw", "working set"]),
        ("lab run new.raw --create-size 1M --working-set 1G", vec!["working set"]),
        ("lab run small.raw --profile vmfleet-sql", vec!["working set"]),
        ("lab run null: --profile nonsense", vec!["nonsense", "vmfleet-sql"]),
        ("lab run null: --profile sqlio/nonsense", vec!["nonsense", "8k-random-write"]),
    ] {
        let error = shop.fails(1, line);
        assert!(words.iter().all(|word| error.contains(word)), "{line}: {error}");
    }
    for line in ["lab run", "lab run null: --read-percent 101", "lab run null: --count 1 --duration 1s"] {
        shop.fails(2, line);
    }
    assert_eq!(fs::read_dir(shop.path("")).unwrap().count(), 1);
}

#[test]
fn profiles_are_listed_printed_changed_and_run() {
    let shop = Workshop::new();
    let list = shop.ok("lab profiles");
    assert!(list.lines().any(|line| line.starts_with("vhd-applications") && line.contains("12")), "{list}");
    assert_eq!(shop.json("lab profiles")["profiles"].as_array().unwrap().len(), list.lines().count() - 1);
    assert!(shop.ok("lab profiles vmfleet-sql").starts_with("# VMFleet"));
    let one = shop.ok("lab profiles vhd-applications/oltp-db");
    fs::write(
        shop.path("mine.toml"),
        one.replace("\"30s\"", "\"0s\"").replace("\"60s\"", "\"100ms\"").replace("\"1m\"", "\"100ms\""),
    )
    .unwrap();
    let run = shop.json("lab run null: --profile mine.toml --no-save");
    assert_eq!(run["job"]["phase"][0]["load"][0]["read_percent"], 70.0);
    fs::write(shop.path("mine.toml"), one.replace("queue_depth", "queue_deph")).unwrap();
    let error = shop.fails(1, "lab run null: --profile mine.toml");
    assert!(error.contains("queue_deph") && error.contains("mine.toml"), "{error}");
}

#[test]
fn flushes_have_their_own_latencies() {
    let shop = Workshop::new();
    let words = format!("--create-size 16M --read-percent 0 --queue-depth 2 --flush-every 10 {SHORT} --output r.json");
    let text = shop.ok(&format!("lab run disk.vhdx {words}"));
    assert_eq!(text.matches("flushes").count(), 2, "a row of rates, a column of percentiles:\n{text}");
    let flushes = &saved(&shop, "r.json")["phases"][0]["threads"][0]["flushes"];
    let count = flushes["ios"].as_u64().unwrap();
    assert!(count > 0 && flushes["service"]["count"] == count, "{flushes}");
    let table = shop.ok("lab report r.json --as csv");
    assert_eq!(
        table.lines().filter(|line| line.contains(",flush,")).count(),
        2,
        "of the thread, and of the phase:\n{table}"
    );
    shop.ok("check disk.vhdx");
}

#[test]
fn a_signal_ends_a_run_and_what_was_measured_is_kept() {
    let shop = Workshop::new();
    let words = ["lab", "run", "null:", "--duration", "60s", "--warm-up", "0", "--output", "r.json"];
    let mut child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let measuring = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("measuring")));
    assert!(measuring.is_some(), "it ended before it measured");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(text.contains("partial"), "{text}");
    let run = saved(&shop, "r.json");
    assert_eq!(run["end"]["kind"], "stopped");
    assert!(ios(&run) > 0);
}

/// A run that is stopped in its warm-up has no figures, and an empty result would be compared with
/// others by mistake.
#[test]
fn a_run_that_was_stopped_in_the_warm_up_saves_nothing() {
    let shop = Workshop::new();
    let words = ["lab", "run", "null:", "--duration", "60s", "--warm-up", "60s", "--output", "r.json"];
    let mut child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let begun = lines.find(|line| line.as_ref().is_ok_and(|line| line.contains("warm")));
    assert!(begun.is_some(), "it ended before its warm-up");
    kill(Pid::from_raw(child.id() as i32), Signal::SIGINT).unwrap();
    let told: String = lines.map(Result::unwrap).collect();
    let mut text = String::new();
    child.stdout.take().unwrap().read_to_string(&mut text).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{text}");
    assert!(told.contains("stopped before anything was measured: no result is saved"), "{told}");
    assert!(text.is_empty() && !shop.path("r.json").exists() && !shop.path("r.toml").exists(), "{text}");
}

#[test]
fn a_result_replaces_a_result_and_nothing_else() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    shop.ok("create disk.vhd --size 8M --type fixed");
    fs::create_dir(shop.path("folder")).unwrap();
    let disks = ["disk.vhdx", "disk.vhd"].map(|name| fs::read(shop.path(name)).unwrap());
    // Before anything is measured, or these would take an hour each.
    for line in [
        "lab run null: -d 1h -o disk.vhdx",
        "lab run null: -d 1h -o disk.vhd",
        "lab run null: -d 1h -o folder",
        "lab run null: -d 1h -o nowhere/x.json",
        "lab run null: -d 1h -o x.toml",
        "lab study zero-payload --cell 3600 -o disk.vhdx",
        "lab selftest --cell 3600 -o disk.vhd",
        "diskspd -d3600 --save disk.vhdx null:",
    ] {
        // The name of the profile shows in the command line alone.
        let code = if line.ends_with("x.toml") { 2 } else { 1 };
        let error = shop.fails(code, line);
        assert!(
            error.contains("nothing was changed") || error.contains("write the result") || error.contains(".json"),
            "{line}: {error}"
        );
    }
    // A live comparison calls "could not compare" by 2.
    shop.fails(2, "lab compare --live null: null:1G -d 1h -o disk.vhdx");
    shop.ok(&format!("lab run null: {SHORT} -o x.json"));
    let error = shop.fails(1, "lab report x.json --as html -o disk.vhdx");
    assert!(error.contains("is not a report"), "{error}");
    let after = ["disk.vhdx", "disk.vhd"].map(|name| fs::read(shop.path(name)).unwrap());
    assert!(disks == after);
    shop.ok(&format!("lab run null: {SHORT} -o x.json"));
    let names: Vec<_> = fs::read_dir(shop.path(".")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert!(!names.iter().any(|name| name.to_string_lossy().ends_with(".saving")), "{names:?}");
}

#[test]
fn a_profile_that_somebody_wrote_stays() {
    let shop = Workshop::new();
    let mine = "# Mine.\n".to_owned() + &shop.ok("lab profiles hyper-v-oltp");
    fs::write(shop.path("mine.toml"), &mine).unwrap();
    for _ in 0..2 {
        let text = shop.ok(&format!("lab run null: --profile mine.toml {SHORT} -o mine.json"));
        assert!(text.contains("--profile mine.run.toml"), "{text}");
    }
    assert_eq!(fs::read_to_string(shop.path("mine.toml")).unwrap(), mine);
    shop.ok("lab run null: --profile mine.run.toml --no-save");
}

#[test]
fn what_the_user_allows_of_a_disk_holds_in_the_lab_too() {
    let shop = Workshop::new();
    shop.ok("create base.vhdx --size 64M");
    shop.ok("create child.vhdx --parent base.vhdx");
    let run = format!("lab run base.vhdx --destroy-data --read-percent 0 --no-save {SHORT}");
    let refused = shop.fails(1, &run);
    assert!(refused.contains("--allow-parent-write"), "{refused}");
    shop.ok(&format!("{run} --allow-parent-write"));
    // Zeros are stored by the one run and not by the other.
    let held_bytes = |name: &str| shop.json(&format!("info {name}"))["size_on_disk"].as_u64().expect("a size");
    shop.ok("create plain.vhdx --size 64M");
    shop.ok("create spared.vhdx --size 64M");
    let zeros = format!("--destroy-data --read-percent 0 --contents zero --no-save {SHORT}");
    shop.ok(&format!("lab run plain.vhdx {zeros}"));
    shop.ok(&format!("lab run spared.vhdx {zeros} --detect-zeroes"));
    assert!(held_bytes("plain.vhdx") > held_bytes("spared.vhdx") + 8 * MIB);
}
