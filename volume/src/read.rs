//! How a disk is read: the trait that callers implement, and a volume as a window onto the disk.
//!
//! ```text
//!   Window   bytes of one volume    (a partition, or a logical volume in several extents)
//!      │     every offset is checked against the volume's size
//!      ▼
//!   ReadAt   bytes of the disk      (the caller's: a file, an image, memory)
//! ```

use crate::reason::{LeftAlone, ReasonKind};
use std::{io, ops::Range};

/// A disk that can be read at any byte.
pub trait ReadAt {
    /// Size of the disk in bytes.
    fn size_bytes(&self) -> u64;

    /// Size of a logical sector in bytes: the unit of partition tables.
    fn sector_bytes(&self) -> u32 {
        512
    }

    /// Fills `buf` from the byte `offset_bytes` on. Neither needs any alignment. The readers of
    /// this crate ask for nothing beyond [`size_bytes`](Self::size_bytes).
    ///
    /// # Errors
    /// If the bytes cannot be read. The volume that they belong to is then left alone.
    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()>;
}

/// A part of a volume that is contiguous on the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte in the volume.
    pub volume_offset_bytes: u64,
    /// First byte on the disk.
    pub disk_offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
}

/// The bytes of one volume. The extents begin at 0, follow each other in the volume without gaps,
/// and lie within the disk.
#[derive(Clone, Copy)]
pub(crate) struct Window<'a> {
    disk: &'a dyn ReadAt,
    extents: &'a [Extent],
}

impl<'a> Window<'a> {
    pub(crate) fn new(disk: &'a dyn ReadAt, extents: &'a [Extent]) -> Self {
        Self { disk, extents }
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        size_of(self.extents)
    }

    /// Logical sector size of the disk in bytes.
    pub(crate) fn sector_bytes(&self) -> u32 {
        self.disk.sector_bytes()
    }

    /// Fills `buf` from the volume's byte `offset_bytes` on.
    pub(crate) fn read(&self, offset_bytes: u64, buf: &mut [u8]) -> Result<(), LeftAlone> {
        let size_bytes = self.size_bytes();
        let len = buf.len() as u64;
        if offset_bytes.checked_add(len).is_none_or(|end| end > size_bytes) {
            return Err(LeftAlone::damaged(format!(
                "a structure of {len} bytes at byte {offset_bytes} reaches beyond the volume's {size_bytes} bytes"
            )));
        }
        let mut done = 0_usize;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let index = self.extents.partition_point(|extent| extent.volume_offset_bytes <= at) - 1;
            let extent = &self.extents[index];
            let into = at - extent.volume_offset_bytes;
            let take = (extent.len_bytes - into).min((buf.len() - done) as u64) as usize;
            self.disk.read_at(extent.disk_offset_bytes + into, &mut buf[done..done + take]).map_err(|error| {
                LeftAlone::new(ReasonKind::Unreadable, format!("byte {at} cannot be read: {error}"))
            })?;
            done += take;
        }
        Ok(())
    }

    /// Reads `len` bytes. `len` must be bounded by the format, not by a field.
    pub(crate) fn bytes(&self, offset_bytes: u64, len: usize) -> Result<Vec<u8>, LeftAlone> {
        let mut buf = vec![0; len];
        self.read(offset_bytes, &mut buf)?;
        Ok(buf)
    }

    /// Reads `N` bytes, or `None` where the volume is too small or the bytes cannot be read.
    pub(crate) fn array<const N: usize>(&self, offset_bytes: u64) -> Option<[u8; N]> {
        let mut buf = [0; N];
        self.read(offset_bytes, &mut buf).ok().map(|()| buf)
    }
}

/// Sum of the lengths of `extents` in bytes.
pub(crate) fn size_of(extents: &[Extent]) -> u64 {
    extents.last().map_or(0, |extent| extent.volume_offset_bytes + extent.len_bytes)
}

/// One extent: the disk's bytes in `range`.
pub(crate) fn one_extent(range: Range<u64>) -> Vec<Extent> {
    vec![Extent { volume_offset_bytes: 0, disk_offset_bytes: range.start, len_bytes: range.end - range.start }]
}
