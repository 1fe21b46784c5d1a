//! The command line: the commands, and the options that all of them share.
//!
//! Each command has its own arguments in `commands/`. The global options may stand before or behind
//! any command. A command shows in its help those that it uses: [`command_line`] hides the options
//! about disks and chains everywhere, and shows them again where a disk is opened. What `-h` and
//! `--help` print is arranged in [`help`](crate::help).

use crate::{
    commands, help,
    options::{GlobalOptions, UsedOptions},
};
use clap::{Arg, CommandFactory, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use std::ffi::OsString;

/// Create, examine, check, convert, serve and measure virtual disks: raw, VHD, VHDX, VMDK, qcow2
/// and VDI, with the chains of their parents.
#[derive(Debug, Parser)]
#[command(name = "diskwright", version, max_term_width = 120, after_help = AFTER_HELP)]
pub struct Cli {
    /// The command.
    #[command(subcommand)]
    pub command: Command,
    /// Options of every command.
    #[command(flatten)]
    pub global: GlobalOptions,
}

const AFTER_HELP: &str = "\
`diskwright COMMAND --help` shows the options of a command, and those about disks where it opens one.

SIZES are bytes, or numbers with k, M, G or T (powers of 1024): 512, 64k, 40G.

A FILE may be a disk of a pool: space://POOL/NAME (see `diskwright space`).

A FILE that exists may be an NVMe/TCP URI: nvme://HOST[:PORT]/NQN?nsid=N, or nvme://HOST if the target has one disk, with secrets=FILE if it wants a proof. It may be an iSCSI URI: iscsi://[USER@]HOST[:PORT]/TARGET/LUN, or iscsi://HOST if there is one disk, \
with secrets=FILE if the target wants CHAP. It may be an NBD URI: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; nbds:// and \
nbds+unix:// require TLS. Parameters follow \"?\", joined by \"&\": timeout=SECONDS (how long to wait for an answer of the server; 0 for no limit), \
reconnect or reconnect=SECONDS, connections=N, and for TLS tls-certificates=DIR (ca-cert.pem, client-cert.pem, client-key.pem), \
tls-hostname=NAME, tls-verify-peer=0.

EXIT CODES are 0 done, 1 failed, 2 used wrongly, 130 stopped by a signal; `compare`, `diff` and `check` have their own, \
as in qemu-img: see their help. Errors go to standard error as one sentence, with --json too.

EXAMPLES
  diskwright create disk.vhdx --size 40G
  diskwright info disk.vhdx --chain
  diskwright convert disk.vhdx disk.raw --verify
  diskwright lab study containers --quick";

/// Two enums of the same commands. Clap makes the options of a command of the first when the
/// command is called, and those of all commands of the second at once, which takes longer than a
/// short command runs.
macro_rules! commands {
    ($($variants:tt)*) => {
        /// The commands.
        #[derive(Debug, Subcommand)]
        #[command(defer = true)]
        pub enum Command { $($variants)* }

        #[derive(Debug, Subcommand)]
        enum WithOptions { $($variants)* }
    };
}

commands! {
    /// Create a disk.
    Create(commands::create::CreateArgs),
    /// Show format, sizes, identifiers, parent and log state of a disk, or its whole chain.
    Info(commands::info::InfoArgs),
    /// Show which layer holds which range, or draw the whole disk on one screen.
    Map(commands::map::MapArgs),
    /// List the partitions and file systems on a disk, and what is free in them.
    Partitions(commands::partitions::PartitionsArgs),
    /// Check a disk for damage and leaked space, and repair it.
    Check(commands::check::CheckArgs),
    /// Copy a disk into a new image of any format and type.
    Convert(commands::convert::ConvertArgs),
    /// Compare the contents of two disks.
    Compare(commands::compare::CompareArgs),
    /// List what changed in a disk against its parent, an ancestor or another disk; export it, and
    /// apply it to a copy.
    Diff(commands::diff::DiffArgs),
    /// Freeze a disk and go on in a new child; list the tree, go back, delete.
    Snapshot(commands::snapshot::SnapshotArgs),
    /// Track which ranges of a disk change, since named points.
    Track(commands::track::TrackArgs),
    /// Make children of a disk.
    Clone(commands::clone::CloneArgs),
    /// Merge a child into its parent or another ancestor, or its chain into a new disk.
    Merge(commands::merge::MergeArgs),
    /// Move a disk to another file, format, folder or file system, also while it is in use.
    Move(commands::move_::MoveArgs),
    /// Give back the space that disks do not need, and make their files small.
    Compact(commands::compact::CompactArgs),
    /// Connect a child to its parent's new place, or search for lost parents.
    Reconnect(commands::reconnect::ReconnectArgs),
    /// Keep disks in a pool of files and devices, in one, two or three copies.
    Space(commands::space::SpaceArgs),
    /// What is kept here of images in S3 and on web servers: list, drop, prefetch.
    Cache(commands::cache::CacheArgs),
    /// Store a disk in a bucket, as chunks that disks share.
    Push(commands::push::PushArgs),
    /// List the disks that were pushed to a folder of a bucket.
    Pushed(commands::pushed::PushedArgs),
    /// Bring a pushed disk to this machine.
    Pull(commands::pull::PullArgs),
    /// Delete what no pushed disk needs any more; remove pushed disks.
    Prune(commands::prune::PruneArgs),
    /// Write the digests of an image, which are compared when children read it from a server.
    Seal(commands::seal::SealArgs),
    /// Copy what can still be read of a damaged image into a new one.
    Rescue(commands::rescue::RescueArgs),
    /// Give a disk another size.
    Resize(commands::resize::ResizeArgs),
    /// Read, write, discard and flush ranges of a disk, by qemu-io's commands.
    Io(commands::io::IoArgs),
    /// Serve disks to other machines by NBD, NVMe/TCP or iSCSI, and to virtual machines by
    /// vhost-user.
    Serve(Box<commands::serve::ServeArgs>),
    /// Control disks that are served or attached: list, statistics, drain, resize, snapshot, clone,
    /// merge, compact, move.
    ServeCtl(commands::serve_ctl::ServeCtlArgs),
    /// Attach a disk as a block device of this machine, or show it as a file.
    Attach(commands::attach::AttachArgs),
    /// Flush and detach an attached disk.
    Detach(commands::detach::DetachArgs),
    /// List the attached disks.
    Attached(commands::attached::AttachedArgs),
    /// Measure disks: runs, sweeps, comparisons, studies, reports.
    Lab(commands::lab::LabArgs),
    /// Measure with DiskSpd's switches, and print DiskSpd's report.
    Diskspd(commands::diskspd::DiskspdArgs),
    /// Print the completion script of a shell.
    Completions(commands::completions::CompletionsArgs),
    /// Print the manual page, or write those of all commands into a folder.
    Man(commands::man::ManArgs),
    /// Open a disk in a process that does nothing else, for the lab to measure.
    #[command(hide = true, name = commands::experiment::CHILD_COMMAND)]
    MeasuringChild(commands::lab::ChildArgs),
}

/// What each command uses of the options about disks. The others use none of them.
const USED: [(&[&str], UsedOptions); 41] = [
    (&["create"], UsedOptions::Parents),
    (&["info"], UsedOptions::Reading),
    (&["map"], UsedOptions::Reading),
    (&["partitions"], UsedOptions::Reading),
    (&["check"], UsedOptions::Reading),
    (&["convert"], UsedOptions::Reading),
    (&["compare"], UsedOptions::Reading),
    (&["diff"], UsedOptions::Writing),
    (&["snapshot"], UsedOptions::Changing),
    (&["snapshot", "list"], UsedOptions::Nothing),
    (&["snapshot", "revert"], UsedOptions::Changing),
    (&["snapshot", "delete"], UsedOptions::Changing),
    (&["track", "start"], UsedOptions::Changing),
    (&["track", "list"], UsedOptions::Reading),
    (&["track", "show"], UsedOptions::Reading),
    (&["track", "stop"], UsedOptions::Reading),
    (&["clone"], UsedOptions::Parents),
    (&["merge"], UsedOptions::Writing),
    (&["move"], UsedOptions::Reading),
    (&["serve-ctl", "move"], UsedOptions::Parents),
    (&["serve-ctl", "clone"], UsedOptions::Parents),
    (&["compact"], UsedOptions::Changing),
    (&["reconnect"], UsedOptions::Changing),
    (&["push"], UsedOptions::Changing),
    (&["pull"], UsedOptions::Reading),
    (&["rescue"], UsedOptions::Reading),
    (&["resize"], UsedOptions::Changing),
    (&["io"], UsedOptions::Writing),
    (&["serve"], UsedOptions::Writing),
    (&["attach"], UsedOptions::Writing),
    (&["diskspd"], UsedOptions::Writing),
    (&["lab", "run"], UsedOptions::Writing),
    (&["lab", "sweep"], UsedOptions::Writing),
    (&["lab", "compare"], UsedOptions::Writing),
    (&["lab", "selftest"], UsedOptions::Engine),
    (&["lab", "study", "containers"], UsedOptions::EngineAndCache),
    (&["lab", "study", "queue-depth"], UsedOptions::Writing),
    (&["lab", "study", "raw-and-file"], UsedOptions::Engine),
    (&["lab", "study", "zero-payload"], UsedOptions::Engine),
    (&["lab", "study", "access-paths"], UsedOptions::Engine),
    (&["lab", "study", "native-and-guest"], UsedOptions::Engine),
];

/// The commands of which `--format` names the format of what they make.
const MAKING: [&[&str]; 8] = [
    &["create"],
    &["convert"],
    &["pull"],
    &["clone"],
    &["move"],
    &["serve-ctl", "clone"],
    &["serve-ctl", "move"],
    &["rescue"],
];

/// The whole command line. Use it instead of `Cli::command()`.
pub fn command_line() -> clap::Command {
    let whole = WithOptions::augment_subcommands(clap::Command::new(""));
    let of = |command: clap::Command| whole.find_subcommand(command.get_name()).cloned().unwrap_or(command);
    let command = Cli::command().mut_subcommands(of);
    let options: Vec<Arg> = command.get_arguments().filter(|option| help::is_of_disks(option)).cloned().collect();
    USED.into_iter().fold(command, |command, (path, used)| {
        // An option that a command has of its own is not taken from above. So the hidden ones are
        // given too: the command above may show them.
        let own = options.iter().map(|option| {
            let id = option.get_id().as_str();
            let option = option.clone().hide(!used.shows(id));
            if id == "format" && MAKING.contains(&path) { format_to_make(option) } else { option }
        });
        with_options(command, path, &own.collect::<Vec<Arg>>())
    })
}

/// `--format` of a command that makes an image, among the command's own options.
fn format_to_make(option: Arg) -> Arg {
    option.help_heading(None::<&'static str>).help("Format of the new image, whatever its name says").long_help(
        "Format of the new image, whatever its name says. Without it the extension decides: .vhd and .avhd, .vhdx and \
         .avhdx, .qcow2, .vmdk, .vdi, and for raw .raw, .img, .bin and .dd",
    )
}

fn with_options(command: clap::Command, path: &[&str], options: &[Arg]) -> clap::Command {
    match path {
        [] => command.args(options),
        [name, rest @ ..] => command.mut_subcommand(name, |below| with_options(below, rest, options)),
    }
}

impl Cli {
    /// Reads a command line whose first word is the program's name.
    ///
    /// # Errors
    /// Clap's error for an invalid command line. Help and version are returned as errors too.
    pub fn read(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> clap::error::Result<Self> {
        let arguments: Vec<OsString> = arguments.into_iter().map(Into::into).collect();
        // Only help and errors show which options belong to a command, and telling that of each
        // command takes longer than everything else until the command begins.
        let plain = Cli::command().try_get_matches_from(&arguments);
        let told = plain.or_else(|error| match error.kind() {
            ErrorKind::DisplayVersion => Err(error),
            _ => command_line().try_get_matches_from(&arguments),
        });
        let matches = told.or_else(|error| match error.kind() {
            ErrorKind::DisplayHelp | ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
                help::arrange(command_line(), None).try_get_matches_from(&arguments)
            }
            _ => Err(error),
        })?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command_line()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn the_command_line_is_consistent() {
        command_line().debug_assert();
        for (path, _) in USED {
            let below = path.iter().try_fold(&command_line(), |command, name| command.find_subcommand(name)).is_some();
            assert!(below, "there is no command {path:?}");
        }
    }

    /// What `-h` of the command at `path` prints.
    fn help(path: &[&str]) -> String {
        let mut command = help::arrange(command_line(), Some(80));
        command.build();
        let below =
            path.iter().fold(&mut command, |command, name| command.find_subcommand_mut(name).expect("it exists"));
        below.render_help().to_string()
    }

    #[test]
    fn options_about_disks_are_shown_where_a_disk_is_opened_and_behind_the_own_ones() {
        for path in [&["info"][..], &["lab", "run"], &["serve"]] {
            let help = help(path);
            let at = |heading: &str| help.find(heading).unwrap_or_else(|| panic!("{path:?} has no {heading}:\n{help}"));
            assert!(at("\nOptions:") < at("\nEXAMPLES") && at("\nEXAMPLES") < at("\nDisk options:"));
            assert!(at("\nDisk options:") < at("\nGlobal options:"));
            assert!(help.contains("--map-drive") && help.contains("--json"), "{help}");
        }
        assert!(!help(&["info"]).contains("--detect-zeroes") && help(&["io"]).contains("--detect-zeroes"));
        assert!(help(&["create"]).contains("--allow-parent-dir") && !help(&["create"]).contains("--map-memory"));
        assert!(!help(&["info"]).contains("--ignore-parent-timestamp"));
        assert!(help(&["resize"]).contains("--ignore-parent-timestamp"));
        for path in [
            &[][..],
            &["lab"],
            &["snapshot", "list"],
            &["man"],
            &["detach"],
            &["attached"],
            &["lab", "report"],
            &["lab", "selftest"],
        ] {
            let help = help(path);
            assert!(!help.contains("--map-drive") && help.contains("--json"), "{path:?}:\n{help}");
        }
    }

    #[test]
    fn an_option_that_is_not_shown_is_taken_all_the_same() {
        for line in [["diskwright", "--cache", "direct", "attached"], ["diskwright", "attached", "--cache", "direct"]] {
            assert!(Cli::read(line).unwrap().global.cache.is_some(), "{line:?}");
        }
        let cli = Cli::read(["diskwright", "--cache", "page", "info", "x", "--cache", "direct"]).unwrap();
        assert_eq!(cli.global.cache.map(|cache| cache.mode()), Some(diskwright_store::CacheMode::Direct));
        let cli = Cli::read(["diskwright", "--io-engine", "pread", "info", "x"]).unwrap();
        assert_eq!(cli.global.engine(), diskwright_store::EngineKind::Sync, "the default behind it does not win");
    }

    #[test]
    fn every_command_shows_examples() {
        let mut all = vec![command_line()];
        while let Some(command) = all.pop() {
            let name = command.get_name().to_owned();
            if command.get_subcommands().next().is_none() && !command.is_hide_set() {
                let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(after.contains("EXAMPLES"), "{name} has no examples");
            }
            assert!(command.get_about().is_some(), "{name} does not say what it does");
            all.extend(command.get_subcommands().cloned());
        }
    }

    /// The command lines in a text: lines that begin with the program's name, perhaps behind a
    /// prompt; and spans in backticks, which may name a command without its arguments.
    fn command_lines(text: &str) -> Vec<(String, bool)> {
        let joined = text.replace("\\\n", " ");
        let lines = joined.lines().map(|line| line.trim().trim_start_matches("$ ").trim_start_matches("sudo "));
        let spans = joined.split("```").step_by(2).flat_map(|prose| prose.split('`').skip(1).step_by(2));
        let spans = spans.map(|span| (span.split_whitespace().collect::<Vec<_>>().join(" "), true));
        let all = lines.map(|line| (line.to_owned(), false)).chain(spans);
        all.filter(|(line, _)| line.starts_with("diskwright ") && !line.contains("COMMAND")).collect()
    }

    /// The words of the program's own commands in a line of a shell.
    fn words(line: &str) -> Vec<Vec<String>> {
        let mut commands = vec![Vec::new()];
        let mut word = String::new();
        let mut in_quotes = false;
        for letter in line.chars().chain([' ']) {
            match letter {
                '\'' => in_quotes = !in_quotes,
                ' ' if !in_quotes => {
                    let word = std::mem::take(&mut word);
                    match &word[..] {
                        "" => {}
                        "|" | "||" | "&&" | ">" => commands.push(Vec::new()),
                        // A remote command starts afresh.
                        "diskwright" => commands.push(vec![word]),
                        _ => commands.last_mut().unwrap().push(word),
                    }
                }
                letter => word.push(letter),
            }
        }
        commands.retain(|words| words.first().is_some_and(|word| word == "diskwright"));
        commands
    }

    #[test]
    fn every_command_line_in_the_documents_and_in_the_help_can_be_parsed() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let documents =
            ["README.md", "docs/tasks.md", "docs/measurements.md", "docs/reliability.md", "docs/schemas/README.md"];
        let read = |name: &&str| (name.to_string(), std::fs::read_to_string(root.join(name)).unwrap());
        let mut texts: Vec<(String, String)> = documents.iter().map(read).collect();
        let mut all = vec![command_line()];
        while let Some(command) = all.pop() {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            let examples = help.split_once("EXAMPLES").map_or("", |(_, examples)| examples);
            texts.push((command.get_name().to_owned(), examples.to_owned()));
            all.extend(command.get_subcommands().cloned());
        }
        let mut parsed = 0;
        let mut wrong = Vec::new();
        for (name, text) in texts {
            for (line, is_span) in command_lines(&text) {
                for words in words(&line) {
                    let parses = match Cli::read(&words) {
                        Ok(_) => true,
                        Err(error) => match error.kind() {
                            ErrorKind::DisplayHelp => true,
                            ErrorKind::MissingRequiredArgument | ErrorKind::MissingSubcommand => is_span,
                            _ => false,
                        },
                    };
                    if !parses {
                        wrong.push(format!("{name}: {line}"));
                    }
                    parsed += 1;
                }
            }
        }
        assert!(wrong.is_empty(), "{wrong:#?}");
        assert!(parsed > 100, "only {parsed} command lines were found");
    }

    #[test]
    fn help_fits_a_terminal_of_80_columns() {
        let mut root = help::arrange(command_line(), Some(80));
        root.build();
        let mut all = vec![root];
        let mut wide = Vec::new();
        while let Some(mut command) = all.pop() {
            all.extend(command.get_subcommands().cloned());
            let help = command.render_long_help().to_string();
            let short = command.render_help().to_string();
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            // An example is typed as it stands, so it breaks with a backslash. A row of a table
            // that is broken runs into the next column.
            let rows = after.lines().filter(|line| line.starts_with("  "));
            let lines = help.lines().chain(short.lines()).chain(rows).filter(|line| line.chars().count() > 80);
            wide.extend(lines.map(|line| format!("{}: {line}", command.get_name())));
        }
        assert!(wide.is_empty(), "{wide:#?}");
    }

    #[test]
    fn global_options_stand_anywhere() {
        for line in [["diskwright", "--json", "info", "x"], ["diskwright", "info", "x", "--json"]] {
            assert!(Cli::read(line).unwrap().global.json);
        }
        let cli = Cli::read(["diskwright", "info", "x", "--allow-parent-dir", "a", "--allow-parent-dir", "b"]).unwrap();
        assert_eq!(cli.global.parents().allowed_dirs, [PathBuf::from("a"), PathBuf::from("b")]);
    }
}
