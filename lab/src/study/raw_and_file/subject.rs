//! A subject of the study: the block device, a mapping of it, or a flat file.
//!
//! The device and its mappings are the same bytes and exclude each other, so a subject is opened
//! for each window and closed after it.

use super::Storage;
use crate::{
    Result,
    open::{self, OpenHow},
};
use diskwright_disk::{CreateRequest, OpenOptions, ParentPolicy, create};
use diskwright_image::Format;
use diskwright_load::{
    OpenTarget,
    job::Caching,
    record::{ContentsRecord, TargetRecord},
};
use diskwright_store::EngineKind;
use std::path::{Path, PathBuf};

/// What is compared: the block device, a mapping of it, or a flat file.
pub(super) struct Subject {
    pub storage: Storage,
    pub path: PathBuf,
    pub engine: EngineKind,
    /// What was found in it before measuring.
    pub contents: Option<ContentsRecord>,
}

impl Subject {
    /// Creates a flat file in `folder`, whose disk is not filled.
    pub fn create(storage: Storage, folder: &Path, size_bytes: u64, engine: EngineKind) -> Result<Self> {
        let request = CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() };
        Self::create_as(storage, folder, request, engine)
    }

    /// Creates a mapping of `device` in `folder`.
    pub fn map(storage: Storage, folder: &Path, device: &Path, engine: EngineKind) -> Result<Self> {
        let request = CreateRequest { device: Some(device.to_owned()), ..CreateRequest::default() };
        Self::create_as(storage, folder, request, engine)
    }

    fn create_as(storage: Storage, folder: &Path, request: CreateRequest, engine: EngineKind) -> Result<Self> {
        let path = folder.join(format!("{}.vmdk", storage.name().replace([' ', ','], "-")));
        let subformat = storage.subformat().map(str::to_owned);
        create(&path, &CreateRequest { format: Some(Format::Vmdk), subformat, parents: policy(), ..request })?;
        Ok(Self { storage, path, engine, contents: None })
    }

    pub fn record(&self) -> Result<TargetRecord> {
        let target = self.open()?;
        let record = OpenTarget::record(&target);
        target.close()?;
        Ok(record)
    }

    /// Opens it. The device and its mappings exclude each other.
    pub fn open(&self) -> Result<OpenTarget> {
        let format = if self.storage == Storage::Device { Format::Raw } else { Format::Vmdk };
        let disk =
            OpenOptions { engine: self.engine, format: Some(format), parents: policy(), ..OpenOptions::default() };
        let how = OpenHow { writable: true, cache: Caching::Direct, disk };
        let target = open::open(&self.path.to_string_lossy(), &how)?;
        Ok(OpenTarget { name: self.storage.name().to_owned(), contents: self.contents, ..target })
    }
}

/// The mappings lead to a device that this study has made.
fn policy() -> ParentPolicy {
    ParentPolicy { allow_devices: true, ..ParentPolicy::default() }
}
