//! Streams against an array of bytes.

use super::{MIB, family, made, writable};
use diskwright_lib::{BlockDevice, CreateRequest, Disk, DiskError, DiskStream, ErrorCode, OpenOptions, create};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};

#[test]
fn any_offset_and_any_length() {
    let dir = tempfile::tempdir().unwrap();
    for sector_bytes in [512, 4096] {
        let path = dir.path().join(format!("{sector_bytes}.vhdx"));
        let request = CreateRequest {
            size_bytes: Some(4 * MIB),
            logical_sector_bytes: Some(sector_bytes),
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        let disk = Disk::open(&path, &writable()).unwrap();
        let mut stream = DiskStream::open(disk.clone()).unwrap();
        let mut model = vec![0u8; 4 << 20];
        let lens = [1, 3, 511, 512, 513, 4095, 4096, 4097, 10_000, (256 << 10) + 1, 700_001];
        let offsets = [0, 1, 511, 512, 4095, 4096, 12_345, (256 << 10) - 1, MIB - 7, 2 * MIB + 100];
        for (n, (&len, &offset)) in lens.iter().flat_map(|len| offsets.iter().map(move |at| (len, at))).enumerate() {
            let data: Vec<u8> = (0..len).map(|at| (at * 7 + n * 13 + 1) as u8).collect();
            stream.write_at(offset, &data).unwrap();
            model[offset as usize..][..len].copy_from_slice(&data);
            let mut found = vec![0; len + 1000];
            assert_eq!(stream.read_at(offset.saturating_sub(500), &mut found).unwrap(), len + 1000);
            assert!(found == model[offset.saturating_sub(500) as usize..][..len + 1000], "{offset} {len}");
            if n % 9 == 0 {
                stream.discard(offset + 5, len as u64).unwrap();
                model[offset as usize + 5..][..len].fill(0);
            }
        }
        stream.flush().unwrap();
        let mut all = Vec::new();
        stream.rewind().unwrap();
        stream.read_to_end(&mut all).unwrap();
        assert!(all == model);
        drop(stream);
        disk.close().unwrap();
    }
}

#[test]
fn the_end_of_the_disk_ends_the_stream() {
    let dir = tempfile::tempdir().unwrap();
    let disk = made(&dir.path().join("disk.vhdx"));
    let mut stream = DiskStream::open(disk.clone()).unwrap();
    let mut buf = [1; 100];
    assert_eq!(stream.seek(SeekFrom::End(-10)).unwrap(), 16 * MIB - 10);
    assert_eq!(stream.write(&buf).unwrap(), 10);
    assert_eq!(stream.write(&buf).unwrap(), 0);
    assert_eq!(stream.read(&mut buf).unwrap(), 0);
    assert_eq!(stream.seek(SeekFrom::Current(-10)).unwrap(), 16 * MIB - 10);
    assert_eq!(stream.read(&mut buf).unwrap(), 10);
    assert_eq!(stream.seek(SeekFrom::Start(u64::MAX)).unwrap(), u64::MAX);
    assert_eq!(stream.read(&mut buf).unwrap(), 0);
    assert!(stream.seek(SeekFrom::Current(1)).is_err() && stream.seek(SeekFrom::End(-17 << 20)).is_err());
    // Nothing is written of a range that does not fit.
    let error = stream.write_at(16 * MIB - 10, &[7; 11]).unwrap_err();
    assert_eq!((error.kind(), DiskError::code_of(&error)), (ErrorKind::InvalidInput, ErrorCode::InvalidInput));
    assert!(stream.write_at(u64::MAX, &[7]).is_err() && stream.discard(1, u64::MAX).is_err());
    assert_eq!(stream.read_at(16 * MIB - 10, &mut buf).unwrap(), 10);
    assert_eq!(buf[..10], [1; 10]);
    // The disk grows under the stream.
    disk.grow(17 * MIB).unwrap();
    assert_eq!(stream.size_bytes(), 17 * MIB);
    stream.write_at(17 * MIB - 1, &[9]).unwrap();
}

#[test]
fn a_child_keeps_what_is_around_a_small_write() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path());
    let child = Disk::open(dir.path().join("child.vhdx"), &writable()).unwrap();
    let mut stream = DiskStream::open(child.clone()).unwrap();
    stream.write_at(12345 + 3, b"by").unwrap();
    let mut text = [0; 13];
    stream.read_at(12345, &mut text).unwrap();
    assert_eq!(&text, b"of bye parent");
    drop(stream);
    child.close().unwrap();
    drop(child);
    let parent = Disk::open(dir.path().join("parent.vhdx"), &OpenOptions::default()).unwrap();
    assert!(parent.geometry().read_only);
    DiskStream::open(parent).unwrap().read_at(12345, &mut text).unwrap();
    assert_eq!(&text, b"of the parent");
}
