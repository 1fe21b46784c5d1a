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

use super::{Command, Status, put, u16_at, u32_at};

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
