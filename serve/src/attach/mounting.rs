//! Mounting what is inside an attached disk.
//!
//! ```text
//!   --partition N ─▶ that one
//!   no partitions ─▶ the whole disk             ─▶ its device; a partition without a node gets a loop device of its own ─▶ mount(2)
//!   partitions    ─▶ the only one with a file system
//! ```
//!
//! What is inside comes from elsewhere, so it is mounted without devices and without set-user-id
//! programs.

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

/// Mounts at `dir` and notes it in the record. Warnings are sentences for the user.
///
/// # Errors
/// [`AttachError`]; nothing stays mounted then, but a further loop device may be noted in the
/// record.
pub fn mount(
    record: &mut Record,
    file_systems: &[Option<&'static str>],
    whole: Option<&'static str>,
    dir: &Path,
    partition: Option<u32>,
    warnings: &mut Vec<String>,
) -> Result<(), AttachError> {
    let bad = |what: String| AttachError::Content { file: record.file.clone(), what };
    let dir = dir.canonicalize().map_err(|source| bad(format!("cannot mount it at {}: {source}", dir.display())))?;
    let (device, file_system) = match choose(record, file_systems, whole, partition).map_err(bad)? {
        Chosen::Whole(file_system) => (record.place().to_owned(), file_system),
        Chosen::Partition(index, file_system) => (node(record, index, warnings)?, file_system),
    };
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if record.read_only {
        flags |= MountFlags::RDONLY;
    }
    rustix::mount::mount(&device, &dir, file_system, flags, None).map_err(|errno| {
        let source = io::Error::from(errno);
        let hint = match errno {
            Errno::NODEV => format!("this kernel cannot mount {file_system}; look at the disk with another system"),
            Errno::ROFS | Errno::ACCESS if record.read_only => {
                "it was not unmounted cleanly and would have to be repaired first; attach it with --ephemeral instead of --read-only".into()
            }
            Errno::INVAL if file_system == "xfs" => {
                "if another XFS with the same UUID is mounted (a copy, or another child of the same disk), attach without --mount and mount the device with `-o nouuid`; else it may be damaged: the kernel's log (dmesg) says more".into()
            }
            Errno::INVAL | Errno::UCLEAN | Errno::IO => {
                "it may be damaged; the kernel's log (dmesg) says more, and a check (fsck) may repair it".into()
            }
            Errno::BUSY => "something is mounted there already, or it is in use; choose another folder".into(),
            _ => "the kernel's log (dmesg) may say more".into(),
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
enum Chosen {
    Whole(&'static str),
    /// By its place in the record.
    Partition(usize, &'static str),
}

/// What to mount, or a sentence that says why that cannot be told.
fn choose(
    record: &Record,
    file_systems: &[Option<&'static str>],
    whole: Option<&'static str>,
    wanted: Option<u32>,
) -> Result<Chosen, String> {
    let partitions = &record.partitions;
    if let Some(number) = wanted {
        let Some(index) = partitions.iter().position(|partition| partition.number == number) else {
            return Err(format!("it has no partition {number}; it has {}", inventory(record)));
        };
        let file_system = file_systems.get(index).copied().flatten();
        return file_system.map(|file_system| Chosen::Partition(index, file_system)).ok_or_else(|| {
            let found = partitions[index].content.as_deref().unwrap_or("nothing that is known");
            format!("partition {number} has no file system to mount; it holds {found}")
        });
    }
    if partitions.is_empty() {
        return whole
            .map(Chosen::Whole)
            .ok_or_else(|| format!("it has no file system to mount; it has {}", inventory(record)));
    }
    let mut mountable =
        file_systems.iter().enumerate().filter_map(|(index, found)| found.map(|name| Chosen::Partition(index, name)));
    match (mountable.next(), mountable.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(format!("none of its partitions has a file system to mount; it has {}", inventory(record))),
        (Some(_), Some(_)) => Err(format!(
            "several of its partitions have a file system: say which by --partition; it has {}",
            inventory(record)
        )),
    }
}

/// "partition 1 (ext4), partition 2 (swap)".
fn inventory(record: &Record) -> String {
    if record.partitions.is_empty() {
        return match &record.content {
            Some(content) => format!("no partitions, but {content} on the whole disk"),
            None => "no partitions, and nothing that is known on the whole disk".into(),
        };
    }
    let words = record.partitions.iter().map(|PartitionRecord { number, content, .. }| {
        format!("partition {number} ({})", content.as_deref().unwrap_or("nothing that is known"))
    });
    words.collect::<Vec<_>>().join(", ")
}

/// The device of a partition.
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
        "partition {number} has no node in /dev; it is mounted by a loop device of its own, {}",
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
    fn the_only_one_is_chosen() {
        assert_eq!(choose(&record(&[]), &[], Some("xfs"), None), Ok(Chosen::Whole("xfs")));
        let two = record(&[Some("swap"), Some("ext4")]);
        assert_eq!(choose(&two, &[None, Some("ext4")], None, None), Ok(Chosen::Partition(1, "ext4")));
        let two = record(&[Some("xfs"), Some("ext4")]);
        assert_eq!(choose(&two, &[Some("xfs"), Some("ext4")], None, Some(2)), Ok(Chosen::Partition(1, "ext4")));
    }

    #[test]
    fn what_cannot_be_chosen_says_what_there_is() {
        let several = choose(&record(&[Some("xfs"), Some("ext4")]), &[Some("xfs"), Some("ext4")], None, None);
        assert_eq!(
            several.unwrap_err(),
            "several of its partitions have a file system: say which by --partition; it has partition 1 (xfs), partition 2 (ext4)"
        );
        let none = choose(&record(&[]), &[], None, None).unwrap_err();
        assert!(none.contains("no partitions, and nothing that is known"), "{none}");
        let other = choose(&record(&[Some("swap")]), &[None], None, Some(3)).unwrap_err();
        assert_eq!(other, "it has no partition 3; it has partition 1 (swap)");
        let swap = choose(&record(&[Some("swap")]), &[None], None, Some(1)).unwrap_err();
        assert!(swap.contains("holds swap"), "{swap}");
    }
}
