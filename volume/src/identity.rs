//! Name, label and UUID of a volume's contents. Each reader returns them; `signature.rs` calls the
//! reader.

/// Contents of a swap area.
pub(crate) const SWAP: &str = "swap";
/// Contents of a btrfs.
pub(crate) const BTRFS: &str = "btrfs";
/// Contents of a physical volume of LVM2.
pub(crate) const LVM: &str = "LVM2 physical volume";

/// Name, label and UUID of a volume's contents.
pub(crate) struct Identity {
    pub(crate) name: &'static str,
    pub(crate) label: Option<String>,
    pub(crate) uuid: Option<String>,
}

impl Identity {
    pub(crate) fn named(name: &'static str) -> Self {
        Self { name, label: None, uuid: None }
    }
}
