//! The ring of an engine: none, one of its own, or a share in a [`SharedRing`](crate::SharedRing).
//!
//! An engine with a ring of its own uses it directly: on this hot path nanoseconds count.
//! Supporting shared rings costs it one well-predicted branch.

use crate::{IoBuf, Slab, ring::Ring, shared::Member};

/// How an engine reaches a ring.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an engine has one link, and its own ring should be stored inline")]
pub(crate) enum Link {
    /// No ring: blocking calls do everything.
    None,
    Own(Ring),
    Shared(Member),
}

impl Link {
    pub(crate) fn is_some(&self) -> bool {
        !matches!(self, Self::None)
    }

    fn slab(&self) -> Option<&Slab> {
        match self {
            Self::None => None,
            Self::Own(ring) => ring.slab(),
            Self::Shared(member) => member.slab(),
        }
    }

    /// Whether `buf` is registered with the ring.
    #[inline]
    pub(crate) fn has_registered(&self, buf: &IoBuf) -> bool {
        self.slab().is_some_and(|slab| slab.owns(buf))
    }

    /// Calls `work` with the ring; `None` if there is no ring.
    #[inline]
    pub(crate) fn with<T>(&mut self, work: impl FnOnce(&mut Ring) -> T) -> Option<T> {
        let mut shared;
        let ring = match self {
            Self::None => return None,
            Self::Own(ring) => ring,
            Self::Shared(member) => {
                shared = member.ring();
                &mut *shared
            }
        };
        Some(work(ring))
    }

    /// The upper half of the `user_data` of the engine's entries.
    pub(crate) fn user_bits(&self) -> u64 {
        match self {
            Self::Shared(member) => member.user_bits(),
            Self::None | Self::Own(_) => 0,
        }
    }
}
