//! Tests of whole qcow2 images. Modules:
//!
//! ```text
//!   mod.rs        an image that is built by hand; reading a whole disk
//!   qemu.rs       images by qemu-img and qemu-io with every option, read by us and by qemu-img
//!   checking.rs   checks and repairs, compared with qemu-img
//!   new_image.rs  metadata of new images, checked by us and by QEMU
//!   writing.rs    random sessions against a model; what QEMU finds of ours, and we of QEMU's
//!   snapshots.rs  the same with internal snapshots: their bytes never change
//!   many_free.rs  more free clusters than fit into a list
//!   subclusters.rs  images with extended L2 entries
//!   hostile.rs    damaged and malicious files
//! ```

mod checking;
mod hostile;
mod main_tables;
mod many_free;
mod new_image;
mod qemu;
mod snapshots;
mod subclusters;
mod writing;

use super::{Qcow2Image, open};
use crate::{BlockState, Image};
use diskwright_format::qcow2::{MAGIC, features};
use diskwright_store::{MemoryStore, Store};
use std::sync::Arc;

/// All bytes of the disk, without a backing file.
fn contents(image: &dyn Image) -> Result<Vec<u8>, crate::ImageError> {
    let (size, block_bytes) = (image.size_bytes(), image.info().block_bytes);
    let mut bytes = vec![0; size as usize];
    let mut states = vec![BlockState::Absent; size.div_ceil(block_bytes) as usize];
    image.block_states(0, &mut states)?;
    for (block, (state, out)) in (0..).zip(states.iter().zip(bytes.chunks_mut(block_bytes as usize))) {
        match *state {
            BlockState::Data { store, offset_bytes } | BlockState::Shared { store, offset_bytes } => {
                image.stores()[usize::from(store)].read_at(out, offset_bytes).unwrap();
            }
            BlockState::Compressed => image.read_compressed(block, 0, out)?,
            BlockState::Damaged => return Err(image.damage(block)?),
            _ => {}
        }
    }
    Ok(bytes)
}

/// An image of version 3 in clusters of 64 KiB, built by hand.
///
/// ```text
///   0 header   1 refcount table   2 refcount block   3 L1 table   4 L2 table   5 ... data
/// ```
struct Built {
    bytes: Vec<u8>,
}

const CLUSTER: u64 = 1 << 16;
const L1: u64 = 3 * CLUSTER;
const L2: u64 = 4 * CLUSTER;
const COPIED: u64 = 1 << 63;
const SIZE: u64 = 8 << 20;

impl Built {
    /// A disk of 8 MiB whose first cluster has data: 0x11 everywhere.
    fn new() -> Self {
        let mut built = Self { bytes: vec![0; 6 * CLUSTER as usize] };
        built.put(0, &MAGIC);
        built.put(4, &3u32.to_be_bytes());
        built.put(20, &16u32.to_be_bytes());
        built.put(24, &SIZE.to_be_bytes());
        built.put(36, &1u32.to_be_bytes());
        built.put(40, &L1.to_be_bytes());
        built.put(48, &CLUSTER.to_be_bytes());
        built.put(56, &1u32.to_be_bytes());
        built.put(96, &4u32.to_be_bytes());
        built.put(100, &112u32.to_be_bytes());
        built.put(CLUSTER, &(2 * CLUSTER).to_be_bytes());
        for cluster in 0..6 {
            built.put(2 * CLUSTER + cluster * 2, &1u16.to_be_bytes());
        }
        built.put(L1, &(L2 | COPIED).to_be_bytes());
        built.put(L2, &((5 * CLUSTER) | COPIED).to_be_bytes());
        built.bytes[5 * CLUSTER as usize..].fill(0x11);
        built
    }

    fn put(&mut self, at: u64, value: &[u8]) -> &mut Self {
        self.bytes[at as usize..at as usize + value.len()].copy_from_slice(value);
        self
    }

    fn put_u64(&mut self, at: u64, value: u64) -> &mut Self {
        self.put(at, &value.to_be_bytes())
    }

    fn incompatible(&mut self, bits: u64) -> &mut Self {
        self.put_u64(72, bits)
    }

    fn store(&self) -> Arc<dyn Store> {
        Arc::new(MemoryStore::with_bytes("disk.qcow2", self.bytes.clone()))
    }

    fn open(&self) -> Result<Qcow2Image, crate::ImageError> {
        open(vec![self.store()], false, None)
    }

    /// The error of opening the image, as text.
    fn refusal(&self) -> String {
        self.open().map(drop).expect_err("it should be refused").to_string()
    }

    /// The state of the first block.
    fn first(&self) -> BlockState {
        let mut state = [BlockState::Absent];
        self.open().unwrap().block_states(0, &mut state).unwrap();
        state[0]
    }

    /// Why the first block is damaged.
    fn damage(&self) -> String {
        assert_eq!(self.first(), BlockState::Damaged);
        self.open().unwrap().damage(0).unwrap().to_string()
    }
}

#[test]
fn a_block_has_data_or_is_absent() {
    let image = Built::new().open().unwrap();
    let mut states = [BlockState::Zero; 4];
    image.block_states(0, &mut states).unwrap();
    assert_eq!(states[..2], [BlockState::data(5 * CLUSTER), BlockState::Absent]);
    image.block_states(SIZE / CLUSTER - 1, &mut states).unwrap();
    assert_eq!(states, [BlockState::Absent; 4]);
    image.block_states(u64::MAX, &mut states).unwrap();
    assert_eq!((image.next_block(0, u64::MAX).unwrap(), image.next_block(1, u64::MAX).unwrap()), (Some(0), None));
    assert!(image.sector_bitmap(0).unwrap().is_full() && image.sector_bitmap(1).unwrap().is_empty());
    let bytes = contents(&image).unwrap();
    assert!(bytes[..CLUSTER as usize].iter().all(|&byte| byte == 0x11));
    assert!(bytes[CLUSTER as usize..].iter().all(|&byte| byte == 0));
}

#[test]
fn the_last_cluster_of_a_file_may_be_cut() {
    let mut built = Built::new();
    built.bytes.truncate(5 * CLUSTER as usize + 700);
    let bytes = contents(&built.open().unwrap()).unwrap();
    assert!(bytes[..700].iter().all(|&byte| byte == 0x11) && bytes[700..].iter().all(|&byte| byte == 0));
}

#[test]
fn a_subcluster_has_data_or_zeros_or_nothing() {
    let mut built = Built::new();
    built.incompatible(features::EXTENDED_L2).put_u64(L2 + 8, 1 << 33 | 1 << 31 | 1);
    let image = built.open().unwrap();
    assert_eq!(image.info().block_bytes, 2048);
    let mut states = [BlockState::Damaged; 33];
    image.block_states(0, &mut states).unwrap();
    assert_eq!(states[..3], [BlockState::data(5 * CLUSTER), BlockState::Zero, BlockState::Absent]);
    assert_eq!(states[30..], [BlockState::Absent, BlockState::data(6 * CLUSTER - 2048), BlockState::Absent]);
    image.block_states(31, &mut states[..1]).unwrap();
    assert_eq!(states[0], BlockState::data(6 * CLUSTER - 2048));
}

#[test]
fn clusters_of_a_data_file_are_where_they_are_on_the_disk() {
    let mut built = Built::new();
    built.incompatible(features::EXTERNAL_DATA).put_u64(L2, COPIED).put_u64(L2 + 16, (2 * CLUSTER) | COPIED);
    built.put_u64(L2 + 24, (2 * CLUSTER) | COPIED).put_u64(L2 + 32, (4 * CLUSTER) | COPIED);
    let data = || Arc::new(MemoryStore::with_bytes("disk.data", vec![7; 3 * CLUSTER as usize - 10])) as Arc<dyn Store>;
    let image = open(vec![built.store(), data()], false, None).unwrap();
    let mut states = [BlockState::Zero; 5];
    image.block_states(0, &mut states).unwrap();
    let placed = |offset_bytes| BlockState::Data { store: 1, offset_bytes };
    let (absent, damaged) = (BlockState::Absent, BlockState::Damaged);
    assert_eq!(states, [placed(0), absent, placed(2 * CLUSTER), damaged, damaged]);
    let mut bytes = [1; 20];
    image.stores()[1].read_at(&mut bytes, 3 * CLUSTER - 20).unwrap();
    assert_eq!(bytes, [[7; 10], [0; 10]].as_flattened());
    assert!(image.damage(3).unwrap().to_string().contains("196608, the cluster's offset on the disk"));
    assert!(image.damage(4).unwrap().to_string().contains("the length of the data file"));
    assert!(built.refusal().contains("names an external data file"));
    assert!(open(vec![Built::new().store(), data()], false, None).is_err());
}
