//! The disks of one `serve`: how they are opened, at the start and later (`serve-ctl DISK add`).

use super::{args::ServeArgs, word::DiskWord};
use crate::{
    exit::{Failure, Outcome},
    options::GlobalOptions,
};
use diskwright_disk::{DiskError, Layer, Movable, Opened};
use diskwright_serve::{control::HostedDisk, ephemeral};
use diskwright_store::{BlockDevice, LimitedDevice, RateLimiter, RateLimits};
use std::{
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// One disk that is served.
#[derive(Debug, Clone)]
pub struct Served {
    /// The export name.
    pub name: String,
    /// The image, as it was named.
    pub path: PathBuf,
    /// The disk.
    pub disk: Arc<Movable>,
    /// Its limits.
    pub limiter: Arc<RateLimiter>,
}

impl Served {
    /// The disk within its limits.
    pub fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::new(LimitedDevice::new(Arc::clone(&self.disk) as Arc<dyn BlockDevice>, Arc::clone(&self.limiter)))
    }

    /// The disk for the control channel.
    pub fn hosted(&self) -> HostedDisk {
        HostedDisk { name: self.name.clone(), disk: Arc::clone(&self.disk), limiter: Arc::clone(&self.limiter) }
    }
}

/// How disks are opened.
#[derive(Debug)]
pub struct Opener {
    global: GlobalOptions,
    read_only: bool,
    snapshot: Option<String>,
    /// The folder for writes that are dropped at the end.
    ephemeral: Option<PathBuf>,
    limit: Option<RateLimits>,
}

impl Opener {
    /// As the arguments say.
    pub fn of(global: &GlobalOptions, args: &ServeArgs) -> Self {
        let dir = || args.ephemeral_dir.clone().unwrap_or_else(ephemeral::default_dir);
        Self {
            global: global.clone(),
            read_only: args.read_only,
            snapshot: args.of.snapshot.clone(),
            ephemeral: args.ephemeral.then(dir),
            limit: args.limit,
        }
    }

    /// Whether writes are dropped at the end.
    pub fn is_ephemeral(&self) -> bool {
        self.ephemeral.is_some()
    }

    /// Opens a disk beside `others`. Its warnings are those of [`diskwright_disk::Disk`].
    ///
    /// # Errors
    /// The disk cannot be opened.
    pub fn open(&self, word: DiskWord, others: &[Served]) -> Outcome<Served> {
        let DiskWord { name, path, format, limit, read_only } = word;
        let read_only = read_only.unwrap_or(self.read_only);
        let mut options = self.global.open_options(!read_only && self.ephemeral.is_none());
        options.format = format.or(options.format);
        options.snapshot.clone_from(&self.snapshot);
        let mut disk = Opened::image(&path, &options, "serve").map_err(|error| {
            let twice = || served_already(&error, &path, others).map(Failure::usage);
            twice().unwrap_or_else(|| error.into())
        })?;
        if let Some(dir) = &self.ephemeral {
            let child = ephemeral::on_top_of(&disk, dir, options.cache);
            disk = child.map_err(|error| Failure::new(error.to_string()))?;
        }
        let limiter = Arc::new(RateLimiter::new(limit.or(self.limit).unwrap_or_default()));
        Ok(Served { name, path, disk: Arc::new(Movable::new(disk)), limiter })
    }
}

/// A sentence for a file that cannot be locked because this command has it open: the file was named
/// twice, or is in the chain of another disk of this command.
fn served_already(error: &DiskError, path: &Path, served: &[Served]) -> Option<String> {
    let DiskError::InUse { path: locked, .. } = error else { return None };
    let identity = |file: &Path| std::fs::metadata(file).ok().map(|found| (found.dev(), found.ino()));
    let wanted = identity(locked)?;
    for Served { path: other, disk, .. } in served {
        let is_it = |layer: &Layer| identity(&layer.path) == Some(wanted);
        match disk.disk().layers().iter().position(is_it) {
            Some(0) if identity(path) == Some(wanted) => {
                return Some(format!(
                    "{}: named twice in this command; name it once, or serve it --read-only under two names",
                    path.display()
                ));
            }
            Some(_) => {
                return Some(format!(
                    "{}: {} is in use by this command itself, which serves {} too; serve one of them, or both --read-only",
                    path.display(),
                    locked.display(),
                    other.display()
                ));
            }
            None => {}
        }
    }
    None
}
