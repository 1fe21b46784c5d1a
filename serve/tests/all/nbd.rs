//! The NBD server and well-behaved clients.

use crate::common::{Client, eventually, memory, raw_file, serve};
use diskwright_nbd::wire::{
    CONTEXT_ALLOCATION, CONTEXT_DEPTH, Command, CommandFlags, ErrorCode, Framing, OptionCode, option,
};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{CacheMode, MemoryStore, RawDevice};
use std::{collections::HashMap, io::Read, sync::Arc};

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];
const NONE: CommandFlags = CommandFlags::empty();

fn pattern(start: usize, len: usize) -> Vec<u8> {
    (start..start + len).map(|n| (n % 251) as u8 ^ (n >> 12) as u8).collect()
}

#[test]
fn writes_are_read_back_in_every_framing() {
    let dir = tempfile::tempdir().unwrap();
    for cache in [CacheMode::PageCache, CacheMode::Direct] {
        let device = raw_file(&dir.path().join("disk"), 64 << 20, cache);
        let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
        for (n, framing) in FRAMINGS.into_iter().enumerate() {
            let mut client = served.client().go("disk", framing, &[]);
            // From one sector to more than one buffer, and to the protocol's maximum.
            for len in [512, 4096, 100 << 10, 1 << 20, (1 << 20) + 512, (3 << 20) + 4096, 32 << 20] {
                let offset = (n as u64) << 12;
                let data: Vec<u8> = (0..len).map(|at| (at * 7 + n + len) as u8 ^ (at >> 9) as u8).collect();
                client.write(offset, &data, CommandFlags::FUA).unwrap();
                assert!(client.read(offset, len as u64).unwrap() == data, "{framing:?} {len}");
            }
            client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
            client.ask(Command::CACHE, NONE, 0, 40 << 20).unwrap();
            client.ask(Command::CACHE, NONE, 0, 3 << 20).unwrap();
            client.ask(Command::TRIM, NONE, 1 << 20, 1 << 20).unwrap();
            let (no_hole, fast) = (CommandFlags::NO_HOLE, CommandFlags::FAST_ZERO);
            client.ask(Command::WRITE_ZEROES, no_hole | CommandFlags::FUA, 4 << 20, 4096).unwrap();
            client.ask(Command::WRITE_ZEROES, fast, 5 << 20, 8192).unwrap();
            assert!(client.read(4 << 20, 4096).unwrap().iter().all(|&byte| byte == 0));
            assert!(client.read(5 << 20, 8192).unwrap().iter().all(|&byte| byte == 0));
            client.send(Command::DISCONNECT, 0, 0);
            assert!(client.is_hung_up());
        }
    }
}

#[test]
fn hundreds_of_requests_in_one_message_are_all_answered() {
    let Some(served) = serve(vec![("m", memory(4 << 20, true))], ServerOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 4 << 20, CacheMode::Direct);
    let Some(on_disk) = serve(vec![("m", device)], ServerOptions::default()) else { return };
    for (served, framing) in
        [(&served, Framing::Simple), (&on_disk, Framing::Structured), (&on_disk, Framing::Extended)]
    {
        let mut client = served.client().go("m", framing, &[]);
        let mut batch = Vec::new();
        let blocks = 900;
        for block in 0..blocks {
            batch.extend(client.request(Command::WRITE, NONE, block * 4096, 4096));
            batch.extend_from_slice(&[block as u8 ^ 0x5a; 4096]);
        }
        let mut writer = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || std::io::Write::write_all(&mut writer, &batch).unwrap());
        for _ in 0..blocks {
            client.reply(0).unwrap();
        }
        sender.join().unwrap();
        let mut batch = Vec::new();
        let mut wanted = HashMap::new();
        for block in 0..blocks {
            let bytes = client.request(Command::READ, NONE, block * 4096, 4096);
            wanted.insert(u64::from_be_bytes(bytes[8..16].try_into().unwrap()), block);
            batch.extend(bytes);
        }
        let mut writer = client.stream.try_clone().unwrap();
        let sender = std::thread::spawn(move || std::io::Write::write_all(&mut writer, &batch).unwrap());
        for _ in 0..blocks {
            let (cookie, contents) = client.try_reply(4096).unwrap();
            let block = wanted.remove(&cookie).expect("each cookie once");
            assert!(contents.unwrap().iter().all(|&byte| byte == block as u8 ^ 0x5a), "block {block}");
        }
        sender.join().unwrap();
        let totals = served.server().metrics().totals();
        assert!(totals.commands[0].requests >= 900 && totals.enters < 3000, "{totals:?}");
    }
}

#[test]
fn clients_that_did_not_ask_for_block_sizes_must_use_whole_sectors() {
    let store = Arc::new(MemoryStore::with_bytes("memory", vec![7; 1 << 20]));
    let device = Arc::new(RawDevice::new(store, true, 4096).unwrap());
    let Some(served) = serve(vec![("large", device)], ServerOptions::default()) else { return };
    let mut client = served.client();
    let mut asked = Vec::new();
    option::encode_plain(OptionCode::EXPORT_NAME, b"large", &mut asked);
    client.say(&asked);
    client.stream.read_exact(&mut [0; 10]).unwrap();
    for mut client in [client, served.client().go("large", Framing::Simple, &[])] {
        for (offset, len) in [(0, 512), (512, 4096), (4096, 4608)] {
            assert_eq!(client.read(offset, len).unwrap_err(), ErrorCode::EINVAL);
            assert_eq!(client.write(offset, &vec![9; len as usize], NONE).unwrap_err(), ErrorCode::EINVAL);
            assert_eq!(client.ask(Command::WRITE_ZEROES, NONE, offset, len).unwrap_err(), ErrorCode::EINVAL);
        }
        assert!(client.read(0, 16 << 10).unwrap().iter().all(|&byte| byte == 7), "the disk is unchanged");
        client.write(16 << 10, &[9; 4096], NONE).unwrap();
        assert_eq!(client.read(16 << 10, 4096).unwrap(), [9; 4096]);
    }
}

#[test]
fn invalid_requests_are_refused_and_the_session_continues() {
    let devices = vec![("rw", memory(1 << 20, true)), ("ro", memory(1 << 20, false))];
    let Some(served) = serve(devices, ServerOptions::default()) else { return };
    let size = 1u64 << 20;
    for framing in FRAMINGS {
        let mut client = served.client().go("rw", framing, &[]);
        for (offset, len) in
            [(size, 512), (size - 512, 1024), (u64::MAX - 511, 512), (0, 0), (1, 512), (0, 511), (100, 4096)]
        {
            assert_eq!(client.read(offset, len).unwrap_err(), ErrorCode::EINVAL, "{framing:?} read {offset} {len}");
            let past = len > 0 && offset.checked_add(len).is_none_or(|end| end > size);
            let expected = if past { ErrorCode::ENOSPC } else { ErrorCode::EINVAL };
            let data = vec![1; len as usize];
            assert_eq!(client.write(offset, &data, NONE).unwrap_err(), expected, "{framing:?} write {offset} {len}");
            for command in [Command::TRIM, Command::WRITE_ZEROES] {
                assert_eq!(client.ask(command, NONE, offset, len).unwrap_err(), expected);
            }
        }
        // 4 GiB, or the most that 32 bits hold.
        let huge = if framing == Framing::Extended { 4 << 30 } else { u64::from(u32::MAX) - 511 };
        assert_eq!(client.read(0, huge).unwrap_err(), ErrorCode::EINVAL);
        assert_eq!(client.ask(Command::WRITE_ZEROES, NONE, 0, huge).unwrap_err(), ErrorCode::ENOSPC);
        assert_eq!(client.ask(Command(99), NONE, 0, 512).unwrap_err(), ErrorCode::EINVAL);
        assert_eq!(client.ask(Command::BLOCK_STATUS, NONE, 0, 512).unwrap_err(), ErrorCode::EINVAL);
        let odd = CommandFlags::from_bits_retain(0x100);
        assert_eq!(client.ask(Command::FLUSH, odd, 0, 0).unwrap_err(), ErrorCode::EINVAL);
        assert_eq!(client.ask(Command::READ, CommandFlags::NO_HOLE, 0, 512).unwrap_err(), ErrorCode::EINVAL);
        // Longer than the maximum payload, but short enough to be skipped.
        let much = vec![1; (33 << 20) + 512];
        assert_eq!(client.write(0, &much, NONE).unwrap_err(), ErrorCode::ENOSPC);
        assert_eq!(client.read(512, 512).unwrap(), pattern(512, 512), "the disk is unchanged");

        let mut client = served.client().go("ro", framing, &[]);
        assert_eq!(client.write(0, &[1; 512], NONE).unwrap_err(), ErrorCode::EPERM);
        assert_eq!(client.ask(Command::TRIM, NONE, 0, 512).unwrap_err(), ErrorCode::EPERM);
        client.ask(Command::FLUSH, NONE, 0, 0).unwrap();
        assert_eq!(client.read(0, 1024).unwrap(), pattern(0, 1024));
    }
}

#[test]
fn block_status_reports_holes_and_data() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 8 << 20, CacheMode::PageCache);
    let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
    for framing in [Framing::Structured, Framing::Extended] {
        let mut client = served.client().go("disk", framing, &[CONTEXT_ALLOCATION]);
        client.write(1 << 20, &[1; 65536], CommandFlags::FUA).unwrap();
        // A reply may end early, which it does on a busy machine; the next one goes on.
        let mut extents: Vec<[u64; 2]> = Vec::new();
        let mut at_bytes = 0;
        while at_bytes < 4 << 20 {
            let told = client.ask(Command::BLOCK_STATUS, NONE, at_bytes, (4 << 20) - at_bytes).unwrap();
            let words: Vec<u64> = if framing == Framing::Extended {
                told[8..].chunks(8).map(|eight| u64::from_be_bytes(eight.try_into().unwrap())).collect()
            } else {
                told[4..].chunks(4).map(|four| u32::from_be_bytes(four.try_into().unwrap()).into()).collect()
            };
            for extent in words.chunks(2) {
                at_bytes += extent[0];
                match extents.last_mut() {
                    Some(last) if last[1] == extent[1] => last[0] += extent[0],
                    _ => extents.push([extent[0], extent[1]]),
                }
            }
        }
        assert_eq!(extents, [[1 << 20, 3], [65536, 0], [(3 << 20) - 65536, 3]], "{framing:?}");
        // Two contexts with one descriptor each: two chunks.
        let mut client = served.client().go("disk", framing, &[CONTEXT_ALLOCATION, CONTEXT_DEPTH]);
        let bytes = client.request(Command::BLOCK_STATUS, CommandFlags::REQ_ONE, 0, 4 << 20);
        client.say(&bytes);
        let mut both = vec![0; if framing == Framing::Extended { 2 * (32 + 24) } else { 2 * (20 + 12) }];
        client.stream.read_exact(&mut both).unwrap();
    }
}

#[test]
fn several_connections_see_one_disk() {
    let devices = vec![("a", memory(1 << 20, true)), ("b", memory(1 << 20, true))];
    let Some(served) = serve(devices, ServerOptions { workers: 2, ..ServerOptions::default() }) else { return };
    let mut clients: Vec<Client> =
        (0..6).map(|n| served.client().go(if n % 2 == 0 { "a" } else { "b" }, FRAMINGS[n % 3], &[])).collect();
    clients[0].write(4096, &[1; 4096], NONE).unwrap();
    clients[1].write(4096, &[2; 4096], NONE).unwrap();
    for (n, client) in clients.iter_mut().enumerate() {
        let expected = 1 + (n % 2) as u8;
        assert!(client.read(4096, 4096).unwrap().iter().all(|&byte| byte == expected));
    }
    assert_eq!(served.server().metrics().totals().connections, 6);
    drop(clients);
    eventually("the connections are closed", || served.server().metrics().totals().connections == 0);
}

#[test]
fn large_ranges_are_cleared_in_steps() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 5 << 30, CacheMode::PageCache);
    let Some(served) = serve(vec![("disk", device)], ServerOptions::default()) else { return };
    for framing in FRAMINGS {
        let mut client = served.client().go("disk", framing, &[]);
        for at in [0u64, (600 << 20) - 512, (3 << 30) - 4096] {
            client.write(at, &[9; 4096], NONE).unwrap();
        }
        client.ask(Command::TRIM, CommandFlags::FUA, 0, 3 << 30).unwrap();
        for at in [0u64, (600 << 20) - 512, (3 << 30) - 4096] {
            assert!(client.read(at, 4096).unwrap().iter().all(|&byte| byte == 0), "{framing:?} {at}");
        }
    }
}

#[test]
fn only_the_damaged_block_fails_and_it_counts_as_data() {
    use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
    use diskwright_store::{BlockDevice, Blocking, EngineKind};
    use std::os::unix::fs::FileExt;
    const MIB: u64 = 1 << 20;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    let (size_bytes, block_bytes) = (Some(16 * MIB), Some(MIB as u32));
    create(&path, &CreateRequest { size_bytes, block_bytes, ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    Blocking::open(&*disk, EngineKind::Sync).unwrap().write(0, &[7; 4 << 20], false).unwrap();
    disk.close().unwrap();
    drop(disk);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&(1u64 << 40 | 6).to_le_bytes(), 3 * MIB + 8).unwrap();
    let disk: Arc<dyn BlockDevice> = Disk::open(&path, &OpenOptions::default()).unwrap();
    let Some(served) = serve(vec![("disk", disk)], ServerOptions::default()) else { return };
    for framing in FRAMINGS {
        let mut client = served.client().go("disk", framing, &[]);
        for (offset, len) in [(MIB, 4096), (MIB - 512, 1024), (0, 4 * MIB)] {
            assert_eq!(client.read(offset, len), Err(ErrorCode::EIO), "{framing:?} {offset}");
        }
        assert!(client.read(0, MIB).unwrap().iter().all(|&byte| byte == 7));
        assert!(client.read(2 * MIB, 2 * MIB).unwrap().iter().all(|&byte| byte == 7));
        assert!(client.read(4 * MIB, 12 * MIB).unwrap().iter().all(|&byte| byte == 0));
    }
    let device = diskwright_nbd::NbdDevice::open(&diskwright_nbd::NbdUri::parse(&served.uri("disk")).unwrap(), false);
    let mut extents = Vec::new();
    device.unwrap().extents(0, 16 * MIB, &mut extents).unwrap();
    let data: u64 = extents.iter().filter(|at| !at.kind.reads_as_zeros()).map(|at| at.len_bytes).sum();
    assert_eq!(data, 4 * MIB, "{extents:?}");
}
