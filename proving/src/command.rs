//! Commands that make files, as cases: create and convert. Before such a command has ended well,
//! there is nothing under the name it was given, or nothing that passes for a disk, or all of it;
//! afterwards all of it is there, durably.

use crate::{
    disk::DiskCase,
    fault::Moment,
    faulty::{FaultyCase, Told},
    history::Snapshot,
    ledger::{Ledger, Version},
    mutation::{Mutation, Phase},
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, convert};
use diskwright_image::Format;
use diskwright_store::{CacheMode, EngineKind, FileSystem};
use std::path::PathBuf;

/// Making a disk of a kind.
#[derive(Debug, Clone)]
pub struct CreateCase(pub DiskCase);

/// Converting a disk of a kind, with something on it, into another format.
#[derive(Debug, Clone)]
pub struct ConvertCase {
    /// For messages.
    pub name: String,
    /// What is converted.
    pub source: DiskCase,
    /// Into what.
    pub dest: CreateRequest,
    /// By reflink where that can be (a [`World`] can).
    pub reflink: bool,
    /// Read back and compare.
    pub verify: bool,
}

/// Whether a command has ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Not yet, or not well.
    No,
    /// It has.
    Well,
}

impl Case for CreateCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("create {}", self.0.name)
    }

    /// The folder, and for a child the parent: made with the child, which is removed again.
    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.0.make(world)?;
        world.remove(&self.0.path()).map_err(|error| error.to_string())?;
        let other = diskwright_store::OpenOptions { writable: true, create_new: true, ..Default::default() };
        world.open("/d/something-else".as_ref(), &other).map(drop).map_err(|error| error.to_string())
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        stage.tell(Ended::No);
        stage.world.phase(Some(Phase::Command));
        self.0.make_again(&stage.world)?;
        stage.world.phase(None);
        stage.tell(Ended::Well);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Ended, seed: u64, depth: Depth) -> Outcome<u64> {
        let path = self.0.path();
        if world.facts(&path).is_err() {
            return if *truth == Ended::No { Ok(0) } else { Err("the new file is not there".into()) };
        }
        // It is a whole disk, or nothing that passes for one.
        if *truth == Ended::No && self.0.format == Format::Raw {
            return Ok(0);
        }
        if *truth == Ended::No {
            // Its tables may not all be there, and `check` may say so; but it shows nothing that is
            // not on it.
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

    /// What is on the source: some of each window.
    fn ledger(&self) -> Ledger {
        let mut ledger = self.source.fresh_ledger();
        for (version, first, count) in self.writes() {
            let write = ledger.announce(first, count, version);
            ledger.acknowledge(write, true);
        }
        ledger
    }

    fn writes(&self) -> Vec<(Version, u64, u64)> {
        let windows = self.source.windows.iter();
        (1..).zip(windows).map(|(version, window)| (version, window.first, (window.count / 2).max(1))).collect()
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
        }
    }

    /// What must hold of a copy that is there.
    fn judge_copy(&self, world: &World, path: &std::path::Path, format: Format) -> Outcome {
        let case = DiskCase { format, meddling: None, damage: None, ..self.source.clone() };
        case.check(world, path)?;
        let shown = case.read_at(world, path)?;
        self.ledger().judge(&shown, false).map(drop)
    }
}

impl Case for ConvertCase {
    type Truth = Ended;

    fn name(&self) -> String {
        format!("convert {}", self.name)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.source.make(world)?;
        self.source.fill(world, &self.writes())
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        stage.tell(Ended::No);
        stage.world.phase(Some(Phase::Command));
        convert(self.source.path(), self.dest_path(), &self.options(&stage.world), &mut |_, _| true)
            .map_err(|error| error.to_string())?;
        stage.world.phase(None);
        stage.tell(Ended::Well);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let dest = self.dest_path();
        self.judge_copy(world, &self.source.path(), self.source.format)
            .map_err(|error| format!("the source: {error}"))?;
        if world.facts(&dest).is_ok() {
            self.judge_copy(world, &dest, self.dest.format.unwrap_or(Format::Raw))
                .map_err(|error| format!("the copy: {error}"))?;
        } else if *truth == Ended::Well {
            return Err("the copy is not there".into());
        }
        if depth.go_on && *truth == Ended::No && world.facts(&dest).is_err() {
            // Once more, when what is left of the first is out of the way.
            let partial = PathBuf::from(format!("{}.partial", dest.display()));
            if world.facts(&partial).is_ok() {
                world.remove(&partial).map_err(|error| error.to_string())?;
            }
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

/// What a command must have left when it failed: nothing under the name it was given, and nothing
/// else of its own, unless the fault kept it from removing that.
fn judge_failure(world: &World, told: &mut Told, before: &Snapshot, result: Outcome) -> Outcome<Ended> {
    let Err(error) = result else { return Ok(Ended::Well) };
    told.errors.push(error);
    let (strikes, _) = world.strikes();
    let left: Vec<_> = world.snapshot().names.into_keys().filter(|name| !before.names.contains_key(name)).collect();
    // One fault has failed the command; it takes a second to keep it from cleaning up.
    if strikes == 1 && !left.is_empty() {
        return Err(format!("a command that failed has left {left:?} behind"));
    }
    Ok(Ended::No)
}

impl FaultyCase for CreateCase {
    fn run_on(&self, stage: &Stage<Ended>, told: &mut Told) -> Outcome {
        stage.tell(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let result = self.0.make_again(&stage.world);
        stage.tell(judge_failure(&stage.world, told, &before, result)?);
        Ok(())
    }
}

impl FaultyCase for ConvertCase {
    fn run_on(&self, stage: &Stage<Ended>, told: &mut Told) -> Outcome {
        stage.tell(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let options = self.options(&stage.world);
        let result = convert(self.source.path(), self.dest_path(), &options, &mut |_, _| true);
        let result = result.map(drop).map_err(|error| error.to_string());
        stage.tell(judge_failure(&stage.world, told, &before, result)?);
        Ok(())
    }

    /// When the first attempt to share fails, even in what comes before the sharing, everything is
    /// copied.
    fn has_another_way(&self, moment: Moment) -> bool {
        self.reflink && matches!(moment, Moment::Write | Moment::Read | Moment::Length)
    }
}

/// Creations that are put through power cuts.
pub fn creations() -> Vec<CreateCase> {
    let kinds = [
        "raw",
        "vhd fixed",
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx fixed 1M",
        "vhdx dynamic 1M",
        "vhdx differencing 2M, 4K sectors",
    ];
    kinds.into_iter().map(|name| CreateCase(crate::disk::named(name))).collect()
}

/// Conversions that are put through power cuts.
pub fn conversions() -> Vec<ConvertCase> {
    let case = |source: &str, format, disk_type, reflink, verify| {
        let block_bytes = match (format, disk_type) {
            (Format::Raw, _) | (Format::Vhd, Some(diskwright_image::DiskType::Fixed)) => None,
            (Format::Vhd, _) => Some(64 << 10),
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
    ]
}
