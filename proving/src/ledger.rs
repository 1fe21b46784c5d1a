//! What the user of a disk may count on: for each sector, which contents it may show.
//!
//! Every sector says whose it is and which write made it, so that bytes of another sector, or of a
//! write long gone, are seen for what they are. Only the *watched* ranges of a disk are written and
//! looked at; a disk may be as large as it likes.
//!
//! ```text
//!   base      what was durable at the last flush
//!   since     writes that came later, in order, each acknowledged or not
//!   a sector may show, after a cut:   base, or any later write of it            (a durable one hides what is older)
//!                      without a cut: the last acknowledged write of it, or a later one that failed
//! ```

use crate::contents::SECTOR_BYTES;
use std::sync::Arc;

/// Which write made a sector: 0 for zeros.
pub type Version = u32;

/// The version of what a parent holds.
pub const PARENT: Version = 1_000_000;

/// Fills `buf`, which begins at `first_sector`, with a version.
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

/// Which version of `sector` these bytes are; `None` when they are none of it.
pub fn version_of(bytes: &[u8], sector: u64) -> Option<Version> {
    let first: [u8; 16] = bytes.get(..16)?.try_into().ok()?;
    let word = u128::from_le_bytes(first);
    // Every 16 bytes are like the 16 before.
    if bytes[16..] != bytes[..bytes.len() - 16] {
        return None;
    }
    if word == 0 {
        return Some(0);
    }
    (word as u64 == sector + 1).then_some((word >> 64) as Version).filter(|version| *version != 0)
}

/// A stretch of sectors that is watched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// First sector of the disk.
    pub first: u64,
    /// How many.
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

/// See the module.
#[derive(Debug, Clone)]
pub struct Ledger {
    windows: Arc<[Window]>,
    /// Of all windows, one after the other.
    base: Arc<Vec<Version>>,
    since: Vec<Entry>,
}

/// A write that was announced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Announced(usize);

impl Ledger {
    /// A disk on which everything has this version, durably.
    pub fn new(windows: &[Window], base: impl Fn(u64) -> Version) -> Self {
        let versions = windows.iter().flat_map(|window| window.first..window.first + window.count).map(base).collect();
        Self { windows: windows.into(), base: Arc::new(versions), since: Vec::new() }
    }

    /// The stretches that are watched.
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// A write begins: from here on a cut may leave it. Only watched sectors count.
    pub fn announce(&mut self, first: u64, count: u64, version: Version) -> Announced {
        self.since.push(Entry { first, count, version, acknowledged: false, durable: false });
        Announced(self.since.len() - 1)
    }

    /// It has ended well; durably, where that was asked for.
    pub fn acknowledge(&mut self, write: Announced, durable: bool) {
        self.since[write.0].acknowledged = true;
        self.since[write.0].durable |= durable;
    }

    /// How many writes were announced so far: to be remembered when a flush begins.
    pub fn mark(&self) -> usize {
        self.since.len()
    }

    /// A flush that began at `mark` has ended well. Marks and announced writes from before are void
    /// then.
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

    /// Whether a sector may show this version after a cut, if `index` is its place in the base.
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

    /// What a sector may show, for messages.
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

    /// Holds what the windows show against what they may show. Returns the versions that are there,
    /// window by window.
    ///
    /// # Errors
    /// The first sector that shows what it must not.
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
                                format!("sector {sector} shows version {version}, where only {allowed:?} can be")
                            }
                            None => format!(
                                "sector {sector} shows {:02x?}..., which was never written there (allowed: versions {allowed:?})",
                                &bytes[..16]
                            ),
                        });
                    }
                }
            }
        }
        Ok(versions)
    }

    /// Writes that were announced and then not made.
    pub fn forget_unacknowledged(&mut self) {
        self.since.retain(|entry| entry.acknowledged);
    }

    /// The program was killed and the disk opened again: this is what it shows now. That is not
    /// durable, but it stays.
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

    /// A ledger of the same disk that shows just this, durably: for what follows a cut.
    pub fn settled(&self, versions: Vec<Version>) -> Self {
        Self { windows: Arc::clone(&self.windows), base: Arc::new(versions), since: Vec::new() }
    }

    /// Whether everything is durable.
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
    fn stamps_are_told_apart() {
        let mut bytes = [0; 512];
        stamp(&mut bytes, 7, 3);
        assert_eq!((version_of(&bytes, 7), version_of(&bytes, 8)), (Some(3), None));
        bytes[500] ^= 1;
        assert_eq!(version_of(&bytes, 7), None);
        assert_eq!(version_of(&[0; 512], 7), Some(0));
    }

    #[test]
    fn old_or_new_until_flushed_and_new_afterwards() {
        let mut ledger = ledger();
        let write = ledger.announce(1, 2, 5);
        assert!(ledger.judge(&shown(&[0, 5, 0, 0]), true).is_ok());
        assert!(ledger.judge(&shown(&[5, 0, 0, 0]), true).is_err(), "that sector was not written");
        ledger.acknowledge(write, false);
        assert!(ledger.judge(&shown(&[0, 5, 0, 0]), false).is_err(), "visible at once");
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
    fn a_failed_write_may_be_there_or_not_for_ever() {
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
