//! What `-h` and `--help` print: the order of a command's help.
//!
//! ```text
//!   -h                                  --help
//!   what the command does, usage        the same
//!   its own options                     its own options, with the meaning of each value
//!   EXAMPLES                            EXAMPLES
//!                                       notes and exit codes
//!   Disk options, Global options:       Disk options, Global options: all that is to be said
//!     a short line for each
//! ```
//!
//! Clap puts all options before the examples, and with `--help` it spreads them. So [`arrange`]
//! hides the options that many commands share, and appends a table of them to the text behind the
//! options. It is called only when help is asked for: parsing, the manual pages and the completions
//! use the plain command line.

use crate::options::{DISK, GLOBAL};
use clap::{Arg, Command};

/// Widest help, also on a wider terminal.
pub(crate) const COLUMNS_MAX: usize = 120;

/// Whether this is one of the options about disks and chains.
pub(crate) fn is_of_disks(option: &Arg) -> bool {
    option.get_help_heading() == Some(DISK)
}

/// The command line with the help of every command in this order. `columns` is the width to print
/// for; `None` stands for the terminal's.
pub fn arrange(line: Command, columns: Option<usize>) -> Command {
    let is_of_all = |option: &&Arg| option.get_help_heading() == Some(GLOBAL);
    let of_all: Vec<Arg> = line.get_arguments().filter(is_of_all).cloned().collect();
    let line = match columns {
        Some(columns) => line.term_width(columns),
        None => line,
    };
    arranged(line, &of_all, columns)
}

fn arranged(command: Command, of_all: &[Arg], columns: Option<usize>) -> Command {
    let is_shown = |option: &&Arg| is_of_disks(option) && !option.is_hide_set();
    let shared: Vec<Arg> = command.get_arguments().filter(is_shown).chain(of_all).cloned().collect();
    let command = command
        .mut_args(|option| match option.get_help_heading() {
            Some(DISK | GLOBAL) => option.hide(true),
            _ => option,
        })
        .mut_subcommands(|below| arranged(below, of_all, columns));
    let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let (notes, examples) = match after.split_once("EXAMPLES") {
        Some((notes, examples)) => (notes.trim(), format!("EXAMPLES{examples}")),
        None => (&after[..], String::new()),
    };
    let table = |option: fn(Arg) -> Arg, is_long| table(shared.iter().cloned().map(option), is_long, columns);
    let short = [examples.trim_end(), &table(short, false)];
    let long = [examples.trim_end(), notes, &table(whole, true)];
    command.after_help(joined(&short)).after_long_help(joined(&long))
}

/// An option in one line.
fn short(option: Arg) -> Arg {
    // Clap refuses this for an option without a value.
    match option.get_action().takes_values() {
        true => option.hide_possible_values(true).hide_default_value(true),
        false => option,
    }
}

/// An option with all that is to be said about it.
fn whole(option: Arg) -> Arg {
    let text = option.get_long_help().or(option.get_help()).map(ToString::to_string).unwrap_or_default();
    let paragraphs: Vec<&str> = text.split("\n\n").collect();
    let (last, first) = paragraphs.split_last().map_or(("", &[][..]), |(last, first)| (*last, first));
    let sentences: String = first.iter().map(|paragraph| format!("{}. ", paragraph.trim_end_matches('.'))).collect();
    option.help(sentences + last)
}

/// The options with their headings: in two columns, or with the text below each option, which has
/// the whole width then.
fn table(options: impl Iterator<Item = Arg>, is_below: bool, columns: Option<usize>) -> String {
    let mut command = Command::new("")
        .disable_help_flag(true)
        .disable_version_flag(true)
        .help_template("{all-args}")
        .max_term_width(COLUMNS_MAX)
        .next_line_help(is_below)
        .args(options);
    if let Some(columns) = columns {
        command = command.term_width(columns);
    }
    command.render_help().ansi().to_string().trim_end().to_owned()
}

fn joined(parts: &[&str]) -> String {
    parts.iter().filter(|part| !part.is_empty()).copied().collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::command_line;

    #[test]
    fn an_option_that_many_commands_share_has_one_line_in_short_help() {
        for columns in [80, 120] {
            let mut line = arrange(command_line(), Some(columns));
            line.build();
            let help = line.find_subcommand_mut("io").unwrap().render_help().to_string();
            let (_, shared) = help.split_once("Disk options:\n").unwrap();
            let rows: Vec<&str> = shared.lines().filter(|row| row.starts_with(' ')).collect();
            assert!(rows.len() > 10 && rows.iter().all(|row| row.contains(" --")), "{shared}");
        }
    }

    /// Beside the longest option, 30 of 80 columns would be left for the text.
    #[test]
    fn long_help_of_a_shared_option_has_the_whole_width() {
        let mut line = arrange(command_line(), Some(80));
        line.build();
        let help = line.find_subcommand_mut("info").unwrap().render_long_help().to_string();
        let (_, shared) = help.split_once("Disk options:\n").unwrap();
        assert!(shared.contains("--format <FORMAT>\n          Format of the image"), "{shared}");
        let texts = shared.lines().filter(|row| row.starts_with("          "));
        assert!(texts.clone().any(|row| row.len() > 70) && texts.clone().all(|row| row.len() <= 80), "{shared}");
    }

    #[test]
    fn the_long_help_has_what_the_short_one_leaves_out() {
        let mut line = arrange(command_line(), Some(80));
        line.build();
        let convert = line.find_subcommand_mut("convert").unwrap();
        let (short, long) = (convert.render_help().to_string(), convert.render_long_help().to_string());
        assert!(!short.contains("EXIT CODES") && long.contains("EXIT CODES"), "{long}");
        assert!(!short.contains("io_uring where the kernel") && long.contains("auto is io_uring"), "{short}");
        assert!(long.find("EXAMPLES") < long.find("EXIT CODES") && long.find("EXIT CODES") < long.find("Disk options"));
        let format = |help: &str| help.find("Format of the new image").unwrap();
        assert!(format(&short) < short.find("EXAMPLES").unwrap(), "{short}");
        assert!(short.lines().count() < 100, "{} lines", short.lines().count());
    }
}
