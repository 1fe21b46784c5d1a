//! [`Qcow2Image`]: an open qcow2 image, and the states of its blocks.

use super::{
    clusters::data_of,
    compact,
    compressed::{self, DecompressedClusters},
    corrupt,
    layout::{Layout, Mapped, SECTOR_BYTES},
    link,
    tables::{L2Lookup, Tables},
    write::{self, Writing},
};
use crate::{
    BlockState, DiskType, Format, Image, ImageInfo, ImageWriter, ParentLink, SectorBitmap,
    error::{ImageError, Result},
    inner::{InternalBitmap, InternalSnapshot},
    padded::padded,
};
use diskwright_format::qcow2::{Invalid, L2Entry, features};
use diskwright_store::Store;
use std::{io, sync::Arc};

/// Largest alignment of payload that is reported, in bytes.
const ALIGNMENT_MAX_BYTES: u64 = 1 << 20;
/// Most bitmaps that are named.
const BITMAPS_NAMED: usize = 4;

/// Opens the qcow2 image whose files are `stores`: the image, and its external data file if it has
/// one. `snapshot` is the id or the name of an internal snapshot, which is opened in place of the
/// disk.
///
/// # Errors
/// `NotAnImage` if the file is not qcow2, or has no such snapshot; `Unsupported` for an unknown
/// incompatible feature, encryption, and what cannot be written; `Corrupt`; `Io`.
pub fn open(stores: Vec<Arc<dyn Store>>, writable: bool, snapshot: Option<&str>) -> Result<Qcow2Image> {
    Qcow2Image::new(stores, writable, snapshot)
}

/// Gives every cluster of a new image its space, and maps it.
///
/// # Errors
/// `Io`.
pub(super) fn allocate_all(store: Arc<dyn Store>) -> Result<()> {
    let image = Qcow2Image::new(vec![store], true, None)?;
    match &image.writing {
        Some(writing) => writing.allocate_all().and_then(|()| writing.close()),
        None => Ok(()),
    }
}

/// An open qcow2 image.
#[derive(Debug)]
pub struct Qcow2Image {
    info: ImageInfo,
    pub(super) layout: Arc<Layout>,
    /// The image, and its data file. The image reads as zeros from its end to the end of its last
    /// cluster.
    stores: Vec<Arc<dyn Store>>,
    kept: DecompressedClusters,
    writing: Option<Writing>,
    snapshots: Vec<InternalSnapshot>,
    bitmaps: Vec<InternalBitmap>,
}

impl Qcow2Image {
    fn new(stores: Vec<Arc<dyn Store>>, writable: bool, snapshot: Option<&str>) -> Result<Self> {
        let mut stores = stores.into_iter();
        let Some(store) = stores.next() else {
            let none = io::Error::new(io::ErrorKind::InvalidInput, "an image needs a file");
            return Err(ImageError::Io { doing: "open it", path: Default::default(), offset_bytes: 0, source: none });
        };
        let data_file = stores.next();
        let layout = Layout::read(&*store, data_file.as_deref(), snapshot)?;
        if let Some((what, hint)) = write::refusal(&layout, snapshot.is_some()).filter(|_| writable) {
            return Err(ImageError::Unsupported { path: store.name().to_owned(), what, hint: hint.into() });
        }
        if layout.has_data_file() != data_file.is_some() || stores.next().is_some() {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: format!(
                    "a qcow2 image whose header {} an external data file, opened with another number of files",
                    if layout.has_data_file() { "names" } else { "does not name" }
                ),
                hint: "open it by its path".into(),
            });
        }
        let parent = link::link_of(&*store, &layout.front)?;
        let info = describe(&layout, snapshot, parent);
        let cluster_bytes = layout.geometry.cluster_bytes();
        let whole = |bytes: u64| bytes.checked_next_multiple_of(cluster_bytes).unwrap_or(bytes);
        let mut all = vec![padded(store, layout.front.file_bytes, whole(layout.front.file_bytes))];
        if let (Some(data), Some(len_bytes)) = (data_file, layout.data_file_bytes()) {
            all.push(padded(data, len_bytes, whole(len_bytes)));
        }
        let kept = DecompressedClusters::new(cluster_bytes);
        let (snapshots, bitmaps) = (layout.internal_snapshots(), layout.internal_bitmaps());
        let layout = Arc::new(layout);
        let writing = if writable { Some(Writing::new(Arc::clone(&layout), &all)?) } else { None };
        Ok(Self { info, layout, stores: all, kept, writing, snapshots, bitmaps })
    }

    fn tables(&self) -> Tables<'_> {
        Tables { store: &*self.stores[0], layout: &self.layout }
    }

    /// Calls `each` for the clusters `first .. end` whose entry is not 0, until it returns false.
    fn each_entry(&self, first: u64, end: u64, each: &mut dyn FnMut(u64, L2Lookup) -> Result<bool>) -> Result<()> {
        match &self.writing {
            Some(writing) => writing.each_entry(first, end, each),
            None => self.tables().each_entry(first, end, each),
        }
    }

    /// The entry of one cluster, and its offset in the file (0 without an L2 table).
    fn entry(&self, cluster: u64) -> Result<(L2Lookup, u64)> {
        match &self.writing {
            Some(writing) => writing.entry_of(cluster),
            None => self.tables().entry(cluster),
        }
    }

    /// The cluster of a block, and its subcluster in it.
    fn cluster_of(&self, block: u64) -> (u64, u64) {
        let subclusters = self.layout.geometry.subclusters();
        (block / subclusters, block % subclusters)
    }

    fn state(&self, cluster: u64, sub: u64, entry: L2Entry) -> BlockState {
        match self.layout.place(cluster, sub, entry) {
            Ok(Mapped::Absent) => BlockState::Absent,
            Ok(Mapped::Zero) => BlockState::Zero,
            Ok(Mapped::Data(offset_bytes)) => {
                let store = u16::from(self.layout.has_data_file());
                let is_own = self.writing.as_ref().is_none_or(|writing| writing.own_data_of(entry).is_some());
                match is_own {
                    true => BlockState::Data { store, offset_bytes },
                    false => BlockState::Shared { store, offset_bytes },
                }
            }
            Ok(Mapped::Compressed { .. }) => BlockState::Compressed,
            Err(_) => BlockState::Damaged,
        }
    }

    /// The bytes of a compressed cluster.
    fn decompressed(&self, cluster: u64) -> Result<Arc<[u8]>> {
        if let Some(bytes) = self.kept.get(cluster) {
            return Ok(bytes);
        }
        let store = &*self.stores[0];
        let (found, entry_at) = self.entry(cluster)?;
        let entry = found.map_err(|fault| fault.into_error(store))?;
        let placed = self.layout.place(cluster, 0, entry);
        let fault = |found: String, expected: String| {
            corrupt(store, entry_at, Invalid::new("compressed cluster", 0, found, expected))
        };
        let former = || self.writing.as_ref().and_then(|writing| writing.former_packed(cluster));
        let (offset_bytes, len_bytes) = match placed.map_err(|invalid| corrupt(store, entry_at, invalid))? {
            Mapped::Compressed { offset_bytes, len_bytes } => (offset_bytes, len_bytes),
            other => former().ok_or_else(|| fault(format!("{other:?}"), "a compressed cluster".into()))?,
        };
        // The last sector of a file may be cut.
        let len_bytes = len_bytes.min(self.layout.file_bytes().saturating_sub(offset_bytes));
        let mut data = vec![0; len_bytes as usize];
        let read = store.read_at(&mut data, offset_bytes);
        read.map_err(|error| ImageError::io("read a compressed cluster", store, offset_bytes, error))?;
        let mut out = vec![0; self.layout.geometry.cluster_bytes() as usize];
        compressed::decompress(self.layout.front.header.compression, &data, &mut out).map_err(|found| {
            let expected = format!("a cluster of {} bytes", out.len());
            corrupt(store, offset_bytes, Invalid::new("compressed cluster", 0, found, expected))
        })?;
        let bytes: Arc<[u8]> = out.into();
        self.kept.put(cluster, Arc::clone(&bytes));
        Ok(bytes)
    }
}

/// The remark about bitmaps that are up to date: a write would not be marked in them.
fn bitmaps_that_go(layout: &Layout) -> Option<String> {
    let is_kept = layout.front.header.features.autoclear & features::BITMAPS != 0;
    let bitmaps = layout.bitmaps.as_ref().ok().filter(|bitmaps| is_kept && !bitmaps.is_empty())?;
    let names: Vec<_> = bitmaps.iter().take(BITMAPS_NAMED).map(|bitmap| format!("{:?}", bitmap.name)).collect();
    let more = if bitmaps.len() > names.len() { ", ..." } else { "" };
    Some(format!(
        "The first write drops the bitmaps of the image ({}{more}): it is not marked in them.",
        names.join(", ")
    ))
}

fn describe(layout: &Layout, snapshot: Option<&str>, parent: Option<ParentLink>) -> ImageInfo {
    let (header, geometry) = (&layout.front.header, &layout.geometry);
    let (mut remarks, mut doubts) = (Vec::new(), Vec::new());
    if layout.size_bytes() != header.size_bytes && snapshot.is_none() {
        remarks.push(format!(
            "The disk's size of {} bytes is not a multiple of the 512-byte sector; its last sector ends in zeros.",
            header.size_bytes
        ));
    }
    if header.features.has(features::DIRTY) {
        remarks.push("The image is marked dirty: it was not closed, and its refcounts may be wrong. Its contents are not affected.".into());
    }
    if header.features.has(features::CORRUPT) {
        doubts.push("The image is marked corrupt: the program that wrote it found damaged structures. Run `diskwright check` on it.".into());
    }
    remarks.extend(doubts.iter().cloned());
    if let Err(error) = &layout.snapshots {
        remarks.push(format!("The internal snapshots cannot be read: {error}."));
    }
    remarks.extend(bitmaps_that_go(layout));
    if let Err(error) = &layout.bitmaps {
        remarks.push(format!("The bitmaps cannot be read: {error}."));
    }
    let disk_type = if parent.is_some() { DiskType::Differencing } else { DiskType::Dynamic };
    ImageInfo {
        parent,
        payload_alignment_bytes: geometry.unit_bytes().min(ALIGNMENT_MAX_BYTES) as u32,
        remarks,
        doubts,
        snapshot: snapshot.map(str::to_owned),
        ..ImageInfo::new(Format::Qcow2, disk_type, layout.size_bytes(), geometry.unit_bytes())
    }
}

impl Image for Qcow2Image {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        out.fill(BlockState::Absent);
        let subclusters = self.layout.geometry.subclusters();
        let end_block = first_block.saturating_add(out.len() as u64).min(self.layout.blocks());
        if first_block >= end_block {
            return Ok(());
        }
        let clusters = first_block / subclusters..end_block.div_ceil(subclusters);
        self.each_entry(clusters.start, clusters.end, &mut |cluster, found| {
            let start = cluster * subclusters;
            for block in start.max(first_block)..(start + subclusters).min(end_block) {
                out[(block - first_block) as usize] = match &found {
                    Ok(entry) => self.state(cluster, block - start, *entry),
                    Err(_) => BlockState::Damaged,
                };
            }
            Ok(true)
        })
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        let subclusters = self.layout.geometry.subclusters();
        let end_block = end_block.min(self.layout.blocks());
        let mut next = None;
        if first_block < end_block {
            let clusters = first_block / subclusters..end_block.div_ceil(subclusters);
            self.each_entry(clusters.start, clusters.end, &mut |cluster, _| {
                next = Some((cluster * subclusters).max(first_block));
                Ok(false)
            })?;
        }
        Ok(next.filter(|&block| block < end_block))
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        let store = &*self.stores[0];
        let (cluster, sub) = self.cluster_of(block);
        let (found, entry_at) = self.entry(cluster)?;
        let entry = match found {
            Ok(entry) => entry,
            Err(fault) => return Ok(fault.into_error(store)),
        };
        match self.layout.place(cluster, sub, entry) {
            Err(invalid) => Ok(corrupt(store, entry_at, invalid)),
            Ok(_) => {
                let sound = format!("block {block} was damaged when it was looked up, but its entry is valid now");
                Err(ImageError::io("explain the damage of a block", store, entry_at, io::Error::other(sound)))
            }
        }
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        let (cluster, sub) = self.cluster_of(block);
        let bytes = self.decompressed(cluster)?;
        let start = sub * self.layout.geometry.unit_bytes() + within_bytes;
        let wanted = usize::try_from(start).ok().and_then(|start| bytes.get(start..start.checked_add(out.len())?));
        let Some(wanted) = wanted else {
            let error = io::Error::new(io::ErrorKind::InvalidInput, "the range ends behind its cluster");
            return Err(ImageError::io("read a compressed cluster", &*self.stores[0], 0, error));
        };
        out.copy_from_slice(wanted);
        Ok(())
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        let mut state = [BlockState::Absent];
        self.block_states(block, &mut state)?;
        let sectors = (self.layout.geometry.unit_bytes() / SECTOR_BYTES) as u32;
        let mut bitmap = SectorBitmap::empty(sectors, SECTOR_BYTES as u32);
        if !matches!(state[0], BlockState::Absent) {
            bitmap.words.fill(u64::MAX);
        }
        Ok(bitmap)
    }

    fn size_bytes(&self) -> u64 {
        self.layout.size_bytes()
    }

    fn parent_link(&self) -> Option<ParentLink> {
        self.writing.as_ref().and_then(Writing::changed_parent).or_else(|| self.info.parent.clone())
    }

    fn packed_len_bytes(&self, blocks: u64) -> Result<Option<u64>> {
        if self.layout.has_data_file() {
            return Ok(None);
        }
        let mut clusters = blocks;
        if self.layout.geometry.is_extended {
            // Subclusters share clusters: at most as many as have data now.
            let mut mapped = 0;
            self.each_entry(0, self.layout.clusters(), &mut |_, found| {
                mapped += u64::from(found.is_ok_and(|entry| data_of(entry).is_some()));
                Ok(true)
            })?;
            clusters = clusters.min(mapped);
        }
        match &self.writing {
            Some(writing) => Ok(Some(writing.packed_len_bytes(clusters))),
            None => compact::packed_len_read_only(&*self.stores[0], &self.layout, clusters).map(Some),
        }
    }

    fn lost_by_writing(&self) -> Option<String> {
        bitmaps_that_go(&self.layout)
    }

    fn shares_blocks(&self) -> bool {
        self.writing.is_some()
    }

    fn keeps_space(&self, _store: u16) -> bool {
        self.layout.has_data_file()
    }

    fn snapshots(&self) -> &[InternalSnapshot] {
        &self.snapshots
    }

    fn bitmaps(&self) -> &[InternalBitmap] {
        &self.bitmaps
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writing.as_ref().map(|writing| writing as &dyn ImageWriter)
    }
}
