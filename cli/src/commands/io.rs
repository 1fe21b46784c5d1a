//! `diskwright io FILE`: reads, writes and discards ranges of a disk by qemu-io's commands.
//!
//! ```text
//!   -c 'write -P 0xaa 0 64k' -c ...   or lines of standard input
//!        └─ words.rs ─▶ Command ─▶ transfer.rs ─▶ Blocking queue
//!                                       └─▶ "wrote 65536/65536 bytes at offset 0"
//! ```
//!
//! All `-c` commands are parsed before the first is carried out. The disk is opened for writing
//! only if one of them writes, so reading takes no writer's lock. As in qemu-io a command that
//! fails does not stop those behind it, and the exit code is 1. An unknown `-c` command is wrong
//! usage (2); an unknown command on standard input fails like any other command (1).

mod transfer;
mod words;

use crate::{
    context::{Context, print_message},
    exit::{self, Failure, Outcome},
    json::{self, Document},
    options::SnapshotArgs,
    switches,
};
use clap::Args;
use diskwright_disk::OpenOptions;
use diskwright_store::Blocking;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::{self, BufRead, IsTerminal, Write},
    path::PathBuf,
    sync::mpsc::{Receiver, RecvTimeoutError, sync_channel},
    thread,
    time::Duration,
};
use words::Command;

/// Arguments of `io`.
#[derive(Debug, Args)]
#[command(after_help = "\
COMMANDS
  read [-P BYTE] [-v] OFF LEN        -P: all bytes must be BYTE; -v: print them
  write [-P BYTE | -z] [-f] OFF LEN  write BYTE [0xcd] or zeros (-z); -f: durably
  discard OFF LEN                    make the range zero and give its space back
  flush                              make all writes so far durable
OFF and LEN are sizes (4k, 1M) or hexadecimal (0x1000), in multiples of the disk's sector. Without -c the commands are read from standard input, one a \
line. At the end the disk is closed, which makes all writes durable.

EXAMPLES
  diskwright io disk.vhdx -c 'write -P 0xaa 0 64k' -c flush \\
      -c 'read -P 0xaa 0 64k'
  diskwright io disk.vhdx -c 'read -v 0 512'
  echo 'read -P 0 1G 1M' | diskwright io disk.vhdx --read-only
  diskwright io 'nbd+unix:///?socket=/run/disk.sock' -c 'write -z -f 0 1G'")]
pub struct IoArgs {
    /// The disk: a file, or an NBD URI.
    file: PathBuf,
    /// A command (may be repeated).
    #[arg(long = "command", short, value_name = "COMMAND")]
    commands: Vec<String>,
    /// Open the disk read-only; writes are refused.
    #[arg(long, short)]
    read_only: bool,
    #[command(flatten)]
    of: SnapshotArgs,
}

/// The result of one command.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Done {
    /// The command as it was given.
    command: String,
    /// Whether it succeeded.
    ok: bool,
    /// The offset that was asked for, in bytes, also where the command failed; `null` for a flush
    /// and for an unknown command.
    offset: Option<u64>,
    /// The length that was asked for, in bytes.
    length: Option<u64>,
    /// Where a `read -P` found the first byte that differs from the pattern.
    first_difference: Option<u64>,
    /// Why the command failed.
    error: Option<String>,
}

/// What `io --json` prints.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The image.
    file: String,
    /// One for each command, in their order.
    results: Vec<Done>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.io/1";
}

/// Interval at which signals are looked for while waiting for a line.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Carries out the commands.
pub fn run(context: &mut Context, args: &IoArgs) -> Outcome {
    let given: Vec<(String, Command)> = args
        .commands
        .iter()
        .map(|text| Command::parse(text).map(|command| (text.clone(), command)).map_err(Failure::usage))
        .collect::<Outcome<_>>()?;
    let writes = given.is_empty() || given.iter().any(|(_, command)| command.writes());
    let options =
        OpenOptions { snapshot: args.of.snapshot.clone(), ..context.global.open_options(writes && !args.read_only) };
    let disk = context.open(&args.file, &options)?;
    let patience = context.signals.patient();
    let mut queue = Blocking::open(disk.device(), context.global.engine())
        .map_err(|error| Failure::doing(format!("{}: cannot open a queue", args.file.display()), error))?;
    let mut results = Vec::new();
    let mut carry_out = |context: &mut Context, text: String, command: Result<Command, String>| -> Outcome<()> {
        let range = command.as_ref().ok().and_then(Command::range);
        let result = command.and_then(|command| {
            transfer::carry_out(&mut queue, &command, &mut context.out, !context.global.json, &patience)
        });
        let (done, error) = match result {
            Ok(done) => {
                let error = done.first_difference.map(|(offset, found)| {
                    format!(
                        "the pattern does not match: the first byte that differs is {found:#04x} at offset {offset}"
                    )
                });
                (done, error)
            }
            Err(error) => (transfer::Transfer::default(), Some(Failure::new(error.to_string()).to_string())),
        };
        if patience.should_stop() {
            return Err(Failure::Stopped);
        }
        if !context.global.json {
            match &error {
                None if !context.global.quiet => writeln!(context.out, "{done}")?,
                None => {}
                Some(error) => {
                    context.out.flush()?;
                    print_message(&format!("{text}: {error}"));
                }
            }
        }
        results.push(Done {
            command: text,
            ok: error.is_none(),
            offset: range.map(|(offset_bytes, _)| offset_bytes),
            length: range.map(|(_, len_bytes)| len_bytes),
            first_difference: done.first_difference.map(|(offset, _)| offset),
            error,
        });
        Ok(())
    };
    let mut ended = Ok(());
    if given.is_empty() {
        let lines = lines_of_stdin();
        loop {
            context.out.flush()?;
            prompt();
            let line = loop {
                match lines.recv_timeout(LOOK_EVERY) {
                    Err(RecvTimeoutError::Timeout) if !context.signals.came() => {}
                    other => break other,
                }
            };
            let line = match line {
                Ok(line) => line.map_err(|error| Failure::doing("cannot read commands from standard input", error))?,
                Err(RecvTimeoutError::Timeout) => return Err(Failure::Stopped),
                Err(RecvTimeoutError::Disconnected) => break,
            };
            let text = line.trim();
            match text {
                "" => continue,
                "quit" | "q" | "exit" => break,
                _ if text.starts_with('#') => continue,
                _ => ended = carry_out(context, text.to_owned(), Command::parse(text)),
            }
            if ended.is_err() {
                break;
            }
        }
    } else {
        ended = given.into_iter().try_for_each(|(text, command)| carry_out(context, text, Ok(command)));
    }
    drop(queue);
    let warnings = switches::all_with_switches(disk.warnings());
    disk.close()?;
    ended?;
    let code = if results.iter().all(|done| done.ok) { exit::OK } else { exit::FAILED };
    if context.global.json {
        context.print_json(&Report { file: json::path(&args.file), results, warnings })?;
    }
    Ok(code)
}

fn prompt() {
    if io::stdin().is_terminal() {
        let _ = write!(io::stderr(), "diskwright> ");
    }
}

// Reading a line blocks, and a signal must be able to end the program meanwhile. So a thread reads,
// and is not joined at the end.
fn lines_of_stdin() -> Receiver<io::Result<String>> {
    let (sender, receiver) = sync_channel(0);
    thread::spawn(move || {
        for line in io::stdin().lock().lines() {
            let failed = line.is_err();
            if sender.send(line).is_err() || failed {
                break;
            }
        }
    });
    receiver
}
