//! A disk that grows while an NBD server exports it: a connection keeps its size, a new one gets
//! the new size.

use crate::common::{Client, serve};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_nbd::wire::{CommandFlags, ErrorCode, Framing, OptionCode, ReplyCode, option};
use diskwright_serve::net::ServerOptions;
use diskwright_store::BlockDevice;
use std::sync::Arc;

const MIB: u64 = 1 << 20;

/// The export's size in the server's NBD_INFO_EXPORT.
fn told_bytes(client: &mut Client) -> u64 {
    let replies = client.option(|out| option::encode_export(OptionCode::INFO, "disk", &[], out));
    let told = replies.iter().find(|(code, data)| *code == ReplyCode::INFO && data[..2] == [0, 0]);
    u64::from_be_bytes(told.expect("the export is described").1[2..10].try_into().unwrap())
}

#[test]
fn a_new_connection_has_the_new_size() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.vhdx", "disk.vhd"] {
        let path = dir.path().join(name);
        create(&path, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        let device: Arc<dyn BlockDevice> = disk.clone();
        let Some(mut served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
        let mut early = served.client();
        assert_eq!(told_bytes(&mut early), 8 * MIB);
        let mut early = early.go("disk", Framing::Structured, &[]);
        early.write(8 * MIB - 4096, &[1; 4096], CommandFlags::empty()).unwrap();
        assert_eq!(early.write(8 * MIB, &[2; 4096], CommandFlags::empty()), Err(ErrorCode::ENOSPC));

        disk.grow(20 * MIB).unwrap();
        // The client keeps the size that it was told, and the session continues.
        early.write(4 * MIB, &[3; 4096], CommandFlags::FUA).unwrap();
        let mut late = served.client();
        assert_eq!(told_bytes(&mut late), 20 * MIB, "{name}");
        let mut late = late.go("disk", Framing::Structured, &[]);
        assert_eq!(late.read(8 * MIB - 4096, 8192).unwrap(), [[1; 4096], [0; 4096]].concat(), "{name}");
        late.write(20 * MIB - 4096, &[4; 4096], CommandFlags::FUA).unwrap();
        assert_eq!(early.read(4 * MIB, 4096).unwrap(), [3; 4096]);
        assert_eq!(late.write(20 * MIB, &[5; 4096], CommandFlags::empty()), Err(ErrorCode::ENOSPC));
        drop((early, late));
        served.stop().unwrap();
        disk.close().unwrap();
        drop(disk);
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
        assert_eq!(disk.geometry().size_bytes, 20 * MIB, "{name}");
    }
}
