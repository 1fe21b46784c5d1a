//! The study `tiers`, small.

use diskwright_lab::{
    LabError,
    progress::Step,
    study::{
        StudyOptions,
        tiers::{AFTER, BEFORE, FAST_SHARE, TierOptions, TiersOptions, TiersResult, run},
    },
};
use diskwright_load::record::End;
use diskwright_store::StoreLimit;
use std::time::Duration;

fn limit(iops: u64) -> Option<StoreLimit> {
    Some(StoreLimit { iops, latency: Duration::ZERO })
}

#[test]
fn a_small_study_predicts_what_it_measures_and_leaves_nothing() {
    let home = tempfile::tempdir().unwrap();
    let fast_dir = tempfile::tempdir().unwrap();
    let options = TiersOptions {
        study: StudyOptions {
            quick: true,
            dir: Some(home.path().to_owned()),
            rounds: Some(2),
            cell: Some(Duration::from_millis(1200)),
            output: Some(home.path().join("result.json")),
            ..StudyOptions::default()
        },
        size_bytes: Some(32 << 20),
        fast_bytes: Some(8 << 20),
        copies: 1,
        fast: TierOptions { dir: Some(fast_dir.path().to_owned()), limit: limit(50_000) },
        slow: TierOptions { dir: None, limit: limit(4_000) },
        ..TiersOptions::default()
    };
    let left = || {
        let names = |dir: &std::path::Path| std::fs::read_dir(dir).unwrap().count();
        (names(home.path()), names(fast_dir.path()))
    };
    let stopped = run(&options, &mut |step: Step<'_>| step.phase != "measure");
    assert!(matches!(stopped, Err(LabError::Stopped)), "{stopped:?}");
    assert_eq!(left(), (0, 0), "a stopped study leaves nothing");

    // Stopped in the second round, the first one counts.
    let report = run(&options, &mut |step: Step<'_>| step.phase != "measure" || step.done < 4).unwrap();
    assert!(report.stopped && report.result.head.end == End::Stopped);
    assert!(report.result.cells.iter().all(|cell| cell.rounds.len() == 1), "{:?}", report.result.cells);
    assert_eq!(report.result.optimizations.len(), 1);
    assert!(report.result.head.verdict.starts_with("Partial: "), "{}", report.result.head.verdict);
    assert_eq!(left(), (1, 0), "only the result is left");

    let report = run(&options, &mut |_: Step<'_>| true).unwrap();
    let result = &report.result;
    assert_eq!((result.optimizations.len(), result.head.end.clone()), (2, End::Complete));
    let [before, after] = [BEFORE, AFTER].map(|subject| result.cell(subject).unwrap());
    let share = |cell: &diskwright_lab::cells::Cell| cell.more(FAST_SHARE).unwrap();
    assert!(share(before).iter().all(|share| *share < 0.35) && share(after).iter().all(|share| *share > 0.35));
    for round in &result.optimizations {
        // A window this short counts few requests, on a busy machine very few.
        assert!((round.predicted - round.measured).abs() < 0.3, "{round:?}");
        assert!(round.measured <= round.best + 0.3 && round.to_fast_bytes > 0, "{round:?}");
        assert!(round.needed.windows(2).all(|two| two[0].1 >= two[1].1), "{round:?}");
    }
    let held_mib = result.fast_bytes >> 20;
    assert!((7..=10).contains(&held_mib), "{held_mib} MiB");
    let saved: TiersResult = serde_json::from_slice(&std::fs::read(report.saved.as_ref().unwrap()).unwrap()).unwrap();
    assert_eq!(saved.cells, result.cells);
    assert_eq!(left(), (1, 0), "only the result is left");
}
