//! OVF 1.x: the XML text that describes virtual machines and their disks, and the manifest beside
//! it (DMTF DSP0243).
//!
//! ```text
//!   <Envelope>
//!     <References>  <File id="file1" href="disk1.vmdk" size="...">     files of the package
//!     <DiskSection> <Disk diskId="vmdisk1" fileRef="file1" capacity>   virtual disks in them
//!     <VirtualSystem> name, operating system, hardware                 machines with the disks
//!
//!   SHA256(disk1.vmdk)= 9f86d0...                                      manifest, `.mf`
//! ```
//!
//! [`Envelope::parse`] keeps what concerns disks, and a line about each machine. The text is
//! hostile: it has at most [`OVF_MAX_BYTES`], elements nest at most 64 deep, document types (and
//! with them entities of their own) are refused. Elements of other namespaces are passed over.
//! [`Appliance::to_text`] writes a machine with one disk.

mod manifest;
mod read;
mod write;

pub use manifest::{DigestKind, Manifest, ManifestEntry};
pub use read::{Envelope, OvfDisk, OvfFile, OvfSystem};
pub use write::Appliance;

/// The longest envelope or manifest that is read, in bytes.
pub const OVF_MAX_BYTES: u64 = 4 << 20;
/// The most files, disks or machines of an envelope, and lines of a manifest.
pub const OVF_ITEMS_MAX: usize = 4096;

/// A text that contradicts the specification, or that this program does not read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{structure}, line {line}: found {found}, expected {expected}")]
pub struct OvfError {
    /// `OVF envelope` or `OVF manifest`.
    pub structure: &'static str,
    /// The line, counted from 1.
    pub line: usize,
    /// What was found.
    pub found: String,
    /// What was expected.
    pub expected: String,
}

/// Whether a file of a package may have this name: a name alone, without a path, in a form that no
/// system reads as more than a name.
pub fn is_plain_name(name: &str) -> bool {
    let is_special = matches!(name, "" | "." | "..");
    !is_special && name.len() <= 255 && !name.chars().any(|c| matches!(c, '/' | '\\' | ':') || c.is_control())
}

/// A value for a message: in quotation marks, and cut after 60 characters.
fn quoted(value: &str) -> String {
    match value.char_indices().nth(60) {
        Some((cut, _)) => format!("{:?}...", &value[..cut]),
        None => format!("{value:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_paths_are_not_plain() {
        for name in ["disk1.vmdk", "a b.vmdk", "größe.vmdk", "...vmdk", ".hidden"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "../x", "/etc/passwd", "a/b", "C:\\x", "c:x", "http://h/x", "a\nb", "a\0"] {
            assert!(!is_plain_name(name), "{name}");
        }
        assert!(!is_plain_name(&"x".repeat(256)));
    }
}
