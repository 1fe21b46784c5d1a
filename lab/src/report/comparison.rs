//! The chapter of a comparison: which side is faster, by how much, and how sure that is.

use super::{Told, parts};
use crate::comparison::{ComparisonRecord, FigureChange, Said};
use diskwright_load::figures::Metric;
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::{list, short};
use maud::Markup;

/// More bars than this in one plot cannot be read.
const BARS_MOST: usize = 40;

impl Told for ComparisonRecord {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(record: &ComparisonRecord, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    let plots: Vec<Markup> = (1..record.sides.len())
        .flat_map(|side| Metric::ALL.map(|metric| bars(record, side, metric, id)))
        .flatten()
        .collect();
    if !plots.is_empty() {
        blocks.push(Block::Plots(plots));
    }
    if !record.overall.is_empty() {
        blocks.push(Block::Heading("Over all measurements".into()));
        blocks.push(Block::Table(table(record, &record.overall)));
    }
    blocks.push(Block::Heading("Each measurement".into()));
    blocks.push(Block::Table(table(record, &record.comparisons)));
    blocks.push(Block::Heading("What was compared".into()));
    blocks.push(Block::Table(sides(record)));
    let names: Vec<String> = record.sides.iter().map(|side| side.name.clone()).collect();
    let chapter =
        parts::chapter(&record.head, (id, name), format!("Comparison of {}", list(&names)), badges(record), blocks);
    // Results that were saved have times of their own.
    if record.paired { chapter } else { Chapter { subtitle: String::new(), ..chapter } }
}

fn badges(record: &ComparisonRecord) -> Vec<(Tone, String)> {
    let mut badges = Vec::new();
    if !record.failed.is_empty() {
        badges.push((Tone::Bad, "failed".to_owned()));
    }
    if !record.unjudged.is_empty() {
        let text = if record.undecided { "a condition is undecided" } else { "a condition was judged in part" };
        badges.push((Tone::Warning, text.to_owned()));
    }
    badges.push(match record.paired {
        true => (Tone::Good, "rounds took turns".into()),
        false => (Tone::Plain, "measured apart".into()),
    });
    badges
}

fn base_name(record: &ComparisonRecord) -> &str {
    record.sides.first().map_or("the base", |side| side.name.as_str())
}

/// One figure of one side: each measurement as a ratio to the base.
fn bars(record: &ComparisonRecord, side: usize, metric: Metric, id: &str) -> Option<Markup> {
    let side_name = &record.sides.get(side)?.name;
    let found: Vec<&FigureChange> = record
        .comparisons
        .iter()
        .filter(|comparison| comparison.side == side && comparison.metric == metric)
        .take(BARS_MOST)
        .collect();
    if found.is_empty() {
        return None;
    }
    let better = if metric.more_is_better() { "more is better" } else { "less is better" };
    let bars = found
        .iter()
        .map(|comparison| {
            let change = &comparison.change;
            Bar {
                name: if comparison.group.is_empty() { side_name.clone() } else { comparison.group.clone() },
                parts: vec![Part { value: 1.0 + change.estimate, style: 0 }],
                range: Some(((1.0 + change.interval.low).max(0.0), 1.0 + change.interval.high)),
                figure: match comparison.said {
                    Said::TooFewRounds => word(comparison.said).1.into(),
                    said => format!("{} ({})", percent(change.estimate), word(said).1),
                },
                tooltip: format!(
                    "{}: {} against {}, {} to {} with {:.0} % confidence",
                    comparison.group,
                    metric.show(comparison.ours),
                    metric.show(comparison.base),
                    percent(change.interval.low),
                    percent(change.interval.high),
                    change.confidence * 100.0
                ),
            }
        })
        .collect();
    let number = Metric::ALL.iter().position(|other| *other == metric).unwrap_or(0);
    Some(
        BarChart {
            id: format!("{id}-s{side}-m{number}"),
            title: format!("{} of {side_name} as a ratio to {}", metric.title(), base_name(record)),
            description: format!("{} measurements with their intervals; {better}.", found.len()),
            axis: "ratio to the base, with its interval",
            write: &short,
            parts: vec![],
            bars,
            reference: Some((1.0, base_name(record).to_owned())),
        }
        .render(),
    )
}

fn word(said: Said) -> (Tone, &'static str) {
    match said {
        Said::Better => (Tone::Good, "better"),
        Said::Worse => (Tone::Bad, "worse"),
        Said::NoDifference => (Tone::Faint, "no difference seen"),
        Said::TooFewRounds => (Tone::Faint, "too few rounds to tell"),
    }
}

/// With its sign.
fn percent(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

fn table(record: &ComparisonRecord, comparisons: &[FigureChange]) -> Table {
    let table = Table::new(
        format!(
            "Changes are median ratios to the base ({}). p: {} test, corrected by Holm for {} comparisons.",
            if record.paired {
                "Hodges-Lehmann over rounds in pairs"
            } else {
                "Hodges-Lehmann over all pairs of rounds"
            },
            if record.paired { "Wilcoxon’s signed rank" } else { "Mann-Whitney" },
            comparisons.len()
        ),
        &[],
    );
    let many_sides = record.sides.len() > 2;
    let many_groups = comparisons.iter().any(|comparison| comparison.group != comparisons[0].group);
    let keys = [(many_sides, "side"), (many_groups, "measurement"), (true, "figure")];
    let keys: Vec<&str> = keys.into_iter().filter_map(|(shown, head)| shown.then_some(head)).collect();
    let mut table = table.keys(keys.len());
    table
        .heads
        .extend(keys.iter().chain(&["base", "side’s", "change", "interval", "p", "said"]).map(|head| (*head).into()));
    for comparison in comparisons {
        let show = |value: f64| {
            // There is no such thing as the IOPS of all measurements.
            let known = (!comparison.group.is_empty()).then_some(value);
            Cell::maybe(known, |value| comparison.metric.show(value))
        };
        let (tone, said) = word(comparison.said);
        let ends = &comparison.change.interval;
        let mut row = Vec::new();
        if many_sides {
            row.push(Cell::text(record.sides.get(comparison.side).map_or("", |side| side.name.as_str())));
        }
        if many_groups {
            row.push(Cell::text(comparison.group.as_str()));
        }
        row.extend([
            Cell::text(comparison.metric.title()),
            show(comparison.base),
            show(comparison.ours),
            // So few rounds show no change, only an interval of little confidence.
            match comparison.said {
                Said::TooFewRounds => Cell::text("not shown").toned(Tone::Faint),
                _ => Cell::figure(comparison.change.estimate, percent),
            },
            Cell::text(match comparison.change.confidence {
                0.0 => "none".into(),
                less if less < 0.95 => {
                    format!("{}..{} ({:.0} %)", percent(ends.low), percent(ends.high), less * 100.0)
                }
                _ => format!("{}..{}", percent(ends.low), percent(ends.high)),
            }),
            Cell::figure(comparison.p_corrected, |p| if p < 0.0005 { "< 0.001".into() } else { format!("{p:.3}") }),
            Cell::text(said).toned(tone),
        ]);
        table.row(row);
    }
    table
}

fn sides(record: &ComparisonRecord) -> Table {
    let mut table = Table::new(
        "The first is the base. Rounds: the fewest of any measurement",
        &["side", "measurements", "rounds", "from", "cache", "machine", "version"],
    );
    for side in &record.sides {
        let rounds = side.groups.iter().map(|group| group.cell.rounds.len()).min().unwrap_or(0);
        let circumstances = &side.circumstances;
        table.row(vec![
            Cell::text(&side.name),
            Cell::figure(side.groups.len() as f64, short),
            Cell::figure(rounds as f64, short),
            Cell::text(side.sources.join(", ")),
            Cell::text(&circumstances.cache),
            Cell::text(&circumstances.machine),
            Cell::text(&circumstances.version),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    /// The example has one round a side: whatever it measured, no change is shown.
    #[test]
    fn a_change_that_so_few_rounds_cannot_show_is_not_in_the_page() {
        let mut record = example::comparison();
        let of = |record: &ComparisonRecord| {
            let blocks = chapter(record, "c", "c").blocks;
            let plot = blocks.iter().find_map(|block| match block {
                Block::Plots(plots) => Some(plots[0].0.clone()),
                _ => None,
            });
            (table(record, &record.comparisons[..1]), plot.unwrap())
        };
        record.comparisons[0].change.estimate = -0.4321;
        record.comparisons[0].said = Said::NoDifference;
        let (table, plot) = of(&record);
        assert!(format!("{table:?}").contains("-43.2 %") && plot.contains("-43.2 %"), "{table:?}");
        record.comparisons[0].said = Said::TooFewRounds;
        let (table, plot) = of(&record);
        assert!(!format!("{table:?}").contains("-43.2 %") && !plot.contains("-43.2 %"), "{table:?}");
        assert!(format!("{table:?}").contains("too few rounds to tell"));
    }
}
