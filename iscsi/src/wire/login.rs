//! Login requests and responses (RFC 7143, 11.12 and 11.13).

use super::{Counters, HEADER_BYTES, Opcode, Sent, pdu::Header, requests::IMMEDIATE};
use crate::{put, u16_at, u32_at};
use std::fmt;

/// The stage of a login.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Stage {
    /// Who the parties are.
    Security = 0,
    /// What they agree on.
    Operational = 1,
    /// Commands.
    Full = 3,
}

impl Stage {
    fn of(bits: u8) -> Option<Self> {
        match bits & 3 {
            0 => Some(Self::Security),
            1 => Some(Self::Operational),
            3 => Some(Self::Full),
            _ => None,
        }
    }
}

/// What a login has come to: class and detail.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoginStatus(pub u16);

impl LoginStatus {
    /// So far it is right.
    pub const SUCCESS: Self = Self(0);
    /// The request is wrong in another way.
    pub const INITIATOR_ERROR: Self = Self(0x0200);
    /// The target is at another address for now, which the text tells.
    pub const MOVED_TEMPORARILY: Self = Self(0x0101);
    /// The target is at another address from now on.
    pub const MOVED: Self = Self(0x0102);
    /// The initiator is not who it says, or does not say it.
    pub const AUTHENTICATION: Self = Self(0x0201);
    /// The initiator may not use the target.
    pub const FORBIDDEN: Self = Self(0x0202);
    /// There is no such target.
    pub const NOT_FOUND: Self = Self(0x0203);
    /// No common version.
    pub const VERSION: Self = Self(0x0205);
    /// A session has one connection.
    pub const TOO_MANY_CONNECTIONS: Self = Self(0x0206);
    /// A key is missing.
    pub const MISSING: Self = Self(0x0207);
    /// The kind of session is not known.
    pub const SESSION_TYPE: Self = Self(0x0209);
    /// There is no such session.
    pub const NO_SESSION: Self = Self(0x020a);
    /// The request does not fit the state of the login.
    pub const INVALID: Self = Self(0x020b);
    /// The target cannot serve the initiator now.
    pub const UNAVAILABLE: Self = Self(0x0301);
    /// The target has no resources.
    pub const OUT_OF_RESOURCES: Self = Self(0x0302);
}

impl fmt::Display for LoginStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match *self {
            Self::SUCCESS => "success",
            Self::INITIATOR_ERROR => "the request is wrong",
            Self::AUTHENTICATION => "it does not accept who this initiator is; give its name and ?secrets=FILE",
            Self::FORBIDDEN => "this initiator may not use the target; look at the target's access list",
            Self::NOT_FOUND => "there is no such target; check its name in the URI",
            Self::VERSION => "no common version",
            Self::TOO_MANY_CONNECTIONS => "too many connections",
            Self::MISSING => "a key is missing",
            Self::SESSION_TYPE => "the type of session is not known",
            Self::NO_SESSION => "there is no such session",
            Self::INVALID => "the request does not fit the state of the login",
            Self::UNAVAILABLE => "it cannot serve this initiator now",
            Self::OUT_OF_RESOURCES => "it has no resources",
            Self(0x0204) => "the target has been removed",
            Self(_) => "the reason is not known",
        };
        write!(f, "{what} (status {:#06x})", self.0)
    }
}

/// A login request, without its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoginRequest {
    /// Whether the initiator is ready for the next stage.
    pub transits: bool,
    /// Whether the text goes on in the next request.
    pub continues: bool,
    /// The stage it belongs to; `None` if the bits are reserved.
    pub stage: Option<Stage>,
    /// The stage that the initiator is ready for.
    pub next: Option<Stage>,
    /// The lowest version that the initiator supports.
    pub version_min: u8,
    /// The initiator's part of the session's id.
    pub isid: [u8; 6],
    /// The target's part, 0 for a new session.
    pub tsih: u16,
    /// The tag of the task.
    pub tag: u32,
    /// The id of the connection.
    pub cid: u16,
    /// The number of the next command.
    pub cmd_sn: u32,
}

impl LoginRequest {
    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            transits: header[1] & TRANSITS != 0,
            continues: header[1] & CONTINUES != 0,
            stage: Stage::of(header[1] >> 2),
            next: Stage::of(header[1]),
            version_min: header[3],
            isid: crate::array(header, 8),
            tsih: u16_at(header, 14),
            tag: u32_at(header, 16),
            cid: u16_at(header, 20),
            cmd_sn: u32_at(header, 24),
        }
    }

    /// Encodes the header, for `text_bytes` of text.
    pub fn encode(&self, expected_stat_sn: u32, text_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::Login, self.tag, text_bytes);
        out[0] |= IMMEDIATE;
        out[1] = flags_of(self.transits, self.continues, self.stage, self.next);
        out[3] = self.version_min;
        put(&mut out, 8, &self.isid);
        put(&mut out, 14, &self.tsih.to_be_bytes());
        put(&mut out, 20, &self.cid.to_be_bytes());
        Sent { cmd_sn: self.cmd_sn, expected_stat_sn }.put(&mut out);
        out
    }
}

/// A login response, without its text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoginReply {
    /// Whether the login goes on with the next stage.
    pub transits: bool,
    /// Whether the text goes on in the next response.
    pub continues: bool,
    /// The stage it belongs to; `None` if the bits are reserved.
    pub stage: Option<Stage>,
    /// The next stage.
    pub next: Option<Stage>,
    /// The initiator's part of the session's id.
    pub isid: [u8; 6],
    /// The target's part.
    pub tsih: u16,
    /// The tag of the request.
    pub tag: u32,
    /// The numbers of the session.
    pub counters: Counters,
    /// The status.
    pub status: LoginStatus,
}

impl LoginReply {
    /// The answer to a request with this status, which does not go on with the next stage.
    pub fn to(request: &LoginRequest, counters: Counters, status: LoginStatus) -> Self {
        let LoginRequest { stage, next, isid, tag, .. } = *request;
        Self { transits: false, continues: false, stage, next, isid, tsih: 0, tag, counters, status }
    }

    /// Encodes the header, for `text_bytes` of text.
    pub fn encode(&self, text_bytes: usize) -> [u8; HEADER_BYTES] {
        let mut out = Header::start(Opcode::LoginResponse, self.tag, text_bytes);
        out[1] = match self.status {
            LoginStatus::SUCCESS => flags_of(self.transits, self.continues, self.stage, self.next),
            _ => 0,
        };
        put(&mut out, 8, &self.isid);
        put(&mut out, 14, &self.tsih.to_be_bytes());
        self.counters.put(&mut out);
        put(&mut out, 36, &self.status.0.to_be_bytes());
        out
    }

    /// Decodes the header.
    pub fn decode(header: &[u8; HEADER_BYTES]) -> Self {
        Self {
            transits: header[1] & TRANSITS != 0,
            continues: header[1] & CONTINUES != 0,
            stage: Stage::of(header[1] >> 2),
            next: Stage::of(header[1]),
            isid: crate::array(header, 8),
            tsih: u16_at(header, 14),
            tag: u32_at(header, 16),
            counters: Counters::decode(header),
            status: LoginStatus(u16_at(header, 36)),
        }
    }
}

const TRANSITS: u8 = 0x80;
const CONTINUES: u8 = 0x40;

fn flags_of(transits: bool, continues: bool, stage: Option<Stage>, next: Option<Stage>) -> u8 {
    let bits = |stage: Option<Stage>| stage.map_or(0, |stage| stage as u8);
    let mut flags = bits(stage) << 2;
    if transits {
        flags |= TRANSITS | bits(next);
    }
    if continues {
        flags |= CONTINUES;
    }
    flags
}
