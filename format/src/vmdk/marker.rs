//! The markers of a streamOptimized extent. A marker stands at a sector boundary.
//!
//! ```text
//!   grain            other kinds
//!    0 first sector   0 sectors of what follows the marker
//!    8 size in bytes  8 zero
//!   12 zlib data      12 kind: 0 end of stream, 1 grain table, 2 directory, 3 footer
//! ```
//!
//! A size that is not 0 makes a marker that of a grain. The data of a grain begin right behind the
//! size; the next marker follows at a sector boundary.

use super::field;

/// Bytes of a grain's marker before its data.
pub const GRAIN_MARKER_BYTES: u64 = 12;

/// The marker of a compressed grain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GrainMarker {
    /// The grain's first sector on the disk, or rather in the part that the extent has.
    pub first_sector: u64,
    /// Length of the compressed data in bytes, not 0.
    pub data_bytes: u32,
}

impl GrainMarker {
    /// The marker as bytes.
    pub fn to_bytes(self) -> [u8; GRAIN_MARKER_BYTES as usize] {
        let mut bytes = [0; GRAIN_MARKER_BYTES as usize];
        bytes[..8].copy_from_slice(&self.first_sector.to_le_bytes());
        bytes[8..].copy_from_slice(&self.data_bytes.to_le_bytes());
        bytes
    }
}

/// What follows a marker that is not a grain's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MarkerKind {
    /// The end of the stream: a sector of zeros.
    End,
    /// A grain table.
    GrainTable,
    /// The grain directory.
    GrainDirectory,
    /// The footer: a copy of the header with the place of the directory.
    Footer,
}

/// A marker.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Marker {
    /// A compressed grain follows.
    Grain(GrainMarker),
    /// A structure of so many sectors follows the marker's own sector.
    Other {
        /// What follows.
        kind: MarkerKind,
        /// Its length.
        sectors: u64,
    },
}

impl Marker {
    /// Parses a marker; `None` for fewer than 16 bytes and for an unknown kind.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..16)?;
        let value = u64::from_le_bytes(field(bytes, 0));
        let data_bytes = u32::from_le_bytes(field(bytes, 8));
        if data_bytes != 0 {
            return Some(Self::Grain(GrainMarker { first_sector: value, data_bytes }));
        }
        let kind = match u32::from_le_bytes(field(bytes, 12)) {
            0 => MarkerKind::End,
            1 => MarkerKind::GrainTable,
            2 => MarkerKind::GrainDirectory,
            3 => MarkerKind::Footer,
            _ => return None,
        };
        Some(Self::Other { kind, sectors: value })
    }

    /// The sector of a marker that is not a grain's.
    pub fn sector(kind: MarkerKind, sectors: u64) -> [u8; 512] {
        let mut bytes = [0; 512];
        bytes[..8].copy_from_slice(&sectors.to_le_bytes());
        let kind: u32 = match kind {
            MarkerKind::End => 0,
            MarkerKind::GrainTable => 1,
            MarkerKind::GrainDirectory => 2,
            MarkerKind::Footer => 3,
        };
        bytes[12..16].copy_from_slice(&kind.to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_read_as_they_were_written() {
        let grain = GrainMarker { first_sector: 0x12_3456_789a, data_bytes: 77 };
        let mut bytes = grain.to_bytes().to_vec();
        assert_eq!(Marker::parse(&bytes), None, "12 bytes");
        bytes.extend([0x78, 0x9c, 1, 2]);
        assert_eq!(Marker::parse(&bytes), Some(Marker::Grain(grain)));
        for kind in [MarkerKind::End, MarkerKind::GrainTable, MarkerKind::GrainDirectory, MarkerKind::Footer] {
            let sector = Marker::sector(kind, 4);
            assert_eq!(Marker::parse(&sector), Some(Marker::Other { kind, sectors: 4 }));
        }
        let mut unknown = Marker::sector(MarkerKind::Footer, 1);
        unknown[12] = 4;
        assert_eq!(Marker::parse(&unknown), None);
    }
}
