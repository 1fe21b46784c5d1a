//! New images in memory, for tests that build disks from layers.

#![allow(dead_code, reason = "each test file uses a part of it")]

use diskwright_disk::Layer;
use diskwright_image::{CreateOptions, DiskType, Format, Image, ParentLink, probe};
use diskwright_store::{MemoryStore, Store};
use std::sync::Arc;

/// A new image in `store`, open for writing. A differencing image has a link to a parent that is
/// never opened.
pub fn new_image(
    store: Arc<dyn Store>,
    format: Format,
    disk_type: DiskType,
    size_bytes: u64,
    block_bytes: u32,
) -> Arc<dyn Image> {
    let options = CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: Some(block_bytes),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: (disk_type == DiskType::Differencing).then(|| ParentLink {
            relative_path: Some(r".\below".into()),
            linkage: Some(uuid::Uuid::from_u128(1).into()),
            ..ParentLink::default()
        }),
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    match format {
        Format::Raw => store.set_len(size_bytes).unwrap(),
        format => format.driver().create(Arc::clone(&store), &options).unwrap(),
    }
    probe::open(store, Some(format), true, 512).unwrap()
}

/// A new image in its own store, as a layer of a chain.
pub fn new_layer(name: &str, format: Format, disk_type: DiskType, size_bytes: u64, block_bytes: u32) -> Layer {
    let image = new_image(Arc::new(MemoryStore::new(name)), format, disk_type, size_bytes, block_bytes);
    Layer { path: name.into(), image }
}
