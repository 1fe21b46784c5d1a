//! The names of an open file.

use std::{
    path::{Path, PathBuf},
    sync::OnceLock,
};

/// The names that a file has had, the oldest first. A store lends its name, so no name is dropped
/// before the store. A disk's file is renamed once when it joins a chain and once when it is
/// frozen.
#[derive(Debug)]
pub(super) struct Names {
    path: PathBuf,
    next: OnceLock<Box<Names>>,
}

impl Names {
    pub(super) fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), next: OnceLock::new() }
    }

    /// The present name.
    pub(super) fn last(&self) -> &Path {
        &self.newest().path
    }

    fn newest(&self) -> &Self {
        let mut last = self;
        while let Some(next) = last.next.get() {
            last = next;
        }
        last
    }

    pub(super) fn add(&self, path: &Path) {
        // Only another thread that renames the same file at this moment makes this fail.
        let _ = self.newest().next.set(Box::new(Self::new(path)));
    }
}
