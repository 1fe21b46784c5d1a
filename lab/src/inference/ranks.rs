//! Midranks, and the distribution of rank sums when nothing differs.
//!
//! Ranks are counted twice (2, 4, 6, ...), so that the mean of two neighbours, which tied values share, is a whole number too and the
//! distribution can be counted exactly with ties and without (Streitberg and Roehmel's shift algorithm).

/// Values and their ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Ranks {
    /// Twice the midrank of each value, in the order of the values.
    pub doubled: Vec<usize>,
    /// The sum over groups of equal values of t^3 - t, which the normal approximations take off.
    pub tie_term: f64,
}

/// Ranks `values`, the smallest first. None of them may be NaN.
pub fn ranks(values: &[f64]) -> Ranks {
    let mut order: Vec<usize> = (0..values.len()).collect();
    order.sort_by(|a, b| values[*a].total_cmp(&values[*b]));
    let (mut doubled, mut tie_term, mut start) = (vec![0; values.len()], 0.0, 0);
    while start < order.len() {
        let mut end = start + 1;
        while end < order.len() && values[order[end]] == values[order[start]] {
            end += 1;
        }
        // Ranks start + 1 to end; twice their mean.
        for index in &order[start..end] {
            doubled[*index] = start + 1 + end;
        }
        let ties = (end - start) as f64;
        tie_term += ties.powi(3) - ties;
        start = end;
    }
    Ranks { doubled, tie_term }
}

/// How the sum of the ranks of `chosen` of the items is distributed when every choice is equally likely: element `s` is the
/// probability of the sum `s`.
pub fn sums_of_chosen(items: &[usize], chosen: usize) -> Vec<f64> {
    let most: usize = items.iter().sum();
    // ways[c][s]: choices of c items with the sum s, as shares, so that no count overflows.
    let mut ways = vec![vec![0.0; most + 1]; chosen + 1];
    ways[0][0] = 1.0;
    for (taken, item) in items.iter().enumerate() {
        for count in (1..=chosen.min(taken + 1)).rev() {
            let (fewer, more) = ways.split_at_mut(count);
            for sum in *item..=most {
                more[0][sum] += fewer[count - 1][sum - item];
            }
        }
    }
    let mut sums = ways.swap_remove(chosen);
    let all: f64 = sums.iter().sum();
    sums.iter_mut().for_each(|ways| *ways /= all);
    sums
}

/// How the sum is distributed when each item is taken or left with the throw of a coin.
pub fn sums_of_coins(items: &[usize]) -> Vec<f64> {
    let most: usize = items.iter().sum();
    let mut shares = vec![0.0; most + 1];
    shares[0] = 1.0;
    for item in items {
        for sum in (0..=most).rev() {
            let taken = if sum >= *item { shares[sum - item] } else { 0.0 };
            shares[sum] = (shares[sum] + taken) / 2.0;
        }
    }
    shares
}

/// Probability, under `distribution`, of a sum at least as far out as `sum`, on either side.
pub fn both_tails(distribution: &[f64], sum: usize) -> f64 {
    let below: f64 = distribution.iter().take(sum + 1).sum();
    let above: f64 = distribution.iter().skip(sum).sum();
    (2.0 * below.min(above)).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_share_their_ranks() {
        let found = ranks(&[3.0, 1.0, 3.0, 2.0, 3.0]);
        // Ranks 4, 1, 4, 2, 4.
        assert_eq!(found.doubled, [8, 2, 8, 4, 8]);
        assert_eq!(found.tie_term, 24.0);
        assert_eq!(ranks(&[]).doubled, Vec::<usize>::new());
    }

    #[test]
    fn small_distributions_are_those_counted_by_hand() {
        // Two of {1, 2, 3}: sums 3, 4, 5, each once.
        let third = 1.0 / 3.0;
        assert_eq!(sums_of_chosen(&[1, 2, 3], 2), [0.0, 0.0, 0.0, third, third, third, 0.0]);
        // Coins over {1, 2}: 0, 1, 2, 3.
        assert_eq!(sums_of_coins(&[1, 2]), [0.25; 4]);
        assert_eq!(both_tails(&[0.25; 4], 0), 0.5);
        assert_eq!(both_tails(&[0.25; 4], 2), 1.0);
    }
}
