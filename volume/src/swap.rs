//! Swap areas of Linux: all but the first page is free while no system uses the area.
//!
//! The signature stands at the end of the first page. A system that is suspended to the area has
//! replaced it by another one. Whether a running or paused system uses the area cannot be seen in
//! it; `volume.rs` decides that by the other volumes.

use crate::{
    bytes::{le32, text, uuid_text},
    identity::{Identity, SWAP},
    read::Window,
    reason::{LeftAlone, ReasonKind, Stop},
    sink::Sink,
};
use std::ops::Range;

/// Sizes of a page on machines that run Linux.
const PAGES: [u64; 5] = [4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10];
const SIGNATURE_BYTES: u64 = 10;
const SUSPENDED: [&[u8]; 6] =
    [b"S1SUSPEND", b"S2SUSPEND", b"ULSUSPEND", b"LINHIB0001", b"\xed\xc3\x02\xe9\x98\x56\xe5\x0c", b"TOI"];

/// The signature at the end of the first page.
enum Mark {
    Area,
    Old,
    Suspended,
}

fn mark(window: &Window<'_>) -> Option<(u64, Mark)> {
    PAGES.into_iter().find_map(|page_bytes| {
        let found: [u8; SIGNATURE_BYTES as usize] = window.array(page_bytes - SIGNATURE_BYTES)?;
        let mark = match &found {
            b"SWAPSPACE2" => Mark::Area,
            b"SWAP-SPACE" => Mark::Old,
            _ if SUSPENDED.iter().any(|signature| found.starts_with(signature)) => Mark::Suspended,
            _ => return None,
        };
        Some((page_bytes, mark))
    })
}

/// Whether the volume is a swap area, in use by a suspended system or not.
pub(crate) fn find(window: &Window<'_>) -> bool {
    mark(window).is_some()
}

/// Label and UUID.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    let raw = window.bytes(1024, 64).ok()?;
    Some(Identity { name: SWAP, label: text(&raw[28..44]), uuid: uuid_text(&raw, 12) })
}

/// Sends all pages but the first to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let pages = area(window)?;
    sink.free(pages)
}

/// First byte after the area.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    Ok(area(window)?.end)
}

/// All pages but the first, in bytes.
fn area(window: &Window<'_>) -> Result<Range<u64>, LeftAlone> {
    let page_bytes = match mark(window) {
        Some((page_bytes, Mark::Area)) => page_bytes,
        Some((_, Mark::Suspended)) => {
            return Err(LeftAlone::new(ReasonKind::Hibernated, "a suspended system is saved in the swap area"));
        }
        _ => return Err(LeftAlone::unsupported("the old format of swap areas")),
    };
    let raw = window.bytes(1024, 64)?;
    let (version, last_page, bad_pages) = (le32(&raw, 0), u64::from(le32(&raw, 4)), le32(&raw, 8));
    if version != 1 || bad_pages != 0 {
        return Err(LeftAlone::unsupported(format!("a swap area of version {version} with {bad_pages} bad pages")));
    }
    let end = (last_page + 1) * page_bytes;
    if last_page == 0 || end > window.size_bytes() {
        return Err(LeftAlone::damaged(format!("a swap area of {last_page} pages of {page_bytes} bytes")));
    }
    Ok(page_bytes..end)
}
