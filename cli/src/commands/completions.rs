//! `diskwright completions SHELL`: the script that completes its words.

use crate::{args::Cli, context::Context, exit};
use clap::{Args, CommandFactory};
use clap_complete::Shell;
use std::io::Write;

/// Arguments of `completions`.
#[derive(Debug, Args)]
#[command(after_help = "\
EXAMPLES
  diskwright completions bash > ~/.local/share/bash-completion/completions/diskwright
  diskwright completions zsh > ~/.zfunc/_diskwright
  diskwright completions fish > ~/.config/fish/completions/diskwright.fish")]
pub struct CompletionsArgs {
    /// For which shell.
    #[arg(value_enum)]
    shell: Shell,
}

/// Prints the script.
pub fn run(context: &mut Context, args: &CompletionsArgs) -> exit::Outcome {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "diskwright", &mut script);
    context.out.write_all(&script)?;
    Ok(exit::OK)
}
