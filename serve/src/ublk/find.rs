//! Devices of ours, found by the mark with which they were added.

use crate::ublk::{UblkError, block_device};
use diskwright_store::ublk::UblkControl;
use rustix::io::Errno;
use std::{fs, io, path::PathBuf};
use uuid::Uuid;

/// Where the kernel lists the devices that were added.
const LIST: &str = "/sys/class/ublk-char";

/// What every mark of ours begins with, so that other programs' use of that word is told from it.
const OURS: u64 = 0xd15c << 36;

/// A mark that no device has. It fits a number of JSON.
pub fn new_mark() -> u64 {
    OURS | (Uuid::new_v4().as_u128() as u64 & ((1 << 36) - 1))
}

/// A device that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Its number.
    pub number: u32,
    /// Its block device, whether that is there or not.
    pub device: PathBuf,
    /// Whether the block device is there.
    pub is_started: bool,
}

impl Found {
    /// The device with a mark, if there is one.
    ///
    /// # Errors
    /// The driver does not answer.
    pub fn by_mark(control: &mut UblkControl, mark: u64) -> Result<Option<Self>, UblkError> {
        let failed = |source| UblkError::Device { doing: "look for", source };
        let names = match fs::read_dir(LIST) {
            Ok(names) => names,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        for name in names.flatten().filter_map(|entry| entry.file_name().into_string().ok()) {
            let Some(number) = name.strip_prefix("ublkc").and_then(|number| number.parse().ok()) else { continue };
            match control.facts(number) {
                Ok(facts) if facts.device.mark == mark => {
                    return Ok(Some(Self { number, device: block_device(number), is_started: facts.is_started }));
                }
                Ok(_) => {}
                // Deleted meanwhile; somebody else's; or nothing that is understood.
                Err(error)
                    if matches!(Errno::from_io_error(&error), Some(Errno::NODEV | Errno::PERM | Errno::ACCESS)) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(None)
    }

    /// Stops it: what was written goes out first, where its server is there, and the block device
    /// goes.
    ///
    /// # Errors
    /// What the driver says. That it is gone is no error.
    pub fn stop(&self, control: &mut UblkControl) -> Result<(), UblkError> {
        unless_gone(control.stop(self.number)).map_err(|source| UblkError::Device { doing: "stop", source })
    }

    /// Deletes it. Its server must be gone.
    ///
    /// # Errors
    /// What the driver says. That it is gone is no error.
    pub fn delete(&self, control: &mut UblkControl) -> Result<(), UblkError> {
        unless_gone(control.delete(self.number)).map_err(|source| UblkError::Device { doing: "delete", source })
    }
}

fn unless_gone(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODEV) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_differ_and_fit_numbers_of_json() {
        let marks = [new_mark(), new_mark()];
        assert_ne!(marks[0], marks[1]);
        for mark in marks {
            assert_eq!((mark >> 36, mark >> 53), (0xd15c, 0));
        }
    }
}
