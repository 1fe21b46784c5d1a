//! The parts of a disk: which extent has which blocks.
//!
//! ```text
//!   disk   |0            2 GiB|2 GiB     2.5 GiB|2.5 GiB 3 GiB|
//!   part    SPARSE s001.vmdk   FLAT f002.vmdk 0  ZERO
//!   block   0 1 2 ...                                            of one length, in one part each
//! ```
//!
//! A block is the largest power of two that divides every grain and the start of every part, so
//! that each block lies in one grain of one part. Usually that is the grain. Where it is smaller,
//! because extents have different grains or odd starts, the image can only be read: a new grain
//! would belong to several blocks.

use super::{
    corrupt,
    tables::{self, Growing, LOST, Tables},
    text::{Head, len_of, stray_parent},
};
use crate::{ImageError, Result, flat::PSEUDO_BLOCK_BYTES};
use diskwright_format::vmdk::{Access, ExtentKind, GRAIN_ABSENT, SECTOR_BYTES};
use diskwright_store::Store;
use std::{ops::Range, sync::Arc};

/// A file by its identity, and a range of it in bytes.
pub(super) type FilePart = (Option<(u64, u64)>, Range<u64>);

/// A part of the disk.
#[derive(Debug)]
pub(super) struct Part {
    pub start_bytes: u64,
    pub end_bytes: Growing,
    pub content: Content,
}

/// What holds a part.
#[derive(Debug, Clone, Copy)]
pub(super) enum Content {
    /// Nothing: it reads as zeros.
    Zero,
    /// A file, sector by sector, from this offset on.
    Flat { store: u16, first_bytes: u64 },
    /// The sparse extent with this index.
    Sparse(usize),
}

/// A sparse extent and its file.
#[derive(Debug)]
pub(super) struct SparseExtent {
    pub store_index: u16,
    pub store: Arc<dyn Store>,
    pub tables: Tables,
}

/// Where a block is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    Zero,
    Flat {
        store: u16,
        offset_bytes: u64,
    },
    Grain {
        extent: usize,
        grain: u64,
        /// Offset of the block in the grain, in bytes.
        within_bytes: u64,
    },
}

/// The disk of a VMDK.
#[derive(Debug)]
pub(super) struct Layout {
    pub head: Head,
    pub stores: Vec<Arc<dyn Store>>,
    pub parts: Vec<Part>,
    pub extents: Vec<SparseExtent>,
    pub size_bytes: Growing,
    pub block_bytes: u64,
    /// Peculiarities, a sentence each.
    pub remarks: Vec<String>,
    /// Those of them that make the contents doubtful.
    pub doubts: Vec<String>,
}

fn unsupported(store: &dyn Store, what: impl Into<String>, hint: &str) -> ImageError {
    ImageError::Unsupported { path: store.name().to_owned(), what: what.into(), hint: hint.into() }
}

impl Layout {
    /// Reads the structures of an image whose files are `stores`: the first one, and those that it
    /// names, in that order.
    ///
    /// # Errors
    /// `Corrupt` for structures that contradict the specification or the files; `Unsupported`;
    /// `Io`.
    pub fn read(stores: Vec<Arc<dyn Store>>) -> Result<Self> {
        let Some(first) = stores.first().cloned() else {
            return Err(ImageError::NotAnImage {
                path: Default::default(),
                found: "no file".into(),
                expected: "the files of a VMDK".into(),
            });
        };
        let head = Head::read(&*first)?;
        let references: Vec<_> = head.references().collect();
        if references.len() + 1 != stores.len() {
            let what = format!("a VMDK of {} files, of which {} are open,", references.len() + 1, stores.len());
            return Err(unsupported(&*first, what, "open it by its path, with all its files beside it"));
        }
        let mut layout = Self {
            head,
            stores,
            parts: Vec::new(),
            extents: Vec::new(),
            size_bytes: Growing::new(0),
            block_bytes: PSEUDO_BLOCK_BYTES,
            remarks: Vec::new(),
            doubts: Vec::new(),
        };
        if layout.head.text.is_none() {
            let tables = layout.add_extent(0)?;
            let sectors = layout.extents[tables].tables.capacity_bytes.get() / SECTOR_BYTES;
            layout.add_part(sectors, Content::Sparse(tables))?;
            layout.doubts.push("The file is an extent without a descriptor, so it is read as a disk of its own; open the descriptor for the whole disk.".into());
        } else {
            let own = layout.head.own_extent();
            let extents = layout.head.extents().to_vec();
            for (index, extent) in extents.iter().enumerate() {
                let named = references.iter().position(|(of, _)| *of == index).map(|at| at as u16 + 1);
                let store = named.or((own == Some(index)).then_some(0));
                layout.add(extent.kind, extent.sectors, extent.first_sector, store, extents.len())?;
            }
        }
        if layout.size_bytes.get() == 0 {
            return Err(corrupt(&*first, "descriptor", 0, "a disk of 0 sectors", "at least one sector"));
        }
        let grains = layout.extents.iter().map(|extent| extent.tables.grain_bytes);
        let common = grains.chain(layout.parts.iter().map(|part| part.start_bytes));
        let common = common.fold(PSEUDO_BLOCK_BYTES, |common, bytes| common | bytes);
        layout.block_bytes = 1 << common.trailing_zeros();
        if let Some(hint) = layout.head.text.as_ref().and_then(stray_parent) {
            layout.doubts.push(format!(
                "The descriptor names the parent {hint:?} but has no parentCID. Blocks that this file does not have read as zeros."
            ));
        }
        layout.remarks.extend(layout.doubts.iter().cloned());
        for extent in &layout.extents {
            layout.remarks.extend(extent.tables.remarks.iter().cloned());
        }
        Ok(layout)
    }

    fn add(
        &mut self,
        kind: ExtentKind,
        sectors: u64,
        first_sector: u64,
        store: Option<u16>,
        extents: usize,
    ) -> Result<()> {
        let Some(index) = store else { return self.add_part(sectors, Content::Zero) };
        let store = Arc::clone(&self.stores[usize::from(index)]);
        let kind_of_sparse = match kind {
            ExtentKind::Zero => return self.add_part(sectors, Content::Zero),
            ExtentKind::VmfsRdm | ExtentKind::VmfsRaw if !store.is_block_device() => {
                return Err(unsupported(
                    &*store,
                    "a raw device mapping that leads to a file",
                    "let it name a block device",
                ));
            }
            ExtentKind::Flat | ExtentKind::Vmfs | ExtentKind::VmfsRdm | ExtentKind::VmfsRaw => {
                let first_bytes = first_sector * SECTOR_BYTES;
                let needed = first_bytes.saturating_add(sectors.saturating_mul(SECTOR_BYTES));
                let len_bytes = len_of(&*store)?;
                if len_bytes < needed {
                    let found = format!("a length of {len_bytes} bytes");
                    let expected =
                        format!("at least {needed}, as the descriptor says: was the file copied completely?");
                    return Err(corrupt(&*store, "flat extent", len_bytes, found, expected));
                }
                return self.add_part(sectors, Content::Flat { store: index, first_bytes });
            }
            ExtentKind::Sparse => "SPARSE",
            ExtentKind::VmfsSparse => "VMFSSPARSE",
            ExtentKind::SeSparse => "SESPARSE",
        };
        let extent = self.add_extent(index)?;
        let tables = &self.extents[extent].tables;
        tables::check_kind(&*store, tables, kind_of_sparse)?;
        let capacity = tables.capacity_bytes.get() / SECTOR_BYTES;
        let mut sectors = sectors;
        if capacity != sectors && extents == 1 && index == 0 {
            // A growth that was cut short has changed only the header.
            self.doubts
                .push(format!("The descriptor says {sectors} sectors and the header {capacity}; the header counts."));
            sectors = capacity;
        } else if capacity < sectors {
            let found = format!("a capacity of {capacity} sectors");
            return Err(corrupt(
                &*store,
                "sparse extent header",
                12,
                found,
                format!("{sectors}, as the descriptor says"),
            ));
        }
        self.add_part(sectors, Content::Sparse(extent))
    }

    fn add_extent(&mut self, store_index: u16) -> Result<usize> {
        let store = Arc::clone(&self.stores[usize::from(store_index)]);
        let tables = Tables::read(&*store)?;
        self.extents.push(SparseExtent { store_index, store, tables });
        Ok(self.extents.len() - 1)
    }

    fn add_part(&mut self, sectors: u64, content: Content) -> Result<()> {
        let end = sectors.checked_mul(SECTOR_BYTES).and_then(|bytes| self.size_bytes.get().checked_add(bytes));
        let Some(end_bytes) = end.filter(|&end| end < 1 << 62) else {
            return Err(corrupt(&*self.stores[0], "descriptor", 0, "a disk of more than 2^62 bytes", "a smaller disk"));
        };
        if sectors > 0 {
            let start_bytes = self.size_bytes.get();
            self.parts.push(Part { start_bytes, end_bytes: Growing::new(end_bytes), content });
        }
        self.size_bytes.raise(end_bytes);
        Ok(())
    }

    /// Number of blocks of the disk.
    pub fn blocks(&self) -> u64 {
        self.size_bytes.get().div_ceil(self.block_bytes)
    }

    /// The part with a block.
    pub fn part(&self, block: u64) -> Option<&Part> {
        let at = block.checked_mul(self.block_bytes).filter(|&at| at < self.size_bytes.get())?;
        self.parts.get(self.parts.partition_point(|part| part.end_bytes.get() <= at))
    }

    /// Where a block is; `None` beyond the end of the disk.
    pub fn place(&self, block: u64) -> Option<Place> {
        let part = self.part(block)?;
        let within = block * self.block_bytes - part.start_bytes;
        Some(match part.content {
            Content::Zero => Place::Zero,
            Content::Flat { store, first_bytes } => Place::Flat { store, offset_bytes: first_bytes + within },
            Content::Sparse(extent) => {
                let grain_bytes = self.extents[extent].tables.grain_bytes;
                Place::Grain { extent, grain: within / grain_bytes, within_bytes: within % grain_bytes }
            }
        })
    }

    /// Whether no part has grain tables.
    pub fn is_flat(&self) -> bool {
        self.extents.is_empty()
    }

    /// Whether grains that the image does not have read the parent's data.
    pub fn is_child(&self) -> bool {
        self.head.parent_link().is_some()
    }

    /// Why the image cannot be written; `None` if it can.
    pub fn refusal(&self) -> Option<ImageError> {
        let refuse = |store: &dyn Store, what: &str, hint: &str| Some(unsupported(store, what, hint));
        let (first, copy) = (&*self.stores[0], "open it read-only, or convert it to a new disk");
        if self.head.text.is_none() {
            return refuse(first, "writing to an extent without a descriptor", "open the descriptor of the disk");
        }
        for extent in self.head.extents() {
            // Sectors without a file read as zeros, and a write to them fails by itself.
            if extent.kind == ExtentKind::Zero || extent.access == Access::None {
                continue;
            }
            if extent.access != Access::ReadWrite {
                return refuse(first, "writing to a VMDK with an extent that is not writable", copy);
            }
            if extent.kind == ExtentKind::SeSparse {
                return refuse(first, "writing to an extent of the ESX kind SESPARSE", copy);
            }
        }
        for SparseExtent { store, tables, .. } in &self.extents {
            if tables.is_compressed() {
                return refuse(&**store, "writing to a VMDK with compressed grains", copy);
            }
            if tables.grain_bytes != self.block_bytes {
                return refuse(&**store, "writing to a VMDK whose extents begin within a grain", copy);
            }
            if tables.table_bytes() != tables.table_entries * tables.entry_bytes() {
                return refuse(&**store, "writing to a VMDK whose grain tables are shorter than a sector", copy);
            }
            let has_lost = tables.entries.iter().flatten().any(|&entry| entry == LOST);
            let lacks_copy = |(one, other): (&u32, &u32)| (*one != GRAIN_ABSENT) && *other == GRAIN_ABSENT;
            if has_lost
                || !tables.remarks.is_empty()
                || matches!(&tables.entries[..], [first, second] if first.iter().zip(second).any(lacks_copy))
            {
                return refuse(&**store, "writing to a VMDK whose grain directory is damaged", copy);
            }
        }
        let own = first.identity();
        if own.is_some() && self.stores[1..].iter().any(|store| store.identity() == own) {
            return refuse(first, "writing to a VMDK whose descriptor is an extent too", copy);
        }
        let files = self.files();
        let shares = |index: usize, (file, range): &FilePart| {
            let overlaps = |(other, of): &FilePart| file == other && range.start < of.end && of.start < range.end;
            file.is_some() && files[..index].iter().any(overlaps)
        };
        if files.iter().enumerate().any(|(index, file)| shares(index, file)) {
            return refuse(first, "writing to a VMDK with two extents in one place", copy);
        }
        None
    }

    /// The ranges of files that the parts use: the file's identity and the range.
    pub fn files(&self) -> Vec<FilePart> {
        self.parts
            .iter()
            .filter_map(|part| match part.content {
                Content::Zero => None,
                Content::Flat { store, first_bytes } => {
                    let range = first_bytes..first_bytes + (part.end_bytes.get() - part.start_bytes);
                    Some((self.stores[usize::from(store)].identity(), range))
                }
                Content::Sparse(extent) => Some((self.extents[extent].store.identity(), 0..u64::MAX)),
            })
            .collect()
    }
}
