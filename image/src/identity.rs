//! The identity by which children name their parent.
//!
//! ```text
//!   VHD    unique id of the file       128 bits
//!   VHDX   DataWriteGuid               128 bits
//!   VMDK   CID                          32 bits
//!   VDI    id of the contents          128 bits; the child also records the id of the file
//! ```
//!
//! Code above the formats compares identities, makes new ones and writes them to files of its own
//! (tracks, difference streams). It needs not know which kind it has. A record of 16 bytes holds
//! any kind: [`LinkageId::to_uuid`] puts a CID behind a prefix that no GUID of another kind has.

use std::{fmt, str::FromStr};
use uuid::Uuid;

/// The identity of an image's contents (VHDX, VMDK, VDI) or of its file (VHD).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LinkageId {
    /// VHD unique id, VHDX DataWriteGuid, VDI `uuidModify`.
    Guid(Uuid),
    /// Content id of a VMDK (CID), 32 bits.
    Cid(u32),
}

/// The bytes before a CID in a record of 16 bytes: a UUID of version 8, as no program draws one.
const CID_PREFIX: u128 = 0x7664_6b63_6964_8d77_9057_0000_0000_0000;
const CID_MASK: u128 = 0xffff_ffff;

/// CIDs with a meaning of their own: none, and one that VMware gives to disks that were never
/// written.
const RESERVED_CIDS: [u32; 3] = [0, 0xffff_fffe, 0xffff_ffff];

impl LinkageId {
    /// A new random identity of the same kind.
    pub fn fresh(self) -> Self {
        match self {
            Self::Guid(_) => Self::Guid(Uuid::new_v4()),
            Self::Cid(_) => Self::random_cid(),
        }
    }

    /// A new random CID.
    pub fn random_cid() -> Self {
        Self::cid_of(Uuid::new_v4().as_u128() as u32)
    }

    /// The CID, or another one if `bits` have a meaning of their own.
    fn cid_of(bits: u32) -> Self {
        Self::Cid(if RESERVED_CIDS.contains(&bits) { bits ^ 0x5a5a_0101 } else { bits })
    }

    /// An identity of this kind that depends on this one, on `other` and on `salt`.
    pub fn combined(self, other: Self, salt: u128) -> Self {
        let mixed = self.to_uuid().as_u128().rotate_left(1) ^ other.to_uuid().as_u128() ^ salt;
        match self {
            Self::Guid(_) => Self::Guid(Uuid::from_u128(mixed)),
            Self::Cid(_) => Self::cid_of((mixed ^ mixed >> 32 ^ mixed >> 64 ^ mixed >> 96) as u32),
        }
    }

    /// Whether both are GUIDs or both are CIDs.
    pub fn is_kind_of(self, other: Self) -> bool {
        self.cid().is_some() == other.cid().is_some()
    }

    /// The GUID; `None` for a CID.
    pub fn guid(self) -> Option<Uuid> {
        match self {
            Self::Guid(guid) => Some(guid),
            Self::Cid(_) => None,
        }
    }

    /// The CID; `None` for a GUID.
    pub fn cid(self) -> Option<u32> {
        match self {
            Self::Guid(_) => None,
            Self::Cid(cid) => Some(cid),
        }
    }

    /// The identity for a record of 16 bytes. [`LinkageId::from_uuid`] is the inverse.
    pub fn to_uuid(self) -> Uuid {
        match self {
            Self::Guid(guid) => guid,
            Self::Cid(cid) => Uuid::from_u128(CID_PREFIX | u128::from(cid)),
        }
    }

    /// The identity in a record of 16 bytes.
    pub fn from_uuid(uuid: Uuid) -> Self {
        let bits = uuid.as_u128();
        if bits & !CID_MASK == CID_PREFIX { Self::Cid(bits as u32) } else { Self::Guid(uuid) }
    }
}

impl From<Uuid> for LinkageId {
    fn from(guid: Uuid) -> Self {
        Self::Guid(guid)
    }
}

/// Lower case. A GUID has hyphens, and braces with `{:#}`. A CID has 8 digits.
impl fmt::Display for LinkageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Guid(guid) if f.alternate() => write!(f, "{{{guid}}}"),
            Self::Guid(guid) => write!(f, "{guid}"),
            Self::Cid(cid) => write!(f, "{cid:08x}"),
        }
    }
}

impl FromStr for LinkageId {
    type Err = uuid::Error;

    /// Reads what `Display` writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match (text.len(), u32::from_str_radix(text, 16)) {
            (8, Ok(cid)) => Ok(Self::Cid(cid)),
            _ => Ok(Self::Guid(Uuid::try_parse(text)?)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_of_16_bytes_holds_any_kind() {
        for id in [LinkageId::Cid(0), LinkageId::Cid(u32::MAX), Uuid::from_u128(7).into(), Uuid::new_v4().into()] {
            assert_eq!(LinkageId::from_uuid(id.to_uuid()), id);
            assert_eq!(id.to_string().parse(), Ok(id));
            assert_eq!(format!("{id:#}").parse(), Ok(id));
        }
        assert_eq!(LinkageId::Cid(0xabc).to_string(), "00000abc");
        assert_eq!(format!("{:#}", LinkageId::from(Uuid::nil())), "{00000000-0000-0000-0000-000000000000}");
    }

    #[test]
    fn new_identities_keep_their_kind() {
        let (cid, guid) = (LinkageId::Cid(1), LinkageId::from(Uuid::from_u128(1)));
        assert!(cid.fresh().cid().is_some() && guid.fresh().guid().is_some());
        assert_ne!(cid.combined(LinkageId::Cid(2), 3), LinkageId::Cid(2).combined(cid, 3));
        assert!(cid.combined(guid, 3).cid().is_some() && guid.combined(cid, 3).guid().is_some());
        for reserved in RESERVED_CIDS {
            assert!(LinkageId::cid_of(reserved).cid().is_some_and(|cid| !RESERVED_CIDS.contains(&cid)));
        }
    }
}
