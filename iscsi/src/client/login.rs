//! The login: who this initiator is, and what both sides agree on (RFC 7143, chapters 6 and 13).
//!
//! ```text
//!   security       names; CHAP if there are secrets, else AuthMethod=None
//!   operational    digests, lengths; what the target does not name has its default
//! ```
//!
//! A target may send the initiator to another address, which is followed a few times.

use super::{
    ClientError, Result, chap,
    session::{Agreed, Numbers, SEGMENT_BYTES, Session},
};
use crate::{
    uri::IscsiUri,
    wire::{LoginReply, LoginRequest, LoginStatus, Opcode, Stage, check_name, text},
};
use diskwright_store::{
    Endpoint,
    remote::Connection,
    secrets::{Credentials, Secrets},
};
use ring::rand::{SecureRandom, SystemRandom};
use std::{
    fs,
    sync::atomic::{AtomicU16, Ordering},
};

/// Redirections that are followed.
const MOVES_MAX: usize = 4;

/// Steps of a login at most.
const STEPS_MAX: usize = 16;

/// Who logs in, and how.
#[derive(Debug, Clone)]
pub(super) struct LoginAs {
    initiator: String,
    secrets: Option<(Credentials, Option<Credentials>)>,
    header_digest: bool,
    data_digest: bool,
}

impl LoginAs {
    /// What the URI says.
    ///
    /// # Errors
    /// [`ClientError::Secrets`].
    pub(super) fn of(uri: &IscsiUri) -> Result<Self> {
        let secrets = match &uri.secrets {
            Some(path) => {
                let secrets = Secrets::read(path)?;
                Some((secrets.own(uri.user.as_deref())?.clone(), secrets.server().cloned()))
            }
            None => None,
        };
        let initiator = uri.initiator.clone().unwrap_or_else(name_of_machine);
        Ok(Self { initiator, secrets, header_digest: uri.header_digest, data_digest: uri.data_digest })
    }
}

/// The name in the system's configuration, or one of this machine. The domain is one that is
/// private everywhere.
fn name_of_machine() -> String {
    let configured = fs::read_to_string("/etc/iscsi/initiatorname.iscsi").unwrap_or_default();
    let named = configured.lines().find_map(|line| line.trim().strip_prefix("InitiatorName="));
    if let Some(name) = named.map(str::trim).filter(|name| check_name(name).is_ok()) {
        return name.to_owned();
    }
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let id: String = machine.chars().filter(char::is_ascii_hexdigit).take(32).collect();
    format!("iqn.2026-11.internal.diskwright:host-{}", id.to_ascii_lowercase())
}

/// A part of a session's id that no other session of this machine has (RFC 7143, 11.12.5: random).
fn isid() -> [u8; 6] {
    static COUNTER: AtomicU16 = AtomicU16::new(0);
    let mut random = [0; 3];
    // Without random numbers the counter still tells this program's sessions apart.
    let _ = SystemRandom::new().fill(&mut random);
    let [high, low] = COUNTER.fetch_add(1, Ordering::Relaxed).to_be_bytes();
    [0x80, random[0], random[1], random[2], high, low]
}

/// Logs in to a target, or for discovery if none is named.
///
/// # Errors
/// [`ClientError`].
pub(super) fn log_in(endpoint: &Endpoint, who: &LoginAs, target: Option<&str>) -> Result<Session> {
    let mut endpoint = endpoint.clone();
    for _ in 0..MOVES_MAX {
        match attempt(&endpoint, who, target)? {
            Attempt::In(session) => return Ok(*session),
            Attempt::Moved(to) => endpoint = to,
        }
    }
    let what = "the target is always at another address".to_owned();
    Err(ClientError::Unknown { peer: endpoint.to_string(), what })
}

enum Attempt {
    In(Box<Session>),
    Moved(Endpoint),
}

fn attempt(endpoint: &Endpoint, who: &LoginAs, target: Option<&str>) -> Result<Attempt> {
    const DOING: &str = "logging in";
    const USING_DIGESTS: &str = "use the digests of the URI";
    let connection = Connection::open(endpoint)?;
    let mut session = Session::new(connection);
    let isid = isid();
    let mut steps = Steps { who, target, stage: Stage::Security, offered: false, challenge: None };
    let mut keys = Vec::new();
    let mut transits = steps.begin(&mut keys);
    let mut received = Vec::new();
    for _ in 0..STEPS_MAX {
        let request = LoginRequest {
            transits,
            continues: false,
            stage: Some(steps.stage),
            next: transits.then_some(if steps.stage == Stage::Security { Stage::Operational } else { Stage::Full }),
            version_min: 0,
            isid,
            tsih: 0,
            tag: 1,
            cid: 0,
            cmd_sn: session.numbers.cmd_sn,
        };
        session.say(DOING, &request.encode(session.numbers.expected_stat_sn, keys.len()), &keys)?;
        let (header, data) = session.hear(DOING)?;
        if header.opcode != Some(Opcode::LoginResponse) {
            return Err(session.violation("it did not answer a login with a login response"));
        }
        let reply = LoginReply::decode(&header.bytes);
        session.numbers = Numbers {
            cmd_sn: session.numbers.cmd_sn,
            expected_stat_sn: reply.counters.stat_sn.wrapping_add(1),
            max_cmd_sn: reply.counters.max_cmd_sn,
        };
        received.extend_from_slice(&data);
        keys.clear();
        if reply.continues && reply.status == LoginStatus::SUCCESS {
            transits = false;
            continue;
        }
        let whole = std::mem::take(&mut received);
        let pairs: Vec<_> = text::pairs(&whole)
            .collect::<Result<_, _>>()
            .map_err(|error| session.violation(&format!("in the login {error}")))?;
        match reply.status {
            LoginStatus::SUCCESS => {}
            LoginStatus::MOVED | LoginStatus::MOVED_TEMPORARILY => {
                let address = pairs.iter().find(|(name, _)| *name == "TargetAddress").map(|&(_, value)| value);
                let moved = address.and_then(endpoint_of);
                return moved
                    .map(Attempt::Moved)
                    .ok_or_else(|| session.violation("it does not say where it has moved"));
            }
            status => return Err(ClientError::Login { peer: session.peer(), status }),
        }
        steps.take(&pairs, &mut session.agreed, &mut keys).map_err(|trouble| match trouble {
            Trouble::Violation(what) => session.violation(&what),
            Trouble::Authentication(what) => ClientError::Authentication { peer: session.peer(), what },
            Trouble::Digest(answer) => ClientError::Refused { peer: session.peer(), doing: USING_DIGESTS, answer },
        })?;
        transits = match (reply.transits, reply.next) {
            (true, _) if !transits => {
                return Err(session.violation("it goes on with the next stage, for which we are not ready"));
            }
            (true, Some(Stage::Full)) if steps.stage == Stage::Operational => {
                let Agreed { header_digest, data_digest, .. } = session.agreed;
                if (header_digest, data_digest) != (who.header_digest, who.data_digest) {
                    let answer = "it does not answer which it uses; leave out ?header-digest and ?data-digest".into();
                    return Err(ClientError::Refused { peer: session.peer(), doing: USING_DIGESTS, answer });
                }
                steps.end().map_err(|what| ClientError::Authentication { peer: session.peer(), what })?;
                session.is_full = true;
                return Ok(Attempt::In(Box::new(session)));
            }
            (true, Some(Stage::Operational)) if steps.stage == Stage::Security => {
                steps.end().map_err(|what| ClientError::Authentication { peer: session.peer(), what })?;
                steps.stage = Stage::Operational;
                steps.begin(&mut keys)
            }
            (true, _) => return Err(session.violation("it goes on with a stage that is not valid")),
            (false, _) => steps.is_ready(),
        };
    }
    Err(session.violation("the login does not end"))
}

/// An address of a target: `HOST:PORT,GROUP` or `HOST`.
pub(super) fn endpoint_of(address: &str) -> Option<Endpoint> {
    let address = address.split(',').next()?;
    Endpoint::of_authority(address, crate::wire::DEFAULT_PORT).ok()
}

enum Trouble {
    Violation(String),
    Authentication(String),
    /// The target does not use a digest that was asked for.
    Digest(String),
}

/// How far a login is.
struct Steps<'a> {
    who: &'a LoginAs,
    target: Option<&'a str>,
    stage: Stage,
    /// Whether the algorithms of CHAP were offered and not answered yet.
    offered: bool,
    challenge: Option<Challenge>,
}

/// How far the authentication is.
enum Challenge {
    /// Nothing more is expected.
    Answered,
    /// The target is to answer.
    Sent(chap::Challenge),
}

impl Steps<'_> {
    /// The keys with which a stage begins. Returns whether the next one may begin at once.
    fn begin(&mut self, keys: &mut Vec<u8>) -> bool {
        let mut put = |name: &str, value: &str| text::put(keys, name, value);
        let digest = |is_wanted| if is_wanted { "CRC32C" } else { "None" };
        if self.stage == Stage::Security {
            put("InitiatorName", &self.who.initiator);
            match self.target {
                Some(target) => {
                    put("SessionType", "Normal");
                    put("TargetName", target);
                }
                None => put("SessionType", "Discovery"),
            }
            let with_chap = self.who.secrets.is_some();
            put("AuthMethod", if with_chap { "CHAP" } else { "None" });
            return !with_chap;
        }
        put("HeaderDigest", digest(self.who.header_digest));
        put("DataDigest", digest(self.who.data_digest));
        put("MaxRecvDataSegmentLength", &SEGMENT_BYTES.to_string());
        put("DefaultTime2Wait", "2");
        put("DefaultTime2Retain", "0");
        put("ErrorRecoveryLevel", "0");
        if self.target.is_some() {
            put("InitialR2T", "Yes");
            put("ImmediateData", "Yes");
            put("MaxBurstLength", &(1 << 20).to_string());
            put("FirstBurstLength", &(64 << 10).to_string());
            put("MaxConnections", "1");
            put("MaxOutstandingR2T", "1");
            put("DataPDUInOrder", "Yes");
            put("DataSequenceInOrder", "Yes");
        }
        true
    }

    /// Whether the next stage may begin as far as we are concerned.
    fn is_ready(&self) -> bool {
        self.stage == Stage::Operational || self.who.secrets.is_none() || self.challenge.is_some()
    }

    /// Handles the keys of a response.
    fn take(&mut self, pairs: &[(&str, &str)], agreed: &mut Agreed, keys: &mut Vec<u8>) -> Result<(), Trouble> {
        if self.stage == Stage::Security
            && let Some((own, server)) = &self.who.secrets
        {
            return self.authenticate(pairs, own, server.as_ref(), keys);
        }
        for &(name, value) in pairs {
            match (self.stage, name) {
                (Stage::Security, "AuthMethod") if value != "None" => {
                    let what =
                        format!("the target wants a proof of who we are ({value}); write ?secrets=FILE in the URI");
                    return Err(Trouble::Authentication(what));
                }
                (Stage::Operational, "HeaderDigest" | "DataDigest") if value == "None" && self.wants_digest(name) => {
                    let what = format!("it answers {name}=None; leave out ?header-digest and ?data-digest");
                    return Err(Trouble::Digest(what));
                }
                (Stage::Operational, _) => {
                    self.agree(name, value, agreed).map_err(|what| {
                        Trouble::Violation(format!("it answers {name}={value} in the login, which {what}"))
                    })?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn authenticate(
        &mut self,
        pairs: &[(&str, &str)],
        own: &Credentials,
        server: Option<&Credentials>,
        keys: &mut Vec<u8>,
    ) -> Result<(), Trouble> {
        let value_of = |wanted: &str| pairs.iter().find(|(name, _)| *name == wanted).map(|&(_, value)| value);
        match (&self.challenge, server) {
            (Some(Challenge::Sent(sent)), Some(server)) => {
                sent.check(pairs, server).map_err(Trouble::Authentication)?;
                self.challenge = Some(Challenge::Answered);
            }
            (Some(_), _) => {}
            (None, _) if self.offered => {
                let sent = chap::answer(pairs, own, server.is_some(), keys).map_err(Trouble::Authentication)?;
                self.challenge = Some(sent.map_or(Challenge::Answered, Challenge::Sent));
            }
            (None, _) if value_of("AuthMethod") == Some("CHAP") => {
                text::put(keys, "CHAP_A", chap::ALGORITHMS);
                self.offered = true;
            }
            (None, _) => {
                let what = "the target does not want CHAP; leave out ?secrets=FILE to connect without a proof";
                return Err(Trouble::Authentication(what.into()));
            }
        }
        Ok(())
    }

    fn wants_digest(&self, name: &str) -> bool {
        if name == "HeaderDigest" { self.who.header_digest } else { self.who.data_digest }
    }

    /// Handles a key of the operational stage.
    fn agree(&self, name: &str, value: &str, agreed: &mut Agreed) -> Result<(), &'static str> {
        let number = text::number(value);
        let length = || number.filter(|bytes| (512..1 << 24).contains(bytes)).map(|bytes| bytes as usize);
        let is = |expected: &str| if value == expected { Ok(()) } else { Err("was not asked for") };
        match name {
            "HeaderDigest" => {
                is(if self.who.header_digest { "CRC32C" } else { "None" })?;
                agreed.header_digest = self.who.header_digest;
            }
            "DataDigest" => {
                is(if self.who.data_digest { "CRC32C" } else { "None" })?;
                agreed.data_digest = self.who.data_digest;
            }
            "MaxRecvDataSegmentLength" => agreed.segment_bytes = length().ok_or("is not valid")?,
            "FirstBurstLength" if value != "Irrelevant" => {
                agreed.first_burst_bytes = length().ok_or("is not valid")?;
            }
            "ImmediateData" => agreed.immediate = value == "Yes",
            "MaxOutstandingR2T" | "MaxConnections" if value != "Irrelevant" => is("1")?,
            "ErrorRecoveryLevel" => is("0")?,
            _ => {}
        }
        Ok(())
    }

    /// The login goes on or ends: the target must have proved itself if it was asked to.
    fn end(&self) -> Result<(), String> {
        let Some((_, server)) = &self.who.secrets else { return Ok(()) };
        match (&self.challenge, server) {
            (Some(Challenge::Answered), _) => Ok(()),
            (Some(Challenge::Sent(_)), Some(server)) => {
                Err(format!("the target does not prove that it is {:?}", server.name()))
            }
            _ => Err("the target does not ask for the proof that ?secrets=FILE is for".into()),
        }
    }
}
