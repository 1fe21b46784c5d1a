//! Where the blocks of an open object come from: the object itself, or the chunks of a pushed disk.
//!
//! ```text
//!   Object   block ─▶ GET a range, If-Match ─▶ the bytes
//!   Pushed   block ─▶ the chunk around it ─▶ GET chunks/AB/... ─▶ digest compared ─▶ the bytes
//!                 └─▶ in no run of the manifest ─▶ zeros, without a request
//! ```
//!
//! A manifest is read once, when the disk is opened, and a chunk never changes. So a pushed disk is
//! of one version like any other object, and each byte of it is proved by the manifest.

use crate::{
    BLOCK_BYTES,
    answer::Version,
    error::{ObjectError, Result},
    repository::{CHUNK_BYTES, Manifest, unpack},
    source::Source,
};
use std::{ops::Range, sync::Arc, time::Duration};
use tokio::task::spawn_blocking;

/// How often a chunk is fetched whose bytes are wrong.
const TRIES: usize = 3;

/// Where blocks come from; see the module documentation.
#[derive(Debug)]
pub(crate) enum Origin {
    Object(Source, Version),
    Pushed(Source, Arc<Manifest>),
}

impl Origin {
    fn source(&self) -> &Source {
        match self {
            Self::Object(source, _) | Self::Pushed(source, _) => source,
        }
    }

    /// The name, without secrets.
    pub(crate) fn name(&self) -> &str {
        self.source().name()
    }

    /// How long a server may fail to answer.
    pub(crate) fn timeout(&self) -> Duration {
        self.source().timeout
    }

    pub(crate) fn size_bytes(&self) -> u64 {
        match self {
            Self::Object(_, version) => version.size_bytes,
            Self::Pushed(_, manifest) => manifest.facts().size_bytes,
        }
    }

    /// The manifest of a pushed disk.
    pub(crate) fn manifest(&self) -> Option<&Arc<Manifest>> {
        match self {
            Self::Object(..) => None,
            Self::Pushed(_, manifest) => Some(manifest),
        }
    }

    /// The blocks that have to be fetched together.
    pub(crate) fn unit_of(&self, block: u64) -> Range<u64> {
        let unit = if self.manifest().is_some() { CHUNK_BYTES / BLOCK_BYTES } else { 1 };
        let start = block - block % unit;
        start..(start + unit).min(self.size_bytes().div_ceil(BLOCK_BYTES))
    }

    /// Whether a block reads as zeros, as the manifest says.
    pub(crate) fn is_zeros(&self, block: u64) -> bool {
        self.manifest().is_some_and(|manifest| manifest.chunk(block / (CHUNK_BYTES / BLOCK_BYTES)).is_none())
    }

    /// The bytes of a range, in place of what `into` has. A range of a pushed disk lies within a
    /// chunk. Asks again for as long as the timeout.
    pub(crate) async fn get(&self, range: Range<u64>, into: &mut Vec<u8>) -> Result<()> {
        match self {
            Self::Object(source, version) => source.get(range, version, into).await,
            Self::Pushed(source, manifest) => {
                let number = range.start / CHUNK_BYTES;
                let bytes = chunk(source, manifest, number).await?;
                let start = (range.start - number * CHUNK_BYTES) as usize;
                let wanted = bytes.get(start..start + (range.end - range.start) as usize).unwrap_or_default();
                into.clear();
                into.extend_from_slice(wanted);
                Ok(())
            }
        }
    }
}

/// The bytes of a chunk.
async fn chunk(source: &Source, manifest: &Manifest, number: u64) -> Result<Vec<u8>> {
    let len = manifest.chunk_bytes(number);
    let Some(chunk) = manifest.chunk(number) else { return Ok(vec![0; len]) };
    let object = source.beside(&chunk.key.to_string())?;
    let damaged = |what| ObjectError::Damaged { name: object.name().to_owned(), what };
    let mut last = None;
    for _ in 0..TRIES {
        let mut bytes = Vec::new();
        let got = object.get_start(chunk.object_bytes.into(), &mut bytes).await;
        let version = got.map_err(|error| match error {
            ObjectError::Missing { .. } => damaged(format!("it is not there, and {} has it", source.name())),
            error => error,
        })?;
        if version.size_bytes != u64::from(chunk.object_bytes) {
            let expected = chunk.object_bytes;
            return Err(damaged(format!("it has {} bytes, and {expected} were expected", version.size_bytes)));
        }
        let digest = chunk.key.digest;
        match spawn_blocking(move || unpack(&bytes, len, &digest)).await {
            Ok(Ok(bytes)) => return Ok(bytes),
            Ok(Err(what)) => last = Some(what),
            Err(error) => last = Some(error.to_string()),
        }
    }
    Err(damaged(last.unwrap_or_default()))
}
