//! What a pool looks like: members, space, disks, and what is not as it should be.

use super::{Pool, is_own, lock, open::open_member, thin::Room};
use crate::{
    cache::CacheStatus,
    error::{Result, SpaceError},
    member::Member,
};
use diskwright_format::space::{
    change::{SlabState, Tier},
    slabs_of,
    superblock::{Class, MemberState, Superblock},
};
use diskwright_store::{CacheMode, Files, LockMode, MemberTraffic, OpenOptions};
use std::{
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
};
use uuid::Uuid;

/// How a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Health {
    /// It is used.
    Active,
    /// It is being drained.
    Leaving,
    /// It is not there, and the pool has recorded that it goes on without it.
    Lost,
    /// It is not there.
    Missing,
}

/// A member in a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberStatus {
    /// Its number.
    pub number: u8,
    /// Its file or device; `None` if it is missing.
    pub path: Option<PathBuf>,
    /// How fast it is.
    pub class: Class,
    /// Whether it has no slabs, and only counts when more than half of the members are needed.
    pub is_witness: bool,
    /// How it is.
    pub health: Health,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// Bytes of slabs that are free; `None` if the map was not read.
    pub free_bytes: Option<u64>,
    /// Whether it holds a journal.
    pub has_journal: bool,
}

/// A disk in a status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub len_bytes: u64,
    /// Copies of each slab.
    pub copies: u8,
    /// How many slabs that follow one another lie on different members.
    pub columns: u8,
    /// Its tier.
    pub tier: Tier,
    /// Bytes of its slabs that are mapped, counted once.
    pub mapped_bytes: u64,
    /// Of these, bytes whose copies may differ after a power cut.
    pub dirty_bytes: u64,
    /// Of these, bytes that have no checksums yet: dirty ones, and those written a while ago.
    pub unsealed_bytes: u64,
    /// Of these, bytes that have fewer valid copies than they should.
    pub degraded_bytes: u64,
}

/// The state of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub id: Uuid,
    /// Size of a slab in bytes.
    pub slab_bytes: u64,
    /// Counts the changes of its members.
    pub generation: u64,
    /// Copies that a new disk has.
    pub copies: u8,
    /// Its members.
    pub members: Vec<MemberStatus>,
    /// Its disks; `None` if the map was not read, because the pool is in use.
    pub disks: Option<Vec<DiskStatus>>,
    /// Its write-back cache; `None` if it has none, or the map was not read.
    pub cache: Option<CacheStatus>,
    /// The space of the pool; `None` if the map was not read.
    pub room: Option<Room>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Status {
    /// Whether members are missing, or copies.
    pub fn is_degraded(&self) -> bool {
        let is_bad = |member: &MemberStatus| matches!(member.health, Health::Lost | Health::Missing);
        let degraded = |disks: &Vec<DiskStatus>| disks.iter().any(|disk| disk.degraded_bytes > 0);
        self.members.iter().any(is_bad) || self.disks.as_ref().is_some_and(degraded)
    }
}

fn rows(superblock: &Superblock, path_of: impl Fn(u8) -> Option<PathBuf>) -> Vec<MemberStatus> {
    let rows = (0_u8..).zip(&superblock.members).filter_map(|(number, row)| Some((number, row.as_ref()?)));
    let status = rows.map(|(number, row)| {
        let path = path_of(number);
        let health = match (row.state, &path) {
            (MemberState::Lost, _) => Health::Lost,
            (_, None) => Health::Missing,
            (MemberState::Active, _) => Health::Active,
            (MemberState::Leaving, _) => Health::Leaving,
        };
        let has_journal = superblock.areas.iter().any(|area| area.member == number);
        let (class, size_bytes) = (row.class, row.size_bytes);
        MemberStatus {
            number,
            path,
            class,
            is_witness: row.is_witness(),
            health,
            size_bytes,
            free_bytes: None,
            has_journal,
        }
    });
    status.collect()
}

impl Pool {
    /// What each member was asked for since it was opened, by disks and by the pool itself.
    pub fn traffic(&self) -> Vec<MemberTraffic> {
        let traffic = |member: &Arc<Member>| MemberTraffic {
            name: member.path.display().to_string(),
            class: match member.class {
                Class::Ssd => "ssd",
                Class::Hdd => "hdd",
            },
            traffic: member.counter.sum(),
        };
        self.holders().map(traffic).collect()
    }

    /// The state of the pool.
    pub fn status(&self) -> Status {
        let state = lock(&self.state);
        let mut members = rows(&state.superblock, |number| self.member(number).map(|member| member.path.clone()));
        for member in &mut members {
            let free = state.free[usize::from(member.number)].free();
            member.free_bytes = Some(u64::from(free) << self.slab_shift);
            if self.member(member.number).is_some() && self.live_member(member.number).is_none() {
                member.health = Health::Lost;
            }
        }
        let names = state.names.iter().filter(|(name, _)| !is_own(name));
        let names = names.filter_map(|(name, number)| Some((name, self.file(*number)?)));
        let disks = names.map(|(name, file)| {
            let (mut mapped, mut dirty, mut unsealed, mut degraded) = (0_u64, 0_u64, 0_u64, 0_u64);
            for (_, entry) in file.table.mapped(0..1 << 32) {
                let slab = entry.load();
                mapped += 1;
                dirty += u64::from(slab.state() == Some(SlabState::Dirty));
                unsealed += u64::from(!slab.is_sealed());
                let good = slab.good_copies().filter(|copy| self.live_member(copy.member).is_some()).count();
                degraded += u64::from(good < usize::from(file.copies));
            }
            DiskStatus {
                name: name.clone(),
                len_bytes: file.len_bytes.load(Ordering::Acquire),
                copies: file.copies,
                columns: file.columns,
                tier: file.tier(),
                mapped_bytes: mapped << self.slab_shift,
                dirty_bytes: dirty << self.slab_shift,
                unsealed_bytes: unsealed << self.slab_shift,
                degraded_bytes: degraded << self.slab_shift,
            }
        });
        let room = self.room(&state);
        let mut warnings = self.warnings();
        warnings.extend(self.scarce(room).filter(|warning| !warnings.contains(warning)));
        Status {
            name: self.name.clone(),
            id: self.id,
            slab_bytes: self.slab_bytes(),
            generation: state.superblock.generation,
            copies: state.superblock.copies,
            members,
            disks: Some(disks.collect()),
            cache: self.cache().and_then(|cache| cache.status()),
            room: Some(room),
            warnings,
        }
    }

    /// What the superblocks say, without opening the pool: for one that another program uses. Takes
    /// no lock.
    ///
    /// # Errors
    /// No path is a member.
    pub fn peek(paths: &[PathBuf], files: &Files) -> Result<Status> {
        let options = OpenOptions { lock: LockMode::None, ..OpenOptions::default() };
        let read = |path: &PathBuf| -> Result<(PathBuf, Superblock)> {
            let store = files.open(path, &options)?;
            Ok((path.clone(), Member::read_superblock(&*store, path)?))
        };
        let (mut found, mut warnings, mut first_error) = (Vec::new(), Vec::new(), None);
        for path in paths {
            match read(path) {
                Ok(member) => found.push(member),
                Err(error) => {
                    warnings.push(error.to_string());
                    first_error.get_or_insert(error);
                }
            }
        }
        let newest = found.iter().map(|(_, superblock)| superblock).max_by_key(|superblock| superblock.generation);
        let Some(newest) = newest else {
            let nothing = SpaceError::Usage { what: "no members were named".into() };
            return Err(first_error.unwrap_or(nothing));
        };
        let path_of = |number: u8| {
            let is_it = |(_, superblock): &&(PathBuf, Superblock)| {
                superblock.number == number && superblock.pool == newest.pool
            };
            found.iter().find(is_it).map(|(path, _)| path.clone())
        };
        Ok(Status {
            name: newest.name.clone(),
            id: newest.pool,
            slab_bytes: 1 << newest.slab_shift,
            generation: newest.generation,
            copies: newest.copies,
            members: rows(newest, path_of),
            disks: None,
            cache: None,
            room: None,
            warnings,
        })
    }

    /// Bytes that the slabs of a member of `size_bytes` have.
    pub fn usable_bytes(size_bytes: u64, slab_bytes: u64) -> u64 {
        let shift = slab_bytes.trailing_zeros() as u8;
        u64::from(slabs_of(size_bytes, shift)) << shift.min(63)
    }

    /// Wipes the superblocks of a member, so that it belongs to no pool.
    ///
    /// # Errors
    /// It is no member, or it is in use.
    pub fn wipe(path: &std::path::Path, files: &Files) -> Result<()> {
        let file = open_member(path, true, CacheMode::PageCache, files)?;
        let superblock = Member::read_superblock(&*file.store, path)?;
        let size_bytes = superblock.member(superblock.number).map_or(file.size_bytes, |row| row.size_bytes);
        let member = Member::new(superblock.number, Class::Ssd, size_bytes, path, file.store);
        member.wipe().map_err(|error| SpaceError::io("wipe it", path, error))
    }
}
