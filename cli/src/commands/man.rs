//! `diskwright man [DIR]`: manual pages, made from the definitions of `--help`.

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure},
};
use clap::{Args, Command};
use clap_mangen::Man;
use std::{
    fs,
    io::{self, Write},
    path::{Path, PathBuf},
};

/// Arguments of `man`.
#[derive(Debug, Args)]
#[command(after_help = "\
EXAMPLES
  diskwright man | man -l -
  sudo diskwright man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Write diskwright.1 and one page for each command into this folder, which is created.
    #[arg(value_name = "DIR")]
    dir: Option<PathBuf>,
}

/// Exit codes of a command whose help does not list them.
const USUAL_STATUS: &str = "0 done, 1 failed, 2 used wrongly, 130 stopped by a signal";

/// Prints the main page, or writes all pages. `command` is the whole program.
pub fn run(context: &mut Context, args: &ManArgs, command: Command) -> exit::Outcome {
    let mut command = command.disable_help_subcommand(true);
    command.build();
    match &args.dir {
        None => page(&command, &mut context.out)?,
        Some(dir) => {
            let failed = |error| Failure::doing(format!("cannot write the manual pages into {}", dir.display()), error);
            fs::create_dir_all(dir).map_err(failed)?;
            pages(&command, dir).map_err(failed)?;
            if !context.global.quiet {
                writeln!(context.out, "manual pages written to {}", printable(&crate::json::path(dir)))?;
            }
        }
    }
    Ok(exit::OK)
}

/// A page for the command and one for each below it.
fn pages(command: &Command, dir: &Path) -> io::Result<()> {
    let mut text = Vec::new();
    page(command, &mut text)?;
    fs::write(dir.join(Man::new(command.clone()).get_filename()), text)?;
    command.get_subcommands().filter(|below| !below.is_hide_set()).try_for_each(|below| pages(below, dir))
}

/// One page. The exit codes in the help become a section of their own.
fn page(command: &Command, out: &mut dyn Write) -> io::Result<()> {
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (status, rest): (Vec<&str>, Vec<&str>) = after.split("\n\n").partition(|part| part.starts_with("EXIT CODES"));
    let status = status.first().map_or(USUAL_STATUS, |text| text.trim_start_matches("EXIT CODES").trim_start());
    let status = status.strip_prefix("are ").unwrap_or(status);
    let man = Man::new(command.clone().after_help(rest.join("\n\n")));
    man.render_title(out)?;
    man.render_name_section(out)?;
    man.render_synopsis_section(out)?;
    man.render_description_section(out)?;
    man.render_options_section(out)?;
    if command.has_subcommands() {
        man.render_subcommands_section(out)?;
    }
    writeln!(out, ".SH \"EXIT STATUS\"\n{}", roff(status))?;
    if !rest.is_empty() {
        man.render_extra_section(out)?;
    }
    if command.get_version().is_some() {
        man.render_version_section(out)?;
    }
    Ok(())
}

/// Text escaped for roff: backslashes, and lines that begin like a request.
fn roff(text: &str) -> String {
    let escaped = text.replace('\\', "\\e").replace('-', "\\-");
    escaped
        .lines()
        .map(|line| if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line.into() })
        .collect::<Vec<_>>()
        .join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_page_tells_its_exit_status() {
        let dir = tempfile::tempdir().unwrap();
        let check =
            Command::new("check").about("c").after_help("EXIT CODES  0 sound, 2 corrupt\n\nEXAMPLES\n  check x");
        let mut command = Command::new("top").about("t").after_help("EXAMPLES\n  top").subcommand(check);
        command.build();
        pages(&command, dir.path()).unwrap();
        let read = |name: &str| fs::read_to_string(dir.path().join(name)).unwrap();
        let below = read("top-check.1");
        assert!(below.contains(".SH \"EXIT STATUS\"\n0 sound, 2 corrupt\n") && below.contains("check x"), "{below}");
        assert_eq!(below.matches("0 sound").count(), 1);
        assert!(read("top.1").contains(".SH \"EXIT STATUS\"\n0 done, 1 failed"), "{}", read("top.1"));
    }
}
