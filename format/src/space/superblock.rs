//! The superblock of a member: which pool it belongs to, which members the pool has, and where its
//! journal lies.
//!
//! ```text
//!   0   magic "DWSPACE1"     8 version (2)           12 CRC-32C, this field as 0
//!   16  GUID of the pool     32 generation (u64)     40 number of this member (u8)
//!   41  slab size as a power of two (u8)             42 number of areas (u8)
//!   43  length of the name (u8)                      44 copies of a new file (u8)
//!   64  areas, 3 of 16 bytes: 0 member (u8)  4 first slab  8 slabs of the journal
//!                             12 slabs of each of the two checkpoints
//!   128 name of the pool, 255 bytes
//!   384 lineage: 16 numbers of 64 bits; generation G has the one at G modulo 16
//!   512 members, 64 of 40 bytes: 0 GUID  16 size in bytes (u64)  24 state (u8)  25 class (u8)
//! ```
//!
//! A pool's generation counts the changes of its superblock. Each generation has a random number of
//! its own, its *lineage*. Two superblocks have a common history if the older one's number is in
//! the lineage of the newer one. If it is not, both were changed without the other: the histories
//! have diverged.

use super::{AREAS_MAX, BLOCK_BYTES, COPIES_MAX, Invalid, MEMBERS_MAX, NAME_BYTES_MAX, Result, SLAB_SHIFTS, SLABS_MAX};
use super::{WITNESS_BYTES, check_block, checksum, field, slabs_of, u32_at, u64_at};
use uuid::Uuid;

const STRUCTURE: &str = "superblock of a space";
const MAGIC: &[u8; 8] = b"DWSPACE1";
const VERSION: u32 = 2;
const CHECKSUM_AT: usize = 12;
const AREAS_AT: usize = 64;
const AREA_BYTES: usize = 16;
const NAME_AT: usize = 128;
const LINEAGE_AT: usize = 384;
/// Number of generations whose numbers a superblock has.
pub const LINEAGE: usize = 16;
const MEMBERS_AT: usize = 512;
const MEMBER_BYTES: usize = 40;

/// How fast a member is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Class {
    /// Solid-state storage.
    Ssd,
    /// A hard disk.
    Hdd,
}

/// What the pool does with a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MemberState {
    /// It is read and written.
    Active,
    /// It failed, or it was missing when the pool was changed: its copies may be old.
    Lost,
    /// It is being drained: it gets no new slabs.
    Leaving,
}

/// A member of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Member {
    /// Identity.
    pub id: Uuid,
    /// Size of its file or device in bytes, as the pool uses it.
    pub size_bytes: u64,
    /// What the pool does with it.
    pub state: MemberState,
    /// How fast it is.
    pub class: Class,
}

impl Member {
    /// Whether it has no slabs, and only counts when more than half of the members are needed.
    pub fn is_witness(&self) -> bool {
        self.size_bytes == WITNESS_BYTES
    }
}

/// Where the journal and the checkpoints lie on a member.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Area {
    /// Number of the member.
    pub member: u8,
    /// First slab.
    pub first_slab: u32,
    /// Number of slabs of the journal, at the beginning.
    pub journal_slabs: u32,
    /// Number of slabs of each of the two checkpoints that follow.
    pub checkpoint_slabs: u32,
}

impl Area {
    /// The slabs of the area; `None` if their numbers are too large.
    pub fn slabs(&self) -> Option<std::ops::Range<u32>> {
        let count = self.checkpoint_slabs.checked_mul(2)?.checked_add(self.journal_slabs)?;
        Some(self.first_slab..self.first_slab.checked_add(count)?)
    }
}

/// A superblock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Superblock {
    /// Identity of the pool.
    pub pool: Uuid,
    /// Name of the pool.
    pub name: String,
    /// Counts the changes of the superblock; at least 1.
    pub generation: u64,
    /// The random numbers of the last generations.
    pub lineage: [u64; LINEAGE],
    /// Number of the member that has this copy.
    pub number: u8,
    /// Size of a slab as a power of two.
    pub slab_shift: u8,
    /// Copies that a new file has if nothing else is said: 1 to 3.
    pub copies: u8,
    /// The members by their numbers; `None` for a number that is not in use.
    pub members: Vec<Option<Member>>,
    /// The areas: 1 to 3.
    pub areas: Vec<Area>,
}

impl Superblock {
    /// The random number of this generation.
    pub fn own_number(&self) -> u64 {
        self.lineage[self.generation as usize % LINEAGE]
    }

    /// Whether this superblock is an earlier state of `newer`, or the same. `None` if it is so old
    /// that this is unknown.
    pub fn is_earlier_than(&self, newer: &Self) -> Option<bool> {
        let age = newer.generation.checked_sub(self.generation);
        match age {
            None => Some(false),
            Some(age) if age >= LINEAGE as u64 => None,
            Some(_) => Some(newer.lineage[self.generation as usize % LINEAGE] == self.own_number()),
        }
    }

    /// Begins the next generation, whose random number is `number`.
    pub fn advance(&mut self, number: u64) {
        self.generation = self.generation.saturating_add(1);
        self.lineage[self.generation as usize % LINEAGE] = number;
    }

    /// The member with a number, if it is in use.
    pub fn member(&self, number: u8) -> Option<&Member> {
        self.members.get(usize::from(number))?.as_ref()
    }

    /// The superblock as a block.
    ///
    /// # Panics
    /// If the name, the members or the areas are too many or too long.
    pub fn to_block(&self) -> [u8; BLOCK_BYTES] {
        assert!(self.members.len() <= MEMBERS_MAX && self.areas.len() <= AREAS_MAX, "too many members or areas");
        let mut block = [0; BLOCK_BYTES];
        let mut put = |at: usize, bytes: &[u8]| block[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, MAGIC);
        put(8, &VERSION.to_le_bytes());
        put(16, &self.pool.to_bytes_le());
        put(32, &self.generation.to_le_bytes());
        put(40, &[self.number, self.slab_shift, self.areas.len() as u8, self.name.len() as u8, self.copies]);
        for (index, area) in self.areas.iter().enumerate() {
            let at = AREAS_AT + index * AREA_BYTES;
            put(at, &[area.member]);
            put(at + 4, &area.first_slab.to_le_bytes());
            put(at + 8, &area.journal_slabs.to_le_bytes());
            put(at + 12, &area.checkpoint_slabs.to_le_bytes());
        }
        assert!(self.name.len() <= NAME_BYTES_MAX, "the name is too long");
        put(NAME_AT, self.name.as_bytes());
        for (index, number) in self.lineage.iter().enumerate() {
            put(LINEAGE_AT + index * 8, &number.to_le_bytes());
        }
        for (index, member) in self.members.iter().enumerate() {
            let Some(member) = member else { continue };
            let at = MEMBERS_AT + index * MEMBER_BYTES;
            put(at, &member.id.to_bytes_le());
            put(at + 16, &member.size_bytes.to_le_bytes());
            let state = match member.state {
                MemberState::Active => 1,
                MemberState::Lost => 2,
                MemberState::Leaving => 3,
            };
            let class = match member.class {
                Class::Ssd => 1,
                Class::Hdd => 2,
            };
            put(at + 24, &[state, class]);
        }
        let sum = checksum(&block, CHECKSUM_AT);
        block[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
        block
    }

    /// Whether a block begins like a superblock, valid or not.
    pub fn looks_like(block: &[u8]) -> bool {
        block.starts_with(MAGIC)
    }

    /// Reads a superblock.
    ///
    /// # Errors
    /// [`Invalid`]: the checksum is wrong, the version is unknown, or the fields contradict each
    /// other.
    pub fn parse(block: &[u8]) -> Result<Self> {
        let invalid = |at: usize, found: String, expected: &str| Invalid::new(STRUCTURE, at as u64, found, expected);
        check_block(STRUCTURE, block, MAGIC, CHECKSUM_AT)?;
        let version = u32_at(block, 8);
        if version != VERSION {
            return Err(invalid(8, format!("version {version}"), "version 2, the only one that this program knows"));
        }
        let [number, slab_shift, areas, name_bytes, copies] = field::<5>(block, 40);
        if !(1..=COPIES_MAX).contains(&usize::from(copies)) {
            return Err(invalid(44, format!("{copies} copies"), "1 to 3"));
        }
        if !SLAB_SHIFTS.contains(&slab_shift) {
            return Err(invalid(41, format!("slabs of 2^{slab_shift} bytes"), "256 KiB to 64 MiB"));
        }
        let name = block.get(NAME_AT..NAME_AT + usize::from(name_bytes)).unwrap_or_default();
        let name = std::str::from_utf8(name).ok().filter(|name| !name.is_empty());
        let name = name.ok_or_else(|| invalid(NAME_AT, "a name that is empty or not UTF-8".into(), "a name"))?;
        let mut members = Vec::with_capacity(MEMBERS_MAX);
        for index in 0..MEMBERS_MAX {
            let at = MEMBERS_AT + index * MEMBER_BYTES;
            let state = match block[at + 24] {
                0 => {
                    members.push(None);
                    continue;
                }
                1 => MemberState::Active,
                2 => MemberState::Lost,
                3 => MemberState::Leaving,
                other => return Err(invalid(at + 24, format!("state {other} of a member"), "1 to 3")),
            };
            let class = match block[at + 25] {
                1 => Class::Ssd,
                2 => Class::Hdd,
                other => return Err(invalid(at + 25, format!("class {other} of a member"), "1 or 2")),
            };
            let id = Uuid::from_bytes_le(field(block, at));
            members.push(Some(Member { id, size_bytes: u64_at(block, at + 16), state, class }));
        }
        while members.last() == Some(&None) {
            members.pop();
        }
        let found = Self {
            pool: Uuid::from_bytes_le(field(block, 16)),
            name: name.to_owned(),
            generation: u64_at(block, 32),
            lineage: std::array::from_fn(|index| u64_at(block, LINEAGE_AT + index * 8)),
            number,
            slab_shift,
            copies,
            members,
            areas: (0..usize::from(areas).min(AREAS_MAX)).map(|index| area_at(block, index)).collect(),
        };
        if found.member(number).is_none() {
            return Err(invalid(40, format!("number {number}, which no member has"), "the number of this member"));
        }
        if !(1..=AREAS_MAX).contains(&usize::from(areas)) {
            return Err(invalid(42, format!("{areas} areas"), "1 to 3"));
        }
        for (index, area) in found.areas.iter().enumerate() {
            let end = area.slabs().map_or(SLABS_MAX, |slabs| slabs.end);
            let fits = found.member(area.member).is_some_and(|member| end <= slabs_of(member.size_bytes, slab_shift));
            let is_new = found.areas[..index].iter().all(|other| other.member != area.member);
            if !fits || !is_new || area.journal_slabs == 0 || area.checkpoint_slabs == 0 {
                let at = AREAS_AT + index * AREA_BYTES;
                return Err(invalid(at, format!("{area:?}"), "an area that lies within a member, one a member"));
            }
        }
        Ok(found)
    }
}

fn area_at(block: &[u8], index: usize) -> Area {
    let at = AREAS_AT + index * AREA_BYTES;
    Area {
        member: block[at],
        first_slab: u32_at(block, at + 4),
        journal_slabs: u32_at(block, at + 8),
        checkpoint_slabs: u32_at(block, at + 12),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Superblock {
        let member = |state, class| Member { id: Uuid::from_u128(77), size_bytes: 100 << 20, state, class };
        Superblock {
            pool: Uuid::from_u128(5),
            name: "vault".into(),
            generation: 40,
            lineage: std::array::from_fn(|index| 1000 + index as u64),
            number: 2,
            slab_shift: 20,
            copies: 2,
            members: vec![
                Some(member(MemberState::Active, Class::Ssd)),
                None,
                Some(member(MemberState::Leaving, Class::Hdd)),
                Some(member(MemberState::Lost, Class::Hdd)),
            ],
            areas: vec![
                Area { member: 0, first_slab: 0, journal_slabs: 1, checkpoint_slabs: 1 },
                Area { member: 2, first_slab: 90, journal_slabs: 2, checkpoint_slabs: 3 },
            ],
        }
    }

    #[test]
    fn a_superblock_is_read_as_it_was_written() {
        let block = sample().to_block();
        assert!(Superblock::looks_like(&block));
        assert_eq!(Superblock::parse(&block).unwrap(), sample());
    }

    #[test]
    fn every_changed_byte_is_found() {
        let good = sample().to_block();
        for at in 0..BLOCK_BYTES {
            let mut block = good;
            block[at] ^= 4;
            assert!(Superblock::parse(&block).is_err(), "byte {at}");
        }
        assert!(Superblock::parse(&good[..4095]).is_err());
    }

    #[test]
    fn fields_that_contradict_each_other_are_refused() {
        type Lie = fn(&mut Superblock);
        let lies: [(&str, Lie); 9] = [
            ("4 copies", |block| block.copies = 4),
            ("number 1, which no member has", |block| block.number = 1),
            ("number 63", |block| block.number = 63),
            ("slabs of 2^17", |block| block.slab_shift = 17),
            ("0 areas", |block| block.areas.clear()),
            ("Area", |block| block.areas[1].first_slab = 98),
            ("Area", |block| block.areas[1].checkpoint_slabs = u32::MAX),
            ("Area", |block| block.areas[1].member = 0),
            ("a name that is empty", |block| block.name.clear()),
        ];
        for (expected, lie) in lies {
            let mut block = sample();
            lie(&mut block);
            let refused = Superblock::parse(&block.to_block()).unwrap_err().to_string();
            assert!(refused.contains(expected), "{refused}");
        }
    }

    #[test]
    fn histories_that_diverge_are_told_apart() {
        let old = sample();
        let (mut one, mut other) = (old.clone(), old.clone());
        one.advance(7);
        other.advance(8);
        assert_eq!((one.generation, one.own_number()), (41, 7));
        assert_eq!(old.is_earlier_than(&one), Some(true));
        assert_eq!(old.is_earlier_than(&old), Some(true));
        assert_eq!(one.is_earlier_than(&old), Some(false));
        assert_eq!(one.is_earlier_than(&other), Some(false));
        (0..20).for_each(|number| other.advance(number));
        assert_eq!(old.is_earlier_than(&other), None, "too old to know");
    }
}
