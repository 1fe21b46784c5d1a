//! `diskwright diff FILE`: which ranges of a disk differ from its parent, an ancestor or another
//! disk; exports of them, and their application to a copy.
//!
//! The list is printed as the ranges are found, so memory does not depend on their number.

mod points;
mod source;

use self::source::{Asked, Source};
use crate::{
    context::Context,
    describe::printable,
    exit::{self, Codes, Failure, Outcome},
    in_use,
    json::{self, Document},
    options::{FormatArg, ShareArgs},
    progress,
    sizes::{Exact, Human},
    switches,
};
use clap::Args;
use diskwright_disk::{
    Applied, ApplyOptions, Change, ChangeKind, Changes, DiskError, Exported, Increment, apply_export,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    time::Duration,
};

/// Arguments of `diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE is the disk with the changes. It is compared with its parent, with ANCESTOR, or with OTHER, or --track lists what was written since a point (with --to: up to a later one, also of a disk in use). `data`: FILE holds data there; `zeros`: it reads as \
zeros; `beyond`: it ends before that range. Ranges of a chain come from tables and sector bitmaps alone, without reading data: what was rewritten with \
the same bytes is listed, unless --exact is given. Two disks without a common image are read and compared.

--export writes what turns the other disk into FILE: as a differencing image (OUT.avhdx, OUT.avhd), as a stream (OUT.dwdiff), or with - as a stream \
on standard output. --apply applies it to COPY, in place; - reads a stream from standard input. COPY must be the disk to which it applies: it is \
recognised by its identity (a VHD keeps its identity when it is written). It then has the contents and the identity of FILE, so the next export applies to it. \
An application that was interrupted leaves a disk that is neither, and the same command finishes it.

EXIT CODES  0 no differences, 1 differences, 2 could not compare; with --export and --apply 0 done, 1 failed

EXAMPLES
  diskwright diff vm.avhdx
  diskwright diff vm.avhdx --since base.vhdx --json
  diskwright diff new.vhdx old.raw
  diskwright diff tuesday.avhdx --export tuesday.dwdiff
  diskwright diff vm.vhdx --track monday --export monday.dwdiff
  diskwright diff vm.vhdx --track monday --to tuesday --export tuesday.dwdiff
  diskwright diff --apply tuesday.dwdiff --onto /backup/vm.vhdx
  diskwright diff vm.avhdx --export - | ssh host diskwright diff --apply - --onto /backup/vm.vhdx")]
pub struct DiffArgs {
    /// The disk with the changes: a file, or an NBD URI.
    #[arg(required_unless_present = "apply", conflicts_with = "apply")]
    file: Option<PathBuf>,
    /// The disk that it is compared with: a file, or an NBD URI. [default: the parent of FILE]
    #[arg(conflicts_with = "apply")]
    other: Option<PathBuf>,
    /// Compare FILE with this image of its chain.
    #[arg(long, value_name = "ANCESTOR", conflicts_with_all = ["other", "apply"])]
    since: Option<PathBuf>,
    /// List what has changed since this point of the disk's change tracking (`track`).
    #[arg(long, value_name = "NAME", conflicts_with_all = ["other", "since", "exact", "apply"])]
    track: Option<String>,
    /// With --track: list what has changed up to this later point, and read it from the image that
    /// `snapshot --track` froze then. The disk may be in use.
    #[arg(long, value_name = "NAME", requires = "track")]
    to: Option<String>,
    /// Read what may differ, and leave out what has the same bytes.
    #[arg(long, conflicts_with = "apply")]
    exact: bool,
    /// Write the changes into this new file; - for a stream on standard output.
    #[arg(long, value_name = "OUT", conflicts_with = "apply")]
    export: Option<PathBuf>,
    /// Apply these changes; - for a stream from standard input.
    #[arg(long, value_name = "EXPORT", requires = "onto")]
    apply: Option<PathBuf>,
    /// The copy to which they are applied.
    #[arg(long, value_name = "COPY", requires = "apply")]
    onto: Option<PathBuf>,
    /// Apply them also to a disk with another identity, or without any (raw). If its contents are
    /// not those of the disk to which they apply, it is damaged.
    #[arg(long, requires = "apply")]
    ignore_id_mismatch: bool,
    /// With --export or --apply: check whether it can be done, and show what would be done.
    #[arg(long)]
    dry_run: bool,
    /// Format of OTHER; --format then applies to FILE alone.
    #[arg(long, value_enum, value_name = "FORMAT", requires = "other")]
    second_format: Option<FormatArg>,
    #[command(flatten)]
    share: ShareArgs,
}

impl DiffArgs {
    /// The exit codes: a list of differences has those of `compare`.
    pub fn codes(&self) -> Codes {
        if self.export.is_some() || self.apply.is_some() { Codes::USUAL } else { Codes::COMPARE }
    }
}

/// What `diff --json` prints. It is written piece by piece while the ranges are found.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// The disk that it was compared with, or the name of the point.
    base: String,
    /// Size of the disk in bytes.
    size: u64,
    /// Size of `base` in bytes.
    base_size: u64,
    /// Whether the contents were read. If not, the tables alone say what may differ.
    contents_read: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// The ranges that differ, in ascending order.
    ranges: Vec<RangeReport>,
    /// Bytes in which the disk holds data that differ.
    data_bytes: u64,
    /// Bytes in which the disk reads as zeros, and `base` does not.
    zero_bytes: u64,
    /// Bytes behind the end of the disk in which `base` may hold data.
    beyond_bytes: u64,
    /// Why the list ends early.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.diff/1";
}

/// A range that differs.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RangeReport {
    /// Offset on the disk in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
    /// What the disk has there.
    kind: KindWord,
}

/// What a disk has in a range that differs.
#[derive(Debug, Clone, Copy, Serialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
enum KindWord {
    /// Data.
    Data,
    /// Zeros.
    Zeros,
    /// Nothing: it ends before.
    Beyond,
}

impl KindWord {
    fn of(kind: ChangeKind) -> Self {
        match kind {
            ChangeKind::Data => Self::Data,
            ChangeKind::Zeros => Self::Zeros,
            ChangeKind::Beyond => Self::Beyond,
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Zeros => "zeros",
            Self::Beyond => "beyond",
        }
    }
}

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

/// Lists, exports or applies.
pub fn run(context: &mut Context, args: &DiffArgs) -> Outcome {
    if args.dry_run && args.export.is_none() && args.apply.is_none() {
        return Err(Failure::usage("--dry-run needs --export or --apply: a list changes nothing"));
    }
    if let (Some(export), Some(copy)) = (&args.apply, &args.onto) {
        return apply_to(context, args, export, copy);
    }
    let Some(file) = &args.file else { return Err(Failure::usage("name the disk with the changes")) };
    let asked = Asked {
        track: args.track.as_deref(),
        to: args.to.as_deref(),
        other: args.other.as_deref(),
        since: args.since.as_deref(),
        exact: args.exact,
        second_format: args.second_format,
        force_share: args.share.force_share,
        exports: args.export.is_some(),
    };
    let (difference, warnings) = Source::open(context, file, &asked)?;
    match &args.export {
        Some(out) => export(context, args, difference, warnings, out),
        None => list(context, difference, &warnings),
    }
}

/// Totals of a list.
#[derive(Debug, Default)]
struct Totals {
    ranges: u64,
    data_bytes: u64,
    zero_bytes: u64,
    beyond_bytes: u64,
}

impl Totals {
    fn add(&mut self, change: &Change) {
        self.ranges += 1;
        *match change.kind {
            ChangeKind::Data => &mut self.data_bytes,
            ChangeKind::Zeros => &mut self.zero_bytes,
            ChangeKind::Beyond => &mut self.beyond_bytes,
        } += change.len_bytes;
    }
}

fn list(context: &mut Context, mut difference: Source, warnings: &[String]) -> Outcome {
    let mut totals = Totals::default();
    if context.global.json {
        list_json(context, &mut difference, warnings, &mut totals)?;
    } else {
        list_text(context, &mut difference, &mut totals)?;
    }
    Ok(if totals.ranges > 0 { exit::DIFFERENT } else { exit::OK })
}

/// Calls `with` for each range, and counts it. What `with` returns ends the walk.
fn each_range(
    context: &mut Context,
    difference: &mut Source,
    totals: &mut Totals,
    mut with: impl FnMut(&mut Context, &Change) -> Outcome<()>,
) -> Outcome<()> {
    let mut display = context.progress("comparing");
    let mut failure = None;
    let walked = difference.for_each(&mut |done, total| display.update(done, total), &mut |change, _| {
        totals.add(&change);
        with(context, &change).map_err(|why| {
            failure = Some(why);
            DiskError::Stopped
        })
    });
    match (failure, walked) {
        (Some(failure), _) => Err(failure),
        (None, walked) => Ok(walked?),
    }
}

fn list_text(context: &mut Context, difference: &mut Source, totals: &mut Totals) -> Outcome<()> {
    let quiet = context.global.quiet;
    let largest = difference.states().map(|state| state.size_bytes).into_iter().fold(0, u64::max);
    let digits = largest.to_string().len().max("length".len());
    let mut is_first = true;
    each_range(context, difference, totals, |context, change| {
        if quiet {
            return Ok(());
        }
        if std::mem::take(&mut is_first) {
            writeln!(context.out, "{:>digits$}  {:>digits$}  kind", "start", "length")?;
        }
        let kind = KindWord::of(change.kind).word();
        Ok(writeln!(context.out, "{:>digits$}  {:>digits$}  {kind}", change.offset_bytes, change.len_bytes)?)
    })?;
    if !quiet {
        writeln!(context.out, "{}", summary(totals))?;
    }
    Ok(())
}

fn summary(totals: &Totals) -> String {
    let parts = [
        (totals.data_bytes, "of data"),
        (totals.zero_bytes, "of zeros"),
        (totals.beyond_bytes, "behind the end of the disk"),
    ];
    let parts: Vec<String> =
        parts.iter().filter(|(bytes, _)| *bytes > 0).map(|(bytes, what)| format!("{} {what}", Human(*bytes))).collect();
    match totals.ranges {
        0 => "no differences".into(),
        1 => format!("1 range: {}", parts.join(", ")),
        ranges => format!("{ranges} ranges: {}", parts.join(", ")),
    }
}

fn list_json(context: &mut Context, difference: &mut Source, warnings: &[String], totals: &mut Totals) -> Outcome<()> {
    let [result, base] = difference.states();
    let (file, other) = (json::path(difference.path()), difference.base());
    write!(
        context.out,
        "{{\n  \"schema\": \"{}\",\n  \"file\": {},\n  \"base\": {},\n  \"size\": {},\n  \"base_size\": {},\n  \"contents_read\": {},\n  \"warnings\": {},\n  \"ranges\": [",
        Report::SCHEMA,
        compact(&file)?,
        compact(&other)?,
        result.size_bytes,
        base.size_bytes,
        difference.reads_contents(),
        compact(&switches::all_told(warnings))?,
    )?;
    let mut separator = "\n    ";
    let listed = each_range(context, difference, totals, |context, change| {
        let (start, length, kind) = (change.offset_bytes, change.len_bytes, KindWord::of(change.kind));
        write!(context.out, "{separator}{}", compact(&RangeReport { start, length, kind })?)?;
        separator = ",\n    ";
        Ok(())
    });
    let error = match &listed {
        Ok(()) => String::new(),
        Err(Failure::ReaderGone) => return listed,
        Err(Failure::Usage(why) | Failure::Sentence(why)) => format!(",\n  \"error\": {}", compact(why)?),
        Err(Failure::Stopped) => ",\n  \"error\": \"stopped\"".into(),
    };
    writeln!(
        context.out,
        "\n  ],\n  \"data_bytes\": {},\n  \"zero_bytes\": {},\n  \"beyond_bytes\": {}{error}\n}}",
        totals.data_bytes, totals.zero_bytes, totals.beyond_bytes
    )?;
    listed
}

fn compact<T: Serialize>(value: &T) -> Outcome<String> {
    serde_json::to_string(value).map_err(|error| Failure::new(error.to_string()))
}

fn export(
    context: &mut Context,
    args: &DiffArgs,
    mut difference: Source,
    mut warnings: Vec<String>,
    out: &Path,
) -> Outcome {
    let engine = context.global.engine();
    let files = context.global.open_options(false).files;
    let [result, base] = difference.states();
    let (file, other) = (json::path(difference.path()), difference.base());
    let into_pipe = out.as_os_str() == "-";
    if into_pipe && (context.global.json || args.dry_run) {
        return Err(Failure::usage(
            "--json and --dry-run need the name of a file: with - standard output is the export",
        ));
    }
    if into_pipe && io::stdout().is_terminal() {
        return Err(Failure::usage("an export is no text: name a file, or send standard output to another program"));
    }
    let mut display = context.progress("exporting");
    let mut tell = |done: u64, total: u64| display.update(done, total);
    let done = match into_pipe {
        true => difference.export(engine, &files).to_stream(&mut context.out, Path::new("standard output"), &mut tell),
        false => difference.export(engine, &files).to_file(out, args.dry_run, &mut tell),
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
            warnings: switches::all_told(&warnings),
            dry_run: args.dry_run,
            seconds: elapsed.as_secs_f64(),
        })?;
    } else if !context.global.quiet && !into_pipe {
        let what = format!("{} of data and {} of zeros", Human(data_bytes), Human(zero_bytes));
        let out = printable(&json::path(out));
        match args.dry_run {
            true => writeln!(context.out, "{out} would get up to {what}; nothing was changed")?,
            false => writeln!(context.out, "{out}: {what}{}", took(data_bytes, elapsed))?,
        }
    }
    Ok(exit::OK)
}

fn took(bytes: u64, elapsed: Duration) -> String {
    format!(", in {} ({}/s)", progress::duration(elapsed), Human(progress::rate(bytes, elapsed)))
}

fn apply_to(context: &mut Context, args: &DiffArgs, export: &Path, copy: &Path) -> Outcome {
    let open = context.global.open_options(true);
    let options = ApplyOptions { ignore_id_mismatch: args.ignore_id_mismatch, open, dry_run: args.dry_run };
    let from_pipe = export.as_os_str() == "-";
    if from_pipe && io::stdin().is_terminal() {
        return Err(Failure::usage("standard input is a terminal: send an export to it, or name a file"));
    }
    // A file is read twice.
    let mut display = match from_pipe {
        true => context.progress("applying"),
        false => context.progress("checking").then("applying"),
    };
    let mut tell = |done: u64, total: u64| display.update(done, total);
    let mut input = io::stdin().lock();
    let increment = if from_pipe { Increment::Stream(&mut input) } else { Increment::File(export) };
    let done = apply_export(increment, copy, &options, &mut tell);
    let elapsed = display.elapsed();
    drop(display);
    let done = done.inspect_err(|error| {
        if matches!(error, DiskError::Stopped) && !args.dry_run {
            let told = "it may have a part of the changes, and the same command finishes it";
            context.warn(&format!("{}: {told}", copy.display()));
        }
    });
    let done = done.map_err(in_use::explain)?;
    done.warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        context.print_json(&applied(export, copy, &done, args.dry_run, elapsed))?;
    } else if !context.global.quiet {
        tell_applied(context, copy, &done, args.dry_run, elapsed)?;
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
        warnings: switches::all_told(&done.warnings),
        dry_run,
        seconds: elapsed.as_secs_f64(),
    }
}

fn tell_applied(context: &mut Context, copy: &Path, done: &Applied, dry_run: bool, elapsed: Duration) -> Outcome<()> {
    let name = printable(&json::path(copy));
    let (data_bytes, zero_bytes) = (done.data_bytes, done.zero_bytes);
    let what = format!("{} of data and {} of zeros", Human(data_bytes), Human(zero_bytes));
    if done.was_applied {
        return Ok(writeln!(context.out, "{name} has these changes already; nothing was changed")?);
    }
    let goes_on = match (done.resumed, dry_run) {
        (false, _) => "",
        (true, false) => ", which finishes an interrupted application",
        (true, true) => ", which would finish an interrupted application",
    };
    match dry_run {
        true => writeln!(context.out, "{name} would get {what}{goes_on}")?,
        false => writeln!(context.out, "{name} got {what}{goes_on}{}", took(data_bytes, elapsed))?,
    }
    let (old, new) = done.size_bytes;
    if old != new {
        let is = if dry_run { "would be" } else { "is" };
        writeln!(context.out, "its virtual size {is} {} (it was {})", Exact(new), Exact(old))?;
    }
    if dry_run {
        writeln!(context.out, "nothing was changed")?;
    }
    Ok(())
}
