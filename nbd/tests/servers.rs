//! The client against third-party servers: nbdkit and qemu-nbd, with every protocol version that
//! they support.

mod common;

use common::{Server, nbdkit, qemu_nbd};
use diskwright_nbd::{
    ClientError, NbdDevice,
    wire::{Framing, TransmissionFlags},
};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, Extent, ExtentKind, IoBuf, Operation, QueueOptions, Request, Slab,
};
use proptest::prelude::*;
use std::{fs, io, thread};

const MIB: u64 = 1 << 20;

fn open(server: &Server) -> NbdDevice {
    NbdDevice::open(&server.uri(), true).unwrap()
}

fn blocking(device: &NbdDevice) -> Blocking {
    Blocking::open(device, EngineKind::Auto).unwrap()
}

/// Bytes that depend on their offset and on `seed`.
fn pattern(offset_bytes: u64, len: usize, seed: u8) -> Vec<u8> {
    (offset_bytes..).take(len).map(|at| (at >> 9) as u8 ^ (at as u8).wrapping_mul(31) ^ seed | 1).collect()
}

/// Writes, reads, zeroes and flushes; compares the contents with memory.
fn exercise(device: &NbdDevice) {
    let size = device.geometry().size_bytes.min(8 * MIB) as usize;
    let mut model = vec![0u8; size];
    let mut queue = blocking(device);
    let mut write = |queue: &mut Blocking, offset: u64, len: usize, fua: bool| {
        let data = pattern(offset, len, 7);
        queue.write(offset, &data, fua).unwrap();
        model[offset as usize..][..len].copy_from_slice(&data);
    };
    write(&mut queue, 0, 512, false);
    write(&mut queue, 4096, 3 << 20, false);
    write(&mut queue, 5 * MIB + 512, 65536, true);
    queue.write_zeroes(MIB, 65536).unwrap();
    model[MIB as usize..][..65536].fill(0);
    queue.discard(2 * MIB, 131_072).unwrap();
    model[2 * MIB as usize..][..131_072].fill(0);
    queue.flush().unwrap();
    let mut found = vec![0xee; size];
    queue.read(0, &mut found).unwrap();
    assert!(found == model, "the contents differ, first at {:?}", found.iter().zip(&model).position(|(a, b)| a != b));
}

#[test]
fn qemu_nbd_stores_what_is_written() {
    let Some(server) = qemu_nbd(8 * MIB, &[]) else { return };
    let device = open(&server);
    assert!(device.export().framing >= Framing::Structured);
    assert!(device.export().allocation_context.is_some());
    exercise(&device);
    let mut found = vec![0; 512];
    blocking(&device).read(4096, &mut found).unwrap();
    assert_eq!(fs::read(server.dir.path().join("disk.raw")).unwrap()[4096..4608], found);
}

#[test]
fn servers_with_fewer_features() {
    for (what, args, framing) in [
        ("newest", &["memory", "8M"][..], Framing::Structured),
        ("without structured replies", &["--no-sr", "memory", "8M"], Framing::Simple),
        ("newstyle, not fixed", &["--mask-handshake=0", "memory", "8M"], Framing::Simple),
        ("without zeroing", &["--filter=nozero", "memory", "8M"], Framing::Structured),
        ("without FUA", &["--filter=fua", "memory", "8M"], Framing::Structured),
        ("without flush", &["--filter=fua", "memory", "8M", "fuamode=discard"], Framing::Structured),
        ("without extents", &["--filter=noextents", "memory", "8M"], Framing::Structured),
        ("one request at a time", &["--filter=noparallel", "memory", "8M"], Framing::Structured),
        (
            "with small payloads",
            &["--filter=blocksize-policy", "memory", "8M", "blocksize-maximum=64k", "blocksize-error-policy=error"],
            Framing::Structured,
        ),
        (
            "with large blocks",
            &["--filter=blocksize-policy", "memory", "8M", "blocksize-minimum=512", "blocksize-error-policy=error"],
            Framing::Structured,
        ),
    ] {
        let Some(server) = nbdkit(args) else { return };
        let device = NbdDevice::open(&server.uri(), true).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(device.export().framing, framing, "{what}");
        exercise(&device);
    }
}

#[test]
fn an_oldstyle_server() {
    // nbdkit 1.32 announces FUA and flush in oldstyle and then refuses both, so neither is
    // requested.
    let Some(server) = nbdkit(&["--oldstyle", "memory", "8M"]) else { return };
    let device = open(&server);
    let mut queue = blocking(&device);
    let data = pattern(0, 3 << 20, 4);
    queue.write(4096, &data, false).unwrap();
    let mut found = vec![0; data.len()];
    queue.read(4096, &mut found).unwrap();
    assert!(found == data);
    let named = diskwright_nbd::NbdUri::unix(&server.socket, "disk");
    assert!(matches!(NbdDevice::open(&named, false).unwrap_err(), ClientError::UnknownExport { .. }));
}

#[test]
fn answers_in_any_order_reach_their_buffers() {
    let Some(server) = nbdkit(&["-t", "8", "--filter=delay", "memory", "16M", "rdelay=3ms"]) else { return };
    let device = open(&server);
    let mut queue = blocking(&device);
    queue.write(0, &pattern(0, 16 << 20, 3), false).unwrap();
    drop(queue);
    let slab = Slab::new(32, 65536);
    let mut queue = device.open_queue(&QueueOptions { depth: 32, ..QueueOptions::default() }).unwrap();
    let mut done = Vec::new();
    let offset = |tag: u64| tag * 7919 % 31 * 500 * 1024;
    let length = |tag: u64| 512 * (1 + tag as usize * 13 % 128);
    for (tag, buf) in (0..).zip(slab.take_all()) {
        queue.push(Request::read(offset(tag), length(tag), buf, tag)).unwrap();
    }
    assert_eq!(queue.push(Request::flush(99)).unwrap_err().reason.kind(), io::ErrorKind::WouldBlock);
    queue.reap(0, &mut done).unwrap();
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done).unwrap();
    }
    assert_eq!(done.len(), 32);
    for completion in done {
        completion.result.unwrap();
        let (buf, len) = (completion.buf.unwrap(), length(completion.tag));
        assert!(buf[..len] == pattern(offset(completion.tag), len, 3)[..], "{}", completion.tag);
    }
}

#[test]
fn large_requests_are_cut_and_joined() {
    let args = ["--filter=blocksize-policy", "memory", "64M", "blocksize-maximum=1M", "blocksize-error-policy=error"];
    let Some(server) = nbdkit(&args) else { return };
    let device = open(&server);
    let mut queue = device.open_queue(&QueueOptions { depth: 4, ..QueueOptions::default() }).unwrap();
    let len = 48 << 20;
    let mut buf = IoBuf::new(len);
    buf.copy_from_slice(&pattern(MIB, len, 9));
    let mut done = Vec::new();
    queue.push(Request { fua: true, ..Request::write(MIB, len, buf, 1) }).unwrap();
    queue.reap(1, &mut done).unwrap();
    let mut buf = done.pop().unwrap().buf.unwrap();
    buf.fill(0);
    queue.push(Request::read(MIB, len, buf, 2)).unwrap();
    queue.reap(1, &mut done).unwrap();
    let completion = done.pop().unwrap();
    completion.result.unwrap();
    assert!(completion.buf.unwrap()[..] == pattern(MIB, len, 9)[..]);
}

#[test]
fn queues_of_many_threads_share_a_connection_or_have_their_own() {
    // qemu-nbd without --shared accepts one client and does not announce CAN_MULTI_CONN.
    let Some(alone) = qemu_nbd(16 * MIB, &[]) else { return };
    let Some(shared) = nbdkit(&["-t", "4", "memory", "16M"]) else { return };
    for (server, connections) in [(alone, 1), (shared, 4)] {
        let device = open(&server);
        thread::scope(|scope| {
            for thread in 0..4u64 {
                let device = &device;
                scope.spawn(move || {
                    let mut queue = device.open_queue(&QueueOptions { depth: 8, ..QueueOptions::default() }).unwrap();
                    let mut free = Slab::new(8, 65536).take_all();
                    let mut done = Vec::new();
                    for step in 0..64u64 {
                        let at = thread * 4 * MIB + step * 65536;
                        while free.is_empty() {
                            queue.reap(1, &mut done).unwrap();
                            for completion in done.drain(..) {
                                completion.result.unwrap();
                                free.extend(completion.buf);
                            }
                        }
                        let mut buf = free.pop().unwrap();
                        buf.copy_from_slice(&pattern(at, 65536, thread as u8));
                        queue.push(Request::write(at, 65536, buf, step)).unwrap();
                    }
                    while queue.in_flight() > 0 {
                        queue.reap(1, &mut done).unwrap();
                    }
                    queue.push(Request::flush(0)).unwrap();
                    queue.reap(1, &mut done).unwrap();
                    assert!(done.iter().all(|completion| completion.result.is_ok()));
                });
            }
        });
        assert!(device.connections() <= connections);
        let mut queue = blocking(&device);
        let mut found = vec![0; 4 << 20];
        for thread in 0..4u64 {
            queue.read(thread * 4 * MIB, &mut found).unwrap();
            for (step, found) in found.chunks(65536).enumerate() {
                let at = thread * 4 * MIB + step as u64 * 65536;
                assert!(found == pattern(at, 65536, thread as u8), "at {at}");
            }
        }
    }
}

fn kinds(device: &NbdDevice, offset_bytes: u64, len_bytes: u64) -> Vec<(u64, u64, ExtentKind)> {
    let mut out: Vec<Extent> = Vec::new();
    device.extents(offset_bytes, len_bytes, &mut out).unwrap();
    out.iter().map(|extent| (extent.offset_bytes, extent.len_bytes, extent.kind)).collect()
}

#[test]
fn extents_are_what_block_status_says() {
    use ExtentKind::{Data, Zero};
    // Larger than one block status can report in compact framing.
    let size = 9 << 30;
    let Some(server) = qemu_nbd(size, &[]) else { return };
    let device = open(&server);
    blocking(&device).write(5 << 30, &pattern(0, 1 << 20, 1), false).unwrap();
    let expected = [(0, 5 << 30, Zero), (5 << 30, MIB, Data), ((5 << 30) + MIB, size - (5 << 30) - MIB, Zero)];
    assert_eq!(kinds(&device, 0, size), expected);
    assert_eq!(kinds(&device, (5 << 30) + 512, 1024), [((5 << 30) + 512, 1024, Data)]);
    assert_eq!(kinds(&device, size, 512), []);
    let Some(server) = nbdkit(&["--filter=noextents", "memory", "8M"]) else { return };
    assert_eq!(kinds(&open(&server), MIB, MIB), [(MIB, MIB, Data)]);
}

#[test]
fn layers_come_from_qemus_context() {
    if !common::has("qemu-img") {
        return;
    }
    let dir = tempfile::TempDir::new().unwrap();
    let run = |program: &str, args: &[&str]| {
        let output = std::process::Command::new(program).args(args).current_dir(dir.path()).output().unwrap();
        assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    };
    run("qemu-img", &["create", "-q", "-f", "qcow2", "base.qcow2", "8M"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 1 0 1M", "-c", "write -z 1M 1M", "base.qcow2"]);
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2", "top.qcow2"]);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 2 4M 1M", "top.qcow2"]);
    let args = ["--persistent", "-A", "-k", "SOCKET", "-f", "qcow2", "DIR/top.qcow2"];
    let Some(server) = common::start_in(dir, "qemu-nbd", &args) else { return };
    let device = NbdDevice::open(&server.uri(), false).unwrap();
    let mut out = Vec::new();
    device.extents(0, 8 * MIB, &mut out).unwrap();
    let told: Vec<_> = out.iter().map(|e| (e.offset_bytes / MIB, e.len_bytes / MIB, e.kind, e.depth)).collect();
    use ExtentKind::{Data, Unallocated, Zero};
    let expected = [(0, 1, Data, 1), (1, 1, Zero, 1), (2, 2, Unallocated, 0), (4, 1, Data, 0), (5, 3, Unallocated, 0)];
    assert_eq!(told, expected);
}

#[test]
fn an_export_that_ends_within_a_sector() {
    let Some(server) = nbdkit(&["memory", "1000"]) else { return };
    let device = open(&server);
    assert_eq!(device.geometry().size_bytes, 1024);
    let mut queue = blocking(&device);
    let mut data = pattern(0, 1024, 5);
    let error = queue.write(0, &data, false).unwrap_err();
    assert!(error.to_string().contains("1000"), "{error}");
    data[1000..].fill(0);
    queue.write(0, &data, true).unwrap();
    let mut found = vec![0xee; 1024];
    queue.read(0, &mut found).unwrap();
    assert_eq!(found, data);
    queue.write_zeroes(512, 512).unwrap();
    queue.read(512, &mut found[512..]).unwrap();
    assert!(found[512..].iter().all(|&byte| byte == 0));
}

#[test]
fn errors_of_the_server_are_reported() {
    let args = ["--filter=error", "memory", "8M", "error-pwrite=ENOSPC", "error-pwrite-rate=100%"];
    let Some(server) = nbdkit(&args) else { return };
    let mut queue = blocking(&open(&server));
    let error = queue.write(4096, &[1; 512], false).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("WRITE of 512 bytes at 4096 with no space left"), "{error}");
    // The connection stays open.
    queue.read(0, &mut [0; 512]).unwrap();
    let args = ["--filter=error", "memory", "8M", "error-pread=EIO", "error-pread-rate=100%"];
    let Some(server) = nbdkit(&args) else { return };
    let mut queue = blocking(&open(&server));
    for _ in 0..3 {
        let error = queue.read(0, &mut [0; 65536]).unwrap_err();
        assert!(error.to_string().contains("READ of 65536 bytes at 0 with input/output error"), "{error}");
    }
    queue.write(0, &[1; 512], false).unwrap();
}

#[test]
fn unavailable_exports_and_servers_are_reported() {
    let Some(mut server) = nbdkit(&["--readonly", "memory", "8M"]) else { return };
    let error = NbdDevice::open(&server.uri(), true).unwrap_err();
    assert!(matches!(&error, ClientError::Unusable { what, .. } if what.contains("read-only")), "{error}");
    let device = NbdDevice::open(&server.uri(), false).unwrap();
    let refused = blocking(&device).write(0, &[0; 512], false).unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::ReadOnlyFilesystem);
    assert!(device.export().flags.contains(TransmissionFlags::READ_ONLY));
    let mut queue = blocking(&device);
    server.kill();
    let error = queue.read(0, &mut [0; 512]).unwrap_err();
    assert!(error.to_string().contains("the connection broke"), "{error}");
    let error = queue.read(0, &mut [0; 512]).unwrap_err();
    assert!(error.to_string().contains("the connection broke"), "{error}");
    let error = NbdDevice::open(&server.uri(), false).unwrap_err();
    assert!(matches!(error, ClientError::Connect { .. }), "{error}");
    let Some(server) = qemu_nbd(MIB, &["-x", "disk", "-D", "the only one"]) else { return };
    let error = NbdDevice::open(&server.uri(), false).unwrap_err();
    assert!(matches!(&error, ClientError::UnknownExport { exports, .. } if exports == &["disk"]), "{error}");
    let named = diskwright_nbd::NbdUri::unix(&server.socket, "disk");
    let device = NbdDevice::open(&named, false).unwrap();
    assert_eq!(device.export().description.as_deref(), Some("the only one"));
    // This server accepts one client at a time.
    drop(device);
    let mut tls = server.uri();
    tls.tls = Some(diskwright_nbd::uri::TlsParameters { trust_anyone: true, ..Default::default() });
    let error = NbdDevice::open(&tls, false).unwrap_err();
    assert!(matches!(error, ClientError::TlsMismatch { .. }), "{error}");
}

#[derive(Debug, Clone)]
struct Step {
    operation: Operation,
    sector: u64,
    sectors: u64,
    seed: u8,
    fua: bool,
}

fn step() -> impl Strategy<Value = Step> {
    use Operation::{Discard, Flush, Read, Write, WriteZeroes};
    let operation =
        prop_oneof![4 => Just(Write), 3 => Just(Read), 1 => Just(WriteZeroes), 1 => Just(Discard), 1 => Just(Flush)];
    (operation, 0u64..2000, 1u64..300, 1u8.., any::<bool>()).prop_map(|(operation, sector, sectors, seed, fua)| Step {
        operation,
        sector,
        sectors: sectors.min(2000 - sector),
        seed,
        fua,
    })
}

#[test]
fn contents_match_a_model() {
    let Some(server) = nbdkit(&["-t", "4", "--filter=delay", "memory", "1M", "wdelay=1ms"]) else { return };
    let device = open(&server);
    proptest!(ProptestConfig::with_cases(24), |(steps in prop::collection::vec(step(), 1..40))| {
        let mut queue = blocking(&device);
        queue.write_zeroes(0, MIB).unwrap();
        let mut model = vec![0u8; MIB as usize];
        for Step { operation, sector, sectors, seed, fua } in steps {
            let (offset, len) = (sector * 512, (sectors * 512) as usize);
            let range = offset as usize..offset as usize + len;
            match operation {
                Operation::Read => {
                    let mut found = vec![0xee; len];
                    queue.read(offset, &mut found).unwrap();
                    prop_assert!(found == model[range]);
                }
                Operation::Write => {
                    let data = pattern(offset, len, seed);
                    queue.write(offset, &data, fua).unwrap();
                    model[range].copy_from_slice(&data);
                }
                Operation::WriteZeroes => {
                    queue.write_zeroes(offset, len as u64).unwrap();
                    model[range].fill(0);
                }
                Operation::Discard => {
                    queue.discard(offset, len as u64).unwrap();
                    model[range].fill(0);
                }
                Operation::Flush => queue.flush().unwrap(),
            }
        }
        let mut found = vec![0xee; MIB as usize];
        queue.read(0, &mut found).unwrap();
        prop_assert!(found == model);
    });
}
