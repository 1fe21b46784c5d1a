//! The host proves who it is by DH-HMAC-CHAP, and asks the subsystem for the same if its secret is
//! known. Each queue does so after its connect command.

use super::{ClientError, Result, host::Keys, session::Session};
use crate::{
    key::{mac, verify},
    wire::auth::{self, ControllerMessage, Hash, HostMessage},
};
use ring::rand::{SecureRandom, SystemRandom};

/// The number of the only transaction of a queue.
const TRANSACTION: u16 = 1;

/// Room for a message of the controller.
const ROOM_BYTES: usize = 512;

/// Authenticates a queue.
///
/// # Errors
/// [`ClientError::Authentication`]; errors of the connection.
pub(super) fn authenticate(session: &mut Session, keys: &Keys, host: &str, subsystem: &str) -> Result<()> {
    let hashes = match keys.host.hash() {
        Some(hash) => vec![hash as u8],
        None => vec![Hash::Sha256 as u8, Hash::Sha384 as u8, Hash::Sha512 as u8],
    };
    let groups = vec![auth::NO_GROUP];
    send(session, &HostMessage::Negotiate { transaction: TRANSACTION, secure_channel: 0, hashes, groups })?;
    let (hash, sequence, challenge) = match receive(session)? {
        ControllerMessage::Challenge { hash, group: auth::NO_GROUP, sequence, challenge } => {
            (hash, sequence, challenge)
        }
        ControllerMessage::Challenge { .. } => {
            return Err(failed(session, "it wants a Diffie-Hellman group, which is not supported".into()));
        }
        ControllerMessage::Failure { explanation } => return Err(refused(session, explanation)),
        ControllerMessage::Success { .. } => return Err(failed(session, "it lets the host in without a proof".into())),
    };
    let names = ("HostHost", host, subsystem);
    let text = auth::hashed(&challenge, sequence, TRANSACTION, 0, names);
    let response = mac(hash, &keys.host.of(host), &text);
    let ours = match &keys.subsystem {
        Some(_) => Some(challenge_of(session, hash)?),
        None => None,
    };
    let (own, own_sequence) = ours.clone().unwrap_or_default();
    let challenge = ours.as_ref().map(|_| own.clone());
    send(session, &HostMessage::Reply { transaction: TRANSACTION, response, challenge, sequence: own_sequence })?;
    let response = match receive(session)? {
        ControllerMessage::Success { response } => response,
        ControllerMessage::Failure { explanation } => return Err(refused(session, explanation)),
        ControllerMessage::Challenge { .. } => return Err(failed(session, "it sends a second challenge".into())),
    };
    let Some(key) = &keys.subsystem else { return Ok(()) };
    let text = auth::hashed(&own, own_sequence, TRANSACTION, 0, ("Controller", subsystem, host));
    if !response.is_some_and(|response| verify(hash, &key.of(subsystem), &text, &response)) {
        // The connection ends anyway.
        let _ = send(session, &HostMessage::Failure { explanation: auth::Failure::Failed as u8 });
        return Err(failed(session, format!("it does not prove that it is {subsystem}; its secret differs")));
    }
    send(session, &HostMessage::Success { transaction: TRANSACTION })
}

fn challenge_of(session: &Session, hash: Hash) -> Result<(Vec<u8>, u32)> {
    let (mut challenge, mut sequence) = (vec![0; hash.bytes()], [0; 4]);
    let random = SystemRandom::new();
    let filled = random.fill(&mut challenge).and_then(|()| random.fill(&mut sequence));
    filled.map_err(|_| failed(session, "there are no random numbers".into()))?;
    // 0 means that a challenge is not valid.
    Ok((challenge, u32::from_le_bytes(sequence).max(1)))
}

fn send(session: &mut Session, message: &HostMessage) -> Result<()> {
    let message = message.encode();
    session.ask("authenticate this host", auth::command(auth::SEND, message.len()), &message).map(drop)
}

fn receive(session: &mut Session) -> Result<ControllerMessage> {
    let (_, data) = session.ask("authenticate this host", auth::command(auth::RECEIVE, ROOM_BYTES), &[])?;
    let message = ControllerMessage::decode(&data);
    message.ok_or_else(|| session.connection.violation("its message of the authentication is not valid".into()).into())
}

fn refused(session: &Session, explanation: u8) -> ClientError {
    let what = match explanation {
        0x01 => "it does not accept the secret of this host; compare the name and the secret with the target's".into(),
        0x04 => "it supports no hash function of the secret".into(),
        0x05 => "it wants a Diffie-Hellman group, which is not supported".into(),
        other => format!("the authentication has failed, with the explanation {other:#04x}"),
    };
    failed(session, what)
}

fn failed(session: &Session, what: String) -> ClientError {
    ClientError::Authentication { peer: session.peer(), what }
}
