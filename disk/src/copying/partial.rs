//! The file that a command makes, until it is complete: it has a temporary name in the folder of
//! the new file.
//!
//! ```text
//!   clear ─▶ created ─▶ filled, durable ─▶ give_name
//!     │                       └─ an error ─▶ discard
//!     └─ what an interrupted command has left under this name is removed
//! ```
//!
//! A leftover is known by its lock: the file of a command that is running is locked nearly all the
//! time. In the moments between, another command may take it for a leftover, so a command names and
//! removes only a file that has the identity of the one that it has created.

use crate::{DiskError, Result, copying::create::is_there, error::file_error};
use diskwright_image::{probe, probe::DetectedFormat};
use diskwright_store::{CacheMode, FileFacts, Files, LockMode, OpenError, OpenOptions, Store};
use std::{
    cell::Cell,
    ffi::{OsStr, OsString},
    io,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
};

/// The longest file name in bytes, on all common file systems.
const NAME_MAX: usize = 255;

/// A new file under its temporary name.
#[derive(Debug)]
pub(crate) struct PartialFile<'a> {
    files: &'a Files,
    path: PathBuf,
    dest: PathBuf,
    /// What makes it, as in "conversion".
    work: &'static str,
    /// The identity of the file, once it is created.
    made: Cell<Option<(u64, u64)>>,
    had_its_name: Cell<bool>,
}

impl<'a> PartialFile<'a> {
    /// The file that becomes `dest` is called `DEST.partial` until then.
    pub(crate) fn new(files: &'a Files, dest: &Path, work: &'static str) -> Self {
        Self::named(files, dest, work, "", ".partial")
    }

    /// The same with another temporary name: `prefix`, the name of `dest`, `suffix`.
    pub(crate) fn named(files: &'a Files, dest: &Path, work: &'static str, prefix: &str, suffix: &str) -> Self {
        let plain = Files::without_options(dest).unwrap_or(dest);
        let name = temporary_name(plain.file_name().unwrap_or_default(), prefix, suffix);
        Self {
            files,
            path: Files::beside(dest, &name),
            dest: dest.to_owned(),
            work,
            made: Cell::new(None),
            had_its_name: Cell::new(false),
        }
    }

    /// The path of the file now.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Errors name the final path.
    pub(crate) fn shown(&self, error: DiskError) -> DiskError {
        error.renamed(&self.path, &self.dest)
    }

    /// Removes what an interrupted command has left under the temporary name.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if a program has that file open; errors of removing it.
    pub(crate) fn clear(&self) -> Result<()> {
        if self.facts().is_err() {
            return Ok(());
        }
        let lock =
            OpenOptions { writable: true, create_new: false, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
        match self.files.open(&self.path, &lock) {
            Err(OpenError::Locked { holder, .. }) => Err(self.in_use(&holder)),
            Err(error) => Err(error.into()),
            Ok(held) => {
                let further = self.further_files(&*held);
                for path in [&self.path].into_iter().chain(&further) {
                    match self.files.remove(path) {
                        // Its command was not interrupted, and has given it its name.
                        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                        removed => removed.map_err(|source| {
                            file_error("remove what an interrupted command has left for it", path, source)
                        })?,
                    }
                }
                Ok(())
            }
        }
    }

    /// The error if another command works on the file. `holder` names it.
    pub(crate) fn in_use(&self, holder: &str) -> DiskError {
        DiskError::BadOptions {
            what: format!("{}: another {} to this name is under way{holder}", self.dest.display(), self.work),
            hint: "wait for its end, or choose another name".into(),
        }
    }

    /// Records the file that this command has created.
    pub(crate) fn created(&self) {
        self.made.set(self.facts().ok().map(|facts| facts.identity));
    }

    /// Refuses a file that another command has put in its place.
    pub(crate) fn check(&self, store: &dyn Store) -> Result<()> {
        if store.identity() == self.made.get() { Ok(()) } else { Err(is_there(&self.path)) }
    }

    /// Removes the file, with the extents of a VMDK.
    pub(crate) fn discard(&self) {
        // The error that led here is returned.
        let found = self.facts().ok().map(|facts| facts.identity);
        if found.is_some() && found == self.made.get() {
            let read = OpenOptions { lock: LockMode::None, ..OpenOptions::default() };
            let further = self.files.open(&self.path, &read).map(|store| self.further_files(&*store));
            for path in [self.path.clone()].into_iter().chain(further.unwrap_or_default()) {
                let _ = self.files.remove(&path);
            }
        }
    }

    /// The extents that the descriptor of a VMDK names. They have their final names already, which
    /// begin with the name of the new disk. No other file is ever named here: the file at the
    /// temporary name may be a stranger's.
    fn further_files(&self, store: &dyn Store) -> Vec<PathBuf> {
        let Some(stem) = self.dest.file_stem().and_then(OsStr::to_str) else { return Vec::new() };
        let references = |format| probe::references(store, DetectedFormat::certain(format));
        let found = probe::probe(store, false).and_then(|verdict| references(verdict.format));
        let names = found.unwrap_or_default().into_iter().map(|reference| reference.name);
        let is_extent = |name: &String| name.starts_with(&format!("{stem}-")) && !name.contains(['/', '\\']);
        names.filter(is_extent).map(|name| self.dest.with_file_name(name)).collect()
    }

    /// Gives the file, which is complete and durable, its name, durably. After an error it has its
    /// temporary name still.
    pub(crate) fn give_name(&self) -> Result<()> {
        let failed = |source| file_error("give the finished file its name", &self.dest, source);
        let found = self.facts().map_err(failed)?.identity;
        if self.made.get().is_some_and(|identity| identity != found) {
            return Err(failed(io::Error::other("another file has its temporary name")));
        }
        self.files.rename(&self.path, &self.dest, false).map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => is_there(&self.dest),
            _ => failed(source),
        })?;
        self.had_its_name.set(true);
        self.files.sync_directory_of(&self.dest).map_err(|source| {
            let _ = self.files.rename(&self.dest, &self.path, false);
            file_error("make the new file's folder durable", &self.dest, source)
        })
    }

    /// Whether the file has had its final name, perhaps for a moment: a power cut may give it back.
    pub(crate) fn had_its_name(&self) -> bool {
        self.had_its_name.get()
    }

    /// The facts of the file, if it is there.
    pub(crate) fn facts(&self) -> io::Result<FileFacts> {
        self.files.facts(&self.path)
    }
}

/// `prefix`, `name`, `suffix`: the name of a file beside the one with this name. Where that is too
/// long, the end of the name is replaced by a number that depends on the whole name.
pub(crate) fn temporary_name(name: &OsStr, prefix: &str, suffix: &str) -> OsString {
    let mut bytes = name.as_bytes().to_vec();
    if prefix.len() + bytes.len() + suffix.len() > NAME_MAX {
        let number = bytes.iter().fold(0_u32, |number, &byte| number.rotate_left(5) ^ u32::from(byte));
        let number = format!("~{number:08x}");
        let mut len = NAME_MAX - prefix.len() - suffix.len() - number.len();
        // Not within a character.
        while len > 0 && bytes[len] & 0xc0 == 0x80 {
            len -= 1;
        }
        bytes.truncate(len);
        bytes.extend(number.bytes());
    }
    OsString::from_vec([prefix.as_bytes(), &bytes, suffix.as_bytes()].concat())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_name_is_as_long_as_a_name_may_be() {
        let temporary = |name: &str| temporary_name(name.as_ref(), ".", ".partial").into_string().unwrap();
        assert_eq!(temporary("disk.vhdx"), ".disk.vhdx.partial");
        let longest = "x".repeat(246);
        assert_eq!(temporary(&longest), format!(".{longest}.partial"));
        let (one, other) = ("é".repeat(127), "é".repeat(126) + "è");
        assert!(one.len() == 254 && (240..=NAME_MAX).contains(&temporary(&one).len()));
        assert_ne!(temporary(&one), temporary(&other));
    }
}
