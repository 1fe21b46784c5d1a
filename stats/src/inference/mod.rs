//! What may be concluded from few rounds: rank tests, shifts with intervals, and the correction for
//! asking many questions.
//!
//! ```text
//!   ranks.rs         midranks, and how rank sums are distributed when nothing differs
//!   rank_tests.rs    Mann-Whitney U for two groups, Wilcoxon's signed rank for pairs
//!   shift.rs         Hodges-Lehmann: by how much, with the interval that belongs to those tests
//!   holm.rs          p-values when several questions are asked at once
//!   power.rs         the fewest values with which a corrected test can reject at all
//! ```
//!
//! Rounds of a benchmark are few, skewed, and now and then one of them is spoilt; ranks feel
//! neither the skew nor the size of the spoilt one. All of it is exact where rounds are few, so
//! nothing leans on a normal distribution that ten rounds cannot have. Pure functions: numbers in,
//! numbers out.
//!
//! Where this is weak: rounds must not depend on each other, and rounds that follow each other on
//! one machine do, a little; the tests tell of *these two targets on this machine today*. Few
//! rounds cannot show anything at all: with five pairs the smallest p-value there is, is 0.0625.
//! [`Design`] says so beforehand.

mod holm;
mod power;
mod rank_tests;
mod ranks;
mod shift;

pub use holm::holm;
pub use power::{Design, SIGNIFICANT};
pub use rank_tests::{RankTest, mann_whitney, smallest_paired_p, smallest_unpaired_p, wilcoxon_signed_rank};
pub use shift::{Shift, middle, paired_shift, unpaired_shift};
