//! Exports what differs, as a differencing image or a stream.

use super::source::Source;
use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    progress,
    sizes::Human,
    switches,
};
use diskwright_disk::Exported;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    path::Path,
};

/// What `diff --export --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExportedReport {
    /// The disk.
    file: String,
    /// The disk to which the export applies, or the name of the point.
    base: String,
    /// The export.
    export: String,
    /// Identity of `base`: VHDX DataWriteGuid, VHD unique id; `null` for raw disks.
    base_id: Option<String>,
    /// Identity of the disk.
    result_id: Option<String>,
    /// Size of `base` in bytes.
    base_size: u64,
    /// Size of the disk in bytes.
    size: u64,
    /// Bytes of data in the export.
    data_bytes: u64,
    /// Bytes of zeros in the export.
    zero_bytes: u64,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Time of the export.
    seconds: f64,
}

impl Document for ExportedReport {
    const SCHEMA: &'static str = "diskwright.diff-export/1";
}

/// Exports the differences into the file `out`, or with `-` into standard output.
pub(super) fn run(
    context: &mut Context,
    mut difference: Source,
    mut warnings: Vec<String>,
    out: &Path,
    dry_run: bool,
) -> Outcome {
    let engine = context.global.engine();
    let files = context.global.open_options(false).files;
    let [result, base] = difference.states();
    let (file, other) = (json::path(difference.path()), difference.base());
    let into_pipe = out.as_os_str() == "-";
    if into_pipe && (context.global.json || dry_run) {
        return Err(Failure::usage(
            "--json and --dry-run need the name of a file: with - standard output is the export",
        ));
    }
    if into_pipe && io::stdout().is_terminal() {
        return Err(Failure::usage("an export is not text: name a file, or send standard output to another program"));
    }
    let mut display = context.progress("exporting");
    let mut report = |done: u64, total: u64| display.update(done, total);
    let done = match into_pipe {
        true => {
            difference.export(engine, &files).to_stream(&mut context.out, Path::new("standard output"), &mut report)
        }
        false => difference.export(engine, &files).to_file(out, dry_run, &mut report),
    };
    let elapsed = display.elapsed();
    drop(display);
    let done: Exported = done?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    warnings.extend(done.warnings);
    let (data_bytes, zero_bytes) = (done.data_bytes, done.zero_bytes);
    if context.global.json {
        context.print_json(&ExportedReport {
            file,
            base: other,
            export: json::path(out),
            base_id: base.linkage_id.map(|id| id.to_string()),
            result_id: result.linkage_id.map(|id| id.to_string()),
            base_size: base.size_bytes,
            size: result.size_bytes,
            data_bytes,
            zero_bytes,
            warnings: switches::all_with_switches(&warnings),
            dry_run,
            seconds: elapsed.as_secs_f64(),
        })?;
    } else if !context.global.quiet && !into_pipe {
        let what = format!("{} of data and {} of zeros", Human(data_bytes), Human(zero_bytes));
        let out = printable(&json::path(out));
        match dry_run {
            true => writeln!(context.text(), "{out} would get up to {what}; nothing was changed")?,
            false => writeln!(context.text(), "{out}: {what}{}", progress::took(data_bytes, elapsed))?,
        }
    }
    Ok(exit::OK)
}
