//! `diskwright move FILE NEW`: a disk goes to another file, format, folder or file system, also
//! while it is in use.

use crate::{
    commands::convert::StandaloneType,
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    options::FormatArg,
    progress,
    sizes::{self, Human},
    space::Space,
    switches,
};
use clap::Args;
use diskwright_disk::{CreateRequest, MoveOptions, Moved, move_disk, require_file};
use diskwright_serve::{
    attach::{self, Registry},
    control::{Client, ControlError, Done, NewImage, Operation},
};
use diskwright_store::ErrorCode;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

/// Arguments of `move`.
#[derive(Debug, Args)]
#[command(after_help = "\
NEW must not exist, or is a folder: there the disk keeps its name. The format comes from NEW's extension, or from --format. A fixed disk stays fixed, and any \
other becomes dynamic, unless --type is given. A FILE with parents is moved with its whole chain, which becomes one disk. Its parents stay.

A disk that `serve` or `attach` has open is moved by that process, while its clients go on: all data are copied beside them, then what they wrote meanwhile, and \
at the end writes wait for some milliseconds. From then on NEW is the disk. A disk that any other program has open is refused.

A disk that is not in use is renamed, if NEW is on the same file system and has the same format and type. Else it is copied, and the copy is compared with it.

FILE is removed when NEW is complete and durable, unless --keep-old is given. It is not removed, and the move refused, if another image in its folder names it as \
its parent. Whatever happens before (a full file system, an error, Ctrl-C, kill -9, a power cut): FILE is the disk, and is whole. Then NEW does not exist; after \
kill -9 or a power cut a file .NEW.moving may be left, which the same command replaces.

EXAMPLES
  diskwright move vm.vhdx /mnt/fast/
  diskwright move vm.vhdx vm.raw
  diskwright move vm.avhdx flat.vhd --type fixed --keep-old
  diskwright move vm.vhdx /mnt/fast/ --dry-run")]
pub struct MoveArgs {
    /// The disk.
    file: PathBuf,
    #[command(flatten)]
    to: Destination,
    /// Format of FILE, instead of probing it. Not for a disk in use.
    #[arg(long, value_enum, value_name = "FORMAT")]
    source_format: Option<FormatArg>,
}

/// Where a disk goes, and how: also for `serve-ctl`.
#[derive(Debug, Args)]
pub struct Destination {
    /// The new file, or an existing folder.
    new: PathBuf,
    /// How the new disk allocates its space. [default: fixed for a fixed disk, else dynamic; raw is
    /// always fixed]
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    disk_type: Option<StandaloneType>,
    /// Size of a payload block of the new disk. [default: that of FILE if the format stays, else
    /// 2M]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    block_size: Option<u32>,
    /// Reserve the space of the whole new disk now.
    #[arg(long)]
    preallocate: bool,
    /// Keep the old file, with the contents that the disk had at the end of the move.
    #[arg(long)]
    keep_old: bool,
    /// Check whether it can be done, show how much would be copied, and change nothing.
    #[arg(long)]
    dry_run: bool,
}

/// What `move --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The file that was the disk.
    file: String,
    /// The file that is the disk now.
    new: String,
    /// Format of the new file.
    format: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes of the disk that hold data; 0 if the file was renamed.
    data_bytes: u64,
    /// Bytes that were copied: more than there are if clients wrote meanwhile, 0 for a dry run.
    copied_bytes: u64,
    /// Bytes that were free on the file system of the new file; `null` if it does not say.
    free_bytes: Option<u64>,
    /// Whether the disk was in use, and was moved by the process that has it open.
    in_use: bool,
    /// The longest time for which writes of clients had to wait, in seconds; `null` if the disk was
    /// not in use.
    pause_seconds: Option<f64>,
    /// Whether the old file is still there.
    old_kept: bool,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Time of the whole command.
    seconds: f64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.move/1";
}

pub fn run(context: &mut Context, args: &MoveArgs) -> Outcome {
    require_file(&args.file, "move")?;
    require_file(&args.to.new, "move a disk into")?;
    refuse_missing_folder(&args.to.new)?;
    if let Some(client) = in_use::client(&args.file)? {
        return move_in_use(context, &args.file, &client, &args.to);
    }
    let mut open = context.global.bulk_options();
    open.format = args.source_format.map(FormatArg::format);
    let to = &args.to;
    let options = MoveOptions {
        dest: CreateRequest {
            format: context.global.format.map(FormatArg::format),
            disk_type: to.disk_type.map(StandaloneType::disk_type),
            block_bytes: to.block_size,
            preallocate: to.preallocate,
            ..CreateRequest::default()
        },
        keep_old: to.keep_old,
        dry_run: to.dry_run,
    };
    let mut display = context.progress("moving").then("comparing");
    let moved = move_disk(&args.file, &to.new, &options, &open, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    let Moved { to: new, format, size_bytes, data_bytes, copied_bytes, free_bytes, warnings, .. } =
        moved.map_err(in_use::explain)?;
    let report = Report {
        file: json::path(&args.file),
        new: json::path(&new),
        format: format.to_string(),
        virtual_size: size_bytes,
        data_bytes,
        copied_bytes,
        free_bytes,
        in_use: false,
        pause_seconds: None,
        old_kept: to.keep_old,
        space: to.dry_run.then(|| Space::on(&new, data_bytes)),
        dry_run: to.dry_run,
        warnings,
        seconds: elapsed.as_secs_f64(),
    };
    print_report(context, report)
}

/// A name that ends in a slash is that of a folder.
fn refuse_missing_folder(new: &Path) -> Outcome<()> {
    match new.as_os_str().as_encoded_bytes().ends_with(b"/") && !new.is_dir() {
        true => Err(Failure::new(format!("{}: there is no such folder; make it first", new.display()))),
        false => Ok(()),
    }
}

/// Refuses to move an attached disk onto a file system on that very disk: its writes would wait for
/// themselves.
fn refuse_onto_itself(file: &Path, new: &Path) -> Result<(), Failure> {
    let Some((_, record)) = Registry::existing().and_then(|registry| registry.find(file).ok()) else { return Ok(()) };
    let folder = if new.is_dir() { Some(new) } else { new.parent() };
    let Some(mounted) = folder.and_then(|folder| attach::carries(&record, folder)) else { return Ok(()) };
    Err(Failure::new(format!(
        "{}: {} lies on {}, which is a file system on this very disk, so the disk cannot be moved there; nothing was changed. Choose a folder on another disk",
        file.display(),
        new.display(),
        mounted.display()
    )))
}

/// Moves a disk in use, for `serve-ctl` too.
pub fn move_in_use(context: &mut Context, file: &Path, client: &Client, to: &Destination) -> Outcome {
    let absolute = std::path::absolute(&to.new)
        .map_err(|error| Failure::new(format!("{}: cannot make the path absolute: {error}", to.new.display())))?;
    refuse_onto_itself(file, &absolute)?;
    let operation = Operation::Move {
        to: absolute,
        new: NewImage {
            format: context.global.format.map(|format| format.format().to_string()),
            disk_type: to.disk_type.map(|kind| kind.disk_type().to_string()),
            block_size: to.block_size,
            preallocate: to.preallocate,
        },
        keep_old: to.keep_old,
        dry_run: to.dry_run,
    };
    let mut display = context.progress("moving");
    let called = client.call(operation, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    let moved = match called {
        Ok(Done::Moved(moved)) => moved,
        Ok(_) => return Err(in_use::unexpected(client)),
        Err(ControlError::Refused { code: ErrorCode::Stopped, .. }) => {
            return Err(Failure::new(format!(
                "{}: {} is ending, so the move was stopped, and the disk is where it was; run the command again",
                file.display(),
                client.peer
            )));
        }
        Err(ControlError::Stopped { .. }) => {
            // The process notices that this client is gone, and undoes what it has begun.
            if client.settle()? {
                return Err(Failure::Stopped);
            }
            return Err(Failure::new(format!(
                "{}: the disk had moved before the command could be stopped; {} goes on with it in its new place",
                file.display(),
                client.peer
            )));
        }
        Err(error) => return Err(error.into()),
    };
    let report = Report {
        file: json::path(file),
        new: json::path(&moved.to),
        format: moved.format,
        virtual_size: moved.virtual_size,
        data_bytes: moved.data_bytes,
        copied_bytes: moved.copied_bytes,
        free_bytes: moved.free_bytes,
        in_use: true,
        pause_seconds: Some(Duration::from_nanos(moved.pause_ns).as_secs_f64()),
        old_kept: to.keep_old,
        space: to.dry_run.then(|| Space::on(&moved.to, moved.data_bytes)),
        dry_run: to.dry_run,
        warnings: moved.warnings,
        seconds: elapsed.as_secs_f64(),
    };
    print_report(context, report)
}

fn print_report(context: &mut Context, mut report: Report) -> Outcome {
    report.warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        report.warnings = switches::all_with_switches(&report.warnings);
        context.print_json(&report)?;
    } else if !context.global.quiet {
        writeln!(context.text(), "{}: {}", printable(&report.file), summary(&report))?;
    }
    Ok(exit::OK)
}

fn summary(report: &Report) -> String {
    let new = printable(&report.new);
    if report.dry_run {
        let how = match report.data_bytes {
            0 if !report.in_use => "nothing has to be copied".to_owned(),
            bytes => format!("{} would be copied", Human(bytes)),
        };
        let space = report.space.as_ref().map_or_else(String::new, |space| format!("; it {space}"));
        return format!("would move to {new} ({}): {how}{space}; nothing was changed", report.format);
    }
    let mut line = format!("moved to {new} ({})", report.format);
    if report.copied_bytes > 0 {
        let elapsed = Duration::from_secs_f64(report.seconds);
        let rate = Human(progress::rate(report.copied_bytes, elapsed));
        line.push_str(&format!(
            "; {} copied in {} ({rate}/s)",
            Human(report.copied_bytes),
            progress::duration(elapsed)
        ));
    }
    if let Some(seconds) = report.pause_seconds {
        line.push_str(&format!("; clients went on, and writes waited for {:.1} ms at most", seconds * 1e3));
    }
    line.push_str(if report.old_kept { "; the old file is kept" } else { "" });
    line
}
