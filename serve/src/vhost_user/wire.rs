//! The vhost-user messages that a block device takes, as values. Pure.
//!
//! ```text
//!   header (12 bytes): request, flags, size ─▶ body ─▶ Message ─▶ reply: header, body
//! ```
//!
//! Numbers are those of the machine, which front-end and back-end share. A message may carry
//! descriptors (`channel.rs`), which belong to it.
//!
//! Rejected: the message types of the crate `vhost`. Its back-end cannot tell the front-end that
//! the configuration has changed, which a resized disk needs, and its reads wait for ever. The
//! tests use its front-end.

use super::{memory::RegionInfo, vring::RingAddresses};
use std::os::fd::OwnedFd;

/// Bytes of a message's header.
pub(crate) const HEADER_BYTES: usize = 12;

/// Maximum number of bytes after the header.
pub(crate) const BODY_BYTES_MAX: usize = 4096;

/// Bytes of the configuration space that a message may name.
pub(crate) const CONFIG_BYTES: usize = 256;

const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const FLAG_REPLY: u32 = 1 << 2;
const FLAG_NEED_REPLY: u32 = 1 << 3;

/// `VHOST_USER_BACKEND_CONFIG_CHANGE_MSG`, from the back-end.
const CONFIG_CHANGE: u32 = 2;

/// Protocol features (`VHOST_USER_PROTOCOL_F_*`) as bits.
pub(crate) mod protocol {
    pub(crate) const MQ: u64 = 1 << 0;
    pub(crate) const REPLY_ACK: u64 = 1 << 3;
    pub(crate) const BACKEND_REQ: u64 = 1 << 5;
    pub(crate) const CONFIG: u64 = 1 << 9;
    pub(crate) const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub(crate) const RESET_DEVICE: u64 = 1 << 13;
}

/// Why a message is not valid.
#[derive(Debug, thiserror::Error)]
pub(crate) enum WireError {
    #[error("a message has version {version} of the protocol; the only one is {VERSION}")]
    Version { version: u32 },
    #[error("a message is marked as a reply, and nothing was asked")]
    Reply,
    #[error("message {code} has {found_bytes} bytes, more than {BODY_BYTES_MAX}")]
    TooLong { code: u32, found_bytes: u32 },
    #[error("message {code} has {found_bytes} bytes, which is not the length of such a message")]
    Length { code: u32, found_bytes: usize },
    #[error("message {code} carries {found} descriptors; it needs {wanted}")]
    Descriptors { code: u32, found: usize, wanted: usize },
    #[error("message {code} is not supported by this device")]
    Unsupported { code: u32 },
    #[error("a ring without a descriptor for its kicks would have to be polled, which is not supported")]
    Polling,
    #[error("the configuration was asked for {len_bytes} bytes at {offset_bytes}; it has {CONFIG_BYTES}")]
    Config { offset_bytes: u32, len_bytes: u32 },
}

/// A message's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) code: u32,
    pub(crate) needs_reply: bool,
    pub(crate) body_bytes: usize,
}

impl Header {
    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Self, WireError> {
        let mut reader = Reader(bytes);
        // The header has three words.
        let mut word = || reader.u32().unwrap_or_default();
        let (code, flags, found_bytes) = (word(), word(), word());
        if flags & VERSION_MASK != VERSION {
            return Err(WireError::Version { version: flags & VERSION_MASK });
        }
        if flags & FLAG_REPLY != 0 {
            return Err(WireError::Reply);
        }
        match usize::try_from(found_bytes).ok().filter(|&bytes| bytes <= BODY_BYTES_MAX) {
            Some(body_bytes) => Ok(Self { code, needs_reply: flags & FLAG_NEED_REPLY != 0, body_bytes }),
            None => Err(WireError::TooLong { code, found_bytes }),
        }
    }
}

/// A range of the configuration space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConfigRange {
    pub(crate) offset_bytes: u32,
    pub(crate) len_bytes: u32,
    flags: u32,
}

impl ConfigRange {
    pub(crate) fn range(self) -> std::ops::Range<usize> {
        self.offset_bytes as usize..(self.offset_bytes + self.len_bytes) as usize
    }
}

/// The memory that records which requests are in flight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InflightInfo {
    pub(crate) len_bytes: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) queues: u16,
    pub(crate) queue_size: u16,
}

/// A message of the front-end.
#[derive(Debug)]
pub(crate) enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemory(Vec<(RegionInfo, OwnedFd)>),
    SetRingSize {
        ring: u32,
        size: u32,
    },
    SetRingAddresses {
        ring: u32,
        addresses: RingAddresses,
    },
    SetRingBase {
        ring: u32,
        base: u32,
    },
    GetRingBase {
        ring: u32,
    },
    SetKick {
        ring: u32,
        fd: OwnedFd,
    },
    /// Without a descriptor the guest is not signalled.
    SetCall {
        ring: u32,
        fd: Option<OwnedFd>,
    },
    SetError {
        ring: u32,
        fd: Option<OwnedFd>,
    },
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueCount,
    EnableRing {
        ring: u32,
        on: bool,
    },
    SetBackendChannel(OwnedFd),
    GetConfig(ConfigRange),
    SetConfig {
        range: ConfigRange,
        bytes: Vec<u8>,
    },
    GetInflight(InflightInfo),
    SetInflight(InflightInfo, OwnedFd),
    ResetDevice,
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*first)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_ne_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }
}

impl Message {
    /// Decodes the body of a message.
    pub(crate) fn decode(code: u32, body: &[u8], fds: Vec<OwnedFd>) -> Result<Self, WireError> {
        let (found_bytes, found) = (body.len(), fds.len());
        let wrong_length = || WireError::Length { code, found_bytes };
        let mut reader = Reader(body);
        let mut fds = fds.into_iter();
        let mut wanted = 0;
        let mut one = || {
            wanted = 1;
            fds.next().ok_or(WireError::Descriptors { code, found, wanted: 1 })
        };
        let state = |reader: &mut Reader<'_>| reader.u32().zip(reader.u32()).ok_or_else(wrong_length);
        let number = |reader: &mut Reader<'_>| reader.u64().ok_or_else(wrong_length);
        let message = match code {
            1 => Self::GetFeatures,
            2 => Self::SetFeatures(number(&mut reader)?),
            3 => Self::SetOwner,
            4 => Self::ResetOwner,
            5 => {
                let (count, _padding) = state(&mut reader)?;
                // The number of descriptors is bounded by what the channel receives.
                wanted = count as usize;
                if found != wanted {
                    return Err(WireError::Descriptors { code, found, wanted });
                }
                let mut regions = Vec::with_capacity(found);
                for fd in fds.by_ref() {
                    let mut number = || number(&mut reader);
                    let (guest_address, len_bytes, user_address) = (number()?, number()?, number()?);
                    regions.push((
                        RegionInfo { guest_address, len_bytes, user_address, file_offset_bytes: number()? },
                        fd,
                    ));
                }
                Self::SetMemory(regions)
            }
            8 => state(&mut reader).map(|(ring, size)| Self::SetRingSize { ring, size })?,
            9 => {
                let (ring, _flags) = state(&mut reader)?;
                let mut number = || number(&mut reader);
                let (descriptors, used, available, _log) = (number()?, number()?, number()?, number()?);
                Self::SetRingAddresses { ring, addresses: RingAddresses { descriptors, available, used } }
            }
            10 => state(&mut reader).map(|(ring, base)| Self::SetRingBase { ring, base })?,
            11 => state(&mut reader).map(|(ring, _)| Self::GetRingBase { ring })?,
            12..=14 => {
                let value = number(&mut reader)?;
                let ring = (value & 0xff) as u32;
                let fd = if value & 0x100 == 0 { Some(one()?) } else { None };
                match (code, fd) {
                    (12, Some(fd)) => Self::SetKick { ring, fd },
                    (12, None) => return Err(WireError::Polling),
                    (13, fd) => Self::SetCall { ring, fd },
                    (_, fd) => Self::SetError { ring, fd },
                }
            }
            15 => Self::GetProtocolFeatures,
            16 => Self::SetProtocolFeatures(number(&mut reader)?),
            17 => Self::GetQueueCount,
            18 => state(&mut reader).map(|(ring, on)| Self::EnableRing { ring, on: on != 0 })?,
            21 => Self::SetBackendChannel(one()?),
            24 | 25 => {
                let (offset_bytes, len_bytes) = state(&mut reader)?;
                let flags = reader.u32().ok_or_else(wrong_length)?;
                let end = offset_bytes.checked_add(len_bytes).filter(|&end| end as usize <= CONFIG_BYTES);
                if end.is_none() {
                    return Err(WireError::Config { offset_bytes, len_bytes });
                }
                let range = ConfigRange { offset_bytes, len_bytes, flags };
                // The front-end sends as many bytes as it asks for.
                let bytes = std::mem::take(&mut reader.0);
                if bytes.len() != len_bytes as usize {
                    return Err(wrong_length());
                }
                if code == 24 { Self::GetConfig(range) } else { Self::SetConfig { range, bytes: bytes.to_vec() } }
            }
            31 | 32 => {
                let (len_bytes, offset_bytes) = (number(&mut reader)?, number(&mut reader)?);
                let (queues, queue_size) = reader.u16().zip(reader.u16()).ok_or_else(wrong_length)?;
                // C's padding.
                reader.0 = &[];
                let info = InflightInfo { len_bytes, offset_bytes, queues, queue_size };
                if code == 31 { Self::GetInflight(info) } else { Self::SetInflight(info, one()?) }
            }
            34 => Self::ResetDevice,
            _ => return Err(WireError::Unsupported { code }),
        };
        if !reader.0.is_empty() {
            return Err(wrong_length());
        }
        // A descriptor too many is a mistake about the protocol, and would be closed unseen.
        if found != wanted { Err(WireError::Descriptors { code, found, wanted }) } else { Ok(message) }
    }
}

/// A reply to a message.
pub(crate) fn reply(code: u32, body: &[u8]) -> Vec<u8> {
    framed(code, VERSION | FLAG_REPLY, body)
}

/// The message of the back-end that the configuration space has changed.
pub(crate) fn config_change() -> Vec<u8> {
    framed(CONFIG_CHANGE, VERSION, &[])
}

fn framed(code: u32, flags: u32, body: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(HEADER_BYTES + body.len());
    for word in [code, flags, body.len() as u32] {
        out.extend_from_slice(&word.to_ne_bytes());
    }
    out.extend_from_slice(body);
    out
}

/// The body of a reply with a ring's state.
pub(crate) fn ring_state(ring: u32, base: u16) -> Vec<u8> {
    [ring.to_ne_bytes(), u32::from(base).to_ne_bytes()].concat()
}

/// The body of a reply with configuration bytes.
pub(crate) fn config(range: ConfigRange, bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(12 + bytes.len());
    for word in [range.offset_bytes, range.len_bytes, range.flags] {
        out.extend_from_slice(&word.to_ne_bytes());
    }
    out.extend_from_slice(bytes);
    out
}

/// The body of a reply with the memory for requests in flight.
pub(crate) fn inflight(info: InflightInfo) -> Vec<u8> {
    let mut out = Vec::with_capacity(24);
    out.extend_from_slice(&info.len_bytes.to_ne_bytes());
    out.extend_from_slice(&info.offset_bytes.to_ne_bytes());
    out.extend_from_slice(&info.queues.to_ne_bytes());
    out.extend_from_slice(&info.queue_size.to_ne_bytes());
    // C's padding.
    out.extend_from_slice(&[0; 4]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use rustix::event::EventfdFlags;

    fn fd() -> OwnedFd {
        rustix::event::eventfd(0, EventfdFlags::CLOEXEC).unwrap()
    }

    #[test]
    fn headers_that_lie_are_refused() {
        let header = |words: [u32; 3]| {
            let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
            Header::decode(bytes.as_slice().try_into().unwrap())
        };
        assert_eq!(header([1, 9, 8]).unwrap(), Header { code: 1, needs_reply: true, body_bytes: 8 });
        assert!(matches!(header([1, 2, 0]), Err(WireError::Version { version: 2 })));
        assert!(matches!(header([1, 5, 0]), Err(WireError::Reply)));
        assert!(matches!(header([1, 1, 4097]), Err(WireError::TooLong { found_bytes: 4097, .. })));
    }

    #[test]
    fn descriptors_are_counted() {
        let refused = |code, body: &[u8], count: usize| {
            let found = Message::decode(code, body, (0..count).map(|_| fd()).collect());
            assert!(matches!(found, Err(WireError::Descriptors { .. })), "{code}: {found:?}");
        };
        refused(1, &[], 1);
        refused(12, &0u64.to_ne_bytes(), 0);
        refused(13, &0x100u64.to_ne_bytes(), 1);
        refused(21, &[], 2);
        let two_regions = [&[2, 0, 0, 0, 0, 0, 0, 0][..], &[0; 64]].concat();
        refused(5, &two_regions, 1);
        let decoded = Message::decode(5, &two_regions, vec![fd(), fd()]).unwrap();
        assert!(matches!(decoded, Message::SetMemory(regions) if regions.len() == 2));
        assert!(matches!(Message::decode(12, &0x105u64.to_ne_bytes(), vec![]), Err(WireError::Polling)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]
        #[test]
        fn no_message_panics(code in 0u32..45, body in prop::collection::vec(any::<u8>(), 0..80), fds in 0usize..3) {
            let decoded = Message::decode(code, &body, (0..fds).map(|_| fd()).collect());
            if let Ok(Message::GetConfig(range)) = decoded {
                prop_assert!(range.range().end <= CONFIG_BYTES);
            }
        }
    }
}
