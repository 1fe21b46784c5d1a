//! Where the file systems of an attached disk are mounted.

use super::{record::Record, usage};
use std::path::PathBuf;

/// All directories on which a file system of the disk is mounted, by attach or by others.
pub fn mounted_from(record: &Record) -> Vec<PathBuf> {
    let devices = usage::Devices::of(record.device.iter().chain(&record.more_devices));
    let mounts = usage::mounts().unwrap_or_default();
    mounts.into_iter().filter(|mount| devices.carry(mount)).map(|mount| mount.dir).collect()
}
