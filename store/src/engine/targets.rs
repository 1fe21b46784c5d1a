//! The stores of an engine: they join and leave it while it works.
//!
//! ```text
//! add_target ─▶ index, registered file or lane
//! member_target ─▶ the index of a member of a placement, added when it is first used
//! remove_target ─▶ leaving ─ unused (checked after each reap) ─▶ dropped, index free
//! ```
//!
//! A request in flight keeps its store. To keep the hot path free of reference counts, the table of
//! parts is searched while a store is being removed, which is rare. A lost part keeps its store for
//! good, since the kernel may still use the file. A lane stays open as long as its engine.

use super::{Engine, OpenLane, TargetId};
use crate::{
    MemoryStore,
    lane::Lane,
    part::{LaneUse, Target},
    ring::LANES_MAX,
    store::Store,
};
use std::{collections::HashSet, io, sync::Arc};

impl Engine {
    /// Adds a store, which the engine keeps open until [`Engine::remove_target`]. Adding the same
    /// store twice gives two targets.
    pub fn add_target(&mut self, store: &Arc<dyn Store>) -> io::Result<TargetId> {
        self.add(store, false)
    }

    /// As [`Engine::add_target`], but reads beyond the end of the store return zeros. For raw files
    /// whose length is not a multiple of the sector size.
    pub(crate) fn add_target_padded(&mut self, store: &Arc<dyn Store>) -> io::Result<TargetId> {
        self.add(store, true)
    }

    fn add(&mut self, store: &Arc<dyn Store>, padded: bool) -> io::Result<TargetId> {
        let index =
            u32::try_from(self.targets.len()).map_err(|_| io::Error::other("an engine holds at most 2^32 stores"))?;
        let mut target = Target::new(store, padded);
        target.is_plain_file &= !self.failed;
        if let Some(fd) = target.fd {
            target.file_index = self.link.with(|ring| ring.register_file(fd)).flatten();
        } else if let Some(lane) = store.lane().filter(|_| self.link.is_some()) {
            target.lane = Some(self.use_lane(lane, store.len_bytes()?)?);
        }
        if let Some(index) = self.free_targets.pop() {
            self.targets[index as usize] = target;
            return Ok(TargetId(index));
        }
        self.targets.push(target);
        Ok(TargetId(index))
    }

    /// Registers a lane with this engine, once even if several stores share it.
    fn use_lane(&mut self, lane: Arc<dyn Lane>, end_bytes: u64) -> io::Result<LaneUse> {
        let alignment_mask = u64::from(lane.alignment_bytes().max(1)) - 1;
        let place = self.lanes.iter().position(|open| Arc::ptr_eq(&open.lane, &lane)).unwrap_or(self.lanes.len());
        let number = u32::try_from(place)
            .ok()
            .filter(|&number| number < LANES_MAX)
            .ok_or_else(|| io::Error::other("an engine holds at most 65536 lanes"))?;
        if place == self.lanes.len() {
            self.lanes.push(OpenLane { lane, parts: 0, is_due: false, polling: false });
        }
        Ok(LaneUse { number, alignment_mask, end_bytes })
    }

    /// Removes a store. When no request of this engine uses it any more, the store is dropped, its
    /// file is closed if no one else holds it, and its index among the ring's registered files is
    /// reused. New parts must not name the target.
    pub fn remove_target(&mut self, target: TargetId) {
        if !self.leaving.contains(&target.0) {
            self.leaving.push(target.0);
            self.drop_unused_targets();
        }
    }

    /// Drops the removed stores that no part uses.
    #[cold]
    pub(super) fn drop_unused_targets(&mut self) {
        let free: HashSet<u32> = self.free_parts.iter().copied().collect();
        let in_flight = (0..).zip(&self.parts).filter(|(index, _)| !free.contains(index)).map(|(_, part)| part);
        let used: HashSet<u32> =
            in_flight.flat_map(|part| [Some(part.target), part.copy_of.map(|copy| copy.target)]).flatten().collect();
        self.drop_unused_members(&used);
        for target in self.leaving.extract_if(.., |target| !used.contains(target)) {
            // A part that names the target by mistake fails, with this name in the message.
            let nothing: Arc<dyn Store> = Arc::new(MemoryStore::new("(removed file)"));
            let left = std::mem::replace(&mut self.targets[target as usize], Target::new(&nothing, false));
            if let Some(index) = left.file_index {
                self.link.with(|ring| ring.unregister_file(index));
            }
            self.free_targets.push(target);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::{Engine, EngineKind, FileStore, IoBuf, OpenOptions, SharedRing, store::Store};
    use std::{fs, path::Path, sync::Arc};

    fn open(path: &Path) -> Arc<dyn Store> {
        Arc::new(FileStore::open(path, &OpenOptions::default()).unwrap())
    }

    /// Number of descriptors of this process that refer to the file at `path`.
    fn descriptors(path: &Path) -> usize {
        let found = fs::read_dir("/proc/self/fd").unwrap();
        found.filter(|entry| fs::read_link(entry.as_ref().unwrap().path()).is_ok_and(|to| to == path)).count()
    }

    fn engines() -> Vec<Engine> {
        let own = Engine::new(EngineKind::Uring, 8, None).ok();
        let shared = SharedRing::new(8, None).ok().map(|ring| Engine::on(&ring));
        own.into_iter().chain(shared).chain(Engine::new(EngineKind::Sync, 8, None).ok()).collect()
    }

    #[test]
    fn a_removed_store_is_closed_when_no_request_uses_it() {
        let directory = tempfile::tempdir().unwrap();
        let (gone, stays) = (directory.path().join("gone"), directory.path().join("stays"));
        fs::write(&gone, vec![1; 8192]).unwrap();
        fs::write(&stays, vec![2; 8192]).unwrap();
        for mut engine in engines() {
            let (leaving, other) = (open(&gone), open(&stays));
            let target = engine.add_target(&leaving).unwrap();
            let kept = engine.add_target(&other).unwrap();
            drop((leaving, other));
            assert_eq!(descriptors(&gone), 1);
            let uses_ring = engine.kind() == EngineKind::Uring;
            engine.read_one(1, 0, target, 0, IoBuf::new(4096), 0..4096);
            engine.remove_target(target);
            engine.remove_target(target);
            assert_eq!(descriptors(&gone), usize::from(uses_ring), "the store stays open while a read is in flight");
            let mut done = Vec::new();
            engine.reap(1, &mut done).unwrap();
            let ended = done.pop().unwrap();
            ended.result.unwrap();
            assert!(ended.buf.unwrap()[..4096].iter().all(|&byte| byte == 1));
            assert_eq!(descriptors(&gone), 0, "{:?}", engine.kind());
            // The indices are reused, for another file.
            let file_index = |engine: &Engine, target: super::TargetId| engine.targets[target.0 as usize].file_index;
            let again = engine.add_target(&open(&gone)).unwrap();
            assert_eq!((again, engine.targets.len()), (target, 2));
            assert!(!uses_ring || file_index(&engine, again) == Some(0), "{:?}", file_index(&engine, again));
            for (tag, target) in [(1, again), (2, kept)] {
                engine.read_one(tag, 0, target, 0, IoBuf::new(4096), 0..4096);
                engine.reap(1, &mut done).unwrap();
                let ended = done.pop().unwrap();
                assert!(ended.result.is_ok() && ended.buf.unwrap()[..4096].iter().all(|&byte| u64::from(byte) == tag));
            }
            // A removed target that is used by mistake.
            engine.remove_target(again);
            engine.read_one(3, 0, again, 0, IoBuf::new(512), 0..512);
            engine.reap(1, &mut done).unwrap();
            assert!(done.pop().unwrap().result.is_err());
        }
    }
}
