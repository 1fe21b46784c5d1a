//! `diskwright diff FILE`: which ranges of a disk differ from its parent, an ancestor or another
//! disk (`list.rs`); exports of them (`export.rs`), and their application to a copy (`apply.rs`).

pub mod apply;
pub mod export;
pub mod list;
mod points;
mod source;

use self::source::{DiffRequest, Source};
use crate::{
    context::Context,
    exit::{Codes, Failure, Outcome},
    options::{FormatArg, ShareArgs},
};
use clap::Args;
use std::path::PathBuf;

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE is the disk with the changes. It is compared with its parent, with ANCESTOR, or with OTHER, or --track lists what was written since a point (with --to: up to a later one, also of a disk in use). `data`: FILE holds data there; `zeros`: it reads as \
zeros; `beyond`: it ends before that range. Ranges of a chain come from tables and sector bitmaps alone, without reading data: what was rewritten with \
the same bytes is listed, unless --exact is given. Two disks without a common image are read and compared.

--export writes what turns the other disk into FILE: as a differencing image (OUT.avhdx, OUT.avhd), as a stream (OUT.dwdiff), or with - as a stream \
on standard output. --apply applies it to COPY, in place; - reads a stream from standard input. COPY must be the disk to which it applies: it is \
recognised by its identity (a VHD keeps its identity when it is written). It then has the contents and the identity of FILE, so the next export applies to it. \
An application that was interrupted leaves a disk that is neither, and the same command finishes it.

EXIT CODES  0 no differences, 1 differences, 2 could not compare; with --export and --apply 0 done, 1 failed

EXAMPLES
  diskwright diff vm.avhdx
  diskwright diff vm.avhdx --since base.vhdx --json
  diskwright diff new.vhdx old.raw
  diskwright diff vm.qcow2 vm.qcow2 --second-snapshot before-update
  diskwright diff tuesday.avhdx --export tuesday.dwdiff
  diskwright diff vm.vhdx --track monday --export monday.dwdiff
  diskwright diff vm.vhdx --track monday --to tuesday --export tuesday.dwdiff
  diskwright diff --apply tuesday.dwdiff --onto /backup/vm.vhdx
  diskwright diff vm.avhdx --export - | ssh host diskwright diff --apply - \\
      --onto /backup/vm.vhdx")]
pub struct DiffArgs {
    /// The disk with the changes: a file, or an NBD URI.
    #[arg(required_unless_present = "apply", conflicts_with = "apply")]
    file: Option<PathBuf>,
    /// The disk that it is compared with: a file, or an NBD URI. [default: the parent of FILE]
    #[arg(conflicts_with = "apply")]
    other: Option<PathBuf>,
    /// Compare FILE with this image of its chain.
    #[arg(long, value_name = "ANCESTOR", conflicts_with_all = ["other", "apply"])]
    since: Option<PathBuf>,
    /// List what has changed since this point of the disk's change tracking (`track`).
    #[arg(long, value_name = "NAME", conflicts_with_all = ["other", "since", "exact", "apply"])]
    track: Option<String>,
    /// With --track: list what has changed up to this later point, and read it from the image that
    /// `snapshot --track` froze then. The disk may be in use.
    #[arg(long, value_name = "NAME", requires = "track")]
    to: Option<String>,
    /// Read what may differ, and leave out what has the same bytes.
    #[arg(long, conflicts_with = "apply")]
    exact: bool,
    /// Write the changes into this new file; - for a stream on standard output.
    #[arg(long, value_name = "OUT", conflicts_with = "apply")]
    export: Option<PathBuf>,
    /// Apply these changes; - for a stream from standard input.
    #[arg(long, value_name = "EXPORT", requires = "onto")]
    apply: Option<PathBuf>,
    /// The copy to which they are applied.
    #[arg(long, value_name = "COPY", requires = "apply")]
    onto: Option<PathBuf>,
    /// Apply them also to a disk with another identity, or without any (raw). If its contents are
    /// not those of the disk to which they apply, it is damaged.
    #[arg(long, requires = "apply")]
    ignore_id_mismatch: bool,
    /// With --export or --apply: check whether it can be done, and show what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Format of OTHER; --format then applies to FILE alone.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "other")]
    second_format: Option<FormatArg>,
    /// Compare this internal snapshot of FILE, a qcow2 image, instead of its present disk: its id
    /// or its name, as info lists them.
    #[arg(long, value_name = "ID|NAME", conflicts_with_all = ["apply", "track"])]
    snapshot: Option<String>,
    /// The same for OTHER.
    #[arg(long, value_name = "ID|NAME", requires = "other")]
    second_snapshot: Option<String>,
    #[command(flatten)]
    share: ShareArgs,
}

impl DiffArgs {
    /// The exit codes: a list of differences has those of `compare`.
    pub fn codes(&self) -> Codes {
        if self.export.is_some() || self.apply.is_some() { Codes::USUAL } else { Codes::COMPARE }
    }
}

pub fn run(context: &mut Context, args: &DiffArgs) -> Outcome {
    if args.dry_run && args.export.is_none() && args.apply.is_none() {
        return Err(Failure::usage("--dry-run needs --export or --apply: a list changes nothing"));
    }
    if let (Some(export), Some(copy)) = (&args.apply, &args.onto) {
        return apply::run(context, export, copy, args.ignore_id_mismatch, args.dry_run);
    }
    let Some(file) = &args.file else { return Err(Failure::usage("name the disk with the changes")) };
    let asked = DiffRequest {
        track: args.track.as_deref(),
        to: args.to.as_deref(),
        other: args.other.as_deref(),
        since: args.since.as_deref(),
        exact: args.exact,
        second_format: args.second_format,
        snapshots: [args.snapshot.clone(), args.second_snapshot.clone()],
        force_share: args.share.force_share,
        exports: args.export.is_some(),
    };
    let (difference, warnings) = Source::open(context, file, &asked)?;
    match &args.export {
        Some(out) => export::run(context, difference, warnings, out, args.dry_run),
        None => list::run(context, difference, &warnings),
    }
}
