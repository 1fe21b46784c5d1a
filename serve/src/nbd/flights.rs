//! What a worker's disks are working on, and for whom.
//!
//! A request of a client becomes one request of a block queue, a *flight*, whose number is the tag;
//! or several, one after the other, where its range is cleared step by step: these are a *group*,
//! which ends when nothing is left to clear and the last flight has landed.

use super::handshake::Session;
use diskwright_nbd::wire::{Answering, Command, Framing, PAYLOAD_BYTES_DEFAULT};
use diskwright_store::{IoBuf, Operation, SegmentMemory, Segments};
use std::io;

/// A request of a client.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// The connection, by its number at the worker.
    pub(crate) connection: u32,
    pub(crate) export: u32,
    pub(crate) framing: Framing,
    pub(crate) command: Command,
    pub(crate) cookie: u64,
    pub(crate) offset_bytes: u64,
    pub(crate) len_bytes: u64,
    /// When it was taken, by the worker's clock.
    pub(crate) taken_ns: u64,
}

impl Asked {
    pub(crate) fn of(session: &Session, connection: u32, taken_ns: u64) -> Self {
        Self {
            connection,
            export: session.export as u32,
            framing: session.framing,
            command: Command::READ,
            cookie: 0,
            offset_bytes: 0,
            len_bytes: 0,
            taken_ns,
        }
    }

    /// For replies in chunks.
    pub(crate) fn answering(&self) -> Answering {
        Answering { framing: self.framing, cookie: self.cookie, offset_bytes: self.offset_bytes }
    }

    /// Bytes of payload that it keeps in memory until it is answered.
    pub(crate) fn held_bytes(&self) -> usize {
        match self.command {
            Command::READ | Command::WRITE | Command::CACHE => {
                self.len_bytes.min(PAYLOAD_BYTES_DEFAULT.into()) as usize
            }
            _ => 0,
        }
    }
}

/// What was read: the first buffer, and the others, so that one alone needs no list.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) first: Option<IoBuf>,
    pub(crate) more: Vec<IoBuf>,
}

impl Contents {
    /// The buffers of a request: the one, or those of its segments, which are left empty.
    pub(crate) fn of(buf: Option<IoBuf>, segments: Option<&mut Segments>) -> Self {
        let own = |memory| match memory {
            SegmentMemory::Own(buf) => Some(buf),
            SegmentMemory::Shared(_) | SegmentMemory::Mapped(_) => None,
        };
        let Some(segments) = segments else { return Self { first: buf, more: Vec::new() } };
        let mut bufs = segments.clear().filter_map(|segment| own(segment.memory));
        let first = buf.or_else(|| bufs.next());
        Self { first, more: bufs.collect() }
    }

    pub(crate) fn into_bufs(self) -> impl Iterator<Item = IoBuf> {
        self.first.into_iter().chain(self.more)
    }
}

/// How a request of a client has ended.
#[derive(Debug)]
pub(crate) struct Landed {
    pub(crate) asked: Asked,
    pub(crate) result: io::Result<()>,
    /// What was read, or buffers to be given back.
    pub(crate) contents: Contents,
}

/// One request of a block queue.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Flight {
    pub(crate) asked: Asked,
    /// The group, if it is one step of several.
    pub(crate) group: Option<u32>,
}

/// The rest of a range that is cleared step by step.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Steps {
    pub(crate) operation: Operation,
    pub(crate) next_bytes: u64,
    pub(crate) end_bytes: u64,
    pub(crate) fua: bool,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Group {
    pub(crate) asked: Asked,
    /// Flights, and one more until all have been given.
    pub(crate) pending: u32,
    /// The first error.
    pub(crate) error: Option<io::Error>,
    pub(crate) steps: Steps,
}

/// A table with a free list.
#[derive(Debug)]
pub(crate) struct Table<T> {
    places: Vec<Option<T>>,
    free: Vec<u32>,
}

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { places: Vec::new(), free: Vec::new() }
    }
}

impl<T> Table<T> {
    #[inline]
    pub(crate) fn insert(&mut self, value: T) -> u32 {
        match self.free.pop() {
            Some(index) => {
                self.places[index as usize] = Some(value);
                index
            }
            None => {
                self.places.push(Some(value));
                u32::try_from(self.places.len() - 1).expect("more of them than memory could hold")
            }
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.places.get_mut(index as usize)?.take();
        if value.is_some() {
            self.free.push(index);
        }
        value
    }

    #[inline]
    pub(crate) fn get(&mut self, index: u32) -> Option<&mut T> {
        self.places.get_mut(index as usize)?.as_mut()
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len() - self.free.len()
    }

    /// The numbers that are taken.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u32> + '_ {
        (0u32..).zip(&self.places).filter(|(_, place)| place.is_some()).map(|(index, _)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_used_again_and_not_twice() {
        let mut table = Table::default();
        let (a, b) = (table.insert('a'), table.insert('b'));
        assert_eq!((table.remove(a), table.remove(a), table.len()), (Some('a'), None, 1));
        let c = table.insert('c');
        assert_eq!((c, table.get(c).copied(), table.get(b).copied(), table.get(9)), (a, Some('c'), Some('b'), None));
        assert_eq!(table.numbers().collect::<Vec<_>>(), [a, b]);
    }
}
