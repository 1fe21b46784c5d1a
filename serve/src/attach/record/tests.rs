use super::*;

fn registry() -> (tempfile::TempDir, Registry) {
    let dir = tempfile::tempdir().unwrap();
    let registry = Registry::at(&dir.path().join("run")).unwrap();
    (dir, registry)
}

#[test]
fn a_record_is_found_by_every_name_of_its_disk() {
    let (dir, registry) = registry();
    let dir = dir.path().canonicalize().unwrap();
    let image = dir.join("a.vhdx");
    fs::write(&image, b"").unwrap();
    let home = registry.dir_of(&image).unwrap();
    home.make(&registry.lock().unwrap()).unwrap();
    let mut record = Record::new(image.clone(), 5);
    record.device = Some("/dev/loop77".into());
    record.fuse_mount = home.make_mount_point().unwrap();
    record.fuse_file = record.fuse_mount.clone();
    record.partitions.push(PartitionRecord {
        number: 1,
        start: 0,
        length: 1,
        device: Some("/dev/loop77p1".into()),
        content: None,
    });
    let mounted = dir.join("mnt");
    fs::create_dir(&mounted).unwrap();
    record.mounts.push(MountRecord {
        directory: mounted.clone(),
        device: "/dev/loop77p1".into(),
        file_system: "ext4".into(),
    });
    home.write(&record).unwrap();
    let link = dir.join("link.vhdx");
    fs::hard_link(&image, &link).unwrap();
    for name in [&image, Path::new("/dev/loop77"), Path::new("/dev/loop77p1"), &record.fuse_file, &mounted, &link] {
        assert_eq!(registry.find(name).unwrap(), (home.clone(), record.clone()), "{}", name.display());
    }
    let other = dir.join("b.vhdx");
    for name in [&other, Path::new("/dev/loop7"), &dir] {
        assert!(matches!(registry.find(name), Err(AttachError::NotAttached { .. })), "{}", name.display());
    }
    assert!(record.is_supervised());
    registry.clear(&home).unwrap();
    assert_eq!(registry.all().unwrap(), []);
}

#[test]
fn a_folder_that_other_users_can_write_to_is_refused() {
    use std::os::unix::fs::PermissionsExt;
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = Registry::at(dir.path()).unwrap_err().to_string();
    assert!(error.contains("other users can write to it"), "{error}");
}

#[test]
fn a_record_that_cannot_be_parsed_is_an_error() {
    let (dir, registry) = registry();
    let image = dir.path().join("a.vhdx");
    fs::write(&image, b"").unwrap();
    let home = registry.dir_of(&image).unwrap();
    assert_eq!(home.read().unwrap(), None);
    home.make(&registry.lock().unwrap()).unwrap();
    fs::write(dir.path().join("run").join(home.dir.file_name().unwrap()).join("record.json"), b"{").unwrap();
    assert!(home.read().unwrap_err().to_string().contains("cannot parse"));
}
