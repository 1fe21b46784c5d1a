//! An NVMe/TCP host that sends whatever a test wants, one command at a time or several.

use super::PATIENCE;
use diskwright_nvme::wire::{
    Command, Completion, ConnectData, DataPdu, Digests, Initialize, PduFlags, PduHeader, PduKind, Sgl, Status,
    Terminate, admin,
    fabrics::{self, ConnectCommand, property},
    identify, nvm,
};
use std::{
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::Path,
};

pub const SUBSYSTEM: &str = "nqn.2026-01.org.example:disks";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef";

/// What the controller sent.
#[derive(Debug, PartialEq)]
pub enum Said {
    Done(Completion),
    Data(PduFlags, DataPdu, Vec<u8>),
    ReadyToTransfer(DataPdu),
    Terminated(Terminate),
    /// The connection has ended.
    End,
}

/// One queue.
#[derive(Debug)]
pub struct Host {
    pub stream: UnixStream,
    pub digests: Digests,
    next_cid: u16,
}

/// How queues are connected.
#[derive(Debug, Clone, Copy)]
pub struct Ways {
    pub digests: Digests,
    pub flow_control: bool,
    pub alignment: u8,
    pub keep_alive_ms: u32,
    pub host_id: [u8; 16],
}

impl Default for Ways {
    fn default() -> Self {
        Self { digests: Digests::empty(), flow_control: true, alignment: 0, keep_alive_ms: 0, host_id: [9; 16] }
    }
}

impl Host {
    /// Connects and initializes, and no more.
    pub fn initialize(path: &Path, ways: Ways) -> Self {
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        let mut host = Self { stream, digests: Digests::empty(), next_cid: 1 };
        let asked = Initialize { version: 0, alignment: ways.alignment, digests: ways.digests, limit: 0 };
        host.say(&asked.encode(PduKind::InitializeRequest));
        let mut granted = [0; Initialize::BYTES];
        host.stream.read_exact(&mut granted).unwrap();
        assert_eq!(PduHeader::decode(&granted).unwrap().unwrap().kind, PduKind::InitializeResponse);
        let granted = Initialize::decode(&granted);
        assert!(granted.digests == ways.digests && granted.limit >= 4096, "{granted:?}");
        host.digests = ways.digests;
        host
    }

    /// An admin queue of an enabled controller, and the controller's id.
    pub fn admin(path: &Path, ways: Ways) -> (Self, u16) {
        let mut host = Self::initialize(path, ways);
        let done = host.connect(0, SUBSYSTEM, 0xffff, ways);
        assert_eq!(done.status, Status::SUCCESS);
        host.set_configuration(property::ENABLE);
        assert_eq!(host.property(property::STATUS, false), u64::from(property::READY));
        (host, done.result as u16)
    }

    /// An I/O queue of a controller.
    pub fn io(path: &Path, controller: u16, queue: u16, ways: Ways) -> Self {
        let mut host = Self::initialize(path, ways);
        assert_eq!(host.connect(queue, SUBSYSTEM, controller, ways).status, Status::SUCCESS);
        host
    }

    pub fn connect(&mut self, queue: u16, subsystem: &str, controller: u16, ways: Ways) -> Completion {
        let attributes = if ways.flow_control { 0 } else { fabrics::NO_FLOW_CONTROL };
        let asked = ConnectCommand { queue, entries: 32, attributes, keep_alive_ms: ways.keep_alive_ms };
        let data = ConnectData { host_id: ways.host_id, controller, subsystem: subsystem.into(), host: HOST.into() };
        self.ask(asked.command(0), &data.encode()).0
    }

    pub fn property(&mut self, offset: u32, is_long: bool) -> u64 {
        let nsid = fabrics::PROPERTY_GET.into();
        let cdw = [u32::from(is_long), offset, 0, 0, 0, 0];
        let (done, _) = self.ask(Command { opcode: fabrics::OPCODE, nsid, cdw, ..plain() }, &[]);
        assert_eq!(done.status, Status::SUCCESS);
        done.result
    }

    pub fn set_configuration(&mut self, value: u32) {
        let nsid = fabrics::PROPERTY_SET.into();
        let cdw = [0, property::CONFIGURATION, value, 0, 0, 0];
        let (done, _) = self.ask(Command { opcode: fabrics::OPCODE, nsid, cdw, ..plain() }, &[]);
        assert_eq!(done.status, Status::SUCCESS);
    }

    pub fn identify(&mut self, cns: u8, nsid: u32) -> Box<[u8; 4096]> {
        let cdw = [cns.into(), 0, 0, 0, 0, 0];
        let (done, page) = self.ask(Command { opcode: admin::IDENTIFY, nsid, cdw, ..with_room(4096) }, &[]);
        assert_eq!(done.status, Status::SUCCESS);
        page.into_boxed_slice().try_into().unwrap()
    }

    pub fn namespace(&mut self, nsid: u32) -> identify::Namespace {
        identify::Namespace::decode(&self.identify(identify::NAMESPACE, nsid))
    }

    pub fn log_page(&mut self, page: u8, len_bytes: u32, offset_bytes: u32) -> (Status, Vec<u8>) {
        let dwords = len_bytes / 4 - 1;
        let cdw = [u32::from(page) | dwords << 16, dwords >> 16, offset_bytes, 0, 0, 0];
        let (done, page) = self.ask(Command { opcode: admin::GET_LOG_PAGE, cdw, ..with_room(len_bytes) }, &[]);
        (done.status, page)
    }

    pub fn feature(&mut self, opcode: u8, feature: u8, value: u32) -> Completion {
        self.ask(Command { opcode, cdw: [feature.into(), value, 0, 0, 0, 0], ..plain() }, &[]).0
    }

    /// Writes blocks of 512 bytes, in the capsule or by an R2T.
    pub fn write(&mut self, nsid: u32, block: u64, data: &[u8], in_capsule: bool, flags: u32) -> Status {
        self.with_data(nvm::WRITE, nsid, block, data, in_capsule, flags)
    }

    pub fn with_data(
        &mut self,
        opcode: u8,
        nsid: u32,
        block: u64,
        data: &[u8],
        in_capsule: bool,
        flags: u32,
    ) -> Status {
        let sgl = if in_capsule { in_capsule_of(data.len()) } else { with_room(data.len() as u32).sgl };
        let command = Command { opcode, nsid, cdw: range(block, data.len() as u64 / 512, flags), sgl, ..plain() };
        self.ask(command, data).0.status
    }

    pub fn read(&mut self, nsid: u32, block: u64, blocks: u64) -> Result<Vec<u8>, Status> {
        let command =
            Command { opcode: nvm::READ, nsid, cdw: range(block, blocks, 0), ..with_room(blocks as u32 * 512) };
        let (done, data) = self.ask(command, &[]);
        if done.status.is_success() { Ok(data) } else { Err(done.status) }
    }

    /// A command of I/O without data.
    pub fn plain(&mut self, opcode: u8, nsid: u32, block: u64, blocks: u64, flags: u32) -> Status {
        self.ask(Command { opcode, nsid, cdw: range(block, blocks, flags), ..plain() }, &[]).0.status
    }

    /// Sends a command with a new id, and its data if they are to be in the capsule. Returns the
    /// id.
    pub fn send(&mut self, command: Command, data: &[u8]) -> u16 {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        let command = Command { cid, ..command };
        let data = if command.sgl.kind == Sgl::IN_CAPSULE { data } else { &[] };
        let pdu = self.pdu(PduKind::Command, &command.encode(), data);
        self.say(&pdu);
        cid
    }

    /// Sends a command and waits for its completion. Gives it its data, and returns those of it.
    pub fn ask(&mut self, command: Command, data: &[u8]) -> (Completion, Vec<u8>) {
        let cid = self.send(command, data);
        let mut found = Vec::new();
        loop {
            match self.hear() {
                Said::Done(done) if done.cid == cid => return (done, found),
                Said::ReadyToTransfer(wanted) if wanted.cid == cid => self.give(wanted, data),
                Said::Data(flags, part, bytes) if part.cid == cid => {
                    assert_eq!((part.offset_bytes as usize, part.len_bytes as usize), (found.len(), bytes.len()));
                    found.extend(bytes);
                    if flags.contains(PduFlags::SUCCESS) {
                        return (Completion { cid, ..Completion::default() }, found);
                    }
                }
                other => panic!("{other:?}, while command {cid} was awaited"),
            }
        }
    }

    /// Sends the data that an R2T asks for, in two parts if they are long.
    pub fn give(&mut self, wanted: DataPdu, data: &[u8]) {
        let (from, len) = (wanted.offset_bytes as usize, wanted.len_bytes as usize);
        let part_bytes = if len > 8192 { (len / 2) & !3 } else { len };
        for (index, part) in data[from..from + len].chunks(part_bytes).enumerate() {
            let offset_bytes = (from + index * part_bytes) as u32;
            let header = DataPdu { offset_bytes, len_bytes: part.len() as u32, ..wanted };
            let pdu = self.pdu(PduKind::HostData, &header.encode_rest(), part);
            self.say(&pdu);
        }
    }

    /// The bytes of a PDU whose header goes on with `rest`.
    pub fn pdu(&self, kind: PduKind, rest: &[u8], data: &[u8]) -> Vec<u8> {
        let digest_bytes = |digest| if self.digests.contains(digest) { 4 } else { 0 };
        let header_bytes = PduHeader::BYTES + rest.len();
        let mut total_bytes = header_bytes + digest_bytes(Digests::HEADER);
        let mut data_offset_bytes = 0;
        if !data.is_empty() {
            data_offset_bytes = total_bytes as u8;
            total_bytes += data.len() + digest_bytes(Digests::DATA);
        }
        let flags = PduFlags::from_bits_retain(self.digests.bits());
        let header_bytes = header_bytes as u8;
        let header = PduHeader { kind, flags, header_bytes, data_offset_bytes, total_bytes: total_bytes as u32 };
        let mut out = [&header.encode()[..], rest].concat();
        if self.digests.contains(Digests::HEADER) {
            out.extend(crc32c::crc32c(&out).to_le_bytes());
        }
        out.extend(data);
        if self.digests.contains(Digests::DATA) && !data.is_empty() {
            out.extend(crc32c::crc32c(data).to_le_bytes());
        }
        out
    }

    pub fn say(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    /// The next PDU. Its digests are checked.
    pub fn hear(&mut self) -> Said {
        let mut bytes = vec![0; PduHeader::BYTES];
        if self.stream.read_exact(&mut bytes).is_err() {
            return Said::End;
        }
        let header = PduHeader::decode(&bytes).unwrap().unwrap();
        let (header_bytes, data_bytes) = header.check(self.digests).unwrap();
        bytes.resize(header.total_bytes as usize, 0);
        self.stream.read_exact(&mut bytes[PduHeader::BYTES..]).unwrap();
        if self.digests.contains(Digests::HEADER) && header.kind != PduKind::ControllerTerminate {
            let end = usize::from(header.header_bytes);
            assert_eq!(bytes[end..end + 4], crc32c::crc32c(&bytes[..end]).to_le_bytes());
        }
        let data = bytes[header_bytes..header_bytes + data_bytes].to_vec();
        if self.digests.contains(Digests::DATA) && data_bytes > 0 && header.kind != PduKind::ControllerTerminate {
            assert_eq!(bytes[header_bytes + data_bytes..], crc32c::crc32c(&data).to_le_bytes());
        }
        let part = DataPdu::decode(bytes.first_chunk().unwrap());
        match header.kind {
            PduKind::Response => Said::Done(Completion::decode(bytes[8..].first_chunk().unwrap())),
            PduKind::ControllerData => Said::Data(header.flags, part, data),
            PduKind::ReadyToTransfer => Said::ReadyToTransfer(part),
            PduKind::ControllerTerminate => Said::Terminated(Terminate::decode(bytes.first_chunk().unwrap())),
            other => panic!("a controller sends no {other:?}"),
        }
    }
}

pub fn plain() -> Command {
    Command { flags: Command::SGL_FLAGS, sgl: Sgl { kind: Sgl::TRANSPORT, ..Sgl::default() }, ..Command::default() }
}

pub fn with_room(len_bytes: u32) -> Command {
    Command { sgl: Sgl { address: 0, len_bytes, kind: Sgl::TRANSPORT }, ..plain() }
}

pub fn in_capsule_of(bytes: usize) -> Sgl {
    Sgl { address: 0, len_bytes: bytes as u32, kind: Sgl::IN_CAPSULE }
}

/// Dwords 10 to 15 of a command for blocks.
pub fn range(block: u64, blocks: u64, flags: u32) -> [u32; 6] {
    [block as u32, (block >> 32) as u32, (blocks - 1) as u32 & 0xffff | flags, 0, 0, 0]
}
