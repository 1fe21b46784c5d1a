//! By what an image is recognised as the one whose changes were tracked.
//!
//! After a clean close nothing of the file may differ: the length, the modification time, the
//! inode, a VHDX's DataWriteGuid, the identities of its parents (of VHDs with the times of their
//! last changes). So the write of any other program shows, and so does a copy and a revert.
//!
//! After a crash the length and the time are not known. A VHDX still has the DataWriteGuid of the
//! session that crashed, and MS-VHDX obliges every program to replace it before it changes what a
//! guest sees. The session chose it, and the file of the tracks named it before the image did.
//! (Not the FileWriteGuid: replaying the log changes that one too, and the contents stay.) The same
//! holds for the CID of a VMDK. A VHD, a raw disk and a qcow2 have nothing that shows whether
//! another program has written after the crash, and QEMU writes a VDI without changing its
//! identity. So everything in these counts as changed then.
//!
//! Not part of it: the device number, which may change when the machine starts, and the time of
//! change of the inode, which changes with each rename and each change of permissions.

use crate::{
    Result,
    engine::chain::{Chain, Layer},
    error::from_io,
};
use diskwright_format::tracks::{Header, Identity, crc_of};
use diskwright_image::{Format, Identities, LinkageId};
use diskwright_store::Files;
use std::{
    io,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use uuid::Uuid;

/// Longer than the steps in which Linux counts modification times.
const CLOCK_STEP: Duration = Duration::from_millis(12);
/// Longer than those of a file system that keeps whole seconds (ext3) or two of them (FAT).
const COARSE_STEP: Duration = Duration::from_millis(2012);

/// The identity of the image at `path`, the top of `layers`, which no other process writes.
pub(crate) fn identity_of(files: &Files, path: &Path, layers: &[Layer]) -> io::Result<Identity> {
    let [top, parents @ ..] = layers else { return Err(io::ErrorKind::NotFound.into()) };
    let facts = files.facts(path)?;
    let store = top.image.store();
    if store.identity() != Some(facts.identity) {
        return Err(io::Error::other("another file has its name by now"));
    }
    let linkage = |layer: &Layer| layer.image.linkage_id().map_or(Uuid::nil(), LinkageId::to_uuid);
    let driver = top.image.info().format.driver();
    let has_contents_id = driver.identities == Identities::DiskAndContents;
    Ok(Identity {
        guid: if has_contents_id { linkage(top) } else { Uuid::nil() },
        inode: facts.identity.1,
        len_bytes: store.len_bytes()?,
        modified_ns: nanoseconds(facts.modified),
        parents: parents.iter().try_fold(0, |crc, parent| -> io::Result<u32> {
            let crc = crc_of(crc, linkage(parent).as_bytes());
            // A VHD keeps its id when it is written, and other programs leave that of a VDI.
            let modified = if driver.renews_contents_id { None } else { files.facts(&parent.path)?.modified };
            Ok(crc_of(crc, &nanoseconds(modified).to_le_bytes()))
        })?,
    })
}

/// Records how the image of a chain is recognised, after it was closed.
pub(crate) fn close_tracks(chain: &Chain) -> Result<()> {
    let Some(view) = &chain.track else { return Ok(()) };
    let mut inner = view.tracker.lock();
    let (files, path) = (inner.files().clone(), chain.layers()[0].path.clone());
    let closed = (|| {
        let mut identity = identity_of(&files, &path, chain.layers())?;
        // A later write of another program must not get the same time as the last one, be that ours
        // or one from before the disk was opened.
        while let Some(left) = step_left(identity.modified_ns) {
            std::thread::sleep(left);
            identity = identity_of(&files, &path, chain.layers())?;
        }
        inner.close(identity, chain.geometry.size_bytes)
    })();
    closed.map_err(|error| from_io("record its changed ranges", &path, error))
}

/// How long the clock has the same step as this time; `None` if it has another one by now.
fn step_left(modified_ns: u64) -> Option<Duration> {
    let since = SystemTime::now().duration_since(UNIX_EPOCH + Duration::from_nanos(modified_ns)).ok()?;
    let is_coarse = modified_ns.is_multiple_of(1_000_000_000);
    let step = if is_coarse { COARSE_STEP } else { CLOCK_STEP };
    step.checked_sub(since).filter(|left| !left.is_zero())
}

fn nanoseconds(time: Option<SystemTime>) -> u64 {
    let since = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    since.and_then(|since| u64::try_from(since.as_nanos()).ok()).unwrap_or(0)
}

/// Why the image is not the one of the header, or may have been changed by others; `None` if it is
/// as its last session has left it.
pub(crate) fn distrust(header: &Header, now: &Identity, format: Format, size_bytes: u64) -> Option<String> {
    if header.is_open {
        let is_it = |known: &Identity| (known.guid, known.inode, known.parents) == (now.guid, now.inode, now.parents);
        let is_session = is_it(&header.identity) || header.coming.as_ref().is_some_and(is_it);
        return match (format.driver().renews_contents_id && !now.guid.is_nil(), is_session) {
            (false, _) => Some(format!(
                "the disk was not closed cleanly, and nothing in a {format} image shows whether another program has written to it since"
            )),
            (true, false) => Some(
                "the disk was not closed cleanly, and the identity of its contents or its parents are not those of that session: another program has written to it, or it was replaced or reverted".into(),
            ),
            // A growth that was cut short has changed only this file.
            (true, true) if size_bytes > header.size_bytes => Some(resized(header, size_bytes)),
            (true, true) => None,
        };
    }
    let known = &header.identity;
    if (now.guid, now.inode) != (known.guid, known.inode) {
        return Some("the image is another file, or its contents have another identity: it was copied, replaced, reverted, or written by another program".into());
    }
    if now.parents != known.parents {
        return Some("the image has other parents than when it was closed".into());
    }
    if (now.len_bytes, now.modified_ns) != (known.len_bytes, known.modified_ns) {
        return Some("another program has written to the image, by its length or its modification time".into());
    }
    (size_bytes != header.size_bytes).then(|| resized(header, size_bytes))
}

fn resized(header: &Header, size_bytes: u64) -> String {
    format!("the disk has {size_bytes} bytes, and had {} when it was tracked", header.size_bytes)
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_settled_when_its_step_has_passed() {
        let now = nanoseconds(Some(SystemTime::now()));
        let ago = |ns: u64| (now - ns) | 1;
        assert!(step_left(ago(0)).is_some_and(|left| left <= CLOCK_STEP));
        assert_eq!(step_left(ago(1_000_000_000)), None);
        // A whole second: the file system may count those only.
        let second = now - now % 1_000_000_000;
        assert!(step_left(second).is_some_and(|left| left > Duration::from_secs(1)));
        assert_eq!(step_left(second - 3_000_000_000), None);
    }
}
