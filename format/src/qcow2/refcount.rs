//! Refcount blocks: refcounts of 1 to 64 bits, and the entries of the refcount table.

/// Width of a refcount: 1, 2, 4, ... 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefcountWidth {
    order: u32,
}

impl RefcountWidth {
    /// The width of `1 << order` bits; `None` for an order above 6.
    pub fn of_order(order: u32) -> Option<Self> {
        (order <= 6).then_some(Self { order })
    }

    /// Bits of a refcount.
    pub fn bits(self) -> u32 {
        1 << self.order
    }

    /// Largest refcount.
    pub fn max(self) -> u64 {
        u64::MAX >> (64 - self.bits())
    }

    /// Refcounts in a block of `block_bytes`.
    pub fn per_block(self, block_bytes: u64) -> u64 {
        (block_bytes * 8) >> self.order
    }

    /// The refcount at `index` of a block. 0 beyond the end of `block`.
    pub fn get(self, block: &[u8], index: usize) -> u64 {
        if self.order < 3 {
            let per_byte = 8 >> self.order;
            let byte = block.get(index / per_byte).copied().unwrap_or(0);
            return u64::from(byte >> (index % per_byte * self.bits() as usize)) & self.max();
        }
        let width = self.bits() as usize / 8;
        let bytes = index.checked_mul(width).and_then(|start| block.get(start..start + width)).unwrap_or(&[]);
        bytes.iter().fold(0, |value, &byte| value << 8 | u64::from(byte))
    }

    /// Changes the refcount at `index` of a block. Returns false, and changes nothing, for a value
    /// above [`RefcountWidth::max`] or an index beyond the end.
    pub fn set(self, block: &mut [u8], index: usize, value: u64) -> bool {
        if value > self.max() {
            return false;
        }
        if self.order < 3 {
            let per_byte = 8 >> self.order;
            let Some(byte) = block.get_mut(index / per_byte) else { return false };
            let shift = index % per_byte * self.bits() as usize;
            *byte = *byte & !((self.max() as u8) << shift) | (value as u8) << shift;
            return true;
        }
        let width = self.bits() as usize / 8;
        let Some(place) = index.checked_mul(width).and_then(|start| block.get_mut(start..start + width)) else {
            return false;
        };
        place.copy_from_slice(&value.to_be_bytes()[8 - width..]);
        true
    }
}

/// An entry of the refcount table: the offset of a refcount block, 0 if there is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RefcountTableEntry(pub u64);

impl RefcountTableEntry {
    const RESERVED: u64 = 0x1ff;

    /// Offset of the block in the file; 0 if all its refcounts are 0.
    pub fn offset_bytes(self) -> u64 {
        self.0 & !Self::RESERVED
    }

    /// Bits that must be zero.
    pub fn reserved(self) -> u64 {
        self.0 & Self::RESERVED
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn widths_below_a_byte_begin_with_the_least_significant_bit() {
        let one = RefcountWidth::of_order(0).unwrap();
        assert_eq!((0..8).map(|index| one.get(&[0b0000_0110], index)).collect::<Vec<_>>(), [0, 1, 1, 0, 0, 0, 0, 0]);
        let four = RefcountWidth::of_order(2).unwrap();
        assert_eq!((four.get(&[0xa5], 0), four.get(&[0xa5], 1), four.get(&[0xa5], 2)), (5, 10, 0));
        let wide = RefcountWidth::of_order(5).unwrap();
        assert_eq!(wide.get(&[0, 0, 0, 0, 1, 2, 3, 4], 1), 0x0102_0304);
        assert_eq!(RefcountWidth::of_order(7), None);
        assert_eq!(RefcountWidth::of_order(4).unwrap().per_block(65536), 32768);
        assert_eq!(one.per_block(512), 4096);
    }

    proptest! {
        #[test]
        fn what_is_set_is_read_and_the_others_stay(order in 0u32..=6, index in 0usize..64, value: u64, fill: u8) {
            let width = RefcountWidth::of_order(order).unwrap();
            let value = value & width.max();
            let before = [fill; 64];
            let mut block = before;
            let entries = width.per_block(64) as usize;
            prop_assert_eq!(width.set(&mut block, index, value), index < entries);
            for other in 0..entries {
                let expected = if other == index { value } else { width.get(&before, other) };
                prop_assert_eq!(width.get(&block, other), expected);
            }
            prop_assert!(width.bits() == 64 || !width.set(&mut block, 0, width.max() + 1));
        }
    }
}
