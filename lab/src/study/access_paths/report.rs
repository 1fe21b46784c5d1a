//! What the study `access-paths` prints: the verdict, a table for each load, the paper's own
//! figures.

use super::{AccessPathsResult, CellRecord, LoadRecord, PAPER_WITHIN, Way, WayRecord};
use crate::{
    measure::Ratio,
    table::{Align, Cell, Table, Tone, bytes, duration, figure, grouped, paint},
};
use std::fmt::Write as _;

/// On the paper's scale a way that is this far below the base is marked.
const LOW: f64 = 0.80;

/// On the paper's scale.
pub(crate) fn relative(ratio: f64) -> String {
    format!("{:.0}", 100.0 * ratio)
}

/// The cell of a way, if it was measured.
pub(crate) fn cell_of(load: &LoadRecord, way: Way) -> Option<&CellRecord> {
    load.cells.iter().find(|cell| cell.way == way)
}

/// The conclusion. `partial` is how many rounds there are, and of how many.
pub(super) fn verdict(loads: &[LoadRecord], ways: &[WayRecord], partial: Option<(usize, usize)>) -> String {
    let partial = partial.map_or_else(String::new, |(whole, asked)| format!("Partial, {whole} of {asked} rounds: "));
    let outside: Vec<Way> = [Way::Nbd, Way::Attach]
        .into_iter()
        .filter(|way| ways.iter().any(|record| record.way == *way && record.skipped.is_none()))
        .collect();
    let (Some(light), Some(heavy), false) = (loads.first(), loads.last(), outside.is_empty()) else {
        return format!("{partial}no way from outside could be measured; what follows is the disk in process.");
    };
    let at = |load: &LoadRecord, way: Way, of: fn(&CellRecord) -> Option<&Ratio>| {
        cell_of(load, way).and_then(of).map_or(f64::NAN, Ratio::median)
    };
    let said: Vec<String> = outside
        .iter()
        .map(|way| {
            format!(
                "{} gives {} at {} load and {} at {}, with {:.1} times the CPU for each request",
                way.name(),
                relative(at(light, *way, |cell| cell.iops_ratio.as_ref())),
                light.name,
                relative(at(heavy, *way, |cell| cell.iops_ratio.as_ref())),
                heavy.name,
                at(heavy, *way, |cell| cell.cpu_ratio.as_ref())
            )
        })
        .collect();
    format!(
        "{partial}Where the disk in process gives 100 requests, {}; the paper's three protocols lie within {:.0} % of each other.",
        said.join("; "),
        100.0 * PAPER_WITHIN.0
    )
}

/// The whole report as text. `colour` only for a terminal.
pub fn render(result: &AccessPathsResult, colour: bool) -> String {
    let mut text = format!("{}\n\n", result.verdict);
    let _ = writeln!(text, "  {}; {}", result.machine, result.place);
    let _ = writeln!(
        text,
        "  {} of {}, populated; 8K random, 70 % reads; {} rounds in turns, cells of {}; every cell finds the disk as it was filled",
        result.disk.name(),
        bytes(result.size_bytes),
        result.rounds,
        duration(result.cell_ns as f64)
    );
    for load in &result.loads {
        let _ = write!(
            text,
            "\n{} load: {} clients with {} outstanding each\n\n",
            capital(&load.name),
            load.clients,
            load.outstanding
        );
        text.push_str(&table(load, colour));
    }
    text.push_str(
        "\n  rel: as a ratio to the disk in process in the same round, times 100; of the rounds the median, in brackets the lowest and highest.\n  CPU for each request: of the generator's process (with the engine or the NBD client in it), of the server's, of the whole machine with\n  the kernel's own threads (those behind a loop device are in nobody's account but this).\n",
    );
    let _ = writeln!(
        text,
        "  paper: FC = 100; SMB 3.0 and iSCSI lie within {:.0} % of it in throughput and within {:.0} % in latency at every load, CPU \"not\n  significantly different\"; its charts' own figures are not in its text.",
        100.0 * PAPER_WITHIN.0,
        100.0 * PAPER_WITHIN.1
    );
    if !result.warnings.is_empty() {
        text.push_str("\nBefore you believe this\n\n");
    }
    for warning in &result.warnings {
        let _ = writeln!(text, "  {} {warning}", paint("!", Tone::Bad, colour));
    }
    text
}

fn capital(word: &str) -> String {
    let mut letters = word.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

fn table(load: &LoadRecord, colour: bool) -> String {
    let mut table = Table::new(&[
        ("way", Align::Left),
        ("IOPS", Align::Right),
        ("rel", Align::Right),
        ("rounds", Align::Left),
        ("mean µs", Align::Right),
        ("rel", Align::Right),
        ("p99 µs", Align::Right),
        ("client µs", Align::Right),
        ("server µs", Align::Right),
        ("machine µs", Align::Right),
        ("CPU rel", Align::Right),
    ]);
    for cell in &load.cells {
        let us = |ns: f64| Cell::new(figure(ns / 1e3));
        let base = || Cell::toned("100", Tone::Faint);
        let rel = |ratio: &Option<Ratio>, is_low: fn(f64) -> bool| match ratio {
            None => base(),
            Some(ratio) if is_low(ratio.median()) => Cell::toned(relative(ratio.median()), Tone::Bad),
            Some(ratio) => Cell::new(relative(ratio.median())),
        };
        let rounds = cell.iops_ratio.as_ref().map_or_else(String::new, |ratio| {
            format!("({}..{})", relative(ratio.summary.min), relative(ratio.summary.max))
        });
        table.row(vec![
            Cell::new(cell.way.name()),
            Cell::new(grouped(cell.iops.median)),
            rel(&cell.iops_ratio, |ratio| ratio < LOW),
            Cell::toned(rounds, Tone::Faint),
            us(cell.mean_ns.median),
            rel(&cell.mean_ratio, |ratio| ratio > 1.0 / LOW),
            us(cell.p99_ns.median),
            us(cell.client_cpu_ns.median),
            cell.server_cpu_ns.map_or_else(|| Cell::toned("-", Tone::Faint), |server| us(server.median)),
            us(cell.machine_cpu_ns.median),
            rel(&cell.cpu_ratio, |_| false),
        ]);
    }
    table.render(colour)
}

#[cfg(test)]
mod tests {
    use super::super::{
        LOADS,
        example::{cells, result},
        measure::{Cells, loads},
    };
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round_and_on_the_papers_scale() {
        let (ways, cells) = cells();
        let found = loads(&ways, &cells).unwrap();
        assert_eq!(found.iter().map(|load| load.outstanding).collect::<Vec<_>>(), [2, 4, 6]);
        let nbd = cell_of(&found[0], Way::Nbd).unwrap();
        let ratio = nbd.iops_ratio.as_ref().unwrap();
        // The slow round is none in the ratio, though it is one in the figure.
        assert_eq!((ratio.summary.min, ratio.summary.max, nbd.iops.min), (0.75, 0.75, 15_000.0));
        assert!((nbd.cpu_ratio.as_ref().unwrap().median() - 2.0).abs() < 1e-9, "client and server together");
        assert!(cell_of(&found[0], Way::InProcess).unwrap().iops_ratio.is_none());
        let none = Cells { rounds: vec![vec![Vec::new(); 3]; LOADS.len()], ..Cells::default() };
        assert!(loads(&ways, &none).is_err());
    }

    #[test]
    fn the_verdict_is_one_sentence_and_says_what_is_missing() {
        let (ways, cells) = cells();
        let loads = loads(&ways, &cells).unwrap();
        let record = |way, skipped: Option<&str>| WayRecord { way, skipped: skipped.map(str::to_owned) };
        let all = [record(Way::InProcess, None), record(Way::Nbd, None), record(Way::Attach, None)];
        assert_eq!(
            verdict(&loads, &all, None),
            "Where the disk in process gives 100 requests, NBD gives 75 at light load and 75 at heavy, with 2.0 times the CPU for each request; \
             attach gives 50 at light load and 50 at heavy, with 2.5 times the CPU for each request; the paper's three protocols lie within 9 % of \
             each other."
        );
        let partial = verdict(&loads, &[record(Way::Nbd, None), record(Way::Attach, Some("not root"))], Some((2, 3)));
        assert!(partial.starts_with("Partial, 2 of 3 rounds: Where") && !partial.contains("attach"), "{partial}");
        assert!(verdict(&loads, &[record(Way::Nbd, Some("x"))], None).starts_with("no way from outside"));
    }

    #[test]
    fn the_report_as_text() {
        let text = render(&result(), false);
        assert!(text.starts_with("Where the disk in process gives 100 requests, NBD gives 75 at light load"), "{text}");
        for part in [
            " GiB, populated; 8K random, 70 % reads; 3 rounds in turns",
            "Heavy load: 20 clients with 6 outstanding each",
            "FC = 100; SMB 3.0 and iSCSI lie within 9 % of it in throughput and within 10 % in latency",
            "left out: qemu-nbd, raw, because qemu-nbd is not installed",
        ] {
            assert!(text.contains(part), "{part} is missing:\n{text}");
        }
        let row = text.lines().find(|line| line.trim_start().starts_with("NBD ")).expect("a row");
        let words: Vec<&str> = row.split_whitespace().collect();
        assert_eq!(
            words,
            ["NBD", "30,000", "75", "(75..75)", "1,333", "133", "3,999", "8.00", "12.0", "24.0", "200"],
            "{row}"
        );
    }
}
