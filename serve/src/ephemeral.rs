//! A disk whose writes are dropped at the end: a temporary child that nobody can name.
//!
//! ```text
//!   writes ─▶ child: a differencing VHDX in a file that is unlinked as soon as it is open
//!   reads  ─▶ child, or what lies beneath: any disk, of any format, opened read-only
//! ```
//!
//! The child is bound to what lies beneath by being put on top of it here, not by ids in files, so
//! the parent may be a raw disk or a VHD as well. However the program ends, the kernel gives the
//! child's space back.

use diskwright_disk::{Disk, DiskError, Layer};
use diskwright_image::{CreateOptions, DiskType, Format, ImageError, ParentLink, probe, vhdx};
use diskwright_store::{BlockDevice, CacheMode, FileStore, LockMode, OpenError, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};
use uuid::Uuid;

/// Why there is no ephemeral disk.
#[derive(Debug, thiserror::Error)]
pub enum EphemeralError {
    /// The file for the writes.
    #[error("{}: cannot make the temporary file for writes in this folder; choose another one: {source}", dir.display())]
    File {
        /// The folder.
        dir: PathBuf,
        /// Why.
        source: OpenError,
    },
    /// Its name could not be removed.
    #[error("{}: cannot unlink the temporary file for writes: {source}", path.display())]
    Unlink {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The child image.
    #[error("cannot make the temporary child: {0}")]
    Image(#[from] ImageError),
    /// The chain.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The folder for temporary files that may become large: `TMPDIR`, or `/var/tmp`.
pub fn usual_dir() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Puts a temporary child on `base`, which was opened read-only, its file in `dir`.
///
/// # Errors
/// [`EphemeralError`].
pub fn on_top_of(base: &Disk, dir: &Path, cache: CacheMode) -> Result<Arc<Disk>, EphemeralError> {
    let geometry = base.geometry();
    let path = dir.join(format!(".diskwright-ephemeral-{}.vhdx", Uuid::new_v4()));
    let options = OpenOptions { writable: true, create_new: true, cache, lock: LockMode::Exclusive };
    let store =
        FileStore::open(&path, &options).map_err(|source| EphemeralError::File { dir: dir.to_owned(), source })?;
    std::fs::remove_file(&path).map_err(|source| EphemeralError::Unlink { path: path.clone(), source })?;
    let store: Arc<dyn Store> = Arc::new(store);
    let beneath = base.layers().first().map(|layer| layer.path.display().to_string());
    let create = CreateOptions {
        disk_type: DiskType::Differencing,
        size_bytes: geometry.size_bytes,
        block_bytes: None,
        logical_sector_bytes: geometry.logical_sector_bytes,
        physical_sector_bytes: geometry.physical_sector_bytes.clamp(512, 4096),
        parent: Some(ParentLink { absolute_path: beneath, linkage: Uuid::new_v4(), ..ParentLink::default() }),
        preallocate: false,
        disk_id: None,
    };
    vhdx::create(Arc::clone(&store), &create)?;
    let image = probe::open(store, Some(Format::Vhdx), true, geometry.logical_sector_bytes)?;
    let mut layers = vec![Layer { path, image }];
    layers.extend_from_slice(&base.layers());
    Ok(Arc::new(Disk::from_layers(layers, base.warnings().to_vec())?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_disk::{CreateRequest, create};
    use diskwright_store::{Blocking, EngineKind};

    #[test]
    fn writes_are_seen_and_dropped_whatever_lies_beneath() {
        let directory = tempfile::tempdir().unwrap();
        let scratch = tempfile::tempdir().unwrap();
        for name in ["a.vhdx", "b.vhd", "c.raw"] {
            let path = directory.path().join(name);
            create(&path, &CreateRequest { size_bytes: Some(20 << 20), ..CreateRequest::default() }).unwrap();
            let options = diskwright_disk::OpenOptions { writable: true, ..Default::default() };
            let disk = Disk::open(&path, &options).unwrap();
            let mut io = Blocking::open(disk.as_ref(), EngineKind::Auto).unwrap();
            io.write(5 << 20, &[7; 65536], true).unwrap();
            drop(io);
            disk.close().unwrap();
            drop(disk);
            let before = std::fs::read(&path).unwrap();
            let base = Disk::open(&path, &diskwright_disk::OpenOptions::default()).unwrap();
            let disk = on_top_of(&base, scratch.path(), CacheMode::PageCache).unwrap();
            drop(base);
            assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0, "it has no name");
            let mut io = Blocking::open(disk.as_ref(), EngineKind::Auto).unwrap();
            io.write((5 << 20) + 4096, &[9; 512], true).unwrap();
            io.discard(10 << 20, 2 << 20).unwrap();
            let mut read = vec![0; 8192];
            io.read(5 << 20, &mut read).unwrap();
            assert!(read[..4096].iter().chain(&read[4608..]).all(|&byte| byte == 7), "{name}");
            assert!(read[4096..4608].iter().all(|&byte| byte == 9), "{name}");
            drop(io);
            disk.close().unwrap();
            drop(disk);
            assert!(std::fs::read(&path).unwrap() == before, "{name} is as it was");
        }
        let base = Disk::open(directory.path().join("c.raw"), &diskwright_disk::OpenOptions::default()).unwrap();
        let error = on_top_of(&base, Path::new("/nowhere"), CacheMode::PageCache).unwrap_err().to_string();
        assert!(error.contains("/nowhere") && error.contains("choose another"), "{error}");
    }
}
