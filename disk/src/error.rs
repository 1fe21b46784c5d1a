//! What can go wrong with a disk.

use diskwright_image::ImageError;
use std::{io, path::PathBuf};
use uuid::Uuid;

/// Result of a disk operation.
pub type Result<T, E = DiskError> = std::result::Result<T, E>;

/// Why a disk operation failed.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// One image failed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An export failed.
    #[error(transparent)]
    Nbd(#[from] diskwright_nbd::ClientError),
    /// A file could not be opened, read, written.
    #[error("{}: cannot {doing}: {source}", path.display())]
    File {
        /// What was being done.
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Somebody else has the file.
    #[error("{path}: cannot lock the file for {purpose}: it is in use{holder}; close the other program and try again")]
    InUse {
        /// The file.
        path: PathBuf,
        /// "reading" or "writing".
        purpose: &'static str,
        /// " by qemu-img (process 123)", or nothing where the system cannot tell.
        holder: String,
    },
    /// A parent was not found in any of the places that the child names.
    #[error("{child}: its parent was not found; looked for {}; put it back in one of these places", looked_for.join(", "))]
    ParentMissing {
        /// The child.
        child: PathBuf,
        /// The places.
        looked_for: Vec<String>,
    },
    /// A parent lies where the child has no business to look.
    #[error("{child}: its parent {parent} lies outside the child's folder; if you trust this chain, allow it with --allow-parent-dir {} (or --allow-any-parent)", parent.parent().unwrap_or(parent).display())]
    ParentOutside {
        /// The child.
        child: PathBuf,
        /// The parent.
        parent: PathBuf,
    },
    /// The parent is not the disk that the child was made from.
    #[error(
        "{child}: its parent {parent} is not the disk it was made from: the parent's identity is {found}, the child expects {expected}; the parent was written to or replaced after the child was made, and the child's contents can no longer be trusted"
    )]
    ParentChanged {
        /// The child.
        child: PathBuf,
        /// The parent.
        parent: PathBuf,
        /// The parent's identity.
        found: String,
        /// What the child expects.
        expected: String,
    },
    /// A chain that cannot be.
    #[error("{path}: {what}")]
    BadChain {
        /// The image at which it was noticed.
        path: PathBuf,
        /// What is wrong and what to do.
        what: String,
    },
    /// Another image depends on the one to be written.
    #[error(
        "{path}: {child} names this image as its parent, so writing to it would silently damage that child; write to the child instead, or insist with --allow-parent-write"
    )]
    HasChildren {
        /// The image that was to be written.
        path: PathBuf,
        /// A child of it.
        child: PathBuf,
    },
    /// Options that cannot be.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// Verification found a difference.
    #[error(
        "{dest}: verification failed: the first byte that differs from {source_path} is at offset {offset_bytes}; do not use this copy"
    )]
    VerifyFailed {
        /// The copy.
        dest: PathBuf,
        /// The original.
        source_path: PathBuf,
        /// First difference.
        offset_bytes: u64,
    },
    /// The user, or a signal, stopped it.
    #[error("stopped before it was done")]
    Stopped,
}

/// An identity for messages: lower-case, in braces.
pub(crate) fn braced(id: Uuid) -> String {
    format!("{{{id}}}")
}

/// A disk's error where only an `io::Error` can be given: its kind and its sentence are kept.
pub(crate) fn to_io(error: DiskError) -> io::Error {
    let kind = match &error {
        DiskError::Image(image) => image.kind(),
        DiskError::File { source, .. } => source.kind(),
        DiskError::Nbd(client) => client.kind(),
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}

impl From<diskwright_store::OpenError> for DiskError {
    fn from(error: diskwright_store::OpenError) -> Self {
        use diskwright_store::OpenError;
        match error {
            OpenError::Io { doing: "open", path, source } => Self::File { doing: "open it", path, source },
            OpenError::Io { doing: "lock", path, source } => Self::File { doing: "lock it", path, source },
            OpenError::Io { path, source, .. } => Self::File { doing: "examine it", path, source },
            OpenError::Locked { path, purpose, holder } => Self::InUse { path, purpose, holder },
            other => Self::BadOptions { what: other.to_string(), hint: "name a regular file or a block device".into() },
        }
    }
}
