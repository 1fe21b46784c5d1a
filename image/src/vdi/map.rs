//! The block map of a writable VDI: its entries in memory, reservations and commits.
//!
//! ```text
//!   read     drops ─▶ file read without the mutex ─▶ mutex: drops unchanged? ─▶ memory wins
//!   reserve  entry in memory ─▶ its space, or a new one
//!   commit   the entry in memory changes; the space it had is quarantined
//! ```
//!
//! What is not in memory is current in the file. So bytes from the file are stale only if a page
//! was changed, written and dropped between the two steps of a read, which changes
//! [`State::drops`]. Then the read is repeated.
//!
//! A free entry reads the parent's data, or zeros without a parent. In a child a block of zeros
//! needs an entry of its own. The state mutex guards all of this.

use super::{
    corrupt,
    write::{PAGE_ENTRIES, Prerequisite, State, Writing},
};
use crate::{BlockState, Commit, ImageError, Reservation, Result};
use diskwright_format::vdi::{VdiEntry, VdiKind};

/// The fewest pages that are kept in memory.
const PAGES_MIN: u64 = 64;

/// An entry of the map, as a place in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    Absent,
    Zero,
    /// The block's first byte in the file.
    At(u64),
    /// The number of a space that lies beyond the end of the file.
    Bad(u32),
}

impl Entry {
    pub fn state(self) -> BlockState {
        match self {
            Self::Absent => BlockState::Absent,
            Self::Zero => BlockState::Zero,
            Self::At(offset_bytes) => BlockState::data(offset_bytes),
            Self::Bad(_) => BlockState::Damaged,
        }
    }
}

impl Writing {
    pub(super) fn decode(&self, file_bytes: u64, word: u32) -> Entry {
        match VdiEntry::parse(word) {
            VdiEntry::Free => Entry::Absent,
            VdiEntry::Zero => Entry::Zero,
            VdiEntry::Space(space) => match self.layout.payload_bytes(space) {
                at if at < file_bytes => Entry::At(at),
                _ => Entry::Bad(space),
            },
        }
    }

    /// The number of the space at this offset.
    pub(super) fn number_of(&self, offset_bytes: u64) -> u64 {
        offset_bytes.saturating_sub(self.layout.data_bytes()) / self.space_bytes()
    }

    /// The entry for a block at this offset.
    pub(super) fn word_of(&self, block: u64, offset_bytes: u64) -> Result<u32> {
        let number = u32::try_from(self.number_of(offset_bytes)).ok();
        let number = number.filter(|&number| VdiEntry::parse(number) == VdiEntry::Space(number));
        number.ok_or_else(|| self.misuse(block, "lies so far in the file that no entry can name it"))
    }

    /// Number of entries of a page.
    fn len_of(&self, state: &State, page: u64) -> usize {
        state.entries.saturating_sub(page * PAGE_ENTRIES).min(PAGE_ENTRIES) as usize
    }

    /// Reads entries of one page from memory, else from the file.
    pub fn entries(&self, first: u64, out: &mut [Entry]) -> Result<()> {
        let (page, start) = (first / PAGE_ENTRIES, (first % PAGE_ENTRIES) as usize);
        let mut read: Option<(u64, Vec<u32>)> = None;
        loop {
            let drops = {
                let state = self.lock();
                let from_memory = state.pages.get(&page).and_then(|words| words.get(start..));
                let from_file = read.as_ref().filter(|(drops, _)| *drops == state.drops).map(|(_, words)| &words[..]);
                if let Some(words) = from_memory.or(from_file) {
                    for (out, &word) in out.iter_mut().zip(words) {
                        *out = self.decode(state.file_bytes, word);
                    }
                    return Ok(());
                }
                state.drops
            };
            read = Some((drops, self.layout.read_words(&*self.store, first, out.len())?));
        }
    }

    /// The entry of a block, without its reservation. `None`: its page is not in memory.
    pub(super) fn entry(&self, state: &State, block: u64) -> Option<Entry> {
        let words = state.pages.get(&(block / PAGE_ENTRIES))?;
        words.get((block % PAGE_ENTRIES) as usize).map(|&word| self.decode(state.file_bytes, word))
    }

    /// Changes an entry, whose page is in memory.
    pub(super) fn set(&self, state: &mut State, block: u64, word: u32) {
        let page = block / PAGE_ENTRIES;
        let Some(entry) = state.pages.get_mut(&page).and_then(|words| words.get_mut((block % PAGE_ENTRIES) as usize))
        else {
            return;
        };
        let has_space = |word| u64::from(matches!(VdiEntry::parse(word), VdiEntry::Space(_)));
        state.mapped = state.mapped + has_space(word) - has_space(*entry);
        *entry = word;
        state.dirty.insert(page);
    }

    /// Reads a page into memory.
    pub(super) fn load(&self, page: u64) -> Result<()> {
        loop {
            let (drops, len) = {
                let state = self.lock();
                if state.pages.contains_key(&page) {
                    return Ok(());
                }
                (state.drops, self.len_of(&state, page))
            };
            let words = self.layout.read_words(&*self.store, page * PAGE_ENTRIES, len)?;
            let mut state = self.lock();
            if state.drops == drops && self.len_of(&state, page) == len {
                remember(&mut state, page, words.into());
                return Ok(());
            }
        }
    }

    /// Quarantines the space of a block.
    pub(super) fn free(&self, state: &mut State, offset_bytes: u64) {
        let len_bytes = self.space_bytes();
        if let Some(space) = &mut state.space {
            space.quarantine(offset_bytes, len_bytes);
        }
    }

    /// The error of an entry that leads out of the file.
    pub(super) fn damage_of(&self, block: u64, space: u32, file_bytes: u64) -> ImageError {
        corrupt(&*self.store, self.layout.entry_at(block), self.layout.outside(space, file_bytes))
    }

    fn check_block(&self, state: &State, block: u64) -> Result<()> {
        if block < state.size_bytes.div_ceil(self.layout.header.block_bytes.into()) {
            return Ok(());
        }
        Err(self.misuse(block, "lies beyond the end of the disk"))
    }

    pub(super) fn reserve_block(&self, state: &mut State, block: u64) -> Result<Option<Reservation>> {
        self.check_block(state, block)?;
        let reservation = |offset_bytes| Some(Reservation { store: 0, offset_bytes, init: None });
        if let Some(&offset_bytes) = state.reserved.get(&block) {
            return Ok(reservation(offset_bytes));
        }
        match self.entry(state, block) {
            None => return Ok(None),
            Some(Entry::At(offset_bytes)) => return Ok(reservation(offset_bytes)),
            Some(Entry::Bad(space)) => return Err(self.damage_of(block, space, state.file_bytes)),
            Some(Entry::Absent | Entry::Zero) => {}
        }
        let Some(offset_bytes) = self.take_space(state, block)? else {
            state.needs.note(block, Prerequisite::Space);
            return Ok(None);
        };
        state.reserved.insert(block, offset_bytes);
        Ok(reservation(offset_bytes))
    }

    /// Takes zeroed space that the header counts; `None` if none is ready.
    pub(super) fn take_space(&self, state: &mut State, block: u64) -> Result<Option<u64>> {
        let announced = state.announced;
        let Some(space) = &mut state.space else { return Ok(None) };
        let next = space.next_offset_bytes(self.space_bytes()).map_err(self.io("grow the file", 0))?;
        // Checked before the space is taken, as it would be lost otherwise.
        self.word_of(block, next)?;
        if self.number_of(next) >= announced {
            return Ok(None);
        }
        space.take(self.space_bytes()).map_err(self.io("grow the file", next))
    }

    /// Changes an entry in memory. `None`: more must be in memory first.
    pub(super) fn commit_block(&self, state: &mut State, block: u64, change: Commit) -> Result<Option<BlockState>> {
        self.check_block(state, block)?;
        let Some(entry) = self.entry(state, block) else { return Ok(None) };
        let old = if let Entry::At(at) = entry { Some(at) } else { None };
        match change {
            Commit::Whole | Commit::Sectors { .. } => {
                let Some(&at) = state.reserved.get(&block) else {
                    let at = old.ok_or_else(|| self.misuse(block, "has no space: reserve it first"))?;
                    return Ok(Some(BlockState::data(at)));
                };
                let word = self.word_of(block, at)?;
                state.reserved.remove(&block);
                self.set(state, block, word);
                Ok(Some(BlockState::data(at)))
            }
            Commit::Moved => {
                let (Some(from), Some(&to)) = (old, state.moving.get(&block)) else {
                    return Err(self.misuse(block, "is committed as moved without a place to move to"));
                };
                let word = self.word_of(block, to)?;
                state.moving.remove(&block);
                self.set(state, block, word);
                self.free(state, from);
                Ok(Some(BlockState::data(to)))
            }
            Commit::Zero | Commit::Discard | Commit::Absent if self.is_fixed() => {
                Err(self.unsupported("a block without space in a fixed VDI", "write zeros over the range instead"))
            }
            Commit::Zero | Commit::Discard | Commit::Absent => {
                let hides = change != Commit::Absent && self.layout.header.kind == VdiKind::Differencing;
                let becomes = if hides { Entry::Zero } else { Entry::Absent };
                if entry != becomes {
                    if state.space.is_none() {
                        state.needs.note(block, Prerequisite::Survey);
                        return Ok(None);
                    }
                    self.set(state, block, if hides { VdiEntry::Zero } else { VdiEntry::Free }.word());
                    old.iter().for_each(|&at| self.free(state, at));
                }
                if let Some(at) = state.reserved.remove(&block) {
                    self.free(state, at);
                }
                Ok(Some(becomes.state()))
            }
        }
    }
}

/// Keeps a page in memory. Drops the clean ones if there are too many.
fn remember(state: &mut State, page: u64, words: Box<[u32]>) {
    let most = (state.limit_bytes / 2 / (PAGE_ENTRIES * 4)).max(PAGES_MIN);
    if state.pages.len() as u64 >= most && !state.pinned {
        let before = state.pages.len();
        let dirty = &state.dirty;
        state.pages.retain(|page, _| dirty.contains(page));
        state.drops += u64::from(state.pages.len() < before);
    }
    state.pages.entry(page).or_insert(words);
}
