//! A set of MiB of a file, one bit for each: 8 MiB of memory for a file of 64 TiB.

use diskwright_format::vhdx::MIB;

/// One bit for each MiB of the file.
#[derive(Debug, Clone, Default)]
pub(super) struct Marks(Vec<u64>);

impl Marks {
    pub(super) fn get(&self, mib: u64) -> bool {
        self.0.get((mib / 64) as usize).is_some_and(|word| word >> (mib % 64) & 1 == 1)
    }

    /// Whether any MiB of a range of bytes is marked.
    pub(super) fn any_marked(&self, start_bytes: u64, end_bytes: u64) -> bool {
        !self.0.is_empty() && (start_bytes / MIB..end_bytes.div_ceil(MIB)).any(|mib| self.get(mib))
    }

    /// Combines each word with the word of `other` at the same index by `combine`.
    pub(super) fn merge(&mut self, other: &Self, combine: impl Fn(u64, u64) -> u64) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (index, word) in self.0.iter_mut().enumerate() {
            *word = combine(*word, other.0.get(index).copied().unwrap_or(0));
        }
    }

    /// Marks a range of bytes. Returns whether any of it was marked before. The caller limits the
    /// end.
    pub(super) fn mark(&mut self, start_bytes: u64, end_bytes: u64) -> bool {
        let mut taken = false;
        let end_mib = end_bytes.div_ceil(MIB);
        let words = end_mib.div_ceil(64) as usize;
        if self.0.len() < words {
            self.0.resize(words, 0);
        }
        for mib in start_bytes / MIB..end_mib {
            let word = &mut self.0[(mib / 64) as usize];
            taken |= *word >> (mib % 64) & 1 == 1;
            *word |= 1 << (mib % 64);
        }
        taken
    }

    /// The first MiB after the last marked one.
    pub(super) fn end_mib(&self) -> u64 {
        let last = self.0.iter().rposition(|&word| word != 0);
        last.map_or(0, |index| 64 * index as u64 + 64 - u64::from(self.0[index].leading_zeros()))
    }
}
