//! What a disk lies on.
//!
//! ```text
//!   File     one file of a format, perhaps with a parent
//!   Late     the same, in a store that answers late and out of order (`world/late.rs`)
//!   Parts    a raw disk in several files, each of which loses its own unsynced writes
//!   ByQemu   a qcow2 with an internal snapshot, a data file, or subclusters (`by_qemu.rs`)
//!   Packed   two files of the made-up format (`packed.rs`), over a parent in a raw file
//! ```

use super::{Backing, ByQemu, Changes, DiskCase, by_qemu};
use crate::{
    contents::SECTOR_BYTES,
    ledger::{PARENT, stamp},
    packed::{self, PackedImage, packed_version},
    rule_breaker::RuleBreaker,
    stage::Outcome,
    world::World,
};
use diskwright_disk::{Disk, Layer, PartRole, check_parts, parts_of};
use diskwright_image::{CheckReport, Format, Image, probe};
use diskwright_store::{Engine, EngineKind, FileSystem, LockMode, OpenOptions, Store};
use std::{path::Path, sync::Arc};

const PARENT_OF_PACKED: &str = "/d/parent.raw";
const BLOCKS_OF_PACKED: &str = "/d/disk.blocks";

impl DiskCase {
    /// The I/O engine. With blocking calls a store cannot answer late.
    pub fn engine(&self) -> EngineKind {
        if self.backing == Backing::Late { EngineKind::Uring } else { EngineKind::Sync }
    }

    /// What the case needs and this machine lacks, for a skip by name. `None` if the case can run.
    pub fn missing(&self) -> Option<String> {
        if matches!(self.backing, Backing::ByQemu(_)) && !by_qemu::is_installed() {
            return Some("qemu-img is not installed".into());
        }
        let ring = match self.engine() {
            EngineKind::Uring => Engine::new(EngineKind::Uring, 1, None).err(),
            EngineKind::Auto | EngineKind::Sync => None,
        };
        ring.map(|error| format!("a store that answers late needs io_uring: {error}")).or_else(|| self.front.missing())
    }

    /// Number of files that are written.
    pub(super) fn files_written(&self) -> usize {
        match self.backing {
            Backing::File | Backing::Late | Backing::ByQemu(ByQemu::Snapshot | ByQemu::Subclusters) => 1,
            Backing::Parts(lens_bytes) => lens_bytes.len(),
            Backing::Packed | Backing::ByQemu(ByQemu::DataFile) => 2,
        }
    }

    /// The virtual size of a new disk.
    pub(super) fn size_at_first(&self) -> u64 {
        match self.changes {
            Changes::Grows { from_bytes } => from_bytes,
            Changes::None
            | Changes::Snapshots
            | Changes::FrozenInUse
            | Changes::AbsorbedInUse
            | Changes::MergedInUse
            | Changes::CompactedInUse
            | Changes::Relinks => self.size_bytes,
        }
    }

    /// Makes the files that no command makes.
    pub(super) fn make_backing(&self, world: &World) -> Outcome {
        let text = |error: std::io::Error| error.to_string();
        let make = |path: &Path| -> Outcome<Arc<dyn Store>> {
            let options = OpenOptions { writable: true, create_new: true, ..OpenOptions::default() };
            world.open(path, &options).map_err(|error| error.to_string())
        };
        match self.backing {
            Backing::File | Backing::Late => {}
            Backing::ByQemu(what) => self.make_by_qemu(world, what)?,
            Backing::Parts(lens_bytes) => {
                for (number, &len_bytes) in (1..).zip(lens_bytes) {
                    let part = make(format!("/d/disk.{number:03}").as_ref())?;
                    part.set_len(len_bytes).map_err(text)?;
                }
            }
            Backing::Packed => {
                let block_bytes = u64::from(self.block_bytes.unwrap_or(16 << 10));
                packed::create(&*make(&self.path())?, self.size_bytes / block_bytes).map_err(text)?;
                make(BLOCKS_OF_PACKED.as_ref())?;
                let parent = make(PARENT_OF_PACKED.as_ref())?;
                let mut bytes = [0; 8 * SECTOR_BYTES as usize];
                for window in &self.windows {
                    for first in (window.first..window.first + window.count).step_by(16) {
                        stamp(&mut bytes, first, PARENT);
                        parent.write_at(&bytes, first * SECTOR_BYTES).map_err(text)?;
                    }
                }
                parent.set_len(self.size_bytes).map_err(text)?;
                debug_assert!(packed_version(0) == PARENT && packed_version(8) == 0, "as in a parent");
            }
        }
        Ok(())
    }

    /// Opens the made-up format over its parent. If it is opened for writing, the case's rule is
    /// broken.
    pub(super) fn open_packed(&self, world: &World, writable: bool) -> Outcome<Arc<Disk>> {
        let open = |path: &Path, writable: bool| {
            let lock = if writable { LockMode::Exclusive } else { LockMode::Shared };
            world
                .open(path, &OpenOptions { writable, lock, ..OpenOptions::default() })
                .map_err(|error| error.to_string())
        };
        let block_bytes = u64::from(self.block_bytes.unwrap_or(16 << 10));
        let stores = [open(&self.path(), writable)?, open(BLOCKS_OF_PACKED.as_ref(), writable)?];
        let image =
            PackedImage::open(stores, self.size_bytes, block_bytes, writable).map_err(|error| error.to_string())?;
        let image: Arc<dyn Image> = match self.broken_rule.filter(|_| writable) {
            None => Arc::new(image),
            Some(broken_rule) => Arc::new(RuleBreaker::new(Arc::new(image), broken_rule)),
        };
        let parent = probe::open(open(PARENT_OF_PACKED.as_ref(), false)?, Some(Format::Raw), false, self.sector_bytes);
        let parent = Layer { path: PARENT_OF_PACKED.into(), image: parent.map_err(|error| error.to_string())? };
        let layers = vec![Layer { path: self.path(), image }, parent];
        Disk::from_layers(layers, Vec::new()).map(Arc::new).map_err(|error| error.to_string())
    }

    pub(super) fn check_parts(&self, world: &World) -> Outcome<CheckReport> {
        let files = world.files();
        let first = world.open(&self.path(), &OpenOptions::default()).map_err(|error| error.to_string())?;
        match parts_of(&files, &self.path()).map_err(|error| error.to_string())? {
            PartRole::First(parts) => {
                check_parts(&files, first, &parts, LockMode::Shared).map_err(|error| error.to_string())
            }
            other => Err(format!("the disk in several files is recognized as {other:?}")),
        }
    }
}
