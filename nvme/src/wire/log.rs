//! Log pages. Base, "Get Log Page Command".

use super::{put, put_text, text_at};
use std::net::SocketAddr;

/// Errors of commands.
pub const ERRORS: u8 = 0x01;
/// Health.
pub const HEALTH: u8 = 0x02;
/// Slots of the firmware.
pub const FIRMWARE: u8 = 0x03;
/// Namespaces that changed since this page was last read.
pub const CHANGED_NAMESPACES: u8 = 0x04;
/// Commands that are supported, and their effects.
pub const EFFECTS: u8 = 0x05;
/// Asymmetric namespace access: the state of each group of namespaces.
pub const ACCESS_STATES: u8 = 0x0c;
/// What other hosts have done to the reservations of this one.
pub const RESERVATIONS: u8 = 0x80;
/// The subsystems of a discovery controller.
pub const DISCOVERY: u8 = 0x70;

/// The page of a controller that has seen no errors.
pub fn errors() -> Vec<u8> {
    vec![0; 64]
}

/// Health of a controller that has no sensors and no wear.
pub fn health() -> Vec<u8> {
    let mut out = vec![0; 512];
    // 300 Kelvin; all spare blocks are there, and the threshold is 10 percent.
    put(&mut out, 1, &300_u16.to_le_bytes());
    (out[3], out[4]) = (100, 10);
    out
}

/// One slot, which is active.
pub fn firmware(version: &str) -> Vec<u8> {
    let mut out = vec![0; 512];
    out[0] = 1;
    put_text(&mut out, 8, 8, version, b' ');
    out
}

/// One group with these namespaces, whose paths are all optimized. Base, "Asymmetric Namespace
/// Access Log Page". `with_ids`: the ids of the namespaces are told (RGO is 0). Hosts read as many
/// bytes as `namespaces_max` ids would take.
pub fn access_states(ids: &[u32], with_ids: bool, namespaces_max: u32) -> Vec<u8> {
    let ids = if with_ids { ids } else { &[] };
    let mut out = vec![0; 48 + 4 * (namespaces_max as usize).max(ids.len())];
    // CHGCNT stays 0: the state never changes. NGRPS.
    out[8] = 1;
    put(&mut out, 16, &1_u32.to_le_bytes());
    put(&mut out, 20, &(ids.len() as u32).to_le_bytes());
    out[32] = 1;
    for (entry, id) in out[48..].chunks_exact_mut(4).zip(ids) {
        entry.copy_from_slice(&id.to_le_bytes());
    }
    out
}

/// Up to 1,024 ids of namespaces. If there are more, the page says that all may have changed.
pub fn changed_namespaces(ids: &[u32]) -> Vec<u8> {
    let mut out = vec![0; 4096];
    let ids = if ids.len() > 1024 { &[0xffff_ffff] } else { ids };
    for (entry, id) in out.chunks_exact_mut(4).zip(ids) {
        entry.copy_from_slice(&id.to_le_bytes());
    }
    out
}

/// The commands that are supported. `changing` are those of the NVM command set that change data.
pub fn effects(admin: &[u8], io: &[u8], changing: &[u8]) -> Vec<u8> {
    let mut out = vec![0; 4096];
    for &opcode in admin {
        out[4 * usize::from(opcode)] |= 1;
    }
    for opcode in io {
        out[1024 + 4 * usize::from(*opcode)] |= if changing.contains(opcode) { 0b11 } else { 1 };
    }
    out
}

/// A subsystem in the discovery log. Base, "Discovery Log Page Entry".
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// Where it listens.
    pub address: SocketAddr,
    /// Its NQN.
    pub subsystem: String,
    /// Whether it is the discovery subsystem that was asked.
    pub is_discovery: bool,
}

impl DiscoveryEntry {
    /// Size of an entry, and of the head of the page.
    pub const BYTES: usize = 1024;

    fn encode(&self, port_id: u16) -> [u8; Self::BYTES] {
        let mut out = [0; Self::BYTES];
        // TRTYPE TCP; ADRFAM; SUBTYPE: this discovery subsystem, or one for storage.
        (out[0], out[1], out[2]) =
            (3, if self.address.is_ipv4() { 1 } else { 2 }, if self.is_discovery { 3 } else { 2 });
        // TREQ: nothing is required; flow control may be disabled.
        out[3] = 1 << 2;
        put(&mut out, 4, &port_id.to_le_bytes());
        // CNTLID: dynamic. ASQSZ: entries of the admin queue.
        put(&mut out, 6, &0xffff_u16.to_le_bytes());
        put(&mut out, 8, &32_u16.to_le_bytes());
        put_text(&mut out, 32, 32, &self.address.port().to_string(), b' ');
        put_text(&mut out, 256, 256, &self.subsystem, 0);
        put_text(&mut out, 512, 256, &self.address.ip().to_canonical().to_string(), b' ');
        out
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let port = text_at(bytes, 32, 32).parse().ok()?;
        let address = text_at(bytes, 512, 256).parse().ok()?;
        let is_discovery = matches!(bytes.get(2)?, 1 | 3);
        Some(Self { address: SocketAddr::new(address, port), subsystem: text_at(bytes, 256, 256), is_discovery })
    }
}

/// The discovery log. `generation` changes with every change of the entries.
pub fn discovery(generation: u64, entries: &[DiscoveryEntry]) -> Vec<u8> {
    let mut out = vec![0; DiscoveryEntry::BYTES];
    put(&mut out, 0, &generation.to_le_bytes());
    put(&mut out, 8, &(entries.len() as u64).to_le_bytes());
    for entry in entries {
        out.extend_from_slice(&entry.encode(1));
    }
    out
}

/// The entries of a discovery log by TCP. Others are left out.
pub fn discovered(page: &[u8]) -> Vec<DiscoveryEntry> {
    let entries = page.get(DiscoveryEntry::BYTES..).unwrap_or_default().chunks_exact(DiscoveryEntry::BYTES);
    entries.filter(|entry| entry[0] == 3).filter_map(DiscoveryEntry::decode).collect()
}
