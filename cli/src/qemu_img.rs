//! Options of qemu-img that a user types out of habit: what they are called here.
//!
//! Clap refuses an unknown option with its own sentence. If the option is one of qemu-img's for
//! the same command, a second sentence says what it is here.

/// An option of qemu-img.
struct QemuImgOption {
    option: &'static str,
    /// Commands for which the sentence holds; empty for all.
    commands: &'static [&'static str],
    sentence: &'static str,
}

const QEMU_IMG_OPTIONS: &[QemuImgOption] = &[
    QemuImgOption {
        option: "-O",
        commands: &[],
        sentence: "qemu-img's -O is --format here; without it the extension of the new file says its format",
    },
    QemuImgOption { option: "-f", commands: &["convert"], sentence: "qemu-img's -f is --source-format here" },
    QemuImgOption { option: "-f", commands: &[], sentence: "qemu-img's -f is --format here" },
    QemuImgOption {
        option: "-o",
        commands: &["convert"],
        sentence: "qemu-img's -o KEY=VALUE are options here: subformat=KIND is --subformat KIND or --type, \
                   block_size=SIZE is --block-size SIZE, preallocation=full is --preallocate",
    },
    QemuImgOption {
        option: "-o",
        commands: &["create"],
        sentence: "qemu-img's -o KEY=VALUE are options here: subformat=KIND is --type, \
                   block_size=SIZE is --block-size SIZE, preallocation=full is --preallocate",
    },
    QemuImgOption {
        option: "-p",
        commands: &[],
        sentence: "qemu-img's -p is not needed here: progress is shown unless --quiet is given",
    },
    QemuImgOption {
        option: "-c",
        commands: &["convert"],
        sentence: "qemu-img's -c is --subformat compressed here for a qcow2, and --subformat streamOptimized for a VMDK",
    },
    QemuImgOption { option: "-b", commands: &["create"], sentence: "qemu-img's -b is --parent here" },
    QemuImgOption {
        option: "-F",
        commands: &["create"],
        sentence: "qemu-img's -F is not needed here: a child has the format of its parent",
    },
    QemuImgOption { option: "-F", commands: &["compare"], sentence: "qemu-img's -F is --second-format here" },
    QemuImgOption {
        option: "-t",
        commands: &[],
        sentence: "qemu-img's -t none is --cache direct here, and -t writeback is --cache page",
    },
    QemuImgOption {
        option: "-T",
        commands: &[],
        sentence: "qemu-img's -T none is --cache direct here, and -T writeback is --cache page",
    },
    QemuImgOption {
        option: "-m",
        commands: &["convert"],
        sentence: "qemu-img's -m is not needed here: several requests are always in flight",
    },
    QemuImgOption {
        option: "-W",
        commands: &["convert"],
        sentence: "qemu-img's -W is not needed here: a copy is always written in the order that is fastest",
    },
    QemuImgOption {
        option: "-S",
        commands: &["convert"],
        sentence: "qemu-img's -S is not needed here: zeros are always skipped, and --preallocate reserves their space",
    },
    QemuImgOption {
        option: "--backing-chain",
        commands: &["info"],
        sentence: "qemu-img's --backing-chain is --chain here",
    },
    QemuImgOption {
        option: "--output",
        commands: &["info", "map", "check", "compare"],
        sentence: "qemu-img's --output=json is --json here",
    },
    QemuImgOption { option: "-r", commands: &["check"], sentence: "qemu-img's -r is --repair here" },
    QemuImgOption {
        option: "-l",
        commands: &["snapshot"],
        sentence: "qemu-img's -l is `diskwright info` here, which lists the internal snapshots of a qcow2",
    },
    QemuImgOption {
        option: "-c",
        commands: &["snapshot"],
        sentence: "qemu-img's -c makes a snapshot inside the file; here FILE is frozen beside itself, and --name names that",
    },
    QemuImgOption {
        option: "--shrink",
        commands: &["resize"],
        sentence: "qemu-img's --shrink is not needed here: a smaller size is refused if something would be lost",
    },
    QemuImgOption {
        option: "-U",
        commands: &[],
        sentence: "this command has no -U: it does not read a disk that another program writes",
    },
];

/// Commands of qemu-img and its companions that have other names here: the name, ours, a sentence.
const QEMU_IMG_COMMANDS: &[(&str, &str, &str)] = &[
    ("commit", "merge", "qemu-img's commit is `diskwright merge` here"),
    (
        "rebase",
        "reconnect",
        "qemu-img's rebase -u is `diskwright reconnect` here; without -u it is `diskwright merge` or `convert`",
    ),
    ("measure", "convert", "qemu-img's measure is `diskwright convert SOURCE DEST --dry-run` here"),
    ("dd", "convert", "qemu-img's dd is `diskwright convert` here"),
    ("bench", "lab", "qemu-img's bench is `diskwright lab run` here"),
    ("bitmap", "track", "qemu-img's bitmap is `diskwright track` here"),
    (
        "amend",
        "convert",
        "qemu-img's amend has no command here: `diskwright convert` makes an image with other options",
    ),
    ("nbd", "serve", "qemu-nbd is `diskwright serve` here, and with -c `diskwright attach`"),
];

/// The command that does here what a command of qemu-img does, and a sentence about it.
pub(crate) fn command(name: &str) -> Option<(&'static str, &'static str)> {
    QEMU_IMG_COMMANDS.iter().find(|(known, ..)| *known == name).map(|&(_, ours, sentence)| (ours, sentence))
}

/// What an option of qemu-img is here, for a command that does not have it.
pub(crate) fn sentence(command: Option<&str>, option: &str) -> Option<&'static str> {
    let for_it = |known: &&QemuImgOption| {
        known.option == option && (known.commands.is_empty() || command.is_some_and(|it| known.commands.contains(&it)))
    };
    QEMU_IMG_OPTIONS.iter().find(for_it).map(|known| known.sentence)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::command_line;

    /// The options that a sentence names, without qemu-img's own.
    fn named(sentence: &str) -> impl Iterator<Item = &str> {
        let words = sentence.split([' ', ';', ',', ':']).filter(|word| word.starts_with("--"));
        words.filter(|word| !word.contains('=') && !["--backing-chain", "--shrink"].contains(word))
    }

    #[test]
    fn every_option_that_is_named_exists_and_qemus_does_not() {
        let line = command_line();
        for known in QEMU_IMG_OPTIONS {
            for command in known.commands {
                let command = line.find_subcommand(command).unwrap();
                let has = |option: &str| {
                    let (long, short) = (option.strip_prefix("--"), option.strip_prefix('-'));
                    let mut all = command.get_arguments().chain(line.get_arguments());
                    all.any(|argument| {
                        argument.get_long().is_some() && argument.get_long() == long
                            || argument.get_short().map(String::from).as_deref() == short
                    })
                };
                assert!(!has(known.option), "{} has {}", command.get_name(), known.option);
                for option in named(known.sentence) {
                    assert!(has(option), "{} has no {option}: {}", command.get_name(), known.sentence);
                }
            }
        }
    }

    #[test]
    fn every_command_that_is_named_exists_and_qemus_does_not() {
        let line = command_line();
        for (name, ours, sentence) in QEMU_IMG_COMMANDS {
            assert!(line.find_subcommand(name).is_none() && line.find_subcommand(ours).is_some(), "{name}");
            assert!(sentence.contains(&format!("`diskwright {ours}")), "{sentence}");
        }
    }

    #[test]
    fn the_same_option_differs_by_command() {
        assert_eq!(sentence(Some("convert"), "-f"), Some("qemu-img's -f is --source-format here"));
        assert_eq!(sentence(Some("info"), "-f"), Some("qemu-img's -f is --format here"));
        assert!(sentence(Some("convert"), "-c").is_some_and(|sentence| sentence.contains("streamOptimized")));
        assert_eq!(sentence(Some("info"), "-c"), None);
        assert_eq!(sentence(None, "--nonsense"), None);
    }
}
