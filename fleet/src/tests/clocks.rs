//! Clocks compared over a network that delays both ways differently.

use super::{agent, options, wanted};
use crate::{
    address::{Address, Place},
    controller::Fleet,
    identity::Identity,
};
use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

/// Pseudorandom delays, the same in each run.
fn next(state: &AtomicU64) -> u64 {
    let mixed = state.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33
}

/// Passes bytes on, each piece after up to `most_us` microseconds.
fn pass(mut from: TcpStream, mut to: TcpStream, most_us: u64, state: &AtomicU64) {
    let mut piece = [0; 16 << 10];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        thread::sleep(Duration::from_micros(next(state) % most_us.max(1)));
        if to.write_all(&piece[..len]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Write);
}

/// A network before an agent: the way there takes up to 5 ms, the way back up to half.
fn network(before: &Address) -> Address {
    let Place::Tcp(host, port) = before.place.clone() else { panic!() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let own = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        static STATE: AtomicU64 = AtomicU64::new(1);
        for one in listener.incoming().flatten() {
            let other = TcpStream::connect((host.as_str(), port)).unwrap();
            one.set_nodelay(true).unwrap();
            other.set_nodelay(true).unwrap();
            let (from, to) = (one.try_clone().unwrap(), other.try_clone().unwrap());
            thread::spawn(move || pass(from, to, 5000, &STATE));
            thread::spawn(move || pass(other, one, 2500, &STATE));
        }
    });
    Address { place: Place::Tcp("127.0.0.1".into(), own), ..before.clone() }
}

#[test]
fn the_offset_is_within_its_error_over_an_uneven_network() {
    let own = Identity::temporary().unwrap();
    let started = agent(&[own.fingerprint]);
    let address = network(&started.address);
    // Both sides have the same clock here, so the truth is 0.
    for run in 0..20 {
        let fleet = Fleet::connect(&format!("r{run}"), &[wanted("a", &address)], options(&own), None).unwrap();
        let clock = fleet.remotes()[0].clock().unwrap().record();
        assert!(clock.offset_ns.unsigned_abs() <= clock.error_ns, "{clock:?}");
        assert!(clock.error_ns < 20_000_000, "the shortest of 16 round trips: {clock:?}");
    }
}
