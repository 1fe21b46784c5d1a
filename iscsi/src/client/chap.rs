//! CHAP on the initiator's side: an answer to the target's challenge, and one of our own.
//!
//! The target is asked to prove itself if the secrets name a server.

use crate::wire::{
    chap::{Algorithm, are_equal},
    text,
};
use diskwright_store::secrets::Credentials;
use ring::rand::{SecureRandom, SystemRandom};

/// Length of our challenge in bytes.
const CHALLENGE_BYTES: usize = 32;

/// The algorithms that we offer, the preferred one first.
pub(super) const ALGORITHMS: &str = "7,5";

/// A challenge that was sent to the target.
#[derive(Debug)]
pub(super) struct Challenge {
    algorithm: Algorithm,
    id: u8,
    challenge: Vec<u8>,
}

/// The value of a key.
fn value_of<'a>(pairs: &[(&str, &'a str)], name: &str) -> Option<&'a str> {
    pairs.iter().find(|(key, _)| *key == name).map(|&(_, value)| value)
}

/// Answers the target's challenge, and appends one of our own if it is to prove itself.
///
/// # Errors
/// What is wrong with the challenge, as a sentence about the target.
pub(super) fn answer(
    pairs: &[(&str, &str)],
    own: &Credentials,
    is_mutual: bool,
    out: &mut Vec<u8>,
) -> Result<Option<Challenge>, String> {
    let algorithm = value_of(pairs, "CHAP_A").and_then(Algorithm::of);
    let id = value_of(pairs, "CHAP_I").and_then(text::number).and_then(|id| u8::try_from(id).ok());
    let challenge = value_of(pairs, "CHAP_C").and_then(text::binary);
    let (Some(algorithm), Some(id), Some(challenge)) = (algorithm, id, challenge) else {
        return Err("the target's challenge of CHAP is not valid".into());
    };
    text::put(out, "CHAP_N", own.name());
    text::put(out, "CHAP_R", &text::hex(&algorithm.hash(id, own.secret(), &challenge)));
    if !is_mutual {
        return Ok(None);
    }
    let mut random = [0; CHALLENGE_BYTES + 1];
    SystemRandom::new().fill(&mut random).map_err(|_| "there are no random numbers for CHAP".to_owned())?;
    let [id, ours @ ..] = random;
    text::put(out, "CHAP_I", &id.to_string());
    text::put(out, "CHAP_C", &text::hex(&ours));
    Ok(Some(Challenge { algorithm, id, challenge: ours.to_vec() }))
}

impl Challenge {
    /// Whether the target has proved that it is the server of the secrets.
    ///
    /// # Errors
    /// It has not, as a sentence about the target.
    pub(super) fn check(&self, pairs: &[(&str, &str)], server: &Credentials) -> Result<(), String> {
        let response = value_of(pairs, "CHAP_R").and_then(text::binary).unwrap_or_default();
        let expected = self.algorithm.hash(self.id, server.secret(), &self.challenge);
        if value_of(pairs, "CHAP_N") != Some(server.name()) || !are_equal(&expected, &response) {
            let name = server.name();
            return Err(format!("the target does not prove that it is {name:?}; its secret or its name differs"));
        }
        Ok(())
    }
}
