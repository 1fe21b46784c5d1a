//! Claims and workers under the `shuttle` scheduler (`store/src/sync.rs`), without a disk: every
//! resting request is woken exactly once. If a request is never woken, all threads wait, and the
//! scheduler reports a deadlock.

use super::*;
use crate::engine::{
    background::{BackgroundWorker, NewJobs},
    schedules::{goes_wrong, schedules},
};
use diskwright_store::{
    Engine, EngineKind,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
        thread::{spawn, yield_now},
    },
};
use std::sync::Arc;

const KEY: Key = (0, 7);
/// How often each thread claims the block, or requests a job.
const ROUNDS: usize = 2;
/// Factor for the number of schedules, as these scenarios are short.
const SCHEDULES_FOR_ONE: usize = 8;

/// Waits for the one ticket of an engine.
fn wait(engine: &mut Engine) -> std::io::Result<()> {
    let mut ended = Vec::new();
    engine.reap(1, &mut ended).expect("an engine without a ring");
    assert_eq!((ended.len(), engine.in_flight()), (1, 0), "woken once");
    ended.pop().map_or(Ok(()), |ended| ended.result)
}

/// Claims the block, excluded or shared. Rests until that succeeds.
fn take(claims: &Mutex<Claims>, engine: &mut Engine, alone: bool) {
    loop {
        {
            let mut claims = claims.lock().expect("no thread panics");
            if alone && claims.exclude(KEY) {
                return;
            }
            if !alone && !claims.is_excluded(KEY) {
                return claims.share(KEY);
            }
            claims.wait(KEY, engine.external(1, 0, None));
        }
        wait(engine).expect("a free block");
    }
}

/// Two threads share a block, two exclude it.
fn one_block_and_four_who_want_it() {
    let claims = Arc::new(Mutex::new(Claims::default()));
    // The holders: 1 for each that shares the block, 100 for each that excludes it.
    let held = Arc::new(AtomicU64::new(0));
    let threads: Vec<_> = [true, false, true, false]
        .into_iter()
        .map(|alone| {
            let (claims, held) = (Arc::clone(&claims), Arc::clone(&held));
            spawn(move || {
                let mut engine = Engine::new(EngineKind::Sync, 1, None).expect("an engine without a ring");
                for _ in 0..ROUNDS {
                    take(&claims, &mut engine, alone);
                    let mine = if alone { 100 } else { 1 };
                    let before = held.fetch_add(mine, Ordering::SeqCst);
                    assert!(before == 0 || !alone && before < 100, "the block is held by {before} others");
                    yield_now();
                    held.fetch_sub(mine, Ordering::SeqCst);
                    let mut claims = claims.lock().expect("no thread panics");
                    if alone {
                        claims.end_exclusion(KEY);
                    } else {
                        claims.release(KEY);
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("every thread gets the block");
    }
    assert!(claims.lock().expect("no thread panics").blocks.is_empty(), "the block is free");
}

fn complete(_disk: &Arc<()>, tickets: Vec<ExternalTicket>, _since: NewJobs<'_, ExternalTicket>) {
    tickets.into_iter().for_each(|ticket| ticket.complete(Ok(())));
}

/// Three threads request jobs of a worker. While the disk exists, each job is done and its ticket
/// completed. After the disk was dropped, the ticket of a job is still completed, perhaps with an
/// error.
fn a_clerk_and_three_who_wait_for_it() {
    let worker = Arc::new(BackgroundWorker::new("worker", complete));
    let disk = Arc::new(());
    let threads: Vec<_> = (0..3)
        .map(|_| {
            let (worker, disk) = (Arc::clone(&worker), Arc::clone(&disk));
            spawn(move || {
                let mut engine = Engine::new(EngineKind::Sync, 1, None).expect("an engine without a ring");
                for _ in 0..ROUNDS {
                    worker.request(&disk, engine.external(1, 0, None));
                    wait(&mut engine).expect("the job is done");
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().expect("all jobs are done");
    }
    worker.settle();
    let mut engine = Engine::new(EngineKind::Sync, 1, None).expect("an engine without a ring");
    worker.request(&disk, engine.external(1, 0, None));
    drop(disk);
    let _ = wait(&mut engine);
}

#[test]
fn every_resting_request_is_woken() {
    assert!(!goes_wrong(None, schedules(SCHEDULES_FOR_ONE), one_block_and_four_who_want_it));
    assert!(!goes_wrong(None, schedules(SCHEDULES_FOR_ONE), a_clerk_and_three_who_wait_for_it));
    println!("schedules: claims and workers alone: {} schedules", 4 * schedules(SCHEDULES_FOR_ONE));
}

#[test]
fn a_request_that_is_not_woken_is_detected() {
    assert!(goes_wrong(Some(Rule::WaitersAreWoken), schedules(SCHEDULES_FOR_ONE), one_block_and_four_who_want_it));
    assert!(goes_wrong(Some(Rule::EveryJobIsDone), schedules(SCHEDULES_FOR_ONE), a_clerk_and_three_who_wait_for_it));
    println!("schedules: caught: WaitersAreWoken, EveryJobIsDone (claims and workers alone)");
}

#[test]
fn an_exclusion_by_two_threads_is_detected() {
    assert!(goes_wrong(Some(Rule::ExcludedAlone), schedules(SCHEDULES_FOR_ONE), one_block_and_four_who_want_it));
    println!("schedules: caught: ExcludedAlone (claims alone)");
}
