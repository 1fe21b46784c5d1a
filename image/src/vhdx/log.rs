//! Replaying the log (MS-VHDX 2.3).
//!
//! ```text
//!   headers found by a scan ─▶ valid entries ─▶ chains of contiguous sequence numbers
//!                              (checksum, descriptors, both halves of each number)
//!                                                     │
//!                        the highest head whose tail is in its chain
//!                                                     ▼
//!      tail ... head, in order ─▶ Target::Memory (pages of an OverlayStore)
//!                              ─▶ Target::Disk   (the file itself)
//! ```
//!
//! The log is a ring: an entry may begin near its end and continue at its start. The log is read in
//! pieces, so memory does not depend on its length. A log longer than 256 MiB is refused. A log
//! whose headers demand checksums over more than four times its length is refused too: valid
//! entries cannot overlap so much.

use super::corrupt;
use crate::error::{ImageError, Result};
use diskwright_format::vhdx::{
    Invalid, MIB,
    log::{
        DESCRIPTOR_BYTES, Descriptor, EntryChecksum, LOG_HEADER_BYTES, LOG_SECTOR_BYTES, LogEntryHeader, restore_page,
    },
};
use diskwright_store::{FileRange, Store, Zeroing};
use std::collections::{BTreeMap, HashMap};
use uuid::Uuid;

const SECTOR: u64 = LOG_SECTOR_BYTES as u64;
/// Longest log that is replayed, in bytes.
const MAX_LOG_BYTES: u64 = 256 << 20;
/// Limit for the file's length after replay, in bytes: twice the largest disk.
const MAX_FILE_BYTES: u64 = 128 << 40;
/// Maximum number of pages of a replay in memory.
const MAX_OVERLAY_PAGES: usize = 64 << 10;
/// Start of the region tables. The log must not change anything before it.
const FIRST_LOGGED_BYTE: u64 = 192 << 10;
/// Bytes read by one call while scanning for headers.
const SCAN_BYTES: u64 = MIB;

/// Called with each descriptor; a data descriptor comes with its page.
type Visit<'a> = dyn FnMut(&Descriptor, Option<Box<[u8]>>) -> Result<()> + 'a;

/// The log of a file, as a ring.
pub(super) struct Ring<'a> {
    pub(super) store: &'a dyn Store,
    pub(super) place: FileRange,
}

/// The entries to replay, tail first.
#[derive(Debug)]
pub(super) struct Sequence {
    entries: Vec<(u64, LogEntryHeader)>,
}

/// The target of a replay.
pub(super) enum Target<'a> {
    /// Entries are applied to the file.
    Disk,
    /// Pages to lay over the file.
    Memory(&'a mut BTreeMap<u64, Box<[u8]>>),
}

impl Sequence {
    pub(super) fn len(&self) -> u32 {
        self.entries.len() as u32
    }

    fn head(&self) -> &LogEntryHeader {
        // `Ring::find` never returns an empty sequence.
        &self.entries[self.entries.len() - 1].1
    }

    /// Minimum length of the file after replay, in bytes.
    pub(super) fn last_file_bytes(&self) -> u64 {
        self.head().last_file_bytes
    }
}

impl Ring<'_> {
    /// Finds the sequence to replay.
    ///
    /// # Errors
    /// `Corrupt` if there is none, as the header says that the log is in use.
    pub(super) fn find(&self, log_guid: Uuid) -> Result<Sequence> {
        if self.place.len_bytes > MAX_LOG_BYTES {
            return Err(ImageError::Unsupported {
                path: self.store.name().to_owned(),
                what: format!("replaying a log of {} MiB", self.place.len_bytes / MIB),
                hint: "logs of up to 256 MiB are supported; open and close the disk on Windows once".into(),
            });
        }
        let entries = self.valid_entries(log_guid)?;
        let after = |position: u64, header: &LogEntryHeader| {
            (position + u64::from(header.entry_len_bytes)) % self.place.len_bytes
        };
        // Each entry has at most one successor, and chains of different heads are disjoint, so
        // walking all chains takes linear time.
        let mut previous: HashMap<u64, u64> = HashMap::new();
        let mut heads = Vec::new();
        for (&position, header) in &entries {
            match entries.get(&after(position, header)) {
                Some(next) if Some(next.sequence_number) == header.sequence_number.checked_add(1) => {
                    previous.insert(after(position, header), position);
                }
                _ => heads.push((header.sequence_number, position)),
            }
        }
        heads.sort_unstable();
        for &(_, head) in heads.iter().rev() {
            if let Some(sequence) = self.chain(&entries, &previous, head) {
                return Ok(sequence);
            }
        }
        let found =
            format!("no complete sequence of entries with the GUID {log_guid} ({} valid entries)", entries.len());
        Err(corrupt(
            self.store,
            self.place.offset_bytes,
            Invalid::new("log", 0, found, "a complete sequence, because the header has that log GUID"),
        ))
    }

    /// The entries from the head's tail to the head; `None` if the tail is not in its chain.
    fn chain(
        &self,
        entries: &BTreeMap<u64, LogEntryHeader>,
        previous: &HashMap<u64, u64>,
        head: u64,
    ) -> Option<Sequence> {
        let tail = u64::from(entries.get(&head)?.tail_bytes);
        let mut found = Vec::new();
        let mut len_bytes = 0;
        let mut position = head;
        loop {
            let header = entries.get(&position)?;
            len_bytes += u64::from(header.entry_len_bytes);
            if len_bytes > self.place.len_bytes {
                return None;
            }
            found.push((position, *header));
            if position == tail {
                found.reverse();
                return Some(Sequence { entries: found });
            }
            position = *previous.get(&position)?;
        }
    }

    /// All valid entries by their position in the log.
    fn valid_entries(&self, log_guid: Uuid) -> Result<BTreeMap<u64, LogEntryHeader>> {
        let mut entries = BTreeMap::new();
        let mut budget_bytes = 4 * self.place.len_bytes;
        let mut buf = vec![0; SCAN_BYTES.min(self.place.len_bytes) as usize];
        for piece_start in (0..self.place.len_bytes).step_by(SCAN_BYTES as usize) {
            self.read(&mut buf, piece_start)?;
            for (position, sector) in (piece_start..).step_by(LOG_SECTOR_BYTES).zip(buf.chunks_exact(LOG_SECTOR_BYTES))
            {
                let Ok(header) = LogEntryHeader::parse(sector) else { continue };
                let fits = u64::from(header.entry_len_bytes) <= self.place.len_bytes
                    && u64::from(header.tail_bytes) < self.place.len_bytes;
                if header.log_guid != log_guid || !fits {
                    continue;
                }
                let left_bytes = budget_bytes.checked_sub(u64::from(header.entry_len_bytes));
                budget_bytes = left_bytes.ok_or_else(|| {
                    let invalid =
                        Invalid::new("log", position, "entries that overlap many times", "entries one after the other");
                    corrupt(self.store, self.place.offset_bytes, invalid)
                })?;
                if self.checksum(position, &header)? == header.checksum
                    && self.walk(position, &header, &mut |_, _| Ok(()))?.is_ok()
                {
                    entries.insert(position, header);
                }
            }
        }
        Ok(entries)
    }

    fn checksum(&self, position: u64, header: &LogEntryHeader) -> Result<u32> {
        let mut sum = EntryChecksum::default();
        let mut buf = vec![0; (64 << 10).min(header.entry_len_bytes as usize)];
        let mut done = 0;
        while done < u64::from(header.entry_len_bytes) {
            let len = buf.len().min((u64::from(header.entry_len_bytes) - done) as usize);
            self.read(&mut buf[..len], position + done)?;
            sum.add(&buf[..len]);
            done += len as u64;
        }
        Ok(sum.value())
    }

    /// Visits the descriptors of an entry in order. The inner result says why the entry is invalid.
    fn walk(&self, position: u64, header: &LogEntryHeader, visit: &mut Visit<'_>) -> Result<Result<(), Invalid>> {
        let descriptors_end = (LOG_HEADER_BYTES + DESCRIPTOR_BYTES * header.descriptors as usize) as u64;
        let mut data_at = descriptors_end.next_multiple_of(SECTOR);
        let (mut sector, mut data) = (vec![0; LOG_SECTOR_BYTES], vec![0; LOG_SECTOR_BYTES]);
        for index in 0..header.descriptors as usize {
            let at = LOG_HEADER_BYTES + DESCRIPTOR_BYTES * index;
            let within = at % LOG_SECTOR_BYTES;
            if index == 0 || within == 0 {
                self.read(&mut sector, position + (at - within) as u64)?;
            }
            let descriptor = match Descriptor::parse(&sector[within..within + DESCRIPTOR_BYTES], header.sequence_number)
            {
                Ok(descriptor) => descriptor,
                Err(invalid) => return Ok(Err(invalid)),
            };
            let mut page = None;
            if let Descriptor::Data { leading, trailing, .. } = descriptor {
                if data_at + SECTOR > u64::from(header.entry_len_bytes) {
                    return Ok(Err(Invalid::new(
                        "log entry",
                        8,
                        "more data descriptors than data sectors",
                        "one sector each",
                    )));
                }
                self.read(&mut data, position + data_at)?;
                data_at += SECTOR;
                page = match restore_page(&data, leading, trailing, header.sequence_number) {
                    Ok(page) => Some(page),
                    Err(invalid) => return Ok(Err(invalid)),
                };
            }
            visit(&descriptor, page)?;
        }
        Ok(Ok(()))
    }

    /// Reads from the ring. `position` may exceed its end by less than its length.
    fn read(&self, buf: &mut [u8], position: u64) -> Result<()> {
        let mut done = 0;
        while done < buf.len() {
            let at = (position + done as u64) % self.place.len_bytes;
            let len = (buf.len() - done).min((self.place.len_bytes - at) as usize);
            let offset_bytes = self.place.offset_bytes + at;
            self.store
                .read_at(&mut buf[done..done + len], offset_bytes)
                .map_err(|error| ImageError::io("read the log", self.store, offset_bytes, error))?;
            done += len;
        }
        Ok(())
    }

    /// Replays a sequence. On disk nothing is synced, and the caller must have set a new
    /// FileWriteGuid.
    ///
    /// # Errors
    /// `Corrupt` if the file is shorter than the head entry requires, or if an entry changes what
    /// the log must not change; `Unsupported` if a replay in memory needs too many pages.
    pub(super) fn replay(&self, sequence: &Sequence, mut target: Target<'_>) -> Result<()> {
        let io = |error, offset_bytes| ImageError::io("replay the log", self.store, offset_bytes, error);
        let held_bytes = self.store.len_bytes().map_err(|error| io(error, 0))?;
        let promised_bytes = sequence.head().flushed_file_bytes;
        if held_bytes < promised_bytes {
            let found = format!("a file of {held_bytes} bytes");
            let expected = format!(
                "at least {promised_bytes}, its length when the log was written: the file was truncated or not copied completely"
            );
            return Err(corrupt(self.store, self.place.offset_bytes, Invalid::new("log", 0, found, expected)));
        }
        if sequence.last_file_bytes() > MAX_FILE_BYTES {
            let found = format!("a last file offset of {}", sequence.last_file_bytes());
            return Err(corrupt(
                self.store,
                self.place.offset_bytes,
                Invalid::new("log", 56, found, "one below 128 TiB"),
            ));
        }
        let file_bytes = held_bytes.max(sequence.last_file_bytes());
        // All entries are validated before the first change.
        self.each_change(sequence, file_bytes, &mut |_, _| Ok(()))?;
        if let Target::Disk = target
            && file_bytes > held_bytes
        {
            self.store.set_len(file_bytes).map_err(|error| io(error, held_bytes))?;
        }
        self.each_change(sequence, file_bytes, &mut |descriptor, page| match (&mut target, descriptor, page) {
            (Target::Disk, Descriptor::Data { offset_bytes, .. }, Some(page)) => {
                self.store.write_at(&page, *offset_bytes).map_err(|error| io(error, *offset_bytes))
            }
            (Target::Disk, &Descriptor::Zero { offset_bytes, len_bytes }, _) => {
                let len_bytes = len_bytes.min(file_bytes.saturating_sub(offset_bytes));
                let range = FileRange { offset_bytes, len_bytes };
                if len_bytes == 0 {
                    Ok(())
                } else {
                    self.store.zero_range(range, Zeroing::Keep).map_err(|error| io(error, offset_bytes))
                }
            }
            (Target::Memory(pages), Descriptor::Data { offset_bytes, .. }, Some(page)) => {
                pages.insert(*offset_bytes, page);
                self.check_overlay(pages)
            }
            (Target::Memory(pages), &Descriptor::Zero { offset_bytes, len_bytes }, _) => {
                self.zero_in_memory(pages, offset_bytes, offset_bytes.saturating_add(len_bytes), held_bytes)
            }
            (_, Descriptor::Data { .. }, None) => Ok(()),
        })
    }

    /// Visits all descriptors of a sequence. Fails for a descriptor that changes headers or the
    /// log, or that lies beyond the end of the file.
    fn each_change(&self, sequence: &Sequence, file_bytes: u64, visit: &mut Visit<'_>) -> Result<()> {
        let (log_start, log_end) = (self.place.offset_bytes, self.place.offset_bytes + self.place.len_bytes);
        for (position, header) in &sequence.entries {
            let refuse = |invalid| corrupt(self.store, log_start + position, invalid);
            let walked = self.walk(*position, header, &mut |descriptor, page| {
                let (start_bytes, end_bytes, limit_bytes) = match *descriptor {
                    Descriptor::Data { offset_bytes, .. } => {
                        (offset_bytes, offset_bytes.saturating_add(SECTOR), file_bytes)
                    }
                    Descriptor::Zero { offset_bytes, len_bytes } => {
                        (offset_bytes, offset_bytes.saturating_add(len_bytes), u64::MAX)
                    }
                };
                let in_log = start_bytes < log_end && log_start < end_bytes;
                if start_bytes < FIRST_LOGGED_BYTE || in_log || end_bytes > limit_bytes {
                    let found = format!("a change of bytes {start_bytes} to {end_bytes}");
                    let expected = format!("changes between {FIRST_LOGGED_BYTE} and {file_bytes}, outside the log");
                    return Err(refuse(Invalid::new("log descriptor", 16, found, expected)));
                }
                visit(descriptor, page)
            })?;
            walked.map_err(refuse)?;
        }
        Ok(())
    }

    /// Zeroes a range in memory. Holes of the file need no page.
    fn zero_in_memory(
        &self,
        pages: &mut BTreeMap<u64, Box<[u8]>>,
        start_bytes: u64,
        end_bytes: u64,
        held_bytes: u64,
    ) -> Result<()> {
        let overlaid: Vec<u64> = pages.range(start_bytes..end_bytes).map(|(&offset, _)| offset).collect();
        for offset_bytes in overlaid {
            pages.insert(offset_bytes, vec![0; LOG_SECTOR_BYTES].into());
        }
        let end_bytes = end_bytes.min(held_bytes.next_multiple_of(SECTOR));
        let mut at_bytes = start_bytes;
        while at_bytes < end_bytes {
            let found = self
                .store
                .next_data(at_bytes)
                .map_err(|error| ImageError::io("replay the log", self.store, at_bytes, error))?;
            let Some(range) = found else { break };
            let first = range.offset_bytes.max(at_bytes) / SECTOR * SECTOR;
            let stop = range.offset_bytes.saturating_add(range.len_bytes).clamp(at_bytes + 1, end_bytes);
            for offset_bytes in (first..stop).step_by(LOG_SECTOR_BYTES) {
                pages.insert(offset_bytes, vec![0; LOG_SECTOR_BYTES].into());
                self.check_overlay(pages)?;
            }
            at_bytes = stop.next_multiple_of(SECTOR);
        }
        Ok(())
    }

    fn check_overlay(&self, pages: &BTreeMap<u64, Box<[u8]>>) -> Result<()> {
        if pages.len() <= MAX_OVERLAY_PAGES {
            return Ok(());
        }
        Err(ImageError::Unsupported {
            path: self.store.name().to_owned(),
            what: "reading through a log that changes more than 256 MiB".into(),
            hint: "open the disk for writing once, which replays the log on disk".into(),
        })
    }
}
