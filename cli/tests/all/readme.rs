//! The README's commands, as a new user types them.
//!
//! What stands in ```` ```console ```` blocks is typed, and must print what stands there. Times,
//! rates and free space differ from run to run, and a terminal breaks long lines, so those are not
//! compared. The commands of the table of tasks, and those in ```` ```sh ```` blocks, are typed in
//! folders where their files lie: measurements with a short time, and paths of other folders
//! (`/run`, `/mnt`, `/images`) below the test's. What is not typed is what builds or tests the
//! program itself.

use crate::{
    attaching::{Place, find},
    common::{Ended, Workshop, schemas},
};
use std::{fs, path::Path};

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

/// What must be there before a command of the README can be typed, as lines of a shell. A command
/// of the README that has no row here fails the test.
const BEFORE: &[(&str, &[&str])] = &[
    ("diskwright cache list", &[]),
    ("diskwright track start vm.vhdx monday", &["diskwright create vm.vhdx --size 64M"]),
    ("diskwright space create vault --member a.img --member b.img", &["truncate -s 64M a.img b.img"]),
    (
        "diskwright space cache vault 4G",
        &[
            "truncate -s 5G a.img b.img",
            "diskwright space create vault --member a.img:ssd --member b.img:hdd --copies 1 --write-cache none",
        ],
    ),
    ("diskwright space report vault", &["truncate -s 64M a.img", "diskwright space create vault --member a.img"]),
    ("diskwright space scrub vault", &["truncate -s 64M a.img", "diskwright space create vault --member a.img"]),
    (
        "diskwright track show vm.vhdx monday",
        &[
            "diskwright create vm.vhdx --size 64M",
            "diskwright track start vm.vhdx monday",
            "diskwright io vm.vhdx -c 'write 1M 64k'",
        ],
    ),
    (
        "diskwright diff vm.avhdx --export tuesday.dwdiff",
        &[
            "diskwright create vm.vhdx --size 64M",
            "diskwright create vm.avhdx --parent vm.vhdx",
            "diskwright io vm.avhdx -c 'write 1M 64k'",
        ],
    ),
    (
        "diskwright diff --apply tuesday.dwdiff --onto vm.vhdx",
        &[
            "diskwright create vm.vhdx --size 64M",
            "diskwright create vm.avhdx --parent vm.vhdx",
            "diskwright io vm.avhdx -c 'write 1M 64k'",
            "diskwright diff vm.avhdx --export tuesday.dwdiff",
            "rm vm.avhdx",
        ],
    ),
    ("diskwright resize disk.vhdx +10G --grow-partition 2", WITH_PARTITIONS),
    ("diskwright resize disk.vhdx --to-minimum", WITH_PARTITIONS),
    ("diskwright compact disk.vhdx", &["diskwright create disk.vhdx --size 64M"]),
    ("diskwright partitions disk.vhdx", WITH_PARTITIONS),
    ("diskwright move vm.vhdx /mnt/fast/", &["mkdir -p mnt/fast", "diskwright create vm.vhdx --size 64M"]),
    ("diskwright convert vm.vhdx vm.ova", &["diskwright create vm.vhdx --size 64M"]),
    (
        "diskwright convert appliance.ova disk.vhdx",
        &["diskwright create vm.vhdx --size 64M", "diskwright convert vm.vhdx appliance.ova"],
    ),
    ("diskwright seal golden.vhdx", &["diskwright create golden.vhdx --size 64M"]),
    (
        "diskwright convert vm.vhdx vm.raw --resume",
        &["diskwright create vm.vhdx --size 64M", "truncate -s 64M vm.raw.partial"],
    ),
    ("diskwright convert vm.vhdx vm.vhd --azure", &["diskwright create vm.vhdx --size 64M"]),
    ("diskwright info vm.vhdx --windows", &["diskwright create vm.vhdx --size 64M"]),
    ("diskwright convert old.vhdx new.vhdx --identity keep", &["diskwright create old.vhdx --size 64M"]),
    (
        "diskwright reconnect machine.vhdx --search /images",
        &[
            "diskwright create golden.vhdx --size 64M",
            "diskwright create machine.vhdx --parent golden.vhdx",
            "mkdir images",
            "mv golden.vhdx images/renamed.vhdx",
        ],
    ),
    ("diskwright check disk.vhdx --repair", &["diskwright create disk.vhdx --size 64M"]),
    ("diskwright rescue damaged.vhdx saved.vhdx", &["diskwright create damaged.vhdx --size 64M"]),
    ("diskwright convert a.vhdx b.vhdx --skip-damaged", &["diskwright create a.vhdx --size 64M"]),
    ("diskwright convert vm.vhdx vm.raw --dry-run", &["diskwright create vm.vhdx --size 64M"]),
    ("diskwright clone golden.vhdx web1.vhdx web2.vhdx", &["diskwright create golden.vhdx --size 64M"]),
    ("diskwright serve-ctl disk.vhdx compact", &["diskwright create disk.vhdx --size 64M"]),
    ("diskwright check *.vhdx", &["diskwright create a.vhdx --size 64M", "diskwright create b.vhdx --size 64M"]),
];

const WITH_PARTITIONS: &[&str] = &[
    "diskwright create disk.raw --size 64M",
    "printf 'label: gpt\\nsize=16M\\nsize=16M\\n' | sfdisk -q disk.raw",
    "diskwright convert disk.raw disk.vhdx",
];

/// The command that needs a bucket.
pub const OF_A_BUCKET: &str = "diskwright create vm.vhdx --parent s3://golden/debian.vhdx";

/// The commands that need another bucket, in their order.
pub const OF_PUSHES: [&str; 5] = [
    "diskwright push vm.vhdx s3://backups/vms/monday --track",
    "diskwright push vm.vhdx s3://backups/vms/tuesday --base monday --track",
    "diskwright pull s3://backups/vms/monday new.vhdx",
    "diskwright pushed s3://backups/vms",
    "diskwright prune s3://backups/vms --remove monday",
];

/// A command with its folders below the one where it is typed.
fn here(command: &str) -> String {
    [" /mnt/", " /images", "unix:/run/", "socket=/run/"]
        .into_iter()
        .fold(command.to_owned(), |command, path| command.replace(path, &path.replacen('/', "", 1)))
}

#[track_caller]
fn done(place: &Place, line: &str) -> Ended {
    let ended = place.typed(&here(line));
    assert_eq!(ended.code, Some(0), "{line}: {ended:#?}");
    ended
}

/// The spans in backticks of the README's prose and tables that are whole commands.
fn commands_in_text() -> Vec<String> {
    let text = readme();
    let prose = text.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2));
    // With a word in capital letters it is a pattern: `diskwright COMMAND --help`.
    let is_whole = |span: &&str| {
        let mut words = span.split_whitespace();
        words.next() == Some("diskwright")
            && words.clone().count() > 1
            && !words.any(|word| word.len() > 2 && word == word.to_uppercase())
    };
    prose.filter(is_whole).map(|span| span.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn every_command_of_the_tasks_does_what_it_says() {
    let has_sfdisk = find("sfdisk").is_some();
    let commands = commands_in_text();
    assert!(commands.len() > 15, "{commands:?}");
    for command in commands {
        let is_elsewhere = ["diskwright completions", "diskwright lab"].iter().any(|start| command.starts_with(start));
        // `objects.rs` and `pushing.rs` have buckets.
        if is_elsewhere || command == OF_A_BUCKET || OF_PUSHES.contains(&&*command) {
            continue;
        }
        let (_, before) =
            BEFORE.iter().find(|(line, _)| *line == command).unwrap_or_else(|| panic!("{command} is not tested"));
        if before.iter().any(|line| line.contains("sfdisk")) && !has_sfdisk {
            println!("skipped: {command}: sfdisk is not installed");
            continue;
        }
        let place = Place::anywhere();
        before.iter().for_each(|line| drop(done(&place, line)));
        let server = command.starts_with("diskwright serve-ctl").then(|| place.spawn("serve disk.vhdx --nbd ./s"));
        if server.is_some() {
            // Its control channel is there a moment after its socket.
            place.wait_until("the disk is served", || {
                place.typed("diskwright serve-ctl disk.vhdx statistics").code == Some(0)
            });
        }
        let ended = place.typed(&here(&command));
        // A rule that does not hold is an answer.
        let is_answer = command.starts_with("diskwright info") && ended.code == Some(3);
        assert!(ended.code == Some(0) || is_answer, "{command}: {ended:#?}");
    }
}

/// A command of the README that measures, with less to do.
fn shortened(command: &str) -> String {
    let command = command.replace(" --duration 2s", "").replace(" -d10", " -d1 -W0").replace("-c1G", "-c16M");
    let more = match command.split_whitespace().skip(1).take(3).collect::<Vec<_>>()[..] {
        ["lab", "run", _] => "--duration 50ms --warm-up 0 --output RESULT.json",
        ["lab", "sweep", _] => "--duration 10ms --warm-up 0 --rounds 1",
        ["lab", "compare", _] => "--duration 10ms --warm-up 0 --rounds 2",
        ["lab", "study", "queue-depth"] => "--size 8M --threads 2 --target-depth 8 --rounds 1 --cell 0.01 --write-back",
        ["lab", "study", "raw-and-file"] => "--size 16M --rounds 1 --cell 0.01",
        ["lab", "study", "containers"] => "--size 32M --rounds 1 --cell 0.01 --chain-length 1,2",
        // `lab_access_paths.rs` starts its guests.
        ["lab", "study", "access-paths"] => "--size 32M --rounds 1 --cell 0.2 --no-guest",
        // A cell of 0.1 s has had no request on a busy machine.
        ["lab", "study", _] => "--size 32M --rounds 1 --cell 0.4",
        ["lab", "selftest"] => "--quick --rounds 1 --cell 50ms",
        _ => "",
    };
    format!("{command} {more}")
}

#[test]
fn every_measurement_of_the_readme_runs() {
    let place = Place::anywhere();
    for name in ["machine", "a", "b"] {
        done(&place, &format!("diskwright create {name}.vhdx --size 64M"));
    }
    let release = readme();
    let release = release.lines().filter_map(|line| line.trim().strip_prefix("cargo run --release -- "));
    let release: Vec<String> = release.map(|line| format!("diskwright {line}")).collect();
    assert_eq!(release.len(), 1, "the one command for a new user");
    let measuring = |line: &String| line.starts_with("diskwright lab") || line.starts_with("diskwright diskspd");
    let commands: Vec<String> = blocks("sh").into_iter().filter(measuring).chain(release).collect();
    assert!(commands.len() > 10, "{commands:?}");
    for command in commands {
        let is_measuring = command.starts_with("diskwright lab") && !command.starts_with("diskwright lab report");
        let json = if is_measuring { "--json" } else { "" };
        let ended = place.typed(&format!("{} {json}", shortened(&command)));
        if is_measuring && !ended.stdout.is_empty() {
            schemas::validate(&ended.stdout);
        }
        // A promise that is missed in a debug build is an answer, and only root has devices.
        let is_answer = command == "diskwright lab selftest" && ended.code == Some(1) && !ended.stdout.is_empty();
        let is_missing = |word: &str| ended.code == Some(1) && ended.stderr.contains(word);
        if is_missing("run it as root") {
            println!("skipped: {command}: not root, or no loop devices");
        } else if is_missing("no kernel for the guest") || is_missing("qemu-system-x86_64 is not installed") {
            println!("skipped: {command}: no guest: {}", ended.stderr.trim());
        } else {
            assert!(ended.code == Some(0) || is_answer, "{command}: {ended:#?}");
        }
    }
    assert!(place.path("report.html").exists());
}

#[test]
fn a_disk_is_served_and_attached_as_the_readme_says() {
    let commands: Vec<String> =
        blocks("sh").into_iter().filter(|line| !line.contains(" lab ") && !line.contains(" diskspd ")).collect();
    let verbs: Vec<&str> = commands.iter().filter_map(|line| line.split_whitespace().nth(1)).collect();
    assert_eq!(verbs, ["serve", "convert", "attach", "detach"]);
    let Some(place) = Place::as_root(&["mkfs.ext4"]) else { return };
    for dir in ["run", "mnt/machine"] {
        place.dir(dir);
    }
    done(&place, "diskwright create machine.raw --size 64M");
    done(&place, "mkfs.ext4 -q -F machine.raw");
    done(&place, "diskwright convert machine.raw machine.vhdx");
    let server = place.spawn(here(&commands[0]).strip_prefix("diskwright ").expect("a command"));
    let socket = place.path("run/machine.sock");
    place.wait_until("the disk is served", || socket.exists());
    done(&place, &commands[1]);
    drop(server);
    place.wait_until("the server has ended", || place.typed("diskwright io machine.vhdx -c flush").code == Some(0));
    done(&place, &commands[2]);
    assert!(Path::new(&place.dir("mnt/machine")).join("lost+found").exists());
    done(&place, &commands[3]);
    assert_eq!(place.attached(), 0);
}

/// What builds or tests the program is not run here, but what it names exists.
#[test]
fn builds_and_tests_of_the_readme_name_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = readme();
    for (line, path) in [
        ("    cargo install --path cli\n", "cli/Cargo.toml"),
        ("    ./test\n", "test"),
        ("`.ci/dist --musl`", ".ci/dist"),
        ("`pip install ./python`", "python/pyproject.toml"),
        ("`cargo run --release -p diskwright-bench -- --quick`", "proof/bench/Cargo.toml"),
    ] {
        assert!(text.contains(line), "{line:?} is not in the README");
        assert!(root.join(path).exists(), "{path}");
    }
}
