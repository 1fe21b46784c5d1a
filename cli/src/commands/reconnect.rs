//! `diskwright reconnect CHILD...`: another link to the parent.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Codes, Outcome},
    json::{self, Document},
    several::{self, Between},
    space::Space,
    switches,
};
use clap::Args;
use diskwright_disk::{ReconnectOptions, Reconnected, reconnect, require_file};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `reconnect`.
#[derive(Debug, Args)]
#[command(after_help = "\
The parent must be the disk from which CHILD was made: it is recognised by the identity that CHILD has recorded, not by its name. With \
--search every file below DIR is examined, and lost parents further down the chain are found as well. If several files have the identity, they \
are listed, and --parent decides.

Nothing is written until the whole chain is found. Only the links change; no data does.

EXAMPLES
  diskwright reconnect vm.avhdx --parent /new/place/base.vhdx
  diskwright reconnect vm.avhdx --search /images --dry-run
  diskwright reconnect vm.avhdx --search /images
  diskwright reconnect web*.avhdx --parent /new/place/golden.vhdx")]
pub struct ReconnectArgs {
    /// The differencing disks whose parent was moved, renamed or lost.
    #[arg(required = true, value_name = "CHILD")]
    children: Vec<PathBuf>,
    /// The parent's new place.
    #[arg(long, value_name = "FILE", required_unless_present = "search")]
    parent: Option<PathBuf>,
    /// Search for lost parents in this folder and the folders below it.
    #[arg(long, value_name = "DIR")]
    search: Vec<PathBuf>,
    /// Connect also to a parent that is not the disk from which CHILD was made. CHILD then reads
    /// wrong data, unless you know that both have the same contents.
    #[arg(long, requires = "parent")]
    ignore_id_mismatch: bool,
    /// Check whether it can be done, and show what would be done.
    #[arg(long)]
    dry_run: bool,
}

/// What `reconnect --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// The images of its chain as far as they are found, the top first.
    chain: Vec<String>,
    /// The links that were replaced, in the order of the chain.
    relinked: Vec<Link>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
}

/// A link to a parent.
#[derive(Debug, Serialize, JsonSchema)]
struct Link {
    /// The image that has the link.
    child: String,
    /// Path of the new parent.
    parent: String,
    /// The paths that the former link had for the parent.
    former_paths: Vec<String>,
    /// Whether the parent has the identity that the child expected.
    has_identity: bool,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.reconnect/1";
}

pub fn run(context: &mut Context, args: &ReconnectArgs) -> Outcome {
    let one = |context: &mut Context, child: &Path| one(context, args, child);
    several::each(context, &args.children, Codes::USUAL, Between::Nothing, one)
}

fn one(context: &mut Context, args: &ReconnectArgs, child: &Path) -> Outcome {
    require_file(child, "reconnect")?;
    let options = ReconnectOptions {
        parent: args.parent.clone(),
        search_dirs: args.search.clone(),
        ignore_id_mismatch: args.ignore_id_mismatch,
        open: context.global.open_options(true),
        dry_run: args.dry_run,
    };
    let mut display = context.progress("searching").counting("files");
    let done = reconnect(child, &options, &mut |done, total| display.update(done, total));
    drop(display);
    let done = done?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        context.print_json(&report(child, &done, args.dry_run))?;
    } else if !context.global.quiet {
        print_report(context, child, &done, args.dry_run)?;
    }
    Ok(exit::OK)
}

/// Most bytes by which the file of an image grows for a new link: a second header and a descriptor,
/// or one more MiB of a log.
const LINK_BYTES: u64 = 1 << 20;

fn space_of(child: &Path, done: &Reconnected) -> Space {
    Space::on(child, done.relinked.len() as u64 * LINK_BYTES)
}

fn report(child: &Path, done: &Reconnected, dry_run: bool) -> Report {
    let relinked = done.relinked.iter().map(|link| Link {
        child: json::path(&link.child),
        parent: json::path(&link.parent),
        former_paths: link.former_paths.clone(),
        has_identity: link.has_identity,
    });
    Report {
        file: json::path(child),
        chain: done.chain.iter().map(|path| json::path(path)).collect(),
        relinked: relinked.collect(),
        warnings: switches::all_with_switches(&done.warnings),
        space: dry_run.then(|| space_of(child, done)),
        dry_run,
    }
}

fn print_report(context: &mut Context, child: &Path, done: &Reconnected, dry_run: bool) -> Outcome<()> {
    let name = |path: &Path| printable(&json::path(path));
    let is = if dry_run { "would be" } else { "is" };
    for link in &done.relinked {
        writeln!(context.text(), "{} {is} connected to {}", name(&link.child), name(&link.parent))?;
    }
    match &done.relinked[..] {
        [] => {
            writeln!(context.text(), "{}: every parent is where its child names it; nothing was changed", name(child))?
        }
        _ if dry_run => writeln!(context.text(), "it {}; nothing was changed", space_of(child, done))?,
        _ => {}
    }
    Ok(())
}
