//! Mode pages (SPC-4, 7.5; SBC-3, 6.5). No field can be changed: a MODE SELECT succeeds if it sends
//! the values that are there.

use super::{Described, Sense, command::ModeQuery};
use crate::{put, u16_at};

const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const INFORMATIONAL: u8 = 0x1c;
const ALL: u8 = 0x3f;

/// The pages with their bytes.
fn pages() -> [(u8, Vec<u8>); 3] {
    let page = |code: u8, len: u8, values: &[(usize, u8)]| {
        let mut out = vec![0; usize::from(len) + 2];
        (out[0], out[1]) = (code, len);
        values.iter().for_each(|&(at, value)| out[at] = value);
        (code, out)
    };
    [
        // A write cache, which SYNCHRONIZE CACHE flushes.
        page(CACHING, 0x12, &[(2, 0x04)]),
        // Commands may be reordered; aborted commands of others are reported by no status.
        page(CONTROL, 0x0a, &[(3, 0x10)]),
        page(INFORMATIONAL, 0x0a, &[]),
    ]
}

/// The answer to a MODE SENSE.
///
/// # Errors
/// The page is not supported, or saved values are wanted.
pub fn sense(disk: &Described, query: &ModeQuery) -> Result<Vec<u8>, Sense> {
    if query.control == 3 {
        return Err(Sense::NO_SAVING);
    }
    let subpages_known = query.subpage == 0 || query.page == ALL && query.subpage == 0xff;
    let wanted = |code: u8| query.page == ALL || query.page == code;
    let mut body: Vec<u8> = Vec::new();
    for (code, mut page) in pages().into_iter().filter(|(code, _)| wanted(*code)) {
        if query.control == 1 {
            page[2..].fill(0);
        } else if code == CONTROL && disk.is_read_only {
            // Software write protect.
            page[4] |= 0x08;
        }
        body.extend(page);
    }
    if body.is_empty() || !subpages_known {
        return Err(Sense::INVALID_FIELD);
    }
    let descriptor = if query.no_descriptors { Vec::new() } else { descriptor(disk, query.long_lba) };
    // DPO and FUA are understood.
    let device = 0x10 | if disk.is_read_only { 0x80 } else { 0 };
    let mut out = if query.is_long {
        let mut header = vec![0; 8];
        put(&mut header, 0, &((6 + descriptor.len() + body.len()) as u16).to_be_bytes());
        (header[3], header[4]) = (device, u8::from(query.long_lba && !descriptor.is_empty()));
        put(&mut header, 6, &(descriptor.len() as u16).to_be_bytes());
        header
    } else {
        vec![(3 + descriptor.len() + body.len()) as u8, 0, device, descriptor.len() as u8]
    };
    out.extend(descriptor);
    out.extend(body);
    Ok(out)
}

fn descriptor(disk: &Described, is_long: bool) -> Vec<u8> {
    if is_long {
        let mut out = vec![0; 16];
        put(&mut out, 0, &disk.blocks.to_be_bytes());
        put(&mut out, 12, &disk.block_bytes.to_be_bytes());
        return out;
    }
    let mut out = vec![0; 8];
    put(&mut out, 0, &u32::try_from(disk.blocks).unwrap_or(u32::MAX).to_be_bytes());
    put(&mut out, 4, &(disk.block_bytes & 0xff_ffff).to_be_bytes());
    out
}

/// Checks the parameter list of a MODE SELECT.
///
/// # Errors
/// It is too short, or changes a value.
pub fn select(disk: &Described, list: &[u8], is_long: bool) -> Result<(), Sense> {
    if list.is_empty() {
        return Ok(());
    }
    let (header_bytes, descriptor_bytes) = match (is_long, list.len()) {
        (true, 8..) => (8, usize::from(u16_at(list, 6))),
        (false, 4..) => (4, usize::from(list[3])),
        _ => return Err(Sense::PARAMETER_LENGTH),
    };
    let mut rest = list.get(header_bytes + descriptor_bytes..).ok_or(Sense::PARAMETER_LENGTH)?;
    match &list[header_bytes..][..descriptor_bytes] {
        [] => {}
        found if *found == descriptor(disk, false) => {}
        // Zero blocks: the number stays.
        [0, 0, 0, 0, rest @ ..] if *rest == descriptor(disk, false)[4..] => {}
        _ => return Err(Sense::INVALID_PARAMETER),
    }
    while let [code, len, ..] = *rest {
        let page_bytes = usize::from(len) + 2;
        let page = rest.get(..page_bytes).ok_or(Sense::PARAMETER_LENGTH)?;
        let (_, mut expected) =
            pages().into_iter().find(|(known, _)| *known == code & 0x3f).ok_or(Sense::INVALID_PARAMETER)?;
        if code & 0x3f == CONTROL && disk.is_read_only {
            expected[4] |= 0x08;
        }
        // The first bit of a page tells whether it can be saved, and is reserved here.
        if page[1..] != expected[1..] {
            return Err(Sense::INVALID_PARAMETER);
        }
        rest = &rest[page_bytes..];
    }
    if rest.is_empty() { Ok(()) } else { Err(Sense::PARAMETER_LENGTH) }
}
