//! How fast a member is, by what its device says of itself.

use diskwright_format::space::superblock::Class;
use rustix::fs::{FileType, major, minor, stat};
use std::path::{Path, PathBuf};

/// The class of a file or device: what its disk says (`queue/rotational`). SSD if that is unknown.
pub fn class_of(path: &Path) -> Class {
    let rotational = || {
        let found = stat(path).ok()?;
        let is_device = FileType::from_raw_mode(found.st_mode) == FileType::BlockDevice;
        let device = if is_device { found.st_rdev } else { found.st_dev };
        let folder = PathBuf::from(format!("/sys/dev/block/{}:{}", major(device), minor(device)));
        // A partition has no queue of its own.
        let queues = [folder.join("queue/rotational"), folder.join("../queue/rotational")];
        queues.iter().find_map(|path| std::fs::read_to_string(path).ok())
    };
    match rotational() {
        Some(text) if text.trim() == "1" => Class::Hdd,
        _ => Class::Ssd,
    }
}
