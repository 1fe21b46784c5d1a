//! Where the grains of an extent begin, for its survey: 4 bytes for each grain, or with grains of a
//! few sectors a bit for each sector of the file.

use diskwright_format::vmdk::SECTOR_BYTES;

/// Grains of fewer sectors are kept as bits, which then take less memory.
const SMALL_SECTORS: u64 = 8;

/// The sectors at which grains begin.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Starts {
    Numbers(Vec<u32>),
    /// One bit for each sector, and how many are set.
    Bits(Vec<u64>, u64),
}

impl Starts {
    /// No grain yet, in a file of this length.
    pub fn of(grain_bytes: u64, file_bytes: u64) -> Self {
        if grain_bytes / SECTOR_BYTES >= SMALL_SECTORS {
            return Self::Numbers(Vec::new());
        }
        // Entries have 32 bits.
        let sectors = file_bytes.div_ceil(SECTOR_BYTES).min(1 << 32);
        Self::Bits(vec![0; sectors.div_ceil(64) as usize], 0)
    }

    /// Adds a grain. Returns false if it is known that another one begins there.
    pub fn add(&mut self, sector: u32) -> bool {
        match self {
            Self::Numbers(numbers) => numbers.push(sector),
            Self::Bits(words, count) => {
                let bit = 1 << (sector % 64);
                match words.get_mut((sector / 64) as usize) {
                    Some(word) if *word & bit == 0 => *word |= bit,
                    _ => return false,
                }
                *count += 1;
            }
        }
        true
    }

    pub fn len(&self) -> u64 {
        match self {
            Self::Numbers(numbers) => numbers.len() as u64,
            Self::Bits(_, count) => *count,
        }
    }

    /// The first grain that was added or that lies lowest; 0 without one.
    pub fn first(&self) -> u64 {
        match self {
            Self::Numbers(numbers) => numbers.first().copied().unwrap_or(0).into(),
            Self::Bits(..) => self.iter().next().unwrap_or(0),
        }
    }

    pub fn sort(&mut self) {
        if let Self::Numbers(numbers) = self {
            numbers.sort_unstable();
        }
    }

    /// The sectors, after a [`Starts::sort`] the lowest first.
    pub fn iter(&self) -> Box<dyn Iterator<Item = u64> + '_> {
        match self {
            Self::Numbers(numbers) => Box::new(numbers.iter().map(|&sector| sector.into())),
            Self::Bits(words, _) => Box::new((0..).zip(words).flat_map(|(index, &word)| {
                let mut left = word;
                std::iter::from_fn(move || {
                    let bit = (left != 0).then(|| left.trailing_zeros())?;
                    left &= left - 1;
                    Some(index * 64 + u64::from(bit))
                })
            })),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_ways_keep_the_same_sectors() {
        let mut all = [Starts::of(8 * SECTOR_BYTES, 1 << 20), Starts::of(SECTOR_BYTES, 1 << 20)];
        for starts in &mut all {
            assert_eq!((starts.len(), starts.first()), (0, 0));
            for sector in [700, 0, 63, 64, 2047, 65] {
                assert!(starts.add(sector));
            }
            starts.sort();
            assert_eq!(starts.iter().collect::<Vec<_>>(), [0, 63, 64, 65, 700, 2047]);
            assert_eq!(starts.len(), 6);
        }
        assert!(!all[1].add(64), "a grain begins there");
        assert!(!all[1].add(2048), "the file ends there");
    }
}
