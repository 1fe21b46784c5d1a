//! Checks what clusters hold, as far as the format can know it: compressed data decompress, and no
//! cluster of the disk is cut by the end of the file.
//!
//! Only the tables of the disk are read here, not those of snapshots. A compressed cluster is
//! decompressed once.

use super::{
    compressed, corrupt,
    layout::{Layout, Mapped},
    tables::Tables,
};
use crate::{
    error::{ImageError, Result},
    findings::{Change, FINDINGS_MAX, Finding, Findings, Severity, corruption},
};
use diskwright_format::qcow2::{Invalid, L2Entry};
use diskwright_store::Store;

/// Checks all clusters of the disk.
///
/// # Errors
/// `Io`.
pub(super) fn check(store: &dyn Store, findings: &mut Findings) -> Result<()> {
    // What makes this fail was reported before.
    let layout = match Layout::read(store, None, None) {
        Ok(layout) if !layout.has_data_file() => layout,
        Ok(_) | Err(ImageError::Corrupt { .. } | ImageError::Unsupported { .. }) => return Ok(()),
        Err(error) => return Err(error),
    };
    let (file_bytes, cluster_bytes) = (layout.file_bytes(), layout.geometry.cluster_bytes());
    let mut out = vec![0; cluster_bytes as usize];
    let (mut faults, mut is_cut) = (Vec::new(), None);
    Tables { store, layout: &layout }.each_entry(0, u64::MAX, &mut |cluster, found| {
        let Ok(entry) = found else { return Ok(true) };
        let on_disk = (layout.size_bytes() - cluster * cluster_bytes).min(cluster_bytes);
        let ends = |sub: u64| (sub + 1).saturating_mul(layout.geometry.unit_bytes()).min(on_disk);
        for sub in 0..layout.geometry.subclusters() {
            match layout.place(cluster, sub, entry) {
                Ok(Mapped::Data(at)) if at - sub * layout.geometry.unit_bytes() + ends(sub) > file_bytes => {
                    is_cut = Some(cluster);
                }
                Ok(Mapped::Compressed { offset_bytes, len_bytes }) if sub == 0 => {
                    let mut data = vec![0; len_bytes.min(file_bytes - offset_bytes) as usize];
                    let read = store.read_at(&mut data, offset_bytes);
                    read.map_err(|error| ImageError::io("read a compressed cluster", store, offset_bytes, error))?;
                    if let Err(what) = compressed::decompress(layout.front.header.compression, &data, &mut out) {
                        let expected = format!("cluster {cluster}, of {cluster_bytes} bytes");
                        let invalid = Invalid::new("compressed cluster", 0, what, expected);
                        faults.push((cluster, corrupt(store, offset_bytes, invalid)));
                    }
                }
                _ => {}
            }
        }
        Ok(faults.len() <= FINDINGS_MAX)
    })?;
    let tables = Tables { store, layout: &layout };
    let is_child = layout.front.backing_name.is_some();
    for (cluster, fault) in faults {
        let (_, entry_at) = tables.entry(cluster)?;
        let start = cluster * cluster_bytes;
        let costs = start..(start + cluster_bytes).min(layout.size_bytes());
        let has_zeros = layout.geometry.version >= 3;
        let entry = if is_child && has_zeros { L2Entry::zeros() } else { L2Entry::Unallocated };
        let what = match is_child && !has_zeros {
            true => format!("cluster {cluster} is given up: the parent's data show there"),
            false => format!("cluster {cluster} is given up: it reads as zeros"),
        };
        let (word, parts) = entry.to_words(&layout.geometry);
        let bytes = [word.to_be_bytes(), parts.to_be_bytes()].concat();
        let change = Change::Write(entry_at, bytes[..layout.geometry.l2_entry_bytes() as usize].to_vec());
        findings.give_up(corruption(fault)?, Some(costs), what, vec![change]);
    }
    if let Some(cluster) = is_cut {
        let end = file_bytes.next_multiple_of(cluster_bytes);
        let message = format!(
            "Cluster {cluster} is cut by the end of the file, and reads as zeros from there: was the file copied completely?"
        );
        let found = format!("a file of {file_bytes} bytes");
        let finding = Finding::new(Severity::Corrupt, file_bytes, "cluster", found, format!("at least {end}"));
        findings.add_repairable(
            finding.says(message),
            "the file gets zeros up to the end of the cluster",
            vec![Change::Extend(end)],
        );
    }
    Ok(())
}
