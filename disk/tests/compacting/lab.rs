//! What the tests share: a folder, tools, and images.

use diskwright_disk::{CompactOptions, Compacted, CreateRequest, Disk, OpenOptions, check_image, compact, create};
use diskwright_image::{BlockState, DiskType, Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::Arc,
};
use tempfile::TempDir;

pub const MIB: u64 = 1 << 20;

/// A folder that goes at the end.
pub struct Lab(TempDir);

impl Lab {
    pub fn new() -> Self {
        // Memory, because the tools sync what they write.
        let memory = Path::new("/dev/shm");
        Self(if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs a tool in the folder. Its words are separated by spaces.
    #[track_caller]
    pub fn run(&self, line: &str) -> String {
        let (success, text) = self.try_run(line);
        assert!(success, "{line}: {text}");
        text
    }

    /// As [`Lab::run`]; whether it succeeded, and what it printed.
    pub fn try_run(&self, line: &str) -> (bool, String) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let output = Command::new(words[0])
            .args(&words[1..])
            .current_dir(self.0.path())
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("MTOOLS_SKIP_CHECK", "1")
            .stdin(Stdio::null())
            .output()
            .unwrap_or_else(|error| panic!("{line}: {error}"));
        let text = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
        (output.status.success(), text)
    }
}

/// Whether the tools are installed; says which is not.
pub fn have(test: &str, tools: &[&str]) -> bool {
    let places = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
    let missing = tools.iter().find(|tool| !places.iter().any(|place| Path::new(place).join(tool).exists()));
    if let Some(tool) = missing {
        println!("skipped: {test}: {tool} is not installed");
    }
    missing.is_none()
}

/// A kind of image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Dynamic(Format),
    /// A child of a disk full of garbage.
    OverGarbage(Format),
    /// A child of an empty disk.
    OverNothing(Format),
}

impl Kind {
    pub fn format(self) -> Format {
        match self {
            Self::Dynamic(format) | Self::OverGarbage(format) | Self::OverNothing(format) => format,
        }
    }

    /// Makes an image of this kind, with `bytes` in all of it; zeros are written too.
    pub fn make(self, lab: &Lab, bytes: &[u8]) -> PathBuf {
        let name = |what: &str| lab.path(&format!("{what}.{}", self.format()));
        let (path, parent_path) = (name("disk"), name("parent"));
        [&path, &parent_path].into_iter().for_each(|path| drop(std::fs::remove_file(path)));
        let size_bytes = Some(bytes.len() as u64);
        let mut parent = None;
        if !matches!(self, Self::Dynamic(_)) {
            let dynamic = Some(DiskType::Dynamic);
            create(&parent_path, &CreateRequest { size_bytes, disk_type: dynamic, ..CreateRequest::default() })
                .unwrap();
            if matches!(self, Self::OverGarbage(_)) {
                let garbage: Vec<u8> = (0..bytes.len()).map(|at| (at / 512) as u8 | 1).collect();
                write_all(&parent_path, &garbage);
            }
            parent = Some(parent_path);
        }
        let disk_type = Some(if parent.is_some() { DiskType::Differencing } else { DiskType::Dynamic });
        create(&path, &CreateRequest { size_bytes, disk_type, parent, ..CreateRequest::default() }).unwrap();
        write_all(&path, bytes);
        path
    }
}

/// Options that open a disk for writing.
pub fn writable() -> OpenOptions {
    OpenOptions { writable: true, ..OpenOptions::default() }
}

pub fn write_all(path: &Path, bytes: &[u8]) {
    let disk = Disk::open(path, &writable()).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Auto).unwrap();
    io.write(0, bytes, false).unwrap();
    drop(io);
    disk.close().unwrap();
}

pub fn read_all(path: &Path) -> Vec<u8> {
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    Blocking::open(&*disk, EngineKind::Auto).unwrap().read(0, &mut bytes).unwrap();
    bytes
}

/// Compacts, and checks what must hold for every image afterwards.
#[track_caller]
pub fn compacted(path: &Path) -> Compacted {
    let done = compact(path, &CompactOptions::default(), &mut |_, _| true).unwrap();
    let (_, report) = check_image(path, &OpenOptions::default()).unwrap();
    assert!(report.worst() < Some(Severity::Leak), "{}: {:?}", path.display(), report.findings);
    let disk = Disk::open(path, &OpenOptions::default()).unwrap();
    let blocks = blocks_with_space(&disk);
    let image = Arc::clone(&disk.layers()[0].image);
    let file_bytes = std::fs::metadata(path).unwrap().len();
    assert_eq!(done.new_file_bytes, file_bytes);
    assert_eq!(image.packed_len_bytes(blocks).unwrap(), Some(file_bytes), "{blocks} blocks");
    done
}

pub fn blocks_with_space(disk: &Disk) -> u64 {
    let layers = disk.layers();
    let image = &layers[0].image;
    let mut states = vec![BlockState::Absent; image.size_bytes().div_ceil(image.info().block_bytes) as usize];
    image.block_states(0, &mut states).unwrap();
    let is_placed = |state: &&BlockState| matches!(state, BlockState::Data { .. } | BlockState::Partial { .. });
    states.iter().filter(is_placed).count() as u64
}
