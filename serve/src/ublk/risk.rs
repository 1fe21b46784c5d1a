//! What the death of a ublk server costs, written where the supervisor finds it.
//!
//! ```text
//!   a write to a new block succeeds ─▶ "at risk" ─▶ its answer
//!   a flush succeeds ─▶ "safe"
//!   killed ─▶ the supervisor reads the file: "safe" ─▶ the next server goes on with the device
//!                                            else   ─▶ the device is removed
//! ```
//!
//! The kernel can hand a device to another server. But completed writes whose mapping was in the
//! memory of the former one are gone then ([`AtRisk`]), and the device must not go on as if they
//! were there. The file is one byte in the folder of the disk's record, on a file system in memory.
//! It is written when the state changes, and not for each request.
//!
//! Invariant: "at risk" is in the file before the request is answered. The state changes under the
//! lock under which the disk was asked.

use diskwright_store::{AtRisk, BlockDevice};
use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::FileExt,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

const SAFE: &[u8] = b"0";
const AT_RISK: &[u8] = b"1";

/// The state of one device.
#[derive(Debug)]
pub(crate) struct Risk {
    disk: Arc<dyn BlockDevice>,
    file: File,
    is_at_risk: AtomicBool,
    change: Mutex<()>,
}

impl Risk {
    /// Creates the file, for a disk that was just opened.
    pub(crate) fn new(disk: Arc<dyn BlockDevice>, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
        let risk = Self { disk, file, is_at_risk: AtomicBool::new(true), change: Mutex::default() };
        risk.flushed()?;
        Ok(risk)
    }

    /// To be called after a request that changes the disk, and before its answer.
    ///
    /// # Errors
    /// The state could not be written. The request must fail then.
    pub(crate) fn changed(&self) -> io::Result<()> {
        if self.is_at_risk.load(Ordering::Acquire) {
            return Ok(());
        }
        let _lock = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        if self.disk.at_risk() == AtRisk::Now {
            self.file.write_all_at(AT_RISK, 0)?;
            self.is_at_risk.store(true, Ordering::Release);
        }
        Ok(())
    }

    /// To be called after a flush.
    ///
    /// # Errors
    /// The state could not be written. It stays at risk.
    pub(crate) fn flushed(&self) -> io::Result<()> {
        if !self.is_at_risk.load(Ordering::Acquire) {
            return Ok(());
        }
        let _lock = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        if self.disk.at_risk() != AtRisk::Now {
            self.file.write_all_at(SAFE, 0)?;
            self.is_at_risk.store(false, Ordering::Release);
        }
        Ok(())
    }
}

/// Whether a server that has died took nothing along, by its file.
pub(crate) fn is_safe(path: &Path) -> bool {
    std::fs::read(path).is_ok_and(|found| found == SAFE)
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::{BlockQueue, Geometry, QueueOptions};

    #[derive(Debug, Default)]
    struct Device {
        is_dirty: AtomicBool,
    }

    impl BlockDevice for Device {
        fn geometry(&self) -> Geometry {
            Geometry { size_bytes: 0, logical_sector_bytes: 512, physical_sector_bytes: 512, read_only: false }
        }

        fn open_queue(&self, _: &QueueOptions<'_>) -> io::Result<Box<dyn BlockQueue>> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn at_risk(&self) -> AtRisk {
            if self.is_dirty.load(Ordering::Relaxed) { AtRisk::Now } else { AtRisk::NotNow }
        }
    }

    #[test]
    fn the_file_says_what_a_death_would_cost() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("risk");
        assert!(!is_safe(&path), "no server has written it");
        let device = Arc::new(Device::default());
        let risk = Risk::new(device.clone(), &path).unwrap();
        assert!(is_safe(&path));
        risk.changed().unwrap();
        assert!(is_safe(&path), "a write in place");
        device.is_dirty.store(true, Ordering::Relaxed);
        risk.changed().unwrap();
        assert!(!is_safe(&path), "a new block");
        risk.flushed().unwrap();
        assert!(!is_safe(&path), "another write came after the flush");
        device.is_dirty.store(false, Ordering::Relaxed);
        risk.flushed().unwrap();
        assert!(is_safe(&path));
        // A server that begins with a disk that is dirty already.
        device.is_dirty.store(true, Ordering::Relaxed);
        drop(Risk::new(device, &path).unwrap());
        assert!(!is_safe(&path));
    }
}
