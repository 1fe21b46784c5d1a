//! How a command ends: exit codes, and errors as one sentence on standard error.
//!
//! ```text
//!              0             1                    2                       3              130
//!   compare    same          different            could not compare       -              stopped
//!   diff       same          different            could not compare       -              stopped
//!   check      sound         could not check      corrupt                 leaks only     stopped
//!   convert    done          failed               used wrongly (clap)     done, but      stopped
//!                                                                         for damage
//!   rescue     done          failed               used wrongly (clap)     done, but      stopped
//!                                                                         for losses
//!   info       done          failed               used wrongly (clap)     a rule does    stopped
//!                                                                         not hold, or a
//!                                                                         digest
//!   space      done          failed               used wrongly (clap)     scrub: data    stopped
//!                                                                         are lost
//!   others     done          failed               used wrongly (clap)     -              stopped
//! ```
//!
//! The codes are qemu-img's, because scripts know them. So a usage error of `check` is 1 and not
//! clap's 2, which would mean "corrupt"; for `compare` clap's 2 is right. A reader of standard
//! output that ends early (`| head`) is not an error.
//!
//! Wrong usage is what the command line alone shows: an unknown command of `io`, a size of 0, a
//! block size that the format does not have, one disk named twice. It ends like an error of clap
//! ([`Failure::Usage`]). What depends on files, such as a parent of another format or a file that
//! exists, is a failure. [`Codes`] turns both into numbers, and nothing else does.

use crate::switches;
use diskwright_disk::DiskError;
use diskwright_fleet::FleetError;
use diskwright_image::ImageError;
use diskwright_lab::LabError;
use diskwright_load::{LoadError, record::End};
use diskwright_object::ObjectError;
use diskwright_serve::attach::AttachError;
use diskwright_space::SpaceError;
use diskwright_store::ErrorCode;
use std::{fmt, io, path::Path};

/// Done; same; sound.
pub const OK: u8 = 0;
/// Failed; different; could not check.
pub const FAILED: u8 = 1;
/// Used wrongly; could not compare; corrupt.
pub const USAGE: u8 = 2;
/// `compare`, `diff`: the contents differ.
pub const DIFFERENT: u8 = 1;
/// `compare`, `diff`: could not compare.
pub const NOT_COMPARED: u8 = 2;
/// `check`: could not check.
pub const NOT_CHECKED: u8 = 1;
/// `check`: corrupt.
pub const CORRUPT: u8 = 2;
/// `check`: sound, with leaked space.
pub const LEAKED: u8 = 3;
/// `convert --skip-damaged` and `rescue`: the copy has zeros where the source is damaged.
pub const COPIED_WITH_LOSSES: u8 = 3;
/// `info --azure`, `info --windows`: a rule of the place does not hold. `info --verify`: a digest
/// is wrong.
pub const RULE_BROKEN: u8 = 3;
/// `space scrub`: no copy has the checksums of some data.
pub const DATA_LOST: u8 = 3;
/// `seal --check`: the image differs from its seal.
pub const SEAL_BROKEN: u8 = 3;
/// Ended by Ctrl-C or SIGTERM.
pub const STOPPED: u8 = 130;

/// The code of a measurement that ended so.
pub fn of_end(end: &End) -> u8 {
    match end {
        End::Complete => OK,
        End::Failed { .. } => FAILED,
        End::Stopped => STOPPED,
    }
}

/// Why a command failed.
#[derive(Debug)]
pub enum Failure {
    /// The command was used wrongly; the sentence says how.
    Usage(String),
    /// The command failed; the sentence says why.
    Sentence(String),
    /// A signal stopped it.
    Stopped,
    /// The reader of standard output has closed it.
    ReaderGone,
}

/// The exit codes of one command for a failure and for wrong usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Codes {
    failed: u8,
    usage: u8,
}

impl Codes {
    /// The codes of most commands.
    pub const USUAL: Self = Self { failed: FAILED, usage: USAGE };
    /// The codes of `check`, whose 2 means "corrupt".
    pub const CHECK: Self = Self { failed: NOT_CHECKED, usage: NOT_CHECKED };
    /// The codes of `compare`, `diff` and `lab compare`, whose 1 means "different".
    pub const COMPARE: Self = Self { failed: NOT_COMPARED, usage: USAGE };

    /// The code of a command line that clap refuses.
    pub fn usage(self) -> u8 {
        self.usage
    }

    /// The code of a command that failed.
    pub fn of(self, failure: &Failure) -> u8 {
        match failure {
            Failure::Usage(_) => self.usage,
            Failure::Sentence(_) => self.failed,
            Failure::Stopped => STOPPED,
            Failure::ReaderGone => OK,
        }
    }
}

/// What a command returns: its exit code, or why it failed.
pub type Outcome<T = u8> = Result<T, Failure>;

impl Failure {
    /// A failure with this sentence.
    pub fn new(sentence: impl Into<String>) -> Self {
        Self::Sentence(for_users(&sentence.into()))
    }

    /// Wrong usage, with this sentence.
    pub fn usage(sentence: impl Into<String>) -> Self {
        Self::Usage(for_users(&sentence.into()))
    }

    /// An error of the system, with what was being done.
    pub fn doing(doing: impl fmt::Display, source: io::Error) -> Self {
        Self::Sentence(for_users(&format!("{doing}: {source}")))
    }
}

/// A sentence of a library with the switches of this command, and without numbers of errors.
pub fn for_users(text: &str) -> String {
    switches::with_switches(without_errno(text))
}

// The system's errors end in "(os error 2)", which says nothing to a user.
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
        match &error {
            DiskError::Stopped => Self::Stopped,
            // An image refuses only the options of its creation in this way.
            DiskError::Usage { .. } | DiskError::Image(ImageError::BadOptions { .. }) => Self::usage(error.to_string()),
            DiskError::File { path, source, .. } if source.kind() == io::ErrorKind::NotFound && is_of_windows(path) => {
                Self::new(format!(
                    "{error}; this is a path of Windows: on this machine the file has another one (in WSL, C:\\vm\\disk.vhdx is /mnt/c/vm/disk.vhdx)"
                ))
            }
            DiskError::InUse { purpose: "reading", .. } if switches::takes_force_share() => Self::new(format!(
                "{error}, or read it all the same with --force-share (what is read may be inconsistent)"
            )),
            other => Self::new(other.to_string()),
        }
    }
}

/// Whether a path begins with the letter of a drive, or with a server, as paths of Windows do.
fn is_of_windows(path: &Path) -> bool {
    match path.as_os_str().as_encoded_bytes() {
        [letter, b':', b'\\' | b'/', ..] => letter.is_ascii_alphabetic(),
        [b'\\', b'\\', ..] => true,
        _ => false,
    }
}

impl From<SpaceError> for Failure {
    fn from(error: SpaceError) -> Self {
        match &error {
            SpaceError::Stopped { .. } => Self::Stopped,
            SpaceError::Usage { .. } | SpaceError::BadName { .. } => Self::usage(error.to_string()),
            other => Self::new(other.to_string()),
        }
    }
}

impl From<ObjectError> for Failure {
    fn from(error: ObjectError) -> Self {
        match error.code() {
            ErrorCode::InvalidInput => Self::usage(error.to_string()),
            _ => Self::new(error.to_string()),
        }
    }
}

impl From<ImageError> for Failure {
    fn from(error: ImageError) -> Self {
        Self::Sentence(for_users(&error.to_string()))
    }
}

impl From<LoadError> for Failure {
    fn from(error: LoadError) -> Self {
        Self::new(error.to_string())
    }
}

impl From<FleetError> for Failure {
    fn from(error: FleetError) -> Self {
        match error {
            FleetError::Stopped => Self::Stopped,
            error => Self::new(error.to_string()),
        }
    }
}

impl From<LabError> for Failure {
    fn from(error: LabError) -> Self {
        match error {
            LabError::Stopped => Self::Stopped,
            LabError::Disk(error) => error.into(),
            other => Self::Sentence(for_users(&other.to_string())),
        }
    }
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self::Sentence(for_users(&error.to_string()))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(sentence) | Self::Sentence(sentence) => f.write_str(sentence),
            Self::Stopped => f.write_str("stopped before it was done"),
            Self::ReaderGone => f.write_str("standard output was closed by its reader"),
        }
    }
}

/// For writes to standard output only: everything else says what it was doing by
/// [`Failure::doing`].
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
        let of = |failure: Failure| [Codes::USUAL, Codes::COMPARE, Codes::CHECK].map(|codes| codes.of(&failure));
        assert_eq!(of(Failure::new("x")), [1, 2, 1]);
        assert_eq!(of(Failure::usage("x")), [2, 2, 1]);
        let wrong = || DiskError::Usage { what: "x".into(), hint: "y".into() };
        assert_eq!(of(Failure::from(wrong())), [2, 2, 1]);
        assert_eq!(of(Failure::from(LabError::Disk(wrong()))), [2, 2, 1]);
        assert_eq!(of(Failure::from(DiskError::Exists { path: "x".into() })), [1, 2, 1]);
        assert_eq!(of(Failure::from(DiskError::Stopped)), [130; 3]);
        assert_eq!(of(Failure::from(io::Error::from(io::ErrorKind::BrokenPipe))), [0; 3]);
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
