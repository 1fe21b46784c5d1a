//! Full disks that differ only in their block size: 512 KiB against 2 MiB in VHD; 1, 2 and 32 MiB
//! in VHDX.
//!
//! Windows Server 2008 made VHDs with blocks of 512 KiB, R2 with 2 MiB. The paper compares the two
//! releases, so block size and software change together. VHDX allows blocks of 1 to 256 MiB;
//! Windows uses 32 MiB. The disks with 2 MiB are the study's own disks.

use super::record::{BLOCK_SIZE, BlockSizeRecord, name_of_size};
use crate::{
    LabError, Result,
    cells::Cell,
    measure::{self, Plan, Steps},
    progress::{Progress, report},
    scratch::Scratch,
    study::budget::Budget,
    targets::{self, Container, Preparation, Target},
};
use diskwright_load::{
    OpenTarget,
    workload::{Workload, paper_monolithic},
};
use std::{os::unix::fs::MetadataExt, path::Path, time::Instant};

/// Block size of the study's other disks.
pub(crate) const USUAL_BYTES: u32 = 2 << 20;

/// Disks with other block sizes, filled and verified.
pub(crate) struct OtherBlocks {
    pub(crate) disks: Vec<(u32, Target)>,
}

/// The other block sizes of a container. Quick studies measure only VHD.
pub(crate) fn sizes_of(container: Container, quick: bool) -> &'static [u32] {
    match container {
        Container::VhdDynamic => &[512 << 10],
        Container::VhdxDynamic if !quick => &[1 << 20, 32 << 20],
        _ => &[],
    }
}

/// Workloads of this experiment: all sixteen, or four if quick (small and large, reads and writes).
pub(crate) fn workloads(queue_depth: u32, quick: bool) -> Vec<Workload> {
    let mut all = paper_monolithic(queue_depth);
    let few = ["4K random read", "4K random write", "64K sequential read", "64K sequential write"];
    all.retain(|workload| !quick || few.contains(&workload.name.as_str()));
    all
}

impl OtherBlocks {
    /// Makes, fills and verifies a disk of each size.
    pub(crate) fn prepare(
        scratch: &Scratch,
        container: Container,
        sizes: &[u32],
        how: &Preparation,
        progress: &mut dyn Progress,
    ) -> Result<Self> {
        let total = sizes.len() as u64 * how.size_bytes * 2;
        scratch.need("disks with other blocks", sizes.len() as u64 * how.size_bytes + (1 << 30))?;
        let mut disks = Vec::new();
        for (index, &block_bytes) in sizes.iter().enumerate() {
            let name = name_of_size(container, block_bytes.into());
            let dir = scratch.folder(&format!("blocks-{block_bytes}"))?;
            let before = 2 * index as u64 * how.size_bytes;
            let path = targets::make_filled_with_blocks(container, &dir, how, Some(block_bytes), &mut |done| {
                report(progress, "block sizes", before + done, total, &name)
            })?;
            let target = targets::open_verified(container, path, how, &mut |done| {
                report(progress, "block sizes", before + how.size_bytes + done, total, &name)
            })?;
            disks.push((block_bytes, target.named(&name)));
        }
        Ok(Self { disks })
    }

    /// Closes and removes the disks.
    pub(crate) fn remove(self) -> Result<()> {
        for (_, disk) in self.disks {
            let dir = disk.path.parent().map(Path::to_owned).unwrap_or_default();
            disk.close()?;
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
        }
        Ok(())
    }
}

/// Measures all disks in interleaved rounds. Adds the disks to `sizes` and the cells to `cells`.
pub(crate) fn measure(
    usual: &Target,
    others: &OtherBlocks,
    workloads: &[Workload],
    (plan, budget): (Plan, Budget),
    (sizes, cells): (&mut Vec<BlockSizeRecord>, &mut Vec<Cell>),
    progress: &mut dyn Progress,
) -> Result<()> {
    let container = usual.container;
    let mut usual_target = usual.to_measure();
    usual_target.name = name_of_size(container, USUAL_BYTES.into());
    let targets: Vec<OpenTarget> =
        std::iter::once(usual_target).chain(others.disks.iter().map(|(_, disk)| disk.to_measure())).collect();
    let paths = std::iter::once(&usual.path).chain(others.disks.iter().map(|(_, disk)| &disk.path));
    let allocated = |path| Ok(std::fs::metadata(path).map_err(LabError::file("examine", path))?.blocks() * 512);
    let block_bytes = std::iter::once(USUAL_BYTES).chain(others.disks.iter().map(|(size, _)| *size));
    sizes.push(BlockSizeRecord {
        container,
        block_bytes: block_bytes.map(u64::from).collect(),
        file_allocated_bytes: paths.map(allocated).collect::<Result<_>>()?,
    });
    let total = workloads.len() * targets.len() * plan.rounds;
    let mut steps = Steps::new(progress, "block sizes", total);
    for workload in workloads {
        let plan = plan.with_cell(budget.cell(Instant::now(), (steps.total - steps.done) as usize));
        measure::compare(BLOCK_SIZE, &targets, workload, &plan, &mut steps, cells)?;
    }
    Ok(())
}
