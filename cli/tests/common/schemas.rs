//! Whether a document that was printed with `--json` is as its schema in `docs/schemas/` says.
//! Every document that a test prints is looked at.

use serde_json::Value;
use std::{fs, path::PathBuf};

/// The file of a schema: `diskwright.lab.run/2` lies in `lab.run-2.json`.
pub fn file_of(schema: &str) -> PathBuf {
    let name = schema.trim_start_matches("diskwright.").replace('/', "-");
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schemas")).join(format!("{name}.json"))
}

/// Returns the name of the document's schema.
#[track_caller]
pub fn validate(printed: &str) -> String {
    let document: Value = serde_json::from_str(printed).unwrap_or_else(|error| panic!("not JSON ({error}): {printed}"));
    let name = document["schema"].as_str().unwrap_or_else(|| panic!("no schema: {printed}")).to_owned();
    let path = file_of(&name);
    let schema = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let schema = serde_json::from_str(&schema).expect("a schema is JSON");
    let validator = jsonschema::validator_for(&schema).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let wrong: Vec<String> =
        validator.iter_errors(&document).map(|error| format!("{}: {error}", error.instance_path)).collect();
    assert!(wrong.is_empty(), "{name}: {wrong:#?}\n{printed}");
    // The documents of the single files are in that of several.
    if name == "diskwright.several/1" {
        let results = document["files"].as_array().expect("files").iter().map(|file| &file["result"]);
        results.filter(|result| !result.is_null()).for_each(|result| drop(validate(&result.to_string())));
    }
    name
}
