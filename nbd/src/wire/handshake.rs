//! The handshake: greeting, client flags, and the answer to `EXPORT_NAME`.

use super::{ClientFlags, Decoded, HandshakeFlags, TransmissionFlags, WireError, bytes::Fields};

/// `NBDMAGIC`, the first word of a greeting.
pub const GREETING_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// `IHAVEOPT`, the second word of a newstyle greeting and the first of each option.
pub(crate) const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
/// The second word of an oldstyle greeting.
pub(crate) const OLDSTYLE_MAGIC: u64 = 0x0000_4202_8186_1253;

/// Zeros after an export's summary, unless `NO_ZEROES` was negotiated.
const PADDING_BYTES: usize = 124;

/// The server's first message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Greeting {
    /// The client sends options next.
    Newstyle(HandshakeFlags),
    /// Without options: the transmission phase begins immediately.
    Oldstyle(ExportSummary),
}

impl Greeting {
    /// Size of a newstyle greeting.
    pub const NEWSTYLE_BYTES: usize = 18;

    /// Encodes a newstyle greeting.
    pub fn encode_newstyle(flags: HandshakeFlags) -> [u8; Self::NEWSTYLE_BYTES] {
        let mut out = [0; Self::NEWSTYLE_BYTES];
        out[..8].copy_from_slice(&GREETING_MAGIC.to_be_bytes());
        out[8..16].copy_from_slice(&OPTION_MAGIC.to_be_bytes());
        out[16..].copy_from_slice(&flags.bits().to_be_bytes());
        out
    }

    /// Decodes either greeting.
    ///
    /// # Errors
    /// [`WireError::Magic`] if the peer is not an NBD server.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Self>, WireError> {
        let mut fields = Fields(bytes);
        let Some(found) = fields.u64() else { return Ok(Decoded::Need(8 - bytes.len())) };
        if found != GREETING_MAGIC {
            return Err(WireError::Magic { what: "the greeting", found, expected: "\"NBDMAGIC\"" });
        }
        match fields.u64() {
            None => Ok(Decoded::Need(16 - bytes.len())),
            Some(OPTION_MAGIC) => Ok(match fields.u16() {
                None => Decoded::Need(Self::NEWSTYLE_BYTES - bytes.len()),
                Some(flags) => {
                    Decoded::Value(Self::Newstyle(HandshakeFlags::from_bits_retain(flags)), Self::NEWSTYLE_BYTES)
                }
            }),
            Some(OLDSTYLE_MAGIC) => {
                const OLDSTYLE_BYTES: usize = 16 + 8 + 4 + PADDING_BYTES;
                if bytes.len() < OLDSTYLE_BYTES {
                    return Ok(Decoded::Need(OLDSTYLE_BYTES - bytes.len()));
                }
                let (Some(size_bytes), Some(flags)) = (fields.u64(), fields.u32()) else {
                    return Ok(Decoded::Need(OLDSTYLE_BYTES - bytes.len()));
                };
                // The upper half holds the handshake flags, which have no meaning here.
                let flags = TransmissionFlags::from_bits_retain(flags as u16);
                Ok(Decoded::Value(Self::Oldstyle(ExportSummary { size_bytes, flags }), OLDSTYLE_BYTES))
            }
            Some(found) => Err(WireError::Magic {
                what: "the second word of the greeting",
                found,
                expected: "\"IHAVEOPT\", or 0x420281861253 of an oldstyle server",
            }),
        }
    }
}

impl ClientFlags {
    /// Size on the wire.
    pub const WIRE_BYTES: usize = 4;

    /// Encodes the flags.
    pub fn encode(self) -> [u8; Self::WIRE_BYTES] {
        self.bits().to_be_bytes()
    }

    /// Decodes the flags. Unknown bits are kept; a server must end the session for them.
    pub fn decode(bytes: &[u8]) -> Decoded<Self> {
        match Fields(bytes).u32() {
            None => Decoded::Need(Self::WIRE_BYTES - bytes.len()),
            Some(bits) => Decoded::Value(Self::from_bits_retain(bits), Self::WIRE_BYTES),
        }
    }
}

/// Size and flags of an export: the whole answer to `EXPORT_NAME`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExportSummary {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Properties and supported commands.
    pub flags: TransmissionFlags,
}

impl ExportSummary {
    /// Appends the answer to `EXPORT_NAME`, followed by 124 zeros unless `no_zeroes` was
    /// negotiated.
    pub fn encode(self, no_zeroes: bool, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.size_bytes.to_be_bytes());
        out.extend_from_slice(&self.flags.bits().to_be_bytes());
        if !no_zeroes {
            out.extend_from_slice(&[0; PADDING_BYTES]);
        }
    }

    /// Decodes the answer to `EXPORT_NAME`.
    pub fn decode(bytes: &[u8], no_zeroes: bool) -> Decoded<Self> {
        let wire_bytes = if no_zeroes { 10 } else { 10 + PADDING_BYTES };
        let mut fields = Fields(bytes);
        match (fields.u64(), fields.u16()) {
            (Some(size_bytes), Some(flags)) if bytes.len() >= wire_bytes => {
                let flags = TransmissionFlags::from_bits_retain(flags);
                Decoded::Value(Self { size_bytes, flags }, wire_bytes)
            }
            _ => Decoded::Need(wire_bytes - bytes.len()),
        }
    }
}
