//! EXTENDED COPY and copies by tokens between the logical units of a target, with an initiator of
//! our own.

use crate::{
    common::{
        iscsi_initiator::{Ended, Initiator, Ways, cdb_16},
        memory, raw_file,
    },
    iscsi::{exported, serve},
    iscsi_reservations::reserve,
};
use diskwright_iscsi::scsi::{
    op,
    token::{self, BlockRange, PopulateList, Token, WriteList},
};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{CacheMode, MemoryStore, RawDevice};
use std::sync::Arc;

const BLOCKS: u64 = 32 << 10;

/// Two disks of 16 MiB, one that cannot be written, and one with blocks of 4 KiB.
fn copier() -> Option<(crate::common::Served, Initiator, Initiator)> {
    let large = RawDevice::new(Arc::new(MemoryStore::with_bytes("large", vec![0; 1 << 20])), true, 4096).unwrap();
    let exports = vec![
        exported("a", memory(16 << 20, true)),
        exported("b", memory(16 << 20, true)),
        exported("read-only", memory(1 << 20, false)),
        exported("large", Arc::new(large)),
    ];
    let served = serve(exports, ServerOptions::default())?;
    let mut first = Initiator::session(&served.socket(), Ways::default());
    let other = Initiator::session(&served.socket(), Ways { isid: 2, ..Ways::default() });
    // Attentions of a new session.
    (0..4).for_each(|unit| drop(first.plain(unit, &[op::TEST_UNIT_READY, 0, 0, 0, 0, 0])));
    Some((served, first, other))
}

/// A descriptor of a unit, by the designator of its page 83h with this type.
fn unit(initiator: &mut Initiator, lun: u16, kind: u8, block_bytes: u32) -> [u8; 32] {
    let page = initiator.fetch(lun, &[op::INQUIRY, 1, 0x83, 1, 0, 0], 256).data;
    let mut at = 4;
    while page[at + 1] != kind {
        at += 4 + usize::from(page[at + 3]);
    }
    let mut entry = [0; 32];
    (entry[0], entry[4], entry[5], entry[7]) = (0xe4, page[at], kind, page[at + 3].min(20));
    let len = usize::from(entry[7]);
    entry[8..8 + len].copy_from_slice(&page[at + 4..][..len]);
    entry[28..].copy_from_slice(&block_bytes.to_be_bytes());
    entry
}

/// A segment: the indexes of source and destination, the number of blocks, and the first ones.
type Segment = (u16, u16, u16, u64, u64);

fn list(id: u8, units: &[[u8; 32]], segments: &[Segment]) -> Vec<u8> {
    let mut out = vec![id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    out[2..4].copy_from_slice(&(units.len() as u16 * 32).to_be_bytes());
    out[8..12].copy_from_slice(&(segments.len() as u32 * 28).to_be_bytes());
    out.extend(units.concat());
    for &(source, destination, blocks, from, to) in segments {
        out.extend([2, 0, 0, 24]);
        out.extend([source.to_be_bytes(), destination.to_be_bytes(), [0, 0], blocks.to_be_bytes()].concat());
        out.extend([from.to_be_bytes(), to.to_be_bytes()].concat());
    }
    out
}

fn copy(initiator: &mut Initiator, lun: u16, list: &[u8]) -> Ended {
    let mut cdb = [0; 16];
    cdb[0] = op::EXTENDED_COPY;
    cdb[10..14].copy_from_slice(&(list.len() as u32).to_be_bytes());
    initiator.give(lun, &cdb, list)
}

fn results(initiator: &mut Initiator, id: u8) -> Ended {
    initiator.fetch(0, &[op::RECEIVE_COPY_RESULTS, 0, id, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 0, 0], 12)
}

fn whole(initiator: &mut Initiator, lun: u16, blocks: u64) -> Vec<u8> {
    let parts = (0..blocks).step_by(4096).map(|first| {
        let count = (blocks - first).min(4096) as u32;
        initiator.fetch(lun, &cdb_16(op::READ_16, 0, first, count), count * 512).data
    });
    parts.collect::<Vec<_>>().concat()
}

fn fill(initiator: &mut Initiator, lun: u16, first: u64, blocks: u32, seed: u8) {
    let data: Vec<u8> = (0..blocks as usize * 512).map(|at| (at / 512 * 13 + at) as u8 ^ seed).collect();
    assert!(initiator.give(lun, &cdb_16(op::WRITE_16, 0, first, blocks), &data).is_good());
}

#[test]
fn blocks_are_copied_from_disk_to_disk_and_within_one() {
    let Some((_served, mut initiator, _)) = copier() else { return };
    (0..4).for_each(|part| fill(&mut initiator, 0, part * 8000, 8000, part as u8));
    // Zeros in between are zeros afterwards.
    assert!(initiator.give(0, &cdb_16(op::WRITE_16, 0, 9000, 4000), &[0; 4000 * 512]).is_good());
    let units = [unit(&mut initiator, 0, 3, 512), unit(&mut initiator, 1, 3, 512)];
    let (mut a, mut b) = (whole(&mut initiator, 0, BLOCKS), whole(&mut initiator, 1, BLOCKS));
    let segments: [Segment; 6] = [
        (0, 1, 30001, 7, 1234),
        (0, 1, 0, 0, 0),
        (1, 0, 1, 5, 31999),
        // Onto themselves, in both directions and by less than a piece.
        (0, 0, 20000, 100, 101),
        (0, 0, 20000, 3000, 17),
        (1, 1, 9000, 1000, 10000),
    ];
    for &(source, destination, blocks, from, to) in &segments {
        let read = if source == 0 { &a } else { &b }[from as usize * 512..][..usize::from(blocks) * 512].to_vec();
        let written = if destination == 0 { &mut a } else { &mut b };
        written[to as usize * 512..][..read.len()].copy_from_slice(&read);
    }
    // The unit that the command is sent to plays no part.
    let ended = copy(&mut initiator, 3, &list(77, &units, &segments));
    assert!(ended.is_good(), "{ended:?}");
    assert!(whole(&mut initiator, 0, BLOCKS) == a && whole(&mut initiator, 1, BLOCKS) == b);
    let told = results(&mut initiator, 77).data;
    let copied_kib: u32 = segments.iter().map(|segment| u32::from(segment.2)).sum::<u32>() / 2;
    assert_eq!((told[3], told[4], told[6], told[7]), (8, 1, 6, 1));
    assert_eq!(told[8..], copied_kib.to_be_bytes());
    assert_eq!(results(&mut initiator, 78).sense, Some((5, 0x24, 0)));
    assert!(copy(&mut initiator, 0, &[]).is_good(), "a list of no length");
}

#[test]
fn nothing_is_copied_if_a_part_of_the_list_is_wrong() {
    let Some((_served, mut initiator, mut other)) = copier() else { return };
    fill(&mut initiator, 0, 0, 100, 1);
    let before = whole(&mut initiator, 1, 1000);
    let [a, b, read_only, large] =
        [(0, 512), (1, 512), (2, 512), (3, 4096)].map(|(lun, bytes)| unit(&mut initiator, lun, 3, bytes));
    let mut unknown = a;
    unknown[9] ^= 1;
    let mut of_4096 = b;
    of_4096[28..].copy_from_slice(&4096_u32.to_be_bytes());
    let good: Segment = (0, 1, 100, 0, 0);
    let end = BLOCKS - 50;
    for (units, segments, sense) in [
        (vec![a, unknown], vec![good], (0xa, 0x0d, 2)),
        (vec![a, b], vec![good, (0, 2, 1, 0, 0)], (0xa, 0x0d, 2)),
        (vec![a, b], vec![good, (0, 1, 100, 0, end)], (0xa, 0, 0)),
        (vec![a, b], vec![good, (0, 1, 100, end, 0)], (0xa, 0, 0)),
        (vec![a, b], vec![good, (0, 1, 1, u64::MAX, 0)], (0xa, 0, 0)),
        (vec![a, b, read_only], vec![good, (0, 2, 1, 0, 0)], (7, 0x27, 0)),
        (vec![a, of_4096], vec![good], (0xa, 0x0d, 3)),
        (vec![a, b, large], vec![good, (0, 2, 1, 0, 0)], (0xa, 0x0d, 3)),
    ] {
        let ended = copy(&mut initiator, 0, &list(1, &units, &segments));
        assert_eq!(ended.sense, Some(sense), "{segments:?}");
    }
    let cut = list(1, &[a, b], &[good]);
    assert_eq!(copy(&mut initiator, 0, &cut[..cut.len() - 1]).sense, Some((5, 0x1a, 0)));
    assert!(whole(&mut initiator, 1, 1000) == before);
    // Another initiator has reserved the destination for writing, and then the source for all.
    (0..2).for_each(|unit| drop(other.plain(unit, &[op::TEST_UNIT_READY, 0, 0, 0, 0, 0])));
    let reserve_unit = |other: &mut Initiator, lun: u16, action: u8, kind: u8| {
        let list = [
            (if action == 0 { 0_u64 } else { 9 }).to_be_bytes(),
            (if action == 0 { 9_u64 } else { 0 }).to_be_bytes(),
            [0; 8],
        ]
        .concat();
        let cdb = [op::PERSISTENT_RESERVE_OUT, action, kind, 0, 0, 0, 0, 0, 24, 0];
        assert!(other.give(lun, &cdb, &list).is_good());
    };
    reserve_unit(&mut other, 1, 0, 0);
    reserve_unit(&mut other, 1, 1, 1);
    let wanted = list(1, &[a, b], &[good]);
    assert_eq!(copy(&mut initiator, 0, &wanted).status, 0x18, "RESERVATION CONFLICT");
    reserve_unit(&mut other, 1, 3, 0);
    assert_eq!(reserve(&mut other, 0, 0, 0, 9, 0), 0);
    assert_eq!(reserve(&mut other, 1, 3, 9, 0, 0), 0, "exclusive access");
    assert_eq!(copy(&mut initiator, 1, &wanted).status, 0x18, "the source is not readable");
    assert!(whole(&mut initiator, 1, 1000) == before);
    assert_eq!(reserve(&mut other, 3, 0, 9, 0, 0), 0);
    assert!(copy(&mut initiator, 1, &wanted).is_good());
    assert!(whole(&mut initiator, 1, 100) == whole(&mut initiator, 0, 100));
}

fn token_command(action: u8, list_id: u32, bytes: usize) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (op::EXTENDED_COPY, action);
    cdb[6..10].copy_from_slice(&list_id.to_be_bytes());
    cdb[10..14].copy_from_slice(&(bytes as u32).to_be_bytes());
    cdb
}

/// RECEIVE ROD TOKEN INFORMATION: the status, the blocks, and the token.
fn token_information(initiator: &mut Initiator, list_id: u32) -> (u8, u64, Option<Token>) {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[12]) = (op::RECEIVE_COPY_RESULTS, 7, 4);
    cdb[2..6].copy_from_slice(&list_id.to_be_bytes());
    let told = initiator.fetch(0, &cdb, 1024).data;
    (told[5], u64::from_be_bytes(told[16..24].try_into().unwrap()), token::token_in(&told))
}

fn populate(initiator: &mut Initiator, lun: u16, ranges: &[BlockRange]) -> Result<Token, Ended> {
    let list = PopulateList { timeout_s: 0, ranges: ranges.to_vec() }.encode();
    let ended = initiator.give(lun, &token_command(0x10, 5, list.len()), &list);
    if !ended.is_good() {
        return Err(ended);
    }
    let (status, blocks, token) = token_information(initiator, 5);
    assert_eq!((status, blocks), (1, ranges.iter().map(|range| range.1).sum()));
    Ok(token.expect("a token"))
}

fn write_token(initiator: &mut Initiator, lun: u16, token: Token, offset_blocks: u64, ranges: &[BlockRange]) -> Ended {
    let list = WriteList { offset_blocks, token, deletes: false, ranges: ranges.to_vec() }.encode();
    initiator.give(lun, &token_command(0x11, 6, list.len()), &list)
}

#[test]
fn data_are_copied_by_a_token() {
    let Some((_served, mut initiator, mut other)) = copier() else { return };
    (0..3).for_each(|part| fill(&mut initiator, 0, part * 8000, 8000, part as u8));
    (0..2).for_each(|unit| drop(other.plain(unit, &[op::TEST_UNIT_READY, 0, 0, 0, 0, 0])));
    let (a, mut b) = (whole(&mut initiator, 0, BLOCKS), whole(&mut initiator, 1, BLOCKS));
    let token = populate(&mut initiator, 0, &[(20000, 4000), (100, 9000), (7, 1)]).unwrap();
    // Another initiator may use it, in other ranges, and of a part of it.
    let ended = write_token(&mut other, 1, token, 3000, &[(5, 500), (1000, 9000), (40, 1)]);
    assert!(ended.is_good(), "{ended:?}");
    assert_eq!(token_information(&mut other, 6), (1, 9501, None));
    let all = [&a[20000 * 512..24000 * 512], &a[100 * 512..9100 * 512], &a[7 * 512..8 * 512]].concat();
    let mut from = 3000 * 512;
    for (first, blocks) in [(5, 500), (1000, 9000), (40, 1)] {
        b[first * 512..][..blocks * 512].copy_from_slice(&all[from..][..blocks * 512]);
        from += blocks * 512;
    }
    assert!(whole(&mut initiator, 1, BLOCKS) == b && whole(&mut initiator, 0, BLOCKS) == a);
    // A write elsewhere does no harm; one to its data ends it.
    fill(&mut initiator, 0, 24000, 10, 9);
    assert!(write_token(&mut initiator, 0, token, 0, &[(30000, 10)]).is_good());
    fill(&mut other, 0, 9000, 1, 9);
    let before = whole(&mut initiator, 1, BLOCKS);
    assert_eq!(write_token(&mut initiator, 1, token, 0, &[(0, 10)]).sense, Some((5, 0x23, 6)), "revoked");
    assert_eq!(token_information(&mut initiator, 6).0, 2);
    assert_eq!(write_token(&mut initiator, 1, token, 0, &[(0, 10)]).sense, Some((5, 0x23, 4)), "unknown");
    assert!(whole(&mut initiator, 1, BLOCKS) == before);
    // One that is deleted with its use, and one whose own data are written by it.
    let token = populate(&mut initiator, 1, &[(0, 100)]).unwrap();
    let list = WriteList { offset_blocks: 0, token, deletes: true, ranges: vec![(200, 100)] }.encode();
    assert!(initiator.give(1, &token_command(0x11, 6, list.len()), &list).is_good());
    assert_eq!(write_token(&mut initiator, 1, token, 0, &[(0, 1)]).sense, Some((5, 0x23, 4)));
    let token = populate(&mut initiator, 1, &[(0, 100)]).unwrap();
    assert!(write_token(&mut initiator, 1, token, 0, &[(0, 100)]).is_good());
    assert_eq!(write_token(&mut initiator, 1, token, 0, &[(0, 100)]).sense, Some((5, 0x23, 6)));
}

#[test]
fn wrong_uses_of_tokens_are_refused() {
    let Some((_served, mut initiator, mut other)) = copier() else { return };
    let token = populate(&mut initiator, 0, &[(0, 100)]).unwrap();
    let before = whole(&mut initiator, 1, BLOCKS);
    let end = BLOCKS - 5;
    let unknown = Token::Data { id: [7; 32], len_bytes: 512 };
    for (lun, token, offset, range, sense) in [
        (1, unknown, 0, (0, 1), (5, 0x23, 4)),
        (1, token, 100, (0, 1), (5, 0x26, 0)),
        (1, token, 0, (0, 101), (5, 0x26, 0)),
        (1, token, u64::MAX, (0, 1), (5, 0x26, 0)),
        (1, token, 0, (end, 10), (5, 0x21, 0)),
        (1, token, 0, (u64::MAX, 10), (5, 0x21, 0)),
        (2, token, 0, (0, 1), (7, 0x27, 0)),
        (3, token, 0, (0, 1), (5, 0x26, 0)),
    ] {
        assert_eq!(
            write_token(&mut initiator, lun, token, offset, &[range]).sense,
            Some(sense),
            "{lun} {offset} {range:?}"
        );
    }
    assert_eq!(populate(&mut initiator, 0, &[(end, 10)]).unwrap_err().sense, Some((5, 0x21, 0)));
    assert_eq!(populate(&mut initiator, 0, &[]).unwrap_err().sense, Some((5, 0x26, 0)));
    let cut = initiator.give(0, &token_command(0x10, 5, 20), &[0; 20]);
    assert_eq!(cut.sense, Some((5, 0x1a, 0)));
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[5], cdb[12]) = (op::RECEIVE_COPY_RESULTS, 7, 99, 4);
    assert_eq!(initiator.fetch(0, &cdb, 1024).sense, Some((5, 0x24, 0)), "no such list");
    // Who may not read the source may not use its token.
    (0..2).for_each(|unit| drop(other.plain(unit, &[op::TEST_UNIT_READY, 0, 0, 0, 0, 0])));
    assert_eq!(reserve(&mut other, 0, 0, 0, 9, 0), 0);
    assert_eq!(reserve(&mut other, 1, 3, 9, 0, 0), 0, "exclusive access");
    assert_eq!(populate(&mut initiator, 0, &[(0, 100)]).unwrap_err().status, 0x18);
    assert_eq!(write_token(&mut initiator, 1, token, 0, &[(0, 10)]).status, 0x18);
    assert!(whole(&mut initiator, 1, BLOCKS) == before);
}

#[test]
fn a_long_copy_by_a_token_is_done_in_parts() {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), 1 << 30, CacheMode::PageCache);
    let Some(served) = serve(vec![exported("disk", device)], ServerOptions::default()) else { return };
    let mut initiator = Initiator::session(&served.socket(), Ways::default());
    drop(initiator.plain(0, &[op::TEST_UNIT_READY, 0, 0, 0, 0, 0]));
    fill(&mut initiator, 0, 0, 64, 3);
    fill(&mut initiator, 0, 600_000, 64, 4);
    let token = populate(&mut initiator, 0, &[(0, 700_000)]).unwrap();
    let first = 1 << 20;
    assert!(write_token(&mut initiator, 0, token, 0, &[(first, 300_000), (first + 300_000, 400_000)]).is_good());
    let (status, blocks, _) = token_information(&mut initiator, 6);
    assert_eq!((status, blocks), (3, 512 << 10), "256 MiB");
    assert!(write_token(&mut initiator, 0, token, blocks, &[(first + blocks, 700_000 - blocks)]).is_good());
    assert_eq!(token_information(&mut initiator, 6), (1, 700_000 - blocks, None));
    let read =
        |initiator: &mut Initiator, first: u64| initiator.fetch(0, &cdb_16(op::READ_16, 0, first, 64), 64 * 512).data;
    for at in [0, 600_000] {
        let data = read(&mut initiator, at);
        assert!(data.iter().any(|&byte| byte != 0) && read(&mut initiator, first + at) == data);
    }
    // Zeros have a token that everyone knows.
    assert!(write_token(&mut initiator, 0, Token::Zeros, 0, &[(0, 64), (600_000, 64)]).is_good());
    assert!([0, 600_000].iter().all(|&at| read(&mut initiator, at).iter().all(|&byte| byte == 0)));
    drop(served);
    // Pieces that were zeros take no space.
    let blocks_of_512 = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(dir.path().join("disk")).unwrap());
    assert!(blocks_of_512 < 32 << 10, "{blocks_of_512}");
}
