//! Disks that change while they are in use: an image is added on top of the chain, the disk grows,
//! or its link to the parent changes (`relinks.rs`).
//!
//! ```text
//!   snapshot   new image, durable ─▶ truth recorded ─▶ Disk::push_layer ─▶ all earlier writes are
//!              durable
//!   grow       truth recorded ─▶ Disk::grow ─▶ the new size is durable
//! ```
//!
//! After a cut, the files decide which chain counts: the image with the highest number is the top.
//! Until the truth says that an image joins, nothing is written to it. So if the image opens, both
//! chains show what the user may rely on. If it does not open or does not exist, the old chain
//! counts.

use super::{Changed, Changes, DiskCase, DiskTruth, session::Session};
use crate::{
    contents::SECTOR_BYTES,
    dice::Dice,
    mutation::Phase,
    stage::{Outcome, Stage},
    world::World,
};
use diskwright_disk::{Disk, Layer};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe};
use diskwright_store::{BlockDevice, FileSystem, LockMode, OpenOptions};
use std::path::{Path, PathBuf};

/// Maximum number of images that are added, so that chains stay short.
const JOIN_MAX: u32 = 6;
/// Sizes are multiples of this, so that a window is completely within the disk or beyond its end.
const GROWTH_BYTES: u64 = 64 << 10;
/// Modification time of every file of a [`World`], in a VHD's seconds. A child stores the
/// modification time of its parent.
pub(super) const PARENT_MODIFIED_SECONDS: u32 = 1_700_000_000 - 946_684_800;

impl Changed {
    /// State of a new disk.
    pub fn not_yet(case: &DiskCase) -> Self {
        let size_bytes = case.size_at_first();
        Self { top: 0, next_top: 0, size_bytes, next_size_bytes: size_bytes, link: 0, next_link: 0 }
    }
}

impl DiskCase {
    /// The file of the image that was added as number `number`; 0 is the first image.
    pub fn path_of(&self, number: u32) -> PathBuf {
        match number {
            0 => self.path(),
            _ => format!("/d/disk-{number}.{}", self.format).into(),
        }
    }

    /// Number of the image that is the top according to the files.
    pub fn top_of(&self, world: &World) -> u32 {
        if self.changes != Changes::Snapshots {
            return 0;
        }
        (1..).take_while(|&number| world.facts(&self.path_of(number)).is_ok()).last().unwrap_or(0)
    }

    /// Present number of sectors of the disk.
    pub(super) fn sectors_now(disk: &Disk) -> u64 {
        disk.geometry().size_bytes / SECTOR_BYTES
    }

    /// State of a disk, read from its files.
    pub(super) fn changed_now(&self, world: &World) -> Outcome<Changed> {
        let top = self.top_of(world);
        let disk = self.open_disk(world, false)?;
        let (size_bytes, link) = (disk.geometry().size_bytes, self.link_number(&disk));
        Ok(Changed { top, next_top: top, size_bytes, next_size_bytes: size_bytes, link, next_link: link })
    }

    /// Decides which chain counts after a cut. Judges the shorter chain if both exist. Removes an
    /// incomplete image that is not in the truth.
    pub(super) fn judge_tops(&self, world: &World, truth: &DiskTruth) -> Outcome<u32> {
        let Changed { top, next_top, .. } = truth.changed;
        let found = self.top_of(world);
        if found < top || found > next_top {
            return Err(format!("image {found} is the top, expected {top} or {next_top}"));
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

    /// Judges the size of the disk.
    pub(super) fn judge_size(&self, disk: &Disk, truth: &DiskTruth) -> Outcome {
        let (found, Changed { size_bytes, next_size_bytes, .. }) = (disk.geometry().size_bytes, truth.changed);
        if (size_bytes..=next_size_bytes).contains(&found) {
            return Ok(());
        }
        Err(format!("the disk has {found} bytes, expected {size_bytes} to {next_size_bytes}"))
    }

    /// Makes an empty image that can be added on top of a disk in use.
    ///
    /// # Errors
    /// What went wrong.
    pub fn make_next_top(&self, world: &World, disk: &Disk, number: u32) -> Outcome<Layer> {
        let layers = disk.layers();
        let below = self.path_of(number - 1);
        // The top's identity changes at the first write, so that must happen before the new image
        // stores it.
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
            linkage: info.linkage_id,
            file_id: info.disk_id.filter(|_| self.format.driver().child_names_file_id),
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
            disk_id: info.disk_id.filter(|_| !self.format.driver().child_names_file_id),
            own: Default::default(),
        };
        let path = self.path_of(number);
        // Removes the file of an attempt that has failed.
        if world.facts(&path).is_ok() {
            world.remove(&path).map_err(|error| error.to_string())?;
        }
        let lock = LockMode::Exclusive;
        let store = open(&path, &OpenOptions { writable: true, create_new: true, lock, ..OpenOptions::default() })?;
        match self.format {
            Format::Raw => return Err("a raw file has no parent".into()),
            format => format.driver().create(store.clone(), &options).map_err(text)?,
        }
        world.sync_directory_of(&path).map_err(|error| error.to_string())?;
        let image = probe::open(store, Some(self.format), true, self.sector_bytes).map_err(text)?;
        Ok(Layer { path, image })
    }

    /// Changes the disk of a session: adds an image, grows, or gets another link. Each change is
    /// durable when it returns.
    pub(super) fn play_change(
        &self,
        stage: &Stage<DiskTruth>,
        session: &mut Session<'_>,
        truth: &mut DiskTruth,
        dice: &mut Dice,
    ) -> Outcome {
        match self.changes {
            // `freezing.rs`, `absorbing.rs`, `merging.rs` and `compacting_in_use.rs` do that.
            Changes::None
            | Changes::FrozenInUse
            | Changes::AbsorbedInUse
            | Changes::MergedInUse
            | Changes::CompactedInUse => Ok(()),
            Changes::Snapshots if truth.changed.top >= JOIN_MAX => Ok(()),
            Changes::Snapshots => self.play_snapshot(stage, session, truth),
            Changes::Relinks => self.play_relink(stage, session, truth),
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
        stage.record(truth.clone());
        session.enter_phase(stage, false);
        let layer = self.make_next_top(&stage.world, &session.disk, number)?;
        truth.changed.top = number;
        stage.record(truth.clone());
        let mark = truth.ledger.mark();
        stage.world.phase(Some(Phase::Snapshot));
        session.disk.push_layer(layer).map_err(|error| format!("push_layer failed: {error}"))?;
        stage.world.phase(None);
        // As after a flush: all writes to the former top are durable.
        truth.ledger.flushed(mark);
        stage.record(truth.clone());
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
        stage.record(truth.clone());
        stage.world.phase(Some(Phase::Grow));
        session.disk.grow(size_bytes).map_err(|error| format!("grow failed: {error}"))?;
        stage.world.phase(None);
        truth.changed.size_bytes = size_bytes;
        stage.record(truth.clone());
        Ok(())
    }
}
