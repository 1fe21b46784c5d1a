//! The terminal: its width, and whether colour is wanted.
//!
//! Colour is used on a terminal only, and not if `NO_COLOR` is set (<https://no-color.org>) or the
//! terminal is `dumb`. The text says everything that colour says.

use std::{env, fmt::Display, io::IsTerminal, os::fd::AsFd};

/// Width without a terminal.
pub const DEFAULT_COLUMNS: usize = 80;

/// Width and colour of an output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Style {
    /// Whether escape sequences are wanted.
    pub colour: bool,
    /// Columns, 20 at least.
    pub columns: usize,
    /// Whether it is a terminal.
    pub is_terminal: bool,
    /// Rows, when it is a terminal.
    pub rows: Option<usize>,
}

impl Style {
    /// The style of standard output.
    pub fn of_stdout() -> Self {
        Self::of(&std::io::stdout())
    }

    /// The style of an output.
    pub fn of(output: &(impl IsTerminal + AsFd)) -> Self {
        let terminal = output.is_terminal();
        let plain =
            env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty()) || env::var_os("TERM").is_some_and(|v| v == "dumb");
        let size = if terminal {
            rustix::termios::tcgetwinsize(output.as_fd()).ok().filter(|size| size.ws_col > 0)
        } else {
            None
        };
        Self {
            colour: terminal && !plain,
            columns: size.map_or(DEFAULT_COLUMNS, |size| usize::from(size.ws_col).max(20)),
            is_terminal: terminal,
            rows: size.map(|size| usize::from(size.ws_row)),
        }
    }

    /// Columns that a line must not exceed; `None` without a terminal, for scripts.
    pub fn limit(&self) -> Option<usize> {
        self.is_terminal.then_some(self.columns)
    }

    /// `text` in an ANSI colour (an SGR parameter such as `31` or `38;5;208`).
    pub fn paint(&self, sgr: &str, text: impl Display) -> String {
        if self.colour { format!("\x1b[{sgr}m{text}\x1b[0m") } else { text.to_string() }
    }
}

/// Bold.
pub const BOLD: &str = "1";
/// Faint.
pub const FAINT: &str = "2";
/// For errors.
pub const RED: &str = "31";
/// For success.
pub const GREEN: &str = "32";
/// For warnings.
pub const YELLOW: &str = "33";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_can_be_left_out() {
        let style = Style { colour: false, columns: 80, is_terminal: false, rows: None };
        assert_eq!(style.paint(RED, "x"), "x");
        assert_eq!(Style { colour: true, ..style }.paint(RED, "x"), "\x1b[31mx\x1b[0m");
    }
}
