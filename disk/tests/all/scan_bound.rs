//! A folder with more images than are examined: what would be wrong if one of the others were a
//! child is refused, and nothing is changed.

use crate::common::{read_all, write};
use diskwright_disk::{
    CompactOptions, CreateRequest, Disk, MergeOptions, Movable, MoveOptions, OpenOptions, SnapshotOptions, compact,
    create, merge, move_disk, remove_snapshot, snapshot,
};
use std::{fs, path::Path};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;
/// More than are examined (`SIBLINGS_MAX`).
const IMAGES: usize = 4100;

fn listed(dir: &Path) -> Vec<(String, u64)> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), entry.metadata().unwrap().len()))
        .collect();
    files.sort();
    files
}

#[test]
fn what_needs_all_children_is_refused() {
    let dir = TempDir::new().unwrap();
    let (parent, child) = (dir.path().join("0parent.vhdx"), dir.path().join("0child.vhdx"));
    create(&parent, &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
    write(&parent, 0, 1, 4096);
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    write(&child, 4096, 2, 4096);
    for number in 0..IMAGES {
        fs::write(dir.path().join(format!("{number}.vhdx")), b"").unwrap();
    }
    let before = (listed(dir.path()), read_all(&child));
    let discard = SnapshotOptions { discard: true, ..SnapshotOptions::default() };
    let away = TempDir::new().unwrap();
    let live = Movable::new(Disk::open(&child, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap());
    let refused = [
        live.move_to(&away.path().join("new.vhdx"), &MoveOptions::default(), &mut ()).map(drop),
        merge(&child, &MergeOptions::default(), &mut |_, _| true).map(drop),
        remove_snapshot(&child, &discard, &mut |_, _| true).map(drop),
    ];
    live.close().unwrap();
    drop(live);
    let closed = [
        compact(&child, &CompactOptions::default(), &mut |_, _| true).map(drop),
        snapshot(&child, &SnapshotOptions { name: "one".into(), ..SnapshotOptions::default() }).map(drop),
        merge(&child, &MergeOptions::default(), &mut |_, _| true).map(drop),
        remove_snapshot(&child, &discard, &mut |_, _| true).map(drop),
        move_disk(
            &child,
            away.path().join("new.vhdx"),
            &MoveOptions::default(),
            &OpenOptions::default(),
            &mut |_, _| true,
        )
        .map(drop),
    ];
    for (number, outcome) in refused.into_iter().chain(closed).enumerate() {
        let error = outcome.expect_err(&format!("operation {number}")).to_string();
        // Those in the middle find the disk in use first.
        let is_told = error.contains("could not be checked") || matches!(number, 1 | 2) && error.contains("in use");
        assert!(is_told, "operation {number}: {error}");
    }
    assert!((listed(dir.path()), read_all(&child)) == before, "something was changed");
    assert_eq!(fs::read_dir(away.path()).unwrap().count(), 0);

    // Writing goes on, with a warning (`formats.rs`).
    write(&child, 0, 3, 4096);
    assert_eq!(read_all(&child)[0], 3);
}
