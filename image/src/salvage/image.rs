//! A salvaged image as a read-only [`Image`]. A lost block is [`BlockState::Damaged`], so that no
//! layer below shows its data in the block's place.

use super::{
    salvaged::{Bitmaps, ParentRecord, Salvaged, read_bitmap, read_packed},
    table::{BlockTable, Fault, SalvagedBlock},
};
use crate::{BlockState, Image, ImageError, ImageInfo, ImageWriter, Result, SectorBitmap};
use diskwright_store::Store;
use std::sync::Arc;

/// A salvaged image: reads return what was found, and lost blocks fail.
#[derive(Debug)]
pub struct SalvagedImage {
    salvaged: Arc<Salvaged>,
    stores: [Arc<dyn Store>; 1],
}

impl SalvagedImage {
    /// An image that reads what was salvaged.
    pub fn new(salvaged: Arc<Salvaged>) -> Self {
        let stores = [Arc::clone(&salvaged.store)];
        Self { salvaged, stores }
    }

    /// An image below all others, of which nothing can be read: the data of a parent that is gone.
    pub fn without_contents(child: &Salvaged) -> Self {
        let mut info = child.info.clone();
        (info.parent, info.remarks) = (None, Vec::new());
        let mut table = BlockTable::new(child.table.count(), info.block_bytes);
        table.doubt_absent(if child.parent_record == ParentRecord::Unknown {
            Fault::MaybeParents
        } else {
            Fault::NoParent
        });
        Self::new(Arc::new(Salvaged {
            info,
            store: Arc::clone(&child.store),
            file_bytes: child.file_bytes,
            parent_record: ParentRecord::Alone,
            table,
            bitmaps: Bitmaps::None,
            unpack: None,
            tables: Vec::new(),
            payload_alignment_bytes: child.payload_alignment_bytes,
            doubts: Vec::new(),
            doubts_bitmaps: false,
        }))
    }

    fn damaged(&self, block: u64, what: String) -> ImageError {
        ImageError::Corrupt {
            path: self.salvaged.store.name().to_owned(),
            structure: "block",
            offset_bytes: block.saturating_mul(self.salvaged.info.block_bytes),
            found: what,
            expected: "an entry that leads to its data".into(),
        }
    }
}

impl Image for SalvagedImage {
    fn info(&self) -> &ImageInfo {
        &self.salvaged.info
    }

    fn stores(&self) -> &[Arc<dyn Store>] {
        &self.stores
    }

    fn block_states(&self, first_block: u64, out: &mut [BlockState]) -> Result<()> {
        for (block, state) in (first_block..).zip(out) {
            *state = match self.salvaged.table.get(block) {
                Ok(None) => BlockState::Absent,
                Ok(Some(SalvagedBlock::Zero)) => BlockState::Zero,
                Ok(Some(SalvagedBlock::Data(offset_bytes))) => BlockState::data(offset_bytes),
                Ok(Some(SalvagedBlock::Partial(offset_bytes))) => BlockState::partial(offset_bytes),
                Ok(Some(SalvagedBlock::Packed { .. })) => BlockState::Compressed,
                Err(_) => BlockState::Damaged,
            };
        }
        Ok(())
    }

    fn next_block(&self, first_block: u64, end_block: u64) -> Result<Option<u64>> {
        Ok(self.salvaged.table.next(first_block).filter(|&block| block < end_block))
    }

    fn damage(&self, block: u64) -> Result<ImageError> {
        if let Err(fault) = self.salvaged.table.get(block) {
            return Ok(self.damaged(block, fault.to_string()));
        }
        Ok(match self.sector_bitmap(block) {
            Err(error) => error,
            Ok(_) => self.damaged(block, "no damage".into()),
        })
    }

    fn read_compressed(&self, block: u64, within_bytes: u64, out: &mut [u8]) -> Result<()> {
        let Ok(Some(SalvagedBlock::Packed { offset_bytes, len_bytes })) = self.salvaged.table.get(block) else {
            return Err(self.damaged(block, "no compressed data".into()));
        };
        let bytes = read_packed(&self.salvaged, block, offset_bytes, len_bytes);
        let bytes = bytes.map_err(|found| self.damaged(block, found))?;
        let from = (within_bytes.min(bytes.len() as u64)) as usize;
        let there = out.len().min(bytes.len() - from);
        out[..there].copy_from_slice(&bytes[from..from + there]);
        out[there..].fill(0);
        Ok(())
    }

    fn sector_bitmap(&self, block: u64) -> Result<SectorBitmap> {
        match self.salvaged.table.get(block) {
            Ok(Some(SalvagedBlock::Partial(offset_bytes))) => {
                read_bitmap(&self.salvaged, block, offset_bytes).map_err(|what| self.damaged(block, what.into()))
            }
            _ => Err(self.damaged(block, "no sector bitmap".into())),
        }
    }

    fn writer(&self) -> Option<&dyn ImageWriter> {
        None
    }
}
