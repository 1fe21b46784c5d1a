//! Cylinders, heads and sectors: the appendix "CHS Calculation" of the specification.
//!
//! A geometry is less precise than a size: it rounds down, and ends at 65535 x 16 x 255 sectors,
//! near 127 GiB. Today it matters only to BIOS guests of small disks, and for the size of files by
//! Virtual PC (see [`Footer::size_bytes`](super::Footer::size_bytes)).

use super::SECTOR_BYTES;

/// A disk geometry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Chs {
    /// Cylinders.
    pub cylinders: u16,
    /// Heads.
    pub heads: u8,
    /// Sectors per track.
    pub sectors: u8,
}

impl Chs {
    /// The largest geometry that the calculation gives.
    pub const MAX: Self = Self { cylinders: 65535, heads: 16, sectors: 255 };

    /// The geometry of a disk of `size_bytes`, as the specification computes it: the largest of its
    /// geometries that does not exceed the size.
    pub fn from_size(size_bytes: u64) -> Self {
        let total = (size_bytes / SECTOR_BYTES).min(Self::MAX.total_sectors());
        let (sectors, heads, tracks);
        if total >= 65535 * 16 * 63 {
            (sectors, heads, tracks) = (255, 16, total / 255);
        } else {
            let of_17 = total / 17;
            let heads_of_17 = of_17.div_ceil(1024).max(4);
            if of_17 < heads_of_17 * 1024 && heads_of_17 <= 16 {
                (sectors, heads, tracks) = (17, heads_of_17, of_17);
            } else if total / 31 < 16 * 1024 {
                (sectors, heads, tracks) = (31, 16, total / 31);
            } else {
                (sectors, heads, tracks) = (63, 16, total / 63);
            }
        }
        // No value is truncated: `total` is at most that of `MAX`, and the last two branches limit
        // tracks to 65535 * 16.
        Self { cylinders: (tracks / heads) as u16, heads: heads as u8, sectors }
    }

    /// Number of sectors.
    const fn total_sectors(self) -> u64 {
        self.cylinders as u64 * self.heads as u64 * self.sectors as u64
    }

    /// Number of bytes.
    pub const fn size_bytes(self) -> u64 {
        self.total_sectors() * SECTOR_BYTES
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn known_sizes() {
        let chs = |c, h, s| Chs { cylinders: c, heads: h, sectors: s };
        // As written by qemu-img and Windows.
        assert_eq!(Chs::from_size(0), chs(0, 4, 17));
        assert_eq!(Chs::from_size(16 << 20), chs(481, 4, 17));
        assert_eq!(Chs::from_size(1 << 30), chs(2080, 16, 63));
        assert_eq!(Chs::from_size(127 << 30), chs(65278, 16, 255));
        assert_eq!(Chs::from_size(u64::MAX), Chs::MAX);
    }

    /// The calculation exactly as in the specification's appendix, for comparison.
    fn appendix(mut total: u64) -> (u64, u64, u64) {
        let (mut sectors, mut heads, mut tracks);
        if total > 65535 * 16 * 255 {
            total = 65535 * 16 * 255;
        }
        if total >= 65535 * 16 * 63 {
            (sectors, heads) = (255, 16);
            tracks = total / sectors;
        } else {
            sectors = 17;
            tracks = total / sectors;
            heads = tracks.div_ceil(1024);
            if heads < 4 {
                heads = 4;
            }
            if tracks >= heads * 1024 || heads > 16 {
                (sectors, heads) = (31, 16);
                tracks = total / sectors;
            }
            if tracks >= heads * 1024 {
                (sectors, heads) = (63, 16);
                tracks = total / sectors;
            }
        }
        (tracks / heads, heads, sectors)
    }

    proptest! {
        #[test]
        fn agrees_with_the_appendix_and_never_exceeds_the_size(
            sectors in prop_oneof![0u64..70_000, 0u64..70_000_000, 0u64..300_000_000, any::<u64>()],
        ) {
            let sectors = sectors.min(u64::MAX / SECTOR_BYTES);
            let chs = Chs::from_size(sectors * SECTOR_BYTES);
            prop_assert_eq!((u64::from(chs.cylinders), u64::from(chs.heads), u64::from(chs.sectors)), appendix(sectors));
            prop_assert!(chs.total_sectors() <= sectors);
        }
    }
}
