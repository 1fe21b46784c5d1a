//! The lab on exports and on attached disks: what is measured there, what is said of it, what is
//! refused. What is measured here is said to be measured, never how fast.

use crate::attaching::{Place, run_ok};
use crate::certificates;
use crate::common::{Running, Workshop, flat};
use crate::serving::{PATIENCE, Serving, program, wait_until};
use nix::sys::signal::Signal;
use serde_json::Value;
use std::{
    fs,
    io::Read,
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

const SHORT: &str = "--duration 200ms --warm-up 0";
const MIB: u64 = 1 << 20;

fn ios(run: &Value, target: u64) -> u64 {
    let threads = run["phases"][0]["threads"].as_array().expect("threads");
    let of_target = threads.iter().filter(|thread| thread["target"] == target);
    of_target.map(|thread| thread["reads"]["ios"].as_u64().unwrap() + thread["writes"]["ios"].as_u64().unwrap()).sum()
}

fn has_warning(run: &Value, kind: &str) -> bool {
    run["warnings"].as_array().expect("warnings").iter().any(|warning| warning["kind"] == kind)
}

/// A disk with data from end to end.
fn full(shop: &Workshop, name: &str) {
    shop.ok(&format!("create {name} --size 16M"));
    shop.ok(&format!("lab run {name} --fill --read-percent 0 --count 1 --no-save"));
}

/// Serves disks on `s.sock`.
fn serve(shop: &Workshop, words: &str) -> Option<Serving> {
    let serving = Serving::start(shop, &format!("serve {words} --nbd {}", shop.path("s.sock").display()))?;
    Some(serving)
}

#[test]
fn an_export_is_measured_and_the_record_says_what_it_is_and_whose_cache() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let Some(server) = serve(&shop, "disk.vhdx --description sample") else { return };
    let uri = server.uri("disk.vhdx");
    let run = shop.json(&format!("lab run {uri} --threads 3 --queue-depth 4 {SHORT} --output r.json"));
    assert_eq!(run["end"]["kind"], "complete");
    assert!(ios(&run, 0) > 0);
    let target = &run["targets"][0];
    assert_eq!((&target["kind"], &target["size_bytes"]), (&"nbd export".into(), &(16 * MIB).into()));
    let behind = &target["behind"];
    assert_eq!(
        (&behind["kind"], &behind["export"], &behind["description"], &behind["tells_zeros"]),
        (&"export".into(), &"disk.vhdx".into(), &"sample".into(), &true.into())
    );
    assert_eq!(behind["connections_max"], 4);
    assert_eq!((&target["contents"]["allocated"], &target["contents"]["zero"]), (&1.0.into(), &0.0.into()));
    assert!(has_warning(&run, "cache_of_server") && !has_warning(&run, "direct_not_honoured"), "{}", run["warnings"]);
    // What this machine's memory holds says nothing of a server's.
    let cached = shop.json(&format!("lab run {uri} --cache page {SHORT} --no-save"));
    assert!(!has_warning(&cached, "memory") && !has_warning(&cached, "cache_of_server"), "{}", cached["warnings"]);
    let text = flat(&shop.ok(&format!("lab run {uri} {SHORT} --no-save")));
    for part in ["nbd export, 16 MiB, \"disk.vhdx\" of the server at", "cache mode of its server", "cannot be enforced"]
    {
        assert!(text.contains(part), "{part} is missing:\n{text}");
    }
    let page = shop.ok("lab report r.json -o -");
    assert!(
        page.contains("cache mode of its server") && page.contains("of the server at"),
        "the page says nothing of the server"
    );
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
}

#[test]
fn what_an_export_holds_is_looked_at_and_guarded_as_if_it_were_a_disk() {
    let shop = Workshop::new();
    shop.ok("create empty.vhdx --size 16M");
    shop.ok("create full.vhdx --size 16M");
    shop.ok("io full.vhdx -c 'write -P 7 9M 4k'");
    let Some(server) = serve(&shop, "empty.vhdx full.vhdx") else { return };
    let (empty, full) = (server.uri("empty.vhdx"), server.uri("full.vhdx"));
    let text = flat(&shop.ok(&format!("lab run {empty} {SHORT} --no-save")));
    assert!(text.starts_with("NOT STORAGE: ") && text.contains("only 0 % of the working set is allocated"), "{text}");
    let error = shop.fails(1, &format!("lab run {full} --read-percent 50 {SHORT}"));
    assert!(error.contains(&format!("offset {} is not zero", 9 * MIB)) && error.contains("--destroy-data"), "{error}");
    shop.ok(&format!("lab run {full} --read-percent 50 --working-set 8M {SHORT} --no-save"));
    let run = shop.json(&format!("lab run {full} --read-percent 50 --destroy-data --fill {SHORT} --no-save"));
    assert_eq!(run["targets"][0]["contents"]["filled_bytes"], 16 * MIB);
    let error = shop.fails(1, &format!("lab run {full} --create-size 16M {SHORT}"));
    assert!(error.contains("cannot be created"), "{error}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("check full.vhdx");
}

#[test]
fn an_ephemeral_or_read_only_export_says_so() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let before = fs::read(shop.path("disk.vhdx")).unwrap();
    // What lies in the layers below is not destroyed by writing above it.
    let Some(server) = serve(&shop, "disk.vhdx --ephemeral") else { return };
    let run = shop.json(&format!("lab run {} --read-percent 50 {SHORT} --no-save", server.uri("disk.vhdx")));
    assert!(ios(&run, 0) > 0);
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    let Some(server) = serve(&shop, "disk.vhdx --read-only") else { return };
    let uri = server.uri("disk.vhdx");
    let error = shop.fails(1, &format!("lab run {uri} --read-percent 50 --destroy-data {SHORT}"));
    assert!(error.contains("it is read-only, but write access is needed"), "{error}");
    let run = shop.json(&format!("lab run {uri} {SHORT} --no-save"));
    assert_eq!(run["targets"][0]["behind"]["read_only"], true);
    drop(server);
    assert!(fs::read(shop.path("disk.vhdx")).unwrap() == before, "the disk was written");
}

#[test]
fn a_server_that_takes_one_client_is_connected_to_once() {
    let shop = Workshop::new();
    fs::File::create(shop.path("disk.raw")).unwrap().set_len(8 * MIB).unwrap();
    let socket = shop.path("q.sock");
    // It ends when its first client goes.
    let args = ["--fork", "-f", "raw", "-k", socket.to_str().unwrap(), "disk.raw"];
    let Some(output) = program(&shop, "qemu-nbd", &args) else { return };
    assert!(output.status.success(), "{output:?}");
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let run = shop.json(&format!("lab run '{uri}' --read-percent 50 --fill --threads 2 {SHORT} --no-save"));
    assert!(ios(&run, 0) > 0);
    assert_eq!(run["targets"][0]["behind"]["connections_max"], 1);
}

#[test]
fn rates_and_several_targets_work_together_with_files_and_nothing() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    shop.ok("create file.raw --size 16M --preallocate");
    let Some(server) = serve(&shop, "disk.vhdx") else { return };
    let uri = server.uri("disk.vhdx");
    let line = format!("{uri} file.raw null:16M --across-targets --threads 2 --queue-depth 3 {SHORT} --no-save");
    let run = shop.json(&format!("lab run {line}"));
    assert!((0..3).all(|target| ios(&run, target) > 0), "{run:#}");
    assert!(has_warning(&run, "polls"), "{}", run["warnings"]);
    // Two threads at 100 a second, for a second: the schedule decides, not the target.
    let run = shop.json(&format!("lab run {uri} --rate 100 --threads 2 --duration 1s --warm-up 0 --no-save"));
    assert!((150..=202).contains(&ios(&run, 0)), "{} requests", ios(&run, 0));
    assert!(has_warning(&run, "polls"));
    // On files alone nothing polls.
    let run = shop.json(&format!("lab run file.raw null:16M --across-targets --rate 50 {SHORT} --no-save"));
    assert!(ios(&run, 0) > 0 && ios(&run, 1) > 0 && !has_warning(&run, "polls"), "{run:#}");
}

#[test]
fn every_command_that_measures_takes_an_export() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let Some(server) = serve(&shop, "disk.vhdx") else { return };
    let uri = server.uri("disk.vhdx");
    let sweep = shop.json(&format!(
        "lab sweep {uri} --vary queue-depth=1,2 --rounds 1 --warm-up 0 --duration 50ms --output s.json"
    ));
    assert_eq!(sweep["cells"].as_array().unwrap().len(), 2);
    let comparison = shop.json(&format!("lab compare --live {uri} null:16M --rounds 2 --warm-up 0 --duration 50ms"));
    assert_eq!(comparison["sides"][0]["circumstances"]["cache"], "the server's", "{comparison:#}");
    let report = shop.ok(&format!("diskspd -b4K -r -d1 -W0 -o2 -t2 {uri}"));
    assert!(report.contains("Total IO") && report.contains("disk.vhdx"), "{report}");
}

#[test]
fn a_server_that_dies_fails_the_run_which_keeps_what_it_measured() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let Some(server) = serve(&shop, "disk.vhdx") else { return };
    let uri = server.uri("disk.vhdx");
    let words =
        ["lab", "run", &uri, "--threads", "2", "--duration", "60s", "--warm-up", "0", "--output", "r.json", "--json"];
    let mut command = shop.command(&words);
    let command = command.args(["--interval", "50ms"]).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = Running::start(command);
    // When it has begun, shown by its connections.
    let of_lab = child.id();
    wait_until("it measures", || threads_named(of_lab, "load-") >= 2);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.stop(Signal::SIGKILL), None);
    let start = Instant::now();
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(1), "{err}");
    assert!(start.elapsed() < PATIENCE, "it went on without a server");
    let run: Value = serde_json::from_slice(&fs::read(shop.path("r.json")).unwrap()).unwrap();
    assert_eq!(run["end"]["kind"], "failed", "{err}");
    let first = run["end"]["first"].as_str().unwrap();
    assert!(first.contains("the read of 4096 bytes at offset ") && first.contains(&uri), "{first}");
    assert!(ios(&run, 0) > 0, "what was measured before is kept");
}

#[test]
fn a_run_by_the_clock_goes_on_when_its_server_comes_back() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let Some(server) = serve(&shop, "disk.vhdx") else { return };
    let uri = format!("{}&reconnect=60", server.uri("disk.vhdx"));
    let words = ["lab", "run", &uri, "--rate", "100", "--duration", "4s", "--warm-up", "0", "--no-save", "--json"];
    let child = Running::start(shop.command(&words).stdout(Stdio::piped()).stderr(Stdio::piped()));
    let of_lab = child.id();
    wait_until("it measures", || threads_named(of_lab, "load-") >= 1);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(server.stop(Signal::SIGKILL), None);
    let server = serve(&shop, "disk.vhdx").expect("it served before");
    let output = child.output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let run: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(run["end"]["kind"], "complete");
    assert!(ios(&run, 0) > 0);
    assert!(server.log().contains("serving"), "it did not come back: {}", server.log());
}

#[test]
fn an_export_behind_tls_is_measured_like_any_other() {
    let shop = Workshop::new();
    full(&shop, "disk.vhdx");
    let folder = |name: &str| {
        let dir = shop.path(name);
        fs::create_dir(&dir).unwrap();
        certificates::write(&dir);
        dir.display().to_string()
    };
    let (pki, strangers) = (folder("pki"), folder("strangers"));
    let Some(server) = Serving::start(&shop, &format!("serve disk.vhdx --nbd 0 --tls-certificates {pki}")) else {
        return;
    };
    let uri = server.uri("disk.vhdx");
    assert!(uri.starts_with("nbds://"), "{uri}");
    let secure = format!("'{uri}?tls-certificates={pki}'");
    let run = shop.json(&format!(
        "lab run {secure} --destroy-data --threads 2 --read-percent 50 --queue-depth 8 --block-size 64K {SHORT} --no-save"
    ));
    assert_eq!((&run["end"]["kind"], &run["targets"][0]["kind"]), (&"complete".into(), &"nbd export".into()));
    assert!(ios(&run, 0) > 0);
    assert_eq!(run["targets"][0]["behind"]["kind"], "export");
    // Without the right certificate nothing is begun, and it is said why.
    let refused = shop.fails(1, &format!("lab run '{uri}?tls-certificates={strangers}' {SHORT} --no-save"));
    assert!(refused.contains("ertificate"), "{refused}");
    let clear = shop.fails(1, &format!("lab run '{}' {SHORT} --no-save", uri.replace("nbds:", "nbd:")));
    assert!(clear.contains("TLS"), "{clear}");
    assert_eq!(server.stop(Signal::SIGTERM), Some(0));
    shop.ok("check disk.vhdx");
}

/// Threads of a process whose name begins like this.
fn threads_named(pid: u32, name: &str) -> usize {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    tasks.filter(|task| fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.starts_with(name))).count()
}

#[test]
fn an_attached_disk_is_told_by_its_image_and_guarded_with_its_partitions() {
    let Some(place) = Place::as_root(&["mkfs.ext4", "sfdisk"]) else { return };
    place.ok("create disk.vhdx --size 64M");
    let said = place.ok("attach disk.vhdx --ephemeral");
    let device = said.trim();
    let run = place.json(&format!("lab run {device} --read-percent 50 {SHORT} --no-save"));
    let behind = &run["targets"][0]["behind"];
    assert_eq!(
        (&behind["kind"], Path::new(behind["image"].as_str().unwrap()), &behind["ephemeral"]),
        (&"attached".into(), &*place.path("disk.vhdx"), &true.into())
    );
    let text = flat(&place.ok(&format!("lab run {device} {SHORT} --no-save")));
    assert!(text.contains("disk.vhdx, attached by diskwright, writes are dropped"), "{text}");
    place.ok("detach disk.vhdx");

    let device = place.attach("disk.vhdx");
    place.user_sh(&format!("printf ',16M\\n' | sfdisk -q --label gpt {device}"));
    // The kernel looks for partitions when the device is made.
    place.ok("detach disk.vhdx");
    let device = place.attach("disk.vhdx");
    let part = format!("{device}p1");
    if !Path::new(&part).exists() {
        println!("skipped: partitions of loop devices have no nodes here");
        return;
    }
    run_ok("mkfs.ext4", &["-q", &part]);
    let run = place.json(&format!("lab run {part} {SHORT} --no-save"));
    assert_eq!(run["targets"][0]["behind"]["kind"], "attached");
    let dir = place.dir("mnt");
    run_ok("mount", &[&part, &dir]);
    let by_device = place.fails(&format!("lab run {device} --read-percent 50 --destroy-data {SHORT}"));
    assert!(by_device.contains(&format!("is mounted at {dir}")), "{by_device}");
    run_ok("umount", &[&dir]);
    let by_image = place.fails(&format!("lab run disk.vhdx --read-percent 50 --destroy-data {SHORT}"));
    assert!(by_image.contains("it is attached as") && by_image.contains("diskwright detach"), "{by_image}");
    let error = place.fails(&format!("lab run {device} --read-percent 50 {SHORT}"));
    assert!(error.contains("GPT partition table"), "{error}");
    place.ok("detach disk.vhdx");
}
