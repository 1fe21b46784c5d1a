//! Which results a linearizable disk may give to threads that read, write, zero and discard the
//! same sectors at the same time.
//!
//! Each sector is a register. An operation takes effect at one moment between its begin and its
//! end. So the order of two operations is known if they do not overlap in time, and unknown if they
//! do:
//!
//! ```text
//!    W1 ├────┤                          W1 is overwritten before the read begins: not allowed
//!             W2 ├─────┤                W2 is allowed, and required if no other write is allowed
//!                    W3 ├──────────┤    W3 is allowed
//!                         R ├────┤
//! ```
//!
//! A read that shows W3 proves that W3 has taken effect, so later reads must not show W2.
//!
//! Within a sector no order is promised while it is being written: a read may see part of a
//! concurrent write, and of two concurrent writes each may leave a part. (POSIX promises more than
//! Linux keeps.) So each *byte* must come from an allowed write. If only one write is allowed, the
//! whole sector must come from it.
//!
//! `judge` gets the operations of all threads ([`Event`]) after they have ended. `drive.rs` runs
//! the threads.

mod drive;

pub use drive::{Clock, Mix, Plan, Tally, drive, round, round_beside};

use crate::{
    contents::SECTOR_BYTES,
    ledger::{Version, stamp, version_of},
    stage::Outcome,
};
use std::collections::HashMap;

/// The effect of an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Effect {
    /// It wrote this version (0: zeros).
    Write(Version),
    /// It read these bytes.
    Read(Vec<u8>),
}

/// An operation that succeeded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// The effect.
    pub act: Effect,
    /// First sector.
    pub first: u64,
    /// Number of sectors.
    pub count: u64,
    /// When it began, on a [`Clock`].
    pub begin: u64,
    /// When its completion was seen.
    pub end: u64,
}

/// A write of one sector, or the contents from before all writes.
#[derive(Debug, Clone, Copy)]
struct Wrote {
    /// `None` means the contents from before.
    version: Option<Version>,
    begin: u64,
    /// The latest time at which the write took effect: its end, or the end of a read that has shown
    /// it.
    by: u64,
}

/// Judges all reads. `base` is the contents of the disk before all operations, from sector 0 on.
///
/// # Errors
/// The first read with contents that are not allowed.
pub fn judge(base: &[u8], mut events: Vec<Event>) -> Outcome<u64> {
    events.sort_by_key(|event| event.end);
    let mut sectors: HashMap<u64, Vec<Wrote>> = HashMap::new();
    for event in &events {
        if let Effect::Write(version) = event.act {
            for sector in event.first..event.first + event.count {
                let wrote = Wrote { version: Some(version), begin: event.begin, by: event.end };
                sectors.entry(sector).or_insert_with(|| vec![before()]).push(wrote);
            }
        }
    }
    let mut judged = 0;
    // In the order of their ends, so that what a read has proved is known to all reads that began
    // after it.
    for event in &events {
        let Effect::Read(shown) = &event.act else { continue };
        for (sector, bytes) in (event.first..).zip(shown.chunks(SECTOR_BYTES as usize)) {
            let wrote = sectors.entry(sector).or_insert_with(|| vec![before()]);
            judge_sector(base, wrote, sector, bytes, event)?;
            judged += 1;
        }
    }
    Ok(judged)
}

fn before() -> Wrote {
    Wrote { version: None, begin: 0, by: 0 }
}

fn judge_sector(base: &[u8], wrote: &mut [Wrote], sector: u64, bytes: &[u8], read: &Event) -> Outcome {
    // Writes that took effect before this time were overwritten when the read began.
    let overwritten = wrote.iter().filter(|other| other.by < read.begin).map(|other| other.begin).max().unwrap_or(0);
    let may_be_seen = |wrote: &Wrote| wrote.begin < read.end && wrote.by >= overwritten;
    let found = version_of(bytes, sector);
    // The common case: the whole sector comes from one write. (Zeros do not tell from which.)
    if let Some(version) = found
        && let Some(seen) = wrote.iter_mut().find(|wrote| wrote.version == Some(version) && may_be_seen(wrote))
    {
        if version != 0 {
            seen.by = seen.by.min(read.end);
        }
        return Ok(());
    }
    let allowed: Vec<Vec<u8>> =
        wrote.iter().filter(|wrote| may_be_seen(wrote)).map(|wrote| bytes_of(base, wrote.version, sector)).collect();
    let bad = bytes.iter().enumerate().find(|&(at, byte)| allowed.iter().all(|allowed| allowed[at] != *byte));
    let Some((at, byte)) = bad else { return Ok(()) };
    let versions: Vec<_> = wrote.iter().filter(|wrote| may_be_seen(wrote)).map(|wrote| wrote.version).collect();
    let (begin, end) = (read.begin, read.end);
    Err(match found {
        Some(version) => {
            let when = wrote.iter().find(|wrote| wrote.version == Some(version));
            format!(
                "a read from {begin} to {end} shows version {version} in sector {sector} ({when:?}), allowed are {versions:?}"
            )
        }
        None => format!(
            "a read from {begin} to {end} shows {byte:#04x} at byte {at} of sector {sector}, which no allowed version has there ({versions:?})"
        ),
    })
}

fn bytes_of(base: &[u8], version: Option<Version>, sector: u64) -> Vec<u8> {
    let mut bytes = vec![0; SECTOR_BYTES as usize];
    match version {
        Some(version) => stamp(&mut bytes, sector, version),
        None => {
            let start = (sector * SECTOR_BYTES) as usize;
            if let Some(there) = base.get(start..start + bytes.len()) {
                bytes.copy_from_slice(there);
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(version: Version, begin: u64, end: u64) -> Event {
        Event { act: Effect::Write(version), first: 0, count: 1, begin, end }
    }

    fn read_bytes(bytes: Vec<u8>, begin: u64, end: u64) -> Event {
        Event { act: Effect::Read(bytes), first: 0, count: 1, begin, end }
    }

    fn read(version: Version, begin: u64, end: u64) -> Event {
        read_bytes(bytes_of(&[], Some(version), 0), begin, end)
    }

    const BASE: [u8; 512] = [0; 512];

    fn fits(events: Vec<Event>) -> bool {
        judge(&BASE, events).is_ok()
    }

    #[test]
    fn a_write_that_ended_is_visible_and_older_ones_are_not() {
        assert!(fits(vec![write(1, 1, 2), read(1, 3, 4)]));
        assert!(!fits(vec![write(1, 1, 2), read(0, 3, 4)]));
        assert!(!fits(vec![write(1, 1, 2), write(2, 3, 4), read(1, 5, 6)]));
        assert!(!fits(vec![read(1, 1, 2), write(1, 3, 4)]), "not before it began");
    }

    #[test]
    fn a_concurrent_write_may_be_visible_and_then_stays_visible() {
        for seen in [0, 1] {
            assert!(fits(vec![write(1, 1, 5), read(seen, 2, 3)]));
        }
        assert!(fits(vec![write(1, 1, 9), read(0, 2, 3), read(1, 4, 5)]));
        assert!(!fits(vec![write(1, 1, 9), read(1, 2, 3), read(0, 4, 5)]));
        // Of two concurrent writes either may be the last, even if no read has seen them.
        for seen in [1, 2] {
            assert!(fits(vec![write(1, 1, 4), write(2, 2, 3), read(seen, 5, 6)]));
        }
    }

    #[test]
    fn a_torn_sector_consists_of_allowed_writes() {
        let mut torn = bytes_of(&[], Some(1), 0);
        torn[256..].copy_from_slice(&bytes_of(&[], Some(2), 0)[256..]);
        assert!(fits(vec![write(1, 1, 2), write(2, 3, 6), read_bytes(torn.clone(), 4, 5)]));
        assert!(!fits(vec![write(1, 1, 2), write(2, 3, 4), read_bytes(torn, 5, 6)]));
        let foreign = bytes_of(&[], Some(1), 7);
        assert!(!fits(vec![write(1, 1, 2), read_bytes(foreign, 3, 4)]), "another sector's bytes");
    }
}
