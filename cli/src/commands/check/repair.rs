//! `diskwright check FILE --repair` and `--undo`: their options and their output.
//!
//! After a repair the check runs as without it, so the verdict and the exit code are those of the
//! file as it is now. A dry run shows the steps, the writes, and what would be left.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Outcome},
    json::{self, Document},
    space::Space,
    style::{GREEN, YELLOW},
    switches,
};
use clap::Args;
use diskwright_disk::{OpenOptions, PlannedWrite, RepairOptions, Repaired, repair, undo_repair};
use diskwright_image::{RepairStep, Severity};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
};

/// Options of `--repair` and `--undo`.
#[derive(Debug, Args)]
pub struct RepairOptionsArgs {
    /// With --repair: also give up what cannot be read, so that the rest can be used.
    #[arg(long, requires = "repair")]
    pub(super) accept_loss: bool,
    /// With --repair: show what would be done, and change nothing.
    #[arg(long, requires = "repair")]
    pub(super) dry_run: bool,
    /// The undo file. [default: FILE.undo, then FILE.undo.2 and so on]
    #[arg(long, value_name = "FILE")]
    pub(super) undo_file: Option<PathBuf>,
}

/// What the undo file has for each write besides the old bytes, at most.
const UNDO_RECORD_BYTES: u64 = 4096;
/// Writes of a dry run that are printed; the JSON has all.
const WRITES_SHOWN: usize = 50;

/// The field `repair` of `check --repair --json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RepairReport {
    /// Whether it was only planned.
    dry_run: bool,
    /// The steps, in order.
    steps: Vec<StepReport>,
    /// Number of steps that are not listed.
    steps_left_out: u64,
    /// The changes of the file, in order.
    writes: Vec<WriteReport>,
    /// Length of the file before the repair, in bytes.
    size_before: u64,
    /// Length of the file after the repair, in bytes.
    size_after: u64,
    /// The ranges of the disk that are given up.
    lost: Vec<RangeReport>,
    /// The worst that is left: `sound`, `leaked` or `corrupt`.
    verdict_after: &'static str,
    /// With `--dry-run`: the space that it needs, most of it for the undo file.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// The undo file; `null` if nothing was changed.
    undo_file: Option<String>,
    /// The undo file of an interrupted repair, which was rolled back first.
    rolled_back: Option<String>,
}

/// A step of a repair.
#[derive(Debug, Serialize, JsonSchema)]
struct StepReport {
    /// `note`, `leak` or `corrupt`.
    severity: &'static str,
    /// Offset in the file of what is repaired, in bytes.
    offset: u64,
    /// What was found.
    finding: String,
    /// What is done.
    step: String,
    /// The range of the disk that is given up.
    costs: Option<RangeReport>,
}

/// A range of the disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RangeReport {
    /// First byte.
    start: u64,
    /// Number of bytes.
    length: u64,
}

impl RangeReport {
    pub(super) fn of(range: &Range<u64>) -> Self {
        Self { start: range.start, length: range.end - range.start }
    }

    /// First byte, and first byte after the range.
    pub(super) fn bounds(&self) -> (u64, u64) {
        (self.start, self.start + self.length)
    }
}

/// A change of the file.
#[derive(Debug, Serialize, JsonSchema)]
struct WriteReport {
    /// `write`, `zero` or `set length`.
    kind: &'static str,
    /// Where in the file, in bytes; `null` for `set length`.
    offset: Option<u64>,
    /// Number of bytes, or the new length.
    length: u64,
}

/// What `check --undo --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct UndoReport {
    /// The image.
    file: String,
    /// The undo file, which was removed.
    undo_file: String,
    /// Length of the image now, in bytes.
    size: u64,
    /// Whether the repair had been interrupted.
    was_interrupted: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for UndoReport {
    const SCHEMA: &'static str = "diskwright.check.undo/1";
}

/// The word for a severity.
pub(super) fn severity_word(severity: Severity) -> &'static str {
    match severity {
        Severity::Note => "note",
        Severity::Leak => "leak",
        Severity::Corrupt => "corrupt",
    }
}

fn options(open: OpenOptions, args: &RepairOptionsArgs) -> RepairOptions {
    RepairOptions { open, accept_loss: args.accept_loss, undo_file: args.undo_file.clone(), dry_run: args.dry_run }
}

/// Repairs, or plans a repair. Prints warnings.
pub(super) fn run(context: &mut Context, file: &Path, args: &RepairOptionsArgs) -> Outcome<Repaired> {
    let options = options(context.global.open_options(false), args);
    let mut display = context.progress("repairing");
    let done = repair(file, &options, &mut |done, total| display.update(done, total));
    drop(display);
    let done = done?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    Ok(done)
}

/// Undoes the last repair.
pub(super) fn undo(context: &mut Context, file: &Path, args: &RepairOptionsArgs) -> Outcome {
    let done = undo_repair(file, &options(context.global.open_options(false), args))?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    let undo_file = json::path(&done.undo_file);
    if context.global.json {
        let report = UndoReport {
            file: json::path(file),
            undo_file,
            size: done.len_bytes,
            was_interrupted: done.was_interrupted,
            warnings: switches::all_with_switches(&done.warnings),
        };
        context.print_json(&report)?;
    } else if !context.global.quiet {
        let what = if done.was_interrupted { "the interrupted repair is undone" } else { "the repair is undone" };
        let (name, undo_file) = (printable(&json::path(file)), printable(&undo_file));
        writeln!(context.text(), "{name}: {what}; the file is as it was before it, and {undo_file} is removed")?;
    }
    Ok(exit::OK)
}

fn costs(step: &RepairStep) -> Option<&Range<u64>> {
    step.finding.costs.as_ref()
}

/// The repair for the JSON document. `verdict` is the word for the worst finding that is left.
pub(super) fn report(file: &Path, done: &Repaired, dry_run: bool, verdict: &'static str) -> RepairReport {
    let step = |step: &RepairStep| StepReport {
        severity: severity_word(step.finding.severity),
        offset: step.finding.offset_bytes,
        finding: switches::with_switches(&step.finding.message),
        step: step.what.clone(),
        costs: costs(step).map(RangeReport::of),
    };
    let write = |write: &PlannedWrite| match *write {
        PlannedWrite::Write { offset_bytes, len_bytes } => {
            WriteReport { kind: "write", offset: Some(offset_bytes), length: len_bytes }
        }
        PlannedWrite::Zero { offset_bytes, len_bytes } => {
            WriteReport { kind: "zero", offset: Some(offset_bytes), length: len_bytes }
        }
        PlannedWrite::SetLen { len_bytes } => WriteReport { kind: "set length", offset: None, length: len_bytes },
    };
    RepairReport {
        dry_run,
        steps: done.steps.iter().map(step).collect(),
        steps_left_out: done.steps_left_out,
        writes: done.writes.iter().map(write).collect(),
        size_before: done.len_bytes.0,
        size_after: done.len_bytes.1,
        lost: done.lost.iter().map(RangeReport::of).collect(),
        verdict_after: verdict,
        space: dry_run.then(|| space_of(file, done)),
        undo_file: done.undo_file.as_ref().map(|path| json::path(path)),
        rolled_back: done.rolled_back.as_ref().map(|path| json::path(path)),
    }
}

/// The space that a repair needs: the undo file keeps the old bytes of every write, and the file
/// may become longer.
fn space_of(file: &Path, done: &Repaired) -> Space {
    let old = |write: &PlannedWrite| match *write {
        PlannedWrite::Write { len_bytes, .. } | PlannedWrite::Zero { len_bytes, .. } => len_bytes,
        PlannedWrite::SetLen { len_bytes } => done.len_bytes.0.saturating_sub(len_bytes),
    };
    let saved: u64 = done.writes.iter().map(|write| old(write) + UNDO_RECORD_BYTES).sum();
    Space::on(file, saved + done.len_bytes.1.saturating_sub(done.len_bytes.0))
}

/// Prints the steps, what they cost, and for a dry run the writes.
pub(super) fn print_report(context: &mut Context, path: &Path, done: &Repaired, dry_run: bool) -> io::Result<()> {
    let style = context.style;
    let file = printable(&json::path(path));
    if let Some(undo) = &done.rolled_back {
        let undo = printable(&json::path(undo));
        writeln!(context.text(), "{file}: an earlier repair was interrupted; it was put back first, by {undo}")?;
    }
    for step in &done.steps {
        let word = match (costs(step), dry_run) {
            (Some(_), false) => style.paint(YELLOW, "given up"),
            (Some(_), true) => style.paint(YELLOW, "would be given up"),
            (None, false) => style.paint(GREEN, "repaired"),
            (None, true) => style.paint(GREEN, "would be repaired"),
        };
        let finding = printable(&switches::with_switches(&step.finding.message));
        let finding = finding.trim_end_matches('.');
        write!(context.out, "{file}: {word}  offset {}: {finding}", step.finding.offset_bytes)?;
        match costs(step) {
            _ if step.what.is_empty() => {}
            Some(range) => write!(context.out, ": bytes {} to {} of the disk; {}", range.start, range.end, step.what)?,
            None => write!(context.out, ": {}", step.what)?,
        }
        writeln!(context.out)?;
    }
    if done.steps_left_out > 0 {
        writeln!(context.text(), "{file}: {} more steps", done.steps_left_out)?;
    }
    for range in &done.lost {
        let is = if dry_run { "would be" } else { "are" };
        writeln!(context.text(), "{file}: bytes {} to {} of the disk {is} given up", range.start, range.end)?;
    }
    if dry_run {
        for write in done.writes.iter().take(WRITES_SHOWN) {
            match write {
                PlannedWrite::Write { offset_bytes, len_bytes } => {
                    writeln!(context.text(), "{file}: would write {len_bytes} bytes at offset {offset_bytes}")?;
                }
                PlannedWrite::Zero { offset_bytes, len_bytes } => {
                    writeln!(context.text(), "{file}: would give back {len_bytes} bytes at offset {offset_bytes}")?;
                }
                PlannedWrite::SetLen { len_bytes } => {
                    writeln!(context.text(), "{file}: would set the length to {len_bytes} bytes")?;
                }
            }
        }
        if done.writes.len() > WRITES_SHOWN {
            writeln!(context.text(), "{file}: and {} more writes", done.writes.len() - WRITES_SHOWN)?;
        }
        let needs = space_of(path, done);
        return writeln!(context.text(), "{file}: it {needs}; nothing was changed; as it is now:");
    }
    match &done.undo_file {
        Some(undo) => {
            let undo = printable(&json::path(undo));
            writeln!(context.text(), "{file}: repaired; {undo} has what --undo needs, remove it when you do not")
        }
        None => writeln!(context.text(), "{file}: nothing to repair; nothing was changed"),
    }
}
