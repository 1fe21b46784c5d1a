//! Tests of the table against the command line and against the sources of the libraries.

use super::*;
use clap::CommandFactory;
use std::{
    cell::RefCell,
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// The libraries that other programs use.
const SOURCES: [&str; 14] = [
    "space/src",
    "store/src",
    "format/src",
    "volume/src",
    "nbd/src",
    "image/src",
    "disk/src",
    "serve/src",
    "facade/src",
    "stats/src",
    "load/src",
    "outline/src",
    "diskspd/src",
    "lab/src",
];

#[test]
fn options_become_the_switches_of_the_command() {
    let sentence = "a.img: say which it is with `OpenOptions::format` = vhd or raw";
    assert_eq!(with_switches_of("info", sentence), "a.img: say which it is with --format vhd or raw");
    assert_eq!(with_switches_of("convert", sentence), "a.img: say which it is with --source-format vhd or raw");
    assert_eq!(
        with_switches_of("compare", sentence),
        "a.img: say which it is with --format or --second-format vhd or raw"
    );
    assert_eq!(
        with_switches_of("convert", "name the format with `CreateRequest::format`"),
        "name the format with --format"
    );
    assert_eq!(with_switches(with_switches("use `DetachOptions::force`")), "use --force");
    assert_eq!(all_with_switches(&["a", "`DetachOptions::unmount`"]), ["a", "--unmount"]);
}

#[test]
fn no_text_of_a_library_names_a_switch() {
    let mut ours = BTreeSet::new();
    for command in commands() {
        ours.extend(switches_of(&command));
    }
    let mut wrong = Vec::new();
    each_text(|path, text| {
        // The reports of the lab say which command lines were measured.
        let is_of_lab = path.to_string_lossy().contains("/lab/src/");
        let text = if is_of_lab { without_command_lines(text) } else { without_arguments(text) };
        for (at, _) in text.match_indices("--") {
            let name: String = text[at..].chars().take_while(|c| c.is_ascii_lowercase() || *c == '-').collect();
            if ours.contains(&name) {
                wrong.push(format!("{}: {name} in {text:?}", path.display()));
            }
        }
    });
    assert!(wrong.is_empty(), "name the library's option instead:\n{}", wrong.join("\n"));
}

#[test]
fn every_option_that_a_text_names_has_a_row_and_every_row_a_use() {
    let named = RefCell::new(BTreeSet::new());
    each_text(|_, text| {
        rename_options(text, |option, _| {
            named.borrow_mut().insert(option.to_owned());
            None
        });
    });
    let rows: BTreeSet<String> = SWITCHES.iter().map(|row| row.option.to_owned()).collect();
    assert_eq!(rows.len(), SWITCHES.len(), "an option has two rows");
    assert_eq!(named.into_inner(), rows);
}

#[test]
fn every_row_names_a_switch_that_the_command_has() {
    let commands = commands();
    for row in SWITCHES {
        let name = row.switch.split(' ').next().unwrap();
        assert!(commands.iter().any(|command| switches_of(command).contains(name)), "no command has {name}");
        for (command, switches) in row.elsewhere {
            let command = commands.iter().find(|other| other.get_name() == *command).unwrap();
            for name in switches.split(" or ") {
                // DiskSpd's own switches have one dash, and `diskspd` reads them itself.
                let is_diskspds = command.get_name() == "diskspd" && !name.starts_with("--");
                assert!(is_diskspds || switches_of(command).contains(name), "{} has no {name}", command.get_name());
            }
        }
    }
}

#[test]
fn command_lines_in_texts_are_no_options() {
    assert_eq!(without_command_lines("--cache=direct"), "");
    assert_eq!(without_command_lines("--cache direct is better"), "--cache direct is better");
    assert_eq!(without_command_lines("`diskwright serve --force` or `--force`"), " or `--force`");
}

#[test]
fn texts_are_found_in_sources() {
    let source = r##"
        // "a comment" and 'x'
        /* "another" */
        #[error("first {}: \"--quoted\" \u{e9}", x.y())]
        fn f<'a>(c: &'a str) { g('"', '\'', b'"', "second \
            line", r#"third "inner" one"#, b"fourth") }
        #[cfg(test)]
        mod tests { fn g() { h("not this one") } }
    "##;
    let found = texts_of(source);
    assert_eq!(found, ["first {}: \\\"--quoted\\\" \\u{e9}", "second line", "third \"inner\" one", "fourth"]);
}

/// All commands of the program, with those inside them.
fn commands() -> Vec<clap::Command> {
    let mut root = crate::args::Cli::command();
    root.build();
    let mut found = vec![root];
    let mut next = 0;
    while next < found.len() {
        let inner: Vec<_> = found[next].get_subcommands().cloned().collect();
        found.extend(inner);
        next += 1;
    }
    found
}

/// A text that is an argument of another process is no sentence.
fn without_arguments(text: &str) -> String {
    if text.starts_with("--") && !text.contains(' ') { String::new() } else { text.to_owned() }
}

/// The same without the command lines in a text, which begin with the name of a program.
fn without_command_lines(text: &str) -> String {
    let text = &without_arguments(text);
    let is_command = |part: &&str| part.starts_with("diskwright ") || part.starts_with("qemu-nbd ");
    let commands = text.split('`').skip(1).step_by(2).filter(is_command);
    commands.fold(text.to_owned(), |text, command| text.replace(&format!("`{command}`"), ""))
}

fn switches_of(command: &clap::Command) -> BTreeSet<String> {
    command.get_arguments().filter_map(clap::Arg::get_long).map(|name| format!("--{name}")).collect()
}

/// Calls `see` with every string literal of the libraries' sources, tests left out.
fn each_text(mut see: impl FnMut(&Path, &str)) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut paths: Vec<PathBuf> = SOURCES.iter().map(|path| root.join(path)).collect();
    let mut files = 0;
    while let Some(path) = paths.pop() {
        let name = path.file_name().unwrap().to_str().unwrap();
        if path.is_dir() && name != "tests" {
            paths.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else if name.ends_with(".rs") && !name.ends_with("tests.rs") {
            files += 1;
            texts_of(&fs::read_to_string(&path).unwrap()).iter().for_each(|text| see(&path, text));
        }
    }
    assert!(files > 200, "only {files} sources were found");
}

/// The string literals of a source up to its tests, as they are written but for line breaks.
fn texts_of(source: &str) -> Vec<String> {
    let source = source.split("#[cfg(test)]\nmod ").next().unwrap();
    let source = source.split("#[cfg(test)]\n        mod ").next().unwrap();
    let mut found = Vec::new();
    let mut rest = source;
    while let Some(at) = rest.find(['"', '\'', '/']) {
        let (before, here) = rest.split_at(at);
        rest = if let Some(comment) = here.strip_prefix("//") {
            comment.split_once('\n').map_or("", |(_, rest)| rest)
        } else if let Some(comment) = here.strip_prefix("/*") {
            comment.split_once("*/").map_or("", |(_, rest)| rest)
        } else if let Some(inner) = here.strip_prefix('"') {
            let hashes = before.len() - before.trim_end_matches('#').len();
            let is_raw = before[..before.len() - hashes].ends_with('r');
            let len =
                if is_raw { inner.find(&format!("\"{}", "#".repeat(hashes))) } else { end_of_literal(inner, b'"') };
            let len = len.expect("a literal without an end");
            let joined: Vec<&str> = inner[..len].split("\\\n").collect();
            let joined = joined.iter().enumerate().map(|(i, line)| if i == 0 { line } else { line.trim_start() });
            found.push(joined.collect());
            &inner[len + 1..]
        } else if let Some(inner) = here.strip_prefix('\'') {
            // A character, or a lifetime.
            let is_character = inner.starts_with('\\') || inner.chars().nth(1) == Some('\'');
            let len = if is_character { end_of_literal(inner, b'\'').map(|len| len + 1) } else { None };
            &inner[len.unwrap_or(0)..]
        } else {
            &here[1..]
        };
    }
    found
}

fn end_of_literal(text: &str, quote: u8) -> Option<usize> {
    let mut bytes = text.bytes().enumerate();
    while let Some((at, byte)) = bytes.next() {
        match byte {
            b'\\' => drop(bytes.next()),
            byte if byte == quote => return Some(at),
            _ => {}
        }
    }
    None
}
