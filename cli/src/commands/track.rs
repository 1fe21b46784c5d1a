//! `diskwright track`: which ranges of a disk have changed since named points.
//!
//! If `serve` or `attach` has the disk open, the request goes over the control channel, and the
//! ranges come in pages. A range that changes meanwhile may be in a later page; none is lost.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    sizes::{Exact, Human},
    switches,
    table::{Align, Columns},
    timestamp,
};
use clap::{Args, Subcommand};
use diskwright_disk::{Disk, OpenOptions, refuse_unknown, require_file};
use diskwright_serve::control::{Client, Done, Operation, TrackedPoint, TrackedRange};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    sync::Arc,
};

/// From 1970 to 2000.
const SECONDS_BEFORE_2000: u64 = 10_957 * 86_400;

/// Arguments of `track`.
#[derive(Debug, Args)]
#[command(after_help = "\
The points are kept in FILE.tracks beside the disk. Writes, zeroes, discards and growth count, in grains of 64 KiB (more on a disk above 2 TiB). \
A write of another program, a copy and a revert cannot be tracked: everything counts as changed then, and `track list` says why.

After a crash a VHDX names at most 1 GiB more than has changed. Of a VHD or a raw disk that was not closed cleanly everything counts as changed.

A disk that `serve` or `attach` has open is tracked by that process. Over NBD a point is the metadata context diskwright:track:NAME, and \
qemu:dirty-bitmap:NAME with QEMU's flags.

EXAMPLES
  diskwright track start vm.vhdx full-1
  diskwright track list vm.vhdx
  diskwright track show vm.vhdx full-1 --json
  diskwright track stop vm.vhdx full-1")]
pub struct TrackArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Start a point: from now on changes count since it.
    #[command(after_help = "\
At most 16 points. `snapshot FILE --track NAME` starts one at the moment of a snapshot.

EXAMPLES
  diskwright track start vm.vhdx full-1")]
    Start(PointArgs),
    /// List the points of a disk, and how much has changed since each.
    #[command(after_help = "\
EXAMPLES
  diskwright track list vm.vhdx
  diskwright track list vm.vhdx --json | jq '.points[] | {name, changed}'")]
    List {
        /// The disk.
        file: PathBuf,
    },
    /// Show the ranges that have changed since a point.
    #[command(after_help = "\
EXAMPLES
  diskwright track show vm.vhdx full-1
  diskwright track show vm.vhdx full-1 --json | jq '[.ranges[].length] | add'")]
    Show(PointArgs),
    /// End a point. Older points stay complete.
    #[command(after_help = "\
EXAMPLES
  diskwright track stop vm.vhdx full-1")]
    Stop(PointArgs),
}

#[derive(Debug, Args)]
struct PointArgs {
    /// The disk.
    file: PathBuf,
    /// The point: 1 to 64 letters, digits, '.', '-' and '_'.
    name: String,
}

/// What `track start`, `track list` and `track stop` print with `--json`: the points afterwards.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// Points of the disk, the oldest first.
    points: Vec<TrackedPoint>,
    /// Whether a process has the disk in use, which has answered.
    in_use: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.track/1";
}

/// What `track show --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ranges {
    /// The disk.
    file: String,
    /// The point.
    name: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Granularity of the tracking in bytes.
    grain_size: u64,
    /// Why everything counts as changed; `null` if the ranges are known.
    everything_because: Option<String>,
    /// The changed ranges in ascending order. They do not touch.
    ranges: Vec<TrackedRange>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Ranges {
    const SCHEMA: &'static str = "diskwright.track-ranges/1";
}

pub fn run(context: &mut Context, args: &TrackArgs) -> Outcome {
    match &args.action {
        Action::Start(point) => change(context, point, true),
        Action::Stop(point) => change(context, point, false),
        Action::List { file } => {
            require_file(file, "track")?;
            if let Some(client) = in_use::client(file)? {
                return list_in_use(context, file, &client);
            }
            let disk = open(context, file, false)?;
            let points = disk.points()?.into_iter().map(TrackedPoint::from).collect();
            list(context, file, points, false, switches::all_with_switches(disk.warnings()))
        }
        Action::Show(point) => show(context, point),
    }
}

fn open(context: &mut Context, file: &Path, writable: bool) -> Outcome<Arc<Disk>> {
    let options = OpenOptions { writable, ..context.global.open_options(writable) };
    let disk = Disk::open(file, &options).map_err(in_use::explain)?;
    disk.warnings().iter().for_each(|warning| context.warn(warning));
    Ok(disk)
}

fn change(context: &mut Context, point: &PointArgs, starts: bool) -> Outcome {
    let PointArgs { file, name } = point;
    require_file(file, "track")?;
    if let Some(client) = in_use::client(file)? {
        return change_in_use(context, file, &client, name, starts);
    }
    let disk = open(context, file, true)?;
    if starts {
        refuse_unknown(&disk, file, &context.global.open_options(true), "tracked")?;
        disk.start_tracking(name)?;
    } else {
        disk.stop_tracking(name)?;
    }
    let points = disk.points()?.into_iter().map(TrackedPoint::from).collect();
    disk.close()?;
    changed(context, file, name, starts, points, false)
}

/// Starts or stops a point of a disk that a process has open.
pub fn change_in_use(context: &mut Context, file: &Path, client: &Client, name: &str, starts: bool) -> Outcome {
    let name = name.to_owned();
    let operation =
        if starts { Operation::TrackStart { name: name.clone() } } else { Operation::TrackStop { name: name.clone() } };
    let Done::Points { points } = in_use::call(client, operation)? else { return Err(in_use::unexpected(client)) };
    changed(context, file, &name, starts, points, true)
}

fn changed(
    context: &mut Context,
    file: &Path,
    name: &str,
    starts: bool,
    points: Vec<TrackedPoint>,
    in_use: bool,
) -> Outcome {
    if context.global.json {
        context.print_json(&Report { file: json::path(file), points, in_use, warnings: Vec::new() })?;
    } else if !context.global.quiet {
        let file = printable(&json::path(file));
        match starts {
            true => writeln!(context.text(), "{file}: changes count since the point {name}")?,
            false => writeln!(context.text(), "{file}: the point {name} is gone")?,
        }
    }
    Ok(exit::OK)
}

/// Lists the points of a disk that a process has open.
pub fn list_in_use(context: &mut Context, file: &Path, client: &Client) -> Outcome {
    let Done::Points { points } = in_use::call(client, Operation::TrackList)? else {
        return Err(in_use::unexpected(client));
    };
    list(context, file, points, true, Vec::new())
}

fn list(context: &mut Context, file: &Path, points: Vec<TrackedPoint>, in_use: bool, warnings: Vec<String>) -> Outcome {
    if context.global.json {
        context.print_json(&Report { file: json::path(file), points, in_use, warnings })?;
        return Ok(exit::OK);
    }
    if points.is_empty() {
        return Ok(exit::OK);
    }
    let mut table = Columns::new(&[("point", Align::Left), ("started", Align::Left), ("changed", Align::Right)]);
    for point in &points {
        let since_2000 = point.started.saturating_sub(SECONDS_BEFORE_2000);
        let started = timestamp::utc_from_2000(u32::try_from(since_2000).unwrap_or(u32::MAX));
        table.row(vec![printable(&point.name), started, Human(point.changed).to_string()]);
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    for point in &points {
        if let Some(reason) = &point.everything_because {
            writeln!(context.text(), "everything has changed since {}: {}", printable(&point.name), printable(reason))?;
        }
    }
    Ok(exit::OK)
}

fn show(context: &mut Context, point: &PointArgs) -> Outcome {
    let PointArgs { file, name } = point;
    require_file(file, "track")?;
    if let Some(client) = in_use::client(file)? {
        return show_in_use(context, file, &client, name);
    }
    let disk = open(context, file, false)?;
    let changed = disk.changed_since(name)?;
    let ranges = changed.ranges().map(|range| TrackedRange { start: range.start, length: range.end - range.start });
    let report = Ranges {
        file: json::path(file),
        name: name.clone(),
        virtual_size: changed.size_bytes(),
        grain_size: changed.grain_bytes(),
        everything_because: changed.everything().map(str::to_owned),
        ranges: ranges.collect(),
        warnings: switches::all_with_switches(disk.warnings()),
    };
    print_report(context, &report)
}

/// Shows the ranges of a disk that a process has open.
pub fn show_in_use(context: &mut Context, file: &Path, client: &Client, name: &str) -> Outcome {
    let mut whole: Option<Ranges> = None;
    let mut from = Some(0);
    while let Some(offset) = from {
        let operation = Operation::TrackShow { name: name.into(), from: offset, to: None };
        let Done::Changed(page) = in_use::call(client, operation)? else { return Err(in_use::unexpected(client)) };
        // A process that repeats an offset must not keep this loop running.
        from = page.next.filter(|next| *next > offset);
        let whole = whole.get_or_insert_with(|| Ranges {
            file: json::path(file),
            name: name.into(),
            virtual_size: page.virtual_size,
            grain_size: page.grain_size,
            everything_because: None,
            ranges: Vec::new(),
            warnings: Vec::new(),
        });
        whole.everything_because = whole.everything_because.take().or(page.everything_because);
        for range in page.ranges {
            match whole.ranges.last_mut().filter(|last| last.start + last.length == range.start) {
                Some(last) => last.length += range.length,
                None => whole.ranges.push(range),
            }
        }
    }
    match whole {
        Some(report) => print_report(context, &report),
        None => Err(Failure::new("the process has sent no ranges")),
    }
}

fn print_report(context: &mut Context, report: &Ranges) -> Outcome {
    if context.global.json {
        context.print_json(report)?;
        return Ok(exit::OK);
    }
    let digits = report.virtual_size.to_string().len().max("length".len());
    writeln!(context.out, "{:>digits$}  {:>digits$}", "start", "length")?;
    for TrackedRange { start, length } in &report.ranges {
        writeln!(context.out, "{start:>digits$}  {length:>digits$}")?;
    }
    if !context.global.quiet {
        let bytes: u64 = report.ranges.iter().map(|range| range.length).sum();
        match &report.everything_because {
            Some(reason) => writeln!(context.text(), "everything has changed: {}", printable(reason))?,
            None => writeln!(context.text(), "{} of {} changed", Human(bytes), Exact(report.virtual_size))?,
        }
    }
    Ok(exit::OK)
}
