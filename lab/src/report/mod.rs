//! Reports: results as pages. The verdict comes first, then figures, plots, warnings, and how to
//! repeat the measurement.
//!
//! ```text
//!   document (files) ──▶ chapters, one per result ──▶ diskwright_outline
//!                                                        └─▶ terminal, HTML, Markdown
//! ```
//!
//! `run.rs`, `sweep.rs`, `comparison.rs` and `acceptance.rs` make the chapter of one kind of
//! result, and `overlay.rs` that of several runs side by side. `fleet.rs` and `fleet_plots.rs` add
//! the agents to the chapter of a run. `containers/`, `queue_depth.rs`, `raw_and_file.rs`,
//! `zero_payload.rs`, `access_paths.rs`, `native_and_guest.rs` and `tiers.rs` make that of a study.
//! `parts.rs` has what all chapters share.
//!
//! This module does no I/O. Names in results come from files, so they are written as text and never
//! as markup. A page forbids scripts and network access.

mod acceptance;
mod access_paths;
mod comparison;
mod containers;
#[cfg(test)]
pub(crate) mod example;
mod fleet;
mod fleet_plots;
mod native_and_guest;
mod overlay;
mod parts;
mod queue_depth;
mod raw_and_file;
mod run;
mod run_plots;
mod run_tables;
mod sweep;
mod tiers;
pub(crate) mod to_chapter;
mod zero_payload;

pub use run::verdict;
pub use to_chapter::ToChapter;

use crate::{LabError, Result, document::Document, output::made_by, sweep::SweepRecord};
use diskwright_load::record::Run;
pub use diskwright_outline::TextOptions;
use diskwright_outline::{Block, Chapter, Markup, plot::standalone};

/// A result as text for a terminal.
pub fn text(result: &impl ToChapter, options: &TextOptions) -> String {
    diskwright_outline::text(&result.chapter("r1", ""), options)
}

/// A result with the name of its file.
pub type Named<'a> = (&'a str, &'a Document);

/// The chapters of a report. Several runs, or several sweeps, also get a chapter side by side.
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
        chapters.push(document.chapter(&id, name));
    }
    chapters
}

/// The plots of a report in their order, without those in folded blocks.
fn plots(chapters: Vec<Chapter>) -> impl Iterator<Item = Markup> {
    chapters.into_iter().flat_map(|chapter| chapter.blocks).flat_map(|block| match block {
        Block::Plots(plots) => plots,
        _ => Vec::new(),
    })
}

/// Plot `number` of a report, from 1, as an SVG file.
///
/// # Errors
/// [`LabError::BadOptions`] if there are fewer plots.
pub fn svg(results: &[Named<'_>], number: usize) -> Result<String> {
    let all: Vec<Markup> = plots(chapters(results)).collect();
    let drawn = number.checked_sub(1).and_then(|index| standalone(all.get(index)?, &made_by()));
    drawn.ok_or_else(|| LabError::BadOptions {
        what: format!("plot {number} does not exist"),
        hint: format!("choose one from 1 to {}, in the order of the HTML page", all.len()),
    })
}

/// The report as Markdown.
pub fn markdown(results: &[Named<'_>]) -> String {
    diskwright_outline::markdown(&chapters(results), &made_by())
}

/// The report as one page.
pub fn html(results: &[Named<'_>]) -> String {
    diskwright_outline::page(&chapters(results), &made_by())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named<'a>(documents: &'a [(&'static str, Document)]) -> Vec<Named<'a>> {
        documents.iter().map(|(name, document)| (*name, document)).collect()
    }

    /// The text of each kind of result on a terminal of 80 columns.
    #[test]
    fn the_text_of_every_kind_fits_a_terminal() {
        let options = TextOptions::default();
        for (name, document) in example::all() {
            let text = diskwright_outline::text(&document.chapter("r1", name), &options);
            for line in text.lines().filter(|line| line.chars().count() > options.width) {
                // A path or a name without spaces cannot be broken.
                let longest = line.split(' ').map(|word| word.chars().count()).max().unwrap_or(0);
                assert!(longest > 40, "{name}: {line}");
            }
            if name != "again.json" {
                insta::assert_snapshot!(format!("text of {name}"), text);
            }
        }
    }

    #[test]
    fn plots_are_numbered_in_the_order_of_the_page() {
        let document = Document::Run(Box::new(example::run()));
        let named = [("r.json", &document)];
        assert!(svg(&named, 1).unwrap().contains("Latency by percentile"));
        let last = plots(chapters(&named)).count();
        assert!(svg(&named, last).is_ok());
        for wrong in [0, last + 1] {
            assert!(svg(&named, wrong).unwrap_err().to_string().contains(&format!("from 1 to {last}")));
        }
    }

    #[test]
    fn a_run_as_markdown() {
        let document = Document::Run(Box::new(example::run()));
        insta::assert_snapshot!(markdown(&[("oltp.json", &document)]));
    }

    #[test]
    fn every_plot_has_a_title_words_and_no_place_that_is_no_number() {
        let documents = example::all();
        let page = html(&named(&documents));
        assert!(!page.contains("NaN") && !page.contains("inf\""), "a figure is no number");
        let plots = page.matches("<svg role=\"img\"").count();
        assert!(plots > 30, "{plots}");
        assert_eq!(plots, page.matches("<desc id=").count());
        // Identifiers are unique, so that each plot refers to its own title.
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
                // The same figure may be computed in another order.
                assert!(shown.iter().any(|shown| (shown / value - 1.0).abs() < 1e-12), "{value} is not in the page");
            }
        }
    }

    #[test]
    fn a_run_that_failed_says_so_before_its_figures() {
        let mut run = example::run();
        run.head.end =
            diskwright_load::record::End::Failed { first: "golden.vhdx: write at 4096: I/O error".into(), errors: 12 };
        assert!(verdict(&run).starts_with("Failed: 12 requests failed"), "{}", verdict(&run));
        run.head.end = diskwright_load::record::End::Stopped;
        assert!(verdict(&run).starts_with("Partial"), "{}", verdict(&run));
        run.phases.clear();
        assert!(verdict(&run).ends_with("no phase was measured."), "{}", verdict(&run));
        let document = Document::Run(Box::new(run));
        assert!(html(&[("empty.json", &document)]).contains("no phase was measured"));
    }
}
