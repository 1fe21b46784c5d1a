//! Which pools this machine knows, and where their members are: a small TOML file for each pool.
//!
//! ```text
//!   $DISKWRIGHT_SPACES, else /var/lib/diskwright/spaces (root),
//!   else $XDG_STATE_HOME/diskwright/spaces, else ~/.local/state/diskwright/spaces
//!     vault.toml    id = "..."   members = ["/dev/nvme0n1", "/srv/a.img"]
//! ```
//!
//! The members say themselves what they belong to; the file only says where to look. So it can be
//! made again at any time (`space import`), and a wrong one harms nothing.

use crate::{
    error::{Result, SpaceError},
    pool::check_name,
};
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};
use uuid::Uuid;

/// A pool that this machine knows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Known {
    /// Identity of the pool.
    pub id: Uuid,
    /// Its members, as absolute paths.
    pub members: Vec<PathBuf>,
    /// Members that are used no faster than this: for tests and studies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<PathBuf, MemberLimit>,
}

/// How fast a member is used at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemberLimit {
    /// Operations per second; 0 for no limit.
    pub iops: u64,
    /// What each operation takes besides, in microseconds.
    pub latency_us: u64,
}

impl Known {
    /// A pool without limits.
    pub fn new(id: Uuid, members: Vec<PathBuf>) -> Self {
        Self { id, members, limits: BTreeMap::new() }
    }
}

/// The folder of the pools that a machine knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registry {
    folder: PathBuf,
}

impl Registry {
    /// The registry in a folder, which need not exist.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// The registry of this user.
    pub fn of_user() -> Self {
        let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        if let Some(folder) = variable("DISKWRIGHT_SPACES") {
            return Self::at(folder);
        }
        if diskwright_store::effective_user() == 0 {
            return Self::at("/var/lib/diskwright/spaces");
        }
        let state = variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")));
        Self::at(state.unwrap_or_else(|| ".".into()).join("diskwright/spaces"))
    }

    /// Where the registry is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    fn path_of(&self, pool: &str) -> PathBuf {
        self.folder.join(format!("{pool}.toml"))
    }

    /// The names of all known pools, in order.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn names(&self) -> Result<Vec<String>> {
        let entries = match fs::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(SpaceError::io("read the list of pools", &self.folder, error)),
        };
        let name = |path: PathBuf| Some(path.file_name()?.to_str()?.strip_suffix(".toml")?.to_owned());
        let mut names: Vec<String> = entries.flatten().filter_map(|entry| name(entry.path())).collect();
        names.sort();
        Ok(names)
    }

    /// Where a pool's members are.
    ///
    /// # Errors
    /// [`SpaceError::Unknown`]; [`SpaceError::Io`] if its file cannot be read.
    pub fn find(&self, pool: &str) -> Result<Known> {
        check_name(pool)?;
        let path = self.path_of(pool);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(SpaceError::Unknown { name: pool.to_owned() });
            }
            Err(error) => return Err(SpaceError::io("read where the members are", &path, error)),
        };
        let invalid = |error: toml::de::Error| io::Error::new(io::ErrorKind::InvalidData, error.message().to_owned());
        toml::from_str(&text).map_err(|error| SpaceError::io("read where the members are", &path, invalid(error)))
    }

    /// Makes a pool known. `replace` if it is known already.
    ///
    /// # Errors
    /// [`SpaceError::NameTaken`]; [`SpaceError::Io`].
    pub fn remember(&self, pool: &str, known: &Known, replace: bool) -> Result<()> {
        check_name(pool)?;
        let path = self.path_of(pool);
        let failed = |error| SpaceError::io("record where the members are", &path, error);
        fs::create_dir_all(&self.folder).map_err(failed)?;
        if !replace && path.exists() {
            return Err(SpaceError::NameTaken { name: pool.to_owned() });
        }
        let text = toml::to_string(known).map_err(|error| failed(io::Error::other(error)))?;
        let new = self.folder.join(format!(".{pool}.{}", std::process::id()));
        fs::write(&new, text).and_then(|()| fs::File::open(&new)?.sync_all()).map_err(failed)?;
        fs::rename(&new, &path).map_err(failed)?;
        diskwright_store::sync_directory_of(&path).map_err(failed)
    }

    /// Forgets a pool. Its members are not changed.
    ///
    /// # Errors
    /// [`SpaceError::Unknown`]; [`SpaceError::Io`].
    pub fn forget(&self, pool: &str) -> Result<()> {
        check_name(pool)?;
        let path = self.path_of(pool);
        fs::remove_file(&path).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => SpaceError::Unknown { name: pool.to_owned() },
            _ => SpaceError::io("forget it", &path, error),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pools_are_remembered_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let registry = Registry::at(dir.path().join("new/spaces"));
        assert!(registry.names().unwrap().is_empty());
        assert!(matches!(registry.find("vault").unwrap_err(), SpaceError::Unknown { .. }));
        let mut known = Known::new(Uuid::from_u128(3), vec!["/a b".into(), "/dev/sdb".into()]);
        registry.remember("vault", &known, false).unwrap();
        assert_eq!(registry.find("vault").unwrap(), known);
        assert!(matches!(registry.remember("vault", &known, false).unwrap_err(), SpaceError::NameTaken { .. }));
        known.limits.insert("/a b".into(), MemberLimit { iops: 150, latency_us: 6000 });
        registry.remember("vault", &known, true).unwrap();
        assert_eq!(registry.find("vault").unwrap(), known);
        assert_eq!(registry.names().unwrap(), ["vault"]);
        assert!(matches!(registry.find("../vault").unwrap_err(), SpaceError::BadName { .. }));
        registry.forget("vault").unwrap();
        assert!(registry.forget("vault").is_err() && registry.names().unwrap().is_empty());
        fs::write(dir.path().join("new/spaces/bad.toml"), "id = 5").unwrap();
        assert!(registry.find("bad").unwrap_err().to_string().contains("bad.toml"));
    }
}
