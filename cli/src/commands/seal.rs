//! `diskwright seal FILE`: writes the digests of an image beside it, or compares it with them.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    progress,
    sizes::Human,
};
use clap::Args;
use diskwright_object::{
    BLOCK_BYTES, SEAL_BYTES_MAX, SEAL_ENDING, Seal,
    repository::{hex, unhex},
};
use diskwright_store::{Files, OpenOptions};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    ffi::OsString,
    fs,
    io::{self, Read, Write},
    path::{Path, PathBuf},
};

/// Arguments of `seal`.
#[derive(Debug, Args)]
#[command(after_help = "\
FILE.seal gets the SHA-256 digest of each MiB of FILE. Upload both to one folder of a bucket or a web server. A child that is made of FILE there records the seal, \
and from then on each MiB is compared with its digest before anything of it is used, whatever server, proxy or cache it comes from. Seal an image when it does not change any more.

A pushed disk needs no seal.

EXIT CODES  0 done, 1 failed, 2 used wrongly, 3 --check has found differences

EXAMPLES
  diskwright seal golden.vhdx
  diskwright seal golden.vhdx --check
  diskwright seal s3://golden/debian.vhdx --output debian.vhdx.seal")]
pub struct SealArgs {
    /// The image: a file, or its URL.
    file: PathBuf,
    /// Compare FILE with FILE.seal, and write nothing.
    #[arg(long)]
    check: bool,
    /// The seal must have this digest.
    #[arg(long, value_name = "SHA-256", requires = "check", value_parser = digest)]
    root: Option<String>,
    /// The file of the seal. [default: FILE.seal]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

fn digest(text: &str) -> Result<String, String> {
    match unhex(text) {
        Some(_) => Ok(text.to_owned()),
        None => Err("expected 64 lower-case hexadecimal digits".into()),
    }
}

/// What `seal --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The image.
    file: String,
    /// The file of its seal.
    seal: String,
    /// The digest of the seal, which children record.
    root: String,
    /// Length of the image in bytes.
    size: u64,
    /// Whether the image was compared with its seal (`--check`).
    checked: bool,
    /// Ranges that differ from the seal, in whole MiB.
    different: Vec<Range>,
    /// Duration.
    seconds: f64,
}

/// A range of the image.
#[derive(Debug, PartialEq, Eq, Serialize, JsonSchema)]
struct Range {
    /// Offset in bytes.
    start: u64,
    /// Length in bytes.
    length: u64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.seal/1";
}

/// Runs `seal`.
pub fn run(context: &mut Context, args: &SealArgs) -> Outcome {
    let beside = || {
        let name: OsString = [args.file.as_os_str(), SEAL_ENDING.as_ref()].into_iter().collect();
        PathBuf::from(name)
    };
    let path = args.output.clone().unwrap_or_else(beside);
    if Files::has_scheme(&path) {
        return Err(Failure::usage(format!(
            "{}: a seal is written to a local file: name one with --output, and upload it",
            path.display()
        )));
    }
    let known = if args.check { Some(read(&path, args.root.as_deref())?) } else { None };
    if known.is_none() && path.symlink_metadata().is_ok() {
        return Err(there_already(&path));
    }
    let failed = |source: io::Error| Failure::doing(format!("{}: cannot read it", args.file.display()), source);
    let image =
        Files::default().open(&args.file, &OpenOptions::default()).map_err(|error| Failure::new(error.to_string()))?;
    if image.contents_id().is_some() {
        return Err(Failure::usage(format!("{}: a pushed disk has digests, and needs no seal", args.file.display())));
    }
    let mut display = context.progress(if args.check { "comparing" } else { "sealing" });
    let made = Seal::of(&*image, &mut |done, total| display.update(done, total));
    let elapsed = display.elapsed();
    drop(display);
    let made = made.map_err(failed)?.ok_or(Failure::Stopped)?;
    let (seal, different) = match known {
        Some(known) => {
            let different = ranges(known.differing(&made), known.size_bytes().max(made.size_bytes()));
            (known, different)
        }
        None => {
            write(&path, &made.to_bytes())?;
            (made, Vec::new())
        }
    };
    let report = Report {
        file: json::path(&args.file),
        seal: json::path(&path),
        root: hex(&seal.root()),
        size: seal.size_bytes(),
        checked: args.check,
        different,
        seconds: elapsed.as_secs_f64(),
    };
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        report.write(context, elapsed)?;
    }
    Ok(if report.different.is_empty() { exit::OK } else { exit::SEAL_BROKEN })
}

fn read(path: &Path, root: Option<&str>) -> Outcome<Seal> {
    let mut bytes = Vec::new();
    // Anything may be there; a longer file is no seal.
    fs::File::open(path)
        .and_then(|file| file.take(SEAL_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|source| Failure::doing(format!("{}: cannot read it", path.display()), source))?;
    let seal = Seal::of_bytes(&bytes).map_err(|what| Failure::new(format!("{}: {what}", path.display())))?;
    let found = hex(&seal.root());
    match root.filter(|root| *root != found) {
        Some(root) => Err(Failure::new(format!("{}: its digest is {found}, expected {root}", path.display()))),
        None => Ok(seal),
    }
}

fn there_already(path: &Path) -> Failure {
    Failure::new(format!(
        "{}: file exists; children may have recorded this seal: remove it if there are none, or check it with --check",
        path.display()
    ))
}

/// Writes a new file, durably. Nothing is left of it after an error.
fn write(path: &Path, bytes: &[u8]) -> Outcome<()> {
    let failed = |source| Failure::doing(format!("{}: cannot write it", path.display()), source);
    let mut file = match fs::File::create_new(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Err(there_already(path)),
        made => made.map_err(failed)?,
    };
    let synced = || Files::default().sync_directory_of(path);
    let written = file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| synced());
    written.map_err(|source| {
        let _ = fs::remove_file(path);
        failed(source)
    })
}

/// Blocks as ranges.
fn ranges(blocks: impl Iterator<Item = u64>, size_bytes: u64) -> Vec<Range> {
    let mut found: Vec<Range> = Vec::new();
    for block in blocks {
        let start = block * BLOCK_BYTES;
        let length = BLOCK_BYTES.min(size_bytes.saturating_sub(start));
        match found.last_mut().filter(|last| last.start + last.length == start) {
            Some(last) => last.length += length,
            None => found.push(Range { start, length }),
        }
    }
    found
}

impl Report {
    fn write(&self, context: &mut Context, elapsed: std::time::Duration) -> Outcome<()> {
        let (file, seal, size) = (printable(&self.file), printable(&self.seal), Human(self.size));
        let took = progress::duration(elapsed);
        let different_bytes: u64 = self.different.iter().map(|range| range.length).sum();
        match (self.checked, self.different.first()) {
            (false, _) => writeln!(context.text(), "{seal}: seals {size} of {file}, in {took}")?,
            (true, None) => writeln!(context.text(), "{file}: {size} are as they were sealed, in {took}")?,
            (true, Some(first)) => writeln!(
                context.text(),
                "{file}: {} differ from {seal}, the first at byte {}; the image was changed or damaged since it was sealed",
                Human(different_bytes),
                first.start
            )?,
        }
        writeln!(context.text(), "root  {}", self.root)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_ranges_within_the_image() {
        let found = ranges([0, 1, 4].into_iter(), (4 << 20) + 512);
        assert_eq!(found, [Range { start: 0, length: 2 << 20 }, Range { start: 4 << 20, length: 512 }]);
    }
}
