//! Where the servers of the study listen for agents, and how an agent names what they serve.
//!
//! What an agent may touch is said on its own command line, before the study runs. So the addresses
//! of the servers are fixed: those of the protocols, or three ports in a row. An agent opens a
//! target when a measurement is prepared, and not when it starts, so the servers need not run yet.

use super::way::{AccessPath, Scale};
use diskwright_fleet::address::Place;
use diskwright_iscsi::wire::DEFAULT_PORT as ISCSI_PORT;
use diskwright_nbd::{NbdUri, wire::DEFAULT_PORT as NBD_PORT};
use diskwright_nvme::wire::DEFAULT_PORT as NVME_PORT;
use std::{fmt, net::IpAddr, str::FromStr};

/// Connections of an agent to the NBD server at most: one for each of its clients.
const CONNECTIONS: usize = super::CLIENTS as usize;

/// A host, and the ports of its servers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentServer {
    host: String,
    /// Port of NBD. Those of NVMe/TCP and iSCSI are the next two. `None`: the usual ports.
    first_port: Option<u16>,
}

impl Default for AgentServer {
    /// The usual ports of this machine alone.
    fn default() -> Self {
        Self { host: "127.0.0.1".into(), first_port: None }
    }
}

/// The host, and the first port if the ports are not the usual ones.
impl fmt::Display for AgentServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.first_port {
            Some(port) => Place::Tcp(self.host.clone(), port).fmt(f),
            None => f.write_str(&self.bracketed()),
        }
    }
}

impl FromStr for AgentServer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let Place::Tcp(host, port) = text.parse()? else {
            return Err("the servers need TCP: HOST or HOST:PORT".into());
        };
        if host.parse::<IpAddr>().is_ok_and(|address| address.is_unspecified()) {
            return Err(format!("agents cannot connect to {host}; give an address of this machine that they reach"));
        }
        let usual = Self { host, first_port: None };
        if text == usual.bracketed() {
            return Ok(usual);
        }
        match port {
            0 => Err("port 0 does not say where the servers are; choose a port".into()),
            port if port > u16::MAX - 2 => Err(format!("the two ports after {port} are needed, too")),
            port => Ok(Self { first_port: Some(port), ..usual }),
        }
    }
}

impl AgentServer {
    /// Host name or address.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Address with the port of an access path.
    pub fn address(&self, way: AccessPath) -> String {
        Place::Tcp(self.host.clone(), self.port(way)).to_string()
    }

    /// How an agent names the disk that is served for an access path, as a target.
    pub fn target(&self, way: AccessPath) -> String {
        match way {
            AccessPath::AgentNvme => format!("nvme://{}", self.address(way)),
            AccessPath::AgentIscsi => format!("iscsi://{}", self.address(way)),
            _ => {
                let uri = NbdUri::tcp(&self.host, self.port(way), "");
                NbdUri { connections: Some(CONNECTIONS), ..uri }.to_string()
            }
        }
    }

    /// The targets that an agent must allow, with their names: `agent-nbd=nbd://...`.
    pub fn targets(&self) -> Vec<String> {
        Scale::Agents.ways().map(|way| format!("{}={}", way.word(), self.target(way))).collect()
    }

    fn port(&self, way: AccessPath) -> u16 {
        let (place, usual) = match way {
            AccessPath::AgentNvme => (1, NVME_PORT),
            AccessPath::AgentIscsi => (2, ISCSI_PORT),
            _ => (0, NBD_PORT),
        };
        self.first_port.map_or(usual, |first| first.saturating_add(place))
    }

    fn bracketed(&self) -> String {
        if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::open;

    #[test]
    fn servers_have_the_usual_ports_or_three_in_a_row() {
        let targets = |text: &str| text.parse::<AgentServer>().unwrap().targets();
        assert_eq!(
            targets("10.0.0.1"),
            [
                "agent-nbd=nbd://10.0.0.1/?connections=20",
                "agent-nvme=nvme://10.0.0.1:4420",
                "agent-iscsi=iscsi://10.0.0.1:3260"
            ]
        );
        assert_eq!(
            targets("[fe80::1]:7000")[1..],
            ["agent-nvme=nvme://[fe80::1]:7001", "agent-iscsi=iscsi://[fe80::1]:7002"]
        );
        assert_eq!(targets("disk:7407")[2], "agent-iscsi=iscsi://disk:7409", "the port of an agent is a port, too");
        for text in ["10.0.0.1", "[fe80::1]:7000", "[::1]", "disk:7407"] {
            let server: AgentServer = text.parse().unwrap();
            assert_eq!(server.to_string(), text);
            assert!(Scale::Agents.ways().all(|way| open::names_export(&server.target(way))), "{text}");
        }
        for wrong in ["", "host:0", "host:65534", "host:x", "::1", "vsock:3:7", "0.0.0.0", "[::]:7000"] {
            wrong.parse::<AgentServer>().unwrap_err();
        }
        assert_eq!(AgentServer::default().address(AccessPath::AgentNbd), "127.0.0.1:10809");
    }
}
