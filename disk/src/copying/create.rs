//! Creates images.
//!
//! A new file is locked from the start, filled by its format's `create`, and removed again if
//! anything fails. A differencing image takes its size, sector sizes and block size from its parent
//! unless the request sets them. It stores a relative and an absolute path to the parent, in
//! Windows syntax.

use crate::{
    DiskError, ParentPolicy, Result,
    copying::{mapped, room::empty_image_bytes},
    error::{file_error, with_whole_need},
    opening::{
        gate,
        image_file::{Access, open_image, refuse_replaced},
    },
};
use diskwright_image::{
    CreateOptions, DiskType, Format, FormatOptions, Identities, ImageError, ImageInfo, ParentLink, probe,
};
use diskwright_store::{CacheMode, Files, LockMode, OpenOptions, Store};
use std::{
    io, iter,
    path::{Component, Path, PathBuf},
    sync::Arc,
};
use uuid::Uuid;

/// Properties of a new image. `None` selects the default.
#[derive(Debug, Clone, Default)]
pub struct CreateRequest {
    /// Virtual size in bytes. Required unless there is a parent.
    pub size_bytes: Option<u64>,
    /// Format; by default from the extension.
    pub format: Option<Format>,
    /// Type; by default dynamic, differencing with a parent, fixed for raw.
    pub disk_type: Option<DiskType>,
    /// Path of the parent of a differencing image.
    pub parent: Option<PathBuf>,
    /// Size of a payload block in bytes.
    pub block_bytes: Option<u32>,
    /// Logical sector of the virtual disk in bytes.
    pub logical_sector_bytes: Option<u32>,
    /// Physical sector of the virtual disk in bytes.
    pub physical_sector_bytes: Option<u32>,
    /// Allocate all space now.
    pub preallocate: bool,
    /// The kind of image within the format, as qemu-img names it (`twoGbMaxExtentSparse`).
    pub subformat: Option<String>,
    /// The block device that the image maps, for the kinds of VMDK that map one. Needs
    /// [`ParentPolicy::allow_devices`].
    pub device: Option<PathBuf>,
    /// The partitions of the device that a `partitionedDevice` shows.
    pub partitions: Vec<u32>,
    /// VHD unique id, VHDX virtual disk id; by default a random one, or of a VHDX with a parent the
    /// parent's. A raw file records none.
    pub disk_id: Option<Uuid>,
    /// Policy for parents. The parent named above is always allowed; its own parents are not
    /// opened.
    pub parents: ParentPolicy,
    /// The file system that resolves paths.
    pub files: Files,
}

/// Creates an image file. Never overwrites a file, and leaves none behind on failure. Returns
/// warnings for the user, one sentence each.
///
/// # Errors
/// [`DiskError::Usage`] and [`diskwright_image::ImageError::BadOptions`] for invalid properties;
/// [`DiskError::BadOptions`] for a parent that does not fit; [`DiskError::Exists`];
/// [`DiskError::File`] for errors of the file system.
pub fn create(path: impl AsRef<Path>, request: &CreateRequest) -> Result<Vec<String>> {
    let path = path.as_ref();
    let mut warnings = create_as(path, path, request).map_err(|error| match error {
        DiskError::File { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => is_there(path),
        other => other,
    })?;
    warnings.extend(request.parent.iter().filter_map(|parent| parent_out_of_reach(&request.files, path, parent)));
    Ok(warnings)
}

/// A warning if the parent lies outside the child's folder. `create` accepts it, but a later open
/// of the child searches only beneath the child's folder.
pub(crate) fn parent_out_of_reach(files: &Files, child: &Path, parent: &Path) -> Option<String> {
    let (child_real, parent_real) = (files.canonical(child).ok()?, files.canonical(parent).ok()?);
    let (dir, parent_dir) = (child_real.parent()?, parent_real.parent()?);
    // By ids a parent is found only in the folder itself.
    let is_by_id = probe::format_of_extension(&child_real).is_some_and(|format| format.driver().child_names_file_id);
    let is_outside = !parent_real.starts_with(dir) || is_by_id && dir != parent_dir;
    is_outside.then(|| {
        format!(
            "{}: its parent {} lies outside its folder, so every open of this disk needs `ParentPolicy::allowed_dirs` = {}",
            child.display(),
            parent_real.display(),
            parent_dir.display()
        )
    })
}

/// The error for a file that exists. It does not advise removing that file, which may be the source
/// of the new disk.
pub(crate) fn is_there(path: &Path) -> DiskError {
    DiskError::Exists { path: path.to_owned() }
}

/// Creates an image file at `path`. Errors name it as `shown`, the final name. Returns warnings. If
/// the names differ, the caller holds a lock of the parent until the file has its own.
pub(crate) fn create_as(shown: &Path, path: &Path, request: &CreateRequest) -> Result<Vec<String>> {
    let format = format_for(shown, request.format)?;
    let disk_type = type_for(shown, format, request)?;
    let files = &request.files;
    let parent = request
        .parent
        .as_deref()
        .map(|parent| parent_of((files, &request.parents), shown, format, parent))
        .transpose()?;
    let (parent, _held) = parent.unzip();
    let examine = |device| mapped::examine((files, &request.parents), shown, device, &request.partitions);
    let device = request.device.as_deref().map(examine).transpose()?;
    let (device, warnings) = device.unzip();
    let size_bytes = request.size_bytes.or(device.as_ref().map(|device| device.id.size_bytes));
    let sized = CreateRequest { size_bytes, ..request.clone() };
    let mut options = resolve(shown, format, disk_type, &sized, parent)?;
    options.own.device = device;
    write_new(files, shown, path, format, &options)?;
    Ok(warnings.unwrap_or_default())
}

/// Creates a child at `path` of an image that is open: `info` is the parent's, `link` leads to it.
/// The child has the parent's size, sectors and blocks. Errors name the child as `shown`.
pub(crate) fn create_child(files: &Files, shown: &Path, path: &Path, info: &ImageInfo, link: ParentLink) -> Result<()> {
    let request = CreateRequest::default();
    let options = resolve(shown, info.format, DiskType::Differencing, &request, Some((info.clone(), link)))?;
    write_new(files, shown, path, info.format, &options)
}

fn write_new(files: &Files, shown: &Path, path: &Path, format: Format, options: &CreateOptions) -> Result<()> {
    let driver = format.driver();
    let own_name = |error| named(DiskError::from(error), shown);
    let further = driver.further_files(options).map_err(own_name)?;
    let new = OpenOptions { writable: true, create_new: true, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
    let mut made: Vec<PathBuf> = Vec::new();
    let free_bytes = diskwright_store::free_bytes(path);
    let mut make = || {
        let mut stores = Vec::new();
        for path in iter::once(path.to_owned()).chain(further.iter().map(|name| shown.with_file_name(name))) {
            stores.push(files.open(&path, &new).map_err(|error| match DiskError::from(error) {
                DiskError::File { source, .. } if source.kind() == io::ErrorKind::AlreadyExists => is_there(&path),
                DiskError::File { source, .. } if source.kind() == io::ErrorKind::NotFound => {
                    file_error("create it: its folder does not exist", &path, source)
                }
                other => other,
            })?);
            made.push(path);
        }
        driver.create_files(stores, options)?;
        files.sync_directory_of(path).map_err(|source| file_error("make the new file's folder durable", path, source))
    };
    make()
        .inspect_err(|_| {
            // The first error is returned. The files are ours, created just now.
            made.iter().for_each(|path| drop(files.remove(path)));
        })
        .map_err(|error| {
            with_whole_need(named(error, shown), ("create it", shown), || needed_bytes(format, options), free_bytes)
        })
}

/// The space that a new image takes, about: its tables, and all its blocks if they are allocated.
/// `None` if it is not known.
pub(crate) fn needed_bytes(format: Format, options: &CreateOptions) -> Option<u64> {
    let has_tables = options.disk_type != DiskType::Fixed;
    let tables_bytes = match has_tables {
        true => empty_image_bytes(format, options.size_bytes, options.block_bytes)?,
        false => 0,
    };
    let blocks_bytes = if options.preallocate { options.size_bytes } else { 0 };
    Some(tables_bytes.saturating_add(blocks_bytes)).filter(|bytes| *bytes > 0)
}

/// The error with the final name of the new file.
fn named(error: DiskError, shown: &Path) -> DiskError {
    match error {
        DiskError::Image(ImageError::BadOptions { what, hint, .. }) => {
            DiskError::Image(ImageError::BadOptions { path: shown.to_owned(), what, hint })
        }
        other => other,
    }
}

/// The requested format, or the one that the extension indicates.
pub(crate) fn format_for(path: &Path, asked: Option<Format>) -> Result<Format> {
    if let (None, Some(foreign)) = (asked, probe::known::by_extension(path).filter(|known| known.format.is_none())) {
        return Err(bad(
            path,
            format!("{} is not supported", foreign.name),
            format!("use {}, or name the format with `CreateRequest::format`", Format::extensions_of(|_| true)),
        ));
    }
    asked.or_else(|| probe::format_of_extension(path)).ok_or_else(|| DiskError::Usage {
        what: format!(
            "cannot tell the format of {} from its extension{}",
            path.display(),
            path.extension().map(|extension| format!(" .{}", extension.to_string_lossy())).unwrap_or_default()
        ),
        hint: format!(
            "use {}, or .img for raw, or name the format with `CreateRequest::format`",
            Format::extensions_of(|_| true)
        ),
    })
}

fn bad(path: &Path, what: impl Into<String>, hint: impl Into<String>) -> DiskError {
    DiskError::Usage { what: format!("cannot create {}: {}", path.display(), what.into()), hint: hint.into() }
}

/// The error for options that do not fit this parent.
fn unfit(path: &Path, what: impl Into<String>, hint: impl Into<String>) -> DiskError {
    DiskError::BadOptions { what: format!("cannot create {}: {}", path.display(), what.into()), hint: hint.into() }
}

/// The requested type, or the default: differencing with a parent, else the format's usual one.
fn type_for(path: &Path, format: Format, request: &CreateRequest) -> Result<DiskType> {
    let disk_type = request.disk_type.unwrap_or(match (&request.parent, format) {
        (Some(_), _) => DiskType::Differencing,
        _ if request.subformat.as_deref().is_some_and(|name| format.driver().is_fixed_subformat(name)) => {
            DiskType::Fixed
        }
        (None, format) => format.driver().usual_type,
    });
    match (&request.parent, disk_type) {
        (None, DiskType::Differencing) => {
            Err(bad(path, "a differencing disk needs a parent", "name it with `CreateRequest::parent`"))
        }
        (Some(_), DiskType::Fixed | DiskType::Dynamic) => Err(bad(
            path,
            format!("a {disk_type} disk has no parent"),
            "leave out `CreateRequest::parent`, or use `CreateRequest::disk_type` = differencing",
        )),
        _ => Ok(disk_type),
    }
}

/// Validates the request and fills in the defaults.
fn resolve(
    path: &Path,
    format: Format,
    disk_type: DiskType,
    request: &CreateRequest,
    parent: Option<(ImageInfo, ParentLink)>,
) -> Result<CreateOptions> {
    if !format.driver().has_blocks {
        if disk_type != DiskType::Fixed {
            return Err(bad(
                path,
                format!("a raw file cannot be {disk_type}"),
                format!(
                    "use {}; a raw file is sparse without `CreateRequest::preallocate`",
                    Format::extensions_of(|driver| driver.has_blocks)
                ),
            ));
        }
        if request.block_bytes.is_some() {
            return Err(bad(path, "a raw file has no payload blocks", "leave out `CreateRequest::block_bytes`"));
        }
    }
    let (parent_info, link) = parent.unzip();
    let size_bytes = request
        .size_bytes
        .or(parent_info.as_ref().map(|info| info.size_bytes))
        .ok_or_else(|| bad(path, "its size is not known", "give it with `CreateRequest::size_bytes`"))?;
    let logical_sector_bytes =
        request.logical_sector_bytes.or(parent_info.as_ref().map(|info| info.logical_sector_bytes)).unwrap_or(512);
    if size_bytes == 0 {
        return Err(bad(path, "its size is 0", "use a larger `CreateRequest::size_bytes`"));
    }
    if !matches!(logical_sector_bytes, 512 | 4096) {
        return Err(bad(
            path,
            format!("a sector of {logical_sector_bytes} bytes"),
            "use a `CreateRequest::logical_sector_bytes` of 512 or 4096",
        ));
    }
    if size_bytes % u64::from(logical_sector_bytes) != 0 {
        return Err(bad(
            path,
            format!("its size of {size_bytes} bytes is not a multiple of its sector of {logical_sector_bytes}"),
            "round it up",
        ));
    }
    if let Some(info) = &parent_info
        && info.logical_sector_bytes != logical_sector_bytes
    {
        return Err(unfit(
            path,
            format!("its parent has sectors of {} bytes, not {logical_sector_bytes}", info.logical_sector_bytes),
            "leave out `CreateRequest::logical_sector_bytes`: a chain has one sector size",
        ));
    }
    Ok(CreateOptions {
        disk_type,
        size_bytes,
        block_bytes: request.block_bytes.or(parent_info
            .as_ref()
            .filter(|info| info.has_blocks && info.disk_type != DiskType::Fixed)
            .filter(|info| {
                let (parent, child) = (info.subformat.as_deref(), request.subformat.as_deref());
                format.driver().child_inherits_blocks(parent, child)
            })
            .and_then(|info| u32::try_from(info.block_bytes).ok())),
        logical_sector_bytes,
        physical_sector_bytes: request
            .physical_sector_bytes
            .or(parent_info.as_ref().map(|info| info.physical_sector_bytes))
            .unwrap_or(format.driver().physical_sector_bytes)
            .max(logical_sector_bytes),
        parent: link,
        preallocate: request.preallocate,
        disk_id: request.disk_id.or(parent_info
            .as_ref()
            .filter(|info| info.format.driver().child_keeps_disk_id)
            .and_then(|info| info.disk_id)),
        own: FormatOptions {
            subformat: request.subformat.clone(),
            file_name: path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            device: None,
        },
    })
}

/// A parent, and the link to it that its child gets.
type LinkedParent = (ImageInfo, ParentLink);

/// Opens the parent and builds the link to it for the child. The files hold the lock of the parent:
/// a merge searches for children once it has the locks of its images, so they stay open until the
/// child has its name.
fn parent_of(
    (files, policy): (&Files, &ParentPolicy),
    child: &Path,
    format: Format,
    parent: &Path,
) -> Result<(LinkedParent, Vec<Arc<dyn Store>>)> {
    // A child whose format allows only parents of its own format needs no probe.
    let only = (!format.driver().child_takes_any_parent).then_some(format);
    let access = Access { format: only, ..Access::default() };
    let access = Access { parents: Some(policy), ..access };
    let (image, stores) = open_image(files, parent, &access, &mut Vec::new()).map_err(|error| match error {
        DiskError::Image(ImageError::NotAnImage { found, .. }) => unfit(
            child,
            format!(
                "its parent {} is not {format} ({found}), and a {format} disk can only have a {format} parent",
                parent.display()
            ),
            "use the parent's format, or convert the parent first",
        ),
        other => other,
    })?;
    // A program that was killed may have left the parent's identity in the page cache only. The
    // child records the time, too.
    let synced = stores.iter().try_for_each(|store| store.sync_all());
    synced.map_err(|source| file_error("make it durable", parent, source))?;
    let info = image.info().clone();
    refuse_as_parent(parent, &info)?;
    let parent_real = files.canonical(parent).map_err(|source| file_error("find it", parent, source))?;
    refuse_replaced(files, parent, &parent_real, &*stores[0])?;
    let dir = child.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let dir_real = files.canonical(dir).map_err(|source| file_error("find it", dir, source))?;
    let seconds = gate::modified_seconds(files, &parent_real);
    let link = link_to((files, &parent_real), &info, seconds, (child, format), &dir_real)?;
    Ok(((info, link), stores))
}

/// How `child`, an image of this format in the folder `dir_real`, names the parent at
/// `parent_real`. Both paths are absolute and without symbolic links; nothing needs to be there
/// yet. `modified_seconds` is what a VHD records of its parent's file. Of an object the version is
/// recorded.
pub(crate) fn link_to(
    (files, parent_real): (&Files, &Path),
    info: &ImageInfo,
    modified_seconds: Option<u32>,
    (child, format): (&Path, Format),
    dir_real: &Path,
) -> Result<ParentLink> {
    if info.linkage_id.is_none() && format.driver().identities != Identities::None {
        return Err(unfit(
            child,
            format!("its parent {} has no identity that a child could record", parent_real.display()),
            format!("convert the parent to a new .{format} first"),
        ));
    }
    let text = |path: &Path| {
        path.to_str().filter(|text| !text.contains('\\')).map(|text| text.replace('/', "\\")).ok_or_else(|| {
            unfit(
                child,
                format!("the path {} cannot be written into the image", path.display()),
                "use names in UTF-8 without backslashes",
            )
        })
    };
    // From a folder of this machine no relative path leads to a server or a space.
    let is_elsewhere = Files::has_scheme(parent_real) && !Files::have_one_scheme(parent_real, dir_real);
    let relative = if is_elsewhere { None } else { Some(text(&relative_path(dir_real, parent_real))?) };
    let relative =
        relative.map(|relative| if relative.starts_with("..") { relative } else { format!(".\\{relative}") });
    let version = files.name_of_version(parent_real);
    let version = version.map_err(|source| file_error("find its version", parent_real, source))?;
    let absolute = match version.to_str() {
        Some(name) if is_elsewhere => name.to_owned(),
        _ => text(parent_real)?,
    };
    Ok(ParentLink {
        relative_path: relative,
        volume_path: None,
        absolute_path: Some(absolute),
        file_id: info.disk_id.filter(|_| info.format.driver().child_names_file_id),
        name: parent_real.file_name().map(|name| name.to_string_lossy().into_owned()),
        linkage: info.linkage_id.filter(|_| format.driver().identities != Identities::None),
        linkage2: None,
        format: (info.format != format).then_some(info.format),
        is_merged: false,
        modified_seconds,
        modified_offset_bytes: None,
    })
}

/// Refuses an image that must have no children.
pub(crate) fn refuse_as_parent(path: &Path, info: &ImageInfo) -> Result<()> {
    let Some(why) = info.refusal_as_parent() else { return Ok(()) };
    Err(DiskError::BadOptions {
        what: format!("{}: {why}", path.display()),
        hint: "map the device with the kind vmfsRawDeviceMap, or `convert` the disk to a new one".into(),
    })
}

/// The relative path from an absolute folder to an absolute path.
fn relative_path(from_dir: &Path, to: &Path) -> PathBuf {
    let from: Vec<Component<'_>> = from_dir.components().collect();
    let target: Vec<Component<'_>> = to.components().collect();
    let shared = from.iter().zip(&target).take_while(|(a, b)| a == b).count();
    let up = from[shared..].iter().map(|_| Component::ParentDir);
    up.chain(target[shared..].iter().copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_paths_lead_from_the_folder_to_the_file() {
        let way = |from: &str, to: &str| relative_path(Path::new(from), Path::new(to)).to_str().unwrap().to_owned();
        assert_eq!(way("/a/b", "/a/b/p.vhd"), "p.vhd");
        assert_eq!(way("/a/b", "/a/c/p.vhd"), "../c/p.vhd");
        assert_eq!(way("/a", "/a/s/p.vhd"), "s/p.vhd");
    }

    #[test]
    fn an_unknown_or_foreign_extension_is_reported_with_all_that_can_be_used() {
        for name in ["disk.xyz", "disk.qed"] {
            let error = create(Path::new("/nonexistent").join(name), &CreateRequest::default()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(&name[5..]) && error.contains("`CreateRequest::format`"), "{error}");
            for format in Format::ALL {
                assert!(error.contains(&format!(".{format}")), "{name}: {format}: {error}");
            }
        }
    }

    #[test]
    fn a_dynamic_raw_file_is_refused_with_the_formats_that_have_blocks() {
        let request =
            CreateRequest { size_bytes: Some(1 << 20), disk_type: Some(DiskType::Dynamic), ..CreateRequest::default() };
        let error = create("/nonexistent/disk.raw", &request).unwrap_err().to_string();
        assert!(error.contains("use .vhd, .vhdx, .vmdk, .qcow2 or .vdi;"), "{error}");
    }
}
