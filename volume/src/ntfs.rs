//! NTFS: the file $Bitmap, one bit for each cluster.
//!
//! ```text
//!   boot.rs      boot sector: geometry, place of the MFT
//!   record.rs    records of the MFT: fixups, attributes, run lists
//!   file.rs      streams of files, through attribute lists
//!   state.rs     $Volume flags, $LogFile, hiberfil.sys, shadow copies: is the volume clean?
//!      │
//!      ▼
//!   $Bitmap ─▶ sink     (which refuses if the MFT, $Bitmap or another system file were free)
//! ```
//!
//! NTFS has no checksums and keeps no count of free clusters. So the bitmap is trusted only if the
//! volume was cleanly unmounted, if the bitmap has a bit for every cluster, and if it marks no
//! cluster as free that belongs to a system file read on the way. Clusters that a shadow copy (VSS)
//! still needs may be free in $Bitmap, so a volume with shadow copies is left alone.

mod boot;
mod evidence;
mod file;
mod numbers;
mod record;
mod state;

pub(crate) use evidence::{Evidence, serial_of_boot, start_by_boot};

use crate::{
    bytes::{le64, utf16, zero_runs},
    identity::Identity,
    read::Window,
    reason::{LeftAlone, Stop},
    sink::Sink,
};
use boot::Boot;
use file::Files;
use numbers::{BITMAP, BOOT, DATA, INDEX_ALLOCATION, LOG_FILE, MFT, MFT_MIRROR, ROOT, VOLUME, VOLUME_NAME};

/// Bytes of $Bitmap that are read at once.
const PIECE_BYTES: usize = 64 << 10;

/// Label and serial number, as far as they can be read.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    let serial = le64(&window.bytes(0, 512).ok()?, 0x48);
    let label = Boot::read(window)
        .and_then(|boot| Files::open(*window, boot))
        .and_then(|files| files.stream(VOLUME, VOLUME_NAME, ""))
        .ok()
        .flatten()
        .and_then(|stream| utf16(stream.resident()?));
    Some(Identity { name: "NTFS", label, uuid: Some(format!("{serial:016X}")) })
}

/// First byte after the copy of the boot sector, which follows the volume.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    let boot = Boot::read(window)?;
    Ok((boot.volume_bytes + boot.sector_bytes).min(window.size_bytes()))
}

/// Sends the free clusters to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let boot = Boot::read(window)?;
    let (clusters, cluster_bytes) = (boot.clusters, boot.cluster_bytes);
    let files = Files::open(*window, boot)?;
    state::check(&files)?;
    let needed_bytes = clusters.div_ceil(8);
    let Some(bitmap) = files.stream(BITMAP, DATA, "")? else {
        return Err(LeftAlone::damaged("$Bitmap has no data").into());
    };
    if bitmap.data_bytes < needed_bytes || bitmap.initialized_bytes < needed_bytes {
        let found = bitmap.initialized_bytes.min(bitmap.data_bytes);
        return Err(LeftAlone::damaged(format!("$Bitmap has {found} bytes for {clusters} clusters")).into());
    }
    sink.reserve(0..cluster_bytes);
    for number in [MFT, MFT_MIRROR, LOG_FILE, BITMAP, BOOT] {
        let Some(stream) = files.stream(number, DATA, "")? else {
            return Err(LeftAlone::damaged(format!("system file {number} has no data")).into());
        };
        stream.runs().iter().for_each(|run| sink.reserve(run.bytes(cluster_bytes)));
    }
    if let Some(index) = files.stream(ROOT, INDEX_ALLOCATION, "$I30")? {
        index.runs().iter().for_each(|run| sink.reserve(run.bytes(cluster_bytes)));
    }
    let mut piece = vec![0; PIECE_BYTES];
    let mut at_bytes = 0;
    while at_bytes < needed_bytes {
        let take = (needed_bytes - at_bytes).min(PIECE_BYTES as u64) as usize;
        files.read(&bitmap, at_bytes, &mut piece[..take])?;
        let first = at_bytes * 8;
        for run in zero_runs(&piece[..take], clusters - first) {
            sink.free((first + run.start) * cluster_bytes..(first + run.end) * cluster_bytes)?;
        }
        at_bytes += take as u64;
    }
    Ok(())
}
