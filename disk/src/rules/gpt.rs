//! The rule about a GPT that all places share.

use super::{facts::ChainFacts, rule::Verdict};
use diskwright_volume::TableKind;

/// Whether the second copy of a GPT lies at the end of the disk. Some guests move it there, others
/// refuse the table.
pub(super) fn end(facts: &ChainFacts) -> Verdict {
    let Some(table) = &facts.table else { return Verdict::not_applicable("the disk cannot be read") };
    if table.kind != TableKind::Gpt {
        return Verdict::not_applicable("the disk has no GPT");
    }
    match &table.fits {
        Ok(true) => Verdict::holds("at the end"),
        Ok(false) => Verdict::broken(
            "missing, or not at the end",
            "`resize` the disk to the size that it has: that moves the second copy",
        ),
        Err(why) => Verdict::broken(why, "repair the table with gdisk"),
    }
}
