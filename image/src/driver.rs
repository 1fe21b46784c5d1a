//! What a format can do and how its images are opened: one record for each format.
//!
//! Whoever needs to know something of a format asks its record ([`Format::driver`]), instead of
//! telling formats apart by itself. So a new format is: a variant of [`Format`], a record here, a
//! row of signatures in `probe/known.rs`, and a value of `--format` in the program.

use crate::{
    CheckReport, CreateOptions, DiskType, Format, Image, ImageError, ParentLink, Result, raw::RawImage, vhd, vhdx,
};
use diskwright_format::vhd::MAX_DYNAMIC_BYTES;
use diskwright_store::{FileRange, Store};
use std::sync::Arc;

/// A store, whether to write, the logical sector of an image that records none.
type Open = fn(Arc<dyn Store>, bool, u32) -> Result<Arc<dyn Image>>;

/// See the module.
#[derive(Debug)]
pub struct Driver {
    /// As users write it.
    pub name: &'static str,
    /// The type that an image gets when none is said, and it has no parent.
    pub usual_type: DiskType,
    /// Whether there are dynamic and differencing images. Else all images are fixed.
    pub has_blocks: bool,
    /// Largest virtual disk of an image with blocks, in bytes, where images that claim more are not
    /// held to it by their own tables.
    pub size_max_bytes: u64,
    /// Whether a fixed image promises its space, so that a discard must keep it.
    pub promises_space: bool,
    /// Logical sector sizes that an image can tell its guest of, in bytes.
    pub logical_sectors_bytes: &'static [u32],
    /// Why it is no other, in a sentence about a copy.
    pub sectors_because: &'static str,
    /// Physical sector size of a new image, in bytes, unless said.
    pub physical_sector_bytes: u32,
    /// Whether a differencing image keeps the disk identity of its parent: to its guest it is the
    /// same disk.
    pub child_keeps_disk_id: bool,
    open: Open,
    create: fn(Arc<dyn Store>, &CreateOptions) -> Result<()>,
    check: fn(Arc<dyn Store>) -> Result<CheckReport>,
    parent_link: fn(&dyn Store) -> Result<Option<ParentLink>>,
}

static RAW: Driver = Driver {
    name: "raw",
    usual_type: DiskType::Fixed,
    has_blocks: false,
    size_max_bytes: u64::MAX,
    promises_space: false,
    logical_sectors_bytes: &[512],
    sectors_because: "a raw file records none, and readers take 512",
    physical_sector_bytes: 4096,
    child_keeps_disk_id: false,
    open: |store, writable, sector_bytes| Ok(Arc::new(RawImage::new(store, writable, sector_bytes)?)),
    create: create_raw,
    check: |_| Ok(CheckReport::default()),
    parent_link: |_| Ok(None),
};

static VHD: Driver = Driver {
    name: "vhd",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    size_max_bytes: MAX_DYNAMIC_BYTES,
    promises_space: true,
    logical_sectors_bytes: &[512],
    sectors_because: "VHD knows only 512",
    physical_sector_bytes: 512,
    // Its id is the file's.
    child_keeps_disk_id: false,
    open: |store, writable, _| Ok(Arc::new(vhd::open(store, writable)?)),
    create: vhd::create,
    check: vhd::check,
    parent_link: vhd::parent_link,
};

static VHDX: Driver = Driver {
    name: "vhdx",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    size_max_bytes: u64::MAX,
    promises_space: true,
    logical_sectors_bytes: &[512, 4096],
    sectors_because: "as asked for",
    physical_sector_bytes: 4096,
    // MS-VHDX 2.6.1.2.
    child_keeps_disk_id: true,
    open: |store, writable, _| Ok(Arc::new(vhdx::open(store, writable)?)),
    create: vhdx::create,
    check: vhdx::check,
    parent_link: vhdx::parent_link,
};

impl Format {
    /// Its record.
    pub fn driver(self) -> &'static Driver {
        match self {
            Self::Raw => &RAW,
            Self::Vhd => &VHD,
            Self::Vhdx => &VHDX,
        }
    }
}

impl Driver {
    /// Opens an image. `raw_sector_bytes` is the logical sector of one that records none.
    ///
    /// # Errors
    /// Those of the format's own `open`.
    pub fn open(&self, store: Arc<dyn Store>, writable: bool, raw_sector_bytes: u32) -> Result<Arc<dyn Image>> {
        (self.open)(store, writable, raw_sector_bytes)
    }

    /// Makes an image of an empty store; durable on return.
    ///
    /// # Errors
    /// `BadOptions` for what the format cannot hold, before anything is written; `Io`, after which
    /// the store holds rubbish.
    pub fn create(&self, store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
        (self.create)(store, options)
    }

    /// Checks an image, and changes nothing. A raw image has nothing to check.
    ///
    /// # Errors
    /// Those of the format's own `check`.
    pub fn check(&self, store: Arc<dyn Store>) -> Result<CheckReport> {
        (self.check)(store)
    }

    /// The parent that an image names, by its headers alone: no log is replayed and no table of
    /// blocks is read. So it may be asked of a file that another program is writing to. `None` for
    /// an image that has no parent.
    ///
    /// # Errors
    /// Those of the format's own structures.
    pub fn parent_link(&self, store: &dyn Store) -> Result<Option<ParentLink>> {
        (self.parent_link)(store)
    }
}

fn create_raw(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let made = if options.preallocate {
        store.allocate(FileRange { offset_bytes: 0, len_bytes: options.size_bytes })
    } else {
        store.set_len(options.size_bytes)
    };
    made.and_then(|()| store.sync_data())
        .map_err(|source| ImageError::io("allocate the space of the new file", &*store, 0, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;

    #[test]
    fn every_driver_opens_and_checks_what_it_makes() {
        for format in [Format::Raw, Format::Vhd, Format::Vhdx] {
            let driver = format.driver();
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new(driver.name));
            let options = CreateOptions {
                disk_type: driver.usual_type,
                size_bytes: 4 << 20,
                block_bytes: None,
                logical_sector_bytes: driver.logical_sectors_bytes[0],
                physical_sector_bytes: driver.physical_sector_bytes,
                parent: None,
                preallocate: false,
                disk_id: None,
            };
            driver.create(Arc::clone(&store), &options).unwrap();
            let report = driver.check(Arc::clone(&store)).unwrap();
            assert!(report.findings.is_empty(), "{format}: {:?}", report.findings);
            assert_eq!(driver.parent_link(&*store).unwrap(), None);
            let image = driver.open(store, true, 512).unwrap();
            let info = image.info();
            assert_eq!((info.format, info.disk_type, info.size_bytes), (format, driver.usual_type, 4 << 20));
        }
    }
}
