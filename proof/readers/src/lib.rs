//! Readers of disk images that share no code with this program, with QEMU, or with each other.
//!
//! ```text
//!   imago       qcow2 with its backing files and internal structures, read and written;
//!               flat VMDKs, read
//!   vmdk-core   VMDKs: sparse, flat, in files of 2 GB, compressed; redo logs by their hints
//! ```
//!
//! They are written in Rust and come from crates.io, so these tests are never skipped. Only tests
//! use this crate: what it depends on is part of no program.

use imago::{
    FormatAccess, FormatDriverBuilder, PermissiveImplicitOpenGate, file::File, format::drivers::FormatDriverInstance,
    qcow2::Qcow2, vmdk::Vmdk,
};
use std::{
    io::{self, Read, Seek, SeekFrom},
    path::Path,
};
use vmdk::VmdkChainReader;

/// The disk of an image by imago, all of it.
///
/// # Errors
/// Those of imago.
pub fn qcow2_by_imago(path: &Path) -> io::Result<Vec<u8>> {
    all_of(Qcow2::<File>::builder_path(path).open(PermissiveImplicitOpenGate::default())?)
}

/// The disk of a flat VMDK by imago, all of it.
///
/// # Errors
/// Those of imago.
pub fn flat_vmdk_by_imago(path: &Path) -> io::Result<Vec<u8>> {
    all_of(Vmdk::<File>::builder_path(path).open(PermissiveImplicitOpenGate::default())?)
}

fn all_of<D: FormatDriverInstance<Storage = File> + 'static>(image: D) -> io::Result<Vec<u8>> {
    let disk = FormatAccess::new(image);
    let len = usize::try_from(disk.size()).map_err(io::Error::other)?;
    let mut bytes = vec![0; len];
    disk.read(&mut bytes[..], 0)?;
    Ok(bytes)
}

/// Writes to a qcow2 by imago: bytes at offsets.
///
/// # Errors
/// Those of imago.
pub fn write_qcow2_by_imago(path: &Path, writes: &[(u64, Vec<u8>)]) -> io::Result<()> {
    let image = Qcow2::<File>::builder_path(path).write(true).open(PermissiveImplicitOpenGate::default())?;
    let disk = FormatAccess::new(image);
    for (offset_bytes, bytes) in writes {
        disk.write(&bytes[..], *offset_bytes)?;
    }
    disk.flush()
}

/// The disk of a VMDK by vmdk-core, with its parents, all of it.
///
/// # Errors
/// Those of vmdk-core.
pub fn vmdk_by_vmdk_core(path: &Path) -> io::Result<Vec<u8>> {
    let mut disk = VmdkChainReader::open(path).map_err(io::Error::other)?;
    let mut bytes = Vec::new();
    disk.seek(SeekFrom::Start(0))?;
    disk.read_to_end(&mut bytes)?;
    Ok(bytes)
}
