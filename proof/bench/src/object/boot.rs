//! A boot from a golden image in S3, through a local child: what is fetched of the image, cold and
//! after another machine's boot was recorded.
//!
//! `boot.txt` has the reads of a guest that booted Debian 12 with systemd to the multi-user target
//! from a disk of 2 GiB: offset and length, in bytes, in their order. They are made again through a
//! child by a program with an empty cache, as they would be by a hypervisor.

use super::{
    children::{command, must_end, write_golden},
    gateway,
    gateway::{BUCKET, Gateway, MIB},
};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::Progress,
};
use diskwright_stats::numbers::bytes;
use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::Path,
};

const READS: &str = include_str!("boot.txt");
const GOLDEN: &str = "debian.vhdx";
const CHILD: &str = "vm.vhdx";
const RECORDED: &str = "boot.json";

/// The reads: offset and length in bytes.
fn reads() -> Vec<(u64, u64)> {
    let pair = |line: &str| {
        let (offset_bytes, len_bytes) = line.split_once(' ')?;
        Some((offset_bytes.parse().ok()?, len_bytes.parse().ok()?))
    };
    READS.lines().filter_map(pair).collect()
}

/// Bytes that were fetched since this was last asked. Each opening asks for the first 16 bytes.
fn fetched_bytes(gateway: &Gateway) -> f64 {
    gateway.take_asked().into_iter().map(|range| range.end - range.start).sum::<u64>() as f64
}

/// Boots from a golden image, cold and with the ranges that another machine has recorded.
pub(crate) fn boot(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let gateway = match gateway(context, MIB)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("a boot from S3", why)),
    };
    let reads = reads();
    let touched: BTreeSet<u64> = reads.iter().flat_map(|(at, len)| at / MIB..(at + len).div_ceil(MIB)).collect();
    write_golden(&gateway, GOLDEN, touched.iter().map(|block| block * MIB))?;
    let folder = context.scratch.folder("boot")?;
    let run = |words: &[&str]| -> Result<()> {
        let child = command(&gateway, &folder, words)?.spawn();
        must_end(child.map_err(LabError::file("start a program in", &folder))?, &folder)
    };
    let url = format!("s3://{BUCKET}/{GOLDEN}");
    run(&["create", CHILD, "--parent", &url])?;
    let commands: Vec<String> = reads.iter().map(|(at, len)| format!("read {at} {len}")).collect();
    let bucket = format!("s3://{BUCKET}");
    let mut booting = vec!["io", CHILD, "-r", "--allow-parent-dir", &bucket];
    booting.extend(commands.iter().flat_map(|command| ["-c", command]));
    let read_bytes = reads.iter().map(|(_, len)| len).sum::<u64>() as f64;
    let (mut cold, mut recorded) = (Vec::new(), Vec::new());
    let rounds = context.rounds(context.pick(1, 3));
    in_turns("boots", &["cold, then recorded"], (rounds, 0), progress, &mut |_, _| {
        run(&["cache", "drop", "--everything"])?;
        gateway.take_asked();
        run(&booting)?;
        cold.push(fetched_bytes(&gateway) / read_bytes);
        let file = folder.join(RECORDED);
        let listed = File::create(&file).map_err(LabError::file("create", &file))?;
        let listing = command(&gateway, &folder, &["cache", "list", &url, "--json"])?.stdout(listed).spawn();
        must_end(listing.map_err(LabError::file("start a program in", &folder))?, &folder)?;
        // Another machine.
        run(&["cache", "drop", "--everything"])?;
        gateway.take_asked();
        run(&["cache", "prefetch", &url, "--ranges", RECORDED])?;
        run(&booting)?;
        recorded.push(fetched_bytes(&gateway) / read_bytes);
        Ok(())
    })?;
    fs::remove_file(folder.join(CHILD)).map_err(LabError::file("remove", Path::new(CHILD)))?;
    let cold = cold.iter().map(|ratio| format!("{ratio:.2}")).collect::<Vec<_>>().join(", ");
    let checks = vec![Check::absolute(
        "bytes that are fetched for each byte that a boot reads, another one's ranges prefetched",
        "",
        &recorded,
        Bar::AtMost(1.3),
    )];
    let notes = vec![format!(
        "{} reads of {} in {} different MiB; an empty cache at the start of each boot; without the recorded ranges {cold}",
        reads.len(),
        bytes(read_bytes as u64),
        touched.len()
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reads_of_a_boot_are_whole_sectors_of_the_disk() {
        let reads = reads();
        assert_eq!(reads.len(), READS.lines().count());
        assert!(reads.iter().all(|(at, len)| at % 512 == 0 && *len > 0 && len % 512 == 0 && at + len <= 2 << 30));
    }
}
