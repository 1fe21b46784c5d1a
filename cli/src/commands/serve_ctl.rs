//! `diskwright serve-ctl`: asks the process that has a disk open for writing, over its control
//! channel.

use crate::{
    commands::{
        clone, compact,
        merge::{self, MergeHow},
        move_, resize,
        serve::{DiskWord, VHOST_QUEUES},
        snapshot,
    },
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    in_use,
    json::{self, Document},
    limits,
    sizes::{Exact, Human},
    table::{Align, Columns},
};
use clap::{Args, Subcommand};
use diskwright_disk::{NewSize, OpenOptions};
use diskwright_load::clock;
use diskwright_serve::{
    control::{self, Client, DiskChange, Done, Door, Limits, NewDisk, Operation, ProcessReport, Statistics},
    vhost_user::QUEUES_MAX,
};
use diskwright_store::RateLimits;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

/// The word that lists the disks, in the place of a disk.
const LIST: &str = "list";

/// Arguments of `serve-ctl`.
#[derive(Debug, Args)]
#[command(after_help = "\
Every `diskwright serve` and `attach` that has a disk open for writing listens on a socket which only its user and root reach, in the folder control/ \
of the run-time folder (/run/diskwright for root, diskwright/ in $XDG_RUNTIME_DIR or /run/user/UID for others, or $DISKWRIGHT_RUN_DIR). The disk's file leads to it.

A disk is named by its FILE, or by the NAME of its export. For a disk with the name \"list\" write ./list.

EXAMPLES
  diskwright serve-ctl list
  diskwright serve-ctl disk.vhdx statistics
  diskwright serve-ctl db resize +20G
  diskwright serve-ctl db limit iops=500,bytes=20M
  diskwright serve-ctl db snapshot before-update
  diskwright serve-ctl db clone test.vhdx
  diskwright serve-ctl db add log.vhdx
  diskwright serve-ctl db open-door /run/vm.sock
  diskwright serve-ctl db merge disk_monday.avhdx
  diskwright serve-ctl db compact
  diskwright serve-ctl db move /mnt/fast/
  diskwright serve-ctl disk.vhdx drain")]
pub struct ServeCtlArgs {
    /// The disk; or `list`, which lists all disks that are open for writing.
    #[arg(value_name = "FILE|NAME|list")]
    disk: PathBuf,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Show what the process does for its clients, and what the disk takes.
    #[command(after_help = "\
EXAMPLES
  diskwright serve-ctl disk.vhdx statistics
  diskwright serve-ctl db statistics --json |
      jq '.traffic.commands[] | {command, requests}'")]
    Statistics,
    /// Finish the requests in flight, refuse new clients, close all disks of the process, and end
    /// it.
    #[command(after_help = "\
Returns when the disks are closed. Fails if something could not be flushed. An attached disk is closed by detach.

EXAMPLES
  diskwright serve-ctl disk.vhdx drain")]
    Drain,
    /// Limit the rate at which the disk is served, or end the limits (none).
    #[command(after_help = "\
The limits hold from now on, for all clients of the disk together, until its process ends. See `serve` for what they mean.

EXAMPLES
  diskwright serve-ctl db limit iops=500,bytes=20M
  diskwright serve-ctl disk.vhdx limit bytes=100M,bytes-burst=1G
  diskwright serve-ctl db limit none")]
    Limit {
        /// The new limits; they replace all former ones.
        #[arg(value_name = limits::VALUE_NAME, value_parser = limits::parse)]
        limits: RateLimits,
    },
    /// Open another disk in the process that serves this one, and serve it too.
    #[command(after_help = "\
The disk is served by NBD under NAME, or the name of its file, if the process has NBD. Options of `serve` like --cache hold for it too.

EXAMPLES
  diskwright serve-ctl db add log.vhdx
  diskwright serve-ctl db add backup=/disks/old.img,format=raw --read-only")]
    Add {
        /// The disk, as for `serve`: [NAME=]FILE[,format=FORMAT].
        #[arg(value_name = "DISK", value_parser = DiskWord::parse)]
        new: DiskWord,
        /// Refuse writes.
        #[arg(long, short)]
        read_only: bool,
    },
    /// Disconnect the clients of the disk after their requests in flight, and close it. Its process
    /// goes on with its other disks.
    #[command(after_help = "\
EXAMPLES
  diskwright serve-ctl log.vhdx remove")]
    Remove,
    /// Make the disk that of a virtual machine (vhost-user-blk) at a socket.
    #[command(
        name = "open-door",
        after_help = "\
The disk is served there until close-door, or until its process ends. See `serve --vhost-user` for what the machine needs.

EXAMPLES
  diskwright serve-ctl db open-door /run/vm.sock
  diskwright serve-ctl db open-door /run/vm.sock --vhost-queues 2"
    )]
    OpenDoor {
        /// The unix socket, which is made.
        socket: PathBuf,
        /// Virtqueues that the machine may use, each with a thread.
        #[arg(long, value_name = "N", default_value_t = VHOST_QUEUES, value_parser = clap::value_parser!(u16).range(1..=i64::from(QUEUES_MAX)))]
        vhost_queues: u16,
    },
    /// Close a door: finish the requests in flight, disconnect the machine, and flush the disk.
    #[command(
        name = "close-door",
        after_help = "\
EXAMPLES
  diskwright serve-ctl db close-door /run/vm.sock"
    )]
    CloseDoor {
        /// The unix socket, as it was given when the door was opened.
        socket: PathBuf,
    },
    /// Enlarge the disk while it is in use.
    #[command(after_help = "\
Clients of an NBD server see the new size when they connect again; the device of an attached disk grows at once.

EXAMPLES
  diskwright serve-ctl disk.vhdx resize 80G
  diskwright serve-ctl db resize +20G --dry-run")]
    Resize {
        /// The new virtual size, or with + in front what is added to it.
        #[arg(value_name = "[+]SIZE", value_parser = resize::new_size)]
        size: NewSize,
        /// Check whether it can be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Freeze the disk while it is in use, and go on in a new child that has its name.
    #[command(after_help = "\
As `snapshot` does it with a disk in use: see there.

EXAMPLES
  diskwright serve-ctl disk.vhdx snapshot
  diskwright serve-ctl db snapshot before-update --dry-run")]
    Snapshot {
        /// What is appended to the disk's name to name the frozen image. [default: the time]
        name: Option<String>,
        /// Start a point of change tracking of this name at the moment of the snapshot (see
        /// `track`).
        #[arg(long, value_name = "POINT")]
        track: Option<String>,
        /// Check whether it can be done, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Freeze the disk while it is in use, and make clones of the frozen image.
    #[command(after_help = "\
As `clone` does it with a disk in use: see there.

EXAMPLES
  diskwright serve-ctl db clone test1.vhdx test2.vhdx
  diskwright serve-ctl db clone test.vhdx --name for-test --dry-run")]
    Clone(clone::CloneHow),
    /// Merge an image of the disk into one of its ancestors while the disk is in use.
    #[command(after_help = "\
As `merge` does it with a disk in use: see there.

EXAMPLES
  diskwright serve-ctl disk.vhdx merge disk_monday.avhdx
  diskwright serve-ctl db merge disk_monday.avhdx --into disk_sunday.avhdx \\
      --keep-name")]
    Merge {
        /// The image: a frozen one, or the disk itself.
        child: PathBuf,
        #[command(flatten)]
        how: MergeHow,
    },
    /// Give back blocks of zeros and make the file small while the disk is in use.
    #[command(after_help = "\
As `compact` does it with a disk in use: see there.

EXAMPLES
  diskwright serve-ctl disk.vhdx compact
  diskwright serve-ctl db compact --dry-run")]
    Compact {
        /// Find out what would be gained, and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Move the disk to another file while it is in use.
    #[command(after_help = "\
Works as `diskwright move` on a disk in use: see its help.

EXAMPLES
  diskwright serve-ctl disk.vhdx move /mnt/fast/
  diskwright serve-ctl db move db.raw --keep-old")]
    Move(move_::Destination),
}

/// What `serve-ctl list --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Listing {
    /// The processes of this user that have disks open for writing.
    processes: Vec<ProcessReport>,
    /// Processes that are there and do not answer, a sentence each.
    silent: Vec<String>,
}

impl Document for Listing {
    const SCHEMA: &'static str = "diskwright.control-list/1";
}

/// What `serve-ctl DISK statistics --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Counted {
    #[serde(flatten)]
    statistics: Statistics,
}

impl Document for Counted {
    const SCHEMA: &'static str = "diskwright.control-statistics/1";
}

/// What `serve-ctl DISK drain --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Drained {
    /// The number of the process that has ended.
    pid: u32,
    /// The files of the disks that it had open for writing. All are closed.
    files: Vec<String>,
}

impl Document for Drained {
    const SCHEMA: &'static str = "diskwright.control-drain/1";
}

pub fn run(context: &mut Context, args: &ServeCtlArgs) -> Outcome {
    match &args.action {
        None if args.disk.as_os_str() == LIST => list(context),
        None => Err(Failure::usage(format!(
            "say what to do with {}: statistics, limit, drain, add, remove, open-door, close-door, resize, snapshot, clone, merge, compact or move",
            printable(&json::path(&args.disk))
        ))),
        Some(Action::Statistics) => {
            let (_, client) = find(&args.disk)?;
            let statistics = in_use::statistics(&client)?;
            print_statistics(context, statistics)
        }
        Some(Action::Drain) => drain(context, &find(&args.disk)?.1),
        Some(Action::Limit { limits }) => {
            let (file, client) = find(&args.disk)?;
            limit(context, &file, &client, *limits)
        }
        Some(Action::Add { new, read_only }) => {
            let (_, client) = find(&args.disk)?;
            let wanted = NewDisk {
                file: absolute(&new.path)?,
                name: Some(new.name.clone()),
                format: new.format.map(|format| format.to_string()),
                read_only: *read_only,
            };
            disk(context, &client, Operation::AddDisk(wanted))
        }
        Some(Action::Remove) => disk(context, &find(&args.disk)?.1, Operation::RemoveDisk),
        Some(Action::OpenDoor { socket, vhost_queues }) => {
            let (file, client) = find(&args.disk)?;
            let operation = Operation::OpenDoor { socket: absolute(socket)?, queues: *vhost_queues };
            door(context, &file, &client, operation)
        }
        Some(Action::CloseDoor { socket }) => {
            let (file, client) = find(&args.disk)?;
            door(context, &file, &client, Operation::CloseDoor { socket: absolute(socket)? })
        }
        Some(Action::Resize { size, dry_run }) => {
            let (file, client) = find(&args.disk)?;
            resize::enlarge(context, &file, &client, *size, *dry_run)
        }
        Some(Action::Merge { child, how }) => {
            let (_, client) = find(&args.disk)?;
            let options = how.options(OpenOptions::default());
            merge::in_process(context, child, &client, merge::MergeRequest::of(&options)?)
        }
        Some(Action::Snapshot { name, track, dry_run }) => {
            let (file, client) = find(&args.disk)?;
            let name = name.clone().unwrap_or_else(clock::compact_utc_now);
            snapshot::freeze(context, &file, &client, name, track.clone(), *dry_run)
        }
        Some(Action::Clone(how)) => {
            let (file, client) = find(&args.disk)?;
            clone::of_disk_in_use(context, &file, &client, how)
        }
        Some(Action::Compact { dry_run }) => {
            let (file, client) = find(&args.disk)?;
            compact::one_in_use(context, &file, &client, *dry_run)
        }
        Some(Action::Move(to)) => {
            let (file, client) = find(&args.disk)?;
            move_::move_in_use(context, &file, &client, to)
        }
    }
}

/// What `serve-ctl DISK limit --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct LimitReport {
    /// The image.
    file: String,
    /// The limits from now on.
    limits: Limits,
}

impl Document for LimitReport {
    const SCHEMA: &'static str = "diskwright.control-limit/1";
}

fn limit(context: &mut Context, file: &Path, client: &Client, limits: RateLimits) -> Outcome {
    let Done::Limited(limits) = in_use::call(client, Operation::Limit(limits.into()))? else {
        return Err(in_use::unexpected(client));
    };
    let file = json::path(file);
    if context.global.json {
        context.print_json(&LimitReport { file, limits })?;
    } else if !context.global.quiet {
        writeln!(context.text(), "{}: {}", printable(&file), limits::InWords(limits.into()))?;
    }
    Ok(exit::OK)
}

/// What `serve-ctl DISK open-door --json` and `close-door --json` print.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DoorReport {
    /// The image.
    file: String,
    /// The export name.
    name: String,
    /// The unix socket.
    socket: String,
    /// Number of virtqueues.
    queues: u16,
    /// Whether a machine can connect now.
    is_open: bool,
}

impl Document for DoorReport {
    const SCHEMA: &'static str = "diskwright.control-door/1";
}

/// What `serve-ctl DISK add --json` and `remove --json` print.
#[derive(Debug, Serialize, JsonSchema)]
pub struct DiskChangeReport {
    /// The image.
    file: String,
    /// The export name.
    name: String,
    /// Whether it is served now.
    is_served: bool,
}

impl Document for DiskChangeReport {
    const SCHEMA: &'static str = "diskwright.control-disk/1";
}

fn disk(context: &mut Context, client: &Client, operation: Operation) -> Outcome {
    let Done::Disk(DiskChange { name, file, is_served }) = in_use::call(client, operation)? else {
        return Err(in_use::unexpected(client));
    };
    let file = json::path(&file);
    if context.global.json {
        context.print_json(&DiskChangeReport { file, name, is_served })?;
    } else if !context.global.quiet {
        let (file, peer) = (printable(&file), printable(&client.peer.to_string()));
        let what = if is_served { format!("served as {name:?} by") } else { "closed by".into() };
        writeln!(context.text(), "{file}: {what} {peer}")?;
    }
    Ok(exit::OK)
}

/// The process has another working directory.
fn absolute(path: &Path) -> Outcome<PathBuf> {
    std::path::absolute(path).map_err(|error| Failure::usage(format!("{}: {error}", path.display())))
}

fn door(context: &mut Context, file: &Path, client: &Client, operation: Operation) -> Outcome {
    let Done::Door(Door { name, socket, queues, is_open }) = in_use::call(client, operation)? else {
        return Err(in_use::unexpected(client));
    };
    let (file, socket) = (json::path(file), json::path(&socket));
    if context.global.json {
        context.print_json(&DoorReport { file, name, socket, queues, is_open })?;
    } else if !context.global.quiet {
        let what = if is_open { format!("open, {queues} queues") } else { "closed".into() };
        writeln!(context.text(), "{}: vhost-user: {}: {what}", printable(&file), printable(&socket))?;
    }
    Ok(exit::OK)
}

/// The disk with this path or export name, and the way to its process.
fn find(named: &Path) -> Outcome<(PathBuf, Client)> {
    if named.exists() {
        return match in_use::client(named)? {
            Some(client) => Ok((named.to_owned(), client)),
            None => Err(not_served(named)),
        };
    }
    let mut found = control::find_by_name(&named.to_string_lossy())?;
    match (found.pop(), found.pop()) {
        (Some(only), None) => Ok((only.file, only.client)),
        (Some(one), Some(other)) => Err(Failure::new(format!(
            "several disks are served under the name {}: {} and {}; name the file",
            named.display(),
            one.file.display(),
            other.file.display()
        ))),
        (None, _) => Err(Failure::new(format!(
            "{}: no such file, and no disk that is open for writing has this name; `diskwright serve-ctl list` lists them",
            named.display()
        ))),
    }
}

/// The error for a disk that no reachable process serves.
fn not_served(file: &Path) -> Failure {
    use diskwright_store::{LockMode, OpenError, OpenOptions, file::FileStore};
    let options = OpenOptions { lock: LockMode::Shared, ..OpenOptions::default() };
    match FileStore::open(file, &options) {
        Err(OpenError::Locked { holder, .. }) => Failure::new(format!(
            "{}: it is in use{}, which has no control channel that you can reach: only `diskwright serve` and `attach` have one, when they have opened the disk for writing, for their own user and root",
            file.display(),
            if holder.is_empty() { " by a program that is not visible here".into() } else { holder }
        )),
        _ => Failure::new(format!(
            "{}: no process has it open for writing, so there is nothing to control; `diskwright serve-ctl list` lists the disks in use",
            file.display()
        )),
    }
}

fn list(context: &mut Context) -> Outcome {
    let control::Listing { processes, silent } = control::list();
    let silent: Vec<String> = silent.iter().map(ToString::to_string).collect();
    if context.global.json {
        context.print_json(&Listing { processes, silent })?;
        return Ok(exit::OK);
    }
    silent.iter().for_each(|sentence| context.warn(sentence));
    if processes.is_empty() {
        return Ok(exit::OK);
    }
    let mut table = Columns::new(&[
        ("name", Align::Left),
        ("size", Align::Right),
        ("process", Align::Right),
        ("by", Align::Left),
        ("file", Align::Left),
    ]);
    for ProcessReport { pid, command, disks, .. } in &processes {
        for disk in disks {
            table.row(vec![
                printable(&disk.name),
                Human(disk.virtual_size).to_string(),
                pid.to_string(),
                printable(command),
                printable(&json::path(&disk.file)),
            ]);
        }
    }
    table.within(context.style.limit()).write(&mut context.out)?;
    Ok(exit::OK)
}

fn print_statistics(context: &mut Context, statistics: Statistics) -> Outcome {
    if context.global.json {
        context.print_json(&Counted { statistics })?;
        return Ok(exit::OK);
    }
    let Statistics { process, disk, chain, size_on_disk, open_seconds, limits, delayed_requests, traffic } =
        &statistics;
    let out = &mut context.text();
    let file = printable(&json::path(&disk.file));
    writeln!(out, "{file}: {}, served as {:?}", Exact(disk.virtual_size), printable(&disk.name))?;
    writeln!(
        out,
        "  process {} ({}, version {}), open for {} s",
        process.pid,
        printable(&process.command),
        printable(&process.version),
        open_seconds
    )?;
    if let Some(bytes) = size_on_disk {
        writeln!(out, "  {} on disk, {} in the chain", Human(*bytes), images(chain.len()))?;
    }
    if let Some(operation) = &disk.busy_with {
        writeln!(out, "  {} is under way", printable(operation))?;
    }
    if let Some(limits) = limits {
        writeln!(out, "  limited to {}; {delayed_requests} requests had to wait", limits::InWords((*limits).into()))?;
    }
    let Some(traffic) = traffic else { return Ok(exit::OK) };
    writeln!(
        out,
        "  {} connections, {} requests in flight; {} accepted and {} refused so far",
        traffic.connections, traffic.in_flight, traffic.accepted, traffic.refused
    )?;
    let mut table = Columns::new(&[
        ("command", Align::Left),
        ("requests", Align::Right),
        ("bytes", Align::Right),
        ("errors", Align::Right),
        ("mean", Align::Right),
    ]);
    for count in traffic.commands.iter().filter(|count| count.requests > 0) {
        let mean = count.mean_latency_ns.map(|nanoseconds| format!("{:?}", rounded(nanoseconds)));
        table.row(vec![
            printable(&count.command),
            count.requests.to_string(),
            Human(count.bytes).to_string(),
            count.errors.to_string(),
            mean.unwrap_or_default(),
        ]);
    }
    if traffic.commands.iter().any(|count| count.requests > 0) {
        writeln!(out)?;
        table.write(out)?;
    }
    Ok(exit::OK)
}

fn images(count: usize) -> String {
    if count == 1 { "one image".into() } else { format!("{count} images") }
}

/// To microseconds.
fn rounded(nanoseconds: u64) -> Duration {
    Duration::from_micros(nanoseconds.div_ceil(1000))
}

fn drain(context: &mut Context, client: &Client) -> Outcome {
    let Done::Drained { files } = in_use::call(client, Operation::Drain)? else {
        return Err(in_use::unexpected(client));
    };
    let files: Vec<String> = files.iter().map(|file| json::path(file)).collect();
    if context.global.json {
        context.print_json(&Drained { pid: client.peer.pid, files })?;
    } else if !context.global.quiet {
        for file in files {
            writeln!(context.text(), "{}: closed by {}", printable(&file), printable(&client.peer.to_string()))?;
        }
    }
    Ok(exit::OK)
}
