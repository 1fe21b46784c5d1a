//! From a path to a chain of images: which files belong to a disk, and which may be opened.
//!
//! ```text
//!   by_id.rs          finds a parent that is named by ids and by no path
//!   disk.rs           the chain as an open disk
//!   folder.rs         the images of a folder and their parents
//!   gate.rs           which parents may be opened, and where they are looked for
//!   image_file.rs     opens one image with its files
//!   inside.rs         an image inside an export of an NBD server
//!   merge_mark.rs     the marks that a merge leaves in a child
//!   open.rs           path -> chain of images; finds each parent, checks policy and identity
//!   ova/              an OVA: the disks inside it
//!   parts.rs          the files of a raw disk in several parts
//!   place.rs          opens a FILE or a URI: a disk or an export
//!   referred.rs       the further files that an image names
//!   relink.rs         what every change of a link to a parent needs
//!   siblings.rs       which images of the folder name this one as their parent
//!   volumes.rs        partitions and file systems on a disk
//! ```
//!
//! Images are not trusted: every path that an image names is checked against the policy of the
//! user.

pub(crate) mod by_id;
pub(crate) mod disk;
pub(crate) mod folder;
pub(crate) mod gate;
pub(crate) mod image_file;
pub(crate) mod inside;
pub(crate) mod merge_mark;
pub(crate) mod open;
pub(crate) mod ova;
pub(crate) mod parts;
pub(crate) mod place;
pub(crate) mod referred;
pub(crate) mod relink;
pub(crate) mod siblings;
pub(crate) mod volumes;
