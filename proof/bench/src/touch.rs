//! Reading a disk everywhere, in a fresh process: the memory of its map.
//!
//! Memory can only be measured in a process that does nothing else; see `diskwright_lab::child`.
//! The child is this program with the hidden first word [`CHILD`]. It prints its cost as JSON.

use diskwright_disk::{Disk, OpenOptions};
use diskwright_lab::{ChildLauncher, LabError, Result};
use diskwright_load::machine;
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::{OsStr, OsString},
    path::Path,
    process::ExitCode,
    time::Instant,
};

/// First word of a child's command line; the path of the disk and the limit of the map follow.
pub(crate) const CHILD: &str = "touch-child";

/// Distance between two reads: less than a page of the map, or of an image's table, covers.
const STEP_BYTES: u64 = 256 << 20;

/// What it cost to read a disk everywhere.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct TouchCost {
    /// Number of reads.
    pub(crate) reads: u64,
    /// Time of the reads, nanoseconds.
    pub(crate) took_ns: u64,
    /// Resident memory of the process with the disk open and one page of its map in use.
    pub(crate) resident_before_bytes: u64,
    /// Highest resident memory of the process until the end (`VmHWM`).
    pub(crate) resident_peak_bytes: u64,
}

/// Reads the disk at `path` everywhere, in a child whose map has at most `map_memory_bytes`.
///
/// # Errors
/// [`LabError::Program`] with what the child said when it fails.
pub(crate) fn in_a_child(path: &Path, map_memory_bytes: u64) -> Result<TouchCost> {
    ChildLauncher::current_exe([CHILD])?.ask([path.as_os_str(), OsStr::new(&map_memory_bytes.to_string())])
}

/// What the child does: `words` are those of [`in_a_child`].
pub(crate) fn child(words: &[OsString]) -> ExitCode {
    let (Some(path), Some(limit_bytes)) = (words.first(), words.get(1).and_then(|limit| limit.to_str()?.parse().ok()))
    else {
        eprintln!("diskwright-bench: {CHILD} is for this program's own use: it takes a disk and a limit in bytes");
        return ExitCode::from(2);
    };
    answer(touch(Path::new(path), limit_bytes))
}

/// Prints what a child has found, or why it failed.
pub(crate) fn answer(cost: Result<impl Serialize>) -> ExitCode {
    match cost.map(|cost| serde_json::to_string(&cost)) {
        Ok(Ok(cost)) => {
            println!("{cost}");
            ExitCode::SUCCESS
        }
        Ok(Err(error)) => failed(&error),
        Err(error) => failed(&error),
    }
}

fn failed(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("diskwright-bench: {error}");
    ExitCode::FAILURE
}

/// Opens `path` in this process and reads 4 KiB at a random offset of every 256 MiB, in random
/// order.
fn touch(path: &Path, map_memory_bytes: u64) -> Result<TouchCost> {
    let options = OpenOptions { map_memory_bytes: Some(map_memory_bytes), ..OpenOptions::default() };
    let disk = Disk::open(path, &options)?;
    let size_bytes = disk.geometry().size_bytes;
    let steps = (size_bytes / STEP_BYTES).max(1);
    let failed = || LabError::file("read", path);
    let mut device = Blocking::open(&*disk, EngineKind::Auto).map_err(failed())?;
    let mut piece = [0; 4096];
    device.read(0, &mut piece).map_err(failed())?;
    let (resident_before_bytes, _) = machine::resident_bytes();
    let start = Instant::now();
    let mut dice = Xoshiro256PlusPlus::seed_from_u64(steps);
    let mut order: Vec<u64> = (0..steps).collect();
    for left in (1..order.len()).rev() {
        order.swap(left, (dice.next_u64() % (left as u64 + 1)) as usize);
    }
    for step in order {
        let inside_bytes = (dice.next_u64() % STEP_BYTES.min(size_bytes)) & !4095;
        device.read(step * STEP_BYTES + inside_bytes, &mut piece).map_err(failed())?;
    }
    let took_ns = start.elapsed().as_nanos() as u64;
    let (_, resident_peak_bytes) = machine::resident_bytes();
    Ok(TouchCost { reads: steps, took_ns, resident_before_bytes, resident_peak_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_lab::targets::{Container, create_empty};

    #[test]
    fn the_cost_of_reading_a_disk_everywhere_is_told() {
        let dir = tempfile::tempdir().unwrap();
        let path = create_empty(Container::VhdxDynamic, dir.path(), 1 << 40).unwrap();
        let cost = touch(&path, 16 << 20).unwrap();
        assert_eq!(cost.reads, 4096);
        assert!(cost.resident_before_bytes > 0 && cost.resident_peak_bytes >= cost.resident_before_bytes);
    }
}
