//! Fleets whose clocks differ.
//!
//! Agents and controllers measure by CLOCK_MONOTONIC, which nobody sets and which begins anew at
//! each boot. The wall clock is only written down: when a run began, and whether the clock was set.
//!
//! | clock | how it differs in tests |
//! |---|---|
//! | monotonic | a time namespace moves it by seven days, so the true offset is known exactly |
//! | wall | a guest sets its own clock again and again while it measures (`lab_fleet_guest.rs`) |
//!
//! The wall clock of this machine is not set: other tests and programs use it.

use crate::{
    common::Workshop,
    lab_fleet::{SHORT, agent, read, shop, started, wrapped},
};
use serde_json::Value;
use std::process::Command;

/// How far the clock of a time namespace is ahead.
const AHEAD_S: i64 = 7 * 86_400;
const AHEAD_NS: i64 = AHEAD_S * 1_000_000_000;

/// A command of the program, with a monotonic clock that is [`AHEAD_S`] ahead.
fn ahead(shop: &Workshop, words: &[&str]) -> Command {
    let own = shop.command(words);
    let mut by = Command::new("unshare");
    by.args(["--time", "--monotonic", &AHEAD_S.to_string(), "--fork", "--kill-child"]).arg(own.get_program());
    wrapped(by, &own)
}

/// Says what is missing, if there are no time namespaces here.
fn can_move_clocks() -> bool {
    let tried = Command::new("unshare").args(["--time", "--monotonic", "1", "--fork", "--kill-child", "true"]).output();
    match tried {
        Ok(output) if output.status.success() => return true,
        Ok(output) => {
            println!("skipped: a clock that is ahead: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Err(error) => println!("skipped: a clock that is ahead: unshare: {error}"),
    }
    false
}

/// Checks the clocks of a result against the true offset of each agent.
#[track_caller]
fn check(result: &Value, offsets_ns: [i64; 2]) {
    assert_eq!(result["end"]["kind"], "complete");
    let (fleet, phase) = (&result["fleet"], &result["fleet"]["phases"][0]);
    let of_agents = phase["agents"].as_array().unwrap();
    let most_ns = phase["error_ns"].as_i64().unwrap();
    for (number, true_ns) in offsets_ns.into_iter().enumerate() {
        let clock = &fleet["agents"][number]["clock"];
        let (offset_ns, error_ns) = (clock["offset_ns"].as_i64().unwrap(), clock["error_ns"].as_i64().unwrap());
        assert!((offset_ns - true_ns).abs() <= error_ns, "offset {offset_ns}, true {true_ns}, error {error_ns}");
        assert!(error_ns > 0 && error_ns <= most_ns, "{error_ns} {most_ns}");
        // Each started when it was told, by its own clock: the error and the drift remain.
        let start_ns = of_agents[number]["start_ns"].as_i64().unwrap();
        assert!(start_ns.abs() <= 2 * error_ns + 1000, "start {start_ns}, error {error_ns}");
        assert_eq!(of_agents[number]["window_ns"], 1_000_000_000);
        assert_eq!(of_agents[number]["window_start_ns"].as_i64(), Some(start_ns + 200_000_000));
        assert_eq!(of_agents[number]["series"].as_array().unwrap().len(), 12);
    }
    let together_ns = phase["until_ns"].as_i64().unwrap() - phase["from_ns"].as_i64().unwrap();
    assert!((together_ns - 1_000_000_000).abs() <= 4 * most_ns + 2000, "{phase}");
}

#[test]
fn a_monotonic_clock_that_is_seven_days_ahead_is_corrected_within_the_stated_error() {
    if !can_move_clocks() {
        return;
    }
    let shop = shop();
    let (_here, first) = agent(&shop, "null:1G");
    let words = ["lab", "agent", "--listen", "127.0.0.1:0", "null:1G"];
    let (_there, second) = started(&mut ahead(&shop, &words));
    shop.ok(&format!("lab fleet --agent one={first} --agent two={second} {SHORT} -o agent.json"));
    check(&read(&shop, "agent.json"), [0, AHEAD_NS]);
    // Then the controller has the clock of the second agent.
    let line = format!("lab fleet --agent one={first} --agent two={second} {SHORT} -o controller.json");
    let words: Vec<&str> = line.split(' ').collect();
    let ended = ahead(&shop, &words).output().unwrap();
    assert!(ended.status.success(), "{ended:?}");
    check(&read(&shop, "controller.json"), [-AHEAD_NS, 0]);
}
