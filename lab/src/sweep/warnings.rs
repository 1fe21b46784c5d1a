//! Condenses the warnings of all windows into a few for the sweep.
//!
//! ```text
//!   warning of a window ──▶ known already?
//!      yes, about the machine ───────────▶ one for the sweep, with the worst figure
//!      yes, of another cell ─────────────▶ the cell is added to it
//!      yes, of this cell ────────────────▶ dropped
//!      no ───────────────────────────────▶ a new warning; after eight of a kind, only the cell
//!   at the end ──▶ a warning of all cells names no cell
//! ```
//!
//! So the number of warnings is bounded by the number of cells and kinds, not by that of windows.

use diskwright_load::warning::Warning;
use serde_json::Value;
use std::mem::discriminant;

/// Different warnings of one kind that are kept in full.
const OF_A_KIND_MAX: usize = 8;

/// Adds a warning of a window of `cell`.
pub(crate) fn of_cell(warnings: &mut Vec<Warning>, cell: &str, warning: Warning) {
    if is_of_load(&warning) || warnings.contains(&warning) {
        return of_all(warnings, warning);
    }
    let (mut of_kind, mut last) = (0, None);
    for (index, known) in warnings.iter_mut().enumerate() {
        let Warning::InCells { cells, warning: same, alike } = known else {
            // Known for all cells, from before the sweep was resumed with more rounds.
            if words(known) == words(&warning) {
                return;
            }
            continue;
        };
        if **same == warning || is_same_straggler(same, &warning) {
            return add(cells, cell);
        }
        if discriminant(&**same) == discriminant(&warning) {
            let is_here = cells.iter().chain(alike.iter()).any(|known| known == cell);
            if is_here && words(same) == words(&warning) {
                if cells.len() == 1 {
                    add_agents(same, &warning);
                }
                return;
            }
            if is_here && of_kind + 1 >= OF_A_KIND_MAX {
                return;
            }
            (of_kind, last) = (of_kind + 1, Some(index));
        }
    }
    match last.and_then(|index| warnings.get_mut(index)) {
        Some(Warning::InCells { alike, .. }) if of_kind >= OF_A_KIND_MAX => add(alike, cell),
        _ => warnings.push(Warning::InCells {
            cells: vec![cell.to_owned()],
            warning: Box::new(warning),
            alike: Vec::new(),
        }),
    }
}

/// Adds a warning about the whole sweep. Of warnings about other load, the largest figure is kept.
pub(crate) fn of_all(warnings: &mut Vec<Warning>, warning: Warning) {
    if warnings.iter_mut().any(|known| join(known, &warning)) {
        return;
    }
    if !warnings.contains(&warning) {
        warnings.push(warning);
    }
}

/// Whether a warning is about the load of machines, which is another one in each window.
fn is_of_load(warning: &Warning) -> bool {
    match warning {
        Warning::OtherLoad { .. } | Warning::StolenTime { .. } => true,
        Warning::OfAgents { warning, .. } => is_of_load(warning),
        _ => false,
    }
}

/// Joins two warnings about the load of machines in the first one. `false` if they are of different
/// kinds.
fn join(known: &mut Warning, more: &Warning) -> bool {
    match (known, more) {
        (Warning::OtherLoad { cpus }, Warning::OtherLoad { cpus: more })
        | (Warning::StolenTime { cpus }, Warning::StolenTime { cpus: more }) => *cpus = cpus.max(*more),
        (Warning::OfAgents { agents, warning }, Warning::OfAgents { agents: others, warning: more }) => {
            if !join(warning, more) {
                return false;
            }
            others.iter().for_each(|agent| add(agents, agent));
        }
        _ => return false,
    }
    true
}

/// Replaces warnings that all of `cells` cells have by one that names no cell.
pub(crate) fn settle(warnings: &mut [Warning], cells: usize) {
    for known in warnings {
        if let Warning::InCells { cells: of, warning, .. } = known
            && of.len() >= cells
        {
            *known = (**warning).clone();
        }
    }
}

fn add(cells: &mut Vec<String>, cell: &str) {
    if !cells.iter().any(|known| known == cell) {
        cells.push(cell.to_owned());
    }
}

/// Whether both are about the same slow agent. The first one gets the lower share: one warning for
/// each agent says enough.
fn is_same_straggler(known: &mut Warning, more: &Warning) -> bool {
    match (known, more) {
        (Warning::Straggler { agent, share }, Warning::Straggler { agent: same, share: more }) if agent == same => {
            *share = share.min(*more);
            true
        }
        _ => false,
    }
}

/// Forgets the agents that were lost in windows which are measured again.
pub(crate) fn forget_losses(warnings: &mut Vec<Warning>) {
    warnings.retain(|known| match known {
        Warning::InCells { warning, .. } => !matches!(**warning, Warning::AgentLost { .. }),
        known => !matches!(known, Warning::AgentLost { .. }),
    });
}

/// Adds the agents that have a warning to those that have had it in an earlier round.
fn add_agents(known: &mut Warning, more: &Warning) {
    if let (Warning::OfAgents { agents, .. }, Warning::OfAgents { agents: others, .. }) = (known, more) {
        others.iter().for_each(|agent| add(agents, agent));
    }
}

/// A warning without its numbers and without the agents that have it: these differ from round to
/// round.
fn words(warning: &Warning) -> Option<Value> {
    let mut value = serde_json::to_value(warning).ok()?;
    strip_numbers(&mut value);
    Some(value)
}

fn strip_numbers(value: &mut Value) {
    if let Value::Object(fields) = value {
        fields.retain(|name, field| !field.is_number() && name != "agents");
        fields.values_mut().for_each(strip_numbers);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(reached: f64, asked: f64) -> Warning {
        Warning::DepthNotReached { load: format!("1 x {asked}"), reached, asked }
    }

    #[test]
    fn warnings_of_one_kind_that_differ_are_all_kept_with_their_cells() {
        let mut warnings = Vec::new();
        for round in 0..3 {
            let noise = f64::from(round) * 0.01;
            for (cell, asked) in [("queue-depth 8", 8.0), ("queue-depth 16", 16.0), ("queue-depth 32", 32.0)] {
                of_cell(&mut warnings, cell, Warning::DebugBuild);
                of_cell(&mut warnings, cell, Warning::OtherLoad { cpus: 0.5 + noise });
                if asked > 10.0 {
                    of_cell(&mut warnings, cell, depth(7.0 + noise, asked));
                    of_cell(&mut warnings, cell, Warning::Polls { load: "all".into() });
                }
            }
        }
        settle(&mut warnings, 3);
        let reported: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        assert_eq!(warnings.len(), 5, "{reported:#?}");
        assert!(
            warnings[0] == Warning::DebugBuild && warnings[1] == Warning::OtherLoad { cpus: 0.52 },
            "{reported:#?}"
        );
        assert!(reported[2].starts_with("at queue-depth 16: 1 x 16: only 7.0 of 16"), "{reported:#?}");
        assert!(reported[3].starts_with("at queue-depth 16; queue-depth 32: all: its threads poll"), "{reported:#?}");
        assert!(reported[4].starts_with("at queue-depth 32: 1 x 32: only 7.0 of 32"), "{reported:#?}");
    }

    #[test]
    fn warnings_of_agents_are_condensed_like_others() {
        let of = |agent: &str, warning| Warning::OfAgents { agents: vec![agent.into()], warning: Box::new(warning) };
        let mut warnings = Vec::new();
        for round in 0..3 {
            let noise = f64::from(round) * 0.01;
            of_cell(&mut warnings, "queue-depth 8", of("vm1", Warning::OtherLoad { cpus: 0.5 - noise }));
            of_cell(&mut warnings, "queue-depth 8", of("vm2", Warning::OtherLoad { cpus: 0.4 + noise }));
            of_cell(&mut warnings, "queue-depth 8", of("vm1", depth(3.0 + noise, 8.0)));
            of_cell(&mut warnings, "queue-depth 8", of("vm2", depth(4.0 + noise, 8.0)));
        }
        let agents = vec!["vm1".to_owned(), "vm2".to_owned()];
        let both = |warning| Warning::OfAgents { agents: agents.clone(), warning: Box::new(warning) };
        settle(&mut warnings, 1);
        assert_eq!(warnings, [both(Warning::OtherLoad { cpus: 0.5 }), both(depth(3.0, 8.0))]);
    }

    #[test]
    fn a_slow_agent_is_told_once_and_a_lost_one_until_it_is_back() {
        let slow = |agent: &str, share| Warning::Straggler { agent: agent.into(), share };
        let mut warnings = Vec::new();
        for (cell, agent, share) in [("8", "vm1", 0.7), ("16", "vm1", 0.5), ("16", "vm2", 0.6), ("24", "vm1", 0.6)] {
            of_cell(&mut warnings, cell, slow(agent, share));
        }
        let lost = Warning::AgentLost { agent: "vm1".into(), phase: "x".into(), since_ns: 0, why: "gone".into() };
        of_cell(&mut warnings, "24", lost);
        forget_losses(&mut warnings);
        let in_cells = |cells: &[&str], warning| Warning::InCells {
            cells: cells.iter().map(|cell| (*cell).to_owned()).collect(),
            warning: Box::new(warning),
            alike: Vec::new(),
        };
        assert_eq!(warnings, [in_cells(&["8", "16", "24"], slow("vm1", 0.5)), in_cells(&["16"], slow("vm2", 0.6))]);
    }

    #[test]
    fn however_many_cells_there_are_the_warnings_stay_few() {
        let mut warnings = Vec::new();
        for round in 0..4 {
            for cell in 1..=100_u32 {
                let warning = depth(f64::from(round) + 0.5, f64::from(cell));
                of_cell(&mut warnings, &format!("queue-depth {cell}"), warning);
            }
        }
        assert_eq!(warnings.len(), OF_A_KIND_MAX);
        let last = warnings[OF_A_KIND_MAX - 1].to_string();
        assert!(last.ends_with("(92 more cells have a warning of this kind)"), "{last}");
        // The warnings are the same after saving, and resuming adds none.
        let json = serde_json::to_string(&warnings).unwrap();
        let mut read: Vec<Warning> = serde_json::from_str(&json).unwrap();
        of_cell(&mut read, "queue-depth 50", depth(1.0, 50.0));
        assert_eq!(read, warnings);
    }
}
