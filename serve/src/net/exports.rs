//! Exports: disks with names.

use diskwright_nbd::wire::STRING_BYTES_MAX;
use diskwright_store::BlockDevice;
use std::sync::Arc;
use uuid::Uuid;

/// A disk and its name.
#[derive(Debug, Clone)]
pub struct Export {
    /// The name that clients ask for.
    pub name: String,
    /// A sentence for people, at most 4096 bytes.
    pub description: String,
    /// The disk. Clients may write to it if its geometry is not read-only.
    pub device: Arc<dyn BlockDevice>,
}

impl Export {
    /// Whether clients may write.
    pub fn is_writable(&self) -> bool {
        !self.device.geometry().read_only
    }
}

/// An export by its index, which it keeps.
#[derive(Debug, Clone)]
enum Slot {
    Here(Export),
    /// Its last clients are being disconnected.
    Leaving(Export),
    /// The index is free.
    Gone,
}

impl Slot {
    fn here(&self) -> Option<&Export> {
        match self {
            Self::Here(export) => Some(export),
            Self::Leaving(_) | Self::Gone => None,
        }
    }
}

/// The exports of a server at one time. A change makes another value, which each worker gets.
#[derive(Debug, Clone)]
pub(crate) struct Exports {
    slots: Vec<Slot>,
    /// Identifies this server among all that ever serve the same disks.
    server: Uuid,
}

/// Why the exports cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The list of exports is empty.
    #[error("there is no disk to serve; name at least one")]
    Nothing,
    /// Two exports have the same name.
    #[error("two exports have the name {name:?}; give one of them another name with NAME=FILE")]
    Twice {
        /// The name.
        name: String,
    },
    /// The protocol does not allow this name.
    #[error(
        "{name:?} is not a valid export name: a name has at most {STRING_BYTES_MAX} bytes and no NUL; choose another name"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The protocol does not allow this description.
    #[error(
        "the description has {len_bytes} bytes; it must have at most {STRING_BYTES_MAX} bytes and no NUL: give a shorter one"
    )]
    Description {
        /// Its length in bytes.
        len_bytes: usize,
    },
}

/// Checks that the protocol allows the export name.
///
/// # Errors
/// [`ExportError::Name`].
pub fn check_name(name: &str) -> Result<(), ExportError> {
    if is_carried(name) { Ok(()) } else { Err(ExportError::Name { name: name.to_owned() }) }
}

/// Checks that the protocol allows the description.
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
        Ok(Self { slots: exports.into_iter().map(Slot::Here).collect(), server: Uuid::new_v4() })
    }

    /// The index of the export with this name. The empty name means the export with the empty name
    /// or, if there is none, the only export.
    pub(crate) fn find(&self, name: &str) -> Option<usize> {
        let is_it = |slot: &Slot| slot.here().is_some_and(|export| export.name == name);
        let is_here = |slot: &Slot| slot.here().is_some();
        match self.slots.iter().position(is_it) {
            None if name.is_empty() && self.iter().count() == 1 => self.slots.iter().position(is_here),
            found => found,
        }
    }

    /// These and another one, which takes an index that is free.
    ///
    /// # Errors
    /// [`ExportError`].
    pub(crate) fn with(&self, export: Export) -> Result<Self, ExportError> {
        check_name(&export.name)?;
        check_description(&export.description)?;
        if self.iter().any(|other| other.name == export.name) {
            return Err(ExportError::Twice { name: export.name });
        }
        let mut all = self.clone();
        match all.slots.iter_mut().find(|slot| matches!(slot, Slot::Gone)) {
            Some(free) => *free = Slot::Here(export),
            None => all.slots.push(Slot::Here(export)),
        }
        Ok(all)
    }

    /// These, with the one of this name leaving. `None` if there is none.
    pub(crate) fn with_leaving(&self, name: &str) -> Option<(Self, Export)> {
        let mut all = self.clone();
        let slot = all.slots.iter_mut().find(|slot| slot.here().is_some_and(|export| export.name == name))?;
        let export = slot.here()?.clone();
        *slot = Slot::Leaving(export.clone());
        Some((all, export))
    }

    /// These without the one that is leaving. No session and no queue may have its index any more.
    pub(crate) fn without_leaving(&self) -> Self {
        let mut all = self.clone();
        all.slots.iter_mut().filter(|slot| matches!(slot, Slot::Leaving(_))).for_each(|slot| *slot = Slot::Gone);
        all
    }

    /// The export with this index, if clients may ask for it.
    pub(crate) fn here(&self, index: usize) -> Option<&Export> {
        self.slots.get(index).and_then(Slot::here)
    }

    /// Whether the export with this index is leaving.
    pub(crate) fn is_leaving(&self, index: usize) -> bool {
        matches!(self.slots.get(index), Some(Slot::Leaving(_)))
    }

    /// The indexes of the exports that are leaving: one or none.
    pub(crate) fn leaving(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().enumerate().filter(|(_, slot)| matches!(slot, Slot::Leaving(_))).map(|(index, _)| index)
    }

    /// Number of indexes.
    pub(crate) fn indexes(&self) -> usize {
        self.slots.len()
    }

    /// The id of the server.
    pub(crate) fn server(&self) -> Uuid {
        self.server
    }

    /// The export of a session.
    pub(crate) fn get(&self, index: usize) -> &Export {
        match &self.slots[index] {
            Slot::Here(export) | Slot::Leaving(export) => export,
            Slot::Gone => unreachable!("an export is gone when no session has its index"),
        }
    }

    /// The exports that clients may ask for.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Export> {
        self.slots.iter().filter_map(Slot::here)
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
    fn names_are_found_and_a_single_export_is_the_default() {
        let one = Exports::new(vec![export("a", true)]).unwrap();
        assert_eq!((one.find("a"), one.find(""), one.find("b")), (Some(0), Some(0), None));
        let two = Exports::new(vec![export("a", true), export("b", true)]).unwrap();
        assert_eq!((two.find("b"), two.find("")), (Some(1), None));
        let default = Exports::new(vec![export("a", true), export("", true)]).unwrap();
        assert_eq!(default.find(""), Some(1));
    }

    #[test]
    fn invalid_lists_of_exports_are_refused() {
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
    fn exports_keep_their_indexes_while_others_come_and_go() {
        let first = Exports::new(vec![export("a", true), export("b", true)]).unwrap();
        assert!(matches!(first.with(export("a", true)), Err(ExportError::Twice { .. })));
        let (leaving, gone) = first.with_leaving("a").unwrap();
        assert_eq!(gone.name, "a");
        assert_eq!((leaving.find("a"), leaving.find("b"), leaving.find("")), (None, Some(1), Some(1)));
        assert!(leaving.is_leaving(0) && leaving.get(0).name == "a");
        assert!(leaving.with_leaving("a").is_none() && leaving.with_leaving("c").is_none());
        let left = leaving.without_leaving();
        assert_eq!((left.find("b"), left.iter().count()), (Some(1), 1));
        let grown = left.with(export("c", true)).unwrap().with(export("a", true)).unwrap();
        assert_eq!(
            (grown.find("c"), grown.find("b"), grown.find("a"), grown.indexes()),
            (Some(0), Some(1), Some(2), 3)
        );
        assert_eq!(grown.server(), first.server());
    }
}
