//! Copies of another size, or with the identity of their source, as cases: a disk with a GPT is
//! converted.
//!
//! Until the command has succeeded the copy does not exist, or is complete: it has its new size,
//! both copies of the table, the data of the partitions, and the identity. The source never
//! changes. The same command finishes what a cut has left, without help.

use crate::{
    command::{Ended, judge_failure},
    fault::OpKind,
    faulty::{FaultyCase, Reported},
    mutation::{Mutation, Phase},
    sizes::ResizeCase,
    stage::{Case, Depth, Outcome, Stage},
    world::World,
};
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, Identity, NewSize, OpenOptions, convert};
use diskwright_image::{DiskType, Format};
use diskwright_store::{CacheMode, EngineKind, FileSystem};
use std::path::PathBuf;

/// Converts a disk with a partition table.
#[derive(Debug, Clone)]
pub struct ResizedCopyCase {
    /// What is converted.
    source: ResizeCase,
    /// Format and type of the copy.
    format: Format,
    disk_type: DiskType,
    /// Its size.
    size: NewSize,
    /// Its identity.
    identity: Identity,
}

impl ResizedCopyCase {
    /// The copy as a disk of its own.
    fn copy(&self) -> ResizeCase {
        let mut copy = self.source.clone();
        copy.disk.format = self.format;
        copy.disk.disk_type = self.disk_type;
        copy
    }

    fn copy_path(&self) -> PathBuf {
        format!("/d/copy.{}", self.format).into()
    }

    fn copy_bytes(&self) -> u64 {
        match self.size {
            NewSize::Bytes(bytes) => bytes,
            NewSize::Minimum => self.source.min_bytes(),
            _ => self.source.disk.size_bytes,
        }
    }

    fn convert(&self, world: &World) -> Outcome {
        let files = world.files();
        let block_bytes =
            (self.disk_type == DiskType::Dynamic).then(|| if self.format == Format::Vhd { 64 << 10 } else { 1 << 20 });
        let options = ConvertOptions {
            source: OpenOptions { engine: EngineKind::Sync, files: files.clone(), ..OpenOptions::default() },
            cache: Some(CacheMode::PageCache),
            dest: CreateRequest {
                files,
                format: Some(self.format),
                disk_type: (self.format != Format::Raw).then_some(self.disk_type),
                block_bytes,
                ..CreateRequest::default()
            },
            size: self.size,
            identity: self.identity,
            verify: true,
            // A failed attempt to share is followed by a copy, so its failure need not be reported.
            no_reflink: true,
            ..ConvertOptions::default()
        };
        convert(self.source.disk.path(), self.copy_path(), &options, &mut |_, _| true)
            .map(drop)
            .map_err(|error| error.to_string())
    }

    fn disk_id(world: &World, path: &std::path::Path) -> Outcome<Option<uuid::Uuid>> {
        let options = OpenOptions { engine: EngineKind::Sync, files: world.files(), ..OpenOptions::default() };
        let disk = Disk::open(path, &options).map_err(|error| error.to_string())?;
        let info = disk.layers()[0].image.info().clone();
        Ok(info.disk_id)
    }

    /// Judges a copy that exists.
    fn judge_copy(&self, world: &World) -> Outcome {
        self.copy().look_finished_at(world, &self.copy_path(), self.copy_bytes())?;
        let ids = [self.source.disk.path(), self.copy_path()].map(|path| Self::disk_id(world, &path));
        let [source, copy] = ids;
        let (source, copy) = (source?, copy?);
        match (self.identity, source == copy) {
            (Identity::Keep, false) => Err(format!("the copy has the identity {copy:?}, not {source:?}")),
            (Identity::New, true) if source.is_some() => Err("the copy has the identity of its source".into()),
            _ => Ok(()),
        }
    }
}

impl Case for ResizedCopyCase {
    type Truth = Ended;

    fn name(&self) -> String {
        let (source, size, identity) = (self.source.disk.name, self.size, self.identity);
        format!("convert {source} to {} {} of {size:?}, {identity:?} identity", self.format, self.disk_type)
    }

    fn prepare(&self, world: &World, _seed: u64) -> Outcome {
        self.source.disk.make(world)?;
        self.source.fill(world)
    }

    fn run(&self, stage: &Stage<Ended>, _seed: u64) -> Outcome {
        stage.record(Ended::No);
        stage.world.phase(Some(Phase::Command));
        self.convert(&stage.world)?;
        stage.world.phase(None);
        stage.record(Ended::Well);
        Ok(())
    }

    fn judge(&self, world: &World, truth: &Ended, _seed: u64, depth: Depth) -> Outcome<u64> {
        let full = self.source.disk.size_bytes;
        self.source.look_finished(world, full).map_err(|error| format!("the source: {error}"))?;
        if world.facts(&self.copy_path()).is_ok() {
            self.judge_copy(world).map_err(|error| format!("the copy: {error}"))?;
        } else if *truth == Ended::Well {
            return Err("the copy does not exist".into());
        } else if depth.resume {
            self.convert(world).map_err(|error| format!("the same command again: {error}"))?;
            self.judge_copy(world).map_err(|error| format!("the second copy: {error}"))?;
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
}

impl FaultyCase for ResizedCopyCase {
    fn run_on(&self, stage: &Stage<Ended>, reported: &mut Reported) -> Outcome {
        stage.record(Ended::No);
        let before = stage.world.snapshot();
        stage.world.phase(Some(Phase::Command));
        let result = self.convert(&stage.world);
        stage.record(judge_failure(&stage.world, reported, &before, result)?);
        Ok(())
    }

    /// The source's headers and its partition table are kept in two places.
    fn has_fallback(&self, op_kind: OpKind) -> bool {
        op_kind == OpKind::Read
    }
}

/// The copies that are tested.
pub fn resized_copies() -> Vec<ResizedCopyCase> {
    let case = |name, format, disk_type, size, identity| {
        let disk = crate::disk::named(name);
        ResizedCopyCase { source: ResizeCase { disk, grows: false }, format, disk_type, size, identity }
    };
    let larger = |name| NewSize::Bytes(crate::disk::named(name).size_bytes * 2);
    let (fixed, dynamic) = (DiskType::Fixed, DiskType::Dynamic);
    vec![
        case("vhdx dynamic 1M", Format::Vhdx, dynamic, NewSize::Minimum, Identity::Keep),
        case("vhdx dynamic 1M", Format::Vhd, fixed, larger("vhdx dynamic 1M"), Identity::New),
        case("vhd dynamic 16K", Format::Vhd, dynamic, larger("vhd dynamic 16K"), Identity::Keep),
        case("vhd fixed", Format::Vhdx, fixed, NewSize::Minimum, Identity::Keep),
        case("vhdx differencing 1M", Format::Vhdx, dynamic, NewSize::Present, Identity::Keep),
        case("raw", Format::Raw, fixed, NewSize::Minimum, Identity::New),
    ]
}
