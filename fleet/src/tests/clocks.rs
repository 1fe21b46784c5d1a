//! Clocks compared over a network that delays both ways differently.

use super::{agent, options, wanted};
use crate::{controller::Fleet, identity::Identity, uneven};

#[test]
fn the_offset_is_within_its_error_over_an_uneven_network() {
    let own = Identity::temporary().unwrap();
    let started = agent(&[own.fingerprint]);
    let address = uneven::network(&started.address, 5000, 2500).unwrap();
    // Both sides have the same clock here, so the truth is 0.
    for run in 0..20 {
        let fleet = Fleet::connect(&format!("r{run}"), &[wanted("a", &address)], options(&own), None).unwrap();
        let clock = fleet.remotes()[0].clock().unwrap().record();
        assert!(clock.offset_ns.unsigned_abs() <= clock.error_ns, "{clock:?}");
        assert!(clock.error_ns < 20_000_000, "the shortest of 16 round trips: {clock:?}");
    }
}
