//! What every command is given: the global options, the signals, standard output, and a way to
//! warn.
//!
//! Standard output is buffered and flushed by `main` when the command has ended, so that a command
//! that fails half-way has usually printed nothing, and a long listing does not cost a system call
//! a line.

use crate::{
    args::GlobalOptions, describe::printable_lines, exit::Outcome, json, progress::ProgressDisplay, signals::Signals,
    steps::StepDisplay, style::Style,
};
use diskwright_disk::{OpenOptions, Opened};
use serde::Serialize;
use std::{
    borrow::Cow,
    io::{self, BufWriter, IsTerminal, Stdout, Write},
    path::Path,
};

/// A sentence of this program on standard error, whatever the names in it are made of. (`eprintln!`
/// panics when standard error is closed.)
pub fn say(sentence: &str) {
    let _ = writeln!(io::stderr(), "diskwright: {}", printable_lines(sentence));
}

/// See the module.
#[derive(Debug)]
pub struct Context {
    /// The global options.
    pub global: GlobalOptions,
    /// Ctrl-C and SIGTERM.
    pub signals: Signals,
    /// Standard output.
    pub out: BufWriter<Stdout>,
    /// What standard output is.
    pub style: Style,
}

impl Context {
    /// For one command.
    pub fn new(global: GlobalOptions, signals: Signals) -> Self {
        Self { global, signals, out: BufWriter::with_capacity(64 << 10, io::stdout()), style: Style::of_stdout() }
    }

    /// Prints the document of this command.
    pub fn print_json(&mut self, schema: &'static str, body: impl Serialize) -> Outcome<()> {
        Ok(json::write(&mut self.out, schema, body)?)
    }

    /// Prints a result of the lab, which says of itself what it is.
    pub fn print_result(&mut self, result: &impl Serialize) -> Outcome<()> {
        Ok(diskwright_lab::json::write(&mut self.out, result)?)
    }

    /// Prints a screen of the lab; `render` is told whether colour is wanted.
    ///
    /// A screen names files, profiles and servers, which may hold control characters. Where the
    /// screen without colour has any besides line feeds, it is shown escaped and without colour,
    /// for nobody could tell them from those that colour text.
    pub fn print_screen(&mut self, render: impl Fn(bool) -> String) -> Outcome<()> {
        Ok(self.out.write_all(screen_text(self.style.colour, render).as_bytes())?)
    }

    /// Prints text that other programs may read: as it is into a file or a pipe, escaped on a
    /// terminal.
    pub fn print_text(&mut self, text: &str) -> Outcome<()> {
        let shown = if io::stdout().is_terminal() { Cow::from(printable_lines(text)) } else { text.into() };
        Ok(self.out.write_all(shown.as_bytes())?)
    }

    /// A sentence on standard error, unless `--quiet`.
    pub fn warn(&mut self, sentence: &str) {
        if !self.global.quiet {
            self.warn_always(sentence);
        }
    }

    /// A sentence on standard error, with `--quiet` too: for what is no warning but the reason of
    /// an exit code.
    pub fn warn_always(&mut self, sentence: &str) {
        let _ = self.out.flush();
        say(sentence);
    }

    /// Opens a disk or an export, with a warning on standard error for each thing that the user
    /// should know about it.
    pub fn open(&mut self, name: &Path, options: &OpenOptions) -> Outcome<Opened> {
        let disk = Opened::open(name, options)?;
        disk.warnings().iter().for_each(|warning| self.warn(warning));
        Ok(disk)
    }

    /// A display for a long operation.
    pub fn progress(&self, doing: &'static str) -> ProgressDisplay {
        ProgressDisplay::new(doing, self.global.quiet, self.signals.patient())
    }

    /// A display for a run of the lab.
    pub fn steps(&self) -> StepDisplay {
        StepDisplay::new(self.global.quiet, self.signals.patient())
    }
}

fn screen_text(colour: bool, render: impl Fn(bool) -> String) -> String {
    let plain = render(false);
    let safe = printable_lines(&plain);
    if colour && safe == plain { render(true) } else { safe }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_screen_keeps_its_own_colours_and_no_other_control_characters() {
        let render = |name: &'static str| {
            move |colour: bool| if colour { format!("\x1b[31m{name}\x1b[0m\nx") } else { format!("{name}\nx") }
        };
        assert_eq!(screen_text(true, render("disk")), "\x1b[31mdisk\x1b[0m\nx");
        assert_eq!(screen_text(false, render("disk")), "disk\nx");
        for colour in [true, false] {
            assert_eq!(screen_text(colour, render("a\x1b[2Jb")), "a\\u{1b}[2Jb\nx");
        }
    }
}
