//! What a target shows that is not a file of its own: an export of a server, a disk that
//! `diskwright attach` shows, the file of a loop device.
//!
//! A figure of `/dev/loop3` means nothing a day later, when the device shows another file. And what
//! is behind a target says who caches: for an export that is its server, whatever is asked for on
//! this side. Whoever opens targets finds these facts; a result keeps them.

use serde::{Deserialize, Serialize};
use std::{fmt, path::PathBuf};

/// What a target shows.
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

#[cfg(test)]
mod tests {
    use super::*;

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
}
