//! The damaged image, and the parents that can be read.
//!
//! The format is the one that the user names, else that of the extension, else that of a signature
//! that is left. Parents are found and checked as in any chain (`gate.rs`, `open.rs`). Where a
//! parent cannot be opened, a layer without contents takes its place: what would be the parent's is
//! lost.

use super::options::RescueOptions;
use crate::{
    Disk, DiskError, OpenOptions, Reach, Result,
    chain::Layer,
    error::file_error,
    gate::{Candidate, Gate},
    open::{check_linkage, open_chain, parent_timestamp_warning},
};
use diskwright_image::{
    DiskType, probe,
    salvage::{SalvageHints, Salvaged, SalvagedImage},
};
use diskwright_store::{CacheMode, LockMode};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// A damaged image with its parents.
#[derive(Debug)]
pub(super) struct Damaged {
    pub(super) path: PathBuf,
    pub(super) salvaged: Salvaged,
    parents: Vec<Layer>,
    warnings: Vec<String>,
}

pub(super) fn open(path: &Path, options: &RescueOptions) -> Result<Damaged> {
    let source = &options.source;
    let lock = if source.force_share { LockMode::None } else { LockMode::Shared };
    let store = source.files.open(
        path,
        &diskwright_store::OpenOptions { writable: false, create_new: false, cache: CacheMode::PageCache, lock },
    )?;
    let named = source.format.or_else(|| probe::known::by_extension(path).and_then(|known| known.format));
    let format = match named {
        Some(format) => format,
        None => probe::probe(&*store, false)?.format,
    };
    let hints = SalvageHints { size_bytes: options.size_bytes, block_bytes: options.block_bytes };
    let salvaged = format.driver().salvage(store, &hints)?;
    let mut damaged = Damaged { path: path.to_owned(), salvaged, parents: Vec::new(), warnings: Vec::new() };
    if damaged.salvaged.info.disk_type == DiskType::Differencing {
        damaged.open_parents(source)?;
    }
    Ok(damaged)
}

impl Damaged {
    /// The disk as it can be read now: lost blocks are `Damaged`.
    pub(super) fn disk(&self) -> Result<Disk> {
        let top =
            Layer { path: self.path.clone(), image: Arc::new(SalvagedImage::new(Arc::new(self.salvaged.clone()))) };
        let layers = std::iter::once(top).chain(self.parents.iter().cloned()).collect();
        Disk::from_layers(layers, self.warnings.clone())
    }

    /// Whether blocks that the image does not have are its parent's.
    pub(super) fn is_child(&self) -> bool {
        self.salvaged.info.disk_type == DiskType::Differencing
    }

    fn open_parents(&mut self, source: &OpenOptions) -> Result<()> {
        let real = source.files.canonical(&self.path).map_err(|error| file_error("find", &self.path, error))?;
        let mut gate = Gate::new(&source.files, &real, &source.parents)?;
        match self.parent_chain(source, &mut gate, &real) {
            Ok(chain) => {
                self.parents = chain.layers;
                self.warnings.extend(chain.warnings);
                if let Some(error) = chain.broken {
                    self.end_with(&error);
                }
            }
            Err(error) => self.end_with(&error),
        }
        Ok(())
    }

    /// Puts a layer without contents below all others.
    fn end_with(&mut self, error: &DiskError) {
        self.warnings.push(format!("What the parent would have is lost: {error}"));
        let image = Arc::new(SalvagedImage::without_contents(&self.salvaged));
        self.parents.push(Layer { path: self.path.clone(), image });
    }

    /// The first file that the image names and that is its parent, with the parents below.
    fn parent_chain(&self, source: &OpenOptions, gate: &mut Gate<'_>, real: &Path) -> Result<crate::open::Chain> {
        let info = &self.salvaged.info;
        let link = info.parent.as_ref().ok_or_else(|| DiskError::BadChain {
            path: self.path.clone(),
            what: "the record of its parent is lost".into(),
        })?;
        let mut refused = None;
        let mut missing = Vec::new();
        for candidate in gate.candidates(real, link) {
            match candidate {
                Candidate::Allowed(path) => {
                    let options = OpenOptions {
                        writable: false,
                        format: Some(info.format),
                        reach: Reach::Available,
                        cache: CacheMode::PageCache,
                        ..source.clone()
                    };
                    let opened = open_chain(&path, &options).and_then(|chain| {
                        check_linkage(&self.path, info, link, &path, chain.layers[0].image.info())?;
                        Ok(chain)
                    });
                    match opened {
                        Ok(mut chain) => {
                            chain.warnings.extend(parent_timestamp_warning(&source.files, link, &path));
                            return Ok(chain);
                        }
                        Err(error) => drop(refused.get_or_insert(error)),
                    }
                }
                Candidate::Outside(parent) => {
                    refused.get_or_insert(DiskError::ParentOutside { child: self.path.clone(), parent });
                }
                Candidate::Missing(place) => missing.push(place),
            }
        }
        Err(refused.unwrap_or(DiskError::ParentMissing { child: self.path.clone(), looked_for: missing }))
    }
}
