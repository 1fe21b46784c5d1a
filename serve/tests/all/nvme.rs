//! The NVMe/TCP target, with a host of our own over a unix socket.

use crate::common::{
    PATIENCE, Served, memory,
    nvme_host::{HOST, Host, SUBSYSTEM, Said, Ways, in_capsule_of, plain, range, with_room},
    raw_file,
};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_nvme::wire::{
    Command, ConnectData, DISCOVERY_NQN, DataPdu, Digests, PduFlags, PduKind, Status, Terminate, admin,
    command::{DEALLOCATE, DSM_DEALLOCATE, DsmRange, FUA, feature},
    fabrics::{ConnectCommand, property},
    identify, log, nvm,
};
use diskwright_serve::{
    ThreadError,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    nvme,
};
use diskwright_store::{BlockDevice, CacheMode};
use std::{
    io::Write,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

fn exported(name: &str, device: Arc<dyn BlockDevice>) -> Export {
    Export { name: name.into(), description: String::new(), device }
}

fn serve(exports: Vec<Export>, options: ServerOptions) -> Option<Served> {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    match nvme::start(SUBSYSTEM, exports, vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 + at / 512) as u8 ^ seed).collect()
}

#[test]
fn every_command_in_every_way_of_connecting() {
    let dir = tempfile::tempdir().unwrap();
    let mut model = vec![0_u8; 16 << 20];
    let device = raw_file(&dir.path().join("disk"), model.len() as u64, CacheMode::PageCache);
    let Some(served) = serve(vec![exported("disk", device)], ServerOptions::default()) else { return };
    for (round, digests) in (0..4_u8).map(|bits| (bits, Digests::from_bits_truncate(bits))) {
        let ways = Ways { digests, flow_control: round.is_multiple_of(2), alignment: round * 5, ..Ways::default() };
        let (_admin, controller) = Host::admin(&served.socket(), ways);
        let mut host = Host::io(&served.socket(), controller, 1, ways);
        let mut put = |host: &mut Host, block: u64, bytes: usize, in_capsule, flags| {
            let data = pattern(bytes, round + block as u8);
            assert_eq!(host.write(1, block, &data, in_capsule, flags), Status::SUCCESS, "{ways:?} {bytes}");
            model[block as usize * 512..][..bytes].copy_from_slice(&data);
        };
        for (index, bytes) in [512, 4096, 8192].into_iter().enumerate() {
            put(&mut host, 100 + 40 * index as u64, bytes, true, FUA);
            put(&mut host, 1000 + 40 * index as u64, bytes, false, 0);
        }
        for (index, bytes) in [65536, 100 << 10, 1 << 20].into_iter().enumerate() {
            put(&mut host, 4096 * (index as u64 + 1), bytes, false, FUA * (index as u32 % 2));
        }
        assert_eq!(host.plain(nvm::FLUSH, 1, 0, 1, 0), Status::SUCCESS);
        for (block, blocks, flags) in [(4100, 20, 0), (8200, 600, FUA), (8300, 64, DEALLOCATE)] {
            assert_eq!(host.plain(nvm::WRITE_ZEROES, 1, block, blocks, flags), Status::SUCCESS);
            model[block as usize * 512..][..blocks as usize * 512].fill(0);
        }
        for (in_capsule, block) in [(true, 4128), (false, 12300)] {
            let ranges: Vec<u8> = [DsmRange { blocks: 8, first_block: block }, DsmRange { blocks: 0, first_block: 1 }]
                .iter()
                .flat_map(DsmRange::encode)
                // What follows is not looked at.
                .chain([0xff; 64])
                .collect();
            let sgl = if in_capsule { in_capsule_of(ranges.len()) } else { with_room(ranges.len() as u32).sgl };
            for attributes in [0, DSM_DEALLOCATE] {
                let cdw = [1, attributes, 0, 0, 0, 0];
                let command = Command { opcode: nvm::DATASET_MANAGEMENT, nsid: 1, cdw, sgl, ..plain() };
                assert_eq!(host.ask(command, &ranges).0.status, Status::SUCCESS);
            }
            model[block as usize * 512..][..8 * 512].fill(0);
        }
        let there = model[100 * 512..][..4096].to_vec();
        let mut other = there.clone();
        other[4000] ^= 1;
        for in_capsule in [true, false] {
            assert_eq!(host.with_data(nvm::COMPARE, 1, 100, &there, in_capsule, 0), Status::SUCCESS);
            assert_eq!(host.with_data(nvm::COMPARE, 1, 100, &other, in_capsule, 0), Status::COMPARE_FAILED);
        }
        assert_eq!(host.plain(nvm::VERIFY, 1, 0, 32768, 0), Status::SUCCESS);
        for (block, blocks) in [(0, 1), (99, 8), (960, 256), (4096, 2048), (30720, 2048)] {
            let found = host.read(1, block, blocks).unwrap();
            assert!(found == model[block as usize * 512..][..found.len()], "{ways:?} {block}");
        }
        for start in (0..32768).step_by(2048) {
            let found = host.read(1, start, 2048).unwrap();
            assert!(found == model[start as usize * 512..][..1 << 20], "{ways:?} {start}");
        }
    }
}

#[test]
fn what_a_host_is_told_of_controller_and_namespaces() {
    let exports = vec![exported("rw", memory(1 << 20, true)), exported("ro", memory(2 << 20, false))];
    let Some(served) = serve(exports, ServerOptions::default()) else { return };
    let (mut host, id) = Host::admin(&served.socket(), Ways::default());
    let controller = identify::Controller::decode(&host.identify(identify::CONTROLLER, 0));
    assert_eq!((controller.id, controller.subsystem.as_str(), controller.transfer_exponent), (id, SUBSYSTEM, 8));
    assert!(!controller.is_discovery && controller.serial.len() == 20 && controller.model == "Diskwright");
    assert_eq!(host.property(property::CAPABILITIES, true) & 0xffff, 127);
    assert_eq!(host.property(property::VERSION, false), u64::from(controller.version));
    let list = host.identify(identify::ACTIVE_NAMESPACES, 0);
    assert_eq!(identify::listed_namespaces(&list).collect::<Vec<_>>(), [1, 2]);
    let list = host.identify(identify::ACTIVE_NAMESPACES, 1);
    assert_eq!(identify::listed_namespaces(&list).collect::<Vec<_>>(), [2]);
    let (one, two) = (host.namespace(1), host.namespace(2));
    assert_eq!((one.blocks, one.block_exponent, one.is_read_only), (2048, 9, false));
    assert_eq!((two.blocks, two.is_read_only), (4096, true));
    assert_eq!(host.namespace(3).blocks, 0, "a namespace that is not active is all zeros");
    let descriptors = host.identify(identify::DESCRIPTORS, 1);
    assert_eq!(descriptors[4..20], one.guid);
    assert!(one.guid != two.guid && one.guid != [0; 16]);
    let granted = host.feature(admin::SET_FEATURES, feature::QUEUES, 3 | 3 << 16);
    assert_eq!((granted.status, granted.result), (Status::SUCCESS, 3 | 3 << 16));
    assert_eq!(host.feature(admin::GET_FEATURES, feature::QUEUES, 0).result, 31 | 31 << 16);
    assert_eq!(host.feature(admin::GET_FEATURES, 0x7f, 0).status, Status::INVALID_FIELD);
    for (page, bytes) in [(log::ERRORS, 64), (log::HEALTH, 512), (log::FIRMWARE, 512), (log::EFFECTS, 4096)] {
        let (status, whole) = host.log_page(page, bytes, 0);
        assert_eq!((status, whole.len()), (Status::SUCCESS, bytes as usize), "{page}");
        assert_eq!(host.log_page(page, 32, 32).1, whole[32..64]);
        assert_eq!(host.log_page(page, 32, bytes + 4).0, Status::INVALID_FIELD);
    }
    assert_eq!(host.log_page(0x7e, 64, 0).0, Status::INVALID_LOG_PAGE);
    let (status, effects) = host.log_page(log::EFFECTS, 4096, 0);
    assert_eq!((status, effects[1024 + 4], effects[1024 + 8]), (Status::SUCCESS, 0b11, 1), "a write changes data");
}

#[test]
fn discovery_names_the_subsystem() {
    let dir = tempfile::tempdir().unwrap();
    let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
    let exports = vec![exported("a", memory(1 << 20, false))];
    let unix = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    let Ok(server) = nvme::start(SUBSYSTEM, exports, vec![listener, unix], ServerOptions::default()) else { return };
    let mut host = Host::initialize(&dir.path().join("socket"), Ways::default());
    let done = host.connect(0, DISCOVERY_NQN, 0xffff, Ways::default());
    assert_eq!(done.status, Status::SUCCESS);
    host.set_configuration(property::ENABLE);
    let controller = identify::Controller::decode(&host.identify(identify::CONTROLLER, 0));
    assert!(controller.is_discovery && controller.subsystem == DISCOVERY_NQN);
    let (status, page) = host.log_page(log::DISCOVERY, 2048, 0);
    assert_eq!((status, log::discovered(&page)), (Status::SUCCESS, Vec::new()), "there is no address on a unix socket");
    let mut queue = Host::initialize(&dir.path().join("socket"), Ways::default());
    let refused = queue.connect(1, DISCOVERY_NQN, done.result as u16, Ways::default());
    assert_eq!(refused.status, Status::CONNECT_INVALID, "a discovery controller has no I/O queues");
    server.stop().unwrap();
}

#[test]
fn a_connect_that_is_wrong_is_refused() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let _queue = Host::io(&served.socket(), controller, 1, Ways::default());
    let cases: [(u16, &str, u16, u64); 6] = [
        (0, "nqn.2026-01.org.example:others", 0xffff, 256 | 1 << 16),
        (0, "disks", 0xffff, 256 | 1 << 16),
        (0, SUBSYSTEM, 7, 16 | 1 << 16),
        (2, SUBSYSTEM, controller + 1, 16 | 1 << 16),
        (1, SUBSYSTEM, controller, 42),
        (33, SUBSYSTEM, controller, 42),
    ];
    for (queue, subsystem, controller, field) in cases {
        let mut host = Host::initialize(&served.socket(), Ways::default());
        let done = host.connect(queue, subsystem, controller, Ways::default());
        assert_eq!((done.status, done.result), (Status::CONNECT_INVALID, field), "{queue} {subsystem} {controller}");
        assert_eq!(host.hear(), Said::End);
    }
    let mut host = Host::initialize(&served.socket(), Ways::default());
    let asked = ConnectCommand { queue: 3, entries: 32, attributes: 0, keep_alive_ms: 0 };
    let host_nqn = HOST.replace("01234567", "11234567");
    let data = ConnectData { host_id: [9; 16], controller, subsystem: SUBSYSTEM.into(), host: host_nqn };
    assert_eq!(host.ask(asked.command(0), &data.encode()).0.status, Status::CONNECT_INVALID, "another host");
    for entries in [1, 129] {
        let mut host = Host::initialize(&served.socket(), Ways::default());
        let asked = ConnectCommand { queue: 4, entries, attributes: 0, keep_alive_ms: 0 };
        let data = ConnectData { host_id: [9; 16], controller, subsystem: SUBSYSTEM.into(), host: HOST.into() };
        assert_eq!(host.ask(asked.command(0), &data.encode()).0.status, Status::CONNECT_INVALID, "{entries} entries");
    }
    let mut host = Host::initialize(&served.socket(), Ways::default());
    assert_eq!(host.plain(nvm::FLUSH, 1, 0, 1, 0), Status::SEQUENCE, "a command before connect");
}

#[test]
fn invalid_commands_are_answered_and_the_queue_goes_on() {
    let exports = vec![exported("rw", memory(4 << 20, true)), exported("ro", memory(1 << 20, false))];
    let Some(served) = serve(exports, ServerOptions::default()) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut host = Host::io(&served.socket(), controller, 1, Ways::default());
    let data = pattern(4096, 3);
    let write = |nsid, block| Command { opcode: nvm::WRITE, nsid, cdw: range(block, 8, 0), ..with_room(4096) };
    let in_capsule = |nsid, block| Command { sgl: in_capsule_of(4096), ..write(nsid, block) };
    let read = |block, blocks| Command { opcode: nvm::READ, nsid: 1, cdw: range(block, blocks, 0), ..with_room(4096) };
    let ranges = DsmRange { blocks: 1, first_block: 8192 }.encode();
    let clear = Command {
        opcode: nvm::DATASET_MANAGEMENT,
        nsid: 1,
        cdw: [0, DSM_DEALLOCATE, 0, 0, 0, 0],
        sgl: in_capsule_of(16),
        ..plain()
    };
    let cases: Vec<(Command, &[u8], Status)> = vec![
        (write(1, 8192), &data, Status::OUT_OF_RANGE),
        (in_capsule(1, 8185), &data, Status::OUT_OF_RANGE),
        (write(1, u64::MAX - 3), &data, Status::OUT_OF_RANGE),
        (read(1 << 55, 8), &[], Status::OUT_OF_RANGE),
        (in_capsule(2, 0), &data, Status::WRITE_PROTECTED),
        (write(3, 0), &data, Status::INVALID_NAMESPACE),
        (in_capsule(0, 0), &data, Status::INVALID_NAMESPACE),
        (in_capsule(u32::MAX, 0), &data, Status::INVALID_NAMESPACE),
        (read(0, 7), &[], Status::SGL_LENGTH),
        (Command { cdw: range(0, 9, 0), ..in_capsule(1, 0) }, &data, Status::SGL_LENGTH),
        (Command { sgl: in_capsule_of(4096), ..read(0, 8) }, &[], Status::SGL_TYPE),
        (
            Command { sgl: diskwright_nvme::wire::Sgl { kind: 0x40, ..write(1, 0).sgl }, ..write(1, 0) },
            &[],
            Status::SGL_TYPE,
        ),
        (Command { flags: 0, ..in_capsule(1, 0) }, &data, Status::INVALID_FIELD),
        (Command { flags: 0x41, ..in_capsule(1, 0) }, &data, Status::INVALID_FIELD),
        (Command { opcode: 0x7e, ..in_capsule(1, 0) }, &data, Status::INVALID_OPCODE),
        (
            Command { opcode: nvm::READ, nsid: 1, cdw: range(0, 4096, 0), ..with_room(2 << 20) },
            &[],
            Status::INVALID_FIELD,
        ),
        (clear, &ranges, Status::OUT_OF_RANGE),
    ];
    for (command, data, status) in cases {
        assert_eq!(host.ask(command, data).0.status, status, "{command:?}");
        assert_eq!(host.write(1, 16, &data_of(status), true, 0), Status::SUCCESS, "after {command:?}");
        assert_eq!(host.read(1, 16, 1).unwrap(), data_of(status));
    }
}

fn data_of(status: Status) -> Vec<u8> {
    pattern(512, status.0 as u8)
}

#[test]
fn a_pdu_that_is_wrong_ends_its_connection_and_no_other() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut other = Host::io(&served.socket(), controller, 1, Ways::default());
    let command = Command { opcode: nvm::WRITE, nsid: 1, cdw: range(0, 8, 0), ..with_room(4096) };
    let header = DataPdu { cid: 99, tag: 77, offset_bytes: 0, len_bytes: 8 };
    let plain_host = Host::initialize(&served.socket(), Ways::default());
    let data = plain_host.pdu(PduKind::HostData, &header.encode_rest(), &[0; 8]);
    let flush = plain_host.pdu(PduKind::Command, &command.encode(), &[]);
    let with = |at: usize, byte: u8, bytes: &[u8]| {
        let mut bytes = bytes.to_vec();
        bytes[at] = byte;
        bytes
    };
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        ("an unknown type", with(0, 0x55, &flush), Terminate::SEQUENCE),
        ("a type of the controller", with(0, 0x05, &with(2, 24, &flush)), Terminate::SEQUENCE),
        ("a second ICReq", with(0, 0, &with(2, 128, &flush)), Terminate::SEQUENCE),
        ("a header that is too long", with(2, 73, &flush), Terminate::FIELD),
        ("a length below the header's", with(4, 70, &flush), Terminate::FIELD),
        ("data of 4 GiB in a capsule", with(3, 72, &with(7, 0xff, &flush)), Terminate::FIELD),
        ("data within the header", with(3, 8, &with(4, 96, &flush)), Terminate::FIELD),
        ("a tag that was not given", data, Terminate::FIELD),
    ];
    for (queue, (what, bytes, status)) in (2..).zip(cases) {
        let mut host = Host::io(&served.socket(), controller, queue, Ways::default());
        host.say(&bytes);
        assert_eq!(host.hear(), Said::Terminated(Terminate { status, information: 0 }), "{what}");
        assert_eq!(host.hear(), Said::End, "{what}");
    }
    // Data beyond what an R2T asks for, twice the same, and of another command.
    let wrong: [fn(DataPdu) -> DataPdu; 3] = [
        |wanted| DataPdu { offset_bytes: 4, ..wanted },
        |wanted| DataPdu { cid: wanted.cid + 1, ..wanted },
        |wanted| DataPdu { len_bytes: 4096 + 4, ..wanted },
    ];
    for (queue, change) in (20..).zip(wrong) {
        let mut host = Host::io(&served.socket(), controller, queue, Ways::default());
        host.send(command, &[]);
        let Said::ReadyToTransfer(wanted) = host.hear() else { panic!("no R2T") };
        let changed = change(wanted);
        let pdu = host.pdu(PduKind::HostData, &changed.encode_rest(), &vec![0; changed.len_bytes as usize]);
        host.say(&pdu);
        assert!(matches!(host.hear(), Said::Terminated(_)), "{changed:?}");
        assert_eq!(host.hear(), Said::End);
    }
    assert_eq!(other.write(1, 0, &[7; 512], true, 0), Status::SUCCESS);
    assert!(served.server().is_well());
}

#[test]
fn damaged_data_fail_the_command_and_a_damaged_header_the_connection() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let ways = Ways { digests: Digests::all(), ..Ways::default() };
    let (_admin, controller) = Host::admin(&served.socket(), ways);
    let mut host = Host::io(&served.socket(), controller, 1, ways);
    let before = host.read(1, 0, 8).unwrap();
    let command =
        Command { opcode: nvm::WRITE, nsid: 1, cdw: range(0, 8, 0), sgl: in_capsule_of(4096), cid: 9, ..plain() };
    let mut pdu = host.pdu(PduKind::Command, &command.encode(), &[5; 4096]);
    *pdu.last_mut().unwrap() ^= 1;
    host.say(&pdu);
    let Said::Done(done) = host.hear() else { panic!("no completion") };
    assert_eq!((done.cid, done.status), (9, Status::TRANSPORT));
    assert_eq!(host.send(Command { sgl: with_room(4096).sgl, ..command }, &[]), 3);
    let Said::ReadyToTransfer(wanted) = host.hear() else { panic!("no R2T") };
    let mut pdu = host.pdu(PduKind::HostData, &wanted.encode_rest(), &[5; 4096]);
    *pdu.last_mut().unwrap() ^= 1;
    host.say(&pdu);
    assert!(matches!(host.hear(), Said::Done(done) if done.status == Status::TRANSPORT));
    assert_eq!(host.read(1, 0, 8).unwrap(), before, "nothing was written");
    let mut pdu = host.pdu(PduKind::Command, &command.encode(), &[5; 4096]);
    pdu[73] ^= 1;
    host.say(&pdu);
    assert!(matches!(host.hear(), Said::Terminated(Terminate { status: Terminate::HEADER_DIGEST, .. })));
    assert_eq!(host.hear(), Said::End);
}

/// More writes than the client's share holds: those that wait must not keep the data of the others
/// from being received.
#[test]
fn commands_beyond_the_share_wait_and_are_all_carried_out() {
    let options = ServerOptions { requests_max: 4, request_bytes_max: 256 << 10, ..ServerOptions::default() };
    let Some(served) = serve(vec![exported("a", memory(8 << 20, true))], options) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut host = Host::io(&served.socket(), controller, 1, Ways::default());
    let len = 128 << 10;
    let command =
        |index: u64| Command { opcode: nvm::WRITE, nsid: 1, cdw: range(index * 256, 256, 0), ..with_room(len) };
    let cids: Vec<u16> = (0..32).map(|index| host.send(command(index), &[])).collect();
    let (mut done, mut asked) = (0, Vec::new());
    while done < 32 {
        match host.hear() {
            // The data of the last R2T are sent first.
            Said::ReadyToTransfer(wanted) => {
                asked.push(wanted);
                if asked.len() > 1 || done + asked.len() == 32 {
                    while let Some(wanted) = asked.pop() {
                        let index = cids.iter().position(|&cid| cid == wanted.cid).unwrap();
                        host.give(wanted, &pattern(len as usize, index as u8));
                    }
                }
            }
            Said::Done(ended) => {
                assert_eq!(ended.status, Status::SUCCESS);
                done += 1;
                while let Some(wanted) = asked.pop() {
                    let index = cids.iter().position(|&cid| cid == wanted.cid).unwrap();
                    host.give(wanted, &pattern(len as usize, index as u8));
                }
            }
            other => panic!("{other:?}"),
        }
    }
    for index in 0..32 {
        assert!(host.read(1, index * 256, 256).unwrap() == pattern(len as usize, index as u8), "{index}");
    }
    for index in 0..33 {
        host.send(Command { opcode: nvm::READ, nsid: 1, cdw: range(index * 256, 256, 0), ..with_room(len) }, &[]);
    }
    // 32 entries, so the 33rd command is one too many unless one has been completed.
    let mut answers = 0;
    while let Said::Data(..) | Said::Done(_) = host.hear() {
        answers += 1;
        if answers == 66 {
            break;
        }
    }
    assert!(served.server().is_well());
}

/// Hosts that send and do not read: what is kept for them is bounded, and others are served.
#[test]
fn a_host_that_reads_nothing_costs_little_memory() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let resident = || {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
    };
    let (mut admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    let before = resident();
    let page = Command {
        opcode: admin::GET_LOG_PAGE,
        cdw: [u32::from(log::HEALTH) | 0xffff << 16, 3, 0, 0, 0, 0],
        ..with_room(1 << 20)
    };
    let write = Command { opcode: nvm::WRITE, nsid: 1, cdw: range(0, 1, 0), sgl: in_capsule_of(512), ..plain() };
    let unknown = Command { nsid: 9, ..write };
    for (host, command, data) in [(&mut admin, page, &[][..]), (&mut queue, unknown, &[3; 512])] {
        host.stream.set_write_timeout(Some(Duration::from_millis(300))).unwrap();
        let pdu = host.pdu(PduKind::Command, &command.encode(), data);
        let mut sent = 0;
        // Until nothing more is taken.
        while sent < 64 << 20 && host.stream.write_all(&pdu).is_ok() {
            sent += pdu.len();
        }
        assert!(sent < 64 << 20, "{sent} bytes of commands were taken from a host that reads nothing");
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 128 << 20, "{grown} bytes of memory for two hosts that read nothing");
    let mut other = Host::io(&served.socket(), controller, 2, Ways::default());
    assert_eq!(other.write(1, 0, &[7; 512], true, 0), Status::SUCCESS);
    // The one that begins to read is answered.
    assert!(matches!(queue.hear(), Said::Done(done) if done.status == Status::INVALID_NAMESPACE));
}

#[test]
fn hosts_are_told_when_namespaces_change() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let (mut host, controller) = Host::admin(&served.socket(), Ways::default());
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    host.identify(identify::ACTIVE_NAMESPACES, 0);
    let notices = identify::Controller::NAMESPACE_NOTICES;
    assert_eq!(host.feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, notices).status, Status::SUCCESS);
    let event = Command { opcode: admin::ASYNC_EVENT, ..plain() };
    let cids: Vec<u16> = (0..4).map(|_| host.send(event, &[])).collect();
    assert_eq!(host.ask(event, &[]).0.status, Status::EVENT_LIMIT);
    served.server().add(exported("b", memory(2 << 20, true))).unwrap();
    let notice = |host: &mut Host| match host.hear() {
        Said::Done(done) => {
            assert!(cids.contains(&done.cid));
            assert_eq!((done.status, done.result), (Status::SUCCESS, 0x4_0002));
        }
        other => panic!("{other:?}"),
    };
    notice(&mut host);
    assert_eq!(host.namespace(2).blocks, 4096);
    assert_eq!(queue.write(2, 0, &[1; 512], true, 0), Status::SUCCESS);
    let changed = |host: &mut Host| host.log_page(log::CHANGED_NAMESPACES, 4096, 0).1[..8].to_vec();
    assert_eq!(changed(&mut host), [2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(changed(&mut host), [0; 8], "reading the page clears it");
    // A write whose data have not come, and then its namespace leaves. Another disk gets the NSID.
    queue.send(Command { opcode: nvm::WRITE, nsid: 2, cdw: range(0, 8, 0), ..with_room(4096) }, &[]);
    let Said::ReadyToTransfer(wanted) = queue.hear() else { panic!("no R2T") };
    served.server().remove("b").unwrap();
    notice(&mut host);
    let fresh = memory(2 << 20, true);
    served.server().add(exported("c", fresh)).unwrap();
    queue.give(wanted, &[9; 4096]);
    assert!(matches!(queue.hear(), Said::Done(done) if done.status == Status::INVALID_NAMESPACE));
    assert_ne!(queue.read(2, 0, 8).unwrap(), [9; 4096], "a write for a disk that has left does not reach the next one");
    assert_eq!(changed(&mut host), [2, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_disk_that_grows_is_larger_at_once_and_its_host_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    create(&path, &CreateRequest { size_bytes: Some(8 << 20), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let Some(mut served) = serve(vec![exported("disk", disk.clone())], ServerOptions::default()) else { return };
    let (mut host, controller) = Host::admin(&served.socket(), Ways::default());
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    let end_block = (8 << 20) / 512;
    host.identify(identify::ACTIVE_NAMESPACES, 0);
    host.feature(admin::SET_FEATURES, feature::ASYNC_EVENTS, identify::Controller::NAMESPACE_NOTICES);
    let cid = host.send(Command { opcode: admin::ASYNC_EVENT, ..plain() }, &[]);
    assert_eq!(queue.write(1, end_block, &[1; 512], true, 0), Status::OUT_OF_RANGE);
    disk.grow(20 << 20).unwrap();
    let start = Instant::now();
    assert!(matches!(host.hear(), Said::Done(done) if done.cid == cid && done.result == 0x4_0002));
    assert!(start.elapsed() < PATIENCE / 4);
    assert_eq!(host.log_page(log::CHANGED_NAMESPACES, 4096, 0).1[..8], [1, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(host.namespace(1).blocks, (20 << 20) / 512);
    assert_eq!(queue.write(1, end_block, &[2; 512], true, FUA), Status::SUCCESS);
    drop((host, queue));
    served.stop().unwrap();
    disk.close().unwrap();
}

#[test]
fn a_stop_does_not_wait_for_data_that_a_host_owes() {
    let Some(mut served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    queue.send(Command { opcode: nvm::WRITE, nsid: 1, cdw: range(0, 8, 0), ..with_room(4096) }, &[]);
    assert!(matches!(queue.hear(), Said::ReadyToTransfer(_)));
    let start = Instant::now();
    served.stop().unwrap();
    assert!(start.elapsed() < ServerOptions::default().drain_time / 2, "{:?}", start.elapsed());
    assert_eq!(queue.hear(), Said::End);
}

#[test]
fn a_host_that_keeps_silent_and_the_queues_of_a_controller_that_has_ended() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let ways = Ways { keep_alive_ms: 1000, ..Ways::default() };
    let (mut host, controller) = Host::admin(&served.socket(), ways);
    let mut queue = Host::io(&served.socket(), controller, 1, ways);
    // Traffic on any queue counts.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        assert_eq!(queue.plain(nvm::FLUSH, 1, 0, 1, 0), Status::SUCCESS);
        thread::sleep(Duration::from_millis(200));
    }
    assert_eq!(host.feature(admin::GET_FEATURES, feature::KEEP_ALIVE, 0).result, 1000);
    let start = Instant::now();
    assert_eq!((host.hear(), queue.hear()), (Said::End, Said::End));
    assert!(start.elapsed() < PATIENCE / 4);
    // A controller that is disabled ends its I/O queues, and goes on itself.
    let (mut host, controller) = Host::admin(&served.socket(), Ways::default());
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    host.set_configuration(0);
    assert_eq!(host.property(property::STATUS, false), 0);
    assert_eq!(queue.hear(), Said::End);
    host.set_configuration(property::ENABLE);
    let mut queue = Host::io(&served.socket(), controller, 1, Ways::default());
    assert_eq!(queue.read(1, 0, 8).unwrap().len(), 4096);
}

#[test]
fn the_head_of_the_queue_is_reported_and_success_needs_no_completion_without_flow_control() {
    let Some(served) = serve(vec![exported("a", memory(1 << 20, true))], ServerOptions::default()) else { return };
    let (_admin, controller) = Host::admin(&served.socket(), Ways::default());
    let mut host = Host::io(&served.socket(), controller, 1, Ways::default());
    for index in 2..40_u16 {
        let (done, _) = host.ask(Command { opcode: nvm::FLUSH, nsid: 1, ..plain() }, &[]);
        assert_eq!(done.sq_head, index % 32);
    }
    let ways = Ways { flow_control: false, ..Ways::default() };
    let mut host = Host::io(&served.socket(), controller, 2, ways);
    let (done, _) = host.ask(Command { opcode: nvm::FLUSH, nsid: 1, ..plain() }, &[]);
    assert_eq!(done.sq_head, 0xffff);
    host.send(Command { opcode: nvm::READ, nsid: 1, cdw: range(0, 8, 0), ..with_room(4096) }, &[]);
    let Said::Data(flags, ..) = host.hear() else { panic!("no data") };
    assert_eq!(flags, PduFlags::LAST | PduFlags::SUCCESS);
}

#[test]
fn what_cannot_be_served() {
    let start = |subsystem: &str, writable, options| {
        let tcp = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
        nvme::start(subsystem, vec![exported("a", memory(1 << 20, writable))], vec![tcp], options).map(drop)
    };
    let error = start("disks", false, ServerOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "\"disks\" is not a valid name: it does not begin with nqn.YYYY-MM.; choose another name"
    );
    let error = start(SUBSYSTEM, true, ServerOptions::default()).unwrap_err();
    assert!(matches!(error, ServeError::Insecure { .. }), "{error}");
    for (writable, insecure_writes) in [(false, false), (true, true)] {
        match start(SUBSYSTEM, writable, ServerOptions { insecure_writes, ..ServerOptions::default() }) {
            Ok(()) | Err(ServeError::Thread(ThreadError::Ring { .. })) => {}
            Err(error) => panic!("{error}"),
        }
    }
}
