//! Explains errors of a full file system: how much space was needed, and how much is free.
//!
//! [`explain`] wraps the system's error where it occurs: in [`FileStore`](crate::FileStore), or,
//! for payload that the engine writes, in the code that knows how much is still to be written. The
//! kind of the error stays the same, so [`is_full`](crate::is_full) and every translation to an
//! errno still work.

use crate::is_full;
use rustix::{
    fs::StatVfs,
    process::{Resource, getrlimit},
};
use std::{
    error, fmt, io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

/// There was no room for a write or an allocation.
#[derive(Debug)]
struct Shortage {
    /// Number of bytes to be written or allocated; `None` if unknown.
    needed_bytes: Option<u64>,
    limit: Limit,
    source: io::Error,
}

/// The limit that was reached.
#[derive(Debug, PartialEq, Eq)]
enum Limit {
    /// The file system: bytes free for this user, and a folder on it.
    FileSystem { free_bytes: u64, folder: PathBuf },
    /// `ulimit -f`: the maximum length of a file that this process writes, in bytes.
    Process { max_bytes: u64 },
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.source)?;
        match &self.limit {
            Limit::FileSystem { free_bytes, folder } => {
                if let Some(needed_bytes) = self.needed_bytes {
                    write!(f, ": needs about {},", Size(needed_bytes))?;
                } else {
                    f.write_str(":")?;
                }
                write!(f, " {} are free on {}", Size(*free_bytes), folder.display())
            }
            Limit::Process { max_bytes } => {
                write!(f, ": this process may write files of at most {} (ulimit -f)", Size(*max_bytes))
            }
        }
    }
}

impl error::Error for Shortage {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        Some(&self.source)
    }
}

/// A byte count, displayed in binary units.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")];
        match units.into_iter().find(|(shift, _)| self.0 >> shift > 0) {
            Some((shift, unit)) if self.0.is_multiple_of(1 << shift) => write!(f, "{} {unit}", self.0 >> shift),
            Some((shift, unit)) => write!(f, "{:.1} {unit}", self.0 as f64 / (1u64 << shift) as f64),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Whether the file system of `path` is of a kind whose files can share data by reflink. It may
/// still refuse to.
pub fn may_reflink(path: &Path) -> bool {
    /// btrfs, XFS, bcachefs, OCFS2.
    const KINDS: [i64; 4] = [0x9123_683e, 0x5846_5342, 0xca45_1a4e, 0x7461_636f];
    rustix::fs::statfs(folder_of(path)).is_ok_and(|found| KINDS.contains(&found.f_type))
}

/// Bytes free for this user on the file system of `path`, which need not exist; `None` if unknown.
pub fn free_bytes(path: &Path) -> Option<u64> {
    available_bytes(rustix::fs::statvfs(folder_of(path)))
}

/// Bytes free for this user on the file system of an open file.
pub(crate) fn free_bytes_of(file: &OwnedFd) -> Option<u64> {
    available_bytes(rustix::fs::fstatvfs(file))
}

/// Adds needed and free space to an out-of-space error for the file at `path`. Other errors, and
/// errors on a file system that cannot be queried, are returned unchanged. An error that is already
/// explained, or that an image has wrapped, says what one step needed: with `needed_bytes`, what
/// the caller needs in all replaces that; with `None` it stays. `free_bytes` is what was free
/// before the attempt, which may have used up the rest before it failed; with `None`, the space
/// that is free now is shown.
pub fn explain(source: io::Error, path: &Path, needed_bytes: Option<u64>, free_bytes: Option<u64>) -> io::Error {
    if !is_full(&source) {
        return source;
    }
    let source = match (source.get_ref(), needed_bytes) {
        (None, _) => source,
        (Some(inner), Some(_)) => match system_error_within(inner) {
            Some(errno) => io::Error::from_raw_os_error(errno),
            None => return source,
        },
        (Some(_), None) => return source,
    };
    let limit = match source.kind() {
        io::ErrorKind::FileTooLarge => getrlimit(Resource::Fsize).current.map(|max_bytes| Limit::Process { max_bytes }),
        _ => free_bytes.or_else(|| self::free_bytes(path)).map(|free_bytes| {
            let folder = folder_of(path);
            Limit::FileSystem { free_bytes, folder: folder.canonicalize().unwrap_or_else(|_| folder.to_owned()) }
        }),
    };
    match limit {
        Some(limit) => io::Error::new(source.kind(), Shortage { needed_bytes, limit, source }),
        None => source,
    }
}

/// The error for an operation that is not begun, because its file system has too little space.
pub fn shortage(path: &Path, needed_bytes: u64, free_bytes: u64) -> io::Error {
    let full = io::Error::from_raw_os_error(rustix::io::Errno::NOSPC.raw_os_error());
    explain(full, path, Some(needed_bytes), Some(free_bytes))
}

/// The number of the system's error from which `error` was made.
fn system_error_within(error: &(dyn error::Error + 'static)) -> Option<i32> {
    let errors = std::iter::successors(Some(error), |error| error.source());
    errors.filter_map(|error| error.downcast_ref::<io::Error>()).find_map(io::Error::raw_os_error)
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

fn available_bytes(found: rustix::io::Result<StatVfs>) -> Option<u64> {
    found.ok().map(|found| found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full(needed_bytes: Option<u64>) -> io::Error {
        let folder = tempfile::tempdir().unwrap();
        explain(io::Error::from_raw_os_error(28), &folder.path().join("disk.vhdx"), needed_bytes, None)
    }

    #[test]
    fn the_message_has_the_numbers_and_the_kind_stays() {
        let error = full(Some(3 << 29));
        assert!(is_full(&error) && error.kind() == io::ErrorKind::StorageFull);
        let told = error.to_string();
        assert!(told.contains(": needs about 1.5 GiB, ") && told.contains(" are free on /"), "{told}");
        let told = full(None).to_string();
        assert!(!told.contains("needs") && told.contains(" are free on /"), "{told}");
        // The free space before the attempt is shown.
        let before = explain(io::Error::from_raw_os_error(28), Path::new("/tmp/x"), Some(2 << 20), Some(1 << 20));
        assert!(before.to_string().contains("needs about 2 MiB, 1 MiB are free on "), "{before}");
    }

    #[test]
    fn what_is_not_begun_names_both_figures() {
        let error = shortage(Path::new("/tmp/x"), 3 << 30, 1 << 30);
        assert!(is_full(&error) && error.to_string().contains("needs about 3 GiB, 1 GiB are free on /tmp"), "{error}");
    }

    /// A step of a copy says what it needed, the copy what all of it needs.
    #[test]
    fn the_need_of_the_whole_replaces_that_of_a_step() {
        let whole = |source| explain(source, Path::new("/tmp/x"), Some(32 << 20), Some(1 << 20));
        let wrapped = io::Error::new(io::ErrorKind::StorageFull, Wrapper(full(Some(2 << 20))));
        for step in [full(Some(2 << 20)), wrapped] {
            assert!(step.to_string().contains("needs about 2 MiB"), "{step}");
            let told = whole(step);
            assert!(is_full(&told));
            let told = told.to_string();
            assert!(told.contains("needs about 32 MiB, 1 MiB are free on "), "{told}");
            assert_eq!(told.matches("needs").count(), 1, "{told}");
        }
        // Nobody knows more: the step's need stays.
        let told = explain(full(Some(2 << 20)), Path::new("/tmp/x"), None, Some(1 << 20)).to_string();
        assert!(told.contains("needs about 2 MiB") && !told.contains("1 MiB are free"), "{told}");
    }

    /// An error of a layer above, such as an image's.
    #[derive(Debug)]
    struct Wrapper(io::Error);

    impl fmt::Display for Wrapper {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "cannot extend the file: {}", self.0)
        }
    }

    impl error::Error for Wrapper {
        fn source(&self) -> Option<&(dyn error::Error + 'static)> {
            Some(&self.0)
        }
    }

    #[test]
    fn other_errors_stay_as_they_are() {
        let error = explain(io::Error::from_raw_os_error(5), Path::new("/tmp/x"), Some(1), None);
        assert_eq!(error.raw_os_error(), Some(5));
        let nowhere =
            explain(io::Error::from_raw_os_error(28), Path::new("/no such folder of a test/x"), Some(1), None);
        assert_eq!(nowhere.raw_os_error(), Some(28));
    }

    #[test]
    fn sizes_are_formatted_in_binary_units() {
        let text = |bytes| Size(bytes).to_string();
        assert_eq!([text(0), text(1536), text(4 << 30), text(5 << 39)], ["0 bytes", "1.5 KiB", "4 GiB", "2.5 TiB"]);
    }
}
