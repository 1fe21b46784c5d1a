//! Many children of one image.
//!
//! ```text
//!   for each name:  temporary file ─▶ filled, durable ─▶ its name (`partial`)
//!     └─ the name is taken by an unused child of the same parent: kept
//! ```
//!
//! Each is a differencing disk that begins as its parent reads. From then on the parent must not be
//! written; an open for writing refuses that while a child lies in its folder.
//!
//! The parent's whole chain is open, and so locked, until the last child has its name. A merge that
//! runs at the same time is refused, or has ended before: it searches for children once it has the
//! locks of its images. A chain that cannot be read gets no children.
//!
//! A file with its final name is always complete. A command that was killed has made some of the
//! children. The same command keeps these, because nothing was written to them, and makes the rest.

use crate::{
    CreateRequest, Disk, DiskError, OpenOptions, Result,
    copying::{
        create::{create_as, format_for, is_there, parent_out_of_reach},
        partial::PartialFile,
        room::empty_image_bytes,
    },
    error::{file_error, with_whole_need},
    opening::{
        image_file::{Access, open_image, refuse_replaced},
        siblings,
    },
};
use diskwright_image::{BlockState, DiskType, Format, Image};
use diskwright_store::{BlockDevice, Files};
use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

/// Creates every one of `children` as a child of `parent`, all or none of them: when one cannot be
/// made, those made by this call are removed. A name that an unused child of this parent has is
/// left as it is. Returns warnings, one sentence each. `progress` is told how many are made, and
/// stops the work by returning `false`. With `dry_run` nothing is created, and only names that are
/// taken are found. Of the request, size, type and parent are ignored.
///
/// # Errors
/// As [`create`](crate::create()); [`DiskError::Usage`] for a name that stands twice;
/// [`DiskError::Stopped`].
pub fn clone_disk(
    parent: &Path,
    children: &[PathBuf],
    request: &CreateRequest,
    dry_run: bool,
    progress: &mut crate::Progress<'_>,
) -> Result<Vec<String>> {
    let mut names: Vec<&PathBuf> = children.iter().collect();
    names.sort();
    if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(DiskError::Usage {
            what: format!("{} is named twice", twice[0].display()),
            hint: "give each clone a name of its own".into(),
        });
    }
    let files = &request.files;
    let (held, real) = hold(parent, request)?;
    let mut warnings = held.warnings().to_vec();
    let above = siblings::Candidate::of(real, held.layers()[0].image.info());
    let is_unused = |child: &Path| is_unused_child(files, child, (&above, &held), request.format);
    let (mut missing, mut kept): (Vec<&PathBuf>, Vec<&PathBuf>) = (Vec::new(), Vec::new());
    for child in children {
        if files.facts(child).is_err() {
            check_folder(files, child)?;
            missing.push(child);
        } else if is_unused(child) {
            kept.push(child);
        } else {
            return Err(is_there(child));
        }
    }
    let request =
        CreateRequest { parent: Some(parent.to_owned()), size_bytes: None, disk_type: None, ..request.clone() };
    match &kept[..] {
        [] => (),
        [one] => warnings.push(format!("{}: an unused clone of this disk exists already; it is kept", one.display())),
        [first, more @ ..] => warnings.push(format!(
            "{} and {} more: unused clones of this disk exist already; they are kept",
            first.display(),
            more.len()
        )),
    }
    let mut made: Vec<&PathBuf> = Vec::new();
    let mut make_all = || -> Result<()> {
        if !dry_run {
            kept.iter().filter(|child| files.facts(child).is_ok()).try_for_each(|child| make_durable(files, child))?;
        }
        // A command that made the kept ones at the same time may have failed, and removed them.
        let gone = kept.iter().copied().filter(|child| !dry_run && files.facts(child).is_err());
        for child in missing.iter().copied().chain(gone) {
            if !progress((kept.len() + made.len()) as u64, children.len() as u64) {
                return Err(DiskError::Stopped);
            }
            if !dry_run && !make(child, &request, &is_unused)? {
                continue;
            }
            made.push(child);
            warnings.extend(parent_out_of_reach(files, child, parent));
        }
        Ok(())
    };
    let free_bytes = missing.first().and_then(|child| diskwright_store::free_bytes(child));
    let result = make_all().map_err(|error| match missing.first() {
        Some(child) => {
            let all = || each_bytes(child, &held, request.format)?.checked_mul(missing.len() as u64);
            with_whole_need(error, ("create the clones", child), all, free_bytes)
        }
        None => error,
    });
    if result.is_err() && !dry_run {
        // The first error is returned. These files are ours, made just now, and empty.
        for child in made {
            let _ = files.remove(child);
        }
    }
    result.map(|()| warnings)
}

/// The space that one child takes, about.
fn each_bytes(child: &Path, parent: &Disk, format: Option<Format>) -> Option<u64> {
    let layers = parent.layers();
    let info = layers[0].image.info();
    let block_bytes = u32::try_from(info.block_bytes).ok().filter(|_| info.has_blocks);
    let empty = |block_bytes| empty_image_bytes(format_for(child, format).ok()?, info.size_bytes, block_bytes);
    empty(block_bytes).or_else(|| empty(None))
}

/// Makes one child under a temporary name, then gives it its own. `false` if another command has
/// made the same child meanwhile.
fn make(child: &Path, request: &CreateRequest, is_unused: &dyn Fn(&Path) -> bool) -> Result<bool> {
    let files = &request.files;
    let partial = PartialFile::new(files, child, "clone");
    let attempt = || {
        partial.clear()?;
        create_as(child, partial.path(), request).map_err(|error| partial.shown(error))?;
        partial.created();
        partial.give_name().inspect_err(|_| partial.discard())
    };
    match attempt() {
        Ok(()) => Ok(true),
        Err(_) if is_unused(child) => {
            make_durable(files, child)?;
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// The name of a clone that another command has made, which may have been killed before it was
/// durable.
fn make_durable(files: &Files, child: &Path) -> Result<()> {
    let synced = files.sync_directory_of(child);
    synced.map_err(|source| file_error("make the folder of this clone durable", child, source))
}

/// Opens the parent with its chain, which is locked until this is dropped. Returns its path without
/// symbolic links too.
fn hold(parent: &Path, request: &CreateRequest) -> Result<(Arc<Disk>, PathBuf)> {
    let CreateRequest { files, parents, .. } = request;
    // Probed: the format of the request is that of the children.
    let open = OpenOptions { files: files.clone(), parents: parents.clone(), ..OpenOptions::default() };
    let held = Disk::open(parent, &open)?;
    let top = &held.layers()[0];
    let real = files.canonical(parent).map_err(|source| file_error("find it", parent, source))?;
    refuse_replaced(files, parent, &real, &**top.image.store())?;
    Ok((held, real))
}

/// Refuses a folder in which no file can be made, before the first one is.
fn check_folder(files: &Files, child: &Path) -> Result<()> {
    let dir = child.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    files.check_names_in(dir).map_err(|source| file_error("make a file in this folder", dir, source))
}

/// Whether the file at `child` is what an interrupted command has made: a child of the disk without
/// data, that no program has open for writing.
fn is_unused_child(
    files: &Files,
    child: &Path,
    (parent, disk): (&siblings::Candidate, &Disk),
    format: Option<Format>,
) -> bool {
    let (Ok(format), Ok(real)) = (format_for(child, format), files.canonical(child)) else { return false };
    let access = Access { format: Some(format), ..Access::default() };
    let Ok((image, _)) = open_image(files, child, &access, &mut Vec::new()) else { return false };
    let info = image.info();
    let is_child = info.disk_type == DiskType::Differencing
        && info.size_bytes == disk.geometry().size_bytes
        && image
            .parent_link()
            .is_some_and(|link| siblings::parent_among(files, (&real, &link), std::slice::from_ref(parent)).is_some());
    is_child && stores_nothing(&*image).unwrap_or(false)
}

/// Whether every block is the parent's.
fn stores_nothing(image: &dyn Image) -> Result<bool> {
    let info = image.info();
    let blocks = info.size_bytes.div_ceil(info.block_bytes.max(1));
    let mut states = [BlockState::Absent; 1024];
    let mut first = 0;
    // Not every format knows its next block.
    while let Some(block) = image.next_block(first, blocks)? {
        let count = (blocks - block).min(states.len() as u64);
        image.block_states(block, &mut states[..count as usize])?;
        if states[..count as usize].iter().any(|state| *state != BlockState::Absent) {
            return Ok(false);
        }
        first = block + count;
    }
    Ok(true)
}
