//! What an image is, read without a lock.

use crate::{
    OpenOptions, Result,
    error::file_error,
    opening::image_file::{Access, ReferenceOptions, open_image},
};
use diskwright_image::{DiskType, Format, ImageInfo, ParentLink};
use diskwright_store::Files;
use std::path::{Path, PathBuf};

/// An image of the chain.
#[derive(Debug, Clone)]
pub(super) struct ChainImage {
    /// A path without symbolic links.
    pub(super) path: PathBuf,
    pub(super) info: ImageInfo,
}

impl ChainImage {
    /// Reads what the image at `path` is. Takes no lock: only its header is read.
    pub(super) fn read(files: &Files, path: &Path, format: Option<Format>) -> Result<Self> {
        let access = Access { format, force_share: true, ..Access::default() };
        let (image, _stores) = open_image(files, path, &access, &mut Vec::new())?;
        let path = files.canonical(path).map_err(|source| file_error("find it", path, source))?;
        Ok(Self { path, info: image.info().clone() })
    }

    /// Reads the image at the path that another image names.
    pub(super) fn referred(open: &OpenOptions, path: &Path, format: Format) -> Result<Self> {
        let referred = Some(ReferenceOptions { allow_devices: open.parents.allow_devices });
        let access = Access { format: Some(format), force_share: true, referred, ..Access::default() };
        let (image, _stores) = open_image(&open.files, path, &access, &mut Vec::new())?;
        Ok(Self { path: path.to_owned(), info: image.info().clone() })
    }

    pub(super) fn link(&self) -> Option<&ParentLink> {
        self.info.parent.as_ref().filter(|_| self.info.disk_type == DiskType::Differencing)
    }
}
