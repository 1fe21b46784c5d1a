//! A second push of a disk of which a hundredth has changed: what is read and what is sent.

use super::{failed, gateway, gateway::MIB};
use crate::turns::in_turns;
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::Progress,
    rounds::Window,
};
use diskwright_load::data;
use diskwright_object::repository::{CHUNK_BYTES, Changed, PushOptions, S3Remote, push};
use diskwright_stats::numbers::bytes;
use diskwright_store::{Blocking, EngineKind};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{collections::BTreeSet, ops::Range, path::Path, sync::Arc};

const SEED: u64 = 29;
/// A hundredth of the disk is changed in so many places, as by files that were written.
const PLACES: u64 = 4;

/// Fills a range with bytes that cannot be compressed.
fn write(disk: &Disk, range: Range<u64>, seed: u64) -> std::io::Result<()> {
    let mut queue = Blocking::open(disk, EngineKind::Auto)?;
    let mut buf = vec![0; MIB as usize];
    for at in range.clone().step_by(MIB as usize) {
        let piece = &mut buf[..(range.end - at).min(MIB) as usize];
        data::fill(seed, at, piece);
        queue.write(at, piece, false)?;
    }
    queue.flush()
}

/// Pushes a disk, changes a hundredth of it, and pushes it again.
pub(crate) fn second(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(1024, 4096) * MIB;
    context.scratch.need("a disk and its copy in a bucket", 3 * size_bytes)?;
    let gateway = match gateway(context, MIB)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("a second push", why)),
    };
    let settings = gateway.settings();
    let path = context.scratch.folder("push")?.join("disk.vhdx");
    let request = CreateRequest { size_bytes: Some(size_bytes), ..CreateRequest::default() };
    create(&path, &request)?;
    let options = OpenOptions { writable: true, ..OpenOptions::default() };
    let disk: Arc<Disk> = Disk::open(&path, &options)?;
    let wrong = || LabError::file("write", &path);
    write(&disk, 0..size_bytes, SEED).map_err(wrong())?;
    let name = |number: usize| format!("s3://golden/pushed/state-{number}");
    let pushed = |number: usize, base: Option<(String, Changed)>| {
        let (remote, name) = S3Remote::of_disk(Path::new(&name(number)), &settings).map_err(failed)?;
        let options = PushOptions { source: "disk.vhdx".into(), base, ..PushOptions::default() };
        let found = push(&remote, &name, &*disk, &options, &mut |_, _| true).map_err(failed)?;
        found.ok_or_else(|| LabError::file("push", &path)(std::io::ErrorKind::Interrupted.into()))
    };
    disk.start_tracking("pushed-0")?;
    let first = pushed(0, None)?;
    let rounds = context.rounds(context.pick(1, 5));
    let mut dice = Xoshiro256PlusPlus::seed_from_u64(SEED);
    let (mut sent, mut read, mut number) = (Vec::new(), Vec::new(), 0);
    in_turns("second pushes", &["1 % changed"], (rounds, SEED), progress, &mut |Window { .. }, _| {
        let len_bytes = size_bytes / 100 / PLACES / 4096 * 4096;
        let mut touched = BTreeSet::new();
        for _ in 0..PLACES {
            let at = dice.next_u64() % ((size_bytes - len_bytes) / 4096) * 4096;
            write(&disk, at..at + len_bytes, SEED + dice.next_u64() % 1000 + 1).map_err(wrong())?;
            touched.extend(at / CHUNK_BYTES..(at + len_bytes).div_ceil(CHUNK_BYTES));
        }
        let changed = disk.changed_since(&format!("pushed-{number}"))?.ranges().collect();
        let base = (format!("state-{number}"), Changed::Ranges(changed));
        number += 1;
        disk.start_tracking(&format!("pushed-{number}"))?;
        gateway.take_sent_bytes();
        let found = pushed(number, Some(base))?;
        sent.push(gateway.take_sent_bytes() as f64 / size_bytes as f64);
        read.push(found.read_bytes as f64 / (touched.len() as u64 * CHUNK_BYTES) as f64);
        Ok(())
    })?;
    disk.close()?;
    let checks = vec![
        Check::absolute("bytes that are sent, of all bytes of the disk", "", &sent, Bar::AtMost(0.02)),
        Check::absolute("bytes that are read, of the chunks that have changed", "", &read, Bar::AtMost(1.0)),
    ];
    let notes = vec![format!(
        "a VHDX of {} that cannot be compressed, {PLACES} places of it written again, a hundredth in all; bytes as the proxy counts them, with all requests; chunks of 4 MiB: the same hundredth in single pieces of 64 KiB would change nearly half of the chunks; the first push sent {}",
        bytes(size_bytes),
        bytes(first.sent_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}
