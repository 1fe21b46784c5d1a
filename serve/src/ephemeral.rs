//! An ephemeral disk: writes go to a temporary child image that is deleted when the disk is closed.
//!
//! ```text
//!   writes ─▶ child: a differencing VHDX; its file is unlinked right after it was created
//!   reads  ─▶ child, or the base: a disk of any format, opened read-only
//! ```
//!
//! The layers are joined here in memory. The parent ids that a differencing VHDX stores are not
//! used, so the base may be a raw disk or a VHD. The file has no name: the kernel frees its space
//! even if the process is killed.

use diskwright_disk::{Disk, DiskError, Layer};
use diskwright_image::{CreateOptions, DiskType, Format, ImageError, ParentLink, probe, vhdx};
use diskwright_store::{BlockDevice, CacheMode, FileStore, LockMode, OpenError, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};
use uuid::Uuid;

/// Why an ephemeral disk could not be made.
#[derive(Debug, thiserror::Error)]
pub enum EphemeralError {
    /// The temporary file could not be created.
    #[error("{}: cannot create the temporary file for writes in this folder; choose another folder: {source}", dir.display())]
    File {
        /// The folder.
        dir: PathBuf,
        /// The cause.
        source: OpenError,
    },
    /// The temporary file could not be unlinked.
    #[error("{}: cannot unlink the temporary file for writes: {source}", path.display())]
    Unlink {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The temporary child image could not be created or opened.
    #[error("cannot create the temporary child image: {0}")]
    Image(#[from] ImageError),
    /// The child and the base could not be joined into one disk.
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// The folder for temporary files that may become large: `TMPDIR` if set, else `/var/tmp`.
pub fn default_dir() -> PathBuf {
    std::env::var_os("TMPDIR").filter(|dir| !dir.is_empty()).map_or_else(|| "/var/tmp".into(), PathBuf::from)
}

/// Puts a temporary child on `base`, which must be open read-only. The child's file is made in
/// `dir`.
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
        parent: Some(ParentLink {
            absolute_path: beneath,
            linkage: Some(Uuid::new_v4().into()),
            ..ParentLink::default()
        }),
        preallocate: false,
        disk_id: None,
        own: Default::default(),
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
    fn writes_are_read_back_and_dropped_on_every_format() {
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
            assert!(std::fs::read(&path).unwrap() == before, "{name} is unchanged");
        }
        let base = Disk::open(directory.path().join("c.raw"), &diskwright_disk::OpenOptions::default()).unwrap();
        let error = on_top_of(&base, Path::new("/nowhere"), CacheMode::PageCache).unwrap_err().to_string();
        assert!(error.contains("/nowhere") && error.contains("choose another"), "{error}");
    }
}
