//! Holm's correction of p-values for several tests.

/// Holm-Bonferroni correction: returns the corrected p-values in the order of `p`.
///
/// If every test whose corrected p-value is below 0.05 is rejected, the probability of one or more
/// false rejections is at most 5 %. This holds for any number of tests and any dependence among
/// them.
///
/// The correction is conservative where the metrics depend on each other, as IOPS and mean latency
/// do at a fixed queue depth. It may then miss a small difference.
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
    fn corrected_p_values_agree_with_r() {
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
        fn corrected_p_values_keep_their_order_and_stay_between_p_and_bonferroni(p in prop::collection::vec(0.0_f64..=1.0, 1..20)) {
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
