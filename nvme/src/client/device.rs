//! A namespace as a block device: found, described once, and a queue for each thread.
//!
//! The admin connection stays open as long as the device, because the controller ends with it.
//! Keep-alive is switched off: a target whose host has gone notices by TCP.

use super::{
    ClientError, Result,
    connect::connect,
    host::HostName,
    limits::{Ids, Limits},
    queue::{self, IoQueue},
    session::Session,
};
use crate::{
    uri::NvmeUri,
    wire::{
        Command, DISCOVERY_NQN, PAGE_BYTES, Sgl, admin,
        command::feature,
        fabrics::{self, ANY_CONTROLLER, property},
        identify, log,
    },
};
use diskwright_store::{BlockDevice, BlockQueue, Endpoint, Geometry, QueueOptions, remote::RemoteQueue};
use std::{io, sync::Mutex};

/// Entries of an admin queue.
const ADMIN_ENTRIES: u32 = 32;

/// The most entries of an I/O queue that are used.
const ENTRIES_MAX: u16 = 128;

/// The longest data of one command, even if the target allows more.
const TRANSFER_BYTES_MAX: u64 = 1 << 20;

/// I/O queues that are asked for.
const QUEUES_MAX: u16 = 64;

/// Length of the discovery log that is read.
const DISCOVERY_BYTES: usize = 64 << 10;

/// What the target tells of the namespace and its controller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamespaceInfo {
    /// NQN of the subsystem.
    pub subsystem: String,
    /// The namespace.
    pub nsid: u32,
    /// The controller's model and serial number.
    pub model: String,
    /// The same.
    pub serial: String,
    /// Whether the target refuses writes.
    pub is_read_only: bool,
    /// The globally unique id of the namespace, if it has one.
    pub guid: [u8; 16],
    /// I/O queues that the target grants.
    pub queues: u16,
    /// Entries of a queue that are used.
    pub entries: u16,
    /// The longest data of a command in bytes.
    pub transfer_bytes: u64,
    /// The longest data in a capsule in bytes.
    pub capsule_bytes: u64,
}

/// A namespace of an NVMe/TCP target.
#[derive(Debug)]
pub struct NvmeDevice {
    uri: NvmeUri,
    endpoint: Endpoint,
    host: HostName,
    controller: u16,
    info: NamespaceInfo,
    geometry: Geometry,
    limits: Limits,
    ids: Ids,
    /// Keeps the controller.
    _admin: Mutex<Session>,
}

impl NvmeDevice {
    /// Connects to the namespace. Unless `writable`, the device refuses writes even if the target
    /// allows them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Unusable`] if `writable` and the namespace is read-only.
    pub fn open(uri: &NvmeUri, writable: bool) -> Result<Self> {
        let host = HostName::of(uri)?;
        let (endpoint, subsystem) = match &uri.subsystem {
            Some(subsystem) => (uri.endpoint.clone(), subsystem.clone()),
            None => discover(uri, &host)?,
        };
        let mut admin = Session::open(&endpoint, uri.digests)?;
        let controller = connect(&mut admin, 0, ADMIN_ENTRIES, &subsystem, ANY_CONTROLLER, &host)?;
        admin.enable()?;
        let described = identify::Controller::decode(&*identified(&mut admin, identify::CONTROLLER, 0)?);
        let capabilities = admin.property(
            "read the controller's capabilities",
            fabrics::PROPERTY_GET,
            property::CAPABILITIES,
            0,
            true,
        )?;
        let queues = queues_granted(&mut admin)?;
        let nsid = chosen(uri, &mut admin)?;
        let namespace = identify::Namespace::decode(&*identified(&mut admin, identify::NAMESPACE, nsid)?);
        let peer = endpoint.to_string();
        let geometry = geometry_of(&namespace, writable).map_err(|what| ClientError::Unusable {
            peer: peer.clone(),
            nsid,
            what,
        })?;
        let most_entries = (capabilities as u16).saturating_add(1);
        let commands = if described.queue_entries == 0 { u16::MAX } else { described.queue_entries };
        let transfer_bytes = match described.transfer_exponent {
            0 => TRANSFER_BYTES_MAX,
            exponent => (4096_u64 << exponent.min(16)).min(TRANSFER_BYTES_MAX),
        };
        let limits = Limits {
            entries: ENTRIES_MAX.min(most_entries).min(commands).max(2),
            transfer_bytes: transfer_bytes.max(geometry.logical_sector_bytes.into()),
            capsule_bytes: (u64::from(described.capsule_units) * 16).saturating_sub(Command::BYTES as u64),
            has_write_zeroes: described.optional_commands & 1 << 3 != 0,
            zeroes_deallocate: namespace.deallocates_to_zeros,
        };
        let info = NamespaceInfo {
            subsystem,
            nsid,
            model: described.model,
            serial: described.serial,
            is_read_only: namespace.is_read_only,
            guid: namespace.guid,
            queues,
            entries: limits.entries,
            transfer_bytes: limits.transfer_bytes,
            capsule_bytes: limits.capsule_bytes,
        };
        let ids = Ids::up_to(queues);
        let uri = uri.clone();
        Ok(Self { uri, endpoint, host, controller, info, geometry, limits, ids, _admin: Mutex::new(admin) })
    }

    /// The URI with which the device was opened.
    pub fn uri(&self) -> &NvmeUri {
        &self.uri
    }

    /// Where the target listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// What the target tells of the namespace.
    pub fn info(&self) -> &NamespaceInfo {
        &self.info
    }

    fn queue(&self, depth: usize) -> Result<RemoteQueue<IoQueue>> {
        let Some(id) = self.ids.take() else {
            let what = format!("all {} I/O queues that it grants are in use", self.info.queues);
            return Err(ClientError::Unknown { peer: self.endpoint.to_string(), what });
        };
        let mut session = Session::open(&self.endpoint, self.uri.digests)?;
        let entries = self.limits.entries.into();
        connect(&mut session, id.number(), entries, &self.info.subsystem, self.controller, &self.host)?;
        Ok(queue::queue(session, self.geometry, self.limits, self.info.nsid, depth, id))
    }
}

impl BlockDevice for NvmeDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// A queue polls its own socket, so it cannot share a ring.
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        if options.ring.is_some() {
            let what = "an NVMe namespace cannot share a ring with other disks; open its queue without one";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        Ok(Box::new(self.queue(options.depth.max(1))?))
    }
}

fn geometry_of(namespace: &identify::Namespace, writable: bool) -> Result<Geometry, String> {
    if namespace.blocks == 0 {
        return Err("the subsystem has no such namespace, or it is empty".into());
    }
    if !(9..=16).contains(&namespace.block_exponent) {
        return Err(format!("its blocks have 2^{} bytes", namespace.block_exponent));
    }
    if namespace.metadata_bytes != 0 {
        return Err(format!("its blocks have {} bytes of metadata", namespace.metadata_bytes));
    }
    if writable && namespace.is_read_only {
        return Err("it is read-only, but write access is needed".into());
    }
    let logical_sector_bytes = 1_u32 << namespace.block_exponent;
    let size_bytes =
        namespace.blocks.checked_mul(logical_sector_bytes.into()).filter(|&bytes| bytes <= i64::MAX as u64);
    let preferred_bytes = (u64::from(namespace.preferred_blocks) + 1) * u64::from(logical_sector_bytes);
    Ok(Geometry {
        size_bytes: size_bytes.ok_or("it is larger than the maximum of 2^63-1 bytes")?,
        logical_sector_bytes,
        physical_sector_bytes: (preferred_bytes.min(4096) as u32).max(logical_sector_bytes),
        read_only: namespace.is_read_only || !writable,
    })
}

/// A command whose data come in PDUs.
fn asking(opcode: u8, nsid: u32, cdw: [u32; 6], len_bytes: usize) -> Command {
    let sgl = Sgl { address: 0, len_bytes: len_bytes as u32, kind: Sgl::TRANSPORT };
    Command { opcode, flags: Command::SGL_FLAGS, cid: 0, nsid, sgl, cdw }
}

fn identified(admin: &mut Session, cns: u8, nsid: u32) -> Result<Box<[u8; PAGE_BYTES]>> {
    let doing = match cns {
        identify::CONTROLLER => "identify the controller",
        identify::ACTIVE_NAMESPACES => "list the namespaces",
        _ => "identify the namespace",
    };
    let (_, page) = admin.ask(doing, asking(admin::IDENTIFY, nsid, [cns.into(), 0, 0, 0, 0, 0], PAGE_BYTES), &[])?;
    page.into_boxed_slice().try_into().map_err(|page: Box<[u8]>| {
        let what = format!("it sent {} bytes of identify data, expected {PAGE_BYTES}", page.len());
        admin.connection.violation(what).into()
    })
}

fn queues_granted(admin: &mut Session) -> Result<u16> {
    let wanted = u32::from(QUEUES_MAX - 1);
    let cdw = [feature::QUEUES.into(), wanted | wanted << 16, 0, 0, 0, 0];
    let (done, _) = admin.ask("grant I/O queues", asking(admin::SET_FEATURES, 0, cdw, 0), &[])?;
    let (submission, completion) = (done.result as u16, (done.result >> 16) as u16);
    Ok(submission.min(completion).saturating_add(1).min(QUEUES_MAX))
}

/// The namespace of the URI, or the only one.
fn chosen(uri: &NvmeUri, admin: &mut Session) -> Result<u32> {
    let list = identified(admin, identify::ACTIVE_NAMESPACES, 0)?;
    let ids: Vec<u32> = identify::listed_namespaces(&list).take(1024).collect();
    let told = |what: String| ClientError::Unknown { peer: admin.peer(), what };
    match (uri.nsid, &ids[..]) {
        (Some(nsid), _) if ids.contains(&nsid) => Ok(nsid),
        (Some(nsid), _) => Err(told(format!("the subsystem has no namespace {nsid}; it has {ids:?}"))),
        (None, [nsid]) => Ok(*nsid),
        (None, _) => Err(told(format!("the subsystem has the namespaces {ids:?}; choose one with ?nsid=N in the URI"))),
    }
}

/// The only subsystem that the target knows, and where it listens.
fn discover(uri: &NvmeUri, host: &HostName) -> Result<(Endpoint, String)> {
    let mut admin = Session::open(&uri.endpoint, uri.digests)?;
    connect(&mut admin, 0, ADMIN_ENTRIES, DISCOVERY_NQN, ANY_CONTROLLER, host)?;
    admin.enable()?;
    let dwords = (DISCOVERY_BYTES / 4 - 1) as u32;
    let cdw = [u32::from(log::DISCOVERY) | dwords << 16, dwords >> 16, 0, 0, 0, 0];
    let command = asking(admin::GET_LOG_PAGE, 0, cdw, DISCOVERY_BYTES);
    let (_, page) = admin.ask("read the discovery log", command, &[])?;
    let entries: Vec<_> = log::discovered(&page).into_iter().filter(|entry| !entry.is_discovery).collect();
    let mut names: Vec<&str> = entries.iter().map(|entry| entry.subsystem.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let [name] = names[..] else {
        let what = match names[..] {
            [] => "it knows no subsystem; give the NQN in the URI".to_owned(),
            _ => format!("it knows the subsystems {}; choose one: nvme://HOST/NQN", names.join(", ")),
        };
        return Err(ClientError::Unknown { peer: admin.peer(), what });
    };
    // A target behind address translation tells an address that is not the one to use.
    let is_here = |port: u16| matches!(&uri.endpoint, Endpoint::Tcp { port: ours, .. } if *ours == port);
    let elsewhere = entries.iter().all(|entry| !is_here(entry.address.port()));
    let endpoint = match entries.first().filter(|_| elsewhere) {
        Some(entry) => Endpoint::Tcp { host: entry.address.ip().to_string(), port: entry.address.port() },
        None => uri.endpoint.clone(),
    };
    Ok((endpoint, name.to_owned()))
}
