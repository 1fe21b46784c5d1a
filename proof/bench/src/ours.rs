//! The program under test, as a child process.
//!
//! A child is this executable with the hidden first word [`PROGRAM`]; `main` hands the words behind
//! it to diskwright's command line. `attach` starts further processes from its own command line, in
//! which the word stays the first.

use diskwright_cli::CHILD_COMMAND;
use diskwright_lab::{ChildLauncher, LabError, Result};
use std::{env, process::Command};

/// First word of a command line that is diskwright's.
pub(crate) const PROGRAM: &str = "diskwright";

/// The program under test, ready for its arguments.
///
/// # Errors
/// [`LabError::File`] when the system cannot tell which program is running.
pub(crate) fn command() -> Result<Command> {
    let program = env::current_exe().map_err(LabError::file("find the running program", "/proc/self/exe"))?;
    let mut command = Command::new(program);
    command.arg(PROGRAM);
    Ok(command)
}

/// How the lab measures in a fresh process.
///
/// # Errors
/// As [`command`].
pub(crate) fn launcher() -> Result<ChildLauncher> {
    ChildLauncher::current_exe([PROGRAM, CHILD_COMMAND])
}
