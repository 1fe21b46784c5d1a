//! Checks: damage is found, a broken link is told, an image that cannot be checked is an error.

use super::{family, made};
use diskwright_lib::{ErrorCode, Format, OpenOptions, Severity, check};
use std::fs;

#[test]
fn a_sound_chain_and_a_broken_one() {
    let dir = tempfile::tempdir().unwrap();
    family(dir.path());
    let child = dir.path().join("child.vhdx");
    let checked = check(&child, &OpenOptions::default()).unwrap();
    assert!(checked.is_sound() && checked.format == Format::Vhdx && checked.warnings.is_empty());
    fs::remove_file(dir.path().join("parent.vhdx")).unwrap();
    let checked = check(&child, &OpenOptions::default()).unwrap();
    assert_eq!(checked.report.worst(), None);
    assert_eq!(checked.broken_link.as_ref().map(|error| error.code()), Some(ErrorCode::ParentMissing));
    assert!(!checked.is_sound());
}

#[test]
fn damage_is_a_finding_and_no_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("disk.vhdx");
    let disk = made(&path);
    // A writer has it.
    assert_eq!(check(&path, &OpenOptions::default()).unwrap_err().code(), ErrorCode::Locked);
    let shared = check(&path, &OpenOptions { force_share: true, ..OpenOptions::default() }).unwrap();
    assert_eq!(shared.warnings.len(), 1);
    disk.close().unwrap();
    drop(disk);
    let mut bytes = fs::read(&path).unwrap();
    bytes[64 << 10..(192 << 10)].fill(0xff);
    fs::write(&path, bytes).unwrap();
    let checked = check(&path, &OpenOptions::default()).unwrap();
    assert_eq!(checked.report.worst(), Some(Severity::Corrupt));
    assert!(!checked.is_sound() && checked.broken_link.is_none(), "{checked:?}");
    fs::write(dir.path().join("empty.vhdx"), "").unwrap();
    let error = check(dir.path().join("empty.vhdx"), &OpenOptions::default()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::NotAnImage);
}
