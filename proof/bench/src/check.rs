//! Checking a large dynamic disk whose blocks all have space.
//!
//! The file is made by its tables alone: an empty disk gets an entry for every block, and for a VHD
//! a full sector bitmap, and the file is extended. The payload is a hole, so a disk of 1 TiB takes
//! some MiB, or 2 GiB for a VHD, whose bitmaps lie between the blocks. A qcow2 is made by qemu-img,
//! which can allocate all clusters without writing them.

use diskwright_disk::{CreateRequest, OpenOptions, check_image, create};
use diskwright_format::vdi::{self, HeaderSector, VdiHeader};
use diskwright_image::Format;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    peer,
    progress::{Progress, report},
};
use diskwright_stats::numbers::{bytes, grouped};
use std::{
    ffi::OsStr,
    fs::{File, OpenOptions as FileOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
    time::Instant,
};

const MIB: u64 = 1 << 20;
/// Payload blocks of VHDX and VHD.
const BLOCK_BYTES: u64 = 2 * MIB;
/// Clusters of qcow2, grains of VMDK.
const CLUSTER_BYTES: u64 = 64 << 10;
const SECTOR_BYTES: u64 = 512;
const FORMATS: [Format; 5] = [Format::Vhdx, Format::Vhd, Format::Qcow2, Format::Vmdk, Format::Vdi];
const CHECK_NS: f64 = 2e9;

/// Time of a check of a disk with all its blocks.
pub(crate) fn allocated(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes: u64 = context.pick(64 << 30, 1 << 40);
    context.scratch.need("a disk whose blocks are holes", 4 << 30)?;
    let rounds = context.rounds(5);
    let mut found = RowOutcome::default();
    for (index, format) in FORMATS.into_iter().enumerate() {
        let path = context.scratch.path().join(format!("allocated.{format}"));
        let qemu_img = peer::find("qemu-img");
        match (format, &qemu_img) {
            (Format::Qcow2, None) => {
                found.checks.push(Check::skipped("qcow2", peer::missing("qemu-img", "qemu-utils")));
                continue;
            }
            (Format::Qcow2, Some(qemu_img)) => make_qcow2(qemu_img, &path, size_bytes)?,
            _ => make(&path, format, size_bytes).map_err(LabError::file("make", &path))?,
        }
        let mut times = Vec::new();
        for round in 0..rounds {
            let done = (index * rounds + round) as u64;
            report(progress, "check", done, (FORMATS.len() * rounds) as u64, &format.to_string())?;
            let start = Instant::now();
            let (_, checked) = check_image(&path, &OpenOptions::default())?;
            times.push(start.elapsed().as_nanos() as f64);
            if !checked.findings.is_empty() || checked.allocated_blocks != size_bytes / unit_bytes(format) {
                found.checks.push(Check::broken(&format.to_string(), format!("found {:?}", checked.findings)));
                break;
            }
        }
        let name = format!("dynamic {format}, {} blocks", grouped((size_bytes / unit_bytes(format)) as f64));
        found.checks.push(Check::absolute(name, "ns", &times, Bar::AtMost(CHECK_NS)));
        std::fs::remove_file(&path).map_err(LabError::file("remove", &path))?;
    }
    found.notes.push(format!("{}, tables in the page cache, payload a hole", bytes(size_bytes)));
    Ok(found)
}

/// The unit of allocation.
fn unit_bytes(format: Format) -> u64 {
    match format {
        Format::Qcow2 | Format::Vmdk => CLUSTER_BYTES,
        Format::Vdi => MIB,
        _ => BLOCK_BYTES,
    }
}

/// Makes a disk whose blocks are all allocated, one after the other.
fn make(path: &Path, format: Format, size_bytes: u64) -> io::Result<()> {
    let block_bytes = Some(BLOCK_BYTES as u32).filter(|_| matches!(format, Format::Vhd | Format::Vhdx));
    let request =
        CreateRequest { size_bytes: Some(size_bytes), format: Some(format), block_bytes, ..CreateRequest::default() };
    create(path, &request).map_err(io::Error::other)?;
    let file = FileOptions::new().read(true).write(true).open(path)?;
    let blocks = size_bytes / unit_bytes(format);
    match format {
        Format::Vhd => fill_vhd(&file, blocks),
        Format::Vmdk => fill_vmdk(&file, blocks),
        Format::Vdi => fill_vdi(&file, blocks),
        Format::Vhdx => fill_vhdx(&file, blocks),
        _ => Ok(()),
    }
}

fn make_qcow2(qemu_img: &Path, path: &Path, size_bytes: u64) -> Result<()> {
    let size = size_bytes.to_string();
    let words = ["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata"].map(OsStr::new);
    peer::run(qemu_img, &[&words[..], &[path.as_os_str(), OsStr::new(&size)]].concat(), None).map(drop)
}

fn fill_vdi(file: &File, blocks: u64) -> io::Result<()> {
    let mut head = HeaderSector([0; vdi::HEADER_BYTES]);
    file.read_exact_at(&mut head.0, 0)?;
    let header = VdiHeader::parse(&head.0).map_err(io::Error::other)?;
    let map: Vec<u8> = (0..blocks as u32).flat_map(u32::to_le_bytes).collect();
    file.write_all_at(&map, header.map_offset_bytes.into())?;
    head.set_allocated(blocks as u32);
    file.write_all_at(&head.0, 0)?;
    file.set_len(header.payload_offset_bytes(blocks as u32))
}

/// Fills the grain tables of both directories.
fn fill_vmdk(file: &File, grains: u64) -> io::Result<()> {
    const DIRECTORIES_AT: [u64; 2] = [48, 56];
    const TABLE_ENTRIES: u64 = 512;
    let first = file.metadata()?.len().next_multiple_of(CLUSTER_BYTES) / SECTOR_BYTES;
    let grain_sectors = CLUSTER_BYTES / SECTOR_BYTES;
    for at in DIRECTORIES_AT {
        let mut sector = [0; 8];
        file.read_exact_at(&mut sector, at)?;
        let mut directory = vec![0; (grains.div_ceil(TABLE_ENTRIES) * 4) as usize];
        file.read_exact_at(&mut directory, u64::from_le_bytes(sector) * SECTOR_BYTES)?;
        for (entry, table) in directory.chunks_exact(4).zip(0..) {
            let table_sector = u32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
            let entries = table * TABLE_ENTRIES..grains.min((table + 1) * TABLE_ENTRIES);
            let bytes: Vec<u8> =
                entries.flat_map(|grain| ((first + grain * grain_sectors) as u32).to_le_bytes()).collect();
            file.write_all_at(&bytes, u64::from(table_sector) * SECTOR_BYTES)?;
        }
    }
    file.set_len(first * SECTOR_BYTES + grains * CLUSTER_BYTES)
}

fn fill_vhdx(file: &File, blocks: u64) -> io::Result<()> {
    // Blocks in a chunk; the entry of the chunk's bitmap block follows them.
    const RATIO: u64 = (512 << 23) / BLOCK_BYTES;
    let first = file.metadata()?.len().next_multiple_of(MIB);
    let mut table = Vec::new();
    for block in 0..blocks {
        table.extend(((first + block * BLOCK_BYTES) | 6).to_le_bytes());
        if (block + 1) % RATIO == 0 && block + 1 < blocks {
            table.extend([0; 8]);
        }
    }
    file.write_all_at(&table, 3 * MIB)?;
    file.set_len(first + blocks * BLOCK_BYTES)
}

fn fill_vhd(file: &File, blocks: u64) -> io::Result<()> {
    const PIECE_BYTES: u64 = 4096 + BLOCK_BYTES;
    let mut footer = [0; 512];
    file.read_exact_at(&mut footer, 0)?;
    let number = |at: u64| -> io::Result<u64> {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at)?;
        Ok(u64::from_be_bytes(bytes))
    };
    let table_at = number(number(16)? + 16)?;
    // The bitmap lies in the sector before the payload, which begins at a multiple of 4096.
    let first = (file.metadata()?.len() - 512).next_multiple_of(4096) + 4096 - 512;
    let mut table = Vec::new();
    for block in 0..blocks {
        let at = first + block * PIECE_BYTES;
        table.extend(((at / 512) as u32).to_be_bytes());
        file.write_all_at(&[0xff; 512], at)?;
    }
    file.write_all_at(&table, table_at)?;
    file.write_all_at(&footer, first + 512 + (blocks - 1) * PIECE_BYTES + BLOCK_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_image::Severity;

    #[test]
    fn a_disk_made_by_its_tables_is_sound() {
        let dir = tempfile::tempdir().unwrap();
        for format in FORMATS {
            let path = dir.path().join(format!("all.{format}"));
            match (format, peer::find("qemu-img")) {
                (Format::Qcow2, None) => continue,
                (Format::Qcow2, Some(qemu_img)) => make_qcow2(&qemu_img, &path, 9 << 30).unwrap(),
                _ => make(&path, format, 9 << 30).unwrap(),
            }
            let (_, checked) = check_image(&path, &OpenOptions::default()).unwrap();
            assert!(checked.worst() < Some(Severity::Note), "{format}: {:?}", checked.findings);
            assert_eq!(
                (checked.allocated_blocks, checked.leaked_bytes),
                ((9 << 30) / unit_bytes(format), 0),
                "{format}"
            );
        }
    }
}
