//! `lab study access-paths`, as the user types it, in moments: what it leaves, what it leaves out,
//! what its result becomes.

use crate::{
    common::{Running, Workshop, flat, schemas, without_summary},
    lab_fleet::{agent, shop},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use std::{
    fs,
    io::{BufRead, BufReader},
    net::TcpListener,
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
    assert_eq!(schemas::validate(&result.to_string()), "diskwright.study.access-paths/4");
    let ways = result["ways"].as_array().unwrap();
    assert_eq!(ways.len(), 21);
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

/// The first of three free ports.
fn three_ports() -> u16 {
    let is_free = |port: u16| TcpListener::bind(("127.0.0.1", port)).is_ok();
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if port < u16::MAX - 2 && (port..port + 3).all(is_free) {
            return port;
        }
    }
}

/// The options of an agent for a study with this server.
fn targets(shop: &Workshop, server: &str) -> String {
    let line = shop.ok(&format!("lab study access-paths --agent-server {server} --agent-command"));
    let options = line.trim_end().strip_prefix("diskwright lab agent --listen 0.0.0.0:7407 ");
    options.unwrap_or_else(|| panic!("{line}")).replace('\'', "")
}

#[test]
fn agents_are_the_clients_on_a_scale_of_their_own() {
    let shop = shop();
    let server = format!("127.0.0.1:{}", three_ports());
    let options = targets(&shop, &server);
    let agents: Vec<(Running, String)> = (0..3).map(|_| agent(&shop, &options)).collect();
    let named: Vec<String> =
        agents.iter().zip(["one", "two", "three"]).map(|((_, at), name)| format!("--agent {name}={at}")).collect();
    let named = format!("--agent-server {server} {}", named.join(" "));
    let line =
        format!("{ON_HOST} --only agent-nbd --only agent-nvme {named} --rounds 1 --cell 0.4 --output r.json --json");
    let output = command(&shop, &line).output().expect("it starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert_clean(&shop);
    let result: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(schemas::validate(&result.to_string()), "diskwright.study.access-paths/4");
    let ways = result["ways"].as_array().unwrap();
    let measured: Vec<&str> =
        ways.iter().filter(|way| way["skipped"].is_null()).map(|way| way["way"].as_str().unwrap()).collect();
    assert_eq!(measured, ["agent_nbd", "agent_nvme"]);
    let of_agents = result["agents"]["agents"].as_array().unwrap();
    let clients: Vec<(&str, u64)> =
        of_agents.iter().map(|agent| (agent["name"].as_str().unwrap(), agent["clients"].as_u64().unwrap())).collect();
    assert_eq!(clients, [("one", 7), ("two", 7), ("three", 6)]);
    let cells = result["cells"].as_array().unwrap();
    let named_so: Vec<(&str, &str, u64)> = cells
        .iter()
        .map(|cell| {
            let text = |name: &str| cell[name].as_str().unwrap();
            (text("part"), text("subject"), cell["in_flight"].as_u64().unwrap())
        })
        .collect();
    let all = [("light, agents", 40), ("medium, agents", 80), ("heavy, agents", 120)];
    let all = all.map(|(part, depth)| ["agents: NBD", "agents: NVMe/TCP"].map(|way| (part, way, depth))).concat();
    assert_eq!(named_so, all);
    for cell in cells {
        let round = &cell["rounds"][0];
        assert!(round["iops"].as_f64().unwrap() > 0.0 && round["cpu_ns_per_io"].as_f64().unwrap() > 0.0, "{cell}");
        assert_eq!(round["queue_depth"], cell["in_flight"], "all clients of all agents: {cell}");
        assert!(cell["more"]["server_cpu_ns_per_io"][0].as_f64().unwrap() > 0.0, "{cell}");
    }
    let verdict = result["verdict"].as_str().unwrap();
    assert!(verdict.starts_with("Of the agents, relative to 100 for NBD, at heavy load: NVMe/TCP "), "{verdict}");
    let text = flat(&shop.ok("lab report r.json"));
    assert!(text.contains("20 clients in 3 agents on 1 machine, 6 or 7 in each"), "{text}");
    shop.ok("lab report r.json -o r.html");
    let page = fs::read_to_string(shop.path("r.html")).unwrap();
    assert!(page.contains("Agents, relative to NBD of the agents"), "the page has no scale of the agents");
}

#[test]
fn an_agent_that_is_killed_ends_the_study_and_the_rounds_before_are_saved() {
    let shop = shop();
    let server = format!("127.0.0.1:{}", three_ports());
    let options = targets(&shop, &server);
    let (_one, first) = agent(&shop, &options);
    let (mut two, second) = agent(&shop, &options);
    let line = format!(
        "{ON_HOST} --only agent-nbd --agent one={first} --agent two={second} --agent-server {server} --rounds 500 \
         --cell 0.2 --output r.json"
    );
    let mut child = Running::start(command(&shop, &line).stdout(Stdio::null()).stderr(Stdio::piped()));
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
    // Lines come every few seconds.
    let round = |line: &str| line.split_once("round ")?.1.split(' ').next()?.parse::<usize>().ok();
    assert!(lines.any(|line| round(&line).is_some_and(|round| round >= 3)), "it ended before its third round");
    two.kill().unwrap();
    let said = lines.collect::<Vec<_>>().join(" ");
    assert_eq!(child.wait().unwrap().code(), Some(1), "{said}");
    assert!(said.contains("two"), "{said}");
    assert_clean(&shop);
    let result: Value = serde_json::from_slice(&fs::read(shop.path("r.json")).unwrap()).unwrap();
    let first = result["end"]["first"].as_str().unwrap();
    assert!(result["end"]["kind"] == "failed" && first.contains("two"), "{first}");
    let rounds = result["cells"][0]["rounds"].as_array().unwrap().len();
    assert!((2..500).contains(&rounds), "{rounds} rounds");
    assert!(result["verdict"].as_str().unwrap().starts_with(&format!("Partial, {rounds} of 500 rounds")), "{result}");
    // Before the disk is made, an agent that is not there is an error.
    let again = shop.fails(1, &line.replace("--output r.json", "--output s.json"));
    assert!(again.contains("two") && !shop.path("s.json").exists(), "{again}");
}

#[test]
fn ways_that_the_agents_do_not_allow_are_told_by_name() {
    let shop = shop();
    let without = shop.fails(1, &format!("{ON_HOST} --only agent-nbd"));
    assert!(without.contains("agent-nbd needs agents, and none is named; name them (--agent)"), "{without}");
    let port = three_ports();
    let nbd = format!("agent-nbd=nbd://127.0.0.1:{port}/?connections=20");
    let (_one, first) = agent(&shop, &format!("{nbd} --read-only"));
    let line = format!("{ON_HOST} --agent one={first} --agent-server 127.0.0.1:{port}");
    let refused = shop.fails(1, &format!("{line} --only agent-nvme,agent-nbd"));
    let missing =
        format!("the agent one does not allow it: it was started without agent-nvme=nvme://127.0.0.1:{}", port + 1);
    assert!(refused.contains(&missing), "{refused}");
    assert!(refused.contains("its target agent-nbd may only be read"), "{refused}");
    let unused = shop.fails(1, &format!("{line} --only nbd"));
    assert!(unused.contains("none of the ways that are asked for needs them"), "{unused}");
    let taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let (_two, second) = agent(&shop, &format!("{nbd} --destroy-data"));
    let busy = shop.fails(1, &format!("{} --only agent-nbd", line.replace(&first, &second)));
    assert!(busy.contains("cannot listen on 127.0.0.1") && busy.contains("--agent-server"), "{busy}");
    drop(taken);
    shop.fails(2, "lab study access-paths --agent-server host:0 --agent-command");
    assert!(!shop.path("scratch").exists(), "nothing was made");
}
