//! The JSON documents of `--json`: each has a `schema` field.
//!
//! A schema is `diskwright.COMMAND/VERSION`. A new field does not change the version; a field that
//! is removed or changes its meaning does. Sizes and offsets are numbers of bytes. Errors are not
//! JSON: they go to standard error as text, and standard output stays empty.

use schemars::JsonSchema;
use serde::Serialize;
use std::io::{self, Write};

/// What a command prints with `--json`. Its JSON schema lies in `docs/schemas/`.
pub trait Document: Serialize + JsonSchema {
    /// `diskwright.COMMAND/VERSION`, the value of the field `schema`.
    const SCHEMA: &'static str;
}

/// A document with its schema in front, as it is printed.
#[derive(Debug, Serialize)]
struct Envelope<'a, T> {
    schema: &'static str,
    #[serde(flatten)]
    body: &'a T,
}

/// Writes one document, indented, and a line feed.
///
/// # Errors
/// If `out` cannot be written.
pub fn write<T: Document>(out: &mut dyn Write, body: &T) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, &Envelope { schema: T::SCHEMA, body })?;
    writeln!(out)
}

/// The same document as a value, to be put into another document.
///
/// # Errors
/// If a value cannot be JSON, which would be a defect of its type.
pub fn value<T: Document>(body: &T) -> io::Result<serde_json::Value> {
    Ok(serde_json::to_value(Envelope { schema: T::SCHEMA, body })?)
}

/// A path as text; bytes that are not UTF-8 are replaced.
pub fn path(path: &std::path::Path) -> String {
    path.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_schema_comes_first() {
        #[derive(Serialize, JsonSchema)]
        struct Body {
            offset: u64,
        }
        impl Document for Body {
            const SCHEMA: &'static str = "diskwright.test/1";
        }
        let mut out = Vec::new();
        write(&mut out, &Body { offset: 7 }).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{\n  \"schema\": \"diskwright.test/1\",\n  \"offset\": 7\n}\n");
    }
}
