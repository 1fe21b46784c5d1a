//! What a run says about the agents of a fleet: their shares, their machines and their clocks.
//!
//! Agents with the same boot identifier share a machine, and its cores. The CPU time of a machine
//! is that in the window of the first of its agents, as in the sum of the run.

use super::fleet_plots;
use diskwright_load::record::{CpuRecord, FleetRecord, PhaseRecord, Run};
use diskwright_outline::{Block, Cell, Table, Tone};
use diskwright_stats::numbers::{duration as time, figure as rate, grouped, list, percent, ratio};

/// The agents in phase number `index`.
pub(super) fn phase_blocks(run: &Run, fleet: &FleetRecord, index: usize, id: &str) -> Vec<Block> {
    let Some(phase) = run.phases.get(index) else { return Vec::new() };
    let mut blocks = vec![Block::Text(times_sentence(fleet, index))];
    let plot = fleet_plots::iops_of_agents(fleet, phase, index, &format!("{id}-agents"));
    blocks.extend(plot.map(|plot| Block::Plots(vec![plot])));
    blocks.push(Block::Table(agent_table(fleet, phase, index)));
    blocks.extend(machine_table(fleet, phase, index).map(Block::Table));
    blocks
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

/// What the requests cost on each machine; `None` without the CPU time of any machine.
fn machine_table(fleet: &FleetRecord, phase: &PhaseRecord, index: usize) -> Option<Table> {
    let heads = ["machine", "agents", "IOPS", "cores", "cores busy", "CPU per request", "whole machine"];
    let mut table =
        Table::new("Each machine: busy cores, and CPU time per request of its agents and of the whole machine", &heads);
    let of_agents = &fleet.phases.get(index)?.agents;
    let boots: Vec<&str> = fleet.agents.iter().map(|agent| agent.boot_id.as_str()).collect();
    let first_of_each = (0..boots.len()).filter(|number| !boots[..*number].contains(&boots[*number]));
    let process_ns = |cpu: &CpuRecord| cpu.process_user_ns.saturating_add(cpu.process_system_ns) as f64;
    for (place, first) in first_of_each.enumerate() {
        let agents: Vec<usize> = (first..boots.len()).filter(|number| boots[*number] == boots[first]).collect();
        let parts = || agents.iter().filter_map(|number| of_agents.get(*number));
        let measured = parts().find(|part| part.window_ns > 0 && !part.cpu.cores.is_empty());
        let cores = measured.map_or(0, |part| part.cpu.cores.len());
        let busy_ns = measured.map(|part| part.cpu.busy_ns() as f64);
        let ios: u64 = agents.iter().map(|number| fleet.total_of(*number, phase).both.ios).sum();
        // After a loss requests are counted up to the loss, and CPU time to the end.
        let per_io = |ns: f64| (fleet.lost.is_empty() && ios > 0).then(|| ns / ios as f64);
        let names: Vec<String> = agents.iter().map(|number| fleet.agents[*number].name.clone()).collect();
        table.row(vec![
            Cell::text(format!("{}: {}", place + 1, fleet.agents[first].machine.cpu_model)),
            Cell::text(if names.len() > 4 { format!("{} agents", names.len()) } else { list(&names) }),
            Cell::figure(ios as f64 / phase.window_s().max(1e-9), rate),
            Cell::maybe((cores > 0).then_some(cores as f64), grouped),
            Cell::maybe(measured.zip(busy_ns).map(|(part, ns)| ns / part.window_ns as f64), ratio),
            Cell::maybe(per_io(parts().map(|part| process_ns(&part.cpu)).sum()), time),
            Cell::maybe(busy_ns.and_then(per_io), time),
        ]);
    }
    let is_any = of_agents.iter().any(|part| !part.cpu.cores.is_empty());
    is_any.then_some(table)
}

/// The machines of the agents and their clocks.
pub(super) fn facts(fleet: &FleetRecord) -> Vec<(String, String)> {
    let fact = |agent: &diskwright_load::record::AgentRecord| {
        let clock = &agent.clock;
        let drift_error = clock.drift_error_ppm.map_or_else(String::new, |error| format!(" ± {error:.2}"));
        let offset = format!(
            "clock {}{} from the controller's, within {}, drift {:.2}{drift_error} ppm",
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
    use super::machine_table;
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
    #[test]
    fn a_drift_is_shown_with_its_error() {
        let mut run = example::fleet();
        let fleet = run.fleet.as_mut().unwrap();
        assert!(super::facts(fleet)[0].1.contains("drift -0.55 ppm"), "a result of an earlier version");
        fleet.agents[0].clock.drift_error_ppm = Some(15.04);
        assert!(super::facts(fleet)[0].1.contains("drift -0.55 ± 15.04 ppm"));
    }

    #[test]
    fn agents_of_one_machine_share_its_cores() {
        let run = example::fleet_of(20);
        let fleet = run.fleet.as_ref().unwrap();
        let table = machine_table(fleet, &run.phases[0], 0).unwrap();
        assert_eq!(table.rows.len(), 4);
        let figure = |cell: usize| table.rows[0].cells[cell].value.unwrap();
        assert_eq!((table.rows[0].cells[1].text.as_str(), figure(3)), ("5 agents", 2.0));
        // Both cores, without idle and stolen time.
        let cpu = &fleet.phases[0].agents[0].cpu;
        let busy_s: f64 =
            cpu.cores.iter().map(|core| core.user_ns + core.system_ns + core.irq_ns).sum::<u64>() as f64 / 1e9;
        assert!((figure(4) - busy_s).abs() < 1e-9 && busy_s > 1.0, "{busy_s}");
        let ios: u64 = [0, 4, 8, 12, 16].map(|agent| fleet.total_of(agent, &run.phases[0]).both.ios).iter().sum();
        let of_agents = 5.0 * (cpu.process_user_ns + cpu.process_system_ns) as f64 / ios as f64;
        assert!((figure(5) / of_agents - 1.0).abs() < 1e-9);
        assert!((figure(6) / (busy_s * 1e9 / ios as f64) - 1.0).abs() < 1e-9);
        // Requests up to a loss are not divided by CPU time to the end.
        let run = example::fleet_with_loss();
        let table = machine_table(run.fleet.as_ref().unwrap(), &run.phases[0], 0).unwrap();
        let cells = &table.rows[0].cells;
        assert!(cells[4].value.is_some() && cells[5].value.is_none() && cells[6].value.is_none());
    }
}
