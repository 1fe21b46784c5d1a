//! An XFS file system in a file: ext4 cannot share extents.

use diskwright_lab::{LabError, Result, peer};
use std::path::{Path, PathBuf};

/// A mounted XFS with reflinks. Dropped, it is unmounted.
#[derive(Debug)]
pub(crate) struct Xfs {
    mount_point: PathBuf,
    mounted: bool,
}

impl Xfs {
    /// Makes a sparse file of `size_bytes` in `home`, makes an XFS in it, and mounts it there. The
    /// inner error says what this machine lacks: rights, programs, the kernel's XFS, a loop device.
    ///
    /// # Errors
    /// [`LabError::File`] when the file cannot be made.
    pub(crate) fn mount(home: &Path, size_bytes: u64) -> Result<Result<Self, String>> {
        if !nix::unistd::geteuid().is_root() {
            return Ok(Err("mounting a file system needs root".into()));
        }
        let (Some(mkfs), Some(mount)) = (peer::find("mkfs.xfs"), peer::find("mount")) else {
            return Ok(Err(peer::missing("mkfs.xfs", "xfsprogs")));
        };
        let (image, mount_point) = (home.join("xfs.img"), home.join("mnt"));
        std::fs::File::create_new(&image)
            .and_then(|file| file.set_len(size_bytes))
            .map_err(LabError::file("create", &image))?;
        std::fs::create_dir(&mount_point).map_err(LabError::file("create", &mount_point))?;
        let image_text = image.to_string_lossy();
        let made = peer::run(&mkfs, &["-q", "-m", "reflink=1", &*image_text], None)
            .and_then(|_| peer::run(&mount, &["-o", "loop", &*image_text, &*mount_point.to_string_lossy()], None));
        match made {
            Ok(_) => Ok(Ok(Self { mount_point, mounted: true })),
            Err(error) => Ok(Err(format!("no XFS can be mounted here: {error}"))),
        }
    }

    pub(crate) fn mount_point(&self) -> &Path {
        &self.mount_point
    }

    /// Unmounts it.
    ///
    /// # Errors
    /// [`LabError::Program`] when something still uses it.
    pub(crate) fn unmount(mut self) -> Result<()> {
        self.mounted = false;
        self.run_umount(&[])
    }

    fn run_umount(&self, options: &[&str]) -> Result<()> {
        let umount = peer::find("umount").unwrap_or_else(|| PathBuf::from("/bin/umount"));
        let point = self.mount_point.to_string_lossy();
        peer::run(&umount, &[options, &[&*point]].concat(), None).map(|_| ())
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        if self.mounted {
            // Lazily, so that the scratch folder can be removed even if something is still open on
            // the way out of an error.
            let _ = self.run_umount(&["-l"]);
        }
    }
}
