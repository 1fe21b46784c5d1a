//! The tokens that the target has given out: which data each stands for.
//!
//! A token stands for data as they were when it was made. The target keeps no copy of them: a watch
//! notices when they change, and the token is of no use from then on. A token that is not used for
//! its time is forgotten. Tokens hold for all sessions of the server, and end with it, or with
//! their disk.

use crate::reservations::Watch;
use diskwright_iscsi::scsi::{Sense, token};
use diskwright_store::BlockDevice;
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::{Duration, Instant},
};

/// Tokens of a server at most. The one that ends first makes room for a new one.
const TOKENS_MAX: usize = 1024;

/// What a token stands for.
#[derive(Debug, Clone)]
pub(super) struct TokenData {
    /// The disk, which may have been removed since, and another one added by its name.
    pub(super) device: Weak<dyn BlockDevice>,
    /// In bytes of the disk.
    pub(super) ranges: Vec<Range<u64>>,
    pub(super) block_bytes: u32,
    pub(super) watch: Arc<Watch>,
}

impl TokenData {
    /// The ranges of the disk for a range of the token; they may be shorter.
    pub(super) fn within(&self, wanted: Range<u64>) -> Vec<Range<u64>> {
        let mut at = 0;
        let mut found = Vec::new();
        for range in &self.ranges {
            let len_bytes = range.end - range.start;
            let from = wanted.start.clamp(at, at + len_bytes) - at;
            let to = wanted.end.clamp(at, at + len_bytes) - at;
            if from < to {
                found.push(range.start + from..range.start + to);
            }
            at += len_bytes;
        }
        found
    }

    pub(super) fn len_bytes(&self) -> u64 {
        self.ranges.iter().map(|range| range.end - range.start).sum()
    }
}

/// The tokens of a server.
#[derive(Debug, Default)]
pub(super) struct Tokens {
    all: Mutex<BTreeMap<[u8; 32], Entry>>,
}

#[derive(Debug)]
struct Entry {
    data: TokenData,
    lasts: Duration,
    ends: Instant,
}

impl Tokens {
    /// Keeps a token that ends when it was not used for `timeout_s`, or for the target's time if
    /// that is 0.
    pub(super) fn add(&self, id: [u8; 32], data: TokenData, timeout_s: u32) {
        let lasts = Duration::from_secs(if timeout_s == 0 { token::TIMEOUT_S } else { timeout_s }.into());
        let mut all = self.lock();
        if all.len() >= TOKENS_MAX
            && let Some(first) = all.iter().min_by_key(|(_, entry)| entry.ends).map(|(id, _)| *id)
        {
            all.remove(&first);
        }
        all.insert(id, Entry { data, lasts, ends: Instant::now() + lasts });
    }

    /// What a token stands for, which is used now.
    ///
    /// # Errors
    /// It is not known any more, or the data have changed.
    pub(super) fn find(&self, id: &[u8; 32]) -> Result<TokenData, Sense> {
        let mut all = self.lock();
        let entry = all.get_mut(id).ok_or(Sense::TOKEN_UNKNOWN)?;
        if entry.data.watch.has_changed() {
            all.remove(id);
            return Err(Sense::TOKEN_REVOKED);
        }
        entry.ends = Instant::now() + entry.lasts;
        Ok(entry.data.clone())
    }

    pub(super) fn remove(&self, id: &[u8; 32]) {
        self.lock().remove(id);
    }

    /// The tokens whose time is not over.
    fn lock(&self) -> MutexGuard<'_, BTreeMap<[u8; 32], Entry>> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        all.retain(|_, entry| entry.ends > now);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reservations::Claims;
    use diskwright_store::{MemoryStore, RawDevice};

    fn data() -> TokenData {
        let claims = Arc::new(Claims::default());
        let ranges = vec![4096..8192, 0..512, 10000..20000];
        let watch = claims.watch(ranges.clone()).unwrap();
        let store = Arc::new(MemoryStore::with_bytes("memory", vec![0; 512]));
        let device: Arc<dyn BlockDevice> = Arc::new(RawDevice::new(store, true, 512).unwrap());
        TokenData { device: Arc::downgrade(&device), ranges, block_bytes: 512, watch }
    }

    #[test]
    fn a_range_of_a_token_is_found_in_its_ranges() {
        let data = data();
        assert_eq!(data.len_bytes(), 4096 + 512 + 10000);
        assert_eq!(data.within(0..u64::MAX), data.ranges);
        assert_eq!(data.within(4000..4200), [8096..8192, 0..104]);
        assert_eq!(data.within(4608..4610).first(), Some(&(10000..10002)));
        assert!(data.within(14608..20000).is_empty() && data.within(7..7).is_empty());
    }

    #[test]
    fn tokens_end() {
        let tokens = Tokens::default();
        tokens.add([1; 32], data(), 1);
        tokens.add([2; 32], data(), 0);
        assert!(tokens.find(&[1; 32]).is_ok() && tokens.find(&[3; 32]).is_err());
        std::thread::sleep(Duration::from_millis(1100));
        assert_eq!(tokens.find(&[1; 32]).unwrap_err(), Sense::TOKEN_UNKNOWN);
        tokens.remove(&[2; 32]);
        assert!(tokens.find(&[2; 32]).is_err());
        (0..TOKENS_MAX as u32 + 9).for_each(|n| {
            let mut id = [0; 32];
            id[..4].copy_from_slice(&n.to_be_bytes());
            tokens.add(id, data(), 0);
        });
        assert_eq!(tokens.lock().len(), TOKENS_MAX);
    }
}
