//! An image inside an NBD export: a VHDX in a file that nbdkit or our own server exports
//! unchanged.

use crate::common::serve;
use crate::servers;
use diskwright_disk::{CreateRequest, Disk, OpenOptions, Opened, create};
use diskwright_image::Format;
use diskwright_nbd::{NbdDevice, NbdStore, NbdUri};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{
    BlockDevice, Blocking, CacheMode, Engine, EngineKind, FileRange, IoBuf, QueueOptions, RawDevice, Request,
    SharedRing, Store, Zeroing,
};
use std::{
    fs,
    io::ErrorKind,
    path::Path,
    process::Command,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn inside(writable: bool) -> OpenOptions {
    OpenOptions { writable, format: Some(Format::Vhdx), ..OpenOptions::default() }
}

/// A folder with a dynamic VHDX of 64 MiB in a file of `export_bytes`.
fn folder(export_bytes: u64) -> TempDir {
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("export.bin");
    let made = dir.path().join("made.vhdx");
    let request =
        CreateRequest { size_bytes: Some(64 * MIB), block_bytes: Some(MIB as u32), ..CreateRequest::default() };
    create(&made, &request).unwrap();
    fs::rename(made, &path).unwrap();
    fs::File::options().write(true).open(&path).unwrap().set_len(export_bytes).unwrap();
    dir
}

fn disk(uri: &NbdUri, writable: bool) -> Arc<Disk> {
    let opened = Opened::open(Path::new(&uri.to_string()), &inside(writable)).unwrap();
    Arc::clone(opened.disk().expect("an image"))
}

fn write(disk: &dyn BlockDevice, model: &mut [u8], offset_bytes: u64, len: usize, seed: u8, fua: bool) {
    let data: Vec<u8> = (0..len).map(|n| (n >> 9) as u8 ^ (n as u8).wrapping_mul(31) ^ seed | 1).collect();
    Blocking::open(disk, EngineKind::Auto).unwrap().write(offset_bytes, &data, fua).unwrap();
    model[offset_bytes as usize..][..len].copy_from_slice(&data);
}

fn expect(disk: &dyn BlockDevice, model: &[u8]) {
    let mut found = vec![0xEE; model.len()];
    Blocking::open(disk, EngineKind::Auto).unwrap().read(0, &mut found).unwrap();
    let differs = found.iter().zip(model).position(|(a, b)| a != b);
    assert!(differs.is_none(), "the contents differ, first at {differs:?}");
}

/// Writes, reads, flushes, closes, reopens, and compares the file with what qemu-img reads.
fn exercise(uri: &NbdUri, file: &Path) {
    let mut model = vec![0; 64 << 20];
    {
        let disk = disk(uri, true);
        assert!(disk.warnings().iter().any(|warning| warning.contains("nothing locks it")), "{:?}", disk.warnings());
        write(&*disk, &mut model, 0, 3 << 20, 1, false);
        write(&*disk, &mut model, 10 * MIB + 512, 512, 2, true);
        write(&*disk, &mut model, 20 * MIB, 4096, 3, false);
        expect(&*disk, &model);
        Blocking::open(&*disk, EngineKind::Auto).unwrap().flush().unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().discard(0, MIB).unwrap();
        model[..1 << 20].fill(0);
        write(&*disk, &mut model, 30 * MIB, 2 << 20, 4, true);
        expect(&*disk, &model);
        disk.close().unwrap();
    }
    let again = disk(uri, false);
    assert!(again.warnings().is_empty(), "{:?}", again.warnings());
    expect(&*again, &model);
    drop(again);
    let raw = file.with_extension("raw");
    let copied =
        Command::new("qemu-img").args(["convert", "-U", "-f", "vhdx", "-O", "raw"]).args([file, &raw]).output();
    match copied {
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            assert!(fs::read(raw).unwrap() == model, "qemu-img reads other contents");
        }
        Err(_) => println!("skipped: qemu-img is not installed"),
    }
}

#[test]
fn a_vhdx_inside_an_export_of_nbdkit() {
    let dir = folder(128 * MIB);
    let Some(server) = servers::nbdkit_in(dir, &["file", "DIR/export.bin"]) else { return };
    exercise(&server.uri(), &server.dir.path().join("export.bin"));
}

/// A server that accepts only blocks of 4 KiB, and one without zeroes, FUA and block
/// status.
#[test]
fn servers_with_fewer_features() {
    let coarse = [
        "--filter=blocksize-policy",
        "file",
        "DIR/export.bin",
        "blocksize-minimum=4096",
        "blocksize-error-policy=error",
    ];
    let plain = [
        "--filter=nozero",
        "--filter=fua",
        "--filter=noextents",
        "file",
        "DIR/export.bin",
        "zeromode=none",
        "fuamode=discard",
    ];
    for arguments in [&coarse[..], &plain[..]] {
        let Some(server) = servers::nbdkit_in(folder(128 * MIB), arguments) else { return };
        exercise(&server.uri(), &server.dir.path().join("export.bin"));
    }
}

#[test]
fn a_vhdx_inside_our_own_export_is_served_again() {
    let dir = folder(128 * MIB);
    let path = dir.path().join("export.bin");
    let raw = Arc::new(RawDevice::open(&path, true, CacheMode::PageCache).unwrap());
    let Some(outer) = serve(vec![("outer", raw as Arc<dyn BlockDevice>)], ServerOptions::default()) else { return };
    let uri = NbdUri::parse(&outer.uri("outer")).unwrap();
    exercise(&uri, &path);
    let mut model = vec![0; 64 << 20];
    let opened = disk(&uri, true);
    Blocking::open(&*opened, EngineKind::Auto).unwrap().read(0, &mut model).unwrap();
    let Some(served) = serve(vec![("inner", opened as Arc<dyn BlockDevice>)], ServerOptions::default()) else { return };
    let device = NbdDevice::open(&NbdUri::parse(&served.uri("inner")).unwrap(), true).unwrap();
    expect(&device, &model);
    write(&device, &mut model, 40 * MIB, 3 << 20, 9, true);
    write(&device, &mut model, 512, 70_144, 8, false);
    Blocking::open(&device, EngineKind::Auto).unwrap().flush().unwrap();
    expect(&device, &model);
    drop(device);
    drop(served);
    expect(&*disk(&uri, false), &model);
}

/// Several threads, each with its own ring, use one connection.
#[test]
fn workers_share_the_connection() {
    let Some(server) = servers::nbdkit_in(folder(128 * MIB), &["file", "DIR/export.bin"]) else { return };
    let disk = disk(&server.uri(), true);
    thread::scope(|scope| {
        for worker in 0..3u64 {
            let disk = &disk;
            scope.spawn(move || {
                let Ok(ring) = SharedRing::new(16, None) else { return };
                let options = QueueOptions { depth: 8, ring: Some(&ring), ..QueueOptions::default() };
                let mut queue = disk.open_queue(&options).unwrap();
                let (mut done, mut bufs) = (Vec::new(), (0..8).map(|_| IoBuf::new(4096)).collect::<Vec<_>>());
                for step in 0..600 {
                    while bufs.is_empty() {
                        queue.reap(0, &mut done).unwrap();
                        if done.is_empty() {
                            ring.wait_for(Duration::from_secs(20)).unwrap();
                        }
                        for completion in done.drain(..) {
                            completion.result.unwrap();
                            let buf = completion.buf.unwrap();
                            assert!(buf.iter().all(|&byte| u64::from(byte) == worker + 1));
                            bufs.push(buf);
                        }
                    }
                    let mut buf = bufs.pop().unwrap();
                    let number = step % 300;
                    let place = (worker * 20 + number / 16) * MIB + number % 16 * 4096;
                    buf.fill(if step < 300 { worker as u8 + 1 } else { 0xEE });
                    let request = if step < 300 {
                        Request::write(place, 4096, buf, step)
                    } else {
                        Request::read(place, 4096, buf, step)
                    };
                    // Reads begin when all writes have ended.
                    if step == 300 {
                        while queue.in_flight() > 0 {
                            queue.reap(1, &mut done).unwrap();
                        }
                    }
                    queue.push(request).unwrap();
                }
                while queue.in_flight() > 0 {
                    queue.reap(1, &mut done).unwrap();
                }
            });
        }
    });
    disk.close().unwrap();
}

#[test]
fn requests_fail_when_the_server_dies() {
    // The server delays reads, so that they are in flight when it dies.
    let arguments = ["--filter=delay", "file", "DIR/export.bin", "delay-read=50ms"];
    let Some(mut server) = servers::nbdkit_in(folder(128 * MIB), &arguments) else { return };
    let disk = disk(&server.uri(), true);
    let mut model = vec![0; 64 << 20];
    write(&*disk, &mut model, 0, 1 << 20, 1, true);
    let started = Instant::now();
    let mut queue = disk.open_queue(&QueueOptions { depth: 8, ..QueueOptions::default() }).unwrap();
    for tag in 0..8 {
        queue.push(Request::read(tag * 4096, 4096, IoBuf::new(4096), tag)).unwrap();
    }
    let mut done = Vec::new();
    queue.reap(0, &mut done).unwrap();
    server.kill();
    while done.len() < 8 {
        queue.reap(1, &mut done).unwrap();
    }
    assert!(done.iter().all(|ended| ended.buf.as_ref().is_some_and(|buf| buf.len() == 4096)));
    let failed: Vec<_> = done.iter().filter_map(|ended| ended.result.as_ref().err()).collect();
    assert!(!failed.is_empty() && failed[0].to_string().contains("the connection broke"), "{failed:?}");
    queue.push(Request::flush(9)).unwrap();
    done.clear();
    queue.reap(1, &mut done).unwrap();
    assert!(done[0].result.is_err());
    drop(queue);
    assert!(disk.close().is_err());
    drop(disk);
    assert!(started.elapsed() < Duration::from_secs(20));
}

/// A server that takes requests and never replies: the URI's timeout ends them, on a ring as in a
/// blocking call.
#[test]
fn requests_to_a_silent_server_end_with_the_timeout() {
    let arguments = ["--filter=delay", "file", "DIR/export.bin", "delay-write=1000", "delay-close=0"];
    let Some(server) = servers::nbdkit_in(folder(128 * MIB), &arguments) else { return };
    let uri = NbdUri { timeout: Some(Duration::from_millis(300)), ..server.uri() };
    let store: Arc<dyn Store> = Arc::new(NbdStore::open(&uri, true).unwrap());
    let Ok(mut engine) = Engine::new(EngineKind::Uring, 4, None) else { return };
    let target = engine.add_target(&store).unwrap();
    let started = Instant::now();
    engine.write_one(1, 0, target, 0, IoBuf::new(4096), 0..4096, false);
    let mut done = Vec::new();
    engine.reap(1, &mut done).unwrap();
    assert_eq!(done[0].result.as_ref().unwrap_err().kind(), ErrorKind::TimedOut);
    assert!((Duration::from_millis(300)..Duration::from_secs(20)).contains(&started.elapsed()));
    assert_eq!((engine.stats().lane_parts, engine.stats().pool_parts), (1, 0));
    assert!(store.read_at(&mut [0; 512], 0).is_err(), "the connection stays closed");
}

#[test]
fn an_image_cannot_grow_beyond_its_export() {
    let Some(server) = servers::nbdkit_in(folder(12 * MIB), &["file", "DIR/export.bin"]) else { return };
    let disk = disk(&server.uri(), true);
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    queue.write(0, &vec![1; 4 << 20], false).unwrap();
    let error = queue.write(16 * MIB, &vec![1; 16 << 20], false).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!(error.to_string().contains("fixed size"), "{error}");
    queue.flush().unwrap();
    let mut found = vec![0; 4 << 20];
    queue.read(0, &mut found).unwrap();
    assert!(found.iter().all(|&byte| byte == 1));
    drop(queue);
    disk.close().unwrap();
}

#[test]
fn a_store_keeps_the_size_of_its_export() {
    let Some(server) = servers::nbdkit(&["memory", "1M"]) else { return };
    let store = NbdStore::open(&server.uri(), true).unwrap();
    store.write_at(&[7; 5000], 100).unwrap();
    store.write_at(&[8; 100], MIB - 100).unwrap();
    let mut found = [0; 5002];
    store.read_at(&mut found, 99).unwrap();
    assert!(found[0] == 0 && found[1..5001] == [7; 5000] && found[5001] == 0);
    assert_eq!(store.read_at(&mut [0; 2], MIB - 1).unwrap_err().kind(), ErrorKind::UnexpectedEof);
    assert_eq!(store.write_at(&[0; 2], MIB - 1).unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(store.set_len(MIB + 1).unwrap_err().kind(), ErrorKind::StorageFull);
    let range = FileRange { offset_bytes: MIB, len_bytes: 1 };
    assert_eq!(store.allocate(range).unwrap_err().kind(), ErrorKind::StorageFull);
    assert_eq!(
        store.allocate(FileRange { offset_bytes: u64::MAX, len_bytes: 2 }).unwrap_err().kind(),
        ErrorKind::StorageFull
    );
    store.zero_range(FileRange { offset_bytes: 200, len_bytes: 100 }, Zeroing::Keep).unwrap();
    store.set_len(1000).unwrap();
    assert_eq!(store.len_bytes().unwrap(), 1000);
    store.allocate(FileRange { offset_bytes: 1000, len_bytes: 9000 }).unwrap();
    store.read_at(&mut found, 100).unwrap();
    assert!(found[..100] == [7; 100] && found[100..200] == [0; 100] && found[200..900] == [7; 700]);
    assert!(found[900..] == [0; 4102], "the range that was cut off reads as zeros");
    store.sync_data().unwrap();
    let refused = NbdStore::open(&NbdUri { reconnect: Some(Duration::from_secs(1)), ..server.uri() }, false);
    assert!(refused.unwrap_err().to_string().contains("leave it out"));
}
