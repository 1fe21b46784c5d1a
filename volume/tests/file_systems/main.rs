//! Real file systems, made by their own tools, against this crate's readers.
//!
//! For each file system and each of its features:
//! - the free ranges are exactly those that the file system's own tool lists, where it lists them;
//! - after free bytes were overwritten with 0xA5 (all, but for the inside of large ranges), the
//!   file system's own checker finds nothing wrong, and each file has its contents.
//!
//! A test whose tool is not installed prints `skipped:` with the tool's name.

mod btrfs;
mod ends;
mod ext;
mod fat;
mod lab;
mod lvm;
mod ntfs;
mod tables;
mod xfs;
