//! Errors of disk operations.

use diskwright_image::{ImageError, LinkageId};
use diskwright_store::ErrorCode;
use std::{
    io,
    path::{Path, PathBuf},
};

/// Result of a disk operation.
pub type Result<T, E = DiskError> = std::result::Result<T, E>;

/// Why a disk operation failed.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// An operation on an image failed.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// An operation on an export of an NBD server failed.
    #[error(transparent)]
    Nbd(#[from] diskwright_nbd::ClientError),
    /// An operation on a namespace of an NVMe/TCP target failed.
    #[error(transparent)]
    Nvme(#[from] diskwright_nvme::ClientError),
    /// An operation on a logical unit of an iSCSI target failed.
    #[error(transparent)]
    Iscsi(#[from] diskwright_iscsi::ClientError),
    /// The connection to a target ended during a request.
    #[error(transparent)]
    Connection(#[from] diskwright_store::remote::ConnectionError),
    /// A file could not be opened, read or written.
    #[error("{}: cannot {doing}: {source}", path.display())]
    File {
        /// The operation, to follow "cannot": "open it".
        doing: &'static str,
        /// Path of the file that could not be used.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// Another process has locked the file.
    #[error("{path}: cannot lock the file for {purpose}: it is in use{holder}; close the other program and try again")]
    InUse {
        /// Path of the file that could not be used.
        path: PathBuf,
        /// What the lock is for: "reading" or "writing".
        purpose: &'static str,
        /// " by qemu-img (process 123)"; empty if the system does not report it.
        holder: String,
    },
    /// No file exists at any of the paths that the child has for its parent.
    #[error("{child}: its parent was not found; looked for {}; put it back in one of these places, or reconnect the image to the parent's new place", looked_for.join(", "))]
    ParentMissing {
        /// Path of the child.
        child: PathBuf,
        /// The paths at which it was looked for, each as a user would type it.
        looked_for: Vec<String>,
    },
    /// The parent lies outside the folders that the policy allows.
    #[error("{child}: its parent {parent} lies outside the child's folder; if you trust this chain, allow it with `ParentPolicy::allowed_dirs` = {} (or with `ParentPolicy::allow_any`)", parent.parent().unwrap_or(parent).display())]
    ParentOutside {
        /// Path of the child.
        child: PathBuf,
        /// Path of the parent.
        parent: PathBuf,
    },
    /// A further file that an image names lies outside the folders that the policy allows.
    #[error("{image}: its {what} {file} lies outside its folder; if you trust this image, allow it with `ParentPolicy::allowed_dirs` = {} (or with `ParentPolicy::allow_any`)", file.parent().unwrap_or(file).display())]
    FileOutside {
        /// Path of the image.
        image: PathBuf,
        /// Path of the file that the image names.
        file: PathBuf,
        /// What the file is: "flat extent".
        what: String,
    },
    /// The parent is not the disk from which the child was created.
    #[error(
        "{child}: its parent {parent} is not the disk it was made from: the parent's identity is {found}, the child expects {expected}; the parent was written to or replaced after the child was made, and the child's contents can no longer be trusted"
    )]
    ParentChanged {
        /// Path of the child.
        child: PathBuf,
        /// Path of the parent.
        parent: PathBuf,
        /// The parent's identity, as text.
        found: String,
        /// The identity that the child expects.
        expected: String,
    },
    /// The child has several paths for its parent, and no file there is the parent.
    #[error("{first}; other places that the child names: {}", others.join("; "))]
    NoParentFits {
        /// The error of the first path with a file.
        first: Box<DiskError>,
        /// The errors of the other paths, one sentence each.
        others: Vec<String>,
    },
    /// An image names a block device: as its parent, or as a part of its disk.
    #[error(
        "{path}: it is a block device, and an image names it as its parent or as a part of its disk; if you trust that image, allow it with `ParentPolicy::allow_devices`"
    )]
    ParentIsDevice {
        /// Path of the device.
        path: PathBuf,
    },
    /// The chain is invalid.
    #[error("{path}: {what}")]
    BadChain {
        /// The image at which the problem was found.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Another image is a child of the image to be written.
    #[error(
        "{path}: {child} names this image as its parent, so writing to it would silently damage that child; write to the child instead, or insist with `OpenOptions::allow_parent_write`"
    )]
    HasChildren {
        /// The image to be written.
        path: PathBuf,
        /// Path of the child.
        child: PathBuf,
    },
    /// Options that do not fit the files.
    #[error("{what}; {hint}")]
    BadOptions {
        /// What is wrong, as the first half of a sentence.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// Options that are invalid whatever the files contain: a usage error.
    #[error("{what}; {hint}")]
    Usage {
        /// What is wrong, as the first half of a sentence.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// The file to be created exists already.
    #[error("{}: file exists; nothing was changed: choose another name, or move that file away first", path.display())]
    Exists {
        /// Path of the file that could not be used.
        path: PathBuf,
    },
    /// The verification of a copy found a difference.
    #[error(
        "{dest}: verification failed: the first byte that differs from {source_path} is at offset {offset_bytes}; do not use this copy"
    )]
    VerifyFailed {
        /// Path of the copy.
        dest: PathBuf,
        /// Path of the original.
        source_path: PathBuf,
        /// Offset of the first different byte.
        offset_bytes: u64,
    },
    /// A range of the source cannot be copied, because the table entry with its location is
    /// damaged.
    #[error(
        "{error}; bytes {offset_bytes} to {end_bytes} of the disk cannot be read, and perhaps others: a conversion with `ConvertOptions::skip_damaged` copies everything else"
    )]
    DamagedSource {
        /// The damaged table entry.
        error: ImageError,
        /// Start of the affected range of the disk.
        offset_bytes: u64,
        /// End of the affected range.
        end_bytes: u64,
    },
    /// A disk is not the base to which an export applies.
    #[error(
        "{}: it is not the disk to which {} applies: its identity is {found}, the export expects {expected}; nothing was changed. If its contents are those of that disk all the same, apply it with `ApplyOptions::ignore_id_mismatch`; if they are not, the result is damaged",
        copy.display(), export.display()
    )]
    WrongBase {
        /// Path of the disk to which the changes are applied.
        copy: PathBuf,
        /// Path of the export.
        export: PathBuf,
        /// The disk's identity, as text.
        found: String,
        /// The identity of the export's base.
        expected: String,
    },
    /// An export is damaged or incomplete.
    #[error("{}: {what}", path.display())]
    BadExport {
        /// Path of the export.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Changes were applied to a disk in part.
    #[error("{error}; {} has a part of the changes, and the same command with the whole export finishes it", copy.display())]
    AppliedInPart {
        /// Path of the disk to which the changes are applied.
        copy: PathBuf,
        /// Why the application ended.
        error: Box<DiskError>,
    },
    /// The user, or a signal, stopped the operation.
    #[error("stopped before it was done")]
    Stopped,
}

impl DiskError {
    /// Why it failed, for programs to match.
    ///
    /// ```
    /// use diskwright_disk::{Disk, OpenOptions};
    /// use diskwright_store::ErrorCode;
    ///
    /// let error = Disk::open("/nonexistent/disk.vhdx", &OpenOptions::default()).unwrap_err();
    /// assert_eq!(error.code(), ErrorCode::NotFound);
    /// ```
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Image(error) | Self::DamagedSource { error, .. } => error.code(),
            Self::Nbd(error) => error.code(),
            Self::Nvme(error) => error.code(),
            Self::Iscsi(error) => error.code(),
            Self::Connection(error) => error.code(),
            Self::File { source, .. } => Self::code_of(source),
            Self::InUse { .. } => ErrorCode::Locked,
            Self::ParentMissing { .. } => ErrorCode::ParentMissing,
            Self::ParentOutside { .. } | Self::FileOutside { .. } | Self::ParentIsDevice { .. } => {
                ErrorCode::ParentNotAllowed
            }
            Self::ParentChanged { .. } => ErrorCode::ParentChanged,
            Self::NoParentFits { first, .. } => first.code(),
            Self::BadChain { .. } => ErrorCode::BadChain,
            Self::HasChildren { .. } => ErrorCode::HasChildren,
            Self::BadOptions { .. } | Self::Usage { .. } => ErrorCode::InvalidInput,
            Self::Exists { .. } => ErrorCode::Exists,
            Self::VerifyFailed { .. } => ErrorCode::VerifyFailed,
            Self::WrongBase { .. } => ErrorCode::ParentChanged,
            Self::BadExport { .. } => ErrorCode::Corrupt,
            Self::AppliedInPart { error, .. } => error.code(),
            Self::Stopped => ErrorCode::Stopped,
        }
    }

    /// Why a request failed: the code of the image's, disk's or client's error inside `error`, else
    /// that of the system. For the errors that a [`BlockQueue`](diskwright_store::BlockQueue)
    /// gives.
    pub fn code_of(error: &io::Error) -> ErrorCode {
        let Some(inner) = error.get_ref() else { return ErrorCode::of_system(error) };
        inner
            .downcast_ref::<Self>()
            .map(Self::code)
            .or_else(|| inner.downcast_ref::<ImageError>().map(ImageError::code))
            .or_else(|| inner.downcast_ref::<diskwright_nbd::ClientError>().map(diskwright_nbd::ClientError::code))
            .unwrap_or_else(|| ErrorCode::of_system(error))
    }

    /// The error of an image, which is at `path`, with that path if it has none: an image that
    /// lacks a function does not know its name.
    pub(crate) fn at(mut self, path: &Path) -> Self {
        if let Self::Image(image) = &mut self
            && image.path_mut().as_os_str().is_empty()
        {
            *image.path_mut() = path.to_owned();
        }
        self
    }

    /// Replaces the path `from` in the error by `to`: for a file that is created under a temporary
    /// name.
    pub(crate) fn renamed(mut self, from: &Path, to: &Path) -> Self {
        let path = match &mut self {
            Self::Image(image) => image.path_mut(),
            Self::File { path, .. } | Self::InUse { path, .. } | Self::BadChain { path, .. } => path,
            Self::BadOptions { what, .. } | Self::Usage { what, .. } => {
                *what = what.replace(&*from.to_string_lossy(), &to.to_string_lossy());
                return self;
            }
            _ => return self,
        };
        if path == from {
            *path = to.to_owned();
        }
        self
    }
}

/// Recovers the `DiskError` in an `io::Error`. An error of an image, a disk or a client has its own
/// path or server. Any other error occurred while `doing` something to `path`.
pub(crate) fn from_io(doing: &'static str, path: &Path, source: io::Error) -> DiskError {
    source
        .downcast::<DiskError>()
        .or_else(|source| source.downcast::<ImageError>().map(DiskError::Image))
        .or_else(|source| source.downcast::<diskwright_nbd::ClientError>().map(DiskError::Nbd))
        .or_else(|source| source.downcast::<diskwright_nvme::ClientError>().map(DiskError::Nvme))
        .or_else(|source| source.downcast::<diskwright_iscsi::ClientError>().map(DiskError::Iscsi))
        .or_else(|source| source.downcast::<diskwright_store::remote::ConnectionError>().map(DiskError::Connection))
        .unwrap_or_else(|source| DiskError::File { doing, path: path.to_owned(), source })
}

/// Says how much space all of an operation needs, where the error says what one step needed. Other
/// errors stay as they are. `free_bytes` is what was free before the operation.
pub(crate) fn with_whole_need(
    error: DiskError,
    (doing, path): (&'static str, &Path),
    needed_bytes: impl FnOnce() -> Option<u64>,
    free_bytes: Option<u64>,
) -> DiskError {
    let source = to_io(error);
    if !diskwright_store::is_full(&source) {
        return from_io(doing, path, source);
    }
    from_io(doing, path, diskwright_store::explain_shortage(source, path, needed_bytes(), free_bytes))
}

/// An identity as text: lower case, in braces.
pub(crate) fn braced(id: LinkageId) -> String {
    format!("{id:#}")
}

/// Converts to an `io::Error` that keeps the kind and the text.
pub(crate) fn to_io(error: DiskError) -> io::Error {
    let kind = match &error {
        DiskError::Image(image) | DiskError::DamagedSource { error: image, .. } => image.kind(),
        DiskError::File { source, .. } => source.kind(),
        DiskError::Nbd(client) => client.kind(),
        DiskError::Nvme(client) => client.kind(),
        DiskError::Iscsi(client) => client.kind(),
        DiskError::Connection(error) => error.kind(),
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
            OpenError::Device { path } => Self::ParentIsDevice { path },
            OpenError::Locked { path, purpose, holder } => Self::InUse { path, purpose, holder },
            other => Self::BadOptions { what: other.to_string(), hint: "name a regular file or a block device".into() },
        }
    }
}

/// Wraps an error of the file system.
pub(crate) fn file_error(doing: &'static str, path: &Path, source: io::Error) -> DiskError {
    DiskError::File { doing, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_with_a_path_keeps_it() {
        let image = || ImageError::NotAnImage { path: "parent.vhd".into(), found: "x".into(), expected: "y".into() };
        for inner in [io::Error::from(image()), to_io(image().into())] {
            let told = from_io("read it", Path::new("top.vhd"), inner).to_string();
            assert_eq!(told, "parent.vhd: x; expected y");
        }
        let told = from_io("read it", Path::new("top.vhd"), io::Error::other("no luck")).to_string();
        assert_eq!(told, "top.vhd: cannot read it: no luck");
    }

    #[test]
    fn every_variant_has_its_code() {
        let path = || PathBuf::from("a.vhdx");
        let text = String::new;
        let image = || ImageError::NotAnImage { path: path(), found: text(), expected: text() };
        let corrupt =
            || ImageError::Corrupt { path: path(), structure: "BAT", offset_bytes: 0, found: text(), expected: text() };
        let file = |kind: io::ErrorKind| DiskError::File { doing: "open it", path: path(), source: kind.into() };
        let missing = || DiskError::ParentMissing { child: path(), looked_for: Vec::new() };
        let unknown = || diskwright_nbd::ClientError::UnknownExport { peer: text(), name: text(), exports: Vec::new() };
        for (error, code) in [
            (DiskError::Image(image()), "not_an_image"),
            (DiskError::Nbd(unknown()), "not_found"),
            (file(io::ErrorKind::NotFound), "not_found"),
            (file(io::ErrorKind::StorageFull), "no_space"),
            (DiskError::InUse { path: path(), purpose: "writing", holder: text() }, "locked"),
            (missing(), "parent_missing"),
            (DiskError::ParentOutside { child: path(), parent: path() }, "parent_not_allowed"),
            (DiskError::FileOutside { image: path(), file: path(), what: text() }, "parent_not_allowed"),
            (
                DiskError::ParentChanged { child: path(), parent: path(), found: text(), expected: text() },
                "parent_changed",
            ),
            (DiskError::NoParentFits { first: Box::new(missing()), others: Vec::new() }, "parent_missing"),
            (DiskError::ParentIsDevice { path: path() }, "parent_not_allowed"),
            (DiskError::BadChain { path: path(), what: text() }, "bad_chain"),
            (DiskError::HasChildren { path: path(), child: path() }, "has_children"),
            (DiskError::BadOptions { what: text(), hint: text() }, "invalid_input"),
            (DiskError::Usage { what: text(), hint: text() }, "invalid_input"),
            (DiskError::Exists { path: path() }, "exists"),
            (DiskError::VerifyFailed { dest: path(), source_path: path(), offset_bytes: 0 }, "verify_failed"),
            (DiskError::DamagedSource { error: corrupt(), offset_bytes: 0, end_bytes: 1 }, "corrupt"),
            (DiskError::WrongBase { copy: path(), export: path(), found: text(), expected: text() }, "parent_changed"),
            (DiskError::BadExport { path: path(), what: text() }, "corrupt"),
            (DiskError::AppliedInPart { copy: path(), error: Box::new(DiskError::Stopped) }, "stopped"),
            (DiskError::Stopped, "stopped"),
        ] {
            assert_eq!(error.code().as_str(), code, "{error:?}");
        }
        // What came through a queue keeps its code, where its kind would say less.
        assert_eq!(DiskError::code_of(&image().into()).as_str(), "not_an_image");
        assert_eq!(DiskError::code_of(&to_io(missing())).as_str(), "parent_missing");
        assert_eq!(DiskError::code_of(&unknown().into()).as_str(), "not_found");
        assert_eq!(DiskError::code_of(&io::ErrorKind::ReadOnlyFilesystem.into()).as_str(), "read_only");
    }

    #[test]
    fn only_the_given_path_is_renamed() {
        let (from, to) = (Path::new("a.vhd.partial"), Path::new("a.vhd"));
        let full = |path: &str| DiskError::File {
            doing: "fill it",
            path: path.into(),
            source: io::ErrorKind::StorageFull.into(),
        };
        assert!(full("a.vhd.partial").renamed(from, to).to_string().starts_with("a.vhd: "));
        assert!(full("b.vhd").renamed(from, to).to_string().starts_with("b.vhd: "));
        let said = DiskError::BadOptions { what: "a.vhd.partial is a pipe".into(), hint: "no".into() };
        assert_eq!(said.renamed(from, to).to_string(), "a.vhd is a pipe; no");
    }
}
