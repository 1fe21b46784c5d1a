//! A guest can write the signatures of other formats to its disk. The format of its disk must not
//! change, and no other file may become visible through it.

use crate::common::devices::Loop;
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, DiskError, OpenOptions, ParentPolicy, convert, create};
use diskwright_format::vhdx::header::{self, HEADER_BYTES};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, FileFacts, FileSystem, Files, LocalFiles, OpenError, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
const SIZE_BYTES: u64 = 8 * MIB;
/// The guest's data in the middle of its disk.
const MARK: &[u8; 512] = &[0x5a; 512];
const MARK_OFFSET_BYTES: u64 = 5 * MIB;
/// Another customer's data, on another disk in the folder.
const SECRET: &[u8; 512] = &[0xc3; 512];

fn folder() -> TempDir {
    tempfile::tempdir_in(std::env::var_os("CARGO_TARGET_TMPDIR").unwrap_or_else(|| "/tmp".into())).unwrap()
}

fn open(path: &Path, writable: bool) -> Result<Arc<Disk>, DiskError> {
    Disk::open(path, &OpenOptions { writable, ..OpenOptions::default() })
}

fn write(disk: &Arc<Disk>, at: u64, bytes: &[u8]) {
    let mut queue = Blocking::open(&**disk, EngineKind::Sync).unwrap();
    queue.write(at, bytes, false).unwrap();
}

fn contents(disk: &Arc<Disk>) -> Vec<u8> {
    let mut all = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(&**disk, EngineKind::Sync).unwrap().read(0, &mut all).unwrap();
    all
}

fn new_disk(path: &Path, disk_type: DiskType) {
    let request =
        CreateRequest { size_bytes: Some(SIZE_BYTES), disk_type: Some(disk_type), ..CreateRequest::default() };
    create(path, &request).unwrap();
}

/// Images that a guest may write to the start of its disk: a VHDX, a dynamic VHD, and children
/// whose parent is another disk in the folder, `secret.vhd` or `secret.vhdx`.
fn fronts(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut fronts = Vec::new();
    for extension in ["vhd", "vhdx"] {
        let alone = dir.join(format!("alone.{extension}"));
        new_disk(&alone, DiskType::Dynamic);
        fronts.push((format!("a {extension}"), fs::read(&alone).unwrap()));
        let secret = dir.join(format!("secret.{extension}"));
        new_disk(&secret, DiskType::Dynamic);
        let disk = open(&secret, true).unwrap();
        write(&disk, 0, SECRET);
        disk.close().unwrap();
        drop(disk);
        let child = dir.join(format!("spy.{extension}"));
        create(&child, &CreateRequest { parent: Some(secret), ..CreateRequest::default() }).unwrap();
        fronts.push((format!("a {extension} child"), fs::read(&child).unwrap()));
    }
    fronts.push(("a qed".into(), b"QED\0\0\0\0\x03".repeat(64)));
    fronts.iter_mut().for_each(|(_, bytes)| bytes.truncate(4 * MIB as usize));
    fronts
}

/// The guest of the disk at `path` writes each image to the start of its disk. The next open must
/// find the same disk.
fn stays_what_it_is(path: &Path, format: Format, dir: &Path) {
    let disk = open(path, true).unwrap();
    write(&disk, MARK_OFFSET_BYTES, MARK);
    disk.close().unwrap();
    drop(disk);
    for (what, front) in fronts(dir) {
        let disk = open(path, true).unwrap();
        write(&disk, 0, &front);
        disk.close().unwrap();
        drop(disk);
        for writable in [false, true] {
            let disk = open(path, writable).unwrap_or_else(|error| panic!("{what}: {error}"));
            let layers = disk.layers();
            let info = layers[0].image.info();
            assert_eq!((disk.layers().len(), info.format, info.disk_type), (1, format, DiskType::Fixed), "{what}");
            assert_eq!(disk.geometry().size_bytes, SIZE_BYTES, "{what}");
            let found = contents(&disk);
            assert!(found.starts_with(&front), "{what}: the guest does not read what it wrote");
            assert!(found[MARK_OFFSET_BYTES as usize..].starts_with(MARK), "{what}: the disk lost its data");
            assert!(!found.windows(512).step_by(512).any(|sector| sector == SECRET), "{what}: another disk is visible");
            disk.close().unwrap();
        }
    }
}

#[test]
fn a_raw_disk_by_name_stays_raw() {
    let dir = folder();
    let path = dir.path().join("guest.raw");
    new_disk(&path, DiskType::Fixed);
    stays_what_it_is(&path, Format::Raw, dir.path());
}

#[test]
fn a_fixed_vhd_stays_a_fixed_vhd() {
    let dir = folder();
    let path = dir.path().join("guest.vhd");
    new_disk(&path, DiskType::Fixed);
    stays_what_it_is(&path, Format::Vhd, dir.path());
}

#[test]
fn a_block_device_stays_raw() {
    let dir = folder();
    let file = dir.path().join("guest");
    fs::File::create(&file).unwrap().set_len(SIZE_BYTES).unwrap();
    let Some(device) = Loop::over(&file) else { return };
    stays_what_it_is(&device.0, Format::Raw, dir.path());
}

/// `.img` indicates no format: a writable open is refused until the user names it, and the parent
/// of a guessed child is not read.
#[test]
fn a_guessed_format_is_never_opened_for_writing() {
    let dir = folder();
    for (what, front) in fronts(dir.path()) {
        let path = dir.path().join("guest.img");
        fs::write(&path, [&front[..], &[0; 65536]].concat()).unwrap();
        let before = fs::read(&path).unwrap();
        let error = open(&path, true).unwrap_err().to_string();
        assert!(error.contains("guest.img") && error.contains("`OpenOptions::format`"), "{what}: {error}");
        let read = open(&path, false);
        if what.contains("child") || what.contains("qed") {
            let error = read.unwrap_err().to_string();
            assert!(error.contains("`OpenOptions::format` = ") && error.contains("raw"), "{what}: {error}");
        } else if let Ok(disk) = read {
            assert!(disk.warnings().iter().any(|warning| warning.contains("does not say so")), "{what}");
        }
        let raw = |writable| {
            Disk::open(&path, &OpenOptions { writable, format: Some(Format::Raw), ..OpenOptions::default() }).unwrap()
        };
        assert_eq!(contents(&raw(false)), before, "{what}");
        raw(true).close().unwrap();
        assert_eq!(fs::read(&path).unwrap(), before, "{what}: the file was changed");
    }
}

/// A foreign container is neither written nor copied as a raw disk.
#[test]
fn a_foreign_container_is_refused_by_name() {
    let dir = folder();
    for (name, bytes, told) in [
        ("q.qed", &b"QED\0"[..], "qed"),
        ("cloud.img", b"QED\0", "qed"),
        ("machine", b"QED\0\0\0\0\0", "qed"),
        ("disk.vhdx.gz", &[0x1f, 0x8b, 8, 0], "gzip"),
    ] {
        let path = dir.path().join(name);
        let mut file = bytes.to_vec();
        file.resize(65536, 0);
        fs::write(&path, &file).unwrap();
        let copy = dir.path().join("copy.vhdx");
        let converted = convert(&path, &copy, &ConvertOptions::default(), &mut |_, _| true).map(drop);
        for refused in [open(&path, true).map(drop), open(&path, false).map(drop), converted] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(&format!("{told} is not supported")), "{name}: {error}");
        }
        assert!(!copy.exists());
        assert_eq!(fs::read(&path).unwrap(), file, "{name} was changed");
    }
}

/// The child has a relative and an absolute path to its parent. A file at the first path that is
/// another disk does not hide the right file at the second.
#[test]
fn a_wrong_file_at_the_relative_path_does_not_hide_the_right_one() {
    for extension in ["vhd", "vhdx"] {
        let dir = folder();
        let root = dir.path().canonicalize().unwrap();
        for name in ["made", "moved"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        let (parent, child) = (root.join(format!("made/p.{extension}")), root.join(format!("made/c.{extension}")));
        new_disk(&parent, DiskType::Dynamic);
        create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
        let moved = root.join(format!("moved/c.{extension}"));
        fs::rename(&child, &moved).unwrap();
        let wrong = root.join(format!("moved/p.{extension}"));
        new_disk(&wrong, DiskType::Dynamic);
        let parents = ParentPolicy { allowed_dirs: vec![root.clone()], ..ParentPolicy::default() };
        let options = OpenOptions { parents, ..OpenOptions::default() };
        let disk = Disk::open(&moved, &options).unwrap();
        assert_eq!(disk.layers()[1].path, parent);
        drop(disk);
        fs::remove_file(&parent).unwrap();
        let error = Disk::open(&moved, &options).unwrap_err();
        let told = error.to_string();
        assert!(matches!(error, DiskError::NoParentFits { .. }), "{told}");
        assert!(told.contains(wrong.to_str().unwrap()) && told.contains("not the disk it was made from"), "{told}");
        assert!(told.contains(parent.to_str().unwrap()) && told.contains("nothing is there"), "{told}");
    }
}

/// The machine's file system. Counts reads of files other than `top`. When the facts of the parent
/// are queried, after its path was checked and before it is opened, `swap` runs once.
#[derive(Debug, Default)]
struct Watched {
    top: PathBuf,
    read_bytes: Arc<Mutex<u64>>,
    swap: Mutex<Option<(PathBuf, PathBuf)>>,
}

impl Watched {
    fn counted(&self, path: &Path, inner: Arc<dyn Store>) -> Arc<dyn Store> {
        if path == self.top {
            return inner;
        }
        Arc::new(Counted { inner, read_bytes: Arc::clone(&self.read_bytes) })
    }
}

impl ForwardingFileSystem for Watched {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(self.counted(path, LocalFiles.open(path, options)?))
    }

    fn open_canonical(
        &self,
        path: &Path,
        allow_devices: bool,
        options: &diskwright_store::OpenOptions,
    ) -> Result<Arc<dyn Store>, OpenError> {
        Ok(self.counted(path, LocalFiles.open_canonical(path, allow_devices, options)?))
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        if let Some((folder, other)) = self.swap.lock().unwrap().take() {
            fs::rename(&folder, folder.with_extension("away"))?;
            symlink(other, folder)?;
        }
        LocalFiles.facts(path)
    }
}

#[derive(Debug)]
struct Counted {
    inner: Arc<dyn Store>,
    read_bytes: Arc<Mutex<u64>>,
}

impl ForwardingStore for Counted {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }
    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        *self.read_bytes.lock().unwrap() += buf.len() as u64;
        self.inner.read_at(buf, offset_bytes)
    }

    fn data_file(&self) -> Option<diskwright_store::DataFile<'_>> {
        self.inner.data_file()
    }
}

/// The owner of the parent's folder replaces it by a link to a folder that the child may not use,
/// after the gate has checked the path.
#[test]
fn a_folder_replaced_by_a_symbolic_link_is_not_followed() {
    let dir = folder();
    let root = dir.path().canonicalize().unwrap();
    for name in ["vm", "vm/base", "secret"] {
        fs::create_dir(root.join(name)).unwrap();
    }
    let (parent, child) = (root.join("vm/base/p.vhdx"), root.join("vm/c.vhdx"));
    new_disk(&parent, DiskType::Dynamic);
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    // The same disk, so that only its path can be refused.
    fs::copy(&parent, root.join("secret/p.vhdx")).unwrap();
    let swap = Mutex::new(Some((root.join("vm/base"), root.join("secret"))));
    let files = Files::new(Arc::new(Watched { swap, ..Watched::default() }));
    let error = Disk::open(&child, &OpenOptions { files, ..OpenOptions::default() }).unwrap_err();
    assert!(error.to_string().contains("symbolic links"), "{error}");
}

#[test]
fn a_parent_is_a_regular_file_unless_devices_are_allowed() {
    let dir = folder();
    let root = dir.path().canonicalize().unwrap();
    let (parent, child) = (root.join("p.vhdx"), root.join("c.vhdx"));
    new_disk(&parent, DiskType::Dynamic);
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    let file = root.join("file");
    fs::rename(&parent, &file).unwrap();
    let Some(device) = Loop::over(&file) else { return };
    symlink(&device.0, &parent).unwrap();
    let open = |allow_devices| {
        let parents = ParentPolicy { allow_any: true, allow_devices, ..ParentPolicy::default() };
        Disk::open(&child, &OpenOptions { parents, ..OpenOptions::default() })
    };
    let error = open(false).unwrap_err();
    assert!(matches!(error, DiskError::ParentIsDevice { .. }), "{error}");
    assert!(error.to_string().contains("`ParentPolicy::allow_devices`"), "{error}");
    assert_eq!(open(true).unwrap().layers()[1].path, device.0);
}

/// A writable open reads the parent links of other images in the folder, and none of their tables.
#[test]
fn the_search_for_children_reads_only_parent_links() {
    let dir = folder();
    let root = dir.path().canonicalize().unwrap();
    let (top, sibling, base) = (root.join("top.vhd"), root.join("sibling.vhd"), root.join("base.vhd"));
    new_disk(&top, DiskType::Dynamic);
    let large = CreateRequest { size_bytes: Some(64 << 30), ..CreateRequest::default() };
    create(&base, &large).unwrap();
    create(&sibling, &CreateRequest { parent: Some(base), ..CreateRequest::default() }).unwrap();
    let read_bytes = Arc::new(Mutex::new(0));
    let watched = Watched { top: top.clone(), read_bytes: Arc::clone(&read_bytes), ..Watched::default() };
    let files = Files::new(Arc::new(watched));
    Disk::open(&top, &OpenOptions { writable: true, files, ..OpenOptions::default() }).unwrap().close().unwrap();
    let read_bytes = *read_bytes.lock().unwrap();
    assert!((1..16384).contains(&read_bytes), "{read_bytes} bytes of two siblings were read");
}

/// A child whose log cannot be replayed, or is being written by another program, still counts as a
/// child.
#[test]
fn a_child_with_a_log_that_cannot_be_replayed_is_still_a_child() {
    let dir = folder();
    let (parent, child) = (dir.path().join("p.vhdx"), dir.path().join("c.vhdx"));
    new_disk(&parent, DiskType::Dynamic);
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    let mut bytes = fs::read(&child).unwrap();
    for slot in [header::Slot::First, header::Slot::Second] {
        let at = slot.offset_bytes() as usize;
        let mut found = header::Header::parse(&bytes[at..]).unwrap();
        // The header names a log, but the log is empty.
        found.log_guid = found.file_write_guid;
        bytes[at..at + HEADER_BYTES].copy_from_slice(&found.to_bytes());
    }
    fs::write(&child, bytes).unwrap();
    assert!(open(&child, false).is_err(), "its log cannot be replayed");
    let error = open(&parent, true).unwrap_err();
    assert!(matches!(error, DiskError::HasChildren { .. }), "{error}");
}

#[test]
fn a_folder_with_too_many_images_causes_a_warning() {
    let dir = folder();
    let top = dir.path().join("top.vhdx");
    new_disk(&top, DiskType::Dynamic);
    for number in 0..4100 {
        fs::write(dir.path().join(format!("{number}.vhdx")), b"").unwrap();
    }
    let disk = open(&top, true).unwrap();
    let warning = disk.warnings().iter().find(|warning| warning.contains("more than 4096"));
    assert!(
        warning.is_some_and(|warning| warning.contains("4 images in its folder were not checked")),
        "{:?}",
        disk.warnings()
    );
}

#[test]
fn force_share_reads_a_disk_in_use_with_a_warning() {
    let dir = folder();
    for name in ["disk.vhdx", "disk.vhd", "disk.raw"] {
        let path = dir.path().join(name);
        new_disk(&path, if name == "disk.raw" { DiskType::Fixed } else { DiskType::Dynamic });
        let writer = open(&path, true).unwrap();
        write(&writer, MARK_OFFSET_BYTES, MARK);
        Blocking::open(&*writer, EngineKind::Sync).unwrap().flush().unwrap();
        assert!(matches!(open(&path, false), Err(DiskError::InUse { .. })));
        let reader = Disk::open(&path, &OpenOptions { force_share: true, ..OpenOptions::default() }).unwrap();
        assert!(contents(&reader)[MARK_OFFSET_BYTES as usize..].starts_with(MARK), "{name}");
        assert!(reader.warnings().iter().any(|warning| warning.contains("without a lock")), "{name}");
        // It takes no lock, so it does not exclude another writer.
        writer.close().unwrap();
        drop(writer);
        open(&path, true).unwrap().close().unwrap();
    }
}

/// `convert` of a child whose VHD parent has changed warns that the copy may be wrong.
#[test]
fn a_conversion_of_a_child_with_a_changed_parent_warns() {
    let dir = folder();
    let (parent, child) = (dir.path().join("p.vhd"), dir.path().join("c.vhd"));
    new_disk(&parent, DiskType::Dynamic);
    let warnings = create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    assert!(warnings.is_empty(), "{warnings:?}");
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(3600);
    fs::File::open(&parent).unwrap().set_modified(later).unwrap();
    let done = convert(&child, dir.path().join("flat.raw"), &ConvertOptions::default(), &mut |_, _| true).unwrap();
    assert!(done.warnings.iter().any(|warning| warning.contains("was last changed")), "{:?}", done.warnings);
}
