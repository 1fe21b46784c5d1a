//! `diskwright attach FILE`: a disk becomes a block device of this machine.
//!
//! ```text
//!   attach (what the user types) ─▶ attach --as supervisor ─▶ attach --as server --at MOUNTPOINT
//!           waits for one line,      in the background,         opens the disk, moves the bytes
//!           prints the device        watches
//! ```
//!
//! Both processes are this program with the same arguments and a hidden option, so every option
//! means the same in all of them. With `--foreground` the command itself is the supervisor.

use crate::{
    context::{Context, print_message},
    exit::{self, Failure, Outcome},
    json::Document,
    limits::{self, AsOption},
    options::SnapshotArgs,
};
use clap::{Args, ValueEnum};
use diskwright_disk::{Disk, OpenOptions, require_file};
use diskwright_serve::{
    attach::{
        self, AttachMethod, AttachOptions, Attached, DeviceKind, MountRecord, PartitionRecord, Record, Registry,
        ServeMethod, ServerMessage, ServerStart, UblkPlace,
    },
    ephemeral,
};
use diskwright_store::RateLimits;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::{
    env,
    ffi::OsString,
    io::{self, BufRead, BufReader, Write},
    path::PathBuf,
    process::{Command, Stdio},
    sync::Arc,
};

/// Arguments of `attach`.
#[derive(Debug, Args)]
#[command(after_help = "\
The disk becomes a block device, which a process in the background serves; the device's path is printed. It is a ublk device where the kernel has \
that driver (Linux 6.5, modprobe ublk_drv), else a loop device over a FUSE file; --by chooses. Partitions get devices too. Writes to the device are writes to FILE; `detach` flushes them and removes the device. Discards (fstrim) give space back. If the process of a ublk device is killed, another one goes on with the device, unless completed writes were lost with it.

Block devices need root. --fuse shows the disk as a file instead, which needs no root but fusermount3 (package fuse3).

File systems are mounted nosuid and nodev, because the disk may come from another machine; mount the device by hand for other options. --read-only and --ephemeral \
leave every byte of FILE as it is. A file system that was not unmounted cleanly can only be mounted with --ephemeral or writable.

Attached disks are recorded in /run/diskwright (root), or in diskwright/ in $XDG_RUNTIME_DIR or /run/user/UID, or in \
/tmp/diskwright-UID. DISKWRIGHT_RUN_DIR names another folder, which must be the same for attach, attached and detach.

EXAMPLES
  diskwright attach disk.vhdx
  diskwright attach disk.vhdx --read-only --mount /mnt
  diskwright attach crashed.vhdx --ephemeral --mount /mnt
  diskwright attach windows.vhd --mount /mnt --partition 2
  diskwright attach disk.vhdx --by loop
  diskwright attach vm.qcow2 --snapshot before-update --read-only
  diskwright attach disk.vhdx --fuse ~/view && cp ~/view/disk copy.raw
  dev=$(diskwright attach disk.vhdx) && mkfs.ext4 $dev && diskwright detach $dev")]
pub struct AttachArgs {
    /// The disk.
    file: PathBuf,
    /// Refuse all writes.
    #[arg(long, short)]
    read_only: bool,
    /// Let writes succeed, and drop them on detach. Until then they are kept in TMPDIR (or
    /// /var/tmp).
    #[arg(long, conflicts_with = "read_only")]
    ephemeral: bool,
    /// Mount the file system inside at DIR.
    #[arg(long, short, value_name = "DIR", conflicts_with = "fuse")]
    mount: Option<PathBuf>,
    /// Mount this partition. [default: the only one with a file system]
    #[arg(long, short, value_name = "N", requires = "mount")]
    partition: Option<u32>,
    /// Kind of block device. [default: ublk where the kernel has it, else loop]
    #[arg(long, value_name = "KIND", conflicts_with = "fuse")]
    by: Option<BlockDeviceKind>,
    /// Create no block device, but mount a FUSE view: if PATH is a folder, the disk is PATH/disk;
    /// if PATH is a file, the disk covers it.
    #[arg(long, value_name = "PATH")]
    fuse: Option<PathBuf>,
    /// Serve the disk no faster than this (see `serve`; serve-ctl changes it).
    #[arg(long, value_name = limits::VALUE_NAME, value_parser = limits::parse)]
    limit: Option<RateLimits>,
    /// Stay in the foreground, and detach when interrupted.
    #[arg(long)]
    foreground: bool,
    #[command(flatten)]
    of: SnapshotArgs,
    /// Role of this process.
    #[arg(long = "as", value_name = "ROLE", hide = true)]
    role: Option<Role>,
    /// Where the server mounts.
    #[arg(long, value_name = "PATH", hide = true, requires = "role")]
    at: Option<PathBuf>,
    /// Mark by which the ublk device is found again.
    #[arg(long, value_name = "NUMBER", hide = true, requires = "role", conflicts_with = "at")]
    mark: Option<u64>,
    /// The ublk device exists: its former server has died.
    #[arg(long, hide = true, requires = "mark")]
    take_over: bool,
    /// File in which the server says what its death would cost.
    #[arg(long, value_name = "PATH", hide = true, requires = "mark")]
    risk: Option<PathBuf>,
    /// The limits that the former server was given by `serve-ctl limit`.
    #[arg(long, value_parser = limits::parse, hide = true, requires = "take_over")]
    limit_now: Option<RateLimits>,
    /// Where the image is now.
    #[arg(long, value_name = "PATH", hide = true, requires = "role")]
    image: Option<PathBuf>,
}

/// Kinds of block device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BlockDeviceKind {
    /// The kernel's ublk driver.
    Ublk,
    /// A loop device over a FUSE file.
    Loop,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Role {
    Supervisor,
    Server,
}

/// What `attach --json` prints.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct Report {
    /// The image.
    file: PathBuf,
    /// The block device; `null` for a disk that is shown as a file.
    device: Option<PathBuf>,
    /// How the disk is made available.
    by: AttachMethod,
    /// The FUSE file, which is the disk as a file; `null` for a ublk device.
    fuse_file: Option<PathBuf>,
    /// Whether writes are refused.
    read_only: bool,
    /// Size of the disk in bytes.
    size: u64,
    /// Partitions of the device.
    partitions: Vec<PartitionRecord>,
    /// The mounts that attach has made.
    mounts: Vec<MountRecord>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.attach/1";
}

impl From<&Record> for Report {
    fn from(record: &Record) -> Self {
        let Record { file, device, by, fuse_file, read_only, size, partitions, mounts, .. } = record.clone();
        let fuse_file = (by != AttachMethod::Ublk).then_some(fuse_file);
        Self { file, device, by, fuse_file, read_only, size, partitions, mounts }
    }
}

/// The line by which the supervisor in the background answers the command.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum SupervisorReply {
    Ready { report: Report, warnings: Vec<String> },
    Failed { error: String },
}

/// Attaches, in the role of this process.
pub fn run(context: &mut Context, args: &AttachArgs) -> Outcome {
    require_file(args.image.as_ref().unwrap_or(&args.file), "attach")?;
    if args.of.snapshot.is_some() && !args.read_only && !args.ephemeral {
        return Err(Failure::usage("an internal snapshot cannot be written: add --read-only or --ephemeral"));
    }
    match args.role {
        Some(Role::Server) => serve(context, args),
        Some(Role::Supervisor) => supervise(context, args),
        None if args.foreground => stay(context, args),
        None => start_supervisor(context),
    }
}

/// This command line in another role.
fn again(role: &str) -> io::Result<Command> {
    let mut words: Vec<OsString> = env::args_os().skip(1).collect();
    // A second `--as` would be refused.
    if let Some(at) = words.iter().position(|word| word == "--as") {
        words.drain(at..(at + 2).min(words.len()));
    }
    let mut command = Command::new(env::current_exe()?);
    command.args(words).args(["--as", role]);
    Ok(command)
}

fn start_supervisor(context: &mut Context) -> Outcome {
    let failed = |error| Failure::doing("cannot start the process in the background", error);
    // The background process must not hold this terminal or pipe open: a script would wait for the
    // pipe's end for ever.
    let mut child = again("supervisor")
        .map_err(failed)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let mut line = String::new();
    if let Some(output) = child.stdout.take() {
        BufReader::new(output).read_line(&mut line).map_err(failed)?;
    }
    match serde_json::from_str(&line) {
        Ok(SupervisorReply::Ready { report, warnings }) => {
            warnings.iter().for_each(|warning| context.warn(warning));
            print(context, report)
        }
        Ok(SupervisorReply::Failed { error }) => Err(Failure::new(error)),
        Err(_) => Err(Failure::new("the process in the background ended without an answer; --foreground shows why")),
    }
}

fn print(context: &mut Context, report: Report) -> Outcome {
    if context.global.json {
        context.print_json(&report)?;
    } else {
        if let Some(place) = report.device.as_ref().or(report.fuse_file.as_ref()) {
            // Scripts read the path: nothing but the path is printed.
            context.print_text(&format!("{}\n", place.display()))?;
        }
    }
    Ok(exit::OK)
}

fn attach_here(args: &AttachArgs) -> Outcome<Attached> {
    let options = AttachOptions {
        file: args.file.clone(),
        fuse_dir: args.fuse.clone(),
        by: args.by.map(|by| match by {
            BlockDeviceKind::Ublk => DeviceKind::Ublk,
            BlockDeviceKind::Loop => DeviceKind::Loop,
        }),
        mount: args.mount.clone(),
        partition: args.partition,
        ephemeral: args.ephemeral,
    };
    // Relative names among the options, also when the supervisor has left the folder.
    let folder = env::current_dir();
    let server = move |start: ServerStart<'_>| {
        // Without the program's path the spawn fails and says so.
        let mut command = again("server").unwrap_or_else(|_| Command::new(""));
        command.arg("--image").arg(start.image);
        if let Some(limits) = start.limits {
            command.arg("--limit-now").arg(AsOption(limits).to_string());
        }
        if let Ok(folder) = &folder {
            command.current_dir(folder);
        }
        match start.method {
            ServeMethod::FuseFile(point) => {
                command.arg("--at").arg(point);
            }
            ServeMethod::Ublk(place) => {
                command.arg("--mark").arg(place.mark.to_string());
                command.args(place.exists.then_some("--take-over"));
                if let Some(risk) = &place.risk {
                    command.arg("--risk").arg(risk);
                }
            }
        }
        command
    };
    Ok(attach::attach(&Registry::open()?, &options, Box::new(server))?)
}

fn stay(context: &mut Context, args: &AttachArgs) -> Outcome {
    let patience = context.signals.patient();
    let attached = attach_here(args)?;
    attached.warnings().iter().for_each(|warning| context.warn(warning));
    print(context, attached.record().into())?;
    context.out.flush()?;
    attached.watch(&|| patience.should_stop(), &print_message)?;
    Ok(exit::OK)
}

fn supervise(context: &mut Context, args: &AttachArgs) -> Outcome {
    let patience = context.signals.patient();
    // A session of its own, so that the disk stays attached when the terminal is closed.
    let _ = rustix::process::setsid();
    let (reply, attached) = match attach_here(args) {
        Ok(attached) => {
            let (report, warnings) = (attached.record().into(), attached.warnings().to_vec());
            (SupervisorReply::Ready { report, warnings }, Ok(attached))
        }
        Err(failure) => (SupervisorReply::Failed { error: failure.to_string() }, Err(failure)),
    };
    let line = serde_json::to_string(&reply)
        .map_err(|error| Failure::doing("cannot encode the answer of the supervisor", error.into()))?;
    // The command that waits for the line may have been killed. The disk stays attached, and this
    // process supervises it.
    let _ = writeln!(context.out, "{line}").and_then(|()| context.out.flush());
    // The folder from which the command was started can then be removed or unmounted.
    let _ = env::set_current_dir("/");
    // Closes the pipe to the command, which waits for its end.
    if let Ok(null) = std::fs::OpenOptions::new().write(true).open("/dev/null") {
        let _ = rustix::stdio::dup2_stdout(&null);
    }
    attached?.watch(&|| patience.should_stop(), &|_| {})?;
    Ok(exit::OK)
}

fn serve(context: &mut Context, args: &AttachArgs) -> Outcome {
    // The server ends when its file is unmounted or its device stopped, and not by a signal to the
    // whole process group.
    let _patience = context.signals.patient();
    let at = match (&args.at, args.mark) {
        (Some(point), _) => ServeMethod::FuseFile(point.clone()),
        (None, Some(mark)) => ServeMethod::Ublk(UblkPlace { mark, exists: args.take_over, risk: args.risk.clone() }),
        (None, None) => return Err(Failure::new("the server got neither --at nor --mark")),
    };
    let opened = open(context, args);
    let disk = match opened {
        Ok(disk) => disk,
        Err(failure) => {
            ServerMessage::Failed { error: failure.to_string(), machine: false }.send(&mut context.out);
            return Err(failure);
        }
    };
    let _ = env::set_current_dir("/");
    let limits = args.limit_now.or(args.limit).unwrap_or_default();
    attach::serve_disk(disk, &at, context.global.engine(), limits, &mut context.out, io::stdin())?;
    Ok(exit::OK)
}

fn open(context: &Context, args: &AttachArgs) -> Outcome<Arc<Disk>> {
    let writable = !args.read_only && !args.ephemeral;
    let options = OpenOptions { writable, snapshot: args.of.snapshot.clone(), ..context.global.bulk_options() };
    let disk = Disk::open(args.image.as_ref().unwrap_or(&args.file), &options)?;
    if !args.ephemeral {
        return Ok(disk);
    }
    ephemeral::on_top_of(&disk, &ephemeral::default_dir(), options.cache)
        .map_err(|error| Failure::new(error.to_string()))
}
