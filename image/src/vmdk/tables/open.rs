//! Reads header and directories of a sparse extent, in its three kinds.

use super::{CHUNK_BYTES, EntryCoding, Growing, KnownLength, LOST, TABLES_MAX, Tables, joined};
use crate::{
    ImageError, Result,
    vmdk::{corrupt, damaged, text},
};
use diskwright_format::vmdk::{
    COWD_HEADER_BYTES, COWD_TABLE_ENTRIES, CowdHeader, GRAIN_ABSENT, Placing, SECTOR_BYTES, SESPARSE_GRAIN_SECTORS,
    SESPARSE_HEADER_BYTES, SESPARSE_TABLE_ENTRIES, SeSparseHeader, SparseFlags, sesparse_replays_journal,
};
use diskwright_store::{Store, sync::atomic::AtomicU64};

impl Tables {
    /// Reads header and directories of the extent in `store`.
    ///
    /// # Errors
    /// `Corrupt`, `Unsupported`, `Io`.
    pub fn read(store: &dyn Store) -> Result<Self> {
        let first = text::read_some(store, 0, 2048, "read the header of the extent")?;
        if first.starts_with(text::COWD_MAGIC) {
            Self::cowd(store, &first)
        } else if first.starts_with(text::SESPARSE_MAGIC) {
            Self::sesparse(store, &first)
        } else {
            Self::hosted(store)
        }
    }

    fn hosted(store: &dyn Store) -> Result<Self> {
        let header = text::header_of(store)?;
        let is_compressed = header.flags.has(SparseFlags::COMPRESSED);
        if is_compressed != header.flags.has(SparseFlags::MARKERS) {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: format!("a sparse extent with the flags {:#x} (compressed grains need markers)", header.flags.0),
                hint: "convert it with the program that made it".into(),
            });
        }
        let directory = match header.directory {
            Placing::Sector(sector) => sector,
            Placing::InFooter => return Err(corrupt(store, "footer of a stream", 0, "no directory", "a directory")),
        };
        let coding = EntryCoding::Hosted { has_zeros: header.flags.has(SparseFlags::ZEROED_GRAINS), is_compressed };
        let sectors = [Some(directory), header.redundant_directory];
        let directories: Vec<u64> =
            sectors.into_iter().flatten().map(|sector| sector.saturating_mul(SECTOR_BYTES)).collect();
        let header_bytes = 0..SECTOR_BYTES;
        let text_start = header.descriptor_sector.saturating_mul(SECTOR_BYTES);
        let text = text_start..text_start.saturating_add(header.descriptor_sectors.saturating_mul(SECTOR_BYTES));
        let tables = Self {
            coding,
            grain_bytes: header.grain_bytes(),
            capacity_bytes: Growing::new(header.capacity_sectors * SECTOR_BYTES),
            table_entries: u64::from(header.table_entries),
            directories,
            entries: Vec::new(),
            only_second: Vec::new(),
            fixed: vec![header_bytes, text],
            taken: Vec::new(),
            is_unclean: header.is_unclean,
            free_sector: None,
            header: Some(header),
            remarks: Vec::new(),
            len_bytes: KnownLength(AtomicU64::new(text::len_of(store)?)),
        };
        tables.with_directories(store)
    }

    fn cowd(store: &dyn Store, first: &[u8]) -> Result<Self> {
        let header = CowdHeader::parse(first).map_err(|error| damaged(store, &error))?;
        let bytes = |sectors: u32| u64::from(sectors) * SECTOR_BYTES;
        let tables = Self {
            coding: EntryCoding::Cowd,
            grain_bytes: bytes(header.grain_sectors),
            capacity_bytes: Growing::new(bytes(header.capacity_sectors)),
            table_entries: COWD_TABLE_ENTRIES,
            directories: vec![bytes(header.directory_sector)],
            entries: Vec::new(),
            only_second: Vec::new(),
            fixed: Vec::from_iter(Some(0..COWD_HEADER_BYTES as u64)),
            taken: Vec::new(),
            header: None,
            is_unclean: header.is_unclean,
            free_sector: Some(header.free_sector),
            remarks: Vec::new(),
            len_bytes: KnownLength(AtomicU64::new(text::len_of(store)?)),
        };
        tables.with_directories(store)
    }

    fn sesparse(store: &dyn Store, first: &[u8]) -> Result<Self> {
        let unsupported = |what: &str| {
            Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: what.into(),
                hint: "open the disk once with ESXi, which cleans it up".into(),
            })
        };
        let header = SeSparseHeader::parse(first).map_err(|error| damaged(store, &error))?;
        if header.flags != 0 {
            return unsupported(&format!("an SESPARSE extent with the flags {:#x}", header.flags));
        }
        let bytes = |sectors: u64| sectors.saturating_mul(SECTOR_BYTES);
        let at = bytes(header.volatile_sector);
        let volatile = text::read_some(store, at, SESPARSE_HEADER_BYTES, "read the volatile header")?;
        match sesparse_replays_journal(&volatile) {
            Some(false) => {}
            Some(true) => return unsupported("an SESPARSE extent whose journal is to be replayed"),
            None => return Err(corrupt(store, "SESPARSE volatile header", at, "another magic", "0xcafecafe")),
        }
        let (tables, grains) = (bytes(header.tables_sector), bytes(header.grains_sector));
        let tables = Self {
            coding: EntryCoding::SeSparse { tables_bytes: tables, grains_bytes: grains },
            grain_bytes: bytes(SESPARSE_GRAIN_SECTORS),
            capacity_bytes: Growing::new(bytes(header.capacity_sectors)),
            table_entries: SESPARSE_TABLE_ENTRIES,
            directories: vec![bytes(header.directory.0)],
            entries: Vec::new(),
            only_second: Vec::new(),
            fixed: Vec::from_iter(Some(0..SECTOR_BYTES)),
            taken: Vec::new(),
            header: None,
            is_unclean: false,
            free_sector: None,
            remarks: Vec::new(),
            len_bytes: KnownLength(AtomicU64::new(text::len_of(store)?)),
        };
        tables.with_directories(store)
    }

    /// Reads the directories. A table that the first one loses is taken from the second.
    fn with_directories(mut self, store: &dyn Store) -> Result<Self> {
        let len_bytes = text::len_of(store)?;
        let count = self.tables();
        if self.capacity_bytes.get() == 0 {
            return Err(corrupt(store, "sparse extent header", 12, "a capacity of 0", "a capacity"));
        }
        if count > TABLES_MAX {
            return Err(ImageError::Unsupported {
                path: store.name().to_owned(),
                what: format!("a sparse extent of {count} grain tables (at most {TABLES_MAX})"),
                hint: "is this the right file? A disk of that size would have larger grains".into(),
            });
        }
        let bytes = count * self.directory_entry_bytes();
        let outside = |at: u64| at == 0 || at.checked_add(bytes).is_none_or(|end| end > len_bytes);
        let at = self.directories[0];
        if outside(at) && self.directories.get(1).is_none_or(|&second| outside(second)) {
            let found = format!("a directory of {bytes} bytes at offset {at} in a file of {len_bytes}");
            return Err(corrupt(store, "grain directory", at, found, "one that lies inside the file"));
        }
        self.fixed.extend(self.directories.iter().filter(|&&at| !outside(at)).map(|&at| at..at + bytes));
        for &at in &self.directories {
            let read =
                if outside(at) { vec![LOST; count as usize] } else { self.read_directory(store, at, len_bytes)? };
            self.entries.push(read);
        }
        let lost = |entries: &[u32]| entries.iter().filter(|&&entry| entry == LOST).count();
        let lost_first = lost(&self.entries[0]);
        if lost_first > 0 {
            if let [first, second] = &mut self.entries[..] {
                for (table, (one, &mut other)) in (0..).zip(first.iter_mut().zip(second)) {
                    if *one == LOST && other != GRAIN_ABSENT {
                        *one = other;
                        self.only_second.extend((other != LOST).then_some(table));
                    }
                }
            }
            let left = lost(&self.entries[0]);
            self.remarks.push(format!(
                "{}: the grain directory at offset {at} is damaged: {lost_first} of its {count} entries lead nowhere; {} of them were taken from the redundant directory.",
                store.name().display(),
                lost_first - left
            ));
        }
        self.taken = joined(self.structures());
        Ok(self)
    }

    fn read_directory(&self, store: &dyn Store, at: u64, len_bytes: u64) -> Result<Vec<u32>> {
        let width = self.directory_entry_bytes() as usize;
        let mut entries = Vec::with_capacity(self.tables() as usize);
        let mut bytes = vec![0; CHUNK_BYTES];
        let mut offset = at;
        let end = at + self.tables() * width as u64;
        while offset < end {
            let chunk = &mut bytes[..(end - offset).min(CHUNK_BYTES as u64) as usize];
            store
                .read_at(chunk, offset)
                .map_err(|error| ImageError::io("read the grain directory", store, offset, error))?;
            entries.extend(chunk.chunks_exact(width).map(|entry| self.directory_entry(entry, len_bytes)));
            offset += chunk.len() as u64;
        }
        Ok(entries)
    }
}
