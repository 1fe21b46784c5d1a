//! The README's commands, as a new user types them.
//!
//! What stands in ```` ```console ```` blocks is typed, and must print what stands there. Times and
//! rates differ from run to run, and a terminal breaks long lines, so those are not compared.
//! Commands in ```` ```sh ```` blocks are typed too, with options behind them that make them small.

use crate::common::Workshop;
use std::{collections::HashMap, fs};

fn readme() -> String {
    fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).unwrap()
}

/// The lines of all blocks of a language.
fn blocks(language: &str) -> Vec<String> {
    let mut lines = Vec::new();
    let mut inside = false;
    for line in readme().lines() {
        match line.strip_prefix("```") {
            Some(found) => inside = !inside && found == language,
            None if inside => lines.push(line.to_owned()),
            None => {}
        }
    }
    assert!(!lines.is_empty(), "the README has no {language} block");
    lines
}

/// Without line breaks, times and rates.
fn comparable(text: &str) -> String {
    let mut words: Vec<String> = text.split_whitespace().map(str::to_owned).collect();
    for index in 0..words.len() {
        let is_unit = |unit: &str| ["s", "ms", "µs"].contains(&unit) || unit.ends_with("/s)");
        if words.get(index + 1).is_some_and(|unit| is_unit(unit)) {
            words[index] = "N".into();
            words[index + 1] = "U".into();
        }
    }
    words.join(" ")
}

#[test]
fn the_tour_prints_what_the_readme_shows() {
    let shop = Workshop::new();
    let mut expected: Vec<(String, String)> = Vec::new();
    for line in blocks("console") {
        match line.strip_prefix("$ diskwright ") {
            Some(command) => expected.push((command.to_owned(), String::new())),
            None => {
                let (_, output) = expected.last_mut().expect("output before the first command");
                output.push_str(&line);
                output.push('\n');
            }
        }
    }
    assert!(expected.len() >= 10, "{expected:?}");
    for (command, output) in expected {
        let ended = shop.run(&command);
        let found = format!("{}{}", ended.stdout, ended.stderr).replace("[DIR]", "/tmp/tour");
        let (found, wanted) = (comparable(&found), comparable(&output));
        assert_eq!(found, wanted, "{command}");
    }
}

#[test]
fn every_command_of_the_readme_is_one() {
    let known: HashMap<&str, &str> = HashMap::from([
        ("serve", "serve --help"),
        ("convert", "convert --help"),
        ("attach", "attach --help"),
        ("detach", "detach --help"),
        ("lab run", "lab run --help"),
        ("lab sweep", "lab sweep --help"),
        ("lab compare", "lab compare --help"),
        ("lab study", "lab study --help"),
        ("lab report", "lab report --help"),
        ("lab selftest", "lab selftest --help"),
        ("diskspd", "diskspd --help"),
    ]);
    let shop = Workshop::new();
    for line in blocks("sh") {
        let command = line.strip_prefix("diskwright ").unwrap_or_else(|| panic!("not a command of ours: {line}"));
        let (name, help) = known
            .iter()
            .find(|(name, _)| command.starts_with(**name))
            .unwrap_or_else(|| panic!("no test knows {line}"));
        let study = command.strip_prefix("lab study ").map(|rest| rest.split(' ').next().unwrap_or_default());
        let help = shop.ok(&study.map_or_else(|| (*help).to_owned(), |study| format!("lab study {study} --help")));
        for option in command.split(' ').filter(|word| word.starts_with("--")) {
            assert!(help.contains(option), "{name} has no {option}");
        }
    }
}
