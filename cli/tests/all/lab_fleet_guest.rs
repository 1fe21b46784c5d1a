//! A fleet with an agent on another kernel: in a guest, whose packets are delayed and lost, and
//! whose wall clock is set while it measures; and a fleet over virtual sockets.
//!
//! ```text
//!   this machine: controller ◀── loopback ── agent 1
//!        ▲
//!        └── user network of QEMU ── netem: 5 ms ± 4 ms, 1 % lost ── agent 2, in the guest
//! ```
//!
//! The guest's clock has its own zero, and nobody else uses the guest, so a test may set its wall
//! clock.

use crate::{
    common::{Running, flat},
    guest_machine::{Guest, HOST},
    lab_fleet::{Expecting, agent, expecting, read, shop},
};
use serde_json::Value;
use std::{fs, path::Path, process::Stdio};

/// The shortest way from the guest is 1 ms, so half of any round trip is at least this.
const LEAST_ERROR_NS: u64 = 500_000;
/// An emulated machine answers within this time, even beside other tests.
const MOST_ERROR_NS: u64 = 2_000_000_000;

/// The wall clock begins in 2001 and goes back by an hour, again and again. It goes in one
/// direction, so that the steps within a window never cancel each other.
const SCRIPT: &str = r#"
dw=/programs/diskwright
if /programs/tc qdisc add dev eth0 root netem delay 5ms 4ms loss 1%; then echo GUEST: DELAYED; fi
date -s @1000000000 >/dev/null
$dw lab agent --connect ADDRESS data=/tmp/data.raw --create-size 4M >/tmp/out 2>/tmp/log &
agent=$!
patient() { i=$((i+1)); [ $i -lt $1 ] || { cat /tmp/out /tmp/log; return 1; }; }
i=0; until grep -q ' begins' /tmp/log; do patient 1500; sleep 0.1; done
i=0
until grep -q 'the run is over' /tmp/log; do
  patient 600
  date -s @$(($(date +%s) - 3600)) >/dev/null
  sleep 0.5
done
sed 's/^/GUEST: said /' /tmp/log
kill -TERM $agent; wait $agent
echo GUEST: ENDED $?
"#;

#[test]
fn a_guest_over_a_bad_network_measures_with_this_machine_while_its_wall_clock_is_set() {
    let modules = ["virtio_pci", "virtio_net", "sch_netem"];
    let Some(guest) = Guest::new(&modules, &["tc"]) else { return };
    guest.add_own_program();
    let shop = shop();
    let mut running = None;
    let begin = || {
        let options = "--listen 127.0.0.1:0 --warm-up 500ms --duration 3s --interval 250ms --lost-after 60s -o r.json";
        let Expecting { controller, addresses, rest } = expecting(&shop, 2, options);
        let words = ["lab", "agent", "--connect", &addresses[0], "data=here.raw", "--create-size", "4M"];
        let here = Running::start(shop.command(&words).stdout(Stdio::null()).stderr(Stdio::null()));
        running = Some((controller, here, rest));
        SCRIPT.replace("ADDRESS", &addresses[1].replace("127.0.0.1", HOST))
    };
    let Some(console) = guest.run_in_turn(begin) else { return };
    let (controller, _here, rest) = running.unwrap();
    let ended = controller.output().unwrap();
    let printed = flat(&String::from_utf8(ended.stdout).unwrap());
    assert_eq!(ended.status.code(), Some(0), "{printed} {:?}\n{console}", rest.join().unwrap());
    assert!(console.contains("GUEST: ENDED 0"), "{console}");

    let result = read(&shop, "r.json");
    assert_eq!(result["end"]["kind"], "complete", "{result}");
    let own_boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
    let agents = result["fleet"]["agents"].as_array().unwrap();
    let in_guest = agents.iter().position(|agent| agent["boot_id"] != own_boot.trim()).expect("another machine");
    assert_eq!(agents[1 - in_guest]["boot_id"], own_boot.trim());
    let clock = &agents[in_guest]["clock"];
    let error_ns = clock["error_ns"].as_u64().unwrap();
    println!("the clock of the guest: {clock}");
    assert!(error_ns < MOST_ERROR_NS, "{clock}");
    if console.contains("GUEST: DELAYED") {
        assert!(error_ns >= LEAST_ERROR_NS, "half a round trip over the delayed network: {clock}");
    } else {
        println!("skipped: the error of a clock over a delayed network: the guest has no netem");
    }
    let phase = &result["fleet"]["phases"][0];
    assert_eq!(phase["error_ns"].as_u64(), Some(error_ns), "that of the worse clock");
    check_parts(&result);
    // The wall clock was set, which is told of the guest, and changes no time that was measured.
    let warnings = result["warnings"].as_array().unwrap();
    let is_step = |warning: &&Value| warning["kind"] == "of_agents" && warning["warning"]["kind"] == "clock_stepped";
    let told = warnings.iter().find(is_step).unwrap_or_else(|| panic!("{warnings:?}"));
    assert_eq!(told["agents"], serde_json::json!([agents[in_guest]["name"]]));
    assert!(told["warning"]["by_s"].as_f64().unwrap().abs() > 3000.0, "{told}");
    assert!(printed.contains("2 agents measured"), "{printed}");
}

/// Both agents have measured the whole window, and the sum is that of both.
#[track_caller]
fn check_parts(result: &Value) {
    let (phase, of_fleet) = (&result["phases"][0], &result["fleet"]["phases"][0]);
    assert_eq!((&phase["window_ns"], &phase["window_start_ns"]), (&3_000_000_000_u64.into(), &500_000_000.into()));
    let series = |record: &Value| record["series"].as_array().unwrap().clone();
    let ios = |point: &Value| point["read_ios"].as_u64().unwrap() + point["write_ios"].as_u64().unwrap();
    let parts: Vec<Vec<Value>> = of_fleet["agents"].as_array().unwrap().iter().map(series).collect();
    assert_eq!(parts.len(), 2);
    for (number, part) in parts.iter().enumerate() {
        let agent = &of_fleet["agents"][number];
        assert_eq!(agent["window_ns"], 3_000_000_000_u64, "{agent}");
        // By the controller's clock, within the error of both comparisons.
        let (start_ns, error_ns) = (agent["start_ns"].as_i64().unwrap(), of_fleet["error_ns"].as_i64().unwrap());
        assert!(start_ns.abs() <= 2 * error_ns + 1000, "{start_ns} {error_ns}");
        assert!(part.iter().map(ios).sum::<u64>() > 0, "agent {number} has measured nothing");
        let of_agent = result["fleet"]["agents"][number]["targets"].as_array().unwrap();
        let threads = phase["threads"].as_array().unwrap();
        assert_eq!(threads.iter().filter(|thread| of_agent.contains(&thread["target"])).count(), 1);
    }
    let sum = series(phase);
    assert_eq!(parts.iter().map(Vec::len).max(), Some(sum.len()));
    for (number, point) in sum.iter().enumerate() {
        let of_parts: u64 = parts.iter().filter_map(|part| part.get(number)).map(ios).sum();
        assert_eq!(ios(point), of_parts, "interval {number}");
    }
}

/// Agent and controller in one guest, which has virtual sockets to itself: this machine may be
/// without them.
#[test]
fn an_agent_is_reached_over_virtual_sockets() {
    let modules = ["vsock_loopback"];
    let Some(guest) = Guest::new(&modules, &[]) else { return };
    guest.add_own_program();
    let console = guest.run(
        r#"
dw=/programs/diskwright
if [ ! -e /dev/vsock ]; then echo GUEST: NO VSOCK; exit 0; fi
$dw lab agent --vsock 7407 data=null:64M >/tmp/address 2>/tmp/log &
agent=$!
i=0; until grep -q '#' /tmp/address; do i=$((i+1)); [ $i -lt 300 ] || { cat /tmp/log; false; }; sleep 0.2; done
sed 's/^/GUEST: address /;s/#.*//' /tmp/address
$dw lab fleet --agent one=vsock:1:7407#$(cut -d'#' -f2 /tmp/address) --warm-up 0 --duration 1s --interval 250ms --lost-after 60s -o /tmp/r.json >/tmp/out 2>&1 || { cat /tmp/out /tmp/log; false; }
grep -q 'certificate' /tmp/out
echo GUEST: MEASURED $(grep -o '"kind": *"complete"' /tmp/r.json | wc -l)
kill -TERM $agent; wait $agent
echo GUEST: ENDED $?
"#,
    );
    let Some(console) = console else { return };
    if console.contains("GUEST: NO VSOCK") {
        println!("skipped: an agent over virtual sockets: the kernel of the guest has none");
        return;
    }
    assert!(console.contains("GUEST: address vsock:"), "{console}");
    assert!(console.contains("GUEST: MEASURED 2") && console.contains("GUEST: ENDED 0"), "{console}");
}

/// From this machine into the guest, whose key is made here so that its fingerprint is known.
#[test]
fn an_agent_in_a_guest_is_reached_by_its_context_identifier() {
    if !Path::new("/dev/vhost-vsock").exists() {
        println!("skipped: an agent in a guest over a virtual socket: this machine has no /dev/vhost-vsock");
        return;
    }
    let Some(mut guest) = Guest::new(&["virtio_pci", "vmw_vsock_virtio_transport"], &[]) else { return };
    guest.add_own_program();
    // Of this process: other tests may have guests too.
    let cid = 0x1000 + std::process::id();
    guest.give_vsock(cid);
    let shop = shop();
    let controller = shop.ok("lab fleet --fingerprint").trim_end().to_owned();
    let (made, address) = agent(&shop, &format!("null: --identity agent.pem --controller {controller}"));
    drop(made);
    let fingerprint = address.split_once('#').unwrap().1;
    let key = fs::read_to_string(shop.path("agent.pem")).unwrap();
    let script = format!(
        "cat > /tmp/agent.pem <<'END'\n{key}\nEND\n\
         chmod 600 /tmp/agent.pem\n\
         /programs/diskwright lab agent --vsock 7407 --identity /tmp/agent.pem --controller {controller} null:64M \
         >/tmp/out 2>/tmp/log &\n\
         i=0; until grep -q '#' /tmp/out; do i=$((i+1)); [ $i -lt 300 ] || {{ cat /tmp/log; false; }}; sleep 0.2; done\n\
         echo GUEST: LISTENS\n\
         i=0; until grep -q 'the run is over' /tmp/log; do i=$((i+1)); [ $i -lt 600 ] || {{ cat /tmp/log; false; }}; sleep 0.2; done\n\
         echo GUEST: MEASURED\nsleep 60\n"
    );
    let measure = || {
        let line = format!("lab fleet --agent vsock:{cid}:7407#{fingerprint} --warm-up 0 --duration 1s -o r.json");
        shop.ok(&format!("{line} --interval 250ms --lost-after 60s"));
    };
    if guest.run_and_kill(&script, "GUEST: LISTENS", measure, "GUEST: MEASURED").is_some() {
        assert_eq!(read(&shop, "r.json")["end"]["kind"], "complete");
    }
}
