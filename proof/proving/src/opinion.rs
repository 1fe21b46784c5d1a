//! What other programs read from a state that a power cut has left.
//!
//! qemu-img replays a dirty VHDX log itself (`check -r all`) and then reads the disk. libvhdi does
//! not replay logs, so it reads the disk after we have opened and closed it once. If a program is
//! not installed, its opinion is `Absent`, and the caller prints that it is skipped.

use crate::{contents::SECTOR_BYTES, history::Snapshot, ledger::Window};
use diskwright_image::Format;
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    process::Command,
};

/// The result of another program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Opinion {
    /// It reads the same contents.
    Agrees,
    /// It reads other contents, or fails. The text says what differs.
    Disagrees(String),
    /// The program with this name is not installed.
    Absent(&'static str),
}

/// A script that reads a whole chain with libvhdi. Arguments: the output file, then the images from
/// the base to the top.
const LIBVHDI: &str = include_str!("chain_by_libvhdi.py");

enum Ran {
    Well,
    Badly(String),
    NotThere,
}

/// Runs a program in `folder`: QEMU looks for the data file of a qcow2 in its working directory.
fn run(folder: &Path, program: &str, args: &[&str]) -> Ran {
    match Command::new(program).current_dir(folder).args(args).output() {
        Ok(output) if output.status.success() => Ran::Well,
        Ok(output) if output.status.code() == Some(77) => Ran::NotThere,
        Ok(output) => Ran::Badly(format!(
            "{program} {}: {}{}",
            args.first().unwrap_or(&""),
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        )),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ran::NotThere,
        Err(error) => Ran::Badly(format!("{program}: {error}")),
    }
}

fn read_windows(raw: &Path, windows: &[Window]) -> io::Result<Vec<Vec<u8>>> {
    let file = File::open(raw)?;
    let len = file.metadata()?.len();
    windows
        .iter()
        .map(|window| {
            let start = window.first * SECTOR_BYTES;
            let mut bytes = vec![0; (window.count * SECTOR_BYTES) as usize];
            let held = len.saturating_sub(start).min(bytes.len() as u64) as usize;
            file.read_exact_at(&mut bytes[..held], start)?;
            Ok(bytes)
        })
        .collect()
}

/// Saves the files, runs `programs` on them to make a raw file, and judges the windows of that
/// file.
fn of(
    left: &Snapshot,
    who: &'static str,
    windows: &[Window],
    judge: impl Fn(&[Vec<u8>], &str) -> Opinion,
    programs: impl FnOnce(&Path, &str) -> Ran,
) -> Opinion {
    let made = (|| {
        let folder = tempfile::tempdir()?;
        left.save(folder.path())?;
        Ok::<_, io::Error>(folder)
    })();
    let folder = match made {
        Ok(folder) => folder,
        Err(error) => return Opinion::Disagrees(format!("cannot save the state: {error}")),
    };
    let raw = folder.path().join("opinion.raw");
    match programs(folder.path(), &raw.to_string_lossy()) {
        Ran::NotThere => return Opinion::Absent(who),
        Ran::Badly(error) => return Opinion::Disagrees(error),
        Ran::Well => {}
    }
    match read_windows(&raw, windows) {
        Ok(shown) => judge(&shown, who),
        Err(error) => Opinion::Disagrees(format!("cannot read the output of {who}: {error}")),
    }
}

/// What qemu-img reads, after its own repair.
pub fn of_qemu(
    left: &Snapshot,
    path: &Path,
    format: Format,
    windows: &[Window],
    judge: impl Fn(&[Vec<u8>], &str) -> Opinion,
) -> Opinion {
    let name = if format == Format::Vhd { "vpc" } else { format.driver().name };
    of(left, "qemu-img", windows, judge, |folder, raw| {
        let file = folder.join(path.file_name().unwrap_or_default());
        let file = file.to_string_lossy();
        if format == Format::Vhdx {
            match run(folder, "qemu-img", &["check", "-q", "-r", "all", "-f", name, &file]) {
                Ran::Well => {}
                other => return other,
            }
        }
        run(folder, "qemu-img", &["convert", "-f", name, "-O", "raw", &file, raw])
    })
}

/// What libvhdi reads from a chain, given from the base to the top.
pub fn of_libvhdi(
    left: &Snapshot,
    chain: &[PathBuf],
    windows: &[Window],
    judge: impl Fn(&[Vec<u8>], &str) -> Opinion,
) -> Opinion {
    of(left, "python3-libvhdi", windows, judge, |folder, raw| {
        let files = chain.iter().filter(|path| left.names.contains_key(*path));
        let files: Vec<String> = files
            .map(|path| folder.join(path.file_name().unwrap_or_default()).to_string_lossy().into_owned())
            .collect();
        let mut args = vec!["-c", LIBVHDI, raw];
        args.extend(files.iter().map(String::as_str));
        run(folder, "/usr/bin/python3", &args)
    })
}
