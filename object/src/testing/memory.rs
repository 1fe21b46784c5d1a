//! A repository in memory, with a clock that stands still.

use crate::{
    error::Result,
    repository::{Listed, Remote},
};
use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

#[derive(Debug, Clone)]
struct Object {
    bytes: Vec<u8>,
    modified: SystemTime,
}

#[derive(Debug)]
struct State {
    objects: BTreeMap<String, Object>,
    now: SystemTime,
    sent_bytes: u64,
}

/// A repository in memory.
#[derive(Debug)]
pub struct MemoryRemote(Mutex<State>);

impl Default for MemoryRemote {
    fn default() -> Self {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
        Self(Mutex::new(State { objects: BTreeMap::new(), now, sent_bytes: 0 }))
    }
}

impl MemoryRemote {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets time pass.
    pub fn advance(&self, by: Duration) {
        self.state().now += by;
    }

    /// All objects.
    pub fn objects(&self) -> BTreeMap<String, Vec<u8>> {
        self.state().objects.iter().map(|(key, object)| (key.clone(), object.bytes.clone())).collect()
    }

    /// Bytes that were written since this was last asked.
    pub fn take_sent_bytes(&self) -> u64 {
        std::mem::take(&mut self.state().sent_bytes)
    }

    fn write(state: &mut State, key: &str, bytes: Vec<u8>) {
        state.sent_bytes += bytes.len() as u64;
        let modified = state.now;
        state.objects.insert(key.to_owned(), Object { bytes, modified });
    }
}

impl Remote for MemoryRemote {
    fn name_of(&self, key: &str) -> String {
        format!("s3://memory/{key}")
    }

    fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        let state = self.state();
        let found = state.objects.get(key);
        Ok(found.map(|object| object.bytes.iter().take(most_bytes as usize).copied().collect()))
    }

    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        Self::write(&mut self.state(), key, bytes);
        Ok(())
    }

    fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool> {
        let mut state = self.state();
        let is_new = !state.objects.contains_key(key);
        if is_new {
            Self::write(&mut state, key, bytes);
        }
        Ok(is_new)
    }

    fn list(&self, folder: &str, is_flat: bool) -> Result<Vec<Listed>> {
        let state = self.state();
        let within = state
            .objects
            .iter()
            .filter(|(key, _)| key.strip_prefix(folder).is_some_and(|rest| !is_flat || !rest.contains('/')));
        let listed = within.map(|(key, object)| Listed {
            key: key.clone(),
            size_bytes: object.bytes.len() as u64,
            modified: object.modified,
        });
        Ok(listed.collect())
    }

    fn clock(&self) -> Duration {
        self.state().now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
    }

    fn delete(&self, keys: &[String]) -> Result<()> {
        let mut state = self.state();
        keys.iter().for_each(|key| drop(state.objects.remove(key)));
        Ok(())
    }
}
