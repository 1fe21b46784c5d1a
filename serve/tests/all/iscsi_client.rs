//! Our iSCSI initiator with our target: contents against a model, many requests in flight, errors,
//! secrets, sessions that end; and with a target that answers what a test tells it to.

use crate::common::{
    Served, file_of_secrets,
    iscsi_initiator::TARGET,
    memory,
    model::{DISK_BYTES, contents_match_a_model, reap_all},
    raw_file,
};
use diskwright_iscsi::{
    ClientError, IscsiDevice, IscsiUri,
    scsi::{Described, Sense, mode, op, report, status},
    wire::{
        Counters, DataIn, HEADER_BYTES, Header, LoginReply, LoginRequest, LoginStatus, Opcode, ReadyToTransfer,
        RejectReason, Residual, ScsiCommand, ScsiReply, padding_of, replies, text,
    },
};
use diskwright_serve::{
    Keyring, ThreadError, iscsi,
    net::{Address, Export, Listener, ServeError, ServerOptions},
    secrets::{Credentials, Secrets},
};
use diskwright_store::{BlockDevice, BlockQueue, CacheMode, Completion, Endpoint, IoBuf, QueueOptions, Request};
use std::{
    io::{self, Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

fn serve_in(dir: tempfile::TempDir, devices: Vec<Arc<dyn BlockDevice>>, options: ServerOptions) -> Option<Served> {
    let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).unwrap();
    let exports = (0..).zip(devices);
    let exports = exports.map(|(n, device)| Export { name: format!("{n}"), description: String::new(), device });
    match iscsi::start(TARGET, exports.collect(), vec![listener], options) {
        Ok(server) => Some(Served { server: Some(server), dir }),
        Err(ServeError::Thread(ThreadError::Ring { source })) => {
            eprintln!("skipped: no io_uring: {source}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn serve(devices: Vec<Arc<dyn BlockDevice>>, options: ServerOptions) -> Option<Served> {
    serve_in(tempfile::tempdir().unwrap(), devices, options)
}

fn uri(socket: &Path) -> IscsiUri {
    IscsiUri::at(Endpoint::Unix(socket.to_owned()), TARGET, 0)
}

fn contents_match(header_digest: bool, data_digest: bool, options: ServerOptions, seed: u64) {
    let dir = tempfile::tempdir().unwrap();
    let device = raw_file(&dir.path().join("disk"), DISK_BYTES as u64, CacheMode::PageCache);
    let Some(served) = serve(vec![device], options) else { return };
    let uri = IscsiUri { header_digest, data_digest, ..uri(&served.socket()) };
    contents_match_a_model(&IscsiDevice::open(&uri, true).unwrap(), seed);
    assert_eq!(served.server().metrics().totals().broken, 0);
}

#[test]
fn contents_match_a_model_in_every_way_of_connecting() {
    for seed in 0..4 {
        contents_match(seed & 1 != 0, seed & 2 != 0, ServerOptions::default(), seed);
    }
}

#[test]
fn contents_match_a_model_when_the_share_is_small() {
    let options = ServerOptions { requests_max: 3, request_bytes_max: 64 << 10, ..ServerOptions::default() };
    contents_match(false, true, options, 77);
}

#[test]
fn the_unit_is_described() {
    let Some(served) = serve(vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    // The target and the unit are the only ones.
    let found = IscsiUri { target: None, unit: None, ..uri(&served.socket()) };
    let device = IscsiDevice::open(&found, true).unwrap();
    let info = device.info();
    assert_eq!((&*info.target, info.unit, &*info.vendor, &*info.product), (TARGET, 0, "DISKWRGT", "Virtual disk"));
    assert!(!info.is_read_only && info.has_write_cache && info.serial.len() == 32, "{info:?}");
    assert_eq!(device.geometry().size_bytes, 1 << 20);
    // Each queue is a session.
    let open = || device.open_queue(&QueueOptions::default());
    let queues: Vec<_> = (0..8).map(|_| open().unwrap()).collect();
    assert!(served.server().metrics().totals().connections >= 8);
    drop(queues);
}

#[test]
fn names_that_do_not_exist_and_disks_that_cannot_be_written() {
    let devices = vec![memory(1 << 20, true), memory(1 << 20, false)];
    let Some(mut served) = serve(devices, ServerOptions::default()) else { return };
    let all = uri(&served.socket());
    let error = |uri: IscsiUri, writable| IscsiDevice::open(&uri, writable).unwrap_err();
    let told = error(IscsiUri { unit: Some(3), ..all.clone() }, false);
    assert!(matches!(told, ClientError::Unknown { .. }) && told.to_string().contains("it has [0, 1]"), "{told}");
    let told = error(IscsiUri { unit: None, ..all.clone() }, false).to_string();
    assert!(told.contains("choose one"), "{told}");
    let other = Some("iqn.2026-11.org.example:others".to_owned());
    let told = error(IscsiUri { target: other, ..all.clone() }, false);
    assert!(matches!(told, ClientError::Login { status: LoginStatus::NOT_FOUND, .. }), "{told}");
    assert!(told.to_string().contains("there is no such target"), "{told}");
    let told = error(IscsiUri { unit: Some(1), ..all.clone() }, true);
    assert!(matches!(told, ClientError::Unusable { .. }), "{told}");
    let device = IscsiDevice::open(&IscsiUri { unit: Some(1), ..all.clone() }, false).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let refused = queue.push(Request::write(0, 512, IoBuf::new(512), 0)).unwrap_err();
    assert_eq!(refused.reason.kind(), io::ErrorKind::ReadOnlyFilesystem);
    // A server that ends takes the requests with it, and says so.
    served.stop().unwrap();
    queue.push(Request::read(0, 512, IoBuf::new(512), 7)).unwrap();
    let completion = reap_all(&mut *queue).pop().unwrap();
    let told = completion.result.unwrap_err().to_string();
    assert!(completion.buf.is_some() && told.contains("the connection broke while"), "{told}");
    assert!(error(all, false).to_string().contains("cannot connect"));
}

fn one(queue: &mut dyn BlockQueue, request: Request) -> io::Result<()> {
    queue.push(request).unwrap();
    reap_all(queue).pop().unwrap().result
}

#[test]
fn a_session_that_ended_while_idle_is_opened_again_unless_a_write_may_be_lost() {
    let served = serve(vec![memory(1 << 20, true)], ServerOptions::default());
    let Some(mut served) = served else { return };
    let device = IscsiDevice::open(&uri(&served.socket()), true).unwrap();
    let open = || device.open_queue(&QueueOptions::default()).unwrap();
    let (mut clean, mut dirty) = (open(), open());
    let write = || Request::write(0, 512, IoBuf::new(512), 0);
    one(&mut *clean, write()).unwrap();
    one(&mut *clean, Request::flush(0)).unwrap();
    one(&mut *dirty, Request::flush(0)).unwrap();
    one(&mut *dirty, write()).unwrap();
    served.stop().unwrap();
    let Some(_served) = serve_in(served.dir, vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    thread::sleep(Duration::from_millis(1100));
    one(&mut *clean, write()).unwrap();
    let told = one(&mut *dirty, Request::flush(0)).unwrap_err().to_string();
    assert!(told.contains("the connection broke while"), "{told}");
    assert!(one(&mut *dirty, Request::flush(0)).is_err(), "a queue that has failed stays so");
}

#[test]
fn both_sides_prove_who_they_are() {
    let of = |name, secret| Credentials::new(name, secret).unwrap();
    let secrets = Secrets::new(vec![of("me", "my own secret")], Some(of("disks", "their secret"))).unwrap();
    let options = ServerOptions { secrets: Some(Arc::new(Keyring::new(secrets))), ..ServerOptions::default() };
    let Some(served) = serve(vec![memory(1 << 20, true)], options) else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = |client: &str, server: Option<&str>| {
        Some(file_of_secrets(dir.path(), ("me", client), server.map(|secret| ("disks", secret))))
    };
    let plain = uri(&served.socket());
    let open = |secrets, user: Option<&str>| {
        let user = user.map(str::to_owned);
        IscsiDevice::open(&IscsiUri { secrets, user, ..plain.clone() }, true)
    };
    let right = || file("my own secret", None);
    for secrets in [right(), file("my own secret", Some("their secret"))] {
        let device = open(secrets.clone(), None).unwrap();
        one(&mut *device.open_queue(&QueueOptions::default()).unwrap(), Request::flush(0)).unwrap();
        let found = IscsiUri { target: None, secrets, user: Some("me".into()), ..plain.clone() };
        IscsiDevice::open(&found, true).unwrap();
    }
    let told = open(file("another secret", None), None).unwrap_err();
    assert!(matches!(told, ClientError::Login { status: LoginStatus::AUTHENTICATION, .. }), "{told}");
    let told = open(file("my own secret", Some("not their secret")), None).unwrap_err();
    assert!(told.to_string().contains("does not prove that it is \"disks\""), "{told}");
    let told = open(None, None).unwrap_err().to_string();
    assert!(told.contains("?secrets=FILE"), "{told}");
    let told = open(right(), Some("you")).unwrap_err().to_string();
    assert!(told.contains("no client \"you\""), "{told}");
    // A target without secrets cannot pretend to have checked ours.
    let Some(open_to_all) = serve(vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    let told = IscsiDevice::open(&IscsiUri { secrets: right(), ..uri(&open_to_all.socket()) }, true).unwrap_err();
    assert!(told.to_string().contains("refuses the login") || told.to_string().contains("leave out"), "{told}");
}

#[test]
fn a_session_beyond_the_limit_is_refused_and_the_others_go_on() {
    let options = ServerOptions { connections_max: 2, ..ServerOptions::default() };
    let Some(served) = serve(vec![memory(1 << 20, true)], options) else { return };
    let device = IscsiDevice::open(&uri(&served.socket()), true).unwrap();
    let open = || device.open_queue(&QueueOptions::default());
    // The session that described the unit may not have gone yet.
    let patiently = || {
        let start = Instant::now();
        loop {
            match open() {
                Ok(queue) => return queue,
                Err(error) => assert!(start.elapsed() < crate::common::PATIENCE, "{error}"),
            }
        }
    };
    let mut queues = [patiently(), patiently()];
    let told = open().unwrap_err().to_string();
    assert!(told.contains("the connection broke while logging in"), "{told}");
    for queue in &mut queues {
        one(&mut **queue, Request::read(0, 512, IoBuf::new(512), 0)).unwrap();
    }
    drop(queues);
    one(&mut *patiently(), Request::flush(0)).unwrap();
}

#[test]
fn an_error_of_the_disk_reaches_the_caller() {
    let Some(served) = serve(vec![memory(1 << 20, true)], ServerOptions::default()) else { return };
    let device = IscsiDevice::open(&uri(&served.socket()), true).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let more = Export { name: "2".into(), description: String::new(), device: memory(1 << 20, true) };
    served.server().add(more).unwrap();
    served.server().remove("0").unwrap();
    let told = one(&mut *queue, Request::read(4096, 512, IoBuf::new(512), 7)).unwrap_err().to_string();
    let expected = "the target answered a read of 512 bytes at 4096 with: illegal request, logical unit not supported";
    assert!(told.contains(expected), "{told}");
}

/// What the target of a test does with a command.
enum Act {
    /// Ends it with this status and sense.
    End(u8, Option<Sense>),
    /// Sends these bytes as data with the status GOOD.
    Data(Vec<u8>),
    /// Sends a PDU as it is, with its data, and goes on.
    Raw([u8; HEADER_BYTES], Vec<u8>),
}

const COUNTERS: Counters = Counters { stat_sn: 1, expected_cmd_sn: 1, max_cmd_sn: 1000 };

struct Scripted {
    stream: UnixStream,
}

impl Scripted {
    fn hear(&mut self) -> Option<([u8; HEADER_BYTES], Vec<u8>)> {
        let mut header = [0; HEADER_BYTES];
        self.stream.read_exact(&mut header).ok()?;
        let data_bytes = Header::decode(&header).data_bytes;
        let mut data = vec![0; data_bytes + padding_of(data_bytes)];
        self.stream.read_exact(&mut data).ok()?;
        data.truncate(data_bytes);
        Some((header, data))
    }

    fn say(&mut self, header: &[u8; HEADER_BYTES], data: &[u8]) {
        let mut bytes = [header, data].concat();
        bytes.resize(bytes.len() + padding_of(data.len()), 0);
        // An initiator that has gone is of no interest.
        let _ = self.stream.write_all(&bytes);
    }

    /// Serves a session. The commands that describe the disk are answered; for the others `act` is
    /// asked, with the number of times it was asked before.
    fn serve(&mut self, disk: &Described, mut act: impl FnMut(usize, &[u8; HEADER_BYTES]) -> Vec<Act>) {
        let mut asked = 0;
        while let Some((header, _)) = self.hear() {
            let decoded = Header::decode(&header);
            let acts = match decoded.opcode {
                Some(Opcode::Login) => {
                    let request = LoginRequest::decode(&header);
                    let mut answer = Vec::new();
                    text::put(&mut answer, "AuthMethod", "None");
                    let reply = LoginReply {
                        transits: true,
                        tsih: 1,
                        ..LoginReply::to(&request, COUNTERS, LoginStatus::SUCCESS)
                    };
                    self.say(&reply.encode(answer.len()), &answer);
                    continue;
                }
                Some(Opcode::Logout) => {
                    self.say(&replies::outcome(Opcode::LogoutResponse, decoded.tag, 0, COUNTERS), &[]);
                    return;
                }
                Some(Opcode::ScsiCommand) => {
                    let cdb = ScsiCommand::decode(&header).cdb;
                    match (cdb[0], cdb[1]) {
                        (op::TEST_UNIT_READY, _) => vec![Act::End(status::GOOD, None)],
                        (op::INQUIRY, 0) => vec![Act::Data(disk.standard())],
                        (op::INQUIRY, _) => vec![Act::Data(disk.page(cdb[2]).unwrap())],
                        (op::SERVICE_ACTION_IN, _) => vec![Act::Data(report::capacity_16(disk))],
                        (op::REPORT_LUNS, _) => vec![Act::Data(report::luns(0, [0].into_iter()).unwrap())],
                        (op::MODE_SENSE_6, _) => {
                            let Ok(diskwright_iscsi::scsi::Command::ModeSense { query, .. }) =
                                diskwright_iscsi::scsi::Command::decode(&cdb)
                            else {
                                panic!("MODE SENSE")
                            };
                            let mut sense = mode::sense(disk, &query).unwrap();
                            // It has no FUA.
                            sense[2] &= !0x10;
                            vec![Act::Data(sense)]
                        }
                        (op::MAINTENANCE_IN, _) => vec![Act::End(status::CHECK_CONDITION, Some(Sense::INVALID_OPCODE))],
                        _ => {
                            asked += 1;
                            act(asked - 1, &header)
                        }
                    }
                }
                _ => {
                    asked += 1;
                    act(asked - 1, &header)
                }
            };
            for act in acts {
                match act {
                    Act::Data(data) => {
                        let ends = Some((status::GOOD, Residual::None));
                        let part = DataIn { tag: decoded.tag, is_final: true, ends, data_sn: 0, offset_bytes: 0 };
                        self.say(&part.encode(COUNTERS, data.len()), &data);
                    }
                    Act::End(status, sense) => {
                        let data = sense.map(|sense| [&[0, 18][..], &sense.encode()].concat()).unwrap_or_default();
                        let residual = Residual::None;
                        let reply =
                            ScsiReply { tag: decoded.tag, is_carried_out: true, status, residual, expected_data_sn: 0 };
                        self.say(&reply.encode(COUNTERS, data.len()), &data);
                    }
                    Act::Raw(header, data) => self.say(&header, &data),
                }
            }
        }
    }
}

/// The completion of a request, and how often the target was asked, if it answers as `act` says.
fn against(
    request: Request,
    act: impl Fn(usize, &[u8; HEADER_BYTES]) -> Vec<Act> + Clone + Send + 'static,
) -> Completion {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let disk = Described {
        blocks: 2048,
        block_bytes: 512,
        physical_exponent: 0,
        is_read_only: false,
        id: [1; 16],
        target: TARGET.into(),
        revision: "1",
        transfer_bytes_max: 1 << 20,
        transfer_bytes_best: 1 << 20,
        token_bytes_max: 1 << 40,
        token_bytes_best: 1 << 28,
    };
    let target = thread::spawn(move || {
        for _ in 0..2 {
            let Ok((stream, _)) = listener.accept() else { return };
            Scripted { stream }.serve(&disk, act.clone());
        }
    });
    let device = IscsiDevice::open(&uri(&socket), true).unwrap();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    queue.push(request).unwrap();
    let completion = reap_all(&mut *queue).pop().unwrap();
    drop(queue);
    target.join().unwrap();
    completion
}

fn read() -> Request {
    Request::read(1024, 512, IoBuf::new(512), 5)
}

#[test]
fn what_can_succeed_later_is_sent_again() {
    let start = Instant::now();
    let done = against(read(), |asked, header| match asked {
        0 => vec![Act::End(status::CHECK_CONDITION, Some(Sense::UNIT_RESET))],
        1 => vec![Act::End(status::BUSY, None)],
        2 => vec![Act::End(status::TASK_SET_FULL, None)],
        3 => vec![Act::End(status::CHECK_CONDITION, Some(Sense::DAMAGED))],
        _ => {
            assert_eq!(ScsiCommand::decode(header).cdb[..10], [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
            vec![Act::Data(vec![7; 512])]
        }
    });
    done.result.unwrap();
    assert_eq!(done.buf.unwrap()[..], [7; 512]);
    assert!(start.elapsed() > Duration::from_millis(60), "a busy target is left alone for a while");
    // Not for ever.
    let done = against(read(), |_, _| vec![Act::End(status::CHECK_CONDITION, Some(Sense::UNIT_RESET))]);
    assert!(done.result.unwrap_err().to_string().contains("unit attention"));
}

#[test]
fn errors_have_their_kinds() {
    for (status, sense, kind, text) in [
        (2, Some(Sense::NO_SPACE), io::ErrorKind::StorageFull, "no space left"),
        (2, Some(Sense::WRITE_PROTECTED), io::ErrorKind::ReadOnlyFilesystem, "write protected"),
        (2, Some(Sense::READ_ERROR), io::ErrorKind::Other, "unrecovered read error (sense 3/11/00)"),
        (2, Some(Sense::OUT_OF_RANGE), io::ErrorKind::InvalidInput, "out of range"),
        (2, Some(Sense::INVALID_OPCODE), io::ErrorKind::Unsupported, "not supported"),
        (status::RESERVATION_CONFLICT, None, io::ErrorKind::PermissionDenied, "reserved the disk"),
        (0x40, None, io::ErrorKind::Other, "SCSI status 0x40"),
        (status::GOOD, None, io::ErrorKind::UnexpectedEof, "0 of 512 bytes"),
    ] {
        let error = against(read(), move |_, _| vec![Act::End(status, sense)]).result.unwrap_err();
        assert!(error.kind() == kind && error.to_string().contains(text), "{error:?}");
    }
}

fn tag_of(header: &[u8; HEADER_BYTES]) -> u32 {
    Header::decode(header).tag
}

fn data_in(tag: u32, offset_bytes: u32, bytes: usize) -> Act {
    let part = DataIn { tag, is_final: true, ends: None, data_sn: 0, offset_bytes };
    Act::Raw(part.encode(COUNTERS, bytes), vec![1; bytes])
}

fn ready(tag: u32, offset_bytes: u32, len_bytes: u32) -> Act {
    let wanted = ReadyToTransfer { tag, lun: 0, transfer_tag: 1, r2t_sn: 0, offset_bytes, len_bytes };
    Act::Raw(wanted.encode(COUNTERS), Vec::new())
}

#[test]
fn a_target_that_violates_the_protocol_is_left() {
    type Answer = fn(&[u8; HEADER_BYTES]) -> Act;
    let cases: [(&str, Answer); 8] = [
        ("data of the task", |header| data_in(tag_of(header) + 1, 0, 512)),
        ("1024 bytes at 0 of a read", |header| data_in(tag_of(header), 0, 1024)),
        ("512 bytes at 512 of a read", |header| data_in(tag_of(header), 512, 512)),
        ("asks for 512 bytes at 0 of 0", |header| ready(tag_of(header), 0, 512)),
        ("an R2T of the task", |header| ready(tag_of(header) + 9, 0, 512)),
        ("the end of the task", |header| {
            let (tag, residual) = (tag_of(header) | 0xffff_0000, Residual::None);
            let reply = ScsiReply { tag, is_carried_out: true, status: 0, residual, expected_data_sn: 0 };
            Act::Raw(reply.encode(COUNTERS, 0), Vec::new())
        }),
        ("not allowed here", |_| Act::Raw([0x3c; HEADER_BYTES], Vec::new())),
        ("rejects a PDU", |header| Act::Raw(replies::reject(RejectReason::Protocol, COUNTERS), header.to_vec())),
    ];
    for (text, act) in cases {
        let done = against(read(), move |_, header| vec![act(header)]);
        let told = done.result.unwrap_err().to_string();
        assert!(done.buf.is_some() && told.contains("violated the protocol") && told.contains(text), "{text}: {told}");
    }
}

#[test]
fn a_question_of_the_target_is_answered() {
    let done = against(read(), |_, header| match Header::decode(header).opcode {
        Some(Opcode::ScsiCommand) => {
            // The command is answered after the answer to the question.
            vec![Act::Raw(replies::nop_in(u32::MAX, 7 << 48, 0x1234, COUNTERS, 0), Vec::new())]
        }
        Some(Opcode::NopOut) => {
            let decoded = Header::decode(header);
            assert_eq!((decoded.tag, decoded.lun, decoded.is_immediate), (u32::MAX, 7 << 48, true));
            assert_eq!(replies::transfer_tag_of(header), Some(0x1234));
            let ends = Some((status::GOOD, Residual::None));
            let part = DataIn { tag: 0, is_final: true, ends, data_sn: 0, offset_bytes: 0 };
            vec![Act::Raw(part.encode(COUNTERS, 512), vec![9; 512])]
        }
        other => panic!("{other:?}"),
    });
    done.result.unwrap();
    assert_eq!(done.buf.unwrap()[..], [9; 512]);
}

#[test]
fn a_durable_write_is_followed_by_a_flush_where_the_unit_has_no_fua() {
    let asked = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&asked);
    let write = Request { fua: true, ..Request::write(0, 512, IoBuf::new(512), 0) };
    let done = against(write, move |_, header| {
        let cdb = ScsiCommand::decode(header).cdb;
        match seen.fetch_add(1, Ordering::SeqCst) {
            0 => assert_eq!((cdb[0], cdb[1]), (op::WRITE_16, 0)),
            _ => assert_eq!(cdb[0], op::SYNCHRONIZE_CACHE_10),
        }
        vec![Act::End(status::GOOD, None)]
    });
    done.result.unwrap();
    assert_eq!(asked.load(Ordering::SeqCst), 2);
}

#[test]
fn a_target_that_ends_the_session_is_not_taken_for_a_broken_one() {
    let done = against(read(), |_, _| {
        let mut event = [0; HEADER_BYTES];
        (event[0], event[1], event[36]) = (Opcode::Async as u8, 0x80, 2);
        vec![Act::Raw(event, Vec::new())]
    });
    let told = done.result.unwrap_err().to_string();
    assert!(told.contains("the target ends the session (event 2)") && !told.contains("violated"), "{told}");
}

#[test]
fn a_target_that_has_moved_is_followed() {
    let listener = Listener::bind(&Address::Tcp("127.0.0.1".into(), 0)).unwrap();
    let Address::Tcp(_, port) = listener.address().clone() else { panic!("TCP") };
    let export = Export { name: "disk".into(), description: String::new(), device: memory(1 << 20, false) };
    let Ok(_server) = iscsi::start(TARGET, vec![export], vec![listener], ServerOptions::default()) else { return };
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let old = UnixListener::bind(&socket).unwrap();
    let moved = thread::spawn(move || {
        let mut old = Scripted { stream: old.accept().unwrap().0 };
        let (header, _) = old.hear().unwrap();
        let mut answer = Vec::new();
        text::put(&mut answer, "TargetAddress", &format!("127.0.0.1:{port},1"));
        let reply = LoginReply::to(&LoginRequest::decode(&header), COUNTERS, LoginStatus::MOVED_TEMPORARILY);
        old.say(&reply.encode(answer.len()), &answer);
    });
    let device = IscsiDevice::open(&uri(&socket), false).unwrap();
    assert_eq!(device.geometry().size_bytes, 1 << 20);
    moved.join().unwrap();
}
