//! Merges as cases. Until a merge has ended, the merged image reads as before, or it is gone and
//! the image that took its data reads so. An image above it always reads as before. The same merge
//! then finishes what a cut has left.
//!
//! ```text
//!   parent ◀─ disk (data, zeros) ◀─ upper (some data) ◀─ over (empty)     only of formats that
//! ```                                                                     record times
//!
//! A VHD records when its parent's file was last changed. So there the file system has a clock,
//! and the image at the top is one that no merge needs to look at: it can be written all the time.

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
use diskwright_disk::{
    CreateRequest, Disk, KeptName, MergeOptions, OpenOptions, SnapshotOptions, create, merge, snapshot,
};
use diskwright_store::{EngineKind, FileSystem};
use std::path::{Path, PathBuf};

/// The kind of VMDK whose data lies in further files.
const TWO_FILES: &str = "twoGbMaxExtentSparse";

/// The version of what the upper image holds.
const UPPER: Version = 500;

/// A merge.
#[derive(Debug, Clone)]
pub struct MergeCase {
    /// The kind of the merged image, which has a parent.
    pub kind: DiskCase,
    /// Whose name is kept.
    pub keep: KeptName,
    /// Whether the upper image is merged too: two steps at once.
    pub both: bool,
    /// Whether data may be shared by reflink. A [`World`] supports it.
    pub reflink: bool,
}

impl MergeCase {
    fn upper(&self) -> PathBuf {
        format!("/d/upper.{}", self.kind.format).into()
    }

    /// Whether children record when their parent's file was last changed.
    fn has_times(&self) -> bool {
        self.kind.format.driver().child_records_time
    }

    /// Whether each image has its data in a second file.
    fn has_extents(&self) -> bool {
        self.kind.subformat.is_some()
    }

    fn over(&self) -> Option<PathBuf> {
        self.has_times().then(|| format!("/d/over.{}", self.kind.format).into())
    }

    fn target(&self) -> PathBuf {
        format!("/d/parent.{}", self.kind.format).into()
    }

    /// The image that is merged.
    fn source(&self) -> PathBuf {
        if self.both { self.upper() } else { self.kind.path() }
    }

    /// Zeros in the lower image: the third quarter of each window.
    fn zeros(&self) -> Vec<(Version, u64, u64)> {
        self.kind.windows.iter().map(|window| (0, window.first + window.count / 2, window.count / 4)).collect()
    }

    /// Data in the upper image: 8 sectors at the start of each window.
    fn upper_data(&self) -> Vec<(Version, u64, u64)> {
        (UPPER..)
            .zip(&self.kind.windows)
            .map(|(version, window)| (version, window.first, window.count.min(8)))
            .collect()
    }

    fn ledger(&self, with_upper: bool) -> Ledger {
        let mut ledger = self.kind.half_full_ledger();
        let upper = if with_upper { self.upper_data() } else { Vec::new() };
        for (version, first, count) in self.zeros().into_iter().chain(upper) {
            let write = ledger.announce(first, count, version);
            ledger.acknowledge(write, true);
        }
        ledger
    }

    fn options(&self, world: &World) -> MergeOptions {
        MergeOptions {
            into: self.both.then(|| self.target()),
            keep: self.keep,
            no_reflink: !self.reflink,
            open: OpenOptions { engine: EngineKind::Sync, files: world.files(), ..OpenOptions::default() },
            ..MergeOptions::default()
        }
    }

    fn carry_out(&self, world: &World) -> Outcome {
        merge(self.source(), &self.options(world), &mut |_, _| true).map(drop).map_err(|error| error.to_string())
    }

    /// The image that has the data of the merged one, whether the merge has ended or not.
    fn holder(&self, world: &World) -> PathBuf {
        let source = self.source();
        if world.facts(&source).is_ok() { source } else { self.target() }
    }

    fn reads(&self, world: &World, path: &Path, with_upper: bool) -> Outcome {
        self.kind.check(world, path)?;
        let shown = self.kind.read_at(world, path)?;
        self.ledger(with_upper).judge(&shown, false).map(drop).map_err(|error| format!("{}: {error}", path.display()))
    }

    fn judge_all(&self, world: &World) -> Outcome {
        self.reads(world, &self.holder(world), self.both)?;
        if !self.both {
            self.reads(world, &self.upper(), true)?;
        } else if world.facts(&self.kind.path()).is_ok() && !self.is_done(world)? {
            self.reads(world, &self.kind.path(), false)?;
        }
        let Some(over) = self.over() else { return Ok(()) };
        self.reads(world, &over, true)?;
        self.kind.fill_at(world, &over, &[]).map_err(|error| format!("opening the top for writing: {error}"))
    }

    /// Whether the merged image is gone, or the target has its name.
    fn is_done(&self, world: &World) -> Outcome<bool> {
        let holder = self.holder(world);
        let disk = Disk::open(&holder, &self.kind.open_options(world, false)).map_err(|error| error.to_string())?;
        Ok(disk.layers().len() == 1)
    }

    /// The files that the merge leaves.
    fn judge_names(&self, world: &World) -> Outcome {
        let last = if self.keep == KeptName::Childs { self.source() } else { self.target() };
        let mut expected: Vec<PathBuf> =
            [Some(last), (!self.both).then(|| self.upper()), self.over()].into_iter().flatten().collect();
        // The extent of the image that took the data keeps its name.
        expected.extend(self.has_extents().then(|| extent_of(&self.target())));
        expected.sort();
        let mut found: Vec<PathBuf> = world.snapshot().names.into_keys().collect();
        found.sort();
        if found != expected { Err(format!("the files {found:?} are there, expected {expected:?}")) } else { Ok(()) }
    }
}

/// The second file of an image.
fn extent_of(path: &Path) -> PathBuf {
    path.with_file_name(format!("{}-s001.vmdk", path.file_stem().unwrap_or_default().display()))
}

impl Case for MergeCase {
    type Truth = Ended;

    fn name(&self) -> String {
        let both = if self.both { ", two steps" } else { "" };
        let keep = if self.keep == KeptName::Childs { ", keeping the name" } else { "" };
        let share = if self.reflink { ", sharing" } else { "" };
        format!("merge {}{both}{keep}{share}", self.kind.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        if self.has_times() {
            world.keep_times();
        }
        self.kind.make(world)?;
        self.kind.fill_half(world)?;
        self.kind.fill_at(world, &self.kind.path(), &self.zeros())?;
        let make = |child: PathBuf, parent: PathBuf| {
            let request = CreateRequest { parent: Some(parent), files: world.files(), ..CreateRequest::default() };
            create(child, &request).map(drop).map_err(|error| error.to_string())
        };
        make(self.upper(), self.kind.path())?;
        self.kind.fill_at(world, &self.upper(), &self.upper_data())?;
        self.over().map_or(Ok(()), |over| make(over, self.upper()))
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.carry_out(world))
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        self.judge_all(world).map_err(|error| format!("after the cut: {error}"))?;
        let done = self.is_done(world)?;
        if *truth == Ended::Well {
            if !done {
                return Err("the merge had ended, and its source has a parent again".into());
            }
            self.judge_names(world)?;
        }
        if depth.resume {
            if done && self.has_extents() && !self.both {
                // A merge that was cut off at its end is not run again. The next snapshot in the
                // folder removes the extents that it has left.
                let open = self.kind.open_options(world, false);
                let options = SnapshotOptions { name: "next".into(), open, ..SnapshotOptions::default() };
                snapshot(self.upper(), &options).map_err(|error| format!("the next snapshot: {error}"))?;
                self.reads(world, &self.upper(), true)?;
                let left = extent_of(&self.kind.path());
                if world.facts(&left).is_ok() {
                    return Err(format!("{} is there after the next snapshot", left.display()));
                }
            }
            if !done {
                self.carry_out(world).map_err(|error| format!("the same merge again: {error}"))?;
                self.judge_all(world).map_err(|error| format!("after the same merge again: {error}"))?;
                self.judge_names(world)?;
            }
            // What is at the top can be written.
            let top = if self.both { self.holder(world) } else { self.upper() };
            let top = self.over().unwrap_or(top);
            self.kind.fill_at(world, &top, &[]).map_err(|error| format!("opening it for writing: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(
            mutation,
            Mutation::NoDirectorySync | Mutation::Disordered(Phase::Command) | Mutation::NotDurable(Phase::Command)
        )
    }
}

impl FaultyCase for MergeCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        run_faulty_command(stage, reported, |world| self.carry_out(world));
        Ok(())
    }

    /// What an open reads first is in two places, and what cannot be shared is copied.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read || self.reflink && matches!(op_kind, OpKind::Write | OpKind::Length)
    }
}

/// The merges that are tested.
pub fn merges() -> Vec<MergeCase> {
    let case = |name: &str, keep, both, reflink| MergeCase { kind: crate::disk::named(name), keep, both, reflink };
    let (vhd, vhdx) = ("vhd differencing 16K", "vhdx differencing 1M");
    let (qcow2, vmdk) = ("qcow2 child 8K", "vmdk child 64K");
    let in_two_files = |keep, both| {
        let kind = crate::disk::named(vmdk);
        let kind = DiskCase { name: "vmdk child 64K, in two files", subformat: Some(TWO_FILES), ..kind };
        MergeCase { kind, keep, both, reflink: false }
    };
    vec![
        in_two_files(KeptName::Parents, false),
        in_two_files(KeptName::Childs, false),
        in_two_files(KeptName::Parents, true),
        case(vhd, KeptName::Parents, false, false),
        case(vhd, KeptName::Childs, false, false),
        case(vhd, KeptName::Childs, true, true),
        case(vhd, KeptName::Parents, true, false),
        case(vhdx, KeptName::Parents, false, false),
        case(vhdx, KeptName::Childs, false, true),
        case(vhdx, KeptName::Parents, true, false),
        case(qcow2, KeptName::Parents, false, true),
        case(qcow2, KeptName::Childs, false, false),
        case(qcow2, KeptName::Childs, true, false),
        case(vmdk, KeptName::Parents, false, false),
        case(vmdk, KeptName::Childs, false, true),
        case(vmdk, KeptName::Parents, true, false),
    ]
}
