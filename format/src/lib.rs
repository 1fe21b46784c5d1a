//! On-disk structures of virtual hard disks as Rust values. Pure: no I/O, no unsafe code, no
//! allocation sized by input.
//!
//! - [`dwdiff`]: the stream of changes between two states of a disk; the program's own
//! - [`ovf`]: the description and the manifest of an OVA (DMTF DSP0243)
//! - [`tar`]: the headers of an archive, which an OVA is
//! - [`qcow2`]: header, extensions, tables, refcounts, snapshots, bitmaps (QEMU's qcow2
//!   specification)
//! - [`space`]: superblock, journal and checkpoint of a pool of members; the program's own
//! - [`tracks`]: the file in which the changes of a disk are tracked; the program's own
//! - [`vdi`]: header and block map of VirtualBox's images
//! - [`vhd`]: footer, dynamic header, parent locators, time stamps, geometry (VHD Image Format
//!   Specification 1.0)
//! - [`vhdx`]: file identifier, headers, region table, metadata, BAT, log, parent locator (MS-VHDX)
//! - [`vmdk`]: descriptor, sparse extents, markers of streams (VMware Virtual Disk Format 5.0)

#![forbid(unsafe_code)]

pub mod dwdiff;
mod invalid;
pub mod ovf;
pub mod qcow2;
pub mod space;
pub mod tar;
pub mod tracks;
pub mod vdi;
pub mod vhd;
pub mod vhdx;
pub mod vmdk;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
