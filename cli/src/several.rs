//! Several files given to one command: each in turn, whatever becomes of the others.
//!
//! ```text
//!   check a.vhdx b.vhdx c.vhd     a: sound   b: error on standard error   c: 3 errors
//!                                 ──▶ exit code 2, the worst of the three
//! ```
//!
//! A single file prints what it always printed. Several files print the same, one after the other;
//! with `--json` one document holds the documents of all files ([`Report`]). A file that fails has
//! its sentence on standard error at once, so that it stands where it belongs.
//!
//! Options that name something of one file, such as `--undo-file`, are refused with several files
//! by the command ([`only_one`]) before the first file is touched. A signal ends the command: files
//! that were not begun are not in the document.
//!
//! `compact` has a document of its own for several disks, so it uses [`in_turn`] alone.

use crate::{
    context::Context,
    exit::{self, Codes, Failure, Outcome},
    json::{self, Document},
};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::{
    io::Write,
    path::{Path, PathBuf},
};

/// What a command with several files prints with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The files, in the order of the command line. A signal ends the list early.
    files: Vec<Ended>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.several/1";
}

/// How one of the files ended.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Ended {
    /// The file, as it was named.
    pub file: String,
    /// The exit code that the command would have had with this file alone.
    pub exit_code: u8,
    /// Why the command failed for this file; `null` if it did not.
    pub error: Option<String>,
    /// The document that the command prints for this file alone; `null` if it failed.
    result: Option<Value>,
}

/// What is printed between the texts of two files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Between {
    /// Nothing: each line names its file.
    Nothing,
    /// An empty line: the first line of each file names it.
    EmptyLine,
    /// The name of the file above its text, which does not name it.
    Heading,
}

/// Runs `one` for each file, and prints the document of several files. The exit code is the worst.
///
/// # Errors
/// For a single file, those of `one`; for several [`Failure::Stopped`] and [`Failure::ReaderGone`].
pub fn each(
    context: &mut Context,
    files: &[PathBuf],
    codes: Codes,
    between: Between,
    mut one: impl FnMut(&mut Context, &Path) -> Outcome,
) -> Outcome {
    let is_text = files.len() > 1 && !context.global.json && !context.global.quiet;
    let mut is_first = true;
    let turns = in_turn(context, files, codes, |context, file| {
        if is_text {
            match between {
                Between::Nothing => {}
                _ if is_first && between == Between::EmptyLine => {}
                Between::EmptyLine => writeln!(context.out)?,
                Between::Heading => {
                    let gap = if is_first { "" } else { "\n" };
                    writeln!(context.out, "{gap}{}:", crate::describe::printable(&json::path(file)))?;
                }
            }
            is_first = false;
        }
        one(context, file)
    })?;
    let outcome = turns.outcome();
    if files.len() > 1 && context.global.json {
        context.print_json(&Report { files: turns.ended })?;
    }
    outcome
}

/// What became of the files.
#[derive(Debug)]
pub struct Turns {
    /// The files that were begun.
    pub ended: Vec<Ended>,
    was_stopped: bool,
}

impl Turns {
    /// The end of the command: the worst exit code, or that a signal stopped it.
    pub fn outcome(&self) -> Outcome {
        match self.was_stopped {
            true => Err(Failure::Stopped),
            false => {
                Ok(self.ended.iter().map(|file| file.exit_code).max_by_key(|code| severity(*code)).unwrap_or(exit::OK))
            }
        }
    }
}

/// Runs `one` for each file. Of several files, an error of one is told and the others go on, and
/// documents that `one` prints with `--json` are kept in [`Turns`] instead of being printed.
///
/// # Errors
/// For a single file, those of `one`; for several [`Failure::ReaderGone`].
pub fn in_turn(
    context: &mut Context,
    files: &[PathBuf],
    codes: Codes,
    mut one: impl FnMut(&mut Context, &Path) -> Outcome,
) -> Outcome<Turns> {
    let mut turns = Turns { ended: Vec::with_capacity(files.len()), was_stopped: false };
    if let [file] = files {
        let exit_code = one(context, file)?;
        turns.ended.push(Ended { file: json::path(file), exit_code, error: None, result: None });
        return Ok(turns);
    }
    for file in files {
        // A signal during the last steps of the file before does not fail that file.
        if context.signals.came() {
            turns.was_stopped = true;
            break;
        }
        let (outcome, result) = context.collecting(|context| one(context, file));
        let (exit_code, error) = match outcome {
            Ok(code) => (code, None),
            Err(Failure::ReaderGone) => return Err(Failure::ReaderGone),
            Err(failure) => {
                turns.was_stopped = matches!(failure, Failure::Stopped);
                let sentence = failure.to_string();
                if !turns.was_stopped {
                    context.warn_always(&sentence);
                }
                (codes.of(&failure), Some(sentence))
            }
        };
        let result = result.filter(|_| error.is_none());
        turns.ended.push(Ended { file: json::path(file), exit_code, error, result });
        if turns.was_stopped {
            break;
        }
    }
    Ok(turns)
}

/// Refuses an option that names something of one file.
///
/// # Errors
/// Wrong usage, if there are several files and the option is given.
pub fn only_one(files: &[PathBuf], option: &str, is_given: bool) -> Outcome<()> {
    match is_given && files.len() > 1 {
        true => Err(Failure::usage(format!("{option} is for one file, and {} are named", files.len()))),
        false => Ok(()),
    }
}

/// Order of exit codes, the worst highest. 3 is the mildest of all commands: leaked space, a rule
/// that does not hold. 2 of `check` is damage, which is worse than a file that was not checked.
fn severity(code: u8) -> u8 {
    match code {
        exit::OK => 0,
        exit::LEAKED => 1,
        exit::FAILED => 2,
        exit::CORRUPT => 3,
        _ => 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn code(codes: &[u8]) -> u8 {
        let ended = |&exit_code: &u8| Ended { file: String::new(), exit_code, error: None, result: None };
        Turns { ended: codes.iter().map(ended).collect(), was_stopped: false }.outcome().unwrap()
    }

    #[test]
    fn the_worst_exit_code_counts() {
        assert_eq!(code(&[0, 0]), 0);
        assert_eq!(code(&[0, exit::LEAKED, 0]), exit::LEAKED);
        assert_eq!(code(&[exit::LEAKED, exit::NOT_CHECKED]), exit::NOT_CHECKED);
        assert_eq!(code(&[exit::NOT_CHECKED, exit::CORRUPT, exit::LEAKED]), exit::CORRUPT);
        let stopped = Turns { ended: Vec::new(), was_stopped: true };
        assert!(matches!(stopped.outcome(), Err(Failure::Stopped)));
    }

    #[test]
    fn an_option_of_one_file_is_refused_with_several() {
        let files = [PathBuf::from("a"), PathBuf::from("b")];
        assert!(only_one(&files, "--undo-file", false).is_ok() && only_one(&files[..1], "--undo-file", true).is_ok());
        let failure = only_one(&files, "--undo-file", true).unwrap_err();
        assert!(matches!(failure, Failure::Usage(text) if text == "--undo-file is for one file, and 2 are named"));
    }
}
