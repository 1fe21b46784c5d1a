//! The segments of a tracker: points are added and taken out, and the disk gets another size.
//!
//! A segment is the time from one point to the next. So a point that is taken out leaves its marks
//! to the one before it, and what has changed since a point is in its segment or a later one.
//!
//! Nothing here is durable: [`Inner::checkpoint`] follows. The caller holds the lock on [`Inner`].

use super::{Inner, grain_for};
use crate::engine::track::{bits::Bits, sidecar::Segment};
use diskwright_format::tracks::{GrainRun, POINTS_MAX};
use diskwright_image::LinkageId;
use std::{
    ops::Range,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

impl Inner {
    /// Adds a point. [`Inner::checkpoint`] must follow when no request uses the former view.
    /// `linkage_id` is that of an image with the contents that the disk has now. Returns the former
    /// durable bits.
    pub(crate) fn add_point(&mut self, name: &str, linkage_id: Option<LinkageId>) -> Arc<Bits> {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        self.segments.push(Segment {
            name: name.into(),
            started_seconds: now.as_secs(),
            started_ns: now.subsec_nanos(),
            linkage_id,
            size_bytes: self.size_bytes,
            everything: None,
            exact: Arc::new(Bits::new(self.grains())),
        });
        let fresh = Arc::new(Bits::new(self.grains()));
        std::mem::replace(&mut self.durable, fresh)
    }

    /// Takes back [`Inner::add_point`], which returned `former`.
    pub(crate) fn remove_last(&mut self, former: Arc<Bits>) {
        self.segments.pop();
        self.durable = former;
    }

    /// Whether a point of this name can be added.
    pub(crate) fn has_room_for(&self, name: &str) -> bool {
        self.segments.len() < POINTS_MAX && self.position(name).is_none()
    }

    fn position(&self, name: &str) -> Option<usize> {
        self.segments.iter().position(|segment| segment.name == name)
    }

    /// Takes a point out. Its segment, which belongs to the older points too, must be given to
    /// [`Inner::merge`] when no request uses the former view. `None` if there is no such point.
    pub(crate) fn take_point(&mut self, name: &str) -> Option<RemovedPoint> {
        let position = self.position(name)?;
        let segment = self.segments.remove(position);
        if position == self.segments.len() {
            self.durable = Arc::new(Bits::new(self.grains()));
        }
        Some(RemovedPoint { into: position.checked_sub(1), segment })
    }

    /// Adds the segment of a point that was taken out to the one before it.
    pub(crate) fn merge(&mut self, taken: RemovedPoint) {
        if let Some(into) = taken.into.and_then(|into| self.segments.get_mut(into)) {
            into.exact.add(&taken.segment.exact);
            into.everything = into.everything.take().or(taken.segment.everything);
        }
    }

    /// Gives all bitmaps another size, and the last segment another bitmap: what was in the former
    /// one must be added to it ([`Inner::add_former`]) when no request uses the former view. A disk
    /// that becomes so large that it needs larger grains counts as changed everywhere.
    pub(crate) fn set_size(&mut self, size_bytes: u64) {
        let larger = grain_for(size_bytes) > self.grain_bytes;
        self.size_bytes = size_bytes;
        if larger {
            self.grain_bytes = grain_for(size_bytes);
            // The bitmaps of all segments are lost, also for what has changed between two points.
            for segment in &mut self.segments {
                segment.everything.get_or_insert_with(|| format!("the disk was enlarged to {size_bytes} bytes"));
            }
        }
        let grains = self.grains();
        for segment in &mut self.segments {
            let resized = if larger { Bits::new(grains) } else { segment.exact.resized(grains) };
            segment.exact = Arc::new(resized);
        }
        self.durable = Arc::new(Bits::new(grains));
    }

    /// The exact bits of the last segment.
    pub(crate) fn last_bits(&self) -> Arc<Bits> {
        self.segments.last().map_or_else(|| Arc::new(Bits::new(self.grains())), |last| Arc::clone(&last.exact))
    }

    /// Adds what requests with the former view have changed, and a range.
    pub(crate) fn add_former(&mut self, former: &Bits, changed: Range<u64>) {
        let (grain_bytes, Some(last)) = (self.grain_bytes, self.segments.last()) else { return };
        if last.everything.is_none() {
            last.exact.add(former);
        }
        let first = changed.start / grain_bytes;
        last.exact.set(GrainRun { first, count: changed.end.div_ceil(grain_bytes).saturating_sub(first) });
    }

    /// Whether the disk has this point and no other.
    pub(crate) fn is_only(&self, name: &str) -> bool {
        self.segments.len() == 1 && self.position(name).is_some()
    }

    /// Everything counts as changed since the last point and all older ones.
    pub(crate) fn distrust(&mut self, why: &str) {
        if let Some(last) = self.segments.last_mut() {
            last.everything.get_or_insert_with(|| why.to_owned());
        }
    }
}

/// A point that was taken out.
pub(crate) struct RemovedPoint {
    into: Option<usize>,
    segment: Segment,
}
