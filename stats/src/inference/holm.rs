//! Several questions at once.

/// Holm's correction: p-values such that calling everything below 0.05 different is wrong about
/// anything at all in at most 5 of 100 comparisons of things that do not differ, whatever the
/// number of questions and however they hang together. In the order given.
///
/// Weak in that it asks much when the figures say the same thing in other words (IOPS and mean
/// latency do, at a fixed queue depth): it may miss a small difference, but it does not invent one.
pub fn holm(p: &[f64]) -> Vec<f64> {
    let mut order: Vec<usize> = (0..p.len()).collect();
    order.sort_by(|a, b| p[*a].total_cmp(&p[*b]));
    let (mut corrected, mut highest) = (vec![1.0; p.len()], 0.0_f64);
    for (rank, index) in order.into_iter().enumerate() {
        highest = highest.max(p[index] * (p.len() - rank) as f64).min(1.0);
        corrected[index] = highest;
    }
    corrected
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// R: `p.adjust(c(0.01, 0.04, 0.03, 0.005), "holm")` is 0.03 0.06 0.06 0.02.
    #[test]
    fn as_r_adjusts() {
        let corrected = holm(&[0.01, 0.04, 0.03, 0.005]);
        for (ours, theirs) in corrected.iter().zip([0.03, 0.06, 0.06, 0.02]) {
            assert!((ours - theirs).abs() < 1e-12, "{corrected:?}");
        }
        assert_eq!(holm(&[]), Vec::<f64>::new());
        assert_eq!(holm(&[0.04]), [0.04]);
        assert_eq!(holm(&[0.9, 0.8]), [1.0, 1.0]);
    }

    proptest! {
        #[test]
        fn never_smaller_never_reordered_never_above_bonferroni(p in prop::collection::vec(0.0_f64..=1.0, 1..20)) {
            let corrected = holm(&p);
            for (i, a) in p.iter().enumerate() {
                prop_assert!(corrected[i] >= *a && corrected[i] <= (a * p.len() as f64).min(1.0) + 1e-12);
                for (j, b) in p.iter().enumerate() {
                    prop_assert!(a > b || corrected[i] <= corrected[j]);
                }
            }
        }
    }
}
