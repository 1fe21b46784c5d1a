//! Where the blocks of an open object come from: the object itself, or the chunks of a pushed disk.
//!
//! ```text
//!   Object   block ─▶ GET a range, If-Match ─▶ the bytes, of a sealed one digests compared
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
    repository::{CHUNK_BYTES, Digest, Manifest, digest_of, unpack},
    seal::Seal,
    source::Source,
};
use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tokio::task::spawn_blocking;

/// Reads bytes at an offset from a disk of this machine, which may be those of a pushed disk.
/// Whether it could.
pub type Donor = Box<dyn Fn(u64, &mut [u8]) -> bool + Send + Sync>;

/// Disks of this machine from which chunks are read that they have at the same place.
#[derive(Default)]
pub struct Donors {
    donors: Vec<Donor>,
    used_bytes: AtomicU64,
}

impl Donors {
    pub(crate) fn new(donors: Vec<Donor>) -> Self {
        Self { donors, used_bytes: AtomicU64::new(0) }
    }

    /// Bytes that were read from the disks and not fetched.
    pub fn bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::Relaxed)
    }

    /// A chunk, if a disk has it.
    fn find(&self, offset_bytes: u64, len: usize, digest: &Digest) -> Option<Vec<u8>> {
        let mut bytes = vec![0; len];
        let is_there = self.donors.iter().any(|read| read(offset_bytes, &mut bytes) && digest_of(&bytes) == *digest);
        is_there.then(|| {
            self.used_bytes.fetch_add(len as u64, Ordering::Relaxed);
            bytes
        })
    }
}

impl fmt::Debug for Donors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} disks of this machine", self.donors.len())
    }
}

/// A pushed disk.
#[derive(Debug)]
pub(crate) struct PushedDisk {
    pub(crate) source: Source,
    pub(crate) manifest: Arc<Manifest>,
    pub(crate) donors: Arc<Donors>,
}

/// How often a chunk is fetched whose bytes are wrong.
const TRIES: usize = 3;

/// Where blocks come from; see the module documentation.
#[derive(Debug)]
pub(crate) enum Origin {
    Object(Source, Version, Option<Arc<Seal>>),
    Pushed(PushedDisk),
}

impl Origin {
    fn source(&self) -> &Source {
        match self {
            Self::Object(source, ..) | Self::Pushed(PushedDisk { source, .. }) => source,
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
            Self::Object(_, version, _) => version.size_bytes,
            Self::Pushed(disk) => disk.manifest.facts().size_bytes,
        }
    }

    /// The manifest of a pushed disk.
    pub(crate) fn manifest(&self) -> Option<&Arc<Manifest>> {
        match self {
            Self::Object(..) => None,
            Self::Pushed(disk) => Some(&disk.manifest),
        }
    }

    /// The blocks that have to be fetched together.
    pub(crate) fn unit_of(&self, block: u64) -> Range<u64> {
        let unit = if self.manifest().is_some() { CHUNK_BYTES / BLOCK_BYTES } else { 1 };
        let start = block - block % unit;
        start..(start + unit).min(self.size_bytes().div_ceil(BLOCK_BYTES))
    }

    /// Whether parts of blocks can be fetched and proved.
    pub(crate) fn has_parts(&self) -> bool {
        matches!(self, Self::Object(_, _, None))
    }

    /// Whether a block reads as zeros, as the manifest says.
    pub(crate) fn is_zeros(&self, block: u64) -> bool {
        self.manifest().is_some_and(|manifest| manifest.chunk(block / (CHUNK_BYTES / BLOCK_BYTES)).is_none())
    }

    /// The bytes of a range, in place of what `into` has. If there are no parts, a range begins and
    /// ends with a block. One of a pushed disk lies within a chunk. Asks again for as long as the
    /// timeout.
    pub(crate) async fn get(&self, range: Range<u64>, into: &mut Vec<u8>) -> Result<()> {
        match self {
            Self::Object(source, version, None) => source.get(range, version, into).await,
            Self::Object(source, version, Some(seal)) => sealed(source, version, seal, range, into).await,
            Self::Pushed(disk) => {
                let number = range.start / CHUNK_BYTES;
                let bytes = disk.chunk(number).await?;
                let start = (range.start - number * CHUNK_BYTES) as usize;
                let wanted = bytes.get(start..start + (range.end - range.start) as usize).unwrap_or_default();
                into.clear();
                into.extend_from_slice(wanted);
                Ok(())
            }
        }
    }
}

/// The bytes of whole blocks of a sealed image.
async fn sealed(
    source: &Source,
    version: &Version,
    seal: &Arc<Seal>,
    range: Range<u64>,
    into: &mut Vec<u8>,
) -> Result<()> {
    let mut wrong = 0;
    for _ in 0..TRIES {
        source.get(range.clone(), version, into).await?;
        let (seal, bytes, first) = (Arc::clone(seal), std::mem::take(into), range.start / BLOCK_BYTES);
        let checked = spawn_blocking(move || (seal.wrong_block(first, &bytes), bytes)).await;
        let failed = |_| {
            ObjectError::local("check the seal of", source.name().as_ref(), std::io::Error::other("a thread failed"))
        };
        match checked.map_err(failed)? {
            (None, bytes) => {
                *into = bytes;
                return Ok(());
            }
            (Some(block), bytes) => (wrong, *into) = (block, bytes),
        }
    }
    into.clear();
    let what = format!("the bytes from {} on are not those that were sealed", wrong * BLOCK_BYTES);
    Err(ObjectError::BrokenSeal { name: source.name().to_owned(), what })
}

impl PushedDisk {
    /// The bytes of a chunk.
    async fn chunk(&self, number: u64) -> Result<Vec<u8>> {
        let Self { source, manifest, donors } = self;
        let len = manifest.chunk_bytes(number);
        let Some(chunk) = manifest.chunk(number) else { return Ok(vec![0; len]) };
        let digest = chunk.key.digest;
        if !donors.donors.is_empty() {
            let donors = Arc::clone(donors);
            let found = spawn_blocking(move || donors.find(number * CHUNK_BYTES, len, &digest)).await;
            if let Ok(Some(bytes)) = found {
                return Ok(bytes);
            }
        }
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
            match spawn_blocking(move || unpack(&bytes, len, &digest)).await {
                Ok(Ok(bytes)) => return Ok(bytes),
                Ok(Err(what)) => last = Some(what),
                Err(error) => last = Some(error.to_string()),
            }
        }
        Err(damaged(last.unwrap_or_default()))
    }
}
