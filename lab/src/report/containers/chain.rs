//! The plots and the table of the chain-length experiment.

use super::marked::marked;
use crate::{
    cells::{Cell as Measured, Compared},
    paper,
    study::containers::{
        ChainRecord,
        record::{CHAIN, chain_name},
    },
};
use diskwright_outline::{
    Cell, Table, Tone,
    plot::{Axis, LineChart, Point, Scale, Series},
};
use diskwright_stats::numbers::bytes;
use diskwright_stats::numbers::{duration as time, figure as rate, grouped as count, ratio, short, short_time};
use maud::Markup;

/// One read workload through chains of all lengths.
pub(super) struct Reads<'a> {
    load: &'a str,
    /// MB/s of each length, and its IOPS as a ratio to a chain of one.
    lengths: Vec<Option<(f64, f64)>>,
}

impl<'a> Reads<'a> {
    pub(super) fn of(chain: &ChainRecord, cells: &'a [Measured]) -> Vec<Self> {
        let loads = Compared::of_part(cells, CHAIN);
        let reads = loads.iter().map(|load| {
            let first = load.cells.first().copied();
            let at = |children: u32| {
                let cell = load.cell(&chain_name(children))?;
                // The chain of one is the base of the ratios.
                let ratio = cell.ratio(first?, |round| round.iops).map_or(1.0, |ratio| ratio.median());
                Some((cell.median(|round| round.mb_per_s)?, ratio))
            };
            Self { load: load.load, lengths: chain.lengths.iter().map(|length| at(length.children)).collect() }
        });
        reads.collect()
    }
}

pub(super) fn plots(chain: &ChainRecord, reads: &[Reads<'_>], id: &str) -> Vec<Markup> {
    let lengths: Vec<f64> = chain.lengths.iter().map(|length| f64::from(length.children)).collect();
    let x = |title| Axis { title, scale: Scale::log_around(lengths.clone()), write: &short, at: Some(lengths.clone()) };
    let reads: Vec<Series> = reads
        .iter()
        .enumerate()
        .map(|(style, reads)| {
            let points = lengths.iter().zip(&reads.lengths).filter_map(|(children, found)| {
                let (mb_per_s, value) = (*found)?;
                Some(Point {
                    x: *children,
                    y: value,
                    tooltip: format!(
                        "{}, {children} children: {} times a chain of one, {} MB/s",
                        reads.load,
                        ratio(value),
                        rate(mb_per_s)
                    ),
                })
            });
            Series { name: reads.load.to_owned(), points: points.collect(), style, line: true, x_error: 0.0 }
        })
        .collect();
    let opening = Series {
        name: "opening and reading one block".into(),
        points: chain
            .lengths
            .iter()
            .map(|length| {
                let ns = (length.open.open_ns + length.open.read_ns) as f64;
                Point {
                    x: f64::from(length.children),
                    y: ns,
                    tooltip: format!(
                        "{} children: {}, peak memory {}",
                        length.children,
                        time(ns),
                        bytes(length.open.resident_peak_bytes)
                    ),
                }
            })
            .collect(),
        style: 0,
        line: true,
        x_error: 0.0,
    };
    let longest = |line: &Series| line.points.last().map(|point| point.tooltip.clone()).unwrap_or_default();
    let highest = reads.iter().flat_map(|line| &line.points).map(|point| point.y).fold(1.0, f64::max);
    vec![
        LineChart {
            id: format!("{id}-chain"),
            title: "Reading through a chain".into(),
            description: reads.iter().map(longest).collect::<Vec<_>>().join("; "),
            x: x("differencing disks above the base (log scale)"),
            y: Axis {
                title: "IOPS, ratio to a chain of one",
                scale: Scale::from_zero(highest),
                write: &short,
                at: None,
            },
            series: reads,
            bands: vec![],
            marks: vec![],
            rules: vec![],
        }
        .render(),
        LineChart {
            id: format!("{id}-open"),
            title: "Opening a chain".into(),
            description: longest(&opening),
            x: x("differencing disks above the base (log scale)"),
            y: Axis {
                title: "time (log scale)",
                scale: Scale::log_around(opening.points.iter().map(|point| point.y)),
                write: &short_time,
                at: None,
            },
            series: vec![opening],
            bands: vec![],
            marks: vec![],
            rules: vec![],
        }
        .render(),
    ]
}

pub(super) fn table(chain: &ChainRecord, reads: &[Reads<'_>]) -> Table {
    let mut table = Table::new(
        format!(
            "Data in the base ({}), read through the top; paper: ratios to the paper’s chain of one",
            bytes(chain.size_bytes)
        ),
        &["children"],
    );
    for reads in reads {
        table.heads.extend([format!("{} MB/s", reads.load), "ratio".into(), "paper, 2008".into(), "paper, R2".into()]);
    }
    table.heads.extend(["open".into(), "read one block".into(), "peak memory".into()]);
    for (index, length) in chain.lengths.iter().enumerate() {
        let mut row = vec![Cell::figure(f64::from(length.children), count)];
        for (reads, points) in reads.iter().zip([&paper::CHAIN_4K_RANDOM_READ, &paper::CHAIN_64K_SEQUENTIAL_READ]) {
            let (mb_per_s, value) = reads.lengths.get(index).copied().flatten().unzip();
            let (old, new) = paper::chain_ratios(points, length.children).unzip();
            row.push(Cell::maybe(mb_per_s, rate));
            row.push(marked(value));
            row.extend([old, new].map(|value| Cell::maybe(value, ratio).toned(Tone::Faint)));
        }
        row.push(Cell::figure(length.open.open_ns as f64, time));
        row.push(Cell::figure(length.open.read_ns as f64, time));
        row.push(Cell::figure(length.open.resident_peak_bytes as f64, |size| bytes(size as u64)));
        table.row(row);
    }
    table
}
