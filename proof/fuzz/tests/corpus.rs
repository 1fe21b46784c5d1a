//! Runs the corpus and random inputs of every target, and measures memory and CPU time. A panic, or
//! memory that is sized by a field of the input, fails here without a fuzzer.
//!
//! `DISKWRIGHT_FUZZ_INPUTS` is the number of random inputs of each target (default 2,000;
//! `./test --nightly` sets more), `DISKWRIGHT_FUZZ_SEED` their seed. A failing input is printed as
//! bytes; add it to `proof/fuzz/corpus/TARGET/`.

use diskwright_fuzz::TARGETS;
use nix::time::{ClockId, clock_gettime};
use peak_alloc::PeakAlloc;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{env, fs, path::Path, time::Duration};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Memory that one input may use. The samples, some 40 MiB, are not counted.
const BYTES_MAX: usize = 64 << 20;
const LONGEST_INPUT: u64 = 192;
/// CPU time that one input may use. (Wall-clock time would depend on other processes.)
const TIME_MAX: Duration = Duration::from_secs(1);

/// CPU time of this thread.
fn processor_time() -> Duration {
    Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).expect("every thread has a clock"))
}

fn number(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn run(name: &str, body: diskwright_fuzz::Body, input: &[u8], what: &str) -> (usize, Duration) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let began = processor_time();
    let outcome = std::panic::catch_unwind(|| body(input));
    let worked = processor_time() - began;
    let taken = MEMORY.peak_usage().saturating_sub(before);
    assert!(outcome.is_ok(), "{name}: {what} breaks a promise: {input:02x?}");
    assert!(taken < BYTES_MAX, "{name}: {what} used {taken} bytes of memory: {input:02x?}");
    assert!(worked < TIME_MAX, "{name}: {what} used {worked:?} of CPU time: {input:02x?}");
    (taken, worked)
}

// A single test, because the allocator counts for the whole process.
#[test]
fn all_targets_pass_their_corpus_and_random_inputs() {
    let _ = diskwright_fuzz::samples::samples();
    diskwright_fuzz::nvme::warm_up();
    diskwright_fuzz::iscsi::warm_up();
    diskwright_fuzz::peers::warm_up();
    diskwright_fuzz::vhost::warm_up();
    let (inputs, seed) = (number("DISKWRIGHT_FUZZ_INPUTS", 2000), number("DISKWRIGHT_FUZZ_SEED", 1));
    for (index, (name, body)) in TARGETS.into_iter().enumerate() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let (mut kept, mut most) = (0, (0, Duration::ZERO));
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            let cost = run(name, body, &fs::read(&path).unwrap(), &path.display().to_string());
            most = (most.0.max(cost.0), most.1.max(cost.1));
            kept += 1;
        }
        assert!(kept > 0, "{} is empty", folder.display());
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed << 8 | index as u64);
        for number in 0..inputs {
            let mut input = vec![0; (random.next_u64() % LONGEST_INPUT) as usize];
            random.fill_bytes(&mut input);
            let cost = run(name, body, &input, &format!("random input {number} of seed {seed}"));
            most = (most.0.max(cost.0), most.1.max(cost.1));
        }
        let (kib, worked) = (most.0 >> 10, most.1);
        println!(
            "{name}: {kept} inputs of the corpus, {inputs} random inputs of seed {seed}; at most {kib} KiB and {worked:.1?} for one"
        );
    }
}
