//! Damaged and malicious files: what is refused, by which name, and at which cost.

use super::*;
use flate2::{Compress, Compression, FlushCompress};

const COMPRESSED: u64 = 1 << 62;

#[test]
fn what_is_not_supported_is_refused_by_name() {
    for (at, value, name) in [
        (72, (1u64 << 5).to_be_bytes().to_vec(), "bit 5 (the image has no name for it)"),
        (32, 1u32.to_be_bytes().to_vec(), "encrypted (AES)"),
        (32, 2u32.to_be_bytes().to_vec(), "encrypted (LUKS)"),
        (32, 7u32.to_be_bytes().to_vec(), "encrypted (method 7)"),
    ] {
        let told = Built::new().put(at, &value).refusal();
        assert!(told.contains(name) && told.contains("not supported"), "{told}");
    }
    let told = Built::new().incompatible(features::COMPRESSION_TYPE).put(104, &[9]).refusal();
    assert!(told.contains("compression type 9"), "{told}");
    let mut named = Built::new();
    named.incompatible(1 << 5).put(112, &[0x68, 0x03, 0xf8, 0x57, 0, 0, 0, 48, 0, 5]).put(122, b"subpixels");
    assert!(named.refusal().contains("bit 5 (subpixels)"));
}

#[test]
fn a_file_of_another_kind_or_length_is_refused() {
    let whole = Built::new();
    for len in 0..4 {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("a", whole.bytes[..len].to_vec()));
        assert!(matches!(open(vec![store], false, None), Err(crate::ImageError::NotAnImage { .. })), "{len}");
    }
    for len in [4, 71, 72, 103, 104, 112, 65536, L1 as usize, L1 as usize + 7] {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("a", whole.bytes[..len].to_vec()));
        assert!(matches!(open(vec![store], false, None), Err(crate::ImageError::Corrupt { .. })), "{len}");
    }
}

#[test]
fn tables_of_gigabytes_cost_nothing() {
    // The longest L1 table lies beyond the end of the file.
    let told = Built::new().put(36, &(4u32 << 20).to_be_bytes()).refusal();
    assert!(told.contains("an L1 table of 33554432 bytes"), "{told}");
    // A disk of 4 PiB needs a longer one.
    assert!(Built::new().put_u64(24, 4 << 50).refusal().contains("at least 8388608"));
    // Snapshots and bitmaps that are not there are only a remark.
    let mut built = Built::new();
    built.put(60, &65536u32.to_be_bytes()).put_u64(64, 0);
    assert!(built.open().unwrap().info().remarks[0].contains("internal snapshots cannot be read"));
    let mut built = Built::new();
    built.put(112, &[0x23, 0x85, 0x28, 0x75, 0, 0, 0, 24]);
    built.put(120, &u32::MAX.to_be_bytes()).put_u64(128, u64::MAX).put_u64(136, u64::MAX);
    assert!(built.open().unwrap().info().remarks[0].contains("bitmaps cannot be read"));
}

#[test]
fn an_invalid_entry_damages_only_its_own_blocks() {
    for (entry, why) in [
        ((9 * CLUSTER) | COPIED, "an offset in the file of 393216 bytes"),
        (1 << 55, "an offset in the file"),
        (CLUSTER | COPIED, "in the refcount table"),
        (L1 | COPIED, "in the L1 table"),
        (COPIED, "no COPIED flag"),
        ((5 * CLUSTER) | 2, "clear"),
        (5 * CLUSTER + 512, "a multiple of the cluster size"),
        (COMPRESSED | (9 * CLUSTER), "an offset in the file"),
        (COMPRESSED | 512, "in the header"),
    ] {
        let mut built = Built::new();
        built.put_u64(L2, entry).put_u64(L2 + 8, (5 * CLUSTER) | COPIED);
        assert!(built.damage().contains(why), "{entry:#x}: {}", built.damage());
        let mut states = [BlockState::Absent; 3];
        built.open().unwrap().block_states(0, &mut states).unwrap();
        assert_eq!(states[1..], [BlockState::data(5 * CLUSTER), BlockState::Absent], "{entry:#x}");
    }
    for (entry, why) in [
        ((9 * CLUSTER) | COPIED, "an offset in the file"),
        (L2 | 1, "clear"),
        (L2 + 512, "a multiple of the cluster size"),
        (L1 | COPIED, "in the L1 table"),
    ] {
        let mut built = Built::new();
        built.put_u64(L1, entry);
        let told = built.damage();
        assert!(told.contains(why) && told.contains("L1 entry"), "{entry:#x}: {told}");
        assert_eq!(built.open().unwrap().next_block(7, 100).unwrap(), Some(7));
    }
}

fn deflated(bytes: &[u8]) -> Vec<u8> {
    let mut stream = Compress::new(Compression::best(), false);
    let mut out = Vec::with_capacity(bytes.len() + 1024);
    stream.compress_vec(bytes, &mut out, FlushCompress::Finish).unwrap();
    out
}

/// An image whose first cluster is compressed and has these bytes at the end of the file.
fn compressed(data: &[u8]) -> Built {
    let mut built = Built::new();
    let place = 5 * CLUSTER + 100;
    let sectors = ((place + data.len() as u64 - 1) / 512 - place / 512).min(255);
    built.bytes.resize((place as usize + data.len()).max(6 * CLUSTER as usize), 0);
    built.put(place, data).put_u64(L2, COMPRESSED | sectors << 54 | place);
    built
}

#[test]
fn a_cluster_never_decompresses_to_more_or_less_than_its_size() {
    let cluster: Vec<u8> = (0..CLUSTER as u32).map(|at| (at / 100) as u8).collect();
    let read = |data: &[u8]| {
        contents(&compressed(data).open().unwrap()).map(|mut bytes| {
            bytes.truncate(CLUSTER as usize);
            bytes
        })
    };
    assert!(read(&deflated(&cluster)).unwrap() == cluster);
    // A bomb: 64 MiB of zeros. The first cluster of them is the cluster.
    assert!(read(&deflated(&vec![0; 64 << 20])).unwrap() == vec![0; CLUSTER as usize]);
    for (data, why) in [
        (deflated(&cluster[1..]), "a deflate stream of 65535 bytes"),
        (deflated(&cluster)[..100].to_vec(), "a deflate stream"),
        (vec![0xff; 600], "a deflate stream with an error after 0 bytes"),
    ] {
        let told = read(&data).unwrap_err().to_string();
        assert!(told.contains(why) && told.contains("65536"), "{told}");
    }
}

#[test]
fn a_bad_zstd_cluster_is_an_error() {
    for data in [
        vec![],
        vec![0; 600],
        vec![0x28, 0xb5, 0x2f, 0xfd, 0, 0xff, 1, 0, 0],
        vec![0x28, 0xb5, 0x2f, 0xfd, 0x20, 0, 1, 0, 0],
    ] {
        let mut built = compressed(&data);
        built.incompatible(features::COMPRESSION_TYPE).put(104, &[1]);
        let told = contents(&built.open().unwrap()).unwrap_err().to_string();
        assert!(told.contains("zstd frame"), "{told}");
    }
}

#[test]
fn marks_are_told() {
    let mut built = Built::new();
    let remarks = built.incompatible(features::DIRTY | features::CORRUPT).open().unwrap().info().remarks.clone();
    assert!(remarks[0].contains("marked dirty") && remarks[1].contains("marked corrupt"), "{remarks:?}");
}
