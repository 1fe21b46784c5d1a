//! The JSON documents of `--json`: each has a `schema` field.
//!
//! A schema is `diskwright.COMMAND/VERSION`. A new field does not change the version; a field that
//! is removed or changes its meaning does. Sizes and offsets are numbers of bytes. Errors are not
//! JSON: they go to standard error as text, and standard output stays empty.

use serde::Serialize;
use std::io::{self, Write};

/// A document: its schema, then the fields of `body`, which must be a struct or a map.
#[derive(Debug, Serialize)]
pub struct Document<T> {
    /// `diskwright.info/1`.
    pub schema: &'static str,
    /// The other fields.
    #[serde(flatten)]
    pub body: T,
}

/// Writes one document, indented, and a line feed.
///
/// # Errors
/// What the system says of `out`.
pub fn write(out: &mut dyn Write, schema: &'static str, body: impl Serialize) -> io::Result<()> {
    serde_json::to_writer_pretty(&mut *out, &Document { schema, body })?;
    writeln!(out)
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
        #[derive(Serialize)]
        struct Body {
            offset: u64,
        }
        let mut out = Vec::new();
        write(&mut out, "diskwright.test/1", Body { offset: 7 }).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{\n  \"schema\": \"diskwright.test/1\",\n  \"offset\": 7\n}\n");
    }
}
