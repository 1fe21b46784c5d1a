//! Entries of the snapshot table.
//!
//! ```text
//!   0 L1 table    8 L1 entries   12 length of id   14 length of name   16 seconds   20 nanoseconds
//!  24 guest time 32 VM state     36 length of extra data
//!  40 extra data (VM state, disk size, instruction count), id, name, padding to a multiple of 8
//! ```

use super::{
    Invalid, Place, Result,
    bytes::{get_u16, get_u32, get_u64, text},
};

/// Length in bytes of the fixed part of an entry.
pub const HEAD_BYTES: usize = 40;
/// Most bytes of extra data that programs accept.
const EXTRA_MAX_BYTES: u32 = 1024;

const STRUCTURE: &str = "snapshot table entry";

/// The fixed part of an entry, which says how long the entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SnapshotHead {
    extra_bytes: usize,
    id_bytes: usize,
    name_bytes: usize,
}

/// An internal snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The snapshot's L1 table. Neither alignment nor limits were checked.
    pub l1: Place,
    /// Unique id: a number in decimal, in images by QEMU.
    pub id: String,
    /// Name.
    pub name: String,
    /// When it was taken: seconds since 1970-01-01 00:00 UTC.
    pub seconds: u32,
    /// Fraction of the second in nanoseconds.
    pub nanoseconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub guest_nanoseconds: u64,
    /// Length of the virtual machine's state in bytes; 0 if none is stored.
    pub vm_state_bytes: u64,
    /// Size of the disk in bytes; `None` if it is that of the present disk.
    pub size_bytes: Option<u64>,
}

impl SnapshotHead {
    /// Parses the first [`HEAD_BYTES`] of an entry.
    ///
    /// # Errors
    /// For a slice that is too short, and for more extra data than programs accept.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        if bytes.len() < HEAD_BYTES {
            return Err(Invalid::short(STRUCTURE, bytes.len(), HEAD_BYTES));
        }
        let extra = get_u32(bytes, 36);
        if extra > EXTRA_MAX_BYTES {
            return Err(Invalid::new(STRUCTURE, 36, format!("{extra} bytes of extra data"), "at most 1024"));
        }
        let (id_bytes, name_bytes) = (get_u16(bytes, 12).into(), get_u16(bytes, 14).into());
        Ok(Self { extra_bytes: extra as usize, id_bytes, name_bytes })
    }

    /// Length of the entry in bytes, without padding.
    pub fn len_bytes(&self) -> usize {
        HEAD_BYTES + self.extra_bytes + self.id_bytes + self.name_bytes
    }

    /// Length of the entry in bytes, with padding.
    pub fn padded_bytes(&self) -> usize {
        self.len_bytes().next_multiple_of(8)
    }
}

impl Snapshot {
    /// Parses an entry.
    ///
    /// # Errors
    /// As [`SnapshotHead::parse`].
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let head = SnapshotHead::parse(bytes)?;
        if bytes.len() < head.len_bytes() {
            return Err(Invalid::short(STRUCTURE, bytes.len(), head.len_bytes()));
        }
        let id_at = HEAD_BYTES + head.extra_bytes;
        let name_at = id_at + head.id_bytes;
        let extra = |at: usize| (at + 8 <= id_at).then(|| get_u64(bytes, at));
        Ok(Self {
            l1: Place { offset_bytes: get_u64(bytes, 0), len_bytes: u64::from(get_u32(bytes, 8)) * 8 },
            id: text(&bytes[id_at..name_at]),
            name: text(&bytes[name_at..name_at + head.name_bytes]),
            seconds: get_u32(bytes, 16),
            nanoseconds: get_u32(bytes, 20),
            guest_nanoseconds: get_u64(bytes, 24),
            vm_state_bytes: extra(40).unwrap_or_else(|| get_u32(bytes, 32).into()),
            size_bytes: extra(48),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry(extra: &[u8], id: &[u8], name: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[5] = 3;
        bytes[11] = 2;
        bytes[12..14].copy_from_slice(&(id.len() as u16).to_be_bytes());
        bytes[14..16].copy_from_slice(&(name.len() as u16).to_be_bytes());
        bytes[19] = 77;
        bytes[35] = 9;
        bytes[36..40].copy_from_slice(&(extra.len() as u32).to_be_bytes());
        [&bytes, extra, id, name].concat()
    }

    #[test]
    fn extra_data_replace_older_fields() {
        let extra = [7u64.to_be_bytes(), (1u64 << 30).to_be_bytes(), [0xff; 8]].concat();
        let bytes = entry(&extra, b"12", b"before");
        let found = Snapshot::parse(&bytes).unwrap();
        assert_eq!((found.id.as_str(), found.name.as_str(), found.seconds), ("12", "before", 77));
        assert_eq!((found.vm_state_bytes, found.size_bytes), (7, Some(1 << 30)));
        assert_eq!(found.l1, Place { offset_bytes: 3 << 16, len_bytes: 16 });
        let found = Snapshot::parse(&entry(&extra[..8], b"", b"")).unwrap();
        assert_eq!((found.vm_state_bytes, found.size_bytes), (7, None));
        let old = Snapshot::parse(&entry(&[], b"1", b"a")).unwrap();
        assert_eq!((old.vm_state_bytes, old.size_bytes), (9, None));
        let head = SnapshotHead::parse(&bytes).unwrap();
        assert_eq!((head.len_bytes(), head.padded_bytes()), (72, 72));
    }

    #[test]
    fn short_and_long_entries_are_refused() {
        let bytes = entry(&[0; 16], b"1", b"name");
        for len in 0..bytes.len() {
            assert!(Snapshot::parse(&bytes[..len]).is_err(), "{len}");
        }
        assert!(SnapshotHead::parse(&entry(&[0; 1025], b"", b"")).is_err());
    }

    proptest! {
        #[test]
        fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Snapshot::parse(&bytes);
        }
    }
}
