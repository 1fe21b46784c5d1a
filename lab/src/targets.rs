//! The containers that are compared: created, filled, verified and opened.
//!
//! All are prepared alike: create, fill through the block queue with incompressible data, flush,
//! close, open again, read everything back and compare, and check that all of it is allocated. So
//! no target is measured that would answer reads from metadata.

use crate::{
    LabError, Result,
    fill::{self, Tick},
    open,
    paper::PaperContainer,
};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_load::{OpenTarget, data, job::Caching};
use diskwright_store::{BlockDevice, CacheMode, EngineKind, RawDevice};
use serde::{Deserialize, Serialize};
use std::{
    path::{Path, PathBuf},
    slice,
    sync::Arc,
    time::{Duration, Instant},
};

/// Format and type of a disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Container {
    /// A preallocated raw file; the base of the ratios.
    Raw,
    /// VHD with all space allocated at creation.
    VhdFixed,
    /// VHD with blocks of 2 MiB, fully allocated.
    VhdDynamic,
    /// VHD, fully allocated, on an empty dynamic parent as in the paper.
    VhdDifferencing,
    /// VHDX with all space allocated at creation.
    VhdxFixed,
    /// VHDX with blocks of the default size, fully allocated.
    VhdxDynamic,
    /// VHDX, fully allocated, on an empty dynamic parent.
    VhdxDifferencing,
    /// VMDK monolithicFlat with all space allocated at creation.
    VmdkFlat,
    /// VMDK monolithicSparse, fully allocated.
    VmdkSparse,
    /// VMDK, fully allocated, on an empty sparse parent.
    VmdkChild,
    /// qcow2 with clusters of 64 KiB, fully allocated.
    Qcow2,
    /// qcow2, fully allocated, on an empty one.
    Qcow2Child,
    /// VDI with blocks of the default size, fully allocated.
    VdiDynamic,
}

impl Container {
    /// The containers of the study, the raw file first.
    pub const STUDIED: [Self; 7] = [
        Self::Raw,
        Self::VhdFixed,
        Self::VhdDynamic,
        Self::VhdDifferencing,
        Self::VhdxFixed,
        Self::VhdxDynamic,
        Self::VhdxDifferencing,
    ];
    /// The others.
    pub const FURTHER: [Self; 6] =
        [Self::VmdkFlat, Self::VmdkSparse, Self::VmdkChild, Self::Qcow2, Self::Qcow2Child, Self::VdiDynamic];

    /// Name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw file",
            Self::VhdFixed => "VHD fixed",
            Self::VhdDynamic => "VHD dynamic",
            Self::VhdDifferencing => "VHD differencing",
            Self::VhdxFixed => "VHDX fixed",
            Self::VhdxDynamic => "VHDX dynamic",
            Self::VhdxDifferencing => "VHDX differencing",
            Self::VmdkFlat => "VMDK flat",
            Self::VmdkSparse => "VMDK sparse",
            Self::VmdkChild => "VMDK child",
            Self::Qcow2 => "qcow2",
            Self::Qcow2Child => "qcow2 child",
            Self::VdiDynamic => "VDI dynamic",
        }
    }

    /// The container with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::STUDIED.into_iter().chain(Self::FURTHER).find(|container| container.name() == name)
    }

    /// Format of the container.
    pub fn format(self) -> Format {
        match self {
            Self::Raw => Format::Raw,
            Self::VhdFixed | Self::VhdDynamic | Self::VhdDifferencing => Format::Vhd,
            Self::VhdxFixed | Self::VhdxDynamic | Self::VhdxDifferencing => Format::Vhdx,
            Self::VmdkFlat | Self::VmdkSparse | Self::VmdkChild => Format::Vmdk,
            Self::Qcow2 | Self::Qcow2Child => Format::Qcow2,
            Self::VdiDynamic => Format::Vdi,
        }
    }

    /// Type of the container's image.
    pub fn disk_type(self) -> DiskType {
        match self {
            Self::Raw | Self::VhdFixed | Self::VhdxFixed | Self::VmdkFlat => DiskType::Fixed,
            Self::VhdDynamic | Self::VhdxDynamic | Self::VmdkSparse | Self::Qcow2 | Self::VdiDynamic => {
                DiskType::Dynamic
            }
            Self::VhdDifferencing | Self::VhdxDifferencing | Self::VmdkChild | Self::Qcow2Child => {
                DiskType::Differencing
            }
        }
    }

    /// The paper's container of this type; `None` for raw and VHDX, which the paper does not have.
    pub fn in_paper(self) -> Option<PaperContainer> {
        match self {
            Self::VhdFixed => Some(PaperContainer::Fixed),
            Self::VhdDynamic => Some(PaperContainer::Dynamic),
            Self::VhdDifferencing => Some(PaperContainer::Differencing),
            _ => None,
        }
    }

    /// Name of its file in a scratch folder.
    pub fn file_name(self) -> String {
        format!("{}.{}", self.name().replace(' ', "-").to_lowercase(), self.format())
    }
}

/// Creates an empty disk in `dir`, and an empty dynamic parent for a differencing disk. Raw files
/// and fixed disks are preallocated.
///
/// # Errors
/// [`LabError::Disk`].
pub fn create_empty(container: Container, dir: &Path, size_bytes: u64) -> Result<PathBuf> {
    create_with_blocks(container, dir, size_bytes, None)
}

/// Like [`create_empty`], with another block size than the default.
///
/// # Errors
/// [`LabError::Disk`], also for an unsupported block size.
pub fn create_with_blocks(
    container: Container,
    dir: &Path,
    size_bytes: u64,
    block_bytes: Option<u32>,
) -> Result<PathBuf> {
    create_as(container, dir, size_bytes, block_bytes, container.disk_type() == DiskType::Fixed)
}

fn create_as(
    container: Container,
    dir: &Path,
    size_bytes: u64,
    block_bytes: Option<u32>,
    preallocate: bool,
) -> Result<PathBuf> {
    let path = dir.join(container.file_name());
    let mut request = CreateRequest {
        format: Some(container.format()),
        disk_type: Some(container.disk_type()),
        size_bytes: Some(size_bytes),
        preallocate,
        block_bytes,
        ..CreateRequest::default()
    };
    if container.disk_type() == DiskType::Differencing {
        let parent = dir.join(format!("parent-of-{}", container.file_name()));
        let of_parent = CreateRequest { disk_type: Some(DiskType::Dynamic), ..request.clone() };
        create(&parent, &of_parent)?;
        request.parent = Some(parent);
    }
    create(&path, &request)?;
    Ok(path)
}

/// An open container.
#[derive(Debug)]
pub struct Target {
    /// Format and type.
    pub container: Container,
    /// Path of the container's file.
    pub path: PathBuf,
    /// The cache mode in force. It differs from the requested mode if the file system does not
    /// support O_DIRECT.
    pub cache: CacheMode,
    open: OpenTarget,
    disk: Option<Arc<Disk>>,
}

impl Target {
    /// Opens a container for reading and writing. A raw file is opened as raw, whatever it holds.
    ///
    /// # Errors
    /// [`LabError::Disk`] or [`LabError::Open`].
    pub fn open(container: Container, path: PathBuf, cache: CacheMode, engine: EngineKind) -> Result<Self> {
        Self::open_with(container, path, cache, engine, true)
    }

    /// Like [`Target::open`], but read-only unless `writable`.
    ///
    /// # Errors
    /// As [`Target::open`].
    pub fn open_with(
        container: Container,
        path: PathBuf,
        cache: CacheMode,
        engine: EngineKind,
        writable: bool,
    ) -> Result<Self> {
        let (device, disk, cache): (Arc<dyn BlockDevice>, _, _) = if container == Container::Raw {
            let device = RawDevice::open(&path, writable, cache)?;
            let in_force = device.cache_mode();
            (Arc::new(device), None, in_force)
        } else {
            let options =
                OpenOptions { writable, cache, engine, format: Some(container.format()), ..OpenOptions::default() };
            let disk = Disk::open(&path, &options)?;
            let in_force = open::top_cache_mode(&disk);
            (disk.clone(), Some(disk), in_force)
        };
        let kind = if container == Container::Raw {
            "raw file".into()
        } else {
            format!("{} {}", container.format(), container.disk_type()).to_lowercase()
        };
        let open = OpenTarget {
            path: Some(path.clone()),
            closes: disk.clone().map(open::closes),
            ..open_target(container.name(), &kind, device, cache)
        };
        Ok(Self { container, path, cache, open, disk })
    }

    /// The target with another name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.open.name);
        self
    }

    /// Name for tables and messages.
    pub fn name(&self) -> &str {
        &self.open.name
    }

    /// The device.
    pub fn device(&self) -> &dyn BlockDevice {
        &*self.open.device
    }

    /// The disk; `None` for a raw file.
    pub fn disk(&self) -> Option<&Arc<Disk>> {
        self.disk.as_ref()
    }

    /// The target in the form that a run needs.
    pub fn to_measure(&self) -> OpenTarget {
        self.open.clone()
    }

    /// Flushes and closes the target.
    ///
    /// # Errors
    /// As [`OpenTarget::close`].
    pub fn close(self) -> Result<()> {
        Ok(self.open.close()?)
    }
}

/// An open device in the form that a run needs.
pub fn open_target(name: &str, kind: &str, device: Arc<dyn BlockDevice>, cache: CacheMode) -> OpenTarget {
    let cache = match cache {
        CacheMode::Direct => Caching::Direct,
        CacheMode::PageCache => Caching::Cached,
    };
    OpenTarget {
        name: name.to_owned(),
        kind: kind.to_owned(),
        path: None,
        device,
        closes: None,
        cache,
        behind: None,
        contents: None,
    }
}

/// How containers are prepared.
#[derive(Debug, Clone, Copy)]
pub struct Preparation {
    /// Size of each disk, bytes.
    pub size_bytes: u64,
    /// Seed of the contents.
    pub seed: u64,
    /// Requested cache mode.
    pub cache: CacheMode,
    /// How I/O is submitted.
    pub engine: EngineKind,
}

/// Creates, fills, flushes and closes a container. `tick` gets the number of bytes written so far.
///
/// # Errors
/// Any failure. The file stays in `dir`; the caller removes it.
pub fn make_filled(container: Container, dir: &Path, how: &Preparation, tick: &mut Tick<'_>) -> Result<PathBuf> {
    make_filled_with_blocks(container, dir, how, None, tick)
}

/// Like [`make_filled`], with another block size than the default.
///
/// # Errors
/// As [`make_filled`] and [`create_with_blocks`].
pub fn make_filled_with_blocks(
    container: Container,
    dir: &Path,
    how: &Preparation,
    block_bytes: Option<u32>,
    tick: &mut Tick<'_>,
) -> Result<PathBuf> {
    let path = create_with_blocks(container, dir, how.size_bytes, block_bytes)?;
    let target = Target::open(container, path.clone(), how.cache, how.engine)?;
    fill::fill(target.name(), target.device(), how.seed, how.engine, tick)?;
    target.close()?;
    Ok(path)
}

/// Bytes written to one file before the next file's turn, if several are filled side by side.
const STRETCH_BYTES: u64 = 64 << 20;

/// A filled container.
#[derive(Debug)]
pub struct Filled {
    /// Path of the container's file.
    pub path: PathBuf,
    /// Time of creating, filling, flushing and closing it.
    pub took: Duration,
}

/// Creates, fills, flushes and closes several containers, each in its own folder, writing a stretch
/// of each in turn. So all of them are spread over the same part of the storage; files that are
/// written one after the other would differ in their place. For the same reason fixed disks are not
/// preallocated here. `tick` gets the number of bytes written to all of them.
///
/// # Errors
/// Any failure. The files are not removed.
pub fn make_filled_side_by_side(
    wanted: &[(Container, &Path)],
    how: &Preparation,
    tick: &mut Tick<'_>,
) -> Result<Vec<Filled>> {
    let (mut targets, mut filled) = (Vec::new(), Vec::new());
    for &(container, dir) in wanted {
        let begun = Instant::now();
        let path = create_as(container, dir, how.size_bytes, None, false)?;
        targets.push(Target::open(container, path.clone(), how.cache, how.engine)?);
        filled.push(Filled { path, took: begun.elapsed() });
    }
    let mut written_bytes = 0;
    for start in (0..how.size_bytes).step_by(STRETCH_BYTES as usize) {
        let stretch = start..(start + STRETCH_BYTES).min(how.size_bytes);
        for (target, filled) in targets.iter().zip(&mut filled) {
            let begun = Instant::now();
            let mut tick = |done| tick(written_bytes + done);
            let mut make = |offset, buf: &mut [u8]| data::fill(how.seed, offset, buf);
            let ranges = slice::from_ref(&stretch);
            fill::fill_ranges(target.name(), target.device(), ranges, how.engine, &mut make, &mut tick)?;
            written_bytes += stretch.end - stretch.start;
            filled.took += begun.elapsed();
        }
    }
    for (target, filled) in targets.into_iter().zip(&mut filled) {
        let begun = Instant::now();
        target.close()?;
        filled.took += begun.elapsed();
    }
    Ok(filled)
}

/// Opens a filled container again, verifies all of it, and checks its size and that all of it is
/// allocated. `tick` gets the number of bytes read so far.
///
/// # Errors
/// [`LabError::WrongData`], [`LabError::NotPopulated`], or any other failure.
pub fn open_verified(container: Container, path: PathBuf, how: &Preparation, tick: &mut Tick<'_>) -> Result<Target> {
    let target = Target::open(container, path, how.cache, how.engine)?;
    let found_bytes = target.device().geometry().size_bytes;
    if found_bytes != how.size_bytes {
        return Err(LabError::NotPopulated { target: target.name().into(), found_bytes, size_bytes: how.size_bytes });
    }
    fill::verify(target.name(), target.device(), how.seed, how.engine, tick)?;
    fill::check_populated(target.name(), target.device(), false)?;
    Ok(target)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn containers_have_their_own_names_and_files() {
        let names: BTreeSet<_> = Container::STUDIED.iter().map(|container| container.name()).collect();
        let files: BTreeSet<_> = Container::STUDIED.iter().map(|container| container.file_name()).collect();
        assert_eq!((names.len(), files.len()), (7, 7));
        assert!(files.contains("vhdx-dynamic.vhdx") && files.contains("raw-file.raw"), "{files:?}");
        assert_eq!(Container::STUDIED.iter().filter(|container| container.in_paper().is_some()).count(), 3);
    }

    #[test]
    fn every_container_is_made_filled_and_proved() {
        let dir = tempfile::tempdir().unwrap();
        let how = Preparation { size_bytes: 9 << 20, seed: 5, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        for container in Container::STUDIED {
            let path = make_filled(container, dir.path(), &how, &mut |_| Ok(())).unwrap();
            let target = open_verified(container, path, &how, &mut |_| Ok(())).unwrap();
            assert_eq!(target.cache, CacheMode::PageCache);
            target.close().unwrap();
        }
    }

    #[test]
    fn containers_that_are_filled_side_by_side_hold_the_same() {
        let dir = tempfile::tempdir().unwrap();
        let others = dir.path().join("others");
        std::fs::create_dir(&others).unwrap();
        // Two stretches, of which the second is short.
        let size_bytes = STRETCH_BYTES + (3 << 20);
        let how = Preparation { size_bytes, seed: 5, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        let wanted = [
            (Container::Raw, dir.path()),
            (Container::VhdDifferencing, dir.path()),
            (Container::VhdxDynamic, dir.path()),
            (Container::Raw, &*others),
        ];
        let mut reported = Vec::new();
        let filled = make_filled_side_by_side(&wanted, &how, &mut |done| {
            reported.push(done);
            Ok(())
        })
        .unwrap();
        assert!(reported.is_sorted() && reported.last() == Some(&(4 * size_bytes)), "{reported:?}");
        for ((container, _), Filled { path, took }) in wanted.into_iter().zip(filled) {
            assert!(took > Duration::ZERO);
            open_verified(container, path, &how, &mut |_| Ok(())).unwrap().close().unwrap();
        }
    }

    #[test]
    fn an_empty_container_is_not_taken_for_a_filled_one() {
        let dir = tempfile::tempdir().unwrap();
        let how = Preparation { size_bytes: 8 << 20, seed: 5, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        let path = create_empty(Container::VhdxDynamic, dir.path(), how.size_bytes).unwrap();
        let error = open_verified(Container::VhdxDynamic, path, &how, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::WrongData { .. }), "{error}");
    }
}
