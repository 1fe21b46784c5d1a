//! `diskwright clone PARENT NAME...`: children of one disk.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Outcome},
    json::{self, Document},
    options::FormatArg,
    space::Space,
    switches,
};
use clap::Args;
use diskwright_disk::{CreateRequest, clone_disk, require_file};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `clone`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every clone is a differencing disk: it begins as PARENT reads and holds only what is written to it from then on. All are made or none. A disk that cannot be read gets none. After a kill or a power cut the same command keeps those that it has made, if they are unused, and makes the rest. \
While a clone lies in PARENT's folder, PARENT is not opened for writing.

EXAMPLES
  diskwright clone golden.vhdx web1.vhdx web2.vhdx db.vhdx
  diskwright clone golden.vhdx vm{01..20}.vhdx
  diskwright clone golden.vhdx scratch.vhdx --dry-run")]
pub struct CloneArgs {
    /// The disk from which the clones differ.
    parent: PathBuf,
    /// The files to make.
    #[arg(required = true, value_name = "NAME")]
    names: Vec<PathBuf>,
    /// Check which names are taken and what space is needed, and make nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What `clone --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk from which the clones differ.
    parent: String,
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
    for name in [&args.parent].into_iter().chain(&args.names) {
        require_file(name, "clone")?;
    }
    let request = CreateRequest {
        format: context.global.format.map(FormatArg::format),
        parents: context.global.parents(),
        ..CreateRequest::default()
    };
    let mut display = context.progress("making").counting("clones");
    let mut tell = |made, all| display.update(made, all);
    let warnings = clone_disk(&args.parent, &args.names, &request, args.dry_run, &mut tell)?;
    drop(display);
    warnings.iter().for_each(|warning| context.warn(warning));
    let open = context.global.open_options(false);
    let space = args.names.first().filter(|_| args.dry_run);
    let space = space.and_then(|child| Space::of_children(&args.parent, child, args.names.len(), &open));
    if context.global.json {
        let clones = args.names.iter().map(|name| json::path(name)).collect();
        let parent = json::path(&args.parent);
        context.print_json(&Report {
            parent,
            clones,
            warnings: switches::all_with_switches(&warnings),
            space,
            dry_run: args.dry_run,
        })?;
    } else if !context.global.quiet {
        let parent = printable(&json::path(&args.parent));
        let count = match args.names.len() {
            1 => "1 clone".to_owned(),
            more => format!("{more} clones"),
        };
        match args.dry_run {
            true => {
                let needs = space.map_or_else(String::new, |space| format!("; it {space}"));
                writeln!(context.text(), "{count} of {parent} would be made{needs}; nothing was changed")?;
            }
            false => writeln!(context.text(), "{count} of {parent} made")?,
        }
    }
    Ok(exit::OK)
}
