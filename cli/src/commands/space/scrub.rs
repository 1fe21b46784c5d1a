//! `diskwright space scrub`: what was checked, mended and lost.

use super::shared::bytes;
use crate::{
    context::Context,
    exit::{self, Outcome},
    json::Document,
    printable::printable,
    sizes::Human,
};
use diskwright_space::Spaces;
use schemars::JsonSchema;
use serde::Serialize;
use std::io::Write;

/// What `space scrub` prints with `--json`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// Name of the pool.
    pool: String,
    /// Bytes that were compared with their checksums, counted once and not for each copy.
    checked: u64,
    /// Bytes that had no checksums before, and have them now.
    sealed: u64,
    /// Bytes that have no checksums, since they are being written or a copy is missing.
    unsealed: u64,
    /// Bytes of copies and checksums that were wrong, and were written anew from another copy.
    mended: u64,
    /// Bytes of copies on members that came back, which were brought up to date.
    resynced: u64,
    /// What no member has with its checksum.
    lost: Vec<Lost>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

/// A range that is lost.
#[derive(Debug, Serialize, JsonSchema)]
struct Lost {
    /// Name of the disk in the pool.
    disk: String,
    /// Offset in the disk, in bytes.
    offset: u64,
    /// Length in bytes.
    length: u64,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.space-scrub/1";
}

pub fn scrub(context: &mut Context, name: &str) -> Outcome {
    let pool = Spaces::of_user().pool(name, true)?;
    let mut display = context.progress("scrubbing");
    let found = pool.scrub(&mut |moved| display.update(bytes(moved.done, moved), bytes(moved.total, moved)))?;
    drop(display);
    let lost = found.damage.into_iter();
    let lost = lost.map(|one| Lost { disk: one.disk, offset: one.offset_bytes, length: one.len_bytes }).collect();
    let warnings = pool.warnings().iter().map(|warning| exit::for_users(warning)).collect();
    let report = Report {
        pool: name.to_owned(),
        checked: found.checked_bytes,
        sealed: found.sealed_bytes,
        unsealed: found.unsealed_bytes,
        mended: found.mended_bytes,
        resynced: found.resynced_bytes,
        lost,
        warnings,
    };
    if context.global.json {
        context.print_json(&report)?;
    } else {
        report.write(context)?;
    }
    Ok(if report.lost.is_empty() { exit::OK } else { exit::DATA_LOST })
}

impl Report {
    fn write(&self, context: &mut Context) -> Outcome<()> {
        self.warnings.iter().for_each(|warning| context.warn_always(warning));
        if context.global.quiet && self.lost.is_empty() {
            return Ok(());
        }
        let result = match (self.lost.is_empty(), self.mended) {
            (true, 0) => "sound".into(),
            (true, mended) => format!("{} were wrong and were mended", Human(mended)),
            (false, _) => context.style.paint("31", "data are lost"),
        };
        let (checked, sealed) = (Human(self.checked), Human(self.sealed));
        write!(context.out, "{}: {result}; {checked} checked", printable(&self.pool))?;
        if self.sealed > 0 {
            write!(context.out, ", {sealed} of them for the first time")?;
        }
        if self.resynced > 0 {
            write!(context.out, "; {} of copies were brought up to date", Human(self.resynced))?;
        }
        if self.unsealed > 0 {
            write!(context.out, "; {} are in use and have no checksums yet", Human(self.unsealed))?;
        }
        writeln!(context.out)?;
        for one in &self.lost {
            writeln!(context.out, "  {}: {} at {} are lost", printable(&one.disk), Human(one.length), one.offset)?;
        }
        context.out.flush()?;
        Ok(())
    }
}
