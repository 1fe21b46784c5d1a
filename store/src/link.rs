//! How an engine comes by a ring: it has none, one of its own, or a share in one.
//!
//! An engine of its own drives its ring directly, and that path is the one that is counted in
//! nanoseconds: a share costs it nothing but one branch that always goes the same way.

use crate::{IoBuf, Slab, ring::Ring, shared::Member};

/// See the module.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "an engine has one of them, and its own ring is to lie near")]
pub(crate) enum Link {
    /// Everything is done by blocking calls.
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

    /// Whether a buffer is registered with the ring.
    #[inline]
    pub(crate) fn has_registered(&self, buf: &IoBuf) -> bool {
        self.slab().is_some_and(|slab| slab.owns(buf))
    }

    /// Does something with the ring, if there is one.
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

    /// What stands in the upper half of the `user_data` of the engine's entries.
    pub(crate) fn user_bits(&self) -> u64 {
        match self {
            Self::Shared(member) => member.user_bits(),
            Self::None | Self::Own(_) => 0,
        }
    }
}
