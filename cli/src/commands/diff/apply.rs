//! Applies an export to a copy of its base.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    progress,
    sizes::{Exact, Human},
    switches,
};
use diskwright_disk::{Applied, ApplyOptions, DiskError, Increment, apply_export};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    path::Path,
    time::Duration,
};

/// What `diff --apply --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct AppliedReport {
    /// The export.
    export: String,
    /// The disk to which it was applied.
    disk: String,
    /// The identity that the disk has afterwards; `null` for a raw disk.
    result_id: Option<String>,
    /// Virtual size before, in bytes.
    old_size: u64,
    /// Virtual size afterwards, in bytes.
    new_size: u64,
    /// Bytes of data that were written.
    data_bytes: u64,
    /// Bytes that were made zeros.
    zero_bytes: u64,
    /// Whether the export had been applied before. Nothing was changed then.
    was_applied: bool,
    /// Whether an application that was interrupted was finished.
    resumed: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Time of the application.
    seconds: f64,
}

impl Document for AppliedReport {
    const SCHEMA: &'static str = "diskwright.diff-apply/1";
}

/// Applies `export`, or with `-` standard input, to the disk `copy`.
pub(super) fn run(
    context: &mut Context,
    export: &Path,
    copy: &Path,
    ignore_id_mismatch: bool,
    dry_run: bool,
) -> Outcome {
    let open = context.global.open_options(true);
    let options = ApplyOptions { ignore_id_mismatch, open, dry_run };
    let from_pipe = export.as_os_str() == "-";
    if from_pipe && io::stdin().is_terminal() {
        return Err(Failure::usage("standard input is a terminal: send an export to it, or name a file"));
    }
    // A file is read twice.
    let mut display = match from_pipe {
        true => context.progress("applying"),
        false => context.progress("checking").then("applying"),
    };
    let mut report = |done: u64, total: u64| display.update(done, total);
    let mut input = io::stdin().lock();
    let increment = if from_pipe { Increment::Stream(&mut input) } else { Increment::File(export) };
    let done = apply_export(increment, copy, &options, &mut report);
    let elapsed = display.elapsed();
    drop(display);
    let done = done.inspect_err(|error| {
        if matches!(error, DiskError::Stopped) && !dry_run {
            let rest = "it may have a part of the changes, and the same command finishes it";
            context.warn(&format!("{}: {rest}", copy.display()));
        }
    });
    let done = done.map_err(in_use::explain)?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        context.print_json(&applied(export, copy, &done, dry_run, elapsed))?;
    } else if !context.global.quiet {
        print_applied(context, copy, &done, dry_run, elapsed)?;
    }
    Ok(exit::OK)
}

fn applied(export: &Path, copy: &Path, done: &Applied, dry_run: bool, elapsed: Duration) -> AppliedReport {
    AppliedReport {
        export: json::path(export),
        disk: json::path(copy),
        result_id: done.result_id.map(|id| id.to_string()),
        old_size: done.size_bytes.0,
        new_size: done.size_bytes.1,
        data_bytes: done.data_bytes,
        zero_bytes: done.zero_bytes,
        was_applied: done.was_applied,
        resumed: done.resumed,
        warnings: switches::all_with_switches(&done.warnings),
        dry_run,
        seconds: elapsed.as_secs_f64(),
    }
}

fn print_applied(context: &mut Context, copy: &Path, done: &Applied, dry_run: bool, elapsed: Duration) -> Outcome<()> {
    let name = printable(&json::path(copy));
    let (data_bytes, zero_bytes) = (done.data_bytes, done.zero_bytes);
    let what = format!("{} of data and {} of zeros", Human(data_bytes), Human(zero_bytes));
    if done.was_applied {
        return Ok(writeln!(context.text(), "{name} has these changes already; nothing was changed")?);
    }
    let goes_on = match (done.resumed, dry_run) {
        (false, _) => "",
        (true, false) => ", which finishes an interrupted application",
        (true, true) => ", which would finish an interrupted application",
    };
    match dry_run {
        true => writeln!(context.text(), "{name} would get {what}{goes_on}")?,
        false => writeln!(context.text(), "{name} got {what}{goes_on}{}", progress::took(data_bytes, elapsed))?,
    }
    let (old, new) = done.size_bytes;
    if old != new {
        let is = if dry_run { "would be" } else { "is" };
        writeln!(context.text(), "its virtual size {is} {} (it was {})", Exact(new), Exact(old))?;
    }
    if dry_run {
        writeln!(context.text(), "nothing was changed")?;
    }
    Ok(())
}
