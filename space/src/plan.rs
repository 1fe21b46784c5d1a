//! Which slabs belong on the fast members: a decision without I/O.
//!
//! ```text
//! pinned to the fast tier ─▶ the hottest of the others, while there is room a slab that is there
//! already counts an eighth more, so slabs of equal heat do not change places
//! ```
//!
//! All slabs have the same size, so taking the hottest first is the best placement, up to slabs
//! with different numbers of copies.

use diskwright_format::space::change::Tier;

/// A slab as the plan sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SlabHeat {
    pub(crate) file: u32,
    pub(crate) index: u32,
    pub(crate) heat: u32,
    pub(crate) tier: Tier,
    /// Copies that it would have on fast members.
    pub(crate) copies: u32,
    /// Copies that it has on fast members now.
    pub(crate) on_fast: u32,
}

impl SlabHeat {
    pub(crate) fn is_fast(&self) -> bool {
        self.on_fast >= self.copies
    }
}

/// What to move: places in the list of slabs, in the order in which to do it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Plan {
    /// To the fast members, the hottest first.
    pub(crate) up: Vec<usize>,
    /// Away from them, the coldest first.
    pub(crate) down: Vec<usize>,
    /// The heat of the coldest slab that belongs on the fast members and is not pinned.
    pub(crate) limit: u32,
}

/// Decides. `room` is how many copies the fast members may hold.
pub(crate) fn plan(slabs: &[SlabHeat], room: u64) -> Plan {
    let mut order: Vec<usize> = (0..slabs.len()).filter(|&at| slabs[at].tier != Tier::Slow).collect();
    let weight = |at: usize| {
        let slab = &slabs[at];
        let heat = u64::from(slab.heat) * if slab.on_fast > 0 { 9 } else { 8 };
        (slab.tier == Tier::Fast, heat, slab.on_fast)
    };
    order.sort_by_key(|&at| std::cmp::Reverse(weight(at)));
    let mut belongs = vec![false; slabs.len()];
    let (mut used, mut limit) = (0, u32::MAX);
    for at in order {
        let slab = &slabs[at];
        // What nobody uses is not moved up; it may stay where it is.
        let is_wanted = slab.tier == Tier::Fast || slab.heat > 0 || slab.on_fast > 0;
        if is_wanted && used + u64::from(slab.copies) <= room {
            used += u64::from(slab.copies);
            belongs[at] = true;
            if slab.tier == Tier::Any {
                limit = limit.min(slab.heat);
            }
        }
    }
    let mut found = Plan { limit: if limit == u32::MAX { 0 } else { limit }, ..Plan::default() };
    for (at, slab) in slabs.iter().enumerate() {
        if belongs[at] && !slab.is_fast() {
            found.up.push(at);
        } else if !belongs[at] && slab.on_fast > 0 {
            found.down.push(at);
        }
    }
    found.up.sort_by_key(|&at| std::cmp::Reverse((slabs[at].tier == Tier::Fast, slabs[at].heat)));
    found.down.sort_by_key(|&at| (slabs[at].tier != Tier::Slow, slabs[at].heat));
    found
}

/// The share of the requests that go to slabs for which `is_fast` holds; `None` without requests.
pub(crate) fn share(slabs: &[SlabHeat], is_fast: impl Fn(usize, &SlabHeat) -> bool) -> Option<f64> {
    let all: u64 = slabs.iter().map(|slab| u64::from(slab.heat)).sum();
    let fast = slabs.iter().enumerate().filter(|(at, slab)| is_fast(*at, slab));
    let fast: u64 = fast.map(|(_, slab)| u64::from(slab.heat)).sum();
    (all > 0).then(|| fast as f64 / all as f64)
}

/// The share after a plan was carried out.
pub(crate) fn share_after(slabs: &[SlabHeat], plan: &Plan) -> Option<f64> {
    let (mut up, mut down) = (vec![false; slabs.len()], vec![false; slabs.len()]);
    plan.up.iter().for_each(|&at| up[at] = true);
    plan.down.iter().for_each(|&at| down[at] = true);
    share(slabs, |at, slab| up[at] || slab.is_fast() && !down[at])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn slab(heat: u32, tier: Tier, copies: u32, on_fast: u32) -> SlabHeat {
        SlabHeat { file: 1, index: 0, heat, tier, copies, on_fast }
    }

    /// The best share of any placement, by trying all.
    fn best(slabs: &[SlabHeat], room: u64) -> f64 {
        let mut best = 0.0_f64;
        for choice in 0..1_u32 << slabs.len() {
            let chosen = |at: usize| choice >> at & 1 == 1;
            let used: u64 = (0..slabs.len()).filter(|&at| chosen(at)).map(|at| u64::from(slabs[at].copies)).sum();
            if used <= room {
                best = best.max(share(slabs, |at, _| chosen(at)).unwrap_or(0.0));
            }
        }
        best
    }

    proptest! {
        /// With one number of copies and nothing pinned no placement is better, except by what
        /// keeps slabs of nearly equal heat in their places.
        #[test]
        fn no_placement_is_much_better(
            heats in prop::collection::vec((0..100_u32, any::<bool>()), 1..11),
            copies in 1..3_u32,
            room in 0..20_u64,
        ) {
            let slabs: Vec<SlabHeat> = heats
                .iter()
                .map(|&(heat, fast)| slab(heat, Tier::Any, copies, if fast { copies } else { 0 }))
                .collect();
            let found = plan(&slabs, room);
            let after = share_after(&slabs, &found).unwrap_or(0.0);
            prop_assert!(after >= best(&slabs, room) * 8.0 / 9.0 - 1e-9);
            let moved: u64 = found.up.iter().map(|&at| u64::from(slabs[at].copies)).sum();
            let (stay, gone) = (slabs.iter().filter(|slab| slab.on_fast > 0).count(), found.down.len());
            prop_assert!(moved + (stay - gone) as u64 * u64::from(copies) <= room);
            // From scratch it is the best one.
            let cold: Vec<SlabHeat> = slabs.iter().map(|one| SlabHeat { on_fast: 0, ..*one }).collect();
            let after = share_after(&cold, &plan(&cold, room)).unwrap_or(0.0);
            prop_assert!((after - best(&cold, room)).abs() < 1e-9);
        }
    }

    #[test]
    fn pins_come_first_and_equal_slabs_stay() {
        let slabs = [
            slab(1, Tier::Fast, 1, 0),
            slab(50, Tier::Any, 1, 0),
            slab(50, Tier::Any, 1, 1),
            slab(90, Tier::Slow, 1, 1),
            slab(0, Tier::Any, 1, 0),
        ];
        let found = plan(&slabs, 2);
        assert_eq!((found.up, found.down, found.limit), (vec![0], vec![3], 50));
        assert_eq!(plan(&slabs, 9).up, [0, 1], "what nobody uses stays on the slow members");
        let hot = [slab(56, Tier::Any, 1, 0), slab(50, Tier::Any, 1, 1)];
        assert_eq!(plan(&hot, 1), Plan { limit: 50, ..Plan::default() });
        let hotter = [slab(57, Tier::Any, 1, 0), slab(50, Tier::Any, 1, 1)];
        assert_eq!((plan(&hotter, 1).up, plan(&hotter, 1).down), (vec![0], vec![1]));
    }
}
