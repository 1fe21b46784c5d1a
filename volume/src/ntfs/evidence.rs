//! Records of the MFT, which have their own number (see [`crate::evidence`]). The runs of the MFT
//! say where a record lies.
//!
//! A record names neither its volume nor itself by a checksum. Records of a volume that was here
//! before it was formatted have the same numbers and often the same places. Their times are older
//! than the volume: a record counts only if one of its four times (created, modified, changed,
//! read) is not before the creation of the MFT, which is when the volume was formatted.

use super::{
    boot::Boot,
    file::Files,
    numbers::{MFT, STANDARD_INFORMATION},
    record::{attributes, undo_fixups},
};
use crate::{
    bytes::{le16, le32, le64},
    read::Window,
    sighting::{EachSighting, Sighting},
};

/// Records 0 to 3 lie in the mirror of the MFT too, so their number states no single place.
const FIRST_SINGLE: u64 = 4;
/// Times count 100 ns. Programs that format a volume do not read the clock at one instant.
const SAME_TIME: u64 = 10_000_000;

/// What is known of one volume.
#[derive(Debug)]
pub(crate) struct Evidence {
    start_bytes: u64,
    boot: Boot,
    serial: u64,
    /// When the volume was formatted, in units of 100 ns since 1601.
    formatted: u64,
    /// In the order of the stream.
    mft: Vec<super::record::Run>,
}

/// Distance of this boot sector from the beginning of its volume: 0. (The copy at the end looks the
/// same; nothing is found behind it.)
pub(crate) fn start_by_boot(sector: &[u8]) -> Option<u64> {
    serial_of_boot(sector).map(|_| 0)
}

/// The serial number of the volume, by a sector that looks like its boot sector or the copy.
pub(crate) fn serial_of_boot(sector: &[u8]) -> Option<u64> {
    (sector[3..11] == *b"NTFS    " && sector[510..512] == [0x55, 0xaa]).then(|| le64(sector, 0x48))
}

impl Evidence {
    /// Learns the volume in this window. Its boot sector and the first record of the MFT must be
    /// readable.
    pub(crate) fn learn(window: &Window<'_>, start_bytes: u64) -> Option<Self> {
        let sector = window.array::<512>(0)?;
        let serial = serial_of_boot(&sector)?;
        let boot = Boot::read(window).ok()?;
        let files = Files::open(*window, boot).ok()?;
        let formatted = times_of(&files.record(MFT).ok()?)?[0];
        Some(Self { start_bytes, boot, serial, formatted, mft: files.mft_runs().to_vec() })
    }

    /// First byte of the file system on the disk.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// First byte behind the volume, where the copy of its boot sector is.
    pub(crate) fn end_bytes(&self) -> u64 {
        self.start_bytes.saturating_add(self.boot.volume_bytes)
    }

    /// The serial number of the volume.
    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// What these bytes say. See [`crate::evidence::DiskEvidence::look`].
    pub(crate) fn look(&self, bytes: &[u8], give: &mut EachSighting<'_>) {
        let mut at = (self.start_bytes % self.boot.record_bytes as u64) as usize;
        while let Some(raw) = bytes.get(at..at + self.boot.record_bytes) {
            if raw[..4] == *b"FILE"
                && le16(raw, 4) >= 0x30
                && let Some(place) = self.place_of(u64::from(le32(raw, 0x2c)))
                && self.is_of_this_volume(raw)
            {
                let disk_offset_bytes = self.start_bytes + place;
                give(Sighting::At { within_bytes: at, disk_offset_bytes, weight: 1, what: "NTFS record" });
            }
            at += self.boot.record_bytes;
        }
    }

    /// Whether a record is whole, and was changed or read since the volume was formatted.
    fn is_of_this_volume(&self, raw: &[u8]) -> bool {
        let mut record = raw.to_vec();
        undo_fixups(&mut record, b"FILE", "a record").is_ok()
            && times_of(&record)
                .and_then(|times| times.into_iter().max())
                .is_some_and(|newest| newest.saturating_add(SAME_TIME) >= self.formatted)
    }

    fn place_of(&self, number: u64) -> Option<u64> {
        let at = number.checked_mul(self.boot.record_bytes as u64).filter(|_| number >= FIRST_SINGLE)?;
        let cluster = at / self.boot.cluster_bytes;
        let index = self.mft.partition_point(|run| run.stream_cluster <= cluster).checked_sub(1)?;
        let run = self.mft.get(index).filter(|run| cluster - run.stream_cluster < run.clusters)?;
        Some((run.cluster? + cluster - run.stream_cluster) * self.boot.cluster_bytes + at % self.boot.cluster_bytes)
    }
}

/// The times of a record whose fixups were undone: created, modified, changed, read.
fn times_of(record: &[u8]) -> Option<[u64; 4]> {
    let information = attributes(record).find(|attribute| attribute.kind == STANDARD_INFORMATION)?;
    let value = information.value().filter(|value| value.len() >= 32)?;
    Some([le64(value, 0), le64(value, 8), le64(value, 16), le64(value, 24)])
}
