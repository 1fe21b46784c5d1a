//! The chapter of a comparison.

use super::{ToChapter, parts};
use crate::comparison::{ComparisonRecord, Conclusion, FigureChange};
use diskwright_load::figures::Metric;
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{Bar, BarChart, Part},
};
use diskwright_stats::numbers::{list, short};
use maud::Markup;

/// Largest number of bars in a plot.
const BARS_MAX: usize = 40;

impl ToChapter for ComparisonRecord {
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
        blocks.push(Block::Heading("All measurements together".into()));
        blocks.push(Block::Table(table(record, &record.overall)));
    }
    blocks.push(Block::Heading("Each measurement".into()));
    blocks.push(Block::Table(table(record, &record.comparisons)));
    blocks.push(Block::Heading("What was compared".into()));
    blocks.push(Block::Table(sides(record)));
    let names: Vec<String> = record.sides.iter().map(|side| side.name.clone()).collect();
    let chapter =
        parts::chapter(&record.head, (id, name), format!("Comparison of {}", list(&names)), badges(record), blocks);
    // A comparison of saved results has no measuring time of its own; the results have.
    if record.paired { chapter } else { Chapter { subtitle: String::new(), ..chapter } }
}

fn badges(record: &ComparisonRecord) -> Vec<(Tone, String)> {
    let mut badges = Vec::new();
    if !record.failed.is_empty() {
        badges.push((Tone::Bad, "failed".to_owned()));
    }
    if !record.unjudged.is_empty() {
        let text = if record.undecided { "a condition is undecided" } else { "a condition was judged only in part" };
        badges.push((Tone::Warning, text.to_owned()));
    }
    badges.push(match record.paired {
        true => (Tone::Good, "interleaved rounds".into()),
        false => (Tone::Plain, "measured separately".into()),
    });
    badges
}

fn base_name(record: &ComparisonRecord) -> &str {
    record.sides.first().map_or("the base", |side| side.name.as_str())
}

/// A plot of one figure of one side: each measurement as a ratio to the base.
fn bars(record: &ComparisonRecord, side: usize, metric: Metric, id: &str) -> Option<Markup> {
    let side_name = &record.sides.get(side)?.name;
    let found: Vec<&FigureChange> = record
        .comparisons
        .iter()
        .filter(|comparison| comparison.side == side && comparison.metric == metric)
        .take(BARS_MAX)
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
                figure: match comparison.conclusion {
                    Conclusion::TooFewRounds => word(comparison.conclusion).1.into(),
                    conclusion => format!("{} ({})", percent(change.estimate), word(conclusion).1),
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
            description: format!("{} measurements with their confidence intervals; {better}.", found.len()),
            axis: "ratio to the base, with its confidence interval",
            write: &short,
            parts: vec![],
            bars,
            reference: Some((1.0, base_name(record).to_owned())),
        }
        .render(),
    )
}

fn word(conclusion: Conclusion) -> (Tone, &'static str) {
    match conclusion {
        Conclusion::Better => (Tone::Good, "better"),
        Conclusion::Worse => (Tone::Bad, "worse"),
        Conclusion::NoDifference => (Tone::Faint, "no significant difference"),
        Conclusion::TooFewRounds => (Tone::Faint, "too few rounds"),
    }
}

/// A share as a percentage with its sign.
fn percent(share: f64) -> String {
    format!("{:+.1} %", share * 100.0)
}

fn table(record: &ComparisonRecord, comparisons: &[FigureChange]) -> Table {
    let table = Table::new(
        format!(
            "Changes are median ratios to the base ({}). p: {} test with Holm’s correction for {} comparisons.",
            if record.paired { "Hodges-Lehmann over paired rounds" } else { "Hodges-Lehmann over all pairs of rounds" },
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
        .extend(keys.iter().chain(&["base", "side", "change", "interval", "p", "result"]).map(|head| (*head).into()));
    for comparison in comparisons {
        let show = |value: f64| {
            // The ratio over all measurements has no IOPS of its own.
            let known = (!comparison.group.is_empty()).then_some(value);
            Cell::maybe(known, |value| comparison.metric.show(value))
        };
        let (tone, text) = word(comparison.conclusion);
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
            // With too few rounds the change is not significant; only its interval is shown.
            match comparison.conclusion {
                Conclusion::TooFewRounds => Cell::text("not significant").toned(Tone::Faint),
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
            Cell::text(text).toned(tone),
        ]);
        table.row(row);
    }
    table
}

fn sides(record: &ComparisonRecord) -> Table {
    let mut table = Table::new(
        "The first is the base. Rounds: the smallest number of any measurement",
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

    /// The example has one round per side, so no change is shown.
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
        record.comparisons[0].conclusion = Conclusion::NoDifference;
        let (table, plot) = of(&record);
        assert!(format!("{table:?}").contains("-43.2 %") && plot.contains("-43.2 %"), "{table:?}");
        record.comparisons[0].conclusion = Conclusion::TooFewRounds;
        let (table, plot) = of(&record);
        assert!(!format!("{table:?}").contains("-43.2 %") && !plot.contains("-43.2 %"), "{table:?}");
        assert!(format!("{table:?}").contains("too few rounds"));
    }
}
