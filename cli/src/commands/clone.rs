//! `diskwright clone PARENT NAME...`: children of one disk.
//!
//! The parent of clones must not change. So a disk that `serve` or `attach` has open is frozen
//! first, by that process, and the frozen image is the parent:
//!
//! ```text
//!   vm.vhdx (in use)  ──snapshot──▶  vm.vhdx (in use)   web.vhdx   db.vhdx
//!                                         └── vm_TIME.avhdx ──┴──────┘
//! ```

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    options::FormatArg,
    space::Space,
    switches,
};
use clap::Args;
use diskwright_disk::{CreateRequest, DiskError, clone_disk, require_file};
use diskwright_image::probe;
use diskwright_load::clock;
use diskwright_serve::control::{Client, Done, Operation};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `clone`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every clone is a differencing disk: it begins as PARENT reads and holds only what is written to it from then on. All are made or none. A disk that cannot be read gets none. After a kill or a power cut the same command keeps those that it has made, if they are unused, and makes the rest. \
While a clone lies in PARENT's folder, PARENT is not opened for writing.

A PARENT that `serve` or `attach` has open is frozen first, as `snapshot` does it, while its clients go on. The frozen image is then the parent of the clones and of the disk.

EXAMPLES
  diskwright clone golden.vhdx web1.vhdx web2.vhdx db.vhdx
  diskwright clone golden.vhdx vm{01..20}.vhdx
  diskwright clone golden.vhdx scratch.vhdx --dry-run
  diskwright clone running.vhdx test.vhdx --name for-test")]
pub struct CloneArgs {
    /// The disk from which the clones differ.
    parent: PathBuf,
    #[command(flatten)]
    how: CloneHow,
}

/// Which clones are made: also for `serve-ctl`.
#[derive(Debug, Args)]
pub struct CloneHow {
    /// The files to make.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<PathBuf>,
    /// Suffix of the frozen image's name, where the disk is in use. [default: the time]
    #[arg(long = "name", value_name = "NAME")]
    frozen_name: Option<String>,
    /// Check which names are taken and what space is needed, and make nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What `clone --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk from which the clones differ; of a disk in use, its frozen image.
    parent: String,
    /// The disk that was frozen for the clones, because it is in use; `null` if it is not.
    disk_in_use: Option<String>,
    /// The clones.
    clones: Vec<String>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.clone/1";
}

pub fn run(context: &mut Context, args: &CloneArgs) -> Outcome {
    for name in [&args.parent].into_iter().chain(&args.how.names) {
        require_file(name, "clone")?;
    }
    if let Some(client) = in_use::client(&args.parent)? {
        return of_disk_in_use(context, &args.parent, &client, &args.how);
    }
    let warnings = make(context, &args.parent, &args.how)?;
    print_report(context, (&args.parent, None), &args.how, &warnings)
}

/// Freezes a disk in use, and clones the frozen image, for `serve-ctl` too.
pub fn of_disk_in_use(context: &mut Context, disk: &Path, client: &Client, how: &CloneHow) -> Outcome {
    // What is refused afterwards leaves the disk with one more frozen image.
    if let Some(taken) = how.names.iter().find(|name| name.exists()) {
        return Err(DiskError::Exists { path: taken.clone() }.into());
    }
    how.names.iter().try_for_each(|name| refuse_name(context, disk, name))?;
    let name = how.frozen_name.clone().unwrap_or_else(clock::compact_utc_now);
    let operation = Operation::Snapshot { name, track: None, dry_run: how.dry_run };
    let Done::Frozen(frozen) = in_use::call(client, operation)? else { return Err(in_use::unexpected(client)) };
    let mut warnings = frozen.warnings;
    if !how.dry_run {
        let made = make(context, &frozen.frozen, how).map_err(|failure| match failure {
            Failure::Sentence(text) | Failure::Usage(text) => Failure::new(format!(
                "{text}; {} was frozen for it, and `diskwright snapshot delete {}` takes that back",
                disk.display(),
                frozen.frozen.display()
            )),
            other => other,
        })?;
        warnings.extend(made);
    }
    print_report(context, (&frozen.frozen, Some(disk)), how, &warnings)
}

/// Refuses a clone that could not be made, as far as names show it.
fn refuse_name(context: &Context, disk: &Path, name: &Path) -> Outcome<()> {
    let folder = name.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(Failure::new(format!(
            "{}: there is no folder {}; make it first",
            name.display(),
            folder.display()
        )));
    }
    let asked = context.global.format.map(FormatArg::format);
    let (own, parents) = (asked.or_else(|| probe::format_of_extension(name)), probe::format_of_extension(disk));
    match (own, parents) {
        (Some(own), Some(parents)) if own != parents && !own.driver().child_takes_any_parent => {
            Err(Failure::new(format!(
                "{}: a {own} disk can only have a {own} parent, and {} is {parents}",
                name.display(),
                disk.display()
            )))
        }
        _ => Ok(()),
    }
}

/// Makes the clones of a disk that does not change.
fn make(context: &Context, parent: &Path, how: &CloneHow) -> Outcome<Vec<String>> {
    let request = CreateRequest {
        format: context.global.format.map(FormatArg::format),
        parents: context.global.parents(),
        ..CreateRequest::default()
    };
    let mut display = context.progress("making").counting("clones");
    let mut tell = |made, all| display.update(made, all);
    clone_disk(parent, &how.names, &request, how.dry_run, &mut tell).map_err(in_use::explain)
}

/// `parent` is the frozen image of `disk_in_use`, if there is one.
fn print_report(
    context: &mut Context,
    (parent, disk_in_use): (&Path, Option<&Path>),
    how: &CloneHow,
    warnings: &[String],
) -> Outcome {
    warnings.iter().for_each(|warning| context.warn(warning));
    let like = disk_in_use.unwrap_or(parent);
    let open = context.global.open_options(false);
    let first = how.names.first().filter(|_| how.dry_run);
    // The disk in use gets a new child as well.
    let count = how.names.len() + usize::from(disk_in_use.is_some());
    let space = first.and_then(|child| Space::of_children(like, child, count, &open));
    if context.global.json {
        context.print_json(&Report {
            parent: json::path(parent),
            disk_in_use: disk_in_use.map(json::path),
            clones: how.names.iter().map(|name| json::path(name)).collect(),
            warnings: switches::all_with_switches(warnings),
            space,
            dry_run: how.dry_run,
        })?;
    } else if !context.global.quiet {
        let shown = printable(&json::path(parent));
        let clones = match how.names.len() {
            1 => "1 clone".to_owned(),
            more => format!("{more} clones"),
        };
        let frozen = disk_in_use.map(|disk| {
            let verb = if how.dry_run { "would become" } else { "is now" };
            format!("{} is in use, and {verb} a new child of {shown}; ", printable(&json::path(disk)))
        });
        let frozen = frozen.unwrap_or_default();
        if how.dry_run {
            let needs = space.map_or_else(String::new, |space| format!("; it {space}"));
            writeln!(context.text(), "{frozen}{clones} of {shown} would be made{needs}; nothing was changed")?;
        } else {
            writeln!(context.text(), "{frozen}{clones} of {shown} made")?;
        }
    }
    Ok(exit::OK)
}
