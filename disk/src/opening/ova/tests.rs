//! OVAs as other programs write them, and hostile ones.

use super::*;
use crate::{CreateRequest, Opened, copying::create::create};
use diskwright_format::{
    ovf::{Appliance, DigestKind, ManifestEntry},
    tar::TarHeader,
};
use diskwright_store::{Blocking, EngineKind};
use std::fs;
use tempfile::{TempDir, tempdir};

/// An archive of these members.
fn tar(members: &[(&str, &[u8])]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for (name, contents) in members {
        bytes.extend(TarHeader::of_file(name, contents.len() as u64, 0).unwrap());
        bytes.extend(*contents);
        bytes.resize(bytes.len().next_multiple_of(512), 0);
    }
    bytes.resize(bytes.len() + 1024, 0);
    bytes
}

/// A disk of 8 MiB as the bytes of a VHDX, with a pattern at 1 MiB.
fn vhdx(dir: &TempDir) -> Vec<u8> {
    let path = dir.path().join("disk.vhdx");
    create(&path, &CreateRequest { size_bytes: Some(8 << 20), ..CreateRequest::default() }).unwrap();
    let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    Blocking::open(&*disk, EngineKind::Sync).unwrap().write(1 << 20, &[7; 4096], false).unwrap();
    disk.close().unwrap();
    drop(disk);
    fs::read(&path).unwrap()
}

fn envelope(file: &str, file_bytes: u64) -> String {
    Appliance {
        name: "vm".into(),
        disk_file: file.into(),
        disk_file_bytes: file_bytes,
        capacity_bytes: 8 << 20,
        populated_bytes: 0,
        is_uefi: false,
    }
    .to_text()
}

fn manifest(members: &[(&str, &[u8])]) -> String {
    let entry = |(name, contents): &(&str, &[u8])| {
        let mut context = verify::context(DigestKind::Sha256);
        context.update(contents);
        let digest = context.finish().as_ref().to_vec();
        ManifestEntry { name: (*name).to_owned(), kind: DigestKind::Sha256, digest }
    };
    Manifest { entries: members.iter().map(entry).collect() }.to_text()
}

fn opened(dir: &TempDir, bytes: &[u8]) -> Result<Ova> {
    let path = dir.path().join("x.ova");
    fs::write(&path, bytes).unwrap();
    Ova::open(&path, &Files::default())
}

#[test]
fn a_disk_is_read_in_place() {
    let dir = tempdir().unwrap();
    let disk = vhdx(&dir);
    let text = envelope("d.vhdx", disk.len() as u64);
    let files: [(&str, &[u8]); 2] = [("vm.ovf", text.as_bytes()), ("d.vhdx", &disk)];
    let list = manifest(&files);
    let ova = opened(&dir, &tar(&[files[0], ("vm.mf", list.as_bytes()), files[1]])).unwrap();
    assert!(ova.remarks().is_empty(), "{:?}", ova.remarks());
    assert!(ova.verify(&mut |_, _| true).unwrap().all_same());
    assert_eq!((ova.members().len(), ova.disks().len(), ova.systems()[0].name.as_deref()), (3, 1, Some("vm")));
    let path = dir.path().join("x.ova");
    let opened = Opened::open(&path, &OpenOptions::default()).unwrap();
    let mut found = [0; 8192];
    Blocking::open(opened.device(), EngineKind::Auto).unwrap().read(1 << 20, &mut found).unwrap();
    assert!(found[..4096].iter().all(|byte| *byte == 7) && found[4096..].iter().all(|byte| *byte == 0));
    let refused = Opened::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap_err();
    assert!(refused.to_string().contains("only read"), "{refused}");
}

#[test]
fn of_several_disks_one_must_be_named() {
    let dir = tempdir().unwrap();
    let disk = vhdx(&dir);
    let text = envelope("a.vhdx", disk.len() as u64)
        .replace("</References>", "<File ovf:href=\"b.vhdx\" ovf:id=\"file2\"/></References>")
        .replace("</DiskSection>", "<Disk ovf:capacity=\"8\" ovf:diskId=\"two\" ovf:fileRef=\"file2\"/></DiskSection>");
    let bytes = tar(&[("vm.ovf", text.as_bytes()), ("a.vhdx", &disk), ("b.vhdx", &disk)]);
    let ova = opened(&dir, &bytes).unwrap();
    assert!(ova.remarks()[0].contains("no manifest"), "{:?}", ova.remarks());
    let refused = ova.find(None).unwrap_err().to_string();
    assert!(refused.contains("it has 2 disks: 1 (a.vhdx), 2 (b.vhdx)"), "{refused}");
    for (wanted, number) in [("2", 2), ("two", 2), ("b.vhdx", 2), ("a.vhdx", 1)] {
        assert_eq!(ova.find(Some(wanted)).unwrap().number, number, "{wanted}");
    }
    assert!(ova.find(Some("3")).unwrap_err().to_string().contains("no disk \"3\""));
    let options = OpenOptions { ova_disk: Some("2".into()), ..OpenOptions::default() };
    let disk = ova.open_disk(&options).unwrap();
    assert!(disk.file().unwrap().ends_with("x.ova/b.vhdx"), "{:?}", disk.file());
}

#[test]
fn disks_that_are_not_read_are_refused_by_name() {
    let dir = tempdir().unwrap();
    let text = envelope("d.vhdx", 1024);
    let with = |from: &str, to: &str| text.replace(from, to);
    for (text, what) in [
        (with("ovf:id=\"file1\"", "ovf:id=\"file1\" ovf:compression=\"gzip\""), "compressed as a whole (gzip)"),
        (with("ovf:id=\"file1\"", "ovf:id=\"file1\" ovf:chunkSize=\"512\""), "cut into pieces"),
        (with("ovf:href=\"d.vhdx\"", "ovf:href=\"../d.vhdx\""), "has a path"),
        (with("ovf:href=\"d.vhdx\"", "ovf:href=\"/etc/passwd\""), "has a path"),
        (with("ovf:href=\"d.vhdx\"", "ovf:href=\"e.vhdx\""), "not in the archive"),
        (with("ovf:size=\"1024\"", "ovf:size=\"2048\""), "the descriptor says 2048"),
        (with("ovf:fileRef=\"file1\"", "ovf:fileRef=\"file9\""), "not among the references"),
        (with("ovf:fileRef=\"file1\"", ""), "no file"),
        (with("ovf:diskId", "ovf:parentRef=\"x\" ovf:diskId"), "depends on another one"),
    ] {
        let ova = opened(&dir, &tar(&[("vm.ovf", text.as_bytes()), ("d.vhdx", &[0; 1024])])).unwrap();
        assert!(ova.disks()[0].trouble.as_ref().is_some_and(|trouble| trouble.contains(what)), "{:?}", ova.disks());
        let refused = ova.open_disk(&OpenOptions::default()).unwrap_err().to_string();
        assert!(refused.contains(what) && refused.contains("not supported"), "{refused}");
    }
}

#[test]
fn hostile_archives_are_refused_or_their_members_ignored() {
    let dir = tempdir().unwrap();
    let text = envelope("d.vhdx", 1024);
    let good = tar(&[("vm.ovf", text.as_bytes()), ("d.vhdx", &[0; 1024])]);
    let refused = |bytes: &[u8], what: &str| {
        let error = opened(&dir, bytes).unwrap_err().to_string();
        assert!(error.contains(what), "{error}");
    };
    refused(&good[..good.len() - 2048], "ends within the archive");
    refused(&good[..700], "ends within the archive");
    refused(&good[..100], "100 bytes, expected 512 bytes");
    refused(&[0; 1024], "without a descriptor");
    refused(&[7; 1024], "checksum");
    refused(&tar(&[("d.vhdx", &[1])]), "1 files without a descriptor");
    let mut lie = good.clone();
    lie[..512].copy_from_slice(&TarHeader::of_file("vm.ovf", u64::MAX - 600, 0).unwrap());
    refused(&lie, "with 18446744073709551015 bytes");
    let bomb = "<!DOCTYPE x [<!ENTITY a \"b\">]>".to_owned() + &text;
    refused(&tar(&[("vm.ovf", bomb.as_bytes())]), "a document type in line 1");
    refused(&tar(&[("vm.ovf", &vec![b' '; (4 << 20) + 1])]), "at most 4194304");
    refused(&tar(&[("vm.ovf", text.as_bytes()), ("vm.mf", b"nonsense")]), "OVF manifest");
    let many: Vec<(&str, &[u8])> = vec![("x", &[]); 10_001];
    refused(&tar(&many), "more than 10000 files");
    let ova = opened(
        &dir,
        &tar(&[("a/vm.ovf", b"<x/>"), ("../vm.ovf", b"<x/>"), ("vm.ovf", text.as_bytes()), ("vm.ovf", b"<x/>")]),
    )
    .unwrap();
    assert_eq!(ova.members().len(), 1);
    let ignored = ova.remarks().iter().filter(|remark| remark.contains("is ignored")).count();
    assert_eq!(ignored, 3, "{:?}", ova.remarks());
}

#[test]
fn wrong_digests_and_files_without_one_are_found() {
    let dir = tempdir().unwrap();
    let text = envelope("d.vhdx", 3);
    let list = manifest(&[("vm.ovf", text.as_bytes()), ("d.vhdx", b"abc"), ("gone.vmdk", b"")]);
    let members: [(&str, &[u8]); 4] =
        [("vm.ovf", text.as_bytes()), ("vm.mf", list.as_bytes()), ("d.vhdx", b"abd"), ("more.iso", b"x")];
    let digests = opened(&dir, &tar(&members)).unwrap().verify(&mut |_, _| true).unwrap();
    let found: Vec<(&str, Option<bool>)> =
        digests.members.iter().map(|member| (member.name.as_str(), member.is_same)).collect();
    assert_eq!(found, [("vm.ovf", Some(true)), ("d.vhdx", Some(false)), ("more.iso", None), ("gone.vmdk", None)]);
    assert!(!digests.all_same());
    let stopped = opened(&dir, &tar(&members)).unwrap().verify(&mut |_, _| false).unwrap_err();
    assert!(matches!(stopped, DiskError::Stopped));
}
