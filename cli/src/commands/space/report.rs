//! A pool as text and as JSON.

use crate::{
    context::Context,
    exit::{self, Outcome},
    json::{self, Document},
    printable::printable,
    sizes::Human,
    table::{Align, Columns},
};
use diskwright_space::{Class, Health, Status, Tier};
use schemars::JsonSchema;
use serde::Serialize;
use std::io::Write;

/// What the actions of `space` print with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The pools.
    pub pools: Vec<PoolReport>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.space/1";
}

/// A pool.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PoolReport {
    /// Its name.
    name: String,
    /// Its GUID.
    id: String,
    /// Size of a slab in bytes.
    slab_size: u64,
    /// Copies that a new disk has.
    copies: u8,
    /// Counts the changes of its members.
    generation: u64,
    /// Whether members or copies are missing.
    degraded: bool,
    /// Its space, in bytes of copies; `null` while another program uses the pool.
    space: Option<SpaceReport>,
    /// The program that uses the pool, as in "by diskwright (process 7)"; `null` if there is none.
    in_use: Option<String>,
    /// Its members.
    members: Vec<MemberReport>,
    /// Its write-back cache; `null` if it has none, or while another program uses the pool.
    cache: Option<CacheReport>,
    /// Its disks; `null` while another program uses the pool.
    disks: Option<Vec<DiskReport>>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

/// The space of a pool.
#[derive(Debug, Serialize, JsonSchema)]
struct SpaceReport {
    /// Bytes of all slabs that data can use.
    size: u64,
    /// Of these, free ones.
    free: u64,
    /// Bytes that the disks may still take. They may be more than there are.
    promised: u64,
}

/// A write-back cache.
#[derive(Debug, Serialize, JsonSchema)]
struct CacheReport {
    /// Its size in bytes.
    size: u64,
    /// Copies of it, each on another fast member.
    copies: u8,
    /// Bytes that are not free.
    used: u64,
    /// Of these, bytes that are not on the slow members yet.
    waiting: u64,
}

/// A member.
#[derive(Debug, Serialize, JsonSchema)]
struct MemberReport {
    /// Its number.
    number: u8,
    /// Its file or device; `null` if it is not there.
    path: Option<String>,
    /// `ssd`, `hdd`, or `witness`: it holds no data, and only counts when more than half of the
    /// members are needed.
    class: &'static str,
    /// `active`, `leaving` (it is being drained), `missing`, or `lost` (the pool goes on without
    /// it).
    state: &'static str,
    /// Its size in bytes.
    size: u64,
    /// Bytes of its free slabs; `null` while another program uses the pool.
    free: Option<u64>,
    /// Whether it holds a copy of the journal.
    journal: bool,
}

/// A disk.
#[derive(Debug, Serialize, JsonSchema)]
struct DiskReport {
    /// Its name in the pool.
    name: String,
    /// Its length in bytes.
    size: u64,
    /// Copies of each slab.
    copies: u8,
    /// How many slabs that follow one another lie on different members.
    columns: u8,
    /// `any`, `fast` or `slow`.
    tier: &'static str,
    /// Bytes of its slabs, counted once.
    allocated: u64,
    /// Of these, bytes that would be compared after a power cut.
    dirty: u64,
    /// Of these, bytes that have no checksums yet.
    unsealed: u64,
    /// Of these, bytes that have fewer valid copies than they should.
    degraded: u64,
}

impl PoolReport {
    pub fn new(status: &Status, in_use: Option<String>) -> Self {
        let members = status.members.iter().map(|member| MemberReport {
            number: member.number,
            path: member.path.as_deref().map(json::path),
            class: match member.class {
                _ if member.is_witness => "witness",
                Class::Ssd => "ssd",
                Class::Hdd => "hdd",
            },
            state: match member.health {
                Health::Active => "active",
                Health::Leaving => "leaving",
                Health::Lost => "lost",
                Health::Missing => "missing",
            },
            size: member.size_bytes,
            free: member.free_bytes,
            journal: member.has_journal,
        });
        let disks = status.disks.as_ref().map(|disks| {
            let disk = disks.iter().map(|disk| DiskReport {
                name: disk.name.clone(),
                size: disk.len_bytes,
                copies: disk.copies,
                columns: disk.columns,
                tier: match disk.tier {
                    Tier::Any => "any",
                    Tier::Fast => "fast",
                    Tier::Slow => "slow",
                },
                allocated: disk.mapped_bytes,
                dirty: disk.dirty_bytes,
                unsealed: disk.unsealed_bytes,
                degraded: disk.degraded_bytes,
            });
            disk.collect()
        });
        Self {
            name: status.name.clone(),
            id: status.id.to_string(),
            slab_size: status.slab_bytes,
            copies: status.copies,
            generation: status.generation,
            degraded: status.is_degraded(),
            space: status.room.map(|room| SpaceReport {
                size: room.all_bytes,
                free: room.free_bytes,
                promised: room.promised_bytes,
            }),
            cache: status.cache.as_ref().map(|cache| CacheReport {
                size: cache.len_bytes,
                copies: cache.copies,
                used: cache.used_bytes,
                waiting: cache.waiting_bytes,
            }),
            in_use,
            members: members.collect(),
            disks,
            warnings: status.warnings.iter().map(|warning| exit::for_users(warning)).collect(),
        }
    }

    fn write(&self, context: &mut Context) -> Outcome<()> {
        let copies = if self.copies == 1 { "1 copy".to_owned() } else { format!("{} copies", self.copies) };
        let state = if self.degraded { context.style.paint("31", "degraded") } else { "complete".into() };
        writeln!(context.out, "{}: {state}; {copies}, slabs of {}", printable(&self.name), Human(self.slab_size))?;
        if let Some(space) = self.space.as_ref().filter(|space| space.promised > 0) {
            let (free, size, promised) = (Human(space.free), Human(space.size), Human(space.promised));
            writeln!(context.out, "{free} of {size} are free; its disks may grow by {promised}.")?;
        }
        if let Some(cache) = &self.cache {
            let (size, waiting) = (Human(cache.size), Human(cache.waiting));
            writeln!(context.out, "Its write-back cache has {size}; {waiting} are not on the slow members yet.")?;
        }
        if let Some(holder) = &self.in_use {
            writeln!(context.text(), "It is in use {}; its disks are not shown.", printable(holder))?;
        }
        writeln!(context.out)?;
        let mut table = Columns::new(&[
            ("member", Align::Right),
            ("class", Align::Left),
            ("state", Align::Left),
            ("size", Align::Right),
            ("free", Align::Right),
            ("journal", Align::Left),
            ("path", Align::Left),
        ]);
        for member in &self.members {
            table.row(vec![
                member.number.to_string(),
                member.class.into(),
                member.state.into(),
                Human(member.size).to_string(),
                member.free.map_or_else(|| "-".into(), |free| Human(free).to_string()),
                if member.journal { "yes".into() } else { "-".into() },
                member.path.as_deref().map_or_else(|| "-".into(), printable),
            ]);
        }
        table.within(context.style.limit()).write(&mut context.out)?;
        let Some(disks) = self.disks.as_ref().filter(|disks| !disks.is_empty()) else { return Ok(()) };
        writeln!(context.out)?;
        let mut table = Columns::new(&[
            ("disk", Align::Left),
            ("size", Align::Right),
            ("copies", Align::Right),
            ("columns", Align::Right),
            ("tier", Align::Left),
            ("allocated", Align::Right),
            ("dirty", Align::Right),
            ("no checksums", Align::Right),
            ("too few copies", Align::Right),
        ]);
        let or_dash = |bytes: u64| if bytes == 0 { "-".into() } else { Human(bytes).to_string() };
        for disk in disks {
            table.row(vec![
                printable(&disk.name),
                Human(disk.size).to_string(),
                disk.copies.to_string(),
                disk.columns.to_string(),
                disk.tier.into(),
                Human(disk.allocated).to_string(),
                or_dash(disk.dirty),
                or_dash(disk.unsealed),
                or_dash(disk.degraded),
            ]);
        }
        table.within(context.style.limit()).write(&mut context.out)?;
        Ok(())
    }
}

impl Report {
    /// Prints the pools.
    pub fn print(&self, context: &mut Context) -> Outcome {
        if context.global.json {
            context.print_json(self)?;
            return Ok(exit::OK);
        }
        if context.global.quiet {
            return Ok(exit::OK);
        }
        for (place, pool) in self.pools.iter().enumerate() {
            if place > 0 {
                writeln!(context.out)?;
            }
            pool.warnings.iter().for_each(|warning| context.warn(warning));
            pool.write(context)?;
        }
        context.out.flush()?;
        Ok(exit::OK)
    }
}
