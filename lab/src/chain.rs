//! Chains of differencing disks: created once, opened at any length.
//!
//! ```text
//!   base.vhdx ◀── 0001.vhdx ◀── 0002.vhdx ◀── ... ◀── 1023.vhdx
//!   opening file number n opens a chain of n children on the base
//! ```
//!
//! The data is in the base, and every read begins at the top, so each child is one more image to
//! look up. As in the paper, the length of a chain is the number of differencing disks above the
//! base.

use crate::{
    LabError, Result,
    fill::{self, Tick},
    targets::Preparation,
};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Blocking, CacheMode, EngineKind};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// The longest chain has 1,024 disks, base included.
pub const CHILDREN_MAX: u32 = 1023;

/// The chain to make.
#[derive(Debug, Clone, Copy)]
pub struct ChainPlan {
    /// Size of every disk, contents, cache mode and engine.
    pub how: Preparation,
    /// Bytes of the base that are filled, from its start.
    pub filled_bytes: u64,
    /// Differencing disks above the base.
    pub children: u32,
    /// This many of the lowest children get data of their own: 4 KiB in each of eight blocks of the
    /// disk's second half. Keep it small: writing to a child opens its whole chain.
    pub with_own_data: u32,
}

/// The files of a chain: the base, then each child.
#[derive(Debug, Clone)]
pub struct Chain {
    paths: Vec<PathBuf>,
}

impl Chain {
    /// Creates the files in `dir`. `tick` gets the number of children made so far.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] for more than [`CHILDREN_MAX`] children; any other failure.
    pub fn make(dir: &Path, plan: &ChainPlan, tick: &mut Tick<'_>) -> Result<Self> {
        if plan.children > CHILDREN_MAX {
            return Err(LabError::BadOptions {
                what: format!("a chain of {} children is too long", plan.children),
                hint: format!("a chain has at most {CHILDREN_MAX} children"),
            });
        }
        let base = dir.join("base.vhdx");
        let request = CreateRequest {
            format: Some(Format::Vhdx),
            disk_type: Some(DiskType::Dynamic),
            size_bytes: Some(plan.how.size_bytes),
            ..CreateRequest::default()
        };
        create(&base, &request)?;
        let disk = open(&base, plan.how.cache, plan.how.engine, true)?;
        fill::fill_front(
            "the base of the chain",
            &*disk,
            plan.filled_bytes,
            plan.how.seed,
            plan.how.engine,
            &mut |_| Ok(()),
        )?;
        disk.close()?;
        drop(disk);
        let mut paths = vec![base];
        for child in 1..=plan.children {
            let path = dir.join(format!("{child:04}.vhdx"));
            let request =
                CreateRequest { format: Some(Format::Vhdx), parent: paths.last().cloned(), ..CreateRequest::default() };
            create(&path, &request)?;
            if child <= plan.with_own_data {
                write_own_data(&path, child, plan)?;
            }
            paths.push(path);
            tick(u64::from(child))?;
        }
        Ok(Self { paths })
    }

    /// The file to open for a chain of `children`, at most the number that was made.
    pub fn top(&self, children: u32) -> &Path {
        &self.paths[(children as usize).min(self.paths.len() - 1)]
    }

    /// Opens a chain of `children` for reading.
    ///
    /// # Errors
    /// [`LabError::Disk`].
    pub fn open(&self, children: u32, cache: CacheMode, engine: EngineKind) -> Result<Arc<Disk>> {
        open(self.top(children), cache, engine, false)
    }
}

fn open(path: &Path, cache: CacheMode, engine: EngineKind, writable: bool) -> Result<Arc<Disk>> {
    Ok(Disk::open(path, &OpenOptions { writable, cache, engine, ..OpenOptions::default() })?)
}

fn write_own_data(path: &Path, child: u32, plan: &ChainPlan) -> Result<()> {
    let disk = open(path, plan.how.cache, plan.how.engine, true)?;
    {
        let failed = |source| LabError::File { doing: "write to", path: path.to_owned(), source };
        let mut device = Blocking::open(&*disk, plan.how.engine).map_err(failed)?;
        let half_blocks = (disk.geometry().size_bytes / 2) >> 21;
        for place in 0..8_u64.min(half_blocks) {
            // Strides with large prime factors spread the children's blocks over the second half.
            let block = (u64::from(child) * 7919 + place * 104_729) % half_blocks;
            let mut sector = [0; 4096];
            let offset_bytes = (half_blocks + block) << 21;
            diskwright_load::data::fill(plan.how.seed ^ u64::from(child), offset_bytes, &mut sector);
            device.write(offset_bytes, &sector, false).map_err(failed)?;
        }
    }
    Ok(disk.close()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_base_is_read_through_every_length() {
        let dir = tempfile::tempdir().unwrap();
        let how = Preparation { size_bytes: 32 << 20, seed: 11, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        let plan = ChainPlan { how, filled_bytes: 16 << 20, children: 9, with_own_data: 2 };
        let chain = Chain::make(dir.path(), &plan, &mut |_| Ok(())).unwrap();
        for children in [0, 1, 9] {
            let disk = chain.open(children, CacheMode::PageCache, EngineKind::Auto).unwrap();
            assert_eq!(disk.layers().len() as u32, children + 1);
            let mut piece = vec![0; 16 << 20];
            Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut piece).unwrap();
            assert_eq!(diskwright_load::data::first_difference(11, 0, &piece), None);
        }
    }

    #[test]
    fn a_chain_too_long_is_refused() {
        let how = Preparation { size_bytes: 1 << 20, seed: 0, cache: CacheMode::PageCache, engine: EngineKind::Auto };
        let plan = ChainPlan { how, filled_bytes: 0, children: 1024, with_own_data: 0 };
        let error = Chain::make(Path::new("/nonexistent"), &plan, &mut |_| Ok(())).unwrap_err();
        assert!(matches!(error, LabError::BadOptions { .. }), "{error}");
    }
}
