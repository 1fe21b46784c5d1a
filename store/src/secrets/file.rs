//! A file of secrets: TOML with `[[client]]` tables and one of `[server]`, each with `name` and
//! `secret`.
//!
//! Server and clients read the same form. Only the owner of the file may read it. What is wrong is
//! said without the secrets.

use super::{Credentials, Secrets, SecretsError};
use serde::Deserialize;
use std::{fs, os::unix::fs::PermissionsExt, path::Path};

/// The length of a file at most.
const FILE_BYTES_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    client: Vec<Entry>,
    server: Option<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    secret: String,
}

impl Entry {
    fn credentials(&self) -> Result<Credentials, String> {
        Credentials::new(&self.name, &self.secret).map_err(|error| error.to_string())
    }
}

impl Secrets {
    /// Reads a file.
    ///
    /// # Errors
    /// [`SecretsError::File`].
    pub fn read(path: &Path) -> Result<Self, SecretsError> {
        let failed = |what| SecretsError::File { path: path.display().to_string(), what };
        parse(&text_of(path).map_err(failed)?).map_err(failed)
    }
}

fn text_of(path: &Path) -> Result<String, String> {
    let cannot = |error| format!("cannot be read: {error}");
    let facts = fs::metadata(path).map_err(cannot)?;
    if !facts.is_file() || facts.len() > FILE_BYTES_MAX {
        return Err("it is not a regular file of at most 1 MiB".to_owned());
    }
    let mode = facts.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(format!("its mode is {mode:03o}, so others may read it; run chmod 600 on it"));
    }
    fs::read_to_string(path).map_err(cannot)
}

fn parse(text: &str) -> Result<Secrets, String> {
    // The error of the parser shows the line, which may be a secret.
    let file: File = toml::from_str(text).map_err(|error| {
        let line = error.span().map_or(1, |span| text[..span.start].matches('\n').count() + 1);
        format!(
            "line {line}: {}; write [[client]] tables with name and secret, and [server] if needed",
            error.message()
        )
    })?;
    let clients = file.client.iter().map(Entry::credentials).collect::<Result<_, _>>()?;
    let server = file.server.as_ref().map(Entry::credentials).transpose()?;
    Secrets::new(clients, server).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_names_clients_and_the_server() {
        let text =
            "[[client]]\nname = \"a\"\nsecret = \"123456789012\"\n[server]\nname = \"t\"\nsecret = \"210987654321\"\n";
        assert!(parse(text).is_ok());
        let wrong = parse("[[client]]\nname = \"a\"\nsecret = \"hidden\n").unwrap_err();
        assert!(wrong.starts_with("line 3: ") && !wrong.contains("hidden"), "{wrong}");
        let unknown = parse(&format!("{text}key = 1\n")).unwrap_err();
        assert!(unknown.contains("unknown field"), "{unknown}");
        assert!(parse("").unwrap_err().contains("[[client]]"));
    }
}
