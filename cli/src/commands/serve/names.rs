//! Names and addresses for clients: where they find the disks, and what the servers are called.

use super::args::ServeArgs;
use diskwright_serve::net::Address;
use std::{fmt::Write as _, fs, path::PathBuf};
use uuid::Uuid;

/// What is the same whenever this machine serves at this address.
fn id_of(address: &Address) -> Uuid {
    let machine = fs::read_to_string("/etc/machine-id").unwrap_or_default();
    let of_machine = Uuid::new_v5(&Uuid::NAMESPACE_OID, machine.trim().as_bytes());
    Uuid::new_v5(&of_machine, address.to_string().as_bytes())
}

/// The NQN of the NVMe subsystem, if there is one: the user's, or one that is the same whenever
/// this machine serves at this address.
pub(super) fn subsystem_of(args: &ServeArgs) -> Option<String> {
    let address = args.nvme.first()?;
    Some(args.nvme_subsystem.clone().unwrap_or_else(|| format!("nqn.2014-08.org.nvmexpress:uuid:{}", id_of(address))))
}

/// The name of the iSCSI target, in the same way. The domain is one that is private everywhere.
pub(super) fn target_of(args: &ServeArgs) -> Option<String> {
    let address = args.iscsi.first()?;
    Some(args.iscsi_target.clone().unwrap_or_else(|| format!("iqn.2026-11.internal.diskwright:{}", id_of(address))))
}

/// The default socket, in the run-time folder of the user, or of the system for root.
pub(super) fn usual_socket() -> PathBuf {
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ if rustix::process::geteuid().is_root() => PathBuf::from("/run"),
        _ => std::env::temp_dir(),
    };
    dir.join(format!("diskwright-nbd-{}.sock", std::process::id()))
}

/// The URI of an export at an address.
pub(super) fn uri(address: &Address, name: &str, tls: bool) -> String {
    let name = percent(name);
    match address {
        Address::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let scheme = if tls { "nbds+unix" } else { "nbd+unix" };
            format!("{scheme}:///{name}?socket={}", percent(&path.to_string_lossy()))
        }
        Address::Tcp(..) => format!("{}://{address}/{name}", if tls { "nbds" } else { "nbd" }),
    }
}

/// Where an NVMe host finds a disk.
pub(super) fn nvme_uri(address: &Address, subsystem: &str, nsid: u32) -> String {
    format!("nvme://{address}/{}?nsid={nsid}", percent(subsystem))
}

/// Where an iSCSI initiator finds a disk, as QEMU and libiscsi write it.
pub(super) fn iscsi_uri(address: &Address, target: &str, lun: u32) -> String {
    format!("iscsi://{address}/{target}/{lun}")
}

/// Percent-encodes all but the characters that a path or a query may hold.
fn percent(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/:@".contains(&byte) {
            out.push(byte.into());
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_serve::metrics::label;

    #[test]
    fn uris_can_be_given_to_clients() {
        let unix = Address::Unix("/run/a b.sock".into());
        assert_eq!(uri(&unix, "d&x", false), "nbd+unix:///d%26x?socket=/run/a%20b.sock");
        assert_eq!(uri(&Address::Tcp("::1".into(), 7), "disk", true), "nbds://[::1]:7/disk");
        assert_eq!(label("a\"b\\"), "a\\\"b\\\\");
    }
}
