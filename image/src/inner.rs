//! What an image holds beside its disk: internal snapshots and bitmaps (qcow2).
//!
//! ```text
//!   records of the file ─▶ InternalSnapshot, InternalBitmap ─▶ shown to people, and by which a
//!                                                              snapshot is named
//! ```
//!
//! An image that was opened has read them already, so they cost nothing here. What could not be
//! read is a remark of the image ([`ImageInfo::remarks`](crate::ImageInfo::remarks)).

/// A former state of the disk, in the image's own file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalSnapshot {
    /// Unique in the image: by this or by the name it is opened.
    pub id: String,
    /// The name, which need not be unique.
    pub name: String,
    /// When it was taken: seconds since 1970-01-01 00:00 UTC.
    pub seconds: u32,
    /// How long the guest had run, in nanoseconds.
    pub guest_nanoseconds: u64,
    /// Length of the virtual machine's state in bytes; 0 if none is stored.
    pub vm_state_bytes: u64,
    /// Size of the disk in bytes, then.
    pub size_bytes: u64,
}

/// A bitmap of the ranges that were written since some moment, in the image's own file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InternalBitmap {
    /// The name, as the file has it.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity_bytes: u64,
    /// Whether it was not saved by the last program that used it, and counts for nothing.
    pub is_in_use: bool,
    /// Whether a program that runs the disk records its writes in it.
    pub is_auto: bool,
}
