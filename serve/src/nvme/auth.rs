//! DH-HMAC-CHAP: a host proves on each of its queues that it has a secret, and the subsystem does
//! if it is asked (Base, "NVMe In-band Authentication").
//!
//! ```text
//!   AUTH_SEND ─▶ Auth::take ─▶ the next step      AUTH_RECEIVE ─▶ Auth::give: the message of it
//! ```
//!
//! A response is an HMAC over the challenge, the numbers of the exchange and both names, by the key
//! of the one that responds.
//! There is no Diffie-Hellman exchange, so a secret must be random: `nvme gen-dhchap-key` makes
//! one.

use crate::secrets::Secrets;
use diskwright_nvme::{
    key::{self, Key, mac},
    wire::auth::{self, Failure, Hash, HostMessage},
};
use ring::rand::{SecureRandom, SystemRandom};

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
                let wanted = parties.host_key().and_then(|key| key.hash());
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
        let is_right = key::verify(hash, &key_bytes, &text, response);
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
