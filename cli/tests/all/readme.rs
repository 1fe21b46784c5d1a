//! The README's commands, as a new user types them.
//!
//! What stands in ```` ```console ```` blocks is typed, and must print what stands there. Times,
//! rates and free space differ from run to run, and a terminal breaks long lines, so those are not
//! compared. All other command lines of the README are parsed by a test in `cli/src/args.rs`.

use crate::common::Workshop;
use std::fs;

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
        // What is free where the test runs.
        if words.get(index + 2..index + 4).is_some_and(|next| next == ["are", "free"]) {
            words[index] = "N".into();
            words[index + 1] = "U".into();
        }
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
