//! Files that commands write: results, reports and profiles.
//!
//! ```text
//!   Output::check   before measuring: may NAME be replaced or created?
//!   save, write     as often as needed: NAME.saving, complete ──▶ renamed to NAME
//! ```
//!
//! An existing file is replaced if it is empty, or if it is a file of the same kind that this
//! program wrote:
//!
//! | kind | recognised by |
//! |---|---|
//! | result | its first field, `"schema"`, with a kind of result in any version |
//! | page | its doctype, and the `generator` in its head |
//! | SVG | its first element, and the comment behind it |
//! | Markdown | its heading, and its last line, which names the program |
//! | CSV | the names of its first columns, and CRLF line ends |
//! | profile | its first line, [`PROFILE_MARK`] |
//!
//! Any other file is kept, and the command fails. A result never replaces a report, and a report
//! never replaces a result. A file is inspected again right before it is replaced, because another
//! program may have created it during the run.
//!
//! If the name is a symbolic link, its target is replaced. Links in `/dev` and `/proc`, such as
//! `/dev/stdout`, are refused: their targets are open already.

use crate::{LabError, Result};
use diskwright_outline::json;
use serde::Serialize;
use std::{
    fs::{self, File},
    io::{self, BufWriter, Read, Seek, SeekFrom, Write},
    path::{Path, PathBuf},
};

/// First line of the profiles that are saved with results.
pub const PROFILE_MARK: &str =
    "# Options of a `diskwright lab run`. Copy this file before you change it: the next run replaces it.";

/// Bytes of a file's start and of its end that are inspected.
const LOOK_BYTES: u64 = 2048;

/// First columns of the CSV tables of `export/`.
const TABLES: [&str; 4] = [
    "result,started_utc,",
    "result,phase,start_s,interval_s,",
    "result,phase,direction,latency_kind,",
    "result,scope,base,side,measurement,",
];

/// Prefixes of the schemas of results.
const SCHEMAS: [&str; 2] = ["diskwright.lab.", "diskwright.study."];

/// Marks every report with the program that made it; the version follows. Reports are recognised by
/// it.
pub(crate) const MADE_BY: &str = "Made by diskwright ";

/// Program and version for a report.
pub(crate) fn made_by() -> String {
    format!("{MADE_BY}{}", env!("CARGO_PKG_VERSION"))
}

const OTHER_NAME: &str = "choose another name";

/// Kind of file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A result as JSON.
    Result,
    /// A report: a page, Markdown, SVG or CSV.
    Report,
    /// A job, saved with the result of its run.
    Profile,
}

/// A checked name for an output file.
#[derive(Debug, Clone)]
pub struct Output {
    /// The name that the user gave.
    path: PathBuf,
    /// The name after following symbolic links.
    real: PathBuf,
    /// Temporary name until the file is complete.
    saving: PathBuf,
    kind: Kind,
}

impl Output {
    /// Checks whether a file of this kind may be written at `path`, by creating and removing a
    /// temporary file beside it. A temporary file of an interrupted save is removed; `path` itself
    /// is not changed.
    ///
    /// # Errors
    /// [`LabError::BadOptions`] if another kind of file exists, [`LabError::File`] if no file can
    /// be created.
    pub fn check(path: &Path, kind: Kind) -> Result<Self> {
        let of_the_system = path.is_symlink() && ["/dev", "/proc"].iter().any(|dir| path.starts_with(dir));
        if of_the_system {
            return Err(kind.refusal(path, "not a regular file", OTHER_NAME));
        }
        let real = match path.canonicalize() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => path.to_owned(),
            real => real.map_err(kind.failure(path))?,
        };
        let mut saving = real.clone().into_os_string();
        saving.push(".saving");
        let output = Self { path: path.to_owned(), real, saving: saving.into(), kind };
        output.check_replaceable(&output.real, path)?;
        output.begin()?;
        fs::remove_file(&output.saving).map_err(kind.failure(path))?;
        Ok(output)
    }

    /// The name that the user gave.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes `value` as JSON. After an error the file is unchanged.
    ///
    /// # Errors
    /// As [`Self::check`], and errors of writing.
    pub fn save<T: Serialize>(&self, value: &T) -> Result<()> {
        self.replace(|file| json::write(file, value))
    }

    /// Writes `text`. After an error the file is unchanged.
    ///
    /// # Errors
    /// As [`Self::save`].
    pub fn write(&self, text: &str) -> Result<()> {
        self.replace(|file| file.write_all(text.as_bytes()))
    }

    fn replace(&self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        self.check_replaceable(&self.real, &self.path)?;
        let mut file = BufWriter::new(self.begin()?);
        let written = write(&mut file).and_then(|()| file.flush()).and_then(|()| fs::rename(&self.saving, &self.real));
        if written.is_err() {
            // The first error is returned.
            let _ = fs::remove_file(&self.saving);
        }
        written.map_err(self.kind.failure(&self.path))
    }

    /// Creates the temporary file. One of an interrupted save is removed first.
    fn begin(&self) -> Result<File> {
        self.check_replaceable(&self.saving, &self.saving)?;
        match fs::remove_file(&self.saving) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => File::create_new(&self.saving),
        }
        .map_err(self.kind.failure(&self.path))
    }

    /// Returns an error if the file at `path` must not be replaced. The message calls it `name`.
    fn check_replaceable(&self, path: &Path, name: &Path) -> Result<()> {
        let kind = self.kind;
        match fs::metadata(path) {
            Ok(found) if !found.is_file() => Err(kind.refusal(name, "not a regular file", OTHER_NAME)),
            Ok(_) if kind.is_replaceable(path).map_err(kind.failure(name))? => Ok(()),
            Ok(_) => Err(kind.refusal(
                name,
                &format!("file exists and is not a {}", kind.word()),
                "remove it, or choose another name",
            )),
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(kind.failure(name)(error)),
            Err(_) if path.is_symlink() => {
                Err(kind.refusal(name, "it is a symbolic link without a target", OTHER_NAME))
            }
            Err(_) => Ok(()),
        }
    }
}

impl Kind {
    fn word(self) -> &'static str {
        match self {
            Self::Result => "result",
            Self::Report => "report",
            Self::Profile => "profile of a run",
        }
    }

    fn refusal(self, path: &Path, what: &str, hint: &str) -> LabError {
        LabError::BadOptions {
            what: format!("the {} cannot be saved as {}: {what}", self.word(), path.display()),
            hint: format!("nothing was changed; {hint}"),
        }
    }

    fn failure(self, path: &Path) -> impl FnOnce(io::Error) -> LabError + use<> {
        let doing = match self {
            Self::Result => "write the result to",
            Self::Report => "write the report to",
            Self::Profile => "write the profile to",
        };
        LabError::file(doing, path.to_owned())
    }

    /// Whether the file is empty or of this kind.
    fn is_replaceable(self, path: &Path) -> io::Result<bool> {
        let mut file = File::open(path)?;
        let (mut start, mut end) = (Vec::new(), Vec::new());
        (&mut file).take(LOOK_BYTES).read_to_end(&mut start)?;
        file.seek(SeekFrom::Start(file.metadata()?.len().saturating_sub(LOOK_BYTES)))?;
        file.take(LOOK_BYTES).read_to_end(&mut end)?;
        // The cuts may be within a character. The marks are ASCII.
        let (start, end) = (String::from_utf8_lossy(&start), String::from_utf8_lossy(&end));
        Ok(start.is_empty()
            || match self {
                Self::Result => is_result(&start),
                Self::Report => is_page(&start) || is_markdown(&start, &end) || is_table(&start) || is_svg(&start),
                Self::Profile => start.starts_with(PROFILE_MARK),
            })
    }
}

fn is_result(start: &str) -> bool {
    let mut rest = start;
    for mark in ["{", "\"schema\"", ":", "\""] {
        match rest.trim_ascii_start().strip_prefix(mark) {
            Some(after) => rest = after,
            None => return false,
        }
    }
    SCHEMAS.iter().any(|schema| rest.starts_with(schema))
}

fn is_page(start: &str) -> bool {
    start.starts_with("<!DOCTYPE html>") && start.contains(&format!("<meta name=\"generator\" content=\"{MADE_BY}"))
}

fn is_svg(start: &str) -> bool {
    start.starts_with("<svg ") && start.contains(&format!("<!-- {MADE_BY}"))
}

fn is_markdown(start: &str, end: &str) -> bool {
    let last = end.lines().last().unwrap_or_default();
    start.starts_with("# ") && last.starts_with(&format!("_{MADE_BY}")) && last.ends_with('_')
}

fn is_table(start: &str) -> bool {
    let first = start.split('\n').next().unwrap_or_default();
    first.ends_with('\r') && TABLES.iter().any(|heads| first.starts_with(heads))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        document::{BUNDLE_SCHEMA, Bundle},
        export::{self, CsvTable},
        report::{self, Named, example},
        study::containers::ContainersRecord,
    };
    use tempfile::TempDir;

    /// A folder, and a file in it that holds `bytes`.
    fn holding(bytes: impl AsRef<[u8]>) -> (TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("there");
        fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    /// The kinds that may replace a file with these bytes. Other kinds leave it unchanged.
    fn replacing(bytes: impl AsRef<[u8]>) -> Vec<Kind> {
        let (dir, path) = holding(&bytes);
        let may = |kind: &Kind| match Output::check(&path, *kind) {
            Ok(_) => true,
            Err(error) => {
                assert!(error.to_string().contains("nothing was changed"), "{error}");
                false
            }
        };
        let kinds = [Kind::Result, Kind::Report, Kind::Profile].into_iter().filter(may).collect();
        assert_eq!(fs::read(&path).unwrap(), bytes.as_ref());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        kinds
    }

    #[test]
    fn whatever_is_written_may_be_replaced_by_its_kind_only() {
        let documents = example::all();
        for (name, document) in &documents {
            let named: [Named<'_>; 1] = [(name, document)];
            assert_eq!(replacing(json::to_text(document).unwrap()), [Kind::Result], "{name}");
            assert_eq!(replacing(serde_json::to_string(document).unwrap()), [Kind::Result], "{name}");
            assert_eq!(replacing(report::html(&named)), [Kind::Report], "{name}");
            assert_eq!(replacing(export::markdown(&named)), [Kind::Report], "{name}");
            let tables = [CsvTable::Figures, CsvTable::Series, CsvTable::Latencies];
            for table in tables.into_iter().filter_map(|table| export::csv(&named, table).ok()) {
                assert_eq!(replacing(&table), [Kind::Report], "{name}: {}", table.lines().next().unwrap_or_default());
            }
        }
        let bundle =
            Bundle { schema: BUNDLE_SCHEMA, results: documents.iter().map(|(_, document)| document).collect() };
        assert_eq!(replacing(json::to_text(&bundle).unwrap()), [Kind::Result]);
        let named: Vec<Named<'_>> = documents.iter().map(|(name, document)| (*name, document)).collect();
        assert_eq!(replacing(report::html(&named)), [Kind::Report]);
        assert_eq!(replacing(export::markdown(&named)), [Kind::Report]);
        assert_eq!(replacing(format!("{PROFILE_MARK}\nname = \"x\"\n")), [Kind::Profile]);
        assert_eq!(replacing(""), [Kind::Result, Kind::Report, Kind::Profile]);
        assert_eq!(
            replacing("{\"schema\":\"diskwright.lab.run/9\""),
            [Kind::Result],
            "of a newer version, and cut off"
        );
    }

    #[test]
    fn files_of_other_programs_are_kept() {
        for bytes in [
            b"{\"name\": \"x\", \"version\": \"1.0.0\"}".as_slice(),
            b"{\"version\": 1, \"schema\": \"diskwright.lab.run/2\"}",
            b"{\"schema\": \"diskwright.map/1\"}",
            b"{\"schema\": \"fio/3\"}",
            b"{",
            b"# Notes\n\nMade by diskwright, they say.\n",
            b"<!DOCTYPE html><html><head><title>Mine</title>",
            b"result,of,mine\r\n",
            b"result,started_utc,phase,scope,load,mine\nrun.json,",
            b"name = \"mine\"\n",
            b"connectix",
            &[0xab; 1 << 20],
            &[b' '; 4096],
        ] {
            let kinds = replacing(bytes);
            assert!(kinds.is_empty(), "{kinds:?}: {}", String::from_utf8_lossy(&bytes[..bytes.len().min(40)]));
        }
    }

    #[test]
    fn a_result_is_saved_whole_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("r.json");
        let output = Output::check(&path, Kind::Result).unwrap();
        assert!(!path.exists());
        output.save(&ContainersRecord { rounds: 3, ..Default::default() }).unwrap();
        let back: ContainersRecord = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(back.rounds, 3);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        let error = Output::check(&dir.path().join("missing/r.json"), Kind::Result).unwrap_err();
        assert!(error.to_string().contains("r.json"), "{error}");
        // A file that another program created in the meantime is kept.
        fs::write(&path, "mine").unwrap();
        assert!(output.save(&1).unwrap_err().to_string().contains("is not a result"));
        assert_eq!(fs::read_to_string(&path).unwrap(), "mine");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(output.write("").unwrap_err().to_string().contains("not a regular file"));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_name_before_it_is_whole_is_not_taken_from_others() {
        let (dir, path) = holding("");
        let saving = dir.path().join("there.saving");
        fs::write(&saving, "mine").unwrap();
        let error = Output::check(&path, Kind::Result).unwrap_err().to_string();
        assert!(error.contains("there.saving"), "{error}");
        assert_eq!(fs::read_to_string(&saving).unwrap(), "mine");
        // As an interrupted save leaves it.
        fs::write(&saving, "{\n  \"schema\": \"diskwright.lab.sweep/1\",\n  \"verd").unwrap();
        Output::check(&path, Kind::Result).unwrap().write("x").unwrap();
        assert!(!saving.exists());
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
    }

    #[test]
    fn a_link_stays_a_link() {
        let (dir, path) = holding("");
        let link = dir.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let output = Output::check(&link, Kind::Result).unwrap();
        assert_eq!(output.path(), link);
        output.write("x").unwrap();
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&path).unwrap(), "x");
        fs::remove_file(&path).unwrap();
        let error = Output::check(&link, Kind::Result).unwrap_err().to_string();
        assert!(error.contains("a symbolic link without a target"), "{error}");
        for name in ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/dev/null"] {
            let error = Output::check(Path::new(name), Kind::Result).unwrap_err().to_string();
            assert!(error.contains("not a regular file"), "{error}");
        }
    }
}
