//! The damaged image, and the parents that can be read.
//!
//! The format is the one that the user names, else that of the extension, else that of a signature
//! that is left. Whether the image has a parent is known from its own records. If they are lost,
//! the user may know ([`RescueOptions::parent`], [`RescueOptions::no_parent`]), and images named
//! `.avhd` and `.avhdx` have one. Otherwise blocks without data are lost: they may be a parent's.
//!
//! Parents are found and checked as in any chain (`gate.rs`, `open.rs`). Where a
//! parent cannot be opened, a layer without contents takes its place: what would be the parent's is
//! lost.

use super::options::RescueOptions;
use crate::{
    ChainScope, Disk, DiskError, OpenOptions, Result,
    engine::chain::Layer,
    error::file_error,
    opening::{
        gate::{Candidate, Gate, refuse_several},
        open::{check_linkage, open_chain, parent_timestamp_warning},
    },
};
use diskwright_image::{
    DiskType, ImageInfo, probe,
    salvage::{ParentRecord, SalvageHints, Salvaged, SalvagedImage},
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
    let is_child = match (&options.parent, options.no_parent) {
        (Some(_), _) => Some(true),
        (None, true) => Some(false),
        (None, false) => is_named_as_child(path).then_some(true),
    };
    let hints = SalvageHints { size_bytes: options.size_bytes, block_bytes: options.block_bytes, is_child };
    let salvaged = format.driver().salvage(store, &hints)?;
    let mut damaged = Damaged { path: path.to_owned(), salvaged, parents: Vec::new(), warnings: Vec::new() };
    let contradiction = match (damaged.salvaged.parent_record, &options.parent, options.no_parent) {
        (ParentRecord::Alone, Some(_), _) => {
            Some(("its own records say that it has no parent", "leave out the parent"))
        }
        (ParentRecord::Child, None, true) => {
            Some(("its own records say that it has a parent", "name the parent instead"))
        }
        _ => None,
    };
    if let Some((what, hint)) = contradiction {
        return Err(DiskError::BadOptions { what: format!("{}: {what}", path.display()), hint: hint.into() });
    }
    match (damaged.salvaged.parent_record, &options.parent) {
        (ParentRecord::Alone, _) => {}
        (_, Some(parent)) => damaged.open_named_parent(source, parent)?,
        (ParentRecord::Child, None) => damaged.open_parents(source)?,
        (ParentRecord::Unknown, None) => damaged.end(
            "Whether the disk has a parent is not known, because all records of it are lost. Blocks without data are lost, as they may be a parent's. If it has one, name it with `RescueOptions::parent`; if it has none, say so with `RescueOptions::no_parent`.".into(),
        ),
    }
    Ok(damaged)
}

/// How a parent is opened.
fn parent_options(source: &OpenOptions, info: &ImageInfo) -> OpenOptions {
    // A child that may have a parent of any format records which one it has.
    let recorded = info.parent.as_ref().and_then(|link| link.format);
    let format = if info.format.driver().child_takes_any_parent { recorded } else { Some(info.format) };
    OpenOptions { writable: false, format, scope: ChainScope::Available, cache: CacheMode::PageCache, ..source.clone() }
}

/// Whether the name of a file is one that only differencing images get.
fn is_named_as_child(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
    ["avhd", "avhdx"].iter().any(|childs| extension.eq_ignore_ascii_case(childs))
}

impl Damaged {
    /// The disk as it can be read now: lost blocks are `Damaged`.
    pub(super) fn disk(&self) -> Result<Disk> {
        let top =
            Layer { path: self.path.clone(), image: Arc::new(SalvagedImage::new(Arc::new(self.salvaged.clone()))) };
        let layers = std::iter::once(top).chain(self.parents.iter().cloned()).collect();
        Disk::from_layers(layers, self.warnings.clone())
    }

    /// The disk without what its parents have: that counts as lost.
    pub(super) fn own_disk(&self) -> Result<Disk> {
        let layer = |image| Layer { path: self.path.clone(), image: Arc::new(image) };
        let mut layers = vec![layer(SalvagedImage::new(Arc::new(self.salvaged.clone())))];
        if self.is_child() {
            layers.push(layer(SalvagedImage::without_contents(&self.salvaged)));
        }
        Disk::from_layers(layers, Vec::new())
    }

    /// Whether blocks that the image does not have are its parent's.
    pub(super) fn is_child(&self) -> bool {
        self.salvaged.info.disk_type == DiskType::Differencing
    }

    fn open_parents(&mut self, source: &OpenOptions) -> Result<()> {
        let real = source.files.canonical(&self.path).map_err(|error| file_error("find it", &self.path, error))?;
        let mut gate = Gate::new(&source.files, &real, &source.parents)?;
        match self.parent_chain(source, &mut gate, &real) {
            Ok(chain) => self.take(chain),
            Err(error) => self.end_with(&error),
        }
        Ok(())
    }

    /// Opens the parent that the user names. It must be the right one, if the record of it is left.
    fn open_named_parent(&mut self, source: &OpenOptions, parent: &Path) -> Result<()> {
        let canonical = |path: &Path| source.files.canonical(path).map_err(|error| file_error("find it", path, error));
        if canonical(&self.path)? == canonical(parent)? {
            return Err(DiskError::BadOptions {
                what: format!("{}: it cannot be its own parent", parent.display()),
                hint: "name another file".into(),
            });
        }
        let info = &self.salvaged.info;
        let chain = open_chain(parent, &parent_options(source, info))?;
        match &info.parent {
            Some(link) => check_linkage(&self.path, info, link, parent, chain.layers[0].image.info())?,
            None => self.warnings.push(format!(
                "The record of the parent is lost, so nothing shows whether {} is the right one: if it is not, what is read from it is wrong.",
                parent.display()
            )),
        }
        self.take(chain);
        Ok(())
    }

    fn take(&mut self, chain: crate::opening::open::Chain) {
        self.parents = chain.layers;
        self.warnings.extend(chain.warnings);
        if let Some(error) = chain.broken {
            self.end_with(&error);
        }
    }

    /// Puts a layer without contents below all others.
    fn end_with(&mut self, error: &DiskError) {
        self.end(format!("What the parent would have is lost: {error}"));
    }

    fn end(&mut self, warning: String) {
        self.warnings.push(warning);
        let image = Arc::new(SalvagedImage::without_contents(&self.salvaged));
        self.parents.push(Layer { path: self.path.clone(), image });
    }

    /// The first file that the image names and that is its parent, with the parents below.
    fn parent_chain(
        &self,
        source: &OpenOptions,
        gate: &mut Gate<'_>,
        real: &Path,
    ) -> Result<crate::opening::open::Chain> {
        let info = &self.salvaged.info;
        let link = info.parent.as_ref().ok_or_else(|| DiskError::BadChain {
            path: self.path.clone(),
            what: "the record of its parent is lost".into(),
        })?;
        let mut refused = None;
        let mut missing = Vec::new();
        let candidates = gate.candidates(real, link);
        refuse_several(&self.path, link, &candidates)?;
        for candidate in candidates {
            match candidate {
                Candidate::Allowed(path) => {
                    let opened = open_chain(&path, &parent_options(source, info)).and_then(|chain| {
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
