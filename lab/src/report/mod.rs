//! Reports: what results say, as a page for people. The verdict comes first, then figures, plots,
//! doubts, and how to repeat it.
//!
//! ```text
//!   document (files) ──▶ chapters (outline.rs) ──▶ html.rs with plot/ ──▶ one self-contained page
//!                                             └──▶ export/markdown.rs
//! ```
//!
//! | file | room |
//! |---|---|
//! | `outline.rs` | chapters, tables and figures as data |
//! | `run.rs`, `overlay.rs`, `sweep.rs`, `contest.rs`, `bench.rs` | one kind of result each; several runs side by side |
//! | `containers.rs`, `queue_depth.rs`, `raw_and_file.rs`, `zero_payload.rs`, `access_paths.rs` | a study each |
//! | `plot/`, `run_plots.rs` | SVG |
//! | `html.rs`, `style.css` | the page |
//!
//! Everything here is pure: results in, text out. Names in results come from files and are written
//! as text, never as markup; the page forbids itself scripts and the network besides.

mod access_paths;
mod bench;
mod containers;
mod contest;
#[cfg(test)]
pub(crate) mod example;
mod html;
mod machine;
mod outline;
mod overlay;
mod plot;
mod queue_depth;
mod raw_and_file;
mod run;
mod run_plots;
mod run_tables;
mod sweep;
mod write;
mod zero_payload;

pub use outline::{Block, Cell, Chapter, Doubt, Row, Table, Tile, Tone};
pub use run::verdict;
pub(crate) use write::moment;

use crate::{document::Document, record::Run, sweep::SweepRecord};

/// A result and the name by which readers know it: its file's.
pub type Named<'a> = (&'a str, &'a Document);

/// The chapters of a report: with several runs, first all of them side by side.
pub fn chapters(results: &[Named<'_>]) -> Vec<Chapter> {
    let runs: Vec<(&str, &Run)> = results
        .iter()
        .filter_map(|(name, document)| match document {
            Document::Run(run) => Some((*name, run.as_ref())),
            _ => None,
        })
        .collect();
    let mut chapters = Vec::new();
    if runs.len() > 1 {
        chapters.push(overlay::chapter(&runs, "runs"));
    }
    let sweeps: Vec<(String, &SweepRecord)> = results
        .iter()
        .filter_map(|(name, document)| match document {
            Document::Sweep(sweep) => Some(((*name).to_owned(), sweep.as_ref())),
            _ => None,
        })
        .collect();
    if sweeps.len() > 1 {
        chapters.push(sweep::overlay(&sweeps, "sweeps"));
    }
    for (index, (name, document)) in results.iter().enumerate() {
        let id = format!("r{}", index + 1);
        chapters.push(match document {
            Document::Run(run) => run::chapter(run, &id, name),
            Document::Sweep(record) => sweep::chapter(record, &id, name),
            Document::Containers(result) => containers::chapter(result, &id, name),
            Document::QueueDepth(result) => queue_depth::chapter(result, &id, name),
            Document::RawAndFile(result) => raw_and_file::chapter(result, &id, name),
            Document::ZeroPayload(result) => zero_payload::chapter(result, &id, name),
            Document::Contest(record) => contest::chapter(record, &id, name),
            Document::AccessPaths(result) => access_paths::chapter(result, &id, name),
            Document::Bench(report) => bench::chapter(report, &id, name),
        });
    }
    chapters
}

/// The report as one page.
pub fn html(results: &[Named<'_>]) -> String {
    html::page(&chapters(results), &made_by())
}

/// How every report says which program made it, before the version. Reports are known again by
/// this.
pub(crate) const MADE_BY: &str = "Made by diskwright ";

/// Which program made a report.
pub(crate) fn made_by() -> String {
    format!("{MADE_BY}{}", env!("CARGO_PKG_VERSION"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<'a>(documents: &'a [(&'static str, Document)]) -> Vec<Named<'a>> {
        documents.iter().map(|(name, document)| (*name, document)).collect()
    }

    #[test]
    fn every_plot_has_a_title_words_and_no_place_that_is_no_number() {
        let documents = example::all();
        let page = html(&named(&documents));
        assert!(!page.contains("NaN") && !page.contains("inf\""), "a figure is no number");
        let plots = page.matches("<svg role=\"img\"").count();
        assert!(plots > 30, "{plots}");
        assert_eq!(plots, page.matches("<desc id=").count());
        // Identifiers are unique, or a plot would be named by another's title.
        let mut ids: Vec<&str> = page.split(" id=\"").skip(1).filter_map(|rest| rest.split('"').next()).collect();
        let all = ids.len();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(all, ids.len());
    }

    #[test]
    fn figures_in_the_page_are_those_of_the_result() {
        let run = example::run();
        let document = Document::Run(Box::new(run.clone()));
        let page = html(&[("run.json", &document)]);
        let values = page.split("<data value=\"").skip(1).filter_map(|rest| rest.split('"').next()?.parse().ok());
        let shown: Vec<f64> = values.collect();
        for phase in &run.phases {
            let total = phase.total();
            let wanted = [phase.iops(), phase.mb_per_s(), total.both.latency().mean_ns(), phase.cpu_ns_per_io()];
            for value in wanted {
                // The same figure may be reckoned in another order.
                assert!(shown.iter().any(|shown| (shown / value - 1.0).abs() < 1e-12), "{value} is not in the page");
            }
        }
    }

    #[test]
    fn a_run_that_failed_says_so_before_its_figures() {
        let mut run = example::run();
        run.end = crate::record::End::Failed { first: "golden.vhdx: write at 4096: I/O error".into(), errors: 12 };
        assert!(verdict(&run).starts_with("Failed, 12 requests were not carried out"), "{}", verdict(&run));
        run.end = crate::record::End::Stopped;
        assert!(verdict(&run).starts_with("Partial"), "{}", verdict(&run));
        run.phases.clear();
        assert!(verdict(&run).ends_with("nothing was measured."), "{}", verdict(&run));
        let document = Document::Run(Box::new(run));
        assert!(html(&[("empty.json", &document)]).contains("nothing was measured"));
    }
}
