//! What a run says, in a sentence.

use crate::{
    record::{End, PhaseRecord, Run},
    table::{figure, grouped},
};

/// The conclusion: one sentence for each phase, then how the run ended if that was not as planned.
pub fn sentences(run: &Run) -> Vec<String> {
    let mut all: Vec<String> = run.phases.iter().map(|phase| of_phase(run, phase)).collect();
    match &run.end {
        End::Complete => {}
        End::Stopped if run.phases.len() < run.job.phases.len() => all.push(format!(
            "Stopped in phase {} of {}: what stands here is partial.",
            run.phases.len(),
            run.job.phases.len()
        )),
        End::Stopped => all.push("Stopped before its end: what stands here is partial.".into()),
        End::Failed { first, errors } => all.push(format!(
            "FAILED: {} request{} did not succeed; the first: {first}. Figures of a failing device mean little.",
            grouped(*errors as f64),
            if *errors == 1 { "" } else { "s" }
        )),
    }
    all
}

/// `8K random 70 % read, 8 x 12 on disk.vhdx: 38,600 IOPS, 316 MB/s, 2.49 ms on average, 99 %
/// within 4.1 ms, 5.1 us of CPU each.`
fn of_phase(run: &Run, phase: &PhaseRecord) -> String {
    let what = what_ran(run, phase);
    let total = phase.total().both;
    if total.ios == 0 {
        return format!("{what}: no request was completed in the measured time.");
    }
    let latency = total.latency();
    let mut text = format!("{what}: {} IOPS, {} MB/s", figure(phase.iops()), figure(phase.mb_per_s()));
    if latency.count > 0 {
        text.push_str(&format!(", {} on average", crate::table::duration(latency.mean_ns())));
        // A percentile needs ten samples beyond it.
        if latency.nines() >= 2
            && let Some(p99) = latency.quantile_ns(0.99)
        {
            text.push_str(&format!(", 99 % within {}", crate::table::duration(p99 as f64)));
        }
    }
    text.push_str(&format!(", {} of CPU each.", crate::table::duration(phase.cpu_ns_per_io())));
    text
}

fn what_ran(run: &Run, phase: &PhaseRecord) -> String {
    let loads = run.job.phases.iter().find(|one| one.name == phase.name).map(|phase| phase.loads.as_slice());
    let loads: Vec<String> = loads.unwrap_or_default().iter().map(|load| load.title()).collect();
    let names: Vec<&str> = run.targets.iter().map(|target| target.name.trim_end_matches(':')).collect();
    let on = match names.as_slice() {
        [one] => (*one).to_owned(),
        [one, other] => format!("{one} and {other}"),
        many => format!("{} targets", many.len()),
    };
    let what = if loads.is_empty() { phase.name.clone() } else { loads.join(" beside ") };
    if run.job.phases.len() > 1 { format!("{}: {what} on {on}", phase.name) } else { format!("{what} on {on}") }
}
