//! The file system of a guest: a cpio archive (format "newc") with the program, the libraries that
//! it needs, and modules.

use super::kernel::{CACHE_MODULES, Kernel, NETWORK_MODULES};
use crate::{LabError, Result, peer};
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Folder of the modules. Their names begin with their numbers in the order of loading.
pub(super) const MODULES_DIR: &str = "modules";
/// Folder of programs of this machine.
pub(super) const PROGRAMS_DIR: &str = "programs";
/// Programs for a network. One that is not installed is left out.
const NETWORK_PROGRAMS: [&str; 3] = [IP, TC, ISCSISTART];
/// Configures addresses.
pub(super) const IP: &str = "ip";
/// Configures queueing disciplines.
pub(super) const TC: &str = "tc";
/// Opens a session of the kernel's iSCSI initiator.
pub(super) const ISCSISTART: &str = "iscsistart";
/// Makes devices of the kernel's device mapper.
pub(super) const DMSETUP: &str = "dmsetup";

/// What a guest needs beside its disks.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needs {
    /// Its network card and the clients of network protocols.
    pub(super) network: bool,
    /// dm-cache.
    pub(super) cache: bool,
}

impl Needs {
    fn modules(self) -> Vec<&'static str> {
        let network = NETWORK_MODULES.into_iter().filter(|_| self.network);
        network.chain(CACHE_MODULES.into_iter().filter(|_| self.cache)).collect()
    }

    fn programs(self) -> impl Iterator<Item = &'static str> {
        let network = NETWORK_PROGRAMS.into_iter().filter(move |_| self.network);
        network.chain(Some(DMSETUP).filter(|_| self.cache))
    }
}

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CHARACTER_DEVICE: u32 = 0o020_600;

/// Makes the archive. `program` is its `/init`. `dir` is a scratch folder.
pub(super) fn build(kernel: &Kernel, program: &Path, dir: &Path, needs: Needs) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    for folder in ["dev", "proc", "sys", "tmp", "run", "share", MODULES_DIR, PROGRAMS_DIR] {
        archive.add(folder, FOLDER, (0, 0), &[]);
    }
    // Without them the program would start without standard output.
    archive.add("dev/console", CHARACTER_DEVICE, (5, 1), &[]);
    archive.add("dev/null", CHARACTER_DEVICE, (1, 3), &[]);
    archive.add("init", PROGRAM, (0, 0), &stripped(program, dir)?);
    let mut needed = libraries(program)?;
    for (name, path) in needs.programs().filter_map(|name| Some((name, peer::find(name)?))) {
        let bytes = fs::read(&path).map_err(LabError::file("read", &path))?;
        archive.add(&format!("{PROGRAMS_DIR}/{name}"), PROGRAM, (0, 0), &bytes);
        needed.extend(libraries(&path)?);
    }
    for library in needed {
        let bytes = fs::read(&library).map_err(LabError::file("read", &library))?;
        archive.add_with_folders(&library, &bytes);
    }
    for (module, number) in kernel.modules(&needs.modules())?.into_iter().zip(0..) {
        archive.add(&format!("{MODULES_DIR}/{number:02}-{}", module.name), FILE, (0, 0), &module.bytes);
    }
    Ok(archive.finish())
}

/// The program without symbols, if `strip` is there: the guest has little memory.
fn stripped(program: &Path, dir: &Path) -> Result<Vec<u8>> {
    let read = |path: &Path| fs::read(path).map_err(LabError::file("read", path));
    let Some(strip) = peer::find("strip") else { return read(program) };
    // A file: strip would replace /dev/stdout.
    let small = dir.join("init");
    let output = Command::new(strip).arg("-o").arg(&small).arg(program).output();
    if output.is_ok_and(|output| output.status.success()) { read(&small) } else { read(program) }
}

/// The shared libraries of a program, and its loader. None for a static program.
fn libraries(program: &Path) -> Result<BTreeSet<PathBuf>> {
    let output = Command::new("ldd").arg(program).output().map_err(LabError::file("start", "ldd"))?;
    let text = String::from_utf8_lossy(&output.stdout);
    Ok(text.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from).collect())
}

/// An archive that is being written.
#[derive(Debug, Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
    folders: Vec<PathBuf>,
}

impl Archive {
    /// Adds an entry. `device` is the number of a device file.
    fn add(&mut self, name: &str, mode: u32, device: (u32, u32), contents: &[u8]) {
        self.entries += 1;
        let len = contents.len() as u32;
        let name_len = name.len() as u32 + 1;
        // inode, mode, user, group, links, time, length, device, device number, name, checksum
        let fields = [self.entries, mode, 0, 0, 1, 0, len, 0, 0, device.0, device.1, name_len, 0];
        self.bytes.extend(b"070701");
        fields.iter().for_each(|field| self.bytes.extend(format!("{field:08x}").bytes()));
        self.bytes.extend(name.bytes().chain([0]));
        self.pad();
        self.bytes.extend(contents);
        self.pad();
    }

    /// Adds a program or library at the same absolute path, and its folders.
    fn add_with_folders(&mut self, path: &Path, contents: &[u8]) {
        let path = path.strip_prefix("/").unwrap_or(path).to_owned();
        let mut above: Vec<PathBuf> = path.ancestors().skip(1).map(Path::to_owned).collect();
        above.reverse();
        for folder in above.into_iter().filter(|folder| !folder.as_os_str().is_empty()) {
            if !self.folders.contains(&folder) {
                self.add(&folder.to_string_lossy(), FOLDER, (0, 0), &[]);
                self.folders.push(folder);
            }
        }
        self.add(&path.to_string_lossy(), PROGRAM, (0, 0), contents);
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Vec<u8> {
        self.add("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_program_reads_the_archive() {
        let Some(busybox) = peer::find("busybox") else {
            println!("skipped: busybox is not installed");
            return;
        };
        let dir = tempfile::tempdir().unwrap();
        let mut archive = Archive::default();
        archive.add("init", PROGRAM, (0, 0), b"hello");
        archive.add_with_folders(Path::new("/lib/x/one.so"), b"1");
        archive.add_with_folders(Path::new("/lib/x/two.so"), &[2; 4097]);
        let path = dir.path().join("archive");
        fs::write(&path, archive.finish()).unwrap();
        let out = dir.path().join("out");
        fs::create_dir(&out).unwrap();
        let input = fs::File::open(&path).unwrap();
        let status = Command::new(busybox).args(["cpio", "-i"]).current_dir(&out).stdin(input).status().unwrap();
        assert!(status.success());
        assert_eq!(fs::read(out.join("init")).unwrap(), b"hello");
        assert_eq!(fs::read(out.join("lib/x/one.so")).unwrap(), b"1");
        assert_eq!(fs::read(out.join("lib/x/two.so")).unwrap(), [2; 4097]);
    }
}
