//! A hundred children of one image in S3: what is fetched of it.

use super::{
    gateway,
    gateway::{BUCKET, Gateway, MIB},
};
use crate::{ours, turns::in_turns};
use diskwright_disk::{CreateRequest, Disk, OpenOptions, create};
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::Progress,
};
use diskwright_load::data;
use diskwright_object::BLOCK_BYTES;
use diskwright_stats::numbers::bytes;
use diskwright_store::{Blocking, EngineKind};
use std::{
    collections::BTreeMap,
    path::Path,
    process::{Child, Command, Stdio},
};

const CHILDREN: usize = 100;
/// Programs that run at the same time.
const AT_ONCE: usize = 8;
const GOLDEN: &str = "golden.vhdx";

/// A golden image in the bucket, with data in these MiB.
pub(super) fn write_golden(gateway: &Gateway, name: &str, places: impl Iterator<Item = u64>) -> Result<()> {
    let path = gateway.bucket().join(name);
    create(&path, &CreateRequest { size_bytes: Some(8 << 30), ..CreateRequest::default() })?;
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() })?;
    let wrong = || LabError::file("write", &path);
    let mut queue = Blocking::open(&*disk, EngineKind::Auto).map_err(wrong())?;
    let mut buf = vec![0; MIB as usize];
    for at in places {
        data::fill(11, at, &mut buf);
        queue.write(at, &buf, false).map_err(wrong())?;
    }
    queue.flush().map_err(wrong())?;
    drop(queue);
    Ok(disk.close()?)
}

/// One of our commands, with the credentials of the server.
pub(super) fn command(gateway: &Gateway, folder: &Path, words: &[&str]) -> Result<Command> {
    let mut command = ours::command()?;
    command.args(words).current_dir(folder).envs(gateway.variables()).env("DISKWRIGHT_CACHE", gateway.cache());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    Ok(command)
}

pub(super) fn must_end(mut child: Child, folder: &Path) -> Result<()> {
    let ended = child.wait().map_err(LabError::file("wait for a program in", folder))?;
    match ended.success() {
        true => Ok(()),
        false => Err(LabError::file("read a child in", folder)(std::io::Error::other(ended.to_string()))),
    }
}

/// A hundred programs, each with a child of its own, read the same parts of one image.
pub(crate) fn hundred(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let data_bytes = context.pick(64, 256) * MIB;
    let gateway = match gateway(context, MIB)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("a hundred children", why)),
    };
    write_golden(&gateway, GOLDEN, (0..data_bytes).step_by(MIB as usize))?;
    let folder = context.scratch.folder("children")?;
    let parent = format!("s3://{BUCKET}/{GOLDEN}");
    let run = |words: &[&str]| -> Result<Child> {
        command(&gateway, &folder, words)?.spawn().map_err(LabError::file("start a program in", &folder))
    };
    for number in 0..CHILDREN {
        must_end(run(&["create", &format!("c{number}.vhdx"), "--parent", &parent])?, &folder)?;
    }
    must_end(run(&["cache", "drop", "--everything"])?, &folder)?;
    gateway.take_asked();
    let read = format!("read 0 {data_bytes}");
    in_turns("children", &["a hundred"], (1, 0), progress, &mut |_, _| {
        let mut running: Vec<Child> = Vec::new();
        for number in 0..CHILDREN {
            if running.len() == AT_ONCE {
                must_end(running.remove(0), &folder)?;
            }
            let child = format!("c{number}.vhdx");
            running.push(run(&["io", &child, "-r", "--allow-parent-dir", &format!("s3://{BUCKET}"), "-c", &read])?);
        }
        running.into_iter().try_for_each(|child| must_end(child, &folder))
    })?;
    let mut fetched: BTreeMap<u64, u64> = BTreeMap::new();
    // Each open asks for the first bytes.
    for range in gateway.take_asked().into_iter().filter(|range| range.end - range.start > 16) {
        (range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES))
            .for_each(|block| *fetched.entry(block).or_default() += 1);
    }
    let (blocks, all) = (fetched.len() as f64, fetched.values().sum::<u64>() as f64);
    let checks =
        vec![Check::absolute("fetches of each MiB of the image", "", &[all / blocks.max(1.0)], Bar::AtMost(1.0))];
    let notes = vec![format!(
        "{CHILDREN} programs, {AT_ONCE} at a time, each with a child of its own, read the same {} through it; an empty cache at the start; {blocks} MiB of the image were fetched",
        bytes(data_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}
