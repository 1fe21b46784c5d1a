//! What host and guest tell each other: one JSON document a line.

use crate::network::NetworkSpec;
use diskwright_load::{figures::Figures, job::Job, machine::Machine, run::SnapshotRecord};
use serde::{Deserialize, Serialize};
use std::net::SocketAddrV4;

/// Name of the virtio-serial port.
pub(super) const PORT: &str = "diskwright.lab";

/// A disk, as the guest reaches it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GuestDisk {
    /// The virtual machine's device with this serial number.
    Serial(String),
    /// A dm-cache of the policy smq, in the mode writeback, on three devices with these serial
    /// numbers. The device of the metadata begins with zeros if the cache is new.
    Cached {
        /// Device of the metadata.
        metadata: String,
        /// The fast device.
        fast: String,
        /// The slow device, whose size the disk has.
        slow: String,
        /// Size of a block of the cache in bytes.
        block_bytes: u64,
    },
    /// The first namespace of an NVMe/TCP subsystem, by the kernel's host.
    Nvme {
        /// Address, as seen by the guest.
        server: SocketAddrV4,
        /// NQN of the subsystem.
        subsystem: String,
    },
    /// LUN 0 of an iSCSI target, by the kernel's initiator.
    Iscsi {
        /// Address, as seen by the guest.
        server: SocketAddrV4,
        /// IQN of the target.
        target: String,
    },
    /// A file of an SMB share, by the kernel's client.
    Smb {
        /// Address, as seen by the guest.
        server: SocketAddrV4,
        /// Name of the share.
        share: String,
        /// Name of the file in it.
        file: String,
        /// Name of the user.
        user: String,
        /// Password of the user.
        password: String,
    },
}

/// From host to guest.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum ToGuest {
    /// Give the network card this address, and delay and limit what it sends.
    Network { address: String, emulated: Option<NetworkSpec> },
    /// Measure a job of one phase on this disk.
    Run { disk: GuestDisk, job: Box<Job> },
    /// Power off.
    End,
}

/// From guest to host.
#[derive(Debug, Serialize, Deserialize)]
pub(super) enum FromGuest {
    /// The guest can measure.
    Ready(Machine),
    /// The network card has its address.
    Networked,
    /// The figures of a job that is measured.
    Progress(SnapshotRecord),
    /// The result of a job.
    Ran(Box<Ran>),
    /// Requests of a job failed.
    Void { first: String, errors: u64 },
    /// A sentence why a job could not be measured, or why the guest cannot measure.
    Failed(String),
}

/// A job that was measured in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Ran {
    /// The figures of the window.
    pub figures: Figures,
    /// Requests that the generator made, warm-up included.
    pub requests: u64,
    /// Bytes of these requests.
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::job::{Load, Span};

    #[test]
    fn a_job_is_the_same_on_the_other_side() {
        let load = Load { queue_depth: 32, read_percent: 70.0, ..Load::default() };
        let mut job = Job::simple("x", load, Span::from_millis(70), Span::from_millis(500));
        job.seed = u64::MAX;
        let asked = GuestDisk::Iscsi { server: "10.0.2.2:3260".parse().unwrap(), target: "iqn.a:b".into() };
        let line = serde_json::to_string(&ToGuest::Run { disk: asked.clone(), job: Box::new(job.clone()) }).unwrap();
        let ToGuest::Run { disk, job: read } = serde_json::from_str(&line).unwrap() else { panic!("{line}") };
        assert_eq!((disk, *read), (asked, job));
    }
}
