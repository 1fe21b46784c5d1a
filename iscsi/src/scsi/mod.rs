//! The SCSI commands of a disk (SPC-4, SBC-3), as structures and bytes.
//!
//! ```text
//!   command.rs    command descriptor blocks -> Command; the table of what is supported
//!   sense.rs      why a command failed
//!   inquiry.rs    what a disk is: standard data and the pages of vital product data
//!   mode.rs       mode pages
//!   report.rs     capacity, logical units, port groups, supported commands, LBA status
//!   persistent.rs the lists of PERSISTENT RESERVE
//!   unmap.rs      the parameter list of UNMAP
//!   token.rs      lists and answers of copies by tokens
//!   designator.rs names of logical units
//!   copy.rs       the parameter list of EXTENDED COPY, and what is told of copies
//!   cdb.rs        the command descriptor blocks that our initiator sends
//!   answers.rs    what our initiator reads of a disk's answers
//! ```

pub mod answers;
pub mod cdb;
pub mod command;
pub mod copy;
pub mod designator;
pub mod inquiry;
pub mod mode;
pub mod persistent;
pub mod report;
pub mod sense;
pub mod token;
pub mod unmap;

pub use command::{Blocks, Command, op};
pub use inquiry::Described;
pub use sense::Sense;

/// SCSI status.
pub mod status {
    /// The command has succeeded.
    pub const GOOD: u8 = 0x00;
    /// It has not; sense data tell why.
    pub const CHECK_CONDITION: u8 = 0x02;
    /// The logical unit is busy for now.
    pub const BUSY: u8 = 0x08;
    /// Another initiator has reserved the logical unit.
    pub const RESERVATION_CONFLICT: u8 = 0x18;
    /// The logical unit has as many commands as it takes.
    pub const TASK_SET_FULL: u8 = 0x28;
}

/// The number of a logical unit, of the 8 bytes in a header (SAM-5, 4.7): peripheral device or flat
/// space addressing, one level.
pub fn unit_of(lun: u64) -> Option<u16> {
    let first = (lun >> 48) as u16;
    match (first >> 14, lun << 16) {
        (0, 0) if first < 256 => Some(first),
        (1, 0) => Some(first & 0x3fff),
        _ => None,
    }
}

/// The 8 bytes of a logical unit.
///
/// # Panics
/// If the number is 16384 or more.
pub fn lun_of(unit: u16) -> u64 {
    assert!(unit < 1 << 14, "a logical unit has a number below 16384");
    u64::from(if unit < 256 { unit } else { unit | 1 << 14 }) << 48
}
