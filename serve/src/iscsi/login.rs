//! The login: who the initiator is, and what both sides agree on (RFC 7143, 6 and 13).
//!
//! ```text
//!   security ─▶ operational ─▶ full feature phase
//! ```
//!
//! An initiator may begin with either stage, and says when it is ready for the next one. Text that
//! is longer than one PDU comes in several. Each key is answered by the smaller or safer of both
//! sides' values; a key that is not known is answered so, and a value that is not valid is
//! rejected.

use super::{
    chap::Chap,
    shared::Port,
    state::{BURST_BYTES, FIRST_BURST_BYTES, Iscsi, Pdu, Phase, SEGMENT_BYTES},
    units::Units,
};
use crate::net::{connection::Connection, core::Core, protocol::SessionEnd};
use diskwright_iscsi::wire::{LoginReply, LoginRequest, LoginStatus, Stage, text};

/// Text of one request, over all its PDUs.
const TEXT_BYTES_MAX: usize = 64 << 10;

impl Core<Iscsi> {
    pub(super) fn take_login(
        &mut self,
        conn: &mut Connection<Iscsi>,
        pdu: &Pdu,
        data: &[u8],
    ) -> Result<(), SessionEnd> {
        let request = LoginRequest::decode(&pdu.bytes);
        let Phase::Login(login) = &mut conn.session.phase else { return Ok(()) };
        if login.stage.is_none() {
            conn.session.counters.expected_cmd_sn = request.cmd_sn;
            conn.session.counters.max_cmd_sn = request.cmd_sn.wrapping_sub(1);
        }
        let mut answer = Vec::new();
        match self.log_in(conn, &request, data, &mut answer) {
            Ok(moves_on) => {
                let tsih = conn.session.nexus().map_or(0, |nexus| nexus.tsih);
                let counters = conn.session.next_counters();
                let reply =
                    LoginReply { transits: moves_on, tsih, ..LoginReply::to(&request, counters, LoginStatus::SUCCESS) };
                // Digests begin after the login.
                self.put_login(conn, &reply, &answer);
                Ok(())
            }
            Err((status, why)) => {
                let counters = conn.session.next_counters();
                self.put_login(conn, &LoginReply::to(&request, counters, status), &[]);
                Err(SessionEnd::Told(why))
            }
        }
    }

    fn put_login(&mut self, conn: &mut Connection<Iscsi>, reply: &LoginReply, text: &[u8]) {
        let agreed = std::mem::take(&mut conn.session.agreed);
        self.put_response(conn, &reply.encode(text.len()), text);
        conn.session.agreed = agreed;
    }

    /// Handles a request. Returns whether the next stage begins.
    fn log_in(
        &mut self,
        conn: &mut Connection<Iscsi>,
        request: &LoginRequest,
        data: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<bool, (LoginStatus, String)> {
        let fail = |status, why: &str| Err((status, format!("the login has failed: {why}")));
        let Phase::Login(login) = &mut conn.session.phase else {
            return fail(LoginStatus::INVALID, "it was over");
        };
        if request.version_min > 0 {
            return fail(LoginStatus::VERSION, "the initiator does not support version 0 of the protocol");
        }
        let stage = match request.stage {
            Some(stage @ (Stage::Security | Stage::Operational)) => stage,
            _ => return fail(LoginStatus::INITIATOR_ERROR, "the stage is not valid"),
        };
        if login.stage.is_some_and(|expected| expected != stage) {
            return fail(LoginStatus::INVALID, "the stage is not the next one");
        }
        login.stage = Some(stage);
        if login.text.len() + data.len() > TEXT_BYTES_MAX {
            return fail(LoginStatus::OUT_OF_RESOURCES, "the text is too long");
        }
        login.text.extend_from_slice(data);
        if request.continues {
            return if request.transits {
                fail(LoginStatus::INITIATOR_ERROR, "the flags exclude each other")
            } else {
                Ok(false)
            };
        }
        let whole = std::mem::take(&mut login.text);
        let pairs: Vec<(&str, &str)> = match text::pairs(&whole).collect() {
            Ok(pairs) => pairs,
            Err(error) => return fail(LoginStatus::INITIATOR_ERROR, &error.to_string()),
        };
        let value_of = |name: &str| pairs.iter().find(|(key, _)| *key == name).map(|&(_, value)| value);
        if login.is_discovery.is_none() {
            let is_discovery = match value_of("SessionType") {
                None | Some("Normal") => false,
                Some("Discovery") => true,
                Some(_) => return fail(LoginStatus::SESSION_TYPE, "the type of session is not known"),
            };
            let is_name = |name: &&str| (1..=223).contains(&name.len()) && !name.contains(char::is_control);
            let Some(initiator) = value_of("InitiatorName").filter(is_name) else {
                return fail(LoginStatus::MISSING, "the initiator does not tell its name");
            };
            match value_of("TargetName") {
                _ if is_discovery => {}
                None => return fail(LoginStatus::MISSING, "the initiator does not name a target"),
                Some(name) if name.eq_ignore_ascii_case(&self.shared.target) => {}
                Some(name) => return fail(LoginStatus::NOT_FOUND, &format!("there is no target {name:?}")),
            }
            // A session has one connection, and its state ends with it.
            if request.tsih != 0 {
                return fail(LoginStatus::NO_SESSION, "the session that it belongs to does not exist");
            }
            login.initiator = Some(initiator.to_owned());
            login.is_discovery = Some(is_discovery);
            if !is_discovery {
                text::put(answer, "TargetPortalGroupTag", "1");
            }
        }
        let is_discovery = login.is_discovery == Some(true);
        if let Some(secrets) = &self.shared.secrets {
            if stage == Stage::Security {
                if let Err(error) = login.chap.step(&secrets.current(), &pairs, answer) {
                    return fail(LoginStatus::AUTHENTICATION, &error.to_string());
                }
            } else if login.chap != Chap::Proved {
                return fail(LoginStatus::AUTHENTICATION, "the initiator does not prove who it is");
            }
        }
        for &(name, value) in &pairs {
            match (name, stage) {
                ("SessionType" | "InitiatorName" | "TargetName" | "InitiatorAlias", _) => {}
                (_, Stage::Security) if self.shared.secrets.is_some() => {}
                ("AuthMethod", Stage::Security) => {
                    if !value.split(',').any(|method| method == "None") {
                        return fail(
                            LoginStatus::AUTHENTICATION,
                            "the target has no secrets, and the initiator wants some",
                        );
                    }
                    text::put(answer, "AuthMethod", "None");
                }
                (_, Stage::Operational) => negotiate(conn, is_discovery, name, value, answer),
                _ => text::put(answer, name, "NotUnderstood"),
            }
        }
        let Phase::Login(login) = &mut conn.session.phase else { return Ok(false) };
        if stage == Stage::Operational && !std::mem::replace(&mut login.has_declared, true) {
            text::put(answer, "MaxRecvDataSegmentLength", &SEGMENT_BYTES.to_string());
        }
        let is_known = self.shared.secrets.is_none() || login.chap == Chap::Proved;
        if !request.transits || !is_known {
            return Ok(false);
        }
        match (stage, request.next) {
            (Stage::Security, Some(Stage::Operational)) => login.stage = Some(Stage::Operational),
            (Stage::Security | Stage::Operational, Some(Stage::Full)) => {
                let initiator = login.initiator.take().unwrap_or_default();
                let nexus = self.shared.open(Port { initiator, isid: request.isid }, is_discovery);
                tracing::info!(peer = %conn.peer, initiator = %nexus.port.initiator, is_discovery, "logged in");
                if !is_discovery {
                    let units = Units::new(nexus.port.to_string(), &self.exports, &self.shared.reservations);
                    if units.are_in_use() {
                        self.shared.close(&nexus);
                        return fail(LoginStatus::UNAVAILABLE, "requests of the earlier session are in flight");
                    }
                    units.end_simple_reservations();
                    conn.session.units = units;
                }
                conn.session.phase = Phase::Full { nexus, is_discovery };
            }
            _ => return fail(LoginStatus::INITIATOR_ERROR, "the next stage is not valid"),
        }
        Ok(true)
    }
}

/// Answers a key of the operational stage. In the full feature phase some may be told again.
pub(super) fn negotiate(
    conn: &mut Connection<Iscsi>,
    is_discovery: bool,
    name: &str,
    value: &str,
    answer: &mut Vec<u8>,
) {
    let agreed = &mut conn.session.agreed;
    let number = text::number(value);
    let within = |low: u32, high: u32| number.filter(|number| (low..=high).contains(number));
    let is_yes = match value {
        "Yes" => Some(true),
        "No" => Some(false),
        _ => None,
    };
    let word = |yes: bool| if yes { "Yes" } else { "No" }.to_owned();
    let reply = match name {
        "HeaderDigest" | "DataDigest" => {
            let chosen = value.split(',').find(|digest| matches!(*digest, "None" | "CRC32C"));
            if let Some(chosen) = chosen {
                let with = chosen == "CRC32C";
                if name == "HeaderDigest" { agreed.header_digest = with } else { agreed.data_digest = with }
            }
            chosen.map(str::to_owned)
        }
        // A declaration, which is not answered.
        "MaxRecvDataSegmentLength" => match within(512, 0xff_ffff) {
            Some(bytes) => {
                agreed.segment_bytes = bytes as usize;
                return;
            }
            None => None,
        },
        "InitiatorAlias" => return,
        "MaxBurstLength" => within(512, 0xff_ffff).map(|bytes| {
            agreed.burst_bytes = bytes.min(BURST_BYTES);
            agreed.first_burst_bytes = agreed.first_burst_bytes.min(agreed.burst_bytes);
            agreed.burst_bytes.to_string()
        }),
        "FirstBurstLength" => within(512, 0xff_ffff).map(|bytes| {
            agreed.first_burst_bytes = bytes.min(FIRST_BURST_BYTES).min(agreed.burst_bytes);
            agreed.first_burst_bytes.to_string()
        }),
        "ImmediateData" => is_yes.map(|yes| {
            agreed.immediate = yes;
            word(yes)
        }),
        "InitialR2T" | "DataPDUInOrder" | "DataSequenceInOrder" => is_yes.map(|_| word(true)),
        "IFMarker" | "OFMarker" => is_yes.map(|_| word(false)),
        "IFMarkInt" | "OFMarkInt" => Some("Irrelevant".to_owned()),
        "MaxConnections" | "MaxOutstandingR2T" => within(1, 65535).map(|_| "1".to_owned()),
        "ErrorRecoveryLevel" => within(0, 2).map(|_| "0".to_owned()),
        "DefaultTime2Wait" => within(0, 3600).map(|seconds| seconds.max(2).to_string()),
        "DefaultTime2Retain" => within(0, 3600).map(|_| "0".to_owned()),
        "iSCSIProtocolLevel" => within(0, 31).map(|level| level.min(1).to_string()),
        "TaskReporting" => value.split(',').any(|kind| kind == "RFC3720").then(|| "RFC3720".to_owned()),
        _ => Some("NotUnderstood".to_owned()),
    };
    let irrelevant = is_discovery
        && matches!(
            name,
            "MaxConnections"
                | "InitialR2T"
                | "ImmediateData"
                | "MaxBurstLength"
                | "FirstBurstLength"
                | "MaxOutstandingR2T"
                | "DataPDUInOrder"
                | "DataSequenceInOrder"
        );
    let reply = if irrelevant { Some("Irrelevant".to_owned()) } else { reply };
    text::put(answer, name, reply.as_deref().unwrap_or("Reject"));
}
