//! Epochs under a scheduler of tests (`store/src/sync.rs`), without a disk around them, so that the
//! few steps of a request and of a grace period are tried in nearly every order.
//!
//! One place in memory stands for space in the file, a word for the map. The owner of the space
//! gives it up and has it used again when the grace period says so; requests look the word up and
//! use the space where it says that they may. None of them may find what the next owner has put
//! there.

use super::*;
use crate::schedules::{goes_wrong, schedules};
use diskwright_store::sync::thread::{spawn, yield_now};

/// In the map: the space is ours. Otherwise we have none.
const OURS: u64 = 1;
/// How often the space is given up.
const ROUNDS: u64 = 3;
/// These are short: so many for each that is asked for of longer ones.
const SCHEDULES_FOR_ONE: usize = 32;

/// Requests of two threads, while the space comes and goes.
fn space_comes_and_goes() {
    let epochs = Arc::new(Epochs::default());
    let word = Arc::new(AtomicU64::new(OURS));
    // Whose bytes are in the space: 0 is what we wrote, anything else is another's.
    let space = Arc::new(AtomicU64::new(0));
    let requests: Vec<_> = (0..2)
        .map(|_| {
            let queue = epochs.join();
            let (word, space) = (Arc::clone(&word), Arc::clone(&space));
            spawn(move || {
                for _ in 0..2 * ROUNDS {
                    let parity = queue.enter().parity;
                    if word.load(Ordering::SeqCst) == OURS {
                        assert_eq!(space.load(Ordering::SeqCst), 0, "a request reaches space that another uses");
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
        // Another uses it, gives it up again, and it comes back to us reading as it did.
        space.store(7, Ordering::SeqCst);
        let grace = epochs.begin_grace();
        while !epochs.grace_over(grace) {
            yield_now();
        }
        space.store(0, Ordering::SeqCst);
        word.store(OURS, Ordering::SeqCst);
    }
    for request in requests {
        request.join().expect("requests that find their own bytes");
    }
}

#[test]
fn no_schedule_reaches_space_that_another_uses() {
    assert!(!goes_wrong(None, schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: epochs alone: {} schedules", 2 * schedules(SCHEDULES_FOR_ONE));
}

#[test]
fn a_grace_period_that_does_not_wait_is_found() {
    assert!(goes_wrong(Some(Rule::GraceIsWaitedFor), schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: caught: GraceIsWaitedFor (epochs alone)");
}

#[test]
fn a_request_counted_in_an_epoch_that_is_over_is_found() {
    assert!(goes_wrong(Some(Rule::CountedInTheCurrentEpoch), schedules(SCHEDULES_FOR_ONE), space_comes_and_goes));
    println!("schedules: caught: CountedInTheCurrentEpoch (epochs alone)");
}
