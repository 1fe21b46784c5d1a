//! Reservation commands of a namespace. Base, "Reservation Register", "Reservation Acquire",
//! "Reservation Release", "Reservation Report"; log page "Reservation Notification".

use super::{array, put, u64_at};

/// What a reservation command asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// Register the new key.
    Register,
    /// Remove the registration.
    Unregister,
    /// Replace the key by the new one.
    Replace,
    /// Reserve the namespace.
    Acquire,
    /// Remove the registrations with the other key, and take over their reservation.
    Preempt,
    /// The same, and wait for the commands in flight of those who are removed.
    PreemptAndAbort,
    /// Release the reservation.
    Release,
    /// Remove the reservation and all registrations.
    Clear,
}

/// Whether registrations and reservation shall outlast a restart (CPTPL).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasting {
    /// As before.
    Unchanged,
    /// They shall not.
    No,
    /// They shall.
    Yes,
}

/// A reservation command.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reserve {
    /// What to do.
    pub action: Action,
    /// IEKEY: the current key is not compared.
    pub ignores_key: bool,
    /// RTYPE: the type of reservation, 1 to 6 if it is valid. 0 where it plays no part.
    pub kind: u8,
    /// CPTPL; [`Lasting::Unchanged`] where it plays no part.
    pub lasting: Lasting,
}

/// Opcode of Reservation Register.
pub const REGISTER: u8 = 0x0d;
/// Opcode of Reservation Report.
pub const REPORT: u8 = 0x0e;
/// Opcode of Reservation Acquire.
pub const ACQUIRE: u8 = 0x11;
/// Opcode of Reservation Release.
pub const RELEASE: u8 = 0x15;

/// Bit of dword 11 of a report: host ids have 128 bits.
pub const EXTENDED: u32 = 1;

impl Reserve {
    /// The command of an opcode and dword 10. `None` if the opcode is another, or a value is
    /// reserved.
    pub fn decode(opcode: u8, dword_10: u32) -> Option<Self> {
        use Action::{Acquire, Clear, Preempt, PreemptAndAbort, Register, Release, Replace, Unregister};
        let actions: &[Action] = match opcode {
            REGISTER => &[Register, Unregister, Replace],
            ACQUIRE => &[Acquire, Preempt, PreemptAndAbort],
            RELEASE => &[Release, Clear],
            _ => return None,
        };
        let lasting = match dword_10 >> 30 {
            _ if opcode != REGISTER => Lasting::Unchanged,
            0 => Lasting::Unchanged,
            2 => Lasting::No,
            3 => Lasting::Yes,
            _ => return None,
        };
        Some(Self {
            action: *actions.get(dword_10 as usize & 7)?,
            ignores_key: dword_10 & 1 << 3 != 0,
            kind: if opcode == REGISTER { 0 } else { (dword_10 >> 8) as u8 },
            lasting,
        })
    }

    /// The opcode, and dword 10.
    pub fn encode(&self) -> (u8, u32) {
        let (opcode, action) = match self.action {
            Action::Register => (REGISTER, 0),
            Action::Unregister => (REGISTER, 1),
            Action::Replace => (REGISTER, 2),
            Action::Acquire => (ACQUIRE, 0),
            Action::Preempt => (ACQUIRE, 1),
            Action::PreemptAndAbort => (ACQUIRE, 2),
            Action::Release => (RELEASE, 0),
            Action::Clear => (RELEASE, 1),
        };
        let lasting = match self.lasting {
            Lasting::Unchanged => 0,
            Lasting::No => 2,
            Lasting::Yes => 3,
        };
        (opcode, action | u32::from(self.ignores_key) << 3 | u32::from(self.kind) << 8 | lasting << 30)
    }

    /// Length of the command's data in bytes.
    pub fn data_bytes(opcode: u8) -> usize {
        if opcode == RELEASE { 8 } else { 16 }
    }
}

/// The data of a command: the current key, and the new or the other one, which a release lacks.
pub fn keys(data: &[u8]) -> (u64, u64) {
    (u64_at(data, 0), u64_at(data, 8))
}

/// A host that has registered. Base, "Registered Controller Extended Data Structure".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Registrant {
    /// Its key.
    pub key: u64,
    /// Its id.
    pub host: [u8; 16],
    /// Whether it holds the reservation.
    pub holds: bool,
}

/// What a report tells. Base, "Reservation Status Extended Data Structure".
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Report {
    /// GEN: grows with each change of the registrations.
    pub generation: u32,
    /// RTYPE: the type of reservation; 0 for none.
    pub kind: u8,
    /// PTPLS: whether they outlast a restart.
    pub lasts: bool,
    /// Who has registered.
    pub registrants: Vec<Registrant>,
}

impl Report {
    /// Length of the report without registrants, and of each registrant, in bytes.
    const ENTRY_BYTES: usize = 64;

    /// The report's bytes. The controllers are dynamic, so their ids are not told.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = vec![0; Self::ENTRY_BYTES * (1 + self.registrants.len())];
        put(&mut out, 0, &self.generation.to_le_bytes());
        out[4] = self.kind;
        put(&mut out, 5, &(self.registrants.len() as u16).to_le_bytes());
        out[9] = u8::from(self.lasts);
        for (one, out) in self.registrants.iter().zip(out.chunks_exact_mut(Self::ENTRY_BYTES).skip(1)) {
            put(out, 0, &0xffff_u16.to_le_bytes());
            out[2] = u8::from(one.holds);
            put(out, 8, &one.key.to_le_bytes());
            put(out, 16, &one.host);
        }
        out
    }

    /// Decodes a report. Registrants for which there was no room are left out.
    pub fn decode(bytes: &[u8]) -> Self {
        let count = usize::from(u16::from_le_bytes(array(bytes, 5)));
        let registrant =
            |entry: &[u8]| Registrant { key: u64_at(entry, 8), host: array(entry, 16), holds: entry[2] & 1 != 0 };
        Self {
            generation: u32::from_le_bytes(array(bytes, 0)),
            kind: array::<1>(bytes, 4)[0],
            lasts: array::<1>(bytes, 9)[0] & 1 != 0,
            registrants: bytes.chunks_exact(Self::ENTRY_BYTES).skip(1).take(count).map(registrant).collect(),
        }
    }
}

/// What another host has done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoticeKind {
    /// The host's registration was removed.
    RegistrationPreempted = 1,
    /// The reservation was released.
    ReservationReleased = 2,
    /// The reservation was removed with all registrations.
    ReservationPreempted = 3,
}

impl NoticeKind {
    /// Its bit in the feature that masks notices.
    pub fn mask(self) -> u32 {
        1 << self as u8
    }
}

/// The log page of one notice. `count` is the number of notices so far, `more` of those behind it.
pub fn notification(count: u64, notice: Option<(NoticeKind, u32)>, more: u8) -> Vec<u8> {
    let mut out = vec![0; 64];
    if let Some((kind, nsid)) = notice {
        put(&mut out, 0, &count.to_le_bytes());
        (out[8], out[9]) = (kind as u8, more);
        put(&mut out, 12, &nsid.to_le_bytes());
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_encoded_and_decoded() {
        use Action::{Acquire, Clear, Preempt, PreemptAndAbort, Register, Release, Replace, Unregister};
        for action in [Register, Unregister, Replace, Acquire, Preempt, PreemptAndAbort, Release, Clear] {
            let registers = matches!(action, Register | Unregister | Replace);
            let lasting = if registers { Lasting::Yes } else { Lasting::Unchanged };
            let command = Reserve { action, ignores_key: true, kind: if registers { 0 } else { 6 }, lasting };
            let (opcode, dword_10) = command.encode();
            assert_eq!(Reserve::decode(opcode, dword_10), Some(command));
        }
        // What Linux sends to register by a key that it had.
        let linux = Reserve::decode(REGISTER, 2 | 1 << 30 | 1 << 31).unwrap();
        assert_eq!((linux.action, linux.lasting), (Replace, Lasting::Yes));
        for (opcode, dword_10) in [(REGISTER, 3), (REGISTER, 1 << 30), (ACQUIRE, 3), (RELEASE, 2), (REPORT, 0)] {
            assert_eq!(Reserve::decode(opcode, dword_10), None, "{opcode} {dword_10}");
        }
    }

    #[test]
    fn reports_are_encoded_and_decoded() {
        let one = Registrant { key: 7, host: [9; 16], holds: true };
        let report =
            Report { generation: 5, kind: 3, lasts: true, registrants: vec![one, Registrant { key: 8, ..one }] };
        let bytes = report.encode();
        assert_eq!((bytes.len(), Report::decode(&bytes)), (192, report.clone()));
        let cut = Report::decode(&bytes[..128]);
        assert_eq!(cut.registrants, [one]);
        assert_eq!(Report::decode(&[]), Report::default());
    }
}
