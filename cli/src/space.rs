//! What a command with `--dry-run` would need on a file system, and what is free there.
//!
//! One record and one sentence for all commands that write. The need is an upper bound: data may be
//! shared by reflink, compressed, or found to be zeros.

use crate::{describe::printable, json, sizes::Human};
use diskwright_disk::{ChainScope, Disk, OpenOptions, empty_image_bytes};
use diskwright_image::DiskType;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::Path;

/// The field `space` of a document of `--dry-run`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct Space {
    /// A folder on the file system.
    folder: String,
    /// Most bytes that are needed there.
    needed_bytes: u64,
    /// Bytes that are free there for this user; `null` if unknown.
    free_bytes: Option<u64>,
}

impl Space {
    /// The space for a file at `path`, which need not exist.
    pub fn on(path: &Path, needed_bytes: u64) -> Self {
        // A file that is a link grows where it leads to.
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        let folder = real.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
        Self { folder: json::path(folder), needed_bytes, free_bytes: diskwright_store::free_bytes(&real) }
    }

    /// The space for `count` children of `parent` beside `child`. `None` if it is not known: the
    /// parent cannot be read, or is in use by a program that does not share it.
    pub fn of_children(parent: &Path, child: &Path, count: usize, open: &OpenOptions) -> Option<Self> {
        let open = OpenOptions { writable: false, force_share: true, scope: ChainScope::Available, ..open.clone() };
        let disk = Disk::open(parent, &open).ok()?;
        let layers = disk.layers();
        let info = layers[0].image.info();
        let block_bytes = u32::try_from(info.block_bytes).ok().filter(|_| info.has_blocks);
        let size_bytes = layers[0].image.size_bytes();
        let each_bytes = empty_image_bytes(info.format, size_bytes, block_bytes)
            .or_else(|| empty_image_bytes(info.format, size_bytes, None))?;
        Some(Self::on(child, each_bytes.saturating_mul(count as u64)))
    }

    /// The space for a larger disk: of a fixed or raw disk all that is added, which is taken where
    /// it is written, of another one its larger tables. `None` if it is not known.
    pub fn of_growth(disk: &Path, (old_bytes, new_bytes): (u64, u64), open: &OpenOptions) -> Option<Self> {
        let open = OpenOptions { writable: false, force_share: true, scope: ChainScope::Available, ..open.clone() };
        let opened = Disk::open(disk, &open).ok()?;
        let layers = opened.layers();
        let info = layers[0].image.info();
        let needed_bytes = match info.disk_type {
            DiskType::Fixed => new_bytes.saturating_sub(old_bytes),
            _ => {
                let block_bytes = u32::try_from(info.block_bytes).ok();
                let tables = |bytes| empty_image_bytes(info.format, bytes, block_bytes);
                tables(new_bytes.max(old_bytes))?.saturating_sub(tables(old_bytes)?)
            }
        };
        Some(Self::on(disk, needed_bytes))
    }

    /// Whether more is needed than is free.
    pub fn is_short(&self) -> bool {
        self.free_bytes.is_some_and(|free_bytes| free_bytes < self.needed_bytes)
    }
}

/// "needs up to 4.1 GiB; 120 GiB are free on /data".
impl std::fmt::Display for Space {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.needed_bytes == 0 {
            return f.write_str("needs no space");
        }
        write!(f, "needs up to {}", Human(self.needed_bytes))?;
        let Some(free_bytes) = self.free_bytes else { return Ok(()) };
        let only = if self.is_short() { "only " } else { "" };
        write!(f, "; {only}{} are free on {}", Human(free_bytes), printable(&self.folder))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sentence_has_both_figures() {
        let folder = tempfile::tempdir().unwrap();
        let space = Space::on(&folder.path().join("new.vhdx"), 3 << 29);
        assert!(space.free_bytes.is_some(), "{space:?}");
        let space = Space { folder: "/data".into(), needed_bytes: 3 << 29, free_bytes: Some(120 << 30) };
        assert_eq!(space.to_string(), "needs up to 1.50 GiB; 120 GiB are free on /data");
        assert!(!space.is_short());
        let short = Space { free_bytes: Some(1 << 30), ..space.clone() };
        assert_eq!(short.to_string(), "needs up to 1.50 GiB; only 1 GiB are free on /data");
        assert!(short.is_short());
        assert_eq!(Space { free_bytes: None, ..space.clone() }.to_string(), "needs up to 1.50 GiB");
        assert_eq!(Space { needed_bytes: 0, ..space }.to_string(), "needs no space");
    }
}
