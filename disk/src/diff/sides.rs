//! The ranges in which a disk differs from another one, its base.
//!
//! ```text
//!        disk   base                 disk            disk      base
//!          │      │                    │               │         │
//!          b      c    two branches    b   an          │         │   nothing in common
//!           ╲    ╱                     │   ancestor    │         │
//!             a                        a = base        │         │
//! ```
//!
//! Images that both chains have at their lower ends are *common*. Where neither disk has a block of
//! its own above them, both read the same bytes, whatever these are. So the tables and sector
//! bitmaps of the images above decide, and no payload is read. The common images are asked only
//! where one disk has zeros of its own and the other one has nothing: there the common images may
//! have zeros too.
//!
//! Of two states of one raw disk the storage may know itself where they differ
//! ([`Store::changed_since`]). Then only these ranges count ([`records`](super::records)).
//!
//! Disks without a common image are read and compared. So are the ranges that the tables give, if
//! [`Difference::exactly`] asks for it. What is zeros in both by their tables is not read.
//!
//! A disk is walked in windows, so memory does not depend on its size. Ranges in which no image has
//! a block are passed over.
//!
//! An image that ends before another one below it hides the rest of that one: beyond its end the
//! disk reads zeros of its own.

use super::{
    change::{ChangeKind, Changes, EachChange, RangeJoiner},
    read::{Read, Reader},
    records::{Records, within},
    state::DiskState,
};
use crate::{
    Disk, DiskError, Layer, Opened, Progress, Result, copying::copy::damage_of, engine::holes::next_known,
    error::from_io,
};
use diskwright_store::{BlockDevice, EngineKind, Extent, ExtentKind, Files, all_zero};
use std::{
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

/// Length of a window, for which the extents are read at once.
const WINDOW_BYTES: u64 = 256 << 20;
/// The same if a side is an export: each window costs a request to its server.
const EXPORT_WINDOW_BYTES: u64 = 1 << 30;
/// Length of the pieces that are compared at once.
const COMPARED_BYTES: usize = 64 << 10;

/// The difference between a disk and its base.
#[derive(Debug)]
pub struct Difference {
    /// The disk, and its base.
    sides: [Side; 2],
    /// The images that both have; `None` if they have none, or if only tables are known.
    common: Option<Disk>,
    records: Option<Records>,
    engine: EngineKind,
    reads: bool,
}

#[derive(Debug)]
struct Side {
    opened: Opened,
    path: PathBuf,
    size_bytes: u64,
    /// The images above the common ones, or the whole disk. `None` if there are none.
    own: Option<SideSource>,
    /// Up to here the common images are read where `own` has nothing. Beyond it there are zeros.
    through_bytes: u64,
}

#[derive(Debug)]
enum SideSource {
    Images(Disk),
    Export,
}

/// What a side has in a range, by its tables.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RangeState {
    Data,
    Zeros,
    /// What the common images have.
    Common,
    Damaged,
}

/// A range that ends at `end_bytes` and begins where the one before it ends.
#[derive(Debug, Clone, Copy)]
struct Piece {
    end_bytes: u64,
    held: RangeState,
}

impl Difference {
    /// The difference between a disk and one of its ancestors; its parent, if none is named. `path`
    /// is that of the disk.
    ///
    /// # Errors
    /// [`DiskError::BadOptions`] if the disk has no parent, or `ancestor` is none of its ancestors;
    /// [`DiskError::File`] if that file is not found.
    pub fn since(
        (disk, path): (&Arc<Disk>, &Path),
        ancestor: Option<&Path>,
        files: &Files,
        engine: EngineKind,
    ) -> Result<Self> {
        let layers = disk.layers();
        let depth = match ancestor {
            None => 1,
            Some(ancestor) => {
                let found = |source| crate::error::file_error("find the ancestor", ancestor, source);
                let real = files.canonical(ancestor).map_err(found)?;
                let identity = files.facts(&real).map_err(found)?.identity;
                let is_it =
                    |layer: &Layer| layer.image.store().identity().map_or(layer.path == real, |own| own == identity);
                layers.iter().position(is_it).filter(|&depth| depth > 0).ok_or_else(|| DiskError::BadOptions {
                    what: format!("{}: {} is not among its ancestors", path.display(), ancestor.display()),
                    hint: "name an image of its chain below it, or name the file as the second disk".into(),
                })?
            }
        };
        let Some(base) = layers.get(depth).cloned() else {
            return Err(DiskError::BadOptions {
                what: format!("{}: it has no parent from which it could differ", path.display()),
                hint: "name the disk that it is to be compared with".into(),
            });
        };
        let below = Arc::new(Disk::from_layers(layers[depth..].to_vec(), Vec::new())?);
        let sides = [(Opened::Disk(Arc::clone(disk)), path.to_owned()), (Opened::Disk(below), base.path)];
        Self::assemble(sides, Some([depth, 0]), engine)
    }

    /// The difference between a disk and another one, `base`.
    ///
    /// # Errors
    /// As [`Disk::from_layers`].
    pub fn between(disk: (Opened, &Path), base: (Opened, &Path), engine: EngineKind) -> Result<Self> {
        let chain = |opened: &Opened| opened.disk().map(|disk| disk.layers());
        let own = chain(&disk.0).zip(chain(&base.0)).and_then(|(first, second)| {
            let is_same = |(a, b): &(&Layer, &Layer)| {
                let (first, second) = (a.image.store().identity(), b.image.store().identity());
                // An internal snapshot has other contents than the disk in the same file.
                first.is_some() && first == second && a.image.info().snapshot == b.image.info().snapshot
            };
            let common = first.iter().rev().zip(second.iter().rev()).take_while(is_same).count();
            (common > 0).then(|| [first.len() - common, second.len() - common])
        });
        Self::assemble([(disk.0, disk.1.to_owned()), (base.0, base.1.to_owned())], own, engine)
    }

    /// What a differencing image has itself, whatever its parent has. `disk` consists of this image
    /// alone.
    pub(super) fn of_child(disk: &Arc<Disk>, path: &Path, engine: EngineKind) -> Result<Self> {
        let size_bytes = disk.geometry().size_bytes;
        let side = |own| Side {
            opened: Opened::Disk(Arc::clone(disk)),
            path: path.to_owned(),
            size_bytes,
            own,
            through_bytes: size_bytes,
        };
        let images = Disk::from_layers(disk.layers().to_vec(), Vec::new())?;
        Ok(Self {
            sides: [side(Some(SideSource::Images(images))), side(None)],
            common: None,
            records: None,
            engine,
            reads: false,
        })
    }

    /// `own`: the number of images of each side above the common ones; `None` without any.
    fn assemble(sides: [(Opened, PathBuf); 2], own: Option<[usize; 2]>, engine: EngineKind) -> Result<Self> {
        let first = sides[0].0.disk().map(|disk| disk.layers());
        let common = match (&first, own) {
            (Some(layers), Some([above, _])) => Some(Disk::from_layers(layers[above..].to_vec(), Vec::new())?),
            _ => None,
        };
        let common_bytes = common.as_ref().map_or(0, |common| common.geometry().size_bytes);
        let side = |(opened, path): (Opened, PathBuf), above: Option<usize>| -> Result<Side> {
            let size_bytes = opened.device().geometry().size_bytes;
            let layers = opened.disk().map(|disk| disk.layers());
            let (own, through_bytes) = match (&layers, above) {
                (None, _) => (Some(SideSource::Export), 0),
                (Some(layers), None) => (Some(SideSource::Images(Disk::from_layers(layers.to_vec(), Vec::new())?)), 0),
                (Some(layers), Some(above)) => {
                    let between = layers.iter().take(above).skip(1).map(|layer| layer.image.size_bytes());
                    let images = match above {
                        0 => None,
                        _ => Some(SideSource::Images(Disk::from_layers(layers[..above].to_vec(), Vec::new())?)),
                    };
                    (images, between.fold(common_bytes.min(size_bytes), u64::min))
                }
            };
            Ok(Side { opened, path, size_bytes, own, through_bytes })
        };
        let records = if common.is_none() { Records::of(&sides[0].0, &sides[1].0)? } else { None };
        let [disk, base] = sides;
        let sides = [side(disk, own.map(|own| own[0]))?, side(base, own.map(|own| own[1]))?];
        Ok(Self { reads: common.is_none() && records.is_none(), sides, common, records, engine })
    }

    /// Reads what may differ by the tables, and leaves out what has the same bytes.
    #[must_use]
    pub fn exactly(self) -> Self {
        Self { reads: true, ..self }
    }

    /// Whether the contents of the disks are read.
    pub fn reads_contents(&self) -> bool {
        self.reads
    }

    /// The disk and its path.
    pub fn disk(&self) -> (&Opened, &Path) {
        (&self.sides[0].opened, &self.sides[0].path)
    }

    /// The base and its path.
    pub fn base(&self) -> (&Opened, &Path) {
        (&self.sides[1].opened, &self.sides[1].path)
    }

    /// The present states of the disk and of its base.
    pub fn states(&self) -> [DiskState; 2] {
        [DiskState::of(&self.sides[0].opened), DiskState::of(&self.sides[1].opened)]
    }

    /// The smallest unit that both disks can write, in bytes.
    fn unit_bytes(&self) -> u64 {
        let sector = |side: &Side| u64::from(side.opened.device().geometry().logical_sector_bytes);
        self.sides.iter().map(sector).fold(512, u64::max)
    }
}

impl Side {
    /// What the side has in a window, in order and without gaps.
    fn hold(&self, window: &Range<u64>, extents: &mut Vec<Extent>, pieces: &mut Vec<Piece>) -> Result<()> {
        pieces.clear();
        extents.clear();
        let end = window.end.min(self.size_bytes).max(window.start);
        if window.start < end {
            let device: Option<&dyn BlockDevice> = match &self.own {
                None => None,
                Some(SideSource::Images(disk)) => Some(disk),
                Some(SideSource::Export) => Some(self.opened.device()),
            };
            match device {
                None => self.fall_through(window.start, end, pieces),
                Some(device) => {
                    let found = device.extents(window.start, end - window.start, extents);
                    found.map_err(|error| from_io("read its tables", &self.path, error))?;
                }
            }
        }
        for extent in extents.iter() {
            let end_bytes = extent.offset_bytes + extent.len_bytes;
            let held = match extent.kind {
                ExtentKind::Data => RangeState::Data,
                ExtentKind::Zero => RangeState::Zeros,
                ExtentKind::Damaged => RangeState::Damaged,
                ExtentKind::Unallocated => {
                    self.fall_through(extent.offset_bytes, end_bytes, pieces);
                    continue;
                }
            };
            pieces.push(Piece { end_bytes, held });
        }
        if end < window.end {
            pieces.push(Piece { end_bytes: window.end, held: RangeState::Zeros });
        }
        Ok(())
    }

    /// A range in which the side has no block of its own.
    fn fall_through(&self, start: u64, end: u64, pieces: &mut Vec<Piece>) {
        let stop = self.through_bytes.clamp(start, end);
        if start < stop {
            pieces.push(Piece { end_bytes: stop, held: RangeState::Common });
        }
        if stop < end {
            pieces.push(Piece { end_bytes: end, held: RangeState::Zeros });
        }
    }

    /// The images in which a block may be of this side's own.
    fn layers(&self) -> Option<Vec<Layer>> {
        match &self.own {
            None => Some(Vec::new()),
            Some(SideSource::Images(disk)) => Some(disk.layers().to_vec()),
            Some(SideSource::Export) => None,
        }
    }

    fn damage(&self, range: Range<u64>) -> DiskError {
        match &self.own {
            Some(SideSource::Images(disk)) => damage_at(disk, range),
            _ => DiskError::BadChain {
                path: self.path.clone(),
                what: "a range of the export is damaged; check the disk on its server".into(),
            },
        }
    }
}

fn damage_at(disk: &Disk, range: Range<u64>) -> DiskError {
    let mut extents = Vec::new();
    if let Err(error) = disk.extents(range.start, range.end - range.start, &mut extents) {
        return from_io("read its tables", &disk.layers()[0].path, error);
    }
    let damaged = extents.iter().find(|extent| extent.kind == ExtentKind::Damaged);
    let is_gone = || DiskError::BadChain {
        path: disk.layers()[0].path.clone(),
        what: "a damaged range was changed meanwhile; try again".into(),
    };
    damaged.map_or_else(is_gone, |extent| damage_of(disk, extent))
}

/// The walk over both disks.
struct Walk<'a> {
    of: &'a Difference,
    joiner: RangeJoiner,
    reader: Option<Reader<'a>>,
    extents: Vec<Extent>,
    pieces: [Vec<Piece>; 2],
    /// For the common images.
    common: Vec<Extent>,
}

impl Changes for Difference {
    fn for_each(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        let devices = [0, 1].map(|side| (self.sides[side].opened.device(), self.sides[side].path.as_path()));
        let mut walk = Walk {
            of: self,
            joiner: RangeJoiner::new(self.unit_bytes()),
            reader: if self.reads { Some(Reader::open(&devices, self.engine)?) } else { None },
            extents: Vec::new(),
            pieces: [Vec::new(), Vec::new()],
            common: Vec::new(),
        };
        walk.run(progress, each)
    }
}

impl Walk<'_> {
    fn run(&mut self, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        let [disk, base] = &self.of.sides;
        let end = disk.size_bytes.max(base.size_bytes);
        // In a window all of these rules stay the same.
        let edges = [disk.size_bytes, base.size_bytes, disk.through_bytes, base.through_bytes, end];
        let own = disk.layers().zip(base.layers()).map(|(disk, base)| [disk, base].concat());
        let common = self.of.common.as_ref().map_or_else(Vec::new, |common| common.layers().to_vec());
        let all = own.as_ref().map(|own| [own.clone(), common].concat());
        let mut at = 0;
        while at < end {
            if !progress(at, end) {
                return Err(DiskError::Stopped);
            }
            let edge = edges.iter().copied().filter(|&edge| edge > at).min().unwrap_or(end);
            // Where both read the common images, or neither does, only their own blocks count.
            let alike = (at < disk.through_bytes) == (at < base.through_bytes);
            at = match if alike { &own } else { &all } {
                Some(layers) => next_known(layers, at, edge)?,
                None => at,
            };
            let window_bytes = if own.is_some() { WINDOW_BYTES } else { EXPORT_WINDOW_BYTES };
            let stop = (at - at % window_bytes + window_bytes).min(edge);
            if at < stop {
                self.window(at..stop, progress, each)?;
                at = stop;
            }
        }
        if let Some(mut reader) = self.reader.take() {
            reader.drain(progress, &mut compared(self.of, &mut self.joiner, each))?;
        }
        self.joiner.finish(progress, each)
    }

    fn window(&mut self, window: Range<u64>, progress: &mut Progress<'_>, each: &mut EachChange<'_>) -> Result<()> {
        let changed = match &self.of.records {
            None => std::iter::once(window.clone()).collect(),
            Some(records) => records.changed(&window)?,
        };
        if changed.is_empty() {
            return Ok(());
        }
        for (side, pieces) in self.of.sides.iter().zip(&mut self.pieces) {
            side.hold(&window, &mut self.extents, pieces)?;
        }
        let (mut at, mut first, mut second) = (window.start, 0, 0);
        while let (Some(&a), Some(&b)) = (self.pieces[0].get(first), self.pieces[1].get(second)) {
            let stop = a.end_bytes.min(b.end_bytes);
            for range in within(&changed, at..stop) {
                self.judge(range, [a.held, b.held], progress, each)?;
            }
            first += usize::from(stop == a.end_bytes);
            second += usize::from(stop == b.end_bytes);
            at = stop;
        }
        Ok(())
    }

    /// A range in which each side has one thing.
    fn judge(
        &mut self,
        range: Range<u64>,
        held: [RangeState; 2],
        progress: &mut Progress<'_>,
        each: &mut EachChange<'_>,
    ) -> Result<()> {
        match held {
            [RangeState::Common, RangeState::Common] | [RangeState::Zeros, RangeState::Zeros] => Ok(()),
            [RangeState::Damaged, _] => Err(self.of.sides[0].damage(range)),
            [_, RangeState::Damaged] => Err(self.of.sides[1].damage(range)),
            [RangeState::Common, other] => self.by_common(range, other, true, progress, each),
            [RangeState::Zeros, RangeState::Common] => self.by_common(range, RangeState::Zeros, false, progress, each),
            [held, _] => self.differ(range, held, progress, each),
        }
    }

    /// A range in which one side reads the common images, and the other one has `other`.
    fn by_common(
        &mut self,
        range: Range<u64>,
        other: RangeState,
        disk_is_common: bool,
        progress: &mut Progress<'_>,
        each: &mut EachChange<'_>,
    ) -> Result<()> {
        let of = self.of;
        let Some(common) = &of.common else {
            let held = if disk_is_common { RangeState::Data } else { other };
            return self.differ(range, held, progress, each);
        };
        let mut extents = std::mem::take(&mut self.common);
        extents.clear();
        let found = common.extents(range.start, range.end - range.start, &mut extents);
        found.map_err(|error| from_io("read its tables", &common.layers()[0].path, error))?;
        for extent in &extents {
            let part = extent.offset_bytes..extent.offset_bytes + extent.len_bytes;
            let is_zeros = extent.kind.reads_as_zeros();
            if is_zeros && other == RangeState::Zeros {
                continue;
            }
            if disk_is_common && extent.kind == ExtentKind::Damaged {
                return Err(damage_of(common, extent));
            }
            let held = match disk_is_common {
                true if is_zeros => RangeState::Zeros,
                true => RangeState::Data,
                false => other,
            };
            self.differ(part, held, progress, each)?;
        }
        self.common = extents;
        Ok(())
    }

    /// A range that differs by the tables. The disk has `held` there.
    fn differ(
        &mut self,
        range: Range<u64>,
        held: RangeState,
        progress: &mut Progress<'_>,
        each: &mut EachChange<'_>,
    ) -> Result<()> {
        let of = self.of;
        if let Some(reader) = &mut self.reader {
            return reader.push(range, progress, &mut compared(of, &mut self.joiner, each));
        }
        let kind = match held {
            _ if range.start >= of.sides[0].size_bytes => ChangeKind::Beyond,
            RangeState::Zeros => ChangeKind::Zeros,
            _ => ChangeKind::Data,
        };
        self.joiner.add((range, kind), of.limit_bytes(kind), progress, each)
    }
}

impl Difference {
    /// Where ranges of this kind end at most.
    fn limit_bytes(&self, kind: ChangeKind) -> u64 {
        match kind {
            ChangeKind::Beyond => self.sides[1].size_bytes,
            ChangeKind::Data | ChangeKind::Zeros => self.sides[0].size_bytes,
        }
    }
}

/// Compares the bytes of both sides, unit by unit.
fn compared<'a>(of: &'a Difference, joiner: &'a mut RangeJoiner, each: &'a mut EachChange<'_>) -> Box<Read<'a>> {
    let unit = of.unit_bytes() as usize;
    let end = of.sides.iter().map(|side| side.size_bytes).fold(0, u64::max);
    Box::new(move |start: u64, bytes: &[&[u8]], progress: &mut Progress<'_>| {
        let [disk, base] = bytes else { return Ok(()) };
        let mut at = start;
        for (a, b) in disk.chunks(COMPARED_BYTES).zip(base.chunks(COMPARED_BYTES)) {
            if a == b {
                at += a.len() as u64;
                continue;
            }
            // Units begin at their multiples, and the first one may be cut.
            let mut within = 0;
            while within < a.len() {
                let len = (unit - at as usize % unit).min(a.len() - within);
                let (x, y) = (&a[within..within + len], &b[within..within + len]);
                if x != y {
                    let kind = match x {
                        _ if at >= of.sides[0].size_bytes => ChangeKind::Beyond,
                        x if all_zero(x) => ChangeKind::Zeros,
                        _ => ChangeKind::Data,
                    };
                    joiner.add((at..at + len as u64, kind), of.limit_bytes(kind), progress, each)?;
                }
                at += len as u64;
                within += len;
            }
        }
        if progress(at, end) { Ok(()) } else { Err(DiskError::Stopped) }
    })
}
