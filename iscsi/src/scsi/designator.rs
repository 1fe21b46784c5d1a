//! Names of logical units (SPC-4, 7.8.6.1). Page 83h of vital product data lists them, and lists of
//! copies name units by them.

/// Code set: binary.
pub const BINARY: u8 = 1;
/// Code set: ASCII.
pub const ASCII: u8 = 2;

/// A name of a logical unit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Designator {
    /// Its code set.
    pub code_set: u8,
    /// Its type; the association is 0, the logical unit.
    pub kind: u8,
    /// The name itself.
    pub value: Vec<u8>,
}
