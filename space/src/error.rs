//! Why an operation on a pool failed, in sentences that say what to do.

use diskwright_format::space::Invalid;
use diskwright_store::OpenError;
use std::{
    io,
    path::{Path, PathBuf},
};
use uuid::Uuid;

/// The result of an operation on a pool.
pub type Result<T, E = SpaceError> = std::result::Result<T, E>;

/// Why an operation on a pool failed.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// A member could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A system call failed.
    #[error("{}: cannot {doing}: {source}", path.display())]
    Io {
        /// The action, as in "read the superblock".
        doing: &'static str,
        /// The member, or another file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// No pool of this name is known on this machine.
    #[error("no pool {name:?} is known on this machine; `diskwright space import MEMBER ...` makes one known")]
    Unknown {
        /// The name.
        name: String,
    },
    /// A pool of this name is known already.
    #[error(
        "a pool {name:?} is known on this machine already; choose another name, or forget the known one: diskwright space export {name}"
    )]
    NameTaken {
        /// The name.
        name: String,
    },
    /// The name cannot be that of a pool or a file.
    #[error("{name:?} cannot be a name in a space: {why}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No superblock at either end.
    #[error("{}: not a member of a pool: {why}", path.display())]
    NotAMember {
        /// The file or device.
        path: PathBuf,
        /// What was found.
        why: String,
    },
    /// A file that is to become a member has contents.
    #[error("{}: {found}; nothing was changed. `PoolCreateOptions::force` gives it to the pool nevertheless, and its contents are lost", path.display())]
    HasContents {
        /// The file or device.
        path: PathBuf,
        /// What was found, as in "it is a member of the pool vault".
        found: String,
    },
    /// A member is too small.
    #[error("{}: {found_bytes} bytes are too small for a member: it needs {needed_bytes} bytes with slabs of {slab_bytes} bytes", path.display())]
    TooSmall {
        /// The file or device.
        path: PathBuf,
        /// Its size.
        found_bytes: u64,
        /// The smallest size.
        needed_bytes: u64,
        /// Size of a slab.
        slab_bytes: u64,
    },
    /// Members of different pools.
    #[error("{} belongs to the pool {found} and {} to the pool {expected}; name the members of one pool", path.display(), other.display())]
    AnotherPool {
        /// A member.
        path: PathBuf,
        /// Its pool.
        found: String,
        /// Another member.
        other: PathBuf,
        /// The other one's pool.
        expected: String,
    },
    /// Two files claim to be the same member.
    #[error("{} and {} are the same member of the pool {pool}: one is a copy of the other. Name only the one that was in use last", path.display(), other.display())]
    Cloned {
        /// A member.
        path: PathBuf,
        /// The other file.
        other: PathBuf,
        /// Name of the pool.
        pool: String,
    },
    /// Members were changed without each other.
    #[error("pool {pool}: its members have diverged: {} and {} were both changed without the other. Open it with only one of them (space import with its path), then add the other one anew with `PoolCreateOptions::force`", path.display(), other.display())]
    Diverged {
        /// Name of the pool.
        pool: String,
        /// The member that is followed.
        path: PathBuf,
        /// A member with another history.
        other: PathBuf,
    },
    /// The pool may only be read.
    #[error("pool {pool}: it cannot be written: {why}")]
    ReadOnly {
        /// Name of the pool.
        pool: String,
        /// Why.
        why: String,
    },
    /// Slabs have no copy on the members that are there.
    #[error(
        "pool {pool}: {slabs} slabs of {files} files have no copy on the members that are there (missing: {missing}); connect the missing members"
    )]
    NoCopy {
        /// Name of the pool.
        pool: String,
        /// Number of slabs.
        slabs: u64,
        /// Number of files.
        files: usize,
        /// The missing members.
        missing: String,
    },
    /// A member that the superblock names was cut short.
    #[error("{}: the member has {found_bytes} bytes where the pool {pool} uses {expected_bytes}; restore its size", path.display())]
    CutShort {
        /// The member.
        path: PathBuf,
        /// Its size.
        found_bytes: u64,
        /// The size in the superblock.
        expected_bytes: u64,
        /// Name of the pool.
        pool: String,
    },
    /// No area has a valid checkpoint.
    #[error("pool {pool}: none of its journals can be read: {why}")]
    NoJournal {
        /// Name of the pool.
        pool: String,
        /// What is wrong with each of them.
        why: String,
    },
    /// The map contradicts itself although its checksums are right.
    #[error("pool {pool}: its map is damaged: {why}. Its members were not changed")]
    BadMap {
        /// Name of the pool.
        pool: String,
        /// What is wrong.
        why: String,
    },
    /// The caller stopped a drain, a rebuild or the emptying of the cache. What has moved stays
    /// where it is.
    #[error("pool {pool}: stopped; {done} of {total} were done. Run it again to go on")]
    Stopped {
        /// Name of the pool.
        pool: String,
        /// Slabs, or bytes of the cache, that have moved.
        done: u64,
        /// Those that had to move.
        total: u64,
    },
    /// The request makes no sense for this pool.
    #[error("{what}")]
    Usage {
        /// What is wrong and what to do.
        what: String,
    },
    /// The file exists, or does not.
    #[error("space://{pool}/{name}: {}", if *exists { "the disk exists already" } else { "the pool has no such disk" })]
    Disk {
        /// Name of the pool.
        pool: String,
        /// Name of the disk.
        name: String,
        /// Whether it exists.
        exists: bool,
    },
}

impl SpaceError {
    pub(crate) fn io(doing: &'static str, path: &Path, source: io::Error) -> Self {
        Self::Io { doing, path: path.to_owned(), source }
    }

    pub(crate) fn not_a_member(path: &Path, why: &Invalid) -> Self {
        Self::NotAMember { path: path.to_owned(), why: why.to_string() }
    }

    /// The error as one of the system, for the layers above.
    pub fn to_io(&self) -> io::Error {
        let kind = match self {
            Self::Io { source, .. } => source.kind(),
            Self::Open(OpenError::Io { source, .. }) => source.kind(),
            Self::Open(OpenError::Locked { .. }) => io::ErrorKind::ResourceBusy,
            Self::Unknown { .. } | Self::Disk { exists: false, .. } => io::ErrorKind::NotFound,
            Self::NameTaken { .. } | Self::Disk { exists: true, .. } => io::ErrorKind::AlreadyExists,
            Self::ReadOnly { .. } => io::ErrorKind::ReadOnlyFilesystem,
            Self::BadName { .. } | Self::Usage { .. } => io::ErrorKind::InvalidInput,
            _ => io::ErrorKind::Other,
        };
        io::Error::new(kind, self.to_string())
    }
}

/// How a pool is called in messages: its name and the beginning of its GUID.
pub(crate) fn called(name: &str, id: Uuid) -> String {
    format!("{name} ({})", &id.to_string()[..8])
}
