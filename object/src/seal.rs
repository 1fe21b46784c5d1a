//! Seals: the digests of an image's blocks, so that an image can be read from a server that nobody
//! has to trust.
//!
//! ```text
//!   KEY         the image
//!   KEY.seal    magic, size of the image, size of a block, SHA-256 of each block
//!   the root    SHA-256 of the seal, in the name by which a child records its parent
//! ```
//!
//! So the tree has two levels. The root proves the seal, and the seal proves each block before
//! anything of it is shown. A pushed disk needs no seal: its manifest has the digests.

use crate::{
    BLOCK_BYTES,
    repository::{Digest, digest_of},
};
use diskwright_store::Store;
use std::{
    io,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

/// How the name of a seal ends.
pub const SEAL_ENDING: &str = ".seal";
/// The largest image that is sealed: its seal has 64 MiB.
pub const SEALED_BYTES_MAX: u64 = 2 << 40;
/// The largest seal.
pub const SEAL_BYTES_MAX: u64 = HEAD_BYTES as u64 + SEALED_BYTES_MAX / BLOCK_BYTES * 32;

const MAGIC: &[u8; 8] = b"DWSEAL\0\x01";
/// Magic, size in bytes (64 bits), size of a block (32 bits), 32 bits of zeros.
const HEAD_BYTES: usize = 24;
/// How often `progress` is called.
const TELL_EVERY: Duration = Duration::from_millis(100);

/// The digests of an image; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    size_bytes: u64,
    digests: Vec<Digest>,
}

impl Seal {
    /// Reads an image and makes its seal, on all processors. `progress` gets the bytes that are
    /// done and those of all, and returns whether to go on. `None` if it was stopped.
    ///
    /// # Errors
    /// `Unsupported` for an image that is empty or larger than [`SEALED_BYTES_MAX`]; errors of
    /// reading it.
    pub fn of(store: &dyn Store, progress: &mut dyn FnMut(u64, u64) -> bool) -> io::Result<Option<Self>> {
        let size_bytes = store.len_bytes()?;
        if !(1..=SEALED_BYTES_MAX).contains(&size_bytes) {
            let what = format!("it has {size_bytes} bytes, and images of 1 byte to 2 TiB can be sealed");
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let digests = Mutex::new(vec![[0; 32]; size_bytes.div_ceil(BLOCK_BYTES) as usize]);
        let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
        let work = || -> io::Result<()> {
            let mut bytes = vec![0; BLOCK_BYTES as usize];
            while !stop.load(Ordering::Relaxed) {
                let block = next.fetch_add(1, Ordering::Relaxed);
                let start = block * BLOCK_BYTES;
                if start >= size_bytes {
                    break;
                }
                let bytes = &mut bytes[..(size_bytes - start).min(BLOCK_BYTES) as usize];
                store.read_at(bytes, start)?;
                let digest = digest_of(bytes);
                digests.lock().unwrap_or_else(PoisonError::into_inner)[block as usize] = digest;
            }
            Ok(())
        };
        let workers = thread::available_parallelism().map_or(1, |count| count.get().min(8));
        let mut result = Ok(());
        thread::scope(|scope| {
            let (sender, ended) = mpsc::channel();
            for _ in 0..workers {
                let sender = sender.clone();
                let (work, stop) = (&work, &stop);
                scope.spawn(move || {
                    let worked = work();
                    if worked.is_err() {
                        stop.store(true, Ordering::Relaxed);
                    }
                    let _ = sender.send(worked);
                });
            }
            drop(sender);
            loop {
                match ended.recv_timeout(TELL_EVERY) {
                    Ok(worked) => result = std::mem::replace(&mut result, Ok(())).and(worked),
                    Err(mpsc::RecvTimeoutError::Disconnected) => break,
                    Err(mpsc::RecvTimeoutError::Timeout) => {
                        let done_bytes = (next.load(Ordering::Relaxed) * BLOCK_BYTES).min(size_bytes);
                        if !progress(done_bytes, size_bytes) {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
            }
        });
        result?;
        if stop.into_inner() {
            return Ok(None);
        }
        let digests = digests.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Some(Self { size_bytes, digests }))
    }

    /// Reads the file of a seal.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_bytes(bytes: &[u8]) -> Result<Self, String> {
        let wrong = |what: &str| Err(format!("it is not a seal: {what}"));
        let Some((head, digests)) = bytes.split_at_checked(HEAD_BYTES).filter(|(head, _)| head.starts_with(MAGIC))
        else {
            return wrong("it does not begin with DWSEAL");
        };
        let number = |at: usize, len: usize| (0..len).rev().fold(0, |sum, byte| sum << 8 | u64::from(head[at + byte]));
        let (size_bytes, block_bytes) = (number(8, 8), number(16, 4));
        if block_bytes != BLOCK_BYTES || number(20, 4) != 0 || !(1..=SEALED_BYTES_MAX).contains(&size_bytes) {
            return wrong(&format!("an image of {size_bytes} bytes in blocks of {block_bytes}"));
        }
        let (count, expected) = (digests.len() / 32, size_bytes.div_ceil(BLOCK_BYTES));
        if !digests.len().is_multiple_of(32) || count as u64 != expected {
            return wrong(&format!("{count} digests, expected {expected}"));
        }
        let digests = digests.as_chunks().0.to_vec();
        Ok(Self { size_bytes, digests })
    }

    /// The bytes of its file.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(self.size_bytes.to_le_bytes());
        bytes.extend((BLOCK_BYTES as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.digests.as_flattened());
        bytes
    }

    /// The digest of the seal, which tells it from all others.
    pub fn root(&self) -> Digest {
        digest_of(&self.to_bytes())
    }

    /// Length of the image in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// The blocks in which an image with another seal differs from this one, by number. An image of
    /// another length differs in its last blocks.
    pub fn differing<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = u64> + 'a {
        let count = self.digests.len().max(other.digests.len());
        (0..count).filter(|&block| self.digests.get(block) != other.digests.get(block)).map(|block| block as u64)
    }

    /// The first of the blocks from `first` on whose bytes are wrong. All but the last block of an
    /// image are whole.
    pub(crate) fn wrong_block(&self, first: u64, bytes: &[u8]) -> Option<u64> {
        let is_right = |(block, bytes): &(u64, &[u8])| {
            self.digests.get(*block as usize).is_some_and(|digest| *digest == digest_of(bytes))
        };
        (first..).zip(bytes.chunks(BLOCK_BYTES as usize)).find(|found| !is_right(found)).map(|(block, _)| block)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::FileStore;
    use proptest::prelude::*;
    use std::fs;

    fn seal_of(bytes: &[u8]) -> io::Result<Option<Seal>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image");
        fs::write(&path, bytes).unwrap();
        Seal::of(&FileStore::open(&path, &diskwright_store::OpenOptions::default()).unwrap(), &mut |_, _| true)
    }

    #[test]
    fn each_block_is_proved_and_a_changed_byte_is_found() {
        let mut bytes: Vec<u8> = (0..(3 << 20) + 100_u32).map(|byte| (byte / 7) as u8).collect();
        let seal = seal_of(&bytes).unwrap().unwrap();
        assert_eq!(Seal::of_bytes(&seal.to_bytes()).as_ref(), Ok(&seal));
        assert_eq!((seal.size_bytes(), seal.digests.len()), (bytes.len() as u64, 4));
        assert_eq!((seal.wrong_block(0, &bytes), seal.wrong_block(3, &bytes[3 << 20..])), (None, None));
        assert_eq!(seal.wrong_block(3, &bytes[3 << 20..bytes.len() - 1]), Some(3));
        bytes[(2 << 20) + 5] ^= 1;
        assert_eq!((seal.wrong_block(0, &bytes), seal.wrong_block(1, &bytes[1 << 20..])), (Some(2), Some(2)));
        let other = seal_of(&bytes).unwrap().unwrap();
        assert_eq!(seal.differing(&other).collect::<Vec<_>>(), [2]);
        assert_ne!(seal.root(), other.root());
        assert_eq!(seal_of(&[]).unwrap_err().kind(), io::ErrorKind::Unsupported);
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..200), whole: bool) {
            if whole && bytes.len() >= 8 {
                bytes[..8].copy_from_slice(MAGIC);
            }
            if let Ok(seal) = Seal::of_bytes(&bytes) {
                prop_assert_eq!(seal.to_bytes(), bytes);
            }
        }
    }
}
