//! Opens a disk: the images of a chain become a [`Disk`], with the points of its changes.

use crate::{
    Disk, MAP_MEMORY_BYTES, OpenOptions, Result,
    engine::{chain::Chain, device::Origin, shared::Shared},
    opening::open,
};
use diskwright_image::DiskType;
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

impl Disk {
    /// Opens the disk whose top image is `path`, with all its parents.
    ///
    /// # Errors
    /// For any problem with an image, its parents or their linkage;
    /// [`InUse`](crate::DiskError::InUse) if another process has locked a file.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Arc<Self>> {
        let path = path.as_ref();
        let chain = open::open_chain(path, options)?;
        Self::of_chain(chain, options.files.canonical(path).ok(), options)
    }

    /// Opens the disk at `path`, which will be renamed to `file`, an absolute path without symbolic
    /// links. The disk has that name from the beginning.
    pub(crate) fn open_as(path: &Path, file: &Path, options: &OpenOptions) -> Result<Arc<Self>> {
        let mut chain = open::open_chain(path, options)?;
        chain.layers[0].path = file.to_owned();
        Self::of_chain(chain, Some(file.to_owned()), options)
    }

    fn of_chain(chain: open::Chain, file: Option<PathBuf>, options: &OpenOptions) -> Result<Arc<Self>> {
        let limit_bytes = options.map_memory_bytes.unwrap_or(MAP_MEMORY_BYTES);
        let mut warnings = chain.warnings;
        let track = chain.tracks.map(|found| found.into_view(&options.files, &chain.layers)).transpose();
        let track = track.unwrap_or_else(|error| {
            warnings
                .push(format!("the points of its changes cannot be opened ({error}): everything counts as changed"));
            None
        });
        let chain_of_layers = Chain::new(chain.layers, limit_bytes)?.with_track(track)?;
        let mut shared = Shared::new(chain_of_layers, warnings);
        let grows = shared.chain().top().image.info().disk_type != DiskType::Fixed;
        shared.detect_zeroes = options.detect_zeroes && grows;
        shared.broken = chain.broken;
        let origin = file.map(|file| Origin { file, options: options.clone() });
        Ok(Arc::new(Self { shared: Arc::new(shared), origin }))
    }
}
