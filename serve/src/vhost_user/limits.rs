//! Units and limits of requests, which the configuration space announces and `request` checks.

/// A unit of addressing, whatever the sector of the disk.
pub(crate) const SECTOR_BYTES: u64 = 512;

/// Maximum number of bytes of a payload.
pub(crate) const TRANSFER_BYTES_MAX: u64 = 32 << 20;

/// Maximum length of a discard or write-zeroes in sectors: 2 GiB.
pub(crate) const ZEROED_SECTORS_MAX: u32 = 1 << 22;
