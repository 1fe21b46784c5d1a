//! The guest's memory: which mapping holds an address.
//!
//! ```text
//!   SET_MEM_TABLE ─▶ regions: guest address ─┬─▶ MappedMemory, offset
//!                    the front-end's address ┘
//! ```
//!
//! Descriptors hold guest addresses. The addresses of a ring are those of the front-end's own
//! mapping. Both come from the other side, so a look-up is checked, and `None` means outside.
//!
//! A payload may cross from one region into the next, and then has two segments. A ring lies within
//! one region.

use diskwright_store::{FileRange, MappedMemory, Segments};
use std::{io, os::fd::BorrowedFd, sync::Arc};

/// Maximum number of regions in a memory table: that of descriptors in a message.
pub(crate) const REGIONS_MAX: usize = 32;

/// A region as the front-end describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RegionInfo {
    pub(crate) guest_address: u64,
    pub(crate) len_bytes: u64,
    /// Its address in the front-end's process.
    pub(crate) user_address: u64,
    /// Where it begins in the memfd.
    pub(crate) file_offset_bytes: u64,
}

#[derive(Debug)]
struct Region {
    info: RegionInfo,
    memory: Arc<MappedMemory>,
}

/// A range of the guest's memory that lies within one mapping.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub(crate) memory: Arc<MappedMemory>,
    /// Where it begins in the mapping.
    pub(crate) at: usize,
}

/// The regions, in the order of their guest addresses.
#[derive(Debug, Default)]
pub(crate) struct GuestMemory(Vec<Region>);

impl GuestMemory {
    /// Maps the regions.
    ///
    /// # Errors
    /// Regions that overlap or reach beyond the last address; see also [`MappedMemory::of_memfd`].
    pub(crate) fn map<'a>(regions: impl IntoIterator<Item = (RegionInfo, BorrowedFd<'a>)>) -> io::Result<Self> {
        let mut mapped = Vec::new();
        for (info, fd) in regions {
            let ends =
                info.guest_address.checked_add(info.len_bytes).zip(info.user_address.checked_add(info.len_bytes));
            if ends.is_none() {
                return Err(invalid(format!("a region of {} bytes ends beyond the last address", info.len_bytes)));
            }
            let range = FileRange { offset_bytes: info.file_offset_bytes, len_bytes: info.len_bytes };
            mapped.push(Region { info, memory: MappedMemory::of_memfd(fd, range, true)? });
        }
        mapped.sort_unstable_by_key(|region| region.info.guest_address);
        for pair in mapped.windows(2) {
            // The end was checked above.
            if pair[0].info.guest_address + pair[0].info.len_bytes > pair[1].info.guest_address {
                return Err(invalid(format!("two regions share the address {:#x}", pair[1].info.guest_address)));
            }
        }
        Ok(Self(mapped))
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The mapping that holds a guest address, where it lies there, and the bytes from there to the
    /// end of the region.
    #[inline]
    fn find(&self, address: u64) -> Option<(&Arc<MappedMemory>, usize, u64)> {
        let after = self.0.partition_point(|region| region.info.guest_address <= address);
        let region = self.0.get(after.checked_sub(1)?)?;
        let within = address - region.info.guest_address;
        let left = region.info.len_bytes.checked_sub(within).filter(|&left| left > 0)?;
        // A mapping is no longer than a `usize` counts.
        Some((&region.memory, within as usize, left))
    }

    /// A range at an address of the front-end.
    pub(crate) fn place_of_user(&self, address: u64, len_bytes: u64) -> Option<Place> {
        self.0.iter().find_map(|Region { info, memory }| {
            let within = address.checked_sub(info.user_address)?;
            let end = within.checked_add(len_bytes)?;
            (end <= info.len_bytes).then(|| Place { memory: Arc::clone(memory), at: within as usize })
        })
    }

    /// The byte at a guest address.
    pub(crate) fn byte(&self, address: u64) -> Option<Place> {
        self.find(address).map(|(memory, at, _)| Place { memory: Arc::clone(memory), at })
    }

    /// Copies the bytes at a guest address. `None` if they are not all within the memory.
    pub(crate) fn copy_out(&self, address: u64, out: &mut [u8]) -> Option<()> {
        let mut done = 0;
        while done < out.len() {
            let (memory, at, left) = self.find(address.checked_add(done as u64)?)?;
            let now = (out.len() - done).min(usize::try_from(left).unwrap_or(usize::MAX));
            memory.copy_out(at, &mut out[done..done + now]).ok()?;
            done += now;
        }
        Some(())
    }

    /// Appends a range at a guest address to a payload.
    ///
    /// # Errors
    /// The range is not within the memory, or the payload has too many pieces.
    pub(crate) fn append(&self, mut address: u64, len_bytes: u64, to: &mut Segments) -> io::Result<()> {
        let mut rest = len_bytes;
        while rest > 0 {
            let outside = || invalid(format!("{len_bytes} bytes at {address:#x} are not all in the guest's memory"));
            let (memory, at, left) = self.find(address).ok_or_else(outside)?;
            let now = rest.min(left);
            to.push(Arc::clone(memory), at..at + now as usize)?;
            rest -= now;
            address = address.checked_add(now).filter(|_| rest > 0).unwrap_or(address);
        }
        Ok(())
    }
}

fn invalid(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, what)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::MemfdFlags;
    use std::os::fd::{AsFd, OwnedFd};

    const PAGE: u64 = 4096;

    fn memfd() -> OwnedFd {
        let fd = rustix::fs::memfd_create("guest", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::ftruncate(&fd, 8 * PAGE).unwrap();
        fd
    }

    fn region(guest_address: u64, pages: u64, file_page: u64) -> RegionInfo {
        let user_address = guest_address.wrapping_add(1 << 40);
        RegionInfo { guest_address, len_bytes: pages * PAGE, user_address, file_offset_bytes: file_page * PAGE }
    }

    /// Two regions side by side whose files are not, and one apart.
    fn memory(fd: &OwnedFd) -> GuestMemory {
        let regions = [region(0x10000 + 2 * PAGE, 2, 0), region(0x10000, 2, 4), region(0x90000, 1, 7)];
        GuestMemory::map(regions.map(|info| (info, fd.as_fd()))).unwrap()
    }

    #[test]
    fn a_payload_crosses_regions_and_nothing_else() {
        let fd = memfd();
        let memory = memory(&fd);
        rustix::io::pwrite(&fd, &[1; 8], 6 * PAGE - 8).unwrap();
        rustix::io::pwrite(&fd, &[2; 8], 0).unwrap();
        let mut out = [0; 16];
        memory.copy_out(0x10000 + 2 * PAGE - 8, &mut out).unwrap();
        assert_eq!(out, [1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2, 2, 2]);
        let mut segments = Segments::new();
        memory.append(0x10000, 4 * PAGE, &mut segments).unwrap();
        assert_eq!((segments.count(), segments.len()), (2, 4 * PAGE as usize));
        for (address, len) in [(0, 1), (0x10000, 4 * PAGE + 1), (0x10000 + 4 * PAGE, 1), (u64::MAX, 2), (0x90fff, 2)] {
            assert!(memory.append(address, len, &mut Segments::new()).is_err(), "{address:#x}");
            assert!(memory.copy_out(address, &mut vec![0; len as usize]).is_none(), "{address:#x}");
        }
        assert!(memory.byte(0x90fff).is_some() && memory.byte(0x91000).is_none());
    }

    #[test]
    fn a_ring_lies_within_one_region_of_the_front_end() {
        let fd = memfd();
        let memory = memory(&fd);
        let user = 1 << 40;
        assert_eq!(memory.place_of_user(user + 0x10000 + PAGE, PAGE).unwrap().at, PAGE as usize);
        assert!(memory.place_of_user(user + 0x10000 + PAGE, PAGE + 1).is_none());
        assert!(memory.place_of_user(0x10000, 1).is_none() && memory.place_of_user(user + 0x90000, u64::MAX).is_none());
    }

    #[test]
    fn hostile_tables_are_refused() {
        let fd = memfd();
        let refused =
            |regions: &[RegionInfo]| GuestMemory::map(regions.iter().map(|&info| (info, fd.as_fd()))).is_err();
        assert!(refused(&[region(0, 2, 0), region(PAGE, 2, 2)]), "regions overlap");
        assert!(refused(&[region(u64::MAX - PAGE + 2, 1, 0)]), "a region ends beyond the last address");
        assert!(refused(&[region(0, 9, 0)]), "longer than its file");
        assert!(refused(&[RegionInfo { user_address: u64::MAX, ..region(0, 1, 0) }]));
    }
}
