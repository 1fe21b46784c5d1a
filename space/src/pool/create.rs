//! A new pool on files and devices that belong to no pool.
//!
//! The first checkpoint, of an empty map, is durable on every area before the first superblock is
//! written. So a power cut leaves a member that is no member, or a pool that can be opened once all
//! its superblocks are there.

use super::{Pool, check_name, lose::lineage_number};
use crate::{
    error::{Result, SpaceError},
    log::OpenArea,
    member::Member,
    pool::{
        areas::{Holder, areas_for},
        open::{MemberFile, open_member},
    },
};
use diskwright_format::space::{
    BLOCK_BYTES, COPIES_MAX, MEMBERS_MAX, SLAB_SHIFTS, WITNESS_BYTES,
    journal::{Checkpoint, Position},
    last_superblock_at, slabs_of,
    superblock::{Area, Class, LINEAGE, Member as Row, MemberState, Superblock},
};
use diskwright_store::{CacheMode, Files};
use std::{path::PathBuf, sync::Arc};
use uuid::Uuid;

/// Size of a slab if none is given.
pub const SLAB_BYTES_DEFAULT: u64 = 1 << 20;

/// A file or device that becomes a member.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewMember {
    /// Where it is.
    pub path: PathBuf,
    /// How fast it is.
    pub class: Class,
}

/// How a pool is created.
#[derive(Debug, Clone)]
pub struct PoolCreateOptions {
    /// Size of a slab in bytes: a power of two from 256 KiB to 64 MiB.
    pub slab_bytes: u64,
    /// Copies that a new disk has if nothing else is said; `None` for 2, or 1 with one member.
    pub copies: Option<u8>,
    /// Whether members lose contents that they have.
    pub force: bool,
    /// Where the members' files are.
    pub files: Files,
}

impl Default for PoolCreateOptions {
    fn default() -> Self {
        Self { slab_bytes: SLAB_BYTES_DEFAULT, copies: None, force: false, files: Files::default() }
    }
}

impl Pool {
    /// Creates a pool. Its members are then opened by [`Pool::open`].
    ///
    /// # Errors
    /// [`SpaceError::HasContents`], [`SpaceError::TooSmall`], [`SpaceError::BadName`],
    /// [`SpaceError::Usage`]; nothing was changed then. [`SpaceError::Io`] while writing.
    pub fn create(name: &str, members: &[NewMember], options: &PoolCreateOptions) -> Result<Uuid> {
        check_name(name)?;
        let slab_shift = options.slab_bytes.trailing_zeros() as u8;
        if !options.slab_bytes.is_power_of_two() || !SLAB_SHIFTS.contains(&slab_shift) {
            let what =
                format!("slabs of {} bytes: a slab must be a power of two from 256 KiB to 64 MiB", options.slab_bytes);
            return Err(SpaceError::Usage { what });
        }
        if members.is_empty() || members.len() > MEMBERS_MAX {
            let what = format!("{} members: a pool has 1 to {MEMBERS_MAX}", members.len());
            return Err(SpaceError::Usage { what });
        }
        let copies = options.copies.unwrap_or(members.len().min(2) as u8);
        if !(1..=COPIES_MAX).contains(&usize::from(copies)) || usize::from(copies) > members.len() {
            let what = format!(
                "{copies} copies on {} members: a pool keeps 1 to 3 copies, each on another member",
                members.len()
            );
            return Err(SpaceError::Usage { what });
        }
        let opened = open_new(members, options)?;
        let sizes: Vec<u64> = opened.iter().map(|one| one.size_bytes).collect();
        let holder = |(number, (new, size_bytes)): (u8, (&NewMember, &u64))| Holder {
            number,
            class: new.class,
            size_bytes: *size_bytes,
        };
        let holders: Vec<Holder> = (0..).zip(members.iter().zip(&sizes)).map(holder).collect();
        let areas = areas_for(&holders, slab_shift);
        for (number, one) in (0..).zip(&opened) {
            let area_slabs =
                areas.iter().find(|area| area.member == number).and_then(Area::slabs).map_or(0, |slabs| slabs.end);
            if slabs_of(one.size_bytes, slab_shift) < area_slabs + 1 {
                // Both superblocks, the area and one slab.
                let needed_bytes = (2 << 20) + ((u64::from(area_slabs) + 1) << slab_shift);
                let (path, slab_bytes) = (one.path.clone(), options.slab_bytes);
                return Err(SpaceError::TooSmall { path, found_bytes: one.size_bytes, needed_bytes, slab_bytes });
            }
        }
        let mut lineage = [0; LINEAGE];
        lineage[1] = lineage_number();
        let row = |(new, size_bytes): (&NewMember, &u64)| {
            Some(Row { id: Uuid::new_v4(), size_bytes: *size_bytes, state: MemberState::Active, class: new.class })
        };
        let superblock = Superblock {
            pool: Uuid::new_v4(),
            name: name.to_owned(),
            generation: 1,
            lineage,
            number: 0,
            slab_shift,
            copies,
            members: members.iter().zip(&sizes).map(row).collect(),
            areas: areas.clone(),
        };
        let write = |one: &MemberFile, doing, result: std::io::Result<()>| {
            result.map_err(|error| SpaceError::io(doing, &one.path, error))
        };
        opened.iter().try_for_each(clear)?;
        let header = Checkpoint {
            position: Position { sequence: 0, before: 0 },
            changes_bytes: 0,
            changes_checksum: crc32c::crc32c(&[]),
        };
        let member = |(number, (one, new)): (u8, (&MemberFile, &NewMember))| {
            Member::new(number, new.class, one.size_bytes, &one.path, Arc::clone(&one.store))
        };
        let of_pool: Vec<Member> = (0..).zip(opened.iter().zip(members)).map(member).collect();
        for area in &areas {
            let (one, member) = (&opened[usize::from(area.member)], &of_pool[usize::from(area.member)]);
            let open = OpenArea::new(area, slab_shift);
            write(one, "allocate the journal", open.allocate(&*one.store))?;
            write(one, "write the journal", open.write_checkpoint(member, superblock.pool, 0, &header, &[]))?;
        }
        for (one, member) in opened.iter().zip(&of_pool) {
            write(one, "write the superblock", member.write_superblock(&superblock))?;
        }
        Ok(superblock.pool)
    }
}

/// Opens files and devices that are to become members.
fn open_new(members: &[NewMember], options: &PoolCreateOptions) -> Result<Vec<MemberFile>> {
    let opened: Vec<MemberFile> = members
        .iter()
        .map(|member| open_member(&member.path, true, CacheMode::PageCache, &options.files))
        .collect::<Result<_>>()?;
    for (place, one) in opened.iter().enumerate() {
        let identity = one.store.identity();
        if identity.is_some() && opened[..place].iter().any(|other| other.store.identity() == identity) {
            let what = format!("{}: it is named twice", one.path.display());
            return Err(SpaceError::Usage { what });
        }
        if !options.force {
            check_empty(one)?;
        }
    }
    Ok(opened)
}

/// Clears the superblocks of a file, durably: a former pool must not come back half.
fn clear(one: &MemberFile) -> Result<()> {
    let last = last_superblock_at(one.size_bytes).into_iter();
    let mut places = [0].into_iter().chain(last);
    let cleared = places.try_for_each(|at| one.store.write_at(&[0; BLOCK_BYTES], at));
    cleared
        .and_then(|()| one.store.sync_data())
        .map_err(|error| SpaceError::io("clear the superblock", &one.path, error))
}

impl Pool {
    /// Adds files and devices to the pool as members. Areas are moved if the new ones are better. A
    /// file of exactly [`WITNESS_BYTES`] becomes a witness.
    ///
    /// # Errors
    /// As [`Pool::create`].
    pub fn add_members(&self, members: &[NewMember], options: &PoolCreateOptions) -> Result<()> {
        self.require_writable()?;
        let opened = open_new(members, options)?;
        for one in &opened {
            if slabs_of(one.size_bytes, self.slab_shift()) == 0 && one.size_bytes != WITNESS_BYTES {
                let (path, slab_bytes) = (one.path.clone(), self.slab_bytes());
                let needed_bytes = (2 << 20) + slab_bytes;
                return Err(SpaceError::TooSmall { path, found_bytes: one.size_bytes, needed_bytes, slab_bytes });
            }
        }
        opened.iter().try_for_each(clear)?;
        self.add_files(opened.into_iter().zip(members.iter().map(|member| member.class)).collect())?;
        self.settle_areas()
    }
}

/// Refuses a file that has contents where a superblock would be, or in its first MiB.
fn check_empty(one: &MemberFile) -> Result<()> {
    let read = |at: u64, bytes: &mut [u8]| {
        one.store.read_at(bytes, at).map_err(|error| SpaceError::io("look for contents", &one.path, error))
    };
    let refused = |found: String| Err(SpaceError::HasContents { path: one.path.clone(), found });
    if let Ok(superblock) = Member::read_superblock(&*one.store, &one.path) {
        return refused(format!("it is a member of the pool {}", superblock.name));
    }
    let mut bytes = vec![0; one.size_bytes.min(1 << 20) as usize];
    read(0, &mut bytes)?;
    let mut last = [0; BLOCK_BYTES];
    if let Some(at) = last_superblock_at(one.size_bytes) {
        read(at, &mut last)?;
    }
    if diskwright_store::all_zero(&bytes) && diskwright_store::all_zero(&last) {
        return Ok(());
    }
    refused("it has contents".into())
}
