//! `diskwright check FILE...`: reports damage and leaked space; writes only with `--repair` or
//! `--undo` (`check/repair.rs`).
//!
//! The file is read under a shared lock, so that no other process writes to it meanwhile
//! (`--force-share` takes no lock). The parents of a child are always followed, because a child
//! whose parent is missing or replaced cannot be read: a broken link is reported, and the exit code
//! is 1 unless damage was found. With `--chain` the parents are also checked, each by itself. A
//! VHD's parent whose modification time differs from the recorded one is a note on the child.

mod repair;

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Codes, Failure, Outcome},
    json::{self, Document},
    options::ShareArgs,
    several::{self, Between},
    sizes::Human,
    style::{GREEN, RED, YELLOW},
    switches,
};
use clap::Args;
use diskwright_disk::{
    ChainScope, Disk, DiskError, Layer, OpenOptions, check_image, check_ranges, interrupted_repair,
    parent_timestamp_warning, read_without_lock, require_file,
};
use diskwright_image::{CheckReport, Finding, Format, Repair, Severity};
use diskwright_store::Files;
pub use repair::RepairReport;
#[cfg(test)]
pub use repair::UndoReport;
use repair::{RangeReport, RepairOptionsArgs, severity_word};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Arguments of `check`.
#[derive(Debug, Args)]
#[command(after_help = "\
A child is read through its parents, so the links to them are followed. A broken link (the parent is missing, was replaced or may not \
be opened) is reported, and the exit code is 1 even if the file itself is sound. --chain also checks the parents themselves.

--repair repairs what it can without a guess: footers, headers and region tables that have a good copy, a log to be replayed, leaked \
space. Every byte of the disk that can be read stays the same. What can only be repaired by giving up data (blocks that lie beyond the end of \
the file, two blocks in one place) is left alone, and the exit code is 2, unless --accept-loss is given: then each range of the disk that is \
given up is printed. Before the first change all old bytes are saved in FILE.undo. --undo puts them back, and is refused if the file was written \
since. A repair that was interrupted is put back by the next --repair or --undo.

EXIT CODES  0 sound, also after a repair or an undo, 1 could not check or repair, or a link to a parent is broken (wrong usage too), 2 corrupt, \
3 leaked space only. With --dry-run: that of the file as it is

EXAMPLES
  diskwright check disk.vhdx
  diskwright check *.vhdx
  diskwright check machine.avhdx --chain
  diskwright check vm.qcow2 --snapshot before-update
  diskwright check disk.vhdx --repair --dry-run
  diskwright check disk.vhdx --repair --accept-loss --undo-file /safe/disk.undo
  diskwright check disk.vhdx --undo
  diskwright check disk.vhd --json | jq '.files[].findings'")]
pub struct CheckArgs {
    /// The disks.
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Check the parents too, down to the disk that has none.
    #[arg(long)]
    chain: bool,
    /// Repair what can be repaired without loss. The old bytes are saved in FILE.undo.
    #[arg(long, conflicts_with_all = ["chain", "force_share"])]
    repair: bool,
    /// Put the file back as it was before its last repair.
    #[arg(long, conflicts_with_all = ["chain", "force_share", "repair", "accept_loss", "dry_run"])]
    undo: bool,
    #[command(flatten)]
    how: RepairOptionsArgs,
    #[command(flatten)]
    share: ShareArgs,
    /// Check also whether every range of this internal snapshot of a qcow2 image can be read: its
    /// id or its name, as info lists them.
    #[arg(long, value_name = "ID|NAME", conflicts_with_all = ["repair", "undo"])]
    snapshot: Option<String>,
}

/// What `check --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The worst of all files: `sound`, `leaked`, `corrupt` or `not checked`.
    verdict: &'static str,
    /// The image that was named, and with `--chain` its parents.
    files: Vec<FileReport>,
    /// Why the chain cannot be followed to its end.
    chain_error: Option<String>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// With `--repair`: what was done. The other fields are the state after it.
    #[serde(skip_serializing_if = "Option::is_none")]
    repair: Option<RepairReport>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.check/1";
}

/// What was found in one image.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FileReport {
    /// The image.
    file: String,
    /// Its format; `null` where it could not be opened.
    format: Option<String>,
    /// `sound`, `leaked`, `corrupt` or `not checked`.
    verdict: &'static str,
    /// Why the file could not be checked.
    error: Option<String>,
    /// Payload blocks with data of this image.
    allocated_blocks: u64,
    /// Payload blocks of the disk.
    total_blocks: u64,
    /// Bytes of the file that nothing refers to.
    leaked_bytes: u64,
    /// Deviations from the format.
    findings: Vec<FindingReport>,
}

/// One finding.
#[derive(Debug, Serialize, JsonSchema)]
pub struct FindingReport {
    /// `note`, `leak` or `corrupt`.
    severity: &'static str,
    /// Offset of the structure in the file, in bytes.
    offset: u64,
    /// What was found and what was expected, as a sentence.
    message: String,
    /// The structure that deviates from the format.
    structure: String,
    /// What was found there.
    found: String,
    /// What the format requires there; may be empty for a note.
    expected: String,
    /// `not needed`, `repairable without loss`, `costs data` or `cannot`.
    repair: &'static str,
    /// The range of the disk that a repair gives up.
    costs: Option<RangeReport>,
}

/// A file, and its report or why it could not be checked.
type Checked = (PathBuf, Result<(Format, CheckReport), DiskError>);

/// Checks the files, and with `--chain` their parents.
pub fn run(context: &mut Context, args: &CheckArgs) -> Outcome {
    several::only_one(&args.files, "--undo-file", args.how.undo_file.is_some())?;
    several::each(context, &args.files, Codes::CHECK, Between::Nothing, |context, file| one(context, args, file))
}

fn one(context: &mut Context, args: &CheckArgs, file: &Path) -> Outcome {
    require_file(file, "check")?;
    if args.undo {
        return repair::undo(context, file, &args.how);
    }
    if args.how.undo_file.is_some() && !args.repair {
        return Err(Failure::usage("--undo-file needs --repair or --undo"));
    }
    let repaired = if args.repair { Some(repair::run(context, file, &args.how)?) } else { None };
    // As far as the chain can be followed, so that damage in a parent is reported even if the next
    // parent is missing.
    let options = OpenOptions {
        scope: ChainScope::Available,
        force_share: args.share.force_share,
        snapshot: args.snapshot.clone(),
        ..context.global.open_options(false)
    };
    let first = match check_image(file, &options) {
        // The losses are printed even if the check after the repair fails.
        Err(error) if repaired.is_none() => return Err(error.into()),
        first => first,
    };
    let mut checked: Vec<Checked> = vec![(file.to_owned(), first)];
    let mut chain_error = None;
    let unlocked = args.share.force_share.then(|| read_without_lock(file));
    let is_told = |warning: &String| repaired.as_ref().is_some_and(|done| done.warnings.contains(warning));
    let interrupted = interrupted_repair(&options.files, file).into_iter().filter(|warning| !is_told(warning));
    let mut warnings: Vec<String> = unlocked.into_iter().chain(interrupted).collect();
    warnings.iter().for_each(|warning| context.warn(warning));
    match Disk::open(file, &options) {
        Ok(disk) => {
            chain_error = disk.broken_link().map(switches::with_switches);
            if let (Some(_), Some((_, Ok((_, report))))) = (&args.snapshot, checked.first_mut()) {
                report.findings.extend(check_ranges(&disk)?);
            }
            for (depth, pair) in disk.layers().windows(2).enumerate() {
                let [child, parent] = pair else { continue };
                if depth > 0 && !args.chain {
                    break;
                }
                let doubt = if options.parents.ignore_timestamp { None } else { doubt_of(child, parent) };
                if let (Some(finding), Some((_, Ok((_, report))))) = (doubt, checked.last_mut()) {
                    let after = report.findings.partition_point(|other| other.offset_bytes <= finding.offset_bytes);
                    report.findings.insert(after, finding);
                }
                if args.chain {
                    let format = Some(parent.image.info().format);
                    let options = OpenOptions { format, snapshot: None, ..options.clone() };
                    checked.push((parent.path.clone(), check_image(&parent.path, &options)));
                }
            }
        }
        // For a damaged file the report already says more than this error.
        Err(_) if !args.chain && is_corrupt(&checked) => {}
        Err(error) => chain_error = Some(switches::with_switches(error)),
    }
    let reports: Vec<FileReport> = checked.iter().map(|(path, result)| report_of(path, result)).collect();
    let code = exit_code(
        checked.iter().map(|(_, result)| result.as_ref().ok().map(|(_, report)| report.worst())),
        chain_error.is_some(),
    );
    if context.global.json {
        warnings.extend(repaired.iter().flat_map(|done| done.warnings.clone()));
        let repair = repaired.map(|done| {
            let after = exit_code([Some(done.after.worst())].into_iter(), false);
            repair::report(file, &done, args.how.dry_run, verdict(after))
        });
        let warnings = switches::all_with_switches(&warnings);
        context.print_json(&Report { verdict: verdict(code), files: reports, chain_error, warnings, repair })?;
        return Ok(code);
    }
    if let Some(done) = &repaired {
        repair::print_report(context, file, done, args.how.dry_run)?;
    }
    for report in &reports {
        print_file(context, report)?;
    }
    if let Some(error) = chain_error {
        let file = printable(&json::path(file));
        let error = printable(&error);
        writeln!(context.text(), "{file}: the chain could not be followed, so the disk cannot be read: {error}")?;
    }
    Ok(code)
}

fn is_corrupt(checked: &[Checked]) -> bool {
    checked.iter().any(|(_, result)| result.as_ref().is_ok_and(|(_, report)| report.worst() == Some(Severity::Corrupt)))
}

/// A note where the parent's modification time differs from the one that the child recorded. It is
/// no damage: a copy that does not keep times changes them too.
fn doubt_of(child: &Layer, parent: &Layer) -> Option<Finding> {
    let link = child.image.info().parent.as_ref()?;
    let told = parent_timestamp_warning(&Files::default(), link, &parent.path)?;
    let message = format!("The parent's time stamp: {told}.");
    let offset_bytes = link.modified_offset_bytes.unwrap_or(0);
    Some(Finding::new(Severity::Note, offset_bytes, "parent's time stamp", told, "the recorded time").says(message))
}

// The worst verdict of all files. "Could not check" is worse than leaks and better than damage.
fn exit_code(files: impl Iterator<Item = Option<Option<Severity>>>, chain_broken: bool) -> u8 {
    let (mut unchecked, mut worst) = (chain_broken, None);
    for file in files {
        match file {
            Some(severity) => worst = worst.max(severity),
            None => unchecked = true,
        }
    }
    match worst {
        Some(Severity::Corrupt) => exit::CORRUPT,
        _ if unchecked => exit::NOT_CHECKED,
        Some(Severity::Leak) => exit::LEAKED,
        _ => exit::OK,
    }
}

fn verdict(code: u8) -> &'static str {
    match code {
        exit::OK => "sound",
        exit::CORRUPT => "corrupt",
        exit::LEAKED => "leaked",
        _ => "not checked",
    }
}

fn report_of(path: &Path, result: &Result<(Format, CheckReport), DiskError>) -> FileReport {
    let verdict = verdict(exit_code([result.as_ref().ok().map(|(_, report)| report.worst())].into_iter(), false));
    let file = json::path(path);
    match result {
        Err(error) => FileReport {
            file,
            format: None,
            verdict,
            error: Some(switches::with_switches(error)),
            allocated_blocks: 0,
            total_blocks: 0,
            leaked_bytes: 0,
            findings: Vec::new(),
        },
        Ok((format, report)) => FileReport {
            file,
            format: Some(format.to_string()),
            verdict,
            error: None,
            allocated_blocks: report.allocated_blocks,
            total_blocks: report.total_blocks,
            leaked_bytes: report.leaked_bytes,
            findings: report
                .findings
                .iter()
                .map(|finding| FindingReport {
                    severity: severity_word(finding.severity),
                    offset: finding.offset_bytes,
                    message: switches::with_switches(&finding.message),
                    structure: finding.structure.clone(),
                    found: switches::with_switches(&finding.found),
                    expected: switches::with_switches(&finding.expected),
                    repair: finding.repair.as_str(),
                    costs: finding.costs.as_ref().map(RangeReport::of),
                })
                .collect(),
        },
    }
}

fn print_file(context: &mut Context, report: &FileReport) -> io::Result<()> {
    let style = context.style;
    let file = printable(&report.file);
    let width = report.findings.iter().map(|finding| finding.offset.to_string().len()).max().unwrap_or(0);
    for finding in &report.findings {
        let colour = match finding.severity {
            "corrupt" => RED,
            "leak" => YELLOW,
            _ => "0",
        };
        let word = style.paint(colour, format_args!("{:<7}", finding.severity));
        writeln!(context.text(), "{file}: {word}  offset {:width$}: {}", finding.offset, printable(&finding.message))?;
        if let Some(range) = &finding.costs {
            let (start, end) = range.bounds();
            writeln!(context.text(), "{file}:          a repair gives up bytes {start} to {end} of the disk")?;
        }
    }
    if let Some(error) = &report.error {
        return writeln!(context.text(), "{}: {}", style.paint(RED, "could not check"), printable(error));
    }
    let harm = || report.findings.iter().filter(|finding| finding.severity != "note");
    let count = |word| report.findings.iter().filter(|finding| finding.severity == word).count();
    let mut line = match report.verdict {
        "sound" => style.paint(GREEN, "sound"),
        "leaked" => {
            format!("{} of space leaked; {}", style.paint(YELLOW, Human(report.leaked_bytes)), "the contents are sound")
        }
        _ => format!("{}, {} found", style.paint(RED, "corrupt"), plural(count("corrupt"), "error")),
    };
    if count("note") > 0 {
        line.push_str(&format!(", {}", plural(count("note"), "note")));
    }
    if report.total_blocks > 0 {
        let percent = report.allocated_blocks as f64 * 100.0 / report.total_blocks as f64;
        line.push_str(&format!(
            "; {} of {} blocks allocated ({percent:.1} %)",
            report.allocated_blocks, report.total_blocks
        ));
    }
    if report.verdict != "sound" && harm().all(|finding| finding.repair == Repair::Lossless.as_str()) {
        line.push_str("; --repair fixes it without loss");
    }
    if report.format.as_deref() == Some("raw") {
        line.push_str("; a raw disk has no structures that could be checked");
    }
    writeln!(context.text(), "{file}: {line}")
}

fn plural(count: usize, noun: &str) -> String {
    format!("{count} {noun}{}", if count == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(files: &[Option<Option<Severity>>], chain_broken: bool) -> u8 {
        exit_code(files.iter().copied(), chain_broken)
    }

    #[test]
    fn exit_codes_are_those_of_qemu_img() {
        assert_eq!(code(&[Some(None)], false), 0);
        assert_eq!(code(&[Some(Some(Severity::Note))], false), 0);
        assert_eq!(code(&[None], false), 1);
        assert_eq!(code(&[Some(Some(Severity::Corrupt))], false), 2);
        assert_eq!(code(&[Some(Some(Severity::Leak))], false), 3);
    }

    #[test]
    fn the_worst_of_a_chain_counts() {
        assert_eq!(code(&[Some(None), Some(Some(Severity::Leak)), Some(Some(Severity::Corrupt))], false), 2);
        assert_eq!(code(&[Some(Some(Severity::Leak)), None], false), 1);
        assert_eq!(code(&[Some(Some(Severity::Corrupt)), None], false), 2);
        assert_eq!(code(&[Some(None)], true), 1);
    }
}
