//! What is known of heat: the share of the requests that the fast members serve, what a larger or
//! smaller fast tier would serve, and where a range lies and why. And heat outlasts a close.
//!
//! "/heat", a table of the pool's own, has a row for each slab with heat: file, index, heat (u32
//! each). It is written when the pool is closed, and every hour. What it says is added to what was
//! counted since, when somebody asks. If it is damaged, it is ignored.

use super::Pool;
use crate::{
    error::Result,
    numbers::u32_at,
    plan::{SlabHeat, plan, share},
};
use diskwright_format::space::{change::Tier, superblock::Class};
use std::{
    io,
    ops::Range,
    path::PathBuf,
    sync::{Arc, atomic::Ordering},
};

/// Name of the file with the heat.
const HEAT: &str = "/heat";
const MAGIC: &[u8; 8] = b"DWHEAT2\0";
const ROW_BYTES: usize = 12;
/// Shares of which the report says what they need.
const SHARES: [f64; 8] = [1.0, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.25];
/// Heat is saved if this many requests were counted since.
const WORTH_SAVING: u64 = 100;

/// How much the fast members serve, and would serve.
#[derive(Debug, Clone, PartialEq)]
pub struct TierReport {
    /// Bytes of the fast members that data can use, with the reserve for new writes.
    pub fast_bytes: u64,
    /// Bytes of copies that lie there.
    pub fast_used_bytes: u64,
    /// Bytes of all mapped slabs, counted once.
    pub mapped_bytes: u64,
    /// Requests that the heat stands for, with those of earlier days as far as they count.
    pub counted: u64,
    /// Share of these requests to slabs that lie on fast members, 0 to 1.
    pub share: Option<f64>,
    /// The same after [`Pool::optimize`].
    pub share_after: Option<f64>,
    /// Share that was measured since the pool was opened.
    pub measured: Option<f64>,
    /// Bytes of the slabs that get nine of ten requests.
    pub working_set_bytes: u64,
    /// What fast members of other sizes would serve: bytes of copies, share.
    pub curve: Vec<(u64, f64)>,
    /// What the fast members must hold to serve a share: share, bytes of copies.
    pub needed: Vec<(f64, u64)>,
}

/// Where a piece of a disk lies.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Offset in the disk.
    pub offset_bytes: u64,
    /// Length.
    pub len_bytes: u64,
    /// Members that have a copy.
    pub members: Vec<PathBuf>,
    /// Whether all copies that can be are on fast members.
    pub is_fast: bool,
    /// Requests that were counted.
    pub heat: u64,
    /// Why it lies there.
    pub why: String,
}

impl Pool {
    /// What the fast members serve.
    ///
    /// # Errors
    /// Heat of earlier sessions cannot be read.
    pub fn tier_report(self: &Arc<Self>) -> Result<TierReport> {
        self.load_heat();
        let slabs = self.heats();
        let room = self.fast_room(&slabs);
        let shares = |room: u64| {
            let from_scratch: Vec<SlabHeat> = slabs.iter().map(|slab| SlabHeat { on_fast: 0, ..*slab }).collect();
            let found = plan(&from_scratch, room);
            crate::plan::share_after(&from_scratch, &found)
        };
        let curve = [25, 50, 75, 100, 150, 200, 400].into_iter().filter_map(|percent| {
            let slabs = room * percent / 100;
            Some((slabs << self.slab_shift, shares(slabs)?))
        });
        let mut curve: Vec<(u64, f64)> = curve.collect();
        // From there on more fast space serves no more.
        let best = curve.last().map_or(0.0, |(_, share)| *share);
        let end = curve.iter().position(|(_, share)| *share >= best).map_or(0, |place| place + 1);
        curve.truncate(end);
        let served = [0, 1].map(|class| self.served[class].load(Ordering::Relaxed));
        let mut heats: Vec<(u32, u32)> = slabs.iter().map(|slab| (slab.heat, slab.copies)).collect();
        heats.sort_unstable_by_key(|(heat, _)| std::cmp::Reverse(*heat));
        let all: u64 = heats.iter().map(|&(heat, _)| u64::from(heat)).sum();
        // The hottest slabs that get this share of the requests.
        let hottest = |share: f64| {
            let mut sum = 0;
            heats.iter().take_while(move |(heat, _)| {
                let goes_on = (sum as f64) < share * all as f64;
                sum += u64::from(*heat);
                goes_on
            })
        };
        let needed = SHARES.map(|share| {
            let copies: u64 = hottest(share).map(|&(_, copies)| u64::from(copies)).sum();
            (share, copies << self.slab_shift)
        });
        let set = hottest(0.9).count() as u64;
        Ok(TierReport {
            fast_bytes: room << self.slab_shift,
            fast_used_bytes: slabs.iter().map(|slab| u64::from(slab.on_fast)).sum::<u64>() << self.slab_shift,
            mapped_bytes: self
                .all_files()
                .iter()
                .map(|file| u64::from(file.mapped.load(Ordering::Relaxed)))
                .sum::<u64>()
                << self.slab_shift,
            counted: all * u64::from(crate::heat::SAMPLE),
            share: share(&slabs, |_, slab| slab.is_fast()),
            share_after: crate::plan::share_after(&slabs, &plan(&slabs, room)),
            measured: (served[0] + served[1] > 0).then(|| served[0] as f64 / (served[0] + served[1]) as f64),
            working_set_bytes: set << self.slab_shift,
            curve,
            needed: if all > 0 { needed.to_vec() } else { Vec::new() },
        })
    }

    /// Where a range of a disk lies, and why.
    ///
    /// # Errors
    /// [`SpaceError::Disk`](crate::SpaceError::Disk) if there is none.
    pub fn where_lies(self: &Arc<Self>, name: &str, range: Range<u64>) -> Result<Vec<Piece>> {
        let file = self.file_named(name).ok_or_else(|| self.no_file(name))?;
        self.load_heat();
        let slabs = self.heats();
        let limit = plan(&slabs, self.fast_room(&slabs)).limit;
        let fast_members = self.active_of(Class::Ssd).len() as u32;
        let first = range.start >> self.slab_shift;
        let end = range.end.div_ceil(self.slab_bytes()).min(1 << 32);
        let mut pieces: Vec<Piece> = Vec::new();
        for (index, entry) in file.table.mapped(first..end) {
            let slab = &self.heat_of(&file, index, entry.load(), fast_members);
            let copies = entry.load().copies();
            let path = |number: u8| {
                self.member(number).map_or_else(|| format!("member {number}").into(), |member| member.path.clone())
            };
            let piece = Piece {
                offset_bytes: u64::from(slab.index) << self.slab_shift,
                len_bytes: self.slab_bytes(),
                members: copies.into_iter().flatten().map(|copy| path(copy.member)).collect(),
                is_fast: slab.is_fast(),
                heat: u64::from(slab.heat) * u64::from(crate::heat::SAMPLE),
                why: why(slab, limit),
            };
            match pieces.last_mut() {
                Some(last)
                    if last.offset_bytes + last.len_bytes == piece.offset_bytes
                        && (&last.members, &last.why) == (&piece.members, &piece.why) =>
                {
                    last.len_bytes += piece.len_bytes;
                    last.heat += piece.heat;
                }
                _ => pieces.push(piece),
            }
        }
        Ok(pieces)
    }

    /// Adds the heat of earlier sessions, once.
    pub(super) fn load_heat(self: &Arc<Self>) {
        if self.heat_loaded.swap(true, Ordering::AcqRel) {
            return;
        }
        // Without them only this session counts. Each is of use without the other.
        if let Err(error) = self.read_heat() {
            tracing::warn!("pool {}: heat of earlier sessions is not used: {error}", self.name);
        }
        if let Err(error) = self.read_moves() {
            tracing::warn!("pool {}: moves of earlier sessions are not shown: {error}", self.name);
        }
    }

    fn read_heat(self: &Arc<Self>) -> io::Result<()> {
        for row in self.read_table(HEAT, MAGIC, ROW_BYTES)? {
            let (file, index) = (u32_at(&row, 0), u32_at(&row, 4));
            if let Some(file) = self.file(file).filter(|file| file.table.get(index).is_some()) {
                file.heat.add(index, u32_at(&row, 8));
            }
        }
        Ok(())
    }

    /// Saves what is known: the heat, if enough requests were counted since it was saved, and what
    /// has moved.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn save_heat(self: &Arc<Self>) -> io::Result<()> {
        if !self.is_writable {
            return Ok(());
        }
        let counted = self.served.iter().map(|served| served.load(Ordering::Relaxed)).sum::<u64>();
        if counted >= self.heat_saved.load(Ordering::Relaxed) + WORTH_SAVING {
            self.load_heat();
            let mut rows = Vec::new();
            for file in self.all_files() {
                for (index, heat) in file.heat.warm() {
                    [file.number, index, heat].iter().for_each(|number| rows.extend_from_slice(&number.to_le_bytes()));
                }
            }
            self.write_table(HEAT, MAGIC, ROW_BYTES, &rows)?;
            self.heat_saved.store(counted, Ordering::Relaxed);
        }
        self.save_moves()
    }

    /// Makes all heat an hour older.
    pub fn age_heat(&self) {
        self.all_files().iter().for_each(|file| file.heat.age());
    }

    /// Counts a request that a member of this class has served.
    #[inline]
    pub(crate) fn count_served(&self, class: Class) {
        self.served[usize::from(class == Class::Hdd)].fetch_add(1, Ordering::Relaxed);
    }
}

fn why(slab: &SlabHeat, limit: u32) -> String {
    let heat = u64::from(slab.heat) * u64::from(crate::heat::SAMPLE);
    let limit = u64::from(limit) * u64::from(crate::heat::SAMPLE);
    match (slab.tier, slab.is_fast()) {
        (Tier::Fast, true) => "pinned to the fast tier".into(),
        (Tier::Slow, false) => "pinned to the slow tier".into(),
        (Tier::Fast, false) => "pinned to the fast tier; `space optimize` moves it".into(),
        (Tier::Slow, true) => "pinned to the slow tier; `space optimize` moves it".into(),
        (Tier::Any, true) if heat == 0 => "new: no request was counted yet".into(),
        (Tier::Any, true) if heat >= limit => "hot".into(),
        (Tier::Any, true) => "colder than others; `space optimize` moves it".into(),
        (Tier::Any, false) if heat > limit => "hotter than others; `space optimize` moves it".into(),
        (Tier::Any, false) => "cold".into(),
    }
}
