//! `diskwright space`: pools of files and devices that hold disks in several copies.
//!
//! Each action ends with the state of the pool, which `--json` prints in full.

mod limits;
mod report;
mod scrub;
mod shared;
mod tiers;

pub use report::Report;
#[cfg(test)]
pub use scrub::Report as ScrubReport;
#[cfg(test)]
pub use tiers::{HeatReport, OptimizeReport};

use crate::{
    context::Context,
    exit::{self, Failure, Outcome},
    member_limit,
    printable::printable,
    sizes,
};
use clap::{Args, Subcommand};
use diskwright_space::{
    Class, Known, NewFile, NewMember, Pool, PoolCreateOptions, PoolOptions, SpaceError, Spaces, WITNESS_BYTES, class_of,
};
use diskwright_store::{Files, OpenError};
use shared::{TierArg, bytes, disk_of, shown};
use std::{
    fs, io,
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `space`.
#[derive(Debug, Args)]
#[command(after_help = "\
A pool keeps the contents of its disks in slabs of 1 MiB, in one, two or three copies on different members. Its disks are named \
space://POOL/NAME wherever a FILE is taken: `diskwright create space://vault/vm.vhdx --size 40G`. A name may be of any format.

A member that fails does not stop the pool. After a power cut only the slabs are compared that were written lately.

EXAMPLES
  diskwright space create vault --member /dev/nvme0n1 --member /dev/nvme1n1
  diskwright create space://vault/vm.vhdx --size 40G
  diskwright space status vault
  diskwright space replace vault /dev/nvme1n1 /dev/nvme2n1")]
pub struct SpaceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Make a pool of files and devices.
    #[command(after_help = "\
A member keeps its own superblocks at both ends, so a pool is found again by its members alone (`space import`). Two copies need twice the space, each on another \
member.

EXAMPLES
  diskwright space create vault --member /dev/nvme0n1 --member /dev/nvme1n1
  diskwright space create vault --member fast.img:ssd --member slow.img:hdd
  diskwright space create test --member a.img --member b.img --size 10G")]
    Create(CreateArgs),
    /// Show pools, their members and disks, and what is not as it should be.
    #[command(after_help = "\
A pool that another program uses is shown without its disks.

EXAMPLES
  diskwright space status
  diskwright space status vault --json | jq '.pools[].degraded'")]
    Status {
        /// The pool; all that this machine knows without it.
        pool: Option<String>,
    },
    /// Add members to a pool.
    #[command(after_help = "\
EXAMPLES
  diskwright space add vault --member /dev/nvme2n1
  diskwright space add vault --witness /mnt/nas/vault.witness")]
    Add(AddArgs),
    /// Move everything away from a member, and remove it from the pool.
    #[command(after_help = "\
Stopped by Ctrl-C, it goes on where it was when it is called again.

EXAMPLES
  diskwright space remove vault /dev/nvme0n1
  diskwright space remove vault 3")]
    Remove {
        /// The pool.
        pool: String,
        /// The member: its path, or its number if it is lost.
        member: String,
    },
    /// Put a new member in the place of another one, which may be lost.
    #[command(after_help = "\
EXAMPLES
  diskwright space replace vault /dev/nvme1n1 /dev/nvme2n1
  diskwright space replace vault 1 new.img:hdd --size 10G")]
    Replace(ReplaceArgs),
    /// Compare all data with their checksums, and mend what is wrong.
    #[command(after_help = "\
A slab that was not written for half a minute gets checksums by itself, and each read of it is compared. A scrub reads all copies of all slabs, \
and gives checksums to those that have none. Wrong data are written anew from another copy. What is wrong in all copies is listed, and the exit \
code is 3.

EXAMPLES
  diskwright space scrub vault
  diskwright space scrub vault --json | jq .lost")]
    Scrub {
        /// The pool.
        pool: String,
    },
    /// Say which members the data of a disk belong on.
    #[command(after_help = "\
A pinned disk does not compete with others for the fast members. New data go to its tier at once; `space optimize` moves those that lie elsewhere, \
and so does a program that has the pool open, slowly.

EXAMPLES
  diskwright space pin space://vault/golden.vhdx --tier fast
  diskwright space pin space://vault/backup.vhdx --tier slow")]
    Pin {
        /// The disk: space://POOL/NAME.
        name: PathBuf,
        /// Where its data belong.
        #[arg(long, value_enum)]
        tier: TierArg,
    },
    /// Move what is used often to the fast members, and the rest away from them.
    #[command(after_help = "\
Random requests are counted for each slab; a day halves the count. A tenth of the fast members is left free for new data. Stopped by Ctrl-C, it goes on \
where it was when it is called again. A program that has the pool open does the same by itself, for a fifth of a second each half minute.

EXAMPLES
  diskwright space optimize vault --dry-run
  diskwright space optimize vault")]
    Optimize(tiers::OptimizeArgs),
    /// Give a pool a write-back cache, another one, or none.
    #[command(after_help = "\
Small random writes to slow members go to the cache first: a log on the fast members, with as many copies as the pool keeps. They are durable \
there, and go to the slow members later, in the order of their addresses. Long writes and streams pass by. A full cache slows writers down to the \
speed of the slow members.

EXAMPLES
  diskwright space cache vault 1G
  diskwright space cache vault none")]
    Cache {
        /// The pool.
        pool: String,
        /// Its size, from 1M to 64G, or `none`.
        #[arg(value_parser = cache_size)]
        size: CacheSize,
    },
    /// Show what the fast members serve, what others would serve, and where data lie.
    #[command(after_help = "\
EXAMPLES
  diskwright space report vault
  diskwright space report space://vault/vm.vhdx --offset 10G --length 1G")]
    Report(tiers::ReportArgs),
    /// Use a member no faster than a given device, for tests and studies.
    #[command(after_help = "\
The limit belongs to this machine's list of pools, not to the member. `iops` counts operations of any length, `latency` is added to each of them.

EXAMPLES
  diskwright space limit vault slow.img iops=150,latency=6ms
  diskwright space limit vault slow.img none")]
    Limit {
        /// The pool.
        pool: String,
        /// The member: its path.
        member: PathBuf,
        /// `iops=N`, `latency=TIME` (us, ms or s), both, or `none`.
        #[arg(value_parser = member_limit::parse)]
        limit: member_limit::LimitArg,
    },
    /// Make a pool known on this machine.
    #[command(after_help = "\
EXAMPLES
  diskwright space import /dev/nvme0n1 /dev/nvme1n1
  diskwright space import a.img --force-degraded")]
    Import(ImportArgs),
    /// Make this machine forget a pool. Its members are not changed.
    #[command(after_help = "\
EXAMPLES
  diskwright space export vault")]
    Export {
        /// The pool.
        pool: String,
    },
    /// Create a raw disk with another number of copies or on a certain tier, or remove a disk.
    #[command(subcommand)]
    Disk(DiskAction),
}

#[derive(Debug, Subcommand)]
enum DiskAction {
    /// Create a raw disk.
    #[command(after_help = "\
The size is promised, not taken: slabs are allocated when they are written. For images and for disks with the pool's number of copies \
`diskwright create` is enough.

EXAMPLES
  diskwright space disk create space://vault/scratch --size 100G --copies 1")]
    Create(DiskArgs),
    /// Remove a disk of any format, and free its slabs.
    #[command(after_help = "\
EXAMPLES
  diskwright space disk remove space://vault/scratch")]
    Remove {
        /// The disk: space://POOL/NAME.
        name: PathBuf,
    },
}

/// A member with its class.
#[derive(Debug, Clone)]
struct MemberArg {
    path: PathBuf,
    class: Option<Class>,
}

fn member_arg(text: &str) -> Result<MemberArg, String> {
    let (path, class) = match text.rsplit_once(':') {
        Some((path, "ssd")) => (path, Some(Class::Ssd)),
        Some((path, "hdd")) => (path, Some(Class::Hdd)),
        _ => (text, None),
    };
    if path.is_empty() {
        return Err("it names no file".into());
    }
    Ok(MemberArg { path: path.into(), class })
}

/// Size of a write-back cache.
#[derive(Debug, Clone, Copy)]
enum CacheSize {
    None,
    Bytes(u64),
}

fn cache_size(text: &str) -> Result<CacheSize, String> {
    if text == "none" { Ok(CacheSize::None) } else { sizes::parse(text).map(CacheSize::Bytes) }
}

#[derive(Debug, Args)]
struct MemberOptions {
    /// Create members that do not exist, as files of this size.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Take members that have contents. The contents are lost.
    #[arg(long)]
    force: bool,
}

#[derive(Debug, Args)]
struct CreateArgs {
    /// Name of the pool.
    pool: String,
    /// A member: a file or a block device. Its speed is what the device says of itself, unless
    /// `:ssd` or `:hdd` follows.
    #[arg(long, required = true, value_name = "PATH[:CLASS]", value_parser = member_arg)]
    member: Vec<MemberArg>,
    /// Copies of each slab of a new disk: 1 to 3. Without it 2, or 1 with one member.
    #[arg(long, value_name = "N")]
    copies: Option<u8>,
    /// Size of a slab: a power of two from 256k to 64M.
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse, default_value = "1M")]
    slab_size: u64,
    /// A small file elsewhere, which is created. It holds no data, but counts as a member when more
    /// than half of them are needed to write the pool.
    #[arg(long, value_name = "PATH")]
    witness: Option<PathBuf>,
    /// Size of the write-back cache on the fast members, or `none`. [default: 1G, or an eighth of
    /// the fast members if that is less; none without slow members]
    #[arg(long, value_name = "SIZE", value_parser = cache_size)]
    write_cache: Option<CacheSize>,
    #[command(flatten)]
    options: MemberOptions,
}

#[derive(Debug, Args)]
struct AddArgs {
    /// The pool.
    pool: String,
    /// A member: a file or a block device, and perhaps `:ssd` or `:hdd`.
    #[arg(long, required_unless_present = "witness", value_name = "PATH[:CLASS]", value_parser = member_arg)]
    member: Vec<MemberArg>,
    /// A small file elsewhere, which is created. It holds no data, but counts as a member when more
    /// than half of them are needed to write the pool.
    #[arg(long, value_name = "PATH")]
    witness: Option<PathBuf>,
    #[command(flatten)]
    options: MemberOptions,
}

#[derive(Debug, Args)]
struct ReplaceArgs {
    /// The pool.
    pool: String,
    /// The old member: its path, or its number if it is lost.
    old: String,
    /// The new member.
    #[arg(value_name = "PATH[:CLASS]", value_parser = member_arg)]
    new: MemberArg,
    #[command(flatten)]
    options: MemberOptions,
}

#[derive(Debug, Args)]
struct ImportArgs {
    /// Its members.
    #[arg(required = true, value_name = "MEMBER")]
    members: Vec<PathBuf>,
    /// Go on without the other members although no majority is here. They are then refused when
    /// they come back, if they were changed too.
    #[arg(long)]
    force_degraded: bool,
}

#[derive(Debug, Args)]
struct DiskArgs {
    /// The disk: space://POOL/NAME.
    name: PathBuf,
    /// Size of the disk.
    #[arg(long, short, value_name = "SIZE", value_parser = sizes::parse)]
    size: u64,
    /// Copies of each slab: 1 to 3. Without it, as the pool was created.
    #[arg(long, value_name = "N")]
    copies: Option<u8>,
    /// How many slabs that follow one another lie on different members, so that a sequential stream
    /// uses them at once. N times the copies need as many members.
    #[arg(long, value_name = "N", default_value = "1")]
    columns: u8,
    /// Where its slabs are allocated.
    #[arg(long, value_enum, default_value = "any")]
    tier: TierArg,
}

pub fn run(context: &mut Context, args: &SpaceArgs) -> Outcome {
    match &args.action {
        Action::Create(args) => create(context, args),
        Action::Status { pool } => status(context, pool.as_deref()),
        Action::Add(args) => {
            let pool = Spaces::of_user().pool(&args.pool, true)?;
            add(&pool, &args.member, &args.options)?;
            args.witness.as_deref().map_or(Ok(()), |path| add_witness(&pool, path))?;
            shown(context, &pool, "the members were added")
        }
        Action::Remove { pool, member } => {
            let pool = Spaces::of_user().pool(pool, true)?;
            remove(context, &pool, member)?;
            shown(context, &pool, &format!("{} is not a member any more", printable(member)))
        }
        Action::Replace(args) => replace(context, args),
        Action::Scrub { pool } => scrub::scrub(context, pool),
        Action::Pin { name, tier } => tiers::pin(context, name, *tier),
        Action::Cache { pool, size } => cache(context, pool, *size),
        Action::Optimize(args) => tiers::optimize(context, args),
        Action::Report(args) => tiers::report(context, args),
        Action::Limit { pool, member, limit } => limits::limit(context, pool, member, *limit),
        Action::Import(args) => import(context, args),
        Action::Export { pool } => {
            Spaces::of_user().registry().forget(pool)?;
            if !context.global.quiet && !context.global.json {
                writeln!(context.text(), "{pool}: this machine does not know the pool any more")?;
            }
            Ok(exit::OK)
        }
        Action::Disk(DiskAction::Create(args)) => create_disk(context, args),
        Action::Disk(DiskAction::Remove { name }) => {
            let (pool, disk) = disk_of(name, true)?;
            pool.remove_file(&disk)?;
            shown(context, &pool, &format!("{disk} was removed"))
        }
    }
}

/// The members as the library takes them. Creates the files that do not exist, if they are to be.
fn members(args: &[MemberArg], options: &MemberOptions) -> Outcome<Vec<NewMember>> {
    let mut members = Vec::new();
    for MemberArg { path, class } in args {
        if let (Some(size), false) = (options.size, path.exists()) {
            let made = fs::OpenOptions::new().write(true).create_new(true).open(path);
            let made = made.and_then(|file| file.set_len(size));
            made.map_err(|error| Failure::doing(format!("{}: cannot create it", path.display()), error))?;
        }
        let path = path.canonicalize().map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => {
                Failure::new(format!("{}: no such file or device; --size creates files", path.display()))
            }
            _ => Failure::doing(format!("{}: cannot find it", path.display()), error),
        })?;
        members.push(NewMember { class: class.unwrap_or_else(|| class_of(&path)), path });
    }
    Ok(members)
}

fn create(context: &mut Context, args: &CreateArgs) -> Outcome {
    let registry = Spaces::of_user().registry();
    match registry.find(&args.pool) {
        Ok(_) => return Err(SpaceError::NameTaken { name: args.pool.clone() }.into()),
        Err(SpaceError::Unknown { .. }) => {}
        Err(error) => return Err(error.into()),
    }
    let members = members(&args.member, &args.options)?;
    let options = PoolCreateOptions {
        slab_bytes: args.slab_size,
        copies: args.copies,
        force: args.options.force,
        ..PoolCreateOptions::default()
    };
    let id = Pool::create(&args.pool, &members, &options)?;
    let members = members.into_iter().map(|member| member.path).collect();
    registry.remember(&args.pool, &Known::new(id, members), false)?;
    let pool = Spaces::of_user().pool(&args.pool, true)?;
    args.witness.as_deref().map_or(Ok(()), |path| add_witness(&pool, path))?;
    match args.write_cache {
        Some(CacheSize::Bytes(len_bytes)) => pool.create_cache(len_bytes)?,
        Some(CacheSize::None) => {}
        None => pool.usual_cache_bytes().map_or(Ok(()), |len_bytes| pool.create_cache(len_bytes))?,
    }
    shown(context, &pool, "the pool was created")
}

fn cache(context: &mut Context, name: &str, size: CacheSize) -> Outcome {
    let spaces = Spaces::of_user();
    let mut pool = spaces.pool(name, true)?;
    if let CacheSize::Bytes(len_bytes) = size {
        pool.check_cache(len_bytes)?;
    }
    if pool.status().cache.is_some() || matches!(size, CacheSize::None) {
        let mut display = context.progress("emptying the cache");
        pool.remove_cache(&mut |emptied| display.update(emptied.done_bytes, emptied.total_bytes))?;
        drop(display);
        // The pool is opened without it.
        drop(pool);
        spaces.close().map_err(|error| Failure::doing("cannot close the pool", error))?;
        pool = spaces.pool(name, true)?;
    }
    match size {
        CacheSize::None => shown(context, &pool, "it has no write-back cache any more"),
        CacheSize::Bytes(len_bytes) => {
            pool.create_cache(len_bytes)?;
            shown(context, &pool, &format!("it has a write-back cache of {}", sizes::Human(len_bytes)))
        }
    }
}

fn status(context: &mut Context, pool: Option<&str>) -> Outcome {
    let spaces = Spaces::of_user();
    let names = match pool {
        Some(name) => vec![name.to_owned()],
        None => spaces.registry().names()?,
    };
    let mut pools = Vec::new();
    for name in names {
        let known = spaces.registry().find(&name)?;
        // Reading records nothing, so a look at a pool with missing members changes nothing.
        let (status, in_use) = match Pool::open(&known.members, &PoolOptions::default()) {
            Ok(pool) => (Ok(pool.status()), None),
            Err(SpaceError::Open(OpenError::Locked { holder, .. })) => {
                (Pool::peek(&known.members, &Files::default()), Some(holder.trim().to_owned()))
            }
            Err(error) => (Err(error), None),
        };
        match status {
            Ok(status) => pools.push(report::PoolReport::new(&status, in_use)),
            // With one pool the error is the answer; otherwise the others are shown too.
            Err(error) if pool.is_some() => return Err(error.into()),
            Err(error) => context.warn_always(&error.to_string()),
        }
    }
    Report { pools }.print(context)
}

/// Records the members of a pool as they are now.
fn remember(pool: &Pool) -> Outcome<()> {
    let paths = pool.status().members.into_iter().filter_map(|member| member.path);
    let members: Vec<PathBuf> = paths.map(|path| path.canonicalize().unwrap_or(path)).collect();
    let registry = Spaces::of_user().registry();
    let mut limits = registry.find(pool.name()).map(|known| known.limits).unwrap_or_default();
    limits.retain(|path, _| members.contains(path));
    Ok(registry.remember(pool.name(), &Known { id: pool.id(), members, limits }, true)?)
}

fn add(pool: &Pool, args: &[MemberArg], options: &MemberOptions) -> Outcome<()> {
    let new = PoolCreateOptions { force: options.force, ..PoolCreateOptions::default() };
    pool.add_members(&members(args, options)?, &new)?;
    remember(pool)
}

/// Creates a witness and adds it to a pool.
fn add_witness(pool: &Pool, path: &Path) -> Outcome<()> {
    let made = fs::OpenOptions::new().write(true).create_new(true).open(path);
    let made = made.and_then(|file| file.set_len(WITNESS_BYTES));
    made.map_err(|error| Failure::doing(format!("{}: cannot create the witness", path.display()), error))?;
    let path = path.canonicalize().map_err(|error| Failure::doing("cannot find the witness", error))?;
    let witness = NewMember { class: Class::Hdd, path: path.clone() };
    let added = pool.add_members(&[witness], &PoolCreateOptions::default());
    if added.is_err() {
        let _ = fs::remove_file(&path);
    }
    added?;
    remember(pool)
}

fn remove(context: &Context, pool: &Pool, member: &str) -> Outcome<()> {
    let mut display = context.progress("moving");
    pool.remove_member(member, &mut |moved| display.update(bytes(moved.done, moved), bytes(moved.total, moved)))?;
    remember(pool)
}

fn replace(context: &mut Context, args: &ReplaceArgs) -> Outcome {
    let pool = Spaces::of_user().pool(&args.pool, true)?;
    add(&pool, std::slice::from_ref(&args.new), &args.options)?;
    remove(context, &pool, &args.old)?;
    let done = format!("{} took the place of {}", printable(&args.new.path.to_string_lossy()), printable(&args.old));
    shown(context, &pool, &done)
}

fn import(context: &mut Context, args: &ImportArgs) -> Outcome {
    let absolute = |path: &PathBuf| path.canonicalize().unwrap_or_else(|_| path.clone());
    let members: Vec<PathBuf> = args.members.iter().map(absolute).collect();
    let seen = Pool::peek(&members, &Files::default())?;
    let registry = Spaces::of_user().registry();
    let is_same = match registry.find(&seen.name) {
        Ok(known) => known.id == seen.id,
        Err(SpaceError::Unknown { .. }) => true,
        Err(error) => return Err(error.into()),
    };
    if !is_same {
        return Err(SpaceError::NameTaken { name: seen.name }.into());
    }
    if args.force_degraded {
        let options = PoolOptions { writable: true, force_degraded: true, ..PoolOptions::default() };
        Pool::open(&members, &options)?.close().map_err(|error| Failure::doing("cannot close the pool", error))?;
    } else {
        // What cannot be read at all is not made known.
        match Pool::open(&members, &PoolOptions::default()) {
            Ok(_) | Err(SpaceError::Open(OpenError::Locked { .. })) => {}
            Err(error) => return Err(error.into()),
        }
    }
    registry.remember(&seen.name, &Known::new(seen.id, members), true)?;
    status(context, Some(&seen.name))
}

fn create_disk(context: &mut Context, args: &DiskArgs) -> Outcome {
    let (pool, disk) = disk_of(&args.name, true)?;
    if args.size == 0 || !args.size.is_multiple_of(512) {
        return Err(Failure::usage(format!("a disk of {} bytes: it must have whole sectors of 512 bytes", args.size)));
    }
    let tier = args.tier.into();
    let copies = args.copies.unwrap_or_else(|| pool.default_copies());
    pool.create_file(&disk, NewFile { len_bytes: args.size, copies, columns: args.columns, tier })?;
    shown(context, &pool, &format!("{disk} was created"))
}
