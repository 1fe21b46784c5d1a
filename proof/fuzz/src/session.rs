//! What the targets of images do with one: read its blocks, write one, salvage it.

use diskwright_image::{
    BlockState, Commit, Format, Image, ImageError, ImageWriter,
    salvage::{SalvageHints, SalvagedImage},
};
use diskwright_store::Store;
use std::sync::Arc;

/// Blocks that are read.
const BLOCKS_MAX: u64 = 1024;

/// Contents of a store in memory.
pub(crate) fn bytes_of(store: &dyn Store) -> Vec<u8> {
    let mut bytes = vec![0; store.len_bytes().expect("a length") as usize];
    store.read_at(&mut bytes, 0).expect("memory can be read");
    bytes
}

/// Writes the first sector of a block, or of the last one if the disk is smaller.
pub(crate) fn put(image: &dyn Image, writer: &dyn ImageWriter, block: u64) -> Result<(), ImageError> {
    // An empty disk has no block, and nobody asks it for one.
    if image.size_bytes() == 0 {
        return Ok(());
    }
    let block = block.min((image.size_bytes() / image.info().block_bytes).saturating_sub(1));
    let at = writer.reserve_waiting(block)?;
    let store = &image.stores()[usize::from(at.store)];
    store.write_at(&[0x5a; 512], at.offset_bytes).map_err(|source| ImageError::Io {
        doing: "write",
        path: store.name().to_owned(),
        offset_bytes: at.offset_bytes,
        source,
    })?;
    writer.commit_waiting(block, Commit::Whole).map(drop)
}

/// The first blocks, as far as they are known: `None` where the image reports damage.
pub(crate) fn read(image: &dyn Image) -> Result<Vec<BlockState>, String> {
    let blocks = image.size_bytes().div_ceil(image.info().block_bytes).min(BLOCKS_MAX);
    let mut states = vec![BlockState::Absent; blocks as usize];
    image.block_states(0, &mut states).map_err(|error| error.to_string())?;
    for (block, state) in (0..).zip(&states) {
        match *state {
            BlockState::Data { store, offset_bytes } | BlockState::Shared { store, offset_bytes } => {
                let mut sector = [0; 512];
                let store = image.stores().get(usize::from(store)).ok_or("a store that is not there")?;
                store.read_at(&mut sector, offset_bytes).map_err(|error| error.to_string())?;
            }
            BlockState::Compressed => {
                image.read_compressed(block, 0, &mut [0; 512]).map_err(|error| error.to_string())?;
            }
            BlockState::Damaged => return Err(image.damage(block).map_err(|error| error.to_string())?.to_string()),
            BlockState::Absent | BlockState::Zero | BlockState::Partial { .. } => {}
        }
    }
    Ok(states)
}

/// Reads what a rescue would read, with what a user knows: the size of a block, and that of the
/// disk.
pub(crate) fn salvage(format: Format, store: &Arc<dyn Store>, (block_bytes, size_bytes): (u32, u64)) {
    let hints = SalvageHints { size_bytes: Some(size_bytes), block_bytes: Some(block_bytes), is_child: None };
    if let Ok(salvaged) = format.driver().salvage(Arc::clone(store), &hints) {
        let gaps = salvaged.gaps();
        assert!(gaps.iter().all(|gap| gap.start < gap.end && gap.end <= salvaged.file_bytes), "{gaps:?}");
        let image = SalvagedImage::new(Arc::new(salvaged));
        let blocks = image.info().size_bytes.div_ceil(image.info().block_bytes);
        for block in 0..blocks.min(BLOCKS_MAX) {
            let mut state = [BlockState::Absent];
            image.block_states(block, &mut state).expect("states are in memory");
            match state[0] {
                BlockState::Damaged => drop(image.damage(block).expect("a reason")),
                BlockState::Compressed => drop(image.read_compressed(block, 0, &mut [0; 512])),
                _ => {}
            }
        }
    }
}
