//! The requests of each agent over time, by the controller's clock.
//!
//! ```text
//!   intervals of an agent, from its own start ─┐
//!   its start by the controller's clock ───────┴─▶ a line
//!   error of its clock ─────────────────────────▶ a band around the line
//!   time in which all agents were active ───────▶ a shaded range
//!   loss of an agent ───────────────────────────▶ a vertical line
//! ```
//!
//! More than [`LINES_MAX`] lines cannot be told apart. Of a larger fleet the fastest, the median
//! and the slowest agent are drawn, and agents that were lost in the phase. Title and legend say
//! so.

use super::run_plots::{length_s, middle_s, seconds};
use diskwright_load::record::{AgentPhaseRecord, FleetPhaseRecord, FleetRecord, PhaseRecord};
use diskwright_outline::plot::{Axis, Band, LineChart, Point, Rule, Scale, Series};
use diskwright_stats::numbers::{duration as time, figure as rate, list, short};
use maud::Markup;

/// Most lines in one plot.
const LINES_MAX: usize = 8;
/// Losses closer together than this share of the time have one label.
const ONE_LABEL: f64 = 0.2;

/// An agent that is drawn.
struct Line<'a> {
    number: usize,
    /// Name in the legend.
    name: String,
    part: &'a AgentPhaseRecord,
    /// Start of its intervals by the controller's clock, seconds from the start of the phase.
    start_s: f64,
    /// Bound of the error of this time, nanoseconds.
    error_ns: u64,
}

/// IOPS of each agent over time in phase number `index`; `None` if no agent has several intervals.
pub(super) fn iops_of_agents(fleet: &FleetRecord, phase: &PhaseRecord, index: usize, id: &str) -> Option<Markup> {
    let times = fleet.phases.get(index)?;
    let (lines, title) = lines(fleet, phase, times)?;
    let series: Vec<Series> = lines.iter().enumerate().map(|(style, line)| of_agent(line, phase, style)).collect();
    let points = || series.iter().flat_map(|line| &line.points);
    let ends = lines.iter().flat_map(|line| {
        line.part.series.last().map(|last| line.start_s + seconds(last.start_ns) + length_s(phase, last))
    });
    let end_s = ends.fold(0.0, f64::max);
    // An agent may start before the others.
    let begin_s = points().map(|point| point.x).fold(0.0, f64::min);
    let (from, to) = (times.from_ns as f64 / 1e9, times.until_ns as f64 / 1e9);
    let error_ns = lines.iter().map(|line| line.error_ns).max().unwrap_or(0);
    let axis = match error_ns {
        0 => "time in the phase (s)".to_owned(),
        error_ns => format!("time in the phase (s), by the controller's clock within ±{}", time(error_ns as f64)),
    };
    let errors: Vec<String> =
        lines.iter().map(|line| format!("{} within {}", line.name, time(line.error_ns as f64))).collect();
    let description = format!(
        "Requests of each agent in each interval of {} s, by the controller's clock. Times are exact: {}. A band \
         around a line shows this error where it is wide enough to see. All agents were active from {} s to {} s.",
        seconds(phase.interval_ns),
        list(&errors),
        short(from),
        short(to),
    );
    let band = Band { from, to, name: "measured, all agents active".into(), class: "window" };
    let chart = LineChart {
        id: id.into(),
        title,
        description,
        x: Axis { title: &axis, scale: Scale::between(begin_s, end_s), write: &short, at: None },
        y: Axis {
            title: "IOPS",
            scale: Scale::from_zero(points().map(|point| point.y).fold(0.0, f64::max)),
            write: &short,
            at: None,
        },
        bands: if to > from { vec![band] } else { vec![] },
        marks: vec![],
        rules: losses(fleet, phase, end_s - begin_s),
        series,
    };
    Some(chart.render())
}

/// The agents that are drawn, and the title that says which ones these are.
fn lines<'a>(fleet: &FleetRecord, phase: &PhaseRecord, times: &'a FleetPhaseRecord) -> Option<(Vec<Line<'a>>, String)> {
    let is_lost =
        |number: usize| fleet.lost.iter().any(|loss| loss.agent as usize == number && loss.phase == phase.name);
    let line = |number: usize, mark: &str| {
        let (agent, part) = (fleet.agents.get(number)?, times.agents.get(number)?);
        let mark = if mark.is_empty() && is_lost(number) { "lost" } else { mark };
        let name = if mark.is_empty() { agent.name.clone() } else { format!("{} ({mark})", agent.name) };
        let start_s = part.series_start_ns(phase.window_start_ns) as f64 / 1e9;
        Some(Line { number, name, part, start_s, error_ns: agent.clock.error_ns })
    };
    let mut all: Vec<usize> = (0..fleet.agents.len())
        .filter(|number| times.agents.get(*number).is_some_and(|part| !part.series.is_empty()))
        .collect();
    all.iter().find(|number| times.agents[**number].series.len() > 1)?;
    if all.len() <= LINES_MAX {
        let lines = all.iter().filter_map(|number| line(*number, "")).collect();
        return Some((lines, "IOPS of each agent over time".into()));
    }
    let count = all.len();
    all.sort_by_key(|number| fleet.total_of(*number, phase).both.ios);
    let mut lines: Vec<Line<'_>> = [(count - 1, "fastest"), (count / 2, "median"), (0, "slowest")]
        .into_iter()
        .filter_map(|(place, mark)| line(all[place], mark))
        .collect();
    let mut title = format!("IOPS over time: fastest, median and slowest of {count} agents");
    let is_new = |number: &&usize| is_lost(**number) && lines.iter().all(|line| line.number != **number);
    let lost: Vec<Line<'_>> = all.iter().filter(is_new).filter_map(|number| line(*number, "lost")).collect();
    if !lost.is_empty() {
        title.push_str(", and lost ones");
    }
    lines.extend(lost.into_iter().take(LINES_MAX - 3));
    Some((lines, title))
}

fn of_agent(line: &Line<'_>, phase: &PhaseRecord, style: usize) -> Series {
    let points = line.part.series.iter().map(|point| {
        let iops = (point.read_ios as f64 + point.write_ios as f64) / length_s(phase, point);
        let begin_s = line.start_s + seconds(point.start_ns);
        Point {
            x: line.start_s + middle_s(phase, point),
            y: iops,
            tooltip: format!("{} at {} s: {} IOPS", line.name, short(begin_s), rate(iops)),
        }
    });
    Series { name: line.name.clone(), points: points.collect(), style, line: true, x_error: seconds(line.error_ns) }
}

/// A vertical line at each loss in this phase. Losses close together have one label.
fn losses(fleet: &FleetRecord, phase: &PhaseRecord, all_s: f64) -> Vec<Rule> {
    let mut groups: Vec<(f64, Vec<String>)> = Vec::new();
    let mut lost: Vec<_> = fleet.lost.iter().filter(|loss| loss.phase == phase.name).collect();
    lost.sort_by_key(|loss| loss.since_ns);
    for loss in lost {
        let Some(agent) = fleet.agents.get(loss.agent as usize) else { continue };
        let at_s = seconds(loss.since_ns);
        match groups.last_mut() {
            Some((first_s, names)) if at_s - *first_s < all_s * ONE_LABEL => names.push(agent.name.clone()),
            _ => groups.push((at_s, vec![agent.name.clone()])),
        }
    }
    let label = |names: &[String]| match names {
        [_, _, _, ..] => format!("{} agents lost", names.len()),
        names => format!("{} lost", list(names)),
    };
    groups.into_iter().map(|(x, names)| Rule { x, name: label(&names) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::example;

    fn plot(run: &diskwright_load::record::Run) -> Option<String> {
        let fleet = run.fleet.as_ref().unwrap();
        iops_of_agents(fleet, &run.phases[0], 0, "x").map(Markup::into_string)
    }

    #[test]
    fn each_agent_has_a_line_with_the_error_of_its_clock() {
        let mut run = example::fleet();
        let text = plot(&run).unwrap();
        for part in ["IOPS of each agent over time", "within ±23.0 µs", "measured, all agents active", ">one<", ">two<"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("class=\"error\"") && !text.contains("class=\"rule\""), "{text}");
        // An error that can be seen is drawn.
        run.fleet.as_mut().unwrap().agents[1].clock.error_ns = 20_000_000;
        let text = plot(&run).unwrap();
        assert_eq!(text.matches("class=\"error\"").count(), 1, "{text}");
        assert!(text.contains("two within 20.0 ms"), "{text}");
    }

    #[test]
    fn lines_are_aligned_by_the_controllers_clock() {
        let mut run = example::fleet();
        let fleet = run.fleet.as_mut().unwrap();
        let xs = |line: usize, run: &diskwright_load::record::Run| {
            let fleet = run.fleet.as_ref().unwrap();
            let (lines, _) = lines(fleet, &run.phases[0], &fleet.phases[0]).unwrap();
            of_agent(&lines[line], &run.phases[0], 0).points[0].x
        };
        // Results of earlier versions have the start of the window only.
        let window_start_ns = fleet.phases[0].agents[0].window_start_ns;
        assert_eq!(fleet.phases[0].agents[0].start_ns, None);
        fleet.phases[0].agents[1].start_ns = Some(500_000_000);
        assert!((xs(0, &run) - (0.125 + window_start_ns as f64 / 1e9)).abs() < 1e-12);
        assert!((xs(1, &run) - 0.625).abs() < 1e-12);
    }

    #[test]
    fn a_lost_agent_has_a_line_up_to_its_end() {
        let text = plot(&example::fleet_with_loss()).unwrap();
        for part in ["two (lost)", "two lost", "class=\"rule\""] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.contains("two (lost) at 0.25 s") && !text.contains("two (lost) at 0.5 s"), "{text}");
    }

    #[test]
    fn of_many_agents_the_fastest_the_median_and_the_slowest_are_drawn() {
        let text = plot(&example::fleet_of(20)).unwrap();
        assert!(text.contains("fastest, median and slowest of 20 agents"), "{text}");
        for part in ["a19 (fastest)", "a10 (median)", "a0 (slowest)"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert_eq!(text.matches("class=\"series").count(), 3);
        // Those that were lost in the phase are drawn too.
        let mut run = example::fleet_of(20);
        let name = run.phases[0].name.clone();
        let loss = |agent| diskwright_load::record::Loss {
            agent,
            phase: name.clone(),
            since_ns: 500_000_000,
            why: "no answer".into(),
        };
        run.fleet.as_mut().unwrap().lost = (3..13).map(loss).collect();
        let text = plot(&run).unwrap();
        assert!(text.contains("and lost ones") && text.contains(">10 agents lost<"), "{text}");
        assert_eq!(text.matches("class=\"series").count(), LINES_MAX);
    }

    #[test]
    fn without_intervals_there_is_no_plot() {
        let mut run = example::fleet();
        for agent in &mut run.fleet.as_mut().unwrap().phases[0].agents {
            agent.series.clear();
        }
        assert!(plot(&run).is_none());
        run.fleet.as_mut().unwrap().phases.clear();
        assert!(plot(&run).is_none());
    }
}
