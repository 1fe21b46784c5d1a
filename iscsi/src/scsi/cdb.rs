//! The command descriptor blocks that our initiator sends (SPC-4, chapter 6; SBC-3, chapter 5).

use super::{Blocks, op};
use crate::put;

type Cdb = [u8; 16];

fn start(opcode: u8) -> Cdb {
    let mut out = [0; 16];
    out[0] = opcode;
    out
}

fn with_range(opcode: u8, flags: u8, blocks: Blocks) -> Cdb {
    let mut out = start(opcode);
    out[1] = flags;
    put(&mut out, 2, &blocks.first.to_be_bytes());
    put(&mut out, 10, &(blocks.count as u32).to_be_bytes());
    out
}

/// TEST UNIT READY.
pub fn test_unit_ready() -> Cdb {
    start(op::TEST_UNIT_READY)
}

/// READ(16). Only the low 32 bits of the number of blocks are used, here and below.
pub fn read(blocks: Blocks) -> Cdb {
    with_range(op::READ_16, 0, blocks)
}

/// WRITE(16). With `fua` the data are durable when it ends.
pub fn write(blocks: Blocks, fua: bool) -> Cdb {
    with_range(op::WRITE_16, if fua { 0x08 } else { 0 }, blocks)
}

/// WRITE SAME(16) of one block. With `unmap` the target may unmap the blocks.
pub fn write_same(blocks: Blocks, unmap: bool) -> Cdb {
    with_range(op::WRITE_SAME_16, if unmap { 0x08 } else { 0 }, blocks)
}

/// SYNCHRONIZE CACHE(10) of the whole disk.
pub fn synchronize_cache() -> Cdb {
    start(op::SYNCHRONIZE_CACHE_10)
}

/// INQUIRY: standard data, or a page of vital product data.
pub fn inquiry(page: Option<u8>, room_bytes: u16) -> Cdb {
    let mut out = start(op::INQUIRY);
    (out[1], out[2]) = (u8::from(page.is_some()), page.unwrap_or(0));
    put(&mut out, 3, &room_bytes.to_be_bytes());
    out
}

/// MODE SENSE(6) of a page with its current values.
pub fn mode_sense(page: u8, room_bytes: u8) -> Cdb {
    let mut out = start(op::MODE_SENSE_6);
    (out[2], out[4]) = (page, room_bytes);
    out
}

/// READ CAPACITY(16).
pub fn capacity(room_bytes: u32) -> Cdb {
    let mut out = start(op::SERVICE_ACTION_IN);
    out[1] = 0x10;
    put(&mut out, 10, &room_bytes.to_be_bytes());
    out
}

/// REPORT LUNS.
pub fn report_luns(room_bytes: u32) -> Cdb {
    let mut out = start(op::REPORT_LUNS);
    put(&mut out, 6, &room_bytes.to_be_bytes());
    out
}

/// REPORT SUPPORTED OPERATION CODES: whether a command without service actions is supported.
pub fn is_supported(opcode: u8, room_bytes: u32) -> Cdb {
    let mut out = start(op::MAINTENANCE_IN);
    (out[1], out[2], out[3]) = (0x0c, 0x01, opcode);
    put(&mut out, 6, &room_bytes.to_be_bytes());
    out
}
