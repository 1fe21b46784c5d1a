//! What `diff` lists and exports: the differences of two disks, or what was tracked since a point.

use super::points;
use crate::{
    context::Context,
    exit::{Failure, Outcome},
    in_use, json,
    options::FormatArg,
    sizes::Exact,
};
use diskwright_disk::{
    Changes, Difference, DiskState, EachChange, Export, OpenOptions, Opened, Progress, Result, SincePoint,
};
use diskwright_store::{EngineKind, Files};
use std::path::{Path, PathBuf};

/// What the disk is compared with, and how.
pub(super) struct DiffRequest<'a> {
    pub(super) track: Option<&'a str>,
    /// The later point.
    pub(super) to: Option<&'a str>,
    pub(super) other: Option<&'a Path>,
    pub(super) since: Option<&'a Path>,
    pub(super) exact: bool,
    pub(super) second_format: Option<FormatArg>,
    /// Internal snapshots of the disk, and of the other disk.
    pub(super) snapshots: [Option<String>; 2],
    pub(super) force_share: bool,
    /// Whether data will be read.
    pub(super) exports: bool,
}

/// Where the ranges come from.
pub(super) enum Source {
    Disks(Box<Difference>),
    Point { since: Box<SincePoint>, name: String, path: PathBuf },
}

impl Source {
    /// Opens the disk and the one that it is compared with. Returns the warnings too.
    pub(super) fn open(context: &mut Context, file: &Path, asked: &DiffRequest<'_>) -> Outcome<(Self, Vec<String>)> {
        let reads = asked.other.is_some() || asked.exact || asked.exports;
        let options = if reads { context.global.bulk_options() } else { context.global.open_options(false) };
        let [snapshot, second_snapshot] = asked.snapshots.clone();
        let options = OpenOptions { force_share: asked.force_share, snapshot, ..options };
        let engine = context.global.engine();
        if let (Some(name), Some(to)) = (asked.track, asked.to)
            && let Some(client) = in_use::client(file)?
        {
            let since = points::of_disk_in_use(&client, file, &options, (name, to))?;
            return Ok(Self::of_points(context, since, (name, file), Vec::new()));
        }
        if asked.track.is_none() && !asked.force_share {
            [Some(file), asked.other].into_iter().flatten().try_for_each(refuse_in_use)?;
        }
        let disk = context.open(file, &options)?;
        let mut warnings = disk.warnings().to_vec();
        let told = Vec::new();
        let source = match (asked.track, asked.other, &disk) {
            (Some(name), ..) => {
                let since = match asked.to {
                    Some(to) => SincePoint::between(&disk, file, name, to)?,
                    None => SincePoint::new(disk, file, name)?,
                };
                return Ok(Self::of_points(context, since, (name, file), warnings));
            }
            (None, Some(other), _) => {
                let format = asked.second_format.map(FormatArg::format).or(options.format);
                let base = context.open(other, &OpenOptions { format, snapshot: second_snapshot, ..options })?;
                warnings.extend_from_slice(base.warnings());
                Self::of(asked, Difference::between((disk, file), (base, other), engine)?)
            }
            (None, None, Opened::Disk(chain)) => {
                Self::of(asked, Difference::since((chain, file), asked.since, &options.files, engine)?)
            }
            (None, None, Opened::Remote(_)) => {
                return Err(Failure::usage(format!(
                    "{}: a disk of a server has no parent; name the disk that it is to be compared with",
                    file.display()
                )));
            }
        };
        Ok(source.with_warnings(context, told, warnings))
    }

    fn of_points(
        context: &mut Context,
        since: SincePoint,
        (name, path): (&str, &Path),
        warnings: Vec<String>,
    ) -> (Self, Vec<String>) {
        let why = since.everything();
        let told = why.map(|why| format!("everything counts as changed since the point {name:?}: {why}"));
        let source = Self::Point { since: Box::new(since), name: name.to_owned(), path: path.to_owned() };
        source.with_warnings(context, told.into_iter().collect(), warnings)
    }

    /// Warns, also of sizes that differ.
    fn with_warnings(
        self,
        context: &mut Context,
        mut told: Vec<String>,
        mut warnings: Vec<String>,
    ) -> (Self, Vec<String>) {
        let [result, base] = self.states();
        if result.size_bytes != base.size_bytes {
            told.push(format!("the disks differ in size: {} and {}", Exact(result.size_bytes), Exact(base.size_bytes)));
        }
        told.iter().for_each(|warning| context.warn(warning));
        warnings.extend(told);
        (self, warnings)
    }

    fn of(asked: &DiffRequest<'_>, difference: Difference) -> Self {
        Self::Disks(Box::new(if asked.exact { difference.exactly() } else { difference }))
    }

    /// The states of the disk and of what it is compared with.
    pub(super) fn states(&self) -> [DiskState; 2] {
        match self {
            Self::Disks(difference) => difference.states(),
            Self::Point { since, .. } => since.states(),
        }
    }

    /// The path of the disk.
    pub(super) fn path(&self) -> &Path {
        match self {
            Self::Disks(difference) => difference.disk().1,
            Self::Point { path, .. } => path,
        }
    }

    /// The path of the other disk, or the name of the point.
    pub(super) fn base(&self) -> String {
        match self {
            Self::Disks(difference) => json::path(difference.base().1),
            Self::Point { name, .. } => name.clone(),
        }
    }

    /// Whether the contents of the disks are read.
    pub(super) fn reads_contents(&self) -> bool {
        matches!(self, Self::Disks(difference) if difference.reads_contents())
    }

    pub(super) fn export(&mut self, engine: EngineKind, files: &Files) -> Export<'_> {
        match self {
            Self::Disks(difference) => difference.export(engine, files),
            Self::Point { since, .. } => since.export(engine, files),
        }
    }
}

/// A disk in use changes while it is compared. Its frozen images do not.
fn refuse_in_use(file: &Path) -> Outcome<()> {
    let Some(client) = in_use::client(file)? else { return Ok(()) };
    let file = file.display();
    Err(Failure::new(format!(
        "{file}: {} has it open, and it would change while it is compared; freeze it first (`diskwright snapshot {file}`) and name the frozen image, or name two points of its change tracking (--track and --to)",
        client.peer
    )))
}

impl Changes for Source {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        match self {
            Self::Disks(difference) => difference.for_each(progress, each),
            Self::Point { since, .. } => since.for_each(progress, each),
        }
    }
}
