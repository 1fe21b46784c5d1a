//! Applications of exports as cases. Until one has ended, the copy has the identity of the base and
//! its contents, or that of the result and its contents, or another one. Then each sector is old or
//! new, and the same application finishes it.
//!
//! ```text
//!   disk (the copy; half full) ◀─ upper (zeros, data) ─▶ export;  upper is removed again
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
use diskwright_disk::{ApplyOptions, CreateRequest, Difference, Disk, Increment, OpenOptions, apply_export, create};
use diskwright_store::{BlockDevice, EngineKind, FileSystem};
use std::path::{Path, PathBuf};
use uuid::Uuid;

/// The version of what the exported disk holds.
const NEW: Version = 700;
/// By how much the exported disk is larger, if it is.
const GROWTH_BYTES: u64 = 2 << 20;

/// An application of an export.
#[derive(Debug, Clone)]
pub struct ApplyCase {
    /// The kind of the copy.
    pub kind: DiskCase,
    /// Whether the export is a differencing image; else it is a stream.
    pub image: bool,
    /// Whether the exported disk is larger than its base.
    pub grows: bool,
}

impl ApplyCase {
    fn stream(&self) -> PathBuf {
        "/d/export.dwdiff".into()
    }

    fn export(&self) -> PathBuf {
        if self.image { format!("/d/export.{}", self.kind.format).into() } else { self.stream() }
    }

    /// Zeros of the exported disk: the third quarter of each window. Data: 8 sectors at its start.
    fn changes(&self) -> Vec<(Version, u64, u64)> {
        let zeros = self.kind.windows.iter().map(|window| (0, window.first + window.count / 2, window.count / 4));
        let data = (NEW..).zip(&self.kind.windows);
        let data = data.map(|(version, window)| (version, window.first, window.count.min(8)));
        zeros.chain(data).collect()
    }

    /// The copy with the changes. Those that are not acknowledged may be there or not.
    fn ledger(&self, acknowledged: bool) -> Ledger {
        let mut ledger = self.kind.half_full_ledger();
        for (version, first, count) in self.changes() {
            let write = ledger.announce(first, count, version);
            if acknowledged {
                ledger.acknowledge(write, true);
            }
        }
        ledger
    }

    fn options(&self, world: &World) -> OpenOptions {
        OpenOptions { engine: EngineKind::Sync, files: world.files(), ..OpenOptions::default() }
    }

    fn carry_out(&self, world: &World) -> Outcome {
        let options = ApplyOptions { open: self.options(world), ..ApplyOptions::default() };
        apply_export(Increment::File(&self.export()), &self.kind.path(), &options, &mut |_, _| true)
            .map(drop)
            .map_err(|error| error.to_string())
    }

    /// The identities of the base and of the result, as the stream names them.
    fn identities(&self, world: &World) -> Outcome<[Uuid; 2]> {
        let text = |error: &dyn std::fmt::Display| error.to_string();
        let store = world.open(&self.stream(), &diskwright_store::OpenOptions::default()).map_err(|e| text(&e))?;
        let mut ids = [[0; 16]; 2];
        for (id, at) in ids.iter_mut().zip([16, 56]) {
            store.read_at(id, at).map_err(|e| text(&e))?;
        }
        Ok(ids.map(Uuid::from_bytes))
    }

    /// Identity and size of the copy.
    fn present(&self, world: &World) -> Outcome<(Option<Uuid>, u64)> {
        let disk = Disk::open(self.kind.path(), &self.options(world)).map_err(|error| error.to_string())?;
        Ok((disk.layers()[0].image.linkage_id().map(diskwright_image::LinkageId::to_uuid), disk.geometry().size_bytes))
    }

    fn reads(&self, world: &World, ledger: &Ledger, after_cut: bool) -> Outcome {
        let path = self.kind.path();
        self.kind.check(world, &path)?;
        let shown = self.kind.read_at(world, &path)?;
        ledger.judge(&shown, after_cut).map(drop)
    }

    /// Whether the application has ended.
    fn judge_copy(&self, world: &World) -> Outcome<bool> {
        let [base, result] = self.identities(world)?;
        let (id, _) = self.present(world)?;
        match id {
            Some(id) if id == base => {
                self.reads(world, &self.kind.half_full_ledger(), false)
                    .map_err(|error| format!("the base: {error}"))?;
            }
            Some(id) if id == result => {
                self.reads(world, &self.ledger(true), false).map_err(|error| format!("the result: {error}"))?;
                return Ok(true);
            }
            _ => self.reads(world, &self.ledger(false), true).map_err(|error| format!("in between: {error}"))?,
        }
        Ok(false)
    }
}

impl Case for ApplyCase {
    type Truth = Ended;

    fn name(&self) -> String {
        let what = if self.image { "an image" } else { "a stream" };
        let grows = if self.grows { ", growing" } else { "" };
        format!("apply {what} to {}{grows}", self.kind.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        let text = |error: diskwright_disk::DiskError| error.to_string();
        self.kind.make(world)?;
        self.kind.fill_half(world)?;
        let (_, size_bytes) = self.present(world)?;
        let upper = PathBuf::from(format!("/d/upper.{}", self.kind.format));
        let request = CreateRequest {
            parent: Some(self.kind.path()),
            size_bytes: self.grows.then_some(size_bytes + GROWTH_BYTES),
            files: world.files(),
            ..CreateRequest::default()
        };
        create(&upper, &request).map_err(text)?;
        self.kind.fill_at(world, &upper, &self.changes())?;
        let outs: &[PathBuf] = &[self.stream(), self.export()];
        for out in &outs[..if self.image { 2 } else { 1 }] {
            self.make_export(world, &upper, out).map_err(text)?;
        }
        world.remove(&upper).map_err(|error| error.to_string())
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.carry_out(world))
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let done = self.judge_copy(world).map_err(|error| format!("after the cut: {error}"))?;
        if *truth == Ended::Well && !done {
            return Err("the application had ended, and the copy has not the identity of the result".into());
        }
        if depth.resume {
            self.carry_out(world).map_err(|error| format!("the same application again: {error}"))?;
            if !self.judge_copy(world).map_err(|error| format!("after the same application again: {error}"))? {
                return Err("the same application again has not finished it".into());
            }
            let path = self.kind.path();
            let (_, size_bytes) = self.present(world)?;
            let opened =
                Disk::open(&path, &OpenOptions { writable: true, allow_parent_write: true, ..self.options(world) });
            let disk = opened.map_err(|error| format!("opening it for writing: {error}"))?;
            if disk.geometry().size_bytes != size_bytes {
                return Err("another size when it is opened for writing".into());
            }
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(mutation, Mutation::Disordered(Phase::Command) | Mutation::NotDurable(Phase::Command))
    }
}

impl ApplyCase {
    fn make_export(&self, world: &World, upper: &Path, out: &Path) -> diskwright_disk::Result<()> {
        let disk = Disk::open(upper, &self.options(world))?;
        let mut difference = Difference::since((&disk, upper), None, &world.files(), EngineKind::Sync)?;
        difference.export(EngineKind::Sync, &world.files()).to_file(out, false, &mut |_, _| true).map(drop)
    }
}

impl FaultyCase for ApplyCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        run_faulty_command(stage, reported, |world| self.carry_out(world));
        Ok(())
    }

    /// What an open reads first is in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The applications that are tested.
pub fn applications() -> Vec<ApplyCase> {
    let case = |name: &str, image, grows| ApplyCase { kind: crate::disk::named(name), image, grows };
    vec![
        case("vhd dynamic 16K", false, true),
        case("vhd fixed", false, false),
        case("vhd differencing 16K", true, false),
        case("vhdx dynamic 1M", false, true),
        case("vhdx fixed 1M", false, false),
        case("vhdx differencing 1M", true, false),
    ]
}
