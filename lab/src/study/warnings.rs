//! Warnings that several studies share: about the machine, its other load, and rounds that scatter.

use crate::ratio::Ratio;
use diskwright_load::{
    clock,
    machine::{Machine, OtherLoad},
    warning::Warning,
};

/// A warning is given if other programs keep more CPUs busy than this.
const BUSY_CPUS: f64 = 0.25;
/// A warning is given if the hypervisor gives more CPUs' worth of time than this to other guests.
const STOLEN_CPUS: f64 = BUSY_CPUS / 5.0;
/// A warning is given if the range of the rounds is above this share of their median.
const SPREAD_MAX: f64 = 0.10;

/// Warnings before measuring: a debug build, a slow clock.
pub(super) fn of_machine(machine: &Machine) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if cfg!(debug_assertions) {
        warnings.push(Warning::DebugBuild);
    }
    let source = &machine.clock_source;
    if !source.is_empty() && !clock::is_fast(source) {
        warnings.push(Warning::SlowClock { source: source.clone() });
    }
    warnings
}

/// Warnings about the CPU time that other programs and other guests used since `watch`.
pub(super) fn since(watch: &OtherLoad) -> Vec<Warning> {
    let (busy_cpus, stolen_cpus) = watch.since();
    of_others(busy_cpus, stolen_cpus)
}

/// Warnings about the CPU time of other programs and of other guests.
pub(super) fn of_others(busy_cpus: f64, stolen_cpus: f64) -> Vec<Warning> {
    let mut warnings = Vec::new();
    if busy_cpus > BUSY_CPUS {
        warnings.push(Warning::OtherLoad { cpus: busy_cpus });
    }
    if stolen_cpus > STOLEN_CPUS {
        warnings.push(Warning::StolenTime { cpus: stolen_cpus });
    }
    warnings
}

/// A warning if the rounds of some of these ratios scatter. Each ratio has a name.
pub(super) fn spread(ratios: &[(String, Ratio)]) -> Option<Warning> {
    let spread = |(_, ratio): &(String, Ratio)| ratio.summary.spread();
    let far = ratios.iter().filter(|named| spread(named) > SPREAD_MAX).count();
    let worst = ratios.iter().max_by(|a, b| spread(a).total_cmp(&spread(b)))?;
    (far > 0).then(|| Warning::Spread {
        cells: far,
        of: ratios.len(),
        threshold: SPREAD_MAX,
        worst: worst.0.clone(),
        worst_spread: spread(worst),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_warning_of_scattering_rounds_names_the_worst_ratio() {
        let ratio = |name: &str, each: &[f64]| (name.to_owned(), Ratio::of(each, &vec![1.0; each.len()]).unwrap());
        let near = ratio("VHD fixed, 4K random read", &[0.95, 1.0, 1.04]);
        assert_eq!(spread(std::slice::from_ref(&near)), None);
        assert_eq!(spread(&[]), None);
        let far = ratio("VHD dynamic, 4K random read", &[0.7, 0.9, 1.1]);
        let found = spread(&[near.clone(), far, ratio("x", &[0.9, 1.0, 1.1])]);
        let Some(Warning::Spread { cells: 2, of: 3, worst, worst_spread, .. }) = found else { panic!("{found:?}") };
        assert!(worst.starts_with("VHD dynamic") && (worst_spread - 0.4 / 0.9).abs() < 1e-9, "{worst} {worst_spread}");
    }

    #[test]
    fn a_busy_machine_and_a_slow_clock_are_reported() {
        assert!(of_others(0.2, 0.04).is_empty());
        assert_eq!(of_others(0.3, 0.06), [Warning::OtherLoad { cpus: 0.3 }, Warning::StolenTime { cpus: 0.06 }]);
        let of = |source: &str| of_machine(&Machine { clock_source: source.into(), ..Machine::default() });
        assert!(of("hpet").contains(&Warning::SlowClock { source: "hpet".into() }));
        assert!(of("tsc").iter().all(|warning| *warning == Warning::DebugBuild));
    }
}
