//! Enlarging disks: the whole of `diskwright resize`, from the open to the close.
//!
//! Each case makes a disk, writes some blocks, and measures one change of its size. The block
//! allocation table has to move in the cases of dynamic and differencing disks.

use diskwright_disk::{CreateRequest, Disk, NewSize, OpenOptions, ResizeOptions, create, resize};
use diskwright_image::{DiskType, Format};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::{Progress, report},
};
use diskwright_store::Blocking;
use std::{path::Path, time::Instant};

const EXPAND_NS: f64 = 1e9;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
const MIB: u64 = 1 << 20;

/// A change of a size.
struct Case {
    name: &'static str,
    format: Format,
    disk_type: DiskType,
    old_bytes: u64,
    new_bytes: u64,
}

const fn case(name: &'static str, format: Format, disk_type: DiskType, old_bytes: u64, new_bytes: u64) -> Case {
    Case { name, format, disk_type, old_bytes, new_bytes }
}

const CASES: [Case; 6] = [
    case("VHDX dynamic, 1 to 64 TiB", Format::Vhdx, DiskType::Dynamic, TIB, 64 * TIB),
    case("VHDX differencing, 1 to 64 TiB", Format::Vhdx, DiskType::Differencing, TIB, 64 * TIB),
    case("VHDX fixed, 1 GiB to 1 TiB", Format::Vhdx, DiskType::Fixed, GIB, TIB),
    case("VHD dynamic, 1 to 2040 GiB", Format::Vhd, DiskType::Dynamic, GIB, 2040 * GIB),
    case("VHD differencing, 1 to 2040 GiB", Format::Vhd, DiskType::Differencing, GIB, 2040 * GIB),
    case("VHD fixed, 1 GiB to 1 TiB", Format::Vhd, DiskType::Fixed, GIB, TIB),
];

pub(crate) fn any_amount(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    context.scratch.need("disks of up to 64 TiB, nearly empty", 4 << 30)?;
    let rounds = context.rounds(context.pick(3, 9));
    let mut found = RowOutcome::default();
    for (index, case) in CASES.iter().enumerate() {
        let mut times = Vec::new();
        for round in 0..rounds {
            report(progress, "expand", (index * rounds + round) as u64, (CASES.len() * rounds) as u64, case.name)?;
            let dir = context.scratch.folder("expand")?;
            let took_ns = once(&dir, case);
            std::fs::remove_dir_all(&dir).map_err(LabError::file("remove", &dir))?;
            times.push(took_ns?);
        }
        found.checks.push(Check::absolute(case.name, "ns", &times, Bar::AtMost(EXPAND_NS)));
    }
    found.notes.push("32 blocks are allocated; the time is that of open, change of the size, sync and close".into());
    Ok(found)
}

/// Makes a disk and enlarges it. Returns the time of the second, nanoseconds.
fn once(dir: &Path, case: &Case) -> Result<f64> {
    let at = |name: &str| dir.join(format!("{name}.{}", case.format));
    let request = |disk_type, parent| CreateRequest {
        size_bytes: Some(case.old_bytes),
        disk_type: Some(disk_type),
        parent,
        ..CreateRequest::default()
    };
    let path = at("disk");
    if case.disk_type == DiskType::Differencing {
        create(at("parent"), &request(DiskType::Dynamic, None))?;
        create(&path, &request(DiskType::Differencing, Some(at("parent"))))?;
    } else {
        create(&path, &request(case.disk_type, None))?;
    }
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
    let failed = || LabError::file("write to", &path);
    let mut device = Blocking::open(&*disk, OpenOptions::default().engine).map_err(failed())?;
    for block in 0..32 {
        device.write(block * (case.old_bytes / 32) + MIB, &[1; 4096], false).map_err(failed())?;
    }
    drop(device);
    disk.close()?;
    drop(disk);
    let options = ResizeOptions { size: NewSize::Bytes(case.new_bytes), ..ResizeOptions::default() };
    let start = Instant::now();
    let resized = resize(&path, &options, &mut |_, _| true)?;
    let took_ns = start.elapsed().as_nanos() as f64;
    debug_assert_eq!(resized.new_bytes, case.new_bytes);
    Ok(took_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_case_is_measured() {
        let home = tempfile::tempdir().unwrap();
        for (index, case) in CASES.iter().enumerate() {
            let dir = home.path().join(index.to_string());
            std::fs::create_dir(&dir).unwrap();
            let took_ns = once(&dir, case).unwrap();
            assert!(took_ns > 0.0, "{}", case.name);
            std::fs::remove_dir_all(&dir).unwrap();
        }
    }
}
