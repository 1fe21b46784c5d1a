//! In-band authentication by DH-HMAC-CHAP. Base, "NVMe In-band Authentication".
//!
//! ```text
//!   H: Negotiate   hashes, groups                C: Challenge   hash, challenge
//!   H: Reply       response (, challenge)        C: Success1    (response), or Failure1
//!   H: Success2    after a response of the controller, or Failure2
//! ```
//!
//! The host sends its messages by the command AUTH_SEND, and asks for the controller's by
//! AUTH_RECEIVE. The only group here is the one without Diffie-Hellman.

use super::{Command, Sgl, Status, fabrics, put, u16_at, u32_at};

/// Type of a fabrics command: a message of the host.
pub const SEND: u8 = 0x05;
/// Type of a fabrics command: the host asks for a message.
pub const RECEIVE: u8 = 0x06;

/// Result of connect: the host must authenticate itself.
pub const REQUIRED: u64 = 1 << 17;

/// The group without Diffie-Hellman.
pub const NO_GROUP: u8 = 0;

/// The security protocol of the commands, with its two fields: DH-HMAC-CHAP.
const PROTOCOL: u32 = 0xe9_01_01_00;

/// Length of a message at most.
pub const MESSAGE_BYTES_MAX: usize = 4096;

const COMMON: u8 = 0;
const DH_HMAC_CHAP: u8 = 1;

/// The hash functions, by their ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names of the standard")]
pub enum Hash {
    Sha256 = 1,
    Sha384 = 2,
    Sha512 = 3,
}

impl Hash {
    /// The function with this id.
    pub fn of(id: u8) -> Option<Self> {
        [Self::Sha256, Self::Sha384, Self::Sha512].into_iter().find(|hash| *hash as u8 == id)
    }

    /// Length of its result, in bytes.
    pub fn bytes(self) -> usize {
        match self {
            Self::Sha256 => 32,
            Self::Sha384 => 48,
            Self::Sha512 => 64,
        }
    }
}

/// Why an authentication fails: the explanation in a failure message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Failure {
    /// The response is wrong.
    Failed = 0x01,
    /// The host does not offer DH-HMAC-CHAP.
    Protocol = 0x02,
    /// The host wants a secure channel.
    SecureChannel = 0x03,
    /// No hash function that is supported.
    Hash = 0x04,
    /// No group that is supported.
    Group = 0x05,
    /// A message has a wrong field.
    Payload = 0x06,
    /// A message is not the next one.
    Message = 0x07,
}

/// Length of the data of AUTH_SEND, or of the room of AUTH_RECEIVE.
///
/// # Errors
/// The command is for another protocol, or the length is not allowed.
pub fn length_of(command: &Command) -> Result<usize, Status> {
    let len_bytes = command.cdw[1] as usize;
    if command.cdw[0] & 0xffff_ff00 != PROTOCOL || len_bytes == 0 || len_bytes > MESSAGE_BYTES_MAX {
        return Err(Status::INVALID_FIELD);
    }
    Ok(len_bytes)
}

/// The command that sends a message of the host, or asks for one of the controller.
pub fn command(kind: u8, len_bytes: usize) -> Command {
    let sgl_kind = if kind == SEND { Sgl::IN_CAPSULE } else { Sgl::TRANSPORT };
    Command {
        opcode: fabrics::OPCODE,
        flags: Command::SGL_FLAGS,
        nsid: kind.into(),
        sgl: Sgl { address: 0, len_bytes: len_bytes as u32, kind: sgl_kind },
        cdw: [PROTOCOL, len_bytes as u32, 0, 0, 0, 0],
        ..Command::default()
    }
}

/// A message of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostMessage {
    /// The first one.
    Negotiate {
        /// The number of the transaction, which all others have too.
        transaction: u16,
        /// Whether the host wants a secure channel to come of it.
        secure_channel: u8,
        /// Ids of hash functions, the preferred one first.
        hashes: Vec<u8>,
        /// Ids of groups.
        groups: Vec<u8>,
    },
    /// The answer to a challenge.
    Reply {
        /// The number of the transaction.
        transaction: u16,
        /// The response.
        response: Vec<u8>,
        /// A challenge for the controller.
        challenge: Option<Vec<u8>>,
        /// Its number.
        sequence: u32,
    },
    /// The controller's response is right.
    Success {
        /// The number of the transaction.
        transaction: u16,
    },
    /// The controller's response is wrong.
    Failure {
        /// The explanation.
        explanation: u8,
    },
}

impl HostMessage {
    /// Decodes a message.
    ///
    /// # Errors
    /// What the failure message to the host tells.
    pub fn decode(bytes: &[u8]) -> Result<Self, Failure> {
        let (Some(&kind), Some(&id)) = (bytes.first(), bytes.get(1)) else { return Err(Failure::Payload) };
        let transaction = u16_at(bytes, 4);
        match (kind, id) {
            (COMMON, 0x00) => {
                let [secure_channel, count] = super::array(bytes, 6);
                let all = bytes.get(8..).unwrap_or_default().chunks_exact(64).take(count.into());
                let ours = all.into_iter().find(|one| one[0] == DH_HMAC_CHAP).ok_or(Failure::Protocol)?;
                let (hashes, groups) = (usize::from(ours[2]), usize::from(ours[3]));
                if hashes > 30 || groups > 30 {
                    return Err(Failure::Payload);
                }
                let (hashes, groups) = (ours[4..4 + hashes].to_vec(), ours[34..34 + groups].to_vec());
                Ok(Self::Negotiate { transaction, secure_channel, hashes, groups })
            }
            (DH_HMAC_CHAP, 0x02) => {
                let [hash_bytes, _, has_challenge, _] = super::array(bytes, 6);
                let hash_bytes = usize::from(hash_bytes);
                let rest = bytes.get(16..).unwrap_or_default();
                let response = rest.get(..hash_bytes).ok_or(Failure::Payload)?.to_vec();
                let challenge = match has_challenge {
                    0 => None,
                    _ => Some(rest.get(hash_bytes..2 * hash_bytes).ok_or(Failure::Payload)?.to_vec()),
                };
                Ok(Self::Reply { transaction, response, challenge, sequence: u32_at(bytes, 12) })
            }
            (DH_HMAC_CHAP, 0x04) => Ok(Self::Success { transaction }),
            (COMMON, 0xf0) => Ok(Self::Failure { explanation: super::array::<1>(bytes, 7)[0] }),
            _ => Err(Failure::Message),
        }
    }

    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let start = |kind, id, transaction: u16, len| {
            let mut out = vec![0; len];
            (out[0], out[1]) = (kind, id);
            put(&mut out, 4, &transaction.to_le_bytes());
            out
        };
        match self {
            Self::Negotiate { transaction, secure_channel, hashes, groups } => {
                let mut out = start(COMMON, 0x00, *transaction, 8 + 64);
                (out[6], out[7], out[8]) = (*secure_channel, 1, DH_HMAC_CHAP);
                let (hashes, groups) = (&hashes[..hashes.len().min(30)], &groups[..groups.len().min(30)]);
                (out[10], out[11]) = (hashes.len() as u8, groups.len() as u8);
                put(&mut out, 12, hashes);
                put(&mut out, 42, groups);
                out
            }
            Self::Reply { transaction, response, challenge, sequence } => {
                let mut out = start(DH_HMAC_CHAP, 0x02, *transaction, 16);
                (out[6], out[8]) = (response.len() as u8, challenge.is_some().into());
                put(&mut out, 12, &sequence.to_le_bytes());
                out.extend_from_slice(response);
                // The field is there whether it is valid or not.
                let empty = vec![0; response.len()];
                out.extend_from_slice(challenge.as_ref().unwrap_or(&empty));
                out
            }
            Self::Success { transaction } => start(DH_HMAC_CHAP, 0x04, *transaction, 16),
            Self::Failure { explanation } => {
                let mut out = start(COMMON, 0xf0, 0, 8);
                (out[6], out[7]) = (1, *explanation);
                out
            }
        }
    }
}

/// A message of the controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ControllerMessage {
    /// The host must answer this.
    Challenge {
        /// The function of the response.
        hash: Hash,
        /// The Diffie-Hellman group.
        group: u8,
        /// The number of the challenge.
        sequence: u32,
        /// The challenge.
        challenge: Vec<u8>,
    },
    /// The host's response is right.
    Success {
        /// The controller's response, if it was challenged.
        response: Option<Vec<u8>>,
    },
    /// The authentication has failed.
    Failure {
        /// The explanation.
        explanation: u8,
    },
}

impl ControllerMessage {
    /// Decodes a message. `None` if it is not valid.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let [kind, id] = *bytes.first_chunk()?;
        let hash_bytes = usize::from(super::array::<1>(bytes, 6)[0]);
        match (kind, id) {
            (DH_HMAC_CHAP, 0x01) => {
                let [hash, group] = super::array(bytes, 8);
                let hash = Hash::of(hash).filter(|hash| hash.bytes() == hash_bytes)?;
                let challenge = bytes.get(16..16 + hash_bytes)?.to_vec();
                Some(Self::Challenge { hash, group, sequence: u32_at(bytes, 12), challenge })
            }
            (DH_HMAC_CHAP, 0x03) => {
                let is_valid = super::array::<1>(bytes, 8)[0] != 0;
                let response = if is_valid { Some(bytes.get(16..16 + hash_bytes)?.to_vec()) } else { None };
                Some(Self::Success { response })
            }
            (COMMON, 0xf1) => Some(Self::Failure { explanation: super::array::<1>(bytes, 7)[0] }),
            _ => None,
        }
    }
}

/// The number of the transaction of any message.
pub fn transaction_of(message: &[u8]) -> u16 {
    u16_at(message, 4)
}

/// The controller's challenge.
pub fn challenge(transaction: u16, hash: Hash, sequence: u32, challenge: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 16];
    (out[0], out[1]) = (DH_HMAC_CHAP, 0x01);
    put(&mut out, 4, &transaction.to_le_bytes());
    (out[6], out[8], out[9]) = (hash.bytes() as u8, hash as u8, NO_GROUP);
    put(&mut out, 12, &sequence.to_le_bytes());
    out.extend_from_slice(challenge);
    out
}

/// The host's response is right; with the controller's, if it was challenged.
pub fn success(transaction: u16, hash: Hash, response: Option<&[u8]>) -> Vec<u8> {
    let mut out = vec![0; 16];
    (out[0], out[1]) = (DH_HMAC_CHAP, 0x03);
    put(&mut out, 4, &transaction.to_le_bytes());
    (out[6], out[8]) = (hash.bytes() as u8, response.is_some().into());
    // The field is there whether it is valid or not.
    out.extend_from_slice(response.unwrap_or(&[0; 64][..hash.bytes()]));
    out
}

/// The authentication has failed.
pub fn failure(transaction: u16, failure: Failure) -> Vec<u8> {
    let mut out = vec![0; 8];
    (out[0], out[1]) = (COMMON, 0xf1);
    put(&mut out, 4, &transaction.to_le_bytes());
    (out[6], out[7]) = (1, failure as u8);
    out
}

/// What is hashed for a response of the host, or of the controller.
pub fn hashed(
    challenge: &[u8],
    sequence: u32,
    transaction: u16,
    secure_channel: u8,
    (who, ours, theirs): (&str, &str, &str),
) -> Vec<u8> {
    let mut out = challenge.to_vec();
    out.extend(sequence.to_le_bytes());
    out.extend(transaction.to_le_bytes());
    out.push(secure_channel);
    out.extend(who.as_bytes());
    out.extend(ours.as_bytes());
    out.push(0);
    out.extend(theirs.as_bytes());
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_the_same_after_encoding() {
        let hashes = vec![1, 2, 3];
        for message in [
            HostMessage::Negotiate { transaction: 9, secure_channel: 0, hashes, groups: vec![0] },
            HostMessage::Reply { transaction: 9, response: vec![1; 32], challenge: Some(vec![2; 32]), sequence: 7 },
            HostMessage::Reply { transaction: 9, response: vec![1; 48], challenge: None, sequence: 0 },
            HostMessage::Success { transaction: 9 },
            HostMessage::Failure { explanation: 1 },
        ] {
            assert_eq!(HostMessage::decode(&message.encode()), Ok(message));
        }
        let asked = challenge(9, Hash::Sha384, 7, &[5; 48]);
        let expected =
            ControllerMessage::Challenge { hash: Hash::Sha384, group: NO_GROUP, sequence: 7, challenge: vec![5; 48] };
        assert_eq!(ControllerMessage::decode(&asked), Some(expected));
        assert_eq!(ControllerMessage::decode(&asked[..63]), None);
        let done = success(9, Hash::Sha256, Some(&[3; 32]));
        let expected = ControllerMessage::Success { response: Some(vec![3; 32]) };
        assert_eq!(ControllerMessage::decode(&done), Some(expected));
        let done = success(9, Hash::Sha256, None);
        assert_eq!(ControllerMessage::decode(&done), Some(ControllerMessage::Success { response: None }));
        let failed = failure(9, Failure::Group);
        assert_eq!(ControllerMessage::decode(&failed), Some(ControllerMessage::Failure { explanation: 5 }));
        assert_eq!(ControllerMessage::decode(&[1]), None);
    }

    #[test]
    fn messages_of_a_host_are_decoded() {
        let mut negotiate = vec![0; 8 + 64];
        (negotiate[4], negotiate[7]) = (9, 1);
        (negotiate[8], negotiate[10], negotiate[11]) = (1, 3, 2);
        negotiate[12..15].copy_from_slice(&[1, 2, 3]);
        negotiate[42..44].copy_from_slice(&[0, 1]);
        let expected =
            HostMessage::Negotiate { transaction: 9, secure_channel: 0, hashes: vec![1, 2, 3], groups: vec![0, 1] };
        assert_eq!(HostMessage::decode(&negotiate), Ok(expected));
        negotiate[8] = 2;
        assert_eq!(HostMessage::decode(&negotiate), Err(Failure::Protocol));
        (negotiate[8], negotiate[10]) = (1, 31);
        assert_eq!(HostMessage::decode(&negotiate), Err(Failure::Payload));
        let mut reply = vec![0; 16 + 64];
        (reply[0], reply[1], reply[4], reply[6], reply[8], reply[12]) = (1, 2, 9, 32, 1, 5);
        (reply[16], reply[48]) = (7, 8);
        let Ok(HostMessage::Reply { response, challenge: Some(challenge), sequence: 5, .. }) =
            HostMessage::decode(&reply)
        else {
            panic!("{reply:?}")
        };
        assert_eq!((response.len(), response[0], challenge.len(), challenge[0]), (32, 7, 32, 8));
        assert_eq!(HostMessage::decode(&reply[..79]), Err(Failure::Payload));
        assert_eq!(HostMessage::decode(&[1, 4, 0, 0, 9]), Ok(HostMessage::Success { transaction: 9 }));
        assert_eq!(HostMessage::decode(&[0, 0xf0, 0, 0, 9, 0, 1, 1]), Ok(HostMessage::Failure { explanation: 1 }));
        assert_eq!(HostMessage::decode(&[1, 9]), Err(Failure::Message));
        assert_eq!(HostMessage::decode(&[1]), Err(Failure::Payload));
    }
}
