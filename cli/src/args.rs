//! The command line: the commands, and the options that all of them share.
//!
//! Each command keeps its own arguments in `commands/`; here are only the list of them and the
//! global options, which may stand before or behind the command.

use crate::commands;
use clap::{Args, Parser, Subcommand, ValueEnum};
use diskwright_disk::{OpenOptions, ParentPolicy};
use diskwright_image::{DiskType, Format};
use diskwright_store::{CacheMode, EngineKind};
use std::{path::PathBuf, time::Duration};

/// Make, look at, check, convert and measure virtual disks: raw, VHD and VHDX, fixed, dynamic and
/// differencing.
#[derive(Debug, Parser)]
#[command(name = "diskwright", version, max_term_width = 120, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// For every command.
    #[command(flatten)]
    pub global: GlobalOptions,
}

const AFTER_HELP: &str = "\
SIZES are bytes, or numbers with k, M, G or T (powers of 1024): 512, 64k, 40G.

A FILE that is read, or written and not made, may be an NBD URI: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; nbds:// and \
nbds+unix:// use TLS and nothing else. Behind \"?\", joined by \"&\", may stand timeout=SECONDS (for a server that answers nothing; 0 is never), \
reconnect or reconnect=SECONDS, connections=N, and for TLS tls-certificates=DIR (ca-cert.pem, client-cert.pem, client-key.pem), \
tls-hostname=NAME, tls-verify-peer=0.

EXIT CODES are 0 done, 1 failed, 2 used wrongly, 130 stopped by a signal; `compare` and `check` have their own, \
as in qemu-img: see their help. Errors go to standard error as one sentence, with --json too.

EXAMPLES
  diskwright create disk.vhdx --size 40G
  diskwright info disk.vhdx --chain
  diskwright convert disk.vhdx disk.raw --verify
  diskwright lab study containers --quick";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a new disk.
    Create(commands::create::CreateArgs),
    /// Show format, sizes, identifiers, parent and log state of a disk, or its whole chain.
    Info(commands::info::InfoArgs),
    /// Show which layer holds which range, or draw the whole disk on one screen.
    Map(commands::map::MapArgs),
    /// Look for damage and lost space, without ever writing.
    Check(commands::check::CheckArgs),
    /// Copy a disk into a new image of any format and type.
    Convert(commands::convert::ConvertArgs),
    /// Compare the contents of two disks.
    Compare(commands::compare::CompareArgs),
    /// Read, write, discard and flush ranges of a disk by hand.
    Io(commands::io::IoArgs),
    /// Serve disks to other programs and machines by NBD.
    Serve(commands::serve::ServeArgs),
    /// Make a disk a block device of this machine, or a file.
    Attach(commands::attach::AttachArgs),
    /// Flush an attached disk and let go of it.
    Detach(commands::detach::DetachArgs),
    /// List what is attached.
    Attached(commands::attached::AttachedArgs),
    /// Measure what disks cost.
    Lab(commands::lab::LabArgs),
    /// Measure with DiskSpd's switches, and print DiskSpd's report.
    Diskspd(commands::diskspd::DiskspdArgs),
    /// Measure whether the engine keeps its promises, against its peers.
    Bench(commands::bench::BenchArgs),
    /// Print the script that completes diskwright's words in a shell.
    Completions(commands::completions::CompletionsArgs),
    /// Print the manual page, or write those of all commands into a folder.
    Man(commands::man::ManArgs),
    /// Open a disk in a process that does nothing else, for the lab to measure.
    #[command(hide = true, name = commands::lab::CHILD_COMMAND)]
    MeasuringChild(commands::lab::ChildArgs),
}

/// Options for every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Global options")]
pub struct GlobalOptions {
    /// Print one JSON document, with a `schema` field, on standard output.
    #[arg(long, global = true)]
    pub json: bool,
    /// Show no progress and no warnings.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Take the file as this format, or make one of it, whatever its contents or extension say.
    /// Without it name and contents must agree: .raw and block devices are raw, .vhd .avhd .vhdx
    /// .avhdx must hold what they promise, and any other file that looks like an image is opened
    /// read-only or refused. An NBD export is a raw disk unless this says that an image of this
    /// format lies inside it.
    #[arg(long, global = true, value_enum, value_name = "FORMAT")]
    pub format: Option<FormatArg>,
    /// What moves the bytes; auto is io_uring where the kernel has it.
    #[arg(long, global = true, value_enum, value_name = "ENGINE", default_value_t = EngineArg::Auto)]
    pub io_engine: EngineArg,
    /// Go through the page cache, or past it with O_DIRECT. [default: direct for convert (but what
    /// the page cache holds is read from there), compare and the lab, else page]
    #[arg(long, global = true, value_enum, value_name = "MODE")]
    pub cache: Option<CacheArg>,
    /// Open parents beneath DIR too, not only beneath the child's own folder (may be repeated).
    #[arg(long, global = true, value_name = "DIR")]
    pub allow_parent_dir: Vec<PathBuf>,
    /// Open parents wherever they are; for chains that you trust.
    #[arg(long, global = true)]
    pub allow_any_parent: bool,
    /// Open parents that are block devices too, not only regular files.
    #[arg(long, global = true)]
    pub allow_devices: bool,
    /// Find what parents' Windows paths call LETTER: beneath DIR (may be repeated).
    #[arg(long, global = true, value_name = "LETTER=DIR", value_parser = drive)]
    pub map_drive: Vec<(char, PathBuf)>,
    /// Write to a child although its parent's time stamp is not the one that the child recorded
    /// (VHD).
    #[arg(long, global = true)]
    pub ignore_parent_timestamp: bool,
    /// Write to an image even though another one in its folder names it as its parent.
    #[arg(long, global = true)]
    pub allow_parent_write: bool,
    /// Store nothing for writes of nothing but zeros, on disks that grow.
    #[arg(long, global = true)]
    pub detect_zeroes: bool,
    /// Memory for the map of each disk (who has each block) and the tables behind it: 64M unless
    /// said. Less costs speed, on disks of many TiB only.
    #[arg(long, global = true, value_name = "SIZE", value_parser = crate::sizes::parse)]
    pub map_memory: Option<u64>,
}

/// For commands that only read a disk.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ShareArgs {
    /// Take no lock, so that a disk can be read that another program has open for writing. What is
    /// read may be of no single moment.
    #[arg(long, short = 'U')]
    pub force_share: bool,
}

impl GlobalOptions {
    /// The engine to use.
    pub fn engine(&self) -> EngineKind {
        match self.io_engine {
            EngineArg::Auto => EngineKind::Auto,
            EngineArg::IoUring => EngineKind::Uring,
            EngineArg::Pread => EngineKind::Sync,
        }
    }

    /// Which parents may be opened.
    pub fn parents(&self) -> ParentPolicy {
        ParentPolicy {
            allowed_dirs: self.allow_parent_dir.clone(),
            allow_any: self.allow_any_parent,
            drives: self.map_drive.clone(),
            allow_devices: self.allow_devices,
            ignore_timestamp: self.ignore_parent_timestamp,
        }
    }

    /// How to open a disk that is read or written as a whole: past the page cache unless told
    /// otherwise, which costs less CPU and leaves other programs' pages where they are.
    pub fn bulk_options(&self) -> OpenOptions {
        OpenOptions { cache: self.cache.map_or(CacheMode::Direct, CacheArg::mode), ..self.open_options(false) }
    }

    /// How to open a disk. Tools go through the page cache unless told otherwise.
    pub fn open_options(&self, writable: bool) -> OpenOptions {
        OpenOptions {
            writable,
            cache: self.cache.map_or(CacheMode::PageCache, CacheArg::mode),
            engine: self.engine(),
            format: self.format.map(FormatArg::format),
            parents: self.parents(),
            allow_parent_write: self.allow_parent_write,
            detect_zeroes: self.detect_zeroes,
            map_memory_bytes: self.map_memory,
            ..OpenOptions::default()
        }
    }
}

/// Reads a time in seconds, above 0.
///
/// # Errors
/// A sentence for clap to put behind the option's name.
pub fn seconds(text: &str) -> Result<Duration, String> {
    let usage = || format!("{text:?} is not a time in seconds; write for example 2 or 0.5");
    let seconds: f64 = text.parse().map_err(|_| usage())?;
    Duration::try_from_secs_f64(seconds).ok().filter(|time| !time.is_zero()).ok_or_else(usage)
}

/// Reads a count above 0.
///
/// # Errors
/// A sentence for clap to put behind the option's name.
pub fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&count| count > 0).ok_or_else(|| "it must be a number above 0".into())
}

fn drive(text: &str) -> Result<(char, PathBuf), String> {
    let usage = || format!("{text:?} is not a drive and its folder; write for example C=/mnt/c");
    let (letter, dir) = text.split_once('=').ok_or_else(usage)?;
    let mut letters = letter.trim_end_matches(':').chars();
    match (letters.next(), letters.next()) {
        (Some(letter), None) if letter.is_ascii_alphabetic() && !dir.is_empty() => Ok((letter, dir.into())),
        _ => Err(usage()),
    }
}

/// A format, as an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum FormatArg {
    /// The disk's bytes and nothing else.
    Raw,
    /// Virtual PC, Hyper-V before 2012, Azure.
    Vhd,
    /// Hyper-V, WSL.
    Vhdx,
}

impl FormatArg {
    /// The library's word for it.
    pub fn format(self) -> Format {
        match self {
            Self::Raw => Format::Raw,
            Self::Vhd => Format::Vhd,
            Self::Vhdx => Format::Vhdx,
        }
    }
}

/// A disk type, as an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TypeArg {
    /// The whole length from the start; its space too with --preallocate.
    Fixed,
    /// Space when a block is first written.
    Dynamic,
    /// A child: what was not written in it is its parent's.
    Differencing,
}

impl TypeArg {
    /// The library's word for it.
    pub fn disk_type(self) -> DiskType {
        match self {
            Self::Fixed => DiskType::Fixed,
            Self::Dynamic => DiskType::Dynamic,
            Self::Differencing => DiskType::Differencing,
        }
    }
}

/// An engine, as an option's value.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum EngineArg {
    /// io_uring where the kernel has it, else pread and pwrite.
    #[default]
    Auto,
    /// io_uring, or an error.
    #[value(name = "io_uring")]
    IoUring,
    /// pread and pwrite, one after the other.
    Pread,
}

/// A cache mode, as an option's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CacheArg {
    /// Past the page cache (O_DIRECT).
    Direct,
    /// Through the page cache.
    Page,
}

impl CacheArg {
    /// The library's word for it.
    pub fn mode(self) -> CacheMode {
        match self {
            Self::Direct => CacheMode::Direct,
            Self::Page => CacheMode::PageCache,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_examples() {
        let mut all = vec![Cli::command()];
        while let Some(command) = all.pop() {
            let name = command.get_name().to_owned();
            if command.get_subcommands().next().is_none() && !command.is_hide_set() {
                let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains("EXAMPLES"), "{name} has no examples");
            }
            assert!(command.get_about().is_some(), "{name} does not say what it does");
            all.extend(command.get_subcommands().cloned());
        }
    }

    #[test]
    fn global_options_stand_anywhere() {
        for line in [["diskwright", "--json", "info", "x"], ["diskwright", "info", "x", "--json"]] {
            assert!(Cli::try_parse_from(line).unwrap().global.json);
        }
        let cli =
            Cli::try_parse_from(["diskwright", "info", "x", "--allow-parent-dir", "a", "--allow-parent-dir", "b"])
                .unwrap();
        assert_eq!(cli.global.parents().allowed_dirs, [PathBuf::from("a"), PathBuf::from("b")]);
    }

    #[test]
    fn times_are_positive() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "2s", ""] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }

    #[test]
    fn drives_have_one_letter() {
        assert_eq!(drive("C=/mnt/c"), Ok(('C', "/mnt/c".into())));
        assert_eq!(drive("d:=/x"), Ok(('d', "/x".into())));
        for text in ["C", "=x", "CC=/x", "1=/x", "C="] {
            assert!(drive(text).is_err(), "{text}");
        }
    }
}
