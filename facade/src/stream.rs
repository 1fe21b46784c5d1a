//! A disk as a stream of bytes: any offset, any length, with the traits of [`std::io`].
//!
//! ```text
//!   write_at:   ┌ part of a sector ┬ whole sectors ┬ part of a sector ┐
//!               │ read, change,    │ written as    │ read, change,    │
//!               │ write            │ they are      │ write            │
//! ```
//!
//! Disks are read and written in whole sectors. A write of a part of a sector reads the sector
//! first. Two streams that write different parts of one sector at the same time can therefore lose
//! one of the two changes; whole sectors are safe.

use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    fmt,
    io::{self, Read, Seek, SeekFrom, Write},
    sync::Arc,
};

/// Maximum bytes that a read which begins within a sector takes into memory at a time.
const WINDOW_BYTES: usize = 256 << 10;

/// Reads and writes a [`BlockDevice`] at any offset. It has a queue of its own, which belongs to
/// the thread that opened the stream: each thread opens its own.
///
/// A disk is written in whole sectors, so a write of a part of a sector reads the sector first. Two
/// streams that write parts of one sector at the same time can lose one of the two changes.
///
/// A disk cannot be closed while a stream of it is open.
pub struct DiskStream {
    device: Arc<dyn BlockDevice>,
    queue: Blocking,
    position_bytes: u64,
    /// Whole sectors around a range that begins or ends within one.
    window: Vec<u8>,
}

impl fmt::Debug for DiskStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStream")
            .field("device", &self.device)
            .field("position_bytes", &self.position_bytes)
            .finish_non_exhaustive()
    }
}

impl DiskStream {
    /// A stream over `device`, at offset 0.
    ///
    /// # Errors
    /// Where no queue can be opened: the disk is closed, or the system has no memory for it.
    pub fn open(device: Arc<dyn BlockDevice>) -> io::Result<Self> {
        Self::with_engine(device, EngineKind::Auto)
    }

    /// The same, where the caller says how I/O is submitted.
    ///
    /// # Errors
    /// As [`DiskStream::open`]; where the system does not have that engine.
    pub fn with_engine(device: Arc<dyn BlockDevice>, engine: EngineKind) -> io::Result<Self> {
        let queue = Blocking::open(&*device, engine)?;
        Ok(Self { device, queue, position_bytes: 0, window: Vec::new() })
    }

    /// Size of the disk in bytes, as of now.
    pub fn size_bytes(&self) -> u64 {
        self.device.geometry().size_bytes
    }

    fn sector_bytes(&self) -> u64 {
        self.device.geometry().logical_sector_bytes.into()
    }

    /// How many of `len` bytes at `offset_bytes` lie on the disk.
    fn on_disk(&self, offset_bytes: u64, len: usize) -> usize {
        let left_bytes = self.size_bytes().saturating_sub(offset_bytes);
        usize::try_from(left_bytes).unwrap_or(usize::MAX).min(len)
    }

    /// Fills `out` from the disk. Returns how many bytes were read: fewer than asked for only at
    /// the end of the disk.
    ///
    /// # Errors
    /// What the disk says; [`DiskError::code_of`](crate::DiskError::code_of) tells which.
    pub fn read_at(&mut self, offset_bytes: u64, out: &mut [u8]) -> io::Result<usize> {
        let len = self.on_disk(offset_bytes, out.len());
        let sector_bytes = self.sector_bytes();
        let mut done = 0;
        while done < len {
            let at = offset_bytes + done as u64;
            let before = (at % sector_bytes) as usize;
            let whole = (len - done) - (len - done) % sector_bytes as usize;
            if before == 0 && whole > 0 {
                self.queue.read(at, &mut out[done..done + whole])?;
                done += whole;
                continue;
            }
            let piece = (len - done).min(WINDOW_BYTES - before);
            let sectors_len = (before + piece).next_multiple_of(sector_bytes as usize);
            self.window.resize(sectors_len, 0);
            self.queue.read(at - before as u64, &mut self.window)?;
            out[done..done + piece].copy_from_slice(&self.window[before..before + piece]);
            done += piece;
        }
        Ok(len)
    }

    /// Writes all of `data`, or nothing where it would reach beyond the end of the disk.
    ///
    /// # Errors
    /// `InvalidInput` for a range beyond the end; what the disk says, after which any part of the
    /// range may have been written.
    pub fn write_at(&mut self, offset_bytes: u64, data: &[u8]) -> io::Result<()> {
        self.check_range(offset_bytes, data.len() as u64)?;
        let sector_bytes = self.sector_bytes();
        let mut done = 0;
        while done < data.len() {
            let at = offset_bytes + done as u64;
            let before = (at % sector_bytes) as usize;
            let left = data.len() - done;
            let whole = left - left % sector_bytes as usize;
            if before == 0 && whole > 0 {
                self.queue.write(at, &data[done..done + whole], false)?;
                done += whole;
                continue;
            }
            let piece = left.min(sector_bytes as usize - before);
            self.window.resize(sector_bytes as usize, 0);
            self.queue.read(at - before as u64, &mut self.window)?;
            self.window[before..before + piece].copy_from_slice(&data[done..done + piece]);
            self.queue.write(at - before as u64, &self.window, false)?;
            done += piece;
        }
        Ok(())
    }

    /// Makes a range read as zeros and gives its space back. Parts of sectors at its ends are
    /// zeroed.
    ///
    /// # Errors
    /// As [`DiskStream::write_at`].
    pub fn discard(&mut self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        self.check_range(offset_bytes, len_bytes)?;
        let sector_bytes = self.sector_bytes();
        let end_bytes = offset_bytes + len_bytes;
        let (from, to) = (offset_bytes.next_multiple_of(sector_bytes), end_bytes - end_bytes % sector_bytes);
        if from > to {
            return self.write_at(offset_bytes, &vec![0; len_bytes as usize]);
        }
        self.write_at(offset_bytes, &vec![0; (from - offset_bytes) as usize])?;
        self.write_at(to, &vec![0; (end_bytes - to) as usize])?;
        if from < to { self.queue.discard(from, to - from) } else { Ok(()) }
    }

    fn check_range(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        let size_bytes = self.size_bytes();
        match offset_bytes.checked_add(len_bytes) {
            Some(end_bytes) if end_bytes <= size_bytes => Ok(()),
            _ => Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                format!(
                    "offset {offset_bytes} plus length {len_bytes} reach beyond the disk's end at {size_bytes} bytes"
                ),
            )),
        }
    }
}

impl Read for DiskStream {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let len = self.read_at(self.position_bytes, out)?;
        self.position_bytes += len as u64;
        Ok(len)
    }
}

impl Write for DiskStream {
    /// Writes up to the end of the disk. At the end, nothing more can be written: `Ok(0)`.
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let len = self.on_disk(self.position_bytes, data.len());
        self.write_at(self.position_bytes, &data[..len])?;
        self.position_bytes += len as u64;
        Ok(len)
    }

    /// Makes everything durable that was written to the disk, by whatever stream.
    fn flush(&mut self) -> io::Result<()> {
        self.queue.flush()
    }
}

impl Seek for DiskStream {
    /// A position beyond the end is allowed: reads there find nothing.
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let target = match to {
            SeekFrom::Start(offset_bytes) => Some(offset_bytes),
            SeekFrom::Current(delta) => self.position_bytes.checked_add_signed(delta),
            SeekFrom::End(delta) => self.size_bytes().checked_add_signed(delta),
        };
        let before_start = || io::Error::new(io::ErrorKind::InvalidInput, "the position would lie before the disk");
        self.position_bytes = target.ok_or_else(before_start)?;
        Ok(self.position_bytes)
    }
}
