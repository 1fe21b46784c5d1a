//! `diskwright push DISK URL`: stores a disk in a bucket, as chunks that disks share.
//!
//! What need not be read is found in one of two ways:
//!
//! ```text
//!   --base NAME, and NAME was pushed with --track ─▶ changed since its point ─▶ read
//!   the disk's chain has an image that was pushed  ─▶ what the images above hold ─▶ read
//! ```

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    options::{ShareArgs, SnapshotArgs},
    progress,
    sizes::Human,
    switches,
};
use clap::Args;
use diskwright_disk::{Disk, OpenOptions, Opened, refuse_unknown, require_file};
use diskwright_object::{
    ObjectUri, Settings,
    repository::{Changed, Manifest, PushId, PushOptions, Remote, S3Remote, disk, hex, push},
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// How points that belong to a push are called.
const POINT: &str = "push-";

/// Arguments of `push`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk is stored as a list of its chunks of 4 MiB, the manifest, and the chunks are stored beside it, compressed by zstd, in s3://BUCKET/FOLDER/chunks. \
Disks in one FOLDER share the chunks that they have in common, and only what is not there is sent. A disk with parents is stored whole. \
Zeros take no space. A pushed disk never changes: each push needs a new NAME. Two pushes of one NAME cannot both succeed. \
A push that was stopped is made again, and finds what it has sent.

With --base only what may differ from the disk NAME is read: if NAME was pushed with --track, what has changed since then. \
Without --base, a DISK whose parent is a pushed disk of FOLDER is read where it differs from that. Otherwise the whole DISK is read.

URL names a disk from then on: `diskwright pull`, `convert`, `serve` and `attach` read it where it lies, and it can be the parent of a VHDX, VHD or qcow2. \
Every byte that is read is checked against the SHA-256 digests in the manifest.

The server must be an S3 server that honours If-None-Match, which each push tests: Amazon S3, Ceph and versitygw do. Credentials are those of the AWS tools.

EXAMPLES
  diskwright push vm.vhdx s3://backups/vms/web-monday --track
  diskwright push vm.vhdx s3://backups/vms/web-tuesday --base web-monday --track
  diskwright push golden.vhdx s3://images/golden-12
  diskwright create web1.vhdx --parent s3://images/golden-12 \\
      --allow-parent-dir s3://images")]
pub struct PushArgs {
    /// The disk: a file, or an NBD URI.
    disk: PathBuf,
    /// Its new name: s3://BUCKET/FOLDER/NAME.
    #[arg(value_name = "URL")]
    url: PathBuf,
    /// A disk in the same FOLDER that was pushed before, of which this one is a later state.
    #[arg(long, value_name = "NAME")]
    base: Option<PathBuf>,
    /// Track from now on what changes in DISK, for the next push. Ends the tracking since --base.
    #[arg(long)]
    track: bool,
    #[command(flatten)]
    of: SnapshotArgs,
    #[command(flatten)]
    share: ShareArgs,
}

/// What `push --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk that was pushed.
    disk: String,
    /// Its name in the bucket.
    url: String,
    /// Tells its contents from all others: SHA-256 of the digests of its chunks.
    contents_id: String,
    /// Its size in bytes.
    virtual_size: u64,
    /// The disk on which it was based; `null` if there was none.
    base: Option<String>,
    /// The point of the disk's change tracking that was started (`--track`).
    point: Option<String>,
    /// Chunks with data.
    chunks: u64,
    /// Bytes of the disk that were read.
    read_bytes: u64,
    /// Chunks that were sent.
    sent_chunks: u64,
    /// Bytes that were sent: compressed chunks, and the manifest.
    sent_bytes: u64,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Duration.
    seconds: f64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.push/1";
}

/// What a push is based on.
struct Base {
    name: String,
    manifest: Manifest,
    changed: Changed,
}

/// Runs `push`.
pub fn run(context: &mut Context, args: &PushArgs) -> Outcome {
    let settings = Settings::of_environment()?;
    let (remote, name) = S3Remote::of_disk(&args.url, &settings)?;
    let base_name = args.base.as_deref().map(|base| base_name(&remote, base, &settings)).transpose()?;
    let asked = base_name.map(|name| Ok::<_, Failure>((disk(&remote, &name)?, name))).transpose()?;
    if args.track {
        require_file(&args.disk, "track")?;
        if args.of.snapshot.is_some() {
            return Err(Failure::usage("--track is for a disk that is written, and --snapshot names a state of it"));
        }
    }
    let options = OpenOptions {
        writable: args.track,
        force_share: args.share.force_share,
        snapshot: args.of.snapshot.clone(),
        ..context.global.open_options(args.track)
    };
    let opened = context.open(&args.disk, &options)?;
    let mut warnings = Vec::new();
    let base = match asked {
        Some((manifest, name)) => Some(of_point(&opened, manifest, name, &mut warnings)?),
        None => of_parent(&opened, &remote, &settings)?,
    };
    warnings.iter().for_each(|warning| context.warn(warning));
    // Before anything is read: what is written from now on counts for the next push.
    let point = match (&opened, args.track) {
        (Opened::Disk(opened), true) => {
            refuse_unknown(opened, &args.disk, &options, "tracked")?;
            Some(start_point(opened)?)
        }
        _ => None,
    };
    let push_options = PushOptions {
        engine: context.global.engine(),
        source: args.disk.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        now: unix_seconds(),
        point: point.clone(),
        base: base.as_ref().map(|base| (base.name.clone(), base.changed.clone())),
        ..PushOptions::default()
    };
    let mut display = context.progress("pushing");
    let pushed = push(&remote, &name, opened.device(), &push_options, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    let ends = match (&pushed, &base) {
        (Ok(Some(_)), Some(base)) if args.track => base.manifest.facts().point.clone(),
        (Ok(Some(_)), _) => None,
        _ => point.clone(),
    };
    if let Opened::Disk(disk) = &opened {
        if let Some(name) = ends.filter(|_| args.track) {
            end_point(disk, &name, &mut warnings);
        }
        disk.close()?;
    }
    let Some(pushed) = pushed? else { return Err(Failure::Stopped) };
    let report = Report {
        disk: json::path(&args.disk),
        url: remote.name_of(&name),
        contents_id: hex(&pushed.contents_id),
        virtual_size: pushed.size_bytes,
        base: base.map(|base| base.name),
        point,
        chunks: pushed.chunks,
        read_bytes: pushed.read_bytes,
        sent_chunks: pushed.sent,
        sent_bytes: pushed.sent_bytes,
        warnings: switches::all_with_switches(&[opened.warnings(), &warnings].concat()),
        seconds: elapsed.as_secs_f64(),
    };
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        writeln!(
            context.text(),
            "{}: {}; {} read, {} sent ({} of {} chunks), in {}",
            printable(&report.url),
            Human(report.virtual_size),
            Human(report.read_bytes),
            Human(report.sent_bytes),
            report.sent_chunks,
            report.chunks,
            progress::duration(elapsed)
        )?;
    }
    Ok(exit::OK)
}

/// The name of the base within the repository.
fn base_name(remote: &S3Remote, base: &Path, settings: &Settings) -> Outcome<String> {
    if ObjectUri::parse(base).is_err() {
        return Ok(base.to_string_lossy().into_owned());
    }
    let (of_base, name) = S3Remote::of_disk(base, settings)?;
    match of_base.name_of("") == remote.name_of("") {
        true => Ok(name),
        false => Err(Failure::usage(format!(
            "--base {}: the base must lie in the folder {}, because disks share chunks with those of their folder",
            base.display(),
            remote.name_of("")
        ))),
    }
}

fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Starts the point of a push. No other push, of this disk or of another one, has its name: a
/// manifest names the point, and a base that is of another disk must not find one.
fn start_point(disk: &Disk) -> Outcome<String> {
    let name = format!("{POINT}{}", PushId::random()?);
    disk.start_tracking(&name)?;
    Ok(name)
}

/// Ends a point that is no longer needed. A point that is left costs little.
fn end_point(disk: &Disk, name: &str, warnings: &mut Vec<String>) {
    let is_there = disk.points().is_ok_and(|points| points.iter().any(|point| point.name == name));
    if is_there
        && name.starts_with(POINT)
        && let Err(error) = disk.stop_tracking(name)
    {
        warnings.push(error.to_string());
    }
}

/// What has changed since the base was pushed, if the disk knows that.
fn of_point(opened: &Opened, manifest: Manifest, name: String, warnings: &mut Vec<String>) -> Outcome<Base> {
    let (point, disk) = match (manifest.facts().point.clone(), opened) {
        (Some(point), Opened::Disk(disk)) => (point, disk),
        (None, _) => {
            warnings.push(format!("{name} was pushed without --track, so the whole disk is read"));
            return Ok(Base { name, manifest, changed: Changed::All });
        }
        (Some(_), Opened::Remote(_)) => {
            warnings.push("the changes of a disk of a server are not known, so the whole disk is read".into());
            return Ok(Base { name, manifest, changed: Changed::All });
        }
    };
    if disk.points()?.iter().all(|known| known.name != point) {
        warnings.push(format!("the disk has no point {point}, at which {name} was pushed, so the whole disk is read"));
        return Ok(Base { name, manifest, changed: Changed::All });
    }
    let changed = disk.changed_since(&point)?;
    if let Some(reason) = changed.everything() {
        warnings.push(format!("the whole disk is read: {reason}"));
        return Ok(Base { name, manifest, changed: Changed::All });
    }
    let changed = Changed::Ranges(changed.ranges().collect());
    Ok(Base { name, manifest, changed })
}

/// The base of a disk that has a pushed disk of the repository in its chain.
fn of_parent(opened: &Opened, remote: &S3Remote, settings: &Settings) -> Outcome<Option<Base>> {
    let Opened::Disk(opened) = opened else { return Ok(None) };
    let layers = Arc::clone(&opened.layers());
    for (depth, layer) in (0_u32..).zip(layers.iter()).skip(1) {
        let Some(id) = layer.image.store().contents_id() else { continue };
        let Ok((of_base, name)) = S3Remote::of_disk(&layer.path, settings) else { continue };
        if of_base.name_of("") != remote.name_of("") {
            continue;
        }
        let manifest = disk(remote, &name)?;
        if manifest.contents_uuid() == id {
            return Ok(Some(Base { name, manifest, changed: Changed::Above(depth) }));
        }
    }
    Ok(None)
}
