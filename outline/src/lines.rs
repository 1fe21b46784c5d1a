//! Terminal lines: wrapping at spaces, and colours.

use crate::chapter::Tone;

/// Wraps `text` at spaces into lines of at most `width` columns. A longer word, such as a path,
/// gets a line of its own and is not broken. A line feed starts a new line.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        let mut columns = 0;
        for word in paragraph.split(' ').filter(|word| !word.is_empty()) {
            let long = word.chars().count();
            if columns > 0 && columns + 1 + long > width {
                lines.push(std::mem::take(&mut line));
                columns = 0;
            }
            if columns > 0 {
                line.push(' ');
                columns += 1;
            }
            line.push_str(word);
            columns += long;
        }
        lines.push(line);
    }
    lines
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
}
