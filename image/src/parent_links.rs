//! Tests of links to parents for all formats that have them: any link is stored and read back, by
//! creation and by [`ImageWriter::set_parent_link`](crate::ImageWriter::set_parent_link) alike;
//! other threads may write meanwhile; identities and time stamps.

use crate::{BlockState, Commit, CreateOptions, DiskType, Format, Image, LinkageId, ParentLink, Severity, vhd};
use diskwright_store::{FileRange, FileStore, MemoryStore, OpenOptions, Store, Zeroing, testing::ForwardingStore};
use proptest::prelude::*;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    thread,
    time::{Duration, UNIX_EPOCH},
};
use uuid::Uuid;

const MIB: u64 = 1 << 20;
const FORMATS: [Format; 2] = [Format::Vhd, Format::Vhdx];

fn options(parent: &ParentLink) -> CreateOptions {
    CreateOptions {
        disk_type: DiskType::Differencing,
        size_bytes: 64 * MIB,
        block_bytes: Some(MIB as u32),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: Some(parent.clone()),
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    }
}

fn created(format: Format, parent: &ParentLink) -> Arc<MemoryStore> {
    let store = Arc::new(MemoryStore::new("child"));
    format.driver().create(store.clone(), &options(parent)).unwrap();
    store
}

fn opened(format: Format, store: &Arc<MemoryStore>, writable: bool) -> Arc<dyn Image> {
    format.driver().open(store.clone(), writable, 512).unwrap()
}

/// The link as an image of this format holds it.
fn stored(format: Format, link: &ParentLink) -> ParentLink {
    let full = |path: &Option<String>| path.clone().filter(|path| !path.is_empty());
    let paths = ParentLink {
        relative_path: full(&link.relative_path),
        absolute_path: full(&link.absolute_path),
        linkage: link.linkage,
        ..ParentLink::default()
    };
    match format {
        Format::Vhd => {
            ParentLink { name: link.name.clone(), modified_seconds: Some(link.modified_seconds.unwrap_or(0)), ..paths }
        }
        _ => ParentLink { volume_path: full(&link.volume_path), linkage2: link.linkage2, ..paths },
    }
}

/// Without the offset of the time stamp, which depends on the place of the header.
fn plain(link: Option<ParentLink>) -> ParentLink {
    ParentLink { modified_offset_bytes: None, ..link.expect("a differencing image has a link") }
}

/// File names: any characters, spaces, and 255 bytes of one or two bytes a character.
fn any_name() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[^\0/\\\\]{1,40}",
        2 => "[a-zA-Z0-9 ._äöüßéñ日本語🐧-]{1,80}",
        1 => Just(format!("{}.vhdx", "n".repeat(250))),
        1 => Just("é".repeat(127) + "x"),
    ]
}

fn any_path(roots: &'static [&'static str]) -> impl Strategy<Value = String> {
    (prop::sample::select(roots), prop::collection::vec(any_name(), 0..12), any_name()).prop_map(
        |(root, folders, name)| {
            let folders: String = folders.iter().map(|folder| folder.clone() + "\\").collect();
            format!("{root}{folders}{name}")
        },
    )
}

fn any_link() -> impl Strategy<Value = ParentLink> {
    let relative = any_path(&[".\\", "..\\", "..\\..\\a b\\"]);
    let absolute = any_path(&["\\\\?\\C:\\", "\\home\\", "\\\\server\\share\\"]);
    let volume = any_path(&["\\\\?\\Volume{26a21bda-a627-11d7-9931-806e6f6e6963}\\"]);
    let paths = (prop::option::of(relative), absolute, prop::option::of(volume));
    let ids = (any::<u128>(), prop::option::of(any::<u128>()), prop::option::of(any::<u32>()));
    (paths, any::<bool>(), any_name(), ids).prop_map(|((relative, absolute, volume), only_relative, name, ids)| {
        let absolute_path = Some(absolute).filter(|_| !only_relative || relative.is_none());
        ParentLink {
            file_id: None,
            absolute_path,
            relative_path: relative,
            volume_path: volume,
            name: Some(name),
            linkage: Some(Uuid::from_u128(ids.0).into()),
            linkage2: ids.1.map(|id| Uuid::from_u128(id).into()),
            format: None,
            is_merged: false,
            modified_seconds: ids.2,
            modified_offset_bytes: None,
        }
    })
}

proptest! {
    #[test]
    fn any_link_is_stored_and_read_back(links in prop::collection::vec(any_link(), 2..6), sessions: u8) {
        for format in FORMATS {
            let store = created(format, &links[0]);
            let mut image = opened(format, &store, true);
            prop_assert_eq!(plain(image.parent_link()), stored(format, &links[0]));
            for (index, link) in links.iter().enumerate().skip(1) {
                image.writer().unwrap().set_parent_link(link).unwrap();
                prop_assert_eq!(plain(image.parent_link()), stored(format, link));
                prop_assert_eq!(plain(format.driver().parent_link(&*store).unwrap()), stored(format, link));
                if sessions >> index & 1 == 1 {
                    image.writer().unwrap().close().unwrap();
                    image = opened(format, &store, true);
                    prop_assert_eq!(&image.info().parent, &image.parent_link());
                }
            }
            let told = image.parent_link();
            image.writer().unwrap().close().unwrap();
            let reader = opened(format, &store, false);
            prop_assert_eq!(&reader.info().parent, &told);
            prop_assert_eq!(&reader.info().remarks, &Vec::<String>::new());
            let report = format.driver().check(store).unwrap();
            prop_assert!(report.worst() < Some(Severity::Corrupt), "{:?}", report.findings);
        }
    }
}

/// Writes one sector of a block.
fn write(image: &dyn Image, block: u64, sector: u32, byte: u8) {
    let writer = image.writer().unwrap();
    writer.begin_writing().unwrap();
    let place = writer.reserve_waiting(block).unwrap().offset_bytes;
    image.store().write_at(&[byte; 512], place + u64::from(sector) * 512).unwrap();
    writer.commit_waiting(block, Commit::Sectors { first: sector, count: 1 }).unwrap();
}

fn read(image: &dyn Image, block: u64, sector: u32) -> Option<u8> {
    let mut state = [BlockState::Absent];
    image.block_states(block, &mut state).unwrap();
    let offset_bytes = match state[0] {
        BlockState::Data { offset_bytes, .. } => offset_bytes,
        BlockState::Partial { offset_bytes, .. } if image.sector_bitmap(block).unwrap().get(sector) => offset_bytes,
        _ => return None,
    };
    let mut bytes = [0; 512];
    image.store().read_at(&mut bytes, offset_bytes + u64::from(sector) * 512).unwrap();
    assert_eq!(bytes, [bytes[0]; 512]);
    Some(bytes[0])
}

/// Four threads write and flush, one makes the disk larger, while the link changes again and again.
#[test]
fn other_threads_write_and_flush_while_the_link_changes() {
    let link = |number: u32| ParentLink {
        relative_path: Some(format!(".\\{}{number}.vhd", "folder\\".repeat(number as usize % 5 * 100))),
        name: Some(format!("{number}.vhd")),
        linkage: Some(Uuid::from_u128(number.into()).into()),
        modified_seconds: Some(number),
        ..ParentLink::default()
    };
    for format in FORMATS {
        let store = created(format, &link(1));
        let image = opened(format, &store, true);
        let is_done = AtomicBool::new(false);
        thread::scope(|scope| {
            let writers: Vec<_> = (0..4u64)
                .map(|thread| {
                    let image = &*image;
                    scope.spawn(move || {
                        for round in 0..15u32 {
                            for block in thread * 16..thread * 16 + 16 {
                                write(image, block, round, (block + 1) as u8);
                                assert_eq!(read(image, block, round), Some((block + 1) as u8));
                            }
                            image.writer().unwrap().flush().unwrap();
                        }
                    })
                })
                .collect();
            let (changing, is_done) = (&*image, &is_done);
            let changer = scope.spawn(move || {
                let mut number = 1;
                while !is_done.load(Ordering::SeqCst) || number < 20 {
                    number += 1;
                    changing.writer().unwrap().set_parent_link(&link(number)).unwrap();
                    assert_eq!(plain(changing.parent_link()), stored(format, &link(number)));
                }
                number
            });
            let resized = scope.spawn(|| {
                for size in [65, 100, 3000] {
                    image.writer().unwrap().resize(size * MIB).unwrap();
                }
            });
            writers.into_iter().for_each(|writer| writer.join().unwrap());
            resized.join().unwrap();
            is_done.store(true, Ordering::SeqCst);
            let last = changer.join().unwrap();
            image.writer().unwrap().close().unwrap();
            assert_eq!(plain(opened(format, &store, false).info().parent.clone()), stored(format, &link(last)));
        });
        let reader = opened(format, &store, false);
        assert_eq!(reader.size_bytes(), 3000 * MIB);
        for block in 0..64 {
            for round in 0..15 {
                assert_eq!(read(&*reader, block, round), Some((block + 1) as u8), "{format}: block {block}");
            }
            assert_eq!(read(&*reader, block, 15), None);
        }
        let report = format.driver().check(store).unwrap();
        assert!(report.worst() < Some(Severity::Corrupt), "{:?}", report.findings);
    }
}

/// A child that is created above an image in use records the identity that the image has now.
#[test]
fn an_image_tells_the_identity_that_it_has_now() {
    let parent = ParentLink { relative_path: Some(".\\base.vhd".into()), ..ParentLink::default() };
    let chosen = [0x11, 0x22].map(|id| LinkageId::from(Uuid::from_u128(id)));
    for format in FORMATS {
        let store = created(format, &parent);
        let image = opened(format, &store, true);
        let first = image.linkage_id().unwrap();
        assert_eq!(image.info().linkage_id, Some(first));
        let read = || opened(format, &store, false).info().clone();
        image.writer().unwrap().begin_writing_as(chosen[0]).unwrap();
        image.writer().unwrap().begin_writing().unwrap();
        write(&*image, 3, 0, 9);
        image.writer().unwrap().flush().unwrap();
        let changes = format == Format::Vhdx;
        assert_eq!(image.linkage_id(), Some(if changes { chosen[0] } else { first }));
        assert_eq!(read().linkage_id, image.linkage_id(), "durable before the first write");
        // In a session that has begun: a merge into a disk that was written before a snapshot.
        let file_write_id = read().file_write_id;
        image.writer().unwrap().begin_writing_as(chosen[1]).unwrap();
        assert_eq!(image.linkage_id(), Some(if changes { chosen[1] } else { first }));
        assert_eq!((read().linkage_id, read().file_write_id), (image.linkage_id(), file_write_id));
        image.writer().unwrap().close().unwrap();
        // A session without a chosen identity.
        let again = opened(format, &store, true);
        let before = again.linkage_id();
        again.writer().unwrap().begin_writing().unwrap();
        assert_eq!(again.linkage_id() != before, changes);
        assert_eq!(again.linkage_id(), read().linkage_id);
        again.writer().unwrap().close().unwrap();
    }
}

/// An image takes the identity of another one, in the middle of a session, and keeps it. Its
/// contents stay, and both footers of a VHD have it.
#[test]
fn an_image_takes_any_identity_and_keeps_it() {
    let chosen = [0x33, 0x44].map(|id| LinkageId::from(Uuid::from_u128(id)));
    for (format, disk_type) in FORMATS.into_iter().flat_map(|format| {
        [DiskType::Fixed, DiskType::Dynamic, DiskType::Differencing].map(|disk_type| (format, disk_type))
    }) {
        let parent = ParentLink { relative_path: Some(".\\base.vhd".into()), ..ParentLink::default() };
        let is_child = disk_type == DiskType::Differencing;
        let plan = CreateOptions {
            disk_type,
            parent: is_child.then(|| parent.clone()),
            block_bytes: (format == Format::Vhdx || disk_type != DiskType::Fixed).then_some(MIB as u32),
            ..options(&parent)
        };
        let store = Arc::new(MemoryStore::new("image"));
        format.driver().create(store.clone(), &plan).unwrap();
        let image = opened(format, &store, true);
        let writer = image.writer().unwrap();
        for id in chosen {
            writer.set_linkage_id(id).unwrap();
            assert_eq!(image.linkage_id(), Some(id));
            let found = opened(format, &store, false);
            assert_eq!(found.info().linkage_id, Some(id), "{format} {disk_type}: durable");
            assert!(found.info().remarks.is_empty(), "{:?}", found.info().remarks);
            // A session that goes on keeps it.
            writer.begin_writing().unwrap();
            if disk_type != DiskType::Fixed {
                write(&*image, 3, 0, 9);
            }
            writer.flush().unwrap();
            assert_eq!(opened(format, &store, false).info().linkage_id, Some(id));
        }
        writer.resize(100 * MIB).unwrap();
        writer.close().unwrap();
        let found = opened(format, &store, false);
        assert_eq!((found.info().linkage_id, found.size_bytes()), (Some(chosen[1]), 100 * MIB));
        let report = format.driver().check(store).unwrap();
        assert!(report.worst() < Some(Severity::Corrupt), "{format} {disk_type}: {:?}", report.findings);
    }
    let raw = Format::Raw.driver().open(Arc::new(MemoryStore::new("raw")), true, 512).unwrap();
    assert!(raw.writer().unwrap().set_linkage_id(chosen[0]).unwrap_err().to_string().contains("an identity"));
}

/// A VHD child records the modification time of its parent's file in whole seconds.
#[test]
fn a_parent_can_get_the_time_back_that_its_children_recorded() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("parent.vhd");
    let writable = OpenOptions { writable: true, create_new: true, ..OpenOptions::default() };
    let store: Arc<dyn Store> = Arc::new(FileStore::open(&path, &writable).unwrap());
    let made = CreateOptions { disk_type: DiskType::Dynamic, parent: None, ..options(&ParentLink::default()) };
    vhd::create(Arc::clone(&store), &made).unwrap();
    for recorded in [0, 1, 812_345_678, 1 << 31, u32::MAX] {
        vhd::set_modified_seconds(&*store, recorded).unwrap();
        let modified = std::fs::metadata(&path).unwrap().modified().unwrap();
        assert_eq!(modified, UNIX_EPOCH + Duration::from_secs(946_684_800 + u64::from(recorded)));
    }
    let error = vhd::set_modified_seconds(&MemoryStore::new("memory.vhd"), 5).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::Unsupported);
    assert!(error.to_string().starts_with("memory.vhd: cannot set the file's modification time"), "{error}");
}

/// A store of which one change fails, or all from one on. A write that fails has written its first
/// half, in whole sectors.
#[derive(Debug)]
struct Failing {
    inner: MemoryStore,
    /// Number of changes until one fails.
    left: AtomicI64,
    is_for_good: AtomicBool,
}

impl Failing {
    fn fails(&self) -> io::Result<()> {
        let left = self.left.fetch_sub(1, Ordering::SeqCst);
        if left == 1 || left < 1 && self.is_for_good.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(5));
        }
        Ok(())
    }
}

impl ForwardingStore for Failing {
    fn inner(&self) -> &dyn Store {
        &self.inner
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        if let Err(error) = self.fails() {
            self.inner.write_at(&buf[..buf.len() / 1024 * 512], offset_bytes)?;
            return Err(error);
        }
        self.inner.write_at(buf, offset_bytes)
    }
    fn set_len(&self, len_bytes: u64) -> io::Result<()> {
        self.fails()?;
        self.inner.set_len(len_bytes)
    }
    fn allocate(&self, range: FileRange) -> io::Result<()> {
        self.fails()?;
        self.inner.allocate(range)
    }
    fn zero_range(&self, range: FileRange, how: Zeroing) -> io::Result<()> {
        self.fails()?;
        self.inner.zero_range(range, how)
    }
    fn sync_data(&self) -> io::Result<()> {
        self.fails()?;
        self.inner.sync_data()
    }
}

/// Every change of the file by a new link fails, one after the other. Afterwards the file has the
/// old link or the new one. If only one change failed, and not a sync, the call can be repeated.
#[test]
fn every_failed_change_leaves_the_old_link_or_the_new_one() {
    let link = |name: &str, id| ParentLink {
        relative_path: Some(format!(".\\{name}.vhd")),
        name: Some(name.into()),
        linkage: Some(Uuid::from_u128(id).into()),
        modified_seconds: Some(0),
        ..ParentLink::default()
    };
    let old = link("old", 1);
    // A change of one sector of a VHD, a link before the blocks, and one at the end of the file.
    let news = [
        ParentLink { linkage: Some(Uuid::from_u128(2).into()), ..old.clone() },
        link("new", 3),
        link(&"n".repeat(9000), 4),
    ];
    let news = news.map(|link| ParentLink { name: link.name.filter(|name| name.len() < 200), ..link });
    let mut repeated = 0;
    for (format, new, is_for_good) in FORMATS
        .into_iter()
        .flat_map(|format| news.iter().flat_map(move |new| [(format, new, false), (format, new, true)]))
    {
        let expected = [&old, new].map(|link| ParentLink { name: None, ..stored(format, link) });
        for number in 1.. {
            let inner = MemoryStore::with_bytes("child", created(format, &old).to_vec());
            let store = Arc::new(Failing { inner, left: 0.into(), is_for_good: false.into() });
            let open = |writable| format.driver().open(store.clone(), writable, 512).unwrap();
            let found = |image: &dyn Image| ParentLink { name: None, ..plain(image.parent_link()) };
            let image = open(true);
            write(&*image, 1, 3, 9);
            image.writer().unwrap().flush().unwrap();
            store.is_for_good.store(is_for_good, Ordering::SeqCst);
            store.left.store(number, Ordering::SeqCst);
            let result = image.writer().unwrap().set_parent_link(new);
            store.is_for_good.store(false, Ordering::SeqCst);
            let has_failed = store.left.swap(0, Ordering::SeqCst) < 1;
            let what = format!("{format}, {:?}, change {number}", new.linkage);
            let reader = open(false);
            assert!(expected.contains(&found(&*reader)), "{what}: {:?}", reader.parent_link());
            assert_eq!((read(&*reader, 1, 3), read(&*reader, 1, 4)), (Some(9), None), "{what}");
            let report = format.driver().check(store.clone()).unwrap();
            assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:?}", report.findings);
            assert_eq!(result.is_ok(), !has_failed, "{what}: no failure is ignored");
            let image = match image.writer().unwrap().check_syncs() {
                Ok(()) => image,
                Err(_) => open(true),
            };
            image.writer().unwrap().set_parent_link(new).unwrap_or_else(|error| panic!("{what}: {error}"));
            write(&*image, 2, 3, 8);
            image.writer().unwrap().close().unwrap();
            let reader = open(false);
            assert_eq!(found(&*reader), expected[1], "{what}");
            assert_eq!((read(&*reader, 1, 3), read(&*reader, 2, 3)), (Some(9), Some(8)), "{what}");
            let report = format.driver().check(store.clone()).unwrap();
            assert!(report.worst() < Some(Severity::Corrupt), "{what}: {:?}", report.findings);
            if !has_failed {
                break;
            }
            repeated += 1;
        }
    }
    assert!(repeated > 40, "{repeated} failures");
}
