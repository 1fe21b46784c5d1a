//! A raw file or device as an image: each byte of the disk is at the same offset of the store.
//!
//! `flat.rs` has the parts that a fixed VHD shares.
//!
//! If the length of a raw file is not a multiple of the sector, the disk's last sector is padded
//! with zeros (`padded.rs`). The file itself is extended only before the first write.
//!
//! A raw disk has no identity, so no child of a VHD or VHDX can have it as its parent. A store
//! whose contents never change has one ([`Store::contents_id`]), and its raw disk has that.

use crate::{
    BlockState, DiskType, Format, Image, ImageError, ImageInfo, ImageWriter, LinkageId, Result, SectorBitmap,
    flat::{FLAT_ALIGNMENT_BYTES, FlatWriter, PSEUDO_BLOCK_BYTES, Trailer, flat_bitmap, flat_states},
    padded::padded,
    salvage::{Bitmaps, BlockTable, ParentRecord, SalvageHints, Salvaged},
};
use diskwright_store::Store;
use std::sync::Arc;
use uuid::Uuid;

/// A raw file has no tables that can be damaged: its blocks follow each other.
pub(crate) fn salvage(store: Arc<dyn Store>, _hints: &SalvageHints) -> Result<Salvaged> {
    let image = RawImage::new(store, false, 512)?;
    let RawImage { info, store, .. } = image;
    let count = info.size_bytes.div_ceil(PSEUDO_BLOCK_BYTES);
    Ok(Salvaged {
        file_bytes: info.size_bytes,
        parent_record: ParentRecord::Alone,
        table: BlockTable::linear(count, PSEUDO_BLOCK_BYTES, info.size_bytes),
        info,
        store,
        bitmaps: Bitmaps::None,
        unpack: None,
        tables: Vec::new(),
        payload_alignment_bytes: 512,
        doubts: Vec::new(),
        doubts_bitmaps: false,
    })
}

/// A raw file or device.
#[derive(Debug)]
pub struct RawImage {
    info: ImageInfo,
    store: Arc<dyn Store>,
    writer: Option<FlatWriter>,
}

impl RawImage {
    /// Opens `store`. The disk's size is the store's length, rounded up to a sector of
    /// `logical_sector_bytes`.
    ///
    /// # Errors
    /// `Io` if the length cannot be determined; `Unsupported` for a sector size other than a power
    /// of two from 512 to 4096.
    pub fn new(store: Arc<dyn Store>, writable: bool, logical_sector_bytes: u32) -> Result<Self> {
        check_sector_bytes(&*store, logical_sector_bytes)?;
        let Measured { store, size_bytes, padding_end_bytes, remark } = measure(store, logical_sector_bytes)?;
        let info = ImageInfo {
            has_blocks: false,
            logical_sector_bytes,
            physical_sector_bytes: match store.contents_id() {
                Some(_) => store.sector_bytes().physical_bytes,
                None => logical_sector_bytes,
            },
            payload_alignment_bytes: FLAT_ALIGNMENT_BYTES,
            linkage_id: store.contents_id().map(|id| LinkageId::from_uuid(Uuid::from_bytes(id))),
            remarks: remark.into_iter().collect(),
            ..ImageInfo::new(Format::Raw, DiskType::Fixed, size_bytes, PSEUDO_BLOCK_BYTES)
        };
        let writer =
            writable.then(|| FlatWriter::new(Arc::clone(&store), size_bytes, padding_end_bytes, Trailer::None));
        Ok(Self { info, store, writer })
    }
}

/// Refuses a sector size other than a power of two from 512 to 4096.
///
/// # Errors
/// `Unsupported`.
pub(crate) fn check_sector_bytes(store: &dyn Store, logical_sector_bytes: u32) -> Result<()> {
    if logical_sector_bytes.is_power_of_two() && (512..=4096).contains(&logical_sector_bytes) {
        return Ok(());
    }
    Err(ImageError::Unsupported {
        path: store.name().to_owned(),
        what: format!("a raw disk with sectors of {logical_sector_bytes} bytes"),
        hint: "use 512 or 4096".into(),
    })
}

/// A raw file whose length was rounded up to whole sectors.
pub(crate) struct Measured {
    /// The file, padded with zeros to the end of its last sector.
    pub(crate) store: Arc<dyn Store>,
    /// Length with the padding, in bytes.
    pub(crate) size_bytes: u64,
    /// Length in bytes to which the file must be extended before the first write; `None` if not
    /// needed.
    pub(crate) padding_end_bytes: Option<u64>,
    /// A sentence for the user about the padding.
    pub(crate) remark: Option<String>,
}

/// Rounds the length of a raw file up to a sector.
///
/// # Errors
/// `Io` if the length cannot be determined.
pub(crate) fn measure(store: Arc<dyn Store>, logical_sector_bytes: u32) -> Result<Measured> {
    let len_bytes = store.len_bytes().map_err(|e| ImageError::io("get the length of the file", &*store, 0, e))?;
    let size_bytes = len_bytes.checked_next_multiple_of(u64::from(logical_sector_bytes)).unwrap_or(len_bytes);
    if size_bytes == len_bytes {
        return Ok(Measured { store, size_bytes, padding_end_bytes: None, remark: None });
    }
    let remark = format!(
        "The file's length of {len_bytes} bytes is not a multiple of the {logical_sector_bytes}-byte sector; the disk ends in {} bytes of zeros that the file does not have.",
        size_bytes - len_bytes
    );
    let store = padded(store, len_bytes, size_bytes);
    Ok(Measured { store, size_bytes, padding_end_bytes: Some(size_bytes), remark: Some(remark) })
}

impl Image for RawImage {
    fn info(&self) -> &ImageInfo {
        &self.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        std::slice::from_ref(&self.store)
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        flat_states(self.size_bytes(), first_block, out);
        Ok(())
    }

    fn size_bytes(&self) -> u64 {
        self.writer.as_ref().map_or(self.info.size_bytes, FlatWriter::size_bytes)
    }

    fn sector_bitmap(&self, _block: u64) -> Result<SectorBitmap> {
        Ok(flat_bitmap(self.info.logical_sector_bytes))
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        self.writer.as_ref().map(|writer| writer as &dyn ImageWriter)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Commit;
    use diskwright_store::{Engine, EngineKind, FileStore, IoBuf, MemoryStore, OpenOptions};
    use std::io;

    fn image(len: usize, writable: bool) -> (Arc<MemoryStore>, RawImage) {
        let store = Arc::new(MemoryStore::with_bytes("disk.raw", vec![7; len]));
        let image = RawImage::new(store.clone(), writable, 512).unwrap();
        (store, image)
    }

    #[test]
    fn blocks_lie_at_their_own_offsets_and_end_with_the_disk() {
        let mut states = [BlockState::Zero; 3];
        flat_states(PSEUDO_BLOCK_BYTES + 512, 0, &mut states);
        assert_eq!(states, [BlockState::data(0), BlockState::data(PSEUDO_BLOCK_BYTES), BlockState::Absent]);
        flat_states(u64::MAX, u64::MAX, &mut states);
        assert_eq!(states, [BlockState::Absent; 3]);
        assert!(flat_bitmap(512).is_full());
    }

    #[test]
    fn a_partial_last_sector_is_padded_with_zeros_and_extended_before_the_first_write() {
        let (store, image) = image(1000, true);
        assert_eq!(image.info().size_bytes, 1024);
        let mut sector = [1; 512];
        image.store().read_at(&mut sector, 512).unwrap();
        assert!(sector[..488].iter().all(|&b| b == 7) && sector[488..].iter().all(|&b| b == 0));
        assert_eq!(image.store().read_at(&mut sector, 1024).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert_eq!(store.to_vec().len(), 1000, "opening changes nothing");
        image.writer().unwrap().begin_writing().unwrap();
        assert_eq!(store.to_vec().len(), 1024);
        image.store().read_at(&mut sector, 512).unwrap();
        assert!(sector[488..].iter().all(|&b| b == 0));
    }

    /// Only a range beyond the end of the file takes a detour. All else goes straight to the file,
    /// and so does everything once the file was extended.
    #[test]
    fn a_padded_file_is_driven_by_the_ring() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), vec![7; 5000]).unwrap();
        let options = OpenOptions { writable: true, ..OpenOptions::default() };
        let store = Arc::new(FileStore::open(file.path(), &options).unwrap());
        let image = RawImage::new(store, true, 512).unwrap();
        let Ok(mut engine) = Engine::new(EngineKind::Uring, 4, None) else { return };
        let target = engine.add_target(image.store()).unwrap();
        let mut read = |offset_bytes: u64, len: usize| {
            let before = engine.stats();
            engine.read_one(0, 0, target, offset_bytes, IoBuf::new(len), 0..len);
            let mut done = Vec::new();
            engine.reap(1, &mut done).unwrap();
            let ended = done.remove(0);
            ended.result.unwrap();
            let (buf, after) = (ended.buf.unwrap(), engine.stats());
            assert_eq!(after.inline_parts, 0, "no part blocks this thread");
            (buf, after.parts - before.parts, after.pool_parts - before.pool_parts)
        };
        let (buf, parts, detours) = read(0, 4608);
        assert!(buf[..] == [7; 4608] && (parts, detours) == (1, 0));
        let (buf, parts, detours) = read(4096, 1024);
        assert!(buf[..904] == [7; 904] && buf[904..] == [0; 120] && (parts, detours) == (2, 1));
        image.writer().unwrap().begin_writing().unwrap();
        let (buf, parts, detours) = read(4096, 1024);
        assert!(buf[..904] == [7; 904] && buf[904..] == [0; 120] && (parts, detours) == (1, 0));
    }

    #[test]
    fn only_valid_sector_sizes_are_accepted() {
        for bad in [0, 256, 1000, 8192] {
            let store = Arc::new(MemoryStore::new("disk.raw"));
            assert!(matches!(RawImage::new(store, false, bad), Err(ImageError::Unsupported { .. })));
        }
    }

    #[test]
    fn zero_commits_are_refused_and_whole_commits_succeed() {
        let (_, image) = image(4096, true);
        let writer = image.writer().unwrap();
        assert!(!writer.can_store_zero());
        assert!(writer.commit(0, Commit::Zero).is_err());
        assert_eq!(writer.commit_waiting(0, Commit::Whole).unwrap(), BlockState::data(0));
        assert_eq!(writer.reserve_waiting(1).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        writer.close().unwrap();
    }

    #[test]
    fn a_growth_whose_sync_failed_cannot_be_retried() {
        let (store, image) = image(512, true);
        let writer = image.writer().unwrap();
        store.fail_syncs(true);
        writer.resize(4096).unwrap_err();
        store.fail_syncs(false);
        assert_eq!(store.to_vec().len(), 4096, "the file has the new length, but perhaps not durably");
        assert!(matches!(writer.resize(4096), Err(ImageError::Poisoned { .. })));
        assert_eq!(image.size_bytes(), 512);
    }

    #[test]
    fn after_a_failed_sync_every_flush_fails() {
        let (store, image) = image(512, true);
        let writer = image.writer().unwrap();
        store.fail_syncs(true);
        assert!(matches!(writer.flush(), Err(ImageError::Io { .. })));
        store.fail_syncs(false);
        assert!(matches!(writer.flush(), Err(ImageError::Poisoned { .. })));
        assert!(matches!(writer.close(), Err(ImageError::Poisoned { .. })));
    }
}
