//! The text of LVM's metadata: sections in braces, and fields that are numbers, strings or lists.

use crate::reason::LeftAlone;

/// Sections within sections: a group, its volumes, a volume, a segment.
const DEPTH_MAX: usize = 8;

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Number(u64),
    Text(String),
    List(Vec<Value>),
    Section(Vec<(String, Value)>),
}

impl Value {
    /// A field or a section of this section. `None` if it is not there, or there twice.
    pub(super) fn get(&self, name: &str) -> Option<&Value> {
        let mut found = self.fields().iter().filter(|(key, _)| key == name);
        found.next().filter(|_| found.next().is_none()).map(|(_, value)| value)
    }

    /// The fields of a section, in the order of the text.
    pub(super) fn fields(&self) -> &[(String, Value)] {
        match self {
            Self::Section(fields) => fields,
            _ => &[],
        }
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        match self.get(name)? {
            Self::Number(number) => Some(*number),
            _ => None,
        }
    }

    pub(super) fn text(&self, name: &str) -> Option<&str> {
        match self.get(name)? {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    /// Whether a list of strings contains this one.
    pub(super) fn lists(&self, name: &str, text: &str) -> bool {
        matches!(self.get(name), Some(Self::List(values)) if values.iter().any(|value| matches!(value, Self::Text(one) if one == text)))
    }

    /// Whether the string is anywhere in the value.
    pub(super) fn mentions(&self, text: &str) -> bool {
        match self {
            Self::Number(_) => false,
            Self::Text(one) => one == text,
            Self::List(values) => values.iter().any(|value| value.mentions(text)),
            Self::Section(fields) => fields.iter().any(|(_, value)| value.mentions(text)),
        }
    }
}

/// Parses metadata.
pub(super) fn parse(bytes: &[u8]) -> Result<Value, LeftAlone> {
    let text = std::str::from_utf8(bytes).map_err(|_| wrong("it is not text"))?;
    let mut parser = Parser { rest: text.trim_end_matches('\0') };
    let root = parser.section(0)?;
    if !parser.rest.is_empty() {
        return Err(wrong("a brace closes nothing"));
    }
    Ok(root)
}

fn wrong(what: &str) -> LeftAlone {
    LeftAlone::damaged(format!("the metadata of LVM cannot be read: {what}"))
}

struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    /// Skips spaces and comments.
    fn skip(&mut self) {
        loop {
            self.rest = self.rest.trim_start();
            let Some(comment) = self.rest.strip_prefix('#') else { return };
            self.rest = comment.find('\n').map_or("", |end| &comment[end..]);
        }
    }

    fn take(&mut self, letter: char) -> bool {
        self.skip();
        let rest = self.rest.strip_prefix(letter);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    /// Fields up to the closing brace, which is left, or to the end.
    fn section(&mut self, depth: usize) -> Result<Value, LeftAlone> {
        let mut fields = Vec::new();
        loop {
            self.skip();
            if self.rest.is_empty() || self.rest.starts_with('}') {
                return Ok(Value::Section(fields));
            }
            let is_name = |letter: char| letter.is_ascii_alphanumeric() || "_-+./".contains(letter);
            let len = self.rest.find(|letter| !is_name(letter)).unwrap_or(self.rest.len());
            let (name, rest) = self.rest.split_at(len);
            let name = name.to_owned();
            self.rest = rest;
            let value = if name.is_empty() {
                return Err(wrong("a name is missing"));
            } else if self.take('=') {
                self.value()?
            } else if depth < DEPTH_MAX && self.take('{') {
                let section = self.section(depth + 1)?;
                if !self.take('}') {
                    return Err(wrong("a section does not end"));
                }
                section
            } else {
                return Err(wrong("a name is followed by neither a value nor a section"));
            };
            fields.push((name, value));
        }
    }

    fn value(&mut self) -> Result<Value, LeftAlone> {
        if self.take('[') {
            let mut values = Vec::new();
            while !self.take(']') {
                values.push(self.scalar()?);
                if !self.take(',') && !self.rest.trim_start().starts_with(']') {
                    return Err(wrong("a list does not end"));
                }
            }
            return Ok(Value::List(values));
        }
        self.scalar()
    }

    /// A number or a string. Fractions do not occur in what is needed; a sign neither.
    fn scalar(&mut self) -> Result<Value, LeftAlone> {
        if self.take('"') {
            let mut text = String::new();
            let mut letters = self.rest.char_indices();
            while let Some((at, letter)) = letters.next() {
                match letter {
                    '"' => {
                        self.rest = &self.rest[at + 1..];
                        return Ok(Value::Text(text));
                    }
                    '\\' => text.extend(letters.next().map(|(_, letter)| letter)),
                    _ => text.push(letter),
                }
            }
            return Err(wrong("a string does not end"));
        }
        let len = self.rest.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(self.rest.len());
        let (digits, rest) = self.rest.split_at(len);
        self.rest = rest;
        digits.parse().map(Value::Number).map_err(|_| wrong("a value is neither a number nor a string"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_lists_and_comments() {
        let root =
            parse(b"# made by hand\nvg {\nsize = 8192 # 4 MiB\nstatus = [\"READ\", \"a\\\"b\"]\nempty = []\n}\n\0")
                .unwrap();
        let group = root.get("vg").unwrap();
        assert_eq!(group.number("size"), Some(8192));
        assert!(group.lists("status", "READ") && group.mentions("a\"b") && !group.mentions("8192"));
        assert_eq!(group.get("empty"), Some(&Value::List(Vec::new())));
    }

    #[test]
    fn broken_text_is_refused() {
        for text in
            ["a", "a {", "a = ", "a = [1", "a = \"b", "}", "a = 99999999999999999999", "a = [1 2]", "=", "a = [,]"]
        {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(parse("a {".repeat(100_000).as_bytes()).is_err());
    }
}
