//! Messages survive encoding and decoding, and no bytes cause a panic.

use super::{command::DsmRange, fabrics::ConnectCommand, identify, log, *};
use proptest::prelude::*;
use std::{io, net::SocketAddr};

fn header(kind: PduKind, data_offset_bytes: u8, total_bytes: u32) -> PduHeader {
    let header_bytes = kind.header_bytes();
    PduHeader { kind, flags: PduFlags::empty(), header_bytes, data_offset_bytes, total_bytes }
}

proptest! {
    #[test]
    fn headers(flags: u8, data_offset_bytes: u8, total_bytes: u32, kind in 0_u8..10) {
        let bytes = [kind, flags, 24, data_offset_bytes, 0, 0, 0, 0];
        if let Ok(Some(PduHeader { kind, .. })) = PduHeader::decode(&bytes) {
            let header = PduHeader { flags: PduFlags::from_bits_retain(flags), ..header(kind, data_offset_bytes, total_bytes) };
            prop_assert_eq!(PduHeader::decode(&header.encode()), Ok(Some(header)));
        }
    }

    #[test]
    fn no_bytes_cause_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..40), digests in 0_u8..4) {
        if let Ok(Some(header)) = PduHeader::decode(&bytes) {
            let digests = Digests::from_bits_truncate(digests);
            if let Ok((header_bytes, data_bytes)) = header.check(digests) {
                let end_bytes = header_bytes as u64 + data_bytes as u64;
                prop_assert!(end_bytes <= u64::from(header.total_bytes));
                prop_assert!(u64::from(header.total_bytes) - end_bytes <= 4);
                prop_assert!(header_bytes >= usize::from(header.header_bytes));
            }
        }
        let mut page = [0xa5; PAGE_BYTES];
        page[..bytes.len()].copy_from_slice(&bytes);
        let _ = (identify::Controller::decode(&page), identify::Namespace::decode(&page));
        let _ = (identify::listed_namespaces(&page).count(), log::discovered(&page));
        let mut data = [0xc3; ConnectData::BYTES];
        data[..bytes.len()].copy_from_slice(&bytes);
        prop_assert!(ConnectData::decode(&data, 1).is_err());
    }

    #[test]
    fn commands(opcode: u8, flags: u8, cid: u16, nsid: u32, address: u64, len_bytes: u32, kind: u8, cdw: [u32; 6]) {
        let command = Command { opcode, flags, cid, nsid, sgl: Sgl { address, len_bytes, kind }, cdw };
        prop_assert_eq!(Command::decode(&command.encode()), command);
        prop_assert_eq!(command.blocks(), u64::from(cdw[2] & 0xffff) + 1);
    }

    #[test]
    fn completions(result: u64, sq_head: u16, cid: u16, status in 0_u16..0x8000) {
        let done = Completion { result, sq_head, cid, status: Status(status) };
        prop_assert_eq!(Completion::decode(&done.encode()), done);
        prop_assert_eq!(done.status.is_success(), done.status.to_error().is_none());
    }

    #[test]
    fn data_headers(cid: u16, tag: u16, offset_bytes: u32, len_bytes: u32) {
        let data = DataPdu { cid, tag, offset_bytes, len_bytes };
        let header = header(PduKind::HostData, 24, 24 + 512);
        let bytes = data.encode(&header);
        prop_assert_eq!((PduHeader::decode(&bytes), DataPdu::decode(&bytes)), (Ok(Some(header)), data));
    }

    #[test]
    fn ranges(blocks: u32, first_block: u64) {
        let range = DsmRange { blocks, first_block };
        prop_assert_eq!(DsmRange::decode(&range.encode()), range);
    }

    #[test]
    fn connects(queue: u16, entries in 2_u32..=65536, attributes: u8, keep_alive_ms: u32, host_id: [u8; 16]) {
        let asked = ConnectCommand { queue, entries, attributes, keep_alive_ms };
        prop_assert_eq!(ConnectCommand::of(&asked.command(3)), Ok(asked));
        let (subsystem, host) = ("nqn.2026-01.org.example:disks".to_owned(), "nqn.2014-08.org.example:host".to_owned());
        let data = ConnectData { host_id, controller: queue, subsystem, host };
        prop_assert_eq!(ConnectData::decode(&data.encode(), 3), Ok(data));
    }

    #[test]
    fn initializations(alignment in 0_u8..32, digests in 0_u8..4, limit: u32) {
        let digests = Digests::from_bits_truncate(digests);
        let initialize = Initialize { version: 0, alignment, digests, limit };
        let bytes = initialize.encode(PduKind::InitializeRequest);
        prop_assert_eq!(Initialize::decode(&bytes), initialize);
        let header = PduHeader::decode(&bytes).unwrap().unwrap();
        prop_assert_eq!(header.check(Digests::all()), Ok((128, 0)));
    }
}

#[test]
fn lengths_are_checked_against_the_digests() {
    let (none, both) = (Digests::empty(), Digests::all());
    let command = |offset, total| header(PduKind::Command, offset, total);
    assert_eq!(command(0, 72).check(none), Ok((72, 0)));
    assert_eq!(command(0, 76).check(both), Ok((76, 0)));
    assert_eq!(command(72, 72 + 512).check(none), Ok((72, 512)));
    assert_eq!(command(80, 80 + 512 + 4).check(both), Ok((80, 512)));
    for (offset, total, digests) in
        [(0, 71, none), (0, 73, none), (71, 600, none), (72, 600, both), (0, 72, both), (76, 80, both), (0, 0, none)]
    {
        let refused = command(offset, total).check(digests).unwrap_err();
        assert_eq!(refused.fatal_status(), Terminate::FIELD, "{refused}");
    }
    let response = |offset, total| header(PduKind::Response, offset, total);
    assert_eq!(response(0, 24).check(none), Ok((24, 0)));
    assert!(response(24, 48).check(none).is_err(), "a response has no data");
}

#[test]
fn a_terminate_carries_the_wrong_header() {
    let terminate = Terminate { status: Terminate::FIELD, information: 4 };
    let bytes = terminate.encode(PduKind::ControllerTerminate, &[7; 200]);
    let header = PduHeader::decode(&bytes).unwrap().unwrap();
    assert_eq!((bytes.len(), header.check(Digests::all())), (24 + 128, Ok((24, 128))));
    assert_eq!(Terminate::decode(bytes.first_chunk().unwrap()), terminate);
}

#[test]
fn pages_survive() {
    let controller = identify::Controller {
        serial: "0123456789abcdef".into(),
        model: "Diskwright".into(),
        firmware: "0.1.0".into(),
        id: 7,
        version: 0x1_0400,
        transfer_exponent: 8,
        is_discovery: false,
        keep_alive_granularity: 10,
        queue_entries: 128,
        namespaces: 3,
        optional_commands: identify::Controller::COMMANDS,
        subsystem: "nqn.2026-01.org.example:disks".into(),
        capsule_units: 516,
    };
    assert_eq!(identify::Controller::decode(&controller.encode()), controller);
    let namespace = identify::Namespace {
        blocks: 1 << 33,
        block_exponent: 9,
        preferred_blocks: 7,
        is_read_only: true,
        deallocates_to_zeros: true,
        metadata_bytes: 0,
        reservations_last: true,
        guid: *b"0123456789abcdef",
    };
    assert_eq!(identify::Namespace::decode(&namespace.encode()), namespace);
    let list = identify::active_namespaces([3, 1, 2].into_iter(), 1);
    assert_eq!(identify::listed_namespaces(&list).collect::<Vec<_>>(), [2, 3]);
    let descriptors = identify::descriptors([9; 16]);
    assert_eq!(descriptors[..4], [2, 16, 0, 0]);
    assert_eq!(descriptors[20..24], [3, 16, 0, 0]);
    assert_eq!(descriptors[40..46], [4, 1, 0, 0, 0, 0]);
}

#[test]
fn the_discovery_log_survives() {
    let entry = |address: &str, is_discovery| log::DiscoveryEntry {
        address: address.parse::<SocketAddr>().unwrap(),
        subsystem: "nqn.2026-01.org.example:disks".into(),
        is_discovery,
    };
    let entries = [entry("127.0.0.1:4420", false), entry("[::1]:8009", true)];
    let page = log::discovery(5, &entries);
    assert_eq!(page.len(), 3 * 1024);
    assert_eq!(log::discovered(&page), entries);
}

#[test]
fn errors_of_the_disk_become_the_status_that_tells_them() {
    for (kind, writes, status) in [
        (io::ErrorKind::StorageFull, true, Status::NO_SPACE),
        (io::ErrorKind::ReadOnlyFilesystem, true, Status::WRITE_PROTECTED),
        (io::ErrorKind::InvalidInput, false, Status::INVALID_FIELD),
        (io::ErrorKind::Other, false, Status::UNRECOVERED_READ),
        (io::ErrorKind::Other, true, Status::WRITE_FAULT),
    ] {
        assert_eq!(Status::of_error(&kind.into(), writes), status);
        let back = status.to_error().unwrap().kind();
        assert!(back == kind || kind == io::ErrorKind::Other, "{kind:?} {back:?}");
    }
    assert!(Status::SUCCESS.to_error().is_none());
}

#[test]
fn names_are_checked() {
    assert_eq!(check_nqn(DISCOVERY_NQN), Ok(()));
    let long = format!("nqn.2026-01.org.example:{}", "a".repeat(200));
    for name in ["", "nqn.", "iqn.2026-01.org.example:disks", "nqn.2026-01.org.example:a b", &long] {
        assert!(check_nqn(name).is_err(), "{name}");
    }
}
