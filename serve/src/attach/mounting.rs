//! Mounts a file system of an attached disk.
//!
//! ```text
//!   --partition N ─▶ that partition
//!   no partitions ─▶ the whole disk                      ─▶ its device ─▶ mount(2)
//!   partitions    ─▶ the only one with a file system
//!
//!   A partition without a device node gets a loop device of its own.
//! ```
//!
//! The file system is untrusted, so it is mounted with nodev and nosuid.

use crate::attach::{
    error::AttachError,
    loop_device::{self, LoopOptions},
    record::{MountRecord, PartitionRecord, Record},
};
use rustix::{io::Errno, mount::MountFlags};
use std::{
    io,
    path::{Path, PathBuf},
};

/// Mounts at `dir` and adds the mount to the record. `warnings` receives sentences for the user.
///
/// # Errors
/// [`AttachError`]. Nothing stays mounted then, but the record may have gained a loop device.
pub fn mount(
    record: &mut Record,
    file_systems: &[Option<&'static str>],
    whole: Option<&'static str>,
    dir: &Path,
    partition: Option<u32>,
    warnings: &mut Vec<String>,
) -> Result<(), AttachError> {
    let bad = |what: String| AttachError::Content { file: record.file.clone(), what };
    let dir = dir.canonicalize().map_err(|source| bad(format!("cannot mount at {}: {source}", dir.display())))?;
    let (device, file_system) = match choose(record, file_systems, whole, partition).map_err(bad)? {
        MountChoice::Whole(file_system) => (record.place().to_owned(), file_system),
        MountChoice::Partition(index, file_system) => (node(record, index, warnings)?, file_system),
    };
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if record.read_only {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount(&device, &dir, file_system, flags, None).map_err(|errno| {
        let source = io::Error::from(errno);
        let hint = match errno {
            Errno::NODEV => format!("this kernel does not support {file_system}; mount the disk on a system that does"),
            Errno::ROFS | Errno::ACCESS if record.read_only => {
                "the file system was not unmounted cleanly, and its journal must be replayed; attach with `AttachOptions::ephemeral` instead of read-only".into()
            }
            Errno::INVAL if file_system == "xfs" => {
                "if another XFS with the same UUID is mounted (a copy, or another child of the same disk), attach without `AttachOptions::mount` and mount the device with `-o nouuid`; otherwise it may be damaged: see the kernel's log (dmesg)".into()
            }
            Errno::INVAL | Errno::UCLEAN | Errno::IO => {
                "the file system may be damaged; see the kernel's log (dmesg), and try to repair it (fsck)".into()
            }
            Errno::BUSY => "the folder is a mount point already, or it is in use; choose another folder".into(),
            _ => "see the kernel's log (dmesg)".into(),
        };
        AttachError::Content {
            file: record.file.clone(),
            what: format!(
                "cannot mount {file_system} from {} at {}: {source}; {hint}",
                device.display(),
                dir.display()
            ),
        }
    })?;
    record.mounts.push(MountRecord { directory: dir, device, file_system: file_system.into() });
    Ok(())
}

#[derive(Debug, PartialEq, Eq)]
enum MountChoice {
    Whole(&'static str),
    /// The partition's index in the record, and its file system.
    Partition(usize, &'static str),
}

/// Chooses what to mount. The error is a sentence.
fn choose(
    record: &Record,
    file_systems: &[Option<&'static str>],
    whole: Option<&'static str>,
    wanted: Option<u32>,
) -> Result<MountChoice, String> {
    let partitions = &record.partitions;
    if let Some(number) = wanted {
        let Some(index) = partitions.iter().position(|partition| partition.number == number) else {
            return Err(format!("there is no partition {number}; the disk has {}", inventory(record)));
        };
        let file_system = file_systems.get(index).copied().flatten();
        return file_system.map(|file_system| MountChoice::Partition(index, file_system)).ok_or_else(|| {
            let found = partitions[index].content.as_deref().unwrap_or("no known content");
            format!("partition {number} has no file system that can be mounted; it holds {found}")
        });
    }
    if partitions.is_empty() {
        return whole
            .map(MountChoice::Whole)
            .ok_or_else(|| format!("the disk has no file system that can be mounted; it has {}", inventory(record)));
    }
    let mut mountable = file_systems
        .iter()
        .enumerate()
        .filter_map(|(index, found)| found.map(|name| MountChoice::Partition(index, name)));
    match (mountable.next(), mountable.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => {
            Err(format!("no partition has a file system that can be mounted; the disk has {}", inventory(record)))
        }
        (Some(_), Some(_)) => Err(format!(
            "several partitions have a file system; choose one with `AttachOptions::partition`; the disk has {}",
            inventory(record)
        )),
    }
}

/// "partition 1 (ext4), partition 2 (swap)".
fn inventory(record: &Record) -> String {
    if record.partitions.is_empty() {
        return match &record.content {
            Some(content) => format!("no partitions, but {content} on the whole disk"),
            None => "no partitions, and no known content on the whole disk".into(),
        };
    }
    let words = record.partitions.iter().map(|PartitionRecord { number, content, .. }| {
        format!("partition {number} ({})", content.as_deref().unwrap_or("no known content"))
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The device node of a partition. Sets up a loop device if it has none.
fn node(record: &mut Record, index: usize, warnings: &mut Vec<String>) -> Result<PathBuf, AttachError> {
    let PartitionRecord { number, start, length, device, .. } = &record.partitions[index];
    if let Some(device) = device {
        return Ok(device.clone());
    }
    let device = loop_device::set_up(&LoopOptions {
        file: record.backing(),
        name: &record.file,
        offset_bytes: *start,
        len_bytes: *length,
        sector_bytes: record.sector_size,
        read_only: record.read_only,
        partitions: false,
    })?;
    warnings.push(format!(
        "partition {number} has no device node; it is mounted through a loop device of its own, {}",
        device.display()
    ));
    record.more_devices.push(device.clone());
    Ok(device)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(contents: &[Option<&str>]) -> Record {
        let mut record = Record::new("/x.vhdx".into(), 0);
        for (number, content) in (1..).zip(contents) {
            record.partitions.push(PartitionRecord {
                number,
                start: 0,
                length: 0,
                device: None,
                content: content.map(Into::into),
            });
        }
        record
    }

    #[test]
    fn the_only_file_system_is_chosen() {
        assert_eq!(choose(&record(&[]), &[], Some("xfs"), None), Ok(MountChoice::Whole("xfs")));
        let two = record(&[Some("swap"), Some("ext4")]);
        assert_eq!(choose(&two, &[None, Some("ext4")], None, None), Ok(MountChoice::Partition(1, "ext4")));
        let two = record(&[Some("xfs"), Some("ext4")]);
        assert_eq!(choose(&two, &[Some("xfs"), Some("ext4")], None, Some(2)), Ok(MountChoice::Partition(1, "ext4")));
    }

    #[test]
    fn a_refused_choice_lists_the_partitions() {
        let several = choose(&record(&[Some("xfs"), Some("ext4")]), &[Some("xfs"), Some("ext4")], None, None);
        assert_eq!(
            several.unwrap_err(),
            "several partitions have a file system; choose one with `AttachOptions::partition`; the disk has partition 1 (xfs), partition 2 (ext4)"
        );
        let none = choose(&record(&[]), &[], None, None).unwrap_err();
        assert!(none.contains("no partitions, and no known content"), "{none}");
        let other = choose(&record(&[Some("swap")]), &[None], None, Some(3)).unwrap_err();
        assert_eq!(other, "there is no partition 3; the disk has partition 1 (swap)");
        let swap = choose(&record(&[Some("swap")]), &[None], None, Some(1)).unwrap_err();
        assert!(swap.contains("holds swap"), "{swap}");
    }
}
