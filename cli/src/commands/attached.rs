//! `diskwright attached`: lists the disks that are attached on this machine.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Outcome},
    json::{self, Document},
    sizes::Human,
    table::{Align, Columns},
};
use clap::Args;
use diskwright_serve::attach::{self, Record, Registry};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `attached`.
#[derive(Debug, Args)]
#[command(after_help = "\
Disks whose processes were killed are cleared away, and named once on standard error.

EXAMPLES
  diskwright attached
  diskwright attached --json | jq -r '.disks[].device'")]
pub struct AttachedArgs {}

/// What `attached --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disks that are attached on this machine.
    disks: Vec<Entry>,
    /// What was left of disks whose processes are gone and was cleared up now, a sentence each.
    cleared: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.attached/1";
}

/// An attached disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Entry {
    #[serde(flatten)]
    record: Record,
    /// Whether its supervisor process runs. The disk works without it, and `detach` then does what
    /// the supervisor would.
    supervised: bool,
    /// The directories where the disk is mounted, also those that other programs have mounted.
    mounted: Vec<PathBuf>,
}

/// Prints the list.
pub fn run(context: &mut Context, _args: &AttachedArgs) -> Outcome {
    let registry = Registry::open()?;
    let cleared = attach::clear_stale(&registry)?;
    let mut disks = Vec::new();
    for (_, record) in registry.all()? {
        let mounted = attach::mounted_from(&record);
        disks.push(Entry { supervised: record.is_supervised(), mounted, record });
    }
    if context.global.json {
        context.print_json(&Report { disks, cleared })?;
        return Ok(exit::OK);
    }
    cleared.iter().for_each(|sentence| context.warn(sentence));
    if disks.is_empty() {
        return Ok(exit::OK);
    }
    let mut table = Columns::new(&[
        ("device", Align::Left),
        ("size", Align::Right),
        ("access", Align::Left),
        ("holds", Align::Left),
        ("mounted at", Align::Left),
        ("file", Align::Left),
    ]);
    for Entry { record, mounted, .. } in &disks {
        let access = if record.read_only { "read-only" } else { "read-write" };
        let mounted: Vec<_> = mounted.iter().map(|dir| printable(&json::path(dir))).collect();
        table.row(vec![
            printable(&json::path(record.place())),
            Human(record.size).to_string(),
            access.into(),
            holds(record),
            if mounted.is_empty() { "-".into() } else { mounted.join(", ") },
            printable(&json::path(&record.file)),
        ]);
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    context.out.flush()?;
    Ok(exit::OK)
}

fn holds(record: &Record) -> String {
    match (record.partitions.len(), &record.content) {
        (0, Some(content)) => content.clone(),
        (0, None) => "-".into(),
        (1, _) => "1 partition".into(),
        (count, _) => format!("{count} partitions"),
    }
}
