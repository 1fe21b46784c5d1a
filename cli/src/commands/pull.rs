//! `diskwright pull URL DEST`: brings a pushed disk to this machine, as an image of any format.

use crate::{
    commands::convert::StandaloneType,
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    options::{CacheArg, FormatArg},
    progress, sizes,
    sizes::Human,
    switches,
};
use clap::Args;
use diskwright_disk::{ConvertOptions, CreateRequest, convert};
use diskwright_object::{Donor, ObjectFiles};
use diskwright_store::Blocking;
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::PathBuf};

/// Arguments of `pull`.
#[derive(Debug, Args)]
#[command(after_help = "\
DEST must not exist. Its format comes from its extension, or from --format. Every chunk is compared with its SHA-256 digest. Zeros are not fetched, \
and what is in the cache is not fetched again: a pull that was stopped goes on where it was. With --reuse a chunk that DISK has at the same place is read from DISK: \
an earlier state of the disk, for example.

`convert URL DEST` does the same, with all the options of `convert`.

EXAMPLES
  diskwright pull s3://backups/vms/web-monday web.vhdx
  diskwright pull s3://backups/vms/web-tuesday new.vhdx --reuse web.vhdx
  diskwright pull https://images.example.com/golden-12 golden.qcow2")]
pub struct PullArgs {
    /// The pushed disk: s3://BUCKET/FOLDER/NAME, or https://HOST/FOLDER/NAME.
    #[arg(value_name = "URL")]
    url: PathBuf,
    /// The image to create.
    dest: PathBuf,
    /// A disk on this machine that may have the same bytes in places; several times.
    #[arg(long, value_name = "DISK")]
    reuse: Vec<PathBuf>,
    /// How DEST allocates its space. [default: dynamic; raw is always fixed]
    #[arg(long = "type", value_enum, value_name = "TYPE")]
    disk_type: Option<StandaloneType>,
    /// Size of a payload block of DEST. [default: 2M]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse_u32)]
    block_size: Option<u32>,
    /// Read DEST back and compare it with the pushed disk.
    #[arg(long)]
    verify: bool,
}

/// What `pull --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The pushed disk.
    url: String,
    /// The new image.
    dest: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Bytes that were written.
    copied_bytes: u64,
    /// Bytes that read as zeros and take no space in the new image.
    zero_bytes: u64,
    /// Bytes of the disk that were read from the disks of `--reuse`.
    reused_bytes: u64,
    /// Whether the new image was read back and compared (`--verify`).
    verified: bool,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
    /// Duration.
    seconds: f64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.pull/1";
}

/// Runs `pull`.
pub fn run(context: &mut Context, args: &PullArgs) -> Outcome {
    let objects = ObjectFiles::of_process();
    let name = printable(&json::path(&args.url));
    if objects.open_object(&args.url, &diskwright_store::OpenOptions::default())?.manifest().is_none() {
        let hint = "use `diskwright convert URL DEST` for an image in a bucket or on a web server";
        return Err(Failure::new(format!("{name}: it is not a disk that was pushed; {hint}")));
    }
    let engine = context.global.engine();
    let mut donors: Vec<Donor> = Vec::new();
    for disk in &args.reuse {
        let opened = context.open(disk, &context.global.open_options(false))?;
        donors.push(Box::new(move |offset_bytes, bytes| {
            let within = opened.device().geometry().size_bytes.checked_sub(offset_bytes);
            within.is_some_and(|left| left >= bytes.len() as u64)
                && Blocking::open(opened.device(), engine)
                    .is_ok_and(|mut queue| queue.read(offset_bytes, bytes).is_ok())
        }));
    }
    let reused = objects.reuse(donors);
    let options = ConvertOptions {
        source: context.global.open_options(false),
        cache: context.global.cache.map(CacheArg::mode),
        dest: CreateRequest {
            format: context.global.format.map(FormatArg::format),
            disk_type: args.disk_type.map(StandaloneType::disk_type),
            block_bytes: args.block_size,
            ..CreateRequest::default()
        },
        verify: args.verify,
        ..ConvertOptions::default()
    };
    let mut display = context.progress("pulling").then("verifying");
    let done = convert(&args.url, &args.dest, &options, &mut |done, total| display.update(done, total))?;
    let elapsed = display.elapsed();
    drop(display);
    done.warnings.iter().for_each(|warning| context.warn(warning));
    let report = Report {
        url: name,
        dest: json::path(&args.dest),
        virtual_size: done.size_bytes,
        copied_bytes: done.copied_bytes,
        zero_bytes: done.zero_bytes,
        reused_bytes: reused.bytes(),
        verified: args.verify,
        warnings: switches::all_with_switches(&done.warnings),
        seconds: elapsed.as_secs_f64(),
    };
    if context.global.json {
        context.print_json(&report)?;
    } else if !context.global.quiet {
        let dest = printable(&report.dest);
        let reused = match report.reused_bytes {
            0 => String::new(),
            bytes => format!(" ({} of them from disks of this machine)", Human(bytes)),
        };
        let (size, copied, zeros) = (Human(report.virtual_size), Human(report.copied_bytes), Human(report.zero_bytes));
        let verified = if args.verify { ", verified" } else { "" };
        writeln!(
            context.text(),
            "{dest}: {size}; {copied} copied{reused}, {zeros} of zeros skipped{verified}, in {}",
            progress::duration(elapsed)
        )?;
    }
    Ok(exit::OK)
}
