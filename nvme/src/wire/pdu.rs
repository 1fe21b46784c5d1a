//! PDUs: the header that all begin with, and those that are not a command or a completion. TCP,
//! "PDU Definitions".

use super::{put, u16_at, u32_at};
use bitflags::bitflags;

/// The kind of a PDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum PduKind {
    /// Host to controller: initialize the connection.
    InitializeRequest = 0x00,
    /// The answer.
    InitializeResponse = 0x01,
    /// Host to controller: the connection ends because of an error.
    HostTerminate = 0x02,
    /// Controller to host: the same.
    ControllerTerminate = 0x03,
    /// A command, and perhaps its data.
    Command = 0x04,
    /// A completion.
    Response = 0x05,
    /// Data of a write that were asked for.
    HostData = 0x06,
    /// Data of a read.
    ControllerData = 0x07,
    /// The controller is ready for data of a write.
    ReadyToTransfer = 0x09,
}

bitflags! {
    /// Flags of a PDU.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct PduFlags: u8 {
        /// A digest follows the header.
        const HEADER_DIGEST = 1;
        /// A digest follows the data.
        const DATA_DIGEST = 1 << 1;
        /// The last data PDU of a command, or of one R2T.
        const LAST = 1 << 2;
        /// The command has succeeded and no completion follows.
        const SUCCESS = 1 << 3;
    }

    /// Which digests a connection uses.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct Digests: u8 {
        /// A CRC32C after each header.
        const HEADER = 1;
        /// A CRC32C after data.
        const DATA = 1 << 1;
    }
}

/// Size of a digest in bytes.
pub const DIGEST_BYTES: usize = 4;

/// A PDU that violates the protocol.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PduError {
    /// The kind is not known, or not one that this side may receive.
    #[error("a PDU of type {found:#04x} is not expected here")]
    Kind {
        /// The type.
        found: u8,
    },
    /// The length of the header is not that of the kind.
    #[error("the header of a {kind:?} PDU has {found} bytes, expected {expected}")]
    HeaderLength {
        /// The kind.
        kind: PduKind,
        /// The length found.
        found: u8,
        /// The length expected.
        expected: u8,
    },
    /// The whole length or the data offset does not fit the rest of the header.
    #[error(
        "a {kind:?} PDU has {total_bytes} bytes and data at offset {data_offset_bytes}, which does not fit its header of {header_bytes} bytes"
    )]
    Length {
        /// The kind.
        kind: PduKind,
        /// The length of the header with its digest.
        header_bytes: u32,
        /// The offset of the data.
        data_offset_bytes: u8,
        /// The whole length.
        total_bytes: u32,
    },
    /// The digest of the header does not match.
    #[error("the header digest is {found:#010x}, expected {expected:#010x}")]
    HeaderDigest {
        /// The digest found.
        found: u32,
        /// The digest computed.
        expected: u32,
    },
    /// A field has an impossible value.
    #[error("{what} is {found}, expected {expected}")]
    Field {
        /// The field.
        what: &'static str,
        /// The value found.
        found: u64,
        /// The values expected.
        expected: &'static str,
    },
}

impl PduError {
    /// The "Fatal Error Status" that a [`Terminate`] PDU reports for this error.
    pub fn fatal_status(&self) -> u16 {
        match self {
            Self::Kind { .. } => Terminate::SEQUENCE,
            Self::HeaderDigest { .. } => Terminate::HEADER_DIGEST,
            Self::HeaderLength { .. } | Self::Length { .. } | Self::Field { .. } => Terminate::FIELD,
        }
    }
}

/// The header that every PDU begins with. TCP, "Common Header".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PduHeader {
    /// The kind of the PDU.
    pub kind: PduKind,
    /// Its flags.
    pub flags: PduFlags,
    /// Length of the header of this kind, without a digest.
    pub header_bytes: u8,
    /// Where the data begins, from the start of the PDU. 0 if there is none.
    pub data_offset_bytes: u8,
    /// Length of the PDU with digests and data.
    pub total_bytes: u32,
}

impl PduKind {
    fn of(byte: u8) -> Option<Self> {
        Some(match byte {
            0x00 => Self::InitializeRequest,
            0x01 => Self::InitializeResponse,
            0x02 => Self::HostTerminate,
            0x03 => Self::ControllerTerminate,
            0x04 => Self::Command,
            0x05 => Self::Response,
            0x06 => Self::HostData,
            0x07 => Self::ControllerData,
            0x09 => Self::ReadyToTransfer,
            _ => return None,
        })
    }

    /// Length of the header of this kind, without a digest.
    pub fn header_bytes(self) -> u8 {
        match self {
            Self::InitializeRequest | Self::InitializeResponse => Initialize::BYTES as u8,
            Self::Command => 72,
            Self::HostTerminate
            | Self::ControllerTerminate
            | Self::Response
            | Self::HostData
            | Self::ControllerData
            | Self::ReadyToTransfer => 24,
        }
    }

    fn may_have_data(self) -> bool {
        matches!(self, Self::Command | Self::HostData | Self::ControllerData)
    }
}

impl PduHeader {
    /// Size of the common header.
    pub const BYTES: usize = 8;

    /// Decodes a header. `None` if there are fewer than [`Self::BYTES`].
    ///
    /// # Errors
    /// [`PduError::Kind`], [`PduError::HeaderLength`].
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, PduError> {
        let Some(&[kind, flags, header_bytes, data_offset_bytes, ..]) = bytes.first_chunk::<{ Self::BYTES }>() else {
            return Ok(None);
        };
        let kind = PduKind::of(kind).ok_or(PduError::Kind { found: kind })?;
        let expected = kind.header_bytes();
        if header_bytes != expected {
            return Err(PduError::HeaderLength { kind, found: header_bytes, expected });
        }
        let flags = PduFlags::from_bits_retain(flags);
        Ok(Some(Self { kind, flags, header_bytes, data_offset_bytes, total_bytes: u32_at(bytes, 4) }))
    }

    /// Checks the lengths against each other and against what the connection negotiated. Returns
    /// the length of the header with its digest and with what pads it up to the data, and the
    /// length of the data without its digest.
    ///
    /// # Errors
    /// [`PduError::Length`].
    pub fn check(&self, digests: Digests) -> Result<(usize, usize), PduError> {
        let has_header_digest = digests.contains(Digests::HEADER) && self.kind_has_digests();
        let header_bytes = u32::from(self.header_bytes) + if has_header_digest { DIGEST_BYTES as u32 } else { 0 };
        let wrong = PduError::Length {
            kind: self.kind,
            header_bytes,
            data_offset_bytes: self.data_offset_bytes,
            total_bytes: self.total_bytes,
        };
        if self.total_bytes == header_bytes && (self.data_offset_bytes == 0 || self.kind.may_have_data()) {
            return Ok((header_bytes as usize, 0));
        }
        if matches!(self.kind, PduKind::HostTerminate | PduKind::ControllerTerminate) {
            // The header that was wrong follows, at most 128 bytes of it.
            let data_bytes = self.total_bytes.checked_sub(header_bytes).filter(|&bytes| bytes <= 128);
            return data_bytes.map(|bytes| (header_bytes as usize, bytes as usize)).ok_or(wrong);
        }
        let digest_bytes = if digests.contains(Digests::DATA) { DIGEST_BYTES as u32 } else { 0 };
        let offset_bytes = u32::from(self.data_offset_bytes);
        match self.total_bytes.checked_sub(offset_bytes).and_then(|bytes| bytes.checked_sub(digest_bytes)) {
            Some(data_bytes) if data_bytes > 0 && offset_bytes >= header_bytes && self.kind.may_have_data() => {
                Ok((offset_bytes as usize, data_bytes as usize))
            }
            _ => Err(wrong),
        }
    }

    fn kind_has_digests(&self) -> bool {
        !matches!(
            self.kind,
            PduKind::InitializeRequest
                | PduKind::InitializeResponse
                | PduKind::HostTerminate
                | PduKind::ControllerTerminate
        )
    }

    /// The bytes of the header.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let [a, b, c, d] = self.total_bytes.to_le_bytes();
        [self.kind as u8, self.flags.bits(), self.header_bytes, self.data_offset_bytes, a, b, c, d]
    }
}

/// ICReq and ICResp: what both sides need to know of each other. TCP, "Initialize Connection".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Initialize {
    /// Version of the PDU formats; 0 is the only one.
    pub version: u16,
    /// Alignment of data in PDUs that the sender receives, in dwords less one.
    pub alignment: u8,
    /// The digests that the host asks for, or that the controller grants.
    pub digests: Digests,
    /// From the host: R2Ts in flight for one command, less one. From the controller: the largest
    /// data of one H2CData PDU, in bytes.
    pub limit: u32,
}

impl Initialize {
    /// Size of the PDU.
    pub const BYTES: usize = 128;
    /// The largest alignment, in dwords less one.
    pub const ALIGNMENT_MAX: u8 = 31;

    /// The PDU's bytes.
    pub fn encode(&self, kind: PduKind) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        let header = PduHeader {
            kind,
            flags: PduFlags::empty(),
            header_bytes: Self::BYTES as u8,
            data_offset_bytes: 0,
            total_bytes: Self::BYTES as u32,
        };
        put(&mut out, 0, &header.encode());
        put(&mut out, 8, &self.version.to_le_bytes());
        (out[10], out[11]) = (self.alignment, self.digests.bits());
        put(&mut out, 12, &self.limit.to_le_bytes());
        out
    }

    /// Decodes the PDU's bytes, from its header on.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            version: u16_at(bytes, 8),
            alignment: bytes[10],
            digests: Digests::from_bits_truncate(bytes[11]),
            limit: u32_at(bytes, 12),
        }
    }
}

/// The header of H2CData, C2HData and R2T: which part of which command's data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataPdu {
    /// The command.
    pub cid: u16,
    /// The controller's tag for the data of one R2T. Not used in C2HData.
    pub tag: u16,
    /// Offset in the command's data.
    pub offset_bytes: u32,
    /// Length of this part.
    pub len_bytes: u32,
}

impl DataPdu {
    /// Size of the header.
    pub const BYTES: usize = 24;

    /// The header's bytes. `header` has the lengths of the whole PDU.
    pub fn encode(&self, header: &PduHeader) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &header.encode());
        put(&mut out, PduHeader::BYTES, &self.encode_rest());
        out
    }

    /// The header's bytes behind the common header.
    pub fn encode_rest(&self) -> [u8; Self::BYTES - PduHeader::BYTES] {
        let mut out = [0; Self::BYTES - PduHeader::BYTES];
        put(&mut out, 0, &self.cid.to_le_bytes());
        put(&mut out, 2, &self.tag.to_le_bytes());
        put(&mut out, 4, &self.offset_bytes.to_le_bytes());
        put(&mut out, 8, &self.len_bytes.to_le_bytes());
        out
    }

    /// Decodes the header's bytes.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self {
            cid: u16_at(bytes, 8),
            tag: u16_at(bytes, 10),
            offset_bytes: u32_at(bytes, 12),
            len_bytes: u32_at(bytes, 16),
        }
    }
}

/// TermReq: why the connection ends. TCP, "Host/Controller to Controller/Host Terminate
/// Connection".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminate {
    /// The "Fatal Error Status".
    pub status: u16,
    /// More about it; for [`Self::FIELD`] the offset of the field.
    pub information: u32,
}

impl Terminate {
    /// Size of the PDU without the header that was wrong.
    pub const BYTES: usize = 24;
    /// A field of a header is invalid.
    pub const FIELD: u16 = 1;
    /// A PDU that is not expected.
    pub const SEQUENCE: u16 = 2;
    /// A header digest does not match.
    pub const HEADER_DIGEST: u16 = 3;
    /// Data that lies outside of what was asked for.
    pub const OUT_OF_RANGE: u16 = 4;

    /// The PDU's bytes, with the beginning of the PDU that was wrong.
    pub fn encode(&self, kind: PduKind, wrong: &[u8]) -> Vec<u8> {
        let wrong = &wrong[..wrong.len().min(128)];
        let header = PduHeader {
            kind,
            flags: PduFlags::empty(),
            header_bytes: Self::BYTES as u8,
            data_offset_bytes: 0,
            total_bytes: (Self::BYTES + wrong.len()) as u32,
        };
        let mut out = vec![0; Self::BYTES];
        put(&mut out, 0, &header.encode());
        put(&mut out, 8, &self.status.to_le_bytes());
        put(&mut out, 10, &self.information.to_le_bytes());
        out.extend_from_slice(wrong);
        out
    }

    /// Decodes the PDU's bytes.
    pub fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        Self { status: u16_at(bytes, 8), information: u32_at(bytes, 10) }
    }
}
