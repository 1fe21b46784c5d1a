//! Options that several commands share, and how their values are read: formats, cache modes, times.
//!
//! Every command takes all [`GlobalOptions`]. [`UsedOptions`] decides which of them its help shows.

use clap::{Args, ValueEnum};
use diskwright_disk::{OpenOptions, ParentPolicy};
use diskwright_image::{DiskType, Format};
use diskwright_load::job::Span;
use diskwright_store::{CacheMode, EngineKind};
use std::{path::PathBuf, time::Duration};

/// Options for every command.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = GLOBAL)]
pub struct GlobalOptions {
    /// Print one JSON document on standard output.
    ///
    /// Its field `schema` names what it holds.
    #[arg(long, global = true)]
    pub json: bool,
    /// Show no progress and no warnings.
    #[arg(long, short, global = true)]
    pub quiet: bool,
    /// Format of the image, instead of probing it.
    ///
    /// Without it the extension and the contents must agree: .raw and block devices are raw, .vhd,
    /// .avhd, .vhdx, .avhdx, .qcow2, .vmdk and .vdi must hold that format, and any other file that
    /// looks like an image is opened read-only or refused. An NBD export is a raw disk unless this
    /// names the format of an image inside it.
    #[arg(long, global = true, hide = true, help_heading = DISK, value_enum, value_name = "FORMAT")]
    pub format: Option<FormatArg>,
    /// Submit I/O by io_uring, or pread and pwrite.
    ///
    /// auto is io_uring where the kernel has it.
    #[arg(
        long, global = true, hide = true, help_heading = DISK, value_enum, value_name = "ENGINE",
        default_value_t = EngineArg::Auto
    )]
    pub io_engine: EngineArg,
    /// Use the page cache, or bypass it (O_DIRECT).
    ///
    /// The default is direct for convert, compare and the lab, and page for all others. convert
    /// reads from the page cache what is in it.
    #[arg(long, global = true, hide = true, help_heading = DISK, value_enum, value_name = "MODE")]
    pub cache: Option<CacheArg>,
    /// Open parents beneath DIR too.
    ///
    /// Without it parents are opened only beneath the child's own folder (may be repeated).
    #[arg(long, global = true, hide = true, help_heading = DISK, value_name = "DIR")]
    pub allow_parent_dir: Vec<PathBuf>,
    /// Open parents in any folder.
    ///
    /// For chains that you trust: a parent's path is taken from the child.
    #[arg(long, global = true, hide = true, help_heading = DISK)]
    pub allow_any_parent: bool,
    /// Open parents that are block devices too.
    ///
    /// Without it only regular files are opened as parents.
    #[arg(long, global = true, hide = true, help_heading = DISK)]
    pub allow_devices: bool,
    /// Look for parents on drive LETTER: in DIR.
    ///
    /// For children that record a Windows path of their parent (may be repeated).
    #[arg(long, global = true, hide = true, help_heading = DISK, value_name = "LETTER=DIR", value_parser = drive)]
    pub map_drive: Vec<(char, PathBuf)>,
    /// Write though the parent's time stamp differs.
    ///
    /// A VHD child records when its parent was last changed. Without this option it is not written
    /// if the parent's file has another time.
    #[arg(long, global = true, hide = true, help_heading = DISK)]
    pub ignore_parent_timestamp: bool,
    /// Write though a child names this image.
    ///
    /// Without it an image is not written if another image in its folder names it as its parent.
    #[arg(long, global = true, hide = true, help_heading = DISK)]
    pub allow_parent_write: bool,
    /// Allocate no space for writes of zeros.
    ///
    /// On dynamic and differencing disks.
    #[arg(long, global = true, hide = true, help_heading = DISK)]
    pub detect_zeroes: bool,
    /// Memory for the block map [default: 64M].
    ///
    /// It holds the block map of each disk and the tables behind it. Less costs speed on disks of
    /// many TiB.
    #[arg(
        long, global = true, hide = true, help_heading = DISK, value_name = "SIZE",
        value_parser = crate::sizes::parse
    )]
    pub map_memory: Option<u64>,
}

/// Heading of the options about disks.
pub(crate) const DISK: &str = "Disk options";
/// Heading of the options of every command.
pub(crate) const GLOBAL: &str = "Global options";

/// Which of the options about disks a command uses, and its help shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum UsedOptions {
    /// None of them, although the command above uses some.
    Nothing,
    /// The I/O engine.
    Engine,
    /// The I/O engine and the cache mode.
    EngineAndCache,
    /// The format, and which parents may be opened.
    Parents,
    /// Everything about reading a chain.
    Reading,
    /// The same, and an image of the chain is changed.
    Changing,
    /// Everything.
    Writing,
}

impl UsedOptions {
    /// Whether the option with this id is shown.
    pub fn shows(self, id: &str) -> bool {
        match id {
            "io_engine" => !matches!(self, Self::Nothing | Self::Parents),
            "cache" => !matches!(self, Self::Nothing | Self::Engine | Self::Parents),
            "format" | "allow_parent_dir" | "allow_any_parent" | "allow_devices" | "map_drive" => {
                !matches!(self, Self::Nothing | Self::Engine | Self::EngineAndCache)
            }
            "map_memory" => matches!(self, Self::Reading | Self::Changing | Self::Writing),
            "ignore_parent_timestamp" => matches!(self, Self::Changing | Self::Writing),
            "allow_parent_write" | "detect_zeroes" => self == Self::Writing,
            _ => false,
        }
    }
}

/// For commands that read a disk inside an OVA.
#[derive(Debug, Clone, Default, Args)]
pub struct OvaArgs {
    /// Which disk of an OVA: its number, its file or its id; needed where there are several.
    #[arg(long = "disk", value_name = "N|NAME")]
    pub ova_disk: Option<String>,
}

/// For commands that read a disk which may be an internal snapshot of an image.
#[derive(Debug, Clone, Default, Args)]
pub struct SnapshotArgs {
    /// Read this internal snapshot of a qcow2 image instead of its present disk: its id or its
    /// name, as info lists them.
    #[arg(long = "snapshot", value_name = "ID|NAME")]
    pub snapshot: Option<String>,
}

/// For commands that only read a disk.
#[derive(Debug, Clone, Copy, Default, Args)]
pub struct ShareArgs {
    /// Take no lock, and read a disk that another program has open for writing. What is read may be
    /// inconsistent.
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

/// Reads a time above 0: `2s`, `500ms`; seconds without a unit.
///
/// # Errors
/// A sentence for clap to put behind the option's name.
pub fn time(text: &str) -> Result<Duration, String> {
    let time = Duration::from(text.parse::<Span>()?);
    if time.is_zero() { Err("a time of 0 measures nothing; write for example 2s or 500ms".into()) } else { Ok(time) }
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
    /// QEMU, KVM.
    Qcow2,
    /// VirtualBox.
    Vdi,
    /// VMware, VirtualBox.
    Vmdk,
}

impl FormatArg {
    /// The library's word for it.
    pub fn format(self) -> Format {
        match self {
            Self::Raw => Format::Raw,
            Self::Vhd => Format::Vhd,
            Self::Vhdx => Format::Vhdx,
            Self::Qcow2 => Format::Qcow2,
            Self::Vdi => Format::Vdi,
            Self::Vmdk => Format::Vmdk,
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
    /// A child: a block that was never written in it reads from its parent.
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

    #[test]
    fn times_are_positive() {
        assert_eq!(time("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(time("500ms"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "2x", ""] {
            assert!(time(text).is_err(), "{text}");
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
