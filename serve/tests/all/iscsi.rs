//! The iSCSI target, with an initiator of our own over a unix socket.

use crate::common::{
    PATIENCE, Served, eventually,
    iscsi_initiator::{Ended, Initiator, TARGET, Ways, cdb_16},
    memory, raw_file,
};
use diskwright_iscsi::{
    scsi::op,
    wire::{HEADER_BYTES, text},
};
use diskwright_serve::{
    ThreadError, iscsi,
    net::{Address, Export, Listener, ServeError, ServerOptions},
};
use diskwright_store::{BlockDevice, CacheMode};
use std::{
    io::Write,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

pub fn exported(name: &str, device: Arc<dyn BlockDevice>) -> Export {
    Export { name: name.into(), description: String::new(), device }
}

pub fn serve(exports: Vec<Export>, options: ServerOptions) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    match iscsi::start(TARGET, exports, vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

pub fn served() -> Option<Served> {
    serve(vec![exported("disk", memory(16 << 20, true))], ServerOptions::default())
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 512) as u8 ^ seed).collect()
}

/// Whether the first blocks are as [`memory`] makes them.
pub fn is_untouched(initiator: &mut Initiator, blocks: u32) -> bool {
    let found = read(initiator, 0, blocks).data;
    found.len() == blocks as usize * 512 && found.iter().enumerate().all(|(at, &byte)| byte == (at % 251) as u8)
}

pub fn read(initiator: &mut Initiator, first: u64, blocks: u32) -> Ended {
    initiator.fetch(0, &cdb_16(op::READ_16, 0, first, blocks), blocks * 512)
}

pub fn write(initiator: &mut Initiator, first: u64, data: &[u8]) -> Ended {
    initiator.give(0, &cdb_16(op::WRITE_16, 0, first, data.len() as u32 / 512), data)
}

#[test]
fn every_length_in_every_way_of_logging_in() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = vec![0_u8; 16 << 20];
    let device = raw_file(&dir.path().join("disk"), model.len() as u64, CacheMode::PageCache);
    let Some(served) = serve(vec![exported("disk", device)], ServerOptions::default()) else { return };
    for round in 0..16_u8 {
        let is = |bit: u8| round >> bit & 1 != 0;
        let ways = Ways {
            header_digest: is(0),
            data_digest: is(1),
            immediate: is(2),
            security: is(3),
            segment_bytes: [256 << 10, 8192, 3000, 512][usize::from(round / 4)],
            burst_bytes: [1 << 20, 65536, 8192, 5000][usize::from(round % 4)],
            first_burst_bytes: [65536, 4096, 512, 3000][usize::from(round % 4)],
            ..Ways::default()
        };
        let mut initiator = Initiator::session(&served.socket(), ways.clone());
        for (index, blocks) in [1, 8, 16, 128, 129, 600, 2048, 5000].into_iter().enumerate() {
            let data = pattern(blocks * 512, round + index as u8);
            let first = 17 * index as u64 + 3000 * index as u64;
            let flags = if index % 2 == 0 { 0x08 } else { 0 };
            let ended = initiator.give(0, &cdb_16(op::WRITE_16, flags, first, blocks as u32), &data);
            assert!(ended.is_good() && ended.residual == (0, 0), "{ways:?} {blocks}: {ended:?}");
            model[first as usize * 512..][..data.len()].copy_from_slice(&data);
            let found = read(&mut initiator, first, blocks as u32);
            assert!(found.data == data && found.residual == (0, 0), "{ways:?} {blocks}");
            assert!(initiator.pieces.iter().all(|&bytes| bytes <= ways.segment_bytes && bytes <= ways.burst_bytes));
        }
        assert!(initiator.plain(0, &cdb_16(op::SYNCHRONIZE_CACHE_16, 0, 0, 0)).is_good());
    }
    drop(served);
    assert!(std::fs::read(dir.path().join("disk")).unwrap() == model, "the file differs from the model");
}

#[test]
fn commands_that_compare_clear_and_repeat() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    let (a, b) = (pattern(4096, 1), pattern(4096, 2));
    assert!(write(&mut initiator, 8, &a).is_good());
    let mut compare_and_write = [0; 16];
    compare_and_write[0] = op::COMPARE_AND_WRITE;
    (compare_and_write[9], compare_and_write[13]) = (8, 8);
    assert!(initiator.give(0, &compare_and_write, &[a.clone(), b.clone()].concat()).is_good());
    // It is b now. The offset of the first difference is told.
    let again = initiator.give(0, &compare_and_write, &[a.clone(), b.clone()].concat());
    assert_eq!(again.sense, Some((0xe, 0x1d, 0)));
    assert!(read(&mut initiator, 8, 8).data == b);
    assert!(initiator.give(0, &cdb_16(op::ORWRITE, 0, 8, 8), &a).is_good());
    let ored: Vec<u8> = a.iter().zip(&b).map(|(a, b)| a | b).collect();
    assert!(read(&mut initiator, 8, 8).data == ored);
    let verify = |initiator: &mut Initiator, data: &[u8]| initiator.give(0, &cdb_16(op::VERIFY_16, 2, 8, 8), data);
    assert!(verify(&mut initiator, &ored).is_good());
    assert_eq!(verify(&mut initiator, &a).sense, Some((0xe, 0x1d, 0)));
    assert!(initiator.give(0, &cdb_16(op::WRITE_AND_VERIFY_16, 2, 64, 5000), &pattern(5000 * 512, 3)).is_good());
    assert!(read(&mut initiator, 64, 5000).data == pattern(5000 * 512, 3));
    // One block, again and again; then zeros, with and without data; then UNMAP.
    let block = pattern(512, 9);
    assert!(initiator.give(0, &cdb_16(op::WRITE_SAME_16, 0, 100, 20000), &block).is_good());
    assert!(read(&mut initiator, 100, 20000).data == block.repeat(20000));
    assert!(initiator.give(0, &cdb_16(op::VERIFY_16, 6, 100, 20000), &block).is_good());
    assert!(initiator.give(0, &cdb_16(op::WRITE_SAME_16, 8, 100, 10), &[0; 512]).is_good());
    assert!(initiator.plain(0, &cdb_16(op::WRITE_SAME_16, 9, 110, 10)).is_good());
    let mut list = vec![0, 0x16 + 16, 0, 32, 0, 0, 0, 0];
    for (first, blocks) in [(200_u64, 5_u32), (300, 7)] {
        list.extend(first.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    assert!(initiator.give(0, &[op::UNMAP, 0, 0, 0, 0, 0, 0, 0, list.len() as u8, 0], &list).is_good());
    let found = read(&mut initiator, 100, 300).data;
    for (number, found) in found.chunks(512).enumerate() {
        let is_clear = matches!(number, 0..20 | 100..105 | 200..207);
        assert_eq!(found, if is_clear { &[0; 512][..] } else { &block }, "block {}", 100 + number);
    }
    // All up to the end.
    assert!(initiator.give(0, &cdb_16(op::WRITE_SAME_16, 0, 32700, 0), &block).is_good());
    assert!(read(&mut initiator, 32700, 68).data == block.repeat(68));
}

#[test]
fn lengths_that_differ_are_told() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways { immediate: false, ..Ways::default() });
    assert!(write(&mut initiator, 0, &[7; 1024]).is_good());
    // The initiator has room for more, for less, and for none.
    for (room_bytes, residual) in [(10000, (2, 10000 - 1024)), (600, (4, 424)), (0, (4, 1024))] {
        let ended = initiator.fetch(0, &cdb_16(op::READ_16, 0, 0, 2), room_bytes);
        assert_eq!((ended.status, ended.residual, ended.data.len()), (0, residual, room_bytes.min(1024) as usize));
    }
    // It has more data, or less. What there is is written, to the byte.
    for (bytes, residual) in [(3000_usize, (2, 3000 - 1024)), (700, (4, 324)), (512, (4, 512)), (0, (4, 1024))] {
        let ended = initiator.give(0, &cdb_16(op::WRITE_16, 0, 0, 2), &vec![9; bytes]);
        assert_eq!((ended.status, ended.residual), (0, residual), "{bytes}");
        let found = read(&mut initiator, 0, 2).data;
        let written = bytes.min(1024);
        assert!(found[..written].iter().all(|&byte| byte == 9) && found[written..].iter().all(|&byte| byte == 7));
        assert!(write(&mut initiator, 0, &[7; 1024]).is_good());
    }
    for (name, ended) in [
        ("past the end", initiator.fetch(0, &cdb_16(op::READ_16, 0, 32767, 2), 1024)),
        ("far past the end", initiator.fetch(0, &cdb_16(op::READ_16, 0, u64::MAX, 2), 1024)),
    ] {
        assert_eq!(ended.sense, Some((5, 0x21, 0)), "{name}");
    }
    assert_eq!(initiator.fetch(0, &cdb_16(op::READ_16, 0, 0, u32::MAX), 1024).sense, Some((5, 0x21, 0)));
    assert!(read(&mut initiator, 5, 0).is_good(), "no blocks at all");
    assert_eq!(initiator.plain(0, &[0xc1, 0, 0, 0, 0, 0]).sense, Some((5, 0x20, 0)), "an unknown command");
    assert_eq!(initiator.plain(3, &[0; 6]).sense, Some((5, 0x25, 0)), "an unknown logical unit");
    assert_eq!(initiator.fetch(3, &[op::INQUIRY, 0, 0, 0, 96, 0], 96).data[0], 0x7f);
}

#[test]
fn what_a_disk_is() {
    let exports = vec![exported("a", memory(16 << 20, true)), exported("b", memory(3 << 20, true))];
    let Some(served) = serve(exports, ServerOptions::default()) else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    let luns = initiator.fetch(0, &[op::REPORT_LUNS, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], 64).data;
    assert_eq!(luns, [0, 0, 0, 16, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(initiator.plain(1, &[0; 6]).sense, Some((6, 0x29, 0)), "each unit has its attention");
    let capacity = initiator.fetch(1, &[op::READ_CAPACITY_10, 0, 0, 0, 0, 0, 0, 0, 0, 0], 8).data;
    assert_eq!(capacity, [0, 0, 0x17, 0xff, 0, 0, 2, 0]);
    let mut id = |unit| initiator.fetch(unit, &[op::INQUIRY, 1, 0x83, 4, 0, 0], 1024).data;
    let (a, b) = (id(0), id(1));
    assert!(a != b && a.len() == b.len());
    let standard = initiator.fetch(0, &[op::INQUIRY, 0, 0, 0, 20, 0], 255);
    assert_eq!((standard.data.len(), standard.residual), (20, (2, 235)), "no more than the command allows");
    // Mode pages are told, and none can be changed.
    let pages = initiator.fetch(0, &[op::MODE_SENSE_6, 0, 0x3f, 0, 255, 0], 255).data;
    let mut same = pages.clone();
    (same[0], same[2]) = (0, 0);
    let select = [op::MODE_SELECT_6, 0x10, 0, 0, same.len() as u8, 0];
    assert!(initiator.give(0, &select, &same).is_good());
    same[14] ^= 4;
    assert_eq!(initiator.give(0, &select, &same).sense, Some((5, 0x26, 0)));
}

#[test]
fn targets_are_found_and_wrong_logins_are_refused() {
    let Some(served) = served() else { return };
    let name = ("InitiatorName", "iqn.2026-11.org.example:a".to_owned());
    let target = |name: &str| ("TargetName", name.to_owned());
    let cases = [
        (0x87, vec![target(TARGET)], 0x0207),
        (0x87, vec![name.clone()], 0x0207),
        (0x87, vec![name.clone(), target("iqn.2026-11.org.example:other")], 0x0203),
        (0x87, vec![name.clone(), target(TARGET), ("SessionType", "Strange".into())], 0x0209),
        (0x81, vec![name.clone(), target(TARGET), ("AuthMethod", "CHAP".into())], 0x0201),
        (0x8c, vec![name.clone(), target(TARGET)], 0x0200),
        (0x86, vec![name.clone(), target(TARGET)], 0x0200),
        (0xc7, vec![name.clone(), target(TARGET)], 0x0200),
    ];
    for (flags, keys, status) in cases {
        let mut initiator = Initiator::connect(&served.socket(), Ways::default());
        let answer = initiator.log_in_with(flags, &keys);
        assert_eq!(u16::from_be_bytes([answer.header[36], answer.header[37]]), status, "{keys:?}");
        assert!(initiator.receive().is_none(), "the connection ends");
    }
    let mut initiator = Initiator::connect(&served.socket(), Ways::default());
    let answer = initiator.log_in_with(0x87, &[name, ("SessionType", "Discovery".into())]);
    assert_eq!(answer.header[36], 0);
    let mut data = Vec::new();
    text::put(&mut data, "SendTargets", "All");
    // It is apart from the sessions of the same port.
    let mut other = Initiator::session(&served.socket(), Ways::default());
    let mut header = initiator.header(0x04, 0x80, data.len());
    header[24..28].copy_from_slice(&initiator.cmd_sn.to_be_bytes());
    initiator.send(&header, &data);
    let answer = initiator.receive().unwrap();
    assert_eq!((answer.opcode(), answer.data), (0x24, format!("TargetName={TARGET}\0").into_bytes()));
    initiator.cmd_sn += 1;
    let command = initiator.command(0, &[0; 6], 0, 0, 0);
    initiator.send(&command, &[]);
    assert!(initiator.receive().is_none(), "there are no disks in such a session");
    assert!(read(&mut other, 0, 1).is_good());
    let mut again = Initiator::connect(&served.socket(), Ways::default());
    let keys = [("InitiatorName", again.ways.initiator.to_owned()), ("SessionType", "Discovery".into())];
    assert_eq!(again.log_in_with(0x87, &keys).header[36], 0);
    thread::sleep(Duration::from_millis(700));
    assert!(read(&mut other, 0, 1).is_good(), "a discovery ends no session");
}

#[test]
fn pings_are_answered_and_a_logout_ends_the_session() {
    let Some(served) = served() else { return };
    let ways = Ways { header_digest: true, data_digest: true, ..Ways::default() };
    let mut initiator = Initiator::session(&served.socket(), ways);
    for data in [&b""[..], b"ping", b"hello"] {
        let mut header = initiator.header(0x40, 0x80, data.len());
        header[24..28].copy_from_slice(&initiator.cmd_sn.to_be_bytes());
        initiator.send(&header, data);
        let answer = initiator.receive().unwrap();
        assert_eq!((answer.opcode(), answer.u32_at(16), &answer.data[..]), (0x20, initiator.tag, data));
    }
    // Something that is not supported is rejected, and the session goes on.
    let snack = initiator.header(0x10, 0x80, 0);
    initiator.send(&snack, &[]);
    let answer = initiator.receive().unwrap();
    assert_eq!((answer.opcode(), answer.header[2], &answer.data[..]), (0x3f, 5, &snack[..]));
    // A damaged payload fails its command only.
    let command = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 1), 0, 512, 512);
    let mut bytes = initiator.bytes_of(&command, &[1; 512]);
    bytes[100] ^= 1;
    initiator.stream.write_all(&bytes).unwrap();
    assert_eq!(initiator.ended(&[]).sense, Some((0xb, 0x47, 5)));
    assert!(is_untouched(&mut initiator, 1));
    let mut header = initiator.header(0x46, 0x80, 0);
    header[24..28].copy_from_slice(&initiator.cmd_sn.to_be_bytes());
    initiator.send(&header, &[]);
    assert_eq!(initiator.receive().unwrap().opcode(), 0x26);
    assert!(initiator.receive().is_none());
}

#[test]
fn hostile_pdus_end_their_connection_only() {
    let Some(served) = served() else { return };
    let mut witness = Initiator::session(&served.socket(), Ways { isid: 9, ..Ways::default() });
    let with = |change: &dyn Fn(&mut [u8; HEADER_BYTES])| {
        let mut initiator = Initiator::session(&served.socket(), Ways::default());
        let mut header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 0);
        change(&mut header);
        let _ = initiator.stream.write_all(&header);
        let mut answers = 0;
        while initiator.receive().is_some() {
            answers += 1;
        }
        answers
    };
    assert_eq!(with(&|header| header[0] = 0x3f), 0, "an opcode of a target");
    assert_eq!(with(&|header| header[0] = 0x1c), 0, "an unknown opcode");
    assert_eq!(with(&|header| header[0] = 0x43), 0, "a second login");
    assert_eq!(with(&|header| header[5..8].fill(0xff)), 0, "16 MiB of data");
    assert_eq!(with(&|header| header[16..20].fill(0xff)), 0, "the tag that is none");
    // Before the login.
    let mut initiator = Initiator::connect(&served.socket(), Ways::default());
    let command = initiator.command(0, &[0; 6], 0, 0, 0);
    initiator.send(&command, &[]);
    assert!(initiator.receive().is_none());
    let mut other = Initiator::connect(&served.socket(), Ways::default());
    other.stream.write_all(b"GET / HTTP/1.1\r\nHost: disks.example.org\r\nAccept: */*\r\n\r\n").unwrap();
    assert!(other.receive().is_none());
    assert!(read(&mut witness, 0, 1).is_good());
}

#[test]
fn numbers_outside_of_the_window_are_ignored() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    for cmd_sn in [initiator.cmd_sn - 1, initiator.max_cmd_sn + 1, initiator.cmd_sn + 1] {
        let mut header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 1), 0, 512, 512);
        header[24..28].copy_from_slice(&cmd_sn.to_be_bytes());
        initiator.cmd_sn -= 1;
        initiator.send(&header, &[5; 512]);
    }
    assert!(is_untouched(&mut initiator, 1));
    // A tag that is in use ends the session.
    let header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 0);
    initiator.send(&header, &[]);
    assert_eq!(initiator.receive().unwrap().opcode(), 0x31);
    let mut again = initiator.command(0, &[0; 6], 0, 0, 0);
    again[16..20].copy_from_slice(&header[16..20]);
    initiator.send(&again, &[]);
    assert!(initiator.receive().is_none());
}

#[test]
fn data_out_of_order_fail_their_command() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways { immediate: false, ..Ways::default() });
    // Positions and values of wrong bytes: a number, an offset, no final bit, a large offset.
    let faults = [(39, 1), (43, 8), (1, 0), (40, 1)];
    for (at, byte) in faults {
        let command = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 0);
        initiator.send(&command, &[]);
        let asked = initiator.receive().unwrap();
        let mut header = initiator.header(0x05, 0x80, 4096);
        initiator.tag -= 1;
        header[16..20].copy_from_slice(&initiator.tag.to_be_bytes());
        header[20..24].copy_from_slice(&asked.header[20..24]);
        header[at] = byte;
        initiator.send(&header, &[3; 4096]);
        assert_eq!(initiator.ended(&[]).sense, Some((0xb, 0x0c, 0x0d)));
        // What comes for it afterwards is dropped.
        initiator.send(&header, &[3; 4096]);
    }
    assert!(is_untouched(&mut initiator, 8));
}

#[test]
fn task_management_forgets_what_waits_for_data() {
    let Some(served) = served() else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways { immediate: false, ..Ways::default() });
    let manage = |initiator: &mut Initiator, function: u8, unit: u16, tag: u32| {
        let mut header = initiator.header(0x42, 0x80 | function, 0);
        header[8..16].copy_from_slice(&diskwright_iscsi::scsi::lun_of(unit).to_be_bytes());
        header[20..24].copy_from_slice(&tag.to_be_bytes());
        header[24..28].copy_from_slice(&initiator.cmd_sn.to_be_bytes());
        initiator.send(&header, &[]);
        let answer = initiator.receive().unwrap();
        assert_eq!((answer.opcode(), answer.u32_at(16)), (0x22, initiator.tag));
        answer.header[2]
    };
    let begin = |initiator: &mut Initiator| {
        let header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 0);
        initiator.send(&header, &[]);
        let asked = initiator.receive().unwrap();
        assert_eq!(asked.opcode(), 0x31);
        (asked.u32_at(16), asked.u32_at(20))
    };
    assert_eq!(manage(&mut initiator, 1, 0, 0x4711), 1, "no such task");
    let (tag, transfer_tag) = begin(&mut initiator);
    assert_eq!(manage(&mut initiator, 1, 0, tag), 0);
    initiator.data_out(transfer_tag, 0, &[4; 4096]);
    assert!(is_untouched(&mut initiator, 8));
    begin(&mut initiator);
    begin(&mut initiator);
    assert_eq!(manage(&mut initiator, 2, 0, 0), 0, "the task set");
    assert_eq!(manage(&mut initiator, 5, 7, 0), 2, "no such unit");
    begin(&mut initiator);
    assert_eq!(manage(&mut initiator, 5, 0, 0), 0, "the unit");
    assert_eq!(read(&mut initiator, 0, 8).sense, Some((6, 0x29, 3)));
    assert_eq!(manage(&mut initiator, 6, 0, 0), 0, "the target");
    assert_eq!(read(&mut initiator, 0, 8).sense, Some((6, 0x29, 3)));
    assert!(read(&mut initiator, 0, 8).is_good());
    assert_eq!((manage(&mut initiator, 8, 0, 0), manage(&mut initiator, 3, 0, 0)), (4, 5));
}

#[test]
fn a_second_login_of_a_port_ends_the_first() {
    let Some(served) = served() else { return };
    let mut first = Initiator::session(&served.socket(), Ways::default());
    let mut other = Initiator::session(&served.socket(), Ways { isid: 2, ..Ways::default() });
    let _second = Initiator::session(&served.socket(), Ways::default());
    assert!(first.receive().is_none());
    assert!(read(&mut other, 0, 1).is_good());
}

#[test]
fn units_that_come_and_go_are_told() {
    let exports = vec![exported("a", memory(1 << 20, true)), exported("b", memory(1 << 20, true))];
    let Some(served) = serve(exports, ServerOptions::default()) else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    // A write that has not come to its end when its unit goes.
    assert_eq!(initiator.plain(1, &[0; 6]).sense, Some((6, 0x29, 0)));
    served.server().remove("b").unwrap();
    served.server().add(exported("c", memory(2 << 20, true))).unwrap();
    assert_eq!(initiator.plain(0, &[0; 6]).sense, Some((6, 0x3f, 0x0e)));
    assert!(initiator.plain(0, &[0; 6]).is_good());
    served.server().remove("c").unwrap();
    let began = Instant::now();
    loop {
        match initiator.plain(1, &[0; 6]).sense {
            Some((5, 0x25, 0)) => break,
            _ => assert!(began.elapsed() < PATIENCE),
        }
        thread::sleep(Duration::from_millis(10));
    }
    // REPORT LUNS is what the attention asks for.
    assert_eq!(initiator.fetch(0, &[op::REPORT_LUNS, 0, 0, 0, 0, 0, 0, 0, 0, 64, 0, 0], 64).data.len(), 16);
    assert!(initiator.plain(0, &[0; 6]).is_good());
}

#[test]
fn a_client_that_vanishes_within_its_data_leaves_nothing() {
    let Some(mut served) = served() else { return };
    for digests in [false, true] {
        for bytes in [47, 48, 100, 48 + 2048, 48 + 4096, 48 + 4096 + 3] {
            let ways = Ways { header_digest: digests, data_digest: digests, ..Ways::default() };
            let mut initiator = Initiator::session(&served.socket(), ways);
            let header = initiator.command(0, &cdb_16(op::WRITE_16, 0, 0, 8), 0, 4096, 4096);
            let whole = initiator.bytes_of(&header, &[9; 4096]);
            initiator.stream.write_all(&whole[..bytes.min(whole.len())]).unwrap();
        }
    }
    eventually("all connections are closed", || served.server().metrics().totals().connections == 0);
    assert_eq!(served.server().metrics().totals().in_flight, 0);
    served.stop().unwrap();
}

#[test]
fn many_commands_at_once_and_a_client_that_vanishes() {
    let options = ServerOptions { requests_max: 4, request_bytes_max: 64 << 10, ..ServerOptions::default() };
    let Some(served) = serve(vec![exported("disk", memory(16 << 20, true))], options) else { return };
    for ends in [true, false] {
        let mut initiator = Initiator::session(&served.socket(), Ways { immediate: false, ..Ways::default() });
        // As many as the window allows, and more than the share: those wait for their R2T.
        let window = initiator.max_cmd_sn.wrapping_sub(initiator.cmd_sn) + 1;
        assert_eq!(window, 128);
        let first_tag = initiator.tag + 1;
        for number in 0..window {
            let header = initiator.command(0, &cdb_16(op::WRITE_16, 0, u64::from(number) * 32, 32), 0, 16384, 0);
            initiator.send(&header, &[]);
        }
        if !ends {
            continue;
        }
        let mut answers = 0;
        while answers < window {
            let said = initiator.receive().unwrap();
            match said.opcode() {
                0x31 => {
                    let tag = std::mem::replace(&mut initiator.tag, said.u32_at(16));
                    let number = said.u32_at(16) - first_tag;
                    initiator.data_out(said.u32_at(20), 0, &vec![number as u8; 16384]);
                    initiator.tag = tag;
                }
                0x21 => {
                    assert_eq!(said.header[3], 0);
                    answers += 1;
                }
                other => panic!("{other:#x}"),
            }
        }
        for number in 0..window {
            assert!(read(&mut initiator, u64::from(number) * 32, 32).data == vec![number as u8; 16384]);
        }
    }
}
