use super::*;
use crate::{CreateOptions, DiskType, ParentLink};
use diskwright_store::MemoryStore;
use uuid::Uuid;

fn probed(name: &str, bytes: Vec<u8>, writable: bool) -> Result<DetectedFormat> {
    probe(&MemoryStore::with_bytes(name, bytes), writable)
}

fn with(len: usize, at: usize, signature: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; len];
    bytes[at..at + signature.len()].copy_from_slice(signature);
    bytes
}

fn told(format: Format) -> DetectedFormat {
    DetectedFormat::certain(format)
}

/// A new image in memory.
fn image(name: &str, format: Format, disk_type: DiskType) -> Arc<MemoryStore> {
    let store = Arc::new(MemoryStore::with_bytes(name, Vec::new()));
    let parent = (disk_type == DiskType::Differencing).then(|| ParentLink {
        relative_path: Some(r".\secret.vhd".into()),
        linkage: Some(Uuid::from_u128(1).into()),
        ..ParentLink::default()
    });
    let options = CreateOptions {
        disk_type,
        size_bytes: 4 << 20,
        block_bytes: None,
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    format.driver().create(Arc::clone(&store) as Arc<dyn Store>, &options).unwrap();
    store
}

#[test]
fn the_extension_decides_if_the_contents_have_its_signature() {
    let both = || {
        let mut bytes = with(4096, 0, b"vhdxfile");
        bytes[4096 - 512..][..8].copy_from_slice(b"conectix");
        bytes
    };
    for writable in [false, true] {
        assert_eq!(probed("a.VHDX", both(), writable).unwrap(), told(Format::Vhdx));
        assert_eq!(probed("a.vhd", both(), writable).unwrap(), told(Format::Vhd));
        assert_eq!(probed("a.avhd", with(4095, 4095 - 511, b"conectix"), writable).unwrap(), told(Format::Vhd));
        assert_eq!(probed("a.raw", both(), writable).unwrap(), told(Format::Raw));
        assert_eq!(probed("a.raw", with(4096, 0, b"QFI\xfb"), writable).unwrap(), told(Format::Raw));
    }
}

#[test]
fn contents_never_override_the_extension() {
    for (name, bytes) in [("a.vhd", &b"vhdxfile"[..]), ("a.vhdx", b"conectix"), ("a.avhdx", b"QFI\xfb\0\0\0\x03")] {
        let error = probed(name, with(4096, 0, bytes), false).unwrap_err();
        assert!(matches!(error, ImageError::FormatUnclear { .. }), "{name}: {error}");
        let told = error.to_string();
        assert!(told.contains("is that of vhd") && told.contains("contents are those of"), "{told}");
        assert!(told.contains("with `OpenOptions::format`"), "{told}");
    }
    for name in ["a.vhd", "a.AVHD", "a.vhdx", "b/c.Avhdx"] {
        assert!(matches!(probed(name, vec![0; 4096], false), Err(ImageError::NotAnImage { .. })), "{name}");
    }
    let store = Arc::new(MemoryStore::with_bytes("a.vhdx", vec![0; 4096]));
    assert_eq!(open(store, Some(Format::Raw), false, 512).unwrap().info().format, Format::Raw);
}

#[test]
fn without_a_known_extension_our_formats_open_read_only() {
    for (at, bytes, format) in [
        (0, &b"vhdxfile"[..], Format::Vhdx),
        (0, b"conectix", Format::Vhd),
        (4096 - 512, b"conectix", Format::Vhd),
        (0, b"QFI\xfb\0\0\0\x02", Format::Qcow2),
        (0, b"QFI\xfb\0\0\0\x03", Format::Qcow2),
        (0, b"KDMV", Format::Vmdk),
        (0, b"# Disk DescriptorFile", Format::Vmdk),
        (0x40, &[0x7f, 0x10, 0xda, 0xbe], Format::Vdi),
    ] {
        for name in ["a", "a.img", "a.bin", "a.dd", "a.iso"] {
            let guessed = DetectedFormat { format, is_guess: true };
            assert_eq!(probed(name, with(4096, at, bytes), false).unwrap(), guessed, "{name}");
            let error = probed(name, with(4096, at, bytes), true).unwrap_err().to_string();
            assert!(error.contains(&format!("with `OpenOptions::format` = {format} or raw")), "{error}");
        }
    }
    for len in 0..20 {
        assert_eq!(probed("a.img", vec![0; len], true).unwrap(), told(Format::Raw));
    }
    assert_eq!(probed("a", with(4096, 1024, b"conectix"), true).unwrap(), told(Format::Raw));
    let mut several = with(4096, 0, b"vhdxfile");
    several[4096 - 512..][..8].copy_from_slice(b"conectix");
    let error = probed("a.img", several, false).unwrap_err().to_string();
    assert!(error.contains("vhdx, vhd"), "{error}");
}

/// A raw disk `.img` in which a guest wrote a child of another customer's disk must not expose that
/// disk.
#[test]
fn a_guessed_image_with_a_parent_is_refused() {
    for format in [Format::Vhd, Format::Vhdx] {
        let sound = open(image("a.img", format, DiskType::Dynamic), None, false, 512).unwrap();
        assert_eq!(sound.info().format, format);
        let error = open(image("a.img", format, DiskType::Differencing), None, false, 512).unwrap_err();
        assert!(matches!(error, ImageError::FormatUnclear { .. }), "{error}");
        assert!(error.to_string().contains("names another file"), "{error}");
        let child = image("a.img", format, DiskType::Differencing);
        assert!(open(child, Some(format), false, 512).unwrap().info().parent.is_some());
    }
}

#[test]
fn foreign_formats_are_refused_unless_the_user_says_raw() {
    for (name, at, bytes, told) in [
        ("a.qed", 0, &b"QED\0"[..], "qed"),
        ("a.img", 0, b"QFI\xfb\0\0\0\x01", "qcow"),
        ("a", 0, b"QED\0", "qed"),
        ("disk.vhd.gz", 0, &[0x1f, 0x8b, 8, 0], "gzip"),
        ("a", 0, b"\xfd7zXZ\0", "xz"),
        ("a", 0, &[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
    ] {
        for writable in [false, true] {
            let error = probed(name, with(4096, at, bytes), writable).unwrap_err();
            assert!(matches!(error, ImageError::Unsupported { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains(&format!("is a {told} image; {told} is not supported")), "{text}");
            assert!(text.contains("`OpenOptions::format` = raw"), "{text}");
        }
        let store = Arc::new(MemoryStore::with_bytes(name, with(4096, at, bytes)));
        assert_eq!(open(store, Some(Format::Raw), true, 512).unwrap().info().format, Format::Raw);
    }
    // The flat extent of a VMDK begins with the guest's data and has no signature.
    let error = probed("disk-flat.vmdk", vec![0; 4096], false).unwrap_err().to_string();
    assert!(error.contains("is that of vmdk, but the file has no signature of that format"), "{error}");
    let error = probed("a.qcow2", with(4096, 0, b"vhdxfile"), false).unwrap_err().to_string();
    assert!(error.contains("is that of qcow2, but the contents are those of vhdx"), "{error}");
}

/// The guest of a fixed VHD can write the signatures of other formats at offset 0.
#[test]
fn a_fixed_vhd_is_recognised_whatever_its_guest_writes() {
    let vhd_child = image("x.vhd", Format::Vhd, DiskType::Differencing);
    let mut structures = vec![0; vhd_child.len_bytes().unwrap().min(64 << 10) as usize];
    vhd_child.read_at(&mut structures, 0).unwrap();
    for front in [b"vhdxfile".to_vec(), b"QFI\xfb\0\0\0\x03".to_vec(), structures] {
        let store = image("disk.vhd", Format::Vhd, DiskType::Fixed);
        store.write_at(&front, 0).unwrap();
        for writable in [false, true] {
            let opened = open(Arc::clone(&store) as Arc<dyn Store>, None, writable, 512).unwrap();
            let info = opened.info();
            assert_eq!((info.format, info.disk_type, info.size_bytes), (Format::Vhd, DiskType::Fixed, 4 << 20));
            assert!(info.parent.is_none());
        }
    }
}

#[test]
fn a_parent_link_is_read_without_opening() {
    for format in [Format::Vhd, Format::Vhdx] {
        let store = image("x", format, DiskType::Differencing);
        let link = format.driver().parent_link(&*store).unwrap().unwrap();
        let opened = open(Arc::clone(&store) as Arc<dyn Store>, Some(format), false, 512).unwrap();
        assert_eq!(Some(&link), opened.info().parent.as_ref());
        let alone = image("x", format, DiskType::Dynamic);
        assert_eq!(format.driver().parent_link(&*alone).unwrap(), None);
    }
}

#[test]
fn new_files_take_their_format_from_the_extension() {
    for (name, format) in [
        ("a.raw", Some(Format::Raw)),
        ("a.IMG", Some(Format::Raw)),
        ("a.bin", Some(Format::Raw)),
        ("a.dd", Some(Format::Raw)),
        ("a.Vhd", Some(Format::Vhd)),
        ("a.avhd", Some(Format::Vhd)),
        ("a.vhdx", Some(Format::Vhdx)),
        ("a.AVHDX", Some(Format::Vhdx)),
        ("a.qcow2", Some(Format::Qcow2)),
        ("a.vdi", Some(Format::Vdi)),
        ("a.qed", None),
        ("vhdx", None),
    ] {
        assert_eq!(format_of_extension(Path::new(name)), format, "{name}");
    }
}

/// A file that lost its signature is told what its own format begins with.
#[test]
fn each_format_names_its_own_signature() {
    for (name, told) in [
        ("a.vhd", "\"conectix\""),
        ("a.vhdx", "\"vhdxfile\""),
        ("a.qcow2", "\"QFI\""),
        ("a.vdi", "7f 10 da be at offset 64"),
        ("a.vmdk", "\"KDMV\""),
    ] {
        let error = probed(name, vec![0; 4096], false).unwrap_err().to_string();
        assert!(error.contains(told), "{name}: {error}");
        assert!(name == "a.vhdx" || !error.contains("vhdxfile"), "{name}: {error}");
    }
    // Every format of ours but raw has one of its own.
    let mut seen: Vec<_> = Format::ALL.iter().map(|format| format.driver().signature).collect();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), Format::ALL.len());
}

#[test]
fn a_file_that_is_checked_has_the_format_of_its_name_without_the_signature_too() {
    for (name, format, at) in [("a.vhdx", Format::Vhdx, 0), ("a.qcow2", Format::Qcow2, 0), ("a.vdi", Format::Vdi, 64)] {
        let disk_type = format.driver().usual_type;
        let store = image(name, format, disk_type);
        store.write_at(&[0x55; 8], at).unwrap();
        let store: Arc<dyn Store> = store;
        assert!(matches!(probe(&*store, false), Err(ImageError::NotAnImage { .. })), "{name}");
        assert_eq!(probe_damaged(&store, true).unwrap(), told(format));
        // Not where more is damaged, and not without the name.
        store.write_at(&[0x55; 300 << 10][..store.len_bytes().unwrap().min(300 << 10) as usize], 0).unwrap();
        assert!(matches!(probe_damaged(&store, false), Err(ImageError::NotAnImage { .. })), "{name}");
    }
    let unnamed: Arc<dyn Store> = image("a.img", Format::Vdi, DiskType::Dynamic);
    unnamed.write_at(&[0x55; 8], 64).unwrap();
    assert_eq!(probe_damaged(&unnamed, true).unwrap(), told(Format::Raw));
}

/// A power cut has kept the new length of a growing fixed disk, and lost its new footer.
#[test]
fn a_fixed_vhd_whose_growth_was_cut_short_is_a_vhd() {
    let store = image("a.vhd", Format::Vhd, DiskType::Fixed);
    store.set_len(store.len_bytes().unwrap() + (1 << 20)).unwrap();
    assert_eq!(probe(&*store, true).unwrap(), told(Format::Vhd));
    store.write_at(&[1], store.len_bytes().unwrap() - 700).unwrap();
    assert!(matches!(probe(&*store, true), Err(ImageError::NotAnImage { .. })));
}
