//! Finds ublk devices that Diskwright has added, by their mark.

use crate::ublk::{UblkError, block_device};
use diskwright_store::ublk::UblkControl;
use rustix::io::Errno;
use std::{fs, io, path::PathBuf};
use uuid::Uuid;

/// The kernel's list of ublk character devices.
const LIST: &str = "/sys/class/ublk-char";

/// The upper bits of every mark. They tell our devices from those of other programs that use the
/// field.
const OURS: u64 = 0xd15c << 36;

/// A new random mark. It has 53 bits at most, so JSON stores it exactly.
pub fn new_mark() -> u64 {
    OURS | (Uuid::new_v4().as_u128() as u64 & ((1 << 36) - 1))
}

/// A ublk device that was found by its mark.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundDevice {
    /// The device number N of `/dev/ublkcN`.
    pub number: u32,
    /// Path of the block device, which exists only while the device is started.
    pub device: PathBuf,
    /// Whether the device is started.
    pub is_started: bool,
}

impl FoundDevice {
    /// The device with this mark, if there is one.
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
                // The device was deleted meanwhile, belongs to another user, or is of an unknown
                // version.
                Err(error)
                    if matches!(Errno::from_io_error(&error), Some(Errno::NODEV | Errno::PERM | Errno::ACCESS)) => {}
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {}
                Err(error) => return Err(failed(error)),
            }
        }
        Ok(None)
    }

    /// Stops the device. The kernel writes back what was written if the server is alive, and
    /// removes the block device.
    ///
    /// # Errors
    /// The error of the driver. No error if the device no longer exists.
    pub fn stop(&self, control: &mut UblkControl) -> Result<(), UblkError> {
        unless_gone(control.stop(self.number)).map_err(|source| UblkError::Device { doing: "stop", source })
    }

    /// Deletes the device. Its server must have ended.
    ///
    /// # Errors
    /// The error of the driver. No error if the device no longer exists.
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
