//! Which format a file has, and opening it.
//!
//! ```text
//!   "vhdxfile" at 0                                   VHDX
//!   "conectix" at 0, or in the last 512 (511) bytes   VHD
//!   neither, and the name ends in .vhd/.vhdx/...      an error: a damaged image is not a raw disk of garbage
//!   neither                                           raw
//! ```
//!
//! A raw disk is whatever its guest wrote, so its guest can make it look like another format. Whoever knows better says the
//! format; probing is for when nobody does.

use crate::{CheckReport, Format, Image, ImageError, Result, raw::RawImage, vhd, vhdx};
use diskwright_format::vhd::{FOOTER_BYTES, FOOTER_COOKIE, OLD_FOOTER_BYTES};
use diskwright_store::Store;
use std::{path::Path, sync::Arc};

const VHDX_SIGNATURE: &[u8; 8] = b"vhdxfile";

/// The format that a path's extension promises, whatever its case; `None` when it promises nothing.
pub fn format_of_extension(path: &Path) -> Option<Format> {
    let extension = path.extension()?.to_str()?.to_ascii_lowercase();
    match extension.as_str() {
        "raw" | "img" | "bin" | "dd" => Some(Format::Raw),
        "vhd" | "avhd" => Some(Format::Vhd),
        "vhdx" | "avhdx" => Some(Format::Vhdx),
        _ => None,
    }
}

/// The format of what `store` holds, by its signatures.
///
/// # Errors
/// `NotAnImage` when there is no signature and the name promises one; `Io`.
pub fn probe(store: &dyn Store) -> Result<Format> {
    let len_bytes = store.len_bytes().map_err(|e| ImageError::io("learn the length of the file", store, 0, e))?;
    let signature_at = |offset_bytes: Option<u64>| -> Result<[u8; 8]> {
        let mut signature = [0; 8];
        if let Some(offset_bytes) = offset_bytes.filter(|offset_bytes| len_bytes - offset_bytes >= 8) {
            store
                .read_at(&mut signature, offset_bytes)
                .map_err(|e| ImageError::io("read the signature of the image", store, offset_bytes, e))?;
        }
        Ok(signature)
    };
    let head = signature_at(Some(0))?;
    if head == *VHDX_SIGNATURE {
        return Ok(Format::Vhdx);
    }
    if head == *FOOTER_COOKIE {
        return Ok(Format::Vhd);
    }
    for footer_bytes in [FOOTER_BYTES, OLD_FOOTER_BYTES] {
        if signature_at(len_bytes.checked_sub(footer_bytes as u64))? == *FOOTER_COOKIE {
            return Ok(Format::Vhd);
        }
    }
    match format_of_extension(store.name()) {
        Some(promised @ (Format::Vhd | Format::Vhdx)) => Err(ImageError::NotAnImage {
            path: store.name().to_owned(),
            found: format!("the name promises {promised}, but the file has no signature of that format"),
            expected: match promised {
                Format::Vhdx => "\"vhdxfile\" at offset 0; if these are the bytes of a raw disk, say so (--format raw, or --source-format raw of convert)".into(),
                _ => "\"conectix\" at offset 0 or in the last 512 bytes (was the file copied completely?); if these are the bytes of a raw disk, say so (--format raw, or --source-format raw of convert)".into(),
            },
        }),
        _ => Ok(Format::Raw),
    }
}

/// Opens an image of `format`, or of the format that [`probe`] finds. `raw_sector_bytes` is the logical sector of a raw disk.
pub fn open(
    store: Arc<dyn Store>,
    format: Option<Format>,
    writable: bool,
    raw_sector_bytes: u32,
) -> Result<Arc<dyn Image>> {
    let format = format.map_or_else(|| probe(&*store), Ok)?;
    Ok(match format {
        Format::Raw => Arc::new(RawImage::new(store, writable, raw_sector_bytes)?),
        Format::Vhd => Arc::new(vhd::open(store, writable)?),
        Format::Vhdx => Arc::new(vhdx::open(store, writable)?),
    })
}

/// Checks an image of `format`, or of the format that [`probe`] finds. Changes nothing. A raw image has nothing to check.
pub fn check(store: Arc<dyn Store>, format: Option<Format>) -> Result<(Format, CheckReport)> {
    let format = format.map_or_else(|| probe(&*store), Ok)?;
    let report = match format {
        Format::Raw => CheckReport::default(),
        Format::Vhd => vhd::check(store)?,
        Format::Vhdx => vhdx::check(store)?,
    };
    Ok((format, report))
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;

    fn probed(name: &str, bytes: Vec<u8>) -> Result<Format> {
        probe(&MemoryStore::with_bytes(name, bytes))
    }

    fn with(len: usize, at: usize, signature: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; len];
        bytes[at..at + signature.len()].copy_from_slice(signature);
        bytes
    }

    #[test]
    fn signatures_decide() {
        assert_eq!(probed("x", with(4096, 0, b"vhdxfile")).unwrap(), Format::Vhdx);
        assert_eq!(probed("x", with(4096, 0, b"conectix")).unwrap(), Format::Vhd);
        assert_eq!(probed("x", with(4096, 4096 - 512, b"conectix")).unwrap(), Format::Vhd);
        assert_eq!(probed("x", with(4095, 4095 - 511, b"conectix")).unwrap(), Format::Vhd);
        assert_eq!(probed("x", with(4096, 1024, b"conectix")).unwrap(), Format::Raw);
        for len in 0..20 {
            assert_eq!(probed("x", vec![0; len]).unwrap(), Format::Raw);
        }
    }

    #[test]
    fn a_damaged_image_is_never_a_raw_disk() {
        for name in ["a.vhd", "a.AVHD", "a.vhdx", "b/c.Avhdx"] {
            assert!(matches!(probed(name, vec![0; 4096]), Err(ImageError::NotAnImage { .. })), "{name}");
        }
        let store = Arc::new(MemoryStore::with_bytes("a.vhdx", vec![0; 4096]));
        assert_eq!(open(store, Some(Format::Raw), false, 512).unwrap().info().format, Format::Raw);
    }

    #[test]
    fn extensions() {
        for (name, format) in [
            ("a.raw", Some(Format::Raw)),
            ("a.IMG", Some(Format::Raw)),
            ("a.bin", Some(Format::Raw)),
            ("a.dd", Some(Format::Raw)),
            ("a.Vhd", Some(Format::Vhd)),
            ("a.avhd", Some(Format::Vhd)),
            ("a.vhdx", Some(Format::Vhdx)),
            ("a.AVHDX", Some(Format::Vhdx)),
            ("a.qcow2", None),
            ("vhdx", None),
        ] {
            assert_eq!(format_of_extension(Path::new(name)), format, "{name}");
        }
    }
}
