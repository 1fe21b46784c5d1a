//! A qcow2 with compressed clusters that is written in one pass, from its front to its end.
//!
//! ```text
//!   0        1
//!   ┌────────┬────────────────────────────────────┬──────────┬─────────────────┬────────────────┐
//!   │ header │ compressed data, whole clusters,   │ L1 table │ refcount blocks │ refcount table │
//!   │        │ L2 tables, as they become complete │          │                 │                │
//!   └────────┴────────────────────────────────────┴──────────┴─────────────────┴────────────────┘
//!     last
//! ```
//!
//! Compressed data follow each other byte by byte. A cluster that does not become shorter is stored
//! whole, at the next multiple of the cluster size. An L2 table is appended when a cluster of the
//! next one comes. A refcount counts how many clusters of the disk have data in a cluster of the
//! file.
//!
//! Memory: the present L2 table, 8 bytes for each L2 table and 2 for each cluster of the file.

use super::{
    Invalid, REFCOUNT_TABLE_MAX_BYTES, RefcountWidth, Result,
    extensions::END_MARK,
    features::Features,
    header::{Compression, Encryption, Header, Place, V3_BYTES},
    table::{Geometry, L1Entry, L2Entry},
};

/// Cluster size of the file, in bytes.
pub const COMPRESSED_CLUSTER_BYTES: u64 = 64 << 10;
const CLUSTER_BITS: u32 = 16;
const HEADER_BYTES: u32 = V3_BYTES as u32 + 8;
const STRUCTURE: &str = "new qcow2 image";
/// Refcounts of 16 bits.
const REFCOUNT_ORDER: u32 = 4;

/// Lays out the file. The caller appends what the functions put into their buffers, from
/// [`COMPRESSED_CLUSTER_BYTES`] on, and writes the header of [`CompressedWriter::finish`] at last.
#[derive(Debug)]
pub struct CompressedWriter {
    size_bytes: u64,
    geometry: Geometry,
    width: RefcountWidth,
    /// Offset of the next byte of the file.
    at: u64,
    l1: Vec<u64>,
    /// Index of the L2 table that is being filled, and its entries.
    table: (usize, Vec<u64>),
    counts: Vec<u16>,
}

impl CompressedWriter {
    /// A writer for a disk of this size.
    ///
    /// # Errors
    /// If the disk is too large for clusters of 64 KiB, which reach 2 PiB.
    pub fn new(size_bytes: u64) -> Result<Self> {
        let geometry = Geometry { cluster_bits: CLUSTER_BITS, version: 3, is_extended: false, has_data_file: false };
        let entries = geometry.l1_entries(size_bytes).max(1);
        let Some(width) = RefcountWidth::of_order(REFCOUNT_ORDER).filter(|_| entries <= super::L1_MAX_BYTES / 8) else {
            let found = format!("a disk of {size_bytes} bytes in clusters of {COMPRESSED_CLUSTER_BYTES}");
            return Err(Invalid::new(STRUCTURE, 0, found, "at most 2 PiB"));
        };
        let table = (0, vec![0; geometry.l2_entries() as usize]);
        let at = COMPRESSED_CLUSTER_BYTES;
        Ok(Self { size_bytes, geometry, width, at, l1: vec![0; entries as usize], table, counts: vec![1] })
    }

    /// Appends a cluster of the disk to `out`: compressed data, or the whole cluster if `packed` is
    /// as long. Clusters must come in ascending order.
    ///
    /// # Errors
    /// For a cluster that does not lie behind the one before, or beyond the end of the disk.
    pub fn cluster(&mut self, number: u64, packed: &[u8], out: &mut Vec<u8>) -> Result<()> {
        let (table, index) = (number / self.geometry.l2_entries(), (number % self.geometry.l2_entries()) as usize);
        let table = usize::try_from(table).unwrap_or(usize::MAX);
        if table < self.table.0 || table >= self.l1.len() || packed.is_empty() {
            return Err(Invalid::new(STRUCTURE, 0, format!("cluster {number}"), "clusters in ascending order"));
        }
        if table > self.table.0 {
            self.end_table(out);
            self.table.0 = table;
        }
        let entry = if packed.len() as u64 == COMPRESSED_CLUSTER_BYTES {
            self.align(out);
            L2Entry::data(self.at)
        } else {
            L2Entry::Compressed { offset_bytes: self.at, len_bytes: packed.len() as u64, is_copied: false }
        };
        self.table.1[index] = entry.to_words(&self.geometry).0;
        self.append(packed, out);
        Ok(())
    }

    /// Appends the tables to `out`, and returns the header and the extensions, for offset 0.
    ///
    /// # Errors
    /// If the file is longer than refcounts can count.
    pub fn finish(mut self, out: &mut Vec<u8>) -> Result<Vec<u8>> {
        self.end_table(out);
        self.align(out);
        let l1 = Place { offset_bytes: self.at, len_bytes: self.l1.len() as u64 * 8 };
        let words: Vec<u8> = std::mem::take(&mut self.l1).iter().flat_map(|word| word.to_be_bytes()).collect();
        self.append(&words, out);
        self.align(out);
        // The blocks and the table count themselves.
        let first = self.at / COMPRESSED_CLUSTER_BYTES;
        let per_block = self.width.per_block(COMPRESSED_CLUSTER_BYTES);
        let (mut blocks, mut table_clusters) = (1, 1);
        while (first + blocks + table_clusters).div_ceil(per_block) > blocks
            || (blocks * 8).div_ceil(COMPRESSED_CLUSTER_BYTES) > table_clusters
        {
            blocks = (first + blocks + table_clusters).div_ceil(per_block);
            table_clusters = (blocks * 8).div_ceil(COMPRESSED_CLUSTER_BYTES);
        }
        if table_clusters * COMPRESSED_CLUSTER_BYTES > REFCOUNT_TABLE_MAX_BYTES {
            return Err(Invalid::new(STRUCTURE, 0, format!("a file of {first} clusters"), "a shorter file"));
        }
        self.counts.resize((first + blocks + table_clusters) as usize, 1);
        let blocks_at = self.at;
        let counts = std::mem::take(&mut self.counts);
        let start = out.len();
        out.extend(counts.iter().flat_map(|count| count.to_be_bytes()));
        out.resize(start + (blocks * COMPRESSED_CLUSTER_BYTES) as usize, 0);
        let start = out.len();
        out.extend((0..blocks).flat_map(|block| (blocks_at + block * COMPRESSED_CLUSTER_BYTES).to_be_bytes()));
        out.resize(start + (table_clusters * COMPRESSED_CLUSTER_BYTES) as usize, 0);
        let header = Header {
            version: 3,
            backing_name: None,
            cluster_bits: CLUSTER_BITS,
            size_bytes: self.size_bytes,
            encryption: Encryption::None,
            l1,
            refcount_table: Place {
                offset_bytes: blocks_at + blocks * COMPRESSED_CLUSTER_BYTES,
                len_bytes: table_clusters * COMPRESSED_CLUSTER_BYTES,
            },
            snapshots: 0,
            snapshots_offset_bytes: 0,
            features: Features::default(),
            refcount_width: self.width,
            header_bytes: HEADER_BYTES,
            compression: Compression::Deflate,
        };
        Ok([&header.to_bytes()[..], &END_MARK].concat())
    }

    fn end_table(&mut self, out: &mut Vec<u8>) {
        if self.table.1.iter().all(|&word| word == 0) {
            return;
        }
        self.align(out);
        self.l1[self.table.0] = L1Entry::copied(self.at).0;
        let bytes: Vec<u8> = self.table.1.iter().flat_map(|word| word.to_be_bytes()).collect();
        self.append(&bytes, out);
        self.table.1.fill(0);
    }

    /// Appends zeros up to the next cluster of the file.
    fn align(&mut self, out: &mut Vec<u8>) {
        let next = self.at.next_multiple_of(COMPRESSED_CLUSTER_BYTES);
        out.resize(out.len() + (next - self.at) as usize, 0);
        self.at = next;
    }

    /// Appends bytes, and counts them once in each cluster of the file in which they lie.
    fn append(&mut self, bytes: &[u8], out: &mut Vec<u8>) {
        let end = self.at + bytes.len() as u64;
        let clusters = (self.at / COMPRESSED_CLUSTER_BYTES) as usize..end.div_ceil(COMPRESSED_CLUSTER_BYTES) as usize;
        self.counts.resize(self.counts.len().max(clusters.end), 0);
        self.counts[clusters].iter_mut().for_each(|count| *count = count.saturating_add(1));
        out.extend_from_slice(bytes);
        self.at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clusters_must_come_in_order() {
        let mut writer = CompressedWriter::new(2 << 30).unwrap();
        let mut out = Vec::new();
        writer.cluster(9000, &[1; 100], &mut out).unwrap();
        assert!(writer.cluster(1, &[1; 100], &mut out).is_err());
        assert!(writer.cluster(1 << 20, &[1; 100], &mut out).is_err());
        assert!(CompressedWriter::new(u64::MAX).is_err());
    }

    #[test]
    fn every_byte_of_the_file_is_counted() {
        let mut writer = CompressedWriter::new(2 << 30).unwrap();
        let mut out = vec![0; COMPRESSED_CLUSTER_BYTES as usize];
        for number in 0..40 {
            writer.cluster(number, &vec![7; if number % 9 == 8 { 65536 } else { 20000 }], &mut out).unwrap();
        }
        writer.cluster(20000, &[3; 5], &mut out).unwrap();
        let front = writer.finish(&mut out).unwrap();
        let header = Header::parse(&front).unwrap();
        let table = header.refcount_table;
        assert_eq!(table.offset_bytes + table.len_bytes, out.len() as u64);
        let at = u64::from_be_bytes(out[table.offset_bytes as usize..][..8].try_into().unwrap()) as usize;
        let count = |cluster: usize| header.refcount_width.get(&out[at..at + 65536], cluster);
        // Three of 20,000 bytes and a part of the fourth.
        assert_eq!((count(0), count(1), count(out.len() / 65536 - 1), count(out.len() / 65536)), (1, 4, 1, 0));
    }
}
