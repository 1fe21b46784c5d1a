//! Compressed clusters: deflate and zstd, and the clusters that were decompressed last.
//!
//! A cluster decompresses into a buffer of its own size. A stream that would give more is stopped
//! there, as the data of the next cluster may follow in the last sector. A stream that gives less
//! is damaged. So a decompression bomb costs one cluster, 2 MiB at most, and the window of its
//! compression (zstd: 8 MiB at most).

use diskwright_format::qcow2::Compression;
use diskwright_store::sync::Mutex;
use flate2::{Decompress, FlushDecompress, Status};
use ruzstd::decoding::StreamingDecoder;
use std::{
    collections::VecDeque,
    io::{Cursor, Read},
    sync::{Arc, PoisonError},
};

/// Memory for clusters that were decompressed last, in bytes. Two clusters are always kept.
const KEPT_BYTES: usize = 4 << 20;
/// Most clusters that are kept, as they are searched one by one.
const KEPT_MAX: usize = 32;
/// Largest window of a zstd frame: what RFC 8878 asks of a decoder. The cluster is smaller.
const ZSTD_WINDOW_MAX_BYTES: u64 = 8 << 20;

/// Decompresses `data` into all of `out`.
///
/// # Errors
/// A sentence without a subject: what was found.
pub(super) fn decompress(compression: Compression, data: &[u8], out: &mut [u8]) -> Result<(), String> {
    match compression {
        Compression::Deflate => inflate(data, out),
        Compression::Zstd => unzstd(data, out),
        Compression::Unknown(kind) => Err(format!("compression type {kind}")),
    }
}

fn inflate(data: &[u8], out: &mut [u8]) -> Result<(), String> {
    // Raw deflate without the header of zlib. QEMU's window has 4 KiB; a larger one reads it too.
    let mut stream = Decompress::new(false);
    loop {
        let (taken, given) = (stream.total_in() as usize, stream.total_out() as usize);
        if given == out.len() {
            return Ok(());
        }
        let left = data.get(taken..).unwrap_or(&[]);
        let status = stream.decompress(left, &mut out[given..], FlushDecompress::Finish);
        let status = status.map_err(|error| format!("a deflate stream with an error after {given} bytes ({error})"))?;
        let now = stream.total_out() as usize;
        let is_stuck = now == given && stream.total_in() as usize == taken;
        if now < out.len() && (is_stuck || status == Status::StreamEnd) {
            return Err(format!("a deflate stream of {now} bytes"));
        }
    }
}

fn unzstd(data: &[u8], out: &mut [u8]) -> Result<(), String> {
    let mut data = Cursor::new(data);
    let mut given = 0;
    // One frame after the other, until the cluster is full.
    while given < out.len() {
        let frame = StreamingDecoder::new_with_max_window_size(&mut data, ZSTD_WINDOW_MAX_BYTES);
        let mut frame = frame.map_err(|error| format!("no zstd frame after {given} bytes ({error})"))?;
        let before = given;
        while given < out.len() {
            let read = frame.read(&mut out[given..]);
            match read.map_err(|error| format!("a zstd frame with an error after {given} bytes ({error})"))? {
                0 => break,
                count => given += count,
            }
        }
        if given == before {
            return Err(format!("an empty zstd frame after {given} bytes"));
        }
    }
    Ok(())
}

/// The clusters that were decompressed last.
#[derive(Debug)]
pub(super) struct DecompressedClusters {
    /// By number of the cluster, the one that was used last at the end.
    clusters: Mutex<VecDeque<(u64, Arc<[u8]>)>>,
    max: usize,
}

impl DecompressedClusters {
    pub fn new(cluster_bytes: u64) -> Self {
        let max = (KEPT_BYTES / cluster_bytes as usize).clamp(2, KEPT_MAX);
        Self { clusters: Mutex::default(), max }
    }

    pub fn get(&self, cluster: u64) -> Option<Arc<[u8]>> {
        let mut clusters = self.clusters.lock().unwrap_or_else(PoisonError::into_inner);
        let index = clusters.iter().position(|(number, _)| *number == cluster)?;
        let found = clusters.remove(index)?;
        let bytes = Arc::clone(&found.1);
        clusters.push_back(found);
        Some(bytes)
    }

    pub fn put(&self, cluster: u64, bytes: Arc<[u8]>) {
        let mut clusters = self.clusters.lock().unwrap_or_else(PoisonError::into_inner);
        clusters.retain(|(number, _)| *number != cluster);
        while clusters.len() >= self.max {
            clusters.pop_front();
        }
        clusters.push_back((cluster, bytes));
    }
}
