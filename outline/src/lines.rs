//! Terminal lines: wrapping at spaces, and colours.

use crate::chapter::Tone;

/// Wraps `text` at spaces into lines of at most `width` columns. A longer word, such as a path,
/// gets a line of its own and is not broken. A line feed starts a new line. Spaces within a line
/// stay as they are, so that columns line up; those where it breaks are dropped.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        let mut columns = 0;
        let mut gap = 0;
        for word in paragraph.split(' ') {
            if !word.is_empty() {
                let long = columns_of(word);
                let is_first = columns == 0;
                if !is_first && columns + gap + long > width {
                    lines.push(std::mem::take(&mut line));
                    (columns, gap) = (0, 0);
                }
                line.extend(std::iter::repeat_n(' ', gap));
                line.push_str(word);
                columns += gap + long;
                gap = 0;
            }
            gap += 1;
        }
        lines.push(line);
    }
    lines
}

/// Columns that `text` takes on a terminal: its characters without the sequences of colours.
pub fn columns_of(text: &str) -> usize {
    let mut columns = 0;
    let mut is_in_sequence = false;
    for letter in text.chars() {
        match letter {
            '\x1b' => is_in_sequence = true,
            'm' if is_in_sequence => is_in_sequence = false,
            _ => columns += usize::from(!is_in_sequence),
        }
    }
    columns
}

/// Adds the terminal colour of `tone` to `text`. Returns `text` unchanged without `colour`.
pub fn paint(text: &str, tone: Tone, colour: bool) -> String {
    let code = match tone {
        Tone::Good => "32",
        Tone::Bad => "31",
        Tone::Warning => "33",
        Tone::Faint => "2",
        Tone::Plain => "",
    };
    if !colour || code.is_empty() || text.is_empty() { text.to_owned() } else { format!("\x1b[{code}m{text}\x1b[0m") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_wrapped_at_spaces_and_long_words_are_not_broken() {
        assert_eq!(wrap("a bb ccc dddd", 6), ["a bb", "ccc", "dddd"]);
        assert_eq!(wrap("/a/long/path it is", 6), ["/a/long/path", "it is"]);
        assert_eq!(wrap("", 6), [""]);
    }

    #[test]
    fn indentation_and_columns_stay_and_colours_take_no_columns() {
        assert_eq!(wrap("  a  bb   ccc dddd", 12), ["  a  bb", "ccc dddd"]);
        assert_eq!(wrap("a  b  ", 12), ["a  b"]);
        let red = paint("bb", Tone::Bad, true);
        assert_eq!(columns_of(&red), 2);
        assert_eq!(wrap(&format!("a {red} c"), 6), [format!("a {red} c")]);
    }
}
