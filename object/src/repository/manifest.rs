//! A manifest: what a pushed disk consists of.
//!
//! ```text
//!    0   8  "DWPUSHED"
//!    8   4  version, 1
//!   12   4  length of the facts
//!   16   8  number of runs
//!   24   8  number of chunks
//!   32  32  SHA-256 of all that follows
//!   64      facts, as JSON
//!           runs: first chunk, count (8 bytes each); ascending, not touching
//!           chunks of the runs: SHA-256 of the bytes (32), push (8), length of the object (4)
//! ```
//!
//! All numbers are little-endian. A chunk that is in no run reads as zeros. The last chunk ends
//! with the disk.
//!
//! The *contents id* is a digest of the disk's size and of the digests of its chunks: two manifests
//! have the same one only if their disks have the same bytes, however they are stored. So the
//! manifest is a tree of digests, with the contents id as its root.

use super::keys::{ChunkKey, Digest, PushId};
use ring::digest::{Context, SHA256, digest};
use serde::{Deserialize, Serialize};
use std::{collections::HashSet, ops::Range};

/// How a manifest begins.
pub(crate) const MAGIC: &[u8; 8] = b"DWPUSHED";
const VERSION: u32 = 1;
const HEAD_BYTES: usize = 64;
const RUN_BYTES: usize = 16;
const CHUNK_ENTRY_BYTES: usize = 44;
const FACTS_MAX: usize = 64 << 10;

/// Bytes of a disk that are stored as one object.
pub const CHUNK_BYTES: u64 = 4 << 20;
/// The largest disk.
pub const DISK_BYTES_MAX: u64 = 64 << 40;
/// The longest object of a chunk: one that cannot be compressed, and its first byte.
pub(super) const CHUNK_OBJECT_MAX: u32 = CHUNK_BYTES as u32 + 1;
/// The longest manifest: of the largest disk, full of data.
pub(crate) const MANIFEST_BYTES_MAX: u64 =
    (HEAD_BYTES + FACTS_MAX) as u64 + DISK_BYTES_MAX / CHUNK_BYTES * (CHUNK_ENTRY_BYTES + RUN_BYTES) as u64;

/// What is known of a pushed disk beside its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facts {
    /// Size of the disk in bytes.
    #[serde(rename = "size")]
    pub size_bytes: u64,
    /// Its logical sector in bytes.
    #[serde(rename = "logical_sector_size")]
    pub logical_sector_bytes: u32,
    /// Its physical sector in bytes.
    #[serde(rename = "physical_sector_size")]
    pub physical_sector_bytes: u32,
    /// The push, which tells the manifest from that of another push of the same bytes.
    pub push: String,
    /// Name of the file that was pushed, without its folder.
    pub source: String,
    /// When it was pushed, in seconds since 1970, by the clock of the machine.
    pub pushed: u64,
    /// The disk on which it was based, in the same repository.
    pub base: Option<String>,
    /// The point of the disk's change tracking that was started for this push.
    pub point: Option<String>,
}

/// A chunk of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// What it is stored as.
    pub key: ChunkKey,
    /// Length of the object in bytes.
    pub object_bytes: u32,
}

/// A manifest; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Manifest {
    facts: Facts,
    /// First chunk of the disk, and first entry of `chunks`.
    runs: Vec<(u64, usize)>,
    chunks: Vec<Chunk>,
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(bytes.get(at..at.checked_add(8)?)?.try_into().ok()?))
}

impl Manifest {
    /// A manifest of these chunks: each with its number on the disk, ascending.
    ///
    /// # Panics
    /// The numbers do not ascend.
    pub fn new(facts: Facts, chunks: impl IntoIterator<Item = (u64, Chunk)>) -> Self {
        let mut made = Self { facts, runs: Vec::new(), chunks: Vec::new() };
        let mut next = None;
        for (number, chunk) in chunks {
            assert!(next.is_none_or(|next| number >= next), "chunks of a manifest must ascend");
            if next != Some(number) {
                made.runs.push((number, made.chunks.len()));
            }
            made.chunks.push(chunk);
            next = Some(number + 1);
        }
        made
    }

    /// What is known of the disk.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// Chunks that hold data.
    pub fn chunks(&self) -> &[Chunk] {
        &self.chunks
    }

    /// Chunks that hold data, with their numbers on the disk, in their order.
    pub fn numbered(&self) -> impl Iterator<Item = (u64, &Chunk)> {
        self.runs.iter().enumerate().flat_map(move |(run, &(first, at))| {
            let end = self.end_of(run);
            (first..).zip(&self.chunks[at..end])
        })
    }

    fn end_of(&self, run: usize) -> usize {
        self.runs.get(run + 1).map_or(self.chunks.len(), |&(_, at)| at)
    }

    /// A chunk of the disk; `None` if it reads as zeros.
    pub fn chunk(&self, number: u64) -> Option<&Chunk> {
        let run = self.runs.partition_point(|&(first, _)| first <= number).checked_sub(1)?;
        let (first, at) = self.runs[run];
        let at = at.checked_add(usize::try_from(number - first).ok()?)?;
        (at < self.end_of(run)).then(|| &self.chunks[at])
    }

    /// The first run of chunks with data that ends after a chunk: its chunks from this one on.
    pub fn next_run(&self, number: u64) -> Option<Range<u64>> {
        let after = self.runs.partition_point(|&(first, _)| first <= number);
        let ranges = (after.saturating_sub(1)..self.runs.len()).map(|run| {
            let (first, at) = self.runs[run];
            first..first + (self.end_of(run) - at) as u64
        });
        ranges.map(|range| range.start.max(number)..range.end).find(|range| !range.is_empty())
    }

    /// Bytes of the objects of its chunks. A chunk that occurs several times is stored once.
    pub fn stored_bytes(&self) -> u64 {
        let chunks: HashSet<(ChunkKey, u32)> =
            self.chunks.iter().map(|chunk| (chunk.key, chunk.object_bytes)).collect();
        chunks.iter().map(|(_, object_bytes)| u64::from(*object_bytes)).sum()
    }

    /// Length of a chunk of the disk in bytes.
    pub fn chunk_bytes(&self, number: u64) -> usize {
        chunk_bytes(self.facts.size_bytes, number)
    }

    /// Tells the contents of the disk from all others: the root of the tree of digests.
    pub fn contents_id(&self) -> Digest {
        let mut context = Context::new(&SHA256);
        context.update(b"diskwright contents 1");
        context.update(&self.facts.size_bytes.to_le_bytes());
        for (number, chunk) in self.numbered() {
            context.update(&number.to_le_bytes());
            context.update(&chunk.key.digest);
        }
        let mut id = [0; 32];
        id.copy_from_slice(context.finish().as_ref());
        id
    }

    /// The contents id as a UUID of version 8 (RFC 9562, section 5.8), for children to record.
    pub fn contents_uuid(&self) -> [u8; 16] {
        let mut id = [0; 16];
        id.copy_from_slice(&self.contents_id()[..16]);
        (id[6], id[8]) = (id[6] & 0x0F | 0x80, id[8] & 0x3F | 0x80);
        id
    }

    /// The bytes of the manifest.
    pub fn to_bytes(&self) -> Vec<u8> {
        // Numbers and strings can always be written as JSON.
        let facts = serde_json::to_vec(&self.facts).unwrap_or_default();
        let mut bytes = vec![0; HEAD_BYTES];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&(facts.len() as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&(self.runs.len() as u64).to_le_bytes());
        bytes[24..32].copy_from_slice(&(self.chunks.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&facts);
        for (run, &(first, at)) in self.runs.iter().enumerate() {
            bytes.extend_from_slice(&first.to_le_bytes());
            bytes.extend_from_slice(&((self.end_of(run) - at) as u64).to_le_bytes());
        }
        for chunk in &self.chunks {
            bytes.extend_from_slice(&chunk.key.digest);
            bytes.extend_from_slice(&chunk.key.push.0.to_le_bytes());
            bytes.extend_from_slice(&chunk.object_bytes.to_le_bytes());
        }
        let sum = digest(&SHA256, &bytes[HEAD_BYTES..]);
        bytes[32..64].copy_from_slice(sum.as_ref());
        bytes
    }

    /// Reads a manifest.
    ///
    /// # Errors
    /// What is wrong with it, and what was expected.
    pub fn of_bytes(bytes: &[u8]) -> Result<Self, String> {
        let short = || "it ends within its head".to_owned();
        let head = bytes.get(..HEAD_BYTES).ok_or_else(short)?;
        if &head[..8] != MAGIC {
            return Err("it does not begin as a manifest".into());
        }
        let word = number(head, 8).ok_or_else(short)?;
        let (version, facts_len) = (word as u32, (word >> 32) as usize);
        if version != VERSION {
            return Err(format!("it has version {version}, and this program knows version {VERSION}"));
        }
        let (runs, chunks) = (number(head, 16).ok_or_else(short)?, number(head, 24).ok_or_else(short)?);
        let most = DISK_BYTES_MAX / CHUNK_BYTES;
        if facts_len > FACTS_MAX || runs > chunks || chunks > most {
            return Err(format!("its head says {runs} runs with {chunks} chunks, and at most {most} can be"));
        }
        let (runs, chunks) = (runs as usize, chunks as usize);
        let expected = HEAD_BYTES + facts_len + runs * RUN_BYTES + chunks * CHUNK_ENTRY_BYTES;
        if bytes.len() != expected {
            return Err(format!("it has {} bytes, and its head says {expected}", bytes.len()));
        }
        if digest(&SHA256, &bytes[HEAD_BYTES..]).as_ref() != &head[32..] {
            return Err("its bytes do not have the digest in its head".into());
        }
        let (facts, rest) = bytes[HEAD_BYTES..].split_at(facts_len);
        let facts: Facts = serde_json::from_slice(facts).map_err(|error| format!("its facts: {error}"))?;
        check_facts(&facts)?;
        let (run_bytes, chunk_bytes) = rest.split_at(runs * RUN_BYTES);
        let runs = read_runs(run_bytes, &facts, chunks)?;
        let chunks = chunk_bytes.as_chunks::<CHUNK_ENTRY_BYTES>().0.iter().map(read_chunk);
        Ok(Self { facts, runs, chunks: chunks.collect::<Result<_, _>>()? })
    }
}

/// Length of a chunk of a disk in bytes.
pub(super) fn chunk_bytes(size_bytes: u64, number: u64) -> usize {
    number.checked_mul(CHUNK_BYTES).map_or(0, |at| size_bytes.saturating_sub(at).min(CHUNK_BYTES)) as usize
}

fn check_facts(facts: &Facts) -> Result<(), String> {
    let Facts { size_bytes, logical_sector_bytes, physical_sector_bytes, .. } = *facts;
    let is_sector = |bytes: u32| bytes.is_power_of_two() && (512..=4096).contains(&bytes);
    if !is_sector(logical_sector_bytes) || !is_sector(physical_sector_bytes) {
        return Err(format!("sectors of {logical_sector_bytes} and {physical_sector_bytes} bytes"));
    }
    if size_bytes == 0 || size_bytes > DISK_BYTES_MAX || !size_bytes.is_multiple_of(logical_sector_bytes.into()) {
        return Err(format!("a disk of {size_bytes} bytes; expected whole sectors, and at most 64 TiB"));
    }
    Ok(())
}

/// The runs of a manifest, as first chunk and first entry.
fn read_runs(bytes: &[u8], facts: &Facts, chunks: usize) -> Result<Vec<(u64, usize)>, String> {
    let end = facts.size_bytes.div_ceil(CHUNK_BYTES);
    let (mut runs, mut entry, mut next) = (Vec::with_capacity(bytes.len() / RUN_BYTES), 0_usize, 0);
    for pair in bytes.as_chunks::<RUN_BYTES>().0 {
        let (first, count) = (number(pair, 0).unwrap_or(0), number(pair, 8).unwrap_or(0));
        let until = first.checked_add(count).filter(|until| *until <= end && count > 0);
        let Some(until) = until else {
            return Err(format!("a run of {count} chunks at {first}, on a disk of {end}"));
        };
        if first < next {
            return Err(format!("a run at chunk {first}, after one that ends at {}", next - 1));
        }
        runs.push((first, entry));
        // No overflow: runs do not touch, so their chunks are at most those of the disk.
        entry += count as usize;
        next = until + 1;
    }
    if entry != chunks {
        return Err(format!("its runs have {entry} chunks, and it lists {chunks}"));
    }
    Ok(runs)
}

fn read_chunk(entry: &[u8; CHUNK_ENTRY_BYTES]) -> Result<Chunk, String> {
    let mut digest = [0; 32];
    digest.copy_from_slice(&entry[..32]);
    let push = PushId(number(entry, 32).unwrap_or(0));
    let object_bytes = u32::from_le_bytes([entry[40], entry[41], entry[42], entry[43]]);
    if !(2..=CHUNK_OBJECT_MAX).contains(&object_bytes) {
        return Err(format!("a chunk whose object has {object_bytes} bytes"));
    }
    Ok(Chunk { key: ChunkKey { digest, push }, object_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn facts(size_bytes: u64) -> Facts {
        Facts {
            size_bytes,
            logical_sector_bytes: 512,
            physical_sector_bytes: 4096,
            push: PushId(7).to_string(),
            source: "vm.vhdx".into(),
            pushed: 1_700_000_000,
            base: None,
            point: Some("push-1".into()),
        }
    }

    fn chunk(seed: u64) -> Chunk {
        let digest = std::array::from_fn(|at| (seed.wrapping_mul(0x9e37_79b9) >> (at % 8)) as u8);
        Chunk { key: ChunkKey { digest, push: PushId(seed) }, object_bytes: 2 + (seed % 1000) as u32 }
    }

    fn made(numbers: &[u64]) -> Manifest {
        Manifest::new(facts(100 * CHUNK_BYTES - 512), numbers.iter().map(|&number| (number, chunk(number))))
    }

    proptest! {
        #[test]
        fn it_is_read_as_it_was_written(numbers in proptest::collection::btree_set(0..100_u64, 0..60)) {
            let numbers: Vec<u64> = numbers.into_iter().collect();
            let manifest = made(&numbers);
            let found = Manifest::of_bytes(&manifest.to_bytes());
            prop_assert_eq!(found.as_ref(), Ok(&manifest));
            prop_assert_eq!(manifest.numbered().map(|(number, _)| number).collect::<Vec<_>>(), numbers.clone());
            for number in 0..102 {
                let expected = numbers.contains(&number).then(|| chunk(number));
                prop_assert_eq!(manifest.chunk(number).copied(), expected);
                let run = manifest.next_run(number);
                prop_assert_eq!(run.clone().map(|run| run.start), numbers.iter().copied().find(|found| *found >= number));
                for within in run.into_iter().flatten() {
                    prop_assert!(numbers.contains(&within));
                }
            }
        }

        #[test]
        fn a_damaged_one_is_refused(at in 0..2000_usize, bits in 1..=255_u8) {
            let mut bytes = made(&[1, 2, 3, 50]).to_bytes();
            let at = at % bytes.len();
            bytes[at] ^= bits;
            prop_assert!(Manifest::of_bytes(&bytes).is_err());
            prop_assert!(Manifest::of_bytes(&bytes[..at]).is_err());
        }
    }

    #[test]
    fn one_that_lies_is_refused() {
        let good = made(&[1, 2, 50]);
        let sealed = |mut bytes: Vec<u8>| {
            let sum = digest(&SHA256, &bytes[HEAD_BYTES..]);
            bytes[32..64].copy_from_slice(sum.as_ref());
            Manifest::of_bytes(&bytes).unwrap_err()
        };
        let with = |change: &dyn Fn(&mut Facts)| {
            let mut facts = facts(100 * CHUNK_BYTES - 512);
            change(&mut facts);
            Manifest::of_bytes(&Manifest::new(facts, [(1, chunk(1))]).to_bytes()).unwrap_err()
        };
        assert!(with(&|facts| facts.size_bytes = 0).contains("whole sectors"));
        assert!(with(&|facts| facts.size_bytes = 513).contains("whole sectors"));
        assert!(with(&|facts| facts.size_bytes = u64::MAX - 511).contains("whole sectors"));
        assert!(with(&|facts| facts.logical_sector_bytes = 0).contains("sectors of 0"));
        assert!(with(&|facts| facts.size_bytes = 4096).contains("a run of 1 chunks at 1, on a disk of 1"));
        let runs_at = HEAD_BYTES + serde_json::to_vec(good.facts()).unwrap().len();
        for (at, value, why) in [
            (runs_at, 99, "a run of 2 chunks at 99"),
            (runs_at, u64::MAX, "a run of 2 chunks at"),
            (runs_at + 8, 0, "a run of 0 chunks"),
            (runs_at + 8, u64::MAX, "chunks at 1"),
            (runs_at + 8, 49, "a run at chunk 50, after one that ends at 50"),
            (runs_at + 8, 3, "its runs have 4 chunks, and it lists 3"),
        ] {
            let mut bytes = good.to_bytes();
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            let error = sealed(bytes);
            assert!(error.contains(why), "{value}: {error}");
        }
        let mut bytes = good.to_bytes();
        let end = bytes.len();
        bytes[end - 4..].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(sealed(bytes).contains("a chunk whose object has 4294967295 bytes"));
        for (at, what) in [(12, "its head says"), (16, "its head says"), (24, "its head says"), (8, "version")] {
            let mut bytes = good.to_bytes();
            bytes[at..at + 4].copy_from_slice(&[0xFF; 4]);
            let error = Manifest::of_bytes(&bytes).unwrap_err();
            assert!(error.contains(what), "{at}: {error}");
        }
    }

    #[test]
    fn the_contents_id_is_of_the_contents_alone() {
        let one = made(&[1, 2, 50]);
        let mut others: Vec<(u64, Chunk)> = one.numbered().map(|(number, chunk)| (number, *chunk)).collect();
        others.iter_mut().for_each(|(_, chunk)| (chunk.key.push, chunk.object_bytes) = (PushId(77), 9));
        let same = Manifest::new(Facts { source: "other".into(), ..one.facts().clone() }, others.clone());
        assert_eq!(same.contents_id(), one.contents_id());
        others[0].0 = 0;
        assert_ne!(Manifest::new(one.facts().clone(), others).contents_id(), one.contents_id());
        let larger = Manifest::new(facts(100 * CHUNK_BYTES), one.numbered().map(|(number, chunk)| (number, *chunk)));
        assert_ne!(larger.contents_id(), one.contents_id());
        assert_eq!((one.chunk_bytes(98), one.chunk_bytes(99)), (CHUNK_BYTES as usize, CHUNK_BYTES as usize - 512));
        assert_eq!((one.chunk_bytes(100), one.chunk_bytes(u64::MAX)), (0, 0));
    }
}
