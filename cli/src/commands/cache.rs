//! `diskwright cache`: what of objects in S3 and on web servers is kept on this machine.

use crate::{
    context::Context,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    printable::printable,
    sizes::Human,
    table::{Align, Columns},
    timestamp,
};
use clap::{Args, Subcommand};
use diskwright_object::{Cache, CachedObject, ObjectFiles, ObjectUri, Settings};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::{
    fs,
    io::Write,
    ops::Range,
    path::{Path, PathBuf},
    time::UNIX_EPOCH,
};

/// Arguments of `cache`.
#[derive(Debug, Args)]
#[command(after_help = "\
Images named s3://BUCKET/KEY and https://HOST/PATH are read where they lie, 1 MiB at a time. What was read is kept, checksummed, for all disks and \
programs of this machine: a hundred children of one golden image fetch it once. The cache is in ~/.cache/diskwright (for root in /var/cache/diskwright) \
and holds 20 GiB; DISKWRIGHT_CACHE and DISKWRIGHT_CACHE_SIZE change that.

EXAMPLES
  diskwright cache list
  diskwright cache prefetch s3://golden/debian.vhdx
  diskwright cache drop s3://golden/debian.vhdx")]
pub struct CacheArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the objects of which there are blocks.
    #[command(after_help = "\
EXAMPLES
  diskwright cache list
  diskwright cache list s3://golden/debian.vhdx --json > boot.json")]
    List {
        /// Only these objects.
        #[arg(value_name = "URL")]
        urls: Vec<PathBuf>,
    },
    /// Drop what is kept of objects.
    #[command(after_help = "\
A disk that is open goes on: what it needs is fetched again.

EXAMPLES
  diskwright cache drop s3://golden/debian.vhdx
  diskwright cache drop --everything")]
    Drop {
        /// The objects.
        #[arg(value_name = "URL", required_unless_present = "everything")]
        urls: Vec<PathBuf>,
        /// All objects.
        #[arg(long, conflicts_with = "urls")]
        everything: bool,
    },
    /// Fetch an object, or ranges of it, before they are needed.
    #[command(after_help = "\
With --ranges only what another machine has read is fetched, for example to boot, in units of 64 KiB. FILE is what `cache list URL --json` printed there. \
Of a sealed image or a pushed disk whole blocks are fetched, because their digests are of blocks.

EXAMPLES
  diskwright cache prefetch s3://golden/debian.vhdx
  diskwright cache prefetch s3://golden/debian.vhdx --ranges boot.json")]
    Prefetch {
        /// The object.
        #[arg(value_name = "URL")]
        url: PathBuf,
        /// Only the ranges of this object in FILE.
        #[arg(long, value_name = "FILE")]
        ranges: Option<PathBuf>,
    },
}

/// What `cache` prints with `--json`.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The folder of the cache.
    folder: String,
    /// Bytes that it may hold.
    limit: u64,
    /// Bytes that it holds.
    held: u64,
    /// The objects that were asked for.
    objects: Vec<Object>,
}

/// An object.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Object {
    /// Its name.
    name: String,
    /// Its ETag: the version.
    etag: String,
    /// Its length in bytes.
    size: u64,
    /// Bytes of it that are kept.
    held: u64,
    /// Bytes of these that were read, in units of 64 KiB.
    #[serde(default)]
    read: u64,
    /// When it was last opened, in seconds since 1970; `null` if that is not known.
    used: Option<u64>,
    /// Whether a program has it open.
    open: bool,
    /// What is kept.
    ranges: Vec<Piece>,
    /// What of it was read, in units of 64 KiB.
    #[serde(default)]
    read_ranges: Vec<Piece>,
}

/// A range of an object.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
struct Piece {
    /// Offset in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.cache/1";
}

impl From<CachedObject> for Object {
    fn from(object: CachedObject) -> Self {
        let (held, read) = (object.held_bytes(), object.read_bytes());
        let since = |used: std::time::SystemTime| used.duration_since(UNIX_EPOCH).ok();
        let used = object.used.and_then(since).map(|since| since.as_secs());
        let (ranges, read_ranges) = (pieces(object.held), pieces(object.read));
        let CachedObject { name, etag, size_bytes: size, is_open: open, .. } = object;
        Self { name, etag, size, held, read, used, open, ranges, read_ranges }
    }
}

fn pieces(ranges: Vec<Range<u64>>) -> Vec<Piece> {
    ranges.into_iter().map(|range| Piece { start: range.start, length: range.end - range.start }).collect()
}

/// Runs `cache`.
pub fn run(context: &mut Context, args: &CacheArgs) -> Outcome {
    let settings = Settings::of_environment()?;
    let cache = Cache::open(&settings)?
        .ok_or_else(|| Failure::usage("there is no folder for a cache: set DISKWRIGHT_CACHE, or HOME".to_owned()))?;
    let urls = match &args.action {
        Action::List { urls } => urls.clone(),
        Action::Drop { urls, everything } => {
            let names = names(urls)?;
            cache.drop_objects(&|name| *everything || names.iter().any(|meant| meant == name))?;
            urls.clone()
        }
        Action::Prefetch { url, ranges } => {
            prefetch(context, url, ranges.as_deref())?;
            vec![url.clone()]
        }
    };
    let names = names(&urls)?;
    let all = cache.list()?;
    let held = all.iter().map(CachedObject::held_bytes).sum();
    let asked = all.into_iter().filter(|object| names.is_empty() || names.contains(&object.name));
    let objects = asked.map(Object::from).collect();
    let report = Report { folder: json::path(cache.folder()), limit: cache.limit_bytes(), held, objects };
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        report.write(context)?;
    }
    Ok(exit::OK)
}

/// The names of objects, as the cache has them.
fn names(urls: &[PathBuf]) -> Outcome<Vec<String>> {
    urls.iter().map(|url| Ok(ObjectUri::parse(url)?.name())).collect()
}

fn prefetch(context: &mut Context, url: &Path, ranges: Option<&Path>) -> Outcome<()> {
    let ranges = ranges.map(|file| recorded(file, url)).transpose()?;
    let mut display = context.progress("fetching");
    let fetched = ObjectFiles::of_process().prefetch(url, ranges, &mut |done, total| display.update(done, total));
    drop(display);
    match fetched? {
        true => Ok(()),
        false => Err(Failure::Stopped),
    }
}

/// What was read of an object, in a document that `cache list --json` has printed. Of one in which
/// nothing was read, what was kept.
fn recorded(file: &Path, url: &Path) -> Outcome<Vec<Range<u64>>> {
    let wrong = |what: String| Failure::new(format!("{}: {what}", file.display()));
    let text = fs::read_to_string(file).map_err(|error| wrong(format!("cannot read it: {error}")))?;
    let report: Report = serde_json::from_str(&text)
        .map_err(|error| wrong(format!("expected what `cache list URL --json` prints: {error}")))?;
    let name = ObjectUri::parse(url)?.name();
    let of_object: Vec<&Object> = report.objects.iter().filter(|object| object.name == name).collect();
    if of_object.is_empty() {
        return Err(wrong(format!("it has no ranges of {name}")));
    }
    let has_read = of_object.iter().any(|object| !object.read_ranges.is_empty());
    let pieces = of_object.iter().flat_map(|object| if has_read { &object.read_ranges } else { &object.ranges });
    Ok(pieces.map(|piece| piece.start..piece.start.saturating_add(piece.length)).collect())
}

impl Report {
    fn write(&self, context: &mut Context) -> Outcome<()> {
        let (held, limit) = (Human(self.held), Human(self.limit));
        writeln!(context.out, "{}: {held} of at most {limit}", printable(&self.folder))?;
        if !self.objects.is_empty() {
            let mut table = Columns::new(&[
                ("kept", Align::Right),
                ("read", Align::Right),
                ("of", Align::Right),
                ("last opened", Align::Left),
                ("open", Align::Left),
                ("object", Align::Left),
            ]);
            for object in &self.objects {
                table.row(vec![
                    Human(object.held).to_string(),
                    Human(object.read).to_string(),
                    Human(object.size).to_string(),
                    object.used.and_then(|used| u32::try_from(used).ok()).map_or("-".into(), timestamp::utc_from_1970),
                    if object.open { "yes" } else { "no" }.into(),
                    printable(&object.name),
                ]);
            }
            table.within(context.style.limit()).write(&mut context.out)?;
        }
        context.out.flush()?;
        Ok(())
    }
}
