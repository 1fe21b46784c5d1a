//! Warns of holes on NTFS: Windows does not attach a virtual disk whose file is sparse there
//! (0xC03A001A).
//!
//! On other file systems there is no warning: a copy to Windows has holes only if the copying
//! program makes them.

use std::path::Path;

/// `f_type` of NTFS by the kernel's old driver (ntfs) and by the present one (ntfs3).
const NTFS_TYPES: [u64; 2] = [0x5346_544e, 0x7366_746e];

/// Whether `file` lies on NTFS; `None` where that is not known.
pub fn is_on_ntfs(file: &Path) -> Option<bool> {
    let found = rustix::fs::statfs(file).ok()?;
    Some(is_ntfs(u64::try_from(found.f_type).ok()?))
}

/// A warning for the new file `file`, which has holes, if it is on NTFS.
pub fn note(file: &Path) -> Option<String> {
    is_on_ntfs(file)?.then(|| {
        format!(
            "{}: the file has holes, and Windows does not attach a file that is sparse on NTFS; make it with --preallocate",
            file.display()
        )
    })
}

fn is_ntfs(file_system: u64) -> bool {
    NTFS_TYPES.contains(&file_system)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ntfs_is_told() {
        assert!(is_ntfs(u64::from(u32::from_le_bytes(*b"NTFS"))) && is_ntfs(u64::from(u32::from_le_bytes(*b"ntfs"))));
        assert!(!is_ntfs(0xef53));
        assert_eq!(note(Path::new("/proc/self/stat")), None);
    }
}
