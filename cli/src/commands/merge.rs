//! `diskwright merge CHILD`: an image into its parent, or a whole chain into a new file.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    progress,
    sizes::{Exact, Human},
    space::Space,
    switches,
};
use clap::{Args, ValueEnum};
use diskwright_disk::{
    ConvertOptions, ConvertOutcome, CreateRequest, DiskError, KeptName, MergeOptions, Merged, OpenOptions, convert,
    merge, plan_convert, require_file,
};
use diskwright_image::DiskType;
use diskwright_serve::control::{Client, ControlError, Done, Operation};
use diskwright_store::ErrorCode;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    time::Duration,
};

/// Longest list of files that is printed whole.
const NAMES_MAX: usize = 8;

/// Arguments of `merge`.
#[derive(Debug, Args)]
#[command(after_help = "\
CHILD's data goes into its parent, and CHILD is removed. The parent keeps its name, unless --keep-name is given. With --into an ancestor takes all \
images above it, one by one, the nearest first. Children of CHILD get a new link to the merged image. No other copy is made: the parent's file grows \
by what it did not have, which --dry-run shows. Data is shared instead of copied where the file system has reflinks.

With --to the whole chain is copied into a new disk without a parent, and CHILD and its parents stay as they are.

Images of a disk that `serve` or `attach` has open are merged by that process, while its clients go on. The merge pauses while they wait for \
answers, so that they keep most of their speed. If CHILD is the disk itself, which clients write, the disk keeps its name.

A merge is refused while another program has one of the images open, and if another image has the parent, or an image between, as its parent: it would \
read other data afterwards. Such images are searched in the folders of the images, and in those given by --search.

A merge that was stopped, or cut off by a power failure, leaves CHILD as it was, and the same command finishes it.

EXAMPLES
  diskwright merge vm.avhdx
  diskwright merge vm.vhdx --into vm_monday.avhdx --keep-name
  diskwright merge vm_monday.avhdx
  diskwright merge vm.avhdx --dry-run
  diskwright merge vm.avhdx --to whole.vhd --type fixed")]
pub struct MergeArgs {
    /// The differencing disk to merge.
    child: PathBuf,
    #[command(flatten)]
    how: MergeHow,
    /// Copy the whole chain into this new disk instead. Its format comes from its extension.
    #[arg(long, value_name = "NEW", conflicts_with_all = ["into", "keep_name", "search"])]
    to: Option<PathBuf>,
    /// How NEW allocates its space. [default: dynamic; raw is always fixed]
    #[arg(long = "type", value_enum, value_name = "TYPE", requires = "to")]
    disk_type: Option<NewType>,
}

/// How an image is merged into an ancestor: also for `serve-ctl`.
#[derive(Debug, Args)]
pub struct MergeHow {
    /// The ancestor that takes the data. [default: the parent]
    #[arg(long, value_name = "ANCESTOR")]
    into: Option<PathBuf>,
    /// The merged image gets CHILD's name, and its own name is gone.
    #[arg(long)]
    keep_name: bool,
    /// Search this folder too for images whose parent would be merged.
    #[arg(long, value_name = "DIR")]
    search: Vec<PathBuf>,
    /// Copy every byte, even where the file system could share it.
    #[arg(long)]
    no_reflink: bool,
    /// Check whether it can be done, and show what would be done.
    #[arg(long)]
    dry_run: bool,
}

impl MergeHow {
    /// The options of the library. `open` is for a disk that is not in use.
    pub fn options(&self, open: OpenOptions) -> MergeOptions {
        MergeOptions {
            into: self.into.clone(),
            keep: if self.keep_name { KeptName::Childs } else { KeptName::Parents },
            search_dirs: self.search.clone(),
            no_reflink: self.no_reflink,
            open,
            dry_run: self.dry_run,
        }
    }
}

/// Disk types without a parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum NewType {
    /// Full length from the start.
    Fixed,
    /// Space is allocated when a block is first written.
    Dynamic,
}

/// What `merge --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk that was merged.
    file: String,
    /// The image that has all data afterwards.
    disk: String,
    /// The images whose data went into it, the nearest first. They are removed, unless a new disk
    /// was made.
    merged: Vec<String>,
    /// Children of the merged disk, which have a new link to `disk`.
    relinked: Vec<String>,
    /// What interrupted merges had left, and was removed.
    leftovers: Vec<String>,
    /// Bytes of data that had to go into `disk`; of a new disk what was found to be data.
    data_bytes: u64,
    /// Bytes that were copied.
    copied_bytes: u64,
    /// Bytes that the file system shares (reflinks).
    cloned_bytes: u64,
    /// By how much the file of `disk` may grow, in bytes; `null` for a new disk.
    growth_bytes: Option<u64>,
    /// Virtual size of `disk` before, in bytes; `null` for a new disk.
    old_size: Option<u64>,
    /// Virtual size of `disk` afterwards, in bytes.
    new_size: u64,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// With `--dry-run`: the space that it needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    space: Option<Space>,
    /// Whether it was only checked what would be done.
    dry_run: bool,
    /// Whether the disk was in use, and was changed by the process that has it open.
    in_use: bool,
    /// Time of the merge.
    seconds: f64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.merge/1";
}

pub fn run(context: &mut Context, args: &MergeArgs) -> Outcome {
    require_file(&args.child, "merge")?;
    match &args.to {
        Some(new) => into_new(context, args, new),
        None => into_ancestor(context, args),
    }
}

fn into_ancestor(context: &mut Context, args: &MergeArgs) -> Outcome {
    let options = args.how.options(context.global.open_options(true));
    let mut display = context.progress("merging");
    let merged = merge(&args.child, &options, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    if let Err(DiskError::InUse { path, .. }) = &merged
        && let Some(below) = in_use::chain_with(path)?
    {
        return in_process(context, &args.child, &below.client, MergeRequest::of(&options)?);
    }
    let merged = merged.map_err(|error| match error {
        DiskError::Stopped => stopped(context, &args.child),
        other => in_use::explain(other),
    })?;
    show(context, &args.child, &merged, args.how.dry_run, elapsed, false)?;
    Ok(exit::OK)
}

fn stopped(context: &mut Context, child: &Path) -> Failure {
    context.warn(&format!("{}: it reads as before; the same command finishes the merge", child.display()));
    Failure::Stopped
}

/// The options of a merge for the process that has the disk open. Paths are absolute, because that
/// process has another working directory.
#[derive(Debug)]
pub struct MergeRequest {
    into: Option<PathBuf>,
    keep_name: bool,
    search: Vec<PathBuf>,
    no_reflink: bool,
    dry_run: bool,
}

impl MergeRequest {
    /// The request with these options.
    ///
    /// # Errors
    /// A path that does not exist.
    pub fn of(options: &MergeOptions) -> Outcome<Self> {
        Ok(Self {
            into: options.into.as_deref().map(absolute).transpose()?,
            keep_name: options.keep == KeptName::Childs,
            search: options.search_dirs.iter().map(|dir| absolute(dir)).collect::<Outcome<_>>()?,
            no_reflink: options.no_reflink,
            dry_run: options.dry_run,
        })
    }
}

fn absolute(path: &Path) -> Outcome<PathBuf> {
    path.canonicalize().map_err(|error| Failure::doing(format!("cannot find {}", path.display()), error))
}

/// Merges an image of a disk in use, for `serve-ctl` too.
pub fn in_process(context: &mut Context, child: &Path, client: &Client, request: MergeRequest) -> Outcome {
    let (merged, elapsed) = ask(context, child, client, &request)?;
    show(context, child, &merged, request.dry_run, elapsed, true)?;
    Ok(exit::OK)
}

/// Sends the request to the process, and shows its progress.
pub fn ask(
    context: &mut Context,
    child: &Path,
    client: &Client,
    request: &MergeRequest,
) -> Outcome<(Merged, Duration)> {
    let MergeRequest { into, keep_name, search, no_reflink, dry_run } = request;
    let operation = Operation::Merge {
        child: absolute(child)?,
        into: into.clone(),
        keep_name: *keep_name,
        search: search.clone(),
        no_reflink: *no_reflink,
        dry_run: *dry_run,
    };
    let before = identity(child);
    let mut display = context.progress("merging");
    let done = client.call(operation, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    match done {
        Ok(Done::Merged(merged)) => Ok((merged.into(), elapsed)),
        Ok(_) => Err(in_use::unexpected(client)),
        Err(ControlError::Stopped { .. }) => {
            // The process notices that this client is gone, and stops at a place where nothing is
            // half done; or it has just ended the merge.
            let _ = client.settle();
            match identity(child) == before {
                true => Err(stopped(context, child)),
                false => {
                    Err(Failure::new(format!("{}: the merge had ended before it could be stopped", child.display())))
                }
            }
        }
        Err(ControlError::Refused { code: ErrorCode::Stopped, .. }) => Err(Failure::new(format!(
            "{}: {} ends, and has stopped the merge; the disk reads as before, and the same command finishes it",
            child.display(),
            client.peer
        ))),
        Err(other) => Err(other.into()),
    }
}

/// Device and inode number of a file. A merge removes the child, or puts another file in its place.
fn identity(file: &Path) -> Option<(u64, u64)> {
    let facts = std::fs::metadata(file).ok()?;
    Some((facts.dev(), facts.ino()))
}

fn show(
    context: &mut Context,
    child: &Path,
    merged: &Merged,
    dry_run: bool,
    elapsed: Duration,
    in_use: bool,
) -> Outcome<()> {
    merged.warnings.iter().for_each(|warning| context.warn(warning));
    if context.global.json {
        context.print_json(&report(child, merged, dry_run, elapsed, in_use))?;
    } else if !context.global.quiet {
        print_report(context, child, merged, dry_run, elapsed)?;
    }
    Ok(())
}

/// The JSON of a merge into an ancestor.
fn report(child: &Path, merged: &Merged, dry_run: bool, elapsed: Duration, in_use: bool) -> Report {
    let paths = |paths: &[PathBuf]| paths.iter().map(|path| json::path(path)).collect();
    Report {
        file: json::path(child),
        disk: json::path(&merged.disk),
        merged: paths(&merged.merged),
        relinked: paths(&merged.relinked),
        leftovers: paths(&merged.leftovers),
        data_bytes: merged.data_bytes,
        copied_bytes: merged.copied_bytes,
        cloned_bytes: merged.cloned_bytes,
        growth_bytes: Some(merged.growth_bytes),
        old_size: Some(merged.size_bytes.0),
        new_size: merged.size_bytes.1,
        warnings: switches::all_with_switches(&merged.warnings),
        space: dry_run.then(|| Space::on(&merged.target, merged.growth_bytes)),
        dry_run,
        in_use,
        seconds: elapsed.as_secs_f64(),
    }
}

/// Names separated by commas; of a long list only its ends and its length (`--json` has all).
fn listed(names: &[String]) -> String {
    match names {
        [first, .., last] if names.len() > NAMES_MAX => format!("{first} to {last} ({} files)", names.len()),
        names => names.join(", "),
    }
}

/// Prints a merge into an ancestor.
pub fn print_report(
    context: &mut Context,
    child: &Path,
    merged: &Merged,
    dry_run: bool,
    elapsed: Duration,
) -> Outcome<()> {
    let name = |path: &Path| printable(&json::path(&beside(child, path)));
    let names = |paths: &[PathBuf]| listed(&paths.iter().map(|path| name(path)).collect::<Vec<_>>());
    let (gone, target) = (names(&merged.merged), name(&merged.target));
    let data = Human(merged.data_bytes);
    let named = match merged.disk == merged.target {
        true => String::new(),
        false => format!(" and {} {}", word(dry_run, "is now", "would become"), name(&merged.disk)),
    };
    if dry_run {
        writeln!(context.text(), "{target} would get {data} of data from {gone}{named}")?;
        match merged.growth_bytes {
            0 => writeln!(context.text(), "its file would not grow")?,
            bytes => writeln!(
                context.text(),
                "its file would grow by up to {}: it {}",
                Exact(bytes),
                Space::on(&merged.target, bytes)
            )?,
        }
    } else {
        let rate = Human(progress::rate(merged.copied_bytes + merged.cloned_bytes, elapsed));
        let shared = match merged.cloned_bytes {
            0 => String::new(),
            bytes => format!(", {} of it shared", Human(bytes)),
        };
        let took = progress::duration(elapsed);
        writeln!(context.text(), "{target} got {data} of data from {gone}{named}{shared}, in {took} ({rate}/s)")?;
    }
    let (old, new) = merged.size_bytes;
    if old != new {
        writeln!(
            context.text(),
            "its virtual size {} {} (it was {})",
            word(dry_run, "is", "would be"),
            Exact(new),
            Exact(old)
        )?;
    }
    let mut removed: Vec<PathBuf> = merged.leftovers.iter().chain(&merged.merged).cloned().collect();
    removed.retain(|path| *path != merged.disk);
    if !removed.is_empty() {
        writeln!(context.text(), "{}: {}", word(dry_run, "removed", "to be removed"), names(&removed))?;
    }
    if !merged.relinked.is_empty() {
        let what = word(dry_run, "new link to the parent", "to get a new link to the parent");
        writeln!(context.text(), "{what}: {}", names(&merged.relinked))?;
    }
    if dry_run {
        writeln!(context.text(), "nothing was changed")?;
    }
    Ok(())
}

fn word(dry_run: bool, done: &'static str, would: &'static str) -> &'static str {
    if dry_run { would } else { done }
}

/// A path in the folder of `given` is shown as `given` was.
fn beside(given: &Path, path: &Path) -> PathBuf {
    let dir = given.parent().filter(|dir| !dir.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match path.file_name() {
        Some(name) if dir.canonicalize().ok().as_deref() == path.parent() => given.with_file_name(name),
        _ => path.to_owned(),
    }
}

fn into_new(context: &mut Context, args: &MergeArgs, new: &Path) -> Outcome {
    require_file(new, "merge into")?;
    let source = context.global.open_options(false);
    let disk_type = args.disk_type.map(|word| match word {
        NewType::Fixed => DiskType::Fixed,
        NewType::Dynamic => DiskType::Dynamic,
    });
    let options = ConvertOptions {
        source,
        dest: CreateRequest { disk_type, ..CreateRequest::default() },
        no_reflink: args.how.no_reflink,
        ..ConvertOptions::default()
    };
    let mut display = context.progress("merging");
    let mut progress = |done, total| display.update(done, total);
    let (done, planned) = if args.how.dry_run {
        let planned = plan_convert(&args.child, new, &options, &mut progress)?;
        let (size_bytes, warnings) = (planned.size_bytes, planned.warnings.clone());
        (ConvertOutcome { size_bytes, warnings, ..ConvertOutcome::default() }, Some(planned))
    } else {
        (convert(&args.child, new, &options, &mut progress)?, None)
    };
    let elapsed = display.elapsed();
    drop(display);
    done.warnings.iter().for_each(|warning| context.warn(warning));
    let space = planned.as_ref().map(|planned| Space::on(new, planned.needed_bytes));
    let data_bytes = planned.map_or(done.copied_bytes + done.cloned_bytes, |planned| planned.data_bytes);
    if context.global.json {
        context.print_json(&Report {
            file: json::path(&args.child),
            disk: json::path(new),
            merged: vec![json::path(&args.child)],
            relinked: Vec::new(),
            leftovers: Vec::new(),
            data_bytes,
            copied_bytes: done.copied_bytes,
            cloned_bytes: done.cloned_bytes,
            growth_bytes: None,
            old_size: None,
            new_size: done.size_bytes,
            warnings: switches::all_with_switches(&done.warnings),
            space,
            dry_run: args.how.dry_run,
            in_use: false,
            seconds: elapsed.as_secs_f64(),
        })?;
    } else if !context.global.quiet {
        let (child, new) = (printable(&json::path(&args.child)), printable(&json::path(new)));
        match space {
            Some(space) => writeln!(
                context.text(),
                "{new} would be a disk of {} with the data of {child}: {}; it {space}; nothing was changed",
                Exact(done.size_bytes),
                Human(data_bytes)
            )?,
            None => writeln!(
                context.text(),
                "{new} is a disk of {} with the data of {child}: {}, in {}",
                Exact(done.size_bytes),
                Human(data_bytes),
                progress::duration(elapsed)
            )?,
        }
    }
    Ok(exit::OK)
}
