//! Creates qcow2 images of version 3: with clusters of 64 KiB unless another size is asked for, and
//! refcounts of 16 bits, as QEMU does.
//!
//! The header is written last, after all other metadata are durable. So a creation that was
//! interrupted leaves no file that is recognised as qcow2. Space for all clusters is allocated
//! after that, through the writer: then every cluster is mapped.

use super::{image, link};
use crate::{CreateOptions, DiskType, Format, ImageError, Result};
use diskwright_format::qcow2::{Backing, CLUSTER_BITS_MAX, CLUSTER_BITS_MIN, NewImage, RefcountWidth};
use diskwright_store::Store;
use std::sync::Arc;

const CLUSTER_BYTES: u32 = 64 << 10;
const SECTOR_BYTES: u64 = 512;
/// Refcounts of 16 bits.
const REFCOUNT_ORDER: u32 = 4;

fn plan(store: &dyn Store, options: &CreateOptions) -> Result<NewImage> {
    let bad = |what: String, hint: &str| {
        Err(ImageError::BadOptions { path: store.name().to_owned(), what, hint: hint.into() })
    };
    if options.disk_type == DiskType::Fixed {
        let what = "a qcow2 image has no fixed type".into();
        return bad(what, "create a dynamic one; if all its space is to be allocated now, preallocate it");
    }
    if options.logical_sector_bytes != SECTOR_BYTES as u32 {
        let what = format!("qcow2 has sectors of 512 bytes, not {}", options.logical_sector_bytes);
        return bad(what, "use VHDX for a disk with 4096-byte sectors");
    }
    if options.size_bytes == 0 || !options.size_bytes.is_multiple_of(SECTOR_BYTES) {
        let what = format!("a size of {} bytes is not a multiple of the 512-byte sector above 0", options.size_bytes);
        return bad(what, "round it up");
    }
    if options.preallocate && options.parent.is_some() {
        let what = "a qcow2 child with space for all clusters would hide its parent".into();
        return bad(what, "leave out the preallocation");
    }
    let cluster_bytes = options.block_bytes.unwrap_or(CLUSTER_BYTES);
    let cluster_bits = cluster_bytes.trailing_zeros();
    if !cluster_bytes.is_power_of_two() || !(CLUSTER_BITS_MIN..=CLUSTER_BITS_MAX).contains(&cluster_bits) {
        let what = format!("a cluster of {cluster_bytes} bytes is not a power of two from 512 bytes to 2 MiB");
        return bad(what, "use 64 KiB (65536), as QEMU does");
    }
    let backing = match &options.parent {
        None => None,
        Some(parent) => {
            let format = link::format_name(parent.format.unwrap_or(Format::Qcow2)).to_owned();
            match link::name_of(parent) {
                Ok(name) => Some(Backing { name, format }),
                Err(what) => return bad(what, "use another path"),
            }
        }
    };
    let Some(refcount_width) = RefcountWidth::of_order(REFCOUNT_ORDER) else {
        return bad("refcounts of this width".into(), "use 16 bits");
    };
    Ok(NewImage { size_bytes: options.size_bytes, cluster_bits, refcount_width, backing })
}

/// Creates an image in an empty store. Durable on return.
///
/// # Errors
/// `BadOptions` for options that the format does not allow, before anything is written; `Io`, after
/// which the store holds an incomplete image.
pub(crate) fn create(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let new = plan(&*store, options)?;
    let made = new.metadata().map_err(|invalid| ImageError::BadOptions {
        path: store.name().to_owned(),
        what: format!("{} is not possible", invalid.found),
        hint: format!("use {}", invalid.expected),
    })?;
    let io = |doing, at| {
        let store = &store;
        move |error| ImageError::io(doing, &**store, at, error)
    };
    store.set_len(made.file_bytes).map_err(io("set the length of the new file", made.file_bytes))?;
    let table_at = made.header.refcount_table.offset_bytes;
    store.write_at(&made.refcounts, table_at).map_err(io("write the new refcounts", table_at))?;
    store.sync_data().map_err(io("make the new image durable", 0))?;
    store.write_at(&made.front, 0).map_err(io("write the new header", 0))?;
    store.sync_data().map_err(io("make the new image durable", 0))?;
    if options.preallocate {
        image::allocate_all(store)?;
    }
    Ok(())
}
