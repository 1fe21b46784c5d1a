//! Computes the conclusions from the cells: knees, the best combination, and the verdict.
//!
//! All conclusions are computed again from all cells, so a resumed sweep has no outdated ones.

use super::{BestCells, Coordinate, KneeRow, Knob, SweepRecord, plan, warnings};
use diskwright_load::{figures::Metric, record::End, warning::Warning};
use diskwright_stats::{
    knee::{self, LoadRounds, Mark, MarkedPoint},
    numbers::{duration, figure, grouped},
};

/// Fewer rounds give a warning: their confidence intervals are of little use.
const FEW_ROUNDS: u32 = 3;

/// Computes knees, best combination, warnings and verdict.
pub fn conclude(record: &mut SweepRecord) {
    record.knees = knees(record);
    record.best = if record.knees.is_empty() { best(record) } else { None };
    warnings::settle(&mut record.head.warnings, record.cells.len());
    record.head.warnings.retain(|warning| !matches!(warning, Warning::FewRounds { .. }));
    if record.options.rounds < FEW_ROUNDS {
        record.head.warnings.push(Warning::FewRounds { rounds: record.options.rounds });
    }
    record.head.verdict = verdict(record);
}

/// The axis of growing load, to look for a knee: queue depth, else threads, else agents. `None` if
/// all cells have the same total depth.
pub fn load_axis(record: &SweepRecord) -> Option<Knob> {
    let varied = |knob: &Knob| record.options.axes.iter().any(|axis| axis.knob == *knob);
    let held = record.options.total_depth.is_some();
    Knob::ALL.into_iter().find(|knob| knob.is_load() && !held && varied(knob))
}

fn knees(record: &SweepRecord) -> Vec<KneeRow> {
    let Some(along) = load_axis(record) else { return Vec::new() };
    let mut rows: Vec<(Vec<Coordinate>, Vec<usize>)> = Vec::new();
    for (index, cell) in record.cells.iter().enumerate() {
        let fixed: Vec<Coordinate> = cell.point.iter().filter(|at| at.knob != along).copied().collect();
        match rows.iter_mut().find(|(other, _)| *other == fixed) {
            Some((_, cells)) => cells.push(index),
            None => rows.push((fixed, vec![index])),
        }
    }
    let limit_ns = record.options.max_p99.map(|span| span.as_nanos() as f64);
    rows.into_iter()
        .map(|(fixed, mut cells)| {
            cells.sort_by_key(|index| record.cells[*index].measured.in_flight);
            let line: Vec<LoadRounds> = cells.iter().map(|index| rounds_of(record, *index)).collect();
            let knee = knee::knee(&line, limit_ns);
            KneeRow { fixed, cells, knee }
        })
        .collect()
}

fn rounds_of(record: &SweepRecord, index: usize) -> LoadRounds {
    let cell = &record.cells[index];
    LoadRounds { load: cell.measured.in_flight as f64, rounds: cell.samples() }
}

fn best(record: &SweepRecord) -> Option<BestCells> {
    // Larger blocks give fewer requests per second, so block sizes are compared by bytes per
    // second.
    let by_bytes = record.options.axes.iter().any(|axis| axis.knob == Knob::BlockSize);
    let metric = if by_bytes { Metric::MbPerS } else { Metric::Iops };
    let measured: Vec<usize> =
        (0..record.cells.len()).filter(|index| !record.cells[*index].measured.rounds.is_empty()).collect();
    let values = |index: &usize| record.cells[*index].measured.each(|round| metric.of(round));
    let (best, rivals) = knee::best(&measured.iter().map(values).collect::<Vec<Vec<f64>>>())?;
    Some(BestCells {
        metric,
        cell: measured[best],
        rivals: rivals.map(|rivals| rivals.into_iter().map(|index| measured[index]).collect()),
    })
}

fn verdict(record: &SweepRecord) -> String {
    let mut text = match &record.head.end {
        End::Failed { first, errors } => format!("Requests failed ({errors}): {first}."),
        _ => unfinished(record),
    };
    if record.cells.iter().all(|cell| cell.measured.rounds.is_empty()) {
        return text;
    }
    if !text.is_empty() {
        text.push(' ');
    }
    let sentences: Vec<String> = match &record.best {
        Some(best) => vec![sentence_of_best(record, best)],
        None => record.knees.iter().map(sentence_of_row).collect(),
    };
    text.push_str(&sentences.join(" "));
    text
}

/// How many windows are measured; empty if all are.
pub fn unfinished(record: &SweepRecord) -> String {
    let done: usize = record.cells.iter().map(|cell| cell.measured.rounds.len()).sum();
    let all = record.cells.len() * record.options.rounds as usize;
    if done < all { format!("Unfinished: {done} of {all} windows measured.") } else { String::new() }
}

fn sentence_of_best(record: &SweepRecord, best: &BestCells) -> String {
    let cell = &record.cells[best.cell];
    let value = cell.measured.median(|round| best.metric.of(round)).unwrap_or(0.0);
    let mut text = format!(
        "The best of {} combinations is {}: {} {}",
        record.cells.len(),
        plan::title(&cell.point),
        figure(value),
        best.metric.title(),
    );
    if let Some(mean_ns) = cell.measured.median(|round| round.mean_ns) {
        text.push_str(&format!(" at {}", duration(mean_ns)));
    }
    match &best.rivals {
        None => text.push_str("; with one round, the difference may be noise"),
        Some(rivals) if rivals.is_empty() => text.push_str("; all others are significantly slower"),
        Some(rivals) => {
            let shown: Vec<String> =
                rivals.iter().take(4).map(|index| plan::title(&record.cells[*index].point)).collect();
            let more = rivals.len().saturating_sub(shown.len());
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            text.push_str(&format!("; not significantly different: {}{more}", shown.join("; ")));
        }
    }
    text.push('.');
    text
}

fn sentence_of_row(row: &KneeRow) -> String {
    let knee = &row.knee;
    let lead = if row.fixed.is_empty() { String::new() } else { format!("{}: ", plan::title(&row.fixed)) };
    let at = |point: &MarkedPoint| {
        format!(
            "{} in flight ({} IOPS at {}{})",
            point.load,
            grouped(point.iops),
            duration(point.mean_ns),
            interval(point)
        )
    };
    // A reason that holds for both points is given once.
    if let (Mark::Undetermined { why }, Mark::Undetermined { why: other }) = (&knee.efficient, &knee.saturation)
        && why == other
    {
        return format!("{lead}no knee found: {why}.");
    }
    let mut parts = vec![match &knee.efficient {
        Mark::Found(point) => format!("most efficient at {}", at(point)),
        Mark::Undetermined { why } => format!("no most efficient load found: {why}"),
    }];
    parts.push(match &knee.saturation {
        Mark::Found(point) => format!("saturated from {}", at(point)),
        Mark::Undetermined { why } => format!("no saturation found: {why}"),
    });
    match &knee.limit {
        Some(Mark::Found(point)) => {
            parts.push(format!("largest load within the limit: {}, p99 {}", at(point), duration(point.p99_ns)));
        }
        Some(Mark::Undetermined { why }) => parts.push(format!("no load within the limit: {why}")),
        None => {}
    }
    if let Mark::Found(point) = &knee.paper {
        parts.push(format!("by the paper's rule {}", point.load));
    }
    if let Some(share) = knee.falls {
        parts.push(format!("above the peak, IOPS fall by {} %", figure(share * 100.0)));
    }
    let text = format!("{lead}{}.", parts.join("; "));
    let mut letters = text.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// `, 95 % interval 7 to 9`, or `, measured once` with one round.
pub fn interval(point: &MarkedPoint) -> String {
    match point.interval {
        Some(ends) => {
            format!(", 95 % interval {} to {}{}", ends.low, ends.high, if point.open_above { " or more" } else { "" })
        }
        None => ", measured once".into(),
    }
}
