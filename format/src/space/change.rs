//! Changes of a pool's map: which files it has, which slabs hold them, and in which state they are.
//!
//! ```text
//!   a change   0 kind (u8)   1 length of what follows (u24)   4 the fields of the kind
//!
//!   1 file     0 file  4 length in bytes (u64)  12 copies (2 bits), columns (6 bits)
//!              13 tier (u8)  14 name
//!   2 length   0 file  4 length in bytes (u64)
//!   3 removed  0 file                          the slabs of the file are free
//!   4 slabs    0 file  4 first index  8 copies (u8)  9 then for each slab: state (u8), its copies
//!   5 state    0 file  4 first index  8 number of slabs  12 state (u8)
//!   6 stale    0 file  4 index  8 copies that are stale (u8, one bit each)
//!   7 unmap    0 file  4 first index  8 number of slabs    the slabs are free
//!   8 lost     0 member (u8)
//!   9 back     0 member (u8)
//!   10 named   0 file  4 name                  the file has this name too
//!   11 unnamed 0 name                          the file has this name no more; another one stays
//!   12 closed                               the pool was closed; what is before is durable
//!   13 extent  0 file  4 first index  8 number of slabs  12 state (u8)  13 copies (u8)
//!              14 the first slab's copies; those of the others follow on the same members
//!   14 tier    0 file  4 tier (u8)             where the slabs of the file belong
//! ```
//!
//! An extent is what kind 4 says of each slab, for unmapped slabs. Only checkpoints have it.
//!
//! Numbers without a type are of 32 bits. A file's slab has an index: the offset in the file
//! divided by the size of a slab. Each change *sets* something, so a change that is applied twice
//! does no harm.
//!
//! Two changes say more than they name. When a member is lost, its copies of all slabs that are
//! *dirty* become stale. When a slab becomes dirty while a member is lost, its copy on that member
//! becomes stale. So nothing needs to be written for the stale copies themselves.

use super::{
    COPIES_MAX, Copy, FILE_SLABS_MAX, Invalid, MEMBERS_MAX, NAME_BYTES_MAX, Result, SLABS_MAX, u32_at, u64_at,
};

const STRUCTURE: &str = "change of a space's map";
/// Length of a change before its fields.
const HEAD_BYTES: usize = 4;
/// Most columns of a file.
pub const COLUMNS_MAX: u8 = 63;
/// Longest change, in bytes.
const CHANGE_BYTES_MAX: usize = (1 << 24) - 1;

/// What is known about the copies of a slab.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash)]
pub enum SlabState {
    /// The copies may differ: a write may be under way, or may not be durable on all of them.
    Dirty,
    /// All copies that are not stale are equal and durable.
    Clean,
    /// The same, and each of them has a record of its checksums.
    Sealed,
}

impl SlabState {
    fn to_byte(self) -> u8 {
        match self {
            Self::Dirty => 1,
            Self::Clean => 2,
            Self::Sealed => 3,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Dirty),
            2 => Some(Self::Clean),
            3 => Some(Self::Sealed),
            _ => None,
        }
    }
}

/// Which tier a file's slabs belong to.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq, Hash, Default)]
pub enum Tier {
    /// The pool chooses.
    #[default]
    Any,
    /// The fast one.
    Fast,
    /// The slow one.
    Slow,
}

impl Tier {
    /// The tier as a number.
    pub fn to_byte(self) -> u8 {
        match self {
            Self::Any => 0,
            Self::Fast => 1,
            Self::Slow => 2,
        }
    }

    /// The tier of [`Tier::to_byte`].
    pub fn from_byte(byte: u8) -> Option<Self> {
        [Self::Any, Self::Fast, Self::Slow].get(usize::from(byte)).copied()
    }
}

/// A change; see the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change<'a> {
    /// A file is created, or its properties change.
    File {
        /// Number of the file.
        file: u32,
        /// Length in bytes.
        len_bytes: u64,
        /// Copies of each new slab: 1 to 3.
        copies: u8,
        /// How many slabs that follow one another lie on different members: 1 to
        /// [`COLUMNS_MAX`].
        columns: u8,
        /// Tier of its slabs.
        tier: Tier,
        /// Its name.
        name: &'a str,
    },
    /// A file has another length.
    Length {
        /// Number of the file.
        file: u32,
        /// Length in bytes.
        len_bytes: u64,
    },
    /// A file is gone.
    Removed {
        /// Number of the file.
        file: u32,
    },
    /// Slabs are mapped, or moved.
    Slabs {
        /// Number of the file.
        file: u32,
        /// Index of the first slab.
        first: u32,
        /// The slabs.
        slabs: SlabRun<'a>,
    },
    /// Mapped slabs have another state.
    State {
        /// Number of the file.
        file: u32,
        /// Index of the first slab.
        first: u32,
        /// Number of slabs. Those that are not mapped are left alone.
        count: u32,
        /// The state.
        state: SlabState,
    },
    /// Copies of a slab are stale, and the others are not.
    Stale {
        /// Number of the file.
        file: u32,
        /// Index of the slab.
        index: u32,
        /// One bit for each copy.
        mask: u8,
    },
    /// Slabs are unmapped: they read as zeros.
    Unmap {
        /// Number of the file.
        file: u32,
        /// Index of the first slab.
        first: u32,
        /// Number of slabs.
        count: u32,
    },
    /// A file has another name too.
    Named {
        /// Number of the file.
        file: u32,
        /// The name.
        name: &'a str,
    },
    /// A name of a file that has others is gone.
    Unnamed {
        /// The name.
        name: &'a str,
    },
    /// A member is lost.
    Lost {
        /// Number of the member.
        member: u8,
    },
    /// A lost member is used again.
    Back {
        /// Number of the member.
        member: u8,
    },
    /// The pool was closed, if this is the last change.
    Closed,
    /// The slabs of a file belong to another tier.
    Tier {
        /// Number of the file.
        file: u32,
        /// The tier.
        tier: Tier,
    },
    /// Unmapped slabs are mapped to copies that follow one another on each member.
    Extent {
        /// Number of the file.
        file: u32,
        /// Index of the first slab.
        first: u32,
        /// Number of slabs.
        count: u32,
        /// The state of all.
        state: SlabState,
        /// Copies of the first slab as [`Copy::to_bits`], of which 0 is none.
        copies: [u32; COPIES_MAX],
    },
}

/// Slabs that follow one another in a file: for each one the state and the copies.
#[derive(Debug, Clone, std::marker::Copy, PartialEq, Eq)]
pub struct SlabRun<'a> {
    copies: u8,
    bytes: &'a [u8],
}

impl<'a> SlabRun<'a> {
    /// Length of a slab with `copies` copies, in bytes.
    pub fn slab_bytes(copies: u8) -> usize {
        1 + 4 * usize::from(copies)
    }

    /// Appends a slab to `bytes`, which [`SlabRun::new`] takes.
    pub fn put(bytes: &mut Vec<u8>, state: SlabState, copies: impl IntoIterator<Item = Copy>) {
        bytes.push(state.to_byte());
        copies.into_iter().for_each(|copy| bytes.extend_from_slice(&copy.to_bits().to_le_bytes()));
    }

    /// The slabs that [`SlabRun::put`] has appended, each with `copies` copies.
    pub fn new(copies: u8, bytes: &'a [u8]) -> Self {
        Self { copies, bytes }
    }

    /// Number of copies of each slab.
    pub fn copies(&self) -> u8 {
        self.copies
    }

    /// Number of slabs.
    pub fn count(&self) -> u32 {
        (self.bytes.len() / Self::slab_bytes(self.copies)) as u32
    }

    /// The state of each slab, and its copies as [`Copy::to_bits`], of which 0 is none.
    pub fn iter(&self) -> impl Iterator<Item = (SlabState, [u32; COPIES_MAX])> + 'a {
        let copies = usize::from(self.copies);
        self.bytes.chunks_exact(Self::slab_bytes(self.copies)).map(move |slab| {
            let copy = |index: usize| if index < copies { u32_at(slab, 1 + 4 * index) } else { 0 };
            (SlabState::from_byte(slab[0]).unwrap_or(SlabState::Dirty), std::array::from_fn(copy))
        })
    }
}

impl Change<'_> {
    /// Appends the change to `out`.
    pub fn put(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; HEAD_BYTES]);
        let put = |out: &mut Vec<u8>, numbers: &[u32]| {
            numbers.iter().for_each(|number| out.extend_from_slice(&number.to_le_bytes()));
        };
        let kind = match self {
            Self::File { file, len_bytes, copies, columns, tier, name } => {
                put(out, &[*file]);
                out.extend_from_slice(&len_bytes.to_le_bytes());
                out.extend_from_slice(&[copies & 3 | columns << 2, tier.to_byte()]);
                out.extend_from_slice(name.as_bytes());
                1
            }
            Self::Length { file, len_bytes } => {
                put(out, &[*file]);
                out.extend_from_slice(&len_bytes.to_le_bytes());
                2
            }
            Self::Removed { file } => {
                put(out, &[*file]);
                3
            }
            Self::Slabs { file, first, slabs } => {
                put(out, &[*file, *first]);
                out.push(slabs.copies);
                out.extend_from_slice(slabs.bytes);
                4
            }
            Self::State { file, first, count, state } => {
                put(out, &[*file, *first, *count]);
                out.push(state.to_byte());
                5
            }
            Self::Stale { file, index, mask } => {
                put(out, &[*file, *index]);
                out.push(*mask);
                6
            }
            Self::Unmap { file, first, count } => {
                put(out, &[*file, *first, *count]);
                7
            }
            Self::Named { file, name } => {
                put(out, &[*file]);
                out.extend_from_slice(name.as_bytes());
                10
            }
            Self::Unnamed { name } => {
                out.extend_from_slice(name.as_bytes());
                11
            }
            Self::Lost { member } => {
                out.push(*member);
                8
            }
            Self::Back { member } => {
                out.push(*member);
                9
            }
            Self::Closed => 12,
            Self::Tier { file, tier } => {
                put(out, &[*file]);
                out.push(tier.to_byte());
                14
            }
            Self::Extent { file, first, count, state, copies } => {
                put(out, &[*file, *first, *count]);
                let copies = copies.iter().take_while(|&&copy| copy != 0);
                out.extend_from_slice(&[state.to_byte(), copies.clone().count() as u8]);
                copies.for_each(|copy| out.extend_from_slice(&copy.to_le_bytes()));
                13
            }
        };
        let len = (out.len() - start - HEAD_BYTES).min(CHANGE_BYTES_MAX) as u32;
        out[start..start + HEAD_BYTES].copy_from_slice(&(kind | len << 8).to_le_bytes());
    }
}

/// The changes in `bytes`, in order. After an error nothing follows.
#[derive(Debug, Clone)]
pub struct Changes<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Changes<'a> {
    /// The changes that [`Change::put`] has appended to `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }
}

impl<'a> Iterator for Changes<'a> {
    type Item = Result<Change<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.bytes.len() {
            return None;
        }
        let at = self.at;
        let found = parse(&self.bytes[at..]);
        self.at = found.as_ref().map_or(self.bytes.len(), |(_, len)| at + len);
        Some(
            found
                .map(|(change, _)| change)
                .map_err(|error| Invalid { offset_bytes: error.offset_bytes.saturating_add(at as u64), ..error }),
        )
    }
}

fn invalid<T>(at: usize, found: String, expected: &str) -> Result<T> {
    Err(Invalid::new(STRUCTURE, at as u64, found, expected))
}

/// The first change in `bytes`, and its length.
fn parse(bytes: &[u8]) -> Result<(Change<'_>, usize)> {
    let head = u32_at(bytes, 0);
    let (kind, len) = (head & 0xff, (head >> 8) as usize);
    let Some(body) = bytes.get(HEAD_BYTES..HEAD_BYTES + len).filter(|_| bytes.len() >= HEAD_BYTES) else {
        return invalid(1, format!("{len} bytes of a change"), "no more than the block has");
    };
    let expects = |wanted: bool| {
        if wanted { Ok(()) } else { invalid(1, format!("{len} bytes of kind {kind}"), "the length of this kind") }
    };
    let (file, second, third) = (u32_at(body, 0), u32_at(body, 4), u32_at(body, 8));
    let is_range = |first: u32, count: u32| first.checked_add(count).is_some_and(|end| end <= FILE_SLABS_MAX);
    let member = |body: &[u8]| match *body {
        [member] if usize::from(member) < MEMBERS_MAX => Ok(member),
        _ => invalid(4, "a member without a number".into(), "a number below 64"),
    };
    let state = |at: usize| match body.get(at).and_then(|&byte| SlabState::from_byte(byte)) {
        Some(state) => Ok(state),
        None => invalid(4 + at, "an unknown state of a slab".into(), "1 to 3"),
    };
    let tier = |at: usize| match body.get(at).and_then(|&byte| Tier::from_byte(byte)) {
        Some(tier) => Ok(tier),
        None => invalid(4 + at, "an unknown tier".into(), "0 to 2"),
    };
    let name = |at: usize| match body.get(at..).map(std::str::from_utf8) {
        Some(Ok(name)) if !name.is_empty() && name.len() <= NAME_BYTES_MAX => Ok(name),
        _ => invalid(4 + at, "a name that is empty, too long or not UTF-8".into(), "a name"),
    };
    let change = match kind {
        1 => {
            expects(len > 14)?;
            // Before there were columns these bits were 0.
            let (copies, columns, name) = (body[12] & 3, (body[12] >> 2).max(1), name(14)?);
            let tier = tier(13)?;
            if !(1..=COPIES_MAX).contains(&usize::from(copies)) {
                return invalid(16, format!("a file with {copies} copies"), "1 to 3");
            }
            Change::File { file, len_bytes: u64_at(body, 4), copies, columns, tier, name }
        }
        2 => {
            expects(len == 12)?;
            Change::Length { file, len_bytes: u64_at(body, 4) }
        }
        3 => {
            expects(len == 4)?;
            Change::Removed { file }
        }
        4 => {
            expects(len >= 9 && (1..=COPIES_MAX).contains(&usize::from(body[8])))?;
            let slabs = SlabRun::new(body[8], &body[9..]);
            let slab_bytes = SlabRun::slab_bytes(slabs.copies);
            expects(slabs.bytes.len().is_multiple_of(slab_bytes) && is_range(second, slabs.count()))?;
            for (index, slab) in slabs.bytes.chunks_exact(slab_bytes).enumerate() {
                let has_copies = slab[1..].chunks_exact(4).all(|copy| Copy::from_bits(u32_at(copy, 0)).is_some());
                if SlabState::from_byte(slab[0]).is_none() || !has_copies {
                    return invalid(13 + index * slab_bytes, "a slab without state or copies".into(), "both");
                }
            }
            Change::Slabs { file, first: second, slabs }
        }
        5 => {
            expects(len == 13 && is_range(second, third))?;
            Change::State { file, first: second, count: third, state: state(12)? }
        }
        6 => {
            expects(len == 9 && is_range(second, 1))?;
            Change::Stale { file, index: second, mask: body[8] & 7 }
        }
        7 => {
            expects(len == 12 && is_range(second, third))?;
            Change::Unmap { file, first: second, count: third }
        }
        8 => Change::Lost { member: member(body)? },
        9 => Change::Back { member: member(body)? },
        10 => {
            expects(len > 4)?;
            Change::Named { file, name: name(4)? }
        }
        11 => Change::Unnamed { name: name(0)? },
        12 => {
            expects(len == 0)?;
            Change::Closed
        }
        13 => {
            let copies = usize::from(body.get(13).copied().unwrap_or(0));
            let fits = (1..=COPIES_MAX).contains(&copies) && len == 14 + 4 * copies;
            expects(fits && third > 0 && is_range(second, third))?;
            let copy = |place: usize| if place < copies { u32_at(body, 14 + 4 * place) } else { 0 };
            let copies: [u32; COPIES_MAX] = std::array::from_fn(copy);
            for bits in copies.into_iter().take_while(|&bits| bits != 0) {
                let last = Copy::from_bits(bits).and_then(|first| first.slab.checked_add(third - 1));
                if last.is_none_or(|last| last >= SLABS_MAX) {
                    return invalid(18, "an extent beyond the last slab".into(), "slabs of a member");
                }
            }
            if copies[0] == 0 {
                return invalid(18, "an extent without a copy".into(), "1 to 3 copies");
            }
            Change::Extent { file, first: second, count: third, state: state(12)?, copies }
        }
        14 => {
            expects(len == 5)?;
            Change::Tier { file, tier: tier(4)? }
        }
        other => return invalid(0, format!("kind {other} of a change"), "1 to 14"),
    };
    Ok((change, HEAD_BYTES + len))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(copies: u8) -> Vec<u8> {
        let mut bytes = Vec::new();
        for slab in 0..3 {
            let copies = (0..copies).map(|member| Copy { member, slab: slab * 10 + u32::from(member) });
            SlabRun::put(&mut bytes, if slab == 1 { SlabState::Clean } else { SlabState::Dirty }, copies);
        }
        bytes
    }

    #[test]
    fn changes_are_read_as_they_were_written() {
        let (one, three) = (run(1), run(3));
        let changes = [
            Change::File { file: 3, len_bytes: 1 << 40, copies: 2, columns: 63, tier: Tier::Fast, name: "a disk.vhdx" },
            Change::Length { file: 3, len_bytes: 77 },
            Change::Removed { file: u32::MAX },
            Change::Tier { file: 3, tier: Tier::Slow },
            Change::Extent { file: 7, first: 5, count: 1000, state: SlabState::Sealed, copies: [1 << 26 | 9, 8, 0] },
            Change::Extent { file: 7, first: 5, count: 1, state: SlabState::Dirty, copies: [9, 0, 0] },
            Change::Slabs { file: 3, first: 9, slabs: SlabRun::new(1, &one) },
            Change::Slabs { file: 4, first: 0, slabs: SlabRun::new(3, &three) },
            Change::State { file: 3, first: 1, count: 64, state: SlabState::Clean },
            Change::Stale { file: 3, index: 6, mask: 0b101 },
            Change::Unmap { file: 1, first: 2, count: 3 },
            Change::Lost { member: 63 },
            Change::Back { member: 0 },
            Change::Named { file: 3, name: "another" },
            Change::Unnamed { name: "a disk.vhdx" },
            Change::Closed,
        ];
        let mut bytes = Vec::new();
        changes.iter().for_each(|change| change.put(&mut bytes));
        let found: Vec<_> = Changes::new(&bytes).collect::<Result<_>>().unwrap();
        assert_eq!(found, changes);
        let slabs = SlabRun::new(3, &three);
        assert_eq!(slabs.count(), 3);
        let second = slabs.iter().nth(1).unwrap();
        let copies = [0, 1, 2].map(|member| Copy { member, slab: 10 + u32::from(member) }.to_bits());
        assert_eq!(second, (SlabState::Clean, copies));
        assert_eq!(SlabRun::new(1, &one).iter().next().unwrap().1[1..], [0, 0]);
    }

    #[test]
    fn a_damaged_change_ends_the_list() {
        let mut bytes = Vec::new();
        Change::Lost { member: 1 }.put(&mut bytes);
        let good = bytes.len();
        Change::Lost { member: 64 }.put(&mut bytes);
        Change::Lost { member: 2 }.put(&mut bytes);
        let found: Vec<_> = Changes::new(&bytes).collect();
        assert_eq!(found.len(), 2);
        assert_eq!(found[1].as_ref().unwrap_err().offset_bytes, good as u64 + 4);
    }

    proptest! {
        #[test]
        fn hostile_bytes_end_in_changes_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut again = Vec::new();
            for change in Changes::new(&bytes) {
                let Ok(change) = change else { break };
                if let Change::Slabs { slabs, .. } = &change {
                    prop_assert_eq!(slabs.iter().count(), slabs.count() as usize);
                }
                change.put(&mut again);
            }
            prop_assert!(again.len() <= bytes.len());
        }
    }
}
