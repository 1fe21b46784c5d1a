//! Disks that only other programs make: qemu-img makes their files, and their windows have the data
//! of a parent from the beginning ([`DiskCase::untouched`]).
//!
//! ```text
//!   raw file with stamps ─▶ qemu-img convert ─▶ qcow2 ─▶ qemu-img snapshot ─▶ files of the world
//! ```
//!
//! After every cut the internal snapshot must show these data still. The files of a kind are made
//! once in a process.

use super::{Backing, ByQemu, DiskCase, session::Session};
use crate::{
    contents::SECTOR_BYTES,
    ledger::{PARENT, stamp},
    stage::Outcome,
    world::World,
};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_store::FileSystem;
use std::{
    collections::BTreeMap,
    fs::{self, File},
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
    sync::{Arc, Mutex, PoisonError},
};

/// Paths in the world, and what the files have.
type Files = Arc<Vec<(PathBuf, Vec<u8>)>>;

static MADE: Mutex<BTreeMap<&'static str, Files>> = Mutex::new(BTreeMap::new());

const SNAPSHOT: &str = "kept";

fn qemu_img(folder: &Path, arguments: &[&str]) -> Outcome {
    let output = Command::new("qemu-img").current_dir(folder).args(arguments).output();
    let output = output.map_err(|error| format!("qemu-img: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("qemu-img {arguments:?}: {}", String::from_utf8_lossy(&output.stderr))),
    }
}

/// Whether there is a qemu-img.
pub(super) fn is_installed() -> bool {
    Command::new("qemu-img").arg("--version").output().is_ok()
}

impl DiskCase {
    fn files_by_qemu(&self, what: ByQemu) -> Outcome<Files> {
        let mut made = MADE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(files) = made.get(self.name) {
            return Ok(Arc::clone(files));
        }
        let text = |error: std::io::Error| error.to_string();
        let folder = tempfile::tempdir().map_err(text)?;
        let raw = File::create(folder.path().join("disk.raw")).map_err(text)?;
        raw.set_len(self.size_bytes).map_err(text)?;
        let mut bytes = [0; 8 * SECTOR_BYTES as usize];
        for window in &self.windows {
            let all = window.first..window.first + window.count;
            for first in all.step_by(8).filter(|&first| self.untouched(first) == PARENT) {
                stamp(&mut bytes, first, PARENT);
                raw.write_all_at(&bytes, first * SECTOR_BYTES).map_err(text)?;
            }
        }
        let more = match what {
            ByQemu::DataFile => ",data_file=disk.data",
            ByQemu::Subclusters => ",extended_l2=on",
            ByQemu::Snapshot => "",
        };
        let options = format!("cluster_size={}{more}", self.block_bytes.unwrap_or(64 << 10));
        qemu_img(folder.path(), &["convert", "-f", "raw", "-O", "qcow2", "-o", &options, "disk.raw", "disk.qcow2"])?;
        let read = |name: &str| fs::read(folder.path().join(name)).map_err(text);
        let files = Arc::new(match what {
            ByQemu::Snapshot => {
                qemu_img(folder.path(), &["snapshot", "-c", SNAPSHOT, "disk.qcow2"])?;
                vec![(self.path(), read("disk.qcow2")?)]
            }
            ByQemu::Subclusters => vec![(self.path(), read("disk.qcow2")?)],
            ByQemu::DataFile => {
                vec![(self.path(), read("disk.qcow2")?), ("/d/disk.data".into(), read("disk.data")?)]
            }
        });
        made.insert(self.name, Arc::clone(&files));
        Ok(files)
    }

    pub(super) fn make_by_qemu(&self, world: &World, what: ByQemu) -> Outcome {
        for (path, bytes) in self.files_by_qemu(what)?.iter() {
            let options = diskwright_store::OpenOptions {
                writable: true,
                create_new: true,
                ..diskwright_store::OpenOptions::default()
            };
            let store = world.open(path, &options).map_err(|error| error.to_string())?;
            let written = store.write_at(bytes, 0).and_then(|()| store.sync_data());
            written.map_err(|error| error.to_string())?;
        }
        Ok(())
    }

    /// Judges what the internal snapshot shows, if the kind has one.
    pub(super) fn judge_inner_snapshot(&self, world: &World) -> Outcome {
        if self.backing != Backing::ByQemu(ByQemu::Snapshot) {
            return Ok(());
        }
        let options = OpenOptions { snapshot: Some(SNAPSHOT.into()), ..self.open_options(world, false) };
        let opened = Disk::open(self.path(), &options).map_err(|error| format!("the snapshot: {error}"))?;
        let shown = Session::of(self, opened)?.read_windows()?;
        self.fresh_ledger().judge(&shown, false).map(drop).map_err(|error| format!("the snapshot: {error}"))
    }
}
