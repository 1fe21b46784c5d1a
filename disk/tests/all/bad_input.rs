//! Files with one kind of damage each. Each gets one error with the file, the offset, what was
//! found and what was expected; or, if the disk can still be read, a finding of the check. The file
//! does not change.

use crate::damage::{
    Told::{Error, Finding, Refusal},
    *,
};
use diskwright_disk::{Disk, OpenOptions};
use diskwright_image::{Format, Severity};
use std::path::Path;
use tempfile::tempdir;

/// Opens for writing and closes without writing. Returns whether the open succeeded.
fn open_for_writing(path: &Path) -> bool {
    let opened = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() });
    opened.map(|disk| disk.close().unwrap()).is_ok()
}

fn contains_all(text: &str, words: &[&str]) -> bool {
    words.iter().all(|word| text.contains(word))
}

fn tells_what_was_expected(text: &str) -> bool {
    text.contains("found") && text.contains("expected") || text.contains("ends too early: was it copied completely?")
}

fn has_offset(text: &str) -> bool {
    text.split("offset ").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn judge(sample: &Sample, told: &Told) -> Result<(), String> {
    let read = read_all(&sample.path, &OpenOptions::default());
    let checked = check(&sample.path, sample.format);
    let found = |severity: Severity, words: &[&str]| {
        checked.as_ref().is_ok_and(|report| {
            report.findings.iter().any(|finding| finding.severity >= severity && contains_all(&finding.message, words))
        })
    };
    let name = sample.path.to_str().unwrap();
    match told {
        Error(words) => {
            let error = read.err().ok_or("it reads without an error")?;
            if !contains_all(&error, words)
                || !error.contains(name)
                || !has_offset(&error)
                || !tells_what_was_expected(&error)
            {
                return Err(format!("the error is incomplete: {error}"));
            }
            if checked.is_ok() && !found(Severity::Corrupt, &[]) {
                return Err(format!("the check finds nothing: {checked:?}"));
            }
        }
        Refusal(words) => {
            let error = read.err().ok_or("it reads without an error")?;
            if !contains_all(&error, words) || !error.contains(name) {
                return Err(format!("the error is incomplete: {error}"));
            }
        }
        Finding(severity, words) => {
            read.map_err(|error| format!("it does not read: {error}"))?;
            if !found(*severity, words) {
                return Err(format!("the check does not find it: {checked:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn each_damage_is_reported_and_changes_nothing() {
    let dir = tempdir().unwrap();
    let samples = samples(dir.path());
    let mut failures = Vec::new();
    for (name, what, damage, told) in vhd::cases().into_iter().chain(vhdx::cases()) {
        let sample = samples.iter().find(|sample| sample.name == name).unwrap();
        let mut bytes = sample.bytes.clone();
        damage(&mut bytes);
        assert!(bytes != sample.bytes, "{name}, {what}: nothing is damaged");
        std::fs::write(&sample.path, &bytes).unwrap();
        if let Err(failure) = judge(sample, &told) {
            failures.push(format!("{name}, {what}: {failure}"));
        }
        if std::fs::read(&sample.path).unwrap() != bytes {
            failures.push(format!("{name}, {what}: reading has changed the file"));
        }
        let replays = name == "logged.vhdx";
        let opened = open_for_writing(&sample.path);
        if std::fs::read(&sample.path).unwrap() != bytes && !(opened && replays) {
            failures.push(format!("{name}, {what}: opening for writing has changed the file (opened: {opened})"));
        }
        std::fs::write(&sample.path, &sample.bytes).unwrap();
    }
    assert!(failures.is_empty(), "{} cases:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn undamaged_samples_are_accepted() {
    let dir = tempdir().unwrap();
    for sample in samples(dir.path()) {
        read_all(&sample.path, &OpenOptions::default()).unwrap();
        let report = check(&sample.path, sample.format).unwrap();
        assert!(report.worst() <= Some(Severity::Note), "{}: {report:?}", sample.name);
        assert!(std::fs::read(&sample.path).unwrap() == sample.bytes, "{}", sample.name);
    }
}

#[test]
fn a_truncated_file_is_never_read_wrongly() {
    let dir = tempdir().unwrap();
    for sample in samples(dir.path()).into_iter().filter(|sample| sample.format != Format::Raw) {
        let whole = whole_disk(&sample.path).unwrap();
        let len = sample.bytes.len();
        let cuts = [0, 1, 7, 511, 512, 513, 1535, 1536, 4096, 65535, 192 * KIB, MIB, METADATA + 31, BAT + 8];
        let from_end = [1, 511, 512, 513, 1024, 4096, 32 * KIB, MIB - 1, MIB, MIB + 1];
        for cut in cuts.into_iter().chain(from_end.map(|back| len.saturating_sub(back))).filter(|&cut| cut < len) {
            std::fs::write(&sample.path, &sample.bytes[..cut]).unwrap();
            if let Ok(found) = whole_disk(&sample.path) {
                assert!(found == whole, "{} of {cut} bytes is read wrongly", sample.name);
            }
            assert!(open_for_writing(&sample.path) || std::fs::read(&sample.path).unwrap() == sample.bytes[..cut]);
        }
        std::fs::write(&sample.path, &sample.bytes).unwrap();
    }
}

fn whole_disk(path: &Path) -> Result<Vec<u8>, String> {
    use diskwright_store::{BlockDevice, Blocking, EngineKind};
    let disk = Disk::open(path, &OpenOptions::default()).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
    io.read(0, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}
