//! Text from files, made safe for a terminal.

/// Text from a file with control characters escaped: on a terminal they could move the cursor or
/// fake lines.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { c.escape_default().to_string() } else { c.to_string() }).collect()
}

/// The same for a text of several lines.
pub fn printable_lines(text: &str) -> String {
    text.split('\n').map(printable).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_from_files_cannot_drive_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\nc\u{9b}d é"), "a\\u{1b}[2Jb\\nc\\u{9b}d é");
        assert_eq!(printable_lines("a\x1b\nb"), "a\\u{1b}\nb");
    }
}
