//! What a bucket holds: manifests of pushed disks, chunks, and seals of images.
//!
//! ```text
//!   first byte % 4
//!     0   the rest is a manifest
//!     1   a small manifest with changed bytes, and its digest repaired
//!     2   the rest is a seal
//!     3   the rest is a chunk
//! ```
//!
//! The promises: nothing panics, what is accepted is written as the same bytes again, and a
//! manifest that is accepted lists each chunk once, in order, within the disk.

use diskwright_object::{
    Seal,
    repository::{CHUNK_BYTES, Chunk, ChunkKey, Facts, Manifest, PushId},
};
use ring::digest::{SHA256, digest};

/// Where a manifest has its digest, and where what the digest covers begins.
const DIGEST: std::ops::Range<usize> = 32..64;

fn chunk(number: u64) -> Chunk {
    Chunk { key: ChunkKey { digest: [number as u8; 32], push: PushId(number) }, object_bytes: 100 }
}

/// A disk of 20 chunks with two runs.
fn sample() -> Manifest {
    let facts = Facts {
        size_bytes: 20 * CHUNK_BYTES,
        logical_sector_bytes: 512,
        physical_sector_bytes: 4096,
        push: "1".into(),
        source: "vm.vhdx".into(),
        pushed: 0,
        base: None,
        point: None,
    };
    Manifest::new(facts, [3, 4, 5, 18, 19].map(|number| (number, chunk(number))))
}

/// Each three bytes of the input are a place and the byte that is put there.
fn damaged(data: &[u8]) -> Vec<u8> {
    let mut bytes = sample().to_bytes();
    for piece in data.as_chunks::<3>().0 {
        let place = usize::from(u16::from_le_bytes([piece[0], piece[1]])) % bytes.len();
        bytes[place] = piece[2];
    }
    let sum = digest(&SHA256, &bytes[DIGEST.end..]);
    bytes[DIGEST].copy_from_slice(sum.as_ref());
    bytes
}

fn manifest(bytes: &[u8]) {
    let Ok(manifest) = Manifest::of_bytes(bytes) else { return };
    assert_eq!(Manifest::of_bytes(&manifest.to_bytes()).as_ref(), Ok(&manifest));
    let end = manifest.facts().size_bytes.div_ceil(CHUNK_BYTES);
    let mut next = 0;
    for (number, chunk) in manifest.numbered() {
        assert!((next..end).contains(&number), "chunk {number} of {end}");
        assert_eq!(manifest.chunk(number), Some(chunk));
        assert!(manifest.next_run(number).is_some_and(|run| run.start <= number && number < run.end));
        assert!((1..=CHUNK_BYTES as usize).contains(&manifest.chunk_bytes(number)));
        next = number + 1;
    }
    assert!(manifest.chunk(end).is_none() && manifest.next_run(end).is_none());
    assert_eq!(manifest.numbered().count(), manifest.chunks().len());
    let _ = manifest.stored_bytes();
}

fn seal(bytes: &[u8]) {
    if let Ok(seal) = Seal::of_bytes(bytes) {
        assert_eq!(seal.to_bytes(), bytes);
    }
}

/// Manifests, chunks and seals of a hostile server.
pub fn objects(data: &[u8]) {
    let Some((which, rest)) = data.split_first() else { return };
    match which % 4 {
        0 => manifest(rest),
        1 => manifest(&damaged(rest)),
        2 => seal(rest),
        _ => {
            // Its digest is that of no bytes that a fuzzer finds.
            let unpacked = chunk(1).unpack(rest, 4096);
            assert!(unpacked.is_err());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_whole_is_accepted() {
        assert_eq!(Manifest::of_bytes(&damaged(&[])), Ok(sample()));
        manifest(&damaged(&[]));
        // A longer run is found by the count of the chunks, below the digest.
        let first_run = DIGEST.end + facts_len() + 8;
        let place = (first_run as u16).to_le_bytes();
        assert!(Manifest::of_bytes(&damaged(&[place[0], place[1], 4])).unwrap_err().contains("lists"));
    }

    /// Length of the facts, as the head says it.
    fn facts_len() -> usize {
        let bytes = sample().to_bytes();
        u32::from_le_bytes([bytes[12], bytes[13], bytes[14], bytes[15]]) as usize
    }
}
