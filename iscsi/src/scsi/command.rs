//! Command descriptor blocks: what a command asks for, and the table of the commands that are
//! supported. REPORT SUPPORTED OPERATION CODES is answered from the table, and a command that is
//! not in it is not carried out.

use super::{
    Sense,
    copy::{copies, results},
};
use crate::{u16_at, u32_at, u64_at};

/// Operation codes.
#[expect(missing_docs, reason = "the names of the standards")]
pub mod op {
    pub const TEST_UNIT_READY: u8 = 0x00;
    pub const REQUEST_SENSE: u8 = 0x03;
    pub const READ_6: u8 = 0x08;
    pub const WRITE_6: u8 = 0x0a;
    pub const INQUIRY: u8 = 0x12;
    pub const MODE_SELECT_6: u8 = 0x15;
    pub const RESERVE_6: u8 = 0x16;
    pub const RELEASE_6: u8 = 0x17;
    pub const MODE_SENSE_6: u8 = 0x1a;
    pub const START_STOP_UNIT: u8 = 0x1b;
    pub const SEND_DIAGNOSTIC: u8 = 0x1d;
    pub const READ_CAPACITY_10: u8 = 0x25;
    pub const READ_10: u8 = 0x28;
    pub const WRITE_10: u8 = 0x2a;
    pub const WRITE_AND_VERIFY_10: u8 = 0x2e;
    pub const VERIFY_10: u8 = 0x2f;
    pub const PRE_FETCH_10: u8 = 0x34;
    pub const SYNCHRONIZE_CACHE_10: u8 = 0x35;
    pub const WRITE_SAME_10: u8 = 0x41;
    pub const UNMAP: u8 = 0x42;
    pub const MODE_SELECT_10: u8 = 0x55;
    pub const MODE_SENSE_10: u8 = 0x5a;
    pub const PERSISTENT_RESERVE_IN: u8 = 0x5e;
    pub const PERSISTENT_RESERVE_OUT: u8 = 0x5f;
    pub const READ_16: u8 = 0x88;
    pub const EXTENDED_COPY: u8 = 0x83;
    pub const RECEIVE_COPY_RESULTS: u8 = 0x84;
    pub const COMPARE_AND_WRITE: u8 = 0x89;
    pub const WRITE_16: u8 = 0x8a;
    pub const ORWRITE: u8 = 0x8b;
    pub const WRITE_AND_VERIFY_16: u8 = 0x8e;
    pub const VERIFY_16: u8 = 0x8f;
    pub const PRE_FETCH_16: u8 = 0x90;
    pub const SYNCHRONIZE_CACHE_16: u8 = 0x91;
    pub const WRITE_SAME_16: u8 = 0x93;
    pub const SERVICE_ACTION_IN: u8 = 0x9e;
    pub const REPORT_LUNS: u8 = 0xa0;
    pub const MAINTENANCE_IN: u8 = 0xa3;
    pub const READ_12: u8 = 0xa8;
    pub const WRITE_12: u8 = 0xaa;
    pub const WRITE_AND_VERIFY_12: u8 = 0xae;
    pub const VERIFY_12: u8 = 0xaf;
}

/// Service actions.
mod action {
    pub(super) const READ_CAPACITY_16: u16 = 0x10;
    pub(super) const GET_LBA_STATUS: u16 = 0x12;
    pub(super) const REPORT_PORT_GROUPS: u16 = 0x0a;
    pub(super) const REPORT_OPCODES: u16 = 0x0c;
}

/// A range of logical blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Blocks {
    /// The first one.
    pub first: u64,
    /// How many.
    pub count: u64,
}

/// How a verify compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Check {
    /// The blocks can be read.
    Readable,
    /// They are what the initiator sends.
    Equal,
    /// Each is the one block that the initiator sends.
    EachEqual,
}

/// What a REPORT SUPPORTED OPERATION CODES asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpcodesQuery {
    /// Reporting options: 0 all, 1 an operation code, 2 one with a service action, 3 either.
    pub options: u8,
    /// The operation code.
    pub opcode: u8,
    /// The service action.
    pub action: u16,
    /// Whether descriptors of the time limits are wanted.
    pub with_times: bool,
}

/// What a mode sense asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModeQuery {
    /// MODE SENSE(10).
    pub is_long: bool,
    /// Whether block descriptors are left out.
    pub no_descriptors: bool,
    /// Whether block descriptors may have 16 bytes.
    pub long_lba: bool,
    /// 0 current, 1 changeable, 2 default, 3 saved.
    pub control: u8,
    /// The page, 0x3f for all.
    pub page: u8,
    /// The subpage, 0xff for all.
    pub subpage: u8,
}

/// What a reservation of another initiator keeps a command from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    /// Nothing.
    Always,
    /// A reservation in the way of SPC-2 only.
    Free,
    /// It is as a read.
    Reads,
    /// It is as a write.
    Writes,
}

/// A command, decoded. `room_bytes` is the allocation length: bytes beyond it are not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names of the standards")]
pub enum Command {
    TestUnitReady,
    RequestSense {
        room_bytes: u32,
    },
    Inquiry {
        page: Option<u8>,
        room_bytes: u32,
    },
    ModeSense {
        query: ModeQuery,
        room_bytes: u32,
    },
    ModeSelect {
        is_long: bool,
        list_bytes: u32,
    },
    /// Of SPC-2.
    Reserve,
    /// Of SPC-2.
    Release,
    StartStop,
    SelfTest,
    ReadCapacity10,
    ReadCapacity16 {
        room_bytes: u32,
    },
    Read {
        blocks: Blocks,
    },
    Write {
        blocks: Blocks,
        fua: bool,
    },
    WriteAndVerify {
        blocks: Blocks,
    },
    Verify {
        blocks: Blocks,
        check: Check,
    },
    Prefetch {
        blocks: Blocks,
    },
    SynchronizeCache {
        blocks: Blocks,
    },
    WriteSame {
        blocks: Blocks,
        unmaps: bool,
        no_data: bool,
    },
    Unmap {
        list_bytes: u32,
    },
    CompareAndWrite {
        blocks: Blocks,
        fua: bool,
    },
    OrWrite {
        blocks: Blocks,
        fua: bool,
    },
    LbaStatus {
        first: u64,
        room_bytes: u32,
    },
    ReportLuns {
        select: u8,
        room_bytes: u32,
    },
    ReportPortGroups {
        is_extended: bool,
        room_bytes: u32,
    },
    ReportOpcodes {
        query: OpcodesQuery,
        room_bytes: u32,
    },
    PersistentIn {
        action: u8,
        room_bytes: u32,
    },
    /// EXTENDED COPY.
    ExtendedCopy {
        list_bytes: u32,
    },
    /// POPULATE TOKEN.
    PopulateToken {
        list_id: u32,
        list_bytes: u32,
    },
    /// WRITE USING TOKEN.
    WriteUsingToken {
        list_id: u32,
        list_bytes: u32,
    },
    /// RECEIVE ROD TOKEN INFORMATION.
    TokenInformation {
        list_id: u32,
        room_bytes: u32,
    },
    /// COPY STATUS of RECEIVE COPY RESULTS.
    CopyStatus {
        list_id: u8,
        room_bytes: u32,
    },
    /// OPERATING PARAMETERS of RECEIVE COPY RESULTS.
    CopyParameters {
        room_bytes: u32,
    },
    PersistentOut {
        action: u8,
        scope: u8,
        kind: u8,
        list_bytes: u32,
    },
}

/// A supported command.
#[derive(Debug, Clone, Copy)]
pub struct Supported {
    /// The operation code.
    pub opcode: u8,
    /// The service action.
    pub action: Option<u16>,
    /// The usage map: a bit is set if the target looks at it. Its length is the command's.
    pub usage: &'static [u8],
}

const fn plain(opcode: u8, usage: &'static [u8]) -> Supported {
    Supported { opcode, action: None, usage }
}

const fn with_action(opcode: u8, action: u16, usage: &'static [u8]) -> Supported {
    Supported { opcode, action: Some(action), usage }
}

/// All supported commands.
pub const SUPPORTED: &[Supported] = &[
    plain(op::TEST_UNIT_READY, &[0x00, 0, 0, 0, 0, 0x07]),
    plain(op::REQUEST_SENSE, &[0x03, 0x01, 0, 0, 0xff, 0x07]),
    plain(op::READ_6, &[0x08, 0x1f, 0xff, 0xff, 0xff, 0x07]),
    plain(op::WRITE_6, &[0x0a, 0x1f, 0xff, 0xff, 0xff, 0x07]),
    plain(op::INQUIRY, &[0x12, 0x01, 0xff, 0xff, 0xff, 0x07]),
    plain(op::MODE_SELECT_6, &[0x15, 0x11, 0, 0, 0xff, 0x07]),
    plain(op::RESERVE_6, &[0x16, 0x1f, 0, 0, 0, 0x07]),
    plain(op::RELEASE_6, &[0x17, 0x1f, 0, 0, 0, 0x07]),
    plain(op::MODE_SENSE_6, &[0x1a, 0x08, 0xff, 0xff, 0xff, 0x07]),
    plain(op::START_STOP_UNIT, &[0x1b, 0x01, 0, 0x0f, 0xf7, 0x07]),
    plain(op::SEND_DIAGNOSTIC, &[0x1d, 0x04, 0, 0, 0, 0x07]),
    plain(op::READ_CAPACITY_10, &[0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0x07]),
    plain(op::READ_10, &[0x28, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::WRITE_10, &[0x2a, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::WRITE_AND_VERIFY_10, &[0x2e, 0xf6, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::VERIFY_10, &[0x2f, 0xf6, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::PRE_FETCH_10, &[0x34, 0x02, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::SYNCHRONIZE_CACHE_10, &[0x35, 0x02, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::WRITE_SAME_10, &[0x41, 0xf8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0x07]),
    plain(op::UNMAP, &[0x42, 0x01, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    plain(op::MODE_SELECT_10, &[0x55, 0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    plain(op::MODE_SENSE_10, &[0x5a, 0x18, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0x07]),
    with_action(op::PERSISTENT_RESERVE_IN, 0, &[0x5e, 0x00, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    with_action(op::PERSISTENT_RESERVE_IN, 1, &[0x5e, 0x01, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    with_action(op::PERSISTENT_RESERVE_IN, 2, &[0x5e, 0x02, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    with_action(op::PERSISTENT_RESERVE_IN, 3, &[0x5e, 0x03, 0, 0, 0, 0, 0, 0xff, 0xff, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 0, &[0x5f, 0x00, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 1, &[0x5f, 0x01, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 2, &[0x5f, 0x02, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 3, &[0x5f, 0x03, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 4, &[0x5f, 0x04, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 5, &[0x5f, 0x05, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::PERSISTENT_RESERVE_OUT, 6, &[0x5f, 0x06, 0xff, 0, 0, 255, 255, 255, 255, 0x07]),
    with_action(op::EXTENDED_COPY, copies::LID1, &[0x83, 0x00, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07]),
    with_action(
        op::EXTENDED_COPY,
        copies::POPULATE_TOKEN,
        &[0x83, 0x10, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07],
    ),
    with_action(
        op::EXTENDED_COPY,
        copies::WRITE_USING_TOKEN,
        &[0x83, 0x11, 0, 0, 0, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07],
    ),
    with_action(
        op::RECEIVE_COPY_RESULTS,
        results::TOKEN_INFORMATION,
        &[0x84, 0x07, 255, 255, 255, 255, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07],
    ),
    with_action(
        op::RECEIVE_COPY_RESULTS,
        results::STATUS,
        &[0x84, 0x00, 0xff, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07],
    ),
    with_action(
        op::RECEIVE_COPY_RESULTS,
        results::PARAMETERS,
        &[0x84, 0x03, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07],
    ),
    plain(op::READ_16, &[0x88, 0xf8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::COMPARE_AND_WRITE, &[0x89, 0xf8, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0, 0, 255, 0, 0x07]),
    plain(op::WRITE_16, &[0x8a, 0xf8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::ORWRITE, &[0x8b, 0xf8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::WRITE_AND_VERIFY_16, &[0x8e, 0xf6, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::VERIFY_16, &[0x8f, 0xf6, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::PRE_FETCH_16, &[0x90, 0x02, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::SYNCHRONIZE_CACHE_16, &[0x91, 0x02, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    plain(op::WRITE_SAME_16, &[0x93, 0xf9, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07]),
    with_action(
        op::SERVICE_ACTION_IN,
        action::READ_CAPACITY_16,
        &[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07],
    ),
    with_action(
        op::SERVICE_ACTION_IN,
        action::GET_LBA_STATUS,
        &[0x9e, 0x12, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0x07],
    ),
    plain(op::REPORT_LUNS, &[0xa0, 0, 0xff, 0, 0, 0, 255, 255, 255, 255, 0, 0x07]),
    with_action(op::MAINTENANCE_IN, action::REPORT_PORT_GROUPS, &[0xa3, 0xea, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0x07]),
    with_action(
        op::MAINTENANCE_IN,
        action::REPORT_OPCODES,
        &[0xa3, 0x0c, 0x87, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x07],
    ),
    plain(op::READ_12, &[0xa8, 0xf8, 0xff, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x07]),
    plain(op::WRITE_12, &[0xaa, 0xf8, 0xff, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x07]),
    plain(op::WRITE_AND_VERIFY_12, &[0xae, 0xf6, 0xff, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x07]),
    plain(op::VERIFY_12, &[0xaf, 0xf6, 0xff, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0x07]),
];

/// Whether the second byte of a command has a service action.
fn has_action(opcode: u8) -> bool {
    matches!(
        opcode,
        op::SERVICE_ACTION_IN
            | op::MAINTENANCE_IN
            | op::PERSISTENT_RESERVE_IN
            | op::PERSISTENT_RESERVE_OUT
            | op::EXTENDED_COPY
            | op::RECEIVE_COPY_RESULTS
    )
}

/// The entry of a command in [`SUPPORTED`].
pub fn supported(opcode: u8, action: u16) -> Option<&'static Supported> {
    let wanted = if has_action(opcode) { Some(action) } else { None };
    SUPPORTED.iter().find(|one| one.opcode == opcode && one.action == wanted)
}

impl Command {
    /// Decodes a command descriptor block.
    ///
    /// # Errors
    /// The sense data of a command that is not supported, or has an invalid field.
    pub fn decode(cdb: &[u8; 16]) -> Result<Self, Sense> {
        let (opcode, flags) = (cdb[0], cdb[1]);
        if !SUPPORTED.iter().any(|one| one.opcode == opcode) {
            return Err(Sense::INVALID_OPCODE);
        }
        let action = u16::from(flags & 0x1f);
        let entry = supported(opcode, action).ok_or(Sense::INVALID_FIELD)?;
        // NACA: auto contingent allegiance is not supported.
        if entry.usage.len() <= cdb.len() && cdb[entry.usage.len() - 1] & 0x04 != 0 {
            return Err(Sense::INVALID_FIELD);
        }
        let has_protection = matches!(entry.usage[1], 0xf6 | 0xf8 | 0xf9);
        if has_protection && flags & 0xe0 != 0 {
            return Err(Sense::INVALID_FIELD);
        }
        let fua = flags & 0x08 != 0;
        let (room_6, room_10) = (u32::from(cdb[4]), u32::from(u16_at(cdb, 7)));
        let blocks = blocks_of(cdb, entry.usage.len());
        Ok(match opcode {
            op::TEST_UNIT_READY => Self::TestUnitReady,
            op::REQUEST_SENSE if flags & 1 != 0 => return Err(Sense::INVALID_FIELD),
            op::REQUEST_SENSE => Self::RequestSense { room_bytes: room_6 },
            op::INQUIRY => {
                let page = (flags & 1 != 0).then_some(cdb[2]);
                if flags & 0x02 != 0 || page.is_none() && cdb[2] != 0 {
                    return Err(Sense::INVALID_FIELD);
                }
                Self::Inquiry { page, room_bytes: u16_at(cdb, 3).into() }
            }
            op::MODE_SENSE_6 | op::MODE_SENSE_10 => {
                let is_long = opcode == op::MODE_SENSE_10;
                let query = ModeQuery {
                    is_long,
                    no_descriptors: flags & 0x08 != 0,
                    long_lba: is_long && flags & 0x10 != 0,
                    control: cdb[2] >> 6,
                    page: cdb[2] & 0x3f,
                    subpage: cdb[3],
                };
                Self::ModeSense { query, room_bytes: if is_long { room_10 } else { room_6 } }
            }
            // Nothing can be saved, and pages have the format of the standard.
            op::MODE_SELECT_6 | op::MODE_SELECT_10 if flags & 0x11 != 0x10 => return Err(Sense::INVALID_FIELD),
            op::MODE_SELECT_6 => Self::ModeSelect { is_long: false, list_bytes: room_6 },
            op::MODE_SELECT_10 => Self::ModeSelect { is_long: true, list_bytes: room_10 },
            op::RESERVE_6 | op::RELEASE_6 if flags & 0x1f != 0 => return Err(Sense::INVALID_FIELD),
            op::RESERVE_6 => Self::Reserve,
            op::RELEASE_6 => Self::Release,
            op::START_STOP_UNIT => Self::StartStop,
            // The default self-test. Others are not supported.
            op::SEND_DIAGNOSTIC if flags & 0x04 == 0 => return Err(Sense::INVALID_FIELD),
            op::SEND_DIAGNOSTIC => Self::SelfTest,
            op::READ_CAPACITY_10 if cdb[8] & 1 == 0 && u32_at(cdb, 2) != 0 => return Err(Sense::INVALID_FIELD),
            op::READ_CAPACITY_10 => Self::ReadCapacity10,
            op::READ_6 | op::READ_10 | op::READ_12 | op::READ_16 => Self::Read { blocks },
            op::WRITE_6 => Self::Write { blocks, fua: false },
            op::WRITE_10 | op::WRITE_12 | op::WRITE_16 => Self::Write { blocks, fua },
            op::WRITE_AND_VERIFY_10 | op::WRITE_AND_VERIFY_12 | op::WRITE_AND_VERIFY_16 => {
                // Whatever is compared, it is what was just written.
                check_of(flags)?;
                Self::WriteAndVerify { blocks }
            }
            op::VERIFY_10 | op::VERIFY_12 | op::VERIFY_16 => Self::Verify { blocks, check: check_of(flags)? },
            op::PRE_FETCH_10 | op::PRE_FETCH_16 => Self::Prefetch { blocks },
            op::SYNCHRONIZE_CACHE_10 | op::SYNCHRONIZE_CACHE_16 => Self::SynchronizeCache { blocks },
            op::WRITE_SAME_10 | op::WRITE_SAME_16 => {
                let unmaps = flags & 0x08 != 0;
                let no_data = opcode == op::WRITE_SAME_16 && flags & 0x01 != 0;
                // Anchored blocks are not supported.
                if flags & 0x10 != 0 {
                    return Err(Sense::INVALID_FIELD);
                }
                Self::WriteSame { blocks, unmaps, no_data }
            }
            op::UNMAP if flags & 1 != 0 => return Err(Sense::INVALID_FIELD),
            op::UNMAP => Self::Unmap { list_bytes: room_10 },
            op::COMPARE_AND_WRITE => {
                let blocks = Blocks { first: u64_at(cdb, 2), count: cdb[13].into() };
                Self::CompareAndWrite { blocks, fua }
            }
            op::ORWRITE => Self::OrWrite { blocks, fua },
            op::SERVICE_ACTION_IN if action == action::READ_CAPACITY_16 => {
                Self::ReadCapacity16 { room_bytes: u32_at(cdb, 10) }
            }
            op::SERVICE_ACTION_IN => Self::LbaStatus { first: u64_at(cdb, 2), room_bytes: u32_at(cdb, 10) },
            op::REPORT_LUNS => Self::ReportLuns { select: cdb[2], room_bytes: u32_at(cdb, 6) },
            op::MAINTENANCE_IN if action == action::REPORT_PORT_GROUPS => match flags >> 5 {
                format @ (0 | 1) => Self::ReportPortGroups { is_extended: format == 1, room_bytes: u32_at(cdb, 6) },
                _ => return Err(Sense::INVALID_FIELD),
            },
            op::MAINTENANCE_IN => {
                let query = OpcodesQuery {
                    options: cdb[2] & 7,
                    opcode: cdb[3],
                    action: u16_at(cdb, 4),
                    with_times: cdb[2] & 0x80 != 0,
                };
                Self::ReportOpcodes { query, room_bytes: u32_at(cdb, 6) }
            }
            op::EXTENDED_COPY if action == copies::POPULATE_TOKEN => {
                Self::PopulateToken { list_id: u32_at(cdb, 6), list_bytes: u32_at(cdb, 10) }
            }
            op::EXTENDED_COPY if action == copies::WRITE_USING_TOKEN => {
                Self::WriteUsingToken { list_id: u32_at(cdb, 6), list_bytes: u32_at(cdb, 10) }
            }
            op::RECEIVE_COPY_RESULTS if action == results::TOKEN_INFORMATION => {
                Self::TokenInformation { list_id: u32_at(cdb, 2), room_bytes: u32_at(cdb, 10) }
            }
            op::EXTENDED_COPY => Self::ExtendedCopy { list_bytes: u32_at(cdb, 10) },
            op::RECEIVE_COPY_RESULTS if action == results::STATUS => {
                Self::CopyStatus { list_id: cdb[2], room_bytes: u32_at(cdb, 10) }
            }
            op::RECEIVE_COPY_RESULTS => Self::CopyParameters { room_bytes: u32_at(cdb, 10) },
            op::PERSISTENT_RESERVE_IN => Self::PersistentIn { action: action as u8, room_bytes: room_10 },
            op::PERSISTENT_RESERVE_OUT => Self::PersistentOut {
                action: action as u8,
                scope: cdb[2] >> 4,
                kind: cdb[2] & 15,
                list_bytes: u32_at(cdb, 5),
            },
            _ => return Err(Sense::INVALID_OPCODE),
        })
    }

    /// Whether it changes the contents of the disk.
    pub fn writes(&self) -> bool {
        matches!(
            self,
            Self::Write { .. }
                | Self::WriteAndVerify { .. }
                | Self::WriteSame { .. }
                | Self::Unmap { .. }
                | Self::CompareAndWrite { .. }
                | Self::OrWrite { .. }
                | Self::WriteUsingToken { .. }
        )
    }

    /// What a reservation of another initiator keeps it from (SPC-4, 5.13.1; SBC-3, 4.13).
    pub fn class(&self) -> Class {
        match self {
            Self::Inquiry { .. } | Self::ReportLuns { .. } | Self::RequestSense { .. } | Self::Release => Class::Always,
            Self::TestUnitReady
            | Self::StartStop
            | Self::ReadCapacity10
            | Self::ReadCapacity16 { .. }
            | Self::ReportPortGroups { .. }
            | Self::ReportOpcodes { .. }
            | Self::PersistentIn { .. }
            | Self::PersistentOut { .. }
            | Self::CopyStatus { .. }
            | Self::TokenInformation { .. }
            | Self::CopyParameters { .. }
            | Self::Reserve => Class::Free,
            Self::Read { .. }
            | Self::PopulateToken { .. }
            | Self::Verify { .. }
            | Self::Prefetch { .. }
            | Self::ModeSense { .. }
            | Self::LbaStatus { .. } => Class::Reads,
            _ => Class::Writes,
        }
    }

    /// The blocks that it refers to.
    pub fn blocks(&self) -> Option<Blocks> {
        match *self {
            Self::Read { blocks }
            | Self::Write { blocks, .. }
            | Self::WriteAndVerify { blocks }
            | Self::Verify { blocks, .. }
            | Self::Prefetch { blocks }
            | Self::SynchronizeCache { blocks }
            | Self::WriteSame { blocks, .. }
            | Self::CompareAndWrite { blocks, .. }
            | Self::OrWrite { blocks, .. } => Some(blocks),
            _ => None,
        }
    }

    /// Whether it is carried out while an attention is pending (SPC-4, 5.14).
    pub fn goes_before_attentions(&self) -> bool {
        matches!(self, Self::Inquiry { .. } | Self::ReportLuns { .. } | Self::RequestSense { .. })
    }
}

/// The range of a command that has one. The length of the command tells where it is.
fn blocks_of(cdb: &[u8; 16], cdb_bytes: usize) -> Blocks {
    match cdb_bytes {
        6 => {
            let count = if cdb[4] == 0 { 256 } else { cdb[4].into() };
            Blocks { first: (u32_at(cdb, 0) & 0x1f_ffff).into(), count }
        }
        10 => Blocks { first: u32_at(cdb, 2).into(), count: u16_at(cdb, 7).into() },
        12 => Blocks { first: u32_at(cdb, 2).into(), count: u32_at(cdb, 6).into() },
        _ => Blocks { first: u64_at(cdb, 2), count: u32_at(cdb, 10).into() },
    }
}

fn check_of(flags: u8) -> Result<Check, Sense> {
    match flags >> 1 & 3 {
        0 => Ok(Check::Readable),
        1 => Ok(Check::Equal),
        3 => Ok(Check::EachEqual),
        _ => Err(Sense::INVALID_FIELD),
    }
}
