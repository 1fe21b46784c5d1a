//! A child with false paths to its parent, in every field that holds a path.
//!
//! The files around it are in memory: the true parent beside the child and in a folder below; a
//! copy of the parent outside the child's folder, which has the right identity, so that only the
//! gate (`disk/src/opening/gate.rs`) prevents its opening; a folder whose name begins with the
//! child's folder; symbolic links that lead outside; a file that is not an image; and the child
//! itself.
//!
//! The promise: no path leads to the opening of a file outside the child's folder, and opening
//! never loops.

use crate::samples::samples;
use arbitrary::{Arbitrary, Unstructured};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe, vhd, vhdx};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, FileFacts, FileSystem, Files, MemoryStore, OpenError,
    OpenOptions as StoreOptions, Store,
};
use std::{
    collections::BTreeMap,
    io,
    path::{Component, Path, PathBuf},
    sync::{Arc, OnceLock},
};

/// The child's folder. A parent may be in it or below it.
const FOLDER: &str = "/vm/disks";
/// Symbolic links and their targets.
const LINKS: [(&str, &str); 3] =
    [("/vm/disks/link", "/vm/parent"), ("/vm/disks/out", "/vm"), ("/vm/disks/near", "/vm/disks/deep/parent")];
/// Maximum number of words in a path.
const WORDS_MAX: usize = 12;

/// A part of a path.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Word {
    Up,
    Here,
    Slash,
    Backslash,
    Parent,
    Child,
    Deep,
    Link,
    Out,
    Near,
    Folder,
    FolderAndMore,
    Outside,
    Shadow,
    Drive,
    LongPrefix,
    Volume,
    Any(char),
}

impl Word {
    fn text(self) -> String {
        match self {
            Self::Up => "..",
            Self::Here => ".",
            Self::Slash => "/",
            Self::Backslash => "\\",
            Self::Parent => "parent",
            Self::Child => "child",
            Self::Deep => "deep",
            Self::Link => "link",
            Self::Out => "out",
            Self::Near => "near",
            Self::Folder => "/vm/disks/",
            Self::FolderAndMore => "/vm/disks-of-others/",
            Self::Outside => "/vm/",
            Self::Shadow => "/etc/shadow",
            Self::Drive => "C:",
            Self::LongPrefix => "\\\\?\\",
            Self::Volume => "Volume{26a21bda-a627-11d7-9931-806e6f6e6963}",
            Self::Any(other) => return other.to_string(),
        }
        .to_owned()
    }
}

/// The input: the paths that the child names.
#[derive(Debug, Arbitrary)]
struct ChildPaths {
    vhd: bool,
    writable: bool,
    relative: Option<Vec<Word>>,
    volume: Option<Vec<Word>>,
    absolute: Option<Vec<Word>>,
    name: Option<Vec<Word>>,
}

/// Read-only files in memory. Opening one outside the folder breaks the promise.
#[derive(Debug)]
struct FilesAround(BTreeMap<PathBuf, Arc<Vec<u8>>>);

impl FilesAround {
    fn real(path: &Path) -> PathBuf {
        let mut real = PathBuf::from("/");
        for part in path.components() {
            match part {
                Component::ParentDir => drop(real.pop()),
                Component::Normal(name) => real.push(name),
                Component::RootDir | Component::CurDir | Component::Prefix(_) => {}
            }
            if let Some((_, to)) = LINKS.iter().find(|(from, _)| real == Path::new(from)) {
                real = PathBuf::from(to);
            }
        }
        real
    }
}

fn read_only<T>() -> io::Result<T> {
    Err(io::ErrorKind::ReadOnlyFilesystem.into())
}

impl FileSystem for FilesAround {
    fn open(&self, path: &Path, _options: &StoreOptions) -> Result<Arc<dyn Store>, OpenError> {
        let real = Self::real(path);
        assert!(
            real.starts_with(FOLDER),
            "a child led to the opening of {}, which is {}",
            path.display(),
            real.display()
        );
        match self.0.get(&real) {
            Some(bytes) => Ok(Arc::new(MemoryStore::with_bytes(path, bytes.to_vec()))),
            None => Err(OpenError::Io { doing: "open", path: path.to_owned(), source: io::ErrorKind::NotFound.into() }),
        }
    }

    fn open_canonical(
        &self,
        path: &Path,
        _allow_devices: bool,
        options: &StoreOptions,
    ) -> Result<Arc<dyn Store>, OpenError> {
        assert_eq!(path, Self::real(path), "a path from a file was opened before it was resolved");
        self.open(path, options)
    }

    fn rename(&self, _from: &Path, _to: &Path, _replace: bool) -> io::Result<()> {
        read_only()
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        read_only()
    }

    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        let real = Self::real(path);
        let is_there = self.0.keys().any(|known| known.starts_with(&real));
        if is_there { Ok(real) } else { Err(io::ErrorKind::NotFound.into()) }
    }

    fn facts(&self, path: &Path) -> io::Result<FileFacts> {
        let real = Self::real(path);
        let number = self.0.keys().position(|known| *known == real).ok_or(io::ErrorKind::NotFound)?;
        Ok(FileFacts { identity: (1, number as u64), modified: None })
    }

    fn list(&self, directory: &Path) -> io::Result<Vec<PathBuf>> {
        let directory = Self::real(directory);
        Ok(self.0.keys().filter(|known| known.parent() == Some(&directory)).cloned().collect())
    }
}

/// The parent's file, the child's link to it, and the options that create the child.
type Parent = (Arc<Vec<u8>>, ParentLink, CreateOptions);

/// The true parent and its identity, for VHD and VHDX.
fn parents() -> &'static [Parent; 2] {
    static PARENTS: OnceLock<[Parent; 2]> = OnceLock::new();
    PARENTS.get_or_init(|| {
        [Format::Vhd, Format::Vhdx].map(|format| {
            let sample = samples().iter().find(|sample| sample.format == format && sample.parent.is_some());
            let bytes = sample.and_then(|sample| sample.parent.clone()).expect("a sample with a parent");
            let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("parent", bytes.clone()));
            let image = probe::open(store, Some(format), false, 512).expect("a sound sample");
            let info = image.info();
            let linkage = Some(info.linkage_id.expect("an identity"));
            let options = CreateOptions {
                disk_type: DiskType::Differencing,
                size_bytes: info.size_bytes,
                block_bytes: Some(info.block_bytes as u32),
                logical_sector_bytes: info.logical_sector_bytes,
                physical_sector_bytes: info.physical_sector_bytes,
                parent: None,
                preallocate: false,
                disk_id: None,
                own: Default::default(),
            };
            (Arc::new(bytes), ParentLink { linkage, ..ParentLink::default() }, options)
        })
    })
}

/// The fuzz target: see the module.
pub fn locators(data: &[u8]) {
    let Ok(paths) = ChildPaths::arbitrary(&mut Unstructured::new(data)) else { return };
    let (parent, truth, options) = &parents()[usize::from(!paths.vhd)];
    let path_of = |words: Option<Vec<Word>>| {
        words.map(|words| words.into_iter().take(WORDS_MAX).map(Word::text).collect::<String>())
    };
    let link = ParentLink {
        relative_path: path_of(paths.relative),
        volume_path: path_of(paths.volume),
        absolute_path: path_of(paths.absolute),
        name: path_of(paths.name),
        ..truth.clone()
    };
    let child: Arc<dyn Store> = Arc::new(MemoryStore::new("child"));
    let options = CreateOptions { parent: Some(link), ..options.clone() };
    let made =
        if paths.vhd { vhd::create(Arc::clone(&child), &options) } else { vhdx::create(Arc::clone(&child), &options) };
    // A path that the format cannot store is refused here.
    if made.is_err() {
        return;
    }
    let mut bytes = vec![0; child.len_bytes().expect("a length") as usize];
    child.read_at(&mut bytes, 0).expect("memory can be read");
    let mut files = BTreeMap::from([
        (PathBuf::from("/vm/disks/child"), Arc::new(bytes)),
        (PathBuf::from("/etc/shadow"), Arc::new(b"root:*:20000::::::\n".to_vec())),
    ]);
    for place in ["/vm/disks/parent", "/vm/disks/deep/parent", "/vm/parent", "/vm/disks-of-others/parent"] {
        files.insert(PathBuf::from(place), Arc::clone(parent));
    }
    let files = Files::new(Arc::new(FilesAround(files)));
    let open = OpenOptions { files, writable: paths.writable, engine: EngineKind::Sync, ..OpenOptions::default() };
    let Ok(disk) = Disk::open("/vm/disks/child", &open) else { return };
    let mut first = vec![0; disk.geometry().logical_sector_bytes as usize];
    let mut queue = Blocking::open(&*disk, EngineKind::Sync).expect("a queue");
    queue.read(0, &mut first).expect("a parent that was opened can be read");
    assert!(first.iter().any(|&byte| byte != 0), "a child without data shows its parent");
}
