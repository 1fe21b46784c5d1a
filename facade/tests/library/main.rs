//! What the library promises to a program that uses it: bytes at any offset, errors that can be
//! matched, checks.

mod check;
mod codes;
mod stream;

use diskwright_lib::{CreateRequest, Disk, DiskStream, OpenOptions, create};
use std::{path::Path, sync::Arc};

const MIB: u64 = 1 << 20;

fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

/// A disk of 16 MiB.
fn made(path: &Path) -> Arc<Disk> {
    create(path, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    Disk::open(path, &writable()).unwrap()
}

/// A parent with some data, and a child of it. Both are closed.
fn family(dir: &Path) {
    let parent = made(&dir.join("parent.vhdx"));
    DiskStream::open(parent.clone()).unwrap().write_at(12345, b"of the parent").unwrap();
    parent.close().unwrap();
    drop(parent);
    let request = CreateRequest { parent: Some(dir.join("parent.vhdx")), ..CreateRequest::default() };
    create(dir.join("child.vhdx"), &request).unwrap();
}
