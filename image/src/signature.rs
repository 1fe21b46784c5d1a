//! Restores the bytes by which a format is recognised, where only they are damaged.
//!
//! ```text
//!   name of the file, or the user ─▶ format ─▶ its signature laid over the file, in memory
//!                                                    │ the image opens: its header is right
//!                                                    ▼
//!                                    a finding, whose repair writes the signature
//! ```
//!
//! A VHDX has the identifier at offset 0, a qcow2 its magic number and version, a VDI signature and
//! version, a sparse extent of a VMDK its magic number. (The cookie of a VHD lies under the
//! checksum of its footer, and comes back with it.) Nothing of that is a guess: all other fields of
//! the header are validated by the open, the format is named from outside, and a file that has any
//! valid signature of the format is left alone.
//!
//! A qcow2 of version 3 has the length of its header where version 2 has none. So the fields behind
//! say which version it was.

use crate::{
    CheckReport, Format, ImageError, Result,
    findings::{Change, CheckOutcome, Finding, Findings, Severity},
};
use diskwright_store::{OverlayStore, Store};
use std::{collections::BTreeMap, sync::Arc};

/// Bytes of a file in which signatures lie, and that are laid over it.
const PAGE_BYTES: usize = 4096;

/// Signatures of a format, of which one is in each file: offset and bytes.
type Signatures = &'static [(usize, &'static [u8])];

const VHDX: Signatures = &[(0, b"vhdxfile")];
const QCOW2: Signatures = &[(0, b"QFI\xfb\0\0\0\x03"), (0, b"QFI\xfb\0\0\0\x02")];
const VDI: Signatures = &[(0x40, &[0x7f, 0x10, 0xda, 0xbe, 1, 0, 1, 0])];
const VMDK: Signatures =
    &[(0, b"KDMV"), (0, b"COWD"), (0, &[0xbe, 0xba, 0xfe, 0xca, 0, 0, 0, 0]), (0, b"# Disk DescriptorFile")];

/// A signature that was lost: its offset in the file, and its bytes.
type Lost = (usize, &'static [u8]);

/// Opens an image or checks it, by the code of its format.
pub(crate) type ByFormat<'a, T> = &'a dyn Fn(Arc<dyn Store>) -> Result<T>;

/// The signature that a file of this format has lost; `None` if it has one, or if more than that is
/// damaged. `open` opens an image for reading.
///
/// # Errors
/// `Io`.
pub(crate) fn lost(format: Format, store: &Arc<dyn Store>, open: ByFormat<'_, ()>) -> Result<Option<Lost>> {
    let Some(page) = first_page(&**store)? else { return Ok(None) };
    let all = match format {
        Format::Vhdx => VHDX,
        Format::Qcow2 => QCOW2,
        Format::Vdi => VDI,
        Format::Vmdk => VMDK,
        Format::Raw | Format::Vhd => &[],
    };
    if all.iter().any(|&(at, bytes)| page[at..].starts_with(bytes)) {
        return Ok(None);
    }
    let possible = match format {
        Format::Qcow2 if is_version_3(&page) => &all[..1],
        Format::Qcow2 => &all[1..],
        _ => all,
    };
    for &(at, bytes) in possible {
        match open(laid_over(store, &page, (at, bytes))?) {
            Ok(()) => return Ok(Some((at, bytes))),
            Err(error @ ImageError::Io { .. }) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(None)
}

/// The first page of a file; `None` if it is shorter.
fn first_page(store: &dyn Store) -> Result<Option<Vec<u8>>> {
    let io = |error| ImageError::io("read the start of the file", store, 0, error);
    if store.is_block_device() || store.len_bytes().map_err(io)? < PAGE_BYTES as u64 {
        return Ok(None);
    }
    let mut page = vec![0; PAGE_BYTES];
    store.read_at(&mut page, 0).map_err(io)?;
    Ok(Some(page))
}

/// Whether the fields behind those of version 2 are those of version 3: refcount order, and length
/// of the header.
fn is_version_3(page: &[u8]) -> bool {
    let word =
        |at: usize| page.get(at..at + 4).map_or(0, |word| u32::from_be_bytes([word[0], word[1], word[2], word[3]]));
    word(96) <= 6 && (104..=1 << 21).contains(&word(100)) && word(100).is_multiple_of(8)
}

fn laid_over(store: &Arc<dyn Store>, page: &[u8], (at, bytes): Lost) -> Result<Arc<dyn Store>> {
    let mut page = page.to_vec();
    page[at..at + bytes.len()].copy_from_slice(bytes);
    let pages = BTreeMap::from([(0, page.into_boxed_slice())]);
    let overlay = OverlayStore::new(Arc::clone(store), pages, 0);
    Ok(Arc::new(overlay.map_err(|error| ImageError::io("lay pages over the file", &**store, 0, error))?))
}

/// The check of a file that has lost its signature: that of the file with the signature, and the
/// loss. `None` if the signature is not what is damaged.
///
/// # Errors
/// Those of `check`; `Io`.
pub(crate) fn examine(
    format: Format,
    store: &Arc<dyn Store>,
    for_repair: bool,
    open: ByFormat<'_, ()>,
    check: ByFormat<'_, CheckReport>,
) -> Result<Option<CheckOutcome>> {
    let (Some((at, bytes)), Some(page)) = (lost(format, store, open)?, first_page(&**store)?) else { return Ok(None) };
    let report = check(laid_over(store, &page, (at, bytes))?)?;
    let text = |bytes: &[u8]| format!("\"{}\"", bytes.escape_ascii());
    let found = text(&page[at..at + bytes.len()]);
    let message = format!(
        "The signature of {format} at offset {at} is damaged: found {found}, expected {}. The rest of the header is right.",
        text(bytes)
    );
    let finding = Finding::new(Severity::Corrupt, at as u64, "signature", found, text(bytes)).says(message);
    let mut findings = Findings::new(for_repair);
    findings.add_repairable(finding, "the signature is written", vec![Change::Write(at as u64, bytes.to_vec())]);
    let CheckOutcome { report: mut with, actions } = findings.finish(CheckReport::default());
    with.findings.extend(report.findings);
    Ok(Some(CheckOutcome { report: CheckReport { findings: with.findings, ..report }, actions }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateOptions, repair_image};
    use diskwright_store::MemoryStore;

    fn options(format: Format) -> CreateOptions {
        let driver = format.driver();
        CreateOptions {
            disk_type: driver.usual_type,
            size_bytes: 4 << 20,
            block_bytes: None,
            logical_sector_bytes: driver.logical_sectors_bytes[0],
            physical_sector_bytes: driver.physical_sector_bytes,
            parent: None,
            preallocate: false,
            disk_id: None,
            own: Default::default(),
        }
    }

    fn damaged(format: Format, damage: impl Fn(&mut [u8])) -> (Vec<u8>, Arc<dyn Store>) {
        let store = Arc::new(MemoryStore::new(format.driver().name));
        format.driver().create(Arc::clone(&store) as Arc<dyn Store>, &options(format)).unwrap();
        let sound = store.to_vec();
        let mut bytes = sound.clone();
        damage(&mut bytes);
        (sound, Arc::new(MemoryStore::with_bytes(format.driver().name, bytes)))
    }

    fn bytes_of(store: &dyn Store) -> Vec<u8> {
        let mut bytes = vec![0; store.len_bytes().unwrap() as usize];
        store.read_at(&mut bytes, 0).unwrap();
        bytes
    }

    #[test]
    fn a_lost_signature_comes_back() {
        for (format, at, len) in [
            (Format::Vhdx, 0, 8),
            (Format::Qcow2, 0, 4),
            (Format::Qcow2, 4, 4),
            (Format::Qcow2, 0, 8),
            (Format::Vdi, 0x40, 4),
            (Format::Vdi, 0x44, 4),
            (Format::Vmdk, 0, 4),
        ] {
            for byte in [0, 0xff, 0x5a] {
                let (sound, store) = damaged(format, |bytes| bytes[at..at + len].fill(byte));
                assert!(format.driver().open(Arc::clone(&store), false, 512).is_err());
                let report = format.driver().check(Arc::clone(&store)).unwrap();
                assert_eq!(report.worst(), Some(Severity::Corrupt), "{format} at {at}");
                let after = repair_image(format, &store, false, &mut |_| true).unwrap().unwrap();
                assert_eq!(after.worst(), None, "{format} at {at}: {:?}", after.findings);
                let is_same = |at: usize| format != Format::Vhdx || !(64 << 10..192 << 10).contains(&at);
                let repaired = bytes_of(&*store);
                assert!((0..sound.len()).filter(|&at| is_same(at)).all(|at| sound[at] == repaired[at]), "{format}");
            }
        }
    }

    #[test]
    fn a_header_that_is_damaged_besides_is_left_alone() {
        for (format, at) in [(Format::Qcow2, 20), (Format::Vdi, 0x4c), (Format::Vmdk, 73), (Format::Qcow2, 79)] {
            let (_, store) = damaged(format, |bytes| {
                bytes[if format == Format::Vdi { 0x40 } else { 0 }] ^= 0xff;
                bytes[at] ^= 0xf0;
            });
            let before = bytes_of(&*store);
            let told = repair_image(format, &store, true, &mut |_| true);
            assert!(told.is_err() || told.unwrap().unwrap().worst() == Some(Severity::Corrupt), "{format}");
            assert_eq!(bytes_of(&*store), before, "{format}");
        }
        // Zeros have no header.
        for &format in Format::ALL {
            let zeros: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("zeros", vec![0; 1 << 20]));
            let open = |store| format.driver().open(store, false, 512).map(drop);
            let found = if format == Format::Raw { None } else { lost(format, &zeros, &open).unwrap() };
            assert_eq!(found, None, "{format}");
        }
    }
}
