//! A small real file system in a loop device that a test can fill up. Needs root. The tests of
//! other crates include this file too.

use std::{
    io::Write,
    path::{Path, PathBuf},
    process::Command,
};
use tempfile::{TempDir, tempdir};

/// A small file system, unmounted when dropped.
pub struct Small {
    pub dir: TempDir,
    pub mount: PathBuf,
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let output = Command::new(program).args(args).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

impl Small {
    /// A file system of `size_bytes`, or what is missing on this machine.
    pub fn new(kind: &str, size_bytes: u64) -> Result<Self, String> {
        if !nix::unistd::geteuid().is_root() {
            return Err("mounting takes root".into());
        }
        let dir = tempdir().map_err(|error| error.to_string())?;
        let (image, mount) = (dir.path().join("fs.img"), dir.path().join("mount"));
        std::fs::create_dir(&mount).map_err(|error| error.to_string())?;
        let file = std::fs::File::create(&image).map_err(|error| error.to_string())?;
        file.set_len(size_bytes).map_err(|error| error.to_string())?;
        let (image, place) = (image.to_str().unwrap_or_default(), mount.to_str().unwrap_or_default());
        match kind {
            // No blocks reserved for root, as root would still find space otherwise.
            "ext4" => run("mkfs.ext4", &["-q", "-F", "-m", "0", image])?,
            _ => run(&format!("mkfs.{kind}"), &["-q", "-f", image])?,
        }
        run("mount", &["-o", "loop", image, place])?;
        Ok(Self { dir, mount })
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let place = self.mount.to_str().unwrap_or_default();
        if let Err(error) = run("umount", &[place]).or_else(|_| run("umount", &["-l", place])) {
            println!("{} stays mounted: {error}", self.dir.path().display());
        }
    }
}

/// Fills the remaining space.
pub fn eat_all(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for piece_bytes in [64 << 10, 4096, 512] {
        while file.write_all(&vec![1; piece_bytes]).is_ok() {}
    }
}
