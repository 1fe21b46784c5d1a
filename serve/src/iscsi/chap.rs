//! CHAP: an initiator proves that it has a secret, and the target does if it is asked (RFC 7143,
//! 12.1.3; RFC 1994).
//!
//! ```text
//!   I: AuthMethod=CHAP                     T: AuthMethod=CHAP
//!   I: CHAP_A=5,7                          T: CHAP_A=7, CHAP_I, CHAP_C     a challenge
//!   I: CHAP_N, CHAP_R (, CHAP_I, CHAP_C)   T: (CHAP_N, CHAP_R)             the answers
//! ```
//!
//! The hash is in the crate `iscsi/`.

use crate::secrets::{Credentials, Secrets};
use diskwright_iscsi::wire::{
    chap::{Algorithm, are_equal},
    text,
};
use ring::rand::{SecureRandom, SystemRandom};

/// Length of our challenge, in bytes.
const CHALLENGE_BYTES: usize = 32;

/// How far the authentication of a login is.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(super) enum Chap {
    /// The initiator has not begun.
    #[default]
    Wanted,
    /// Both sides have agreed to use it.
    Chosen,
    /// The challenge was sent.
    Challenged { algorithm: Algorithm, id: u8, challenge: Vec<u8> },
    /// The initiator has proved who it is.
    Proved,
}

/// Why an authentication has failed. What the initiator is told does not depend on it.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ChapError {
    /// The keys are not those of this step.
    Step(&'static str),
    /// The name or the secret is wrong.
    Wrong { name: String },
    /// The initiator sent our own challenge.
    Reflected,
    /// The initiator wants to know who the target is, which has no secret.
    NoServer,
    /// There are no random numbers.
    Random,
}

impl std::fmt::Display for ChapError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Step(what) => f.write_str(what),
            Self::Wrong { name } => write!(f, "CHAP: the name {name:?} or its secret is wrong"),
            Self::Reflected => f.write_str("CHAP: the initiator sent the target's own challenge"),
            Self::NoServer => f.write_str("CHAP: the initiator asks for the target's secret, and there is none"),
            Self::Random => f.write_str("CHAP: there are no random numbers"),
        }
    }
}

impl Chap {
    /// Handles the keys of one request, and appends those of the answer.
    ///
    /// # Errors
    /// The login has failed.
    pub(super) fn step(
        &mut self,
        secrets: &Secrets,
        pairs: &[(&str, &str)],
        answer: &mut Vec<u8>,
    ) -> Result<(), ChapError> {
        let value_of = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|&(_, value)| value);
        let next = match &*self {
            Self::Wanted => match value_of("AuthMethod") {
                Some(methods) if methods.split(',').any(|method| method == "CHAP") => {
                    text::put(answer, "AuthMethod", "CHAP");
                    Self::Chosen
                }
                _ => return Err(ChapError::Step("the initiator does not offer CHAP, and the target wants it")),
            },
            Self::Chosen => {
                let offered = value_of("CHAP_A").unwrap_or("");
                let Some(algorithm) = offered.split(',').find_map(Algorithm::of) else {
                    return Err(ChapError::Step("the initiator offers no CHAP algorithm that is supported (5, 7)"));
                };
                let mut random = [0; CHALLENGE_BYTES + 1];
                SystemRandom::new().fill(&mut random).map_err(|_| ChapError::Random)?;
                let [id, challenge @ ..] = random;
                text::put(answer, "CHAP_A", algorithm.number());
                text::put(answer, "CHAP_I", &id.to_string());
                text::put(answer, "CHAP_C", &text::hex(&challenge));
                Self::Challenged { algorithm, id, challenge: challenge.to_vec() }
            }
            Self::Challenged { algorithm, id, challenge } => {
                let (Some(name), Some(response)) = (value_of("CHAP_N"), value_of("CHAP_R").and_then(text::binary))
                else {
                    return Err(ChapError::Step("the initiator does not answer the challenge of CHAP"));
                };
                let client = secrets.client(name);
                // A name that is not known takes as long as one that is.
                let secret = client.map_or(&b"no such client"[..], Credentials::secret);
                let is_right = are_equal(&algorithm.hash(*id, secret, challenge), &response);
                if client.is_none() || !is_right {
                    return Err(ChapError::Wrong { name: name.to_owned() });
                }
                if let Some(id) = value_of("CHAP_I") {
                    let theirs = value_of("CHAP_C").and_then(text::binary);
                    let (Some(theirs), Some(id)) = (theirs, text::number(id).and_then(|id| u8::try_from(id).ok()))
                    else {
                        return Err(ChapError::Step("the initiator's challenge of CHAP is not valid"));
                    };
                    if theirs == *challenge {
                        return Err(ChapError::Reflected);
                    }
                    let server = secrets.server().ok_or(ChapError::NoServer)?;
                    text::put(answer, "CHAP_N", server.name());
                    text::put(answer, "CHAP_R", &text::hex(&algorithm.hash(id, server.secret(), &theirs)));
                }
                Self::Proved
            }
            Self::Proved => return Ok(()),
        };
        *self = next;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn secrets(server: bool) -> Secrets {
        let of = |name, secret| Credentials::new(name, secret).unwrap();
        Secrets::new(vec![of("a", "the secret of a")], server.then(|| of("t", "the secret of t"))).unwrap()
    }

    /// The answers of a target to an initiator with this secret.
    fn play(secrets: &Secrets, algorithms: &str, secret: &str, more: &[(&str, &str)]) -> Result<String, ChapError> {
        let mut chap = Chap::default();
        chap.step(secrets, &[("AuthMethod", "None,CHAP")], &mut Vec::new())?;
        chap.step(secrets, &[("CHAP_A", algorithms)], &mut Vec::new())?;
        let Chap::Challenged { algorithm, id, challenge } = chap.clone() else { panic!("{chap:?}") };
        let response = text::hex(&algorithm.hash(id, secret.as_bytes(), &challenge));
        let mut answer = Vec::new();
        let ours = text::hex(&challenge);
        let mut pairs = vec![("CHAP_N", "a"), ("CHAP_R", response.as_str())];
        pairs.extend(more.iter().map(|&(name, value)| (name, if value == "ours" { &ours } else { value })));
        chap.step(secrets, &pairs, &mut answer)?;
        assert_eq!(chap, Chap::Proved);
        Ok(String::from_utf8(answer).unwrap())
    }

    #[test]
    fn the_right_secret_is_let_in_and_no_other() {
        for algorithms in ["5", "7", "7,5", "6,7"] {
            assert_eq!(play(&secrets(false), algorithms, "the secret of a", &[]), Ok(String::new()));
        }
        let wrong = play(&secrets(false), "7", "the secret of b", &[]);
        assert_eq!(wrong, Err(ChapError::Wrong { name: "a".into() }));
        assert!(matches!(play(&secrets(false), "6,8", "the secret of a", &[]), Err(ChapError::Step(_))));
        let mut chap = Chap::default();
        assert!(chap.step(&secrets(false), &[("AuthMethod", "None")], &mut Vec::new()).is_err());
    }

    #[test]
    fn the_target_proves_itself_if_it_can() {
        let theirs = [("CHAP_I", "7"), ("CHAP_C", "0x0102")];
        let answer = play(&secrets(true), "7", "the secret of a", &theirs).unwrap();
        let hash = Algorithm::Sha256.hash(7, b"the secret of t", &[1, 2]);
        assert_eq!(answer, format!("CHAP_N=t\0CHAP_R={}\0", text::hex(&hash)));
        assert_eq!(play(&secrets(false), "7", "the secret of a", &theirs), Err(ChapError::NoServer));
        let reflected = [("CHAP_I", "7"), ("CHAP_C", "ours")];
        assert_eq!(play(&secrets(true), "7", "the secret of a", &reflected), Err(ChapError::Reflected));
    }
}
