//! What is known of a logical unit, and a new session with it.

use super::{
    ClientError, Result,
    login::{LoginAs, log_in},
    session::Session,
};
use crate::scsi::{answers::Capacity, cdb};
use diskwright_store::{Endpoint, Geometry};

/// What the target tells of the logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnitInfo {
    /// The iSCSI name of the target.
    pub target: String,
    /// The number of the logical unit.
    pub unit: u16,
    /// Who made the unit.
    pub vendor: String,
    /// What it is called.
    pub product: String,
    /// Its version.
    pub revision: String,
    /// Its serial number; empty if it tells none.
    pub serial: String,
    /// Whether the unit refuses writes.
    pub is_read_only: bool,
    /// Whether completed writes may be in a volatile cache.
    pub has_write_cache: bool,
    /// The longest data of a command in bytes.
    pub transfer_bytes: u64,
}

/// What a queue may use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The longest data of a command in bytes.
    pub(super) transfer_bytes: u64,
    pub(super) has_fua: bool,
    pub(super) has_write_cache: bool,
    pub(super) has_write_same: bool,
    /// Blocks of one WRITE SAME.
    pub(super) same_blocks: u64,
    /// Whether WRITE SAME may unmap, and unmapped blocks read as zeros.
    pub(super) unmaps_to_zeros: bool,
}

/// What the queues of a device share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) endpoint: Endpoint,
    pub(super) who: LoginAs,
    pub(super) info: UnitInfo,
    pub(super) geometry: Geometry,
    pub(super) limits: Limits,
}

impl Shared {
    /// A new session whose unit is ready, and the same as it was.
    pub(super) fn session(&self) -> Result<Session> {
        let mut session = log_in(&self.endpoint, &self.who, Some(&self.info.target))?;
        session.make_ready(self.info.unit)?;
        let capacity = capacity_of(&mut session, self.info.unit)?;
        let size_bytes = (capacity.last_block.saturating_add(1)).saturating_mul(capacity.block_bytes.into());
        if size_bytes != self.geometry.size_bytes {
            let what = format!("its size was {} bytes, and now is {size_bytes}", self.geometry.size_bytes);
            return Err(ClientError::Unusable { peer: session.peer(), unit: self.info.unit, what });
        }
        Ok(session)
    }
}

/// Asks something that the unit must answer.
pub(super) fn asked(
    session: &mut Session,
    unit: u16,
    doing: &'static str,
    cdb: [u8; 16],
    room_bytes: u32,
) -> Result<Vec<u8>> {
    let answer = session.ask(doing, unit, cdb, room_bytes)?;
    answer.map_err(|answer| ClientError::Refused { peer: session.peer(), doing, answer })
}

/// Its size.
pub(super) fn capacity_of(session: &mut Session, unit: u16) -> Result<Capacity> {
    Ok(Capacity::decode(&asked(session, unit, "tell its capacity", cdb::capacity(32), 32)?))
}
