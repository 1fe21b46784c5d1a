//! Header and extensions of a file, and what is refused by name.

use super::corrupt;
use crate::error::{ImageError, Result};
use diskwright_format::qcow2::{
    Compression, Extensions, Header, Invalid, MAGIC,
    features::describe_incompatible,
    header::{Encryption, V3_BYTES},
};
use diskwright_store::Store;

/// Bytes of a file that are read for the header: all fields that are known.
const HEADER_READ_BYTES: usize = V3_BYTES + 8;

/// What the first cluster of a file says.
#[derive(Debug, Clone)]
pub(super) struct HeaderCluster {
    pub header: Header,
    pub extensions: Extensions,
    /// Name of the backing file, as it is in the file.
    pub backing_name: Option<String>,
    /// Length of the file in bytes.
    pub file_bytes: u64,
}

impl HeaderCluster {
    /// Reads the first cluster.
    ///
    /// # Errors
    /// `NotAnImage` without the magic number; `Unsupported` for an unknown incompatible feature,
    /// encryption, or compression; `Corrupt`; `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let front = Self::read_any(store)?;
        front.refuse_unsupported(store)?;
        Ok(front)
    }

    /// The same, also for features that are not supported.
    ///
    /// # Errors
    /// As [`HeaderCluster::read`], without `Unsupported`.
    fn read_any(store: &dyn Store) -> Result<Self> {
        let io = |doing: &'static str| move |error| ImageError::io(doing, store, 0, error);
        let file_bytes = store.len_bytes().map_err(io("get the length of the file"))?;
        let mut bytes = vec![0; file_bytes.min(HEADER_READ_BYTES as u64) as usize];
        store.read_at(&mut bytes, 0).map_err(io("read the qcow2 header"))?;
        if !bytes.starts_with(&MAGIC) {
            return Err(ImageError::NotAnImage {
                path: store.name().to_owned(),
                found: format!("the file begins with \"{}\"", bytes[..bytes.len().min(4)].escape_ascii()),
                expected: format!("\"{}\", the magic number of qcow2", MAGIC.escape_ascii()),
            });
        }
        let header = Header::parse(&bytes).map_err(|invalid| corrupt(store, 0, invalid))?;
        let mut cluster = vec![0; file_bytes.min(header.cluster_bytes()) as usize];
        store.read_at(&mut cluster, 0).map_err(io("read the qcow2 header"))?;
        let within = |offset_bytes: u64, len_bytes: u64| {
            let start = (offset_bytes as usize).min(cluster.len());
            let end = (offset_bytes.saturating_add(len_bytes) as usize).min(cluster.len());
            &cluster[start..end.max(start)]
        };
        let area = header.extensions();
        let extensions = Extensions::parse(within(area.offset_bytes, area.len_bytes), area.offset_bytes);
        let extensions = match extensions {
            // Unknown features may explain what is wrong with the extensions.
            Err(_) if header.features.unknown_incompatible() != 0 => Extensions::default(),
            parsed => parsed.map_err(|invalid| {
                let invalid = Invalid { offset_bytes: invalid.offset_bytes, ..invalid };
                corrupt(store, 0, invalid)
            })?,
        };
        let backing_name = match header.backing_name {
            None => None,
            Some(place) => {
                let name = within(place.offset_bytes, place.len_bytes);
                let fail = |found: &str, expected: &str| {
                    Err(corrupt(store, place.offset_bytes, Invalid::new("backing file name", 0, found, expected)))
                };
                if name.len() as u64 != place.len_bytes {
                    return fail("the end of the file", "the whole name");
                }
                match std::str::from_utf8(name) {
                    Ok(name) if !name.contains('\0') => Some(name.to_owned()),
                    Ok(_) => return fail("a name with the character NUL", "a name without it"),
                    Err(_) => return fail(&format!("\"{}\"", name.escape_ascii()), "a name in UTF-8"),
                }
            }
        };
        Ok(Self { header, extensions, backing_name, file_bytes })
    }

    /// The refusal of features that no code here understands.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn refuse_unsupported(&self, store: &dyn Store) -> Result<()> {
        let header = &self.header;
        let unsupported = |what: String, hint: &str| {
            Err(ImageError::Unsupported { path: store.name().to_owned(), what, hint: hint.into() })
        };
        let unknown = header.features.unknown_incompatible();
        if unknown != 0 {
            let names = describe_incompatible(unknown, &self.extensions.feature_names);
            return unsupported(
                format!("the incompatible feature {names} of this qcow2 image"),
                "open it with a version of the program that wrote it, and convert it there",
            );
        }
        let encrypted = match header.encryption {
            Encryption::None => None,
            Encryption::Aes => Some("AES".to_owned()),
            Encryption::Luks => Some("LUKS".to_owned()),
            Encryption::Unknown(method) => Some(format!("method {method}")),
        };
        if let Some(method) = encrypted {
            return unsupported(
                format!("a qcow2 image that is encrypted ({method})"),
                "decrypt it with `qemu-img convert`, which takes the key as a secret object",
            );
        }
        if let Compression::Unknown(kind) = header.compression {
            return unsupported(
                format!("the compression type {kind} of this qcow2 image"),
                "convert it with the program that wrote it",
            );
        }
        Ok(())
    }
}
