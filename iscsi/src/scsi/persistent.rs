//! The lists of PERSISTENT RESERVE IN and OUT (SPC-4, 6.15 and 6.16).

use super::Sense;
use crate::{put, u64_at};

/// Service actions of PERSISTENT RESERVE IN.
pub mod read {
    /// READ KEYS.
    pub const KEYS: u8 = 0x00;
    /// READ RESERVATION.
    pub const RESERVATION: u8 = 0x01;
    /// REPORT CAPABILITIES.
    pub const CAPABILITIES: u8 = 0x02;
    /// READ FULL STATUS.
    pub const FULL_STATUS: u8 = 0x03;
}

/// Service actions of PERSISTENT RESERVE OUT.
pub mod change {
    /// REGISTER.
    pub const REGISTER: u8 = 0x00;
    /// RESERVE.
    pub const RESERVE: u8 = 0x01;
    /// RELEASE.
    pub const RELEASE: u8 = 0x02;
    /// CLEAR.
    pub const CLEAR: u8 = 0x03;
    /// PREEMPT.
    pub const PREEMPT: u8 = 0x04;
    /// PREEMPT AND ABORT.
    pub const PREEMPT_AND_ABORT: u8 = 0x05;
    /// REGISTER AND IGNORE EXISTING KEY.
    pub const REGISTER_AND_IGNORE: u8 = 0x06;
}

/// The types of reservations that exist.
pub const TYPES: [u8; 6] = [0x01, 0x03, 0x05, 0x06, 0x07, 0x08];

/// Length of the parameter list of PERSISTENT RESERVE OUT.
pub const LIST_BYTES: u32 = 24;

/// The parameter list of PERSISTENT RESERVE OUT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangeList {
    /// The key that the initiator has registered.
    pub key: u64,
    /// The key that the action is about.
    pub action_key: u64,
    /// Whether the state shall be there after a loss of power.
    pub lasts: bool,
}

impl ChangeList {
    /// Decodes a list. Keys for other initiators' ports are not supported.
    ///
    /// # Errors
    /// The length is wrong, or a field is not supported.
    pub fn decode(list: &[u8]) -> Result<Self, Sense> {
        if list.len() != LIST_BYTES as usize {
            return Err(Sense::PARAMETER_LENGTH);
        }
        // SPEC_I_PT.
        if list[20] & 0x08 != 0 {
            return Err(Sense::INVALID_PARAMETER);
        }
        Ok(Self { key: u64_at(list, 0), action_key: u64_at(list, 8), lasts: list[20] & 0x01 != 0 })
    }
}

/// The holder of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Held {
    /// Its key; 0 if all that are registered hold it.
    pub key: u64,
    /// The type of the reservation.
    pub kind: u8,
}

/// READ KEYS.
pub fn keys(generation: u32, keys: impl Iterator<Item = u64>) -> Vec<u8> {
    list(generation, keys.flat_map(u64::to_be_bytes).collect())
}

/// READ RESERVATION.
pub fn reservation(generation: u32, held: Option<Held>) -> Vec<u8> {
    let mut body = Vec::new();
    if let Some(held) = held {
        body.extend(held.key.to_be_bytes());
        body.extend([0, 0, 0, 0, 0, held.kind, 0, 0]);
    }
    list(generation, body)
}

/// REPORT CAPABILITIES. `can_last` tells whether the state can be there after a loss of power, and
/// `lasts` whether it will.
pub fn capabilities(can_last: bool, lasts: bool) -> Vec<u8> {
    // The mask of types is valid: all six.
    vec![0, 8, u8::from(can_last), 0x80 | u8::from(lasts), 0xea, 0x01, 0, 0]
}

/// A registration, for READ FULL STATUS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registered {
    /// Its key.
    pub key: u64,
    /// The type of the reservation, if it holds it.
    pub holds: Option<u8>,
    /// The initiator's port: its iSCSI name, `,i,0x`, and its part of the session's id.
    pub port: String,
}

/// READ FULL STATUS.
pub fn full_status(generation: u32, all: impl Iterator<Item = Registered>) -> Vec<u8> {
    let mut body = Vec::new();
    for one in all {
        let mut entry = [0; 24];
        put(&mut entry, 0, &one.key.to_be_bytes());
        if let Some(kind) = one.holds {
            (entry[12], entry[13]) = (1, kind);
        }
        entry[19] = 1;
        let mut port = one.port.into_bytes();
        port.push(0);
        port.resize(port.len().next_multiple_of(4), 0);
        put(&mut entry, 20, &(port.len() as u32 + 4).to_be_bytes());
        body.extend(entry);
        // The id of an iSCSI initiator's port.
        body.extend([0x45, 0]);
        body.extend((port.len() as u16).to_be_bytes());
        body.extend(port);
    }
    list(generation, body)
}

fn list(generation: u32, body: Vec<u8>) -> Vec<u8> {
    let mut out = generation.to_be_bytes().to_vec();
    out.extend((body.len() as u32).to_be_bytes());
    out.extend(body);
    out
}
