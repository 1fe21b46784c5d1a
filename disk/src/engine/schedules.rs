//! Runs a test scenario in many schedules of the `shuttle` scheduler (`store/src/sync.rs`), with or
//! without a broken rule.

use diskwright_store::sync::broken::{Rule, break_rule};
use shuttle::{
    Config, FailurePersistence, Runner,
    scheduler::{PctScheduler, RandomScheduler},
};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Number of schedules for a scenario: `for_one` times the environment variable
/// `DISKWRIGHT_SHUTTLE_RUNS` (120 by default). Short scenarios have a larger `for_one`.
pub(crate) fn schedules(for_one: usize) -> usize {
    let asked =
        std::env::var("DISKWRIGHT_SHUTTLE_RUNS").map_or(120, |text| text.parse().expect("a number of schedules"));
    asked * for_one
}

/// Whether the scenario fails in any schedule. Tries `schedules` random schedules, and as many that
/// delay threads at a few points.
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
