//! The object of a chunk: a byte that says how it is stored, and the bytes.
//!
//! ```text
//!   0   the bytes
//!   1   the bytes, compressed by zstd (RFC 8878)
//! ```
//!
//! Nothing of a chunk is shown before its digest was compared.

use super::{
    keys::{Digest, hex},
    manifest::{CHUNK_BYTES, Chunk},
};
use ring::digest::{SHA256, digest};
use std::io;

const STORED: u8 = 0;
const ZSTD: u8 = 1;
/// A level at which one processor compresses some hundred MB/s.
const LEVEL: i32 = 3;

/// SHA-256 of bytes.
pub(crate) fn digest_of(bytes: &[u8]) -> Digest {
    let mut sum = [0; 32];
    sum.copy_from_slice(digest(&SHA256, bytes).as_ref());
    sum
}

/// Makes objects of chunks. Keeps memory from one to the next.
pub(super) struct Packer(zstd::bulk::Compressor<'static>);

impl Packer {
    pub(super) fn new() -> io::Result<Self> {
        zstd::bulk::Compressor::new(LEVEL).map(Self)
    }

    /// The object of a chunk.
    pub(super) fn pack(&mut self, bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut object = vec![0; 1 + zstd::zstd_safe::compress_bound(bytes.len())];
        let len = self.0.compress_to_buffer(bytes, &mut object[1..])?;
        if len < bytes.len() {
            (object[0], _) = (ZSTD, object.truncate(1 + len));
        } else {
            object.truncate(1 + bytes.len());
            object[0] = STORED;
            object[1..].copy_from_slice(bytes);
        }
        Ok(object)
    }
}

/// The bytes of a chunk of `len` bytes, compared with its digest.
///
/// # Errors
/// What is wrong with the object.
pub(crate) fn unpack(object: &[u8], len: usize, expected: &Digest) -> Result<Vec<u8>, String> {
    debug_assert!(len as u64 <= CHUNK_BYTES);
    let bytes = match object.split_first() {
        Some((&STORED, bytes)) => bytes.to_vec(),
        Some((&ZSTD, packed)) => {
            zstd::bulk::decompress(packed, len).map_err(|error| format!("it cannot be decompressed: {error}"))?
        }
        Some((how, _)) => return Err(format!("it is stored in a way that is not known ({how})")),
        None => return Err("it is empty".into()),
    };
    if bytes.len() != len {
        return Err(format!("it holds {} bytes, and {len} were expected", bytes.len()));
    }
    let found = digest_of(&bytes);
    if found != *expected {
        return Err(format!("its bytes have the digest {}, and {} was expected", hex(&found), hex(expected)));
    }
    Ok(bytes)
}

impl Chunk {
    /// The bytes of the chunk, of which there are `len`, compared with its digest.
    ///
    /// # Errors
    /// What is wrong with the object.
    pub fn unpack(&self, object: &[u8], len: usize) -> Result<Vec<u8>, String> {
        unpack(object, len, &self.key.digest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_is_read_as_it_was_written_and_damage_is_found() {
        let mut packer = Packer::new().unwrap();
        let text: Vec<u8> = (0..100_000_u32).map(|at| (at / 100) as u8).collect();
        let noise: Vec<u8> = (0..25_000_u64)
            .flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ at << 40).to_le_bytes()[..4].to_vec())
            .collect();
        for (bytes, how) in [(&text, ZSTD), (&noise, STORED)] {
            let object = packer.pack(bytes).unwrap();
            assert_eq!(object[0], how);
            assert!(object.len() <= bytes.len() + 1);
            let sum = digest_of(bytes);
            assert_eq!(unpack(&object, bytes.len(), &sum).as_ref(), Ok(bytes));
            assert!(unpack(&object, bytes.len() - 1, &sum).is_err(), "longer than it may be");
            assert!(unpack(&object, bytes.len() + 1, &sum).unwrap_err().contains("were expected"));
            assert!(unpack(&object[..object.len() / 2], bytes.len(), &sum).is_err());
            let mut damaged = object.clone();
            let middle = damaged.len() / 2;
            damaged[middle] ^= 1;
            assert!(unpack(&damaged, bytes.len(), &sum).is_err());
            damaged[0] = 9;
            assert!(unpack(&damaged, bytes.len(), &sum).unwrap_err().contains("not known (9)"));
        }
        assert!(unpack(&[], 5, &digest_of(b"")).unwrap_err().contains("empty"));
    }

    /// A few bytes that say they are gigabytes.
    #[test]
    fn a_chunk_that_would_fill_the_memory_is_refused() {
        let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 19).unwrap();
        let object: Vec<u8> = std::iter::once(ZSTD).chain(bomb).collect();
        assert!(unpack(&object, 4096, &digest_of(&[0; 4096])).unwrap_err().contains("decompressed"));
    }
}
