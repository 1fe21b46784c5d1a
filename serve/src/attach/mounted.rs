//! Where the file systems of an attached disk are mounted.

use super::{record::Record, usage};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

/// All directories on which a file system of the disk is mounted, by attach or by others.
pub fn mounted_from(record: &Record) -> Vec<PathBuf> {
    let devices = usage::Devices::of(record.device.iter().chain(&record.more_devices));
    let mounts = usage::mounts().unwrap_or_default();
    mounts.into_iter().filter(|mount| devices.carry(mount)).map(|mount| mount.dir).collect()
}

/// The directory on which a file system of the disk is mounted, if `folder` lies in it. A file
/// system on LVM or another device above the disk is not found. Does not write to it, but asks it
/// for the folder's device number.
pub fn carries(record: &Record, folder: &Path) -> Option<PathBuf> {
    let devices = usage::Devices::of(record.device.iter().chain(&record.more_devices));
    let number = fs::metadata(folder).ok()?.dev();
    let mounts = usage::mounts().unwrap_or_default();
    mounts.into_iter().find(|mount| mount.device == number && devices.carry(mount)).map(|mount| mount.dir)
}
