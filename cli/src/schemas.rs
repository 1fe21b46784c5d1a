//! The JSON schemas of everything that is printed with `--json`, as files in `docs/schemas/`.
//!
//! ```text
//!   a document's type ──▶ schema_for ──▶ docs/schemas/info-1.json
//!                                              └──▶ cli/tests: each document that a test prints
//! ```
//!
//! The files are made from the types that are printed, so they cannot differ from them: a test
//! compares. `DISKWRIGHT_WRITE_SCHEMAS=1 cargo test -p diskwright schemas` writes them again.

use crate::{
    commands::{
        attach, attached, cache, check, clone, compact, compare, convert, create, detach, diff, info, io, lab, map,
        merge, move_, partitions, prune, pull, push, pushed, reconnect, rescue, resize, seal, serve, serve_ctl,
        snapshot, space, track,
    },
    export::ExportReport,
    json::Document,
    logical_unit::UnitReport,
    namespace::NamespaceReport,
    several,
};
use diskwright_lab::{
    acceptance::{self, AcceptanceWithSummary},
    cells::WithSummary,
    comparison::{COMPARISON_SCHEMA, ComparisonRecord},
    study::{
        access_paths::{self, AccessPathsResult},
        containers::{self, ContainersResult},
        native_and_guest::{self, NativeAndGuestResult},
        queue_depth::{self, QueueDepthResult},
        raw_and_file::{self, RawAndFileResult},
        tiers::{self, TiersResult},
        zero_payload::{self, ZeroPayloadResult},
    },
    sweep::{SWEEP_SCHEMA, SweepRecord},
};
use diskwright_load::record::{RUN_SCHEMA, Run};
use schemars::{JsonSchema, Schema, generate::SchemaSettings};
use serde_json::{Value, json};
use std::{fs, path::PathBuf};

/// A schema by the name that its documents have in their field `schema`.
type Named = (&'static str, Schema);

/// The schema of what a command prints: the body with the field `schema` in front.
fn of<T: Document>() -> Named {
    (T::SCHEMA, complete::<T>(T::SCHEMA, true))
}

/// `enveloped`: whether the field `schema` is not one of the type's own.
fn complete<T: JsonSchema>(name: &str, enveloped: bool) -> Schema {
    let mut schema = SchemaSettings::draft2020_12().for_serialize().into_generator().into_root_schema_for::<T>();
    schema.insert("title".into(), name.into());
    let fields = schema.ensure_object();
    let properties = fields.entry("properties").or_insert_with(|| json!({}));
    if let Value::Object(properties) = properties {
        let field = properties.entry("schema").or_insert_with(|| json!({}));
        *field = json!({ "const": name, "description": "The name and the version of this schema." });
    }
    if enveloped && let Value::Array(required) = fields.entry("required").or_insert_with(|| json!([])) {
        required.insert(0, "schema".into());
    }
    schema
}

/// The schema of a result of the lab, which has the field `schema` itself. What is printed has a
/// summary, and a saved file has none.
fn of_result<T: JsonSchema>(name: &'static str) -> Named {
    let mut schema = complete::<T>(name, false);
    if let Some(Value::Array(required)) = schema.get_mut("required") {
        required.retain(|field| field != "summary");
    }
    (name, schema)
}

fn all() -> Vec<Named> {
    vec![
        of_result::<AcceptanceWithSummary<'_>>(acceptance::SCHEMA),
        of_result::<WithSummary<'_, AccessPathsResult>>(access_paths::SCHEMA),
        of_result::<WithSummary<'_, ComparisonRecord>>(COMPARISON_SCHEMA),
        of_result::<WithSummary<'_, ContainersResult>>(containers::SCHEMA),
        of_result::<WithSummary<'_, NativeAndGuestResult>>(native_and_guest::SCHEMA),
        of_result::<WithSummary<'_, QueueDepthResult>>(queue_depth::SCHEMA),
        of_result::<WithSummary<'_, RawAndFileResult>>(raw_and_file::SCHEMA),
        of_result::<WithSummary<'_, Run>>(RUN_SCHEMA),
        of_result::<WithSummary<'_, SweepRecord>>(SWEEP_SCHEMA),
        of_result::<WithSummary<'_, TiersResult>>(tiers::SCHEMA),
        of_result::<WithSummary<'_, ZeroPayloadResult>>(zero_payload::SCHEMA),
        of::<attach::Report>(),
        of::<attached::Report>(),
        of::<check::Report>(),
        of::<check::UndoReport>(),
        of::<clone::Report>(),
        of::<compare::Report>(),
        of::<convert::Report>(),
        of::<create::Report>(),
        of::<detach::Report>(),
        of::<diff::apply::AppliedReport>(),
        of::<diff::export::ExportedReport>(),
        of::<diff::list::Report>(),
        of::<ExportReport>(),
        of::<NamespaceReport>(),
        of::<UnitReport>(),
        of::<info::Report>(),
        of::<info::ova::Report>(),
        of::<info::rules::Report>(),
        of::<io::Report>(),
        of::<lab::agent::Report>(),
        of::<lab::profiles::Listing>(),
        of::<lab::profiles::OneProfile>(),
        of::<lab::report::Written<'_>>(),
        of::<map::DrawingReport<'_>>(),
        of::<map::Report<'_>>(),
        of::<merge::Report>(),
        of::<move_::Report>(),
        of::<partitions::Report>(),
        of::<compact::Report>(),
        of::<reconnect::Report>(),
        of::<rescue::Report>(),
        of::<resize::Report>(),
        of::<serve::Report>(),
        of::<serve_ctl::Counted>(),
        of::<serve_ctl::Drained>(),
        of::<serve_ctl::LimitReport>(),
        of::<serve_ctl::DoorReport>(),
        of::<serve_ctl::DiskChangeReport>(),
        of::<serve_ctl::Listing>(),
        of::<snapshot::Listing>(),
        of::<cache::Report>(),
        of::<push::Report>(),
        of::<pushed::Report>(),
        of::<pull::Report>(),
        of::<prune::Report>(),
        of::<seal::Report>(),
        of::<space::Report>(),
        of::<space::ScrubReport>(),
        of::<space::OptimizeReport>(),
        of::<space::HeatReport>(),
        of::<snapshot::Report>(),
        of::<several::Report>(),
        of::<track::Ranges>(),
        of::<track::Report>(),
    ]
}

fn folder() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/schemas"))
}

/// `diskwright.lab.run/2` lies in `lab.run-2.json`.
fn file_name(schema: &str) -> String {
    format!("{}.json", schema.trim_start_matches("diskwright.").replace('/', "-"))
}

#[test]
fn the_files_are_those_of_the_types() {
    let write = std::env::var_os("DISKWRIGHT_WRITE_SCHEMAS").is_some();
    let mut expected = Vec::new();
    for (name, schema) in all() {
        let path = folder().join(file_name(name));
        let text = format!("{}\n", serde_json::to_string_pretty(&schema).unwrap());
        if write {
            fs::write(&path, &text).unwrap();
        }
        let found = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "{} differs from the type that is printed. If that is meant (a field was added), write it again with \
             DISKWRIGHT_WRITE_SCHEMAS=1 cargo test -p diskwright schemas; a field that changed its meaning or is gone \
             needs a new version of {name}",
            path.display()
        );
        expected.push(file_name(name));
    }
    let mut found: Vec<String> =
        fs::read_dir(folder()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    found.retain(|name| name != "README.md");
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "each schema has one file in docs/schemas, and each file a schema");
}

/// Authors of scripts read the schema to learn what a field means.
#[test]
fn every_field_says_what_it_means() {
    fn check(value: &Value, place: &str, undescribed: &mut Vec<String>) {
        match value {
            Value::Object(map) => {
                // A variant of one field, which is described as a whole.
                let is_variant = |properties: &serde_json::Map<String, Value>| {
                    properties.len() == 1 && map.contains_key("description") && !map.contains_key("$defs")
                };
                if let Some(Value::Object(properties)) = map.get("properties")
                    && !is_variant(properties)
                {
                    for (name, property) in properties {
                        // The tag of a variant is described by its variant.
                        let is_tag = property.get("const").is_some();
                        if property.get("description").is_none() && !is_tag {
                            undescribed.push(format!("{place}.{name}"));
                        }
                    }
                }
                map.iter().for_each(|(key, value)| check(value, &format!("{place}/{key}"), undescribed));
            }
            Value::Array(list) => list.iter().for_each(|value| check(value, place, undescribed)),
            _ => {}
        }
    }
    let mut undescribed = Vec::new();
    for (name, schema) in all() {
        check(schema.as_value(), name, &mut undescribed);
    }
    assert!(undescribed.is_empty(), "without a description: {undescribed:#?}");
}
