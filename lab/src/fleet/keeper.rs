//! The targets of an agent: what its user allows, and nothing else.
//!
//! ```text
//!   the agent's options: targets, whether they may be written, data destroyed, files created
//!            │
//!   task ────┴─▶ prepare.rs: open, check, fill ─▶ ranges that the task may write
//!   job  ─────────────────────────────────────▶ does it write only there? ─▶ it may run
//! ```
//!
//! A controller names targets and sends jobs. It cannot name a path, and it cannot write where the
//! task did not: the checks before writing (`inspect/guard.rs`) were made for the ranges of the
//! task.

use crate::{
    inspect::warnings::working_sets,
    open::{self, OpenHow},
    prepare::{self, PrepareOptions},
    progress::{Silent, Step},
};
use diskwright_fleet::{
    agent::{Keeper, Prepared, Preparing},
    message::{Allowed, Task},
};
use diskwright_load::{
    Job, OpenTarget,
    job::{Contents, Load},
};
use std::ops::Range;

/// A target that an agent allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TargetOfAgent {
    /// Its name for controllers.
    pub name: String,
    /// The target, as [`open::open`] takes it.
    pub spec: String,
}

/// See the module documentation.
#[derive(Debug)]
pub struct LabKeeper {
    targets: Vec<TargetOfAgent>,
    /// Whether targets may be written at all.
    writable: bool,
    options: PrepareOptions,
    /// Of the task that is prepared: sizes, the ranges that may be written, and the contents.
    prepared: Vec<(u64, Vec<Range<u64>>)>,
    contents: Contents,
}

impl LabKeeper {
    /// A keeper of these targets. `options` says what may be done to them; the controller chooses
    /// whether they are filled.
    pub fn new(targets: Vec<TargetOfAgent>, writable: bool, options: PrepareOptions) -> Self {
        Self { targets, writable, options, prepared: Vec::new(), contents: Contents::default() }
    }
}

impl Keeper for LabKeeper {
    fn allowed(&self) -> Vec<Allowed> {
        let allowed = |target: &TargetOfAgent| Allowed { name: target.name.clone(), writable: self.writable };
        self.targets.iter().map(allowed).collect()
    }

    fn prepare(&mut self, task: &Task, progress: &mut Preparing<'_>) -> Result<Prepared, String> {
        if !self.writable && (task.job.writes() || task.fill) {
            return Err("the job writes, and this agent allows reading only".into());
        }
        let wanted: Vec<&TargetOfAgent> = match task.targets.is_empty() {
            true => self.targets.iter().collect(),
            false => {
                let find = |name: &String| self.targets.iter().find(|target| target.name == *name);
                task.targets.iter().filter_map(find).collect()
            }
        };
        let specs: Vec<String> = wanted.iter().map(|target| target.spec.clone()).collect();
        let disk = diskwright_disk::OpenOptions { engine: task.job.engine.into(), ..self.options.open.disk.clone() };
        let options = PrepareOptions {
            fill: task.fill,
            open: OpenHow { writable: false, cache: task.job.cache, disk },
            ..self.options.clone()
        };
        let mut step = |step: Step<'_>| progress(&format!("{} {}", step.phase, step.message), step.done, step.total);
        let prepared = prepare::prepare(&task.job, &specs, &options, &mut step).map_err(|error| error.to_string())?;
        let ranges_of = |(number, target): (usize, &OpenTarget)| {
            let size_bytes = target.device.geometry().size_bytes;
            (size_bytes, working_sets(&task.job, number, size_bytes, Load::writes))
        };
        self.prepared = prepared.targets.iter().enumerate().map(ranges_of).collect();
        self.contents = task.job.contents;
        let named = prepared.targets.into_iter().zip(wanted);
        let targets = named.map(|(target, of)| OpenTarget { name: of.name.clone(), ..target }).collect();
        Ok(Prepared { targets, warnings: prepared.warnings })
    }

    fn allows(&self, job: &Job) -> Result<(), String> {
        for (number, (size_bytes, may)) in self.prepared.iter().enumerate() {
            let wanted = working_sets(job, number, *size_bytes, Load::writes);
            let is_within = |set: &Range<u64>| may.iter().any(|may| may.start <= set.start && set.end <= may.end);
            if let Some(set) = wanted.iter().find(|set| !is_within(set)) {
                return Err(format!(
                    "the job writes bytes {} to {} of target {}, and the targets were not prepared for that",
                    set.start,
                    set.end,
                    number + 1
                ));
            }
        }
        if job.contents == Contents::Verified && self.contents != Contents::Verified {
            return Err("the job verifies contents, and the targets were not prepared for that".into());
        }
        Ok(())
    }

    fn close(&mut self, targets: Vec<OpenTarget>) -> Result<(), String> {
        self.prepared.clear();
        open::close(&targets, &mut Silent).map_err(|error| error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::job::{Bytes, Span};
    use std::fs;

    fn job(read_percent: f64, working_set: u64) -> Job {
        let load = Load { read_percent, working_set: Bytes(working_set), ..Load::default() };
        Job::simple("x", load, Span::default(), Span::from_millis(10))
    }

    fn task(job: Job) -> Task {
        Task { run: "r".into(), targets: Vec::new(), job, fill: false }
    }

    fn keeper(spec: &str, writable: bool) -> LabKeeper {
        let target = TargetOfAgent { name: "data".into(), spec: spec.into() };
        LabKeeper::new(vec![target], writable, PrepareOptions::default())
    }

    #[test]
    fn a_controller_sees_names_and_not_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret.raw");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        let mut keeper = keeper(path.to_str().unwrap(), false);
        assert_eq!(keeper.allowed(), [Allowed { name: "data".into(), writable: false }]);
        let prepared = keeper.prepare(&task(job(100.0, 0)), &mut |_, _, _| true).unwrap();
        assert_eq!(prepared.targets[0].name, "data");
        keeper.close(prepared.targets).unwrap();
    }

    #[test]
    fn nothing_is_written_that_the_agent_did_not_allow() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.raw");
        let mut data = vec![0; 1 << 20];
        data[600_000..].fill(7);
        fs::write(&path, &data).unwrap();
        let go_on: &mut Preparing<'_> = &mut |_, _, _| true;
        // Reading only.
        let spec = path.to_str().unwrap();
        let refused = keeper(spec, false).prepare(&task(job(0.0, 0)), go_on).unwrap_err();
        assert!(refused.contains("reading only"), "{refused}");
        let fill = Task { fill: true, ..task(job(100.0, 0)) };
        keeper(spec, false).prepare(&fill, go_on).unwrap_err();
        // Data, and no permission to destroy them.
        let mut keeper = keeper(spec, true);
        let refused = keeper.prepare(&task(job(0.0, 0)), go_on).unwrap_err();
        assert!(refused.contains("would be overwritten"), "{refused}");
        // Only the part without data, and then a job that wants more.
        let prepared = keeper.prepare(&task(job(0.0, 512 << 10)), go_on).unwrap();
        keeper.allows(&job(0.0, 512 << 10)).unwrap();
        keeper.allows(&job(100.0, 0)).unwrap();
        let refused = keeper.allows(&job(0.0, 0)).unwrap_err();
        assert!(refused.contains("not prepared for that"), "{refused}");
        keeper.allows(&Job { contents: Contents::Verified, ..job(0.0, 4096) }).unwrap_err();
        keeper.close(prepared.targets).unwrap();
        assert_eq!(fs::read(&path).unwrap(), data);
    }
}
