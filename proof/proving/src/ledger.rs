//! What the user of a disk may rely on: for each sector, the contents that it may show.
//!
//! Every sector holds its own number and the number of the write that made it. So stale data and
//! the bytes of another sector are recognized. Only the *watched* ranges of a disk are written and
//! read, so a disk may have any size.
//!
//! ```text
//!   base      the versions that were durable at the last flush
//!   since     later writes, in order, each acknowledged or not
//!   after a cut a sector may show:  base, or any later write; a durable write hides older ones
//!   without a cut:  the last acknowledged write, or a later one that failed
//! ```

use crate::contents::SECTOR_BYTES;
use std::sync::Arc;

/// The number of the write that made a sector; 0 for zeros.
pub type Version = u32;

/// The version of a parent's contents.
pub const PARENT: Version = 1_000_000;

/// Fills `buf`, whose first sector is `first_sector`, with a version.
pub fn stamp(buf: &mut [u8], first_sector: u64, version: Version) {
    for (sector, bytes) in (first_sector..).zip(buf.chunks_mut(SECTOR_BYTES as usize)) {
        if version == 0 {
            bytes.fill(0);
            continue;
        }
        for chunk in bytes.chunks_mut(16) {
            let word = (u128::from(version) << 64 | u128::from(sector + 1)).to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

/// The version that these bytes of `sector` show; `None` if they are not a version of this sector.
pub fn version_of(bytes: &[u8], sector: u64) -> Option<Version> {
    let first: [u8; 16] = bytes.get(..16)?.try_into().ok()?;
    let word = u128::from_le_bytes(first);
    // A sector repeats its first 16 bytes.
    if bytes[16..] != bytes[..bytes.len() - 16] {
        return None;
    }
    if word == 0 {
        return Some(0);
    }
    (word as u64 == sector + 1).then_some((word >> 64) as Version).filter(|version| *version != 0)
}

/// A watched range of sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First sector.
    pub first: u64,
    /// Number of sectors.
    pub count: u64,
}

#[derive(Debug, Clone, Copy)]
struct Entry {
    first: u64,
    count: u64,
    version: Version,
    acknowledged: bool,
    durable: bool,
}

impl Entry {
    fn covers(&self, sector: u64) -> bool {
        (self.first..self.first + self.count).contains(&sector)
    }
}

/// The ledger of one disk.
#[derive(Debug, Clone)]
pub struct Ledger {
    windows: Arc<[Window]>,
    /// Versions of the sectors of all windows, one after the other.
    base: Arc<Vec<Version>>,
    since: Vec<Entry>,
}

/// Identifies an announced write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced(usize);

impl Ledger {
    /// A disk whose sectors have these versions, durably.
    pub fn new(windows: &[Window], base: impl Fn(u64) -> Version) -> Self {
        let versions = windows.iter().flat_map(|window| window.first..window.first + window.count).map(base).collect();
        Self { windows: windows.into(), base: Arc::new(versions), since: Vec::new() }
    }

    /// The watched ranges.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// A write begins: from now on it may be visible after a cut. Only watched sectors count.
    pub fn announce(&mut self, first: u64, count: u64, version: Version) -> Announced {
        self.since.push(Entry { first, count, version, acknowledged: false, durable: false });
        Announced(self.since.len() - 1)
    }

    /// The write succeeded; `durable` if it was sent with FUA.
    pub fn acknowledge(&mut self, write: Announced, durable: bool) {
        self.since[write.0].acknowledged = true;
        self.since[write.0].durable |= durable;
    }

    /// Number of writes announced so far. Remember it when a flush begins.
    pub fn mark(&self) -> usize {
        self.since.len()
    }

    /// A flush that began at `mark` has succeeded. Older marks and announced writes become invalid.
    pub fn flushed(&mut self, mark: usize) {
        for entry in &mut self.since[..mark] {
            entry.durable |= entry.acknowledged;
        }
        if self.since[..mark].iter().all(|entry| entry.durable) {
            let base = Arc::make_mut(&mut self.base);
            for entry in self.since.drain(..mark) {
                let mut at = 0;
                for window in &*self.windows {
                    for sector in
                        window.first.max(entry.first)..(window.first + window.count).min(entry.first + entry.count)
                    {
                        base[at + (sector - window.first) as usize] = entry.version;
                    }
                    at += window.count as usize;
                }
            }
        }
    }

    /// Whether a sector may show this version. `index` is the sector's index in `base`.
    fn allows(&self, sector: u64, index: usize, version: Version, after_cut: bool) -> bool {
        for entry in self.since.iter().rev().filter(|entry| entry.covers(sector)) {
            if entry.version == version {
                return true;
            }
            if entry.durable || (entry.acknowledged && !after_cut) {
                return false;
            }
        }
        self.base[index] == version
    }

    /// The versions that a sector may show, for messages.
    fn allowed(&self, sector: u64, index: usize, after_cut: bool) -> Vec<Version> {
        let mut versions = Vec::new();
        for entry in self.since.iter().rev().filter(|entry| entry.covers(sector)) {
            versions.push(entry.version);
            if entry.durable || (entry.acknowledged && !after_cut) {
                return versions;
            }
        }
        versions.push(self.base[index]);
        versions
    }

    /// Compares the contents of the windows with what they may show. Returns the versions found,
    /// window by window.
    ///
    /// # Errors
    /// The first sector with contents that are not allowed.
    pub fn judge(&self, shown: &[Vec<u8>], after_cut: bool) -> Result<Vec<Version>, String> {
        let mut versions = Vec::with_capacity(self.base.len());
        for (window, bytes) in self.windows.iter().zip(shown) {
            for (sector, bytes) in (window.first..).zip(bytes.chunks(SECTOR_BYTES as usize)) {
                let index = versions.len();
                let found = version_of(bytes, sector);
                match found {
                    Some(version) if self.allows(sector, index, version, after_cut) => versions.push(version),
                    _ => {
                        let allowed = self.allowed(sector, index, after_cut);
                        return Err(match found {
                            Some(version) => {
                                format!("sector {sector} shows version {version}, allowed are {allowed:?}")
                            }
                            None => format!(
                                "sector {sector} shows {:02x?}..., which was never written there (allowed are versions {allowed:?})",
                                &bytes[..16]
                            ),
                        });
                    }
                }
            }
        }
        Ok(versions)
    }

    /// Drops announced writes that were never sent.
    pub fn forget_unacknowledged(&mut self) {
        self.since.retain(|entry| entry.acknowledged);
    }

    /// Records what the disk shows after the program was killed and the disk was opened again.
    /// These versions are not durable, but they stay visible.
    pub fn reread(&mut self, versions: &[Version]) {
        let mut at = 0;
        let mut seen: Vec<Entry> = Vec::new();
        for window in &*self.windows {
            for (sector, &version) in (window.first..window.first + window.count).zip(&versions[at..]) {
                if !self.since.iter().any(|entry| entry.covers(sector)) {
                    continue;
                }
                match seen.last_mut() {
                    Some(last) if last.version == version && last.first + last.count == sector => last.count += 1,
                    _ => seen.push(Entry { first: sector, count: 1, version, acknowledged: true, durable: false }),
                }
            }
            at += window.count as usize;
        }
        self.since.extend(seen);
    }

    /// A ledger of the same windows with these durable versions, for a session after a cut.
    pub fn settled(&self, versions: Vec<Version>) -> Self {
        Self { windows: Arc::clone(&self.windows), base: Arc::new(versions), since: Vec::new() }
    }

    /// Whether all writes are durable.
    pub fn is_durable(&self) -> bool {
        self.since.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(versions: &[Version]) -> Vec<Vec<u8>> {
        let mut bytes = vec![0; versions.len() * 512];
        for (sector, (version, bytes)) in versions.iter().zip(bytes.chunks_mut(512)).enumerate() {
            stamp(bytes, sector as u64, *version);
        }
        vec![bytes]
    }

    fn ledger() -> Ledger {
        Ledger::new(&[Window { first: 0, count: 4 }], |_| 0)
    }

    #[test]
    fn stamps_are_distinguished() {
        let mut bytes = [0; 512];
        stamp(&mut bytes, 7, 3);
        assert_eq!((version_of(&bytes, 7), version_of(&bytes, 8)), (Some(3), None));
        bytes[500] ^= 1;
        assert_eq!(version_of(&bytes, 7), None);
        assert_eq!(version_of(&[0; 512], 7), Some(0));
    }

    #[test]
    fn old_or_new_before_a_flush_and_new_afterwards() {
        let mut ledger = ledger();
        let write = ledger.announce(1, 2, 5);
        assert!(ledger.judge(&shown(&[0, 5, 0, 0]), true).is_ok());
        assert!(ledger.judge(&shown(&[5, 0, 0, 0]), true).is_err(), "that sector was not written");
        ledger.acknowledge(write, false);
        assert!(ledger.judge(&shown(&[0, 5, 0, 0]), false).is_err(), "an acknowledged write must be visible");
        assert!(ledger.judge(&shown(&[0, 5, 5, 0]), false).is_ok());
        let mark = ledger.mark();
        let late = ledger.announce(2, 1, 6);
        ledger.acknowledge(late, false);
        ledger.flushed(mark);
        assert!(ledger.judge(&shown(&[0, 0, 5, 0]), true).is_err());
        for late in [5, 6] {
            assert!(ledger.judge(&shown(&[0, 5, late, 0]), true).is_ok());
        }
    }

    #[test]
    fn a_failed_write_may_or_may_not_be_visible() {
        let mut ledger = ledger();
        ledger.announce(0, 1, 5);
        ledger.flushed(ledger.mark());
        for version in [0, 5] {
            assert!(ledger.judge(&shown(&[version, 0, 0, 0]), true).is_ok());
        }
        let write = ledger.announce(0, 1, 6);
        ledger.acknowledge(write, true);
        assert!(ledger.judge(&shown(&[5, 0, 0, 0]), true).is_err());
        assert!(ledger.judge(&shown(&[6, 0, 0, 0]), true).is_ok());
    }
}
