//! Where a disk moves to, what its new image is, and which names are made and removed: shared by
//! `live_move.rs` and `offline_move.rs`.
//!
//! ```text
//!   vm.vhdx ──copy──▶ .new.vhd.moving ──durable, complete──▶ new.vhd ──durable──▶ vm.vhdx removed
//! ```
//!
//! The new file has a temporary name until it is complete and durable, and the old one stays until
//! the new name is durable. So after a power cut one of them is the disk. A temporary file that an
//! interrupted move has left is not locked, and the next move to the same name replaces it.
//!
//! A move marks the old file before the new one gets its name. If both are there, the same move
//! finishes it when no process has the disk open: it compares them, and removes the old one. If
//! they differ, one of them was written since, and the move says so.

use crate::{
    CreateRequest, Disk, DiskError, Result,
    copying::{
        create::{create_as, format_for, is_there},
        partial::PartialFile,
    },
    engine::track::resume::refuse_if_tracked,
    error::file_error,
    life::{mark_file::MarkFile, removal},
    opening::siblings,
};
use diskwright_image::{DiskType, Format};
use diskwright_store::{BlockDevice, Files};
use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

/// How a disk is moved.
#[derive(Debug, Clone, Default)]
pub struct MoveOptions {
    /// Properties of the new image. By default the format comes from its name; a fixed disk stays
    /// fixed, and the block size stays if the format does. `size_bytes`, `parent` and `files` are
    /// ignored: the size stays, and the whole chain becomes one image.
    pub dest: CreateRequest,
    /// Keeps the old file. It has the contents that the disk had at the end of the move.
    pub keep_old: bool,
    /// Checks everything and changes nothing.
    pub dry_run: bool,
}

/// A disk that has moved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// The old file, an absolute path without symbolic links.
    pub from: PathBuf,
    /// Path of the new file.
    pub to: PathBuf,
    /// Format of the new image.
    pub format: Format,
    /// Virtual size in bytes.
    pub size_bytes: u64,
    /// Bytes of the disk that hold data, all of which is copied; 0 if only the name has changed.
    pub data_bytes: u64,
    /// Bytes that were copied, some several times because clients wrote meanwhile.
    pub copied_bytes: u64,
    /// Bytes free on the file system of the new file before the move; `None` if unknown.
    pub free_bytes: Option<u64>,
    /// The longest time for which writes of clients were held back.
    pub pause: Duration,
    /// Whether the old file is there still.
    pub old_is_kept: bool,
    /// Children that name the new file as their parent now.
    pub relinked: Vec<PathBuf>,
    /// Sentences for the user.
    pub warnings: Vec<String>,
}

/// Who looks on while a disk is moved.
pub trait MoveWatch {
    /// `done` of about `total` bytes are copied. Returns `false` to stop, which leaves the disk
    /// where it was.
    fn goes_on(&mut self, done: u64, total: u64) -> bool {
        let _ = (done, total);
        true
    }

    /// The new disk is nearly complete. `identity` is that of its file.
    ///
    /// # Errors
    /// Any error stops the move, and the disk stays where it was.
    fn new_disk_is_made(&mut self, identity: Option<(u64, u64)>) -> Result<()> {
        let _ = identity;
        Ok(())
    }
}

/// No watcher.
impl MoveWatch for () {}

/// The identity of a file, as in [`FileFacts`](diskwright_store::files::FileFacts).
type Identity = (u64, u64);

/// What a move will do.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) files: &'a Files,
    /// The old file, without symbolic links.
    pub(crate) from: PathBuf,
    /// All files of the old image, with the identities of the open files.
    old_files: Vec<(PathBuf, Option<Identity>)>,
    /// The new file, in a folder without symbolic links.
    pub(crate) to: PathBuf,
    partial: PartialFile<'a>,
    pub(crate) request: CreateRequest,
    pub(crate) keep_old: bool,
    /// The further files that only the old image uses.
    extents: Vec<PathBuf>,
    /// Whether the new file is complete: an earlier move was interrupted.
    pub(crate) is_copied: bool,
}

/// The mark of the old file.
fn mark_of<'a>(files: &'a Files, from: &Path) -> MarkFile<'a> {
    MarkFile::of(files, from, ".moved")
}

/// What the mark says: the inode numbers of both files.
fn mark_text(new: Identity, old: Identity) -> String {
    format!("moved to inode {:016x} from inode {:016x}\n", new.1, old.1)
}

impl<'a> Plan<'a> {
    /// Plans the move of an open disk whose file is `from`. Changes nothing.
    pub(crate) fn new(disk: &Disk, from: &Path, files: &'a Files, to: &Path, options: &MoveOptions) -> Result<Self> {
        let layers = disk.layers();
        let top = &layers[0];
        let info = top.image.info();
        refuse_if_tracked(files, from)?;
        let to = destination(files, from, to, &options.dest)?;
        let format = format_for(&to, options.dest.format)?;
        let is_copied = match (files.facts(&to), files.facts(from)) {
            (Ok(new), Ok(old)) => {
                let text = mark_text(new.identity, old.identity);
                if options.keep_old || mark_of(files, from).text()? != Some(text) {
                    return Err(is_there(&to));
                }
                true
            }
            _ => false,
        };
        // The paths of the layer may be relative to a folder that the process has left.
        let stores = top.image.stores();
        let later = stores.iter().skip(1).filter_map(|store| store.name().file_name());
        let paths = std::iter::once(from.to_owned()).chain(later.map(|name| from.with_file_name(name)));
        let old_files = paths.zip(stores.iter().map(|store| store.identity())).collect();
        if top.image.stores().iter().any(|store| store.is_block_device()) && !options.keep_old {
            return Err(DiskError::Usage {
                what: format!("{}: it is a block device, which cannot be removed", from.display()),
                hint: "keep it (`MoveOptions::keep_old`)".into(),
            });
        }
        let geometry = disk.geometry();
        let sectors = format.driver().logical_sectors_bytes;
        let keeps_sectors = sectors.contains(&geometry.logical_sector_bytes);
        let mut request = options.dest.clone();
        request.files = files.clone();
        request.format = Some(format);
        request.parent = None;
        request.size_bytes = Some(geometry.size_bytes);
        if keeps_sectors && sectors.len() > 1 {
            request.logical_sector_bytes = request.logical_sector_bytes.or(Some(geometry.logical_sector_bytes));
            request.physical_sector_bytes = request.physical_sector_bytes.or(Some(geometry.physical_sector_bytes));
        }
        if format.driver().has_blocks && info.has_blocks | (info.disk_type == DiskType::Fixed) {
            let stays_fixed = info.disk_type == DiskType::Fixed && info.format != Format::Raw;
            request.disk_type = request.disk_type.or(stays_fixed.then_some(DiskType::Fixed));
        }
        let grows = request.disk_type.is_none_or(|disk_type| disk_type == DiskType::Dynamic);
        if format == info.format && info.has_blocks && grows {
            request.block_bytes = request.block_bytes.or(u32::try_from(info.block_bytes).ok());
        }
        let plan = Self {
            files,
            from: from.to_owned(),
            old_files,
            partial: PartialFile::named(files, &to, "move", ".", ".moving"),
            to,
            request,
            keep_old: options.keep_old,
            extents: removal::extents_of_layer(&*top.image, from)?,
            is_copied,
        };
        plan.check_old_names()?;
        plan.check_children(disk)?;
        if let Some(folder) = plan.from.parent().filter(|_| !plan.keep_old) {
            let checked = files.check_names_in(folder);
            checked.map_err(|source| file_error("remove the old file from its folder", folder, source))?;
        }
        Ok(plan)
    }

    /// Refuses a disk whose file was renamed or replaced since it was opened: another file would be
    /// removed.
    pub(crate) fn check_old_names(&self) -> Result<()> {
        for (file, identity) in &self.old_files {
            self.check_old_name(file, *identity)?;
        }
        Ok(())
    }

    fn check_old_name(&self, file: &Path, identity: Option<Identity>) -> Result<()> {
        let found = self.files.facts(file).map_err(|source| file_error("find the disk's file", file, source))?;
        if identity.is_none_or(|identity| identity == found.identity) {
            return Ok(());
        }
        Err(DiskError::BadOptions {
            what: format!("{}: it is another file than the one that the disk has open", file.display()),
            hint: "give the disk's file its name back, and try again".into(),
        })
    }

    /// Refuses to remove an image that others need.
    pub(crate) fn check_children(&self, disk: &Disk) -> Result<()> {
        if self.keep_old {
            return Ok(());
        }
        let layers = disk.layers();
        let found = siblings::children_of(self.files, &self.from, layers[0].image.info());
        match found.children.first() {
            Some(child) => Err(DiskError::BadOptions {
                what: format!(
                    "{}: {} names it as its parent, so it cannot be removed",
                    self.from.display(),
                    child.display()
                ),
                hint: "keep it (`MoveOptions::keep_old`), or move the child".into(),
            }),
            None if found.not_asked > 0 => Err(siblings::cannot_rule_out_children(&self.from, found.not_asked)),
            None => Ok(()),
        }
    }

    /// Makes the new image under its temporary name, and opens it for writing. Leaves nothing
    /// behind if that fails.
    pub(crate) fn make(&self, disk: &Disk, open: &crate::OpenOptions) -> Result<Arc<Disk>> {
        self.partial.clear()?;
        let shown = |error| self.partial.shown(error);
        create_as(&self.to, self.partial.path(), &self.request).map_err(shown)?;
        self.partial.created();
        let open = crate::OpenOptions { writable: true, format: self.request.format, ..open.clone() };
        let made = Disk::open_as(self.partial.path(), &self.to, &open).map_err(shown);
        let checked = made.and_then(|made| {
            let store = Arc::clone(made.layers()[0].image.store());
            self.partial.check(&*store)?;
            // Without the old file's owner the file belongs to this user.
            let _ = store.take_access_of(&**disk.layers()[0].image.store());
            self.check_geometry(disk, &made).map(|()| made)
        });
        checked.inspect_err(|_| self.discard())
    }

    /// Clients keep the sizes that they know.
    fn check_geometry(&self, disk: &Disk, made: &Disk) -> Result<()> {
        let (was, is) = (disk.geometry(), made.geometry());
        if is.size_bytes == was.size_bytes && is.logical_sector_bytes <= was.logical_sector_bytes {
            return Ok(());
        }
        Err(DiskError::BadOptions {
            what: format!(
                "{}: the new disk would have {} bytes in sectors of {}, and {} has {} bytes in sectors of {}",
                self.to.display(),
                is.size_bytes,
                is.logical_sector_bytes,
                self.from.display(),
                was.size_bytes,
                was.logical_sector_bytes
            ),
            hint: "choose a format that can have the same: VHDX or raw".into(),
        })
    }

    /// Removes the new file, which has its temporary name.
    pub(crate) fn discard(&self) {
        self.partial.discard();
    }

    /// Gives the new file, which is complete and durable, its name, durably. After an error it has
    /// its temporary name still.
    pub(crate) fn give_name(&self, made: &Disk) -> Result<()> {
        self.partial.give_name()?;
        made.layers()[0].image.stores().iter().for_each(|store| store.was_renamed(&self.to));
        Ok(())
    }

    /// Marks the old file: the new one is complete and durable, under its temporary name.
    pub(crate) fn mark_copied(&self, made: &Disk) -> Result<()> {
        let new = made.layers()[0].image.store().identity();
        let old = self.old_files.first().and_then(|(_, identity)| *identity);
        match (new.zip(old), self.keep_old) {
            (Some((new, old)), false) => mark_of(self.files, &self.from).set(&mark_text(new, old)),
            _ => Ok(()),
        }
    }

    /// Takes the mark back, after [`Plan::discard`]: the disk stays where it is. The mark stays
    /// while a power cut could bring the new file back, as the same move finishes only a marked
    /// one. An error is ignored: the mark names a file that is gone, and a file that got its number
    /// is compared before anything is removed.
    pub(crate) fn unmark(&self) {
        if !self.partial.had_its_name() || self.files.sync_directory_of(&self.to).is_ok() {
            let _ = mark_of(self.files, &self.from).remove();
        }
    }

    /// The error for two complete files that a move has left, and that differ.
    pub(crate) fn both_are_there(&self) -> DiskError {
        DiskError::BadOptions {
            what: format!(
                "{}: a move of {} to this name was interrupted when both files were complete, and one of them was written since",
                self.to.display(),
                self.from.display()
            ),
            hint: "both hold everything that was durable then: keep the one that is in use, and remove the other"
                .into(),
        }
    }

    /// Whether the old file may be renamed into the new one.
    pub(crate) fn is_on_same_file_system(&self) -> bool {
        let device = |path: &Path| self.files.facts(path).map(|facts| facts.identity.0).ok();
        self.to.parent().is_some_and(|folder| device(folder) == device(&self.from))
    }

    /// Renames the old file into the new one, durably. `false` if they are on different file
    /// systems after all.
    pub(crate) fn rename_old(&self) -> Result<bool> {
        match self.files.rename(&self.from, &self.to, false) {
            Ok(()) => {}
            Err(source) if source.kind() == io::ErrorKind::CrossesDevices => return Ok(false),
            Err(source) if source.kind() == io::ErrorKind::AlreadyExists => return Err(is_there(&self.to)),
            Err(source) => return Err(file_error("rename the disk", &self.to, source)),
        }
        for path in [&self.to, &self.from] {
            let synced = self.files.sync_directory_of(path);
            synced.map_err(|source| file_error("make its new name durable", &self.to, source))?;
        }
        Ok(true)
    }

    /// Removes the old files, durably. They may be open.
    pub(crate) fn remove_old(&self) -> Result<()> {
        self.check_old_names()?;
        removal::remove(self.files, &self.from, self.extents.clone())?;
        let further = self.old_files.iter().map(|(file, _)| file).skip(1);
        for file in further.filter(|file| !self.extents.contains(file)) {
            self.files.remove(file).map_err(|source| file_error("remove the old file", file, source))?;
        }
        mark_of(self.files, &self.from).remove()?;
        self.files
            .sync_directory_of(&self.from)
            .map_err(|source| file_error("make the removal of the old file durable", &self.from, source))
    }

    /// What the move of a disk with this much data is, before anything was done.
    pub(crate) fn outcome(&self, disk: &Disk, data_bytes: u64) -> Moved {
        Moved {
            from: self.from.clone(),
            to: self.to.clone(),
            format: self.request.format.unwrap_or(Format::Raw),
            size_bytes: disk.geometry().size_bytes,
            data_bytes,
            copied_bytes: 0,
            free_bytes: diskwright_store::free_bytes(&self.to),
            pause: Duration::ZERO,
            old_is_kept: self.keep_old,
            relinked: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Refuses a copy that is to replace an image with internal snapshots.
    pub(crate) fn refuse_to_lose_snapshots(&self, disk: &Disk) -> Result<()> {
        let top = &disk.layers()[0];
        if self.keep_old { Ok(()) } else { removal::refuse_to_lose_snapshots(&*top.image, &top.path) }
    }

    /// Refuses a destination without room.
    pub(crate) fn check_room(&self, moved: &Moved) -> Result<()> {
        match moved.free_bytes {
            Some(free_bytes) if free_bytes < moved.data_bytes => {
                let shortage = diskwright_store::shortage(&self.to, moved.data_bytes, free_bytes);
                Err(file_error("move the disk there", &self.to, shortage))
            }
            _ => Ok(()),
        }
    }
}

/// The new file: `to`, or in the folder `to` the present name, with the extension of the format if
/// one was asked for.
fn destination(files: &Files, from: &Path, to: &Path, asked: &CreateRequest) -> Result<PathBuf> {
    let mut file = to.to_owned();
    if to.is_dir() {
        let mut name = PathBuf::from(from.file_name().unwrap_or_default());
        if let Some(format) =
            asked.format.filter(|format| diskwright_image::probe::format_of_extension(&name) != Some(*format))
        {
            name.set_extension(format.driver().name);
        }
        file = to.join(name);
    }
    let folder = match file.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let Some(name) = file.file_name() else {
        return Err(DiskError::Usage {
            what: format!("{}: this is not a file name", to.display()),
            hint: "name a file or an existing folder".into(),
        });
    };
    let folder =
        files.canonical(folder).map_err(|source| file_error("find the folder of the new disk", &file, source))?;
    Ok(folder.join(name))
}
