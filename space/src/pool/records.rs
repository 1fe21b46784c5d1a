//! Records of checksums: read into the cache, written for a copy, and given up when all are
//! damaged.

use super::{FileState, Pool, lock};
use crate::{busy::Busy, sums::SlabSums};
use diskwright_format::space::{
    Copy,
    change::{Change, SlabState},
    record_bytes,
    sums::{parse_record, record_at, to_record},
};
use std::io;

impl Pool {
    /// The checksums of a sealed slab, which the caller holds: from the cache, or else from the
    /// record of one of its copies. `None` if all records that can be read are damaged.
    ///
    /// # Errors
    /// No record can be read.
    pub(crate) fn sums_of(&self, file: &FileState, index: u32) -> io::Result<Option<SlabSums>> {
        if let Some(sums) = self.sums_cache().get(file.number, index) {
            file.table.entry(index).set_cached(true);
            return Ok(Some(sums));
        }
        self.sums_on_members(file, index)
    }

    /// The same from the records alone, which then replace what is in the cache.
    pub(crate) fn sums_on_members(&self, file: &FileState, index: u32) -> io::Result<Option<SlabSums>> {
        let entry = file.table.entry(index);
        let (mut failure, mut damaged) = (None, false);
        for copy in entry.load().good_copies() {
            match self.read_record(copy, file.number, index) {
                Ok(Some(sums)) => {
                    self.sums_cache().put(file.number, index, &sums);
                    entry.set_cached(true);
                    return Ok(Some(sums));
                }
                Ok(None) => damaged = true,
                Err(error) => failure = Some(error),
            }
        }
        match failure {
            Some(error) if !damaged => Err(error),
            _ => Ok(None),
        }
    }

    /// The checksums in the record of a copy; `None` if it is damaged.
    pub(crate) fn read_record(&self, copy: Copy, file: u32, index: u32) -> io::Result<Option<SlabSums>> {
        let missing = || io::Error::other("no member that holds its checksums is there");
        let member = self.live_member(copy.member).ok_or_else(missing)?;
        let Some(at) = record_at(member.size_bytes, self.slab_shift(), copy.slab) else { return Ok(None) };
        let mut record = vec![0; record_bytes(self.slab_shift()) as usize];
        member.read_at(&mut record, at)?;
        Ok(parse_record(&record, self.id(), file, index, self.slab_shift()).ok().map(Into::into))
    }

    /// Writes the record of a copy, unless `is_ours` says that it belongs to another slab by now.
    /// It is durable with the next sync of the member.
    pub(crate) fn write_record(
        &self,
        copy: Copy,
        (file, index): (u32, u32),
        sums: &[u32],
        is_ours: impl FnOnce() -> bool,
    ) -> io::Result<()> {
        // Who takes the copy's place over writes its record after this one.
        let _records = lock(self.records_lock());
        if !is_ours() {
            return Ok(());
        }
        let missing = || io::Error::other("a member vanished meanwhile");
        let member = self.live_member(copy.member).ok_or_else(missing)?;
        let at = record_at(member.size_bytes, self.slab_shift(), copy.slab)
            .ok_or_else(|| io::Error::other("a slab beyond the end of its member"))?;
        let written = member.write_at(&to_record(self.id(), file, index, sums), at);
        member.written();
        written
    }

    /// Takes the contents of a sealed slab as they are, since nothing is left that they can be
    /// compared with.
    pub(crate) fn unseal(&self, file: &FileState, index: u32) -> io::Result<()> {
        let _busy = Busy::wait(self, file.table.entry(index));
        self.unseal_busy(file, index)
    }

    /// The same for a slab that this thread has for itself. Whoever moves or resyncs a slab does it
    /// first: where a copy comes to lie there may be an old record of the same slab.
    pub(super) fn unseal_busy(&self, file: &FileState, index: u32) -> io::Result<()> {
        let entry = file.table.entry(index);
        if !entry.load().is_sealed() || self.sums_of(file, index)?.is_some() {
            return Ok(());
        }
        self.warn(format!(
            "pool {}: the checksums of {} are damaged on every member; its contents could not be checked, and are taken as \
             they are",
            self.name(),
            self.described(file, index)
        ));
        if !self.is_writable() {
            return Ok(());
        }
        let mut state = lock(self.state());
        let unsealed = Change::State { file: file.number, first: index, count: 1, state: SlabState::Clean };
        let ticket = self.append(&mut state, &unsealed);
        drop(state);
        self.wait(ticket)
    }

    /// A slab as users know it.
    pub(crate) fn described(&self, file: &FileState, index: u32) -> String {
        let state = lock(self.state());
        let name = state.names.iter().find(|(_, number)| **number == file.number).map(|(name, _)| name.clone());
        let name = name.unwrap_or_else(|| format!("file {}", file.number));
        format!("{name} at {} MiB", (u64::from(index) << self.slab_shift()) as f64 / f64::from(1 << 20))
    }
}
