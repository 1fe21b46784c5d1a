//! `diskwright lab report`: shows saved results, or exports them for other programs.

use crate::{
    context::Context,
    describe::{printable, printable_lines},
    exit::{self, Failure, Outcome},
    json,
};
use clap::{Args, ValueEnum};
use diskwright_lab::{
    document::{self, Document},
    export::{self, CsvTable},
    output::{Kind, Output},
    report,
};
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// Arguments of `lab report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Reads one or several results that `lab run`, `lab study`, `lab sweep`, `lab selftest` or `diskspd` \
saved as JSON. Without -o it prints them as text. An HTML page is self-contained: it needs no \
network and no scripts, and is readable on light and dark screens and on paper. Several runs are \
first compared side by side. An older report of the same name is replaced when the new one is \
complete. Any other file is kept.

CSV is tidy: one row per thread, target and direction, and rows with the `scope` `phase` for totals. \
`--table` selects the time series or the histograms. JSON is the complete result; several results \
go into one file that `lab report` can read.

EXAMPLES
  diskwright lab report oltp.json
  diskwright lab report oltp.json -o oltp.html
  diskwright lab report before.json after.json -o both.html
  diskwright lab report oltp.json --as csv > oltp.csv
  diskwright lab report oltp.json --table series -o oltp-series.csv
  diskwright lab report *.json -o summary.md
  diskwright lab report oltp.json --plot 2 -o oltp.svg")]
pub struct ReportArgs {
    /// Saved results.
    #[arg(value_name = "RESULT", required = true)]
    results: Vec<PathBuf>,
    /// Output file; "-" is standard output. [default: standard output]
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Format of the report. [default: by the file's extension; text on standard output]
    #[arg(long = "as", value_enum, value_name = "FORM")]
    form: Option<Form>,
    /// The table of a CSV file.
    #[arg(long, value_enum, value_name = "TABLE")]
    table: Option<Table>,
    /// The plot of an SVG file, in the order of the page. [default: 1]
    #[arg(long, value_name = "N")]
    plot: Option<usize>,
}

/// Format of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Form {
    /// The text that the measuring command prints.
    Text,
    /// A self-contained page with plots.
    Html,
    /// A table for spreadsheets and statistics programs.
    Csv,
    /// Markdown with tables.
    Md,
    /// One plot.
    Svg,
    /// The results as JSON.
    Json,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Table {
    /// Rates, latencies and errors of each thread.
    Figures,
    /// Each interval of the time series.
    Series,
    /// Each bucket of the histograms.
    Latencies,
}

impl Table {
    fn of_lab(self) -> CsvTable {
        match self {
            Self::Figures => CsvTable::Figures,
            Self::Series => CsvTable::Series,
            Self::Latencies => CsvTable::Latencies,
        }
    }
}

/// Output of `lab report --json -o FILE`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Written<'a> {
    /// Path of the report.
    written: &'a Path,
    /// Format of the report.
    form: Form,
    /// Length of the report in bytes.
    bytes: usize,
    /// The results in the report.
    results: Vec<ReportedResult<'a>>,
}

impl json::Document for Written<'_> {
    const SCHEMA: &'static str = "diskwright.report/1";
}

/// A result in a report.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ReportedResult<'a> {
    /// The file with the result.
    file: &'a Path,
    /// Verdict of the result.
    verdict: String,
}

/// Reads the results and writes the report.
pub fn run(context: &mut Context, args: &ReportArgs) -> Outcome {
    let form = form(args)?;
    if args.table.is_some() && form != Form::Csv {
        return Err(Failure::new("--table selects the table of a CSV file; add --as csv"));
    }
    let to_file = args.output.as_deref().filter(|path| *path != Path::new("-"));
    if args.plot.is_some() && form != Form::Svg {
        return Err(Failure::new("--plot selects the plot of an SVG file; add --as svg"));
    }
    if to_file.is_some() && form == Form::Text {
        return Err(Failure::new("--as text is only for standard output; for a file use html, md, csv, svg or json"));
    }
    if to_file.is_none() && context.global.json {
        return Err(Failure::new("--json describes the written file: add -o FILE"));
    }
    let mut documents: Vec<(&Path, Document)> = Vec::new();
    for path in &args.results {
        let read = document::read(path).map_err(|error| Failure::new(error.to_string()))?;
        documents.extend(read.into_iter().map(|document| (path.as_path(), document)));
    }
    if documents.is_empty() {
        return Err(Failure::new("the given files contain no results"));
    }
    let output = to_file.map(|path| place(path, form, &args.results)).transpose()?;
    let names = names(&documents);
    let named: Vec<report::Named<'_>> =
        names.iter().zip(&documents).map(|(name, (_, document))| (name.as_str(), document)).collect();
    let text = match form {
        Form::Text => {
            for chapter in report::chapters(&named) {
                context.print_chapter(&chapter, false)?;
            }
            return Ok(exit::OK);
        }
        Form::Html => report::html(&named),
        Form::Svg => report::svg(&named, args.plot.unwrap_or(1))?,
        Form::Csv => export::csv(&named, args.table.unwrap_or(Table::Figures).of_lab())?,
        Form::Md => export::markdown(&named),
        Form::Json => export::json(&named).map_err(|error| Failure::new(format!("cannot write JSON: {error}")))?,
    };
    let Some(output) = output else {
        context.print_text(&text)?;
        return Ok(exit::OK);
    };
    output.write(&text)?;
    let verdicts = report::chapters(&named).into_iter().map(|chapter| chapter.verdict);
    if context.global.json {
        let skipped =
            if named.iter().filter(|(_, document)| matches!(document, Document::Run(_))).count() > 1 { 1 } else { 0 };
        let results = documents
            .iter()
            .zip(verdicts.skip(skipped))
            .map(|((file, _), verdict)| ReportedResult { file, verdict })
            .collect();
        context.print_json(&Written { written: output.path(), form, bytes: text.len(), results })?;
    } else {
        for verdict in verdicts.take(1) {
            writeln!(context.text(), "{}", printable_lines(&verdict))?;
        }
        writeln!(context.text(), "written to {}", printable(&json::path(output.path())))?;
    }
    Ok(exit::OK)
}

fn form(args: &ReportArgs) -> Outcome<Form> {
    if let Some(form) = args.form {
        return Ok(form);
    }
    let Some(path) = args.output.as_deref().filter(|path| *path != Path::new("-")) else {
        return Ok(match (args.table, args.plot, &args.output) {
            (Some(_), ..) => Form::Csv,
            (_, Some(_), _) => Form::Svg,
            (_, _, Some(_)) => Form::Html,
            (_, _, None) => Form::Text,
        });
    };
    match path.extension().and_then(|extension| extension.to_str()).map(str::to_ascii_lowercase).as_deref() {
        Some("html" | "htm") => Ok(Form::Html),
        Some("csv") => Ok(Form::Csv),
        Some("md" | "markdown") => Ok(Form::Md),
        Some("json") => Ok(Form::Json),
        Some("svg") => Ok(Form::Svg),
        _ => Err(Failure::new(format!(
            "the format of {} is unknown: use the extension .html, .csv, .md, .svg or .json, or add --as",
            path.display()
        ))),
    }
}

/// Checks the output file. It must not be one of the results.
fn place(path: &Path, form: Form, sources: &[PathBuf]) -> Outcome<Output> {
    let real = path.canonicalize();
    let is_path = |source: &&PathBuf| real.as_ref().is_ok_and(|real| source.canonicalize().is_ok_and(|it| it == *real));
    if let Some(source) = sources.iter().find(is_path) {
        return Err(Failure::new(format!("{} is one of the results; choose another file", source.display())));
    }
    // A report as JSON is a result file.
    let kind = if form == Form::Json { Kind::Result } else { Kind::Report };
    Ok(Output::check(path, kind)?)
}

/// Names of the results: file names if they differ, else paths. Results of one bundle are numbered.
fn names(documents: &[(&Path, Document)]) -> Vec<String> {
    let file_name = |path: &Path| {
        path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned())
    };
    let mut names: Vec<String> = Vec::with_capacity(documents.len());
    for (index, (path, _)) in documents.iter().enumerate() {
        let short = file_name(path);
        let ambiguous = documents.iter().any(|(other, _)| other != path && file_name(other) == short);
        let name = if ambiguous { path.display().to_string() } else { short };
        let alike = documents.iter().filter(|(other, _)| other == path).count();
        let number = documents[..=index].iter().filter(|(other, _)| other == path).count();
        names.push(if alike > 1 { format!("{name} ({number})") } else { name });
    }
    names
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_lab::AcceptanceRecord;

    fn args(output: Option<&str>, form: Option<Form>) -> ReportArgs {
        ReportArgs { results: vec![], output: output.map(Into::into), form, table: None, plot: None }
    }

    #[test]
    fn the_extension_says_what_to_write() {
        for (name, wanted) in [
            ("a.html", Form::Html),
            ("a.CSV", Form::Csv),
            ("a.md", Form::Md),
            ("a.json", Form::Json),
            ("a.svg", Form::Svg),
        ] {
            assert_eq!(form(&args(Some(name), None)).unwrap(), wanted);
        }
        assert_eq!(form(&args(Some("a.txt"), Some(Form::Csv))).unwrap(), Form::Csv);
        assert!(form(&args(Some("a.txt"), None)).is_err());
        assert_eq!(form(&args(Some("-"), None)).unwrap(), Form::Html);
        assert_eq!(form(&args(None, None)).unwrap(), Form::Text);
    }

    #[test]
    fn names_tell_results_apart() {
        let json = include_str!("../../../../lab/tests/results/acceptance.json");
        let record: AcceptanceRecord = serde_json::from_str(json).unwrap();
        let document = Document::Acceptance(Box::new(record));
        let named = |paths: &[&'static str]| {
            let documents: Vec<_> = paths.iter().map(|path| (Path::new(*path), document.clone())).collect();
            names(&documents)
        };
        assert_eq!(named(&["a/x.json", "y.json"]), ["x.json", "y.json"]);
        assert_eq!(named(&["a/x.json", "b/x.json"]), ["a/x.json", "b/x.json"]);
        assert_eq!(named(&["x.json", "x.json"]), ["x.json (1)", "x.json (2)"]);
    }
}
