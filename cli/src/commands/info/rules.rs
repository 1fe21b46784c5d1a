//! `diskwright info FILE --azure --windows --vmware`: checks an image against the rules of the
//! place that it goes to.
//!
//! The rules are those of the library (`disk/src/rules/`). A rule that does not hold is an
//! answer and no failure, with an exit code of its own.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    ntfs,
    options::{OvaArgs, ShareArgs},
    style::{FAINT, GREEN, RED},
    switches,
    table::write_hanging,
};
use clap::Args;
use diskwright_disk::{ChainFacts, ChainScope, Destination, Judgement, OpenOptions, Opened, Verdict};
use schemars::JsonSchema;
use serde::Serialize;
use std::{io::Write, path::Path};

/// The places to ask about.
#[derive(Debug, Clone, Copy, Args)]
pub struct RulesArgs {
    /// Check whether Azure accepts FILE as a disk.
    #[arg(long, conflicts_with = "chain")]
    azure: bool,
    /// Check whether Windows and Hyper-V accept FILE and its chain.
    #[arg(long, conflicts_with = "chain")]
    windows: bool,
    /// Check which of ESXi, Workstation, VirtualBox and importers of OVF accept FILE and its chain.
    #[arg(long, conflicts_with = "chain")]
    vmware: bool,
}

impl RulesArgs {
    /// Whether a place was named.
    pub fn any(self) -> bool {
        self.azure || self.windows || self.vmware
    }
}

/// What `info --azure --windows --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The disk.
    file: String,
    /// Whether all rules of all places hold, as far as they apply.
    holds: bool,
    /// The places that were asked about.
    places: Vec<PlaceReport>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.info-rules/1";
}

/// A place and its rules.
#[derive(Debug, Serialize, JsonSchema)]
pub struct PlaceReport {
    /// `azure`, `windows`, `esxi`, `workstation`, `virtualbox` or `ovf`.
    place: String,
    /// Whether all of its rules hold, as far as they apply.
    holds: bool,
    /// The rules.
    rules: Vec<RuleReport>,
}

/// A rule and what it says of the disk.
#[derive(Debug, Serialize, JsonSchema)]
pub struct RuleReport {
    /// Name of the rule, which does not change: `format`, `size-unit`.
    rule: &'static str,
    /// `ok`, `not ok` or `not applicable`.
    verdict: &'static str,
    /// What the place expects.
    expected: &'static str,
    /// What was found; `null` where the rule does not apply.
    found: Option<String>,
    /// How to fix the disk, where the rule does not hold.
    remedy: Option<String>,
    /// Why the rule does not apply, where it does not.
    not_applicable_because: Option<String>,
}

impl From<Judgement> for RuleReport {
    fn from(Judgement { rule, verdict }: Judgement) -> Self {
        let (verdict, found, remedy, why) = match verdict {
            Verdict::Holds { found } => ("ok", Some(found), None, None),
            Verdict::Broken { found, remedy } => ("not ok", Some(found), Some(remedy), None),
            Verdict::NotApplicable { why } => ("not applicable", None, None, Some(why)),
        };
        Self {
            rule: rule.name,
            verdict,
            expected: rule.expected,
            found: found.map(switches::with_switches),
            remedy: remedy.map(switches::with_switches),
            not_applicable_because: why.map(switches::with_switches),
        }
    }
}

/// Asks the rules, and prints the verdicts.
pub fn run(context: &mut Context, file: &Path, (share, ova): (ShareArgs, &OvaArgs), args: RulesArgs) -> Outcome {
    let options = OpenOptions {
        force_share: share.force_share,
        ova_disk: ova.ova_disk.clone(),
        ..context.global.open_options(false)
    };
    let opened = context.open(file, &OpenOptions { scope: ChainScope::Available, ..options.clone() })?;
    let Opened::Disk(disk) = &opened else {
        return Err(Failure::usage("an export has no file, and the rules are about files: name the image itself"));
    };
    let facts = ChainFacts::of(disk, &options.files, context.global.engine(), &ntfs::is_on_ntfs)?;
    let vmware = [Destination::Esxi, Destination::Workstation, Destination::VirtualBox, Destination::Ovf];
    let asked = [(args.azure, Destination::Azure), (args.windows, Destination::Windows)]
        .into_iter()
        .chain(vmware.map(|place| (args.vmware, place)));
    let places: Vec<(Destination, PlaceReport)> =
        asked.filter(|(is_asked, _)| *is_asked).map(|(_, place)| (place, judge(place, &facts))).collect();
    let holds = places.iter().all(|(_, report)| report.holds);
    if context.global.json {
        context.print_json(&Report {
            file: json::path(file),
            holds,
            places: places.into_iter().map(|(_, report)| report).collect(),
            warnings: switches::all_with_switches(disk.warnings()),
        })?;
    } else {
        for (place, report) in &places {
            print_report(context, &json::path(file), *place, report)?;
        }
    }
    Ok(if holds { exit::OK } else { exit::RULE_BROKEN })
}

fn judge(place: Destination, facts: &ChainFacts) -> PlaceReport {
    let judgements = place.judge(facts);
    let holds = !judgements.iter().any(Judgement::is_broken);
    let rules = judgements.into_iter().map(RuleReport::from).collect();
    PlaceReport { place: place.to_string().to_lowercase(), holds, rules }
}

fn print_report(context: &mut Context, file: &str, place: Destination, report: &PlaceReport) -> Outcome<()> {
    let style = context.style;
    let out = &mut context.out;
    let broken = report.rules.iter().filter(|rule| rule.verdict == "not ok").count();
    let summary = match broken {
        0 => "all rules hold".to_owned(),
        1 => "1 rule does not hold".to_owned(),
        count => format!("{count} rules do not hold"),
    };
    writeln!(out, "{} for {place}: {summary}", printable(file))?;
    let width = report.rules.iter().map(|rule| rule.rule.len()).max().unwrap_or(0);
    for rule in &report.rules {
        let (colour, mark, text) = match (&rule.found, &rule.remedy, &rule.not_applicable_because) {
            (Some(found), Some(_), _) => (RED, "not ok", format!("found {found}; expected {}", rule.expected)),
            (Some(found), None, _) => (GREEN, "ok", found.clone()),
            (None, _, why) => (FAINT, "-", format!("not applicable: {}", why.as_deref().unwrap_or_default())),
        };
        let mark = style.paint(colour, format!("{mark:<6}"));
        let prefix = format!("  {mark}  {:<width$}  ", rule.rule);
        write_hanging(out, &prefix, &printable(&text), style.limit())?;
        if let Some(remedy) = &rule.remedy {
            let prefix = format!("  {:6}  {:<width$}  fix: ", "", "");
            write_hanging(out, &prefix, &printable(remedy), style.limit())?;
        }
    }
    Ok(())
}
