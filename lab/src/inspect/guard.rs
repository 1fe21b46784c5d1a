//! Decides whether a target may be written. No other code decides this.
//!
//! ```text
//!   in use (mounted, swap, held, shown by a loop device) ─▶ refused, whatever is allowed
//!   file of the lab (created on request, and marked) ─┐
//!   `PrepareOptions::destroy_data` ───────────────────┼───▶ written
//!   all stored bytes to be overwritten are zero ──────┘
//!   else ─────────────────────────────────────────────────▶ refused: what was found, and where
//! ```
//!
//! *Stored* means stored in the top layer. A new child of a full parent stores nothing, and writing
//! to the child destroys nothing, so a disk with data can be measured through a child. All bytes
//! that the job may write are read: a sample would find a file system but could miss a small file.
//!
//! A file that the lab created has an extended attribute, and later runs may write it without
//! `destroy_data`. It is inspected too: if it holds a file system, a partition table or an image,
//! it is refused.

use super::{
    magic,
    usage::{self, TargetUse},
};
use crate::{
    LabError, Result,
    fill::{self, Tick},
};
use diskwright_load::LoadError;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rustix::fs::XattrFlags;
use std::{ops::Range, path::Path};

/// Extended attribute of files that the lab created.
const OWN_MARK: &str = "user.diskwright.lab";

/// A target that the job will write.
#[derive(Debug, Clone, Copy)]
pub struct Writing<'a> {
    /// Name that the user gave.
    pub name: &'a str,
    /// Its file or device; `None` for an export.
    pub path: Option<&'a Path>,
    /// The target, open at least for reading.
    pub device: &'a dyn BlockDevice,
    /// Ranges that the job may write.
    pub ranges: &'a [Range<u64>],
    /// How I/O is submitted.
    pub engine: EngineKind,
}

/// Returns an error unless the target may be written. `tick` gets the number of bytes searched so
/// far.
///
/// # Errors
/// [`LabError::InUse`], [`LabError::HoldsData`], and errors of reading.
pub fn allow(target: &Writing<'_>, destroy_data: bool, tick: &mut Tick<'_>) -> Result<()> {
    if let Some(path) = target.path {
        refuse_used(target.name, path)?;
    }
    if destroy_data {
        return Ok(());
    }
    let front = front(target)?;
    if let Some(what) = front.as_deref().and_then(magic::identify) {
        return Err(LabError::HoldsData { target: target.name.to_owned(), what: what.to_owned() });
    }
    if target.path.is_some_and(is_own) {
        return Ok(());
    }
    let mut stored = Vec::new();
    fill::for_extents(target.name, target.device, target.ranges, &mut |extent| {
        if !extent.kind.reads_as_zeros() && extent.depth == 0 {
            stored.push(extent.offset_bytes..extent.offset_bytes + extent.len_bytes);
        }
    })?;
    match fill::find_data(target.name, target.device, &stored, target.engine, tick)? {
        None => Ok(()),
        Some(offset_bytes) => Err(LabError::HoldsData {
            target: target.name.to_owned(),
            what: format!("data of an unknown kind: the byte at offset {offset_bytes} is not zero"),
        }),
    }
}

/// Returns an error if a device or a file is in use. It need not be open.
///
/// # Errors
/// [`LabError::InUse`].
pub fn refuse_used(name: &str, path: &Path) -> Result<()> {
    let users = usage::uses(path);
    if users.is_empty() {
        return Ok(());
    }
    Err(LabError::InUse { target: name.to_owned(), users: sentence(&users) })
}

/// The first bytes of the target; `None` if its top layer stores none of them.
fn front(target: &Writing<'_>) -> Result<Option<Vec<u8>>> {
    let sector_bytes = u64::from(target.device.geometry().logical_sector_bytes);
    let len_bytes = target.device.geometry().size_bytes.min(magic::FRONT_BYTES as u64).next_multiple_of(sector_bytes);
    let range = 0..len_bytes.min(target.device.geometry().size_bytes);
    let mut stored = false;
    fill::for_extents(target.name, target.device, std::slice::from_ref(&range), &mut |extent| {
        stored |= !extent.kind.reads_as_zeros() && extent.depth == 0;
    })?;
    if !stored {
        return Ok(None);
    }
    let mut bytes = vec![0; range.end as usize];
    let failed =
        |source| LoadError::Queue { target: target.name.to_owned(), doing: "read its first bytes".into(), source };
    Blocking::open(target.device, target.engine).and_then(|mut hand| hand.read(0, &mut bytes)).map_err(failed)?;
    Ok(Some(bytes))
}

/// Marks the file at `path` as created by the lab. Errors are ignored: without the extended
/// attribute, the next run needs `destroy_data`.
pub fn mark_own(path: &Path) {
    let _ = rustix::fs::setxattr(path, OWN_MARK, b"1", XattrFlags::empty());
}

/// Whether the lab created the file at `path`.
pub fn is_own(path: &Path) -> bool {
    let mut value = [0_u8; 1];
    rustix::fs::getxattr(path, OWN_MARK, &mut value).is_ok_and(|len| len == 1 && value == *b"1")
}

fn sentence(users: &[TargetUse]) -> String {
    users.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
    use diskwright_store::{CacheMode, RawDevice};
    use std::fs::File;

    fn raw(dir: &Path, name: &str, len_bytes: u64) -> RawDevice {
        let path = dir.join(name);
        File::create(&path).unwrap().set_len(len_bytes).unwrap();
        RawDevice::open(&path, true, CacheMode::PageCache).unwrap()
    }

    fn ask(device: &dyn BlockDevice, path: Option<&Path>, ranges: &[Range<u64>], destroy: bool) -> Result<()> {
        let writing = Writing { name: "disk", path, device, ranges, engine: EngineKind::Auto };
        allow(&writing, destroy, &mut |_| Ok(()))
    }

    fn one(range: Range<u64>) -> Vec<Range<u64>> {
        std::iter::once(range).collect()
    }

    fn write(device: &dyn BlockDevice, at: u64, data: &[u8]) {
        let mut hand = Blocking::open(device, EngineKind::Auto).unwrap();
        hand.write(at, data, false).unwrap();
        hand.flush().unwrap();
    }

    #[test]
    fn an_empty_target_may_be_written_and_one_byte_of_data_forbids_it() {
        let dir = tempfile::tempdir().unwrap();
        let device = raw(dir.path(), "disk", 32 << 20);
        let all = one(0..32 << 20);
        ask(&device, None, &all, false).unwrap();
        // Stored zeros do not count as data.
        write(&device, 5 << 20, &[0; 4096]);
        ask(&device, None, &all, false).unwrap();
        let mut sector = [0; 512];
        sector[100] = 1;
        write(&device, 20 << 20, &sector);
        let error = ask(&device, None, &all, false).unwrap_err().to_string();
        assert!(
            error.contains(&((20 << 20) + 100).to_string()) && error.contains("`PrepareOptions::destroy_data`"),
            "{error}"
        );
        // Data outside the written ranges do not matter.
        ask(&device, None, &[0..20 << 20, 21 << 20..32 << 20], false).unwrap();
        ask(&device, None, &all, true).unwrap();
    }

    #[test]
    fn a_file_system_is_called_by_its_name_wherever_the_job_writes() {
        let dir = tempfile::tempdir().unwrap();
        let device = raw(dir.path(), "disk", 32 << 20);
        let mut sector = [0; 512];
        sector[..4].copy_from_slice(b"XFSB");
        write(&device, 0, &sector);
        let error = ask(&device, None, &one(16 << 20..32 << 20), false).unwrap_err().to_string();
        assert!(error.contains("an XFS file system") && error.contains("`PrepareOptions::destroy_data`"), "{error}");
    }

    #[test]
    fn the_labs_own_file_is_used_again_unless_somebody_put_it_to_use() {
        let dir = tempfile::tempdir().unwrap();
        let (device, path) = (raw(dir.path(), "own", 8 << 20), dir.path().join("own"));
        write(&device, 1 << 20, &[7; 4096]);
        let all = one(0..8 << 20);
        assert!(ask(&device, Some(&path), &all, false).is_err());
        mark_own(&path);
        if !is_own(&path) {
            println!("skipped: the temporary folder has no extended attributes");
            return;
        }
        ask(&device, Some(&path), &all, false).unwrap();
        let mut sector = [0; 512];
        sector[..4].copy_from_slice(b"XFSB");
        write(&device, 0, &sector);
        assert!(ask(&device, Some(&path), &all, false).is_err());
    }

    #[test]
    fn a_new_child_over_a_full_parent_may_be_written() {
        let dir = tempfile::tempdir().unwrap();
        let (base, child) = (dir.path().join("base.vhdx"), dir.path().join("child.vhdx"));
        create(&base, &CreateRequest { size_bytes: Some(32 << 20), ..CreateRequest::default() }).unwrap();
        let writable = OpenOptions { writable: true, ..OpenOptions::default() };
        let disk = Disk::open(&base, &writable).unwrap();
        write(&*disk, 0, &[1; 4096]);
        disk.close().unwrap();
        drop(disk);
        let all = one(0..32 << 20);
        let disk = Disk::open(&base, &OpenOptions::default()).unwrap();
        assert!(matches!(ask(&*disk, Some(&base), &all, false), Err(LabError::HoldsData { .. })));
        drop(disk);
        create(&child, &CreateRequest { parent: Some(base), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&child, &writable).unwrap();
        ask(&*disk, Some(&child), &all, false).unwrap();
        write(&*disk, 8 << 20, &[1; 4096]);
        assert!(matches!(ask(&*disk, Some(&child), &all, false), Err(LabError::HoldsData { .. })));
    }
}
