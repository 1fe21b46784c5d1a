//! The extents of a whole disk, one after the other, in bounded memory.
//!
//! A disk can have millions of extents, so they are read in windows of the disk, one at a time.
//! Windows grow while they have few extents, so that 64 TiB of unallocated space take few, and
//! shrink while they have many. Extents that the edge of a window has cut are joined again.

use diskwright_store::{BlockDevice, Extent};
use std::{io, vec};

/// Size of the first window.
const WINDOW_BYTES: u64 = 1 << 30;
/// The smallest and the largest window. In the largest, every second sector may belong to another
/// layer, and its extents must still fit in memory.
const WINDOW_MIN_BYTES: u64 = 64 << 20;
const WINDOW_MAX_BYTES: u64 = 16 << 30;
/// After a window with fewer extents the next one is twice as large.
const FEW: usize = 1 << 10;
/// After a window with more extents the next one is half as large.
const MANY: usize = 1 << 16;

/// Iterates over a device's extents in order, without gaps; neighbours of one kind are joined. Ends
/// after the first error.
#[derive(Debug)]
pub struct Extents<'a> {
    device: &'a dyn BlockDevice,
    size_bytes: u64,
    window_bytes: u64,
    next_bytes: u64,
    window: vec::IntoIter<Extent>,
    held: Option<Extent>,
}

impl<'a> Extents<'a> {
    /// The extents of the whole `device`.
    pub fn of(device: &'a dyn BlockDevice) -> Self {
        Self::with_window(device, WINDOW_BYTES)
    }

    fn with_window(device: &'a dyn BlockDevice, window_bytes: u64) -> Self {
        let size_bytes = device.geometry().size_bytes;
        Self { device, size_bytes, window_bytes, next_bytes: 0, window: Vec::new().into_iter(), held: None }
    }

    fn next_uncut(&mut self) -> io::Result<Option<Extent>> {
        loop {
            if let Some(extent) = self.window.next() {
                return Ok(Some(extent));
            }
            let len_bytes = self.window_bytes.min(self.size_bytes - self.next_bytes);
            if len_bytes == 0 {
                return Ok(None);
            }
            let mut found = Vec::new();
            self.device.extents(self.next_bytes, len_bytes, &mut found)?;
            self.next_bytes += len_bytes;
            self.window_bytes = match found.len() {
                0..FEW => (self.window_bytes * 2).min(WINDOW_MAX_BYTES),
                MANY.. => (self.window_bytes / 2).max(WINDOW_MIN_BYTES),
                _ => self.window_bytes,
            };
            self.window = found.into_iter();
        }
    }
}

impl Iterator for Extents<'_> {
    type Item = io::Result<Extent>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            match self.next_uncut() {
                Ok(Some(extent)) => match &mut self.held {
                    Some(held) if joins(held, &extent) => held.len_bytes += extent.len_bytes,
                    held => {
                        if let Some(whole) = held.replace(extent) {
                            return Some(Ok(whole));
                        }
                    }
                },
                Ok(None) => return self.held.take().map(Ok),
                Err(error) => {
                    self.next_bytes = self.size_bytes;
                    self.held = None;
                    return Some(Err(error));
                }
            }
        }
    }
}

fn joins(first: &Extent, second: &Extent) -> bool {
    first.offset_bytes + first.len_bytes == second.offset_bytes
        && first.kind == second.kind
        && (first.depth, first.file) == (second.depth, second.file)
        && first.file_offset_bytes.and_then(|offset| offset.checked_add(first.len_bytes)) == second.file_offset_bytes
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use diskwright_store::{BlockQueue, ExtentKind, Geometry, QueueOptions};
    use proptest::prelude::*;

    /// A device that has extents and nothing else: each unit is a kind, a depth, and a place in the
    /// file.
    #[derive(Debug)]
    pub struct Paper(pub Vec<(ExtentKind, u32, Option<u64>)>);

    /// Bytes of a unit of [`Paper`].
    pub const UNIT: u64 = 512;

    impl BlockDevice for Paper {
        fn geometry(&self) -> Geometry {
            Geometry {
                size_bytes: self.0.len() as u64 * UNIT,
                logical_sector_bytes: 512,
                physical_sector_bytes: 512,
                read_only: true,
            }
        }
        fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }
        fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
            for unit in offset_bytes / UNIT..(offset_bytes + len_bytes) / UNIT {
                let (kind, depth, place) = self.0[unit as usize];
                out.push(Extent {
                    offset_bytes: unit * UNIT,
                    len_bytes: UNIT,
                    kind,
                    depth,
                    file: 0,
                    file_offset_bytes: place.map(|p| p * UNIT),
                });
            }
            Ok(())
        }
    }

    #[test]
    fn joins_only_what_lies_together_in_the_file() {
        use ExtentKind::{Data, Unallocated, Zero};
        let paper = Paper(vec![
            (Data, 0, Some(10)),
            (Data, 0, Some(11)),
            (Data, 0, Some(5)),
            (Data, 1, Some(6)),
            (Zero, 0, None),
            (Zero, 0, None),
            (Unallocated, 0, None),
        ]);
        let lengths: Vec<u64> =
            Extents::with_window(&paper, UNIT).map(|extent| extent.unwrap().len_bytes / UNIT).collect();
        assert_eq!(lengths, [2, 1, 1, 2, 1]);
    }

    #[test]
    fn an_empty_disk_has_none() {
        assert_eq!(Extents::of(&Paper(Vec::new())).count(), 0);
    }

    proptest! {
        #[test]
        fn windows_do_not_show(units in proptest::collection::vec((0u8..3, 0u32..2, 0u64..4), 0..60), window in 1u64..9) {
            let paper = Paper(units.iter().enumerate().map(|(i, &(kind, depth, place))| match kind {
                0 => (ExtentKind::Data, depth, Some(i as u64 + place / 3 * 100)),
                1 => (ExtentKind::Zero, depth, None),
                _ => (ExtentKind::Unallocated, 0, None),
            }).collect());
            let through = |window| Extents::with_window(&paper, window).collect::<io::Result<Vec<_>>>().unwrap();
            let whole = through(1 << 20);
            prop_assert_eq!(&through(window * UNIT), &whole);
            let mut at = 0;
            for extent in &whole {
                prop_assert_eq!(extent.offset_bytes, at);
                at += extent.len_bytes;
            }
            prop_assert_eq!(at, paper.geometry().size_bytes);
        }
    }
}
