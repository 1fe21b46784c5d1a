//! Commands that are answered at once: what a logical unit is, and what it supports.

use super::{
    copies,
    replies::{Outcome, cut},
    state::{BURST_BYTES, Iscsi, TRANSFER_BYTES},
};
use crate::{
    net::{Export, connection::Connection, core::Core},
    reservations::Change,
    walk::Walk,
};
use diskwright_iscsi::scsi::{Blocks, Command, Described, Sense, mode, report};
use diskwright_store::ExtentKind;
use std::time::{Duration, Instant};
use uuid::Uuid;

/// Time after which GET LBA STATUS ends with what was found, because the worker has other clients.
const PATIENCE: Duration = Duration::from_millis(2);

/// Runs of one GET LBA STATUS at most.
const RUNS_MAX: usize = 512;

impl Core<Iscsi> {
    /// The answer to a command that needs no disk. `None` for the others.
    pub(super) fn answer_at_once(
        &mut self,
        conn: &mut Connection<Iscsi>,
        export: usize,
        served: &Export,
        command: &Command,
    ) -> Option<Outcome> {
        let disk = self.describe(served);
        let page = |page: Result<Vec<u8>, Sense>, room_bytes: u32| match page {
            Ok(page) => cut(page, room_bytes),
            Err(sense) => Outcome::Failed(sense),
        };
        Some(match *command {
            Command::TestUnitReady | Command::StartStop | Command::SelfTest | Command::Prefetch { .. } => Outcome::Good,
            Command::RequestSense { room_bytes } => {
                let sense = conn.session.units.take(export).unwrap_or(Sense::NONE);
                cut(sense.encode().to_vec(), room_bytes)
            }
            Command::Inquiry { page: None, room_bytes } => cut(disk.standard(), room_bytes),
            Command::Inquiry { page: Some(number), room_bytes } => page(disk.page(number), room_bytes),
            Command::ModeSense { query, room_bytes } => page(mode::sense(&disk, &query), room_bytes),
            Command::ReadCapacity10 => Outcome::Page(report::capacity_10(&disk)),
            Command::ReadCapacity16 { room_bytes } => cut(report::capacity_16(&disk), room_bytes),
            Command::LbaStatus { first, room_bytes } => page(lba_status(served, &disk, first, room_bytes), room_bytes),
            Command::ReportLuns { select, room_bytes } => {
                conn.session.units.forget_units_changed();
                self.report_luns(select, room_bytes)
            }
            Command::TokenInformation { list_id, room_bytes } => copies::token_information(conn, list_id, room_bytes),
            Command::CopyStatus { list_id, room_bytes } => copies::result(conn, list_id, room_bytes),
            Command::CopyParameters { room_bytes } => copies::parameters(room_bytes),
            Command::PersistentIn { action, room_bytes } => self.read_reservations(conn, export, action, room_bytes),
            Command::Reserve => self.reserve_simply(conn, export, &Change::ReserveSimply),
            Command::Release => self.reserve_simply(conn, export, &Change::ReleaseSimply),
            Command::ReportPortGroups { is_extended, room_bytes } => cut(report::port_groups(is_extended), room_bytes),
            Command::ReportOpcodes { query, room_bytes } => page(report::opcodes(&query), room_bytes),
            Command::WriteSame { blocks, .. } if blocks.count > disk.same_blocks_max() => {
                Outcome::Failed(Sense::INVALID_FIELD)
            }
            _ => return None,
        })
    }

    pub(super) fn report_luns(&self, select: u8, room_bytes: u32) -> Outcome {
        let units = (0..self.exports.indexes()).filter(|&unit| self.exports.here(unit).is_some());
        match report::luns(select, units.map(|unit| unit as u16)) {
            Ok(page) => cut(page, room_bytes),
            Err(sense) => Outcome::Failed(sense),
        }
    }

    /// What initiators are told of an export. Its identity is the same whenever the disk is served
    /// by this name in this target.
    pub(super) fn describe(&self, export: &Export) -> Described {
        let geometry = export.device.geometry();
        let of_target = Uuid::new_v5(&Uuid::NAMESPACE_OID, self.shared.target.as_bytes());
        let block_bytes = geometry.logical_sector_bytes.max(1);
        Described {
            blocks: geometry.size_bytes / u64::from(block_bytes),
            block_bytes,
            physical_exponent: (geometry.physical_sector_bytes / block_bytes).max(1).trailing_zeros() as u8,
            is_read_only: geometry.read_only,
            id: Uuid::new_v5(&of_target, export.name.as_bytes()).into_bytes(),
            target: self.shared.target.clone(),
            revision: env!("CARGO_PKG_VERSION"),
            transfer_bytes_max: TRANSFER_BYTES,
            transfer_bytes_best: BURST_BYTES.into(),
            token_bytes_max: copies::TOKEN_BYTES_MAX,
            token_bytes_best: copies::COPY_BY_TOKEN_BYTES,
        }
    }
}

/// The runs of blocks from `first` on.
fn lba_status(export: &Export, disk: &Described, first: u64, room_bytes: u32) -> Result<Vec<u8>, Sense> {
    if first >= disk.blocks {
        return Err(Sense::OUT_OF_RANGE);
    }
    let block_bytes = u64::from(disk.block_bytes);
    let runs_max = (room_bytes.saturating_sub(8) as usize / 16).clamp(1, RUNS_MAX);
    let end_bytes = disk.blocks * block_bytes;
    let mut walk = Walk::over(export.device.as_ref(), first * block_bytes..end_bytes);
    let began = Instant::now();
    let mut runs: Vec<(Blocks, bool)> = Vec::new();
    let failed = |error| Sense::of_error(&error, false);
    while let Some(extents) = walk.next_window().map_err(failed)? {
        for extent in extents {
            let is_mapped = matches!(extent.kind, ExtentKind::Data | ExtentKind::Damaged);
            let count = extent.len_bytes / block_bytes;
            match runs.last_mut() {
                Some((last, mapped)) if *mapped == is_mapped => last.count += count,
                _ => runs.push((Blocks { first: extent.offset_bytes / block_bytes, count }, is_mapped)),
            }
        }
        if runs.len() > runs_max || began.elapsed() > PATIENCE {
            break;
        }
    }
    runs.truncate(runs_max);
    Ok(report::lba_status(&runs))
}
