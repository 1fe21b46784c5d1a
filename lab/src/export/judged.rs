//! CSV of comparisons and acceptance runs: one row per compared figure, or per check.

use crate::{
    acceptance::{AcceptanceRecord, Bar},
    comparison::{ComparisonRecord, FigureChange},
};
use diskwright_outline::Csv;
use std::io;

pub(super) fn comparison(csv: &mut Csv, name: &str, record: &ComparisonRecord) -> io::Result<()> {
    let side = |index: usize| record.sides.get(index).map_or_else(String::new, |side| side.name.clone());
    let row = |scope: &str, comparison: &FigureChange| {
        let change = &comparison.change;
        // All measurements together have no IOPS of their own.
        let known = |value: f64| if scope == "overall" { String::new() } else { value.to_string() };
        [
            ("result", name.to_owned()),
            ("scope", scope.to_owned()),
            ("base", side(0)),
            ("side", side(comparison.side)),
            ("measurement", comparison.group.clone()),
            ("figure", comparison.metric.name().to_owned()),
            ("base_median", known(comparison.base)),
            ("side_median", known(comparison.ours)),
            ("change", change.estimate.to_string()),
            ("change_low", change.interval.low.to_string()),
            ("change_high", change.interval.high.to_string()),
            ("confidence", change.confidence.to_string()),
            ("p", comparison.p.to_string()),
            ("p_corrected", comparison.p_corrected.to_string()),
            ("conclusion", format!("{:?}", comparison.conclusion)),
            ("base_rounds", comparison.rounds.0.to_string()),
            ("side_rounds", comparison.rounds.1.to_string()),
        ]
    };
    record.overall.iter().try_for_each(|comparison| csv.record(&row("overall", comparison)))?;
    record.comparisons.iter().try_for_each(|comparison| csv.record(&row("measurement", comparison)))
}

pub(super) fn acceptance(csv: &mut Csv, name: &str, record: &AcceptanceRecord) -> io::Result<()> {
    let figure = |value: Option<f64>| value.map_or_else(String::new, |value| value.to_string());
    for row in &record.rows {
        for check in &row.checks {
            let (at_least, at_most) = match check.bar {
                Some(Bar::AtLeast(value)) => (Some(value), None),
                Some(Bar::AtMost(value)) => (None, Some(value)),
                None => (None, None),
            };
            csv.record(&[
                ("result", name.to_owned()),
                ("started_utc", record.started_utc.clone()),
                ("promise", row.row.clone()),
                ("check", check.name.clone()),
                ("outcome", format!("{:?}", check.outcome).to_lowercase()),
                ("unit", check.unit.clone()),
                ("rounds", check.figure.map_or_else(String::new, |figure| figure.rounds.to_string())),
                ("median", figure(check.figure.map(|figure| figure.median))),
                ("min", figure(check.figure.map(|figure| figure.min))),
                ("max", figure(check.figure.map(|figure| figure.max))),
                ("at_least", figure(at_least)),
                ("at_most", figure(at_most)),
                ("sides_unit", check.sides_unit.clone()),
                ("ours_median", figure(check.ours.map(|side| side.median))),
                ("peer_median", figure(check.peer.map(|side| side.median))),
                ("why", check.why.clone().unwrap_or_default()),
            ])?;
        }
    }
    Ok(())
}
