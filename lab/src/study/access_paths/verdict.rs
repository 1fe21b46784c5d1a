//! The verdict of the study `access-paths`.

use super::{AccessPath, AccessPathRecord, PAPER_WITHIN, Scale, record};
use crate::cells::{Cell, Compared};

/// A ratio on the paper's scale, where the base is 100.
pub(crate) fn relative(ratio: f64) -> String {
    format!("{:.0}", 100.0 * ratio)
}

/// The verdict. `partial` is the number of whole rounds and of requested rounds, if it was stopped.
pub(super) fn verdict(cells: &[Cell], ways: &[AccessPathRecord], partial: Option<(usize, usize)>) -> String {
    let [loads, guest_loads, agent_loads] = Scale::ALL.map(|scale| scale.loads(cells));
    let among = |wanted: &[AccessPath]| -> Vec<AccessPath> {
        let is_measured = |way: &&AccessPath| ways.iter().any(|one| one.way == **way && one.skipped.is_none());
        wanted.iter().filter(is_measured).copied().collect()
    };
    let mut sentences = Vec::new();
    let outside = among(&[AccessPath::Nbd, AccessPath::NvmeTcp, AccessPath::Iscsi, AccessPath::Attach]);
    if let (Some(light), Some(heavy), false) = (loads.first(), loads.last(), outside.is_empty()) {
        let said: Vec<String> = outside.iter().map(|way| at_both_ends(light, heavy, *way)).collect();
        sentences.push(format!(
            "Relative to 100 for the disk in process, {}; the paper's three protocols are within {:.0} % of each other.",
            said.join("; "),
            100.0 * PAPER_WITHIN.0
        ));
    }
    let over = among(&[AccessPath::NbdNetwork, AccessPath::NvmeNetwork, AccessPath::IscsiNetwork]);
    if let (Some(heavy), false) = (loads.last(), over.is_empty()) {
        let within = of_one_another(heavy, &over);
        sentences.push(format!("Over the emulated network at heavy load: {}{within}.", list(heavy, &over)));
    }
    let from_guest = among(&[AccessPath::GuestNvme, AccessPath::GuestIscsi, AccessPath::GuestSmb]);
    if let (Some(heavy), false) = (guest_loads.last(), from_guest.is_empty()) {
        let list = list(heavy, &from_guest);
        sentences.push(format!("In a guest, relative to 100 for vhost-user, at heavy load: {list}."));
    }
    let over = among(&[AccessPath::GuestNvmeNetwork, AccessPath::GuestIscsiNetwork, AccessPath::GuestSmbNetwork]);
    if let (Some(heavy), false) = (guest_loads.last(), over.is_empty()) {
        sentences.push(format!("In a guest over the emulated network: {}.", list(heavy, &over)));
    }
    let of_agents: Vec<AccessPath> = among(&Scale::Agents.ways().collect::<Vec<_>>());
    if let (Some(heavy), [base, others @ ..]) = (agent_loads.last(), &of_agents[..])
        && !others.is_empty()
    {
        let (base, list, within) = (base.name_on_scale(), list(heavy, others), of_one_another(heavy, &of_agents));
        sentences.push(format!("Of the agents, relative to 100 for {base}, at heavy load: {list}{within}."));
    }
    if sentences.is_empty() {
        sentences.push("No way was measured beside those with which others are compared.".into());
    }
    let partial = partial.map_or_else(String::new, |(whole, asked)| format!("Partial, {whole} of {asked} rounds: "));
    format!("{partial}{}", sentences.join(" "))
}

fn at(load: &Compared<'_>, way: AccessPath, of: record::CellFigure) -> f64 {
    if load.cells.first().is_some_and(|base| base.subject == way.name()) {
        return 1.0;
    }
    load.ratio(way.name(), of).map_or(f64::NAN, |ratio| ratio.median())
}

/// An access path at light and at heavy load.
fn at_both_ends(light: &Compared<'_>, heavy: &Compared<'_>, way: AccessPath) -> String {
    format!(
        "{} reaches {} at {} load and {} at {}, with {:.1} times the CPU time per request",
        way.name(),
        relative(at(light, way, record::iops)),
        light.part,
        relative(at(heavy, way, record::iops)),
        heavy.part,
        at(heavy, way, record::cpu_ns)
    )
}

/// How far the fastest of several access paths is above the slowest, as the paper says it.
fn within(load: &Compared<'_>, ways: &[AccessPath]) -> Option<f64> {
    let ratios = || ways.iter().map(|way| at(load, *way, record::iops));
    let (least, most) = (ratios().fold(f64::INFINITY, f64::min), ratios().fold(0.0, f64::max));
    (ways.len() > 1 && least > 0.0).then(|| most / least - 1.0)
}

/// The phrase for [`within`]; empty if there is one access path.
fn of_one_another(load: &Compared<'_>, ways: &[AccessPath]) -> String {
    within(load, ways)
        .map_or_else(String::new, |within| format!(", within {:.0} % of one another", (100.0 * within).ceil()))
}

/// Several access paths at one load: `NBD 90, NVMe/TCP 88`.
fn list(load: &Compared<'_>, ways: &[AccessPath]) -> String {
    let one = |way: &AccessPath| {
        let name = way.name_on_scale();
        let name = name.strip_suffix(", network").unwrap_or(name);
        format!("{name} {}", relative(at(load, *way, record::iops)))
    };
    ways.iter().map(one).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::{super::example::cells, *};

    #[test]
    fn ratios_are_of_the_same_round_and_on_the_papers_scale() {
        let cells = cells();
        let [found, in_guest] = [Scale::Host, Scale::Guest].map(|scale| scale.loads(&cells));
        assert_eq!((in_guest.len(), in_guest[0].cells[0].subject.as_str()), (3, AccessPath::GuestVhostUser.name()));
        assert_eq!(found.iter().map(|load| load.in_flight).collect::<Vec<_>>(), [40, 80, 120]);
        let nbd = AccessPath::Nbd.name();
        let ratio = found[0].ratio(nbd, record::iops).unwrap();
        // The slow round does not change the ratio, only the figure.
        let slowest = found[0].cell(nbd).unwrap().summary_of(|round| round.iops).unwrap().min;
        assert_eq!((ratio.summary.min, ratio.summary.max, slowest), (0.75, 0.75, 15_000.0));
        let cpu = found[0].ratio(nbd, record::cpu_ns).unwrap();
        assert!((cpu.median() - 2.0).abs() < 1e-9, "client and server together");
    }

    #[test]
    fn the_verdict_has_a_sentence_for_each_scale_and_says_what_is_missing() {
        let cells = cells();
        let record = |way, skipped: Option<&str>| AccessPathRecord { way, skipped: skipped.map(str::to_owned) };
        let all =
            [record(AccessPath::InProcess, None), record(AccessPath::Nbd, None), record(AccessPath::Attach, None)];
        assert_eq!(
            verdict(&cells, &all, None),
            "Relative to 100 for the disk in process, NBD reaches 75 at light load and 75 at heavy, with 2.0 times the CPU time per request; \
             attach reaches 50 at light load and 50 at heavy, with 2.5 times the CPU time per request; the paper's three protocols are within 9 % of \
             each other."
        );
        let more = [AccessPath::NvmeNetwork, AccessPath::GuestNvme, AccessPath::GuestSmb];
        let all: Vec<AccessPathRecord> = all.into_iter().chain(more.map(|way| record(way, None))).collect();
        let said = verdict(&cells, &all, None);
        assert!(
            said.ends_with(
                "each other. Over the emulated network at heavy load: NVMe/TCP 35. In a guest, relative to 100 for vhost-user, \
                 at heavy load: NVMe/TCP 75, SMB 25."
            ),
            "{said}"
        );
        let partial = verdict(
            &cells,
            &[record(AccessPath::Nbd, None), record(AccessPath::Attach, Some("not root"))],
            Some((2, 3)),
        );
        assert!(partial.starts_with("Partial, 2 of 3 rounds: Relative") && !partial.contains("attach"), "{partial}");
        let loads = Scale::Host.loads(&cells);
        let found = within(&loads[2], &[AccessPath::NvmeNetwork, AccessPath::Iscsi]).unwrap();
        assert!((found - 12.0 / 14.0).abs() < 0.01 && within(&loads[2], &[AccessPath::Iscsi]).is_none(), "{found}");
        let nothing = verdict(&cells, &[record(AccessPath::Nbd, Some("x"))], None);
        assert!(nothing.starts_with("No way was measured beside"), "{nothing}");
        let in_guest = verdict(&cells, &more.map(|way| record(way, None))[1..], None);
        assert!(in_guest.starts_with("In a guest, relative to 100"), "{in_guest}");
    }

    #[test]
    fn agents_are_compared_with_the_first_of_their_protocols() {
        let cells = cells();
        let record = |way| AccessPathRecord { way, skipped: None };
        let said = verdict(&cells, &[AccessPath::AgentNbd, AccessPath::AgentNvme].map(record), None);
        assert_eq!(
            said,
            "Of the agents, relative to 100 for NBD, at heavy load: NVMe/TCP 105, within 6 % of one another."
        );
        let alone = verdict(&cells, &[record(AccessPath::AgentNbd)], None);
        assert!(alone.starts_with("No way was measured beside"), "{alone}");
    }
}
