//! The metadata of a new image of version 3: header, refcounts, and an L1 table without entries.
//!
//! ```text
//!   0         1                2                 ...        (numbers of clusters)
//!   ┌─────────┬────────────────┬─────────────────┬──────────┐
//!   │ front   │ refcount table │ refcount blocks │ L1 table │ end of the file
//!   └─────────┴────────────────┴─────────────────┴──────────┘
//!     header, extensions, name of the backing file
//! ```
//!
//! Every cluster of this metadata has refcount 1, those with the refcounts included. So the number
//! of refcount blocks depends on itself: it is raised until the blocks cover all clusters.
//!
//! The L1 table is a hole of the file. Its length is bounded only by 32 MiB, and zeros are what an
//! empty table has. The rest is bounded by the refcounts of that many clusters.

use super::{
    CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, Invalid, L1_MAX_BYTES, REFCOUNT_TABLE_MAX_BYTES, RefcountWidth, Result,
    extensions,
    features::Features,
    header::{BACKING_NAME_MAX_BYTES, Compression, Encryption, Header, Place, V3_BYTES},
    table::Geometry,
};

const STRUCTURE: &str = "new qcow2 image";

/// Length of the header that is written, in bytes: with the compression type, as QEMU writes it.
const HEADER_BYTES: u32 = V3_BYTES as u32 + 8;

/// The backing file of a new image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// Name of the file, as readers find it.
    pub name: String,
    /// Name of its format: "raw", "qcow2", "vpc" (VHD), "vhdx".
    pub format: String,
}

/// What a new image is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// Width of a refcount.
    pub refcount_width: RefcountWidth,
    /// The backing file of a differencing image.
    pub backing: Option<Backing>,
}

/// The metadata of a new image, as pieces of its file. What is in no piece reads as zeros.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMetadata {
    /// The header, as [`Header::parse`] reads it.
    pub header: Header,
    /// Header, extensions and the name of the backing file, for offset 0. At most one cluster.
    pub front: Vec<u8>,
    /// The refcount table and the refcount blocks, for the offset of the table.
    pub refcounts: Vec<u8>,
    /// Length of the file in bytes: a multiple of the cluster size.
    pub file_bytes: u64,
}

impl NewImage {
    /// Lays out the metadata.
    ///
    /// # Errors
    /// For a cluster size outside the limits; for a disk that needs a longer L1 table than programs
    /// accept; and for a name of the backing file that is empty, too long, or does not fit the
    /// first cluster.
    pub fn metadata(&self) -> Result<NewMetadata> {
        let fail = |found: String, expected: String| Err(Invalid::new(STRUCTURE, 0, found, expected));
        if !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&self.cluster_bits) {
            let expected = format!("{CLUSTER_BITS_MIN} to {CLUSTER_BITS_MAX} (512 bytes to 2 MiB)");
            return fail(format!("{} cluster bits", self.cluster_bits), expected);
        }
        let geometry =
            Geometry { cluster_bits: self.cluster_bits, version: 3, is_extended: false, has_data_file: false };
        let cluster_bytes = geometry.cluster_bytes();
        // An empty disk gets one entry too, so that the table has a place in the file.
        let l1_entries = geometry.l1_entries(self.size_bytes).max(1);
        if l1_entries > L1_MAX_BYTES / 8 {
            let most_bytes = (L1_MAX_BYTES / 8).saturating_mul(geometry.l2_entries()).saturating_mul(cluster_bytes);
            let expected = format!("at most {most_bytes} bytes, or larger clusters");
            return fail(format!("a disk of {} bytes in clusters of {cluster_bytes}", self.size_bytes), expected);
        }
        let l1_clusters = (l1_entries * 8).div_ceil(cluster_bytes);
        let counted = Counted::of(l1_clusters, self.refcount_width, cluster_bytes);
        if counted.table_clusters * cluster_bytes > REFCOUNT_TABLE_MAX_BYTES.max(cluster_bytes) {
            return fail(format!("a refcount table of {} clusters", counted.table_clusters), "at most 8 MiB".into());
        }
        let table_at = cluster_bytes;
        let blocks_at = table_at + counted.table_clusters * cluster_bytes;
        let l1_at = blocks_at + counted.blocks * cluster_bytes;

        let (extensions, name) = match &self.backing {
            None => (extensions::END_MARK.to_vec(), ""),
            Some(backing) => (extensions::with_backing_format(&backing.format), backing.name.as_str()),
        };
        let name_at = u64::from(HEADER_BYTES) + extensions.len() as u64;
        if self.backing.is_some() {
            let most = u64::from(BACKING_NAME_MAX_BYTES).min(cluster_bytes.saturating_sub(name_at));
            if name.is_empty() || name.len() as u64 > most {
                return fail(format!("a backing file name of {} bytes", name.len()), format!("1 to {most}"));
            }
        }
        let header = Header {
            version: 3,
            backing_name: self
                .backing
                .is_some()
                .then_some(Place { offset_bytes: name_at, len_bytes: name.len() as u64 }),
            cluster_bits: self.cluster_bits,
            size_bytes: self.size_bytes,
            encryption: Encryption::None,
            l1: Place { offset_bytes: l1_at, len_bytes: l1_entries * 8 },
            refcount_table: Place { offset_bytes: table_at, len_bytes: counted.table_clusters * cluster_bytes },
            snapshots: 0,
            snapshots_offset_bytes: 0,
            features: Features::default(),
            refcount_width: self.refcount_width,
            header_bytes: HEADER_BYTES,
            compression: Compression::Deflate,
        };
        let front = [&header.to_bytes()[..], &extensions, name.as_bytes()].concat();
        let refcounts = counted.to_bytes(self.refcount_width, cluster_bytes, blocks_at);
        Ok(NewMetadata { header, front, refcounts, file_bytes: l1_at + l1_clusters * cluster_bytes })
    }
}

/// How many clusters the metadata have.
struct Counted {
    table_clusters: u64,
    blocks: u64,
    /// All clusters of the new file.
    clusters: u64,
}

impl Counted {
    fn of(l1_clusters: u64, width: RefcountWidth, cluster_bytes: u64) -> Self {
        let mut blocks: u64 = 1;
        loop {
            let table_clusters = (blocks * 8).div_ceil(cluster_bytes);
            let clusters = 1 + table_clusters + blocks + l1_clusters;
            let needed = clusters.div_ceil(width.per_block(cluster_bytes));
            if needed <= blocks {
                return Self { table_clusters, blocks, clusters };
            }
            blocks = needed;
        }
    }

    /// The table, filled up to whole clusters, and the blocks.
    fn to_bytes(&self, width: RefcountWidth, cluster_bytes: u64, blocks_at: u64) -> Vec<u8> {
        let table_bytes = (self.table_clusters * cluster_bytes) as usize;
        let mut bytes = vec![0; table_bytes + (self.blocks * cluster_bytes) as usize];
        let (table, blocks) = bytes.split_at_mut(table_bytes);
        for (entry, block) in table.chunks_exact_mut(8).zip(0..self.blocks) {
            entry.copy_from_slice(&(blocks_at + block * cluster_bytes).to_be_bytes());
        }
        // A block ends with a whole refcount, so all blocks can be counted through as one.
        for cluster in 0..self.clusters {
            width.set(blocks, cluster as usize, 1);
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::Extensions;
    use proptest::prelude::*;

    fn image(size_bytes: u64, cluster_bits: u32, order: u32) -> NewImage {
        let refcount_width = RefcountWidth::of_order(order).unwrap();
        NewImage { size_bytes, cluster_bits, refcount_width, backing: None }
    }

    fn over(name: &str) -> NewImage {
        let backing = Backing { name: name.into(), format: "raw".into() };
        NewImage { backing: Some(backing), ..image(1 << 30, 16, 4) }
    }

    /// All refcounts that the metadata have, read by their table.
    fn counts(made: &NewMetadata) -> Vec<u64> {
        let (cluster_bytes, table) = (made.header.cluster_bytes(), made.header.refcount_table);
        let mut all = Vec::new();
        for entry in made.refcounts[..table.len_bytes as usize].chunks_exact(8) {
            let at = u64::from_be_bytes(entry.try_into().unwrap());
            if at == 0 {
                break;
            }
            let block = &made.refcounts[(at - table.offset_bytes) as usize..][..cluster_bytes as usize];
            let width = made.header.refcount_width;
            all.extend((0..width.per_block(cluster_bytes)).map(|index| width.get(block, index as usize)));
        }
        all
    }

    #[test]
    fn the_usual_image_has_four_clusters() {
        let made = image(1 << 30, 16, 4).metadata().unwrap();
        assert_eq!((made.file_bytes, made.front.len(), made.refcounts.len()), (4 << 16, 120, 2 << 16));
        assert_eq!(made.header.l1, Place { offset_bytes: 3 << 16, len_bytes: 16 });
    }

    #[test]
    fn the_backing_file_is_named_with_its_format() {
        let made = over("base.raw").metadata().unwrap();
        let header = Header::parse(&made.front).unwrap();
        assert_eq!(header, made.header);
        let name = header.backing_name.unwrap();
        assert_eq!(&made.front[name.offset_bytes as usize..], b"base.raw");
        let area = &made.front[header.header_bytes as usize..name.offset_bytes as usize];
        assert_eq!(Extensions::parse(area, 112).unwrap().backing_format.as_deref(), Some("raw"));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for bad in [
            image(1 << 30, 8, 4),
            image(1 << 30, 22, 4),
            image(u64::MAX, 16, 4),
            image((128 << 30) + 1, 9, 4),
            over(""),
            over(&"n".repeat(1024)),
            NewImage { cluster_bits: 9, ..over(&"n".repeat(400)) },
        ] {
            assert!(bad.metadata().is_err(), "{bad:?}");
        }
        assert!(over(&"n".repeat(1023)).metadata().is_ok());
        assert!(image(128 << 30, 9, 6).metadata().is_ok());
    }

    proptest! {
        #[test]
        fn exactly_the_clusters_of_the_file_have_refcount_1(
            size_bytes in 0u64..1 << 34, cluster_bits in 9u32..=21, order in 0u32..=6
        ) {
            let made = image(size_bytes, cluster_bits, order).metadata().unwrap();
            prop_assert_eq!(&Header::parse(&made.front).unwrap(), &made.header);
            let clusters = (made.file_bytes >> cluster_bits) as usize;
            let counts = counts(&made);
            prop_assert!(counts.len() >= clusters);
            prop_assert!(counts[..clusters].iter().all(|&count| count == 1));
            prop_assert!(counts[clusters..].iter().all(|&count| count == 0));
        }
    }
}
