//! Finds ranges in which no layer of a chain has a block, so that walks over nearly empty disks do
//! not query each block.

use crate::{Layer, Result, error::file_error};
use diskwright_image::{BlockState, Image};
use diskwright_store::Store;
use std::ops::Range;

/// Length of the first search step in bytes. Each step that finds nothing doubles it.
const FIRST_STEP_BYTES: u64 = 1 << 30;

/// The first byte of `start_bytes .. end_bytes` for which a layer may have a block: the start of
/// that block, or `start_bytes`. `end_bytes` if no layer has any. Everything before the returned
/// byte reads as zeros.
///
/// The search covers all layers in steps of growing length. So a layer with a long empty range is
/// not searched to its end for each block of another layer.
///
/// # Errors
/// `Io` if a table cannot be read.
pub(crate) fn next_known(layers: &[Layer], start_bytes: u64, end_bytes: u64) -> Result<u64> {
    search(layers, start_bytes, end_bytes, &|image, blocks| Ok(image.next_block(blocks.start, blocks.end)?))
}

/// As [`next_known`]; a disk without a block table has what its file stores, so that a huge sparse
/// raw disk is not walked window by window.
///
/// # Errors
/// `Io` if a table, or where the file has holes, cannot be read.
pub(crate) fn next_stored(layers: &[Layer], start_bytes: u64, end_bytes: u64) -> Result<u64> {
    search(layers, start_bytes, end_bytes, &|image, blocks| {
        let first = image.next_block(blocks.start, blocks.end)?;
        match (first, image.stores()) {
            (Some(first), [store]) if !image.info().has_blocks => stored_block(image, &**store, first..blocks.end),
            _ => Ok(first),
        }
    })
}

/// The first of these blocks of a disk without a table of which its file stores something.
fn stored_block(image: &dyn Image, store: &dyn Store, blocks: Range<u64>) -> Result<Option<u64>> {
    let mut state = [BlockState::Absent];
    image.block_states(blocks.start, &mut state)?;
    let BlockState::Data { offset_bytes, .. } = state[0] else { return Ok(Some(blocks.start)) };
    let failed = |source| file_error("find the holes of", store.name(), source);
    let Some(data) = store.next_data(offset_bytes).map_err(failed)? else { return Ok(None) };
    // The blocks of such a disk follow each other in its file.
    let block = blocks.start + (data.offset_bytes - offset_bytes) / image.info().block_bytes;
    Ok((block < blocks.end).then_some(block))
}

/// The first block of an image in a range of blocks.
type NextBlock<'a> = dyn Fn(&dyn Image, Range<u64>) -> Result<Option<u64>> + 'a;

/// Asks each layer by `next` for its first block in a range of blocks.
fn search(layers: &[Layer], start_bytes: u64, end_bytes: u64, next: &NextBlock<'_>) -> Result<u64> {
    let (mut at, mut step_bytes) = (start_bytes, FIRST_STEP_BYTES);
    while at < end_bytes {
        let step_end = at.saturating_add(step_bytes).min(end_bytes);
        let mut found = step_end;
        for image in layers.iter().map(|layer| &layer.image) {
            let info = image.info();
            // A block found in one layer limits the search in the layers below.
            let stop = found.min(image.size_bytes());
            if at < stop
                && let Some(block) = next(&**image, at / info.block_bytes..stop.div_ceil(info.block_bytes))?
            {
                found = found.min((block * info.block_bytes).max(at));
            }
        }
        if found < step_end {
            return Ok(found);
        }
        (at, step_bytes) = (step_end, step_bytes.saturating_mul(2));
    }
    Ok(end_bytes.max(start_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CreateRequest, Disk, OpenOptions, copying::create::create};
    use diskwright_store::{BlockDevice, Blocking, EngineKind};

    #[test]
    fn the_first_block_of_any_layer_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let (base, top) = (dir.path().join("base.vhdx"), dir.path().join("top.vhdx"));
        create(&base, &CreateRequest { size_bytes: Some(8 << 40), ..CreateRequest::default() }).unwrap();
        let write = |path: &std::path::Path, offsets_bytes: &[u64]| {
            let disk = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
            let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
            offsets_bytes.iter().for_each(|&at| io.write(at, &[1; 512], false).unwrap());
            drop(io);
            disk.close().unwrap();
        };
        write(&base, &[5 << 40, (5 << 40) + (64 << 20)]);
        let parent = Some(base);
        create(&top, &CreateRequest { parent, size_bytes: Some(16 << 40), ..CreateRequest::default() }).unwrap();
        write(&top, &[3 << 30, 12 << 40]);
        let disk = Disk::open(&top, &OpenOptions::default()).unwrap();
        let size_bytes = disk.geometry().size_bytes;
        let next = |start, end| next_known(&disk.layers(), start, end).unwrap();
        assert_eq!(next(0, size_bytes), 3 << 30);
        assert_eq!(next((3 << 30) + 4096, size_bytes), (3 << 30) + 4096, "inside an allocated block");
        assert_eq!(next(4 << 30, size_bytes), 5 << 40);
        assert_eq!(next((5 << 40) + (2 << 20), size_bytes), (5 << 40) + (64 << 20));
        assert_eq!(next(6 << 40, size_bytes), 12 << 40);
        assert_eq!(next(13 << 40, size_bytes), size_bytes);
        assert_eq!(next(4 << 30, 4 << 40), 4 << 40);
        assert_eq!(next(5, 5), 5);
    }

    #[test]
    fn the_holes_of_a_raw_disk_are_passed_over() {
        use std::os::unix::fs::FileExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("sparse.raw");
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(12 << 40).unwrap();
        file.write_all_at(&[1; 4096], 5 << 40).unwrap();
        let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
        let size_bytes = disk.geometry().size_bytes;
        let layers = disk.layers();
        // Every block of a raw disk is known. Files in tmpfs and on ext4, XFS and btrfs tell holes.
        assert_eq!(next_known(&layers, 0, size_bytes).unwrap(), 0);
        let block_bytes = layers[0].image.info().block_bytes;
        assert_eq!(next_stored(&layers, 0, size_bytes).unwrap(), (5 << 40) / block_bytes * block_bytes);
        assert_eq!(next_stored(&layers, (5 << 40) + 100, size_bytes).unwrap(), (5 << 40) + 100);
        assert_eq!(next_stored(&layers, 6 << 40, size_bytes).unwrap(), size_bytes);
        let opened = crate::Opened::Disk(std::sync::Arc::clone(&disk));
        assert_eq!(crate::copying::room::data_bytes(&opened, size_bytes).unwrap(), 4096);
    }
}
