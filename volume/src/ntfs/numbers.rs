//! Numbers of system files and types of attributes.

/// Numbers of the system files in the MFT.
pub(super) const MFT: u64 = 0;
pub(super) const MFT_MIRROR: u64 = 1;
pub(super) const LOG_FILE: u64 = 2;
pub(super) const VOLUME: u64 = 3;
pub(super) const ROOT: u64 = 5;
pub(super) const BITMAP: u64 = 6;
pub(super) const BOOT: u64 = 7;

/// Types of attributes.
pub(super) const STANDARD_INFORMATION: u32 = 0x10;
pub(super) const VOLUME_NAME: u32 = 0x60;
pub(super) const VOLUME_INFORMATION: u32 = 0x70;
pub(super) const DATA: u32 = 0x80;
pub(super) const INDEX_ROOT: u32 = 0x90;
pub(super) const INDEX_ALLOCATION: u32 = 0xa0;
pub(super) const INDEX_BITMAP: u32 = 0xb0;
