//! Disks that are pushed: what is sent, what can be read again, and what is deleted.

use super::{BLOCK, all, eventually};
use crate::{
    ObjectError, ObjectFiles, Result,
    repository::{Changed, Listed, PruneOptions, Pruned, PushOptions, Pushed, Remote, disk, disks, prune, push},
    testing::MemoryRemote,
};
use diskwright_store::{
    BlockDevice, EngineKind, Extent, ExtentKind, FileSystem, MemoryStore, OpenOptions, RawDevice, Store,
};
use std::{path::Path, sync::Arc, time::Duration};

const CHUNK: usize = 4 << 20;

/// A disk in memory.
fn device(bytes: &[u8]) -> RawDevice {
    RawDevice::new(Arc::new(MemoryStore::with_bytes("disk.raw", bytes.to_vec())), true, 512).unwrap()
}

fn options() -> PushOptions {
    PushOptions { source: "disk.raw".into(), now: 1_700_000_000, ..PushOptions::default() }
}

fn pushed(remote: &dyn Remote, name: &str, bytes: &[u8]) -> Result<Pushed> {
    push(remote, name, &device(bytes), &options(), &mut |_, _| true).map(Option::unwrap)
}

fn pruned(remote: &dyn Remote, remove: &[&str]) -> Pruned {
    let remove = remove.iter().map(|name| (*name).to_owned()).collect();
    prune(remote, &PruneOptions { remove, dry_run: false }, &mut |_, _| true).unwrap().unwrap()
}

/// The keys of a repository that begin so.
fn keys(remote: &MemoryRemote, prefix: &str) -> Vec<String> {
    remote.objects().into_keys().filter(|key| key.starts_with(prefix)).collect()
}

/// A disk of so many chunks, each with its number; the number 0 gives zeros.
fn bytes_of(chunks: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; chunks.len() * CHUNK];
    for (chunk, number) in bytes.chunks_mut(CHUNK).zip(chunks).filter(|(_, number)| **number > 0) {
        for (at, piece) in chunk.chunks_exact_mut(512).enumerate() {
            piece[0] = *number;
            piece[1..9].copy_from_slice(&(at as u64 * 0x9e37_79b9).to_le_bytes());
        }
    }
    bytes
}

/// The disk of a repository, as it is read from a web server that has its objects.
fn read_back(remote: &MemoryRemote, name: &str) -> Result<Vec<u8>> {
    let (bench, _) = super::Bench::new(1);
    for (key, bytes) in remote.objects() {
        bench.server.put(&format!("vms/{key}"), bytes, &format!("\"{key}\""));
    }
    let store =
        bench.files().open_object(Path::new(&bench.server.url(&format!("vms/{name}"))), &OpenOptions::default())?;
    let mut bytes = vec![0xEE; store.len_bytes().unwrap() as usize];
    store.read_whole(&mut bytes, 0)?;
    Ok(bytes)
}

#[test]
fn a_pushed_disk_is_read_as_it_was_and_what_is_there_is_not_sent_again() {
    let remote = MemoryRemote::default();
    let mut bytes = bytes_of(&[1, 0, 2, 1, 0, 0, 3]);
    bytes.truncate(bytes.len() - 1024);
    let first = pushed(&remote, "monday", &bytes).unwrap();
    assert_eq!((first.chunks, first.size_bytes), (4, bytes.len() as u64));
    assert_eq!(first.sent, 3, "two chunks are the same");
    assert!(read_back(&remote, "monday").unwrap() == bytes);
    assert_eq!(keys(&remote, "pushing/"), [""; 0]);
    let before = keys(&remote, "chunks/").len();
    bytes[2 * CHUNK + 9] ^= 1;
    let second = pushed(&remote, "tuesday", &bytes).unwrap();
    assert_eq!((second.sent, keys(&remote, "chunks/").len()), (1, before + 1));
    assert!(read_back(&remote, "tuesday").unwrap() == bytes);
    assert_ne!(first.contents_id, second.contents_id);
    // The same contents have the same id, and nothing is sent but the manifest.
    let third = pushed(&remote, "wednesday", &bytes).unwrap();
    assert_eq!((third.sent, third.contents_id), (0, second.contents_id));
    let names: Vec<String> = disks(&remote).unwrap().into_iter().map(|disk| disk.name).collect();
    assert_eq!(names, ["monday", "tuesday", "wednesday"]);
}

#[test]
fn a_name_is_published_once_and_its_disk_never_changes() {
    let remote = MemoryRemote::default();
    pushed(&remote, "monday", &bytes_of(&[1])).unwrap();
    let before = remote.objects();
    assert!(matches!(pushed(&remote, "monday", &bytes_of(&[2])), Err(ObjectError::Exists { .. })));
    assert_eq!(remote.objects(), before);
    for bad in ["chunks", "a/b", "", ".x"] {
        assert!(matches!(pushed(&remote, bad, &bytes_of(&[2])), Err(ObjectError::BadName { .. })), "{bad}");
    }
    // Two at once: the second is published while the first is sending.
    let other = bytes_of(&[3, 4]);
    let mut has_pushed = false;
    let result = push(&remote, "tuesday", &device(&bytes_of(&[5, 6])), &options(), &mut |_, _| {
        if !std::mem::replace(&mut has_pushed, true) {
            pushed(&remote, "tuesday", &other).unwrap();
        }
        true
    });
    assert!(matches!(result, Err(ObjectError::Exists { .. })), "{result:?}");
    assert!(read_back(&remote, "tuesday").unwrap() == other);
    // What the loser has sent is garbage.
    let found = pruned(&remote, &[]);
    assert_eq!((found.disks, found.kept.0, found.deleted.0, found.waiting.0), (2, 3, 2, 0));
    assert_eq!(keys(&remote, "condemned/").len() + keys(&remote, "pushing/").len(), 0);
    assert!(read_back(&remote, "tuesday").unwrap() == other);
}

/// A base whose changes are named: the rest is not read, also if it differs (it was said not to).
#[test]
fn only_what_has_changed_since_the_base_is_read() {
    let remote = MemoryRemote::default();
    let mut bytes = bytes_of(&[1, 2, 0, 4]);
    pushed(&remote, "monday", &bytes).unwrap();
    bytes[CHUNK + 70_000] ^= 1;
    bytes.extend(bytes_of(&[7, 0]));
    let changed = |range: std::ops::Range<usize>| {
        let ranges = std::iter::once(range.start as u64..range.end as u64).collect();
        PushOptions { base: Some(("monday".into(), Changed::Ranges(ranges))), ..options() }
    };
    let at = CHUNK + 65_536;
    let with = changed(at..at + 65_536);
    let found = push(&remote, "tuesday", &device(&bytes), &with, &mut |_, _| true).unwrap().unwrap();
    assert_eq!((found.sent, found.chunks), (2, 4));
    // What lies beyond the end of the base is read too, and may be zeros.
    assert_eq!(found.read_bytes, 3 * CHUNK as u64);
    assert!(read_back(&remote, "tuesday").unwrap() == bytes);
    assert_eq!(disk(&remote, "tuesday").unwrap().facts().base.as_deref(), Some("monday"));
    let missing = PushOptions { base: Some(("sunday".into(), Changed::Above(1))), ..options() };
    let result = push(&remote, "x", &device(&bytes), &missing, &mut |_, _| true);
    assert!(matches!(result, Err(ObjectError::Missing { .. })), "{result:?}");
}

/// A disk that is a child of a pushed one.
#[derive(Debug)]
struct Child(RawDevice);

impl BlockDevice for Child {
    fn geometry(&self) -> diskwright_store::Geometry {
        self.0.geometry()
    }
    fn open_queue(
        &self,
        options: &diskwright_store::QueueOptions<'_>,
    ) -> std::io::Result<Box<dyn diskwright_store::BlockQueue>> {
        self.0.open_queue(options)
    }
    /// Chunk 1 has data of the child, chunk 2 zeros; the rest is the base's, but for chunk 3, which
    /// nobody has.
    fn extents(&self, offset_bytes: u64, len_bytes: u64, out: &mut Vec<Extent>) -> std::io::Result<()> {
        let kinds = [(ExtentKind::Data, 1), (ExtentKind::Data, 0), (ExtentKind::Zero, 0), (ExtentKind::Unallocated, 1)];
        for (number, (kind, depth)) in kinds.into_iter().enumerate() {
            let offset = number as u64 * CHUNK as u64;
            if (offset_bytes..offset_bytes + len_bytes).contains(&offset) {
                out.push(Extent {
                    offset_bytes: offset,
                    len_bytes: CHUNK as u64,
                    kind,
                    depth,
                    file: 0,
                    file_offset_bytes: None,
                });
            }
        }
        Ok(())
    }
}

#[test]
fn of_a_child_only_what_it_holds_itself_is_read() {
    let remote = MemoryRemote::default();
    pushed(&remote, "golden", &bytes_of(&[1, 2, 3, 0])).unwrap();
    let bytes = bytes_of(&[1, 9, 0, 0]);
    let with = PushOptions { base: Some(("golden".into(), Changed::Above(1))), ..options() };
    let found = push(&remote, "child", &Child(device(&bytes)), &with, &mut |_, _| true).unwrap().unwrap();
    assert_eq!((found.read_bytes, found.sent, found.chunks), (CHUNK as u64, 1, 2));
    assert!(read_back(&remote, "child").unwrap() == bytes);
}

#[test]
fn a_push_that_was_stopped_is_gone_and_the_next_one_goes_on() {
    let remote = MemoryRemote::default();
    let bytes = bytes_of(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20]);
    let options = PushOptions { threads: 1, ..options() };
    let mut steps = 0;
    let stopped = push(&remote, "monday", &device(&bytes), &options, &mut |_, _| {
        steps += 1;
        steps < 5
    });
    assert_eq!(stopped.unwrap(), None);
    assert!(disks(&remote).unwrap().is_empty() && keys(&remote, "pushing/").is_empty());
    let there = keys(&remote, "chunks/").len() as u64;
    assert!(there >= 5, "{there}");
    let found = pushed(&remote, "monday", &bytes).unwrap();
    assert_eq!(found.sent, 20 - there);
    assert!(read_back(&remote, "monday").unwrap() == bytes);
}

#[test]
fn disks_that_are_removed_give_back_what_no_other_disk_has() {
    let remote = MemoryRemote::default();
    pushed(&remote, "monday", &bytes_of(&[1, 2])).unwrap();
    pushed(&remote, "tuesday", &bytes_of(&[1, 3])).unwrap();
    remote.put("notes.txt", vec![7; 100]).unwrap();
    let dry = PruneOptions { remove: vec!["monday".into()], dry_run: true };
    let before = remote.objects();
    let would = prune(&remote, &dry, &mut |_, _| true).unwrap().unwrap();
    assert_eq!((would.disks, would.kept.0, would.deleted.0), (1, 2, 1));
    assert_eq!(keys(&remote, ""), before.into_keys().collect::<Vec<_>>());
    assert_eq!(pruned(&remote, &["monday"]), would);
    assert!(read_back(&remote, "tuesday").unwrap() == bytes_of(&[1, 3]));
    assert!(matches!(read_back(&remote, "monday"), Err(ObjectError::Missing { .. })));
    assert!(remote.objects().contains_key("notes.txt"), "it is not ours");
    for name in ["monday", "notes.txt"] {
        let options = PruneOptions { remove: vec![name.into()], dry_run: false };
        assert!(prune(&remote, &options, &mut |_, _| true).is_err(), "{name}");
    }
    // A manifest that cannot be read: nothing is deleted.
    let mut damaged = remote.objects()["tuesday"].clone();
    *damaged.last_mut().unwrap() ^= 1;
    remote.put("wednesday", damaged).unwrap();
    let error = prune(&remote, &PruneOptions::default(), &mut |_, _| true).unwrap_err();
    assert!(matches!(error, ObjectError::Damaged { .. }) && error.to_string().contains("wednesday"), "{error}");
}

/// A push that has died is waited for as long as it may live.
#[test]
fn a_push_that_is_silent_for_a_day_is_not_waited_for() {
    let remote = MemoryRemote::default();
    pushed(&remote, "monday", &bytes_of(&[1])).unwrap();
    remote.put("pushing/00000000000000aa/start", vec![1]).unwrap();
    let dead = "chunks/ab/".to_owned() + &"ab".repeat(32) + ".00000000000000aa";
    let unused = "chunks/cd/".to_owned() + &"cd".repeat(32) + ".00000000000000bb";
    remote.put(&dead, vec![0; 50]).unwrap();
    remote.put(&unused, vec![0; 70]).unwrap();
    let found = pruned(&remote, &[]);
    assert_eq!((found.pushes, found.deleted, found.waiting), (1, (0, 0), (1, 70)));
    remote.advance(Duration::from_secs(23 * 3600));
    remote.put("pushing/00000000000000aa/alive", vec![1]).unwrap();
    remote.advance(Duration::from_secs(23 * 3600));
    assert_eq!(pruned(&remote, &[]).waiting, (1, 70));
    remote.advance(Duration::from_secs(2 * 3600));
    let found = pruned(&remote, &[]);
    assert_eq!((found.pushes, found.deleted, found.waiting), (0, (2, 120), (0, 0)));
    assert_eq!(keys(&remote, "pushing/").len() + keys(&remote, "condemned/").len(), 0);
}

/// A server that overwrites whatever it is told.
#[derive(Debug, Default)]
struct Careless(MemoryRemote);

impl Remote for Careless {
    fn name_of(&self, key: &str) -> String {
        self.0.name_of(key)
    }
    fn get(&self, key: &str, most_bytes: u64) -> Result<Option<Vec<u8>>> {
        self.0.get(key, most_bytes)
    }
    fn put(&self, key: &str, bytes: Vec<u8>) -> Result<()> {
        self.0.put(key, bytes)
    }
    fn put_new(&self, key: &str, bytes: Vec<u8>) -> Result<bool> {
        self.0.put(key, bytes).map(|()| true)
    }
    fn list(&self, folder: &str, is_flat: bool) -> Result<Vec<Listed>> {
        self.0.list(folder, is_flat)
    }
    fn delete(&self, keys: &[String]) -> Result<()> {
        self.0.delete(keys)
    }
}

#[test]
fn a_server_that_ignores_conditions_is_refused() {
    let remote = Careless::default();
    let error = pushed(&remote, "monday", &bytes_of(&[1])).unwrap_err();
    assert!(error.to_string().contains("ignores If-None-Match"), "{error}");
    assert!(remote.0.objects().is_empty(), "nothing is left there");
}

/// Cold reads of a pushed disk: one GET for each chunk that is touched, none for zeros, and from
/// the cache after that.
#[test]
fn each_chunk_is_fetched_once_and_zeros_never() {
    let remote = MemoryRemote::default();
    let bytes = bytes_of(&[1, 0, 2, 3]);
    pushed(&remote, "disk", &bytes).unwrap();
    let (bench, _) = super::Bench::new(1);
    for (key, bytes) in remote.objects() {
        bench.server.put(&key, bytes, &format!("\"{key}\""));
    }
    let files: ObjectFiles = bench.files();
    let open = |files: &ObjectFiles| bench.open_with(files).unwrap();
    let store = open(&files);
    assert_eq!(store.len_bytes().unwrap(), bytes.len() as u64);
    let mut data = Vec::new();
    let mut at = 0;
    while let Some(range) = store.next_data(at).unwrap() {
        data.push((range.offset_bytes as usize / CHUNK, range.len_bytes as usize / CHUNK));
        at = range.offset_bytes + range.len_bytes;
    }
    assert_eq!(data, [(0, 1), (2, 2)]);
    let id = store.contents_id().unwrap();
    assert_eq!((id[6] >> 4, id[8] >> 6), (8, 2), "a UUID of version 8");
    let asked = || {
        let seen = bench.server.take_seen();
        seen.into_iter().filter(|seen| seen.path.contains("chunks/")).count()
    };
    let read = |at: usize| {
        let mut found = vec![0; 4096];
        store.read_at(&mut found, at as u64).unwrap();
        assert!(found == bytes[at..at + 4096], "{at}");
    };
    for at in [0, 3 * BLOCK, CHUNK + 5, 2 * CHUNK, 2 * CHUNK + BLOCK, 2 * CHUNK - 2048] {
        read(at);
    }
    assert_eq!(asked(), 2);
    assert!(all(&*store) == bytes);
    assert_eq!(asked(), 1);
    // Another process finds all of it in the cache.
    drop(store);
    eventually(|| {
        files.settle();
        let again = bench.files();
        let is_right = all(&*open(&again)) == bytes;
        assert!(is_right);
        asked() == 0
    });
    assert!(files.open(Path::new(&bench.server.url("none")), &OpenOptions::default()).is_err());
}

#[test]
fn a_chunk_whose_bytes_are_wrong_or_gone_is_an_error_and_never_shown() {
    let remote = MemoryRemote::default();
    let bytes = bytes_of(&[1, 2]);
    pushed(&remote, "disk", &bytes).unwrap();
    let chunks = keys(&remote, "chunks/");
    let good = remote.objects();
    let other = good[&chunks[1]].clone();
    for (what, why) in
        [(Some(other), "its bytes have the digest"), (Some(vec![0; 50]), "it has 50 bytes"), (None, "it is not there")]
    {
        match what {
            Some(bytes) => remote.put(&chunks[0], bytes).unwrap(),
            None => remote.delete(&chunks[..1]).unwrap(),
        }
        let error = read_back(&remote, "disk").unwrap_err().to_string();
        assert!(error.contains(why) && error.contains(&chunks[0]), "{error}");
    }
    remote.put(&chunks[0], good[&chunks[0]].clone()).unwrap();
    assert!(read_back(&remote, "disk").unwrap() == bytes);
    // A manifest that lies.
    let mut manifest = good["disk"].clone();
    *manifest.last_mut().unwrap() ^= 1;
    remote.put("disk", manifest).unwrap();
    assert!(matches!(read_back(&remote, "disk"), Err(ObjectError::Damaged { .. })));
}

#[test]
fn the_engine_of_a_push_can_be_chosen() {
    let remote = MemoryRemote::default();
    let bytes = bytes_of(&[1, 2, 3]);
    let options = PushOptions { engine: EngineKind::Sync, threads: 2, ..options() };
    let found = push(&remote, "disk", &device(&bytes), &options, &mut |_, _| true).unwrap().unwrap();
    assert_eq!(found.read_bytes, bytes.len() as u64);
    assert!(read_back(&remote, "disk").unwrap() == bytes);
}
