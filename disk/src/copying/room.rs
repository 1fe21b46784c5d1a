//! How much space a new image or a copy will need, before it is made.

use crate::{Opened, engine::holes::next_stored, error::to_io};
use diskwright_image::{CreateOptions, DiskType, Format, FormatOptions};
use diskwright_store::{ExtentKind, MemoryStore, Store};
use std::{io, sync::Arc};

/// The largest tables that are laid out in memory, only to learn their length.
const TABLES_MAX_BYTES: u64 = 320 << 20;
/// Length of the pieces in which extents are counted, so that the list stays small.
const COUNT_BYTES: u64 = 1 << 30;

/// Length in bytes of the file of an image without data: headers, logs and tables. An image of the
/// format is made in memory. 0 for a raw disk; `None` if it is not known, because the format does
/// not have this size or block size, or because the tables are very large.
///
/// A differencing image has a link to its parent as well, which takes a few KiB.
pub fn empty_image_bytes(format: Format, size_bytes: u64, block_bytes: Option<u32>) -> Option<u64> {
    if !format.driver().has_blocks {
        return Some(0);
    }
    let options = CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes,
        block_bytes,
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: FormatOptions::default(),
    };
    let store = Arc::new(MemoryStore::new("an empty image"));
    store.limit(TABLES_MAX_BYTES);
    format.driver().create(Arc::clone(&store) as Arc<dyn Store>, &options).ok()?;
    store.len_bytes().ok()
}

/// Bytes of the disk's first `size_bytes` that hold data.
pub(crate) fn data_bytes(disk: &Opened, size_bytes: u64) -> io::Result<u64> {
    let mut extents = Vec::new();
    let (mut start, mut data_bytes) = (0, 0);
    while start < size_bytes {
        if let Some(disk) = disk.disk() {
            start = next_stored(&disk.layers(), start, size_bytes).map_err(to_io)?;
        }
        extents.clear();
        let len_bytes = COUNT_BYTES.min(size_bytes - start);
        if len_bytes > 0 {
            disk.device().extents(start, len_bytes, &mut extents)?;
        }
        let data = extents.iter().filter(|extent| extent.kind == ExtentKind::Data);
        data_bytes += data.map(|extent| extent.len_bytes).sum::<u64>();
        start += len_bytes;
    }
    Ok(data_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_image_is_as_long_as_one_that_is_made() {
        let dir = tempfile::tempdir().unwrap();
        for (format, size_bytes) in Format::ALL.iter().flat_map(|format| [(*format, 1 << 30), (*format, 500 << 30)]) {
            let path = dir.path().join(format!("{size_bytes}.{format}"));
            let request = crate::CreateRequest { size_bytes: Some(size_bytes), ..Default::default() };
            crate::create(&path, &request).unwrap();
            let made = std::fs::metadata(&path).unwrap().len();
            let expected = if format.driver().has_blocks { made } else { 0 };
            assert_eq!(empty_image_bytes(format, size_bytes, None), Some(expected), "{format}");
        }
        // VHD has no such size, and these tables would take 512 MiB.
        assert_eq!(empty_image_bytes(Format::Vhd, 64 << 40, None), None);
        assert_eq!(empty_image_bytes(Format::Vhdx, 64 << 40, Some(1 << 20)), None);
    }
}
