//! What the libraries' options are called on the command line.
//!
//! ```text
//!   error or warning of a library                      standard error, --json
//!   "… with `ParentPolicy::allowed_dirs` = /images"  ─▶  "… with --allow-parent-dir /images"
//! ```
//!
//! The libraries name their own options in texts (`store/src/option_names.rs`), since programs in
//! Rust and Python show the same texts. [`SWITCHES`] is the one table of what this program calls
//! them. `exit.rs` passes every failure through [`with_switches`], `context.rs` every sentence on
//! standard error, and commands the sentences that they print as results or put into JSON. Applying
//! it twice changes nothing.
//!
//! The tests read the sources of the libraries: no text names a switch, every option that a text
//! names has a row, and every row has a use and names a switch that the command has.

use diskwright_disk::{
    ApplyOptions, ConvertOptions, CreateRequest, MoveOptions, OpenOptions, ParentPolicy, ReconnectOptions,
    RepairOptions, RescueOptions, SnapshotOptions,
};
use diskwright_lab::{
    comparison::{FailIf, JudgeOptions},
    guest::GuestChoice,
    prepare::PrepareOptions,
    study::{
        StudyOptions,
        access_paths::{AccessPathsOptions, AgentsChoice},
        containers::ContainersOptions,
        queue_depth::QueueDepthOptions,
        raw_and_file::RawAndFileOptions,
        tiers::TiersOptions,
    },
    sweep::SweepOptions,
};
use diskwright_serve::{
    attach::{AttachOptions, DetachOptions},
    net::ServerOptions,
};
use diskwright_space::{PoolCreateOptions, PoolOptions};
use diskwright_store::rename_options;
use std::{fmt::Display, sync::OnceLock};

/// One option.
struct Switch {
    /// As the libraries write it.
    option: &'static str,
    /// As it is typed.
    switch: &'static str,
    /// Commands that have another switch for it.
    elsewhere: &'static [(&'static str, &'static str)],
}

/// Makes the table. A row whose field does not exist does not compile.
macro_rules! switches {
    ($($owner:ident::$field:ident => $switch:literal $(, $command:literal => $other:literal)*;)*) => {
        const SWITCHES: &[Switch] = &[$(Switch {
            option: concat!(stringify!($owner), "::", stringify!($field)),
            switch: $switch,
            elsewhere: &[$(($command, $other)),*],
        }),*];
        $(const _: fn(&$owner) = |options| { let _ = &options.$field; };)*
    };
}

switches! {
    OpenOptions::force_share => "--force-share";
    OpenOptions::allow_parent_write => "--allow-parent-write";
    // `--format` of convert is the format of the copy.
    OpenOptions::format => "--format", "convert" => "--source-format", "move" => "--source-format", "rescue" => "--source-format", "compare" => "--format or --second-format", "diff" => "--format or --second-format";
    OpenOptions::ova_disk => "--disk";
    OpenOptions::snapshot => "--snapshot", "compare" => "--snapshot or --second-snapshot", "diff" => "--snapshot or --second-snapshot";
    ParentPolicy::allow_any => "--allow-any-parent";
    ParentPolicy::allow_devices => "--allow-devices";
    ParentPolicy::allowed_dirs => "--allow-parent-dir";
    ParentPolicy::drives => "--map-drive";
    ParentPolicy::ignore_timestamp => "--ignore-parent-timestamp";
    SnapshotOptions::discard => "--discard";
    MoveOptions::keep_old => "--keep-old";
    CreateRequest::device => "--device";
    CreateRequest::partitions => "--partitions";
    CreateRequest::block_bytes => "--block-size";
    CreateRequest::disk_type => "--type";
    CreateRequest::format => "--format";
    CreateRequest::logical_sector_bytes => "--sector-size";
    CreateRequest::parent => "--parent";
    CreateRequest::preallocate => "--preallocate";
    CreateRequest::size_bytes => "--size";
    CreateRequest::subformat => "--subformat";
    ConvertOptions::azure => "--azure";
    ConvertOptions::compress_level => "--compress-level";
    ConvertOptions::identity => "--identity";
    ConvertOptions::resume => "--resume";
    ConvertOptions::size => "--size";
    ConvertOptions::skip_damaged => "--skip-damaged";
    PrepareOptions::create_bytes => "--create-size", "diskspd" => "-c";
    PrepareOptions::destroy_data => "--destroy-data";
    ApplyOptions::ignore_id_mismatch => "--ignore-id-mismatch";
    ReconnectOptions::ignore_id_mismatch => "--ignore-id-mismatch";
    ReconnectOptions::parent => "--parent";
    ReconnectOptions::search_dirs => "--search";
    RepairOptions::undo_file => "--undo-file";
    RescueOptions::block_bytes => "--block-size";
    RescueOptions::no_parent => "--no-parent";
    RescueOptions::parent => "--parent";
    RescueOptions::size_bytes => "--size";
    RescueOptions::trust_absent => "--trust-table";
    SweepOptions::axes => "--vary";
    SweepOptions::total_depth => "--total-depth";
    JudgeOptions::metrics => "--figures";
    FailIf::certainty => "--fail-when";
    StudyOptions::cell => "--cell";
    StudyOptions::dir => "--dir";
    StudyOptions::keep => "--keep";
    StudyOptions::output => "--output";
    ContainersOptions::size_bytes => "--size";
    AccessPathsOptions::agents => "--agent";
    AccessPathsOptions::guest => "--no-guest";
    AgentsChoice::server => "--agent-server";
    GuestChoice::kernel => "--kernel";
    QueueDepthOptions::array => "--copies and --devices";
    QueueDepthOptions::target_depth => "--target-depth";
    QueueDepthOptions::targets => "--target";
    QueueDepthOptions::threads => "--threads";
    RawAndFileOptions::device => "--device";
    RawAndFileOptions::size_bytes => "--size";
    TiersOptions::copies => "--copies";
    TiersOptions::fast_bytes => "--fast-size";
    TiersOptions::theta => "--zipf";
    AttachOptions::by => "--by";
    AttachOptions::ephemeral => "--ephemeral";
    AttachOptions::fuse_dir => "--fuse PATH";
    AttachOptions::mount => "--mount";
    AttachOptions::partition => "--partition";
    DetachOptions::force => "--force";
    DetachOptions::unmount => "--unmount";
    PoolCreateOptions::force => "--force";
    PoolOptions::force_degraded => "--force-degraded";
    ServerOptions::insecure_writes => "--insecure-writes";
    ServerOptions::secrets => "--secrets";
    ServerOptions::tls => "--tls-certificates";
}

/// The command that this process runs.
static COMMAND: OnceLock<&'static str> = OnceLock::new();

/// Sets the command that this process runs. Call it once, before the first message.
pub fn set_command(name: &'static str) {
    let _ = COMMAND.set(name);
}

/// Whether this command reads a disk that another program has open for writing, with --force-share.
pub fn takes_force_share() -> bool {
    let name = COMMAND.get().copied().unwrap_or_default();
    ["info", "map", "check", "partitions", "convert", "compare", "diff"].contains(&name)
}

/// A sentence of a library, with the switches of this command for the options in it.
pub fn with_switches(sentence: impl Display) -> String {
    with_switches_of(COMMAND.get().copied().unwrap_or_default(), &sentence.to_string())
}

/// The same for several sentences.
pub fn all_with_switches<T: Display>(sentences: &[T]) -> Vec<String> {
    sentences.iter().map(with_switches).collect()
}

fn with_switches_of(command: &str, sentence: &str) -> String {
    rename_options(sentence, |option, has_value| {
        let row = SWITCHES.iter().find(|row| row.option == option)?;
        let elsewhere = row.elsewhere.iter().find(|(name, _)| *name == command);
        let switch = elsewhere.map_or(row.switch, |(_, switch)| switch);
        Some(if has_value { format!("{switch} ") } else { switch.to_owned() })
    })
}

#[cfg(test)]
#[path = "switches_tests.rs"]
mod tests;
