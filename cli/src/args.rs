//! The command line: the commands, and the options that all of them share.
//!
//! Each command keeps its own arguments in `commands/`; here are only the list of them and the
//! global options, which may stand before or behind the command.

use crate::{commands, options::GlobalOptions};
use clap::{Parser, Subcommand};

/// Make, look at, check, convert and measure virtual disks: raw, VHD and VHDX, fixed, dynamic and
/// differencing.
#[derive(Debug, Parser)]
#[command(name = "diskwright", version, max_term_width = 120, after_help = AFTER_HELP)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// For every command.
    #[command(flatten)]
    pub global: GlobalOptions,
}

const AFTER_HELP: &str = "\
SIZES are bytes, or numbers with k, M, G or T (powers of 1024): 512, 64k, 40G.

A FILE that is read, or written and not made, may be an NBD URI: nbd://HOST[:PORT]/EXPORT or nbd+unix:///EXPORT?socket=PATH; nbds:// and \
nbds+unix:// use TLS and nothing else. Behind \"?\", joined by \"&\", may stand timeout=SECONDS (for a server that answers nothing; 0 is never), \
reconnect or reconnect=SECONDS, connections=N, and for TLS tls-certificates=DIR (ca-cert.pem, client-cert.pem, client-key.pem), \
tls-hostname=NAME, tls-verify-peer=0.

EXIT CODES are 0 done, 1 failed, 2 used wrongly, 130 stopped by a signal; `compare` and `check` have their own, \
as in qemu-img: see their help. Errors go to standard error as one sentence, with --json too.

EXAMPLES
  diskwright create disk.vhdx --size 40G
  diskwright info disk.vhdx --chain
  diskwright convert disk.vhdx disk.raw --verify
  diskwright lab study containers --quick";

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Make a new disk.
    Create(commands::create::CreateArgs),
    /// Show format, sizes, identifiers, parent and log state of a disk, or its whole chain.
    Info(commands::info::InfoArgs),
    /// Show which layer holds which range, or draw the whole disk on one screen.
    Map(commands::map::MapArgs),
    /// Look for damage and lost space, without ever writing.
    Check(commands::check::CheckArgs),
    /// Copy a disk into a new image of any format and type.
    Convert(commands::convert::ConvertArgs),
    /// Compare the contents of two disks.
    Compare(commands::compare::CompareArgs),
    /// Read, write, discard and flush ranges of a disk by hand.
    Io(commands::io::IoArgs),
    /// Serve disks to other programs and machines by NBD.
    Serve(commands::serve::ServeArgs),
    /// Make a disk a block device of this machine, or a file.
    Attach(commands::attach::AttachArgs),
    /// Flush an attached disk and let go of it.
    Detach(commands::detach::DetachArgs),
    /// List what is attached.
    Attached(commands::attached::AttachedArgs),
    /// Measure what disks cost.
    Lab(commands::lab::LabArgs),
    /// Measure with DiskSpd's switches, and print DiskSpd's report.
    Diskspd(commands::diskspd::DiskspdArgs),
    /// Print the script that completes diskwright's words in a shell.
    Completions(commands::completions::CompletionsArgs),
    /// Print the manual page, or write those of all commands into a folder.
    Man(commands::man::ManArgs),
    /// Open a disk in a process that does nothing else, for the lab to measure.
    #[command(hide = true, name = commands::experiment::CHILD_COMMAND)]
    MeasuringChild(commands::lab::ChildArgs),
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::path::PathBuf;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_shows_examples() {
        let mut all = vec![Cli::command()];
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

    #[test]
    fn global_options_stand_anywhere() {
        for line in [["diskwright", "--json", "info", "x"], ["diskwright", "info", "x", "--json"]] {
            assert!(Cli::try_parse_from(line).unwrap().global.json);
        }
        let cli =
            Cli::try_parse_from(["diskwright", "info", "x", "--allow-parent-dir", "a", "--allow-parent-dir", "b"])
                .unwrap();
        assert_eq!(cli.global.parents().allowed_dirs, [PathBuf::from("a"), PathBuf::from("b")]);
    }
}
