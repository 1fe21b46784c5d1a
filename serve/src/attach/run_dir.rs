//! The folder of a user's records of attached disks.
//!
//! ```text
//!   $DISKWRIGHT_RUN_DIR                 if set
//!   /run/diskwright                     root
//!   $XDG_RUNTIME_DIR/diskwright         if $XDG_RUNTIME_DIR is a folder of this user
//!   /run/user/UID/diskwright            if /run/user/UID is a folder of this user
//!   /tmp/diskwright-UID                 otherwise (su, cron, containers)
//! ```
//!
//! Mounts and files named in the records are unmounted and removed later, so no other user may be
//! able to change a record. The folder must belong to this user, and no other user may write to it.
//! In `/tmp`, every user can make files. So there the folder must not be a symbolic link, and
//! `/tmp` must be sticky; otherwise another user could rename the folder and put one of his own in
//! place.
//!
//! `XDG_RUNTIME_DIR` is ignored if it belongs to another user, because `su` does not change it.

use crate::attach::error::{AttachError, state_error};
use rustix::fs::FlockOperation;
use std::{
    fs::{self, File},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt},
    path::{Path, PathBuf},
};

/// Environment variable with another folder for the records.
const RUN_DIR_VARIABLE: &str = "DISKWRIGHT_RUN_DIR";

const OTHERS_MAY_WRITE: u32 = 0o022;
const EVERYBODY_MAY_WRITE: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// The folder for the records, which may not exist yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunDir {
    path: PathBuf,
    /// Whether the folder's parent is writable for all users.
    in_public: bool,
}

/// Until this is dropped, programs that clean `/tmp` (systemd-tmpfiles) skip the folder.
#[derive(Debug)]
pub struct CleanupLock {
    _locked: File,
}

impl RunDir {
    /// The folder of this user.
    pub fn usual() -> Self {
        let user = rustix::process::geteuid();
        match std::env::var_os(RUN_DIR_VARIABLE) {
            Some(dir) if !dir.is_empty() => Self::named(dir.into()),
            _ if user.is_root() => Self::named("/run/diskwright".into()),
            _ => {
                let named = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
                Self::of_user(user.as_raw(), named, Path::new("/run/user"), Path::new("/tmp"))
            }
        }
    }

    /// A folder that was chosen explicitly.
    pub fn named(path: PathBuf) -> Self {
        Self { path, in_public: false }
    }

    fn of_user(user: u32, named: Option<PathBuf>, run_user: &Path, tmp: &Path) -> Self {
        let private = [named, Some(run_user.join(user.to_string()))].into_iter().flatten().find(|dir| {
            dir.is_absolute() && fs::metadata(dir).is_ok_and(|found| found.is_dir() && found.uid() == user)
        });
        match private {
            Some(dir) => Self::named(dir.join("diskwright")),
            None => Self { path: tmp.join(format!("diskwright-{user}")), in_public: true },
        }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes the folder if it does not exist, and checks it.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn make(&self) -> Result<(), AttachError> {
        make_private(&self.path).map_err(|error| self.with_hint(error))?;
        self.check()
    }

    /// Checks that the folder exists and that no other user can change its contents.
    ///
    /// # Errors
    /// [`AttachError::State`].
    pub fn check(&self) -> Result<(), AttachError> {
        check_private(&self.path).and_then(|()| self.check_public()).map_err(|error| self.with_hint(error))
    }

    fn check_public(&self) -> Result<(), AttachError> {
        let Some(parent) = self.path.parent().filter(|_| self.in_public) else { return Ok(()) };
        let is_link = fs::symlink_metadata(&self.path).is_ok_and(|found| found.is_symlink());
        let is_open = fs::metadata(parent)
            .is_ok_and(|found| found.mode() & (STICKY | EVERYBODY_MAY_WRITE) == EVERYBODY_MAY_WRITE);
        let what = match (is_link, is_open) {
            (true, _) => "it is a symbolic link",
            (false, true) => "its parent folder is writable for all users and not sticky",
            (false, false) => return Ok(()),
        };
        Err(state_error("use", &self.path, io::Error::new(io::ErrorKind::PermissionDenied, what)))
    }

    /// Adds a hint to errors of a folder that the user did not choose.
    fn with_hint(&self, error: AttachError) -> AttachError {
        match error {
            AttachError::State { doing, path, source, .. } if self.in_public => AttachError::State {
                doing,
                path,
                source,
                hint: "; set DISKWRIGHT_RUN_DIR to a folder of your own (chmod 700), the same for attach, attached and detach",
            },
            other => other,
        }
    }

    /// Keeps the folder from being deleted as unused. `None` if it cannot be locked.
    pub fn keep(&self) -> Option<CleanupLock> {
        let folder = File::open(&self.path).ok()?;
        rustix::fs::flock(&folder, FlockOperation::NonBlockingLockShared).ok()?;
        Some(CleanupLock { _locked: folder })
    }
}

/// Makes a folder that only this user can access, if it does not exist.
///
/// # Errors
/// [`AttachError::State`].
pub fn make_private(dir: &Path) -> Result<(), AttachError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|source| state_error("create", dir, source))?;
    check_private(dir)
}

fn check_private(dir: &Path) -> Result<(), AttachError> {
    let found = fs::metadata(dir).map_err(|source| state_error("read", dir, source))?;
    let what = match () {
        () if found.uid() != rustix::process::geteuid().as_raw() => "it belongs to another user",
        () if found.mode() & OTHERS_MAY_WRITE != 0 => "other users can write to it",
        () => return Ok(()),
    };
    let source = io::Error::new(io::ErrorKind::PermissionDenied, what);
    let hint = "; use a folder of your own (chmod 700)";
    Err(AttachError::State { doing: "use", path: dir.to_owned(), source, hint })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn user() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn tmp(mode: u32) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(mode)).unwrap();
        dir
    }

    fn in_tmp(tmp: &Path) -> RunDir {
        RunDir::of_user(user(), None, Path::new("/nonexistent"), tmp)
    }

    #[test]
    fn the_first_folder_of_this_user_is_taken() {
        let (own, run_user, tmp) = (tmp(0o700), tmp(0o755), tmp(0o1777));
        let of = |named: Option<&Path>, run_user: &Path| {
            RunDir::of_user(user(), named.map(Path::to_owned), run_user, tmp.path()).path
        };
        let fallback = tmp.path().join(format!("diskwright-{}", user()));
        assert_eq!(of(Some(own.path()), run_user.path()), own.path().join("diskwright"));
        // Belongs to another user, does not exist, is not absolute, is not set.
        for named in [Some("/proc/1/nonexistent"), Some("relative"), Some(""), None] {
            assert_eq!(of(named.map(Path::new), run_user.path()), fallback);
        }
        let mine = run_user.path().join(user().to_string());
        fs::create_dir(&mine).unwrap();
        assert_eq!(of(None, run_user.path()), mine.join("diskwright"));
        let stranger = RunDir::of_user(user() + 1, Some(own.path().into()), run_user.path(), tmp.path());
        assert_eq!(stranger.path, tmp.path().join(format!("diskwright-{}", user() + 1)), "a folder of another user");
    }

    #[test]
    fn the_folder_in_tmp_is_made_for_this_user_alone() {
        let tmp = tmp(0o1777);
        let dir = in_tmp(tmp.path());
        dir.make().unwrap();
        assert_eq!(fs::metadata(dir.path()).unwrap().mode() & 0o7777, 0o700);
        dir.make().unwrap();
        assert!(dir.keep().is_some());
    }

    #[test]
    fn a_folder_in_tmp_that_other_users_can_change_is_refused() {
        let refused = |dir: &RunDir, word: &str| {
            let error = dir.make().unwrap_err().to_string();
            assert!(error.contains(word) && error.contains("DISKWRIGHT_RUN_DIR"), "{error}");
        };
        let (sticky, elsewhere) = (tmp(0o1777), tmp(0o700));
        let dir = in_tmp(sticky.path());
        symlink(elsewhere.path(), dir.path()).unwrap();
        refused(&dir, "symbolic link");
        fs::remove_file(dir.path()).unwrap();
        fs::create_dir(dir.path()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        refused(&dir, "other users can write");
        let open = tmp(0o777);
        refused(&in_tmp(open.path()), "not sticky");
        if rustix::process::geteuid().is_root() {
            let theirs = tmp(0o1777);
            let dir = in_tmp(theirs.path());
            fs::create_dir(dir.path()).unwrap();
            std::os::unix::fs::chown(dir.path(), Some(65534), None).unwrap();
            refused(&dir, "another user");
        }
    }
}
