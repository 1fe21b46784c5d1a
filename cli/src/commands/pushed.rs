//! `diskwright pushed URL`: the disks of a repository.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json::Document,
    printable::printable,
    sizes::Human,
    table::{Align, Columns},
    timestamp,
};
use clap::Args;
use diskwright_object::{
    Settings,
    repository::{Disk, Remote, S3Remote, disks, hex},
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    collections::{HashMap, HashSet},
    io::Write,
    path::PathBuf,
    time::UNIX_EPOCH,
};

/// Arguments of `pushed`.
#[derive(Debug, Args)]
#[command(after_help = "\
`stored` is what the chunks of a disk take in the bucket, compressed. `alone` is the part of it that no other disk has: what `prune --remove NAME` would give back.

EXAMPLES
  diskwright pushed s3://backups/vms
  diskwright pushed s3://backups/vms --json | jq -r '.disks[].name'")]
pub struct PushedArgs {
    /// The folder: s3://BUCKET/FOLDER.
    #[arg(value_name = "URL")]
    url: PathBuf,
}

/// What `pushed --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The folder.
    url: String,
    /// Its disks, by name.
    disks: Vec<Row>,
}

/// A disk.
#[derive(Debug, Serialize, JsonSchema)]
struct Row {
    /// Its name.
    name: String,
    /// When it was pushed, in seconds since 1970.
    pushed: u64,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes of its chunks in the bucket.
    stored: u64,
    /// Bytes of the chunks that no other disk has.
    alone: u64,
    /// Tells its contents from all others.
    contents_id: String,
    /// Name of the file that was pushed.
    source: String,
    /// The disk on which it was based.
    base: Option<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.pushed/1";
}

fn rows(disks: &[Disk]) -> Vec<Row> {
    let mut users: HashMap<_, u32> = HashMap::new();
    let of = |disk: &Disk| disk.manifest.chunks().iter().map(|chunk| (chunk.key, chunk.object_bytes)).collect();
    let chunks: Vec<HashSet<_>> = disks.iter().map(of).collect();
    chunks.iter().flatten().for_each(|chunk| *users.entry(*chunk).or_default() += 1);
    let row = |(disk, chunks): (&Disk, &HashSet<_>)| {
        let facts = disk.manifest.facts();
        let sum = |alone: bool| {
            chunks.iter().filter(|chunk| !alone || users.get(chunk) == Some(&1)).map(|(_, len)| u64::from(*len)).sum()
        };
        Row {
            name: disk.name.clone(),
            pushed: disk.published.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs()),
            virtual_size: facts.size_bytes,
            stored: sum(false),
            alone: sum(true),
            contents_id: hex(&disk.manifest.contents_id()),
            source: facts.source.clone(),
            base: facts.base.clone(),
        }
    };
    disks.iter().zip(&chunks).map(row).collect()
}

/// Runs `pushed`.
pub fn run(context: &mut Context, args: &PushedArgs) -> Outcome {
    let remote = S3Remote::new(&args.url, &Settings::of_environment()?)?;
    let report = Report { url: remote.name_of(""), disks: rows(&disks(&remote)?) };
    if context.global.json {
        context.print_json(&report)?;
        return Ok(exit::OK);
    }
    if report.disks.is_empty() {
        if !context.global.quiet {
            writeln!(context.text(), "{}: no disk was pushed there", printable(&report.url))?;
        }
        return Ok(exit::OK);
    }
    let mut table = Columns::new(&[
        ("pushed", Align::Left),
        ("size", Align::Right),
        ("stored", Align::Right),
        ("alone", Align::Right),
        ("name", Align::Left),
        ("from", Align::Left),
    ]);
    for row in &report.disks {
        table.row(vec![
            u32::try_from(row.pushed).map_or("-".into(), timestamp::utc_from_1970),
            Human(row.virtual_size).to_string(),
            Human(row.stored).to_string(),
            Human(row.alone).to_string(),
            printable(&row.name),
            printable(&row.source),
        ]);
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    context.out.flush()?;
    Ok(exit::OK)
}
