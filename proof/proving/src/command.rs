//! Commands that make files, as cases: create and convert. Until such a command has succeeded, its
//! destination does not exist, or is not a valid disk, or is complete. Afterwards the destination
//! is complete and durable.

use crate::{
    disk::DiskCase,
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    history::Snapshot,
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, convert};
use diskwright_image::Format;
use diskwright_store::{CacheMode, EngineKind, FileSystem};
use std::path::PathBuf;

/// Creates a disk of a kind.
#[derive(Debug, Clone)]
pub struct CreateCase(pub DiskCase);

/// Converts a disk of a kind, with some contents, to another format.
#[derive(Debug, Clone)]
pub struct ConvertCase {
    /// Name for messages.
    pub name: String,
    /// Kind of the source.
    pub source: DiskCase,
    /// How the destination is created.
    pub dest: CreateRequest,
    /// Whether to use reflink. A [`World`] supports it.
    pub reflink: bool,
    /// Whether convert verifies the copy.
    pub verify: bool,
}

/// Whether a command has succeeded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It is running, or it has failed.
    No,
    /// It has succeeded.
    Well,
}

/// Runs a command as the only thing that a case does.
///
/// # Errors
/// That of the command.
pub(crate) fn run_command(stage: &Stage<Ended>, command: impl FnOnce(&World) -> Outcome) -> Outcome {
    stage.record(Ended::No);
    stage.world.phase(Some(Phase::Command));
    command(&stage.world)?;
    stage.world.phase(None);
    stage.record(Ended::Well);
    Ok(())
}

/// The same for a command that may fail.
pub(crate) fn run_faulty_command(
    stage: &Stage<Ended>,
    reported: &mut Reported,
    command: impl FnOnce(&World) -> Outcome,
) {
    if let Err(error) = run_command(stage, command) {
        reported.errors.push(error);
    }
}

impl Case for CreateCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("create {}", self.0.name)
    }

    /// Makes the folder and the parent of a child. The child that is made with the parent is
    /// removed.
    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        world.remove(&self.0.path()).map_err(|error| error.to_string())?;
        let other = diskwright_store::OpenOptions { writable: true, create_new: true, ..Default::default() };
        world.open("/d/something-else".as_ref(), &other).map(drop).map_err(|error| error.to_string())
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| self.0.make_again(world))
    }

    fn judge(&self, world: &World, truth: &Ended, seed: u64, depth: Depth) -> Outcome<u64> {
        let path = self.0.path();
        if world.facts(&path).is_err() {
            return if *truth == Ended::No { Ok(0) } else { Err("the new file does not exist".into()) };
        }
        // Before the command has succeeded, a raw file may have any contents.
        if *truth == Ended::No && self.0.format == Format::Raw {
            return Ok(0);
        }
        if *truth == Ended::No {
            // Its tables may be incomplete, and `check` may report that. But it must not show data
            // that was not written to it.
            return match Disk::open(&path, &self.0.open_options(world, false)) {
                Err(_) => Ok(0),
                Ok(_) => self.0.fresh_ledger().judge(&self.0.read_at(world, &path)?, false).map(|_| 0),
            };
        }
        let case = DiskCase { damage: None, ..self.0.clone() };
        case.judge(world, &case.new_truth(world)?, seed, depth)
    }
}

impl ConvertCase {
    fn dest_path(&self) -> PathBuf {
        format!("/d/copy.{}", self.dest.format.unwrap_or(Format::Raw)).into()
    }

    fn options(&self, world: &World) -> ConvertOptions {
        let files = world.files();
        ConvertOptions {
            source: OpenOptions { engine: EngineKind::Sync, files: files.clone(), ..OpenOptions::default() },
            cache: Some(CacheMode::PageCache),
            dest: CreateRequest { files, ..self.dest.clone() },
            skip_damaged: false,
            verify: self.verify,
            no_reflink: !self.reflink,
            ..ConvertOptions::default()
        }
    }

    /// Judges a copy that exists.
    fn judge_copy(&self, world: &World, path: &std::path::Path, format: Format) -> Outcome {
        let case = DiskCase { format, broken_rule: None, damage: None, ..self.source.clone() };
        case.check(world, path)?;
        let shown = case.read_at(world, path)?;
        self.source.half_full_ledger().judge(&shown, false).map(drop)
    }
}

impl Case for ConvertCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("convert {}", self.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.source.make(world)?;
        self.source.fill_half(world)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        run_command(stage, |world| {
            let converted = convert(self.source.path(), self.dest_path(), &self.options(world), &mut |_, _| true);
            converted.map(drop).map_err(|error| error.to_string())
        })
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let dest = self.dest_path();
        self.judge_copy(world, &self.source.path(), self.source.format)
            .map_err(|error| format!("the source: {error}"))?;
        if world.facts(&dest).is_ok() {
            self.judge_copy(world, &dest, self.dest.format.unwrap_or(Format::Raw))
                .map_err(|error| format!("the copy: {error}"))?;
        } else if *truth == Ended::Well {
            return Err("the copy does not exist".into());
        }
        if depth.resume && *truth == Ended::No && world.facts(&dest).is_err() {
            convert(self.source.path(), &dest, &self.options(world), &mut |_, _| true)
                .map_err(|error| format!("a second conversion: {error}"))?;
            self.judge_copy(world, &dest, self.dest.format.unwrap_or(Format::Raw))
                .map_err(|error| format!("the second copy: {error}"))?;
        }
        Ok(0)
    }

    fn is_touched_by(&self, mutation: Mutation) -> bool {
        matches!(
            mutation,
            Mutation::NoDirectorySync
                | Mutation::Unordered(Phase::Command, _)
                | Mutation::Disordered(Phase::Command)
                | Mutation::NotDurable(Phase::Command)
        )
    }

    fn ask_others(&self, _left: &Snapshot, _truth: &Ended) -> Option<crate::opinion::Opinion> {
        None
    }
}

/// Judges what a failed command has left: the destination must not exist. Other files of the
/// command must have been removed, unless a second fault prevented that.
pub(crate) fn judge_failure(
    world: &World,
    reported: &mut Reported,
    before: &Snapshot,
    result: Outcome,
) -> Outcome<Ended> {
    let Err(error) = result else { return Ok(Ended::Well) };
    reported.errors.push(error);
    let (strikes, _) = world.strikes();
    let left: Vec<_> = world.snapshot().names.into_keys().filter(|name| !before.names.contains_key(name)).collect();
    // The first fault has failed the command; only another one can prevent the clean-up.
    if strikes == 1 && !left.is_empty() {
        return Err(format!("a command that failed has left {left:?} behind"));
    }
    Ok(Ended::No)
}

impl FaultyCase for CreateCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        stage.record(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let result = self.0.make_again(&stage.world);
        stage.record(judge_failure(&stage.world, reported, &before, result)?);
        Ok(())
    }
}

impl FaultyCase for ConvertCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        stage.record(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let options = self.options(&stage.world);
        let result = convert(self.source.path(), self.dest_path(), &options, &mut |_, _| true);
        let result = result.map(drop).map_err(|error| error.to_string());
        stage.record(judge_failure(&stage.world, reported, &before, result)?);
        Ok(())
    }

    /// If sharing or an operation before it fails, everything is copied.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        self.reflink && matches!(op_kind, OpKind::Write | OpKind::Read | OpKind::Length)
    }
}

/// The creations that are tested.
pub fn creations() -> Vec<CreateCase> {
    let kinds = [
        "raw",
        "vhd fixed",
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx fixed 1M",
        "vhdx dynamic 1M",
        "vhdx differencing 2M, 4K sectors",
        "qcow2 64K",
        "qcow2 child 8K",
    ];
    kinds.into_iter().map(|name| CreateCase(crate::disk::named(name))).collect()
}

/// The conversions that are tested.
pub fn conversions() -> Vec<ConvertCase> {
    let case = |source: &str, format, disk_type, reflink, verify| {
        let block_bytes = match (format, disk_type) {
            (Format::Raw, _) | (Format::Vhd, Some(diskwright_image::DiskType::Fixed)) => None,
            (Format::Vhd | Format::Qcow2, _) => Some(64 << 10),
            _ => Some(1 << 20),
        };
        let how = if reflink { ", sharing" } else { "" };
        let dest_type = disk_type.map_or_else(String::new, |disk_type| format!(" {disk_type}"));
        ConvertCase {
            name: format!("{source} to {format}{dest_type}{how}"),
            source: crate::disk::named(source),
            dest: CreateRequest { format: Some(format), disk_type, block_bytes, ..CreateRequest::default() },
            reflink,
            verify,
        }
    };
    let fixed = Some(diskwright_image::DiskType::Fixed);
    vec![
        case("raw", Format::Vhdx, None, false, false),
        case("raw", Format::Vhd, None, false, true),
        case("vhd fixed", Format::Vhdx, fixed, true, false),
        case("vhdx differencing 1M, for libvhdi", Format::Vhd, fixed, false, false),
        case("vhdx differencing 1M, for libvhdi", Format::Vhdx, None, true, true),
        case("vhd differencing 16K", Format::Raw, None, false, false),
        case("raw", Format::Qcow2, None, false, true),
        case("qcow2 child 8K", Format::Vhdx, None, true, false),
    ]
}
