//! The options of `serve`, on a command line or in a file (`config.rs`).

use super::{log, machine::MachineWord, word::DiskWord};
use crate::{
    limits,
    options::{self, SnapshotArgs},
};
use clap::Args;
use diskwright_serve::{
    iscsi,
    net::{Address, ServerOptions, exports},
    nvme,
    vhost_user::QUEUES_MAX,
};
use diskwright_store::RateLimits;
use ipnet::IpNet;
use std::{net::IpAddr, path::PathBuf};

/// The ids of all other options of `serve`: with a file they are in it.
pub const IN_FILE: [&str; 29] = [
    "disks",
    "nbd",
    "nvme",
    "nvme_subsystem",
    "iscsi",
    "iscsi_target",
    "reservations",
    "secrets",
    "vhost_user",
    "vhost_queues",
    "read_only",
    "snapshot",
    "ephemeral",
    "ephemeral_dir",
    "description",
    "tls_certificates",
    "tls_any_client",
    "tls_on_unix",
    "allow",
    "insecure_writes",
    "connections",
    "requests",
    "limit",
    "client_limit",
    "threads",
    "metrics",
    "log_format",
    "log_level",
    "progress",
];

/// Virtqueues unless the user gives another number. QEMU refuses a device with fewer than its
/// machine has processors, and one that is not used costs a thread that sleeps.
pub const VHOST_QUEUES: u16 = 8;

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(group(clap::ArgGroup::new("reserving").args(["nvme", "iscsi"]).multiple(true)))]
#[command(after_help = "\
An ADDRESS is the path of a unix socket (with a slash, or unix:PATH), PORT (on 127.0.0.1), or HOST:PORT; [::1]:PORT for IPv6. Without --nbd the \
sockets that systemd hands over (LISTEN_FDS) are used, or else a unix socket in the run-time folder, whose path is printed. Only the owner can \
connect to a unix socket.

--vhost-user makes a disk the disk of a virtual machine, with NAME= before the socket if several disks are served. The machine's memory must be shared with the server, as a memfd: for QEMU -object \
memory-backend-memfd,id=m,size=1G,share=on -machine memory-backend=m -chardev socket,id=d,path=SOCKET,reconnect=1 -device vhost-user-blk-pci,chardev=d. \
--nbd then is served only if it is given too.

--nvme ADDRESS (PORT or HOST[:PORT], usually 4420) serves the disks by NVMe/TCP, and --nbd only if it is given too. A host finds them with nvme discover, and attaches them with nvme connect-all -t tcp -a HOST. The first disk is namespace 1. The name of the subsystem is printed, and --nvme-subsystem sets it. NVMe/TCP here has no TLS, so writable disks need --secrets or --insecure-writes; --allow limits who may connect.

--iscsi ADDRESS (PORT or HOST[:PORT], usually 3260) serves the disks by iSCSI in the same way: as the logical units of one target, the first one with number 0. --iscsi-target sets the target's name. Linux attaches the disks with iscsiadm -m discovery -t sendtargets -p HOST and iscsiadm -m node --login, Windows with the iSCSI initiator.

NVMe hosts and iSCSI initiators may reserve the disks, as clusters do. NBD clients and virtual machines are refused what is reserved. Reservations that shall survive a restart need --reservations DIR.

--secrets: NVMe hosts and iSCSI initiators must prove who they are. The file has a [[client]] table with name and secret for each, and may have a [server] table for clients that ask the server for a proof. A host's name is its NQN, and its secret a key of nvme gen-dhchap-key (DH-HMAC-CHAP without a Diffie-Hellman group); an initiator has any name, and a secret of 12 bytes or more (CHAP). SIGHUP reads the file again, for clients that connect afterwards.

A disk is exported under NAME, or the name of its file; a client that asks for no name gets the only one. A FILE with = in its name is written \
with a folder before it: ./a=b.vhdx. FORMAT (raw, vhd, vhdx, qcow2, vdi, vmdk) is the format of one disk, --format that of all others. A writable disk needs it if \
its extension names no format (.img) and its contents look like an image.

TLS: the folder holds ca-cert.pem, server-cert.pem and server-key.pem, as for qemu and libnbd. With it, clients on TCP must use TLS and show a \
certificate that the CA vouches for. SIGHUP reads the folder again.

serve-ctl reaches disks that are served for writing: statistics, limit, resize, snapshot, merge, compact, move, further disks (add, remove) and sockets for machines (open-door), and their end (drain).

LIMITS are iops (requests per second) and bytes (of reads and writes per second). After a pause a tenth of a second's may start at once, or iops-burst=N and bytes-burst=SIZE. \
The requests above wait; flushes never do. serve-ctl changes the limits of a disk.

A FILE.toml has the options as keys, and a table for each disk: file, and name, format, limit and read-only if needed. Paths are relative to the working directory. \
SIGHUP reads it again: limits are replaced; what else has changed needs a restart, and the log says what.

  nbd = [\"10809\"]
  tls-certificates = \"/etc/pki/diskwright\"
  [[disk]]
  name = \"db\"
  file = \"/disks/db.vhdx\"
  limit = \"iops=500,bytes=20M\"

SIGTERM or Ctrl-C: requests in flight are finished, everything is flushed, and the exit code is 0. A second signal ends the server at once (130).

EXAMPLES
  diskwright serve disk.vhdx --nbd /tmp/disk.sock
  nbdinfo 'nbd+unix:///?socket=/tmp/disk.sock'
  diskwright serve golden.vhdx --ephemeral --nbd /tmp/golden.sock
  diskwright serve db=db.vhdx log=log.vhd --nbd 0.0.0.0:10809 \\
      --tls-certificates /etc/pki/diskwright --allow 10.0.0.0/8
  diskwright serve db=guest.img,format=raw log.vhdx --nbd /tmp/d.sock
  diskwright serve disk.raw --read-only --nbd /tmp/d.sock --metrics 9100 \\
      --progress
  diskwright serve a.vhdx b.vhdx --nbd /tmp/d.sock --limit iops=2000
  diskwright serve machine.vhdx --vhost-user /run/machine.sock
  diskwright serve os=os.vhdx db=db.vhdx --vhost-user os=/run/os.sock \\
      --vhost-user db=/run/db.sock --nbd /run/nbd.sock
  diskwright serve db.vhdx --nvme 10.0.0.5 --allow 10.0.0.0/24 --insecure-writes
  diskwright serve db.vhdx --iscsi 10.0.0.5 \\
      --iscsi-target iqn.2026-11.org.example:db --secrets /etc/secrets.toml
  diskwright serve --config /etc/diskwright/serve.toml")]
pub struct ServeArgs {
    /// The disks: each may have a name before it and its format behind it.
    #[arg(value_name = "[NAME=]FILE[,format=FORMAT]", required_unless_present = "config", value_parser = DiskWord::parse)]
    pub(super) disks: Vec<DiskWord>,
    /// Take the disks and all options of serve from this file.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = IN_FILE)]
    pub(super) config: Option<PathBuf>,
    /// Listen at this address (may be repeated).
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub(super) nbd: Vec<Address>,
    /// Serve by NVMe/TCP at this address (may be repeated): the disks are namespaces of one
    /// subsystem.
    #[arg(long, value_name = "ADDRESS", value_parser = nvme_address)]
    pub(super) nvme: Vec<Address>,
    /// Name of the NVMe subsystem. [default: one of this machine and the address]
    #[arg(long, value_name = "NQN", requires = "nvme", value_parser = nqn)]
    pub(super) nvme_subsystem: Option<String>,
    /// Serve by iSCSI at this address (may be repeated): the disks are logical units of one target.
    #[arg(long, value_name = "ADDRESS", value_parser = iscsi_address)]
    pub(super) iscsi: Vec<Address>,
    /// Name of the iSCSI target. [default: one of this machine and the address]
    #[arg(long, value_name = "IQN", requires = "iscsi", value_parser = iqn)]
    pub(super) iscsi_target: Option<String>,
    /// Keep persistent reservations in DIR, so that they last longer than the server.
    #[arg(long, value_name = "DIR", requires = "reserving")]
    pub(super) reservations: Option<PathBuf>,
    /// Ask NVMe hosts and iSCSI initiators for a name and secret of this file.
    #[arg(long, value_name = "FILE.toml")]
    pub(super) secrets: Option<PathBuf>,
    /// Be the disk of a virtual machine (vhost-user-blk) at this unix socket (may be repeated).
    #[arg(long, value_name = "[NAME=]SOCKET", value_parser = MachineWord::parse)]
    pub(super) vhost_user: Vec<MachineWord>,
    /// Virtqueues that each machine may use, each with a thread.
    #[arg(long, value_name = "N", requires = "vhost_user", default_value_t = VHOST_QUEUES, value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
    pub(super) vhost_queues: u16,
    /// Refuse writes.
    #[arg(long, short)]
    pub(super) read_only: bool,
    #[command(flatten)]
    pub(super) of: SnapshotArgs,
    /// Take writes, but drop them at the end: the disks themselves are opened read-only.
    #[arg(long, conflicts_with = "read_only")]
    pub(super) ephemeral: bool,
    /// Keep the writes of --ephemeral in DIR. [default: $TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIR", requires = "ephemeral")]
    pub(super) ephemeral_dir: Option<PathBuf>,
    /// Description of the disks for clients (4096 bytes at most).
    #[arg(long, value_name = "TEXT", value_parser = description)]
    pub(super) description: Option<String>,
    /// Use TLS, with the certificates in DIR.
    #[arg(long, value_name = "DIR")]
    pub(super) tls_certificates: Option<PathBuf>,
    /// Accept clients without a certificate.
    #[arg(long, requires = "tls_certificates")]
    pub(super) tls_any_client: bool,
    /// Require TLS on unix sockets too.
    #[arg(long, requires = "tls_certificates")]
    pub(super) tls_on_unix: bool,
    /// Accept TCP clients from NETWORK only (may be repeated): 192.168.1.0/24, or one address.
    #[arg(long, value_name = "NETWORK", value_parser = network)]
    pub(super) allow: Vec<IpNet>,
    /// Serve writable disks on TCP without TLS, and by NVMe/TCP and iSCSI.
    #[arg(long)]
    pub(super) insecure_writes: bool,
    /// Maximum number of connections at a time.
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().connections_max, value_parser = options::at_least_one)]
    pub(super) connections: usize,
    /// Maximum number of requests in flight for each connection.
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().requests_max, value_parser = clap::value_parser!(u32).range(1..=4096))]
    pub(super) requests: u32,
    /// Serve each disk no faster than this.
    #[arg(long, value_name = limits::VALUE_NAME, value_parser = limits::parse)]
    pub(super) limit: Option<RateLimits>,
    /// Serve each connection no faster than this.
    #[arg(long, value_name = limits::VALUE_NAME, value_parser = limits::parse)]
    pub(super) client_limit: Option<RateLimits>,
    /// Threads that serve. [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub(super) threads: Option<u16>,
    /// Serve metrics for Prometheus at this address, under /metrics.
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    pub(super) metrics: Option<Address>,
    /// Format of the log.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = log::Format::Text)]
    pub(super) log_format: log::Format,
    /// Lowest level that is logged. [default: info; warn with --quiet]
    #[arg(long, value_enum, value_name = "LEVEL")]
    pub(super) log_level: Option<log::Level>,
    /// Show connections, rates and latencies in one line that is updated.
    #[arg(long)]
    pub(super) progress: bool,
}

fn address(text: &str) -> Result<Address, String> {
    Address::parse(text).map_err(|error| error.to_string())
}

impl ServeArgs {
    /// Whether disks are served by other ways than NBD.
    pub(super) fn has_other_doors(&self) -> bool {
        !(self.vhost_user.is_empty() && self.nvme.is_empty() && self.iscsi.is_empty())
    }
}

fn nvme_address(text: &str) -> Result<Address, String> {
    tcp_address(text, nvme::DEFAULT_PORT, "NVMe/TCP")
}

fn iscsi_address(text: &str) -> Result<Address, String> {
    tcp_address(text, iscsi::DEFAULT_PORT, "iSCSI")
}

fn tcp_address(text: &str, usual_port: u16, protocol: &str) -> Result<Address, String> {
    match Address::parse_with(text, usual_port).map_err(|error| error.to_string())? {
        Address::Unix(_) => Err(format!("{protocol} needs PORT or HOST:PORT; its clients do not use unix sockets")),
        tcp => Ok(tcp),
    }
}

fn iqn(text: &str) -> Result<String, String> {
    iscsi::check_target(text)
        .map(|()| text.to_owned())
        .map_err(|reason| format!("{text:?} is not an iSCSI name: {reason}"))
}

fn nqn(text: &str) -> Result<String, String> {
    nvme::check_nqn(text).map(|()| text.to_owned()).map_err(|reason| format!("{text:?} is not an NQN: {reason}"))
}

fn description(text: &str) -> Result<String, String> {
    exports::check_description(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

fn network(text: &str) -> Result<IpNet, String> {
    let one = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse::<IpNet>().or_else(|_| one()).map_err(|_| "write for example 192.168.1.0/24 or ::1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_protocol_cannot_carry_is_wrong_usage() {
        let (longest, longer) = ("a".repeat(4096), "a".repeat(4097));
        assert_eq!(description(&longest), Ok(longest.clone()));
        let error = description(&longer).unwrap_err();
        assert!(error.contains("at most 4096 bytes"), "{error}");
    }

    #[test]
    fn networks_and_single_addresses_are_read() {
        assert_eq!(network("10.0.0.0/8").unwrap().to_string(), "10.0.0.0/8");
        assert_eq!(network("::1").unwrap().to_string(), "::1/128");
        assert!(network("10.0.0.0/33").is_err() && network("host").is_err());
    }
}
