//! exFAT: the allocation bitmap, a file that the root folder names (Microsoft exFAT specification).
//!
//! ```text
//!   boot region (checksum) ─▶ geometry, VolumeDirty
//!   root folder: label, bitmap, up-case table      (clusters followed through the FAT)
//!   bitmap ─▶ sink
//! ```

use crate::{
    bytes::{le16, le32, le64, utf16, zero_runs},
    identity::Identity,
    read::Window,
    reason::{LeftAlone, ReasonKind, Stop},
    sink::Sink,
};

const BITMAP: u8 = 0x81;
const UP_CASE: u8 = 0x82;
const LABEL: u8 = 0x83;
const END_OF_CHAIN: u32 = 0xffff_ffff;
const ENTRY_BYTES: usize = 32;
/// The specification allows a folder of 256 MiB. What is needed stands at the beginning.
const ROOT_BYTES_MAX: u64 = 16 << 20;

/// Geometry of a volume that fits its place.
#[derive(Debug)]
struct Boot {
    sector_bytes: u64,
    cluster_bytes: u64,
    clusters: u64,
    fat_start_bytes: u64,
    heap_start_bytes: u64,
    root_cluster: u32,
    size_bytes: u64,
    serial: u32,
    flags: u16,
}

/// What the root folder names: first cluster and length in bytes.
#[derive(Debug, Default)]
struct Root {
    bitmap: Option<(u32, u64)>,
    up_case: Option<(u32, u64)>,
    label: Option<String>,
    clusters: Vec<u32>,
}

/// Label and serial number.
pub(crate) fn identify(window: &Window<'_>) -> Option<Identity> {
    let boot = Boot::read(window).ok();
    let label = boot.as_ref().and_then(|boot| Root::read(window, boot).ok()).and_then(|root| root.label);
    let uuid = boot.map(|boot| format!("{:04X}-{:04X}", boot.serial >> 16, boot.serial & 0xffff));
    Some(Identity { name: "exFAT", label, uuid })
}

/// First byte after the file system.
pub(crate) fn end_bytes(window: &Window<'_>) -> Result<u64, LeftAlone> {
    Ok(Boot::read(window)?.size_bytes)
}

/// Sends the free clusters to `sink`.
pub(crate) fn scan(window: &Window<'_>, sink: &mut Sink<'_>) -> Result<(), Stop> {
    let boot = Boot::read(window)?;
    check_boot_region(window, &boot)?;
    // VolumeDirty and MediaFailure.
    if boot.flags & 0x6 != 0 {
        return Err(
            LeftAlone::new(ReasonKind::Dirty, "the exFAT is marked dirty: check it with fsck.exfat or chkdsk").into()
        );
    }
    let root = Root::read(window, &boot)?;
    let (Some((first, len_bytes)), Some((up_case, _))) = (root.bitmap, root.up_case) else {
        return Err(LeftAlone::damaged("the root folder of the exFAT names no bitmap or no up-case table").into());
    };
    let needed_bytes = boot.clusters.div_ceil(8);
    if len_bytes != needed_bytes {
        return Err(LeftAlone::damaged(format!("a bitmap of {len_bytes} bytes for {} clusters", boot.clusters)).into());
    }
    for cluster in root.clusters.iter().chain([&up_case]) {
        let start = boot.place(*cluster)?;
        sink.reserve(start..start + boot.cluster_bytes);
    }
    // The bitmap is followed twice: its own clusters must be known before the first is called free.
    let count = needed_bytes.div_ceil(boot.cluster_bytes);
    let mut next = first;
    for _ in 0..count {
        let start = boot.place(next)?;
        sink.reserve(start..start + boot.cluster_bytes);
        next = boot.next(window, next)?;
    }
    if next != END_OF_CHAIN {
        return Err(LeftAlone::damaged("the chain of the exFAT's bitmap does not end with the bitmap").into());
    }
    let mut piece = vec![0; boot.cluster_bytes.min(64 << 10) as usize];
    let mut next = first;
    let mut at_bytes = 0;
    while at_bytes < needed_bytes {
        let into = at_bytes % boot.cluster_bytes;
        if at_bytes > 0 && into == 0 {
            next = boot.next(window, next)?;
        }
        let take = (needed_bytes - at_bytes).min(piece.len() as u64) as usize;
        window.read(boot.place(next)? + into, &mut piece[..take])?;
        let place = |bit: u64| boot.heap_start_bytes + (at_bytes * 8 + bit) * boot.cluster_bytes;
        for run in zero_runs(&piece[..take], boot.clusters - at_bytes * 8) {
            sink.free(place(run.start)..place(run.end))?;
        }
        at_bytes += take as u64;
    }
    Ok(())
}

impl Boot {
    fn read(window: &Window<'_>) -> Result<Self, LeftAlone> {
        let raw = window.bytes(0, 512)?;
        let wrong = |what: String| LeftAlone::damaged(format!("boot sector of exFAT: {what}"));
        let (sector_shift, cluster_shift) = (raw[0x6c], raw[0x6d]);
        if !(9..=12).contains(&sector_shift) || cluster_shift > 25 - sector_shift {
            return Err(wrong(format!("sectors of 2^{sector_shift} bytes, clusters of 2^{cluster_shift} sectors")));
        }
        if raw[0x69] != 1 || raw[0x6e] != 1 {
            return Err(LeftAlone::unsupported(format!("exFAT of version {} with {} FATs", raw[0x69], raw[0x6e])));
        }
        let sector_bytes = 1_u64 << sector_shift;
        let cluster_bytes = sector_bytes << cluster_shift;
        let sectors = le64(&raw, 0x48);
        let size_bytes = window.size_bytes();
        let clusters = u64::from(le32(&raw, 0x5c));
        let (fat, fat_sectors) = (u64::from(le32(&raw, 0x50)), u64::from(le32(&raw, 0x54)));
        let heap = u64::from(le32(&raw, 0x58));
        let fits = sectors.checked_mul(sector_bytes).is_some_and(|bytes| bytes <= size_bytes)
            && clusters > 0
            && fat >= 24
            && fat + fat_sectors <= heap
            && (clusters + 2) * 4 <= fat_sectors * sector_bytes
            && heap * sector_bytes + clusters * cluster_bytes <= sectors * sector_bytes;
        if !fits {
            return Err(wrong(format!("{clusters} clusters from sector {heap} on in {sectors} sectors")));
        }
        Ok(Self {
            sector_bytes,
            cluster_bytes,
            clusters,
            fat_start_bytes: fat * sector_bytes,
            heap_start_bytes: heap * sector_bytes,
            root_cluster: le32(&raw, 0x60),
            size_bytes: sectors * sector_bytes,
            serial: le32(&raw, 0x64),
            flags: le16(&raw, 0x6a),
        })
    }

    /// First byte of a cluster; clusters count from 2.
    fn place(&self, cluster: u32) -> Result<u64, LeftAlone> {
        let index = u64::from(cluster).checked_sub(2).filter(|index| *index < self.clusters);
        let index = index.ok_or_else(|| LeftAlone::damaged(format!("the exFAT points to cluster {cluster}")))?;
        Ok(self.heap_start_bytes + index * self.cluster_bytes)
    }

    /// The cluster that follows in the FAT. `cluster` is one that [`place`](Self::place) accepts.
    fn next(&self, window: &Window<'_>, cluster: u32) -> Result<u32, LeftAlone> {
        Ok(le32(&window.bytes(self.fat_start_bytes + u64::from(cluster) * 4, 4)?, 0))
    }
}

impl Root {
    fn read(window: &Window<'_>, boot: &Boot) -> Result<Self, LeftAlone> {
        let mut root = Self::default();
        let mut cluster = boot.root_cluster;
        let mut piece = vec![0; boot.cluster_bytes.min(4096) as usize];
        loop {
            let start_bytes = boot.place(cluster)?;
            root.clusters.push(cluster);
            for part in 0..boot.cluster_bytes / piece.len() as u64 {
                window.read(start_bytes + part * piece.len() as u64, &mut piece)?;
                for entry in piece.chunks_exact(ENTRY_BYTES) {
                    let place = (le32(entry, 20), le64(entry, 24));
                    let before = match entry[0] {
                        0 => return Ok(root),
                        // Bit 0 is set in the bitmap of a second FAT.
                        BITMAP if entry[1] & 1 == 0 => root.bitmap.replace(place),
                        UP_CASE => root.up_case.replace(place),
                        LABEL => {
                            root.label = utf16(&entry[2..2 + 2 * usize::from(entry[1]).min(11)]);
                            None
                        }
                        _ => None,
                    };
                    if before.is_some() {
                        return Err(LeftAlone::damaged(
                            "the root folder of the exFAT has two bitmaps or up-case tables",
                        ));
                    }
                }
            }
            if root.clusters.len() as u64 * boot.cluster_bytes > ROOT_BYTES_MAX {
                return Err(LeftAlone::unsupported("an exFAT with so large a root folder"));
            }
            cluster = match boot.next(window, cluster)? {
                END_OF_CHAIN => return Ok(root),
                next => next,
            };
        }
    }
}

/// The twelfth sector repeats a checksum of the eleven before it.
fn check_boot_region(window: &Window<'_>, boot: &Boot) -> Result<(), LeftAlone> {
    let region = window.bytes(0, 12 * boot.sector_bytes as usize)?;
    let (summed, sums) = region.split_at(11 * boot.sector_bytes as usize);
    // VolumeFlags and PercentInUse change all the time and are left out.
    let bytes = summed.iter().enumerate().filter(|(at, _)| !matches!(at, 106 | 107 | 112));
    let sum = bytes.fold(0_u32, |sum, (_, byte)| sum.rotate_right(1).wrapping_add(u32::from(*byte)));
    if sums.chunks_exact(4).any(|word| le32(word, 0) != sum) {
        return Err(LeftAlone::damaged("the checksum of the exFAT's boot region does not match"));
    }
    Ok(())
}
