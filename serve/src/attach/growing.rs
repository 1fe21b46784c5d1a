//! Test: a disk grows while it is attached. The server runs in a thread of this process, with a
//! real FUSE mount and a real loop device.

use super::{
    loop_device::{self, LoopOptions},
    *,
};
use crate::fuse;
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_store::{BlockDevice, Blocking, EngineKind, RateLimits};
use std::{
    fs::{self, File},
    io::{self, Write},
    os::unix::fs::FileExt,
    sync::{
        Arc,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
};

const MIB: u64 = 1 << 20;

/// The server's output: each line becomes a message.
struct Lines(Sender<ServerMessage>);

impl Write for Lines {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = self.0.send(serde_json::from_slice(line).unwrap());
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn next_message(said: &Receiver<ServerMessage>) -> ServerMessage {
    said.recv_timeout(Duration::from_secs(60)).expect("the server sends a message")
}

#[test]
fn the_loop_device_of_a_disk_that_grows_has_the_new_size() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.vhdx", "disk.vhd"] {
        let path = dir.path().join(name);
        create(&path, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        let point = dir.path().join(format!("{name}.point"));
        fs::write(&point, b"").unwrap();
        let (say, said) = channel();
        let server = {
            let (disk, at) = (Arc::clone(&disk), ServeMethod::FuseFile(point.clone()));
            thread::spawn(move || {
                serve_disk(disk, &at, EngineKind::Auto, RateLimits::default(), &mut Lines(say), io::empty())
            })
        };
        match next_message(&said) {
            ServerMessage::Ready { size, .. } => assert_eq!(size, 8 * MIB),
            ServerMessage::Failed { error, machine: true } => return println!("skipped: {error}"),
            other => panic!("{other:?}"),
        }
        let options = LoopOptions {
            file: &point,
            name: &path,
            offset_bytes: 0,
            len_bytes: 0,
            sector_bytes: 512,
            read_only: false,
            partitions: false,
        };
        let device = match loop_device::set_up(&options) {
            Ok(device) => device,
            Err(error) => {
                println!("skipped: {error}");
                fuse::unmount(&point, false).unwrap();
                server.join().unwrap().unwrap();
                return;
            }
        };
        let shown_bytes = || {
            let size = fs::read_to_string(Path::new("/sys/block").join(device.file_name().unwrap()).join("size"));
            size.unwrap().trim().parse::<u64>().unwrap() * 512
        };
        assert_eq!(shown_bytes(), 8 * MIB);
        let file = File::options().read(true).write(true).open(&device).unwrap();
        file.write_all_at(&[1; 4096], 8 * MIB - 4096).unwrap();

        disk.grow(20 * MIB).unwrap();
        assert_eq!(next_message(&said), ServerMessage::Resized { size: 20 * MIB });
        assert_eq!(fs::metadata(&point).unwrap().len(), 20 * MIB, "{name}: the FUSE file has grown");
        loop_device::follow_size(&device, &point).unwrap();
        assert_eq!(shown_bytes(), 20 * MIB, "{name}: the loop device has grown");
        let mut found = [1; 4096];
        file.read_exact_at(&mut found, 8 * MIB).unwrap();
        assert_eq!(found, [0; 4096]);
        file.write_all_at(&[2; 4096], 20 * MIB - 4096).unwrap();
        file.sync_all().unwrap();
        drop(file);
        let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
        for (at, byte) in [(8 * MIB - 4096, 1), (20 * MIB - 4096, 2)] {
            io.read(at, &mut found).unwrap();
            assert_eq!(found, [byte; 4096], "{name}: written through the loop device");
        }
        drop(io);
        assert!(loop_device::free(&device, Duration::from_secs(2)).unwrap());
        fuse::unmount(&point, false).unwrap();
        assert_eq!(next_message(&said), ServerMessage::Closing);
        assert_eq!(next_message(&said), ServerMessage::Closed { error: None });
        server.join().unwrap().unwrap();
        drop(disk);
        assert_eq!(Disk::open(&path, &OpenOptions::default()).unwrap().geometry().size_bytes, 20 * MIB);
    }
}
