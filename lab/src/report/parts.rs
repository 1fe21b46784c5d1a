//! Parts that the chapters of all results share: subtitle, badges, warnings, machine.

use diskwright_load::{
    machine::{Machine, Place, Versions},
    record::{End, Head},
    warning::Warning,
};
use diskwright_outline::{self as outline, Block, Chapter, Tone};
use diskwright_stats::numbers::{bytes, duration, grouped, moment};

/// The chapter of a result with this head. `(id, name)` are those of [`super::ToChapter::chapter`].
pub fn chapter(
    head: &Head,
    (id, name): (&str, &str),
    title: impl Into<String>,
    badges: Vec<(Tone, String)>,
    blocks: Vec<Block>,
) -> Chapter {
    Chapter {
        id: id.to_owned(),
        title: title.into(),
        source: name.to_owned(),
        subtitle: subtitle(&head.started_utc, head.took_ns),
        verdict: head.verdict.clone(),
        badges,
        warnings: warnings_with_end(&head.end, &head.warnings),
        blocks,
    }
}

/// Badges for the end, the number of rounds, and a quick study.
pub fn badges(head: &Head, rounds: usize, quick: bool) -> Vec<(Tone, String)> {
    let mut badges = vec![end_badge(&head.end), (Tone::Plain, counted(rounds, "round"))];
    if quick {
        badges.push((Tone::Warning, "quick".into()));
    }
    badges
}

/// A number of things: `1 round`, `3 rounds`.
pub fn counted(number: usize, thing: &str) -> String {
    if number == 1 { format!("1 {thing}") } else { format!("{number} {thing}s") }
}

/// The block [`measured_on`] for a head.
pub fn how_measured(head: &Head, more: Vec<(String, String)>) -> Vec<Block> {
    measured_on(&head.machine, &head.versions, head.place.as_ref(), more)
}

/// When a result was measured, and how long it took.
pub fn subtitle(started_utc: &str, took_ns: u64) -> String {
    format!("{}, took {}", moment(started_utc), duration(took_ns as f64))
}

/// A badge for the end of a measurement.
pub fn end_badge(end: &End) -> (Tone, String) {
    match end {
        End::Complete => (Tone::Good, "complete".into()),
        End::Stopped => (Tone::Warning, "partial".into()),
        End::Failed { .. } => (Tone::Bad, "failed".into()),
    }
}

/// A sentence about a failure, then each warning as a sentence.
pub fn warnings_with_end(end: &End, warnings: &[Warning]) -> Vec<outline::Warning> {
    let failed = match end {
        End::Failed { errors: 0, first } => Some(outline::Warning {
            tone: Tone::Bad,
            sentence: format!("FAILED, and the figures are those that were measured before: {first}"),
        }),
        End::Failed { errors, first } => Some(outline::Warning {
            tone: Tone::Bad,
            sentence: format!(
                "FAILED: {} failed; the first: {first}. The figures are only of requests that succeeded.",
                if *errors == 1 { "1 request".into() } else { format!("{} requests", grouped(*errors as f64)) }
            ),
        }),
        _ => None,
    };
    failed.into_iter().chain(warnings_of(warnings)).collect()
}

/// Each warning as a sentence. A warning that voids the result begins in capitals.
pub fn warnings_of(warnings: &[Warning]) -> Vec<outline::Warning> {
    let of = |warning: &Warning| match warning.voids() {
        true => outline::Warning { tone: Tone::Bad, sentence: format!("NOT STORAGE: {warning}") },
        false => outline::Warning { tone: Tone::Warning, sentence: warning.to_string() },
    };
    warnings.iter().map(of).collect()
}

/// One line about the machine, and a folded block with all facts about machine and programs.
pub fn measured_on(
    machine: &Machine,
    versions: &Versions,
    place: Option<&Place>,
    more: Vec<(String, String)>,
) -> Vec<Block> {
    let mut short = vec![("Machine".to_owned(), machine.to_string())];
    short.extend(place.map(self::place));
    short.extend(more);
    vec![
        Block::Heading("How it was measured".into()),
        Block::Facts(short),
        Block::Folded { name: "Machine and programs".into(), blocks: vec![Block::Facts(facts(machine, versions))] },
    ]
}

/// Facts about machine and programs.
fn facts(machine: &Machine, versions: &Versions) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| {
        if !value.is_empty() {
            facts.push((name.to_owned(), value));
        }
    };
    add("Processor", format!("{} × {}", machine.logical_cpus, machine.cpu_model));
    add("Memory", bytes(machine.memory_bytes));
    add("System", [machine.operating_system.as_str(), machine.kernel.as_str()].join(", "));
    add("Clock", machine.clock_source.clone());
    add("Load before", format!("{:.2}", machine.load_average));
    let build = if versions.optimised { "" } else { " (debug build)" };
    add("diskwright", format!("{}{build}", versions.diskwright));
    add("qemu-img", versions.qemu.clone().unwrap_or_default());
    facts
}

/// The file system with the disks.
fn place(place: &Place) -> (String, String) {
    let scheduler = place.scheduler.as_ref().map_or_else(String::new, |name| format!(", scheduler {name}"));
    (
        "Disks are on".into(),
        format!(
            "{} on {} ({}), {} free{scheduler}",
            place.file_system,
            place.device,
            place.mount_options,
            bytes(place.free_bytes)
        ),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_without_failed_requests_is_told_before_the_warnings() {
        let sentence = |errors| {
            let end = End::Failed { first: "db1: cannot connect".into(), errors };
            warnings_with_end(&end, &[Warning::DebugBuild]).remove(0).sentence
        };
        assert_eq!(sentence(0), "FAILED, and the figures are those that were measured before: db1: cannot connect");
        assert!(sentence(1).starts_with("FAILED: 1 request failed"), "{}", sentence(1));
        assert_eq!(warnings_with_end(&End::Complete, &[Warning::DebugBuild]).len(), 1);
    }
}
