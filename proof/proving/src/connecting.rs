//! New links of a chain whose images were renamed, as cases. At every instant each image is sound,
//! and the top reads right or says that a parent is missing. The same command then finishes what a
//! cut has left.
//!
//! ```text
//!   parent ◀─ disk (half full) ◀─ upper (some data)      two of them get other names:
//!   found  ✗  moved            ✗  upper                  reconnect --search finds both
//! ```

use crate::{
    command::{Ended, run_command, run_faulty_command},
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    ledger::{Ledger, Version},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{CreateRequest, OpenOptions, ReconnectOptions, create, reconnect};
use diskwright_store::{EngineKind, FileSystem};
use std::path::PathBuf;

/// The version of what the top holds.
const UPPER: Version = 600;

/// Connects a chain again, of which the middle image is of this kind.
#[derive(Debug, Clone)]
pub struct ReconnectCase(pub DiskCase);

impl ReconnectCase {
    fn at(&self, name: &str) -> PathBuf {
        format!("/d/{name}.{}", self.0.format).into()
    }

    fn upper_data(&self) -> Vec<(Version, u64, u64)> {
        (UPPER..).zip(&self.0.windows).map(|(version, window)| (version, window.first, window.count.min(8))).collect()
    }

    fn ledger(&self) -> Ledger {
        let mut ledger = self.0.half_full_ledger();
        for (version, first, count) in self.upper_data() {
            let write = ledger.announce(first, count, version);
            ledger.acknowledge(write, true);
        }
        ledger
    }

    fn carry_out(&self, world: &World) -> Outcome {
        let open = OpenOptions { engine: EngineKind::Sync, files: world.files(), ..OpenOptions::default() };
        let options = ReconnectOptions { search_dirs: vec!["/d".into()], open, ..ReconnectOptions::default() };
        let done = reconnect(self.at("upper"), &options, &mut |_, _| true).map_err(|error| error.to_string())?;
        if done.chain.len() == 3 { Ok(()) } else { Err(format!("the chain is {:?}", done.chain)) }
    }

    /// Every image is sound. Returns whether the top can be read; then it reads right.
    fn judge_all(&self, world: &World) -> Outcome<bool> {
        for name in ["found", "moved", "upper"] {
            self.0.check(world, &self.at(name)).map_err(|error| format!("{name}: {error}"))?;
        }
        match self.0.read_at(world, &self.at("upper")) {
            Ok(shown) => self.ledger().judge(&shown, false).map(|_| true),
            Err(error) if error.contains("parent") => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The top reads right and can be written: times of last change fit.
    fn judge_end(&self, world: &World) -> Outcome {
        if !self.judge_all(world)? {
            return Err("its parents are not found".into());
        }
        let written = self.0.fill_at(world, &self.at("upper"), &[]);
        written.map_err(|error| format!("opening the top for writing: {error}"))
    }
}

impl Case for ReconnectCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("reconnect {}", self.0.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        let text = |error: std::io::Error| error.to_string();
        if self.0.format.driver().child_records_time {
            world.keep_times();
        }
        self.0.make(world)?;
        self.0.fill_half(world)?;
        let request = CreateRequest { parent: Some(self.0.path()), files: world.files(), ..CreateRequest::default() };
        create(self.at("upper"), &request).map_err(|error| error.to_string())?;
        self.0.fill_at(world, &self.at("upper"), &self.upper_data())?;
        world.rename(&self.at("parent"), &self.at("found"), false).map_err(text)?;
        world.rename(&self.0.path(), &self.at("moved"), false).map_err(text)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.carry_out(world))
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        match truth {
            Ended::Well => self.judge_end(world)?,
            Ended::No => drop(self.judge_all(world).map_err(|error| format!("after the cut: {error}"))?),
        }
        if depth.resume {
            self.carry_out(world).map_err(|error| format!("the same command again: {error}"))?;
            self.judge_end(world).map_err(|error| format!("after the same command again: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(mutation, Mutation::Disordered(Phase::Command) | Mutation::NotDurable(Phase::Command))
    }
}

impl FaultyCase for ReconnectCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        run_faulty_command(stage, reported, |world| self.carry_out(world));
        Ok(())
    }

    /// What an open reads first is in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The chains that are connected again.
pub fn reconnections() -> Vec<ReconnectCase> {
    let kinds = ["vhd differencing 16K", "vhdx differencing 1M", "vmdk child 64K"];
    kinds.into_iter().map(|name| ReconnectCase(crate::disk::named(name))).collect()
}
