//! Each code where it comes from in practice.

use super::{MIB, family, made, writable};
use diskwright_lib::{
    ConvertOptions, CreateRequest, Disk, DiskError, DiskStream, DiskType, ErrorCode, Format, OpenOptions, Opened,
    convert, create,
};
use std::{fs, path::Path};

fn code(path: &Path, options: &OpenOptions) -> ErrorCode {
    Disk::open(path, options).unwrap_err().code()
}

#[test]
fn of_opening_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let reading = OpenOptions::default();
    assert_eq!(code(&at("none.vhdx"), &reading), ErrorCode::NotFound);
    fs::write(at("text.vhdx"), "no disk at all").unwrap();
    assert_eq!(code(&at("text.vhdx"), &reading), ErrorCode::NotAnImage);
    fs::write(at("other.qed"), "QED\0").unwrap();
    assert_eq!(code(&at("other.qed"), &reading), ErrorCode::Unsupported);
    let disk = made(&at("held.vhdx"));
    assert_eq!(code(&at("held.vhdx"), &writable()), ErrorCode::Locked);
    disk.close().unwrap();
    drop(disk);
    fs::copy(at("held.vhdx"), at("guess.img")).unwrap();
    assert_eq!(code(&at("guess.img"), &writable()), ErrorCode::FormatUnclear);
    // Both headers of the VHDX.
    let mut bytes = fs::read(at("held.vhdx")).unwrap();
    bytes[64 << 10..(192 << 10)].fill(0xff);
    fs::write(at("damaged.vhdx"), bytes).unwrap();
    assert_eq!(code(&at("damaged.vhdx"), &reading), ErrorCode::Corrupt);
    let uri = format!("nbd+unix:///disk?socket={}", at("nobody").display());
    let error = Opened::open(Path::new(&uri), &reading).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Connection);
}

#[test]
fn of_chains() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path());
    let at = |name: &str| dir.path().join(name);
    let reading = OpenOptions::default();
    assert_eq!(code(&at("parent.vhdx"), &writable()), ErrorCode::HasChildren);
    let elsewhere = tempfile::tempdir().unwrap();
    fs::copy(at("child.vhdx"), elsewhere.path().join("child.vhdx")).unwrap();
    assert_eq!(code(&elsewhere.path().join("child.vhdx"), &reading), ErrorCode::ParentNotAllowed);
    fs::rename(at("parent.vhdx"), at("away.vhdx")).unwrap();
    assert_eq!(code(&at("child.vhdx"), &reading), ErrorCode::ParentMissing);
    drop(made(&at("parent.vhdx")));
    assert_eq!(code(&at("child.vhdx"), &reading), ErrorCode::ParentChanged);
    // A file that is its own parent.
    fs::copy(at("child.vhdx"), at("parent.vhdx")).unwrap();
    assert_eq!(code(&at("parent.vhdx"), &reading), ErrorCode::BadChain);
}

#[test]
fn of_creating_and_converting() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    drop(made(&at("disk.vhdx")));
    let of = |path: &Path, request: CreateRequest| create(path, &request).unwrap_err().code();
    let sized = || CreateRequest { size_bytes: Some(MIB), ..CreateRequest::default() };
    assert_eq!(of(&at("disk.vhdx"), sized()), ErrorCode::Exists);
    assert_eq!(of(&at("new.vhdx"), CreateRequest::default()), ErrorCode::InvalidInput);
    assert_eq!(of(&at("new.vhd"), CreateRequest { block_bytes: Some(3), ..sized() }), ErrorCode::InvalidInput);
    assert_eq!(of(&at("no folder/new.vhd"), sized()), ErrorCode::NotFound);
    let raw = CreateRequest { format: Some(Format::Raw), disk_type: Some(DiskType::Dynamic), ..sized() };
    assert_eq!(of(&at("new.raw"), raw), ErrorCode::InvalidInput);
    let verified = ConvertOptions { verify: true, ..ConvertOptions::default() };
    let stopped = convert(at("disk.vhdx"), at("copy.vhd"), &verified, &mut |_, _| false);
    assert_eq!(stopped.unwrap_err().code(), ErrorCode::Stopped);
    assert!(!at("copy.vhd").exists());
}

#[test]
fn of_requests() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    drop(made(&path));
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let error = DiskStream::open(disk).unwrap().write_at(0, b"x").unwrap_err();
    assert_eq!(DiskError::code_of(&error), ErrorCode::ReadOnly);
    // The first block's entry of the BAT lies within the header: reads of it fail, and say so.
    let mut bytes = fs::read(&path).unwrap();
    let bat = bat_offset(&bytes);
    bytes[bat..bat + 8].copy_from_slice(&6u64.to_le_bytes());
    fs::write(&path, bytes).unwrap();
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let error = DiskStream::open(disk).unwrap().read_at(0, &mut [0; 512]).unwrap_err();
    assert_eq!(DiskError::code_of(&error), ErrorCode::Corrupt);
    let error = convert(&path, dir.path().join("copy.raw"), &ConvertOptions::default(), &mut |_, _| true).unwrap_err();
    assert_eq!(error.code(), ErrorCode::Corrupt);
}

/// Where the BAT lies, by the region table (MS-VHDX 2.2.3).
fn bat_offset(vhdx: &[u8]) -> usize {
    let table = &vhdx[192 << 10..];
    // {2DC27766-F623-4200-9D64-115E9BFD4A08}
    let guid = [0x66, 0x77, 0xc2, 0x2d, 0x23, 0xf6, 0x00, 0x42, 0x9d, 0x64, 0x11, 0x5e, 0x9b, 0xfd, 0x4a, 0x08];
    let entry = (16..).step_by(32).map(|at| &table[at..at + 32]).find(|entry| entry[..16] == guid).unwrap();
    u64::from_le_bytes(entry[16..24].try_into().unwrap()) as usize
}
