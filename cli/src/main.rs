//! The face of Diskwright: commands, screens, exit codes. No logic that a user of the libraries
//! would miss.
//!
//! ```text
//!   args.rs        the command line          options.rs    options that several commands share
//!   commands/      one file per command: arguments in, library called, words out
//!   context.rs     what a command is given: options, signals, standard output
//!   exit.rs        exit codes and failures        signals.rs    Ctrl-C and SIGTERM
//!   progress.rs    how far a long operation is    style.rs      terminal, colour
//!   extents.rs     a disk's extents, by windows   draw.rs       a disk on one screen
//!   describe.rs    one image in words and JSON    steps.rs      how far a run of the lab is
//!   export.rs      an NBD export in words, JSON   live.rs      a run while it is measured
//!   ntfs.rs       holes that Windows refuses
//!   switches.rs   what the libraries' options are called here
//!   sizes.rs  timestamp.rs  table.rs  json.rs     how things are written
//! ```
//!
//! What a command found goes to standard output; progress, warnings and errors go to standard
//! error. With `--json` standard output holds one document, or nothing when the command failed.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod context;
mod describe;
mod draw;
mod exit;
mod export;
mod extents;
mod json;
mod live;
mod ntfs;
mod options;
mod progress;
mod signals;
mod sizes;
mod steps;
mod style;
mod switches;
mod table;
mod timestamp;

use args::{Cli, Command};
use clap::{CommandFactory, Parser};
use context::{Context, say};
use exit::{Codes, Failure};
use std::{ffi::OsString, io::Write, process::ExitCode};

fn main() -> ExitCode {
    signals::let_full_files_fail();
    let signals = signals::Signals::install();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    switches::set_command(switches_of(&cli.command));
    let codes = codes(&cli.command);
    let mut context = Context::new(cli.global, signals);
    let outcome = run(&mut context, &cli.command).and_then(|code| {
        context.out.flush()?;
        Ok(code)
    });
    ExitCode::from(match outcome {
        Ok(code) => code,
        Err(failure) => {
            match &failure {
                Failure::Usage(sentence) | Failure::Sentence(sentence) => say(sentence),
                Failure::Stopped => say("stopped before it was done"),
                Failure::ReaderGone => {}
            }
            codes.of(&failure)
        }
    })
}

fn run(context: &mut Context, command: &Command) -> exit::Outcome {
    match command {
        Command::Create(args) => commands::create::run(context, args),
        Command::Info(args) => commands::info::run(context, args),
        Command::Map(args) => commands::map::run(context, args),
        Command::Check(args) => commands::check::run(context, args),
        Command::Convert(args) => commands::convert::run(context, args),
        Command::Compare(args) => commands::compare::run(context, args),
        Command::Io(args) => commands::io::run(context, args),
        Command::Serve(args) => commands::serve::run(context, args),
        Command::Attach(args) => commands::attach::run(context, args),
        Command::Detach(args) => commands::detach::run(context, args),
        Command::Attached(args) => commands::attached::run(context, args),
        Command::Lab(args) => commands::lab::run(context, args),
        Command::Diskspd(args) => commands::diskspd::run(context, args, Cli::command()),
        Command::Bench(args) => commands::bench::run(context, args),
        Command::MeasuringChild(args) => commands::lab::measuring_child(context, args),
        Command::Completions(args) => commands::completions::run(context, args, Cli::command()),
        Command::Man(args) => commands::man::run(context, args, Cli::command()),
    }
}

fn codes(command: &Command) -> Codes {
    match command {
        Command::Check(_) => Codes::CHECK,
        Command::Compare(_) => Codes::COMPARE,
        Command::Lab(args) => args.codes(),
        _ => Codes::USUAL,
    }
}

// The commands that have switches of their own for an option that others share.
fn switches_of(command: &Command) -> &'static str {
    match command {
        Command::Convert(_) => "convert",
        Command::Compare(_) => "compare",
        _ => "",
    }
}

// Help and version are printed by clap and are a success.
fn usage(error: &clap::Error) -> ExitCode {
    let _ = error.print();
    ExitCode::from(if error.use_stderr() { usage_code(std::env::args_os()) } else { exit::OK })
}

// A usage error of `check` must not end with 2, which says "corrupt". The line cannot be parsed, so
// it is parsed again leniently for the name of the command alone.
fn usage_code(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> u8 {
    let matches = Cli::command().ignore_errors(true).try_get_matches_from(arguments);
    match matches.as_ref().ok().and_then(|matches| matches.subcommand_name()) {
        Some("check") => Codes::CHECK.usage(),
        _ => Codes::USUAL.usage(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_usage_error_of_check_is_not_corruption() {
        assert_eq!(usage_code(["diskwright", "check"]), exit::NOT_CHECKED);
        assert_eq!(usage_code(["diskwright", "--format", "vhd", "check", "--nonsense"]), exit::NOT_CHECKED);
        assert_eq!(usage_code(["diskwright", "compare", "check"]), exit::USAGE);
        assert_eq!(usage_code(["diskwright", "info"]), exit::USAGE);
        assert_eq!(usage_code(["diskwright"]), exit::USAGE);
    }
}
