//! `diskwright completions SHELL`: the completion script of a shell.

use crate::{context::Context, exit};
use clap::{Args, Command};
use clap_complete::Shell;
use std::io::Write;

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
EXAMPLES
  diskwright completions bash > \\
      ~/.local/share/bash-completion/completions/diskwright
  diskwright completions zsh > ~/.zfunc/_diskwright
  diskwright completions fish > ~/.config/fish/completions/diskwright.fish")]
pub struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script for `command`, the whole program.
pub fn run(context: &mut Context, args: &CompletionsArgs, mut command: Command) -> exit::Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut command, "diskwright", &mut script);
    context.out.write_all(&script)?;
    Ok(exit::OK)
}
