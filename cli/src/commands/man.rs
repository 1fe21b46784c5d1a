//! `diskwright man [DIR]`: the manual, made from the same definitions as `--help`.

use crate::{
    args::Cli,
    context::Context,
    describe::printable,
    exit::{self, Failure},
};
use clap::{Args, CommandFactory};
use std::{fs, io::Write, path::PathBuf};

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "\
EXAMPLES
  diskwright man | man -l -
  sudo diskwright man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Write diskwright.1 and one page for each command into this folder (made if need be).
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Prints the main page, or writes all pages.
pub fn run(context: &mut Context, args: &ManArgs) -> exit::Outcome {
    match &args.dir {
        None => clap_mangen::Man::new(Cli::command()).render(&mut context.out)?,
        Some(dir) => {
            let failed = |error| Failure::doing(format!("cannot write the manual pages into {}", dir.display()), error);
            fs::create_dir_all(dir).map_err(failed)?;
            clap_mangen::generate_to(Cli::command(), dir).map_err(failed)?;
            if !context.global.quiet {
                writeln!(context.out, "manual pages written to {}", printable(&crate::json::path(dir)))?;
            }
        }
    }
    Ok(exit::OK)
}
