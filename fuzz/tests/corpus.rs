//! The corpus of every target, and as many random inputs, in a process that counts its memory: a panic, or memory taken by a
//! field's word, fails here without any fuzzer.
//!
//! `DISKWRIGHT_FUZZ_INPUTS` sets how many random inputs each target gets (2,000 unless said; `./test --nightly` asks for more), and
//! `DISKWRIGHT_FUZZ_SEED` which ones. What fails is printed as bytes, to be put into `fuzz/corpus/TARGET/`.

use diskwright_fuzz::TARGETS;
use peak_alloc::PeakAlloc;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{env, fs, path::Path};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// The samples and their copies are some 40 MiB; what one input may take beside them.
const MOST_BYTES: usize = 64 << 20;
const LONGEST_INPUT: u64 = 192;

fn number(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

fn run(name: &str, body: diskwright_fuzz::Body, input: &[u8], what: &str) {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let outcome = std::panic::catch_unwind(|| body(input));
    let taken = MEMORY.peak_usage().saturating_sub(before);
    assert!(outcome.is_ok(), "{name}: {what} breaks a promise: {input:02x?}");
    assert!(taken < MOST_BYTES, "{name}: {what} took {taken} bytes of memory: {input:02x?}");
}

// One test, as the allocator counts for the whole process.
#[test]
fn every_target_stands_its_corpus_and_random_inputs() {
    let _ = diskwright_fuzz::samples::samples();
    diskwright_fuzz::peers::warm_up();
    let (inputs, seed) = (number("DISKWRIGHT_FUZZ_INPUTS", 2000), number("DISKWRIGHT_FUZZ_SEED", 1));
    for (index, (name, body)) in TARGETS.into_iter().enumerate() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        let mut kept = 0;
        for entry in fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display())) {
            let path = entry.unwrap().path();
            run(name, body, &fs::read(&path).unwrap(), &path.display().to_string());
            kept += 1;
        }
        assert!(kept > 0, "{} is empty", folder.display());
        let mut random = Xoshiro256PlusPlus::seed_from_u64(seed << 8 | index as u64);
        for number in 0..inputs {
            let mut input = vec![0; (random.next_u64() % LONGEST_INPUT) as usize];
            random.fill_bytes(&mut input);
            run(name, body, &input, &format!("random input {number} of seed {seed}"));
        }
        println!("{name}: {kept} of the corpus, {inputs} random inputs of seed {seed}");
    }
}
