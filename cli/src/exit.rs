//! How a command ends: exit codes, and errors as one sentence on standard error.
//!
//! ```text
//!              0             1                    2                       3              130
//!   compare    same          different            could not compare       -              stopped
//!   check      sound         could not check      corrupt                 leaks only     stopped
//!   convert    done          failed               used wrongly (clap)     done, but      stopped
//!                                                                         for damage
//!   others     done          failed               used wrongly (clap)     -              stopped
//! ```
//!
//! The codes are those of qemu-img, because scripts know them. So a usage error of `check` is 1 and not clap's 2, which
//! would read as "corrupt"; for `compare` clap's 2 is right as it is. A reader that goes away (`| head`) is no error.

use diskwright_disk::DiskError;
use diskwright_image::ImageError;
use diskwright_lab::LabError;
use diskwright_serve::attach::AttachError;
use std::{fmt, io};

/// Done; same; sound.
pub const OK: u8 = 0;
/// Failed; different; could not check.
pub const FAILED: u8 = 1;
/// Used wrongly; could not compare; corrupt.
pub const USAGE: u8 = 2;
/// `compare`: the contents differ.
pub const DIFFERENT: u8 = 1;
/// `compare`: no verdict.
pub const NOT_COMPARED: u8 = 2;
/// `check`: no verdict.
pub const NOT_CHECKED: u8 = 1;
/// `check`: damaged.
pub const CORRUPT: u8 = 2;
/// `check`: sound, but space in the file is lost.
pub const LEAKED: u8 = 3;
/// `convert --skip-damaged`: the copy is whole but for what is damaged in the source.
pub const COPIED_WITH_LOSSES: u8 = 3;
/// Ended by Ctrl-C or SIGTERM.
pub const STOPPED: u8 = 130;

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// A sentence to show.
    Sentence(String),
    /// A signal stopped it.
    Stopped,
    /// Nobody reads standard output any more.
    ReaderGone,
}

/// What a command returns: its exit code, or why it failed.
pub type Outcome<T = u8> = Result<T, Failure>;

impl Failure {
    /// A failure with this sentence.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self::Sentence(without_errno(&sentence.into()))
    }

    /// Wraps an error of the system with what was being done.
    pub fn doing(doing: impl fmt::Display, source: io::Error) -> Self {
        Self::Sentence(without_errno(&format!("{doing}: {source}")))
    }

    /// The exit code, for a command whose ordinary failures end with `failed`.
    pub fn code(&self, failed: u8) -> u8 {
        match self {
            Self::Sentence(_) => failed,
            Self::Stopped => STOPPED,
            Self::ReaderGone => OK,
        }
    }
}

// The system's errors say "(os error 2)" behind their words, which helps nobody who reads a sentence.
fn without_errno(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find(" (os error ") {
        let Some(len) = rest[start..].find(')') else { break };
        out.push_str(&rest[..start]);
        rest = &rest[start + len + 1..];
    }
    out + rest
}

impl From<DiskError> for Failure {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Stopped => Self::Stopped,
            other => Self::Sentence(without_errno(&other.to_string())),
        }
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::Sentence(without_errno(&error.to_string()))
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::Stopped | LabError::Disk(DiskError::Stopped) => Self::Stopped,
            other => Self::Sentence(without_errno(&other.to_string())),
        }
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self::Sentence(without_errno(&error.to_string()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sentence(sentence) => f.write_str(sentence),
            Self::Stopped => f.write_str("stopped before it was done"),
            Self::ReaderGone => f.write_str("nobody reads standard output any more"),
        }
    }
}

/// For writes to standard output only: everything else says what it was doing by [`Failure::doing`].
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Self::ReaderGone,
            _ => Self::doing("cannot write to standard output", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_failures() {
        assert_eq!(Failure::new("x").code(NOT_COMPARED), 2);
        assert_eq!(Failure::new("x").code(NOT_CHECKED), 1);
        assert_eq!(Failure::from(DiskError::Stopped).code(FAILED), 130);
        assert_eq!(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe)).code(FAILED), 0);
    }

    #[test]
    fn no_numbers_of_the_system() {
        let Failure::Sentence(text) = Failure::doing("cannot read x", io::Error::from_raw_os_error(2)) else {
            panic!("no sentence")
        };
        assert_eq!(text, "cannot read x: No such file or directory");
        assert_eq!(without_errno("a (os error 28); b (os error 5)"), "a; b");
        assert_eq!(without_errno("a (os error"), "a (os error");
    }
}
