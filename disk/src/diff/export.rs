//! Exports changes: as a differencing image, or as a stream.
//!
//! ```text
//!   OUT.avhdx, OUT.vhd ...   a child of the base with exactly the changed ranges; zeros are its
//!                            own, and parts of blocks have a sector bitmap
//!   OUT.dwdiff, a pipe       a stream (`stream.rs`)
//! ```
//!
//! A child gets the identity of the disk that is exported. Its parent then has the same contents
//! below it as that disk has, so both read the same, and a child of one is a child of the other.
//!
//! A file is written under a temporary name (`OUT.partial`), and renamed, durably, when it is
//! complete and durable. If anything fails, or the user stops it, the file is removed.

use super::{
    change::{ChangeKind, Changes},
    payload::Payload,
    sides::Difference,
    sink::{Written, write_into},
    state::DiskState,
    stream::{StoreBytes, write_stream},
};
use crate::{
    Disk, DiskError, Layer, Opened, Progress, Result,
    copying::{
        create::{self, is_there},
        partial::PartialFile,
    },
    error::file_error,
    opening::{
        gate,
        image_file::{Access, open_image},
    },
};
use diskwright_image::{Format, ImageInfo, ParentLink, probe, probe::DetectedFormat};
use diskwright_store::{CacheMode, EngineKind, Files, LockMode, OpenOptions};
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// The extension of a stream.
const STREAM_EXTENSION: &str = "dwdiff";

/// The changes to export, and what they apply to.
pub struct Export<'a> {
    /// The disk, open for reading.
    pub disk: Opened,
    /// The path of the disk, for errors.
    pub path: PathBuf,
    /// The ranges in which the disk differs from its base.
    pub changes: &'a mut dyn Changes,
    /// The state of the base.
    pub base: DiskState,
    /// The state of the disk.
    pub result: DiskState,
    /// The images of the base, the top first: the parents of an exported image. A stream does not
    /// need them.
    pub base_layers: Vec<Layer>,
    /// How the disk is read.
    pub engine: EngineKind,
    /// The file system in which a file is made.
    pub files: Files,
}

/// Totals of an export.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exported {
    /// Bytes of the disk that the export contains as data.
    pub data_bytes: u64,
    /// Bytes of the disk that the export records as zeros.
    pub zero_bytes: u64,
    /// Warnings for the user, one sentence each.
    pub warnings: Vec<String>,
}

impl From<Written> for Exported {
    fn from(Written { data_bytes, zero_bytes }: Written) -> Self {
        Self { data_bytes, zero_bytes, warnings: Vec::new() }
    }
}

/// What a name means.
enum Kind {
    Stream,
    Image(Format),
}

impl Difference {
    /// An export of the difference.
    pub fn export(&mut self, engine: EngineKind, files: &Files) -> Export<'_> {
        let (disk, path) = self.disk();
        let (disk, path) = (disk.clone(), path.to_owned());
        let base_layers = self.base().0.disk().map_or_else(Vec::new, |base| base.layers().to_vec());
        let [result, base] = self.states();
        Export { disk, path, changes: self, base, result, base_layers, engine, files: files.clone() }
    }
}

impl Export<'_> {
    /// Writes a file whose kind its extension says: `.dwdiff` for a stream, `.avhdx`, `.vhdx`,
    /// `.avhd` or `.vhd` for a differencing image. Durable on return. `progress` counts bytes of
    /// the disk. With `dry_run` only the ranges are found: bytes of data that are zero count as
    /// data then.
    ///
    /// # Errors
    /// [`DiskError::Usage`] for another extension; [`DiskError::BadOptions`] if the base cannot be
    /// the parent of such an image; [`DiskError::Exists`]; errors of the changes, of reading and
    /// writing; [`DiskError::Stopped`]. No file is left then.
    pub fn to_file(self, out: &Path, dry_run: bool, progress: &mut Progress<'_>) -> Result<Exported> {
        let kind = kind_of(out)?;
        let place = match kind {
            Kind::Stream => None,
            Kind::Image(format) => Some(self.place_of_child(out, format)?),
        };
        if self.files.facts(out).is_ok() {
            return Err(is_there(out));
        }
        if dry_run {
            return self.measured(progress);
        }
        let files = self.files.clone();
        let partial = PartialFile::new(&files, out, "export");
        partial.clear()?;
        let base = self.base_layers.first().map(|base| base.path.clone());
        let written = match place {
            None => self.stream_into(&partial, progress),
            Some(place) => self.child_into(out, &partial, place, progress),
        };
        let named = |written| partial.give_name().map(|()| written);
        let written =
            written.map_err(|error| partial.shown(error)).and_then(named).inspect_err(|_| partial.discard())?;
        let is_image = matches!(kind, Kind::Image(_));
        let warning = base.filter(|_| is_image).and_then(|base| create::parent_out_of_reach(&files, out, &base));
        Ok(Exported { warnings: warning.into_iter().collect(), ..written.into() })
    }

    /// Writes a stream into `out`, and flushes it. Errors of writing name `name`.
    ///
    /// # Errors
    /// As [`Export::to_file`].
    pub fn to_stream(mut self, out: &mut dyn Write, name: &Path, progress: &mut Progress<'_>) -> Result<Exported> {
        let states = [self.base, self.result];
        let written = write_stream(out, name, [&states[0], &states[1]], &mut self.pieces(), progress)?;
        out.flush().map_err(|source| file_error("write the changes into it", name, source))?;
        Ok(written.into())
    }

    fn pieces(&mut self) -> Payload<'_> {
        Payload { disk: &self.disk, path: &self.path, changes: self.changes, engine: self.engine }
    }

    /// Counts the ranges, without reading what is in them.
    fn measured(self, progress: &mut Progress<'_>) -> Result<Exported> {
        let mut written = Exported::default();
        self.changes.for_each(progress, &mut |change, _| {
            match change.kind {
                ChangeKind::Data => written.data_bytes += change.len_bytes,
                ChangeKind::Zeros => written.zero_bytes += change.len_bytes,
                ChangeKind::Beyond => {}
            }
            Ok(())
        })?;
        Ok(written)
    }

    fn stream_into(mut self, partial: &PartialFile<'_>, progress: &mut Progress<'_>) -> Result<Written> {
        let options =
            OpenOptions { writable: true, create_new: true, cache: CacheMode::PageCache, lock: LockMode::Exclusive };
        let files = self.files.clone();
        let store = files.open(partial.path(), &options)?;
        partial.created();
        let states = [self.base, self.result];
        let mut out = StoreBytes::new(store);
        let path = partial.path();
        write_stream(&mut out, path, [&states[0], &states[1]], &mut self.pieces(), progress).and_then(|written| {
            let synced = out.flush();
            synced.map_err(|source| file_error("make it durable", path, source)).map(|()| written)
        })
    }

    /// The child's description, and the link to its parent.
    fn place_of_child(&self, out: &Path, format: Format) -> Result<(ImageInfo, ParentLink)> {
        let refused = |what: String, hint: &str| {
            Err(DiskError::BadOptions {
                what: format!("cannot export a differencing image {}: {what}", out.display()),
                hint: hint.into(),
            })
        };
        if self.base_layers.is_empty() {
            return refused(
                "no file holds the disk as it was, so none can be its parent".into(),
                "name a stream (.dwdiff)",
            );
        }
        let Some(base) = self.base_layers.first().filter(|_| self.base.format == format) else {
            return refused(
                format!("it would be a {format} child of a {} disk, and a chain has one format", self.base.format),
                "name a stream (.dwdiff), or an image of the base's format",
            );
        };
        if self.base.sector_bytes != self.result.sector_bytes {
            return refused(
                format!(
                    "the base has sectors of {} bytes and the disk of {}, and a chain has one sector size",
                    self.base.sector_bytes, self.result.sector_bytes
                ),
                "name a stream (.dwdiff)",
            );
        }
        let info = ImageInfo {
            size_bytes: self.result.size_bytes,
            linkage_id: self.base.linkage_id,
            ..base.image.info().clone()
        };
        let find = |path: &Path| self.files.canonical(path).map_err(|source| file_error("find it", path, source));
        let parent = find(&base.path)?;
        let dir = out.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let seconds = gate::time_to_record(&self.files, &parent, &**base.image.store())?;
        let link = create::link_to((&self.files, &parent), &info, seconds, (out, info.format), &find(dir)?)?;
        Ok((info, link))
    }

    fn child_into(
        self,
        out: &Path,
        partial: &PartialFile<'_>,
        (info, link): (ImageInfo, ParentLink),
        progress: &mut Progress<'_>,
    ) -> Result<Written> {
        create::create_child(&self.files, out, partial.path(), &info, link)?;
        partial.created();
        self.fill_child(partial, info.format, progress)
    }

    fn fill_child(mut self, partial: &PartialFile<'_>, format: Format, progress: &mut Progress<'_>) -> Result<Written> {
        let access = Access { format: Some(format), writable: true, ..Access::default() };
        let path = partial.path();
        let (_, stores) = open_image(&self.files, path, &access, &mut Vec::new())?;
        stores.iter().try_for_each(|store| partial.check(&**store))?;
        let image = probe::open_parts(stores, DetectedFormat::certain(format), true, self.result.sector_bytes)?;
        // With its parents: zeros of a child without any would not be recorded.
        let layers = [Layer { path: path.to_owned(), image: image.clone() }];
        let child = Disk::from_layers([&layers[..], &self.base_layers].concat(), Vec::new())?;
        let engine = self.engine;
        let written = write_into(&child, path, engine, &mut self.pieces(), progress)?;
        if let (Some(writer), Some(id)) = (image.writer(), self.result.linkage_id) {
            writer.set_linkage_id(id)?;
        }
        child.close()?;
        Ok(written)
    }
}

fn kind_of(out: &Path) -> Result<Kind> {
    if out.extension().is_some_and(|extension| extension.eq_ignore_ascii_case(STREAM_EXTENSION)) {
        return Ok(Kind::Stream);
    }
    match probe::format_of_extension(out) {
        Some(format) if format.driver().has_blocks => Ok(Kind::Image(format)),
        _ => Err(DiskError::Usage {
            what: format!("{}: cannot tell from its extension what the export should be", out.display()),
            hint: format!(
                "use .dwdiff for a stream, or {} for a differencing image",
                Format::extensions_of(|driver| driver.has_blocks)
            ),
        }),
    }
}
