//! A qcow2 with compressed clusters: the blocks of a packing as clusters.

use super::{
    super::options::ConvertOptions,
    encode::{Written, explain, outcome_of, pack_into},
};
use crate::{
    Opened, Progress, Result,
    copying::{
        copy::Failure,
        packing::{Deflate, Output, Packing},
    },
};
use diskwright_format::qcow2::{COMPRESSED_CLUSTER_BYTES, CompressedWriter};
use diskwright_store::Store;
use std::{io, path::Path, sync::Arc};

/// Writes the source into the empty file `store`, whose name is `dest`. The header comes last, when
/// everything else is durable.
pub(super) fn write(
    source: (&Opened, &Path),
    (store, dest): (&Arc<dyn Store>, &Path),
    options: &ConvertOptions,
    progress: &mut Progress<'_>,
) -> Result<Written> {
    let size_bytes = source.0.device().geometry().size_bytes;
    let free_bytes = diskwright_store::free_bytes(dest);
    let failed = |failure| explain(source, dest, free_bytes, failure);
    let on_dest = |error| failed(Some(Failure::Dest(error)));
    let mut writer = CompressedWriter::new(size_bytes).map_err(|error| on_dest(io::Error::other(error)))?;
    let mut output = Output::new(Arc::clone(store), COMPRESSED_CLUSTER_BYTES, None);
    let packing = Packing {
        source: source.0,
        engine: options.source.engine,
        block_bytes: COMPRESSED_CLUSTER_BYTES as usize,
        skip_damaged: options.skip_damaged,
        packer: &|| Ok(Box::new(Deflate::new(options.compress_level))),
    };
    let mut encode =
        |number, packed: &[u8], out: &mut Vec<u8>| writer.cluster(number, packed, out).map_err(io::Error::other);
    let packed = pack_into(&mut output, &packing, &mut encode, progress).map_err(failed)?;
    let mut buf = Vec::new();
    let front = writer.finish(&mut buf).map_err(|error| on_dest(io::Error::other(error)))?;
    output.append(&buf).map_err(on_dest)?;
    let file_bytes = output.flush().map_err(on_dest)?;
    store.sync_data().and_then(|()| store.write_at(&front, 0)).map_err(on_dest)?;
    progress(size_bytes, size_bytes);
    Ok(Written { outcome: outcome_of(packed, size_bytes), file_bytes })
}
