//! A disk that changes while it is in use: an image that joins on top of its chain, and a size that
//! grows.
//!
//! ```text
//!   snapshot   new image, durable ─▶ told ─▶ Disk::push_top ─▶ all that was written before is durable
//!   grow       told ─▶ Disk::grow ─▶ the size is durable
//! ```
//!
//! Which chain counts after a cut, the files say: the image with the highest number is the top.
//! Before it is told that the image will join, nothing was written to it, so where it opens, both
//! chains show what the user may count on; where it does not open, or is not there, the old chain
//! counts.

use super::{DiskCase, DiskTruth, session::Session};
use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    mutation::Phase,
    stage::{Outcome, Stage},
    world::World,
};
use diskwright_disk::{Disk, Layer};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe, vhd, vhdx};
use diskwright_store::{BlockDevice, FileSystem, LockMode, OpenOptions};
use std::path::{Path, PathBuf};

/// How a disk changes while it is in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Changes {
    /// Not at all.
    None,
    /// Images join on top.
    Snapshots,
    /// It grows, from this size to that of its kind.
    Grows {
        /// Virtual size at first, in bytes.
        from_bytes: u64,
    },
}

/// Most images that join in all, so that chains stay short.
const JOIN_MAX: u32 = 6;
/// Sizes are multiples of this, so that a window is within the disk or behind it.
const GROWTH_BYTES: u64 = 64 << 10;
/// The time of every file of a [`World`], in a VHD's seconds. A child remembers when its parent was
/// last changed.
const PARENT_MODIFIED_SECONDS: u32 = 1_700_000_000 - 946_684_800;

/// What is known of how a disk has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// The image that is the top, for sure: how many have joined.
    pub top: u32,
    /// The image that may be there already, empty.
    pub next_top: u32,
    /// The size that is durable, in bytes.
    pub size_bytes: u64,
    /// The size that it may have already.
    pub next_size_bytes: u64,
}

impl Changed {
    /// Of a disk that was just made.
    pub fn not_yet(case: &DiskCase) -> Self {
        let size_bytes = case.size_at_first();
        Self { top: 0, next_top: 0, size_bytes, next_size_bytes: size_bytes }
    }
}

impl DiskCase {
    /// The file of the image that joined as number `number`; 0 is the one that was made first.
    pub fn path_of(&self, number: u32) -> PathBuf {
        match number {
            0 => self.path(),
            _ => format!("/d/disk-{number}.{}", self.format).into(),
        }
    }

    /// The image that the files call the top.
    pub fn top_of(&self, world: &World) -> u32 {
        if self.changes != Changes::Snapshots {
            return 0;
        }
        (1..).take_while(|&number| world.facts(&self.path_of(number)).is_ok()).last().unwrap_or(0)
    }

    /// Sectors of the disk as large as it is now.
    pub(super) fn sectors_now(disk: &Disk) -> u64 {
        disk.geometry().size_bytes / SECTOR_BYTES
    }

    /// What is known of a disk that has been looked at.
    pub(super) fn changed_now(&self, world: &World) -> Outcome<Changed> {
        let top = self.top_of(world);
        let size_bytes = self.open_disk(world, false)?.geometry().size_bytes;
        Ok(Changed { top, next_top: top, size_bytes, next_size_bytes: size_bytes })
    }

    /// Decides which chain counts, and removes an image that is not whole and that nobody has
    /// counted on. Where both chains are there, the shorter one is judged here.
    pub(super) fn judge_tops(&self, world: &World, truth: &DiskTruth) -> Outcome<u32> {
        let Changed { top, next_top, .. } = truth.changed;
        let found = self.top_of(world);
        if found < top || found > next_top {
            return Err(format!("image {found} is the top, where {top} should be (or {next_top})"));
        }
        if found == top {
            return Ok(top);
        }
        let path = self.path_of(found);
        let is_whole = self.check(world, &path).is_ok() && self.open_disk(world, false).is_ok();
        let shown = self.read_at(world, &self.path_of(top)).map_err(|error| format!("the old chain: {error}"))?;
        truth.ledger.judge(&shown, true).map_err(|error| format!("the old chain: {error}"))?;
        if is_whole {
            return Ok(found);
        }
        world.remove(&path).map_err(|error| error.to_string())?;
        Ok(top)
    }

    /// Whether the disk is as large as was promised.
    pub(super) fn judge_size(&self, disk: &Disk, truth: &DiskTruth) -> Outcome {
        let (found, Changed { size_bytes, next_size_bytes, .. }) = (disk.geometry().size_bytes, truth.changed);
        if (size_bytes..=next_size_bytes).contains(&found) {
            return Ok(());
        }
        Err(format!("the disk has {found} bytes, where it should have {size_bytes} (or up to {next_size_bytes})"))
    }

    /// Makes an empty image over the present top of a disk that is in use.
    ///
    /// # Errors
    /// What went wrong.
    pub fn make_next_top(&self, world: &World, disk: &Disk, number: u32) -> Outcome<Layer> {
        let layers = disk.layers();
        let below = self.path_of(number - 1);
        // Its identity changes with the first write, and the new image must name the one that
        // stays.
        let writer = layers[0].image.writer().ok_or("the disk is not writable")?;
        writer.begin_writing().map_err(|error| error.to_string())?;
        let text = |error: diskwright_image::ImageError| error.to_string();
        let open = |path: &Path, options: &OpenOptions| world.open(path, options).map_err(|error| error.to_string());
        let reader = open(&below, &OpenOptions { lock: LockMode::None, ..OpenOptions::default() })?;
        let info = probe::open(reader, Some(self.format), false, self.sector_bytes).map_err(text)?.info().clone();
        let name = below.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let parent = ParentLink {
            relative_path: Some(format!(".\\{name}")),
            absolute_path: Some(below.to_string_lossy().replace('/', "\\")),
            name: Some(name),
            linkage: info.linkage_id.ok_or("the top has no identity")?,
            modified_seconds: Some(PARENT_MODIFIED_SECONDS),
            ..ParentLink::default()
        };
        let options = CreateOptions {
            disk_type: DiskType::Differencing,
            size_bytes: disk.geometry().size_bytes,
            block_bytes: self.block_bytes,
            logical_sector_bytes: info.logical_sector_bytes,
            physical_sector_bytes: info.physical_sector_bytes,
            parent: Some(parent),
            preallocate: false,
            disk_id: info.disk_id,
        };
        let path = self.path_of(number);
        // What an attempt that failed has left.
        if world.facts(&path).is_ok() {
            world.remove(&path).map_err(|error| error.to_string())?;
        }
        let lock = LockMode::Exclusive;
        let store = open(&path, &OpenOptions { writable: true, create_new: true, lock, ..OpenOptions::default() })?;
        match self.format {
            Format::Vhd => vhd::create(store.clone(), &options).map_err(text)?,
            Format::Vhdx => vhdx::create(store.clone(), &options).map_err(text)?,
            Format::Raw => return Err("a raw file has no parent".into()),
        }
        world.sync_directory_of(&path).map_err(|error| error.to_string())?;
        let image = probe::open(store, Some(self.format), true, self.sector_bytes).map_err(text)?;
        Ok(Layer { path, image })
    }

    /// Changes the disk of a session: an image joins, or it grows. Both promise that something is
    /// durable when they return.
    pub(super) fn play_change(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
    ) -> Outcome {
        match self.changes {
            Changes::None => Ok(()),
            Changes::Snapshots if truth.changed.top >= JOIN_MAX => Ok(()),
            Changes::Snapshots => self.play_snapshot(stage, session, truth),
            Changes::Grows { .. } => {
                let steps = (self.size_bytes - truth.changed.next_size_bytes) / GROWTH_BYTES;
                let more_bytes = dice.below(steps / 2 + 1) * GROWTH_BYTES;
                self.play_growth(stage, session, truth, truth.changed.next_size_bytes + more_bytes)
            }
        }
    }

    pub(super) fn play_snapshot(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
    ) -> Outcome {
        let number = truth.changed.top + 1;
        truth.changed.next_top = number;
        stage.tell(truth.clone());
        session.enter_phase(stage, false);
        let layer = self.make_next_top(&stage.world, &session.disk, number)?;
        truth.changed.top = number;
        stage.tell(truth.clone());
        let mark = truth.ledger.mark();
        stage.world.phase(Some(Phase::Snapshot));
        session.disk.push_top(layer).map_err(|error| format!("an image does not join: {error}"))?;
        stage.world.phase(None);
        // As after a flush: what the former top was given is durable.
        truth.ledger.flushed(mark);
        stage.tell(truth.clone());
        Ok(())
    }

    pub(super) fn play_growth(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        size_bytes: u64,
    ) -> Outcome {
        truth.changed.next_size_bytes = size_bytes;
        stage.tell(truth.clone());
        stage.world.phase(Some(Phase::Grow));
        session.disk.grow(size_bytes).map_err(|error| format!("it does not grow: {error}"))?;
        stage.world.phase(None);
        truth.changed.size_bytes = size_bytes;
        stage.tell(truth.clone());
        Ok(())
    }
}
