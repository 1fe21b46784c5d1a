//! Header and tables of one view of an image: the disk, or an internal snapshot.

use super::{corrupt, header::HeaderCluster, records};
use crate::{
    error::{ImageError, Result},
    inner::{InternalBitmap, InternalSnapshot},
};
use diskwright_format::qcow2::{BitmapEntry, Geometry, Invalid, L1Entry, L2Entry, Place, Snapshot, features};
use diskwright_store::{
    Store,
    sync::atomic::{AtomicU64, Ordering},
};
use std::ops::Range;

/// The guest's sector in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;

/// A view of an image.
#[derive(Debug)]
pub(super) struct Layout {
    pub front: HeaderCluster,
    pub geometry: Geometry,
    /// Size of the disk in bytes, rounded up to a sector.
    size_bytes: AtomicU64,
    /// Length of the file in bytes, as last known. It grows while the image is written.
    file_bytes: AtomicU64,
    /// Place of the L1 table in the file.
    pub l1: Place,
    /// All snapshots of the image; or why the table cannot be read.
    pub snapshots: Result<Vec<Snapshot>, ImageError>,
    /// All bitmaps of the image; or why the directory cannot be read.
    pub bitmaps: Result<Vec<BitmapEntry>, ImageError>,
    /// Length of the external data file in bytes. It grows while the image is written.
    data_file_bytes: Option<AtomicU64>,
    /// Structures whose places are known without reading a table. No data may lie there.
    fixed: Vec<(&'static str, Range<u64>)>,
}

/// Where a block's data are, or why they cannot be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mapped {
    Absent,
    Zero,
    Data(u64),
    Compressed { offset_bytes: u64, len_bytes: u64 },
}

impl Layout {
    /// Reads the header of `store` and what the view needs. `snapshot` is a snapshot's id or name;
    /// an id has precedence.
    ///
    /// # Errors
    /// Those of [`HeaderCluster::read`]; `Corrupt` for an L1 table beyond the end of the file;
    /// `NotAnImage` for a snapshot that the image does not have.
    pub fn read(store: &dyn Store, data_file: Option<&dyn Store>, snapshot: Option<&str>) -> Result<Self> {
        let front = HeaderCluster::read(store)?;
        let (header, file_bytes) = (&front.header, front.file_bytes);
        let geometry = header.geometry();
        let mut fixed = vec![
            ("header", 0..header.cluster_bytes()),
            ("L1 table", range(header.l1)),
            ("refcount table", range(header.refcount_table)),
        ];
        let snapshots = records::snapshots(store, header, file_bytes).map(|(snapshots, len_bytes)| {
            let start = header.snapshots_offset_bytes;
            fixed.push(("snapshot table", start..start + len_bytes));
            snapshots
        });
        let bitmaps = match &front.extensions.bitmaps {
            Some(extension) => records::bitmaps(store, extension, &geometry, file_bytes),
            None => Ok(Vec::new()),
        };
        let (l1, size_bytes) = match snapshot {
            None => (header.l1, header.size_bytes),
            Some(wanted) => {
                let known = match &snapshots {
                    Ok(known) => known,
                    Err(_) => {
                        return Err(records::snapshots(store, header, file_bytes)
                            .err()
                            .unwrap_or_else(|| no_snapshot(store, wanted, &[])));
                    }
                };
                let found = known
                    .iter()
                    .find(|snapshot| snapshot.id == wanted)
                    .or_else(|| known.iter().find(|snapshot| snapshot.name == wanted))
                    .ok_or_else(|| no_snapshot(store, wanted, known))?;
                if let Some(invalid) = records::fault_of_snapshot(found, header, file_bytes) {
                    return Err(corrupt(store, header.snapshots_offset_bytes, invalid));
                }
                fixed.push(("L1 table", range(found.l1)));
                (found.l1, found.size_bytes.unwrap_or(header.size_bytes))
            }
        };
        if l1.offset_bytes.checked_add(l1.len_bytes).is_none_or(|end| end > file_bytes) {
            let found = format!("an L1 table of {} bytes at offset {}", l1.len_bytes, l1.offset_bytes);
            let expected = format!("a place in the file of {file_bytes} bytes");
            return Err(corrupt(store, 0, Invalid::new("qcow2 header", 40, found, expected)));
        }
        let data_file_bytes = match data_file {
            None => None,
            Some(data) => {
                let length = data.len_bytes();
                Some(length.map_err(|error| ImageError::io("get the length of the data file", data, 0, error))?)
            }
        };
        let Some(size_bytes) = size_bytes.checked_next_multiple_of(SECTOR_BYTES) else {
            let found = format!("a disk of {size_bytes} bytes");
            return Err(corrupt(store, 0, Invalid::new("qcow2 header", 24, found, "at most 2^64 - 512")));
        };
        Ok(Self {
            geometry,
            size_bytes: AtomicU64::new(size_bytes),
            file_bytes: AtomicU64::new(file_bytes),
            l1,
            snapshots,
            bitmaps,
            data_file_bytes: data_file_bytes.map(AtomicU64::new),
            fixed,
            front,
        })
    }

    /// The snapshots, for users of the image; none if their table cannot be read.
    pub fn internal_snapshots(&self) -> Vec<InternalSnapshot> {
        let of = |snapshot: &Snapshot| InternalSnapshot {
            id: snapshot.id.clone(),
            name: snapshot.name.clone(),
            seconds: snapshot.seconds,
            guest_nanoseconds: snapshot.guest_nanoseconds,
            vm_state_bytes: snapshot.vm_state_bytes,
            size_bytes: snapshot.size_bytes.unwrap_or(self.front.header.size_bytes),
        };
        self.snapshots.as_deref().unwrap_or_default().iter().map(of).collect()
    }

    /// The bitmaps, for users of the image; none if their directory cannot be read.
    pub fn internal_bitmaps(&self) -> Vec<InternalBitmap> {
        let is_kept = self.front.header.features.autoclear & features::BITMAPS != 0;
        let of = |bitmap: &BitmapEntry| InternalBitmap {
            name: bitmap.name.clone(),
            granularity_bytes: 1 << bitmap.granularity_bits,
            is_in_use: bitmap.is_in_use || !is_kept,
            is_auto: bitmap.is_auto,
        };
        self.bitmaps.as_deref().unwrap_or_default().iter().map(of).collect()
    }

    /// Whether all guest data lie in another file.
    pub fn has_data_file(&self) -> bool {
        self.geometry.has_data_file
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Ordering::Acquire)
    }

    pub fn set_size_bytes(&self, size_bytes: u64) {
        self.size_bytes.store(size_bytes, Ordering::Release);
    }

    /// Length of the file in bytes.
    pub fn file_bytes(&self) -> u64 {
        self.file_bytes.load(Ordering::Acquire)
    }

    /// Length of the external data file in bytes, as last known.
    pub fn data_file_bytes(&self) -> Option<u64> {
        self.data_file_bytes.as_ref().map(|len_bytes| len_bytes.load(Ordering::Acquire))
    }

    pub fn set_data_file_bytes(&self, bytes: u64) {
        if let Some(len_bytes) = &self.data_file_bytes {
            len_bytes.store(bytes, Ordering::Release);
        }
    }

    /// Tells that the file is at least this long.
    pub fn note_len(&self, file_bytes: u64) {
        self.file_bytes.fetch_max(file_bytes, Ordering::AcqRel);
    }

    /// The place of the L2 table of an entry of the L1 table; `None` if it has none.
    pub fn l2_table(&self, entry: L1Entry) -> Result<Option<u64>, Invalid> {
        let Some(offset_bytes) = entry.l2_offset(&self.geometry)? else { return Ok(None) };
        let within = self.within_file(offset_bytes, self.geometry.cluster_bytes());
        within.map(|()| Some(offset_bytes)).map_err(|invalid| Invalid { structure: "L1 entry", ..invalid })
    }

    /// Blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.size_bytes().div_ceil(self.geometry.unit_bytes())
    }

    /// Clusters of the disk.
    pub fn clusters(&self) -> u64 {
        self.size_bytes().div_ceil(self.geometry.cluster_bytes())
    }

    /// The state of subcluster `sub` of a cluster of the disk, by the cluster's entry.
    pub fn place(&self, cluster: u64, sub: u64, entry: L2Entry) -> Result<Mapped, Invalid> {
        match entry {
            L2Entry::Unallocated => Ok(Mapped::Absent),
            L2Entry::Compressed { offset_bytes, len_bytes, .. } => {
                self.within_file(offset_bytes, len_bytes.min(self.file_bytes().saturating_sub(offset_bytes)))?;
                Ok(Mapped::Compressed { offset_bytes, len_bytes })
            }
            L2Entry::Standard { offset_bytes, parts, .. } => {
                if parts.zero >> sub & 1 == 1 {
                    return Ok(Mapped::Zero);
                }
                let Some(offset_bytes) = offset_bytes.filter(|_| parts.allocated >> sub & 1 == 1) else {
                    return Ok(Mapped::Absent);
                };
                self.check_cluster(cluster, offset_bytes)?;
                Ok(Mapped::Data(offset_bytes + sub * self.geometry.unit_bytes()))
            }
        }
    }

    /// Whether a standard cluster of the disk may be at this offset.
    pub fn check_cluster(&self, cluster: u64, offset_bytes: u64) -> Result<(), Invalid> {
        if !self.has_data_file() {
            return self.within_file(offset_bytes, self.geometry.cluster_bytes());
        }
        let guest = cluster << self.geometry.cluster_bits;
        let fail =
            |expected| Err(Invalid::new("L2 entry", 0, format!("offset {offset_bytes} in the data file"), expected));
        if offset_bytes != guest {
            return fail(format!("{guest}, the cluster's offset on the disk"));
        }
        match self.data_file_bytes() {
            Some(len_bytes) if offset_bytes >= len_bytes => {
                fail(format!("an offset below {len_bytes}, the length of the data file"))
            }
            _ => Ok(()),
        }
    }

    /// Whether something may lie in this range: it begins in the file, and has no byte in common
    /// with the header and the tables that it names. The last cluster of a file may be cut.
    pub fn within_file(&self, offset_bytes: u64, len_bytes: u64) -> Result<(), Invalid> {
        if offset_bytes >= self.file_bytes() {
            let expected = format!("an offset in the file of {} bytes", self.file_bytes());
            return Err(Invalid::new("L2 entry", 0, format!("offset {offset_bytes}"), expected));
        }
        let end = offset_bytes.saturating_add(len_bytes);
        let met = self.fixed.iter().find(|(_, range)| range.start < end && offset_bytes < range.end);
        match met {
            Some((name, range)) => {
                let found = format!("offset {offset_bytes}, in the {name} at {} to {}", range.start, range.end);
                Err(Invalid::new("L2 entry", 0, found, "space of its own"))
            }
            None => Ok(()),
        }
    }
}

fn range(place: Place) -> Range<u64> {
    place.offset_bytes..place.offset_bytes.saturating_add(place.len_bytes)
}

fn no_snapshot(store: &dyn Store, wanted: &str, known: &[Snapshot]) -> ImageError {
    const NAMED_MAX: usize = 8;
    let names: Vec<_> = known.iter().take(NAMED_MAX).map(|one| format!("{} ({:?})", one.id, one.name)).collect();
    let expected = match known.len() {
        0 => "one of its internal snapshots, of which it has none".to_owned(),
        count if count > NAMED_MAX => {
            format!("the id or name of one of its {count} snapshots: {}, ...", names.join(", "))
        }
        _ => format!("the id or name of one of its snapshots: {}", names.join(", ")),
    };
    ImageError::NotAnImage {
        path: store.name().to_owned(),
        found: format!("snapshot {wanted:?} is not in the image"),
        expected,
    }
}
