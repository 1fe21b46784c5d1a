//! Commands of fabrics: connect a queue, get and set a controller's properties. Base, "Fabrics
//! Command Set".

use super::{Command, Completion, Status, put, put_text, text_at, u16_at};

/// The opcode of all fabrics commands; [`Command::nsid`] has their type.
pub const OPCODE: u8 = 0x7f;
/// Type: set a property.
pub const PROPERTY_SET: u8 = 0x00;
/// Type: connect a queue.
pub const CONNECT: u8 = 0x01;
/// Type: get a property.
pub const PROPERTY_GET: u8 = 0x04;

/// The subsystem that every controller port has, which knows the others.
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";

/// Longest NVMe qualified name in bytes. Base, "NVMe Qualified Names".
pub const NQN_BYTES_MAX: usize = 223;

/// [`ConnectData::controller`] of a new controller: the target chooses.
pub const ANY_CONTROLLER: u16 = 0xffff;

/// Connect: flow control of the submission queue is disabled. Bit of the attributes.
pub const NO_FLOW_CONTROL: u8 = 1 << 2;

/// Whether the text is an NVMe qualified name.
///
/// # Errors
/// What is wrong with it, as a clause.
pub fn check_nqn(text: &str) -> Result<(), &'static str> {
    if text.len() > NQN_BYTES_MAX {
        return Err("it has more than 223 bytes");
    }
    if !text.starts_with("nqn.") || text.len() < 12 {
        return Err("it does not begin with nqn.YYYY-MM.");
    }
    if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
        return Err("it has white space or control characters");
    }
    Ok(())
}

/// Properties of a controller: their offsets. Base, "Controller Properties".
pub mod property {
    /// Capabilities, 8 bytes.
    pub const CAPABILITIES: u32 = 0x00;
    /// Version, 4 bytes.
    pub const VERSION: u32 = 0x08;
    /// Configuration, 4 bytes.
    pub const CONFIGURATION: u32 = 0x14;
    /// Status, 4 bytes.
    pub const STATUS: u32 = 0x1c;

    /// Configuration: the controller is enabled.
    pub const ENABLE: u32 = 1;
    /// Configuration: the bits of a shutdown notification.
    pub const SHUTDOWN: u32 = 0b11 << 14;
    /// Status: the controller is ready.
    pub const READY: u32 = 1;
    /// Status: the shutdown is complete.
    pub const SHUTDOWN_COMPLETE: u32 = 0b10 << 2;
}

/// What a connect command asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ConnectCommand {
    /// The queue: 0 is the admin queue.
    pub queue: u16,
    /// Number of entries of the queue.
    pub entries: u32,
    /// Attributes, such as [`NO_FLOW_CONTROL`].
    pub attributes: u8,
    /// Keep-alive time-out in milliseconds; 0 is none.
    pub keep_alive_ms: u32,
}

impl ConnectCommand {
    /// Of a command whose type is [`CONNECT`].
    ///
    /// # Errors
    /// [`Status::CONNECT_FORMAT`].
    pub fn of(command: &Command) -> Result<Self, Status> {
        let [record, sizes, keep_alive_ms, ..] = command.cdw;
        if record as u16 != 0 {
            return Err(Status::CONNECT_FORMAT);
        }
        let (queue, entries) = ((record >> 16) as u16, u32::from(sizes as u16) + 1);
        Ok(Self { queue, entries, attributes: (sizes >> 16) as u8, keep_alive_ms })
    }

    /// The command; its data are in the capsule.
    pub fn command(&self, cid: u16) -> Command {
        let record = u32::from(self.queue) << 16;
        let sizes = self.entries.saturating_sub(1) & 0xffff | u32::from(self.attributes) << 16;
        Command {
            opcode: OPCODE,
            flags: Command::SGL_FLAGS,
            cid,
            nsid: CONNECT.into(),
            sgl: super::Sgl { address: 0, len_bytes: ConnectData::BYTES as u32, kind: super::Sgl::IN_CAPSULE },
            cdw: [record, sizes, self.keep_alive_ms, 0, 0, 0],
        }
    }
}

/// The data of a connect command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConnectData {
    /// The host's id.
    pub host_id: [u8; 16],
    /// The controller, or [`ANY_CONTROLLER`].
    pub controller: u16,
    /// NQN of the subsystem.
    pub subsystem: String,
    /// NQN of the host.
    pub host: String,
}

impl ConnectData {
    /// Size of the data.
    pub const BYTES: usize = 1024;
    const SUBSYSTEM: usize = 256;
    const HOST: usize = 512;

    /// The data's bytes.
    pub fn encode(&self) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        put(&mut out, 0, &self.host_id);
        put(&mut out, 16, &self.controller.to_le_bytes());
        put_text(&mut out, Self::SUBSYSTEM, 256, &self.subsystem, 0);
        put_text(&mut out, Self::HOST, 256, &self.host, 0);
        out
    }

    /// Decodes the data's bytes.
    ///
    /// # Errors
    /// The completion that tells which name is invalid.
    pub fn decode(bytes: &[u8; Self::BYTES], cid: u16) -> Result<Self, Completion> {
        let (subsystem, host) = (text_at(bytes, Self::SUBSYSTEM, 256), text_at(bytes, Self::HOST, 256));
        for (name, at) in [(&subsystem, Self::SUBSYSTEM), (&host, Self::HOST)] {
            if check_nqn(name).is_err() {
                return Err(invalid_data(cid, at as u16));
            }
        }
        Ok(Self { host_id: super::array(bytes, 0), controller: u16_at(bytes, 16), subsystem, host })
    }
}

/// The completion of a connect command whose data have an invalid field at this offset.
pub fn invalid_data(cid: u16, at_bytes: u16) -> Completion {
    invalid(cid, at_bytes, 1)
}

/// The completion of a connect command with an invalid field at this offset.
pub fn invalid_command(cid: u16, at_bytes: u16) -> Completion {
    invalid(cid, at_bytes, 0)
}

fn invalid(cid: u16, at_bytes: u16, in_data: u64) -> Completion {
    let result = u64::from(at_bytes) | in_data << 16;
    Completion { result, cid, status: Status::CONNECT_INVALID, ..Completion::default() }
}
