//! An XML document as a tree of elements with their lines, so that an error can name the line.
//!
//! The document may be hostile. Elements nest at most [`DEPTH_MAX`] deep. Document types, and with
//! them entity definitions, are an error. The memory of the tree is a small multiple of the text.

use super::profile_error::ProfileError;
use quick_xml::{
    Reader, XmlVersion,
    escape::resolve_predefined_entity,
    events::{BytesRef, BytesStart, Event},
};

/// Deepest nesting of elements; DiskSpd's profiles reach 8.
const DEPTH_MAX: usize = 16;
/// Values longer than this are cut in messages.
const SHOWN_CHARS: usize = 40;

/// An element.
#[derive(Debug)]
pub(super) struct Element {
    name: String,
    line: usize,
    attributes: Vec<(String, String)>,
    text: String,
    children: Vec<Element>,
}

/// Parses a document, which must be one element with the name `root`.
pub(super) fn parse(text: &str, root: &str) -> Result<Element, ProfileError> {
    let mut reader = Reader::from_str(text);
    let mut open: Vec<Element> = Vec::new();
    let (mut line, mut counted) = (1, 0);
    loop {
        let at = usize::try_from(reader.buffer_position()).unwrap_or(counted);
        line += newlines(text, counted, at);
        counted = at.max(counted);
        let unreadable = |found: String| wrong(line, found, "well-formed XML");
        let event = reader.read_event().map_err(|error| {
            let at = usize::try_from(reader.error_position()).unwrap_or(counted);
            wrong(line + newlines(text, counted, at), error.to_string(), "well-formed XML")
        })?;
        let closed = match event {
            Event::Start(start) => {
                let element = element(&start, line)?;
                if open.len() == DEPTH_MAX {
                    let found = format!("<{}>, nested {DEPTH_MAX} deep", element.name);
                    return Err(wrong(line, found, "a DiskSpd profile"));
                }
                open.push(element);
                None
            }
            Event::Empty(start) => Some(element(&start, line)?),
            Event::End(_) => open.pop(),
            Event::Text(piece) => {
                add(&mut open, &piece.decode().map_err(|error| unreadable(error.to_string()))?, line)?;
                None
            }
            Event::CData(piece) => {
                add(&mut open, &piece.decode().map_err(|error| unreadable(error.to_string()))?, line)?;
                None
            }
            Event::GeneralRef(reference) => {
                let resolved = resolve(&reference).ok_or_else(|| {
                    unreadable(format!("the unknown entity {}", quoted(&reference.escape_ascii().to_string())))
                })?;
                add(&mut open, &resolved, line)?;
                None
            }
            Event::DocType(_) => return Err(wrong(line, "a document type", format!("<{root}>"))),
            Event::Decl(_) | Event::PI(_) | Event::Comment(_) => None,
            Event::Eof => {
                let found = open.last().map_or_else(
                    || "the end of the file".to_owned(),
                    |element| format!("the end of the file within <{}> of line {}", element.name, element.line),
                );
                return Err(wrong(line, found, format!("<{root}>, complete")));
            }
        };
        match (closed, open.last_mut()) {
            (Some(element), Some(parent)) => parent.children.push(element),
            (Some(element), None) if element.name == root => return Ok(element),
            (Some(element), None) => {
                return Err(wrong(element.line, format!("<{}>", element.name), format!("<{root}>")));
            }
            (None, _) => {}
        }
    }
}

fn newlines(text: &str, from: usize, to: usize) -> usize {
    let bytes = text.as_bytes().get(from..to.min(text.len())).unwrap_or_default();
    bytes.iter().filter(|byte| **byte == b'\n').count()
}

fn element(start: &BytesStart<'_>, line: usize) -> Result<Element, ProfileError> {
    let name = String::from_utf8_lossy(start.name().as_ref()).into_owned();
    let mut attributes = Vec::new();
    for attribute in start.attributes() {
        let unreadable = |found: String| wrong(line, format!("<{name}> with {found}"), "well-formed XML");
        let attribute = attribute.map_err(|error| unreadable(error.to_string()))?;
        let value =
            attribute.normalized_value(XmlVersion::Implicit1_0).map_err(|error| unreadable(error.to_string()))?;
        attributes.push((String::from_utf8_lossy(attribute.key.as_ref()).into_owned(), value.into_owned()));
    }
    Ok(Element { name, line, attributes, text: String::new(), children: Vec::new() })
}

fn add(open: &mut [Element], piece: &str, line: usize) -> Result<(), ProfileError> {
    match open.last_mut() {
        Some(element) => element.text.push_str(piece),
        None if piece.trim_matches(['\u{feff}', ' ', '\t', '\r', '\n']).is_empty() => {}
        None => return Err(wrong(line, quoted(piece.trim()), "<Profile>")),
    }
    Ok(())
}

fn resolve(reference: &BytesRef<'_>) -> Option<String> {
    if let Some(character) = reference.resolve_char_ref().ok()? {
        return Some(character.to_string());
    }
    resolve_predefined_entity(&reference.decode().ok()?).map(str::to_owned)
}

pub(super) fn wrong(line: usize, found: impl Into<String>, expected: impl Into<String>) -> ProfileError {
    ProfileError::Wrong { line, found: found.into(), expected: expected.into() }
}

/// A value in quotes for a message, shortened.
fn quoted(value: &str) -> String {
    match value.char_indices().nth(SHOWN_CHARS) {
        Some((cut, _)) => format!("{:?}...", &value[..cut]),
        None => format!("{value:?}"),
    }
}

impl Element {
    pub(super) fn line(&self) -> usize {
        self.line
    }

    /// Checks the names of children and attributes. A child in `once` may occur once, a child in
    /// `many` any number of times.
    pub(super) fn known(&self, attributes: &[&str], once: &[&str], many: &[&str]) -> Result<(), ProfileError> {
        for (index, child) in self.children.iter().enumerate() {
            let name = child.name.as_str();
            if !once.contains(&name) && !many.contains(&name) {
                let names: Vec<String> = once.iter().chain(many).map(|name| format!("<{name}>")).collect();
                let expected = if names.is_empty() { "only text".to_owned() } else { names.join(", ") };
                return Err(wrong(child.line, format!("<{name}> in <{}>", self.name), expected));
            }
            if once.contains(&name) && self.children[..index].iter().any(|earlier| earlier.name == child.name) {
                return Err(wrong(child.line, format!("<{name}> a second time in <{}>", self.name), "one element"));
            }
        }
        if let Some((name, _)) = self.attributes.iter().find(|(name, _)| !attributes.contains(&name.as_str())) {
            let expected = match attributes {
                [] => "no attribute".to_owned(),
                names => format!("no attribute but {}", names.join(", ")),
            };
            return Err(wrong(self.line, format!("the attribute {name} of <{}>", self.name), expected));
        }
        Ok(())
    }

    pub(super) fn child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|child| child.name == name)
    }

    pub(super) fn children<'e>(&'e self, name: &'e str) -> impl Iterator<Item = &'e Element> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// The text of the element. An element with children is an error.
    pub(super) fn text(&self) -> Result<&str, ProfileError> {
        match self.children.first() {
            Some(child) => Err(wrong(child.line, format!("<{}> in <{}>", child.name, self.name), "only text")),
            None => Ok(self.text.trim()),
        }
    }

    /// The text of the element as a whole number up to `max`.
    pub(super) fn number(&self, max: u64) -> Result<u64, ProfileError> {
        self.whole(&format!("<{}>", self.name), self.text()?, max)
    }

    /// A whole number up to `max` in a mandatory attribute.
    pub(super) fn attribute_number(&self, name: &str, max: u64) -> Result<u64, ProfileError> {
        match self.attribute(name) {
            Some(value) => self.whole(&format!("the attribute {name} of <{}>", self.name), value, max),
            None => Err(wrong(self.line, format!("<{}> without the attribute {name}", self.name), "that attribute")),
        }
    }

    fn whole(&self, place: &str, text: &str, max: u64) -> Result<u64, ProfileError> {
        let value: Option<u64> = text.parse().ok().filter(|value| *value <= max);
        value.ok_or_else(|| {
            wrong(self.line, format!("{} in {place}", quoted(text)), format!("a whole number from 0 to {max}"))
        })
    }

    pub(super) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    /// The number in a child; `None` without the child.
    pub(super) fn number_of(&self, name: &str, max: u64) -> Result<Option<u64>, ProfileError> {
        self.child(name).map(|child| child.number(max)).transpose()
    }

    /// The number in a child, up to 32 bits; `None` without the child.
    pub(super) fn small_of(&self, name: &str, max: u32) -> Result<Option<u32>, ProfileError> {
        Ok(self.number_of(name, u64::from(max))?.map(|value| value as u32))
    }

    /// The Boolean in a child; `false` without the child.
    pub(super) fn flag_of(&self, name: &str) -> Result<bool, ProfileError> {
        let Some(child) = self.child(name) else { return Ok(false) };
        match child.text()? {
            "true" | "1" => Ok(true),
            "false" | "0" => Ok(false),
            other => Err(child.not(other, "true or false")),
        }
    }

    /// The error for an element whose text `found` is not what was expected.
    pub(super) fn not(&self, found: &str, expected: impl Into<String>) -> ProfileError {
        wrong(self.line, format!("{} in <{}>", quoted(found), self.name), expected)
    }
}
