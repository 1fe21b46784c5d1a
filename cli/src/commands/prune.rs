//! `diskwright prune URL`: deletes the chunks that no disk of a repository has.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::Document,
    sizes::Human,
};
use clap::Args;
use diskwright_object::{
    Settings,
    repository::{PruneOptions, Pruned, Remote, S3Remote, prune},
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `prune`.
#[derive(Debug, Args)]
#[command(after_help = "\
Chunks are listed for deletion first, and deleted when no push is under way that may count on them. So it may run at any time, beside pushes, and be stopped at any moment; another prune goes on. \
A push that was killed counts as under way for a day.

EXAMPLES
  diskwright prune s3://backups/vms --remove web-monday
  diskwright prune s3://backups/vms --remove web-monday --dry-run
  diskwright prune s3://backups/vms")]
pub struct PruneArgs {
    /// The folder: s3://BUCKET/FOLDER.
    #[arg(value_name = "URL")]
    url: PathBuf,
    /// Remove this disk first. A disk whose parent it is cannot be read any more.
    #[arg(long, value_name = "NAME")]
    remove: Vec<String>,
    /// Show what would be deleted, and delete nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What `prune --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The folder.
    url: String,
    /// Disks that were removed (`--remove`).
    removed: Vec<String>,
    /// Disks that are left.
    disks: u64,
    /// What is left.
    kept: Amount,
    /// What was deleted.
    deleted: Amount,
    /// What another prune will delete, because pushes are under way.
    waiting: Amount,
    /// Pushes that are under way, or were killed less than a day ago.
    pushes: u64,
    /// Whether nothing was deleted (`--dry-run`).
    dry_run: bool,
}

/// Chunks.
#[derive(Debug, Serialize, JsonSchema)]
struct Amount {
    /// Their number.
    chunks: u64,
    /// The bytes that they take in the bucket.
    bytes: u64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.prune/1";
}

fn amount((chunks, bytes): (u64, u64)) -> Amount {
    Amount { chunks, bytes }
}

/// Runs `prune`.
pub fn run(context: &mut Context, args: &PruneArgs) -> Outcome {
    let remote = S3Remote::new(&args.url, &Settings::of_environment()?)?;
    let options = PruneOptions { remove: args.remove.clone(), dry_run: args.dry_run };
    let mut display = context.progress("deleting chunks");
    let pruned = prune(&remote, &options, &mut |done, total| display.update(done, total));
    drop(display);
    let Some(Pruned { disks, kept, deleted, waiting, pushes }) = pruned? else { return Err(Failure::Stopped) };
    let report = Report {
        url: remote.name_of(""),
        removed: args.remove.clone(),
        disks,
        kept: amount(kept),
        deleted: amount(deleted),
        waiting: amount(waiting),
        pushes,
        dry_run: args.dry_run,
    };
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        report.write(context)?;
    }
    Ok(exit::OK)
}

impl Report {
    fn write(&self, context: &mut Context) -> Outcome<()> {
        let would = if self.dry_run { "would be " } else { "" };
        let (deleted, kept) = (Human(self.deleted.bytes), Human(self.kept.bytes));
        let url = printable(&self.url);
        writeln!(context.text(), "{url}: {deleted} {would}deleted, {kept} kept for {} disks", self.disks)?;
        if self.waiting.chunks > 0 {
            let waiting = Human(self.waiting.bytes);
            writeln!(
                context.text(),
                "{waiting} more can be deleted when the pushes that are under way ({}) have ended: prune again then",
                self.pushes
            )?;
        }
        Ok(())
    }
}
