//! Reads results from files: finds the kind of a file, and gives a reason for each file that cannot
//! be read.
//!
//! ```text
//!   file ──▶ JSON? ──▶ "schema"? ──▶ known kind? ──▶ version? ──▶ fields? ──▶ sound? ──▶ Document
//! ```
//!
//! A file may come from anywhere, and may be a disk that was named by mistake. Its first 64 KiB
//! must begin a JSON object with a known schema; only then is the rest read, up to a limit. Values
//! that later code sums or uses as indices are checked here once: no overflowing sums, histograms
//! in ascending order, existing targets.

mod read_error;

pub use read_error::ReadError;

use crate::{
    acceptance::{self, AcceptanceRecord},
    cells::{Cell, Cells},
    comparison::{COMPARISON_SCHEMA, ComparisonRecord},
    report::to_chapter::ToChapter,
    study::{
        access_paths::{self, AccessPathsResult},
        containers::{self, ContainersResult},
        native_and_guest::{self, NativeAndGuestResult},
        queue_depth::record::{QueueDepthResult, SCHEMA as QUEUE_DEPTH_SCHEMA},
        raw_and_file::{self, RawAndFileResult},
        tiers::{self, TiersResult},
        zero_payload::{self, ZeroPayloadResult},
    },
    sweep::{SWEEP_SCHEMA, SweepRecord},
};
use diskwright_load::record::{self, Head, RUN_SCHEMA, Run};
use diskwright_outline::Chapter;
use serde::{
    Deserialize, Serialize,
    de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor},
};
use std::{borrow::Cow, fmt, fs::File, io::Read, path::Path};

/// Schema of a file with several results.
pub const BUNDLE_SCHEMA: &str = "diskwright.lab.results/1";
/// Longer files are refused. A result of a run of a week is a tenth as long.
const LONGEST_BYTES: u64 = 1 << 30;
/// Bytes in which the schema must be found. Our files begin with it. If another program has sorted
/// the keys, it follows the cells or phases.
const BYTES_WITHOUT_SCHEMA: [u64; 2] = [64 << 10, 64 << 20];

/// What a kind of result implements, beside its chapter and its list of cells.
trait Kind: Cells + ToChapter + DeserializeOwned {
    /// The head; `None` for an acceptance run, which has other fields.
    fn head(&self) -> Option<&Head>;

    /// Start of the measurement, as in `20261120T221749Z`.
    fn started_utc(&self) -> &str {
        self.head().map_or("", |head| &head.started_utc)
    }

    /// Checks its figures; the error names the first contradiction.
    fn check(&self) -> Result<(), String> {
        Ok(())
    }
}

/// Makes [`Document`] from the table of kinds.
macro_rules! kinds {
    ($($(#[$doc:meta])* $kind:ident($result:ty), $schema:path, $words:literal;)*) => {
        /// A result of any kind.
        #[derive(Debug, Clone, PartialEq, Serialize, schemars::JsonSchema)]
        #[serde(untagged)]
        pub enum Document {
            $($(#[$doc])* $kind(Box<$result>),)*
        }

        /// The schemas of all kinds of results, and that of a bundle.
        const KINDS: &[&str] = &[$($schema,)* BUNDLE_SCHEMA];

        impl Document {
            /// The head of the result; `None` for an acceptance run, which has other fields.
            pub fn head(&self) -> Option<&Head> {
                match self { $(Self::$kind(result) => Kind::head(&**result),)* }
            }

            /// Start of the measurement, as in `20261120T221749Z`.
            pub fn started_utc(&self) -> &str {
                match self { $(Self::$kind(result) => Kind::started_utc(&**result),)* }
            }

            /// The kind of result as a phrase, for example "a sweep".
            pub fn kind(&self) -> &'static str {
                match self { $(Self::$kind(_) => $words,)* }
            }

            /// Reads a result of the schema `known`, one of [`KINDS`].
            fn read(known: &str, path: &Path, bytes: &[u8]) -> Result<Self, ReadError> {
                $(if known == $schema {
                    return Ok(Self::$kind(Box::new(checked(path, known, bytes)?)));
                })*
                Err(ReadError::NoResult { path: path.to_owned(), found: "it is a bundle within a bundle".into() })
            }
        }

        impl Cells for Document {
            fn cells(&self) -> Cow<'_, [Cell]> {
                match self { $(Self::$kind(result) => result.cells(),)* }
            }
        }

        impl ToChapter for Document {
            fn chapter(&self, id: &str, name: &str) -> Chapter {
                match self { $(Self::$kind(result) => result.chapter(id, name),)* }
            }
        }
    };
}

kinds! {
    /// Result of `lab run` and `diskspd`.
    Run(Run), RUN_SCHEMA, "a run";
    /// Result of `lab sweep`.
    Sweep(SweepRecord), SWEEP_SCHEMA, "a sweep";
    /// Result of `lab study containers`.
    Containers(ContainersResult), containers::SCHEMA, "a study of containers";
    /// Result of `lab study queue-depth`.
    QueueDepth(QueueDepthResult), QUEUE_DEPTH_SCHEMA, "a study of queue depth";
    /// Result of `lab study raw-and-file`.
    RawAndFile(RawAndFileResult), raw_and_file::SCHEMA, "a study of device and file";
    /// Result of `lab study zero-payload`.
    ZeroPayload(ZeroPayloadResult), zero_payload::SCHEMA, "a study of zero payload";
    /// Result of `lab study tiers`.
    Tiers(TiersResult), tiers::SCHEMA, "a study of tiers";
    /// Result of `lab compare`.
    Comparison(ComparisonRecord), COMPARISON_SCHEMA, "a comparison";
    /// Result of `lab study access-paths`.
    AccessPaths(AccessPathsResult), access_paths::SCHEMA, "a study of access paths";
    /// Result of `lab study native-and-guest`.
    NativeAndGuest(NativeAndGuestResult), native_and_guest::SCHEMA, "a study of native and guest";
    /// Result of `lab selftest` and `diskwright-bench`.
    Acceptance(AcceptanceRecord), acceptance::SCHEMA, "an acceptance run";
}

/// Results that need no check beyond their types.
macro_rules! with_head {
    ($($result:ty),*) => {
        $(impl Kind for $result {
            fn head(&self) -> Option<&Head> {
                Some(&self.head)
            }
        })*
    };
}

with_head!(
    SweepRecord,
    ContainersResult,
    RawAndFileResult,
    ZeroPayloadResult,
    TiersResult,
    AccessPathsResult,
    NativeAndGuestResult
);

impl Kind for QueueDepthResult {
    fn head(&self) -> Option<&Head> {
        Some(&self.head)
    }

    fn check(&self) -> Result<(), String> {
        self.pre_test.as_ref().map_or(Ok(()), record::check_run)
    }
}

impl Kind for Run {
    fn head(&self) -> Option<&Head> {
        Some(&self.head)
    }

    fn check(&self) -> Result<(), String> {
        record::check_run(self)
    }
}

impl Kind for ComparisonRecord {
    fn head(&self) -> Option<&Head> {
        Some(&self.head)
    }

    fn check(&self) -> Result<(), String> {
        check_comparison(self)
    }
}

impl Kind for AcceptanceRecord {
    fn head(&self) -> Option<&Head> {
        None
    }

    fn started_utc(&self) -> &str {
        &self.started_utc
    }
}

impl Cells for AcceptanceRecord {
    /// Empty: an acceptance run has figures of many units and no cells.
    fn cells(&self) -> Cow<'_, [Cell]> {
        Cow::default()
    }
}

/// Several results in one file, as `lab report --as json` writes them.
#[derive(Debug, Serialize, schemars::JsonSchema)]
pub struct Bundle<'a> {
    /// [`BUNDLE_SCHEMA`].
    pub schema: &'static str,
    /// The results, each with its own schema.
    pub results: Vec<&'a Document>,
}

#[derive(Deserialize)]
struct AnySchema {
    schema: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct BundleBody {
    results: Vec<Box<serde_json::value::RawValue>>,
}

/// Reads a file: one result, or a bundle of them.
///
/// # Errors
/// [`ReadError`].
pub fn read(path: &Path) -> Result<Vec<Document>, ReadError> {
    let file = File::open(path).map_err(|source| ReadError::File { path: path.to_owned(), source })?;
    parse(path, &whole(path, file)?)
}

/// Reads a whole file, but stops early if its beginning is not that of a result.
fn whole(path: &Path, mut from: impl Read) -> Result<Vec<u8>, ReadError> {
    let mut bytes = Vec::new();
    let mut read_up_to = |limit: u64, bytes: &mut Vec<u8>| {
        let more = limit - bytes.len() as u64;
        let read = from.by_ref().take(more).read_to_end(bytes);
        // Whether the end of the file was reached.
        read.map(|read| (read as u64) < more).map_err(|source| ReadError::File { path: path.to_owned(), source })
    };
    for limit in BYTES_WITHOUT_SCHEMA {
        if read_up_to(limit, &mut bytes)? {
            return Ok(bytes);
        }
        if let Some(schema) = schema_at_beginning(path, &bytes)? {
            known(path, &schema)?;
            let ended = read_up_to(LONGEST_BYTES + 1, &mut bytes)?;
            return if ended { Ok(bytes) } else { Err(ReadError::TooLong { path: path.to_owned() }) };
        }
    }
    let found = format!("it has no \"schema\" in its first {} MiB", bytes.len() >> 20);
    Err(ReadError::NoResult { path: path.to_owned(), found })
}

/// The schema of an object that begins with `bytes`; `None` if it may come later.
///
/// # Errors
/// [`ReadError::NotJson`] and [`ReadError::NoResult`] if `bytes` cannot begin such an object.
fn schema_at_beginning(path: &Path, bytes: &[u8]) -> Result<Option<String>, ReadError> {
    let mut schema = None;
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let object = serde::Deserializer::deserialize_map(&mut deserializer, SchemaOf(&mut schema));
    // Nothing may follow the object.
    match object.and_then(|()| deserializer.end()) {
        Err(error) if schema.is_none() && error.is_data() => Err(ReadError::NoResult {
            path: path.to_owned(),
            found: "it is not an object whose \"schema\" is a string".into(),
        }),
        Err(error) if schema.is_none() && !error.is_eof() => {
            Err(ReadError::NotJson { path: path.to_owned(), line: error.line(), column: error.column() })
        }
        _ => Ok(schema),
    }
}

/// Stores the schema of an object, also if the object is incomplete.
struct SchemaOf<'a>(&'a mut Option<String>);

impl<'de> Visitor<'de> for SchemaOf<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a schema")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key::<Cow<'de, str>>()? {
            if key == "schema" {
                *self.0 = Some(map.next_value()?);
                return Ok(());
            }
            map.next_value::<IgnoredAny>()?;
        }
        Ok(())
    }
}

/// Reads results from bytes; `path` is for messages.
///
/// # Errors
/// As [`read`].
pub fn parse(path: &Path, bytes: &[u8]) -> Result<Vec<Document>, ReadError> {
    let schema = schema_of(path, bytes)?;
    if schema != BUNDLE_SCHEMA {
        return Ok(vec![one(path, &schema, bytes)?]);
    }
    let body: BundleBody = fields(path, &schema, bytes)?;
    let inner = |raw: &serde_json::value::RawValue| {
        let bytes = raw.get().as_bytes();
        let schema = schema_of(path, bytes)?;
        one(path, &schema, bytes)
    };
    body.results.iter().map(|raw| inner(raw)).collect()
}

fn schema_of(path: &Path, bytes: &[u8]) -> Result<String, ReadError> {
    let path = || path.to_owned();
    let no_result = |found: String| ReadError::NoResult { path: path(), found };
    match serde_json::from_slice::<AnySchema>(bytes) {
        Ok(AnySchema { schema: Some(serde_json::Value::String(schema)) }) => Ok(schema),
        Ok(AnySchema { schema: Some(_) }) => Err(no_result("its \"schema\" is not a string".into())),
        Ok(AnySchema { schema: None }) => Err(no_result("it has no \"schema\"".into())),
        Err(error) if error.is_eof() && !bytes.trim_ascii().is_empty() => {
            Err(ReadError::CutOff { path: path(), line: error.line() })
        }
        // serde reads an array as the fields of the structure.
        Err(_) if serde_json::from_slice::<IgnoredAny>(bytes).is_ok() => {
            Err(no_result("it is not an object with a \"schema\"".into()))
        }
        Err(error) => Err(ReadError::NotJson { path: path(), line: error.line(), column: error.column() }),
    }
}

/// Reads a file that must hold one result.
///
/// # Errors
/// As [`read`]; [`ReadError::Several`] for a bundle with several.
pub fn read_one(path: &Path) -> Result<Document, ReadError> {
    let mut documents = read(path)?;
    match (documents.pop(), documents.len()) {
        (Some(document), 0) => Ok(document),
        (_, others) => Err(ReadError::Several { path: path.to_owned(), results: others }),
    }
}

fn one(path: &Path, schema: &str, bytes: &[u8]) -> Result<Document, ReadError> {
    Document::read(known(path, schema)?, path, bytes)
}

fn checked<T: Kind>(path: &Path, schema: &str, bytes: &[u8]) -> Result<T, ReadError> {
    let result: T = fields(path, schema, bytes)?;
    match result.check() {
        Ok(()) => Ok(result),
        Err(what) => Err(ReadError::Damaged { path: path.to_owned(), schema: schema.into(), what }),
    }
}

/// The known schema that equals `found`.
fn known(path: &Path, found: &str) -> Result<&'static str, ReadError> {
    let parts = |schema: &str| {
        let (kind, version) = schema.rsplit_once('/')?;
        Some((kind.to_owned(), version.parse::<u64>().ok()?))
    };
    let unknown = || ReadError::NoResult { path: path.to_owned(), found: format!("its schema is \"{found}\"") };
    let (kind, version) = parts(found).ok_or_else(unknown)?;
    let ours = KINDS.iter().copied().find_map(|known| {
        let (our_kind, our_version) = parts(known)?;
        (our_kind == kind).then_some((known, our_version))
    });
    match ours {
        Some((known, our_version)) if version > our_version => {
            Err(ReadError::Newer { path: path.to_owned(), found: found.into(), known })
        }
        Some((known, our_version)) if version == our_version => Ok(known),
        Some((known, _)) => Err(ReadError::Older { path: path.to_owned(), found: found.into(), known }),
        None => Err(unknown()),
    }
}

fn fields<T: DeserializeOwned>(path: &Path, schema: &str, bytes: &[u8]) -> Result<T, ReadError> {
    serde_json::from_slice(bytes).map_err(|error| ReadError::Damaged {
        path: path.to_owned(),
        schema: schema.to_owned(),
        what: error.to_string(),
    })
}

/// Checks that every comparison refers to an existing side.
fn check_comparison(record: &ComparisonRecord) -> Result<(), String> {
    let all = record.overall.iter().chain(&record.comparisons);
    match all.into_iter().find(|comparison| comparison.side == 0 || comparison.side >= record.sides.len()) {
        Some(comparison) => Err(format!("a comparison refers to side {}, which does not exist", comparison.side)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
