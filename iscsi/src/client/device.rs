//! A logical unit as a block device: found, described once, and a session for each queue.

use super::{
    ClientError, Result,
    login::{LoginAs, endpoint_of, log_in},
    queue::{self, UnitQueue},
    session::Session,
    unit::{Limits, Shared, UnitInfo, asked, capacity_of},
};
use crate::{
    scsi::{
        answers::{self, BlockLimits, Caching, Capacity, Standard},
        cdb, op,
    },
    uri::IscsiUri,
};
use diskwright_store::{BlockDevice, BlockQueue, Endpoint, Geometry, QueueOptions, remote::RemoteQueue};
use std::{io, sync::Arc};

/// The longest data of one command, even if the unit allows more.
const TRANSFER_BYTES_MAX: u64 = 1 << 20;

/// Blocks of one WRITE SAME if the unit tells no limit.
const SAME_BLOCKS_DEFAULT: u64 = 65535;

/// Room for an answer about the unit.
const ROOM_BYTES: u16 = 512;

/// Room for the list of units.
const LUNS_ROOM_BYTES: u32 = 8 << 10;

/// A logical unit of an iSCSI target.
#[derive(Debug)]
pub struct IscsiDevice {
    uri: IscsiUri,
    shared: Arc<Shared>,
}

impl IscsiDevice {
    /// Logs in to the target and asks what the unit is. Unless `writable`, the device refuses
    /// writes even if the unit allows them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Unusable`] if `writable` and the unit is read-only.
    pub fn open(uri: &IscsiUri, writable: bool) -> Result<Self> {
        let who = LoginAs::of(uri)?;
        let (endpoint, target) = match &uri.target {
            Some(target) => (uri.endpoint.clone(), target.clone()),
            None => discover(uri, &who)?,
        };
        let mut session = log_in(&endpoint, &who, Some(&target))?;
        let unit = chosen(uri, &mut session)?;
        let peer = session.peer();
        let unusable = |what: String| ClientError::Unusable { peer: peer.clone(), unit, what };
        session.make_ready(unit)?;
        let standard = Standard::decode(&asked(&mut session, unit, "identify the unit", cdb::inquiry(None, 96), 96)?);
        if !standard.is_there || standard.kind != 0 {
            return Err(unusable(format!("it is no disk, but a device of type {:#04x}", standard.kind)));
        }
        let capacity = capacity_of(&mut session, unit)?;
        let caching = asked(&mut session, unit, "tell its caching", cdb::mode_sense(Caching::PAGE, 192), 192)
            .or_else(|_| asked(&mut session, unit, "tell its mode", cdb::mode_sense(0x3f, 192), 192));
        let caching = Caching::decode(&caching.unwrap_or_default());
        let pages = page(&mut session, unit, 0)?;
        let mut page_if_there = |number: u8| match answers::pages(&pages).contains(&number) {
            true => page(&mut session, unit, number),
            false => Ok(Vec::new()),
        };
        let serial = answers::serial(&page_if_there(0x80)?);
        let told = BlockLimits::decode(&page_if_there(0xb0)?);
        let may_unmap = answers::same_unmaps(&page_if_there(0xb2)?);
        let says = session.ask("tell its commands", unit, cdb::is_supported(op::WRITE_SAME_16, 64), 64)?;
        let says = says.ok().and_then(|data| answers::says_supported(&data));
        session.log_out();
        let geometry = geometry_of(&capacity, caching.is_write_protected, writable).map_err(&unusable)?;
        let block_bytes = u64::from(geometry.logical_sector_bytes);
        let of_blocks = |blocks: u64, default: u64| if blocks == 0 { default } else { blocks };
        let transfer_bytes = of_blocks(u64::from(told.transfer_blocks) * block_bytes, TRANSFER_BYTES_MAX);
        let limits = Limits {
            transfer_bytes: transfer_bytes.min(TRANSFER_BYTES_MAX),
            has_fua: caching.has_fua,
            has_write_cache: caching.has_write_cache,
            has_write_same: says.unwrap_or(may_unmap || told.same_blocks > 0),
            same_blocks: of_blocks(told.same_blocks, SAME_BLOCKS_DEFAULT),
            unmaps_to_zeros: may_unmap && capacity.unmapped_are_zero,
        };
        let info = UnitInfo {
            target,
            unit,
            vendor: standard.vendor,
            product: standard.product,
            revision: standard.revision,
            serial,
            is_read_only: caching.is_write_protected,
            has_write_cache: caching.has_write_cache,
            transfer_bytes: limits.transfer_bytes,
        };
        Ok(Self { uri: uri.clone(), shared: Arc::new(Shared { endpoint, who, info, geometry, limits }) })
    }

    /// The URI with which the device was opened.
    pub fn uri(&self) -> &IscsiUri {
        &self.uri
    }

    /// Where the target listens.
    pub fn endpoint(&self) -> &Endpoint {
        &self.shared.endpoint
    }

    /// What the target tells of the unit.
    pub fn info(&self) -> &UnitInfo {
        &self.shared.info
    }

    fn queue(&self, depth: usize) -> Result<RemoteQueue<UnitQueue>> {
        Ok(queue::queue(&self.shared, self.shared.session()?, depth))
    }
}

impl BlockDevice for IscsiDevice {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    /// A queue polls its own socket, so it cannot share a ring.
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        if options.ring.is_some() {
            let what = "an iSCSI disk cannot share a ring with other disks; open its queue without one";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        Ok(Box::new(self.queue(options.depth.max(1))?))
    }
}

/// A page of vital product data; empty if the unit refuses it.
fn page(session: &mut Session, unit: u16, number: u8) -> Result<Vec<u8>> {
    let answer = session.ask("describe itself", unit, cdb::inquiry(Some(number), ROOM_BYTES), ROOM_BYTES.into())?;
    Ok(answer.unwrap_or_default())
}

fn geometry_of(capacity: &Capacity, is_read_only: bool, writable: bool) -> Result<Geometry, String> {
    let Capacity { last_block, block_bytes, .. } = *capacity;
    if !block_bytes.is_power_of_two() || !(512..=65536).contains(&block_bytes) {
        return Err(format!("its blocks have {block_bytes} bytes; 512 to 65536 are supported, powers of 2"));
    }
    if writable && is_read_only {
        return Err("it is read-only, but write access is needed".into());
    }
    let size_bytes = last_block.checked_add(1).and_then(|blocks| blocks.checked_mul(block_bytes.into()));
    let size_bytes = size_bytes.filter(|&bytes| bytes <= i64::MAX as u64);
    let physical_bytes = u64::from(block_bytes) << capacity.physical_exponent;
    Ok(Geometry {
        size_bytes: size_bytes.ok_or("it is larger than the maximum of 2^63-1 bytes")?,
        logical_sector_bytes: block_bytes,
        physical_sector_bytes: (physical_bytes.min(4096) as u32).max(block_bytes),
        read_only: is_read_only || !writable,
    })
}

/// The logical unit of the URI, or the only one.
fn chosen(uri: &IscsiUri, session: &mut Session) -> Result<u16> {
    let cdb = cdb::report_luns(LUNS_ROOM_BYTES);
    let units = answers::units(&asked(session, 0, "list its logical units", cdb, LUNS_ROOM_BYTES)?);
    let told = |what: String| ClientError::Unknown { peer: session.peer(), what };
    match (uri.unit, &units[..]) {
        (Some(unit), _) if units.contains(&unit) => Ok(unit),
        (Some(unit), _) => Err(told(format!("the target has no logical unit {unit}; it has {units:?}"))),
        (None, [unit]) => Ok(*unit),
        (None, _) => {
            Err(told(format!("the target has the logical units {units:?}; choose one: iscsi://HOST/TARGET/LUN")))
        }
    }
}

/// The only target that the server knows, and where it listens.
fn discover(uri: &IscsiUri, who: &LoginAs) -> Result<(Endpoint, String)> {
    let mut session = log_in(&uri.endpoint, who, None)?;
    let pairs = session.text("list the targets", "SendTargets", "All")?;
    let peer = session.peer();
    session.log_out();
    let unknown = |what: String| ClientError::Unknown { peer: peer.clone(), what };
    let names: Vec<&str> = pairs.iter().filter(|(name, _)| name == "TargetName").map(|(_, name)| &**name).collect();
    let [name] = names[..] else {
        return Err(unknown(match names[..] {
            [] => "it knows no target; give the name in the URI: iscsi://HOST/TARGET/LUN".to_owned(),
            _ => format!("it knows the targets {}; choose one: iscsi://HOST/TARGET/LUN", names.join(", ")),
        }));
    };
    let addresses = pairs.iter().filter(|(name, _)| name == "TargetAddress").map(|(_, address)| endpoint_of(address));
    let endpoints: Vec<Endpoint> = addresses.flatten().collect();
    // A target behind address translation tells an address that is not the one to use.
    let port_of = |endpoint: &Endpoint| match endpoint {
        Endpoint::Tcp { port, .. } => Some(*port),
        Endpoint::Unix(_) => None,
    };
    let ours = port_of(&uri.endpoint);
    let is_here = ours.is_none() || endpoints.iter().any(|endpoint| port_of(endpoint) == ours);
    let elsewhere = endpoints.into_iter().next().filter(|_| !is_here);
    Ok((elsewhere.unwrap_or_else(|| uri.endpoint.clone()), name.to_owned()))
}
