//! Compares XenServer's batmap with its checksum, the BAT and the sector bitmaps.

use super::{batmap::Batmap, bitmap, layout::Blocks, table};
use crate::{
    ImageError, Result,
    findings::{Change, Finding, Findings, Severity},
};
use diskwright_store::Store;

/// Adds a finding for each contradiction.
///
/// # Errors
/// `Io`.
pub(super) fn check_batmap(
    batmap: &Batmap,
    store: &dyn Store,
    blocks: &Blocks,
    data_end: u64,
    findings: &mut Findings,
) -> Result<()> {
    // At most 128 KiB: the size of the disk is validated, and the map lies in the file.
    let mut map = vec![0; batmap.checked_bytes as usize];
    let at = batmap.header.map_offset;
    store.read_at(&mut map, at).map_err(|e| ImageError::io("read XenServer's batmap", store, at, e))?;
    let checksum = batmap.header.checksum_of(&map);
    if checksum != batmap.header.checksum {
        let message = format!(
            "The checksum of XenServer's batmap is {:#010x}, but that of its map is {checksum:#010x}: XenServer will not write to this disk.",
            batmap.header.checksum
        );
        let (found, expected) = (format!("{:#010x}", batmap.header.checksum), format!("{checksum:#010x}"));
        let structure = "checksum of XenServer's batmap";
        let finding = Finding::new(Severity::Corrupt, batmap.header_offset + 24, structure, found, expected);
        // A clear bit says nothing, so a map of zeros is right for every disk.
        let empty = vec![0; map.len()];
        let checksum = batmap.header.checksum_of(&empty).to_be_bytes().to_vec();
        findings.add_repairable(
            finding.says(message),
            "all bits of the batmap are cleared; XenServer sets them again",
            vec![Change::Write(at, empty), Change::Write(batmap.header_offset + 24, checksum)],
        );
        return Ok(());
    }
    let mut left = map.clone();
    table::scan(store, blocks, blocks.count, |block, entry| {
        let (index, bit) = ((block / 8) as usize, 0x80u8 >> (block % 8));
        let piece = blocks.place(entry);
        if map.get(index).is_none_or(|byte| byte & bit == 0) || blocks.fault_of(&piece, data_end).is_some() {
            return Ok(true);
        }
        left[index] &= !bit;
        let bits = bitmap::read(store, blocks, &piece)?;
        if !bits.is_full() {
            let message = format!(
                "XenServer's batmap says that block {block} is full, but {} of {} bits of its bitmap are clear: XenServer reads other data there.",
                bits.sectors - bits.count(),
                bits.sectors
            );
            let expected = "a full bitmap, as the batmap says";
            let finding = Finding::new(Severity::Corrupt, piece.bitmap_offset, "sector bitmap", "clear bits", expected);
            findings.add(finding.says(message));
        }
        Ok(true)
    })?;
    let without_space = (0..blocks.count.min(left.len() as u64 * 8))
        .filter(|block| left[(block / 8) as usize] & 0x80 >> (block % 8) != 0);
    for block in without_space {
        let message = format!("XenServer's batmap says that block {block} is full, but the block has no space.");
        let found = format!("a full block {block}, which has no space");
        let expected = "a clear bit";
        let finding = Finding::new(Severity::Corrupt, at + block / 8, "XenServer's batmap", found, expected);
        findings.add(finding.says(message));
    }
    Ok(())
}
