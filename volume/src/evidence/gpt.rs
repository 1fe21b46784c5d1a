//! Headers of a GPT, which name their own sector.

use crate::{
    bytes::{le32, le64},
    sighting::{EachSighting, PROOF, Sighting},
};

/// Headers in `bytes`. The two headers of a disk name each other, so that one of a smaller disk
/// that is stored in a file is not taken for one of this disk.
pub(super) fn look(bytes: &[u8], size_bytes: u64, sector_bytes: u32, give: &mut EachSighting<'_>) {
    let sector = u64::from(sector_bytes.max(512));
    let last = (size_bytes / sector).saturating_sub(1);
    for (index, raw) in bytes.chunks_exact(512).enumerate() {
        if raw[..8] != *b"EFI PART" {
            continue;
        }
        let len = le32(raw, 12) as usize;
        if !(92..=512).contains(&len) {
            continue;
        }
        let mut without = raw[..len].to_vec();
        without[16..20].fill(0);
        let (mine, other) = (le64(raw, 24), le64(raw, 32));
        let is_ours = (mine == 1 && other == last) || (mine == last && other == 1);
        if is_ours && crc32fast::hash(&without) == le32(raw, 16) {
            give(Sighting::At {
                within_bytes: index * 512,
                disk_offset_bytes: mine * sector,
                weight: PROOF,
                what: "GPT header",
            });
        }
    }
}
