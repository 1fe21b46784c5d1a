//! Finds out what is behind a target: the export's server, or the file behind a block device.
//!
//! ```text
//!   nbd://HOST/EXPORT ─▶ what the server reported in the handshake
//!   /dev/loop3        ─▶ the record of attached disks, else the file that sysfs names
//! ```
//!
//! This module only reads. Unknown facts are left out.

use diskwright_iscsi::IscsiDevice;
use diskwright_load::backing::{Backing, ExportRecord};
use diskwright_nbd::{NbdDevice, wire::TransmissionFlags};
use diskwright_nvme::NvmeDevice;
use diskwright_serve::attach::{Record, Registry};
use rustix::fs::{FileType, major, minor, stat};
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Facts that the server of an export reported.
pub fn of_export(device: &NbdDevice) -> Backing {
    let export = device.export();
    let has = |flag| export.flags.contains(flag);
    let sizes = export.block_sizes;
    Backing::Export(ExportRecord {
        server: device.uri().endpoint.to_string(),
        export: export.name.clone(),
        description: export.description.clone(),
        read_only: has(TransmissionFlags::READ_ONLY),
        connections_max: device.connections_max(),
        has_fua: has(TransmissionFlags::SEND_FUA),
        has_flush: has(TransmissionFlags::SEND_FLUSH),
        tells_zeros: export.allocation_context.is_some(),
        block_bytes: [sizes.minimum, sizes.preferred, sizes.maximum],
        tls: export.tls.clone(),
    })
}

/// Facts that the target of a namespace told.
pub fn of_namespace(device: &NvmeDevice) -> Backing {
    let info = device.info();
    Backing::Namespace {
        target: device.endpoint().to_string(),
        subsystem: info.subsystem.clone(),
        nsid: info.nsid,
        queues_max: info.queues,
    }
}

/// Facts that the target of a logical unit told.
pub fn of_unit(device: &IscsiDevice) -> Backing {
    let info = device.info();
    Backing::Unit {
        target: device.endpoint().to_string(),
        name: info.target.clone(),
        unit: info.unit,
        product: format!("{} {} {}", info.vendor, info.product, info.revision),
    }
}

/// What is behind the block device at `path`; `None` if unknown.
pub fn of_device(path: &Path) -> Option<Backing> {
    let real = path.canonicalize().ok()?;
    let found = stat(&real).ok().filter(|found| FileType::from_raw_mode(found.st_mode).is_block_device())?;
    if let Some(record) = attached(&real) {
        let is_it = |device: &Option<PathBuf>| device.as_deref() == Some(&*real);
        let partition = record.partitions.iter().find(|partition| is_it(&partition.device));
        return Some(Backing::Attached {
            partition: partition.map(|partition| partition.number),
            ephemeral: record.ephemeral,
            server_pid: record.server.map(|server| server.pid),
            image: record.file,
        });
    }
    let folder = format!("/sys/dev/block/{}:{}", major(found.st_rdev), minor(found.st_rdev));
    loop_file(Path::new(&folder)).map(|file| Backing::Loop { file })
}

/// The attached disk of `path`, which may be its image, its device or one of its partitions.
/// Records that cannot be read are ignored.
pub fn attached(path: &Path) -> Option<Record> {
    let (_, record) = Registry::existing()?.find(path).ok()?;
    record.is_supervised().then_some(record)
}

/// The backing file of a loop device, or of the loop device of a partition. `folder` is in sysfs.
fn loop_file(folder: &Path) -> Option<PathBuf> {
    let folder = folder.canonicalize().ok()?;
    let whole = if folder.join("partition").exists() { folder.parent()? } else { &folder };
    let file = fs::read_to_string(whole.join("loop/backing_file")).ok()?;
    Some(file.trim_end_matches('\n').into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_loop_devices_file_is_found_from_its_partition_too() {
        let sys = tempfile::tempdir().unwrap();
        let part = sys.path().join("loop7/loop7p1");
        fs::create_dir_all(&part).unwrap();
        fs::create_dir_all(sys.path().join("loop7/loop")).unwrap();
        fs::create_dir_all(sys.path().join("vda")).unwrap();
        fs::write(sys.path().join("loop7/loop/backing_file"), "/x/my disk.raw\n").unwrap();
        assert_eq!(loop_file(&part), None, "a folder is no partition by its place");
        fs::write(part.join("partition"), "1\n").unwrap();
        for folder in ["loop7", "loop7/loop7p1"] {
            assert_eq!(loop_file(&sys.path().join(folder)), Some("/x/my disk.raw".into()));
        }
        assert_eq!(loop_file(&sys.path().join("vda")), None);
    }

    #[test]
    fn an_ordinary_file_shows_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(of_device(file.path()), None);
        assert_eq!(of_device(Path::new("/nowhere")), None);
    }
}
