//! The command line of Diskwright: commands, terminal output, exit codes. What a user of the
//! libraries would need is in the libraries.
//!
//! ```text
//!   args.rs        the command line              options.rs   options that several commands share
//!   commands/      one file per command: reads its arguments, calls a library, prints the result
//!   context.rs     what a command is given: options, signals, standard output
//!   exit.rs        exit codes and failures       signals.rs   Ctrl-C and SIGTERM
//!   progress.rs    progress of long operations   style.rs     terminal width, colour
//!   extents.rs     a disk's extents, in windows  draw.rs      a disk on one screen
//!   in_use.rs      disks that a process of this program has open
//!   describe.rs    an image as text and JSON     steps.rs     progress of a run of the lab
//!   qemu_img.rs    what qemu-img's options are called here
//!   export.rs      an NBD export, the same       live.rs      a run while it is measured
//!   several.rs     several files, one after the other
//!   space.rs       what a dry run would need, and what is free
//!   ntfs.rs        holes that Windows refuses
//!   switches.rs    what the program calls the options of the libraries
//!   printable.rs   text from files, made safe for a terminal
//!   sizes.rs  timestamp.rs  table.rs  json.rs    formats of numbers, tables and documents
//! ```
//!
//! Results go to standard output; progress, warnings and errors go to standard error. With `--json`
//! standard output holds one document, or nothing when the command failed.
//!
//! This is a library so that `diskwright-bench` can start the program's own `serve` and `attach`
//! from its own executable ([`run`]), and can show progress and results as the program does
//! ([`conduct`], [`acceptance`]). It is not meant for other programs: `diskwright-lib` is.

#![forbid(unsafe_code)]

mod args;
mod commands;
mod context;
mod describe;
mod draw;
mod exit;
mod export;
mod extents;
mod help;
mod in_use;
mod json;
mod limits;
mod live;
mod logical_unit;
mod member_limit;
mod namespace;
mod ntfs;
mod options;
mod printable;
mod progress;
mod qemu_img;
#[cfg(test)]
mod schemas;
mod several;
mod signals;
mod sizes;
mod space;
mod steps;
mod style;
mod switches;
mod table;
mod timestamp;

pub use commands::experiment::{CHILD_COMMAND, ExperimentArgs, acceptance};
pub use context::Context;
pub use exit::{Codes, Failure, Outcome};
pub use options::{EngineArg, GlobalOptions};

use args::{Cli, Command, command_line};
use clap::error::{ContextKind, ContextValue};
use context::print_message;
use diskwright_object::ObjectFiles;
use diskwright_rbd::RbdFiles;
use diskwright_space::Spaces;
use std::{ffi::OsString, io::Write, process::ExitCode};

/// Runs the program with a command line whose first word is the program's name. Call it in `main`,
/// before any other thread starts.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let arguments: Vec<OsString> = arguments.into_iter().collect();
    match Cli::read(&arguments) {
        Ok(cli) => {
            switches::set_command(switches_of(&cli.command));
            conduct(cli.global, codes(&cli.command), |context| dispatch(context, &cli.command))
        }
        Err(error) => usage(error, arguments),
    }
}

/// Runs one command: takes the signals, flushes standard output at the end, prints a failure as a
/// sentence on standard error, and turns the outcome into an exit code by `codes`. Call it in
/// `main`, before any other thread starts.
pub fn conduct(global: GlobalOptions, codes: Codes, command: impl FnOnce(&mut Context) -> Outcome) -> ExitCode {
    signals::let_full_files_fail();
    let signals = signals::Signals::install();
    let mut context = Context::new(global, signals);
    Spaces::install();
    ObjectFiles::install();
    RbdFiles::install();
    let outcome = command(&mut context).and_then(|code| {
        context.out.flush()?;
        Ok(code)
    });
    ObjectFiles::of_process().settle();
    // Also after a failure: what was written before it stays.
    let closed = Spaces::of_user().close().map_err(|error| Failure::doing("cannot close the space", error));
    let outcome = outcome.and_then(|code| closed.map(|()| code));
    ExitCode::from(match outcome {
        Ok(code) => code,
        Err(failure) => {
            match &failure {
                Failure::Usage(sentence) | Failure::Sentence(sentence) => print_message(sentence),
                Failure::Stopped => print_message("stopped before it was done"),
                Failure::ReaderGone => {}
            }
            codes.of(&failure)
        }
    })
}

fn dispatch(context: &mut Context, command: &Command) -> Outcome {
    match command {
        Command::Create(args) => commands::create::run(context, args),
        Command::Info(args) => commands::info::run(context, args),
        Command::Map(args) => commands::map::run(context, args),
        Command::Partitions(args) => commands::partitions::run(context, args),
        Command::Check(args) => commands::check::run(context, args),
        Command::Convert(args) => commands::convert::run(context, args),
        Command::Compare(args) => commands::compare::run(context, args),
        Command::Diff(args) => commands::diff::run(context, args),
        Command::Snapshot(args) => commands::snapshot::run(context, args),
        Command::Space(args) => commands::space::run(context, args),
        Command::Cache(args) => commands::cache::run(context, args),
        Command::Push(args) => commands::push::run(context, args),
        Command::Pushed(args) => commands::pushed::run(context, args),
        Command::Pull(args) => commands::pull::run(context, args),
        Command::Prune(args) => commands::prune::run(context, args),
        Command::Seal(args) => commands::seal::run(context, args),
        Command::Track(args) => commands::track::run(context, args),
        Command::Clone(args) => commands::clone::run(context, args),
        Command::Merge(args) => commands::merge::run(context, args),
        Command::Move(args) => commands::move_::run(context, args),
        Command::Compact(args) => commands::compact::run(context, args),
        Command::Reconnect(args) => commands::reconnect::run(context, args),
        Command::Rescue(args) => commands::rescue::run(context, args),
        Command::Resize(args) => commands::resize::run(context, args),
        Command::Io(args) => commands::io::run(context, args),
        Command::Serve(args) => commands::serve::run(context, args),
        Command::ServeCtl(args) => commands::serve_ctl::run(context, args),
        Command::Attach(args) => commands::attach::run(context, args),
        Command::Detach(args) => commands::detach::run(context, args),
        Command::Attached(args) => commands::attached::run(context, args),
        Command::Lab(args) => commands::lab::run(context, args),
        Command::Diskspd(args) => commands::diskspd::run(context, args, || help::arrange(command_line(), None)),
        Command::MeasuringChild(args) => commands::lab::measuring_child(context, args),
        Command::Completions(args) => commands::completions::run(context, args, command_line()),
        Command::Man(args) => commands::man::run(context, args, command_line()),
    }
}

// The commands that have switches of their own for an option that others share, and those with
// --force-share.
fn switches_of(command: &Command) -> &'static str {
    match command {
        Command::Info(_) => "info",
        Command::Map(_) => "map",
        Command::Check(_) => "check",
        Command::Partitions(_) => "partitions",
        Command::Convert(_) => "convert",
        Command::Compare(_) => "compare",
        Command::Diff(_) => "diff",
        Command::Move(_) => "move",
        Command::Rescue(_) => "rescue",
        Command::Diskspd(_) => "diskspd",
        _ => "",
    }
}

fn codes(command: &Command) -> Codes {
    match command {
        Command::Check(_) => Codes::CHECK,
        Command::Compare(_) => Codes::COMPARE,
        Command::Diff(args) => args.codes(),
        Command::Lab(args) => args.codes(),
        _ => Codes::USUAL,
    }
}

// Help and version are printed by clap and are a success.
fn usage(mut error: clap::Error, arguments: Vec<OsString>) -> ExitCode {
    let known = match error.get(ContextKind::InvalidSubcommand) {
        Some(ContextValue::String(name)) => qemu_img::command(name),
        _ => None,
    };
    if let Some((ours, _)) = known {
        // Instead of the names that are spelled alike.
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::String(ours.to_owned()));
    }
    let _ = error.print();
    if let Some((_, sentence)) = known {
        eprintln!("\n{sentence}");
    }
    if let Some(ContextValue::String(option)) = error.get(ContextKind::InvalidArg) {
        let command = command_of(arguments.clone());
        if let Some(sentence) = qemu_img::sentence(command.as_deref(), option) {
            eprintln!("\n{sentence}");
        } else if command.as_deref() == Some("create") && sizes::parse(option).is_ok() {
            eprintln!("\nthe size is an option here: --size {option}");
        }
    }
    ExitCode::from(if error.use_stderr() { usage_code(arguments) } else { exit::OK })
}

// A usage error of `check` must not end with 2, which says "corrupt". The line cannot be parsed, so
// it is parsed again leniently for the name of the command alone.
fn usage_code(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> u8 {
    match command_of(arguments).as_deref() {
        Some("check") => Codes::CHECK.usage(),
        _ => Codes::USUAL.usage(),
    }
}

// The name of the command of a line that cannot be parsed.
fn command_of(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> Option<String> {
    let matches = command_line().ignore_errors(true).try_get_matches_from(arguments).ok()?;
    matches.subcommand_name().map(str::to_owned)
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
