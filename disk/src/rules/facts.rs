//! What the rules look at: what was read of a chain of images, and of the partition table on it.

use crate::{Disk, DiskError, Layer, opening::volumes::examine, parent_timestamp_warning};
use diskwright_format::vmdk::{DESCRIPTOR_MAX_BYTES, Descriptor, SECTOR_BYTES, SparseHeader, is_descriptor};
use diskwright_image::{ImageInfo, ParentLink};
use diskwright_store::{BlockDevice, EngineKind, Files, Store};
use diskwright_volume::{Boot, TableKind, boot, table_change};
use std::path::{Path, PathBuf};

/// What is known of an image and its chain.
#[derive(Debug, Clone)]
pub struct ChainFacts {
    /// The images, the top first, as far as the chain can be followed.
    pub images: Vec<ImageFacts>,
    /// Why the chain ends before its base; `None` where it does not.
    pub broken_link: Option<String>,
    /// The partition table; `None` where it was not read, because the chain is incomplete.
    pub table: Option<TableFacts>,
}

/// What is known of one image.
#[derive(Debug, Clone)]
pub struct ImageFacts {
    /// Where it lies, or will lie.
    pub path: PathBuf,
    /// What it says of itself.
    pub info: ImageInfo,
    /// The kind of a VMDK, as its descriptor names it (`createType`).
    pub kind: Option<String>,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Number of its files.
    pub files: usize,
    /// Length of its files in bytes, where the system reports it.
    pub file_bytes: Option<u64>,
    /// Bytes that its files occupy, where the system reports it.
    pub allocated_bytes: Option<u64>,
    /// Whether its file lies on NTFS; `None` where that is not known.
    pub is_on_ntfs: Option<bool>,
    /// The present link to its parent.
    pub parent: Option<ParentLink>,
    /// Why the time of the parent's file is not the one that this image recorded; `None` where it
    /// is, or where nothing was recorded.
    pub parent_time: Option<String>,
}

/// What is known of the partition table.
#[derive(Debug, Clone)]
pub struct TableFacts {
    /// MBR, GPT, or none.
    pub kind: TableKind,
    /// How a machine starts from the disk; `None` for a disk of data.
    pub boot: Option<Boot>,
    /// Whether the table fits the size of the disk: the second copy of a GPT lies at the end. Or
    /// why that is not known.
    pub fits: Result<bool, String>,
}

impl ChainFacts {
    /// Reads the facts of a disk that is open, and the partition table on it. `is_on_ntfs` is asked
    /// with the path of each image.
    ///
    /// # Errors
    /// If no queue can be opened. A partition table that cannot be read is a fact.
    pub fn of(
        disk: &Disk,
        files: &Files,
        engine: EngineKind,
        is_on_ntfs: &dyn Fn(&Path) -> Option<bool>,
    ) -> crate::Result<Self> {
        let layers = disk.layers();
        let mut images: Vec<ImageFacts> = layers.iter().map(|layer| ImageFacts::of(layer, &layer.path)).collect();
        for (index, pair) in layers.windows(2).enumerate() {
            let link = images[index].parent.as_ref();
            images[index].parent_time = link.and_then(|link| parent_timestamp_warning(files, link, &pair[1].path));
        }
        for image in &mut images {
            image.is_on_ntfs = is_on_ntfs(&image.path);
        }
        let broken_link = disk.broken_link().map(ToString::to_string);
        let table = if broken_link.is_none() { Some(TableFacts::read(disk, engine)?) } else { None };
        Ok(Self { images, broken_link, table })
    }

    /// The facts of a new disk without a parent, which will be called `path` and have this table.
    pub(crate) fn of_copy(layer: &Layer, path: &Path, table: TableFacts) -> Self {
        Self { images: vec![ImageFacts::of(layer, path)], broken_link: None, table: Some(table) }
    }

    /// The image that was named.
    pub(super) fn top(&self) -> Option<&ImageFacts> {
        self.images.first()
    }
}

impl ImageFacts {
    fn of(layer: &Layer, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            info: layer.image.info().clone(),
            kind: kind_of(&**layer.image.store()),
            size_bytes: layer.image.size_bytes(),
            files: layer.image.stores().len(),
            file_bytes: layer.files_len_bytes().ok(),
            allocated_bytes: layer.allocated_bytes().ok(),
            is_on_ntfs: None,
            parent: layer.image.parent_link(),
            parent_time: None,
        }
    }
}

/// The `createType` of the descriptor in a file: one that is the whole file, or one that follows
/// the header of a sparse extent. `None` for other files, and for a descriptor that is damaged.
fn kind_of(store: &dyn Store) -> Option<String> {
    let read = |offset_bytes: u64, most_bytes: u64| {
        let len_bytes = store.len_bytes().ok()?.checked_sub(offset_bytes)?.min(most_bytes);
        let mut bytes = vec![0; usize::try_from(len_bytes).ok()?];
        store.read_at(&mut bytes, offset_bytes).ok().map(|()| bytes)
    };
    let front = read(0, 512)?;
    let (offset_bytes, len_bytes) = if is_descriptor(&front) {
        (0, DESCRIPTOR_MAX_BYTES)
    } else {
        let header = SparseHeader::parse(&front, 0).ok()?;
        let len_bytes = header.descriptor_sectors.checked_mul(SECTOR_BYTES)?.min(DESCRIPTOR_MAX_BYTES);
        (header.descriptor_sector.checked_mul(SECTOR_BYTES)?, len_bytes)
    };
    Some(Descriptor::parse(&read(offset_bytes, len_bytes)?, offset_bytes).ok()?.create_type)
}

impl TableFacts {
    fn read(disk: &Disk, engine: EngineKind) -> crate::Result<Self> {
        let size_bytes = disk.geometry().size_bytes;
        let mut found = None;
        let path = disk.file().map_or_else(PathBuf::new, Path::to_owned);
        examine(disk, engine, &mut |_, _| true, &mut |reader| {
            let change = table_change(reader, size_bytes, None);
            let fits = change.map(|change| change.steps.is_empty()).map_err(|reason| reason.to_string());
            let (kind, boot) = boot(reader);
            found = Some(Self { kind, boot, fits });
        })
        .map_err(|error| crate::error::from_io("read its partition table", &path, error))?;
        found.ok_or(DiskError::Stopped)
    }
}
