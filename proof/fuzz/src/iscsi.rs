//! A hostile initiator of the iSCSI target, a hostile target for our initiator, over real sockets,
//! and the decoders.
//!
//! As in `peers.rs`, an input is a list of messages, so that a fuzzer gets past the login: valid
//! PDUs, valid PDUs with one wrong field, and any bytes. What must hold:
//!
//! - The target answers or disconnects soon, sends no more than was asked for, and serves the next
//!   initiator.
//! - Every request of our initiator completes and returns its buffer. Errors have a text.
//! - Memory depends on the bytes sent, not on length fields (`tests/corpus.rs` measures it).

use crate::scripted::{ScriptedServer, drive, play_client};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_iscsi::{
    IscsiDevice, IscsiUri,
    scsi::{
        Command, Described, Sense,
        answers::{self, BlockLimits, Caching, Capacity, Standard},
        cdb,
        copy::CopyList,
        mode,
        persistent::ChangeList,
        report,
        token::{PopulateList, WriteList, token_in},
        unit_of, unmap,
    },
    wire::{
        Counters, DataIn, DataOut, HEADER_BYTES, Header, LoginReply, LoginRequest, LoginStatus, Opcode,
        ReadyToTransfer, Residual, ScsiCommand, ScsiReply, Stage, TaskFunction, check_name, padding_of, replies, text,
    },
};
use diskwright_serve::{
    iscsi,
    net::{Address, Export, Listener, Server, ServerOptions},
};
use diskwright_store::{BlockDevice, Endpoint, MemoryStore, QueueOptions, RawDevice};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, OnceLock},
};
use tempfile::TempDir;

const SIZE_BYTES: u64 = 1 << 20;
const TARGET: &str = "iqn.2026-11.org.example:disks";
/// Maximum number of messages in an input.
const MOST: usize = 12;

/// The decoders: no bytes cause a panic, and lists are no longer than their bytes.
pub fn iscsi_wire(data: &[u8]) {
    if let Some(bytes) = data.first_chunk::<HEADER_BYTES>() {
        let header = Header::decode(bytes);
        assert!(header.data_bytes < 1 << 24 && header.more_header_bytes <= 1020);
        let _ = (LoginRequest::decode(bytes), DataOut::decode(bytes), TaskFunction::decode(bytes));
        let _ = unit_of(header.lun);
        let command = ScsiCommand::decode(bytes);
        decode_command(&command.cdb);
    }
    if let Some(bytes) = data.first_chunk::<HEADER_BYTES>() {
        let reply = LoginReply::decode(bytes);
        assert!(!reply.status.to_string().is_empty());
        let _ = (Header::decode_reply(bytes), DataIn::decode(bytes), ReadyToTransfer::decode(bytes));
        let _ = (ScsiReply::decode(bytes), Counters::decode(bytes), replies::transfer_tag_of(bytes));
    }
    if let Some(cdb) = data.first_chunk() {
        decode_command(cdb);
    }
    let sense = Sense::decode(data);
    let _ = (sense.to_string(), sense.to_error_kind(), sense.is_transient());
    let _ = (Standard::decode(data), Capacity::decode(data), Caching::decode(data), BlockLimits::decode(data));
    let _ = (answers::serial(data), answers::same_unmaps(data), answers::says_supported(data));
    assert!(answers::pages(data).len() <= data.len() && answers::units(data).len() * 8 <= data.len());
    if let Ok(uri) = std::str::from_utf8(data).map_err(drop).and_then(|text| IscsiUri::parse(text).map_err(drop)) {
        assert_eq!(IscsiUri::parse(&uri.to_string()).as_ref(), Ok(&uri));
    }
    if let Ok(ranges) = unmap::ranges(data) {
        assert!(ranges.len() * 16 <= data.len());
    }
    if let Ok(list) = CopyList::decode(data) {
        assert_eq!(CopyList::decode(&list.encode()), Ok(list));
    }
    if let Ok(list) = PopulateList::decode(data) {
        assert_eq!(PopulateList::decode(&list.encode()), Ok(list));
    }
    if let Ok(list) = WriteList::decode(data) {
        assert_eq!(WriteList::decode(&list.encode()), Ok(list));
    }
    let _ = token_in(data);
    let disk = disk();
    let _ = (ChangeList::decode(data), mode::select(&disk, data, false), mode::select(&disk, data, true));
    assert!(text::pairs(data).count() <= data.len() + 1);
    if let Ok(word) = std::str::from_utf8(data) {
        let _ = (text::number(word), check_name(word));
        if let Some(bytes) = text::binary(word) {
            assert_eq!(text::binary(&text::hex(&bytes)), Some(bytes));
        }
    }
}

fn disk() -> Described {
    Described {
        blocks: SIZE_BYTES / 512,
        block_bytes: 512,
        physical_exponent: 3,
        is_read_only: false,
        id: [1; 16],
        target: TARGET.into(),
        revision: "1",
        transfer_bytes_max: 1 << 20,
        transfer_bytes_best: 1 << 20,
        token_bytes_max: 1 << 40,
        token_bytes_best: 1 << 28,
    }
}

fn decode_command(cdb: &[u8; 16]) {
    let Ok(command) = Command::decode(cdb) else { return };
    let _ = (command.class(), command.blocks(), command.writes());
    match command {
        Command::Inquiry { page: Some(page), .. } => drop(disk().page(page)),
        Command::ModeSense { query, .. } => drop(mode::sense(&disk(), &query)),
        Command::ReportOpcodes { query, .. } => drop(report::opcodes(&query)),
        _ => {}
    }
}

/// A number of blocks as hostile peers send it.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Number {
    Small(u8),
    NearEnd(i8),
    Any(u64),
}

impl Number {
    fn get(self) -> u64 {
        match self {
            Self::Small(value) => value.into(),
            Self::NearEnd(by) => (SIZE_BYTES / 512).wrapping_add_signed(by.into()),
            Self::Any(value) => value,
        }
    }
}

/// A message of the initiator.
#[derive(Debug, Arbitrary)]
enum Message {
    /// A command with a range.
    Transfer {
        opcode: u8,
        flags: u8,
        first: Number,
        blocks: u8,
        expected: u16,
        data: u8,
        directions: u8,
    },
    /// Any command.
    Command {
        cdb: [u8; 16],
        expected: u16,
        data: u8,
        directions: u8,
        unit: u8,
    },
    /// Data for one of the first tasks.
    Data {
        tag: u8,
        transfer_tag: u8,
        number: u8,
        offset: u8,
        blocks: u8,
        is_final: bool,
    },
    /// Another PDU.
    Other {
        opcode: u8,
        flags: u8,
        field: u32,
        data: Vec<u8>,
    },
    Bytes(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct Script {
    /// 0: any bytes. 1: a login with chosen text. Others: a session.
    phase: u8,
    text: Vec<u8>,
    messages: Vec<Message>,
    /// A byte of a header, and its value, of one message.
    wrong: Option<(u8, u8, u8)>,
    /// Bytes of each send; 0 sends everything at once.
    piece: u8,
}

fn put(mut header: [u8; HEADER_BYTES], data: &[u8], out: &mut Vec<u8>) {
    header[5..8].copy_from_slice(&(data.len() as u32).to_be_bytes()[1..]);
    out.extend_from_slice(&header);
    out.extend_from_slice(data);
    out.resize(out.len() + padding_of(data.len()), 0);
}

fn log_in(isid: u8, more: &[u8], out: &mut Vec<u8>) {
    let mut header = [0; HEADER_BYTES];
    (header[0], header[1], header[13]) = (0x43, 0x87, isid);
    let mut data = Vec::new();
    text::put(&mut data, "InitiatorName", "iqn.2026-11.org.example:hostile");
    text::put(&mut data, "TargetName", TARGET);
    data.extend_from_slice(more);
    put(header, &data, out);
}

impl Message {
    fn encode(&self, number: u32, out: &mut Vec<u8>) {
        let mut header = [0; HEADER_BYTES];
        header[16..20].copy_from_slice(&number.to_be_bytes());
        // The number of the command is that of the message: others are immediate.
        header[24..28].copy_from_slice(&number.to_be_bytes());
        let command = |header: &mut [u8; HEADER_BYTES], directions: u8, expected: u32, cdb: &[u8]| {
            header[0] = 0x41;
            header[1] = 0x80 | directions << 5 & 0x60;
            header[20..24].copy_from_slice(&expected.to_be_bytes());
            header[32..32 + cdb.len()].copy_from_slice(cdb);
        };
        match self {
            Self::Transfer { opcode, flags, first, blocks, expected, data, directions } => {
                const OPCODES: [u8; 9] = [0x88, 0x8a, 0x8b, 0x8e, 0x8f, 0x93, 0x89, 0x91, 0x9e];
                let mut cdb = [0; 16];
                (cdb[0], cdb[1]) = (OPCODES[usize::from(*opcode) % OPCODES.len()], flags & 0x1f);
                cdb[2..10].copy_from_slice(&first.get().to_be_bytes());
                (cdb[12], cdb[13]) = (blocks & 1, *blocks);
                let expected = if expected % 2 == 0 { u32::from(*blocks) * 512 } else { (*expected).into() };
                command(&mut header, *directions, expected, &cdb);
                put(header, &vec![0x6b; usize::from(*data) * 64], out);
            }
            Self::Command { cdb, expected, data, directions, unit } => {
                header[9] = unit / 128;
                command(&mut header, *directions, (*expected).into(), cdb);
                put(header, &vec![1; usize::from(*data)], out);
            }
            Self::Data { tag, transfer_tag, number, offset, blocks, is_final } => {
                (header[0], header[1]) = (0x05, u8::from(*is_final) << 7);
                header[16..20].copy_from_slice(&u32::from(tag % 16).to_be_bytes());
                header[20..24].copy_from_slice(&u32::from(transfer_tag % 4).to_be_bytes());
                header[39] = *number;
                header[40..44].copy_from_slice(&(u32::from(*offset) * 512).to_be_bytes());
                put(header, &vec![0x5a; usize::from(*blocks) * 512], out);
            }
            Self::Other { opcode, flags, field, data } => {
                (header[0], header[1]) = (opcode & 0x7f | 0x40, *flags);
                header[20..24].copy_from_slice(&field.to_be_bytes());
                put(header, data, out);
            }
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
        }
    }
}

struct Running {
    server: Server,
    dir: TempDir,
}

fn server() -> Option<&'static Running> {
    static SERVER: OnceLock<Option<Running>> = OnceLock::new();
    let start = || {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let listener = Listener::bind(&Address::Unix(dir.path().join("socket"))).expect("a socket");
        let store = Arc::new(MemoryStore::with_bytes("disk", vec![7; SIZE_BYTES as usize]));
        let device = Arc::new(RawDevice::new(store, true, 512).expect("a device"));
        let export = Export { name: "disk".into(), description: String::new(), device };
        let options = ServerOptions { workers: 1, ..ServerOptions::default() };
        match iscsi::start(TARGET, vec![export], vec![listener], options) {
            Ok(server) => Some(Running { server, dir }),
            Err(error) => {
                println!("skipped: hostile initiators of the iSCSI target: {error}");
                None
            }
        }
    };
    SERVER.get_or_init(start).as_ref()
}

/// Starts the server of this module, so that its memory is not counted for an input.
pub fn warm_up() {
    let _ = server();
}

/// The fuzz target: a hostile initiator of our target.
pub fn iscsi_target(data: &[u8]) {
    let Ok(script) = Script::arbitrary(&mut Unstructured::new(data)) else { return };
    let Some(Running { server, dir }) = server() else { return };
    let mut bytes = Vec::new();
    match script.phase % 8 {
        0 => {}
        1 => log_in(script.piece, &script.text, &mut bytes),
        _ => {
            log_in(script.piece, &[], &mut bytes);
            // The attention of a new session.
            Message::Command { cdb: [0; 16], expected: 0, data: 0, directions: 0, unit: 0 }.encode(0xffff, &mut bytes);
        }
    }
    let messages = &script.messages[..script.messages.len().min(MOST)];
    for (number, message) in (0..).zip(messages) {
        let start = bytes.len();
        message.encode(number, &mut bytes);
        if let Some((of, at, byte)) = script.wrong
            && u32::from(of) % MOST as u32 == number
            && let Some(wrong) = bytes.get_mut(start + usize::from(at) % HEADER_BYTES)
        {
            *wrong = byte;
        }
    }
    let answered = play_client(dir.path().join("socket"), &bytes, script.piece);
    let most = (messages.len() as u64 + 4 + bytes.len() as u64 / 48) * (SIZE_BYTES + (64 << 10));
    assert!(answered <= most, "{answered} bytes of answers to {} bytes", bytes.len());
    assert!(server.is_well(), "a thread of the target ended");
    if data.first().is_some_and(|byte| byte % 16 == 0) {
        let mut other = UnixStream::connect(dir.path().join("socket")).expect("the target listens");
        other.set_read_timeout(Some(crate::scripted::PATIENCE)).expect("a socket");
        let mut login = Vec::new();
        log_in(0xff, &[], &mut login);
        other.write_all(&login).expect("the target takes a login");
        let mut header = [0; HEADER_BYTES];
        other.read_exact(&mut header).expect("an answer to another initiator");
        assert_eq!((header[0], header[36]), (0x23, 0));
    }
}

/// What a hostile target sends when a request may be in flight.
#[derive(Debug, Arbitrary)]
enum TargetMessage {
    Done { tag: u8, status: u8, sense: [u8; 18], more: Told },
    Data { tag: u8, offset: u8, len: u16, ends: Option<u8>, more: Told },
    Ready { tag: u8, offset: u8, len: u16, more: Told },
    Question { transfer_tag: u32, more: Told },
    Event { event: u8, more: Told },
    Bytes(Vec<u8>),
}

/// What the header of a PDU tells besides.
#[derive(Debug, Arbitrary)]
struct Told {
    /// Replaces a byte of the header.
    wrong: Option<(u8, u8)>,
    window: u8,
}

impl Told {
    fn counters(&self) -> Counters {
        Counters { stat_sn: 1, expected_cmd_sn: 1, max_cmd_sn: u32::from(self.window) }
    }

    fn put(&self, mut header: [u8; HEADER_BYTES], data: &[u8], out: &mut Vec<u8>) {
        if let Some((at, byte)) = self.wrong {
            header[usize::from(at) % HEADER_BYTES] = byte;
        }
        put_reply(&header, data, out);
    }
}

#[derive(Debug, Arbitrary)]
struct TargetScript {
    /// Replaces a byte of what the session of the device sends.
    wrong: Option<(u16, u8)>,
    /// What the session of the queue sends.
    answers: Vec<TargetMessage>,
    piece: u8,
}

const WIDE: Counters = Counters { stat_sn: 1, expected_cmd_sn: 1, max_cmd_sn: 1000 };

fn put_reply(header: &[u8; HEADER_BYTES], data: &[u8], out: &mut Vec<u8>) {
    out.extend_from_slice(header);
    out.extend_from_slice(data);
    out.resize(out.len() + padding_of(data.len()), 0);
}

/// The login, in two steps.
fn put_login(out: &mut Vec<u8>) {
    for (stage, next, key) in [
        (Stage::Security, Stage::Operational, ("AuthMethod", "None")),
        (Stage::Operational, Stage::Full, ("MaxRecvDataSegmentLength", "8192")),
    ] {
        let mut keys = Vec::new();
        text::put(&mut keys, key.0, key.1);
        let reply = LoginReply {
            transits: true,
            continues: false,
            stage: Some(stage),
            next: Some(next),
            isid: [0; 6],
            tsih: 1,
            tag: 1,
            counters: WIDE,
            status: LoginStatus::SUCCESS,
        };
        put_reply(&reply.encode(keys.len()), &keys, out);
    }
}

/// Data that end the command with this tag, or its end if there are none.
fn put_answer(tag: u32, data: &[u8], out: &mut Vec<u8>) {
    let ends = Some((0, Residual::None));
    let part = DataIn { tag, is_final: true, ends, data_sn: 0, offset_bytes: 0 };
    put_reply(&part.encode(WIDE, data.len()), data, out);
}

impl TargetScript {
    /// What the session of the device sends: the answers that our initiator waits for, in their
    /// order.
    fn device(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_login(&mut out);
        let disk = disk();
        let page = |number| disk.page(number).expect("a page that it has");
        let Ok(Command::ModeSense { query, .. }) = Command::decode(&cdb::mode_sense(Caching::PAGE, 192)) else {
            unreachable!("our own command")
        };
        let answers = [
            report::luns(0, [0].into_iter()).expect("the list"),
            Vec::new(),
            disk.standard(),
            report::capacity_16(&disk),
            mode::sense(&disk, &query).expect("a page that it has"),
            page(0x00),
            page(0x80),
            page(0xb0),
            page(0xb2),
            vec![0, 3, 0, 0],
        ];
        for (tag, answer) in (1..).zip(answers) {
            put_answer(tag, &answer, &mut out);
        }
        put_reply(&replies::outcome(Opcode::LogoutResponse, 11, 0, WIDE), &[], &mut out);
        if let Some((at, byte)) = self.wrong {
            let at = usize::from(at) % out.len();
            out[at] = byte;
        }
        out
    }

    fn queue(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_login(&mut out);
        put_answer(1, &[], &mut out);
        put_answer(2, &report::capacity_16(&disk()), &mut out);
        for answer in self.answers.iter().take(MOST) {
            match answer {
                TargetMessage::Done { tag, status, sense, more } => {
                    let data = [&[0, 18][..], sense].concat();
                    let (tag, residual) = (u32::from(tag % 8), Residual::None);
                    let reply = ScsiReply { tag, is_carried_out: true, status: *status, residual, expected_data_sn: 0 };
                    more.put(reply.encode(more.counters(), data.len()), &data, &mut out);
                }
                TargetMessage::Data { tag, offset, len, ends, more } => {
                    let ends = ends.map(|status| (status, Residual::None));
                    let (tag, offset_bytes) = (u32::from(tag % 8), u32::from(*offset) * 64);
                    let part = DataIn { tag, is_final: true, ends, data_sn: 0, offset_bytes };
                    let data = vec![0x6b; usize::from(*len) % 8192];
                    more.put(part.encode(more.counters(), data.len()), &data, &mut out);
                }
                TargetMessage::Ready { tag, offset, len, more } => {
                    let (tag, offset_bytes) = (u32::from(tag % 8), u32::from(*offset) * 64);
                    let len_bytes = (*len).into();
                    let wanted = ReadyToTransfer { tag, lun: 0, transfer_tag: 1, r2t_sn: 0, offset_bytes, len_bytes };
                    more.put(wanted.encode(more.counters()), &[], &mut out);
                }
                TargetMessage::Question { transfer_tag, more } => {
                    more.put(replies::nop_in(u32::MAX, 0, *transfer_tag, more.counters(), 0), &[], &mut out);
                }
                TargetMessage::Event { event, more } => {
                    let mut header = [0; HEADER_BYTES];
                    (header[0], header[1], header[36]) = (Opcode::Async as u8, 0x80, *event);
                    more.put(header, &[], &mut out);
                }
                TargetMessage::Bytes(bytes) => out.extend_from_slice(bytes),
            }
        }
        out
    }
}

fn hostile_target() -> &'static ScriptedServer {
    static TARGET: OnceLock<&ScriptedServer> = OnceLock::new();
    TARGET.get_or_init(ScriptedServer::start)
}

/// The fuzz target: a hostile target for our initiator.
pub fn iscsi_initiator(data: &[u8]) {
    let Ok(script) = TargetScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let target = hostile_target();
    target.set([script.device(), script.queue()], script.piece);
    let uri = IscsiUri::at(Endpoint::Unix(target.socket()), TARGET, 0);
    let told = |error: &dyn std::error::Error| assert!(!error.to_string().is_empty());
    let device = match IscsiDevice::open(&uri, true) {
        Ok(device) => device,
        Err(error) => return told(&error),
    };
    let mut queue = match device.open_queue(&QueueOptions::default()) {
        Ok(queue) => queue,
        Err(error) => return told(&error),
    };
    drive(&mut *queue);
}
