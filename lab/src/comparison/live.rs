//! A live A/B comparison: measures several targets in interleaved rounds. Rounds are compared in
//! pairs, so a drift of the machine's speed affects all targets alike.

use super::{
    Circumstances, Group, Side,
    read::{cache_of, machine_of, version_of, workload_of},
};
use crate::{
    LabError, Result,
    progress::Progress,
    rounds::{self, Rounds, Steps, Window},
};
use diskwright_load::{
    figures::Figures,
    job::Job,
    machine::{Machine, Versions},
    record::{End, Run},
    run::Watch,
};

/// Rounds and range of a live comparison.
#[derive(Debug, Clone, Copy)]
pub struct LiveOptions {
    /// Rounds of each target. Too few rounds cannot show a difference: see
    /// `inference::Design::fewest`.
    pub rounds: usize,
    /// Size of the smallest target. Sequential streams begin within it, at another offset in each
    /// round.
    pub smallest_bytes: u64,
}

/// Measures a job on the target with this index.
pub type MeasureOne<'a> = dyn FnMut(usize, &Job, &dyn Watch) -> Result<Run> + 'a;

/// Measures `job` on each of `names`; `measure` gets the index of the name. If the user stops it,
/// the whole rounds are kept.
///
/// # Errors
/// Any error of `measure`; [`LabError::BadOptions`] if requests failed; [`LabError::Stopped`]
/// without a whole round.
pub fn live(
    names: &[String],
    job: &Job,
    options: &LiveOptions,
    measure: &mut MeasureOne<'_>,
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
    let title = |at: Window| Some(format!("round {} of {}, {}", at.round + 1, options.rounds, names[at.cell]));
    let mut window = |at: Window, watch: &dyn Watch| {
        let job = rounds::job_of(job, &job.name, at.round, Some(options.smallest_bytes));
        let run = measure(at.cell, &job, watch)?;
        match run.head.end {
            End::Complete => add(&mut sides[at.cell], run, &machine),
            End::Stopped => return Err(LabError::Stopped),
            End::Failed { first, errors } => {
                return Err(LabError::BadOptions {
                    what: format!("{}: {errors} requests failed; the first: {first}", names[at.cell]),
                    hint: "figures of a failing device are meaningless: repair it and compare again".into(),
                });
            }
        }
        Ok(())
    };
    let mut steps = Steps::new(progress, "compare", options.rounds * names.len());
    let done =
        rounds::interleave(&Rounds::new(options.rounds, job.seed), names.len(), &mut steps, &title, &mut window)?;
    if done.whole == 0 {
        return Err(LabError::Stopped);
    }
    for side in &mut sides {
        side.groups.iter_mut().for_each(|group| group.cell.truncate(done.whole));
        side.circumstances.partial = done.whole < options.rounds;
    }
    Ok(sides)
}

fn add(side: &mut Side, run: Run, machine: &Machine) {
    side.circumstances.machine = machine_of(machine);
    side.circumstances.cache = cache_of(&run.targets);
    side.circumstances.version = version_of(&Versions::detect());
    for warning in run.head.warnings {
        if !side.circumstances.warnings.contains(&warning) {
            side.circumstances.warnings.push(warning);
        }
    }
    for phase in &run.phases {
        let figures = Figures::of(phase);
        match side.groups.iter_mut().find(|group| group.name() == phase.name) {
            Some(group) => group.cell.rounds.push(figures),
            None => {
                let mut group = Group::new(&phase.name, &workload_of(&run.job, &phase.name), vec![figures]);
                group.cell.subject.clone_from(&side.name);
                side.groups.push(group);
            }
        }
    }
}
