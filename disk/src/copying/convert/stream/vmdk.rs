//! A streamOptimized VMDK: the blocks of a packing as grains.

use super::{
    super::options::{ConvertOptions, ConvertOutcome},
    encode::{Written, explain, outcome_of, pack_into},
};
use crate::{
    Opened, Progress, Result,
    copying::{
        copy::Failure,
        packing::{Output, Packing, Zlib},
    },
};
use diskwright_format::vmdk::{Access, Descriptor, Extent, ExtentKind, SECTOR_BYTES, STREAM_GRAIN_BYTES, StreamWriter};
use std::{io, path::Path};
use uuid::Uuid;

/// Heads and sectors of a track of the geometry that the descriptor records, as those of all large
/// SCSI disks.
const HEADS: u64 = 255;
const TRACK_SECTORS: u64 = 63;

/// Appends the source to the output, as the VMDK `name`. `dest` is the file, for errors.
pub(super) fn write(
    source: (&Opened, &Path),
    (output, dest): (&mut Output, &Path),
    name: &str,
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let size_bytes = source.0.device().geometry().size_bytes;
    let free_bytes = diskwright_store::free_bytes(dest);
    let failed = |failure| explain(source, dest, free_bytes, failure);
    let on_dest = |error| failed(Some(Failure::Dest(error)));
    let start_bytes = output.flush().map_err(on_dest)?;
    let mut buf = Vec::new();
    let capacity_sectors = size_bytes.div_ceil(SECTOR_BYTES);
    let mut writer = StreamWriter::new(capacity_sectors, &descriptor(name, capacity_sectors), &mut buf)
        .map_err(|error| on_dest(io::Error::other(error)))?;
    output.append(&buf).map_err(on_dest)?;
    let packing = Packing {
        source: source.0,
        engine: options.source.engine,
        block_bytes: STREAM_GRAIN_BYTES as usize,
        skip_damaged: options.skip_damaged,
        packer: &|| Ok(Box::new(Zlib::new(options.compress_level)?)),
    };
    let mut encode =
        |number, packed: &[u8], out: &mut Vec<u8>| writer.grain(number, packed, out).map_err(io::Error::other);
    let packed = pack_into(output, &packing, &mut encode, progress).map_err(failed)?;
    buf.clear();
    writer.finish(&mut buf);
    output.append(&buf).map_err(on_dest)?;
    let file_bytes = output.flush().map_err(on_dest)? - start_bytes;
    progress(size_bytes, size_bytes);
    let mut warnings = Vec::new();
    if !size_bytes.is_multiple_of(STREAM_GRAIN_BYTES) {
        warnings.push(format!(
            "{}: its size of {size_bytes} bytes is not a multiple of 64 KiB, which programs of VMware expect; `resize` the source to {} bytes",
            dest.display(),
            size_bytes.next_multiple_of(STREAM_GRAIN_BYTES)
        ));
    }
    let from = source.0.device().geometry().logical_sector_bytes;
    if u64::from(from) != SECTOR_BYTES {
        warnings.push(format!(
            "{}: sectors of {from} bytes became sectors of {SECTOR_BYTES}, the only ones of a VMDK; partition tables and some file systems made for {from} will not be recognised",
            dest.display()
        ));
    }
    let outcome = ConvertOutcome { warnings, ..outcome_of(packed, size_bytes) };
    Ok(Written { outcome, file_bytes })
}

fn descriptor(name: &str, capacity_sectors: u64) -> Descriptor {
    // A quotation mark or a control character would end the name in the text.
    let name = if name.chars().any(|c| c == '"' || c.is_control()) { "disk.vmdk" } else { name };
    let extent = Extent {
        access: Access::ReadWrite,
        sectors: capacity_sectors,
        kind: ExtentKind::Sparse,
        file: Some(name.into()),
        first_sector: 0,
    };
    // The last 8 digits of the long id are the CID, as VMware has it.
    let id = Uuid::new_v4().as_u128();
    let (id, cid) = match id as u32 {
        // What these values mean for VMware: no parent, and a disk that was never written.
        cid @ (0xffff_ffff | 0xffff_fffe) => (id ^ 2, cid ^ 2),
        cid => (id, cid),
    };
    let cylinders = (capacity_sectors / (HEADS * TRACK_SECTORS)).clamp(1, 65535);
    let database = [
        ("ddb.virtualHWVersion", "4".to_owned()),
        ("ddb.geometry.cylinders", cylinders.to_string()),
        ("ddb.geometry.heads", HEADS.to_string()),
        ("ddb.geometry.sectors", TRACK_SECTORS.to_string()),
        ("ddb.adapterType", "lsilogic".to_owned()),
        ("ddb.longContentID", format!("{id:032x}")),
    ];
    Descriptor::new(cid, "streamOptimized", vec![extent], &database)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_descriptor_is_read_again() {
        for name in ["disk.vmdk", "a \"b\".vmdk", "zwei\nRW 1 FLAT \"x\" 0"] {
            let written = descriptor(name, 20480);
            let read = Descriptor::parse(written.to_text().as_bytes(), 0).unwrap();
            assert_eq!((read.cid, read.create_type.as_str()), (written.cid, "streamOptimized"));
            assert_eq!(read.extents.len(), 1);
            assert_eq!(read.extents[0].file.as_deref(), Some("disk.vmdk"));
            assert!(read.get("ddb.longContentID").unwrap().ends_with(&format!("{:08x}", read.cid)));
        }
    }
}
