//! What every command is given: global options, signals, standard output, warnings, progress.
//!
//! Standard output is buffered and flushed when the command has ended. So a command that fails
//! half-way has usually printed nothing, and a long list does not cost a system call a line.

use crate::{
    describe::printable_lines,
    exit::Outcome,
    json::{self, Document},
    options::GlobalOptions,
    progress::ProgressDisplay,
    signals::Signals,
    steps::StepDisplay,
    style::Style,
    switches,
};
use diskwright_disk::{OpenOptions, Opened};
use diskwright_lab::{
    cells::{Cells, WithSummary},
    report::{TextOptions, ToChapter, text},
};
use diskwright_outline::wrap;
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;
use std::{
    borrow::Cow,
    io::{self, BufWriter, IsTerminal, Stdout, Write},
    path::Path,
};

/// Prints a sentence on standard error, with control characters escaped, and with the switches of
/// this command for the options that a library names. (`eprintln!` panics when standard error is
/// closed.)
///
/// On a terminal the sentence is wrapped at its width; elsewhere it is one line.
pub fn print_message(sentence: &str) {
    let sentence = format!("diskwright: {}", printable_lines(&switches::with_switches(sentence)));
    let text = match Style::of(&io::stderr()) {
        Style { is_terminal: true, columns, .. } => hanging(&sentence, columns),
        _ => sentence,
    };
    let _ = writeln!(io::stderr(), "{text}");
}

/// `text` in lines of at most `columns`, all but the first indented by two columns.
fn hanging(text: &str, columns: usize) -> String {
    let lines = text.lines().flat_map(|line| {
        let mut broken = wrap(line, columns);
        // The lines behind the first have two columns less.
        if broken.len() > 1 {
            let rest = broken.split_off(1).join(" ");
            broken.extend(wrap(&rest, columns.saturating_sub(2)).iter().map(|line| format!("  {line}")));
        }
        broken
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// What every command is given.
#[derive(Debug)]
pub struct Context {
    /// The global options.
    pub global: GlobalOptions,
    /// Ctrl-C and SIGTERM.
    pub signals: Signals,
    /// Standard output.
    pub out: BufWriter<Stdout>,
    /// Width and colour of standard output.
    pub style: Style,
    /// The document of [`Context::collecting`], while it runs.
    collected: Option<Option<Value>>,
}

impl Context {
    /// The context of one command.
    pub fn new(global: GlobalOptions, signals: Signals) -> Self {
        let out = BufWriter::with_capacity(64 << 10, io::stdout());
        Self { global, signals, out, style: Style::of_stdout(), collected: None }
    }

    /// Prints the JSON document of this command, or keeps it for the document of several files
    /// ([`Context::collecting`]).
    pub fn print_json(&mut self, body: &impl Document) -> Outcome<()> {
        match &mut self.collected {
            Some(kept) => *kept = Some(json::value(body)?),
            None => json::write(&mut self.out, body)?,
        }
        Ok(())
    }

    /// Runs a part of the command, and returns the JSON document that it would have printed.
    pub fn collecting<T>(&mut self, part: impl FnOnce(&mut Self) -> T) -> (T, Option<Value>) {
        self.collected = Some(None);
        let result = part(self);
        (result, self.collected.take().flatten())
    }

    /// Prints a result of the lab as JSON; it has its own `schema`.
    pub fn print_result(&mut self, result: &(impl Serialize + JsonSchema)) -> Outcome<()> {
        Ok(diskwright_outline::json::write(&mut self.out, result)?)
    }

    /// The same with a `summary`: the figures of each cell that the text shows.
    pub fn print_measured<T: Serialize + JsonSchema + Cells>(&mut self, result: &T) -> Outcome<()> {
        self.print_result(&WithSummary::of(result))
    }

    /// Prints a text. `render` gets whether colour is wanted.
    ///
    /// Names of files, profiles and servers may hold control characters. If the text without colour
    /// has any besides line feeds, it is printed escaped and without colour, because control
    /// characters cannot be distinguished from the escape sequences of colour.
    fn print_rendered(&mut self, render: impl Fn(bool) -> String) -> Outcome<()> {
        Ok(self.out.write_all(safe_text(self.style.colour, render).as_bytes())?)
    }

    /// Prints a result of the lab as a chapter, as wide as the terminal. `details` shows what an
    /// HTML page folds, such as each thread.
    pub fn print_chapter(&mut self, result: &impl ToChapter, details: bool) -> Outcome<()> {
        let width = self.style.columns;
        self.print_rendered(|colour| text(result, &TextOptions { width, colour, details }))
    }

    /// Writes sentences to standard output. On a terminal each line is wrapped at its width;
    /// elsewhere it stays one line, for scripts.
    pub fn text(&mut self) -> Sentences<'_> {
        let columns = self.style.is_terminal.then_some(self.style.columns);
        Sentences { out: &mut self.out, columns, line: Vec::new() }
    }

    /// Prints text for other programs: unchanged into a file or a pipe, escaped on a terminal.
    pub fn print_text(&mut self, text: &str) -> Outcome<()> {
        let shown = if io::stdout().is_terminal() { Cow::from(printable_lines(text)) } else { text.into() };
        Ok(self.out.write_all(shown.as_bytes())?)
    }

    /// Prints a sentence on standard error, unless `--quiet`.
    pub fn warn(&mut self, sentence: &str) {
        if !self.global.quiet {
            self.warn_always(sentence);
        }
    }

    /// Prints a sentence on standard error, with `--quiet` too: the reason of an exit code.
    pub fn warn_always(&mut self, sentence: &str) {
        let _ = self.out.flush();
        print_message(sentence);
    }

    /// Opens a disk or an export, and prints its warnings on standard error.
    pub fn open(&mut self, name: &Path, options: &OpenOptions) -> Outcome<Opened> {
        let disk = Opened::open(name, options)?;
        disk.warnings().iter().for_each(|warning| self.warn(warning));
        Ok(disk)
    }

    /// A progress display for a long operation.
    pub fn progress(&self, doing: &'static str) -> ProgressDisplay {
        ProgressDisplay::new(doing, self.global.quiet, self.signals.patient())
    }

    /// A progress display for a run of the lab.
    pub fn steps(&self) -> StepDisplay {
        StepDisplay::new(self.global.quiet, self.signals.patient())
    }
}

/// Wraps whole lines; see [`Context::text`].
#[derive(Debug)]
pub struct Sentences<'a, W: Write = BufWriter<Stdout>> {
    out: &'a mut W,
    /// `None` without a terminal.
    columns: Option<usize>,
    /// The line so far, without its line feed.
    line: Vec<u8>,
}

impl<W: Write> Write for Sentences<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(columns) = self.columns else { return self.out.write(bytes) };
        for byte in bytes {
            if *byte == b'\n' {
                let line = std::mem::take(&mut self.line);
                writeln!(self.out, "{}", hanging(&String::from_utf8_lossy(&line), columns))?;
            } else {
                self.line.push(*byte);
            }
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

fn safe_text(colour: bool, render: impl Fn(bool) -> String) -> String {
    let plain = render(false);
    let safe = printable_lines(&plain);
    if colour && safe == plain { render(true) } else { safe }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_sentence_is_broken_where_the_terminal_ends() {
        let sentence = "diskwright: a.vhdx: the log cannot be replayed because the file is read-only";
        assert_eq!(
            hanging(sentence, 40),
            "diskwright: a.vhdx: the log cannot be\n  replayed because the file is read-only"
        );
        assert_eq!(hanging(sentence, 200), sentence);
        assert_eq!(hanging("one\ntwo three", 6), "one\ntwo\n  three");
    }

    #[test]
    fn sentences_are_wrapped_on_a_terminal_only() {
        let written = |columns| {
            let mut out = Vec::new();
            let mut text = Sentences { out: &mut out, columns, line: Vec::new() };
            writeln!(text, "disk.vhdx: 12 MiB of copied data").unwrap();
            writeln!(text, "done").unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(written(None), "disk.vhdx: 12 MiB of copied data\ndone\n");
        assert_eq!(written(Some(20)), "disk.vhdx: 12 MiB of\n  copied data\ndone\n");
    }

    #[test]
    fn a_text_keeps_its_own_colours_and_no_other_control_characters() {
        let render = |name: &'static str| {
            move |colour: bool| if colour { format!("\x1b[31m{name}\x1b[0m\nx") } else { format!("{name}\nx") }
        };
        assert_eq!(safe_text(true, render("disk")), "\x1b[31mdisk\x1b[0m\nx");
        assert_eq!(safe_text(false, render("disk")), "disk\nx");
        for colour in [true, false] {
            assert_eq!(safe_text(colour, render("a\x1b[2Jb")), "a\\u{1b}[2Jb\nx");
        }
    }
}
