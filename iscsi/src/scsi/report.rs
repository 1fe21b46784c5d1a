//! Answers that are lists: capacity, logical units, port groups, supported commands, LBA status.

use super::{
    Blocks, Described, Sense,
    command::{OpcodesQuery, SUPPORTED, Supported, supported},
    lun_of,
};
use crate::put;

/// READ CAPACITY(10). A disk of more than 2^32 blocks has the last block 0xffffffff.
pub fn capacity_10(disk: &Described) -> Vec<u8> {
    let last = u32::try_from(disk.blocks.saturating_sub(1)).unwrap_or(u32::MAX);
    [last.to_be_bytes(), disk.block_bytes.to_be_bytes()].concat()
}

/// READ CAPACITY(16).
pub fn capacity_16(disk: &Described) -> Vec<u8> {
    let mut out = vec![0; 32];
    put(&mut out, 0, &disk.blocks.saturating_sub(1).to_be_bytes());
    put(&mut out, 8, &disk.block_bytes.to_be_bytes());
    out[13] = disk.physical_exponent & 15;
    // Blocks can be unmapped, and read as zeros then.
    out[14] = 0x80 | 0x40;
    out
}

/// REPORT LUNS.
///
/// # Errors
/// The selection is not supported.
pub fn luns(select: u8, units: impl Iterator<Item = u16>) -> Result<Vec<u8>, Sense> {
    let mut out = vec![0; 8];
    match select {
        0x00 | 0x02 => units.for_each(|unit| out.extend(lun_of(unit).to_be_bytes())),
        // There are no well-known logical units.
        0x01 => {}
        _ => return Err(Sense::INVALID_FIELD),
    }
    let list_bytes = out.len() as u32 - 8;
    put(&mut out, 0, &list_bytes.to_be_bytes());
    Ok(out)
}

/// REPORT TARGET PORT GROUPS: one group with one port, always active.
pub fn port_groups(is_extended: bool) -> Vec<u8> {
    // The group is 1, its port is 1; active and optimized, which is the only state.
    let group = [0x00, 0x01, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1];
    let mut out = vec![0; 4];
    if is_extended {
        out.extend([0x10, 0, 0, 0]);
    }
    out.extend(group);
    let list_bytes = out.len() as u32 - 4;
    put(&mut out, 0, &list_bytes.to_be_bytes());
    out
}

/// REPORT SUPPORTED OPERATION CODES.
///
/// # Errors
/// The query is invalid.
pub fn opcodes(query: &OpcodesQuery) -> Result<Vec<u8>, Sense> {
    if query.options == 0 {
        let mut out = vec![0; 4];
        for one in SUPPORTED {
            let mut entry = [0; 8];
            entry[0] = one.opcode;
            put(&mut entry, 2, &one.action.unwrap_or(0).to_be_bytes());
            entry[5] = u8::from(one.action.is_some()) | if query.with_times { 2 } else { 0 };
            entry[7] = one.usage.len() as u8;
            out.extend(entry);
            if query.with_times {
                out.extend(times());
            }
        }
        let list_bytes = out.len() as u32 - 4;
        put(&mut out, 0, &list_bytes.to_be_bytes());
        return Ok(out);
    }
    let has_actions = SUPPORTED.iter().any(|one| one.opcode == query.opcode && one.action.is_some());
    match query.options {
        1 if has_actions => return Err(Sense::INVALID_FIELD),
        2 if !has_actions && SUPPORTED.iter().any(|one| one.opcode == query.opcode) => {
            return Err(Sense::INVALID_FIELD);
        }
        1..=3 => {}
        _ => return Err(Sense::INVALID_FIELD),
    }
    let found: Option<&Supported> = supported(query.opcode, query.action);
    let mut out = vec![0; 4];
    // Supported by the standard, or not.
    out[1] = if found.is_some() { 3 } else { 1 };
    if let Some(found) = found {
        put(&mut out, 2, &(found.usage.len() as u16).to_be_bytes());
        let mut usage = found.usage.to_vec();
        usage[0] = found.opcode;
        if let Some(action) = found.action {
            usage[1] = usage[1] & 0xe0 | action as u8;
        }
        out.extend(usage);
        if query.with_times {
            out[1] |= 0x80;
            out.extend(times());
        }
    }
    Ok(out)
}

/// A descriptor of the time limits of a command, which has none.
fn times() -> [u8; 12] {
    let mut out = [0; 12];
    out[1] = 10;
    out
}

/// GET LBA STATUS: runs of blocks, mapped or not.
pub fn lba_status(runs: &[(Blocks, bool)]) -> Vec<u8> {
    let mut out = vec![0; 8];
    for (blocks, is_mapped) in runs {
        let mut entry = [0; 16];
        put(&mut entry, 0, &blocks.first.to_be_bytes());
        put(&mut entry, 8, &u32::try_from(blocks.count).unwrap_or(u32::MAX).to_be_bytes());
        entry[12] = u8::from(!is_mapped);
        out.extend(entry);
    }
    let list_bytes = out.len() as u32 - 4;
    put(&mut out, 0, &list_bytes.to_be_bytes());
    out
}
