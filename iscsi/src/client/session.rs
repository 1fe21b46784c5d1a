//! A session in its blocking phase: PDUs, and SCSI commands one at a time. Then a queue takes the
//! connection.

use super::{ClientError, Result};
use crate::{
    scsi::{Sense, cdb, lun_of, status},
    wire::{
        Counters, DIGEST_BYTES, DataIn, HEADER_BYTES, Header, Opcode, ScsiCommand, ScsiReply, Sent, padding_of,
        replies, requests, text,
    },
};
use diskwright_store::remote::Connection;
use std::{io, thread, time::Duration};

/// How often a command is sent again while the unit tells that something has happened, or is not
/// ready.
const TRIES_MAX: u32 = 20;

/// Data of one PDU that we take. Longer Data-In PDUs cost fewer headers.
pub(super) const SEGMENT_BYTES: usize = 1 << 20;

/// Length of the text of a discovery at most, in bytes.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// What both sides have agreed on. What the target does not name has the default of the standard.
#[derive(Debug, Clone, Copy)]
pub(super) struct Agreed {
    pub(super) header_digest: bool,
    pub(super) data_digest: bool,
    /// Data of one PDU that the target takes.
    pub(super) segment_bytes: usize,
    /// Data that may go with a command.
    pub(super) first_burst_bytes: usize,
    pub(super) immediate: bool,
}

impl Default for Agreed {
    fn default() -> Self {
        Self {
            header_digest: false,
            data_digest: false,
            segment_bytes: 8192,
            first_burst_bytes: 64 << 10,
            immediate: true,
        }
    }
}

/// The numbers of commands and responses.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Numbers {
    /// The next command.
    pub(super) cmd_sn: u32,
    /// The next response.
    pub(super) expected_stat_sn: u32,
    /// The last command that the target takes.
    pub(super) max_cmd_sn: u32,
}

impl Numbers {
    /// Takes the numbers of a PDU. `has_status` tells whether its response number is used up.
    pub(super) fn take(&mut self, counters: Counters, has_status: bool) {
        if has_status {
            self.expected_stat_sn = counters.stat_sn.wrapping_add(1);
        }
        // An older PDU may arrive after a newer one has been built, and its window is smaller.
        if (counters.max_cmd_sn.wrapping_sub(self.max_cmd_sn) as i32) > 0 {
            self.max_cmd_sn = counters.max_cmd_sn;
        }
    }

    /// Whether the target takes one more command.
    pub(super) fn is_open(&self) -> bool {
        (self.max_cmd_sn.wrapping_sub(self.cmd_sn) as i32) >= 0
    }

    /// What a PDU has that is not a command.
    pub(super) fn sent(&self) -> Sent {
        Sent { cmd_sn: self.cmd_sn, expected_stat_sn: self.expected_stat_sn }
    }

    /// What a command has, which uses up a number.
    pub(super) fn next(&mut self) -> Sent {
        let sent = self.sent();
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        sent
    }
}

/// Appends a header with its digest.
pub(super) fn put_header(header: &[u8; HEADER_BYTES], agreed: &Agreed, out: &mut Vec<u8>) {
    out.extend_from_slice(header);
    if agreed.header_digest {
        out.extend_from_slice(&crc32c::crc32c(header).to_le_bytes());
    }
}

/// Appends what follows data: padding and digest.
pub(super) fn put_tail(data: &[u8], agreed: &Agreed, out: &mut Vec<u8>) {
    if data.is_empty() {
        return;
    }
    let padding = &[0; 3][..padding_of(data.len())];
    out.extend_from_slice(padding);
    if agreed.data_digest {
        let digest = crc32c::crc32c_append(crc32c::crc32c(data), padding);
        out.extend_from_slice(&digest.to_le_bytes());
    }
}

/// Bytes that follow so many bytes of data.
pub(super) fn tail_of(data_bytes: usize, agreed: &Agreed) -> usize {
    let digest_bytes = if agreed.data_digest && data_bytes > 0 { DIGEST_BYTES } else { 0 };
    padding_of(data_bytes) + digest_bytes
}

/// Checks the digest in `tail` of data.
pub(super) fn check_tail(data: &[u8], tail: &[u8], agreed: &Agreed) -> Result<(), String> {
    if !agreed.data_digest || data.is_empty() {
        return Ok(());
    }
    let (padding, digest) = tail.split_at(padding_of(data.len()).min(tail.len()));
    let computed = crc32c::crc32c_append(crc32c::crc32c(data), padding);
    if digest == computed.to_le_bytes() { Ok(()) } else { Err("the digest of data does not match".into()) }
}

/// Checks the digest that follows a header.
pub(super) fn check_header(header: &[u8], digest: &[u8]) -> Result<(), String> {
    if digest == crc32c::crc32c(header).to_le_bytes() {
        return Ok(());
    }
    Err("the digest of a header does not match".into())
}

/// Sense data in a response: a length, and so many bytes.
pub(super) fn sense_in(data: &[u8]) -> Sense {
    Sense::decode(data.get(2..).unwrap_or_default())
}

/// A PDU of the target, without its data.
#[derive(Debug)]
pub(super) struct Heard {
    pub(super) opcode: Option<Opcode>,
    pub(super) tag: u32,
    pub(super) bytes: [u8; HEADER_BYTES],
}

/// One session with its only connection.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) connection: Connection,
    pub(super) agreed: Agreed,
    pub(super) numbers: Numbers,
    /// Whether the login is over. Digests begin after it.
    pub(super) is_full: bool,
    tag: u32,
}

impl Session {
    /// A session before its login.
    pub(super) fn new(connection: Connection) -> Self {
        let numbers = Numbers { cmd_sn: 1, ..Numbers::default() };
        Self { connection, agreed: Agreed::default(), numbers, is_full: false, tag: 0 }
    }

    /// The target, for messages.
    pub(super) fn peer(&self) -> String {
        self.connection.peer.to_string()
    }

    /// The target violated the protocol.
    pub(super) fn violation(&self, what: &str) -> ClientError {
        self.connection.violation(what.to_owned()).into()
    }

    fn digests(&self) -> Agreed {
        let Agreed { header_digest, data_digest, .. } = self.agreed;
        Agreed { header_digest: header_digest && self.is_full, data_digest: data_digest && self.is_full, ..self.agreed }
    }

    /// Sends a PDU.
    pub(super) fn say(&self, doing: &'static str, header: &[u8; HEADER_BYTES], data: &[u8]) -> Result<()> {
        let agreed = self.digests();
        let mut out = Vec::new();
        put_header(header, &agreed, &mut out);
        out.extend_from_slice(data);
        put_tail(data, &agreed, &mut out);
        Ok(self.connection.say(doing, &out)?)
    }

    /// The next PDU with its data.
    pub(super) fn hear(&self, doing: &'static str) -> Result<(Heard, Vec<u8>)> {
        let agreed = self.digests();
        let mut bytes = [0; HEADER_BYTES];
        self.connection.fill(doing, &mut bytes)?;
        let header = Header::decode_reply(&bytes);
        let mut rest = vec![0; header.more_header_bytes];
        self.connection.fill(doing, &mut rest)?;
        if agreed.header_digest {
            let mut digest = [0; DIGEST_BYTES];
            self.connection.fill(doing, &mut digest)?;
            check_header(&[&bytes[..], &rest].concat(), &digest).map_err(|what| self.violation(&what))?;
        }
        if header.data_bytes > SEGMENT_BYTES {
            return Err(self.violation(&format!("it sent a PDU with {} bytes of data", header.data_bytes)));
        }
        let mut data = vec![0; header.data_bytes + tail_of(header.data_bytes, &agreed)];
        self.connection.fill(doing, &mut data)?;
        let tail = data.split_off(header.data_bytes);
        check_tail(&data, &tail, &agreed).map_err(|what| self.violation(&what))?;
        Ok((Heard { opcode: header.opcode, tag: header.tag, bytes }, data))
    }

    /// Sends a SCSI command, and waits for its end. Returns its data, `None` if the unit has
    /// refused it. A unit that tells that something has happened is asked again.
    pub(super) fn ask(
        &mut self,
        doing: &'static str,
        unit: u16,
        cdb: [u8; 16],
        room_bytes: u32,
    ) -> Result<Result<Vec<u8>, String>> {
        for tries in 0.. {
            let (status, sense, data) = self.ask_once(doing, unit, cdb, room_bytes)?;
            let answer = match status {
                status::GOOD => return Ok(Ok(data)),
                status::CHECK_CONDITION if !sense.is_transient() => return Ok(Err(sense.to_string())),
                status::CHECK_CONDITION => sense.to_string(),
                status::BUSY | status::TASK_SET_FULL => "it is busy".to_owned(),
                status::RESERVATION_CONFLICT => return Ok(Err("another initiator has reserved the disk".into())),
                other => return Ok(Err(format!("SCSI status {other:#04x}"))),
            };
            if tries == TRIES_MAX {
                return Ok(Err(answer));
            }
            if !sense.is_attention() {
                thread::sleep(Duration::from_millis(100));
            }
        }
        unreachable!("the loop ends")
    }

    fn ask_once(
        &mut self,
        doing: &'static str,
        unit: u16,
        cdb: [u8; 16],
        room_bytes: u32,
    ) -> Result<(u8, Sense, Vec<u8>)> {
        self.tag += 1;
        let reads = room_bytes > 0;
        let command = ScsiCommand { is_final: true, reads, writes: false, expected_bytes: room_bytes, cdb };
        let (lun, tag) = (lun_of(unit), self.tag);
        let sent = self.numbers.next();
        self.say(doing, &command.encode(lun, tag, sent, 0), &[])?;
        let mut found = Vec::new();
        loop {
            let (heard, data) = self.answer(doing)?;
            if heard.tag != tag {
                return Err(self.violation("it answered a command that is not in flight"));
            }
            match heard.opcode {
                Some(Opcode::DataIn) => {
                    let part = DataIn::decode(&heard.bytes);
                    if part.offset_bytes as usize != found.len() || found.len() + data.len() > room_bytes as usize {
                        return Err(self.violation("it sent data that were not asked for"));
                    }
                    found.extend_from_slice(&data);
                    if let Some((status, _)) = part.ends {
                        return Ok((status, Sense::NONE, found));
                    }
                }
                Some(Opcode::ScsiResponse) => {
                    let reply = ScsiReply::decode(&heard.bytes);
                    if !reply.is_carried_out {
                        return Err(self.violation("it could not carry out a command"));
                    }
                    return Ok((reply.status, sense_in(&data), found));
                }
                _ => return Err(self.violation("it sent a PDU that does not answer a command")),
            }
        }
    }

    /// The next PDU that is an answer. Questions of the target are answered on the way.
    fn answer(&mut self, doing: &'static str) -> Result<(Heard, Vec<u8>)> {
        loop {
            let (heard, data) = self.hear(doing)?;
            let counters = Counters::decode(&heard.bytes);
            match heard.opcode {
                Some(Opcode::NopIn) => {
                    let question = replies::transfer_tag_of(&heard.bytes);
                    self.numbers.take(counters, question.is_none());
                    if let Some(tag) = question {
                        let lun = Header::decode_reply(&heard.bytes).lun;
                        self.say(doing, &requests::nop_out(lun, tag, self.numbers.sent()), &[])?;
                    }
                }
                Some(Opcode::Async) => {
                    self.numbers.take(counters, true);
                    if replies::async_event_of(&heard.bytes) != 0 {
                        let ended = io::Error::new(io::ErrorKind::ConnectionAborted, "the target ends the session");
                        return Err(self.connection.lost(doing, ended).into());
                    }
                }
                Some(Opcode::Reject) => {
                    let code = replies::reject_code_of(&heard.bytes);
                    return Err(self.violation(&format!("it rejects a PDU with the reason {code:#04x}")));
                }
                opcode => {
                    let has_status = match opcode {
                        Some(Opcode::DataIn) => DataIn::decode(&heard.bytes).ends.is_some(),
                        _ => opcode != Some(Opcode::ReadyToTransfer),
                    };
                    self.numbers.take(counters, has_status);
                    return Ok((heard, data));
                }
            }
        }
    }

    /// The keys that the target answers to a text request.
    pub(super) fn text(&mut self, doing: &'static str, name: &str, value: &str) -> Result<Vec<(String, String)>> {
        let mut keys = Vec::new();
        text::put(&mut keys, name, value);
        let (mut whole, mut more) = (Vec::new(), None);
        loop {
            self.tag += 1;
            self.say(doing, &requests::text_request(self.tag, more, self.numbers.sent(), keys.len()), &keys)?;
            let (heard, data) = self.answer(doing)?;
            if heard.opcode != Some(Opcode::TextResponse) || heard.tag != self.tag {
                return Err(self.violation("it did not answer a text request"));
            }
            whole.extend_from_slice(&data);
            if whole.len() > TEXT_BYTES_MAX {
                return Err(self.violation("its text does not end"));
            }
            more = replies::transfer_tag_of(&heard.bytes);
            keys.clear();
            if more.is_none() {
                break;
            }
        }
        let pairs = text::pairs(&whole).map(|pair| pair.map(|(name, value)| (name.to_owned(), value.to_owned())));
        pairs.collect::<Result<_, _>>().map_err(|error| self.violation(&error.to_string()))
    }

    /// Waits until the unit takes commands.
    pub(super) fn make_ready(&mut self, unit: u16) -> Result<()> {
        const DOING: &str = "make the logical unit ready";
        let answer = self.ask(DOING, unit, cdb::test_unit_ready(), 0)?;
        answer.map(drop).map_err(|answer| ClientError::Refused { peer: self.peer(), doing: DOING, answer })
    }

    /// Ends the session. An error is of no interest: the connection is closed anyway.
    pub(super) fn log_out(mut self) {
        self.tag += 1;
        let logout = requests::logout(self.tag, self.numbers.sent());
        if self.say("logging out", &logout, &[]).is_ok() {
            let _ = self.answer("logging out");
        }
    }
}
