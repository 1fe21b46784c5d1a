use super::*;
use crate::{LockMode, raise_open_file_limit, sync_directory_of};
use proptest::prelude::*;
use std::{fs, os::unix::net::UnixListener, process::Command, thread};

const BOTH: [CacheMode; 2] = [CacheMode::PageCache, CacheMode::Direct];

fn create(path: &Path, cache: CacheMode) -> FileStore {
    FileStore::open(path, &OpenOptions { writable: true, create_new: true, cache, lock: LockMode::Exclusive })
        .expect("a new file")
}

fn range(offset_bytes: u64, len_bytes: u64) -> FileRange {
    FileRange { offset_bytes, len_bytes }
}

#[test]
fn only_files_and_block_devices_are_opened() {
    let directory = tempfile::tempdir().unwrap();
    let (fifo, socket) = (directory.path().join("fifo"), directory.path().join("socket"));
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let _listener = UnixListener::bind(&socket).unwrap();
    let unsuitable = [
        (directory.path(), "a directory"),
        (&fifo, "a named pipe"),
        (&socket, "a socket"),
        (Path::new("/dev/null"), "a character device"),
    ];
    for (path, expected) in unsuitable {
        for writable in [false, true] {
            match FileStore::open(path, &OpenOptions { writable, ..Default::default() }) {
                Err(OpenError::NotAFile { found, .. }) => assert_eq!(found, expected),
                other => panic!("{}: {other:?}", path.display()),
            }
        }
    }
}

#[test]
fn errors_say_what_was_done_to_which_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("absent.vhdx");
    let error = FileStore::open(&path, &OpenOptions::default()).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("{}: cannot open it: No such file or directory (os error 2)", path.display())
    );
    fs::write(&path, b"here").unwrap();
    let options = OpenOptions { writable: true, create_new: true, ..Default::default() };
    let Err(OpenError::Io { source, .. }) = FileStore::open(&path, &options) else {
        panic!("the file was created twice")
    };
    assert_eq!(source.kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(fs::read(&path).unwrap(), b"here");
}

#[test]
fn reading_beyond_the_end_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    for cache in BOTH {
        let store = create(&directory.path().join(format!("{cache:?}")), cache);
        store.write_at(&[7; 1000], 0).unwrap();
        assert_eq!(store.len_bytes().unwrap(), 1000, "{cache:?}");
        let mut buf = [0; 100];
        store.read_at(&mut buf, 900).unwrap();
        assert_eq!(buf, [7; 100]);
        for offset_bytes in [901, 1000, 4096, 1 << 40] {
            let error = store.read_at(&mut buf, offset_bytes).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cache:?} at {offset_bytes}");
        }
        assert!(store.read_at(&mut buf, u64::MAX - 50).is_err());
        assert!(store.write_at(&buf, u64::MAX - 50).is_err());
        assert_eq!(store.zero_range(range(950, 51), Zeroing::Keep).unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
        assert!(store.zero_range(range(u64::MAX, 51), Zeroing::Keep).is_err());
    }
}

#[derive(Debug, Clone)]
enum Step {
    Write(u64, usize, u8),
    Read(u64, usize),
    Zero(u64, u64, Zeroing),
    SetLen(u64),
    Allocate(u64, u64),
    Sync,
    DropCache,
}

fn step() -> impl Strategy<Value = Step> {
    let offset = prop_oneof![0..40_000u64, (0..80u64).prop_map(|n| n * 512), (0..10u64).prop_map(|n| n * 4096)];
    let len = prop_oneof![1..300usize, Just(512usize), Just(4096usize), 1..300_000usize];
    prop_oneof![
        6 => (offset.clone(), len.clone(), 1..=255u8).prop_map(|(o, l, b)| Step::Write(o, l, b)),
        4 => (offset.clone(), len.clone()).prop_map(|(o, l)| Step::Read(o, l)),
        2 => (offset.clone(), len.clone(), any::<bool>())
            .prop_map(|(o, l, keep)| Step::Zero(o, l as u64, if keep { Zeroing::Keep } else { Zeroing::Deallocate })),
        1 => (0..60_000u64).prop_map(Step::SetLen),
        1 => (offset, len).prop_map(|(o, l)| Step::Allocate(o, l as u64)),
        1 => Just(Step::Sync),
        1 => Just(Step::DropCache),
    ]
}

fn check_against_model(cache: CacheMode, alignment_bytes: u32, steps: &[Step]) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let mut store = create(&path, cache);
    if let Some(Some(direct)) = store.direct.get_mut() {
        direct.coarsen(alignment_bytes);
    }
    let mut model: Vec<u8> = Vec::new();
    for step in steps {
        match *step {
            Step::Write(offset_bytes, len_bytes, byte) => {
                let data: Vec<u8> = (0..len_bytes).map(|n| byte ^ n as u8).collect();
                store.write_at(&data, offset_bytes).unwrap();
                let start = offset_bytes as usize;
                model.resize(model.len().max(start + len_bytes), 0);
                model[start..start + len_bytes].copy_from_slice(&data);
            }
            Step::Read(offset_bytes, len_bytes) => {
                let mut buf = vec![0xEE; len_bytes];
                let result = store.read_at(&mut buf, offset_bytes);
                match model.get(offset_bytes as usize..offset_bytes as usize + len_bytes) {
                    Some(expected) => {
                        result.unwrap();
                        assert!(buf == expected, "{step:?} in {steps:?}");
                    }
                    None => assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
                }
            }
            Step::Zero(offset_bytes, len_bytes, how) => {
                let result = store.zero_range(range(offset_bytes, len_bytes), how);
                match model.get_mut(offset_bytes as usize..(offset_bytes + len_bytes) as usize) {
                    Some(bytes) => {
                        result.unwrap();
                        bytes.fill(0);
                    }
                    None => assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof),
                }
            }
            Step::SetLen(len_bytes) => {
                store.set_len(len_bytes).unwrap();
                model.resize(len_bytes as usize, 0);
            }
            Step::Allocate(offset_bytes, len_bytes) => {
                store.allocate(range(offset_bytes, len_bytes)).unwrap();
                model.resize(model.len().max((offset_bytes + len_bytes) as usize), 0);
            }
            Step::Sync => store.sync_data().unwrap(),
            Step::DropCache => store.drop_cache().unwrap(),
        }
        assert_eq!(store.len_bytes().unwrap(), model.len() as u64, "{step:?} in {steps:?}");
    }
    drop(store);
    assert!(fs::read(&path).unwrap() == model, "the file differs after {steps:?}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn reads_and_file_match_a_model(steps in prop::collection::vec(step(), 1..25)) {
        check_against_model(CacheMode::PageCache, 1, &steps);
        for alignment_bytes in [512, 4096, 16384] {
            check_against_model(CacheMode::Direct, alignment_bytes, &steps);
        }
    }
}

#[test]
fn small_writes_to_one_block_do_not_undo_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let store = create(&directory.path().join("store"), CacheMode::Direct);
    store.write_at(&[0; 8192], 0).unwrap();
    thread::scope(|scope| {
        for writer in 0..4u64 {
            let store = &store;
            scope.spawn(move || {
                for n in 0..64u64 {
                    store.write_at(&[writer as u8 + 1; 8], (n * 4 + writer) * 8).unwrap();
                }
            });
        }
    });
    let mut all = [0; 2048];
    store.read_at(&mut all, 0).unwrap();
    for (n, eight) in all.chunks(8).enumerate() {
        assert_eq!(eight, [n as u8 % 4 + 1; 8], "piece {n}");
    }
}

#[test]
fn a_writable_direct_file_leaves_the_page_cache_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("store");
    let store = create(&path, CacheMode::Direct);
    if store.cache_mode() == CacheMode::PageCache {
        return eprintln!("skipped: {} has no direct I/O", directory.path().display());
    }
    store.allocate(range(0, 1 << 20)).unwrap();
    store.write_at(&[3; 100_000], 333).unwrap();
    store.read_at(&mut [0; 5000], 77).unwrap();
    store.zero_range(range(5000, 20_000), Zeroing::Keep).unwrap();
    store.zero_range(range(40_001, 20_000), Zeroing::Deallocate).unwrap();
    // The last, partial block goes through the page cache, and the sync drops it from there.
    store.write_at(&[4; 100], 1 << 20).unwrap();
    store.sync_data().unwrap();
    let Ok(output) = Command::new("fincore").args(["--bytes", "--noheadings", "--output", "RES"]).arg(&path).output()
    else {
        return eprintln!("skipped: fincore is not installed");
    };
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "0");
}

#[test]
fn without_o_direct_the_page_cache_is_used() {
    let Ok(directory) = tempfile::tempdir_in("/dev/shm") else { return eprintln!("skipped: there is no /dev/shm") };
    let store = create(&directory.path().join("store"), CacheMode::Direct);
    assert_eq!(store.cache_mode(), CacheMode::PageCache);
    assert_eq!(store.data_file().unwrap().alignment_bytes, 1);
    store.write_at(&[9; 3000], 5).unwrap();
    store.zero_range(range(100, 1000), Zeroing::Keep).unwrap();
    store.zero_range(range(2000, 10), Zeroing::Deallocate).unwrap();
    let mut buf = [1; 3005];
    store.read_at(&mut buf, 0).unwrap();
    let expected: Vec<u8> =
        (0..3005).map(|n| if n < 5 || (100..1100).contains(&n) || (2000..2010).contains(&n) { 0 } else { 9 }).collect();
    assert_eq!(buf[..], expected[..]);
}

#[test]
fn holes_are_skipped_and_take_no_space() {
    let directory = tempfile::tempdir().unwrap();
    for cache in BOTH {
        let store = create(&directory.path().join(format!("{cache:?}")), cache);
        assert_eq!(store.next_data(0).unwrap(), None);
        store.set_len(64 << 20).unwrap();
        assert_eq!(store.next_data(0).unwrap(), None);
        assert!(store.allocated_bytes().unwrap() < 1 << 20);
        store.write_at(&[1; 65536], 32 << 20).unwrap();
        store.sync_data().unwrap();
        assert_eq!(store.next_data(0).unwrap(), Some(range(32 << 20, 65536)));
        assert_eq!(store.next_data((32 << 20) + 4096).unwrap(), Some(range((32 << 20) + 4096, 61440)));
        assert_eq!(store.next_data(33 << 20).unwrap(), None);
        assert!((65536..1 << 20).contains(&store.allocated_bytes().unwrap()));
        store.zero_range(range(32 << 20, 65536), Zeroing::Deallocate).unwrap();
        assert_eq!(store.next_data(0).unwrap(), None);
        store.allocate(range(0, 8 << 20)).unwrap();
        assert!(store.allocated_bytes().unwrap() >= 8 << 20);
    }
}

#[test]
fn reflink_succeeds_or_is_unsupported() {
    let directory = tempfile::tempdir().unwrap();
    let source = create(&directory.path().join("source"), CacheMode::PageCache);
    let target = create(&directory.path().join("target"), CacheMode::PageCache);
    source.write_at(&[5; 65536], 0).unwrap();
    match target.clone_range(&source, range(0, 65536), 65536) {
        Ok(()) => {
            let mut buf = vec![0; 65536];
            target.read_at(&mut buf, 65536).unwrap();
            assert!(buf.iter().all(|&byte| byte == 5));
        }
        Err(error) => {
            assert_eq!(error.kind(), io::ErrorKind::Unsupported);
            let copied = Command::new("cp")
                .arg("--reflink=always")
                .args([source.name(), &directory.path().join("copy")])
                .output();
            assert!(!copied.is_ok_and(|output| output.status.success()), "cp can reflink, but clone_range cannot");
        }
    }
    let memory = crate::MemoryStore::with_bytes("memory", vec![0; 4096]);
    assert_eq!(target.clone_range(&memory, range(0, 4096), 0).unwrap_err().kind(), io::ErrorKind::Unsupported);
    target.clone_range(&memory, range(0, 0), 0).unwrap();
}

#[test]
fn identity_is_that_of_the_file_and_not_of_its_name() {
    let directory = tempfile::tempdir().unwrap();
    let (one, two) = (directory.path().join("one"), directory.path().join("two"));
    fs::write(&one, b"x").unwrap();
    fs::hard_link(&one, &two).unwrap();
    fs::write(directory.path().join("other"), b"x").unwrap();
    let open = |path: &Path| FileStore::open(path, &OpenOptions::default()).unwrap().identity().unwrap();
    assert_eq!(open(&one), open(&two));
    assert_ne!(open(&one), open(&directory.path().join("other")));
}

#[test]
fn the_open_file_limit_reaches_what_is_allowed() {
    let limit = raise_open_file_limit().unwrap();
    let now = rustix::process::getrlimit(rustix::process::Resource::Nofile);
    assert_eq!(now.current.unwrap_or(u64::MAX), limit);
}

#[test]
fn after_a_failed_sync_the_page_cache_is_not_trusted() {
    let directory = tempfile::tempdir().unwrap();
    for cache in BOTH {
        let store = create(&directory.path().join(format!("{cache:?}")), cache);
        store.settle_sync(Ok(())).unwrap();
        assert!(store.settle_sync(Err(io::Error::from_raw_os_error(nix::libc::EIO))).is_err());
        let later = store.sync_data();
        match store.cache_mode() {
            CacheMode::PageCache => assert!(later.unwrap_err().to_string().contains("may be lost")),
            CacheMode::Direct => later.unwrap(),
        }
    }
}

#[test]
fn a_directory_can_be_synced() {
    let directory = tempfile::tempdir().unwrap();
    sync_directory_of(&directory.path().join("any")).unwrap();
    sync_directory_of(Path::new("bare-name")).unwrap();
    assert!(sync_directory_of(&directory.path().join("absent/any")).is_err());
}

/// A loop device over a file, if the machine permits.
struct LoopDevice(String);

impl LoopDevice {
    fn over(path: &Path, sector_bytes: u32) -> Option<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector_bytes.to_string()])
            .arg(path)
            .output()
            .ok()?;
        output.status.success().then(|| Self(String::from_utf8_lossy(&output.stdout).trim().to_owned()))
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_a_store() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    fs::write(&file, vec![0xAA; 8 << 20]).unwrap();
    for (cache, sector_bytes) in
        [(CacheMode::PageCache, 512), (CacheMode::Direct, 512), (CacheMode::PageCache, 4096), (CacheMode::Direct, 4096)]
    {
        let Some(device) = LoopDevice::over(&file, sector_bytes) else {
            return eprintln!("skipped: no loop device is available");
        };
        let options = OpenOptions { writable: true, create_new: false, cache, lock: LockMode::Exclusive };
        let store = FileStore::open(&device.0, &options).unwrap();
        assert!(store.is_block_device());
        assert_eq!(store.sector_bytes().logical_bytes, sector_bytes);
        assert_eq!((store.len_bytes().unwrap(), store.cache_mode()), (8 << 20, cache));
        // The claim is one for all of the process; its lock keeps a second disk out.
        let second = FileStore::open(&device.0, &options);
        assert!(matches!(second, Err(OpenError::Locked { .. })), "a device in use was opened: {second:?}");
        // Other programs find it claimed.
        let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::EXCL;
        let foreign = rustix::fs::open(&*device.0, flags, rustix::fs::Mode::empty());
        assert_eq!(foreign.unwrap_err(), Errno::BUSY);
        store.write_at(&[1; 3000], 777).unwrap();
        store.zero_range(range(1000, 100_000), Zeroing::Keep).unwrap();
        store.zero_range(range(200_000, 100_000), Zeroing::Deallocate).unwrap();
        store.sync_data().unwrap();
        let mut all = vec![0; 8 << 20];
        store.read_at(&mut all, 0).unwrap();
        for (n, &byte) in all.iter().enumerate() {
            let expected = match n {
                777..1000 => 1,
                1000..101_000 | 200_000..300_000 => 0,
                _ => 0xAA,
            };
            assert_eq!(byte, expected, "byte {n} with {cache:?}");
        }
        store.set_len(8 << 20).unwrap();
        assert!(store.set_len(9 << 20).is_err());
        store.allocate(range(0, 8 << 20)).unwrap();
        assert_eq!(store.allocate(range(1, 8 << 20)).unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(store.next_data(4096).unwrap(), Some(range(4096, (8 << 20) - 4096)));
        store.write_at(&vec![0xAA; 8 << 20], 0).unwrap();
    }
}
