//! The log of a server: `tracing` on standard error, as text for people, or as JSON for collectors,
//! one document a line.

use clap::ValueEnum;
use std::io;
use tracing::level_filters::LevelFilter;

/// Format of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text, one line an event.
    Text,
    /// One JSON document a line.
    Json,
}

/// Lowest level that is logged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Level {
    /// Failures of the server itself.
    Error,
    /// Also requests that failed, and clients that broke the protocol.
    Warn,
    /// Also clients that connect and disconnect.
    Info,
    /// Also each refused request, and clients that only listed exports.
    Debug,
}

/// Starts the log. A second start in one process changes nothing.
pub fn start(format: Format, level: Option<Level>, quiet: bool) {
    let level = match level {
        Some(Level::Error) => LevelFilter::ERROR,
        Some(Level::Warn) => LevelFilter::WARN,
        Some(Level::Debug) => LevelFilter::DEBUG,
        Some(Level::Info) => LevelFilter::INFO,
        None if quiet => LevelFilter::WARN,
        None => LevelFilter::INFO,
    };
    let builder = tracing_subscriber::fmt().with_writer(io::stderr).with_max_level(level).with_target(false);
    let _ = match format {
        Format::Json => builder.json().flatten_event(true).try_init(),
        Format::Text => builder.with_ansi(false).try_init(),
    };
}
