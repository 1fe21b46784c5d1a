//! Indented JSON: each field has a line of its own, and an array of numbers is on one line.
//! Otherwise a histogram of ten thousand buckets would have forty thousand lines.

use serde::Serialize;
use std::io::{self, Write};

/// Writes `value` as indented JSON with a line feed at its end. The text is streamed to `out`.
///
/// # Errors
/// Those of `out`, and values that JSON cannot represent.
pub fn write<T: Serialize + ?Sized>(out: &mut dyn Write, value: &T) -> io::Result<()> {
    let mut lines = Lines { out, open: Vec::new(), undecided: 0, string: InString::No };
    serde_json::to_writer(&mut lines, value)?;
    out.write_all(b"\n")
}

/// Returns `value` as indented JSON with a line feed at its end.
///
/// # Errors
/// A value that JSON cannot represent.
pub fn to_text<T: Serialize + ?Sized>(value: &T) -> io::Result<String> {
    let mut bytes = Vec::new();
    write(&mut bytes, value)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// Whether the next byte is inside a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InString {
    No,
    Yes,
    /// After a backslash.
    Escaped,
}

/// Breaks compact JSON that is written to it into lines.
struct Lines<'a> {
    out: &'a mut dyn Write,
    /// For each open array and object, whether its elements have lines of their own.
    open: Vec<bool>,
    /// Number of array brackets that are not written yet. The first element decides their layout.
    undecided: usize,
    string: InString,
}

impl Lines<'_> {
    fn byte(&mut self, byte: u8) -> io::Result<()> {
        if self.string != InString::No {
            self.string = match (self.string, byte) {
                (InString::Yes, b'"') => InString::No,
                (InString::Yes, b'\\') => InString::Escaped,
                _ => InString::Yes,
            };
            return self.out.write_all(&[byte]);
        }
        match byte {
            b'[' => self.undecided += 1,
            _ => {
                self.decide(byte)?;
                self.mark(byte)?;
            }
        }
        Ok(())
    }

    /// Writes the array brackets that were held back. `first` is the first byte of the element.
    fn decide(&mut self, first: u8) -> io::Result<()> {
        let has_lines = matches!(first, b'{' | b'"');
        for _ in 0..std::mem::take(&mut self.undecided) {
            self.begin(b'[', has_lines)?;
        }
        Ok(())
    }

    fn begin(&mut self, bracket: u8, has_lines: bool) -> io::Result<()> {
        self.open.push(has_lines);
        self.out.write_all(&[bracket])?;
        if has_lines { self.new_line() } else { Ok(()) }
    }

    fn end(&mut self) -> io::Result<()> {
        let had_lines = self.open.pop();
        if had_lines == Some(true) { self.new_line() } else { Ok(()) }
    }

    /// Writes a byte outside of strings.
    fn mark(&mut self, byte: u8) -> io::Result<()> {
        match byte {
            b'{' => return self.begin(b'{', true),
            b',' if self.open.last() == Some(&true) => {
                self.out.write_all(b",")?;
                return self.new_line();
            }
            b',' => return self.out.write_all(b", "),
            b':' => return self.out.write_all(b": "),
            b'}' | b']' => self.end()?,
            b'"' => self.string = InString::Yes,
            _ => {}
        }
        self.out.write_all(&[byte])
    }

    fn new_line(&mut self) -> io::Result<()> {
        self.out.write_all(b"\n")?;
        self.open.iter().try_for_each(|_| self.out.write_all(b"  "))
    }
}

impl Write for Lines<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        bytes.iter().try_for_each(|byte| self.byte(*byte))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    #[test]
    fn fields_have_lines_of_their_own_and_numbers_share_one() {
        let text = to_text(&json!({
            "b": [], "buckets": [[1, 2], [3.5, null]], "list": [{"x": true}, "y, \"z\": [\\"], "n": -1
        }));
        let lines = [
            "{",
            "  \"b\": [],",
            "  \"buckets\": [[1, 2], [3.5, null]],",
            "  \"list\": [",
            "    {",
            "      \"x\": true",
            "    },",
            "    \"y, \\\"z\\\": [\\\\\"",
            "  ],",
            "  \"n\": -1",
            "}",
            "",
        ];
        assert_eq!(text.unwrap(), lines.join("\n"));
        assert_eq!(to_text(&7).unwrap(), "7\n");
        assert_eq!(to_text("a\\").unwrap(), "\"a\\\\\"\n");
    }

    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            ".{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 40, 5, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..5).prop_map(Value::from),
                prop::collection::btree_map(".{0,4}", inner, 0..5).prop_map(|map| map.into_iter().collect()),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_text_parses_to_the_same_value(value in any_json()) {
            prop_assert_eq!(serde_json::from_str::<Value>(&to_text(&value).unwrap()).unwrap(), value);
        }
    }
}
