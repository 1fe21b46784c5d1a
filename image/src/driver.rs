//! One record for each format: its capabilities, and the functions that open, create and check
//! images.
//!
//! Code that depends on the format asks this record ([`Format::driver`]) and does not match on
//! [`Format`]. A new format therefore needs: a variant of [`Format`], a record here, a row of
//! signatures in `probe/known.rs`, and a value of `--format` in the command line.

use crate::{
    CreateOptions, DiskType, Format, Image, ImageError, ParentLink, Result,
    findings::{CheckOutcome, CheckReport, Finding, Severity},
    qcow2,
    raw::RawImage,
    references::Reference,
    salvage::{SalvageHints, Salvaged},
    signature,
    split::SplitRawImage,
    vdi, vhd, vhdx, vmdk,
};
use diskwright_format::vhd::MAX_DYNAMIC_BYTES;
use diskwright_store::{FileRange, Store};
use std::sync::Arc;

/// The files of an image: the one that was opened, and those that [`Driver::references`] names.
type Stores = Vec<Arc<dyn Store>>;
/// The same for a check; `None` for a file that could not be opened.
type MaybeStores<'a> = &'a [Option<Arc<dyn Store>>];

/// Arguments: the files, whether to open for writing, the logical sector of a raw disk in bytes.
type Open = fn(Stores, bool, u32) -> Result<Arc<dyn Image>>;

/// Arguments: the files, the id or the name of the snapshot.
type OpenSnapshot = fn(Stores, &str) -> Result<Arc<dyn Image>>;

/// The identities that the images of a format record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Identities {
    /// Images have no identity.
    None,
    /// One, of the file. Children name their parent by it too, also after the parent was written.
    File,
    /// One of the disk, which its guests see, and one of its contents, by which children name their
    /// parent.
    DiskAndContents,
}

/// Capabilities and entry points of one format.
#[derive(Debug)]
pub struct Driver {
    format: Format,
    /// Name in options and messages, and the extension of its files: "vhdx".
    pub name: &'static str,
    /// The bytes by which a file of the format is known, as a message says what it expected.
    pub signature: &'static str,
    /// Type of a new image without a parent, unless the user chooses one.
    pub usual_type: DiskType,
    /// Whether dynamic and differencing images exist. If not, all images are fixed.
    pub has_blocks: bool,
    /// The kinds of image within the format that can be created, as qemu-img names them, the
    /// default first. Empty if there is only one.
    pub subformats: &'static [&'static str],
    /// Upper limit in bytes for the virtual size of a dynamic or differencing image. `u64::MAX`
    /// where the image's own tables already bound the size.
    pub size_max_bytes: u64,
    /// Whether a discard in a fixed image must keep the space allocated.
    pub promises_space: bool,
    /// Logical sector sizes that the format can record, in bytes.
    pub logical_sectors_bytes: &'static [u32],
    /// Why a copy gets another logical sector size than its source: the end of a sentence.
    pub sectors_because: &'static str,
    /// Physical sector size of a new image in bytes, unless the user chooses one.
    pub physical_sector_bytes: u32,
    /// The identities that an image records.
    pub identities: Identities,
    /// Whether the format asks every program for another identity of the contents before it changes
    /// them. If not, an identity that is the same says nothing about writes of other programs.
    pub renews_contents_id: bool,
    /// Whether a differencing image keeps its parent's disk id, so that the guest sees the same
    /// disk.
    pub child_keeps_disk_id: bool,
    /// Whether a differencing image can record a block as zeros without payload. If not, a block
    /// without space reads the parent's data.
    pub child_records_zeros: bool,
    /// Whether a child records when its parent's file was last changed.
    pub child_records_time: bool,
    /// Whether the parent of a child may have any format, which the child records. If not, it has
    /// the child's format.
    pub child_takes_any_parent: bool,
    /// Whether a child records one path to its parent, not one for each of several ways.
    pub child_records_one_path: bool,
    /// Whether a child names its parent by the ids of its file and of its contents, and by no path.
    pub child_names_file_id: bool,
    /// Whether the link of a child to its parent can be replaced
    /// ([`ImageWriter::set_parent_link`](crate::ImageWriter::set_parent_link)).
    pub child_can_be_relinked: bool,
    /// Extension of a snapshot's frozen image.
    pub frozen_extension: &'static str,
    open: Open,
    /// Opens an internal snapshot; `None` for a format that has none.
    open_snapshot: Option<OpenSnapshot>,
    references: fn(&dyn Store) -> Result<Vec<Reference>>,
    further_files: fn(&CreateOptions) -> Result<Vec<String>>,
    create: fn(Stores, &CreateOptions) -> Result<()>,
    /// Arguments: the files, whether to say how findings are repaired.
    examine: fn(MaybeStores<'_>, bool) -> Result<CheckOutcome>,
    begin_repair: fn(&Arc<dyn Store>, bool) -> Result<()>,
    settle_log: fn(&Arc<dyn Store>, bool) -> Result<()>,
    parent_link: fn(&dyn Store) -> Result<Option<ParentLink>>,
    salvage: fn(Arc<dyn Store>, &SalvageHints) -> Result<Salvaged>,
}

static RAW: Driver = Driver {
    format: Format::Raw,
    name: "raw",
    signature: "any bytes",
    usual_type: DiskType::Fixed,
    has_blocks: false,
    subformats: &[],
    size_max_bytes: u64::MAX,
    promises_space: false,
    logical_sectors_bytes: &[512],
    sectors_because: "a raw file records none, and readers take 512",
    physical_sector_bytes: 4096,
    identities: Identities::None,
    renews_contents_id: false,
    child_keeps_disk_id: false,
    child_records_zeros: false,
    child_records_time: false,
    child_takes_any_parent: false,
    child_records_one_path: false,
    child_names_file_id: false,
    child_can_be_relinked: false,
    frozen_extension: "raw",
    open: open_raw,
    open_snapshot: None,
    references: |_| Ok(Vec::new()),
    further_files: |_| Ok(Vec::new()),
    create: |stores, options| create_raw(only(stores, "raw")?, options),
    examine: |_, _| Ok(CheckOutcome::default()),
    begin_repair: |_, _| Ok(()),
    settle_log: |_, _| Ok(()),
    parent_link: |_| Ok(None),
    salvage: crate::raw::salvage,
};

static VHD: Driver = Driver {
    format: Format::Vhd,
    name: "vhd",
    signature: "\"conectix\" at offset 0 or in the last 512 bytes (was the file copied completely?)",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    subformats: &[],
    size_max_bytes: MAX_DYNAMIC_BYTES,
    promises_space: true,
    logical_sectors_bytes: &[512],
    sectors_because: "VHD knows only 512",
    physical_sector_bytes: 512,
    identities: Identities::File,
    renews_contents_id: false,
    // The VHD unique id identifies the file, not the disk.
    child_keeps_disk_id: false,
    child_records_zeros: false,
    child_records_time: true,
    child_takes_any_parent: false,
    child_records_one_path: false,
    child_names_file_id: false,
    child_can_be_relinked: true,
    frozen_extension: "avhd",
    open: |stores, writable, _| Ok(Arc::new(vhd::open(only(stores, "vhd")?, writable)?)),
    open_snapshot: None,
    references: |_| Ok(Vec::new()),
    further_files: |_| Ok(Vec::new()),
    create: |stores, options| vhd::create(only(stores, "vhd")?, options),
    examine: |stores, for_repair| vhd::examine(only_opened(stores, "vhd")?, for_repair),
    // Nothing in a VHD says when it was written.
    begin_repair: |_, _| Ok(()),
    settle_log: |_, _| Ok(()),
    parent_link: vhd::parent_link,
    salvage: vhd::salvage,
};

static VHDX: Driver = Driver {
    format: Format::Vhdx,
    name: "vhdx",
    signature: "\"vhdxfile\" at offset 0",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    subformats: &[],
    size_max_bytes: u64::MAX,
    promises_space: true,
    logical_sectors_bytes: &[512, 4096],
    sectors_because: "as requested",
    physical_sector_bytes: 4096,
    identities: Identities::DiskAndContents,
    // MS-VHDX 2.2.2.1.
    renews_contents_id: true,
    // MS-VHDX 2.6.1.2.
    child_keeps_disk_id: true,
    child_records_zeros: true,
    child_records_time: false,
    child_takes_any_parent: false,
    child_records_one_path: false,
    child_names_file_id: false,
    child_can_be_relinked: true,
    frozen_extension: "avhdx",
    open: |stores, writable, _| Ok(Arc::new(vhdx::open(only(stores, "vhdx")?, writable)?)),
    open_snapshot: None,
    references: |_| Ok(Vec::new()),
    further_files: |_| Ok(Vec::new()),
    create: |stores, options| vhdx::create(only(stores, "vhdx")?, options),
    examine: |stores, for_repair| vhdx::examine(only_opened(stores, "vhdx")?, for_repair),
    begin_repair: vhdx::begin_repair,
    settle_log: vhdx::settle_log,
    parent_link: vhdx::parent_link,
    salvage: vhdx::salvage,
};

static QCOW2: Driver = Driver {
    format: Format::Qcow2,
    name: "qcow2",
    signature: "\"QFI\" and the byte 0xfb at offset 0, and version 2 or 3",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    subformats: &[],
    frozen_extension: "qcow2",
    size_max_bytes: u64::MAX,
    promises_space: true,
    logical_sectors_bytes: &[512],
    sectors_because: "qcow2 records none, and readers take 512",
    physical_sector_bytes: 512,
    identities: Identities::None,
    renews_contents_id: false,
    child_keeps_disk_id: false,
    child_records_zeros: true,
    child_records_time: false,
    child_takes_any_parent: true,
    child_records_one_path: true,
    child_names_file_id: false,
    child_can_be_relinked: true,
    open: |stores, writable, _| Ok(Arc::new(qcow2::open(stores, writable, None)?)),
    open_snapshot: Some(|stores, snapshot| Ok(Arc::new(qcow2::open(stores, false, Some(snapshot))?))),
    references: qcow2::references,
    further_files: |_| Ok(Vec::new()),
    create: |stores, options| qcow2::create(only(stores, "qcow2")?, options),
    examine: qcow2::examine,
    begin_repair: |_, _| Ok(()),
    settle_log: |_, _| Ok(()),
    parent_link: qcow2::parent_link,
    salvage: qcow2::salvage,
};

static VDI: Driver = Driver {
    format: Format::Vdi,
    name: "vdi",
    signature: "the bytes 7f 10 da be at offset 64",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    subformats: &[],
    frozen_extension: "vdi",
    size_max_bytes: u64::MAX,
    promises_space: true,
    logical_sectors_bytes: &[512],
    sectors_because: "VDI knows only 512",
    physical_sector_bytes: 512,
    identities: Identities::DiskAndContents,
    // QEMU leaves uuidModify as it is.
    renews_contents_id: false,
    child_keeps_disk_id: false,
    child_records_zeros: true,
    child_records_time: false,
    child_takes_any_parent: false,
    child_records_one_path: false,
    child_names_file_id: true,
    child_can_be_relinked: true,
    open: |stores, writable, _| Ok(Arc::new(vdi::open(only(stores, "vdi")?, writable)?)),
    open_snapshot: None,
    references: |_| Ok(Vec::new()),
    further_files: |_| Ok(Vec::new()),
    create: |stores, options| vdi::create(only(stores, "vdi")?, options),
    examine: |stores, for_repair| vdi::examine(only_opened(stores, "vdi")?, for_repair),
    begin_repair: vdi::begin_repair,
    settle_log: |_, _| Ok(()),
    parent_link: vdi::parent_link,
    salvage: vdi::salvage,
};

static VMDK: Driver = Driver {
    format: Format::Vmdk,
    name: "vmdk",
    signature: "\"# Disk DescriptorFile\", \"KDMV\", \"COWD\" or an SESPARSE header at offset 0",
    usual_type: DiskType::Dynamic,
    has_blocks: true,
    subformats: vmdk::SUBFORMATS,
    size_max_bytes: u64::MAX,
    promises_space: true,
    logical_sectors_bytes: &[512],
    sectors_because: "VMDK knows only 512",
    physical_sector_bytes: 512,
    identities: Identities::DiskAndContents,
    // The CID, "Virtual Disk Format 5.0".
    renews_contents_id: true,
    child_keeps_disk_id: false,
    child_records_zeros: false,
    child_records_time: false,
    child_takes_any_parent: false,
    child_records_one_path: true,
    child_names_file_id: false,
    child_can_be_relinked: true,
    frozen_extension: "vmdk",
    open: |stores, writable, _| Ok(Arc::new(vmdk::open(stores, writable)?)),
    open_snapshot: None,
    references: vmdk::references,
    further_files: vmdk::further_files,
    create: |stores, options| vmdk::create(&stores, options),
    examine: vmdk::examine,
    begin_repair: vmdk::begin_repair,
    settle_log: |_, _| Ok(()),
    parent_link: vmdk::parent_link,
    salvage: vmdk::salvage,
};

impl Format {
    /// The record of this format.
    pub fn driver(self) -> &'static Driver {
        match self {
            Self::Raw => &RAW,
            Self::Vhd => &VHD,
            Self::Vhdx => &VHDX,
            Self::Qcow2 => &QCOW2,
            Self::Vdi => &VDI,
            Self::Vmdk => &VMDK,
        }
    }

    /// The extensions of the formats that `is_fit` accepts, as a message lists them: ".vhd, .vhdx
    /// or .vmdk".
    pub fn extensions_of(is_fit: impl Fn(&Driver) -> bool) -> String {
        let fit = Self::ALL.iter().map(|format| format.driver()).filter(|driver| is_fit(driver));
        let mut names: Vec<_> = fit.map(|driver| format!(".{}", driver.name)).collect();
        let last = names.pop().unwrap_or_default();
        if names.is_empty() { last } else { format!("{} or {last}", names.join(", ")) }
    }
}

impl Driver {
    /// What a program of the format's vendor adds to the name of an image while it uses the image:
    /// Workstation and Fusion put a folder `disk.vmdk.lck` beside it.
    pub fn in_use_suffix(&self) -> Option<&'static str> {
        (self.name == VMDK.name).then_some(".lck")
    }

    /// Whether an image of this subformat is a fixed disk.
    pub fn is_fixed_subformat(&self, name: &str) -> bool {
        self.name == VMDK.name && vmdk::is_flat_kind(name)
    }

    /// Whether a child has blocks as long as its parent's, unless the user asks for others. The
    /// arguments are the subformats of the parent and of the child; `None` is the default one.
    pub fn child_inherits_blocks(&self, parent: Option<&str>, child: Option<&str>) -> bool {
        let is_esx = |name: Option<&str>| self.name == VMDK.name && name.is_some_and(vmdk::is_esx_kind);
        is_esx(parent) == is_esx(child)
    }

    /// The names of the subformats that map a block device, the long and the short one of each.
    pub fn device_subformats(&self) -> &'static [(&'static str, &'static str)] {
        if self.name == VMDK.name { &vmdk::DEVICE_SUBFORMATS } else { &[] }
    }

    /// The further files that the image in `store` names. Reads only headers and the descriptor.
    /// The list is empty for an image in one file.
    ///
    /// # Errors
    /// Those of the format's own structures.
    pub fn references(&self, store: &dyn Store) -> Result<Vec<Reference>> {
        (self.references)(store)
    }

    /// Opens an image in one file. `raw_sector_bytes` is the logical sector of a raw disk.
    ///
    /// # Errors
    /// Those of the format's own `open`.
    pub fn open(&self, store: Arc<dyn Store>, writable: bool, raw_sector_bytes: u32) -> Result<Arc<dyn Image>> {
        self.open_files(vec![store], writable, raw_sector_bytes)
    }

    /// Opens an image: its first file, and those of [`Driver::references`] in that order. A raw
    /// disk has its parts.
    ///
    /// # Errors
    /// Those of the format's own `open`; `Unsupported` for further files in a format that has none.
    pub fn open_files(
        &self,
        stores: Vec<Arc<dyn Store>>,
        writable: bool,
        raw_sector_bytes: u32,
    ) -> Result<Arc<dyn Image>> {
        (self.open)(stores, writable, raw_sector_bytes)
    }

    /// Whether an image can have internal snapshots.
    pub fn has_snapshots(&self) -> bool {
        self.open_snapshot.is_some()
    }

    /// Opens an internal snapshot of an image with all its files, read-only, by its id or its name.
    ///
    /// # Errors
    /// Those of the format's own `open`; `NotAnImage` if the image has no such snapshot;
    /// `Unsupported` for a format that has none.
    pub fn open_snapshot(&self, stores: Vec<Arc<dyn Store>>, snapshot: &str) -> Result<Arc<dyn Image>> {
        match self.open_snapshot {
            Some(open) => open(stores, snapshot),
            None => Err(ImageError::Unsupported {
                path: stores.first().map(|first| first.name().to_owned()).unwrap_or_default(),
                what: format!("the internal snapshot {snapshot:?} of an image in the format {}", self.name),
                hint: "only qcow2 has internal snapshots: leave out `OpenOptions::snapshot`".into(),
            }),
        }
    }

    /// The names of the further files that an image with these options has, besides the first one.
    /// They lie in its folder.
    ///
    /// # Errors
    /// `BadOptions` for options that the format does not allow.
    pub fn further_files(&self, options: &CreateOptions) -> Result<Vec<String>> {
        (self.further_files)(options)
    }

    /// Creates an image in an empty store. The image is durable on return.
    ///
    /// # Errors
    /// As [`Driver::create_files`].
    pub fn create(&self, store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
        self.create_files(vec![store], options)
    }

    /// Creates an image in empty stores: the first file, and those of [`Driver::further_files`] in
    /// that order. The image is durable on return.
    ///
    /// # Errors
    /// `BadOptions` for options that the format does not allow, before anything is written; `Io`,
    /// after which the stores hold an incomplete image.
    pub fn create_files(&self, stores: Vec<Arc<dyn Store>>, options: &CreateOptions) -> Result<()> {
        if let (Some(_), Some(store), true) = (&options.own.device, stores.first(), self.device_subformats().is_empty())
        {
            return Err(ImageError::BadOptions {
                path: store.name().to_owned(),
                what: format!("a {} image cannot map a device", self.name),
                hint: "use a VMDK for that".into(),
            });
        }
        if let (Some(subformat), Some(store), true) =
            (&options.own.subformat, stores.first(), self.subformats.is_empty())
        {
            return Err(ImageError::BadOptions {
                path: store.name().to_owned(),
                what: format!("a {} image has no subformat {subformat:?}", self.name),
                hint: "leave it out".into(),
            });
        }
        (self.create)(stores, options)
    }

    /// Checks an image in one file without changing it. The report of a raw image is always empty.
    ///
    /// # Errors
    /// Those of the format's own `check`.
    pub fn check(&self, store: Arc<dyn Store>) -> Result<CheckReport> {
        self.check_files(&[Some(store)])
    }

    /// Checks an image: its first file, and those of [`Driver::references`] in that order; `None`
    /// for one that could not be opened, which the caller reports.
    ///
    /// # Errors
    /// Those of the format's own `check`.
    pub fn check_files(&self, stores: &[Option<Arc<dyn Store>>]) -> Result<CheckReport> {
        Ok(self.examine_any(stores, false)?.report)
    }

    /// Checks an image, also one that has lost its signature.
    fn examine_any(&self, stores: MaybeStores<'_>, for_repair: bool) -> Result<CheckOutcome> {
        let result = (self.examine)(stores, for_repair);
        let is_at_start = |finding: &Finding| finding.severity == Severity::Corrupt && finding.offset_bytes < 512;
        let may_be_lost = match &result {
            Err(ImageError::NotAnImage { .. } | ImageError::Corrupt { .. }) => true,
            Ok(outcome) => outcome.report.findings.iter().any(is_at_start),
            Err(_) => false,
        };
        match stores {
            [Some(store)] if may_be_lost => {
                let check = |store| Ok((self.examine)(&[Some(store)], false)?.report);
                let restored = signature::examine(self.format, store, for_repair, &|store| self.opens(store), &check)?;
                restored.map_or(result, Ok)
            }
            _ => result,
        }
    }

    fn opens(&self, store: Arc<dyn Store>) -> Result<()> {
        self.open(store, false, 512).map(drop)
    }

    /// Whether a file without the format's signature at its usual places is an image all the same,
    /// which the format's open finds: a fixed VHD whose growth was cut short.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn is_found_elsewhere(&self, store: &dyn Store) -> Result<bool> {
        if self.format == Format::Vhd { vhd::has_left_footer(store) } else { Ok(false) }
    }

    /// Whether an image in one file would open if it had the signature of the format, which it has
    /// not.
    ///
    /// # Errors
    /// `Io`.
    pub(crate) fn has_lost_signature(&self, store: &Arc<dyn Store>) -> Result<bool> {
        Ok(signature::lost(self.format, store, &|store| self.opens(store))?.is_some())
    }

    /// The same for an image in one file; with `for_repair` also how the findings are repaired.
    pub(crate) fn examine(&self, store: Arc<dyn Store>, for_repair: bool) -> Result<CheckOutcome> {
        self.examine_any(&[Some(store)], for_repair)
    }

    /// Changes the identities that the format demands to change before a repair: that of the file,
    /// and with `costs_data` also that of the disk's contents. Durable on return.
    pub(crate) fn begin_repair(&self, store: &Arc<dyn Store>, costs_data: bool) -> Result<()> {
        (self.begin_repair)(store, costs_data)
    }

    /// Replays the log or drops its entries, and leaves it empty. Durable on return.
    pub(crate) fn settle_log(&self, store: &Arc<dyn Store>, replays: bool) -> Result<()> {
        (self.settle_log)(store, replays)
    }

    /// The parent that an image names. Reads only headers and metadata: no log is replayed and no
    /// block table is read. So the call is safe on a file that another program is writing. `None`
    /// for an image without a parent.
    ///
    /// # Errors
    /// Those of the format's own structures.
    pub fn parent_link(&self, store: &dyn Store) -> Result<Option<ParentLink>> {
        (self.parent_link)(store)
    }

    /// What can still be known of an image whose tables are damaged (see [`crate::salvage`]).
    ///
    /// # Errors
    /// If the file cannot be read at all, or nothing in it says what disk it was; the error names
    /// the hint that is needed.
    pub fn salvage(&self, store: Arc<dyn Store>, hints: &SalvageHints) -> Result<Salvaged> {
        (self.salvage)(store, hints)
    }
}

/// The file of an image of a format that has only one.
fn only(mut stores: Stores, format: &str) -> Result<Arc<dyn Store>> {
    match stores.len() {
        1 => Ok(stores.remove(0)),
        _ => Err(ImageError::Unsupported {
            path: stores.first().map(|first| first.name().to_owned()).unwrap_or_default(),
            what: format!("a {format} image in several files"),
            hint: "join the parts into one file".into(),
        }),
    }
}

fn only_opened(stores: MaybeStores<'_>, format: &str) -> Result<Arc<dyn Store>> {
    only(stores.iter().flatten().cloned().collect(), format)
}

fn open_raw(mut stores: Stores, writable: bool, sector_bytes: u32) -> Result<Arc<dyn Image>> {
    match stores.len() {
        1 => Ok(Arc::new(RawImage::new(stores.remove(0), writable, sector_bytes)?)),
        _ => Ok(Arc::new(SplitRawImage::new(stores, writable, sector_bytes)?)),
    }
}

fn create_raw(store: Arc<dyn Store>, options: &CreateOptions) -> Result<()> {
    let made = if options.preallocate {
        store.allocate(FileRange { offset_bytes: 0, len_bytes: options.size_bytes })
    } else {
        store.set_len(options.size_bytes)
    };
    made.and_then(|()| store.sync_data())
        .map_err(|source| ImageError::io("allocate the space of the new file", &*store, 0, source))
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_store::MemoryStore;

    #[test]
    fn every_driver_opens_and_checks_the_images_that_it_creates() {
        for &format in Format::ALL {
            let driver = format.driver();
            let store: Arc<dyn Store> = Arc::new(MemoryStore::new(driver.name));
            let options = CreateOptions {
                disk_type: driver.usual_type,
                size_bytes: 4 << 20,
                block_bytes: None,
                logical_sector_bytes: driver.logical_sectors_bytes[0],
                physical_sector_bytes: driver.physical_sector_bytes,
                parent: None,
                preallocate: false,
                disk_id: None,
                own: Default::default(),
            };
            driver.create(Arc::clone(&store), &options).unwrap();
            let report = driver.check(Arc::clone(&store)).unwrap();
            assert!(report.findings.is_empty(), "{format}: {:?}", report.findings);
            assert_eq!(driver.parent_link(&*store).unwrap(), None);
            let image = driver.open(store, true, 512).unwrap();
            let info = image.info();
            assert_eq!((info.format, info.disk_type, info.size_bytes), (format, driver.usual_type, 4 << 20));
        }
    }
}
