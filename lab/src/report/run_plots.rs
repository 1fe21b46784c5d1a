//! Plots of runs: latency by percentile, time series, CPU.

use diskwright_load::record::{LatencyRecord, PhaseRecord, Run, SeriesPoint};
use diskwright_outline::plot::{
    Axis, Band, Bar, BarChart, LineChart, Mark, Part, Point, Rule, Scale, Series, downsample,
};
use diskwright_stats::numbers::{duration as time, figure as rate, percent, percentile, short, short_time};
use maud::Markup;

/// Latency by percentile. One phase has a line for reads, writes and flushes, and for service times
/// that differ from response times. Several phases have a line each.
pub fn percentiles(phases: &[(String, &PhaseRecord)], id: &str) -> Markup {
    let mut lines: Vec<(String, LatencyRecord)> = Vec::new();
    for (name, phase) in phases {
        let total = phase.total();
        if phases.len() > 1 {
            lines.push((name.clone(), total.both.latency().clone()));
            continue;
        }
        for (name, direction) in [("reads", &total.reads), ("writes", &total.writes), ("flushes", &total.flushes)] {
            lines.push((name.into(), direction.latency().clone()));
            if direction.response.is_some() {
                lines.push((format!("{name}, service time"), direction.service.clone()));
            }
        }
    }
    lines.retain(|(_, latency)| latency.count > 0 && !latency.buckets.is_empty());
    let nines = lines.iter().map(|(_, latency)| latency.nines()).max().unwrap_or(1).max(1);
    let series: Vec<Series> = lines
        .iter()
        .enumerate()
        .map(|(style, (name, latency))| Series {
            name: name.clone(),
            points: percentile_points(name, latency),
            style,
            line: true,
            x_error: 0.0,
        })
        .collect();
    let description: Vec<String> = lines
        .iter()
        .map(|(name, latency)| {
            let at = |share: f64| time(latency.quantile_ns(share).unwrap_or(0) as f64);
            format!("{name}: half within {}, 90 % within {}, max {}", at(0.5), at(0.9), time(latency.max_ns as f64))
        })
        .collect();
    LineChart {
        id: id.into(),
        title: "Latency by percentile".into(),
        description: format!("{}. Percentiles with at least ten slower requests are drawn.", description.join("; ")),
        x: Axis {
            title: "percentile (%; logarithmic in 100 % minus it)",
            scale: Scale::Nines { nines },
            write: &percentile,
            at: None,
        },
        y: Axis {
            title: "latency (log scale)",
            scale: Scale::log_around(series.iter().flat_map(|line| &line.points).map(|point| point.y)),
            write: &short_time,
            at: None,
        },
        series,
        bands: vec![],
        marks: vec![],
        rules: vec![],
    }
    .render()
}

/// One point per bucket, up to the last nine that the number of requests supports.
fn percentile_points(name: &str, latency: &LatencyRecord) -> Vec<Point> {
    let last = 1.0 - 10_f64.powi(-(latency.nines().max(1) as i32));
    let mut seen = 0;
    let mut places = vec![(0.0, latency.min_ns as f64)];
    for (value, count) in &latency.buckets {
        seen += count;
        let share = seen as f64 / latency.count.max(1) as f64;
        let ns = (*value).min(latency.max_ns) as f64;
        if share >= last {
            places.push((last, ns));
            break;
        }
        places.push((share, ns));
    }
    // A logarithmic axis has no 0.
    places.retain(|(_, ns)| *ns > 0.0);
    let tooltip =
        |share: f64, ns: f64| format!("{name}: {} % within {}", percentile((share * 1e7).round() / 1e7), time(ns));
    downsample(&places, 400).into_iter().map(|(x, y)| Point { x, y, tooltip: tooltip(x, y) }).collect()
}

pub(super) fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

/// Length of an interval of a phase, seconds. The last interval may be shorter than the others.
pub(super) fn length_s(phase: &PhaseRecord, point: &SeriesPoint) -> f64 {
    seconds(if point.len_ns > 0 { point.len_ns } else { phase.interval_ns.max(1) })
}

/// The middle of an interval, at which it is drawn, seconds from the start of the series.
pub(super) fn middle_s(phase: &PhaseRecord, point: &SeriesPoint) -> f64 {
    seconds(point.start_ns) + length_s(phase, point) / 2.0
}

/// IOPS over time, and latency over time.
pub fn series(phase: &PhaseRecord, id: &str) -> Vec<Markup> {
    let interval_s = seconds(phase.interval_ns).max(1e-9);
    let length = |point: &SeriesPoint| length_s(phase, point);
    let middle = |point: &SeriesPoint| middle_s(phase, point);
    let end = phase.series.last().map_or(0.0, |point| seconds(point.start_ns) + length(point));
    let (begin, until) =
        (seconds(phase.window_start_ns), seconds(phase.window_start_ns.saturating_add(phase.window_ns)));
    let mut bands = vec![];
    let mut band = |from: f64, to: f64, name: &str, class| {
        if to - from > 1e-6 {
            bands.push(Band { from, to, name: name.into(), class });
        }
    };
    band(0.0, begin, "warm-up", "warm");
    let steady = phase.steady.as_ref().is_some_and(|steady| steady.reached_ns.is_some() && steady.left_ns.is_none());
    band(begin, until.min(end), if steady { "measured, steady state" } else { "measured" }, "window");
    band(until, end, "cool-down", "warm");
    let mut rules = vec![];
    if let Some(steady) = &phase.steady {
        let at = |ns: u64, name: &str| Rule { x: seconds(ns), name: name.into() };
        rules.extend(steady.reached_ns.map(|ns| at(ns, "steady state reached")));
        rules.extend(steady.left_ns.map(|ns| at(ns, "steady state left")));
    }
    type Figure = fn(&SeriesPoint) -> f64;
    let line = |name: &str, style: usize, figure: &dyn Fn(&SeriesPoint) -> f64, write: fn(f64) -> String| Series {
        name: name.into(),
        points: phase
            .series
            .iter()
            .map(|point| Point {
                x: middle(point),
                y: figure(point),
                tooltip: format!("{} s: {name} {}", short(seconds(point.start_ns)), write(figure(point))),
            })
            .collect(),
        style,
        line: true,
        x_error: 0.0,
    };
    let both = |point: &SeriesPoint| (point.read_ios as f64 + point.write_ios as f64) / length(point);
    let directions: [(&str, Figure); 2] =
        [("reads", |point| point.read_ios as f64), ("writes", |point| point.write_ios as f64)];
    let used: Vec<(usize, &str, Figure)> = directions
        .into_iter()
        .enumerate()
        .filter(|(_, (_, figure))| phase.series.iter().any(|point| figure(point) > 0.0))
        .map(|(style, (name, figure))| (style, name, figure))
        .collect();
    let mut rates: Vec<Series> = used
        .iter()
        .map(|(style, name, figure)| line(name, *style, &|point| figure(point) / length(point), rate))
        .collect();
    if used.len() > 1 {
        rates.push(line("both", 2, &both, rate));
    }
    let latencies = vec![
        line("p50", 0, &|point| point.p50_ns as f64, time),
        line("p99", 1, &|point| point.p99_ns as f64, time),
        line("max", 2, &|point| point.max_ns as f64, time),
    ];
    let highest =
        |lines: &[Series]| lines.iter().flat_map(|line| &line.points).map(|point| point.y).fold(0.0, f64::max);
    let inside: Vec<f64> =
        phase.series.iter().filter(|point| (begin..until).contains(&middle(point))).map(both).collect();
    let (low, high) =
        (inside.iter().copied().fold(f64::INFINITY, f64::min), inside.iter().copied().fold(0.0, f64::max));
    let range = if inside.is_empty() {
        String::new()
    } else {
        format!(" In the measured window between {} and {} IOPS.", rate(low), rate(high))
    };
    let x = || Axis { title: "time in the phase (s)", scale: Scale::between(0.0, end), write: &short, at: None };
    let latency_scale = Scale::log_around(latencies.iter().flat_map(|line| &line.points).map(|point| point.y));
    vec![
        LineChart {
            id: format!("{id}-iops"),
            title: "IOPS over time".into(),
            description: format!("Requests completed in each interval of {interval_s} s.{range}"),
            x: x(),
            y: Axis { title: "IOPS", scale: Scale::from_zero(highest(&rates)), write: &short, at: None },
            series: rates,
            bands: bands.clone(),
            marks: vec![],
            rules: rules.clone(),
        }
        .render(),
        LineChart {
            id: format!("{id}-times"),
            title: "Latency over time".into(),
            description: format!(
                "Median, 99th percentile and maximum of the latency in each interval of {interval_s} s."
            ),
            x: x(),
            y: Axis { title: "latency (log scale)", scale: latency_scale, write: &short_time, at: None },
            series: latencies,
            bands,
            marks: vec![],
            rules,
        }
        .render(),
    ]
}

/// Share of the time in which each core was busy.
pub fn cores(phase: &PhaseRecord, id: &str) -> Markup {
    let mut busiest = (0, 0.0);
    let bars = phase
        .cpu
        .cores
        .iter()
        .enumerate()
        .map(|(index, core)| {
            let all = core.user_ns + core.system_ns + core.irq_ns + core.iowait_ns + core.idle_ns + core.stolen_ns;
            let share = |ns: u64| ns as f64 / all.max(1) as f64;
            let shares = [core.user_ns, core.system_ns, core.irq_ns, core.stolen_ns].map(share);
            let busy: f64 = shares.iter().sum();
            if busy > busiest.1 {
                busiest = (index, busy);
            }
            Bar {
                name: format!("core {index}"),
                parts: shares.iter().enumerate().map(|(style, share)| Part { value: share * 100.0, style }).collect(),
                range: None,
                figure: percent(busy),
                tooltip: format!(
                    "core {index}: user {}, kernel {}, interrupts {}, stolen {}, waiting for I/O {}",
                    percent(shares[0]),
                    percent(shares[1]),
                    percent(shares[2]),
                    percent(shares[3]),
                    percent(share(core.iowait_ns))
                ),
            }
        })
        .collect();
    BarChart {
        id: id.into(),
        title: "Cores of the machine in the measured window".into(),
        description: format!(
            "Share of the time that each core was busy. The busiest is core {} with {}.",
            busiest.0,
            percent(busiest.1)
        ),
        axis: "busy (% of the time)",
        write: &short,
        parts: ["user", "kernel", "interrupts", "stolen by the hypervisor"].map(str::to_owned).into(),
        bars,
        reference: None,
    }
    .render()
}

/// CPU time per request of every phase of every run.
pub fn cpu_cost(runs: &[(&str, &Run)], id: &str) -> Markup {
    let mut bars = Vec::new();
    for (name, run) in runs {
        for phase in &run.phases {
            let ios = phase.total().both.ios.max(1) as f64;
            let (user, system) = (phase.cpu.process_user_ns as f64 / ios, phase.cpu.process_system_ns as f64 / ios);
            let machine = if phase.cpu.cores.is_empty() { user + system } else { phase.machine_cpu_ns_per_io() };
            let others = (machine - user - system).max(0.0);
            let label = match (runs.len(), run.phases.len()) {
                (1, _) => phase.name.clone(),
                (_, 1) => (*name).to_owned(),
                _ => format!("{name}: {}", phase.name),
            };
            bars.push(Bar {
                figure: time(user + system),
                tooltip: format!(
                    "{label}: {} user and {} kernel time of the load generator, {} of the rest of the machine, per request",
                    time(user),
                    time(system),
                    time(others)
                ),
                name: label,
                parts: [user, system].into_iter().enumerate().map(|(style, value)| Part { value, style }).collect(),
                range: None,
            });
        }
    }
    BarChart {
        id: id.into(),
        title: "CPU time of the load generator per request".into(),
        description: bars.iter().map(|bar| bar.tooltip.clone()).collect::<Vec<_>>().join("; "),
        axis: "CPU time per request",
        write: &short_time,
        parts: ["user", "kernel"].map(str::to_owned).into(),
        bars,
        reference: None,
    }
    .render()
}

/// Throughput against latency; each phase is a point.
pub fn scatter(points: &[(String, &PhaseRecord)], id: &str) -> Markup {
    let mut series = Vec::new();
    for (style, (name, figure)) in [("mean", None), ("p99", Some(0.99))].into_iter().enumerate() {
        let points = points
            .iter()
            .filter_map(|(label, phase)| {
                let total = phase.total();
                let latency = total.both.latency();
                let ns = match figure {
                    None => latency.mean_ns(),
                    Some(share) => latency.quantile_ns(share).filter(|_| latency.count >= 1000)? as f64,
                };
                let tooltip = format!("{label}: {} IOPS, {name} latency {}", rate(phase.iops()), time(ns));
                (ns > 0.0).then(|| Point { x: phase.iops(), y: ns, tooltip })
            })
            .collect();
        series.push(Series { name: format!("{name} latency"), points, style, line: false, x_error: 0.0 });
    }
    let marks = points
        .iter()
        .zip(&series[0].points)
        .map(|((label, _), point)| Mark { x: point.x, y: point.y, name: label.clone(), tooltip: point.tooltip.clone() })
        .collect();
    let highest = points.iter().map(|(_, phase)| phase.iops()).fold(0.0, f64::max);
    LineChart {
        id: id.into(),
        title: "Throughput against latency".into(),
        description: series
            .iter()
            .flat_map(|line| &line.points)
            .map(|point| point.tooltip.clone())
            .collect::<Vec<_>>()
            .join("; "),
        x: Axis { title: "IOPS", scale: Scale::from_zero(highest * 1.05), write: &short, at: None },
        y: Axis {
            title: "latency (log scale)",
            scale: Scale::log_around(series.iter().flat_map(|line| &line.points).map(|point| point.y)),
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
