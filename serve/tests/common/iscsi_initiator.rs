//! An iSCSI initiator for tests: it sends what it is told to, right or wrong.

use diskwright_iscsi::{
    scsi::lun_of,
    wire::{DIGEST_BYTES, HEADER_BYTES, padding_of, text},
};
use std::{
    io::{ErrorKind, Read, Write},
    os::unix::net::UnixStream,
    path::Path,
    time::Duration,
};

pub const TARGET: &str = "iqn.2026-11.org.example:disks";

/// A PDU of the target.
#[derive(Debug, Clone)]
pub struct Said {
    pub header: [u8; HEADER_BYTES],
    pub data: Vec<u8>,
}

impl Said {
    pub fn opcode(&self) -> u8 {
        self.header[0] & 0x3f
    }

    pub fn u32_at(&self, at: usize) -> u32 {
        u32::from_be_bytes(self.header[at..at + 4].try_into().unwrap())
    }

    /// Sense key, code and qualifier of a response.
    pub fn sense(&self) -> (u8, u8, u8) {
        assert_eq!(self.header[3], 2, "{self:?}");
        (self.data[4] & 15, self.data[14], self.data[15])
    }
}

/// How a command ended: its status, its sense, its data, the residual with its flags.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ended {
    pub status: u8,
    pub sense: Option<(u8, u8, u8)>,
    pub data: Vec<u8>,
    pub residual: (u8, u32),
}

impl Ended {
    pub fn is_good(&self) -> bool {
        self.status == 0
    }
}

/// What an initiator asks for at the login.
#[derive(Debug, Clone)]
pub struct Ways {
    pub initiator: &'static str,
    pub isid: u8,
    pub header_digest: bool,
    pub data_digest: bool,
    pub segment_bytes: usize,
    pub burst_bytes: usize,
    pub first_burst_bytes: usize,
    pub immediate: bool,
    /// Begin with the security stage.
    pub security: bool,
}

impl Default for Ways {
    fn default() -> Self {
        Self {
            initiator: "iqn.2026-11.org.example:a",
            isid: 1,
            header_digest: false,
            data_digest: false,
            segment_bytes: 256 << 10,
            burst_bytes: 1 << 20,
            first_burst_bytes: 64 << 10,
            immediate: true,
            security: false,
        }
    }
}

#[derive(Debug)]
pub struct Initiator {
    pub stream: UnixStream,
    pub ways: Ways,
    full: bool,
    pub tag: u32,
    pub cmd_sn: u32,
    /// The highest number that the target takes.
    pub max_cmd_sn: u32,
    pub stat_sn: Option<u32>,
    /// Lengths of the Data-In PDUs of the last command.
    pub pieces: Vec<usize>,
    /// Number of R2Ts of the last command.
    pub r2ts: usize,
}

impl Initiator {
    /// A connection before the login.
    pub fn connect(socket: &Path, ways: Ways) -> Self {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let (tag, cmd_sn) = (0x100, 77);
        Self { stream, ways, full: false, tag, cmd_sn, max_cmd_sn: 0, stat_sn: None, pieces: Vec::new(), r2ts: 0 }
    }

    /// A session of which the first attention of unit 0 was taken.
    pub fn session(socket: &Path, ways: Ways) -> Self {
        let mut initiator = Self::connect(socket, ways);
        initiator.log_in();
        assert_eq!(initiator.plain(0, &[0; 6]).sense, Some((6, 0x29, 0)), "a new session is told so");
        initiator
    }

    pub fn log_in(&mut self) {
        let word = |yes| if yes { "Yes" } else { "No" };
        let digest = |yes| if yes { "CRC32C,None" } else { "None" };
        let mut keys = vec![("InitiatorName", self.ways.initiator.to_owned()), ("TargetName", TARGET.to_owned())];
        if self.ways.security {
            keys.push(("AuthMethod", "CHAP,None".into()));
            let answer = self.log_in_with(0x81, &keys);
            assert_eq!((answer.header[36], answer.header[1]), (0, 0x81), "{answer:?}");
            keys.clear();
        }
        let more = [
            ("HeaderDigest", digest(self.ways.header_digest).to_owned()),
            ("DataDigest", digest(self.ways.data_digest).to_owned()),
            ("MaxRecvDataSegmentLength", self.ways.segment_bytes.to_string()),
            ("MaxBurstLength", self.ways.burst_bytes.to_string()),
            ("FirstBurstLength", self.ways.first_burst_bytes.to_string()),
            ("ImmediateData", word(self.ways.immediate).to_owned()),
            ("InitialR2T", "No".to_owned()),
            ("MaxConnections", "4".to_owned()),
            ("X-org.example.strange", "1".to_owned()),
        ];
        keys.extend(more);
        // In one request of the operational stage, or in two.
        let first = if self.ways.security { 0x04 } else { 0x87 };
        let answer = self.log_in_with(first, &keys);
        assert_eq!((answer.header[36], answer.header[1]), (0, first), "{answer:?}");
        let told = answer.data.clone();
        let answer = if self.ways.security { self.log_in_with(0x87, &[]) } else { answer };
        assert_eq!((answer.header[36], answer.header[1]), (0, 0x87), "{answer:?}");
        assert!(answer.header[14..16] != [0, 0], "a session has an id");
        let pairs: Vec<_> = text::pairs(&told).map(Result::unwrap).collect();
        for expected in [("InitialR2T", "Yes"), ("MaxConnections", "1"), ("X-org.example.strange", "NotUnderstood")] {
            assert!(pairs.contains(&expected), "{expected:?} in {pairs:?}");
        }
        self.full = true;
    }

    /// Sends a login request with these flags and keys, and returns the answer.
    pub fn log_in_with(&mut self, flags: u8, keys: &[(&str, String)]) -> Said {
        let mut data = Vec::new();
        keys.iter().for_each(|(name, value)| text::put(&mut data, name, value));
        let mut header = self.header(0x43, flags, data.len());
        header[8..14].copy_from_slice(&[0x80, 0, 0, 0, 0, self.ways.isid]);
        header[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
        self.send(&header, &data);
        let answer = self.receive().expect("an answer to a login");
        assert_eq!(answer.opcode(), 0x23);
        answer
    }

    pub fn header(&mut self, opcode: u8, flags: u8, data_bytes: usize) -> [u8; HEADER_BYTES] {
        self.tag += 1;
        let mut header = [0; HEADER_BYTES];
        (header[0], header[1]) = (opcode, flags);
        header[5..8].copy_from_slice(&(data_bytes as u32).to_be_bytes()[1..]);
        header[16..20].copy_from_slice(&self.tag.to_be_bytes());
        header[20..24].copy_from_slice(&u32::MAX.to_be_bytes());
        header
    }

    pub fn send(&mut self, header: &[u8; HEADER_BYTES], data: &[u8]) {
        self.stream.write_all(&self.bytes_of(header, data)).unwrap();
    }

    /// A PDU as it is sent.
    pub fn bytes_of(&self, header: &[u8; HEADER_BYTES], data: &[u8]) -> Vec<u8> {
        let mut bytes = header.to_vec();
        if self.full && self.ways.header_digest {
            bytes.extend(crc32c::crc32c(header).to_le_bytes());
        }
        let from = bytes.len();
        bytes.extend(data);
        bytes.resize(bytes.len() + padding_of(data.len()), 0);
        if self.full && self.ways.data_digest && !data.is_empty() {
            bytes.extend(crc32c::crc32c(&bytes[from..]).to_le_bytes());
        }
        bytes
    }

    /// The next PDU; `None` at the end of the connection.
    pub fn receive(&mut self) -> Option<Said> {
        let mut header = [0; HEADER_BYTES];
        match self.stream.read_exact(&mut header) {
            Err(error) if matches!(error.kind(), ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset) => return None,
            outcome => outcome.unwrap(),
        }
        let mut digest = [0; DIGEST_BYTES];
        if self.full && self.ways.header_digest {
            self.stream.read_exact(&mut digest).unwrap();
            assert_eq!(u32::from_le_bytes(digest), crc32c::crc32c(&header));
        }
        let data_bytes = u32::from_be_bytes([0, header[5], header[6], header[7]]) as usize;
        let mut data = vec![0; data_bytes + padding_of(data_bytes)];
        self.stream.read_exact(&mut data).unwrap();
        if self.full && self.ways.data_digest && data_bytes > 0 {
            self.stream.read_exact(&mut digest).unwrap();
            assert_eq!(u32::from_le_bytes(digest), crc32c::crc32c(&data));
        }
        data.truncate(data_bytes);
        let said = Said { header, data };
        // The numbers of responses come in their order.
        let has_status = said.opcode() != 0x25 || header[1] & 1 != 0;
        if has_status && said.opcode() != 0x31 {
            let stat_sn = said.u32_at(24);
            if let Some(before) = self.stat_sn {
                assert_eq!(stat_sn, before.wrapping_add(1), "{said:?}");
            }
            self.stat_sn = Some(stat_sn);
        }
        let max_cmd_sn = said.u32_at(32);
        assert!((max_cmd_sn.wrapping_sub(self.max_cmd_sn) as i32) >= 0 || self.max_cmd_sn == 0, "the window shrinks");
        self.max_cmd_sn = max_cmd_sn;
        Some(said)
    }

    /// The header of a command.
    pub fn command(&mut self, unit: u16, cdb: &[u8], reads: u32, writes: u32, data_bytes: usize) -> [u8; HEADER_BYTES] {
        let flags = 0x80 | if reads > 0 { 0x40 } else { 0 } | if writes > 0 { 0x20 } else { 0 };
        let mut header = self.header(0x01, flags, data_bytes);
        header[8..16].copy_from_slice(&lun_of(unit).to_be_bytes());
        header[20..24].copy_from_slice(&reads.max(writes).to_be_bytes());
        header[24..28].copy_from_slice(&self.cmd_sn.to_be_bytes());
        header[32..32 + cdb.len()].copy_from_slice(cdb);
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        header
    }

    /// A command without data.
    pub fn plain(&mut self, unit: u16, cdb: &[u8]) -> Ended {
        let header = self.command(unit, cdb, 0, 0, 0);
        self.send(&header, &[]);
        self.ended(&[])
    }

    /// A command that returns data.
    pub fn fetch(&mut self, unit: u16, cdb: &[u8], room_bytes: u32) -> Ended {
        let header = self.command(unit, cdb, room_bytes, 0, 0);
        self.send(&header, &[]);
        self.ended(&[])
    }

    /// A command with data: as many of them with it as allowed, the rest as the target asks.
    pub fn give(&mut self, unit: u16, cdb: &[u8], data: &[u8]) -> Ended {
        let immediate = if self.ways.immediate { data.len().min(self.ways.first_burst_bytes) } else { 0 };
        let header = self.command(unit, cdb, 0, data.len() as u32, immediate);
        self.send(&header, &data[..immediate]);
        self.ended(data)
    }

    /// The end of the last command, after the data that the target asks for.
    pub fn ended(&mut self, data: &[u8]) -> Ended {
        let mut found = Vec::new();
        (self.pieces, self.r2ts) = (Vec::new(), 0);
        loop {
            let said = self.receive().expect("the end of a command");
            let residual = (said.header[1] & 6, said.u32_at(44));
            assert_eq!(said.u32_at(16), self.tag, "{said:?}");
            match said.opcode() {
                0x25 => {
                    assert_eq!(said.u32_at(40) as usize, found.len());
                    assert_eq!(said.u32_at(36) as usize, self.pieces.len());
                    self.pieces.push(said.data.len());
                    found.extend(said.data);
                    if said.header[1] & 1 != 0 {
                        return Ended { status: said.header[3], sense: None, data: found, residual };
                    }
                }
                0x31 => {
                    self.r2ts += 1;
                    let (from, bytes) = (said.u32_at(40) as usize, said.u32_at(44) as usize);
                    self.data_out(said.u32_at(20), from, &data[from..from + bytes]);
                }
                0x21 => {
                    let sense = (said.header[3] == 2).then(|| said.sense());
                    return Ended { status: said.header[3], sense, data: found, residual };
                }
                other => panic!("a PDU of type {other:#x}: {said:?}"),
            }
        }
    }

    /// Sends the data of an R2T in several PDUs.
    pub fn data_out(&mut self, transfer_tag: u32, from: usize, data: &[u8]) {
        let pieces: Vec<_> = data.chunks(48 << 10).collect();
        let mut at = from;
        for (number, piece) in pieces.iter().enumerate() {
            let mut header = self.header(0x05, if number + 1 == pieces.len() { 0x80 } else { 0 }, piece.len());
            self.tag -= 1;
            header[16..20].copy_from_slice(&self.tag.to_be_bytes());
            header[20..24].copy_from_slice(&transfer_tag.to_be_bytes());
            header[36..40].copy_from_slice(&(number as u32).to_be_bytes());
            header[40..44].copy_from_slice(&(at as u32).to_be_bytes());
            self.send(&header, piece);
            at += piece.len();
        }
    }
}

/// WRITE(16) or another command of 16 bytes with a range.
pub fn cdb_16(opcode: u8, flags: u8, first: u64, blocks: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1]) = (opcode, flags);
    cdb[2..10].copy_from_slice(&first.to_be_bytes());
    cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
    cdb
}
