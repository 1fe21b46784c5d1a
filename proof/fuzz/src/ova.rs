//! Damaged OVAs, and texts of OVF alone.
//!
//! ```text
//!   even first byte: the rest as an envelope, a manifest, a tar header or a pax header
//!   odd: a small OVA with changed bytes; checksums of its headers repaired if the input says so
//!        ▼
//!   Ova::open, verify, find, open_disk, read
//! ```
//!
//! The promises: nothing panics, memory is bounded, every member lies within the archive and has a
//! plain name, and only members are opened.

use arbitrary::{Arbitrary, Unstructured};
use diskwright_disk::{OpenOptions, Ova};
use diskwright_format::{
    ovf::{Appliance, Envelope, Manifest, is_plain_name},
    tar::{Pax, TarHeader},
};
use diskwright_store::{
    BlockDevice, Blocking, EngineKind, FileFacts, FileSystem, Files, MemoryStore, OpenError,
    OpenOptions as StoreOptions, Store,
};
use std::{
    io,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
};

const PATH: &str = "/vm/x.ova";
/// Most edits of one input. Further ones are ignored.
const MOST_EDITS: usize = 12;
const DISK_BYTES: usize = 64 << 10;

/// The decoded input of a fuzzer.
#[derive(Debug, Arbitrary)]
struct Damage {
    edits: Vec<Edit>,
    /// Whether the checksums of the headers are repaired.
    seal: bool,
    /// How much of the archive is there, in 65,536ths.
    kept: Option<u16>,
}

/// Bytes that replace others.
#[derive(Debug, Arbitrary)]
struct Edit {
    /// Offset, modulo the length of headers and texts.
    offset: u16,
    bytes: [u8; 4],
    /// How many of them are used, modulo 5.
    len: u8,
}

/// A file system with one file.
#[derive(Debug)]
struct One(Arc<MemoryStore>);

impl FileSystem for One {
    fn open(&self, path: &Path, _options: &StoreOptions) -> Result<Arc<dyn Store>, OpenError> {
        assert_eq!(path, Path::new(PATH), "a file outside the OVA was opened");
        Ok(Arc::clone(&self.0) as Arc<dyn Store>)
    }
    fn rename(&self, _from: &Path, _to: &Path, _replace: bool) -> io::Result<()> {
        panic!("nothing is renamed")
    }
    fn remove(&self, _path: &Path) -> io::Result<()> {
        panic!("nothing is removed")
    }
    fn sync_directory_of(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }
    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        Ok(path.to_owned())
    }
    fn facts(&self, _path: &Path) -> io::Result<FileFacts> {
        Ok(FileFacts { identity: (1, 1), modified: None })
    }
    fn list(&self, _directory: &Path) -> io::Result<Vec<PathBuf>> {
        Ok(Vec::new())
    }
}

/// A small OVA: an envelope, a manifest and a raw disk; and the offsets of its headers.
fn sample() -> &'static (Vec<u8>, Vec<usize>) {
    static SAMPLE: OnceLock<(Vec<u8>, Vec<usize>)> = OnceLock::new();
    SAMPLE.get_or_init(|| {
        let envelope = Appliance {
            name: "vm".into(),
            disk_file: "d.raw".into(),
            disk_file_bytes: DISK_BYTES as u64,
            capacity_bytes: DISK_BYTES as u64,
            populated_bytes: 0,
            is_uefi: false,
        };
        let manifest = format!("SHA256(vm.ovf)= {0}\nSHA1(d.raw)= {1}\n", "00".repeat(32), "11".repeat(20));
        let disk = vec![7; DISK_BYTES];
        let (mut bytes, mut headers) = (Vec::new(), Vec::new());
        for (name, contents) in
            [("vm.ovf", envelope.to_text().as_bytes()), ("vm.mf", manifest.as_bytes()), ("d.raw", &disk)]
        {
            headers.push(bytes.len());
            bytes.extend(TarHeader::of_file(name, contents.len() as u64, 0).expect("a short name"));
            bytes.extend(contents);
            bytes.resize(bytes.len().next_multiple_of(512), 0);
        }
        bytes.resize(bytes.len() + 1024, 0);
        (bytes, headers)
    })
}

/// The target; see the module documentation.
pub fn ova(data: &[u8]) {
    let Some((which, rest)) = data.split_first() else { return };
    if which % 2 == 0 {
        texts(rest);
        return;
    }
    let Ok(damage) = Damage::arbitrary(&mut Unstructured::new(rest)) else { return };
    let (bytes, headers) = sample();
    let mut bytes = bytes.clone();
    let changeable = headers.last().map_or(0, |last| last + 512);
    for edit in damage.edits.iter().take(MOST_EDITS) {
        let at = usize::from(edit.offset) % changeable;
        let len = usize::from(edit.len % 5).min(changeable - at);
        bytes[at..at + len].copy_from_slice(&edit.bytes[..len]);
    }
    if damage.seal {
        for &at in headers {
            bytes[at + 148..at + 156].fill(b' ');
            let sum: u32 = bytes[at..at + 512].iter().map(|byte| u32::from(*byte)).sum();
            bytes[at + 148..at + 156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        }
    }
    if let Some(kept) = damage.kept {
        bytes.truncate((bytes.len() * usize::from(kept)) >> 16);
    }
    open(bytes);
}

fn texts(bytes: &[u8]) {
    if let Ok(envelope) = Envelope::parse(bytes) {
        envelope.disks.iter().for_each(|disk| drop(envelope.file_of(disk).cloned()));
    }
    if let Ok(manifest) = Manifest::parse(bytes) {
        assert_eq!(Manifest::parse(manifest.to_text().as_bytes()).as_ref(), Ok(&manifest));
    }
    let _ = TarHeader::parse(bytes);
    let _ = Pax::parse(bytes);
    open(bytes.to_vec());
}

fn open(bytes: Vec<u8>) {
    let len_bytes = bytes.len() as u64;
    let files = Files::new(Arc::new(One(Arc::new(MemoryStore::with_bytes(PATH, bytes)))));
    let Ok(ova) = Ova::open(Path::new(PATH), &files) else { return };
    for member in ova.members() {
        let end_bytes = member.offset_bytes.checked_add(member.size_bytes);
        assert!(end_bytes.is_some_and(|end| end <= len_bytes), "{member:?} ends beyond the archive");
        assert!(is_plain_name(&member.name), "{member:?}");
    }
    if let Ok(digests) = ova.verify(&mut |_, _| true) {
        assert!(!digests.all_same() || !digests.members.iter().any(|member| member.name == "d.raw"));
    }
    let options = OpenOptions { ova_disk: Some("1".into()), engine: EngineKind::Sync, ..OpenOptions::default() };
    let _ = ova.find(None);
    if let Ok(disk) = ova.open_disk(&options) {
        let mut sector = [0; 512];
        let size_bytes = disk.geometry().size_bytes;
        let mut io = Blocking::open(&*disk, EngineKind::Sync).expect("a queue in memory");
        if size_bytes >= 512 {
            io.read(0, &mut sector).expect("the first sector is there");
            io.read((size_bytes / 512 - 1) * 512, &mut sector).expect("the last sector is there");
        }
    }
}
