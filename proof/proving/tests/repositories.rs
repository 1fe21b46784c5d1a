//! Pushes and prunes at the same time, on a server that fails: no order of their requests loses a
//! chunk.

use diskwright_proving::pushing::{RULES, Run, run};

/// How many orders are tried, unless DISKWRIGHT_PROVE_STATES says more.
const RUNS: u64 = 400;

fn runs() -> u64 {
    let asked = std::env::var("DISKWRIGHT_PROVE_STATES").ok().and_then(|states| states.parse::<u64>().ok());
    asked.map_or(RUNS, |states| (states / 20).max(RUNS))
}

/// The seeds: only DISKWRIGHT_PROVE_SEED, to reproduce a failure, or as many as [`runs`] says.
fn seeds() -> std::ops::Range<u64> {
    let only = std::env::var("DISKWRIGHT_PROVE_SEED").ok().and_then(|seed| seed.parse::<u64>().ok());
    only.map_or(0..runs(), |seed| seed..seed + 1)
}

#[test]
fn no_order_of_requests_loses_a_chunk() {
    let mut sum = Run::default();
    for seed in seeds() {
        let found = run(seed, None).unwrap_or_else(|what| panic!("seed {seed}: {what}"));
        sum.pushed = (sum.pushed.0 + found.pushed.0, sum.pushed.1 + found.pushed.1);
        sum.deleted += found.deleted;
    }
    // Runs in which everything fails would prove nothing.
    assert!(seeds().count() == 1 || sum.pushed.0 * 4 > sum.pushed.1 && sum.deleted > 0, "{sum:?}");
}

#[test]
fn each_rule_is_needed() {
    for rule in RULES {
        let caught = (0..20_000).find_map(|seed| run(seed, Some(rule)).err().map(|what| (seed, what)));
        let (seed, what) = caught.unwrap_or_else(|| panic!("{rule:?} was broken, and no run has failed"));
        println!("{rule:?}: seed {seed}: {what}");
    }
}
