//! A folder to work in, the program, and what it printed.

#![allow(dead_code, reason = "each test file uses its own part")]

pub mod schemas;

use std::{
    io::{self, Write},
    ops::{Deref, DerefMut},
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
};
use tempfile::TempDir;

/// A folder in which commands run, so that what they print has relative paths.
pub struct Workshop {
    dir: TempDir,
    /// Environment variables of the commands.
    pub variables: Vec<(&'static str, String)>,
}

/// A program in the background. Whatever becomes of the test, it does not outlive it.
#[derive(Debug)]
pub struct Running(Option<Child>);

impl Running {
    #[track_caller]
    pub fn start(command: &mut Command) -> Self {
        Self(Some(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"))))
    }

    /// What it prints until its end.
    pub fn output(mut self) -> io::Result<Output> {
        self.0.take().expect("it was not taken").wait_with_output()
    }
}

impl Deref for Running {
    type Target = Child;
    fn deref(&self) -> &Child {
        self.0.as_ref().expect("it was not taken")
    }
}

impl DerefMut for Running {
    fn deref_mut(&mut self) -> &mut Child {
        self.0.as_mut().expect("it was not taken")
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// The end of a command.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

impl Workshop {
    pub fn new() -> Self {
        Self::within(tempfile::tempdir())
    }

    /// A folder in memory, if there is such a file system: syncs cost nothing there.
    pub fn in_memory() -> Self {
        Self::within(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()))
    }

    fn within(dir: io::Result<TempDir>) -> Self {
        Self { dir: dir.expect("a temporary folder"), variables: Vec::new() }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The command, ready to be started here.
    pub fn command(&self, line: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_diskwright"));
        command.args(line).current_dir(self.dir.path()).env_remove("NO_COLOR").env("TERM", "xterm-256color");
        // Tests wait for a step by its line.
        command.env("DISKWRIGHT_PROGRESS", "steps");
        // Its own pools.
        command.env("DISKWRIGHT_SPACES", self.path(".spaces"));
        // Its own cache.
        command.env("DISKWRIGHT_CACHE", self.path(".cache"));
        command.envs(self.variables.iter().map(|(name, value)| (*name, value.as_str())));
        command
    }

    /// Runs a command as a user types it (words are separated by blanks; `'` and `"` group).
    pub fn run(&self, line: &str) -> Ended {
        self.run_with_stdin(line, "")
    }

    pub fn run_with_stdin(&self, line: &str, stdin: &str) -> Ended {
        let words = words(line);
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        let mut child = self
            .command(&words)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("diskwright starts");
        // A command that does not read its input closes it early.
        let _ = child.stdin.take().expect("a pipe").write_all(stdin.as_bytes());
        let ended = Ended::from(child.wait_with_output().expect("diskwright ends"), self.dir.path());
        if words.contains(&"--json") && !ended.stdout.is_empty() {
            schemas::validate(&ended.stdout);
        }
        ended
    }

    /// Runs a command that must succeed, and gives what it printed.
    #[track_caller]
    pub fn ok(&self, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, Some(0), "`diskwright {line}` failed: {ended:#?}");
        ended.stdout
    }

    /// Runs a command that must succeed with `--json`, and gives its document.
    #[track_caller]
    pub fn json(&self, line: &str) -> serde_json::Value {
        serde_json::from_str(&self.ok(&format!("{line} --json"))).expect("one JSON document")
    }

    /// Bytes of a disk that hold data, as `map` has them.
    #[track_caller]
    pub fn data_bytes(&self, disk: &str) -> u64 {
        let map = self.json(&format!("map {disk}"));
        let extents = map["extents"].as_array().expect("extents").iter();
        extents.filter(|extent| extent["data"] == true).filter_map(|extent| extent["length"].as_u64()).sum()
    }

    /// Runs a command that must fail with `code` and one sentence.
    #[track_caller]
    pub fn fails(&self, code: i32, line: &str) -> String {
        let ended = self.run(line);
        assert_eq!(ended.code, Some(code), "`diskwright {line}`: {ended:#?}");
        assert!(ended.stderr.starts_with("diskwright: ") || ended.stderr.starts_with("error: "), "{ended:#?}");
        ended.stderr
    }
}

impl Ended {
    fn from(output: Output, dir: &Path) -> Self {
        let text = |bytes: &[u8]| {
            let text = String::from_utf8(bytes.to_vec()).expect("UTF-8");
            let real = dir.canonicalize().expect("the folder is there");
            let steady =
                text.replace(&real.display().to_string(), "[DIR]").replace(&dir.display().to_string(), "[DIR]");
            // Children name their parents as Windows writes paths.
            steady.replace(&real.display().to_string().replace('/', "\\"), "[DIR]")
        };
        Self { code: output.status.code(), stdout: text(&output.stdout), stderr: text(&output.stderr) }
    }
}

/// What was printed as words, whatever its line breaks and columns.
pub fn flat(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A dry run's text, in which `[free]` stands for what is free on the file system.
pub fn without_free(text: &str) -> String {
    let mut text = text.to_owned();
    while let Some(at) = text.find(" are free on ") {
        let start = text[..at].rfind("; ").expect("the need comes first") + 2;
        let end = text[at..].find([';', '\n']).map_or(text.len(), |end| at + end);
        text.replace_range(start..end, "[free]");
    }
    text
}

/// A printed result without the summary that is printed beside it.
pub fn without_summary(mut result: serde_json::Value) -> serde_json::Value {
    let summary = result.as_object_mut().and_then(|result| result.remove("summary"));
    assert!(summary.is_some_and(|cells| cells[0]["iops"].as_f64().is_some()), "{result}");
    result
}

pub fn words(line: &str) -> Vec<String> {
    let (mut words, mut word, mut quote) = (Vec::new(), None::<String>, None::<char>);
    for c in line.chars() {
        match quote {
            Some(open) if c == open => quote = None,
            None if c == '\'' || c == '"' => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            None if c == ' ' => words.extend(word.take()),
            _ => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}

/// What differs from run to run is replaced by its name: ids, dates, what the file system
/// allocates, times.
pub fn steady(text: &str) -> String {
    let lines = text.lines().map(|line| {
        let line = without_ids(line);
        for label in ["size on disk", "file length", "creator", "created"] {
            if line.starts_with(label) {
                return format!("{label:21}  [{label}]");
            }
        }
        let line = match line.find("modified  ") {
            Some(at) => format!("{}modified  [date]", &line[..at]),
            None => line,
        };
        let line = match (line.rfind(", in "), line.ends_with("/s)")) {
            (Some(at), true) => format!("{}, in [time]", &line[..at]),
            _ => line,
        };
        if !line.contains(" on disk") {
            return line;
        }
        let columns = line.trim().split("  ").map(str::trim).filter(|column| !column.is_empty());
        columns
            .map(|column| if column.ends_with(" on disk") { "[size] on disk" } else { column })
            .collect::<Vec<_>>()
            .join("  ")
    });
    lines.collect::<Vec<_>>().join("\n")
}

fn without_ids(line: &str) -> String {
    let mut out = String::new();
    let mut rest = line;
    while let Some(c) = rest.chars().next() {
        match rest.get(..36).filter(|id| uuid::Uuid::try_parse(id).is_ok()) {
            Some(id) => {
                out.push_str("[id]");
                rest = &rest[id.len()..];
            }
            None => {
                out.push(c);
                rest = &rest[c.len_utf8()..];
            }
        }
    }
    out
}

/// Whether programs started from here hear SIGHUP; else a line says that a test is skipped. Whoever
/// starts the tests by `nohup` has them ignore it.
pub fn hears_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap().trim();
    let ignores = u64::from_str_radix(ignored, 16).unwrap() & 1 == 1;
    if ignores {
        println!("skipped: what SIGHUP does: it is ignored here (the tests were started by nohup)");
    }
    !ignores
}
