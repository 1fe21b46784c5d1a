//! Block devices for tests: loop devices, and zram where the kernel has it.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// A loop device over a file. Detached when it is dropped.
pub struct Loop(pub PathBuf);

impl Loop {
    /// `None`, with a line that says so, where loop devices cannot be made.
    pub fn over(file: &Path) -> Option<Self> {
        Self::with(&["-f", "--show"], file).map(|shown| Self(shown.trim().into()))
    }

    fn with(arguments: &[&str], file: &Path) -> Option<String> {
        let output = Command::new("losetup").args(arguments).arg(file).output();
        match output {
            Ok(output) if output.status.success() => Some(String::from_utf8(output.stdout).unwrap()),
            _ => {
                println!("skipped: block devices: losetup cannot make a loop device here");
                None
            }
        }
    }

    /// Puts another file behind the same device.
    pub fn change(&self, file: &Path) {
        let device = self.0.to_str().unwrap();
        assert!(Command::new("losetup").args(["-d", device]).status().unwrap().success());
        // The last close of the device detaches it.
        for _ in 0..100 {
            if Command::new("losetup").arg(device).arg(file).status().unwrap().success() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        panic!("{device} cannot be attached to {}", file.display());
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").arg("-d").arg(&self.0).status();
    }
}

/// A compressed disk in memory. Removed when it is dropped.
pub struct Zram(u32);

impl Zram {
    /// `None`, with a line that says so, where the kernel has none.
    pub fn of(size_bytes: u64) -> Option<Self> {
        let number =
            fs::read_to_string("/sys/class/zram-control/hot_add").ok().and_then(|text| text.trim().parse().ok());
        let Some(number) = number else {
            println!("skipped: zram: the kernel does not make such a device here");
            return None;
        };
        let zram = Self(number);
        zram.resize(size_bytes);
        Some(zram)
    }

    pub fn path(&self) -> PathBuf {
        format!("/dev/zram{}", self.0).into()
    }

    /// Empties the device, and gives it another size.
    pub fn resize(&self, size_bytes: u64) {
        let at = |name: &str| format!("/sys/block/zram{}/{name}", self.0);
        // While another program looks at the device it is busy.
        let mut tries = 0..500;
        while let Err(error) = fs::write(at("reset"), "1") {
            assert!(tries.next().is_some() && error.kind() == std::io::ErrorKind::ResourceBusy, "{error}");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        fs::write(at("disksize"), size_bytes.to_string()).unwrap();
    }
}

impl Drop for Zram {
    fn drop(&mut self) {
        let _ = fs::write(format!("/sys/block/zram{}/reset", self.0), "1");
        let _ = fs::write("/sys/class/zram-control/hot_remove", self.0.to_string());
    }
}
