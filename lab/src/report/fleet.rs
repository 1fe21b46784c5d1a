//! What a run says about the agents of a fleet: their shares, their machines and their clocks.

use diskwright_load::record::{FleetRecord, PhaseRecord, Run};
use diskwright_outline::{Block, Cell, Table, Tone};
use diskwright_stats::numbers::{duration as time, figure as rate, percent};

/// The agents in phase number `index`.
pub(super) fn phase_blocks(run: &Run, fleet: &FleetRecord, index: usize) -> Vec<Block> {
    let Some(phase) = run.phases.get(index) else { return Vec::new() };
    vec![Block::Text(times_sentence(fleet, index)), Block::Table(agent_table(fleet, phase, index))]
}

/// When the agents measured.
fn times_sentence(fleet: &FleetRecord, index: usize) -> String {
    let agents = fleet.agents.len();
    let Some(times) = fleet.phases.get(index) else { return String::new() };
    let together_ns = times.until_ns.saturating_sub(times.from_ns).max(0) as f64;
    let mut text = format!(
        "{agents} agents measured. All were active for {} together; their windows began within {} of each other, \
         and their clocks are known to within {}.",
        time(together_ns),
        time(times.skew_ns as f64),
        time(times.error_ns as f64),
    );
    if !fleet.lost.is_empty() {
        text.push_str(" The figures are those of this time, because an agent was lost.");
    }
    text
}

fn agent_table(fleet: &FleetRecord, phase: &PhaseRecord, index: usize) -> Table {
    let heads = ["agent", "group", "IOPS", "share", "MB/s", "mean", "p50", "p99", "max", "CPU per request", ""];
    let mut table = Table::new("Each agent", &heads);
    let seconds = phase.window_s().max(1e-9);
    let total = phase.total();
    let latencies = |latency: &diskwright_load::record::LatencyRecord| {
        let quantile = |share: f64| latency.quantile_ns(share).map(|ns| ns as f64);
        let is_any = latency.count > 0;
        [
            Cell::maybe(is_any.then(|| latency.mean_ns()), time),
            Cell::maybe(quantile(0.5), time),
            Cell::maybe(quantile(0.99), time),
            Cell::maybe(is_any.then_some(latency.max_ns as f64), time),
        ]
    };
    let slowest = (0..fleet.agents.len()).min_by_key(|agent| fleet.total_of(*agent, phase).both.ios);
    for (number, agent) in fleet.agents.iter().enumerate() {
        let sum = fleet.total_of(number, phase);
        let cpu = fleet.phases.get(index).and_then(|times| times.agents.get(number)).map(|agent| &agent.cpu);
        let cpu_ns = cpu.map_or(0, |cpu| cpu.process_user_ns.saturating_add(cpu.process_system_ns)) as f64;
        let is_lost = fleet.lost.iter().any(|loss| loss.agent as usize == number);
        let mark = match (is_lost, fleet.agents.len() > 1 && slowest == Some(number)) {
            (true, _) => Cell::text("lost").toned(Tone::Bad),
            (false, true) => Cell::text("slowest").toned(Tone::Faint),
            (false, false) => Cell::text(""),
        };
        let mut cells = vec![
            Cell::text(&agent.name),
            Cell::text(&agent.group),
            Cell::figure(sum.both.ios as f64 / seconds, rate),
            Cell::figure(sum.both.ios as f64 / total.both.ios.max(1) as f64, percent),
            Cell::figure(sum.both.bytes as f64 / 1e6 / seconds, rate),
        ];
        cells.extend(latencies(sum.both.latency()));
        let is_known = cpu_ns > 0.0 && sum.both.ios > 0 && fleet.lost.is_empty();
        cells.push(Cell::maybe(is_known.then(|| cpu_ns / sum.both.ios as f64), time));
        cells.push(mark);
        table.row(cells);
    }
    let mut cells = vec![
        Cell::text("all"),
        Cell::text(""),
        Cell::figure(phase.iops(), rate),
        Cell::figure(1.0, percent),
        Cell::figure(phase.mb_per_s(), rate),
    ];
    cells.extend(latencies(total.both.latency()));
    let is_known = fleet.lost.is_empty() && total.both.ios > 0;
    cells.push(Cell::maybe(is_known.then(|| phase.cpu_ns_per_io()), time));
    cells.push(Cell::text(""));
    table.total(cells);
    table
}

/// The machines of the agents and their clocks.
pub(super) fn facts(fleet: &FleetRecord) -> Vec<(String, String)> {
    let fact = |agent: &diskwright_load::record::AgentRecord| {
        let clock = &agent.clock;
        let offset = format!(
            "clock {}{} from the controller's, within {}, drift {:.2} ppm",
            if clock.offset_ns < 0 { "-" } else { "+" },
            time(clock.offset_ns.unsigned_abs() as f64),
            time(clock.error_ns as f64),
            clock.drift_ppm
        );
        let print: String = agent.fingerprint.chars().take(16).collect();
        (agent.name.clone(), format!("{}; {offset}; certificate {print}...", agent.machine))
    };
    fleet.agents.iter().map(fact).collect()
}

#[cfg(test)]
mod tests {
    use crate::report::{self, TextOptions, example};

    #[test]
    fn a_fleet_is_shown_by_agent_and_in_all() {
        let run = example::fleet();
        let text = report::text(&run, &TextOptions { width: 200, ..TextOptions::default() });
        for part in ["2 agents measured", "their clocks are known to within", "Each agent", "slowest", "ppm"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(text.lines().any(|line| line.trim_start().starts_with("all ")), "the sum: {text}");
    }
}
