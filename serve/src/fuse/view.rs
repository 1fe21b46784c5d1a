//! What the kernel sees at the mount point: the disk as a file, or a directory that holds the disk.
//!
//! ```text
//!   Shape::File         node 1: the disk               a file mount point, used by a loop device
//!   Shape::Directory    node 1: .    node 2: ./disk    `attach --fuse DIR`
//! ```
//!
//! Only the size of the disk ever changes, so the kernel may cache names for ever. The kernel
//! checks permissions (`default_permissions`). Pure: no I/O.

use crate::fuse::wire::{Answer, Attributes, ROOT, attribute};
use rustix::io::Errno;

/// Name of the disk in the directory.
pub const DISK_NAME: &str = "disk";

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;

/// Whether the mount point is a file or a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// The mount point is the disk itself.
    File,
    /// The mount point is a directory that holds the disk.
    Directory,
}

impl Shape {
    /// File type of the mount point, as in `st_mode`.
    pub fn root_mode(self) -> u32 {
        match self {
            Self::File => REGULAR,
            Self::Directory => DIRECTORY,
        }
    }
}

/// What is needed to answer questions about names and attributes.
#[derive(Debug, Clone, Copy)]
pub struct View {
    /// File or directory.
    pub shape: Shape,
    /// Size of the disk when it was last read from the device.
    pub size_bytes: u64,
    /// Preferred transfer unit: the disk's physical sector, at least 4096.
    pub unit_bytes: u32,
    /// Writes are refused.
    pub read_only: bool,
    /// Owner of the files, a user id.
    pub uid: u32,
    /// Group of the files.
    pub gid: u32,
    /// Time stamp of the files: when the disk was attached, in seconds since 1970.
    pub time_seconds: u64,
}

impl View {
    /// Whether the node is the disk.
    pub fn is_disk(&self, node: u64) -> bool {
        node == self.disk_node()
    }

    fn disk_node(&self) -> u64 {
        match self.shape {
            Shape::File => ROOT,
            Shape::Directory => ROOT + 1,
        }
    }

    /// Attributes of a node. `ENOENT` if it does not exist.
    pub fn attributes(&self, node: u64) -> Result<Attributes, Errno> {
        let (mode, links, size_bytes) = if self.is_disk(node) {
            (REGULAR | if self.read_only { 0o400 } else { 0o600 }, 1, self.size_bytes)
        } else if node == ROOT {
            (DIRECTORY | if self.read_only { 0o500 } else { 0o700 }, 2, 0)
        } else {
            return Err(Errno::NOENT);
        };
        Ok(Attributes {
            node,
            size_bytes,
            mode,
            links,
            uid: self.uid,
            gid: self.gid,
            time_seconds: self.time_seconds,
            unit_bytes: self.unit_bytes,
        })
    }

    /// Looks up a name in a directory.
    pub fn lookup(&self, node: u64, name: &[u8]) -> Result<Attributes, Errno> {
        match self.shape {
            Shape::File => Err(Errno::NOTDIR),
            Shape::Directory if node == ROOT && name == DISK_NAME.as_bytes() => self.attributes(self.disk_node()),
            Shape::Directory => Err(Errno::NOENT),
        }
    }

    /// Appends the entries after `cookie` to the reply, as many as fit.
    pub fn list(&self, node: u64, cookie: u64, limit_bytes: u32, answer: &mut Answer<'_>) -> Result<(), Errno> {
        if self.shape != Shape::Directory || node != ROOT {
            return Err(Errno::NOTDIR);
        }
        let entries = [(ROOT, DIRECTORY, "."), (ROOT, DIRECTORY, ".."), (self.disk_node(), REGULAR, DISK_NAME)];
        for (index, (node, mode, name)) in (1..).zip(entries) {
            if index > cookie && !answer.entry(limit_bytes, node, index, mode, name.as_bytes()) {
                break;
            }
        }
        Ok(())
    }

    /// Answers a change of attributes. Times are accepted and ignored. The length cannot be
    /// changed, as with a block device: `O_TRUNC` in open is ignored, ftruncate to another length
    /// fails.
    pub fn set_attributes(&self, node: u64, valid: u32, size_bytes: u64) -> Result<Attributes, Errno> {
        let attributes = self.attributes(node)?;
        if valid & (attribute::MODE | attribute::UID | attribute::GID) != 0 {
            return Err(Errno::PERM);
        }
        if valid & attribute::SIZE != 0 {
            if self.read_only {
                return Err(Errno::ROFS);
            }
            let by_opening = valid & attribute::FH == 0 && size_bytes == 0;
            if size_bytes != attributes.size_bytes && !by_opening {
                return Err(Errno::INVAL);
            }
        }
        Ok(attributes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(shape: Shape, read_only: bool) -> View {
        View { shape, size_bytes: 1 << 30, unit_bytes: 4096, read_only, uid: 7, gid: 8, time_seconds: 9 }
    }

    #[test]
    fn a_file_has_no_names_in_it() {
        let view = view(Shape::File, false);
        assert!(view.is_disk(1) && !view.is_disk(2));
        assert_eq!(view.attributes(1).unwrap().mode, 0o100_600);
        assert_eq!(view.lookup(1, b"disk"), Err(Errno::NOTDIR));
        assert_eq!(view.attributes(2), Err(Errno::NOENT));
    }

    #[test]
    fn a_directory_has_the_disk_in_it() {
        let view = view(Shape::Directory, true);
        assert!(view.is_disk(2) && !view.is_disk(1));
        assert_eq!(view.attributes(1).unwrap().mode, 0o040_500);
        let disk = view.lookup(1, b"disk").unwrap();
        assert_eq!((disk.node, disk.mode, disk.size_bytes, disk.uid), (2, 0o100_400, 1 << 30, 7));
        assert_eq!(view.lookup(1, b"disk2"), Err(Errno::NOENT));
        assert_eq!(view.lookup(2, b"disk"), Err(Errno::NOENT));
    }

    #[test]
    fn listings_continue_at_their_cookie() {
        let view = view(Shape::Directory, false);
        let list = |cookie, limit_bytes| {
            let mut buf = [0; 4096];
            let mut answer = Answer::new(&mut buf);
            view.list(1, cookie, limit_bytes, &mut answer).unwrap();
            answer.end(1) - 16
        };
        assert_eq!((list(0, 4096), list(2, 4096), list(3, 4096)), (96, 32, 0));
        assert_eq!((list(0, 64), list(0, 31)), (64, 0));
    }

    #[test]
    fn a_disk_keeps_its_length() {
        let size_bytes = 1 << 30;
        let view = view(Shape::File, false);
        let set = |valid, size| view.set_attributes(1, valid, size).map(|attributes| attributes.size_bytes);
        assert_eq!(set(attribute::SIZE, 0), Ok(size_bytes), "opened with O_TRUNC");
        assert_eq!(set(attribute::SIZE | attribute::FH, size_bytes), Ok(size_bytes));
        assert_eq!(set(attribute::SIZE | attribute::FH, 0), Err(Errno::INVAL));
        assert_eq!(set(attribute::SIZE, 4096), Err(Errno::INVAL));
        assert_eq!(set(attribute::MODE, 0), Err(Errno::PERM));
        assert_eq!(set(1 << 5, 0), Ok(size_bytes), "times");
    }
}
