//! Conversions that change the size of a disk, keep its identity, or are made for Azure; and the
//! rules of the places that images go to.

use crate::common::{read_all, write};
use diskwright_disk::{
    ChainFacts, ChainScope, ConvertOptions, ConvertOutcome, CreateRequest, Destination, Disk, DiskError, Identity,
    NewSize, OpenOptions, ReconnectOptions, Verdict, convert, create, reconnect,
};
use diskwright_image::{DiskType, Format, LinkageId};
use diskwright_store::{
    CacheMode, EngineKind, FileSystem, Files, LocalFiles, OpenError, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    collections::BTreeMap,
    fs, io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tempfile::{TempDir, tempdir};
use uuid::Uuid;

const MIB: u64 = 1 << 20;

fn dynamic(path: &Path, size_bytes: u64) {
    create(path, &CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() }).unwrap();
}

fn converted(source: &Path, dest: &Path, options: &ConvertOptions) -> Result<ConvertOutcome, DiskError> {
    convert(source, dest, options, &mut |_, _| true)
}

fn verified() -> ConvertOptions {
    ConvertOptions { verify: true, ..ConvertOptions::default() }
}

/// The disk id and the identity for children.
fn ids(path: &Path) -> (Option<Uuid>, Option<Uuid>) {
    let disk = Disk::open(path, &OpenOptions { scope: ChainScope::Top, ..OpenOptions::default() }).unwrap();
    let layers = disk.layers();
    (layers[0].image.info().disk_id, layers[0].image.linkage_id().map(LinkageId::to_uuid))
}

/// A folder with a raw disk of 8 MiB: an MBR with one partition, active if `active`, that ends at
/// 4 MiB, and data in it.
fn with_mbr(active: bool) -> TempDir {
    let dir = tempdir().unwrap();
    let mut bytes = vec![0_u8; 8 << 20];
    bytes[446] = if active { 0x80 } else { 0 };
    bytes[450] = 0x83;
    bytes[454..458].copy_from_slice(&2048_u32.to_le_bytes());
    bytes[458..462].copy_from_slice(&6144_u32.to_le_bytes());
    bytes[510..512].copy_from_slice(&[0x55, 0xaa]);
    bytes[1 << 20..2 << 20].fill(7);
    bytes[(4 << 20) - 512..4 << 20].fill(9);
    fs::write(dir.path().join("source.raw"), bytes).unwrap();
    dir
}

#[test]
fn a_larger_copy_ends_in_zeros() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.vhdx");
    dynamic(&source, 8 * MIB);
    write(&source, 7 * MIB, 5, MIB as usize);
    for (name, size) in
        [("a.vhd", NewSize::Bytes(11 * MIB)), ("b.vhdx", NewSize::More(3 * MIB)), ("c.raw", NewSize::More(3 * MIB))]
    {
        let dest = dir.path().join(name);
        let done = converted(&source, &dest, &ConvertOptions { size, ..verified() }).unwrap();
        assert_eq!((done.size_bytes, done.dest_bytes, done.verified_bytes), (8 * MIB, 11 * MIB, 8 * MIB));
        let mut expected = read_all(&source);
        expected.resize(11 << 20, 0);
        assert!(read_all(&dest) == expected, "{name}");
    }
}

#[test]
fn a_smaller_copy_ends_at_its_last_partition_or_is_refused() {
    let dir = with_mbr(false);
    let source = dir.path().join("source.raw");
    for (name, size, bytes) in [
        ("least.vhdx", NewSize::Minimum, 4 * MIB),
        ("least.vhd", NewSize::Bytes(4 * MIB), 4 * MIB),
        ("five.raw", NewSize::Bytes(5 * MIB), 5 * MIB),
    ] {
        let dest = dir.path().join(name);
        let done = converted(&source, &dest, &ConvertOptions { size, ..verified() }).unwrap();
        assert_eq!((done.dest_bytes, done.verified_bytes), (bytes, bytes), "{name}");
        assert!(read_all(&dest) == read_all(&source)[..bytes as usize], "{name}");
    }
    let dest = dir.path().join("cut.vhdx");
    let cut = NewSize::Bytes(4 * MIB - 512);
    let told = converted(&source, &dest, &ConvertOptions { size: cut, ..verified() }).unwrap_err().to_string();
    assert!(told.contains("partition 1") && told.contains(&(4 * MIB).to_string()), "{told}");
    assert!(fs::read_dir(dir.path()).unwrap().count() == 4, "the refused copy left a file");
}

#[test]
fn what_lies_on_an_unknown_disk_is_not_cut() {
    let dir = tempdir().unwrap();
    let (source, dest) = (dir.path().join("source.raw"), dir.path().join("dest.vhdx"));
    fs::write(&source, vec![3; 4 << 20]).unwrap();
    let told = converted(&source, &dest, &ConvertOptions { size: NewSize::Bytes(2 * MIB), ..verified() });
    assert!(told.unwrap_err().to_string().contains("cannot be made smaller") && !dest.exists());
}

#[test]
fn an_identity_is_new_unless_it_is_to_be_kept() {
    for (from, to, keeps_contents) in
        [("vhdx", "vhdx", true), ("vhd", "vhd", true), ("vhd", "vhdx", false), ("vhdx", "vhd", false)]
    {
        let dir = tempdir().unwrap();
        let source = dir.path().join(format!("source.{from}"));
        dynamic(&source, 8 * MIB);
        write(&source, MIB, 5, MIB as usize);
        let (old_id, old_linkage) = ids(&source);
        let new = dir.path().join(format!("new.{to}"));
        let done = converted(&source, &new, &verified()).unwrap();
        assert_eq!((done.kept_disk_id, done.kept_linkage_id), (false, false));
        let found = ids(&new);
        assert!(found.0 != old_id && found.1 != old_linkage, "{from} to {to}");

        let kept = dir.path().join(format!("kept.{to}"));
        let options = ConvertOptions { identity: Identity::Keep, ..verified() };
        let done = converted(&source, &kept, &options).unwrap();
        assert_eq!((done.kept_disk_id, done.kept_linkage_id), (true, keeps_contents), "{from} to {to}");
        let found = ids(&kept);
        assert_eq!(found.0, old_id, "{from} to {to}");
        assert_eq!(found.1 == old_linkage, keeps_contents, "{from} to {to}");
        assert_eq!(done.warnings.is_empty(), keeps_contents, "{:?}", done.warnings);
        assert!(read_all(&kept) == read_all(&source));
    }
}

/// A copy with the identity of the contents takes the place of a parent.
#[test]
fn children_accept_a_copy_with_the_identity_of_their_parent() {
    for extension in ["vhdx", "vhd"] {
        let dir = tempdir().unwrap();
        let at = |name: &str| dir.path().join(format!("{name}.{extension}"));
        dynamic(&at("base"), 8 * MIB);
        write(&at("base"), MIB, 5, MIB as usize);
        create(at("child"), &CreateRequest { parent: Some(at("base")), ..CreateRequest::default() }).unwrap();
        write(&at("child"), 3 * MIB, 6, 4096);
        let before = read_all(&at("child"));
        let keep = ConvertOptions { identity: Identity::Keep, ..verified() };
        converted(&at("base"), &at("copy"), &keep).unwrap();
        converted(&at("base"), &at("stranger"), &verified()).unwrap();
        fs::remove_file(at("base")).unwrap();
        let to = |name: &str| ReconnectOptions { parent: Some(at(name)), ..ReconnectOptions::default() };
        reconnect(at("child"), &to("stranger"), &mut |_, _| true).unwrap_err();
        reconnect(at("child"), &to("copy"), &mut |_, _| true).unwrap();
        assert!(read_all(&at("child")) == before, "{extension}");
    }
}

#[test]
fn a_copy_of_another_size_has_the_disk_but_not_the_contents() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.vhdx");
    dynamic(&source, 8 * MIB);
    let options = ConvertOptions { identity: Identity::Keep, size: NewSize::More(MIB), ..verified() };
    let dest = dir.path().join("dest.vhdx");
    let done = converted(&source, &dest, &options).unwrap();
    assert_eq!((done.kept_disk_id, done.kept_linkage_id), (true, false));
    assert!(done.warnings[0].contains("do not accept it as their parent: its size differs"), "{:?}", done.warnings);
    assert!(ids(&dest).0 == ids(&source).0 && ids(&dest).1 != ids(&source).1);
}

#[test]
fn an_identity_that_a_side_cannot_have_is_refused_by_name() {
    let dir = tempdir().unwrap();
    let (vhdx, raw) = (dir.path().join("a.vhdx"), dir.path().join("b.raw"));
    dynamic(&vhdx, MIB);
    fs::write(&raw, vec![0; 1 << 20]).unwrap();
    let options = ConvertOptions { identity: Identity::Keep, ..ConvertOptions::default() };
    for (source, dest, word) in
        [(&vhdx, "c.raw", "a raw file records no identity"), (&raw, "c.vhdx", "no identity that a copy could keep")]
    {
        let dest = dir.path().join(dest);
        let told = converted(source, &dest, &options).unwrap_err().to_string();
        assert!(told.contains(word) && !dest.exists(), "{told}");
    }
}

fn azure() -> ConvertOptions {
    ConvertOptions { azure: true, ..verified() }
}

/// The names of the rules that do not hold.
fn broken(path: &Path, place: Destination) -> Vec<&'static str> {
    let disk = Disk::open(path, &OpenOptions { scope: ChainScope::Available, ..OpenOptions::default() }).unwrap();
    let facts = ChainFacts::of(&disk, &Files::default(), EngineKind::Auto, &|_| Some(false)).unwrap();
    place.judge(&facts).iter().filter(|judgement| judgement.is_broken()).map(|judgement| judgement.rule.name).collect()
}

#[test]
fn a_copy_for_azure_is_a_fixed_vhd_of_whole_mib() {
    for (bytes, made_bytes) in [(5 * MIB, 20 * MIB), (20 * MIB + 512, 21 * MIB), (22 * MIB, 22 * MIB)] {
        let dir = tempdir().unwrap();
        let (source, dest) = (dir.path().join("source.vhdx"), dir.path().join("dest.vhd"));
        dynamic(&source, bytes);
        write(&source, bytes - 512, 5, 512);
        let done = converted(&source, &dest, &azure()).unwrap();
        assert_eq!((done.size_bytes, done.dest_bytes), (bytes, made_bytes));
        assert_eq!(fs::metadata(&dest).unwrap().len(), made_bytes + 512);
        let mut expected = read_all(&source);
        expected.resize(made_bytes as usize, 0);
        assert!(read_all(&dest) == expected);
        assert_eq!(broken(&dest, Destination::Azure), Vec::<&str>::new());
        // The footer: current size, and a creator for which every reader uses it.
        let mut footer = [0; 512];
        fs::File::open(&dest).unwrap().read_exact_at(&mut footer, made_bytes).unwrap();
        assert_eq!(
            (&footer[..8], &footer[28..32], &footer[48..56]),
            (&b"conectix"[..], &b"win "[..], &made_bytes.to_be_bytes()[..])
        );
    }
}

#[test]
fn what_azure_refuses_is_refused_before_the_copy() {
    let dir = with_mbr(true);
    let source = dir.path().join("source.raw");
    let refused = |dest: &str, options: &ConvertOptions| {
        let dest = dir.path().join(dest);
        let told = converted(&source, &dest, options).unwrap_err().to_string();
        assert!(!dest.exists() && !dir.path().join("a.vhd.partial").exists(), "{told}");
        told
    };
    let with = |dest: CreateRequest| ConvertOptions { dest, ..azure() };
    let none = CreateRequest::default;
    assert!(refused("a.vhdx", &azure()).contains("only a fixed VHD"));
    let dynamic = CreateRequest { disk_type: Some(DiskType::Dynamic), ..none() };
    assert!(refused("a.vhd", &with(dynamic)).contains("`CreateRequest::disk_type`"));
    let large = CreateRequest { logical_sector_bytes: Some(4096), ..none() };
    assert!(refused("a.vhd", &with(large)).contains("`CreateRequest::logical_sector_bytes`"));
    // It starts a machine by BIOS, so 2 TiB are the most.
    let told = refused("a.vhd", &ConvertOptions { size: NewSize::Bytes(3 << 40), ..azure() });
    assert!(told.contains("by the rule system-size") && told.contains("2199023255552"), "{told}");
    let told = refused("a.vhd", &ConvertOptions { size: NewSize::Bytes(33 << 40), ..azure() });
    assert!(told.contains("32 TiB"), "{told}");
}

#[test]
fn partitions_of_large_sectors_are_not_for_azure() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.vhdx");
    let request =
        CreateRequest { size_bytes: Some(32 * MIB), logical_sector_bytes: Some(4096), ..CreateRequest::default() };
    create(&source, &request).unwrap();
    // Without a table only a warning.
    let done = converted(&source, &dir.path().join("bare.vhd"), &azure()).unwrap();
    assert!(done.warnings[0].contains("sectors of 4096 bytes became sectors of 512"), "{:?}", done.warnings);
    let disk = Disk::open(&source, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut sector = vec![0_u8; 4096];
    sector[450] = 0x83;
    sector[454] = 8;
    sector[458] = 64;
    sector[510..512].copy_from_slice(&[0x55, 0xaa]);
    diskwright_store::Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &sector, false).unwrap();
    disk.close().unwrap();
    drop(disk);
    let told = converted(&source, &dir.path().join("table.vhd"), &azure()).unwrap_err().to_string();
    assert!(told.contains("sectors of 4096 bytes, and Azure's VHD has sectors of 512"), "{told}");
}

/// Every kind of image, and the rules that it breaks.
#[test]
fn the_rules_say_what_each_place_refuses() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let make = |name: &str, request: CreateRequest| {
        create(at(name), &CreateRequest { size_bytes: request.size_bytes.or(Some(24 * MIB)), ..request }).unwrap();
    };
    let plain = CreateRequest::default;
    make("fixed.vhd", CreateRequest { disk_type: Some(DiskType::Fixed), ..plain() });
    make("odd.vhd", CreateRequest { disk_type: Some(DiskType::Fixed), size_bytes: Some(24 * MIB + 512), ..plain() });
    make("tiny.vhd", CreateRequest { disk_type: Some(DiskType::Fixed), size_bytes: Some(2 * MIB), ..plain() });
    make("dynamic.vhd", plain());
    make("blocks.vhd", CreateRequest { block_bytes: Some(64 << 10), ..plain() });
    make("dynamic.vhdx", plain());
    make("wrong.img", CreateRequest { format: Some(Format::Vhdx), ..plain() });
    make("disk.raw", plain());
    let found: BTreeMap<&str, [Vec<&str>; 2]> =
        ["fixed.vhd", "odd.vhd", "tiny.vhd", "dynamic.vhd", "blocks.vhd", "dynamic.vhdx", "wrong.img", "disk.raw"]
            .into_iter()
            .map(|name| (name, [Destination::Azure, Destination::Windows].map(|place| broken(&at(name), place))))
            .collect();
    let expected: BTreeMap<&str, [Vec<&str>; 2]> = [
        ("fixed.vhd", [vec![], vec![]]),
        ("odd.vhd", [vec!["size-unit"], vec![]]),
        ("tiny.vhd", [vec!["size"], vec!["size", "remarks"]]),
        ("dynamic.vhd", [vec!["type"], vec![]]),
        ("blocks.vhd", [vec!["type"], vec!["block-size"]]),
        ("dynamic.vhdx", [vec!["format", "type"], vec![]]),
        ("wrong.img", [vec!["format", "type"], vec!["extension"]]),
        ("disk.raw", [vec!["format"], vec!["format"]]),
    ]
    .into_iter()
    .collect();
    assert_eq!(found, expected);
}

#[test]
fn the_rules_of_windows_look_at_the_whole_chain() {
    let dir = tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    dynamic(&at("base.vhd"), 8 * MIB);
    create(at("child.vhd"), &CreateRequest { parent: Some(at("base.vhd")), ..CreateRequest::default() }).unwrap();
    assert_eq!(broken(&at("child.vhd"), Destination::Windows), Vec::<&str>::new());
    // A parent that was touched later: Windows compares the times.
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    fs::File::options().write(true).open(at("base.vhd")).unwrap().set_modified(later).unwrap();
    assert_eq!(broken(&at("child.vhd"), Destination::Windows), ["parent-time"]);
    fs::remove_file(at("base.vhd")).unwrap();
    let names = broken(&at("child.vhd"), Destination::Windows);
    assert_eq!(names, ["chain"]);

    let larger = CreateRequest { parent: Some(at("b.vhd")), size_bytes: Some(9 * MIB), ..CreateRequest::default() };
    dynamic(&at("b.vhd"), 8 * MIB);
    create(at("c.vhd"), &larger).unwrap();
    assert_eq!(broken(&at("c.vhd"), Destination::Windows), ["parent-size"]);
}

#[test]
fn a_broken_rule_says_what_mends_it() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("odd.vhd");
    dynamic(&path, 24 * MIB + 512);
    let disk = Disk::open(&path, &OpenOptions::default()).unwrap();
    let facts = ChainFacts::of(&disk, &Files::default(), EngineKind::Auto, &|_| None).unwrap();
    let judgements = Destination::Azure.judge(&facts);
    let of = |name: &str| &judgements.iter().find(|judgement| judgement.rule.name == name).unwrap().verdict;
    let Verdict::Broken { found, remedy } = of("size-unit") else { panic!("{judgements:?}") };
    assert_eq!(found, "25166336 bytes");
    assert!(remedy.contains("`ConvertOptions::azure`") && remedy.contains("26214400"), "{remedy}");
    assert!(matches!(of("one-size"), Verdict::NotApplicable { .. }));
    assert!(matches!(of("gpt-end"), Verdict::NotApplicable { .. }));
}

/// A file system on which the file with this in its name can be written and synced so many times.
#[derive(Debug)]
struct Faulty {
    left: Arc<AtomicU64>,
}

#[derive(Debug)]
struct FaultyStore {
    inner: Arc<dyn Store>,
    left: Arc<AtomicU64>,
}

fn count_down(left: &AtomicU64) -> io::Result<()> {
    let counted = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
    counted.map(drop).map_err(|_| io::ErrorKind::StorageFull.into())
}

impl ForwardingStore for FaultyStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn write_at(&self, buf: &[u8], offset_bytes: u64) -> io::Result<()> {
        count_down(&self.left)?;
        self.inner.write_at(buf, offset_bytes)
    }
    fn sync_data(&self) -> io::Result<()> {
        count_down(&self.left)?;
        self.inner.sync_data()
    }
}

impl ForwardingFileSystem for Faulty {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        let inner = FileSystem::open(&LocalFiles, path, options)?;
        let is_dest = path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("dest"));
        Ok(if is_dest { Arc::new(FaultyStore { inner, left: Arc::clone(&self.left) }) } else { inner })
    }
    fn rename(&self, from: &Path, to: &Path, replace: bool) -> io::Result<()> {
        count_down(&self.left)?;
        FileSystem::rename(&LocalFiles, from, to, replace)
    }
}

/// The changes behind the copy itself fail too, at every write and sync: nothing is left behind.
#[test]
fn a_conversion_that_fails_at_any_write_leaves_nothing() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.vhdx");
    dynamic(&source, 4 * MIB);
    write(&source, MIB, 5, 4096);
    let dest = dir.path().join("dest.vhdx");
    let options = ConvertOptions { identity: Identity::Keep, ..verified() };
    let (calls, done) = fails_until_it_is_let_be(&source, &dest, &options);
    assert!(done.kept_linkage_id && calls > 15, "{calls}");
    assert_eq!(ids(&dest), ids(&source));
    assert!(read_all(&dest) == read_all(&source));
}

#[test]
fn a_stream_that_fails_at_any_write_leaves_nothing() {
    let dir = tempdir().unwrap();
    let source = dir.path().join("source.raw");
    // Incompressible, so that it is written in several pieces.
    let mut random = 1_u64;
    let bytes = std::iter::repeat_with(|| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 56) as u8
    });
    fs::write(&source, bytes.take(3 << 20).collect::<Vec<u8>>()).unwrap();
    for (name, least) in [("dest.vmdk", 5), ("dest.ova", 6)] {
        let dest = dir.path().join(name);
        let options = ConvertOptions { dest: stream_optimized(), ..ConvertOptions::default() };
        let (calls, done) = fails_until_it_is_let_be(&source, &dest, &options);
        assert!(calls >= least, "{name}: {calls}");
        assert_eq!(done.stream_bytes, Some(fs::metadata(&dest).unwrap().len()));
        fs::remove_file(&dest).unwrap();
    }
}

/// Repeats a conversion that fails at the first write, at the second and so on, until it succeeds.
/// Returns how many have failed.
fn fails_until_it_is_let_be(source: &Path, dest: &Path, options: &ConvertOptions) -> (u64, ConvertOutcome) {
    let mut calls = 0;
    loop {
        let left = Arc::new(AtomicU64::new(calls));
        let files = Files::new(Arc::new(Faulty { left: Arc::clone(&left) }));
        let source_open = OpenOptions { engine: EngineKind::Sync, ..OpenOptions::default() };
        let options = ConvertOptions {
            source: source_open,
            cache: Some(CacheMode::PageCache),
            dest: CreateRequest { files, ..options.dest.clone() },
            ..options.clone()
        };
        match converted(source, dest, &options) {
            Ok(done) => {
                assert_eq!(left.load(Ordering::SeqCst), 0);
                return (calls, done);
            }
            Err(error) => {
                let left = fs::read_dir(source.parent().unwrap()).unwrap().count();
                assert_eq!(left, 1, "after {calls} calls: {error}");
            }
        }
        calls += 1;
    }
}

fn stream_optimized() -> CreateRequest {
    CreateRequest { subformat: Some("streamOptimized".into()), ..CreateRequest::default() }
}

#[test]
fn streams_refuse_what_they_cannot_be() {
    let dir = with_mbr(false);
    let source = dir.path().join("source.raw");
    let dest = dir.path().join("dest.vmdk");
    let request = stream_optimized;
    let base = ConvertOptions { dest: request(), ..ConvertOptions::default() };
    for (options, what) in [
        (ConvertOptions { size: NewSize::Minimum, ..base.clone() }, "`ConvertOptions::size`"),
        (ConvertOptions { identity: Identity::Keep, ..base.clone() }, "`ConvertOptions::identity`"),
        (ConvertOptions { azure: true, ..base.clone() }, "`ConvertOptions::azure`"),
        (ConvertOptions { compress_level: Some(13), ..base.clone() }, "`ConvertOptions::compress_level`"),
        (
            ConvertOptions { dest: CreateRequest { preallocate: true, ..request() }, ..base.clone() },
            "`CreateRequest::preallocate`",
        ),
        (
            ConvertOptions { dest: CreateRequest { disk_type: Some(DiskType::Fixed), ..request() }, ..base.clone() },
            "`CreateRequest::disk_type`",
        ),
        (
            ConvertOptions { dest: CreateRequest { logical_sector_bytes: Some(4096), ..request() }, ..base.clone() },
            "`CreateRequest::logical_sector_bytes`",
        ),
        (
            ConvertOptions { dest: CreateRequest { block_bytes: Some(1 << 20), ..request() }, ..base.clone() },
            "`CreateRequest::block_bytes`",
        ),
    ] {
        let refused = converted(&source, &dest, &options).unwrap_err();
        assert!(matches!(refused, DiskError::Usage { .. }) && refused.to_string().contains(what), "{refused}");
    }
    let stopped = convert(&source, &dest, &base, &mut |_, _| false);
    // A short copy may end before it is asked whether to stop.
    assert!(matches!(stopped, Ok(_) | Err(DiskError::Stopped)));
    let _ = fs::remove_file(&dest);
    fs::write(&dest, b"mine").unwrap();
    assert!(matches!(converted(&source, &dest, &base).unwrap_err(), DiskError::Exists { .. }));
    assert_eq!(fs::read(&dest).unwrap(), b"mine");
}

#[test]
fn a_plan_can_be_stopped() {
    let dir = with_mbr(false);
    let options = ConvertOptions { size: NewSize::Minimum, ..verified() };
    let stopped = convert(dir.path().join("source.raw"), dir.path().join("dest.vhdx"), &options, &mut |_, _| false);
    assert!(matches!(stopped, Err(DiskError::Stopped)), "{stopped:?}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

/// A copy that was cut off is replaced by the same command; one that is under way is not.
#[test]
fn the_same_command_replaces_what_an_interrupted_one_has_left() {
    let dir = with_mbr(false);
    let (source, dest) = (dir.path().join("source.raw"), dir.path().join("copy.vhdx"));
    let partial = dir.path().join("copy.vhdx.partial");
    fs::write(&partial, "a part of a copy").unwrap();
    let exclusive = diskwright_store::OpenOptions {
        writable: true,
        lock: diskwright_store::LockMode::Exclusive,
        ..Default::default()
    };
    let held = LocalFiles.open(&partial, &exclusive).unwrap();
    let error = converted(&source, &dest, &verified()).unwrap_err().to_string();
    assert!(error.contains("another conversion to this name is under way"), "{error}");
    assert_eq!(fs::read(&partial).unwrap(), b"a part of a copy");
    drop(held);
    converted(&source, &dest, &verified()).unwrap();
    assert!(dest.exists() && !partial.exists());
}

#[test]
fn a_copy_may_have_a_name_as_long_as_names_may_be() {
    let dir = with_mbr(false);
    let dest = dir.path().join(format!("{}.vhdx", "ä".repeat(125)));
    assert_eq!(dest.file_name().unwrap().len(), 255);
    converted(&dir.path().join("source.raw"), &dest, &verified()).unwrap();
    assert!(dest.exists() && fs::read_dir(dir.path()).unwrap().count() == 2);
}
