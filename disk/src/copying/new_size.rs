//! Decides which size a disk gets, and what its partition table becomes: for `resize`, which
//! changes the disk, and for `convert`, which changes the copy.
//!
//! ```text
//!   NewSize ─▶ a number of bytes ─▶ fit(): rounded, or refused by the image
//!                                     │
//!        smaller: where do the contents end?  ─▶ refused, if beyond the new end
//!                                     ▼
//!                       writes to the partition table ─▶ SizePlan
//! ```
//!
//! What must hold: nothing but unpartitioned space is lost (`diskwright-volume` decides where the
//! contents end, and when in doubt the disk keeps its size). A plan changes nothing. So everything
//! that can be refused is refused before the first change. A failed read fails the plan.

use crate::{DiskError, Progress, Result, error::from_io, opening::volumes::examine};
use diskwright_store::{BlockDevice, Blocking, EngineKind};
use diskwright_volume::{ContentsEnd, LeftAlone, ReadAt, Step, TableChange, TableKind, ends, table_change};
use std::{cell::Cell, io, path::Path};

/// The size that a disk gets, absolute or relative to the present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum NewSize {
    /// The present one. Of a disk that is resized only the partition table changes.
    #[default]
    Present,
    /// This many bytes.
    Bytes(u64),
    /// So many bytes more.
    More(u64),
    /// The smallest size without loss.
    Minimum,
}

/// Which size is wanted.
pub(crate) struct SizeRequest<'a> {
    pub(crate) size: NewSize,
    /// The number of the last partition, if it is to reach the new end of the disk.
    pub(crate) grow_partition: Option<u32>,
    /// The size that the disk gets where this many bytes are wanted; or why it cannot.
    pub(crate) fit: &'a dyn Fn(u64) -> Result<u64>,
}

/// What is going to be done.
#[derive(Debug, Clone, Default)]
pub(crate) struct SizePlan {
    pub(crate) new_bytes: u64,
    pub(crate) change: Option<TableChange>,
    /// Why the partition table of a disk that does not become smaller is left as it is.
    pub(crate) table_left: Option<LeftAlone>,
}

impl SizePlan {
    /// Makes a plan for the disk at `path`, which has `old_bytes`. `progress` is told how far the
    /// disk was examined, in bytes of its size.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] for a size that would cut data, and for a partition that cannot be
    /// enlarged; [`DiskError::Stopped`]; the errors of `fit` and of reading the disk.
    pub(crate) fn new(
        (device, path): (&dyn BlockDevice, &Path),
        engine: EngineKind,
        wanted: &SizeRequest<'_>,
        progress: &mut Progress<'_>,
    ) -> Result<Self> {
        let old_bytes = device.geometry().size_bytes;
        let mut of_disk = |what: &mut dyn FnMut(&dyn ReadAt)| {
            let failed = Cell::new(None);
            let examined =
                examine(device, engine, progress, &mut |reader| what(&FailureRecorder { reader, failed: &failed }));
            examined
                .and_then(|()| failed.take().map_or(Ok(()), Err))
                .map_err(|error| from_io("read its partition table", path, error))
        };
        let mut found: Option<ContentsEnd> = None;
        let wanted_bytes = match wanted.size {
            NewSize::Present => old_bytes,
            NewSize::Bytes(bytes) => bytes,
            NewSize::More(bytes) => old_bytes.saturating_add(bytes),
            NewSize::Minimum => {
                of_disk(&mut |reader| found = Some(ends(reader)))?;
                match found.as_ref().map(|found| &found.min_bytes) {
                    Some(Ok(min_bytes)) => *min_bytes,
                    Some(Err(reason)) => return Err(refused(path, "cannot be made smaller", reason)),
                    None => return Err(DiskError::Stopped),
                }
            }
        };
        let new_bytes = (wanted.fit)(wanted_bytes)?;
        if new_bytes < old_bytes {
            if found.is_none() {
                of_disk(&mut |reader| found = Some(ends(reader)))?;
            }
            if let Some(reason) = found.as_ref().and_then(|found| found.refusal(new_bytes)) {
                return Err(refused(path, &format!("cannot be made smaller, to {new_bytes} bytes"), &reason));
            }
        }
        let mut change = None;
        of_disk(&mut |reader| change = Some(table_change(reader, new_bytes, wanted.grow_partition)))?;
        match (change.transpose(), wanted.grow_partition) {
            (Ok(change), _) => Ok(Self { new_bytes, change, table_left: None }),
            (Err(reason), Some(number)) => {
                Err(refused(path, &format!("partition {number} cannot be enlarged"), &reason))
            }
            (Err(reason), None) if new_bytes < old_bytes => Err(refused(path, "cannot be made smaller", &reason)),
            (Err(reason), None) => Ok(Self { new_bytes, change: None, table_left: Some(reason) }),
        }
    }

    /// The writes to the partition table, in their order.
    pub(crate) fn steps(&self) -> &[Step] {
        self.change.as_ref().map_or(&[], |change| &change.steps)
    }

    /// Kind of the partition table that changes; `None` if none does.
    pub(crate) fn changed_table(&self) -> Option<TableKind> {
        self.change.as_ref().filter(|change| !change.steps.is_empty()).map(|change| change.table)
    }
}

/// Remembers that a read failed. A plan without the bytes could leave one copy of a GPT as it is,
/// although the disk gets another size.
struct FailureRecorder<'a> {
    reader: &'a dyn ReadAt,
    failed: &'a Cell<Option<io::Error>>,
}

impl ReadAt for FailureRecorder<'_> {
    fn size_bytes(&self) -> u64 {
        self.reader.size_bytes()
    }

    fn sector_bytes(&self) -> u32 {
        self.reader.sector_bytes()
    }

    fn read_at(&self, offset_bytes: u64, buf: &mut [u8]) -> io::Result<()> {
        self.reader.read_at(offset_bytes, buf).map_err(|error| {
            let kind = error.kind();
            self.failed.set(Some(error));
            kind.into()
        })
    }
}

fn refused(path: &Path, what: &str, reason: &LeftAlone) -> DiskError {
    DiskError::BadOptions {
        what: format!("{}: {what}: {reason}", path.display()),
        hint: "nothing was changed; `partitions` shows what lies on the disk".into(),
    }
}

/// Carries out the steps, each durable before the next.
pub(crate) fn write_table(device: &dyn BlockDevice, path: &Path, engine: EngineKind, steps: &[Step]) -> Result<()> {
    if steps.is_empty() {
        return Ok(());
    }
    let write = || {
        let mut queue = Blocking::open(device, engine)?;
        for step in steps {
            queue.write(step.offset_bytes, &step.bytes, false)?;
            queue.flush()?;
        }
        Ok(())
    };
    write().map_err(|error| from_io("write its partition table", path, error))
}
