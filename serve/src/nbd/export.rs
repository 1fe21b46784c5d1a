//! Exports: disks under names, and what clients are told about them.

use super::connection::Peer;
use diskwright_nbd::wire::{BlockSizes, PAYLOAD_BYTES_DEFAULT, STRING_BYTES_MAX, TransmissionFlags};
use diskwright_store::{BlockDevice, Geometry};
use std::sync::Arc;

/// Bytes that clients are asked to keep to where a disk has no wish of its own.
const PREFERRED_BYTES: u32 = 4096;

/// A disk and its name.
#[derive(Debug, Clone)]
pub struct Export {
    /// The name by which clients ask for it.
    pub name: String,
    /// A sentence for people, of at most 4096 bytes.
    pub description: String,
    /// The disk. It is written where its geometry allows that.
    pub device: Arc<dyn BlockDevice>,
}

impl Export {
    /// Whether clients may write.
    pub fn is_writable(&self) -> bool {
        !self.device.geometry().read_only
    }

    /// What clients are told that the export can do. `chunks`: whether replies come in chunks,
    /// which the client has agreed on.
    pub(crate) fn flags(&self, chunks: bool) -> TransmissionFlags {
        let mut flags = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::CAN_MULTI_CONN
            | TransmissionFlags::SEND_CACHE;
        if self.is_writable() {
            flags |= TransmissionFlags::SEND_FUA
                | TransmissionFlags::SEND_TRIM
                | TransmissionFlags::SEND_WRITE_ZEROES
                | TransmissionFlags::SEND_FAST_ZERO;
        } else {
            flags |= TransmissionFlags::READ_ONLY;
        }
        flags.set(TransmissionFlags::SEND_DF, chunks);
        flags
    }

    /// The sizes that clients must keep to.
    pub(crate) fn block_sizes(&self) -> BlockSizes {
        let Geometry { logical_sector_bytes: minimum, physical_sector_bytes, .. } = self.device.geometry();
        let preferred = physical_sector_bytes.max(minimum).max(PREFERRED_BYTES);
        BlockSizes { minimum, preferred, maximum: PAYLOAD_BYTES_DEFAULT }
    }

    /// Says in the log what a client may run into that has not asked for the block sizes.
    pub(crate) fn tell_of_strays(&self, peer: &Peer) {
        let block_bytes = self.block_sizes().minimum;
        tracing::warn!(
            %peer, export = %self.name,
            "the client has not asked for the block sizes, and this disk is read and written in whole blocks of {block_bytes} bytes: \
             requests for parts of them are refused (EINVAL); tell the client how large they are (nbd-client: -b {block_bytes})"
        );
    }
}

/// The exports of a server.
#[derive(Debug)]
pub(crate) struct Exports(Vec<Export>);

/// Why a list of exports cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// None.
    #[error("there is nothing to serve; name at least one disk")]
    Nothing,
    /// Two of one name.
    #[error("two exports are called {name:?}; give one of them another name with NAME=FILE")]
    Twice {
        /// The name.
        name: String,
    },
    /// A name that the protocol cannot carry.
    #[error(
        "{name:?} cannot be the name of an export; it must be text without NUL, of at most {STRING_BYTES_MAX} bytes"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// A description that the protocol cannot carry.
    #[error(
        "the description has {len_bytes} bytes; it must be text without NUL, of at most {STRING_BYTES_MAX} bytes: give a shorter one"
    )]
    Description {
        /// Its length.
        len_bytes: usize,
    },
}

/// Whether the protocol can carry the name.
///
/// # Errors
/// [`ExportError::Name`].
pub fn check_name(name: &str) -> Result<(), ExportError> {
    if is_carried(name) { Ok(()) } else { Err(ExportError::Name { name: name.to_owned() }) }
}

/// Whether the protocol can carry the description.
///
/// # Errors
/// [`ExportError::Description`].
pub fn check_description(description: &str) -> Result<(), ExportError> {
    if is_carried(description) { Ok(()) } else { Err(ExportError::Description { len_bytes: description.len() }) }
}

fn is_carried(text: &str) -> bool {
    text.len() <= STRING_BYTES_MAX && !text.contains('\0')
}

impl Exports {
    pub(crate) fn new(exports: Vec<Export>) -> Result<Self, ExportError> {
        if exports.is_empty() {
            return Err(ExportError::Nothing);
        }
        for (index, export) in exports.iter().enumerate() {
            check_name(&export.name)?;
            check_description(&export.description)?;
            if exports[..index].iter().any(|other| other.name == export.name) {
                return Err(ExportError::Twice { name: export.name.clone() });
            }
        }
        Ok(Self(exports))
    }

    /// The export of a name. The empty name is the default export: the one so called, or the only
    /// one.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        match self.0.iter().position(|export| export.name == name) {
            None if name.is_empty() && self.0.len() == 1 => Some(0),
            found => found,
        }
    }

    pub(crate) fn get(&self, index: usize) -> &Export {
        &self.0[index]
    }

    pub(crate) fn iter(&self) -> std::slice::Iter<'_, Export> {
        self.0.iter()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{MemoryStore, RawDevice};

    fn export(name: &str, writable: bool) -> Export {
        let device = RawDevice::new(Arc::new(MemoryStore::with_bytes("m", vec![0; 8192])), writable, 512).unwrap();
        Export { name: name.into(), description: String::new(), device: Arc::new(device) }
    }

    #[test]
    fn names_are_found_and_the_only_one_is_the_default() {
        let one = Exports::new(vec![export("a", true)]).unwrap();
        assert_eq!((one.find("a"), one.find(""), one.find("b")), (Some(0), Some(0), None));
        let two = Exports::new(vec![export("a", true), export("b", true)]).unwrap();
        assert_eq!((two.find("b"), two.find("")), (Some(1), None));
        let default = Exports::new(vec![export("a", true), export("", true)]).unwrap();
        assert_eq!(default.find(""), Some(1));
    }

    #[test]
    fn what_cannot_be_served_is_told() {
        assert!(matches!(Exports::new(Vec::new()), Err(ExportError::Nothing)));
        assert!(matches!(Exports::new(vec![export("a", true), export("a", true)]), Err(ExportError::Twice { .. })));
        assert!(matches!(Exports::new(vec![export(&"a".repeat(4097), true)]), Err(ExportError::Name { .. })));
        let described = |description: &str| {
            Exports::new(vec![Export { description: description.into(), ..export("a", true) }]).map(|_| ())
        };
        described(&"ä".repeat(2048)).unwrap();
        let error = described(&("ä".repeat(2048) + "a")).unwrap_err().to_string();
        assert!(error.contains("has 4097 bytes") && error.contains("at most 4096 bytes"), "{error}");
        assert!(matches!(described("a\0b"), Err(ExportError::Description { len_bytes: 3 })));
    }

    #[test]
    fn a_read_only_disk_says_so() {
        let flags = export("a", false).flags(true);
        assert!(flags.contains(TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_DF));
        assert!(!flags.intersects(TransmissionFlags::SEND_TRIM | TransmissionFlags::SEND_FUA));
        let flags = export("a", true).flags(false);
        assert!(!flags.intersects(TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_DF));
        export("a", true).block_sizes().check().unwrap();
    }
}
