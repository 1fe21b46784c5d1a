//! `diskwright snapshot`: freeze a disk, go back, remove; and the tree of a folder (`list.rs`).

mod list;

use crate::{
    commands::merge,
    context::Context,
    describe::printable,
    exit::{self, Codes, Outcome},
    in_use,
    json::{self, Document},
    several::{self, Between},
    space::Space,
};
use clap::{Args, Subcommand};
use diskwright_disk::{
    DiskError, FormerImage, KeptName, MergeOptions, Merged, Snapshot, SnapshotOptions, remove_snapshot, require_file,
    revert, snapshot,
};
use diskwright_load::clock;
use diskwright_serve::control::{Client, Done, Operation};
#[cfg(test)]
pub use list::Listing;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

/// Arguments of `snapshot`.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
FILE is frozen under a new name beside it (vm.vhdx as vm_monday.avhdx), and FILE becomes a new, empty differencing disk above it. So the \
name of the disk stays, and leads to what is written from now on. No data is copied.

A disk that `serve` or `attach` has open is frozen by that process, while its clients go on. File systems that are mounted from an attached disk are \
frozen for that moment, so that the frozen image needs no repair. A disk that any other program has open is refused.

The change is one rename: after a power cut there is the old disk or the new one. Several disks are frozen one after the other, under one name, not at the same instant.

EXAMPLES
  diskwright snapshot vm.vhdx --name before-update
  diskwright snapshot system.vhdx data.vhdx --name monday
  diskwright snapshot vm.vhdx --name monday --track monday
  diskwright snapshot vm.vhdx --dry-run
  diskwright snapshot list .
  diskwright snapshot revert vm.vhdx --discard
  diskwright snapshot delete vm_monday.avhdx"
)]
pub struct SnapshotArgs {
    #[command(subcommand)]
    action: Option<Action>,
    /// The disks to freeze.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    #[command(flatten)]
    naming: Naming,
    /// Start a point of change tracking of this name at the moment of the snapshot (see `track`).
    #[arg(long, value_name = "POINT")]
    track: Option<String>,
}

#[derive(Debug, Args)]
struct Naming {
    /// What is appended to the disk's name to name the frozen image. [default: the time]
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Check whether it can be done, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Draw the tree of a folder's images: parents, children, siblings and orphans.
    #[command(after_help = "\
Images are read without a lock, so those in use are listed too.

EXAMPLES
  diskwright snapshot list /var/lib/machines
  diskwright snapshot list vm.vhdx --json")]
    List {
        /// A folder, or an image in it.
        #[arg(value_name = "FOLDER|FILE")]
        place: PathBuf,
    },
    /// Go back: the disk becomes a new child of its parent, or of another snapshot.
    #[command(after_help = "\
What the disk has now is kept under a new name beside it, unless --discard is given.

EXAMPLES
  diskwright snapshot revert vm.vhdx
  diskwright snapshot revert vm.vhdx --to vm_monday.avhdx --name given-up
  diskwright snapshot revert vm.vhdx --discard")]
    Revert {
        /// The disk.
        file: PathBuf,
        /// The snapshot to go back to. [default: the disk's parent]
        #[arg(long, value_name = "FILE")]
        to: Option<PathBuf>,
        /// Remove what the disk has now; what was written since the snapshot is lost.
        #[arg(long, conflicts_with = "name")]
        discard: bool,
        #[command(flatten)]
        naming: Naming,
    },
    /// Remove a snapshot; if an image has it as its parent, both are merged.
    #[command(after_help = "\
If one image has the snapshot as its parent, that image keeps its name and its contents, and gets the data of the snapshot \
(as `merge CHILD --keep-name` does). An image with several children is refused.

An image that no other has as its parent is the newest state: the disk itself, or a branch that was given up. What only it stores is lost, so \
it is removed only with --discard.

The snapshot of a disk that `serve` or `attach` has open is merged by that process while its clients go on.

EXAMPLES
  diskwright snapshot delete vm_monday.avhdx vm_tuesday.avhdx
  diskwright snapshot delete vm_monday.avhdx --dry-run
  diskwright snapshot delete vm_given-up.avhdx --discard")]
    Delete {
        /// The snapshots.
        #[arg(required = true, value_name = "FILE")]
        files: Vec<PathBuf>,
        /// Remove an image that no other has as its parent; what only it stores is lost.
        #[arg(long)]
        discard: bool,
        /// Check whether it can be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
}

/// What `snapshot`, `snapshot revert` and `snapshot delete` print with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// `snapshot`, `revert` or `delete`.
    action: &'static str,
    /// The disk; of a deletion, the snapshot.
    file: String,
    /// The parent that the disk has now.
    parent: Option<String>,
    /// The name that the image has now which was the disk; `null` if it was removed.
    frozen: Option<String>,
    /// After a deletion: the child that has the data now; `null` if the snapshot had no child.
    merged_into: Option<String>,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Whether the disk was in use, and was changed by the process that has it open.
    in_use: bool,
    /// Where the file systems are mounted that were frozen for the moment of the snapshot.
    file_systems: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.snapshot/1";
}

pub fn run(context: &mut Context, args: &SnapshotArgs) -> Outcome {
    match &args.action {
        Some(Action::List { place }) => list::list(context, place),
        Some(Action::Revert { file, to, discard, naming }) => {
            let left = if *discard { FormerImage::Discarded } else { FormerImage::Kept };
            let options = options(context, file, naming)?;
            let done = revert(file, to.as_deref(), left, &options)?;
            print_report(context, "revert", &done, naming.dry_run, None)
        }
        Some(Action::Delete { files, discard, dry_run }) => {
            let naming = Naming { name: None, dry_run: *dry_run };
            several::each(context, files, Codes::USUAL, Between::Nothing, |context, file| {
                let options = SnapshotOptions { discard: *discard, ..options(context, file, &naming)? };
                delete(context, file, &options)
            })
        }
        None => {
            // One name for all disks, so that those which belong together can be found.
            let name = args.naming.name.clone().unwrap_or_else(clock::compact_utc_now);
            let naming = Naming { name: Some(name), dry_run: args.naming.dry_run };
            several::each(context, &args.files, Codes::USUAL, Between::Nothing, |context, file| {
                let options = SnapshotOptions { track: args.track.clone(), ..options(context, file, &naming)? };
                if let Some(client) = in_use::client(file)? {
                    return freeze(context, file, &client, options.name, options.track, options.dry_run);
                }
                let done = snapshot(file, &options).map_err(in_use::explain)?;
                print_report(context, "snapshot", &done, naming.dry_run, None)
            })
        }
    }
}

fn options(context: &Context, file: &Path, naming: &Naming) -> Outcome<SnapshotOptions> {
    require_file(file, "freeze")?;
    Ok(SnapshotOptions {
        name: naming.name.clone().unwrap_or_else(clock::compact_utc_now),
        open: context.global.open_options(true),
        dry_run: naming.dry_run,
        track: None,
        discard: false,
    })
}

/// Prints what was done. `file_systems`: those that were frozen while the disk was in use; `None`
/// for a disk that was not.
fn print_report(
    context: &mut Context,
    action: &'static str,
    done: &Snapshot,
    dry_run: bool,
    file_systems: Option<Vec<String>>,
) -> Outcome {
    // The frozen image has the format and the size of the new child.
    let open = context.global.open_options(false);
    let like = if action == "revert" { &done.parent } else { &done.disk };
    let space = dry_run.then(|| Space::of_children(like, &done.disk, 1, &open)).flatten();
    if context.global.json {
        let report = Report {
            action,
            file: json::path(&done.disk),
            parent: Some(json::path(&done.parent)),
            frozen: done.frozen.as_deref().map(json::path),
            merged_into: None,
            space,
            dry_run,
            in_use: file_systems.is_some(),
            file_systems: file_systems.unwrap_or_default(),
        };
        context.print_json(&report)?;
    } else if !context.global.quiet {
        // In the disk's own folder, a path is shown as the disk's was given.
        let dir = done.disk.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let dir = dir.canonicalize().ok();
        let name = |path: &Path| {
            let shown = path.file_name().filter(|_| path.parent() == dir.as_deref());
            printable(&json::path(&shown.map_or_else(|| path.to_owned(), |name| done.disk.with_file_name(name))))
        };
        let file = printable(&json::path(&done.disk));
        let verb = if dry_run { "would become" } else { "is now" };
        let needs = space.map_or_else(String::new, |space| format!("; it {space}"));
        let end = if dry_run { format!("{needs}; nothing was changed") } else { String::new() };
        let kept = match &done.frozen {
            Some(frozen) if *frozen != done.parent => format!(", and what it had is in {}", name(frozen)),
            Some(_) => String::new(),
            None => ", and what it had is gone".to_owned(),
        };
        let kept = if dry_run { kept.replace(" is ", " would be ") } else { kept };
        writeln!(context.text(), "{file} {verb} a new child of {}{kept}{end}", name(&done.parent))?;
    }
    Ok(exit::OK)
}

/// Freezes a disk in use, for `serve-ctl` too.
pub fn freeze(
    context: &mut Context,
    file: &Path,
    client: &Client,
    name: String,
    track: Option<String>,
    dry_run: bool,
) -> Outcome {
    let Done::Frozen(done) = in_use::call(client, Operation::Snapshot { name, track, dry_run })? else {
        return Err(in_use::unexpected(client));
    };
    done.warnings.iter().for_each(|warning| context.warn(warning));
    let frozen = Some(done.frozen.clone());
    let snapshot = Snapshot { disk: file.to_owned(), parent: done.frozen, frozen, warnings: Vec::new() };
    let file_systems = done.file_systems.iter().map(|dir| json::path(dir)).collect();
    print_report(context, "snapshot", &snapshot, dry_run, Some(file_systems))
}

/// Removes a snapshot.
fn delete(context: &mut Context, file: &Path, options: &SnapshotOptions) -> Outcome {
    let dry_run = options.dry_run;
    let mut display = context.progress("merging");
    let removed = remove_snapshot(file, options, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    if let Err(DiskError::InUse { path, .. }) = &removed
        && let Some(below) = in_use::chain_with(path)?
        && let Some(child) = below.depth.checked_sub(1).map(|above| &below.chain[above])
    {
        let merging =
            MergeOptions { into: Some(path.clone()), keep: KeptName::Childs, dry_run, ..MergeOptions::default() };
        let (merged, elapsed) = merge::ask(context, child, &below.client, &merge::MergeRequest::of(&merging)?)?;
        return print_deleted(context, file, Some(&merged), dry_run, elapsed, true);
    }
    print_deleted(context, file, removed.map_err(in_use::explain)?.as_ref(), dry_run, elapsed, false)
}

fn print_deleted(
    context: &mut Context,
    file: &Path,
    merged: Option<&Merged>,
    dry_run: bool,
    elapsed: Duration,
    in_use: bool,
) -> Outcome {
    match merged {
        Some(merged) if !context.global.json && !context.global.quiet => {
            merge::print_report(context, file, merged, dry_run, elapsed)?;
            Ok(exit::OK)
        }
        merged => print_removal(context, file, merged, dry_run, in_use),
    }
}

fn print_removal(context: &mut Context, file: &Path, merged: Option<&Merged>, dry_run: bool, in_use: bool) -> Outcome {
    if context.global.json {
        context.print_json(&Report {
            action: "delete",
            file: json::path(file),
            parent: None,
            frozen: None,
            merged_into: merged.map(|merged| json::path(&merged.disk)),
            space: dry_run.then(|| match merged {
                Some(merged) => Space::on(&merged.target, merged.growth_bytes),
                None => Space::on(file, 0),
            }),
            dry_run,
            in_use,
            file_systems: Vec::new(),
        })?;
    } else if !context.global.quiet {
        let what = if dry_run { "would be removed; nothing was changed" } else { "is removed" };
        writeln!(context.text(), "{} {what}", printable(&json::path(file)))?;
    }
    Ok(exit::OK)
}
