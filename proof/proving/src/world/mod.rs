//! A file system in memory that records all operations and can be told to fail.
//!
//! ```text
//!   code under test ─▶ Files, Store ─▶ World ─┬─ what the code sees    all of its changes
//!                                             ├─ history               all changes, syncs ─▶ cut
//!                                             ├─ faults                at the n-th operation
//!                                             └─ broken rules          see `mutation`
//! ```
//!
//! There is no data file, so the engine writes payload through the store's methods, and it is
//! recorded too. With [`World::answer_late`], payload goes through lanes (`late.rs`), which call
//! the same methods in another order, or never. One mutex guards everything. There are no real
//! directories: a directory exists if a path in it exists.

mod late;
mod state;
mod store;

pub use late::Afterwards;
pub use state::{Suspended, SyncHook, World};

use crate::{
    contents::Contents,
    fault::OpKind,
    history::{Event, NameChange},
    mutation::Mutation,
};
use diskwright_store::{FileFacts, FileSystem, OpenError, OpenOptions, Store};
use late::LateLane;
use state::{DEVICE, first_time};
use std::{
    io,
    path::{Component, Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};
use store::WorldStore;

/// The path without `.` and `..` components.
fn plain(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => drop(plain.pop()),
            Component::CurDir => {}
            other => plain.push(other),
        }
    }
    plain
}

fn not_found() -> io::Error {
    io::Error::from_raw_os_error(2)
}

impl FileSystem for World {
    fn open(&self, path: &Path, options: &OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let path = plain(path);
        let failed = |source| OpenError::Io { doing: "open", path: path.clone(), source };
        let known = self.state().now.names.get(&path).copied();
        let file = match (known, options.create_new) {
            (Some(file), false) => file,
            (None, true) => {
                if let Some(kind) = self.meet_fault(OpKind::Name, None) {
                    return Err(failed(kind.error()));
                }
                let file = {
                    let mut state = self.state();
                    let file = state.now.files.keys().chain(state.start.files.keys()).max().map_or(0, |last| last + 1);
                    state.now.files.insert(file, Contents::default());
                    state.go_on(file);
                    file
                };
                self.name(NameChange::Make(path.clone(), file));
                file
            }
            (Some(_), true) => return Err(failed(io::Error::from_raw_os_error(17))),
            (None, false) => return Err(failed(not_found())),
        };
        let mut state = self.state();
        let holders = state.locks.entry(file).or_default();
        let Some(with_us) = holders.with(options.lock) else {
            let purpose = if options.writable { "writing" } else { "reading" };
            return Err(OpenError::Locked { path, purpose, holder: " by this test".into() });
        };
        *holders = with_us;
        let (life, late) = (state.life, state.late);
        drop(state);
        let (world, writable, lock) = (self.clone(), options.writable, Mutex::new(options.lock));
        let mut store = WorldStore { world, name: path.clone(), file, writable, lock, life, lane: None };
        if let Some(seed) = late {
            store.lane = Some(Arc::new(LateLane::new(store.unlocked(), seed).map_err(failed)?));
        }
        Ok(Arc::new(store))
    }

    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        let (from, to) = (plain(from), plain(to));
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let file = {
            let state = self.state();
            if !replace && state.now.names.contains_key(&to) {
                return Err(io::Error::from_raw_os_error(17));
            }
            state.now.names.get(&from).copied().ok_or_else(not_found)?
        };
        self.name(NameChange::Move(from, to, file));
        Ok(())
    }

    fn link(&self, existing: &Path, new: &Path) -> io::Result<()> {
        let (existing, new) = (plain(existing), plain(new));
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let file = {
            let state = self.state();
            if state.now.names.contains_key(&new) {
                return Err(io::Error::from_raw_os_error(17));
            }
            state.now.names.get(&existing).copied().ok_or_else(not_found)?
        };
        self.name(NameChange::Make(new, file));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let path = plain(path);
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        if !self.state().now.names.contains_key(&path) {
            return Err(not_found());
        }
        self.name(NameChange::Remove(path));
        Ok(())
    }

    fn sync_directory_of(&self, path: &Path) -> io::Result<()> {
        let path = plain(path);
        if let Some(kind) = self.meet_fault(OpKind::Name, None) {
            return Err(kind.error());
        }
        let mut state = self.state();
        if state.mutation == Some(Mutation::NoDirectorySync) {
            state.mutated += 1;
            return Ok(());
        }
        state.history.push(Event::DirectorySynced(path.parent().unwrap_or(Path::new("/")).to_owned()));
        Ok(())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let path = plain(path);
        let state = self.state();
        let is_there = state.now.names.keys().chain(state.start.names.keys()).any(|name| name.starts_with(&path));
        if is_there || path == Path::new("/") { Ok(path) } else { Err(not_found()) }
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let file = self.state().now.names.get(&plain(path)).copied().ok_or_else(not_found)?;
        // Without a clock always the same, as a child stores the modification time of its parent.
        let seconds = self.state().now.times.as_ref().and_then(|times| times.modified_seconds.get(&file).copied());
        let modified = first_time() + Duration::from_secs(seconds.unwrap_or(0));
        Ok(FileFacts { identity: (DEVICE, file as u64 + 1), modified: Some(modified) })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let directory = plain(directory);
        Ok(self.state().now.names.keys().filter(|name| name.parent() == Some(&directory)).cloned().collect())
    }
}
