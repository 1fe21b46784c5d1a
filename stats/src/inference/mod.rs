//! Rank tests for two sets of rounds, shifts with confidence intervals, and Holm's correction for
//! several tests.
//!
//! ```text
//!   ranks.rs         null distributions of rank sums; the sorted differences of a test
//!   rank_tests.rs    Mann-Whitney U for two groups, Wilcoxon signed-rank for pairs
//!   shift.rs         Hodges-Lehmann estimate, with the interval that belongs to these tests
//!   holm.rs          p-values corrected for several tests
//!   power.rs         the fewest values with which a corrected test can reject
//! ```
//!
//! The rounds of a benchmark are few and skewed, and other load may slow one of them down by much.
//! Rank tests are robust against skew and against the size of an outlier. Up to 50 values the null
//! distributions are exact, so that no normal distribution is assumed for ten rounds. All functions
//! are pure.
//!
//! Limits: the tests assume independent rounds, but consecutive rounds on one machine depend on
//! each other a little. A result therefore holds for these two targets on this machine at this
//! time. Too few rounds cannot show any difference: five pairs have a smallest p-value of 0.0625.
//! [`Design`] gives the fewest rounds before anything is measured.

mod holm;
mod power;
mod rank_tests;
mod ranks;
mod shift;

pub use holm::holm;
pub use power::{Design, SIGNIFICANT};
pub use rank_tests::{RankTest, mann_whitney, wilcoxon_signed_rank};
pub(crate) use rank_tests::{smallest_paired_p, smallest_unpaired_p};
pub use shift::{Shift, hodges_lehmann, paired_shift, unpaired_shift};
