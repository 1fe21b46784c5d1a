//! Whether a volume is clean: nothing to replay, no hibernated system, no shadow copies.

use super::{
    file::Files,
    numbers::{DATA, INDEX_ALLOCATION, INDEX_BITMAP, INDEX_ROOT, LOG_FILE, ROOT, VOLUME, VOLUME_INFORMATION},
    record::{is_text, undo_fixups},
};
use crate::{
    bytes::{le16, le32, le64},
    reason::{LeftAlone, ReasonKind},
};

/// Dirty, resize of the log, upgrade at mount, chkdsk under way.
const MUST_BE_CLEAR: u16 = 0x0001 | 0x0002 | 0x0004 | 0x4000;
/// Offset of the header that VSS writes, and its id (3808876b-c176-4e48-b7ae-04046e6cc752).
const SHADOW_OFFSET_BYTES: u64 = 0x1e00;
const SHADOW_ID: [u8; 16] = *b"\x6b\x87\x08\x38\x76\xc1\x48\x4e\xb7\xae\x04\x04\x6e\x6c\xc7\x52";
/// Maximum bytes of a root folder's index that are searched.
const INDEX_BYTES_MAX: u64 = 64 << 20;
const NO_CLIENT: u16 = 0xffff;
const VOLUME_IS_CLEAN: u16 = 0x0002;

/// Refuses a volume that is not clean.
pub(super) fn check(files: &Files<'_>) -> Result<(), LeftAlone> {
    check_flags(files)?;
    check_log(files)?;
    check_shadow_copies(files)?;
    check_hibernation(files)
}

fn check_flags(files: &Files<'_>) -> Result<(), LeftAlone> {
    let stream = files.stream(VOLUME, VOLUME_INFORMATION, "")?;
    let Some(value) = stream.as_ref().and_then(|stream| stream.resident()).filter(|value| value.len() >= 12) else {
        return Err(LeftAlone::damaged("$Volume has no flags"));
    };
    if value[8] != 3 {
        return Err(LeftAlone::unsupported(format!("version {}.{} of NTFS", value[8], value[9])));
    }
    let flags = le16(value, 10);
    if flags & MUST_BE_CLEAR != 0 {
        let sentence = format!("the volume is marked dirty (flags {flags:#06x}): run chkdsk in Windows");
        return Err(LeftAlone::new(ReasonKind::Dirty, sentence));
    }
    Ok(())
}

/// $LogFile is clean if it is empty (all bytes 0xFF), or if its newest restart page has no client
/// or says that the volume is clean.
fn check_log(files: &Files<'_>) -> Result<(), LeftAlone> {
    let dirty = |what: &str| {
        LeftAlone::new(ReasonKind::Dirty, format!("$LogFile {what}: start Windows and shut it down, or run chkdsk"))
    };
    let Some(log) = files.stream(LOG_FILE, DATA, "")? else {
        return Err(LeftAlone::damaged("$LogFile has no data"));
    };
    let mut head = vec![0; 16 << 10];
    files.read(&log, 0, &mut head)?;
    if head.iter().all(|byte| *byte == 0xff) {
        return Ok(());
    }
    let page_bytes = le32(&head, 0x10) as usize;
    if !matches!(page_bytes, 512 | 1024 | 2048 | 4096 | 8192) {
        return Err(dirty("has no restart page"));
    }
    let mut newest: Option<(u64, bool)> = None;
    for at in [0, page_bytes] {
        let mut page = head[at..at + page_bytes].to_vec();
        if undo_fixups(&mut page, b"RSTR", "restart page").is_err() {
            return Err(dirty("has a restart page that is not valid"));
        }
        if le16(&page, 0x1c) != 1 {
            return Err(dirty("is of a version whose data may still be in memory (fast startup)"));
        }
        let area = usize::from(le16(&page, 0x18));
        let Some(area) = page.get(area..area + 16) else {
            return Err(dirty("has a restart area outside of its page"));
        };
        let clean = le16(area, 12) == NO_CLIENT || le16(area, 14) & VOLUME_IS_CLEAN != 0;
        if newest.is_none_or(|(number, _)| le64(area, 0) > number) {
            newest = Some((le64(area, 0), clean));
        }
    }
    if newest.is_none_or(|(_, clean)| !clean) {
        return Err(dirty("has changes to replay"));
    }
    Ok(())
}

fn check_shadow_copies(files: &Files<'_>) -> Result<(), LeftAlone> {
    let header = files.window.bytes(SHADOW_OFFSET_BYTES, 128)?;
    if header[..16] == SHADOW_ID && le64(&header, 48) != 0 {
        return Err(LeftAlone::unsupported("a volume with shadow copies (VSS): delete them with vssadmin; it"));
    }
    Ok(())
}

/// Looks for hiberfil.sys, whose first bytes say whether a system is suspended in it.
fn check_hibernation(files: &Files<'_>) -> Result<(), LeftAlone> {
    let Some(number) = find_in_root(files, "hiberfil.sys")? else { return Ok(()) };
    let Some(data) = files.stream(number, DATA, "")? else { return Ok(()) };
    let mut head = [0; 4];
    if data.initialized_bytes < 4 || data.data_bytes < 4 {
        return Ok(());
    }
    files.read(&data, 0, &mut head)?;
    // Zeros: nothing was saved yet. "wake": the saved system was resumed.
    if head == [0; 4] || head.eq_ignore_ascii_case(b"wake") {
        return Ok(());
    }
    Err(LeftAlone::new(
        ReasonKind::Hibernated,
        "Windows is hibernated or was shut down with fast startup (hiberfil.sys): start it and run shutdown /s /t 0",
    ))
}

/// Number of the record of a file in the root folder.
fn find_in_root(files: &Files<'_>, name: &str) -> Result<Option<u64>, LeftAlone> {
    let Some(root) = files.stream(ROOT, INDEX_ROOT, "$I30")? else {
        return Err(LeftAlone::damaged("the root folder has no index"));
    };
    let root = root.resident().unwrap_or_default();
    if let Some(number) = find_in_node(root, 16, name)? {
        return Ok(Some(number));
    }
    let Some(blocks) = files.stream(ROOT, INDEX_ALLOCATION, "$I30")? else { return Ok(None) };
    let block_bytes = le32(root, 8) as usize;
    if !block_bytes.is_power_of_two() || !(512..=64 << 10).contains(&block_bytes) {
        return Err(LeftAlone::damaged(format!("an index with blocks of {block_bytes} bytes")));
    }
    if blocks.data_bytes > INDEX_BYTES_MAX {
        return Err(LeftAlone::unsupported(format!("a root folder whose index has {} bytes", blocks.data_bytes)));
    }
    let Some(bitmap) = files.stream(ROOT, INDEX_BITMAP, "$I30")? else {
        return Err(LeftAlone::damaged("the index of the root folder has no bitmap"));
    };
    let mut block = vec![0; block_bytes];
    for index in 0..blocks.data_bytes / block_bytes as u64 {
        let mut byte = [0];
        files.read(&bitmap, index / 8, &mut byte)?;
        if byte[0] >> (index % 8) & 1 == 0 {
            continue;
        }
        files.read(&blocks, index * block_bytes as u64, &mut block)?;
        undo_fixups(&mut block, b"INDX", &format!("block {index} of the root folder's index"))?;
        if let Some(number) = find_in_node(&block, 24, name)? {
            return Ok(Some(number));
        }
    }
    Ok(None)
}

/// Looks at the entries of a node whose header is at `header`.
fn find_in_node(node: &[u8], header: usize, name: &str) -> Result<Option<u64>, LeftAlone> {
    let wrong = || LeftAlone::damaged("the index of the root folder has an entry of unknown shape");
    let mut at = header + le32(node, header) as usize;
    loop {
        let len = usize::from(le16(node, at + 8));
        let entry = node.get(at..at + len).filter(|entry| entry.len() >= 16).ok_or_else(wrong)?;
        if le16(entry, 12) & 2 != 0 {
            return Ok(None);
        }
        let name_len = usize::from(*entry.get(16 + 64).ok_or_else(wrong)?);
        let found = entry.get(16 + 66..16 + 66 + 2 * name_len).ok_or_else(wrong)?;
        if is_text(found, name) {
            return Ok(Some(le64(entry, 0) & ((1 << 48) - 1)));
        }
        at += len;
    }
}
