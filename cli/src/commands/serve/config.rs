//! `serve --config FILE.toml`: what to serve, and how, from a file.
//!
//! ```text
//!   nbd = ["/run/vm.sock", "10809"]      a key is an option, its value the same text
//!   [[disk]]                                 a disk; options of its own replace those for all
//!   file = "/disks/db.vhdx"
//!   limit = "iops=500"
//! ```
//!
//! The keys become words of a command line, which clap parses. So a file takes exactly what the
//! command takes, with the same checks and messages, and a new option needs no line here.
//!
//! SIGHUP reads the file again. Limits are replaced then, and certificates are read again. Of what
//! else has changed, the log says that it needs a restart.

use super::{args::ServeArgs, word::DiskWord};
use crate::{exit::Failure, limits, options::FormatArg};
use clap::{Args, Command, FromArgMatches, ValueEnum};
use diskwright_store::RateLimits;
use serde::Deserialize;
use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};
use toml::Value;

/// The key of the tables of disks.
pub const DISK: &str = "disk";

/// The largest file that is read.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// What a file says.
#[derive(Debug)]
pub struct Config {
    /// As if its options had been typed.
    pub args: ServeArgs,
    /// Keys and values but `disk` and the limits, to find what a later version of the file changes.
    fixed: BTreeMap<String, Value>,
}

#[derive(Debug, Deserialize)]
struct File {
    #[serde(default)]
    disk: Vec<DiskTable>,
    #[serde(flatten)]
    options: BTreeMap<String, Value>,
}

/// A `[[disk]]`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct DiskTable {
    file: PathBuf,
    name: Option<String>,
    format: Option<String>,
    limit: Option<String>,
    read_only: Option<bool>,
}

impl DiskTable {
    fn word(self) -> Result<DiskWord, String> {
        let format = self.format.map(|format| {
            FormatArg::from_str(&format, true).map(FormatArg::format).map_err(|_| format!("{format:?} is not a format"))
        });
        let limit = self.limit.map(|limit| limits::parse(&limit).map_err(|error| format!("limit: {error}")));
        DiskWord::new(self.name, self.file, format.transpose()?, limit.transpose()?, self.read_only)
    }
}

/// Reads a file.
///
/// # Errors
/// A sentence that names the file, and the line or the key.
pub fn read(path: &Path) -> Result<Config, Failure> {
    let failed = |what: String| Failure::new(format!("configuration {}: {what}", path.display()));
    let text = text_of(path).map_err(|error| failed(format!("cannot be read: {error}")))?;
    parse(&text).map_err(failed)
}

fn text_of(path: &Path) -> io::Result<String> {
    let facts = fs::metadata(path)?;
    if !facts.is_file() || facts.len() > FILE_BYTES_MAX {
        return Err(io::Error::other("it is not a regular file of at most 1 MiB"));
    }
    fs::read_to_string(path)
}

fn parse(text: &str) -> Result<Config, String> {
    let File { disk, options } = toml::from_str(text).map_err(|error| error.to_string().trim_end().to_owned())?;
    let mut words = vec!["serve".to_owned()];
    for (key, value) in &options {
        words.extend(words_of(key, value)?);
    }
    // The disks are not passed as words: their paths may be any text.
    words.extend(["--".to_owned(), "disk".to_owned()]);
    let matches = command().try_get_matches_from(words).map_err(|error| sentence(&error))?;
    let mut args = ServeArgs::from_arg_matches(&matches).map_err(|error| sentence(&error))?;
    if disk.is_empty() {
        return Err("it names no disk; write [[disk]] with file = \"FILE\" below".into());
    }
    args.disks = disk.into_iter().map(DiskTable::word).collect::<Result<_, _>>()?;
    let is_fixed = |key: &String| !matches!(&**key, "limit" | "client-limit" | "tls-certificates");
    let fixed = options.into_iter().filter(|(key, _)| is_fixed(key)).collect();
    Ok(Config { args, fixed })
}

/// What clap says, without its usage lines.
fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let told = text.lines().map(str::trim).take_while(|line| !line.is_empty()).collect::<Vec<_>>().join(" ");
    told.trim_start_matches("error: ").replace("'--", "'").replace("argument", "key")
}

fn command() -> Command {
    ServeArgs::augment_args(Command::new("serve"))
}

/// The words of one option.
fn words_of(key: &str, value: &Value) -> Result<Vec<String>, String> {
    let command = command();
    let known = command.get_arguments().find(|option| option.get_long() == Some(key) && key != "config");
    let Some(option) = known else {
        let keys = command.get_arguments().filter_map(clap::Arg::get_long).filter(|key| *key != "config");
        return Err(format!("unknown key {key:?}; the keys are disk and {}", keys.collect::<Vec<_>>().join(", ")));
    };
    let is_switch = !option.get_action().takes_values();
    let one = |value: &Value| match value {
        Value::String(text) if !is_switch => Ok(format!("--{key}={text}")),
        Value::Integer(number) if !is_switch => Ok(format!("--{key}={number}")),
        _ => Err(format!("{key} must be {}", if is_switch { "true or false" } else { "a text or a number" })),
    };
    match value {
        Value::Boolean(is_set) if is_switch => Ok(is_set.then(|| format!("--{key}")).into_iter().collect()),
        Value::Array(values) if !is_switch => values.iter().map(one).collect(),
        value => one(value).map(|word| vec![word]),
    }
}

impl Config {
    /// The limits of the disks, in their order.
    pub fn limits(&self) -> impl Iterator<Item = RateLimits> {
        self.args.disks.iter().map(|disk| disk.limit.or(self.args.limit).unwrap_or_default())
    }

    /// What `newer` changes that only a restart can: the keys, `disk` among them.
    pub fn needs_restart(&self, newer: &Self) -> Vec<String> {
        let mut changed: Vec<String> = self
            .fixed
            .iter()
            .filter(|(key, value)| newer.fixed.get(*key) != Some(value))
            .chain(newer.fixed.iter().filter(|(key, _)| !self.fixed.contains_key(*key)))
            .map(|(key, _)| key.clone())
            .collect();
        changed.sort();
        changed.dedup();
        let disks = |config: &Self| -> Vec<DiskWord> {
            config.args.disks.iter().cloned().map(|disk| DiskWord { limit: None, ..disk }).collect()
        };
        if disks(self) != disks(newer) {
            changed.push(DISK.into());
        }
        if self.args.tls_certificates.is_some() != newer.args.tls_certificates.is_some() {
            changed.push("tls-certificates".into());
        }
        changed
    }
}

#[cfg(test)]
mod tests {
    use super::{super::args::IN_FILE, *};
    use std::collections::BTreeSet;

    const WHOLE: &str = "
        nbd = ['/run/vm.sock', '10809']
        threads = 2
        insecure-writes = true
        limit = 'iops=100'
        client-limit = 'bytes=1M'
        [[disk]]
        file = '/disks/a=b.vhdx'
        [[disk]]
        name = 'log'
        file = 'log.img'
        format = 'raw'
        limit = 'none'
        read-only = true
    ";

    #[test]
    fn a_file_takes_what_the_command_takes() {
        let config = parse(WHOLE).unwrap();
        let args = &config.args;
        assert_eq!((args.nbd.len(), args.threads, args.insecure_writes), (2, Some(2), true));
        assert_eq!(args.client_limit.unwrap().bytes_per_second, 1 << 20);
        let [first, second] = &args.disks[..] else { panic!("two disks") };
        assert_eq!((&*first.name, first.path.to_str(), first.read_only), ("a=b.vhdx", Some("/disks/a=b.vhdx"), None));
        assert_eq!((&*second.name, second.read_only), ("log", Some(true)));
        assert_eq!(config.limits().map(|limits| limits.iops).collect::<Vec<_>>(), [100, 0]);
    }

    #[test]
    fn with_a_file_no_other_option_of_serve_is_taken() {
        let command = command();
        let ids = command.get_arguments().map(|option| option.get_id().as_str()).filter(|id| *id != "config");
        assert_eq!(ids.collect::<BTreeSet<_>>(), IN_FILE.into_iter().collect());
        let refused = command.try_get_matches_from(["serve", "--config", "x.toml", "--threads", "2"]);
        assert_eq!(refused.unwrap_err().kind(), clap::error::ErrorKind::ArgumentConflict);
    }

    #[test]
    fn mistakes_are_named() {
        for (text, parts) in [
            ("nbd = '10809'", &["names no disk"][..]),
            ("[[disk]]\nname = 'a'", &["missing field `file`"]),
            ("[[disk]]\nfile = 'a'\nsize = 5", &["unknown field `size`", "line 3"]),
            ("nbb = 'x'\n[[disk]]\nfile = 'a'", &["unknown key \"nbb\"", "nbd"]),
            ("config = 'x'\n[[disk]]\nfile = 'a'", &["unknown key \"config\""]),
            ("threads = 'many'\n[[disk]]\nfile = 'a'", &["'many'", "threads"]),
            ("progress = 'yes'\n[[disk]]\nfile = 'a'", &["progress must be true or false"]),
            ("nbd = true\n[[disk]]\nfile = 'a'", &["nbd must be a text"]),
            ("limit = 'iops=0'\n[[disk]]\nfile = 'a'", &["leave it out"]),
            ("[[disk]]\nfile = 'a'\nformat = 'qed'", &["\"qed\" is not a format"]),
            ("[[disk]]\nfile = 'a'\nlimit = 'x'", &["limit: ", "KEY=VALUE"]),
            ("tls-on-unix = true\n[[disk]]\nfile = 'a'", &["tls-certificates"]),
            ("nbd = ", &["line 1"]),
        ] {
            let error = parse(text).unwrap_err();
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }

    #[test]
    fn what_needs_a_restart_is_told() {
        let config = parse(WHOLE).unwrap();
        let changed = |from: &str, to: &str| config.needs_restart(&parse(&WHOLE.replace(from, to)).unwrap());
        assert!(changed("iops=100", "iops=5").is_empty() && changed("'none'", "'iops=1'").is_empty());
        assert_eq!(changed("threads = 2", "threads = 3"), ["threads"]);
        assert_eq!(changed("threads = 2", ""), ["threads"]);
        assert_eq!(changed("log.img", "log2.img"), ["disk"]);
        assert_eq!(changed("threads = 2", "connections = 3"), ["connections", "threads"]);
    }
}
