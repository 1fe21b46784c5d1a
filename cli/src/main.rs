//! The program `diskwright`. Everything is in the library beside it.

#![forbid(unsafe_code)]

use std::{env, process::ExitCode};

fn main() -> ExitCode {
    diskwright_cli::run(env::args_os())
}
