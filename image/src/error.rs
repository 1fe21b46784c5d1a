//! What can go wrong with an image, told so that a user can act on it.

use diskwright_store::{BarrierError, ErrorCode};
use std::{io, path::PathBuf};

/// Result of an image operation.
pub type Result<T, E = ImageError> = std::result::Result<T, E>;

/// Why an image operation failed.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The store failed.
    #[error("{path}: cannot {doing} at offset {offset_bytes}: {source}{}", hint_for(source))]
    Io {
        /// What was being done: "read the block allocation table".
        doing: &'static str,
        /// To which file.
        path: PathBuf,
        /// Where in it.
        offset_bytes: u64,
        /// What the system said.
        source: io::Error,
    },
    /// The file contradicts its format.
    #[error(
        "{path}: {structure} at offset {offset_bytes} is damaged: found {found}, expected {expected}; `diskwright check` lists everything that is wrong with the file"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// Which structure, in the words of the specification.
        structure: &'static str,
        /// Where it is.
        offset_bytes: u64,
        /// What is there.
        found: String,
        /// What should be.
        expected: String,
    },
    /// The file is not of a format that we know.
    #[error("{path}: {found}; expected {expected}")]
    NotAnImage {
        /// The file.
        path: PathBuf,
        /// What was found.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// Name and contents do not agree on a format, or contents alone are not enough to go by.
    #[error("{path}: {what}; {hint}")]
    FormatUnclear {
        /// The file.
        path: PathBuf,
        /// What name and contents say.
        what: String,
        /// What to do.
        hint: String,
    },
    /// The file needs something that this program does not have.
    #[error("{path}: {what} is not supported; {hint}")]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// What.
        what: String,
        /// What to do.
        hint: String,
    },
    /// Options that no image can have.
    #[error("cannot create {path}: {what}; {hint}")]
    BadOptions {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
        /// What to do.
        hint: String,
    },
    /// A flush failed before; what is durable is unknown.
    #[error(
        "{path}: an earlier flush failed ({reason}); nothing written since can be called durable: close the disk, run `diskwright check`, and open it again"
    )]
    Poisoned {
        /// The file.
        path: PathBuf,
        /// What the first failure was.
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

    /// The file that it tells of, for callers that show it by another name.
    pub fn path_mut(&mut self) -> &mut PathBuf {
        match self {
            Self::Io { path, .. }
            | Self::Corrupt { path, .. }
            | Self::NotAnImage { path, .. }
            | Self::FormatUnclear { path, .. }
            | Self::Unsupported { path, .. }
            | Self::BadOptions { path, .. }
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
            Self::BadOptions { .. } => ErrorCode::InvalidInput,
            Self::Poisoned { .. } => ErrorCode::Poisoned,
        }
    }

    /// The kind of the system's error beneath, for callers that must answer with an errno.
    pub fn kind(&self) -> io::ErrorKind {
        match self {
            Self::Io { source, .. } => source.kind(),
            Self::Corrupt { .. } | Self::NotAnImage { .. } | Self::FormatUnclear { .. } => io::ErrorKind::InvalidData,
            Self::Unsupported { .. } => io::ErrorKind::Unsupported,
            Self::BadOptions { .. } => io::ErrorKind::InvalidInput,
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
            (ImageError::Poisoned { path: path(), reason: text() }, "poisoned"),
        ] {
            assert_eq!(error.code().as_str(), code, "{error:?}");
        }
    }
}
