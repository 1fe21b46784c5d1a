//! DH-HMAC-CHAP: a host proves on each of its queues that it has a secret, and the subsystem does
//! if it is asked (Base, "NVMe In-band Authentication").
//!
//! ```text
//!   AUTH_SEND ─▶ Auth::take ─▶ the next step      AUTH_RECEIVE ─▶ Auth::give: the message of it
//! ```
//!
//! A response is an HMAC over the challenge, the numbers of the exchange and both names, by the key
//! of the one that responds. A key is first hashed with its owner's name, unless it says otherwise.
//! There is no Diffie-Hellman exchange, so a secret must be random: `nvme gen-dhchap-key` makes
//! one.

use crate::secrets::Secrets;
use base64::{Engine, engine::general_purpose::STANDARD};
use diskwright_nvme::wire::auth::{self, Failure, Hash, HostMessage};
use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};

/// A key, as `DHHC-1:HH:BASE64:` tells it.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Key {
    /// The function by which it is hashed with its owner's name.
    hash: Option<Hash>,
    bytes: Vec<u8>,
}

impl Key {
    /// Parses a key.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (hash, rest) = text.trim().strip_prefix("DHHC-1:")?.split_once(':')?;
        let hash = match u8::from_str_radix(hash, 16).ok()? {
            0 => None,
            id => Some(Hash::of(id)?),
        };
        let mut bytes = STANDARD.decode(rest.strip_suffix(':')?).ok()?;
        let sum = bytes.split_off(bytes.len().checked_sub(4)?);
        let is_right = matches!(bytes.len(), 32 | 48 | 64) && sum == crc32fast::hash(&bytes).to_le_bytes();
        (is_right && hash.is_none_or(|hash| hash.bytes() == bytes.len())).then_some(Self { hash, bytes })
    }

    /// The key of its owner.
    fn of(&self, owner: &str) -> Vec<u8> {
        match self.hash {
            Some(hash) => mac(hash, &self.bytes, &[owner.as_bytes(), b"NVMe-over-Fabrics"].concat()),
            None => self.bytes.clone(),
        }
    }
}

fn algorithm(hash: Hash) -> hmac::Algorithm {
    match hash {
        Hash::Sha256 => hmac::HMAC_SHA256,
        Hash::Sha384 => hmac::HMAC_SHA384,
        Hash::Sha512 => hmac::HMAC_SHA512,
    }
}

fn mac(hash: Hash, key: &[u8], text: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(algorithm(hash), key), text).as_ref().to_vec()
}

/// How far the authentication of a queue is.
#[derive(Debug)]
pub(super) enum Auth {
    /// Negotiate is expected.
    Wanted,
    /// The challenge is to be asked for.
    Challenge(Exchange),
    /// Reply is expected.
    Reply(Exchange),
    /// A message is to be asked for, with which the host is let in.
    Success {
        message: Vec<u8>,
        transaction: Option<u16>,
    },
    /// Success2 is expected.
    Confirm {
        transaction: u16,
    },
    /// A failure is to be asked for, and the connection ends.
    Failed {
        message: Vec<u8>,
        why: String,
    },
    Done,
}

/// What both sides know of an exchange.
#[derive(Debug, Clone)]
pub(super) struct Exchange {
    transaction: u16,
    secure_channel: u8,
    hash: Hash,
    challenge: Vec<u8>,
    sequence: u32,
}

/// Who is authenticated, and by which secrets.
pub(super) struct Parties<'a> {
    pub(super) secrets: &'a Secrets,
    pub(super) host: &'a str,
    pub(super) subsystem: &'a str,
}

impl Parties<'_> {
    fn host_key(&self) -> Option<Key> {
        self.secrets.client(self.host).and_then(|client| Key::parse(&client.secret_text()))
    }

    fn subsystem_key(&self) -> Option<Key> {
        self.secrets.server().and_then(|server| Key::parse(&server.secret_text()))
    }
}

impl Auth {
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Self::Done)
    }

    /// Handles a message of the host.
    pub(super) fn take(&mut self, parties: &Parties<'_>, message: &[u8]) {
        let transaction = auth::transaction_of(message);
        let failed =
            |failure, why: &str| Self::Failed { message: auth::failure(transaction, failure), why: why.to_owned() };
        let message = match HostMessage::decode(message) {
            Ok(message) => message,
            Err(failure) => {
                *self = failed(failure, "a message of the authentication is not valid");
                return;
            }
        };
        *self = match (&*self, message) {
            // A host may begin anew, also after it was let in.
            (_, HostMessage::Negotiate { transaction, secure_channel, hashes, groups }) => {
                let wanted = parties.host_key().and_then(|key| key.hash);
                let is_offered = |hash: &Hash| hashes.contains(&(*hash as u8));
                let hash = wanted.filter(is_offered).or_else(|| hashes.iter().find_map(|&id| Hash::of(id)));
                match hash {
                    _ if secure_channel != 0 => failed(Failure::SecureChannel, "the host wants TLS"),
                    None => failed(Failure::Hash, "the host offers no hash function that is supported"),
                    _ if !groups.contains(&auth::NO_GROUP) => failed(
                        Failure::Group,
                        "the host wants a Diffie-Hellman group; only the group 'null' is supported",
                    ),
                    Some(hash) => {
                        let (mut challenge, mut sequence) = (vec![0; hash.bytes()], [0; 4]);
                        let random = SystemRandom::new();
                        match random.fill(&mut challenge).and_then(|()| random.fill(&mut sequence)) {
                            Ok(()) => {
                                // 0 means that a challenge is not valid.
                                let sequence = u32::from_le_bytes(sequence).max(1);
                                Self::Challenge(Exchange { transaction, secure_channel, hash, challenge, sequence })
                            }
                            Err(_) => failed(Failure::Failed, "there are no random numbers"),
                        }
                    }
                }
            }
            (Self::Reply(exchange), HostMessage::Reply { transaction, response, challenge, sequence })
                if transaction == exchange.transaction =>
            {
                Self::replied(parties, exchange, &response, challenge.map(|challenge| (challenge, sequence)))
            }
            (Self::Confirm { transaction: expected }, HostMessage::Success { transaction })
                if transaction == *expected =>
            {
                Self::Done
            }
            (_, HostMessage::Failure { explanation }) => {
                failed(Failure::Failed, &format!("the host does not accept the subsystem's secret ({explanation})"))
            }
            _ => failed(Failure::Message, "a message of the authentication is not the next one"),
        };
    }

    fn replied(parties: &Parties<'_>, exchange: &Exchange, response: &[u8], challenge: Option<(Vec<u8>, u32)>) -> Self {
        let Exchange { transaction, secure_channel, hash, .. } = *exchange;
        let failed =
            |why: &str| Self::Failed { message: auth::failure(transaction, Failure::Failed), why: why.to_owned() };
        let (host, subsystem) = (parties.host, parties.subsystem);
        let text = auth::hashed(
            &exchange.challenge,
            exchange.sequence,
            transaction,
            secure_channel,
            ("HostHost", host, subsystem),
        );
        let key = parties.host_key();
        // A host that is not known takes as long as one that is.
        let key_bytes = key.as_ref().map_or_else(|| vec![0; 32], |key| key.of(host));
        let is_right = hmac::verify(&hmac::Key::new(algorithm(hash), &key_bytes), &text, response).is_ok();
        if key.is_none() || !is_right {
            return failed("the host has no secret here, or another one");
        }
        let Some((challenge, sequence)) = challenge else {
            return Self::Success { message: auth::success(transaction, hash, None), transaction: None };
        };
        if challenge == exchange.challenge {
            return failed("the host sent the subsystem's own challenge");
        }
        let Some(key) = parties.subsystem_key() else {
            return failed("the host asks for the subsystem's secret, and there is none");
        };
        let text = auth::hashed(&challenge, sequence, transaction, secure_channel, ("Controller", subsystem, host));
        let response = mac(hash, &key.of(subsystem), &text);
        let message = auth::success(transaction, hash, Some(&response));
        Self::Success { message, transaction: Some(transaction) }
    }

    /// The message that the host asks for. The second value is why the connection ends with it.
    pub(super) fn give(&mut self) -> Option<(Vec<u8>, Option<String>)> {
        let (message, next) = match std::mem::replace(self, Self::Wanted) {
            Self::Challenge(exchange) => {
                let Exchange { transaction, hash, sequence, .. } = exchange;
                (auth::challenge(transaction, hash, sequence, &exchange.challenge), Self::Reply(exchange))
            }
            Self::Success { message, transaction: None } => (message, Self::Done),
            Self::Success { message, transaction: Some(transaction) } => (message, Self::Confirm { transaction }),
            Self::Failed { message, why } => return Some((message, Some(why))),
            other => {
                *self = other;
                return None;
            }
        };
        *self = next;
        Some((message, None))
    }
}
