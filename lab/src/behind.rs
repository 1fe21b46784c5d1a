//! What stands behind a target that is no file of its own: an export of a server, a disk that
//! `diskwright attach` shows, the file of a loop device.
//!
//! ```text
//!   nbd://HOST/EXPORT ─▶ what the server told when it was connected to
//!   /dev/loop3        ─▶ the record of attached disks (its image, its server), else the file that the kernel names in sysfs
//! ```
//!
//! A figure of `/dev/loop3` means nothing a day later, when it shows another file. And what a
//! target stands on says who caches: for an export that is its server, whatever this side asks for.
//! Everything here only reads, and what cannot be found out is left out.

use diskwright_nbd::{NbdDevice, wire::TransmissionFlags};
use diskwright_serve::attach::{Record, Registry};
use rustix::fs::{FileType, major, minor, stat};
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    path::{Path, PathBuf},
};

/// See the module.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Behind {
    /// An export of an NBD server.
    Export(ExportRecord),
    /// A disk attached by `diskwright attach`.
    Attached {
        /// Its image.
        image: PathBuf,
        /// The partition that was measured; none: the whole disk.
        partition: Option<u32>,
        /// Writes are dropped when it is detached.
        ephemeral: bool,
        /// The process that moves its bytes.
        server_pid: Option<u32>,
    },
    /// The file of a loop device that somebody else has made.
    Loop {
        /// As the kernel names it.
        file: PathBuf,
    },
}

/// What a server told of an export.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportRecord {
    /// Host and port, or the path of the socket.
    pub server: String,
    /// Its name; empty is the server's default.
    pub export: String,
    /// A sentence of the server for people.
    pub description: Option<String>,
    /// The server takes no writes.
    pub read_only: bool,
    /// Connections that are made at most: one for each thread, as far as the server allows and the
    /// URI says.
    pub connections_max: usize,
    /// A write can be asked to be durable; else a flush follows it.
    pub has_fua: bool,
    /// The server has flushes. Without, nothing can be said of durability.
    pub has_flush: bool,
    /// The server tells what is zeros and what has space; else all counts as data.
    pub tells_zeros: bool,
    /// Smallest, preferred and largest request in bytes.
    pub block_bytes: [u32; 3],
    /// TLS's version and cipher, where it is encrypted.
    pub tls: Option<String>,
}

impl Behind {
    /// What the server of an export told.
    pub fn of_export(device: &NbdDevice) -> Self {
        let export = device.export();
        let has = |flag| export.flags.contains(flag);
        let sizes = export.block_sizes;
        Self::Export(ExportRecord {
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

    /// What the block device at `path` shows, where that can be found out.
    pub fn of_device(path: &Path) -> Option<Self> {
        let real = path.canonicalize().ok()?;
        let found = stat(&real).ok().filter(|found| FileType::from_raw_mode(found.st_mode).is_block_device())?;
        if let Some(record) = attached(&real) {
            let is_it = |device: &Option<PathBuf>| device.as_deref() == Some(&*real);
            let partition = record.partitions.iter().find(|partition| is_it(&partition.device));
            return Some(Self::Attached {
                partition: partition.map(|partition| partition.number),
                ephemeral: record.ephemeral,
                server_pid: record.server.map(|server| server.pid),
                image: record.file,
            });
        }
        let folder = format!("/sys/dev/block/{}:{}", major(found.st_rdev), minor(found.st_rdev));
        loop_file(Path::new(&folder)).map(|file| Self::Loop { file })
    }

    /// The export, if it is one.
    pub fn export(&self) -> Option<&ExportRecord> {
        match self {
            Self::Export(export) => Some(export),
            _ => None,
        }
    }
}

impl fmt::Display for Behind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Export(export) => {
                let name =
                    if export.export.is_empty() { "the default export".into() } else { format!("{:?}", export.export) };
                write!(f, "{name} of the server at {}", export.server)?;
                match export.connections_max {
                    1 => write!(f, ", one connection")?,
                    most => write!(f, ", up to {most} connections")?,
                }
                if let Some(tls) = &export.tls {
                    write!(f, ", {tls}")?;
                }
                Ok(())
            }
            Self::Attached { image, partition, ephemeral, .. } => {
                if let Some(number) = partition {
                    write!(f, "partition {number} of ")?;
                }
                let dropped = if *ephemeral { ", writes are dropped" } else { "" };
                write!(f, "{}, attached by diskwright{dropped}", image.display())
            }
            Self::Loop { file } => write!(f, "a loop device over {}", file.display()),
        }
    }
}

/// The attached disk that `path` belongs to, by its image, its device or one of its partitions'.
/// Records that cannot be read are none.
pub fn attached(path: &Path) -> Option<Record> {
    let (_, record) = Registry::existing()?.find(path).ok()?;
    record.is_supervised().then_some(record)
}

/// The file of the loop device whose folder in sysfs this is, or of which it is a partition.
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
    fn it_is_told_in_words_and_survives_json() {
        let export = ExportRecord {
            server: "/run/s.sock".into(),
            export: String::new(),
            description: None,
            read_only: false,
            connections_max: 4,
            has_fua: true,
            has_flush: true,
            tells_zeros: true,
            block_bytes: [1, 4096, 32 << 20],
            tls: Some("TLS 1.3".into()),
        };
        let attached =
            Behind::Attached { image: "/a/disk.vhdx".into(), partition: Some(2), ephemeral: true, server_pid: Some(7) };
        for (behind, words) in [
            (
                Behind::Export(export.clone()),
                "the default export of the server at /run/s.sock, up to 4 connections, TLS 1.3",
            ),
            (
                Behind::Export(ExportRecord { export: "db".into(), connections_max: 1, tls: None, ..export }),
                "\"db\" of the server at /run/s.sock, one connection",
            ),
            (attached, "partition 2 of /a/disk.vhdx, attached by diskwright, writes are dropped"),
            (Behind::Loop { file: "/x.raw".into() }, "a loop device over /x.raw"),
        ] {
            assert_eq!(behind.to_string(), words);
            let json = serde_json::to_string(&behind).unwrap();
            assert_eq!(serde_json::from_str::<Behind>(&json).unwrap(), behind, "{json}");
        }
    }

    #[test]
    fn an_ordinary_file_shows_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Behind::of_device(file.path()), None);
        assert_eq!(Behind::of_device(Path::new("/nowhere")), None);
    }
}
