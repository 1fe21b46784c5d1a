//! A small file beside an image that says which operation on it is under way, for formats whose
//! images have no room for that: whoever finishes the operation finds it.
//!
//! ```text
//!   vm.vhdx     .vm.vhdx.merging    merged in use, keeps its name      (`kept_name.rs`)
//!   old.vhd     .old.vhd.moved      copied, only to be removed         (`move_plan.rs`)
//! ```
//!
//! A mark names inode numbers, so it means nothing when the names lead to other files. Where inode
//! numbers are made up at each mount, a mark may be ignored.

use crate::{DiskError, Result, copying::partial::temporary_name, error::file_error};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

/// More than any mark has.
const LEN_MAX_BYTES: u64 = 4096;

/// The mark of one operation on one image.
#[derive(Debug)]
pub(crate) struct MarkFile<'a> {
    files: &'a Files,
    path: PathBuf,
}

impl<'a> MarkFile<'a> {
    /// The mark of the image at `image`: its name with a dot in front and `suffix` behind.
    pub(crate) fn of(files: &'a Files, image: &Path, suffix: &str) -> Self {
        let name = temporary_name(image.file_name().unwrap_or_default(), ".", suffix);
        Self { files, path: image.with_file_name(name) }
    }

    /// Sets the mark. Durable on return.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn set(&self, text: &str) -> Result<()> {
        let failed = |source| file_error("mark an operation that begins", &self.path, source);
        let opened = |create_new| self.open(create_new).map_err(|error| failed(io::Error::other(error)));
        if !matches!(self.text(), Ok(Some(found)) if found == text) {
            self.remove()?;
            opened(true)?.write_at(text.as_bytes(), 0).map_err(failed)?;
        }
        // A program that was killed may have left it in the page cache only.
        opened(false)?.sync_data().map_err(failed)?;
        self.files.sync_directory_of(&self.path).map_err(failed)
    }

    /// What the mark says; `None` without one.
    ///
    /// # Errors
    /// Those of reading it: without it the operation would end in another way than it began.
    pub(crate) fn text(&self) -> Result<Option<String>> {
        // What cannot be opened is no mark of this program: a link, or a file of another type.
        let Ok(store) = self.open(false) else { return Ok(None) };
        let failed = |source| file_error("read the mark of an operation", &self.path, source);
        let len_bytes = store.len_bytes().map_err(failed)?;
        if len_bytes > LEN_MAX_BYTES {
            return Ok(None);
        }
        let mut text = vec![0; len_bytes as usize];
        store.read_at(&mut text, 0).map_err(failed)?;
        Ok(String::from_utf8(text).ok())
    }

    fn open(&self, create_new: bool) -> Result<Arc<dyn Store>, DiskError> {
        let options = OpenOptions { writable: true, create_new, cache: CacheMode::PageCache, lock: LockMode::None };
        let opened = match create_new {
            true => self.files.open(&self.path, &options),
            false => self.files.open_canonical(&self.path, false, &options),
        };
        Ok(opened?)
    }

    /// Removes the mark, if there is one.
    ///
    /// # Errors
    /// Those of the file system.
    pub(crate) fn remove(&self) -> Result<()> {
        // Nothing is done where there is none, as always but after an interruption.
        if self.files.facts(&self.path).is_err() {
            return Ok(());
        }
        match self.files.remove(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.map_err(|source| file_error("remove the mark of an operation", &self.path, source)),
        }
    }
}
