//! Which reads are sequential, so that it is worth to read ahead.
//!
//! A stream is one that misses the first byte of two blocks that follow each other. Random reads of
//! 4 KiB hit the first byte of a block once in 256 times, so they are hardly ever taken for one. A
//! stream goes on if the first byte of a block that was read ahead is what is read of it first.

use std::collections::VecDeque;

/// How many starts are remembered.
const STARTS: usize = 16;
/// Blocks that are read ahead of a new stream, and at most.
const AHEAD_MIN: u64 = 2;
pub(crate) const AHEAD_MAX: u64 = 16;

/// Streams of an object.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    /// Blocks whose first byte was missed lately.
    starts: VecDeque<u64>,
}

impl Streams {
    /// The first byte of a block was read and was not there. Returns how many blocks to read ahead.
    pub(crate) fn missed(&mut self, block: u64) -> u64 {
        let before = block.checked_sub(1);
        let is_stream = before.is_some_and(|before| self.starts.contains(&before));
        if is_stream {
            self.starts.retain(|start| Some(*start) != before);
        }
        if !self.starts.contains(&block) {
            self.starts.push_back(block);
        }
        if self.starts.len() > STARTS {
            self.starts.pop_front();
        }
        if is_stream { AHEAD_MIN } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_starts_in_a_row_are_a_stream() {
        let mut streams = Streams::default();
        assert_eq!([7, 100, 3, 50].map(|block| streams.missed(block)), [0; 4]);
        // Two streams at once.
        assert_eq!([8, 101, 9].map(|block| streams.missed(block)), [AHEAD_MIN; 3]);
        assert_eq!(streams.missed(0), 0);
        // Many others make it forget.
        (0..STARTS as u64).for_each(|number| assert_eq!(streams.missed(1000 + 2 * number), 0));
        assert_eq!(streams.missed(10), 0);
    }
}
