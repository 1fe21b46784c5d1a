//! Records of the MFT, which have their own number (see [`crate::evidence`]). The runs of the MFT
//! say where a record lies.

use super::{boot::Boot, file::Files, record::undo_fixups};
use crate::{
    bytes::{le16, le32},
    read::Window,
    seen::{Give, Seen},
};

/// Records 0 to 3 lie in the mirror of the MFT too, so their number states no single place.
const FIRST_SINGLE: u64 = 4;

/// What is known of one volume.
#[derive(Debug)]
pub(crate) struct Evidence {
    start_bytes: u64,
    boot: Boot,
    mft: Vec<super::record::Run>,
}

/// Distance of this boot sector from the beginning of its volume: 0. (The copy at the end looks the
/// same; nothing is found behind it.)
pub(crate) fn start_by_boot(sector: &[u8]) -> Option<u64> {
    (sector[3..11] == *b"NTFS    " && sector[510..] == [0x55, 0xaa]).then_some(0)
}

impl Evidence {
    /// Learns the volume in this window. Its boot sector and the first record of the MFT must be
    /// readable.
    pub(crate) fn learn(window: &Window<'_>, start_bytes: u64) -> Option<Self> {
        window.array::<11>(0).filter(|head| head[3..] == *b"NTFS    ")?;
        let boot = Boot::read(window).ok()?;
        let files = Files::open(*window, boot).ok()?;
        Some(Self { start_bytes, boot, mft: files.mft_runs().to_vec() })
    }

    /// First byte of the file system on the disk.
    pub(crate) fn start_bytes(&self) -> u64 {
        self.start_bytes
    }

    /// What these bytes say. See [`crate::evidence::Witness::look`].
    pub(crate) fn look(&self, bytes: &[u8], give: &mut Give<'_>) {
        let mut at = (self.start_bytes % self.boot.record_bytes as u64) as usize;
        while let Some(raw) = bytes.get(at..at + self.boot.record_bytes) {
            if raw[..4] == *b"FILE"
                && le16(raw, 4) >= 0x30
                && let Some(place) = self.place_of(u64::from(le32(raw, 0x2c)))
                && undo_fixups(&mut raw.to_vec(), b"FILE", "a record").is_ok()
            {
                let disk_offset_bytes = self.start_bytes + place;
                give(Seen::At { within_bytes: at, disk_offset_bytes, weight: 1, what: "NTFS record" });
            }
            at += self.boot.record_bytes;
        }
    }

    fn place_of(&self, number: u64) -> Option<u64> {
        let at = number.checked_mul(self.boot.record_bytes as u64).filter(|_| number >= FIRST_SINGLE)?;
        let cluster = at / self.boot.cluster_bytes;
        let run =
            self.mft.iter().find(|run| run.stream_cluster <= cluster && cluster - run.stream_cluster < run.clusters)?;
        Some((run.cluster? + cluster - run.stream_cluster) * self.boot.cluster_bytes + at % self.boot.cluster_bytes)
    }
}
