//! Rounds in which the subjects of a row take turns, by the lab's loop ([`rounds`]).

use diskwright_lab::{
    Result,
    progress::Progress,
    rounds::{self, Rounds, Steps, Window},
};
use diskwright_load::run::Watch;

/// Measures each of `subjects` once in each round, in an order that changes from round to round
/// and depends on `seed`. `measure` gets the index of the subject, as [`Window::cell`], and the
/// round.
///
/// # Errors
/// The first error of `measure`; `Stopped` if the user stopped it.
pub(crate) fn in_turns(
    phase: &str,
    subjects: &[&str],
    (count, seed): (usize, u64),
    progress: &mut dyn Progress,
    measure: &mut dyn FnMut(Window, &dyn Watch) -> Result<()>,
) -> Result<()> {
    let mut steps = Steps::new(progress, phase, count * subjects.len());
    let title = |window: Window| subjects.get(window.cell).map(|subject| (*subject).to_owned());
    rounds::interleave(&Rounds::new(count, seed), subjects.len(), &mut steps, &title, measure)?.or_stopped()
}
