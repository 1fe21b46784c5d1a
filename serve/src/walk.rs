//! Walks over the extents of a device in windows that grow.
//!
//! A caller that looks for the next hole, or for as many extents as fit a reply, does not know how
//! far it must look, and a device finds all extents of the range that it is asked for. So the first
//! window is small. While a window has few extents, the next is twice as large.
//!
//! ```text
//!   1 MiB │ 2 MiB │ 4 MiB   │ ...      few extents in each window: a far extent is soon reached
//!   1 MiB │ 1 MiB │ 1 MiB   │ ...      many extents: none is found for nothing
//! ```
//!
//! The bytes asked for are at most twice the bytes needed, plus one first window. Callers come
//! again and again, so this matters: with fixed windows of 1 GiB, a walk over a disk of many small
//! extents would take time in the square of their number.

use diskwright_store::{BlockDevice, Extent};
use std::{io, ops::Range};

/// Bytes of the first window, and of the largest.
const WINDOW_BYTES: (u64, u64) = (1 << 20, 1 << 30);

/// If a window has at most this many extents, the next is twice as large.
const FEW_EXTENTS: usize = 64;

/// A walk that is under way.
#[derive(Debug)]
pub(crate) struct Walk<'a> {
    device: &'a dyn BlockDevice,
    left: Range<u64>,
    window_bytes: u64,
    extents: Vec<Extent>,
}

impl<'a> Walk<'a> {
    /// `range` must consist of whole sectors of the device.
    pub(crate) fn over(device: &'a dyn BlockDevice, range: Range<u64>) -> Self {
        Self { device, left: range, window_bytes: WINDOW_BYTES.0, extents: Vec::new() }
    }

    /// The extents of the next window, or `None` at the end of the range.
    ///
    /// # Errors
    /// The error of the device.
    pub(crate) fn next_window(&mut self) -> io::Result<Option<&[Extent]>> {
        if self.left.is_empty() {
            return Ok(None);
        }
        let now_bytes = self.window_bytes.min(self.left.end - self.left.start);
        self.extents.clear();
        self.device.extents(self.left.start, now_bytes, &mut self.extents)?;
        self.left.start += now_bytes;
        if self.extents.len() <= FEW_EXTENTS {
            self.window_bytes = (2 * self.window_bytes).min(WINDOW_BYTES.1);
        }
        Ok(Some(&self.extents))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use diskwright_store::{BlockQueue, ExtentKind, Geometry, QueueOptions};
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A disk of 16 TiB that counts what it is asked for. In its first half, stripes of data and of
    /// holes alternate; its second half is a hole.
    #[derive(Debug)]
    pub(crate) struct Scattered {
        pub(crate) stripe_bytes: u64,
        asked_bytes: AtomicU64,
        asked_times: AtomicU64,
    }

    impl Scattered {
        pub(crate) const SIZE_BYTES: u64 = 16 << 40;
        pub(crate) const HALF_BYTES: u64 = Self::SIZE_BYTES / 2;

        pub(crate) fn new(stripe_bytes: u64) -> Self {
            Self { stripe_bytes, asked_bytes: AtomicU64::new(0), asked_times: AtomicU64::new(0) }
        }

        /// Bytes asked for, and number of calls, since the last call of this function.
        pub(crate) fn asked(&self) -> (u64, u64) {
            (self.asked_bytes.swap(0, Ordering::Relaxed), self.asked_times.swap(0, Ordering::Relaxed))
        }
    }

    impl BlockDevice for Scattered {
        fn geometry(&self) -> Geometry {
            let (logical_sector_bytes, physical_sector_bytes) = (512, 4096);
            Geometry { size_bytes: Self::SIZE_BYTES, logical_sector_bytes, physical_sector_bytes, read_only: true }
        }
        fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
            self.asked_bytes.fetch_add(len_bytes, Ordering::Relaxed);
            self.asked_times.fetch_add(1, Ordering::Relaxed);
            let mut at = offset_bytes;
            let end = offset_bytes + len_bytes;
            while at < end {
                let stripe = at / self.stripe_bytes;
                let stripe_end = ((stripe + 1) * self.stripe_bytes).min(Self::HALF_BYTES);
                let (kind, stop) = match at {
                    Self::HALF_BYTES.. => (ExtentKind::Unallocated, end),
                    _ if stripe.is_multiple_of(2) => (ExtentKind::Data, stripe_end),
                    _ => (ExtentKind::Unallocated, stripe_end),
                };
                let len_bytes = stop.min(end) - at;
                out.push(Extent { offset_bytes: at, len_bytes, kind, depth: 0, file: 0, file_offset_bytes: None });
                at += len_bytes;
            }
            Ok(())
        }
    }

    const MIB: u64 = 1 << 20;

    /// For each of the first windows: the number of extents and their bytes.
    fn windows(disk: &Scattered, range: Range<u64>) -> Vec<(usize, u64)> {
        let mut walk = Walk::over(disk, range);
        let mut found = Vec::new();
        while found.len() < 14
            && let Some(extents) = walk.next_window().unwrap()
        {
            found.push((extents.len(), extents.iter().map(|extent| extent.len_bytes).sum()));
        }
        found
    }

    #[test]
    fn windows_grow_where_extents_are_few() {
        let disk = Scattered::new(4096);
        let half = Scattered::HALF_BYTES;
        let found = windows(&disk, half..Scattered::SIZE_BYTES);
        let expected: Vec<_> = (0..14).map(|window: u32| (1, MIB << window.min(10))).collect();
        assert_eq!(found, expected);
        // The end of the range cuts the last window.
        assert_eq!(windows(&disk, half..half + 2 * MIB), [(1, MIB), (1, MIB)]);
        assert_eq!(windows(&disk, half..half), []);
    }

    #[test]
    fn windows_stay_small_where_extents_are_many() {
        assert_eq!(windows(&Scattered::new(4096), 0..3 * MIB + 512), [(256, MIB), (256, MIB), (256, MIB), (1, 512)]);
    }
}
