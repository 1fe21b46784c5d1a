//! An export as a block device.
//!
//! *Connections.* The first connection is made when the device is opened. If the server announces
//! `CAN_MULTI_CONN`, each queue gets a connection of its own, up to the number in the URI; further
//! queues share. Otherwise all queues share one. It is not an error if the server refuses a further
//! connection.
//!
//! *Sizes.* The sector size is the server's minimum block size, but at least 512 bytes. If an
//! export ends within a sector, the device shows the whole sector: bytes beyond the end read as
//! zeros, and only zeros can be written there.

use super::{
    ClientError, Result,
    lane::Lane,
    lost::Answered,
    negotiate::{self, ExportInfo},
    queue::NbdQueue,
    status,
    tables::{Memory, Slot, SlotWork, StatusFound},
};
use crate::{
    uri::NbdUri,
    wire::{BlockSizes, TransmissionFlags},
};
use diskwright_store::{BlockDevice, BlockQueue, Extent, ExtentKind, Geometry, QueueOptions};
use std::{
    io,
    sync::{Arc, Mutex, MutexGuard},
};

/// Maximum physical sector size: what image formats can report to their guests.
const PHYSICAL_MAX: u32 = 4096;

/// An export of an NBD server.
#[derive(Debug)]
pub struct NbdDevice {
    uri: NbdUri,
    export: ExportInfo,
    geometry: Geometry,
    answered: Arc<Answered>,
    lanes: Mutex<Lanes>,
}

#[derive(Debug)]
struct Lanes {
    open: Vec<Arc<Lane>>,
    most: usize,
}

impl NbdDevice {
    /// Connects to the export. Unless `writable`, the device refuses writes even if the server
    /// allows them.
    ///
    /// # Errors
    /// [`ClientError`]; [`ClientError::Unusable`] if `writable` and the export is read-only.
    pub fn open(uri: &NbdUri, writable: bool) -> Result<Self> {
        let (transport, mut export) = negotiate::connect(uri)?;
        let unusable =
            |what: String| ClientError::Unusable { peer: uri.endpoint.to_string(), name: uri.export.clone(), what };
        export.block_sizes = export.block_sizes.check().map_err(|error| unusable(error.to_string()))?;
        let read_only = export.flags.contains(TransmissionFlags::READ_ONLY);
        if writable && read_only {
            return Err(unusable("it is read-only, but write access is needed".into()));
        }
        let BlockSizes { minimum, preferred, .. } = export.block_sizes;
        let sector_bytes = minimum.max(512);
        if !export.size_bytes.is_multiple_of(u64::from(minimum)) {
            return Err(unusable(format!(
                "its size of {} bytes is not a multiple of its minimum block size of {minimum}",
                export.size_bytes
            )));
        }
        let size_bytes = export
            .size_bytes
            .checked_next_multiple_of(u64::from(sector_bytes))
            .filter(|&size_bytes| size_bytes <= i64::MAX as u64)
            .ok_or_else(|| {
                unusable(format!("its size of {} bytes is larger than the maximum of 2^63-1", export.size_bytes))
            })?;
        let geometry = Geometry {
            size_bytes,
            logical_sector_bytes: sector_bytes,
            physical_sector_bytes: preferred.min(PHYSICAL_MAX).max(sector_bytes),
            read_only: read_only || !writable,
        };
        let most = if export.flags.contains(TransmissionFlags::CAN_MULTI_CONN) {
            uri.connections.unwrap_or(NbdUri::CONNECTIONS_DEFAULT)
        } else {
            1
        };
        let answered = Arc::new(Answered::by(export.server_id.clone()));
        let lane = Self::lane(uri, transport, export.clone(), Arc::clone(&answered))?;
        let lanes = Mutex::new(Lanes { open: vec![lane], most });
        Ok(Self { uri: uri.clone(), export, geometry, answered, lanes })
    }

    fn lane(
        uri: &NbdUri,
        transport: super::transport::Transport,
        export: ExportInfo,
        answered: Arc<Answered>,
    ) -> Result<Arc<Lane>> {
        let lane = Lane::new(uri.clone(), transport, export, answered);
        lane.map(Arc::new).map_err(|source| negotiate::lost(&uri.endpoint.to_string(), "connecting", source))
    }

    /// The URI with which the device was opened.
    pub fn uri(&self) -> &NbdUri {
        &self.uri
    }

    /// Information from the server about the export.
    pub fn export(&self) -> &ExportInfo {
        &self.export
    }

    /// Number of open connections.
    pub fn connections(&self) -> usize {
        self.lanes().open.len()
    }

    /// Maximum number of connections: that of the URI, or 1 if the server does not announce
    /// `CAN_MULTI_CONN`.
    pub fn connections_max(&self) -> usize {
        self.lanes().most
    }

    /// How often a connection was re-established.
    pub fn reconnects(&self) -> u64 {
        self.lanes().open.iter().map(|lane| lane.reconnects()).sum()
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A lane and an inbox on it for one more queue: an idle lane, a new one, or the one with the
    /// fewest queues.
    pub(super) fn take_lane(&self, may_connect: bool) -> Result<(Arc<Lane>, u32)> {
        let mut lanes = self.lanes();
        let lane = self.choose_lane(&mut lanes, may_connect)?;
        // Under the lock, so that no other thread finds this lane idle.
        let inbox = lane.open_inbox();
        Ok((lane, inbox))
    }

    fn choose_lane(&self, lanes: &mut Lanes, may_connect: bool) -> Result<Arc<Lane>> {
        lanes.open.retain(|lane| !lane.is_dead());
        let best = lanes.open.iter().min_by_key(|lane| lane.queues()).cloned();
        match best {
            Some(lane) if lane.queues() == 0 || lanes.open.len() >= lanes.most || !may_connect => Ok(lane),
            Some(lane) => match self.connect_again() {
                Ok(new) => {
                    lanes.open.push(Arc::clone(&new));
                    Ok(new)
                }
                // A different export is an error. If the server refuses more connections, the
                // queues share.
                Err(error) if !error.is_transient() => Err(error),
                Err(_) => {
                    lanes.most = lanes.open.len();
                    Ok(lane)
                }
            },
            None => {
                let new = self.connect_again()?;
                lanes.open.push(Arc::clone(&new));
                Ok(new)
            }
        }
    }

    fn connect_again(&self) -> Result<Arc<Lane>> {
        let (transport, found) = negotiate::connect(&self.uri)?;
        self.answered.connected(found.server_id.as_deref());
        let lane = Self::lane(&self.uri, transport, self.export.clone(), Arc::clone(&self.answered))?;
        lane.check_same_export(&found)?;
        Ok(lane)
    }

    /// Status of the first part of a range, as far as one answer of the server reports it.
    fn status(&self, lane: &Lane, inbox: u32, start_bytes: u64, end_bytes: u64) -> io::Result<StatusFound> {
        let slot = Slot::new(inbox, SlotWork::Status, start_bytes, end_bytes, Memory::None);
        let mut ended = Vec::new();
        lane.drive(inbox, std::iter::once(slot), 1, &mut ended);
        let ended = ended.pop().ok_or_else(|| io::Error::other("the connection completed no request"))?;
        ended.completion.result.map(|()| ended.status)
    }
}

impl BlockDevice for NbdDevice {
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// A queue polls its own socket, so it cannot share a ring.
    fn open_queue(&self, options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        if options.ring.is_some() {
            let what = "an NBD export cannot share a ring with other disks; open its queue without one";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        let (lane, inbox) = self.take_lane(true)?;
        let (export_bytes, flags) = (self.export.size_bytes, self.export.flags);
        Ok(Box::new(NbdQueue::new(lane, inbox, self.geometry, export_bytes, flags, options.depth.max(1))))
    }

    /// From the block status in `base:allocation`, with layers from `qemu:allocation-depth`, if the
    /// server offers these contexts; otherwise everything is data.
    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> io::Result<()> {
        let shown_end = offset_bytes.saturating_add(len_bytes).min(self.geometry.size_bytes);
        if offset_bytes >= shown_end {
            return Ok(());
        }
        if self.export.allocation_context.is_none() {
            let (kind, len_bytes) = (ExtentKind::Data, shown_end - offset_bytes);
            out.push(Extent { offset_bytes, len_bytes, kind, depth: 0, file: 0, file_offset_bytes: None });
            return Ok(());
        }
        let (lane, inbox) = self.take_lane(false)?;
        let mut found = status::Extents::new(offset_bytes, shown_end, self.geometry.logical_sector_bytes, out);
        let end_bytes = shown_end.min(self.export.size_bytes);
        let mut at_bytes = offset_bytes;
        let mut result = Ok(());
        while at_bytes < end_bytes && result.is_ok() {
            let stop_bytes = at_bytes.saturating_add(lane.status_max()).min(end_bytes);
            result =
                self.status(&lane, inbox, at_bytes, stop_bytes).map(|status| at_bytes = found.add(at_bytes, &status));
        }
        lane.close_inbox(inbox);
        result.map(|()| found.finish())
    }
}
