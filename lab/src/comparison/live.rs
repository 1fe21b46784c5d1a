//! An A/B of targets that are there: each round measures every one once, in an order that changes,
//! so that rounds can be compared in pairs and a drift of the machine falls on all alike.

use super::{
    Circumstances, Group, Side,
    read::{cache_of, machine_of, workload_of},
};
use crate::{
    LabError, Result,
    progress::{Progress, report},
};
use diskwright_load::{
    figures::Figures,
    job::Job,
    machine::{Machine, Versions},
    record::{End, Run},
    seeds,
};
use diskwright_stats::summary;

/// How to measure.
#[derive(Debug, Clone, Copy)]
pub struct LiveOptions {
    /// How often each target is measured. Few rounds cannot show a difference: see
    /// `inference::Design::fewest`.
    pub rounds: usize,
}

/// Measures `job` on each of `names`; `measure` is told which. A stop by the user keeps the whole
/// rounds that there are.
///
/// # Errors
/// Whatever `measure` returns; [`LabError::BadOptions`] when requests failed; [`LabError::Stopped`]
/// when there is no whole round.
pub fn live(
    names: &[String],
    job: &Job,
    options: &LiveOptions,
    measure: &mut dyn FnMut(usize, &Job) -> Result<Run>,
    progress: &mut dyn Progress,
) -> Result<Vec<Side>> {
    let machine = Machine::detect();
    let mut sides: Vec<Side> = names
        .iter()
        .map(|name| Side {
            name: name.clone(),
            sources: vec![name.clone()],
            circumstances: Circumstances::default(),
            groups: Vec::new(),
        })
        .collect();
    let all = (options.rounds * names.len()) as u64;
    let mut done = 0;
    let mut whole = 0;
    'rounds: for round in 0..options.rounds {
        for index in summary::round_order(names.len(), round, job.seed) {
            let message = format!("round {} of {}, {}", round + 1, options.rounds, names[index]);
            match report(progress, "compare", done, all, &message) {
                Err(LabError::Stopped) => break 'rounds,
                other => other?,
            }
            // Each round makes other requests, and the same ones on all targets.
            let job = Job { seed: seeds::of_window(job.seed, &job.name, round), ..job.clone() };
            let run = measure(index, &job)?;
            done += 1;
            match run.end {
                End::Complete => add(&mut sides[index], run, &machine),
                End::Stopped => break 'rounds,
                End::Failed { first, errors } => {
                    return Err(LabError::BadOptions {
                        what: format!("{}: {errors} requests failed; the first: {first}", names[index]),
                        hint: "an average over a failing device means nothing: mend it and compare again".into(),
                    });
                }
            }
        }
        whole = round + 1;
    }
    if whole == 0 {
        return Err(LabError::Stopped);
    }
    for side in &mut sides {
        side.groups.iter_mut().for_each(|group| group.rounds.truncate(whole));
        side.circumstances.partial = whole < options.rounds;
    }
    Ok(sides)
}

fn add(side: &mut Side, run: Run, machine: &Machine) {
    side.circumstances.machine = machine_of(machine);
    side.circumstances.cache = cache_of(&run.targets);
    let versions = Versions::detect();
    side.circumstances.version = format!("{}{}", versions.diskwright, if versions.optimised { "" } else { " (debug)" });
    for warning in run.warnings {
        if !side.circumstances.warnings.contains(&warning) {
            side.circumstances.warnings.push(warning);
        }
    }
    for phase in &run.phases {
        let figures = Figures::of(phase);
        match side.groups.iter_mut().find(|group| group.name == phase.name) {
            Some(group) => group.rounds.push(figures),
            None => side.groups.push(Group {
                name: phase.name.clone(),
                workload: workload_of(&run.job, &phase.name),
                rounds: vec![figures],
                stretches: Vec::new(),
            }),
        }
    }
}
