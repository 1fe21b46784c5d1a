//! What makes a block device recognisable: its serial number, its world wide name, and its size.
//!
//! ```text
//!   /sys/dev/block/MAJOR:MINOR ─┬─ wwid, device/wwid, dm/uuid, md/uuid   ─▶ wwn
//!                               ├─ serial, device/serial                 ─▶ serial
//!                               ├─ loop/backing_file                     ─▶ serial, "file PATH"
//!                               └─ partition ─▶ those of the whole device, and the number
//! ```
//!
//! `/dev/sda` is whatever the kernel found first, so an image that maps a device records these
//! facts beside a name in `/dev/disk/by-id`. A device without serial number and world wide name
//! (zram) is recognised by its exact size only. One with either of them may have grown since.
//!
//! The texts come from hardware. They are cut to [`TEXT_MAX`] characters, and characters that would
//! end a line or a quotation are dropped, so a caller can write them into a text file as they are.

use std::{
    fmt, fs, io,
    os::unix::fs::{FileTypeExt, MetadataExt},
    path::{Path, PathBuf},
};

/// The longest serial number or world wide name that is kept, in characters.
const TEXT_MAX: usize = 256;
/// Folders with names that lead to the same device after every boot, the best first.
const STABLE_FOLDERS: [&str; 2] = ["/dev/disk/by-id", "/dev/mapper"];
/// Names made of what identifies the disk itself come before those made of its model.
const BEST_PREFIXES: [&str; 3] = ["wwn-", "nvme-eui.", "dm-uuid-"];

/// What makes a block device recognisable.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceId {
    /// Length in bytes.
    pub size_bytes: u64,
    /// Serial number; of a loop device the path of its file.
    pub serial: Option<String>,
    /// World wide name, or another identity that no two devices share.
    pub wwn: Option<String>,
}

impl DeviceId {
    /// Reads what the system knows of the device with this number ([`Store::identity`]).
    ///
    /// [`Store::identity`]: crate::Store::identity
    pub fn of(device_number: u64, size_bytes: u64) -> Self {
        let (major, minor) = (rustix::fs::major(device_number), rustix::fs::minor(device_number));
        Self::read(Path::new(&format!("/sys/dev/block/{major}:{minor}")), size_bytes)
    }

    fn read(folder: &Path, size_bytes: u64) -> Self {
        let partition = text(&folder.join("partition"));
        // The link leads to .../block/sda/sda1, so the folder above is that of the whole device.
        let whole = match &partition {
            Some(_) => folder.canonicalize().ok().and_then(|real| real.parent().map(Path::to_owned)),
            None => None,
        };
        let folder = whole.as_deref().unwrap_or(folder);
        let first = |names: &[&str]| names.iter().find_map(|name| text(&folder.join(name)));
        let part = |found: String| match &partition {
            Some(number) => format!("{found} partition {number}"),
            None => found,
        };
        let backing = || first(&["loop/backing_file"]).map(|file| format!("file {file}"));
        Self {
            size_bytes,
            serial: first(&["serial", "device/serial"]).or_else(backing).map(part),
            wwn: first(&["wwid", "device/wwid", "dm/uuid", "md/uuid"]).map(part),
        }
    }

    /// Whether `found` is another device than this one, or has become too small: what differs, as
    /// in `serial "A", expected "B"`. `None` if it is the same device.
    pub fn difference(&self, found: &Self) -> Option<String> {
        let shown = |text: &Option<String>| text.as_ref().map_or_else(|| "none".to_owned(), |text| format!("{text:?}"));
        let named = [("world wide name", &self.wwn, &found.wwn), ("serial number", &self.serial, &found.serial)];
        for (what, expected, found) in named {
            if expected.is_some() && expected != found {
                return Some(format!("its {what} is {}, expected {}", shown(found), shown(expected)));
            }
        }
        let is_named = self.wwn.is_some() || self.serial.is_some();
        let is_good = found.size_bytes == self.size_bytes || is_named && found.size_bytes > self.size_bytes;
        (!is_good).then(|| format!("it has {} bytes, expected {}", found.size_bytes, self.size_bytes))
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.size_bytes)?;
        for (what, text) in [("serial number", &self.serial), ("world wide name", &self.wwn)] {
            if let Some(text) = text {
                write!(f, ", {what} {text:?}")?;
            }
        }
        Ok(())
    }
}

/// One line of a file of sysfs; `None` if it says nothing.
fn text(path: &Path) -> Option<String> {
    let bytes = fs::read(path).ok()?;
    let text = String::from_utf8_lossy(&bytes);
    let line = text.lines().next().unwrap_or_default();
    let kept: String = line.chars().filter(|c| !c.is_control() && !matches!(c, '"' | '\\')).take(TEXT_MAX).collect();
    Some(kept.trim().to_owned()).filter(|text| !text.is_empty())
}

/// A name of the device at `path` that leads to the same device after the next boot; `None` if the
/// system has none. A path that is such a name already is returned as it is.
///
/// # Errors
/// The system's, and `InvalidInput` if there is no block device at `path`.
pub fn stable_device_name(path: &Path) -> io::Result<Option<PathBuf>> {
    let found = fs::metadata(path)?;
    if !found.file_type().is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is not a block device"));
    }
    if path.starts_with("/dev/disk") || path.starts_with("/dev/mapper") {
        return Ok(Some(path.to_owned()));
    }
    let leads_here = |entry: &PathBuf| {
        fs::metadata(entry).is_ok_and(|other| other.file_type().is_block_device() && other.rdev() == found.rdev())
    };
    let named = STABLE_FOLDERS.iter().find_map(|folder| {
        let entries = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
        let rank = |path: &PathBuf| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let best = BEST_PREFIXES.iter().position(|prefix| name.starts_with(prefix));
            (best.unwrap_or(BEST_PREFIXES.len()), name)
        };
        entries.filter(leads_here).min_by_key(rank)
    });
    Ok(named)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(size_bytes: u64, serial: Option<&str>, wwn: Option<&str>) -> DeviceId {
        DeviceId { size_bytes, serial: serial.map(Into::into), wwn: wwn.map(Into::into) }
    }

    #[test]
    fn a_device_is_the_same_by_its_names_and_without_them_by_its_size() {
        let known = id(100, Some("S1"), Some("naa.5"));
        assert_eq!(known.difference(&known), None);
        assert_eq!(known.difference(&id(200, Some("S1"), Some("naa.5"))), None, "it has grown");
        let differs = |found: &DeviceId, what: &str| {
            let told = known.difference(found).unwrap();
            assert!(told.contains(what), "{told}");
        };
        differs(&id(50, Some("S1"), Some("naa.5")), "it has 50 bytes, expected 100");
        differs(&id(100, Some("S2"), Some("naa.5")), "serial number is \"S2\", expected \"S1\"");
        differs(&id(100, Some("S1"), None), "world wide name is none, expected \"naa.5\"");
        let nameless = id(100, None, None);
        assert_eq!(nameless.difference(&id(100, Some("S1"), None)), None, "the system tells more now");
        assert!(nameless.difference(&id(101, None, None)).unwrap().contains("expected 100"));
    }

    #[test]
    fn sysfs_is_read_also_of_a_partition_and_cleaned() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("sda");
        fs::create_dir_all(disk.join("device")).unwrap();
        fs::create_dir_all(disk.join("sda2")).unwrap();
        fs::write(disk.join("device/wwid"), "naa.5000c500\n").unwrap();
        fs::write(disk.join("serial"), "  AB\"C\\D\u{1}E \n").unwrap();
        fs::write(disk.join("sda2/partition"), "2\n").unwrap();
        assert_eq!(DeviceId::read(&disk, 7), id(7, Some("ABCDE"), Some("naa.5000c500")));
        let part = DeviceId::read(&disk.join("sda2"), 3);
        assert_eq!(part, id(3, Some("ABCDE partition 2"), Some("naa.5000c500 partition 2")));
        assert_eq!(
            part.to_string(),
            r#"3 bytes, serial number "ABCDE partition 2", world wide name "naa.5000c500 partition 2""#
        );
        fs::create_dir_all(dir.path().join("loop1/loop")).unwrap();
        fs::write(dir.path().join("loop1/loop/backing_file"), "/images/x.raw\n").unwrap();
        assert_eq!(DeviceId::read(&dir.path().join("loop1"), 1), id(1, Some("file /images/x.raw"), None));
        assert_eq!(DeviceId::read(&dir.path().join("none"), 1), id(1, None, None));
    }

    #[test]
    fn a_file_has_no_stable_name() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(stable_device_name(file.path()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
