//! The image, export or file behind a target: an NBD export, a disk attached by
//! `diskwright attach`, or the file of a loop device.
//!
//! A result of `/dev/loop3` is of no use without the file, because the device may show another file
//! the next day. For an export, the record also says that the server's cache mode is not known. The
//! caller that opens a target finds these facts, and the result records them.

use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// The image, export or file that a target shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Backing {
    /// An export of an NBD server.
    Export(ExportRecord),
    /// A namespace of an NVMe/TCP target.
    Namespace {
        /// Host and port.
        target: String,
        /// NQN of the subsystem.
        subsystem: String,
        /// Id of the namespace.
        nsid: u32,
        /// I/O queues that the target grants; each thread uses one.
        queues_max: u16,
    },
    /// A logical unit of an iSCSI target.
    Unit {
        /// Host and port.
        target: String,
        /// The iSCSI name of the target.
        name: String,
        /// Number of the logical unit.
        unit: u16,
        /// Vendor, product and version.
        product: String,
    },
    /// A disk attached by `diskwright attach`.
    Attached {
        /// The image file.
        image: PathBuf,
        /// Number of the partition that was measured; `None`: the whole disk.
        partition: Option<u32>,
        /// Writes are dropped when the disk is detached.
        ephemeral: bool,
        /// Process id of the server that carries out the requests.
        server_pid: Option<u32>,
    },
    /// A loop device that was not made by `diskwright attach`.
    Loop {
        /// The file behind the loop device, as the kernel names it.
        file: PathBuf,
    },
}

/// An NBD export and the properties that its server announced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ExportRecord {
    /// Host and port, or the path of the socket.
    pub server: String,
    /// Name of the export; empty: the server's default export.
    pub export: String,
    /// The server's description of the export.
    pub description: Option<String>,
    /// The export is read-only.
    pub read_only: bool,
    /// Maximum number of connections: one for each thread, limited by the server and by the URI.
    pub connections_max: usize,
    /// The server supports FUA; else a flush follows each durable write.
    pub has_fua: bool,
    /// The server supports flushes. Without them no write is known to be durable.
    pub has_flush: bool,
    /// The server reports zeros and holes (`base:allocation`); else everything counts as data.
    pub tells_zeros: bool,
    /// Smallest, preferred and largest request in bytes.
    pub block_bytes: [u32; 3],
    /// TLS version and cipher; `None`: not encrypted.
    pub tls: Option<String>,
}

impl Backing {
    /// Whether the target is the disk of a server: an export, a namespace or a logical unit.
    pub fn is_on_server(&self) -> bool {
        matches!(self, Self::Export(_) | Self::Namespace { .. } | Self::Unit { .. })
    }
}

impl fmt::Display for Backing {
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
            Self::Namespace { target, subsystem, nsid, queues_max } => {
                write!(f, "namespace {nsid} of {subsystem} at {target}, up to {queues_max} queues")
            }
            Self::Unit { target, name, unit, product } => {
                write!(f, "logical unit {unit} of {name} at {target} ({product})")
            }
            Self::Loop { file } => write!(f, "a loop device over {}", file.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_is_displayed_and_is_read_back_from_its_json() {
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
        let attached = Backing::Attached {
            image: "/a/disk.vhdx".into(),
            partition: Some(2),
            ephemeral: true,
            server_pid: Some(7),
        };
        for (behind, words) in [
            (
                Backing::Export(export.clone()),
                "the default export of the server at /run/s.sock, up to 4 connections, TLS 1.3",
            ),
            (
                Backing::Export(ExportRecord { export: "db".into(), connections_max: 1, tls: None, ..export }),
                "\"db\" of the server at /run/s.sock, one connection",
            ),
            (attached, "partition 2 of /a/disk.vhdx, attached by diskwright, writes are dropped"),
            (
                Backing::Namespace { target: "h:4420".into(), subsystem: "nqn.x".into(), nsid: 3, queues_max: 32 },
                "namespace 3 of nqn.x at h:4420, up to 32 queues",
            ),
            (
                Backing::Unit { target: "h:3260".into(), name: "iqn.x".into(), unit: 3, product: "A B 1".into() },
                "logical unit 3 of iqn.x at h:3260 (A B 1)",
            ),
            (Backing::Loop { file: "/x.raw".into() }, "a loop device over /x.raw"),
        ] {
            assert_eq!(behind.to_string(), words);
            let json = serde_json::to_string(&behind).unwrap();
            assert_eq!(serde_json::from_str::<Backing>(&json).unwrap(), behind, "{json}");
        }
    }
}
