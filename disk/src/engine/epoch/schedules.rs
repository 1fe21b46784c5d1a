//! Epochs under the `shuttle` scheduler (`store/src/sync.rs`), without a disk, so that the few
//! steps of a request and of a grace period run in nearly every order.
//!
//! One atomic stands for space in the file, another for the map. The owner of the space frees it,
//! and another owner uses it after the grace period. Requests look up the map and read the space if
//! the map says that it is ours. No request may find the other owner's data.

use super::*;
use crate::engine::schedules::{goes_wrong, schedules};
use diskwright_store::sync::thread::{spawn, yield_now};

/// Value of the map: the space is ours. 0: we have no space.
const OURS: u64 = 1;
/// How often the space is freed.
const ROUNDS: u64 = 3;
/// Factor for the number of schedules, as these scenarios are short.
const SCHEDULES_FOR_ONE: usize = 32;

/// Two threads send requests while the space is freed and allocated.
fn space_comes_and_goes() {
    let epochs = Arc::new(Epochs::default());
    let word = Arc::new(AtomicU64::new(OURS));
    // Contents of the space: 0 is our data, anything else another owner's.
    let space = Arc::new(AtomicU64::new(0));
    let requests: Vec<_> = (0..2)
        .map(|_| {
            let queue = epochs.join();
            let (word, space) = (Arc::clone(&word), Arc::clone(&space));
            spawn(move || {
                for _ in 0..2 * ROUNDS {
                    let parity = queue.enter().parity;
                    if word.load(Ordering::SeqCst) == OURS {
                        assert_eq!(space.load(Ordering::SeqCst), 0, "a request read another owner's data");
                    }
                    queue.leave(parity);
                }
            })
        })
        .collect();
    for _ in 0..ROUNDS {
        word.store(0, Ordering::SeqCst);
        let grace = epochs.begin_grace();
        while !epochs.grace_over(grace) {
            yield_now();
        }
        // Another owner uses the space and frees it; then it is ours again, with our data.
        space.store(7, Ordering::SeqCst);
        let grace = epochs.begin_grace();
        while !epochs.grace_over(grace) {
            yield_now();
        }
        space.store(0, Ordering::SeqCst);
        word.store(OURS, Ordering::SeqCst);
    }
    for request in requests {
        request.join().expect("requests that read our data");
    }
}

#[test]
fn no_schedule_reads_another_owners_data() {
    assert!(!goes_wrong(None, schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: epochs alone: {} schedules", 2 * schedules(SCHEDULES_FOR_ONE));
}

#[test]
fn a_grace_period_that_does_not_wait_is_detected() {
    assert!(goes_wrong(Some(Rule::GraceIsWaitedFor), schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: caught: GraceIsWaitedFor (epochs alone)");
}

#[test]
fn a_request_counted_in_a_past_epoch_is_detected() {
    assert!(goes_wrong(Some(Rule::CountedInTheCurrentEpoch), schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: caught: CountedInTheCurrentEpoch (epochs alone)");
}
