//! Runs a scene under a scheduler of tests (`store/src/sync.rs`), in many orders, with a rule
//! broken or with none.

use diskwright_store::sync::broken::{Rule, break_rule};
use shuttle::{
    Config, FailurePersistence, Runner,
    scheduler::{PctScheduler, RandomScheduler},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// How many schedules a scene is run in, where a longer scene is run in as many as
/// `DISKWRIGHT_SHUTTLE_RUNS` says.
pub(crate) fn schedules(for_one: usize) -> usize {
    let asked =
        std::env::var("DISKWRIGHT_SHUTTLE_RUNS").map_or(120, |text| text.parse().expect("a number of schedules"));
    asked * for_one
}

/// Whether some schedule of the scene goes wrong, of `schedules` random ones and as many that delay
/// threads at a few places.
pub(crate) fn goes_wrong(rule: Option<Rule>, schedules: usize, scene: fn()) -> bool {
    break_rule(rule);
    let config = || {
        let mut config = Config::new();
        config.failure_persistence = FailurePersistence::None;
        config
    };
    let ran = catch_unwind(AssertUnwindSafe(|| {
        Runner::new(RandomScheduler::new_from_seed(1, schedules), config()).run(scene);
        Runner::new(PctScheduler::new_from_seed(1, 3, schedules), config()).run(scene);
    }));
    break_rule(None);
    ran.is_err()
}
