//! What has changed since a point: a bitmap, read as sorted ranges.

use super::{bits::Bits, sidecar::Segment};
use diskwright_format::tracks::{GRAIN_BYTES_MIN, GRAINS_MAX, GrainRun};
use diskwright_image::LinkageId;
use std::{
    ops::Range,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// A point since which changes are tracked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrackPoint {
    /// The name that the user gave it.
    pub name: String,
    /// Tells it from a former point of its name.
    pub id: u64,
    /// When it was started.
    pub started: SystemTime,
    /// Bytes that have changed since, in whole grains.
    pub changed_bytes: u64,
    /// Why everything counts as changed; `None` if the ranges are known.
    pub everything: Option<String>,
    /// The identity of an image that had the contents of the disk at that moment: a frozen image,
    /// or the disk before it was written. `None` if the disk was being written, and for raw disks.
    pub linkage_id: Option<LinkageId>,
    /// Size of the disk at that moment, in bytes.
    pub size_bytes: u64,
}

/// The ranges of a disk that have changed since a point. More may be named, never less.
#[derive(Debug, Clone)]
pub struct Changed {
    pub(crate) words: Box<[u64]>,
    pub(crate) grain_bytes: u64,
    pub(crate) size_bytes: u64,
    pub(crate) everything: Option<String>,
}

impl Changed {
    /// The grains that these ranges touch, as another process has reported them.
    ///
    /// # Errors
    /// For grains that no disk has.
    pub fn of_ranges(
        ranges: impl IntoIterator<Item = Range<u64>>,
        grain_bytes: u64,
        size_bytes: u64,
        everything: Option<String>,
    ) -> crate::Result<Self> {
        if grain_bytes < GRAIN_BYTES_MIN
            || !grain_bytes.is_power_of_two()
            || size_bytes.div_ceil(grain_bytes) > GRAINS_MAX
        {
            return Err(crate::DiskError::Usage {
                what: format!("grains of {grain_bytes} bytes in a disk of {size_bytes} bytes"),
                hint: "use the grains that the disk's points have".into(),
            });
        }
        let bits = Bits::new(size_bytes.div_ceil(grain_bytes));
        for range in ranges.into_iter().filter(|range| range.start < range.end) {
            let first = range.start / grain_bytes;
            bits.set(GrainRun { first, count: range.end.div_ceil(grain_bytes) - first });
        }
        let mut words = vec![0; bits.grains().div_ceil(64) as usize];
        let all = 0..words.len();
        bits.add_to(&mut words, all);
        Ok(Self { words: words.into(), grain_bytes, size_bytes, everything })
    }

    /// Why everything counts as changed; `None` if the ranges are known.
    pub fn everything(&self) -> Option<&str> {
        self.everything.as_deref()
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Length in bytes of the parts of the disk that are tracked separately (grains).
    pub fn grain_bytes(&self) -> u64 {
        self.grain_bytes
    }

    /// Sum of the ranges in bytes.
    pub fn bytes(&self) -> u64 {
        self.ranges().map(|range| range.end - range.start).sum()
    }

    /// The changed ranges in bytes, sorted; no two of them touch.
    pub fn ranges(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.ranges_from(0)
    }

    /// The parts of [`Changed::ranges`] from `offset_bytes` on.
    pub fn ranges_from(&self, offset_bytes: u64) -> impl Iterator<Item = Range<u64>> + '_ {
        let mut at = offset_bytes;
        std::iter::from_fn(move || {
            let run = self.next_run(at / self.grain_bytes)?;
            let start = (run.first * self.grain_bytes).max(at);
            at = ((run.first + run.count) * self.grain_bytes).min(self.size_bytes);
            (start < at).then_some(start..at)
        })
    }

    fn grains(&self) -> u64 {
        self.size_bytes.div_ceil(self.grain_bytes)
    }

    /// The first run of changed grains from grain `from` on.
    fn next_run(&self, from: u64) -> Option<GrainRun> {
        let grains = self.grains();
        if from >= grains {
            return None;
        }
        if self.everything.is_some() {
            return Some(GrainRun { first: from, count: grains - from });
        }
        let first = self.next_with(from, false)?;
        let end = self.next_with(first, true).unwrap_or(grains).min(grains);
        Some(GrainRun { first, count: end - first })
    }

    /// The first grain from `from` on whose bit is set, or is not if `inverted`.
    fn next_with(&self, from: u64, inverted: bool) -> Option<u64> {
        let mut word = (from / 64) as usize;
        let mut mask = u64::MAX << (from % 64);
        while let Some(&bits) = self.words.get(word) {
            let bits = if inverted { !bits } else { bits } & mask;
            if bits != 0 {
                let grain = word as u64 * 64 + u64::from(bits.trailing_zeros());
                return (grain < self.grains()).then_some(grain);
            }
            (word, mask) = (word + 1, u64::MAX);
        }
        None
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn ranges_are_sorted_apart_and_those_of_the_bits(
            bits in prop::collection::vec(any::<bool>(), 1..200),
            cut in 0u64..4096,
            from in 0u64..220 * 4096,
        ) {
            let grains = bits.len() as u64;
            let mut words = vec![0_u64; bits.len().div_ceil(64)];
            bits.iter().enumerate().filter(|(_, bit)| **bit).for_each(|(at, _)| words[at / 64] |= 1 << (at % 64));
            let size_bytes = grains * 4096 - cut;
            let changed = Changed { words: words.into(), grain_bytes: 4096, size_bytes, everything: None };
            for from in [0, from] {
                let mut last_end = None;
                let mut found = vec![false; bits.len()];
                for range in changed.ranges_from(from) {
                    prop_assert!(range.start < range.end && range.end <= size_bytes && range.start >= from);
                    prop_assert!(last_end.is_none_or(|end| end < range.start));
                    last_end = Some(range.end);
                    (range.start / 4096..range.end.div_ceil(4096)).for_each(|grain| found[grain as usize] = true);
                }
                for (grain, (found, bit)) in found.into_iter().zip(&bits).enumerate() {
                    let in_range = (grain as u64 + 1) * 4096 > from && from < size_bytes;
                    prop_assert_eq!(found, *bit && in_range, "grain {}", grain);
                }
            }
        }
    }

    #[test]
    fn everything_is_one_range() {
        let everything = Some("another program wrote to it".to_owned());
        let changed = Changed { words: Box::default(), grain_bytes: 65536, size_bytes: 100_000, everything };
        assert!(changed.ranges().eq(std::iter::once(0..100_000)));
        assert!(changed.ranges_from(70_000).eq(std::iter::once(70_000..100_000)));
        assert_eq!(changed.bytes(), 100_000);
    }
}
/// The points of segments, the oldest first.
pub(crate) fn points_of(
    segments: &[Segment],
    grain_bytes: u64,
    size_bytes: u64,
    everything: Option<&str>,
) -> Vec<TrackPoint> {
    let point = |(position, segment): (usize, &Segment)| {
        let changed = changed_in(segments.get(position..)?, grain_bytes, size_bytes, everything, 0..u64::MAX);
        Some(TrackPoint {
            name: segment.name.clone(),
            id: segment.id(),
            started: UNIX_EPOCH + Duration::from_secs(segment.started_seconds.min(u64::from(u32::MAX) * 4)),
            changed_bytes: changed.bytes(),
            everything: changed.everything,
            linkage_id: segment.linkage_id,
            size_bytes: segment.size_bytes,
        })
    };
    segments.iter().enumerate().filter_map(point).collect()
}

/// Which changes are asked for.
#[derive(Debug, Clone)]
pub(crate) struct ChangesQuery<'a> {
    /// The point from which on they count.
    pub(crate) name: &'a str,
    /// The point of this name that is meant; `None` for any.
    pub(crate) id: Option<u64>,
    /// The point up to which they count; `None` for now.
    pub(crate) to: Option<&'a str>,
    /// The range of the disk, in bytes.
    pub(crate) window: Range<u64>,
}

impl ChangesQuery<'_> {
    /// The segments from the first point to the second one. `None` if one of them is not there, or
    /// they are in another order.
    pub(crate) fn segments<'s>(&self, segments: &'s [Segment]) -> Option<&'s [Segment]> {
        let first = segments.iter().position(|segment| segment.begins_with(self.name, self.id))?;
        let end = match self.to {
            Some(name) => segments.iter().position(|segment| segment.name == name)?,
            None => segments.len(),
        };
        segments.get(first..end)
    }

    pub(crate) fn changed(
        &self,
        segments: &[Segment],
        grain_bytes: u64,
        now_bytes: u64,
        everything: Option<&str>,
    ) -> Option<Changed> {
        let end = self.to.and_then(|name| segments.iter().find(|segment| segment.name == name));
        let size_bytes = end.map_or(now_bytes, |end| end.size_bytes);
        Some(changed_in(self.segments(segments)?, grain_bytes, size_bytes, everything, self.window.clone()))
    }
}

/// What has changed in these segments, within `window`.
fn changed_in(
    since: &[Segment],
    grain_bytes: u64,
    size_bytes: u64,
    everything: Option<&str>,
    window: Range<u64>,
) -> Changed {
    let reason = everything.map(str::to_owned).or_else(|| since.iter().find_map(|segment| segment.everything.clone()));
    let mut words =
        vec![0; since.iter().map(|segment| segment.exact.grains().div_ceil(64)).max().unwrap_or(0) as usize];
    let (first, last) = (window.start / grain_bytes / 64, window.end / grain_bytes / 64);
    for segment in since {
        segment.exact.add_to(&mut words, first as usize..(last as usize).saturating_add(1));
    }
    Changed { words: words.into(), grain_bytes, size_bytes, everything: reason }
}
