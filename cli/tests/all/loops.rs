//! Loop devices, for tests of block devices.

use std::{path::Path, process::Command};

/// A loop device, detached when it is dropped.
pub struct Loop(pub String);

impl Loop {
    /// A device over a file, with sectors of this size. `None`, with a line that says so, where
    /// there are no loop devices.
    pub fn over(file: &Path, sector_bytes: u32) -> Option<Self> {
        let sectors = sector_bytes.to_string();
        match Command::new("losetup").args(["-f", "--show", "--sector-size", &sectors]).arg(file).output() {
            Ok(ran) if ran.status.success() => Some(Self(String::from_utf8(ran.stdout).unwrap().trim().to_owned())),
            _ => {
                println!("skipped: block devices: losetup cannot make a loop device here");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["-d", &self.0]).status();
    }
}
