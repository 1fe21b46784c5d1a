//! A connection in its blocking phase: it is initialized, and carries commands one at a time. Then
//! an I/O queue takes the socket.

use super::{ClientError, Result};
use crate::wire::{
    Command, Completion, DataPdu, Digests, Initialize, PduError, PduFlags, PduHeader, PduKind, Terminate,
    fabrics::{self, property},
    pdu::DIGEST_BYTES,
};
use diskwright_store::{Endpoint, remote::Connection};
use std::time::{Duration, Instant};

/// How long a controller may take until it is ready.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest data of a PDU that is accepted here.
const DATA_BYTES_MAX: usize = 1 << 20;

/// Controller configuration: entries of 64 and 16 bytes, enabled.
const CONFIGURATION: u32 = 4 << 20 | 6 << 16 | property::ENABLE;

/// One connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: Connection,
    pub(super) digests: Digests,
    /// The longest data of one H2CData PDU.
    pub(super) data_bytes_max: usize,
    next_cid: u16,
}

impl Session {
    /// Connects, and initializes the connection.
    pub(super) fn open(endpoint: &Endpoint, digests: Digests) -> Result<Self> {
        let connection = Connection::open(endpoint)?;
        let mut session = Self { connection, digests: Digests::empty(), data_bytes_max: 0, next_cid: 0 };
        let asked = Initialize { version: 0, alignment: 0, digests, limit: 0 };
        const DOING: &str = "initializing the connection";
        session.connection.say(DOING, &asked.encode(PduKind::InitializeRequest))?;
        let (header, bytes) = session.hear(DOING)?;
        let granted = match (header.kind, bytes.first_chunk()) {
            (PduKind::InitializeResponse, Some(bytes)) => Initialize::decode(bytes),
            (kind, _) => return Err(session.wrong(DOING, PduError::Kind { found: kind as u8 })),
        };
        let field = |what, found: u32, expected| PduError::Field { what, found: found.into(), expected };
        if granted.version != 0 || granted.alignment != 0 {
            let found = u32::from(granted.version).max(granted.alignment.into());
            return Err(session.wrong(DOING, field("the version or alignment in ICResp", found, "0")));
        }
        if granted.limit < 4096 {
            return Err(session.wrong(DOING, field("the data limit in ICResp", granted.limit, "at least 4096")));
        }
        if granted.digests != digests {
            let what = format!("it grants the digests {:?}, and {digests:?} were asked for", granted.digests);
            return Err(session.connection.violation(what).into());
        }
        session.digests = digests;
        session.data_bytes_max = granted.limit as usize & !3;
        Ok(session)
    }

    fn wrong(&self, doing: &'static str, source: PduError) -> ClientError {
        ClientError::Wire { peer: self.peer(), doing, source }
    }

    /// The target, for messages.
    pub(super) fn peer(&self) -> String {
        self.connection.peer.to_string()
    }

    /// Enables the controller, and waits until it is ready.
    pub(super) fn enable(&mut self) -> Result<()> {
        const DOING: &str = "enable the controller";
        self.property(DOING, fabrics::PROPERTY_SET, property::CONFIGURATION, CONFIGURATION, false)?;
        let start = Instant::now();
        loop {
            let status = self.property(DOING, fabrics::PROPERTY_GET, property::STATUS, 0, false)?;
            if status & u64::from(property::READY) != 0 {
                return Ok(());
            }
            if start.elapsed() > PATIENCE {
                return Err(self.connection.stalled().into());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Gets or sets a property.
    pub(super) fn property(
        &mut self,
        doing: &'static str,
        kind: u8,
        offset: u32,
        value: u32,
        is_long: bool,
    ) -> Result<u64> {
        let cdw = [u32::from(is_long), offset, value, 0, 0, 0];
        let flags = Command::SGL_FLAGS;
        let command = Command { opcode: fabrics::OPCODE, flags, nsid: kind.into(), cdw, ..Command::default() };
        Ok(self.ask(doing, command, &[])?.0.result)
    }

    /// Sends a command with the data in its capsule, and waits for its completion and the data that
    /// come before it.
    pub(super) fn ask(&mut self, doing: &'static str, command: Command, data: &[u8]) -> Result<(Completion, Vec<u8>)> {
        self.next_cid = self.next_cid.wrapping_add(1);
        let command = Command { cid: self.next_cid, ..command };
        let mut pdu = Vec::new();
        put_pdu(self.digests, PduKind::Command, &command.encode(), data.len(), &mut pdu);
        pdu.extend_from_slice(data);
        put_digest(self.digests, data, &mut pdu);
        self.connection.say(doing, &pdu)?;
        let mut found = Vec::new();
        loop {
            let (header, bytes) = self.hear(doing)?;
            let body = bytes.get(PduHeader::BYTES..).unwrap_or_default();
            match header.kind {
                PduKind::Response => {
                    let done = body.first_chunk().map(Completion::decode).unwrap_or_default();
                    if done.cid != command.cid {
                        let what = format!("it completed the command {}, which is not in flight", done.cid);
                        return Err(self.connection.violation(what).into());
                    }
                    if !done.status.is_success() {
                        let (peer, status) = (self.peer(), done.status);
                        return Err(ClientError::Refused { peer, doing, status });
                    }
                    return Ok((done, found));
                }
                PduKind::ControllerData => {
                    let (header_bytes, data_bytes) =
                        header.check(self.digests).map_err(|error| self.wrong(doing, error))?;
                    let part = bytes.first_chunk().map(DataPdu::decode);
                    let fits = found.len() + data_bytes <= command.sgl.len_bytes as usize;
                    if !part.is_some_and(|part| part.cid == command.cid && part.offset_bytes as usize == found.len())
                        || !fits
                    {
                        let what = "it sent data that were not asked for".to_owned();
                        return Err(self.connection.violation(what).into());
                    }
                    found.extend_from_slice(&bytes[header_bytes..header_bytes + data_bytes]);
                    if header.flags.contains(PduFlags::SUCCESS) {
                        return Ok((Completion { cid: command.cid, ..Completion::default() }, found));
                    }
                }
                PduKind::ControllerTerminate => {
                    let status = bytes.first_chunk().map_or(0, |bytes| Terminate::decode(bytes).status);
                    let what = format!("it ended the connection with the fatal error status {status}");
                    return Err(self.connection.violation(what).into());
                }
                kind => return Err(self.wrong(doing, PduError::Kind { found: kind as u8 })),
            }
        }
    }

    /// The next PDU, whole.
    fn hear(&self, doing: &'static str) -> Result<(PduHeader, Vec<u8>)> {
        let mut bytes = vec![0; PduHeader::BYTES];
        self.connection.fill(doing, &mut bytes)?;
        let header = PduHeader::decode(&bytes).map_err(|error| self.wrong(doing, error))?;
        let wrong = || self.wrong(doing, PduError::Kind { found: 0xff });
        let header = header.ok_or_else(wrong)?;
        let (header_bytes, data_bytes) = header.check(self.digests).map_err(|error| self.wrong(doing, error))?;
        if data_bytes > DATA_BYTES_MAX {
            let what = format!("it sent a PDU with {data_bytes} bytes of data");
            return Err(self.connection.violation(what).into());
        }
        bytes.resize(header.total_bytes as usize, 0);
        self.connection.fill(doing, &mut bytes[PduHeader::BYTES..])?;
        check_header_digest(self.digests, &header, &bytes).map_err(|error| self.wrong(doing, error))?;
        let data = &bytes[header_bytes..header_bytes + data_bytes];
        if data_bytes > 0 && self.digests.contains(Digests::DATA) && header.kind == PduKind::ControllerData {
            let found = bytes.last_chunk().map_or(0, |digest| u32::from_le_bytes(*digest));
            if found != crc32c::crc32c(data) {
                let what = "the data digest does not match".to_owned();
                return Err(self.connection.violation(what).into());
            }
        }
        Ok((header, bytes))
    }
}

/// Appends the header of a PDU that goes on with `rest`, up to where its data begin.
pub(super) fn put_pdu(digests: Digests, kind: PduKind, rest: &[u8], data_bytes: usize, out: &mut Vec<u8>) {
    let has = |digest| if digests.contains(digest) { DIGEST_BYTES } else { 0 };
    let header_bytes = PduHeader::BYTES + rest.len();
    let mut flags = PduFlags::empty();
    flags.set(PduFlags::HEADER_DIGEST, digests.contains(Digests::HEADER));
    let mut total_bytes = header_bytes + has(Digests::HEADER);
    let mut data_offset_bytes = 0;
    if data_bytes > 0 {
        flags.set(PduFlags::DATA_DIGEST, digests.contains(Digests::DATA));
        data_offset_bytes = total_bytes as u8;
        total_bytes += data_bytes + has(Digests::DATA);
    }
    if kind == PduKind::HostData {
        flags |= PduFlags::LAST;
    }
    let header =
        PduHeader { kind, flags, header_bytes: header_bytes as u8, data_offset_bytes, total_bytes: total_bytes as u32 };
    let start = out.len();
    out.extend_from_slice(&header.encode());
    out.extend_from_slice(rest);
    if digests.contains(Digests::HEADER) {
        let digest = crc32c::crc32c(&out[start..]);
        out.extend_from_slice(&digest.to_le_bytes());
    }
}

/// Appends the digest of data, if there is one.
pub(super) fn put_digest(digests: Digests, data: &[u8], out: &mut Vec<u8>) {
    if !data.is_empty() && digests.contains(Digests::DATA) {
        out.extend_from_slice(&crc32c::crc32c(data).to_le_bytes());
    }
}

/// Checks the digest of a header, which `bytes` begin with.
pub(super) fn check_header_digest(digests: Digests, header: &PduHeader, bytes: &[u8]) -> Result<(), PduError> {
    let has_none = matches!(header.kind, PduKind::InitializeResponse | PduKind::ControllerTerminate);
    if has_none || !digests.contains(Digests::HEADER) {
        return Ok(());
    }
    let (front, rest) = bytes.split_at(usize::from(header.header_bytes).min(bytes.len()));
    let (expected, found) = (crc32c::crc32c(front), rest.first_chunk().map_or(0, |digest| u32::from_le_bytes(*digest)));
    if found == expected { Ok(()) } else { Err(PduError::HeaderDigest { found, expected }) }
}
