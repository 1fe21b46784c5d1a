//! Virtual hard disks as a library: VHD, VHDX, VMDK, qcow2 and VDI with their whole chain of
//! parents, raw files and devices, and NBD exports. Linux only.
//!
//! This crate is the only dependency that a user needs. It re-exports the parts of the crates below
//! it (`diskwright-disk`, `-image`, `-nbd`, `-serve`, `-store`) and adds [`DiskStream`]. The
//! package is called `diskwright-lib` because `diskwright` is the program:
//! `cargo install diskwright` must install that.
//!
//! | to do | use |
//! |---|---|
//! | open a file with its parents, or an NBD URI | [`Disk::open`]; [`Opened::open`] for either |
//! | read and write bytes at any offset | [`DiskStream`] (`Read`, `Write`, `Seek`) |
//! | read and write whole sectors, one request at a time | [`queue::Blocking`] |
//! | many requests in flight, without copies | [`queue`] |
//! | create an image, or a child of one | [`create()`] |
//! | copy a disk into another format, size, file or export | [`convert()`] |
//! | whether Azure or Windows accepts an image | [`Destination::judge`] |
//! | compare two disks; find damage | [`compare()`], [`check()`] |
//! | list what changed, and export it | [`Difference`], [`Export`] |
//! | apply such an export to a copy | [`apply_export()`] |
//! | see which layer holds which range | [`BlockDevice::extents`] |
//! | freeze a disk, and go back | [`snapshot()`], [`revert()`] |
//! | remove a snapshot | [`remove_snapshot()`] |
//! | make many children; give a disk another size | [`clone_disk()`], [`resize()`] |
//! | merge an image into its parent or another ancestor | [`merge()`] |
//! | give back space; move a disk to another file | [`compact()`], [`move_disk()`] |
//! | which ranges change since a named point | [`Disk::start_tracking`], [`Disk::changed_since`] |
//! | find lost parents; save what can be read of a damaged image | [`reconnect()`], [`rescue()`] |
//! | the images of a folder as a tree | [`FolderImages::of`] |
//! | partitions, file systems, what is free in them | [`layout()`] |
//! | serve disks to NBD clients | [`serve`] |
//! | match an error | [`DiskError::code`], [`DiskError::code_of`] |
//!
//! # Open a chain and read it
//!
//! A child is opened by its own path. Its parents are found by what the child says of them, proved
//! to be the disks that the child was made from, and opened read-only.
//!
//! ```
//! use diskwright_lib::{BlockDevice, CreateRequest, Disk, DiskStream, OpenOptions, create};
//! use std::io::{Read, Seek, SeekFrom, Write};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let (base, child) = (dir.path().join("base.vhdx"), dir.path().join("child.vhdx"));
//! # create(&base, &CreateRequest { size_bytes: Some(64 << 20), ..CreateRequest::default() })?;
//! # let disk = Disk::open(&base, &OpenOptions { writable: true, ..OpenOptions::default() })?;
//! # DiskStream::open(disk.clone())?.write_at(1_000_000, b"from the parent")?;
//! # disk.close()?;
//! # drop(disk);
//! # create(&child, &CreateRequest { parent: Some(base), ..CreateRequest::default() })?;
//! let disk = Disk::open(&child, &OpenOptions::default())?;
//! for layer in disk.layers().iter() {
//!     println!("{}: {}", layer.path.display(), layer.image.info().disk_type);
//! }
//! assert_eq!(disk.layers().len(), 2);
//! assert_eq!(disk.geometry().size_bytes, 64 << 20);
//!
//! let mut stream = DiskStream::open(disk.clone())?;
//! stream.seek(SeekFrom::Start(1_000_000))?;
//! let mut text = [0; 15];
//! stream.read_exact(&mut text)?;
//! assert_eq!(&text, b"from the parent");
//! # Ok(())
//! # }
//! ```
//!
//! # Create, write, flush
//!
//! A write that has returned is seen by every reader of the disk. A flush makes it durable. The
//! files are locked until the last `Arc` of the disk is dropped.
//!
//! ```
//! use diskwright_lib::{CreateRequest, Disk, DiskStream, OpenOptions, create};
//! use std::io::Write;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("new.vhdx");
//! create(&path, &CreateRequest { size_bytes: Some(10 << 30), ..CreateRequest::default() })?;
//! let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
//! let mut stream = DiskStream::open(disk.clone())?;
//! stream.write_all(b"at the front")?;
//! stream.write_at(5 << 30, b"in the middle")?;
//! stream.flush()?;
//! drop(stream);
//! disk.close()?;
//! // Ten gigabytes for a guest, some megabytes in the file.
//! assert!(path.metadata()?.len() < 16 << 20);
//! # Ok(())
//! # }
//! ```
//!
//! # Convert
//!
//! The callback hears how many bytes of the disk are done, and ends the conversion by `false`.
//!
//! ```
//! use diskwright_lib::{CompareOutcome, ConvertOptions, compare, convert};
//! # use diskwright_lib::{CreateRequest, Disk, DiskStream, OpenOptions, create};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let (source, dest) = (dir.path().join("old.vhd"), dir.path().join("new.vhdx"));
//! # create(&source, &CreateRequest { size_bytes: Some(64 << 20), ..CreateRequest::default() })?;
//! # let disk = Disk::open(&source, &OpenOptions { writable: true, ..OpenOptions::default() })?;
//! # DiskStream::open(disk.clone())?.write_at(12345, b"contents")?;
//! # disk.close()?;
//! # drop(disk);
//! let options = ConvertOptions { verify: true, ..ConvertOptions::default() };
//! let outcome = convert(&source, &dest, &options, &mut |done_bytes, total_bytes| {
//!     println!("{done_bytes} of {total_bytes}");
//!     true
//! })?;
//! assert_eq!(outcome.verified_bytes, outcome.size_bytes);
//! # let old = Disk::open(&source, &OpenOptions::default())?;
//! # let new = Disk::open(&dest, &OpenOptions::default())?;
//! # assert_eq!(diskwright_lib::check(&dest, &OpenOptions::default())?.report.worst(), None);
//! # let same = compare([(&*old, &source), (&*new, &dest)], Default::default(), &mut |_, _| true)?;
//! # assert_eq!(same, CompareOutcome::Same);
//! # Ok(())
//! # }
//! ```
//!
//! # Serve a disk by NBD
//!
//! See [`serve`].
//!
//! # Errors
//!
//! A text names the option that helps as the field that it is: "insist with
//! `OpenOptions::allow_parent_write`". A program with other names for these options passes texts
//! through [`rename_options`].
//!
//! ```
//! use diskwright_lib::{Disk, ErrorCode, OpenOptions};
//!
//! match Disk::open("/nonexistent/disk.vhdx", &OpenOptions::default()) {
//!     Ok(disk) => println!("{:?}", disk.layers()),
//!     Err(error) if error.code() == ErrorCode::NotFound => println!("no such disk"),
//!     Err(error) if error.code() == ErrorCode::Locked => println!("try again later"),
//!     Err(error) => println!("{error}"),
//! }
//! ```

#![forbid(unsafe_code)]

pub mod queue;
pub mod serve;
mod stream;

pub use diskwright_disk::{
    Applied, ApplyOptions, ChainFacts, ChainScope, Change, ChangeKind, Changed, Changes, Checked, CompactOptions,
    Compacted, CompareOutcome, ConvertOptions, ConvertOutcome, CreateRequest, Destination, Difference, Disk, DiskError,
    DiskState, Export, Exported, FolderImage, FolderImages, FormerImage, FoundParent, Identity, ImageFacts, Increment,
    Judgement, KeptName, Layer, Leftover, LostRange, LostRanges, MAP_MEMORY_BYTES, MergeOptions, Merged, MoveOptions,
    Moved, NamedRanges, NewSize, OpenOptions, Opened, ParentPolicy, Place, PlacedBlock, PlannedWrite, Progress,
    RangeKind, ReconnectOptions, Reconnected, Relinked, RepairOptions, Repaired, RescueOptions, Rescued, RescuedRange,
    ResizeOptions, Resized, Result, Rule, SincePoint, Snapshot, SnapshotOptions, TableFacts, TrackPoint, Undone,
    Verdict, VolumeGain, apply_export, check, clone_disk, compact, compare, convert, create, interrupted_repair,
    layout, merge, move_disk, reconnect, remove_snapshot, repair, rescue, resize, revert, snapshot, undo_repair,
    volume,
};
pub use diskwright_image::{
    CheckReport, DiskType, Finding, Format, Image, ImageError, ImageInfo, LogState, ParentLink, Repair, RepairStep,
    Severity,
};
pub use diskwright_iscsi::{ClientError as IscsiError, IscsiDevice, IscsiUri};
pub use diskwright_nbd::{ClientError, NbdDevice, NbdUri};
pub use diskwright_nvme::{ClientError as NvmeError, NvmeDevice, NvmeUri};
/// Objects in S3 and on web servers. `object::ObjectFiles::install()` makes names such as
/// `s3://BUCKET/KEY` work in all functions that only read a disk.
pub use diskwright_object as object;
/// Images of a Ceph cluster. `rbd::RbdFiles::install()` makes names such as `rbd://POOL/IMAGE` work
/// in all functions that take the path of a disk, on machines that have librbd.
pub use diskwright_rbd as rbd;
/// Pools of members. `space::Spaces::install()` makes names such as `space://POOL/NAME` work in all
/// functions that take the path of a disk.
pub use diskwright_space as space;
pub use diskwright_store::{
    BlockDevice, CacheMode, EngineKind, ErrorCode, Extent, ExtentKind, Files, Geometry, rename_options,
};
pub use stream::DiskStream;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
