//! The chapter of a sweep: throughput against latency with the marked loads; heat maps for two
//! axes.

use super::{
    ToChapter,
    parts::{self, end_badge, how_measured},
};
use crate::sweep::{Coordinate, KneeRow, SweepCell, SweepRecord};
use diskwright_load::{figures::Figures, record::End};
use diskwright_outline::{
    Block, Cell, Chapter, Table, Tone,
    plot::{self, Axis, HeatMap, LineChart, Point, Scale, Series},
};
use diskwright_stats::{
    knee::{Mark, MarkedPoint},
    numbers::{bytes, duration as time, figure as rate, grouped as count, list, percent, ratio, short, short_time},
};
use maud::Markup;

impl ToChapter for SweepRecord {
    fn chapter(&self, id: &str, name: &str) -> Chapter {
        chapter(self, id, name)
    }
}

fn chapter(sweep: &SweepRecord, id: &str, name: &str) -> Chapter {
    let mut blocks = Vec::new();
    let mut plots = vec![throughput(&[(String::new(), sweep)], &format!("{id}-tl"))];
    if let [rows, columns] = sweep.options.axes.as_slice() {
        let map = |title, what, figure, write, log| Map { title, what, figure, write, log };
        let maps = [
            map("IOPS", "IOPS", |figures| figures.iops, &short as &dyn Fn(f64) -> String, false),
            map("Mean latency", "mean latency", |figures| figures.mean_ns, &time, true),
            map("CPU time per request", "CPU time per request", |figures| figures.cpu_ns_per_io, &time, false),
        ];
        for (number, map) in maps.iter().enumerate() {
            plots.push(heat_map(sweep, (rows.knob.name(), columns.knob.name()), map, &format!("{id}-map{number}")));
        }
    } else {
        plots.extend(against_load(sweep, id));
    }
    blocks.push(Block::Plots(plots));
    if !sweep.knees.is_empty() {
        blocks.push(Block::Heading("Marked loads".into()));
        blocks.push(Block::Table(marked_points(sweep)));
    }
    blocks.push(Block::Heading("All cells".into()));
    blocks.push(Block::Table(cells(sweep)));
    match &sweep.head.end {
        End::Complete => {}
        End::Stopped => blocks.push(Block::Text("Stopped before its end; the same command resumes it.".into())),
        End::Failed { .. } => {
            blocks.push(Block::Text("Ended because requests failed; earlier windows are kept.".into()));
        }
    }
    blocks.extend(how_measured(&sweep.head, facts(sweep)));
    blocks.push(Block::Heading("The workload that the cells vary".into()));
    blocks.push(Block::Code {
        name: "A profile; the sweep varied the axes above.".into(),
        text: sweep.options.job.to_toml(),
        language: "toml",
    });
    let axes: Vec<String> = sweep.options.axes.iter().map(|axis| axis.knob.name().to_owned()).collect();
    let title = format!("Sweep of {} over {}", sweep.options.job.name, list(&axes));
    parts::chapter(&sweep.head, (id, name), title, vec![end_badge(&sweep.head.end)], blocks)
}

fn facts(sweep: &SweepRecord) -> Vec<(String, String)> {
    let mut facts = Vec::new();
    let mut add = |name: &str, value: String| facts.push((name.to_owned(), value));
    for target in &sweep.targets {
        add("Target", format!("{} ({}, {})", target.name, target.kind, bytes(target.size_bytes)));
    }
    if let Some(load) = sweep.options.job.phases.first().and_then(|phase| phase.loads.first()) {
        let axes: Vec<String> = sweep.options.axes.iter().map(ToString::to_string).collect();
        add("Workload", format!("{}, with {}", load.title(), axes.join(" and ")));
    }
    add("Rounds", sweep.options.rounds.to_string());
    if let Some(limit) = sweep.options.max_p99 {
        add("Limit for the 99th percentile", limit.to_string());
    }
    if let Some(array) = sweep.options.array {
        add("Array", format!("{} copies on {} devices", array.copies, array.devices));
    }
    sweep.labels.iter().for_each(|(name, value)| add(&format!("Label {name}"), value.clone()));
    facts
}

fn place(point: &[Coordinate]) -> String {
    list(&point.iter().map(|at| format!("{} {}", at.knob.name(), at.knob.show(at.value))).collect::<Vec<_>>())
}

/// The lines of a sweep: cells in ascending load; without a load axis, all cells as one line.
fn lines(sweep: &SweepRecord) -> Vec<(String, Vec<&SweepCell>, Option<&KneeRow>)> {
    if sweep.knees.is_empty() {
        return vec![("cells".into(), sweep.cells.iter().collect(), None)];
    }
    sweep
        .knees
        .iter()
        .map(|row| {
            let name = if row.fixed.is_empty() { "mean latency".to_owned() } else { place(&row.fixed) };
            (name, row.cells.iter().filter_map(|index| sweep.cells.get(*index)).collect(), Some(row))
        })
        .collect()
}

/// Throughput against latency, with a line for each row of each sweep. A single line also has its
/// marked loads.
pub fn throughput(sweeps: &[(String, &SweepRecord)], id: &str) -> Markup {
    let mut series: Vec<Series> = Vec::new();
    let mut marks: Vec<plot::Mark> = Vec::new();
    for (name, sweep) in sweeps {
        for (line, cells, row) in lines(sweep) {
            let label = if name.is_empty() {
                line
            } else if sweep.knees.len() > 1 {
                format!("{name}: {line}")
            } else {
                name.clone()
            };
            let points: Vec<Point> = cells
                .iter()
                .filter_map(|cell| {
                    let (x, y) = (
                        cell.measured.median(|figures| figures.iops)?,
                        cell.measured.median(|figures| figures.mean_ns)?,
                    );
                    let tooltip = format!("{}: {} IOPS, mean latency {}", place(&cell.point), rate(x), time(y));
                    (y > 0.0).then_some(Point { x, y, tooltip })
                })
                .collect();
            series.push(Series { name: label, points, style: series.len(), line: row.is_some(), x_error: 0.0 });
            for (name, mark) in row.into_iter().flat_map(named_marks) {
                let Some(point) = mark.found() else { continue };
                // Several marks may be at the same cell; then one ring has all their names.
                match marks.iter_mut().find(|other| (other.x, other.y) == (point.iops, point.mean_ns)) {
                    Some(other) => {
                        other.name = format!("{}, {name}", other.name);
                        other.tooltip = format!("{}; {}", other.tooltip, mark_tooltip(name, point));
                    }
                    None => marks.push(plot::Mark {
                        x: point.iops,
                        y: point.mean_ns,
                        name: name.into(),
                        tooltip: mark_tooltip(name, point),
                    }),
                }
            }
        }
    }
    // The names of marks on several lines would overlap; the table and the heat maps have them.
    if series.len() > 1 {
        marks.clear();
    }
    let all = || series.iter().flat_map(|line| &line.points);
    let tooltips: Vec<String> = marks.iter().map(|mark| mark.tooltip.clone()).collect();
    LineChart {
        id: id.into(),
        title: "Throughput against latency".into(),
        description: format!("Each point is a cell of the sweep (medians of the rounds). {}", tooltips.join("; ")),
        x: Axis {
            title: "IOPS",
            scale: Scale::from_zero(all().map(|point| point.x).fold(0.0, f64::max) * 1.06),
            write: &short,
            at: None,
        },
        y: Axis {
            title: "mean latency (log scale)",
            scale: Scale::log_around(all().flat_map(|point| [point.y * 0.85, point.y * 1.15])),
            write: &short_time,
            at: None,
        },
        series,
        bands: vec![],
        marks,
        rules: vec![],
    }
    .render()
}

fn named_marks(row: &KneeRow) -> Vec<(&'static str, &Mark)> {
    let knee = &row.knee;
    let mut marks = vec![("efficient", &knee.efficient), ("saturation", &knee.saturation)];
    marks.extend(knee.limit.as_ref().map(|mark| ("limit", mark)));
    marks.push(("the paper’s rule", &knee.paper));
    marks
}

fn mark_tooltip(name: &str, point: &MarkedPoint) -> String {
    format!("{name}: {} in flight, {} IOPS, mean latency {}", short(point.load), rate(point.iops), time(point.mean_ns))
}

/// IOPS, latency and CPU time against the first axis.
pub fn against_load(sweep: &SweepRecord, id: &str) -> Vec<Markup> {
    let Some(axis) = sweep.options.axes.first() else { return vec![] };
    let places: Vec<f64> = sweep.cells.iter().filter_map(|cell| Some(cell.point.first()?.value as f64)).collect();
    let line = |name: &str, style, figure: fn(&Figures) -> f64, write: fn(f64) -> String| {
        let points = sweep.cells.iter().filter_map(|cell| {
            let (at, y) = (cell.point.first()?, cell.measured.median(figure)?);
            Some(Point { x: at.value as f64, y, tooltip: format!("{}: {name} {}", place(&cell.point), write(y)) })
        });
        Series { name: name.into(), points: points.collect(), style, line: true, x_error: 0.0 }
    };
    let above_zero = places.iter().copied().fold(f64::INFINITY, f64::min) > 0.0;
    let (low, high) =
        (places.iter().copied().fold(f64::INFINITY, f64::min), places.iter().copied().fold(0.0, f64::max));
    // A logarithmic axis suits powers of two, but has no 0.
    let scale = || {
        if above_zero && high / low > 12.0 {
            Scale::log_around(places.clone())
        } else {
            Scale::between(low.min(high), high)
        }
    };
    let write = |value: f64| axis.knob.show(value as u64);
    let x = || Axis { title: axis.knob.name(), scale: scale(), write: &write, at: Some(places.clone()) };
    let iops = vec![line("IOPS", 0, |figures| figures.iops, rate)];
    let times = vec![
        line("mean", 0, |figures| figures.mean_ns, time),
        line("p50", 1, |figures| figures.p50_ns, time),
        line("p99", 2, |figures| figures.p99_ns, time),
    ];
    let cpu = vec![line("generator", 0, |figures| figures.cpu_ns_per_io, time)];
    let highest =
        |lines: &[Series]| lines.iter().flat_map(|line| &line.points).map(|point| point.y).fold(0.0, f64::max);
    let chart = |part: &str, title: &str, y: Axis<'_>, series: Vec<Series>| {
        LineChart {
            id: format!("{id}-{part}"),
            title: title.into(),
            description: format!("{title} at each value of {}, medians of the rounds.", axis.knob.name()),
            x: x(),
            y,
            series,
            bands: vec![],
            marks: vec![],
            rules: vec![],
        }
        .render()
    };
    let times_scale = Scale::log_around(times.iter().flat_map(|line| &line.points).map(|point| point.y));
    vec![
        chart(
            "iops",
            "IOPS",
            Axis { title: "IOPS", scale: Scale::from_zero(highest(&iops)), write: &short, at: None },
            iops,
        ),
        chart(
            "times",
            "Latency",
            Axis { title: "latency (log scale)", scale: times_scale, write: &short_time, at: None },
            times,
        ),
        chart(
            "cpu",
            "CPU time per request",
            Axis {
                title: "CPU time per request",
                scale: Scale::from_zero(highest(&cpu)),
                write: &short_time,
                at: None,
            },
            cpu,
        ),
    ]
}

struct Map<'a> {
    title: &'a str,
    what: &'a str,
    figure: fn(&Figures) -> f64,
    write: &'a dyn Fn(f64) -> String,
    log: bool,
}

fn heat_map(sweep: &SweepRecord, (y_title, x_title): (&str, &str), map: &Map<'_>, id: &str) -> Markup {
    let values = |axis: usize| {
        let mut values: Vec<Coordinate> = Vec::new();
        for at in sweep.cells.iter().filter_map(|cell| cell.point.get(axis)) {
            if !values.contains(at) {
                values.push(*at);
            }
        }
        values.sort_by_key(|at| at.value);
        values
    };
    let (rows, columns) = (values(0), values(1));
    let find = |row: &Coordinate, column: &Coordinate| {
        sweep.cells.iter().position(|cell| cell.point.as_slice() == [*row, *column])
    };
    let cells: Vec<Vec<Option<f64>>> = rows
        .iter()
        .map(|row| columns.iter().map(|column| sweep.cells[find(row, column)?].measured.median(map.figure)).collect())
        .collect();
    let mut marks = Vec::new();
    for (name, index) in sweep.knees.iter().flat_map(|row| {
        let short = |(name, mark): (&'static str, &Mark)| Some((name, *row.cells.get(mark.found()?.cell)?));
        named_marks(row).into_iter().take(2).filter_map(short).collect::<Vec<_>>()
    }) {
        let place = |axis: usize, values: &[Coordinate]| {
            let at = sweep.cells.get(index)?.point.get(axis)?;
            values.iter().position(|value| value == at)
        };
        if let (Some(row), Some(column)) = (place(0, &rows), place(1, &columns)) {
            match marks.iter_mut().find(|(r, c, _): &&mut (usize, usize, String)| (*r, *c) == (row, column)) {
                Some((_, _, word)) => *word = format!("{word}, {name}"),
                None => marks.push((row, column, name.to_owned())),
            }
        }
    }
    let found: Vec<f64> = cells.iter().flatten().flatten().copied().collect();
    let (low, high) = (found.iter().copied().fold(f64::INFINITY, f64::min), found.iter().copied().fold(0.0, f64::max));
    HeatMap {
        id: id.into(),
        title: format!("{} by {y_title} and {x_title}", map.title),
        description: format!(
            "{} measured cells; {} from {} to {}.",
            found.len(),
            map.what,
            (map.write)(low),
            (map.write)(high)
        ),
        x_title,
        y_title,
        z_title: map.what,
        columns: columns.iter().map(|at| at.knob.show(at.value)).collect(),
        rows: rows.iter().map(|at| at.knob.show(at.value)).collect(),
        cells,
        write: map.write,
        log: map.log,
        marks,
    }
    .render()
}

/// The marked loads of each line, or why there is none.
pub fn marked_points(sweep: &SweepRecord) -> Table {
    let heads = ["rule", "line", "in flight", "95 % interval", "IOPS", "mean", "p99", "remark"];
    let mut table = Table::new(
        "Efficient: largest ratio of IOPS to latency. Saturation: first load at 95 % of the peak. Limit: most IOPS with p99 under the limit. 95 % interval: by bootstrap.",
        &heads,
    );
    for row in &sweep.knees {
        for (name, mark) in named_marks(row) {
            let line = if row.fixed.is_empty() { String::new() } else { place(&row.fixed) };
            match mark {
                Mark::Found(point) => table.row(vec![
                    Cell::text(name),
                    Cell::text(line),
                    Cell::figure(point.load, short),
                    Cell::text(point.interval.map_or_else(String::new, |interval| {
                        format!("{}..{}", short(interval.low), short(interval.high))
                    })),
                    Cell::figure(point.iops, rate),
                    Cell::figure(point.mean_ns, time),
                    Cell::figure(point.p99_ns, time),
                    Cell::text(if point.open_above { "may be above the largest load" } else { "" }),
                ]),
                Mark::Undetermined { why } => {
                    let mut cells = vec![Cell::text(name), Cell::text(line)];
                    cells.extend((0..5).map(|_| Cell::maybe(None, short)));
                    cells.push(Cell::text(why.to_string()).toned(Tone::Faint));
                    table.row(cells);
                }
            }
        }
    }
    table
}

pub fn cells(sweep: &SweepRecord) -> Table {
    let mut table = Table::new(
        "Medians of the rounds; range: over the rounds. Power: IOPS divided by mean latency, as a share of the largest.",
        &[],
    )
    .keys(sweep.options.axes.len());
    table.heads.extend(sweep.options.axes.iter().map(|axis| axis.knob.name().to_owned()));
    let split = sweep.options.total_depth.is_some();
    if split {
        table.heads.push("threads × depth".into());
    }
    let heads = ["in flight", "IOPS", "range", "MB/s", "mean", "p50", "p99", "CPU/IO", "power", "mark"];
    table.heads.extend(heads.map(str::to_owned));
    let array = sweep.cells.iter().any(|cell| cell.array(&sweep.options).is_some());
    if array {
        table.heads.extend(["amplification", "depth per device", "IOPS per device"].map(str::to_owned));
    }
    let times: [fn(&Figures) -> f64; 4] = [
        |figures| figures.mean_ns,
        |figures| figures.p50_ns,
        |figures| figures.p99_ns,
        |figures| figures.cpu_ns_per_io,
    ];
    let power = |cell: &SweepCell| {
        cell.measured.median(|round| if round.mean_ns > 0.0 { round.iops / round.mean_ns } else { 0.0 })
    };
    let most = sweep.cells.iter().filter_map(power).fold(0.0, f64::max);
    for (index, cell) in sweep.cells.iter().enumerate() {
        let mut row: Vec<Cell> =
            cell.point.iter().map(|at| Cell::figure(at.value as f64, |_| at.knob.show(at.value))).collect();
        if split {
            row.push(Cell::text(format!("{} × {}", cell.threads, cell.queue_depth)));
        }
        row.push(Cell::figure(cell.measured.in_flight as f64, count));
        row.push(Cell::maybe(cell.measured.median(|figures| figures.iops), rate));
        row.push(Cell::text(range(cell)).toned(Tone::Faint));
        row.push(Cell::maybe(cell.measured.median(|figures| figures.mb_per_s), rate));
        for figure in times {
            row.push(Cell::maybe(cell.measured.median(figure), time));
        }
        row.push(Cell::maybe(power(cell), |value| percent(value / most.max(f64::MIN_POSITIVE))));
        row.push(Cell::text(points(sweep, index)).toned(Tone::Good));
        if array {
            let array = cell.array(&sweep.options);
            row.push(Cell::maybe(array.map(|array| array.amplification), ratio));
            row.push(Cell::maybe(array.map(|array| array.depth_per_device), rate));
            row.push(Cell::maybe(array.map(|array| array.iops_per_device), rate));
        }
        table.row(row);
    }
    table
}

/// The range of the IOPS over the rounds.
fn range(cell: &SweepCell) -> String {
    match cell.measured.rounds.len() {
        0 => "not measured".into(),
        1 => String::new(),
        _ => {
            let each = || cell.measured.rounds.iter().map(|round| round.iops);
            format!("{}..{}", rate(each().fold(f64::INFINITY, f64::min)), rate(each().fold(0.0, f64::max)))
        }
    }
}

/// The names of the marks at a cell.
fn points(sweep: &SweepRecord, index: usize) -> String {
    let mut names = Vec::new();
    for row in &sweep.knees {
        let found = |mark: &Mark| mark.found().is_some_and(|point| row.cells.get(point.cell) == Some(&index));
        names.extend(named_marks(row).into_iter().filter(|(_, mark)| found(mark)).map(|(name, _)| name));
    }
    if let Some(best) = &sweep.best {
        if best.cell == index {
            names.push("best");
        } else if best.rivals.as_ref().is_some_and(|rivals| rivals.contains(&index)) {
            names.push("as good");
        }
    }
    names.join(", ")
}

/// The chapter with several sweeps in one plot.
pub fn overlay(sweeps: &[(String, &SweepRecord)], id: &str) -> Chapter {
    let verdicts: Vec<String> = sweeps.iter().map(|(name, sweep)| format!("{name}: {}", sweep.head.verdict)).collect();
    Chapter {
        id: id.to_owned(),
        title: format!("{} sweeps side by side", sweeps.len()),
        source: String::new(),
        subtitle: list(&sweeps.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>()),
        verdict: verdicts.join(" "),
        badges: vec![],
        warnings: vec![],
        blocks: vec![Block::Plots(vec![throughput(sweeps, &format!("{id}-tl"))])],
    }
}
