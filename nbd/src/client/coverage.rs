//! Which bytes of a read have arrived. A server may send them in any order and in many pieces, but
//! each byte exactly once.

/// Maximum number of disjoint ranges. Servers usually send pieces in order; one that does not must
/// not fill our memory.
const SCATTERED_MAX: usize = 1024;

/// Disjoint ranges, sorted, no two adjacent.
#[derive(Debug, Default)]
pub(super) struct Coverage {
    ranges: Vec<(u64, u64)>,
}

impl Coverage {
    /// Adds `start..end`, which must not be empty.
    ///
    /// If a byte arrived before, or if there are too many disjoint ranges.
    pub(super) fn add(&mut self, start: u64, end: u64) -> Result<(), &'static str> {
        let at = self.ranges.partition_point(|range| range.1 < start);
        let joins_left = self.ranges.get(at).is_some_and(|range| range.1 == start);
        let right = if joins_left { at + 1 } else { at };
        match self.ranges.get(right) {
            Some(range) if range.0 < end => return Err("it sent the same bytes twice"),
            Some(range) if range.0 == end => {
                let stop = range.1;
                if joins_left {
                    self.ranges[at].1 = stop;
                    self.ranges.remove(right);
                } else {
                    self.ranges[right].0 = start;
                }
            }
            _ if joins_left => self.ranges[at].1 = end,
            _ if self.ranges.len() == SCATTERED_MAX => return Err("it sent a read in too many scattered pieces"),
            _ => self.ranges.insert(at, (start, end)),
        }
        Ok(())
    }

    /// Whether the coverage is exactly `start..end`.
    pub(super) fn is_exactly(&self, start: u64, end: u64) -> bool {
        self.ranges == [(start, end)]
    }

    /// The first missing byte from `start` on.
    pub(super) fn first_gap(&self, start: u64) -> u64 {
        match self.ranges.first() {
            Some(range) if range.0 == start => range.1,
            _ => start,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn coverage_matches_a_model(pieces in prop::collection::vec((0u64..60, 1u64..9), 0..40)) {
            let mut coverage = Coverage::default();
            let mut model = [false; 70];
            for (start, len) in pieces {
                let bits = &mut model[start as usize..(start + len) as usize];
                let twice = bits.iter().any(|&bit| bit);
                prop_assert_eq!(coverage.add(start, start + len).is_err(), twice);
                if !twice {
                    bits.fill(true);
                }
            }
            let mut expected: Vec<(u64, u64)> = Vec::new();
            for (at, _) in model.iter().enumerate().filter(|(_, bit)| **bit) {
                let at = at as u64;
                match expected.last_mut() {
                    Some(last) if last.1 == at => last.1 = at + 1,
                    _ => expected.push((at, at + 1)),
                }
            }
            prop_assert_eq!(&coverage.ranges, &expected);
            let first = model.iter().position(|bit| !bit).unwrap() as u64;
            prop_assert_eq!(coverage.first_gap(0), first);
            prop_assert_eq!(coverage.is_exactly(0, first), expected == [(0, first)]);
        }
    }

    #[test]
    fn scattered_pieces_are_bounded() {
        let mut coverage = Coverage::default();
        let all = (0..=SCATTERED_MAX as u64).map(|at| coverage.add(at * 2, at * 2 + 1)).collect::<Result<Vec<_>, _>>();
        assert!(all.unwrap_err().contains("scattered"));
    }
}
