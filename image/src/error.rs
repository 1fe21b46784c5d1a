//! Errors of image operations. Each says what failed, on which file, and what the user can do.

use diskwright_store::{BarrierError, ErrorCode};
use std::{io, path::PathBuf};

/// Result of an image operation.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// Why an image operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A read, a write or another operation of the store failed.
    #[error("{path}: cannot {doing} at offset {offset_bytes}: {source}{}", hint_for(source))]
    Io {
        /// The operation, to follow "cannot": "read the block allocation table".
        doing: &'static str,
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// Offset in the file.
        offset_bytes: u64,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file violates the specification of its format.
    #[error(
        "{path}: {structure} at offset {offset_bytes} is damaged: found {found}, expected {expected}; `diskwright check` lists everything that is wrong with the file"
    )]
    Corrupt {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// Name of the structure, as in the specification.
        structure: &'static str,
        /// Offset of the structure, or of its bad field, in the file.
        offset_bytes: u64,
        /// The value in the file.
        found: String,
        /// The value or range that the specification allows.
        expected: String,
    },
    /// The file has none of the known formats.
    #[error("{path}: {found}; expected {expected}")]
    NotAnImage {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// What the file begins with, or its length.
        found: String,
        /// The signatures that are known.
        expected: String,
    },
    /// File name and contents indicate different formats, or the contents alone do not prove one.
    #[error("{path}: {what}; {hint}")]
    FormatUnclear {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// What the name and the contents indicate.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// The file uses a feature that this program does not support.
    #[error("{path}: {what} is not supported; {hint}")]
    Unsupported {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// The feature, as the specification calls it.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// Creation options that the format does not allow.
    #[error("cannot create {path}: {what}; {hint}")]
    BadOptions {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// The option that is not allowed.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// A link to a parent that the image cannot store.
    #[error("{path}: cannot change the link to the parent: {what}; {hint}")]
    BadParentLink {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// What cannot be stored.
        what: String,
        /// What to do, as the second half of the sentence.
        hint: String,
    },
    /// An earlier flush failed. Which of the written data is durable is unknown.
    #[error(
        "{path}: an earlier flush failed ({reason}); nothing written since can be called durable: close the disk, run `diskwright check`, and open it again"
    )]
    Poisoned {
        /// Name of the file, as its store reports it. Empty if only the caller knows it.
        path: PathBuf,
        /// Text of the first failure.
        reason: String,
    },
}

fn hint_for(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::FileTooLarge => "; raise that limit, or use a file system that takes longer files",
        _ if diskwright_store::is_full(source) => "; free some space on the file system and try again",
        io::ErrorKind::PermissionDenied => "; check the file's permissions",
        io::ErrorKind::UnexpectedEof => "; the file ends too early: was it copied completely?",
        _ => "",
    }
}

impl ImageError {
    /// Wraps a store's error.
    pub fn io(doing: &'static str, store: &dyn diskwright_store::Store, offset_bytes: u64, source: io::Error) -> Self {
        Self::Io { doing, path: store.name().to_owned(), offset_bytes, source }
    }

    /// The path in the error. Callers replace it to show the file under another name.
    pub fn path_mut(&mut self) -> &mut PathBuf {
        match self {
            Self::Io { path, .. }
            | Self::Corrupt { path, .. }
            | Self::NotAnImage { path, .. }
            | Self::FormatUnclear { path, .. }
            | Self::Unsupported { path, .. }
            | Self::BadOptions { path, .. }
            | Self::BadParentLink { path, .. }
            | Self::Poisoned { path, .. } => path,
        }
    }

    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Io { source, .. } => ErrorCode::of_system(source),
            Self::Corrupt { .. } => ErrorCode::Corrupt,
            Self::NotAnImage { .. } => ErrorCode::NotAnImage,
            Self::FormatUnclear { .. } => ErrorCode::FormatUnclear,
            Self::Unsupported { .. } => ErrorCode::Unsupported,
            Self::BadOptions { .. } | Self::BadParentLink { .. } => ErrorCode::InvalidInput,
            Self::Poisoned { .. } => ErrorCode::Poisoned,
        }
    }

    /// The kind of the underlying system error, for callers that must answer with an errno.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Io { source, .. } => source.kind(),
            Self::Corrupt { .. } | Self::NotAnImage { .. } | Self::FormatUnclear { .. } => io::ErrorKind::InvalidData,
            Self::Unsupported { .. } => io::ErrorKind::Unsupported,
            Self::BadOptions { .. } | Self::BadParentLink { .. } => io::ErrorKind::InvalidInput,
            Self::Poisoned { .. } => io::ErrorKind::Other,
        }
    }
}

impl From<BarrierError> for ImageError {
    fn from(error: BarrierError) -> Self {
        match error {
            BarrierError::Sync { doing, path, source } => Self::Io { doing, path, offset_bytes: 0, source },
            BarrierError::Poisoned { path, reason } => Self::Poisoned { path, reason },
        }
    }
}

impl From<ImageError> for io::Error {
    fn from(error: ImageError) -> Self {
        Self::new(error.kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_has_its_code() {
        let text = String::new;
        let path = PathBuf::new;
        let io = |kind: io::ErrorKind| ImageError::Io {
            doing: "read it",
            path: path(),
            offset_bytes: 0,
            source: kind.into(),
        };
        let corrupt =
            ImageError::Corrupt { path: path(), structure: "footer", offset_bytes: 0, found: text(), expected: text() };
        for (error, code) in [
            (io(io::ErrorKind::StorageFull), "no_space"),
            (io(io::ErrorKind::UnexpectedEof), "io"),
            (corrupt, "corrupt"),
            (ImageError::NotAnImage { path: path(), found: text(), expected: text() }, "not_an_image"),
            (ImageError::FormatUnclear { path: path(), what: text(), hint: text() }, "format_unclear"),
            (ImageError::Unsupported { path: path(), what: text(), hint: text() }, "unsupported"),
            (ImageError::BadOptions { path: path(), what: text(), hint: text() }, "invalid_input"),
            (ImageError::BadParentLink { path: path(), what: text(), hint: text() }, "invalid_input"),
            (ImageError::Poisoned { path: path(), reason: text() }, "poisoned"),
        ] {
            assert_eq!(error.code().as_str(), code, "{error:?}");
        }
    }
}
