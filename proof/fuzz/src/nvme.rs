//! A hostile host of the NVMe/TCP target, a hostile target for our host, over real sockets, and the
//! decoders.
//!
//! As in `peers.rs`, an input is a list of messages, so that a fuzzer gets past the connection:
//! valid PDUs, valid PDUs with one wrong field, and any bytes. What must hold:
//!
//! - The target answers or disconnects soon, sends no more than was asked for, and serves the next
//!   host.
//! - Every request of our host completes and returns its buffer. Errors have a text.
//! - Memory depends on the bytes sent, not on length fields (`tests/corpus.rs` measures it).

use crate::scripted::{ScriptedServer, drive, play_client};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_nvme::{
    NvmeDevice, NvmeUri,
    key::Key,
    wire::{
        Command, Completion, ConnectData, DataPdu, Digests, Initialize, PduFlags, PduHeader, PduKind, Sgl, Status,
        auth,
        command::DsmRange,
        fabrics::{self, ConnectCommand, property},
        identify, log,
        reservation::{self, Report, Reserve},
    },
};
use diskwright_serve::{
    net::{Address, Export, Listener, Server, ServerOptions},
    nvme,
};
use diskwright_store::{BlockDevice, Blocking, Endpoint, EngineKind, MemoryStore, QueueOptions, RawDevice};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    sync::{Arc, OnceLock},
};
use tempfile::TempDir;

const SIZE_BYTES: u64 = 1 << 20;
const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";
const HOST: &str = "nqn.2026-01.org.example:host";
/// Maximum number of messages in an input.
const MOST: usize = 12;

/// The decoders: no bytes cause a panic, and what is accepted is the same after encoding.
pub fn nvme_wire(data: &[u8]) {
    if let Ok(Some(header)) = PduHeader::decode(data) {
        assert_eq!(PduHeader::decode(&header.encode()), Ok(Some(header)));
        for digests in (0..4).map(Digests::from_bits_truncate) {
            if let Ok((header_bytes, data_bytes)) = header.check(digests) {
                assert!(header_bytes as u64 + data_bytes as u64 <= u64::from(header.total_bytes));
            }
        }
    }
    if let Some(bytes) = data.first_chunk() {
        let command = Command::decode(bytes);
        assert_eq!(Command::decode(&command.encode()), command);
        let _ = ConnectCommand::of(&command);
        if let Some(reserve) = Reserve::decode(command.opcode, command.cdw[0]) {
            let (opcode, dword_10) = reserve.encode();
            assert_eq!(Reserve::decode(opcode, dword_10), Some(reserve));
        }
    }
    if let Some(bytes) = data.first_chunk() {
        let done = Completion::decode(bytes);
        assert_eq!(Completion::decode(&done.encode()), done);
        assert!(!done.status.to_string().is_empty());
        assert_eq!(done.status.is_success(), done.status.to_error().is_none());
    }
    let _ = (DsmRange::decode(data), reservation::keys(data));
    assert!(Report::decode(data).registrants.len() * 64 <= data.len());
    if let Ok(auth::HostMessage::Reply { response, .. }) = auth::HostMessage::decode(data) {
        assert!(response.len() <= data.len());
    }
    if let Ok(message) = auth::HostMessage::decode(data) {
        assert!(auth::HostMessage::decode(&message.encode()).is_ok());
    }
    let _ = (auth::ControllerMessage::decode(data), Key::parse(&String::from_utf8_lossy(data)));
    let mut page = [0; 4096];
    page[..data.len().min(4096)].copy_from_slice(&data[..data.len().min(4096)]);
    let _ = (identify::Controller::decode(&page), identify::Namespace::decode(&page));
    let _ = (identify::listed_namespaces(&page).count(), log::discovered(&page));
    let connect: &[u8; 1024] = page.first_chunk().expect("a part of the page");
    if let Ok(data) = ConnectData::decode(connect, 1) {
        assert_eq!(ConnectData::decode(&data.encode(), 1), Ok(data));
    }
    if let Ok(uri) = std::str::from_utf8(data).map_err(drop).and_then(|text| NvmeUri::parse(text).map_err(drop)) {
        assert_eq!(NvmeUri::parse(&uri.to_string()).as_ref(), Ok(&uri));
    }
}

/// A PDU, perhaps with a wrong byte in its header, and its data.
#[derive(Debug, Arbitrary)]
struct Sent {
    /// Replaces a byte of the header.
    wrong: Option<(u8, u8)>,
    /// Blocks of 64 bytes of data.
    data: u8,
}

impl Sent {
    fn put(&self, kind: PduKind, rest: &[u8], out: &mut Vec<u8>) {
        let data_bytes = usize::from(self.data) * 64;
        let header_bytes = PduHeader::BYTES + rest.len();
        let header = PduHeader {
            kind,
            flags: PduFlags::empty(),
            header_bytes: header_bytes as u8,
            data_offset_bytes: if data_bytes > 0 { header_bytes as u8 } else { 0 },
            total_bytes: (header_bytes + data_bytes) as u32,
        };
        let start = out.len();
        out.extend_from_slice(&header.encode());
        out.extend_from_slice(rest);
        if let Some((at, byte)) = self.wrong {
            out[start + usize::from(at) % header_bytes] = byte;
        }
        out.resize(out.len() + data_bytes, 0x6b);
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

/// A message of the host.
#[derive(Debug, Arbitrary)]
enum HostMessage {
    Command { opcode: u8, flags: u8, nsid: u8, block: Number, dword12: u32, sgl: (u8, u8), dword11: u16, pdu: Sent },
    Connect { queue: u8, controller: u8, entries: u8 },
    Property { set: bool, offset: u8, value: u32, long: bool },
    Admin { opcode: u8, dwords: [u32; 4], nsid: u8, len: u16 },
    Data { cid: u8, tag: u8, offset: u8, len_error: i8, pdu: Sent },
    Bytes(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct HostScript {
    /// 0: any bytes. 1: initialized. 2: an enabled controller. 3: an I/O queue.
    phase: u8,
    messages: Vec<HostMessage>,
    /// Bytes of each send; 0 sends everything at once.
    piece: u8,
}

fn initialize() -> Vec<u8> {
    let asked = Initialize { version: 0, alignment: 0, digests: Digests::empty(), limit: 0 };
    asked.encode(PduKind::InitializeRequest).to_vec()
}

fn put_command(command: &Command, data: &[u8], out: &mut Vec<u8>) {
    let header = PduHeader {
        kind: PduKind::Command,
        flags: PduFlags::empty(),
        header_bytes: 72,
        data_offset_bytes: if data.is_empty() { 0 } else { 72 },
        total_bytes: 72 + data.len() as u32,
    };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(&command.encode());
    out.extend_from_slice(data);
}

fn put_connect(queue: u16, controller: u16, entries: u32, cid: u16, out: &mut Vec<u8>) {
    let asked = ConnectCommand { queue, entries, attributes: 0, keep_alive_ms: 0 };
    let (subsystem, host) = (SUBSYSTEM.to_owned(), HOST.to_owned());
    let data = ConnectData { host_id: [3; 16], controller, subsystem, host };
    put_command(&asked.command(cid), &data.encode(), out);
}

fn put_property(kind: u8, offset: u32, value: u32, long: bool, cid: u16, out: &mut Vec<u8>) {
    let cdw = [u32::from(long), offset, value, 0, 0, 0];
    let flags = Command::SGL_FLAGS;
    put_command(
        &Command { opcode: fabrics::OPCODE, flags, cid, nsid: kind.into(), cdw, ..Command::default() },
        &[],
        out,
    );
}

impl HostMessage {
    fn encode(&self, cid: u16, out: &mut Vec<u8>) {
        match self {
            Self::Command { opcode, flags, nsid, block, dword12, sgl: (kind, len), dword11, pdu } => {
                let kind = match kind % 4 {
                    0 => Sgl::IN_CAPSULE,
                    1 | 2 => Sgl::TRANSPORT,
                    _ => *kind,
                };
                let flags = if *flags > 240 { *flags } else { Command::SGL_FLAGS };
                let nsid = if *nsid > 64 { u32::from(*nsid) - 64 } else { 1 };
                let sgl = Sgl { address: 0, len_bytes: u32::from(*len) * 64, kind };
                let high = (block.get() >> 32) as u32 | u32::from(*dword11 & 4);
                let dword12 = if dword12 & 1 << 20 == 0 { dword12 & 0xc200_00ff } else { *dword12 };
                let cdw = [block.get() as u32, high, dword12, 0, 0, 0];
                let command = Command { opcode: opcode % 22, flags, cid, nsid, sgl, cdw };
                pdu.put(PduKind::Command, &command.encode(), out);
            }
            Self::Connect { queue, controller, entries } => {
                put_connect((*queue).into(), (*controller).into(), u32::from(*entries) + 1, cid, out);
            }
            Self::Property { set, offset, value, long } => {
                let kind = if *set { fabrics::PROPERTY_SET } else { fabrics::PROPERTY_GET };
                put_property(kind, (*offset).into(), *value, *long, cid, out);
            }
            Self::Admin { opcode, dwords: [a, b, c, d], nsid, len } => {
                let sgl = Sgl { address: 0, len_bytes: u32::from(*len), kind: Sgl::TRANSPORT };
                let (opcode, flags) = (opcode % 32, Command::SGL_FLAGS);
                let cdw = [*a, *b, *c, *d, 0, 0];
                put_command(&Command { opcode, flags, cid, nsid: (*nsid).into(), sgl, cdw }, &[], out);
            }
            Self::Data { cid, tag, offset, len_error, pdu } => {
                let len_bytes = (u32::from(pdu.data) * 64).wrapping_add_signed((*len_error).into());
                let offset_bytes = u32::from(*offset) * 64;
                let data = DataPdu { cid: (*cid).into(), tag: u16::from(tag % 4), offset_bytes, len_bytes };
                pdu.put(PduKind::HostData, &data.encode_rest(), out);
            }
            Self::Bytes(bytes) => out.extend_from_slice(bytes),
        }
    }
}

struct Running {
    server: Server,
    dir: TempDir,
    /// Keeps a controller, to which inputs connect I/O queues.
    _admin: UnixStream,
    controller: u16,
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
        let server = match nvme::start(SUBSYSTEM, vec![export], vec![listener], options) {
            Ok(server) => server,
            Err(error) => {
                println!("skipped: hostile hosts of the NVMe/TCP target: {error}");
                return None;
            }
        };
        let mut admin = UnixStream::connect(dir.path().join("socket")).expect("the target listens");
        let mut bytes = initialize();
        put_connect(0, 0xffff, 32, 1, &mut bytes);
        put_property(fabrics::PROPERTY_SET, property::CONFIGURATION, property::ENABLE, false, 2, &mut bytes);
        admin.write_all(&bytes).expect("the target takes it");
        let mut answers = [0; Initialize::BYTES + 2 * 24];
        admin.read_exact(&mut answers).expect("the target answers");
        let done = answers[Initialize::BYTES + PduHeader::BYTES..].first_chunk().map(Completion::decode);
        let controller = done.expect("a completion").result as u16;
        Some(Running { server, dir, _admin: admin, controller })
    };
    SERVER.get_or_init(start).as_ref()
}

/// Starts the servers of this module, so that their memory is not counted for an input.
pub fn warm_up() {
    let _ = (server(), hostile_target());
}

/// The fuzz target: a hostile host of our target.
pub fn nvme_target(data: &[u8]) {
    let Ok(script) = HostScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let Some(Running { server, dir, controller, .. }) = server() else { return };
    let mut bytes = if script.phase.is_multiple_of(4) { Vec::new() } else { initialize() };
    match script.phase % 4 {
        2 => {
            put_connect(0, 0xffff, 32, 0x4000, &mut bytes);
            put_property(fabrics::PROPERTY_SET, property::CONFIGURATION, property::ENABLE, false, 0x4001, &mut bytes);
        }
        3 => put_connect(u16::from(script.piece % 32) + 1, *controller, 32, 0x4000, &mut bytes),
        _ => {}
    }
    let messages = &script.messages[..script.messages.len().min(MOST)];
    (0..).zip(messages).for_each(|(cid, message)| message.encode(cid, &mut bytes));
    let answered = play_client(dir.path().join("socket"), &bytes, script.piece);
    let most = (messages.len() as u64 + 4 + bytes.len() as u64 / 72) * (SIZE_BYTES + (64 << 10));
    assert!(answered <= most, "{answered} bytes of answers to {} bytes", bytes.len());
    assert!(server.is_well(), "a thread of the target ended");
    if data.first().is_some_and(|byte| byte % 16 == 0) {
        let uri = NvmeUri::at(Endpoint::Unix(dir.path().join("socket")), SUBSYSTEM, 1);
        let host = NvmeDevice::open(&uri, false).expect("a host");
        let mut queue = Blocking::open(&host, EngineKind::Auto).expect("a queue");
        queue.read(0, &mut [0; 512]).expect("a read by another host");
    }
}

/// What a hostile target sends when a request may be in flight.
#[derive(Debug, Arbitrary)]
enum TargetMessage {
    Done { cid: u8, status: u16, pdu: Sent },
    Data { cid: u8, offset: u8, len_error: i8, success: bool, pdu: Sent },
    Ready { cid: u8, tag: u16, offset: u8, len: u16, pdu: Sent },
    Bytes(Vec<u8>),
}

#[derive(Debug, Arbitrary)]
struct TargetScript {
    /// Replaces a byte of what the admin queue sends.
    wrong: Option<(u16, u8)>,
    blocks: Option<Number>,
    /// What the I/O queue sends.
    answers: Vec<TargetMessage>,
    piece: u8,
}

fn put_pdu(kind: PduKind, rest: &[u8], data: &[u8], out: &mut Vec<u8>) {
    let header_bytes = PduHeader::BYTES + rest.len();
    let header = PduHeader {
        kind,
        flags: PduFlags::LAST,
        header_bytes: header_bytes as u8,
        data_offset_bytes: if data.is_empty() { 0 } else { header_bytes as u8 },
        total_bytes: (header_bytes + data.len()) as u32,
    };
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(rest);
    out.extend_from_slice(data);
}

fn put_done(cid: u16, result: u64, out: &mut Vec<u8>) {
    put_pdu(PduKind::Response, &Completion { result, cid, ..Completion::default() }.encode(), &[], out);
}

fn put_page(cid: u16, page: &[u8], out: &mut Vec<u8>) {
    let data = DataPdu { cid, tag: 0, offset_bytes: 0, len_bytes: page.len() as u32 };
    put_pdu(PduKind::ControllerData, &data.encode_rest(), page, out);
    put_done(cid, 0, out);
}

fn initialized() -> Vec<u8> {
    let granted = Initialize { version: 0, alignment: 0, digests: Digests::empty(), limit: 1 << 20 };
    granted.encode(PduKind::InitializeResponse).to_vec()
}

impl TargetScript {
    /// What the admin queue sends: the answers that our host waits for, in their order.
    fn admin(&self) -> Vec<u8> {
        let mut out = initialized();
        put_done(1, 1, &mut out);
        put_done(2, 0, &mut out);
        put_done(3, property::READY.into(), &mut out);
        let controller = identify::Controller {
            serial: "s".into(),
            model: "m".into(),
            firmware: "f".into(),
            id: 1,
            version: 0x1_0400,
            transfer_exponent: 2,
            is_discovery: false,
            keep_alive_granularity: 10,
            queue_entries: 16,
            namespaces: 1,
            optional_commands: identify::Controller::COMMANDS,
            subsystem: SUBSYSTEM.into(),
            capsule_units: 68,
        };
        put_page(4, &controller.encode()[..], &mut out);
        put_done(5, 15, &mut out);
        put_done(6, 3 | 3 << 16, &mut out);
        put_page(7, &identify::active_namespaces([1].into_iter(), 0)[..], &mut out);
        let namespace = identify::Namespace {
            blocks: self.blocks.map_or(SIZE_BYTES / 512, Number::get),
            block_exponent: 9,
            preferred_blocks: 7,
            is_read_only: false,
            deallocates_to_zeros: true,
            metadata_bytes: 0,
            reservations_last: true,
            guid: [1; 16],
        };
        put_page(8, &namespace.encode()[..], &mut out);
        if let Some((at, byte)) = self.wrong {
            let at = usize::from(at) % out.len();
            out[at] = byte;
        }
        out
    }

    fn io(&self) -> Vec<u8> {
        let mut out = initialized();
        put_done(1, 1, &mut out);
        for answer in self.answers.iter().take(MOST) {
            match answer {
                TargetMessage::Done { cid, status, pdu } => {
                    let (cid, status) = (u16::from(cid % 8), Status(status & 0x7fff));
                    pdu.put(PduKind::Response, &Completion { cid, status, ..Completion::default() }.encode(), &mut out);
                }
                TargetMessage::Data { cid, offset, len_error, success, pdu } => {
                    let len_bytes = (u32::from(pdu.data) * 64).wrapping_add_signed((*len_error).into());
                    let cid = u16::from(cid % 8);
                    let data = DataPdu { cid, tag: 0, offset_bytes: u32::from(*offset) * 64, len_bytes };
                    let start = out.len();
                    pdu.put(PduKind::ControllerData, &data.encode_rest(), &mut out);
                    out[start + 1] |= if *success { (PduFlags::LAST | PduFlags::SUCCESS).bits() } else { 0 };
                }
                TargetMessage::Ready { cid, tag, offset, len, pdu } => {
                    let (offset_bytes, len_bytes) = (u32::from(*offset) * 64, u32::from(*len));
                    let data = DataPdu { cid: u16::from(cid % 8), tag: *tag, offset_bytes, len_bytes };
                    Sent { wrong: pdu.wrong, data: 0 }.put(PduKind::ReadyToTransfer, &data.encode_rest(), &mut out);
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

/// The fuzz target: a hostile target for our host.
pub fn nvme_host(data: &[u8]) {
    let Ok(script) = TargetScript::arbitrary(&mut Unstructured::new(data)) else { return };
    let target = hostile_target();
    target.set([script.admin(), script.io()], script.piece);
    let uri = NvmeUri::at(Endpoint::Unix(target.socket()), SUBSYSTEM, 1);
    let told = |error: &dyn std::error::Error| assert!(!error.to_string().is_empty());
    let device = match NvmeDevice::open(&uri, true) {
        Ok(device) => device,
        Err(error) => return told(&error),
    };
    let mut queue = match device.open_queue(&QueueOptions::default()) {
        Ok(queue) => queue,
        Err(error) => return told(&error),
    };
    drive(&mut *queue);
}
