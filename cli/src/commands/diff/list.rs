//! Lists the ranges that differ. They are printed as they are found, so memory does not depend on
//! their number.

use super::source::Source;
use crate::{
    context::Context,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    sizes::Human,
    switches,
};
use diskwright_disk::{Change, ChangeKind, Changes, DiskError};
use schemars::JsonSchema;
use serde::Serialize;
use std::io::Write;

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
    /// The disk ends before this range.
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

pub(super) fn run(context: &mut Context, mut difference: Source, warnings: &[String]) -> Outcome {
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
        writeln!(context.text(), "{}", summary(totals))?;
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
        compact(&switches::all_with_switches(warnings))?,
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
