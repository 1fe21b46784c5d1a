//! (being written)
use crate::{OpenOptions, Result};
use diskwright_image::Image;
use diskwright_store::{BlockDevice, BlockQueue, Extent, Geometry, QueueOptions};
use std::{path::{Path, PathBuf}, sync::Arc, io};

/// One image of a chain.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Its path.
    pub path: PathBuf,
    /// The image.
    pub image: Arc<dyn Image>,
}

/// A virtual disk, open.
#[derive(Debug)]
pub struct Disk {
    layers: Vec<Layer>,
}

impl Disk {
    /// Opens the disk whose top image is `path`, with all its parents.
    pub fn open(path: impl AsRef<Path>, options: &OpenOptions) -> Result<Arc<Self>> {
        let _ = (path.as_ref(), options);
        Err(crate::DiskError::Stopped)
    }

    /// The chain: the top first.
    pub fn layers(&self) -> &[Layer] {
        &self.layers
    }

    /// Makes everything durable and closes cleanly. Call when every queue is dropped; dropping the disk without it
    /// does the same but cannot report failure.
    pub fn close(&self) -> Result<()> {
        Ok(())
    }
}

impl BlockDevice for Disk {
    fn geometry(&self) -> Geometry {
        Geometry { size_bytes: 0, logical_sector_bytes: 512, physical_sector_bytes: 512, read_only: true }
    }
    fn open_queue(&self, _options: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
        Err(io::ErrorKind::Unsupported.into())
    }
    fn extents(&self, _offset_bytes: u64, _len_bytes: u64, _out: &mut Vec<Extent>) -> io::Result<()> {
        Ok(())
    }
}
