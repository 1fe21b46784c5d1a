use super::*;
use crate::progress::{Silent, Step};
use diskwright_load::job::{Bytes, Span};
use diskwright_store::Blocking;

const MIB: u64 = 1 << 20;

fn job(load: Load) -> Job {
    let mut job = Job::simple("test", load, Span::default(), Span::from_millis(10));
    job.cache = diskwright_load::job::Caching::Cached;
    job
}

fn writing() -> Job {
    job(Load { read_percent: 50.0, ..Load::default() })
}

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn spec(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    fn sparse(&self, name: &str, len_bytes: u64) -> String {
        File::create(self.spec(name)).unwrap().set_len(len_bytes).unwrap();
        self.spec(name)
    }
}

fn options() -> PrepareOptions {
    PrepareOptions {
        open: OpenHow { cache: diskwright_load::job::Caching::Cached, ..OpenHow::default() },
        ..PrepareOptions::default()
    }
}

fn go(job: &Job, spec: &str, options: &PrepareOptions) -> Result<Prepared> {
    prepare(job, &[spec.to_owned()], options, &mut Silent)
}

#[test]
fn a_sparse_file_gives_a_warning_and_a_filled_one_does_not() {
    let folder = Folder::new();
    let spec = folder.sparse("disk.raw", 8 * MIB);
    let prepared = go(&writing(), &spec, &options()).unwrap();
    assert!(matches!(&prepared.warnings[0], Warning::Unallocated { allocated: 0.0, .. }), "{:?}", prepared.warnings);
    assert_eq!(prepared.targets[0].contents.unwrap().allocated, 0.0);
    drop(prepared);
    let prepared = go(&writing(), &spec, &PrepareOptions { fill: true, ..options() }).unwrap();
    let contents = prepared.targets[0].contents.unwrap();
    assert_eq!((contents.allocated, contents.zero, contents.filled_bytes), (1.0, 0.0, 8 * MIB));
    assert!(!prepared.warnings.iter().any(|warning| matches!(warning, Warning::Unallocated { .. })));
    drop(prepared);
    // The file holds data now, which must not be overwritten. Reading is allowed.
    assert!(matches!(go(&writing(), &spec, &options()), Err(LabError::HoldsData { .. })));
    go(&writing(), &spec, &PrepareOptions { destroy_data: true, ..options() }).unwrap();
    go(&job(Load::default()), &spec, &options()).unwrap();
    let refused = go(&job(Load::default()), &spec, &PrepareOptions { fill: true, ..options() });
    assert!(matches!(refused, Err(LabError::HoldsData { .. })), "a fill overwrites too");
}

#[test]
fn only_the_working_set_is_filled_and_inspected() {
    let folder = Folder::new();
    let spec = folder.sparse("disk.raw", 16 * MIB);
    let load = Load { start: Bytes(4 * MIB), working_set: Bytes(2 * MIB), ..Load::default() };
    let prepared = go(&job(load), &spec, &PrepareOptions { fill: true, ..options() }).unwrap();
    assert_eq!(prepared.targets[0].contents.unwrap().filled_bytes, 2 * MIB);
    let mut data = 0;
    fill::for_extents("disk", &*prepared.targets[0].device, &[0..8 * MIB, 8 * MIB..16 * MIB], &mut |extent| {
        if extent.kind == ExtentKind::Data {
            data += extent.len_bytes;
        }
    })
    .unwrap();
    assert_eq!(data, 2 * MIB);
}

#[test]
fn a_file_that_is_made_is_filled_and_used_again() {
    let folder = Folder::new();
    for name in ["own.dat", "own.vhdx"] {
        let spec = folder.spec(name);
        let making = PrepareOptions { create_bytes: Some(8 * MIB), ..options() };
        let prepared = go(&writing(), &spec, &making).unwrap();
        assert_eq!(prepared.targets[0].contents.unwrap().filled_bytes, 8 * MIB, "{name}");
        drop(prepared);
        if !guard::is_own(Path::new(&spec)) {
            println!("skipped: the temporary folder has no extended attributes");
            return;
        }
        let again = go(&writing(), &spec, &making).unwrap();
        assert_eq!(again.targets[0].contents.unwrap().filled_bytes, 0, "{name} was filled already");
    }
    // A file of the lab with another size is resized.
    let larger = PrepareOptions { create_bytes: Some(12 * MIB), ..options() };
    let prepared = go(&writing(), &folder.spec("own.dat"), &larger).unwrap();
    assert_eq!(prepared.targets[0].device.geometry().size_bytes, 12 * MIB);
    assert_eq!(prepared.targets[0].contents.unwrap().allocated, 1.0);
}

#[test]
fn a_virtual_disk_smaller_than_asked_for_is_refused() {
    let folder = Folder::new();
    for (name, other_name) in [("small.vhdx", "small.bin"), ("small.vhd", "other.bin")] {
        let spec = folder.spec(name);
        create(Path::new(&spec), &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
        let before = fs::read(&spec).unwrap();
        for destroy_data in [false, true] {
            let asked = |size| PrepareOptions { create_bytes: Some(size), destroy_data, ..options() };
            let error = go(&writing(), &spec, &asked(16 * MIB)).unwrap_err().to_string();
            for text in [name, "8388608", "16777216", "`PrepareOptions::create_bytes`"] {
                assert!(error.contains(text), "{text}: {error}");
            }
            assert_eq!(fs::read(&spec).unwrap(), before);
            for enough in [4 * MIB, 8 * MIB] {
                go(&job(Load::default()), &spec, &asked(enough)).unwrap();
            }
        }
        // With another name it is still not a raw file that may be resized.
        fs::rename(&spec, folder.spec(other_name)).unwrap();
        let asked = PrepareOptions { create_bytes: Some(16 * MIB), destroy_data: true, ..options() };
        go(&writing(), &folder.spec(other_name), &asked).unwrap_err();
        assert_eq!(fs::read(folder.spec(other_name)).unwrap(), before);
    }
}

#[test]
fn a_raw_file_is_resized_if_its_data_may_be_destroyed() {
    let folder = Folder::new();
    for (len_bytes, asked_bytes) in [(4 * MIB, 8 * MIB), (8 * MIB, 4 * MIB)] {
        let spec = folder.sparse(&format!("raw-{len_bytes}.dat"), len_bytes);
        let asked = PrepareOptions { create_bytes: Some(asked_bytes), ..options() };
        let error = go(&job(Load::default()), &spec, &asked).unwrap_err().to_string();
        assert!(error.contains("`PrepareOptions::destroy_data`"), "{error}");
        assert_eq!(fs::metadata(&spec).unwrap().len(), len_bytes);
        let prepared =
            go(&job(Load::default()), &spec, &PrepareOptions { destroy_data: true, ..asked.clone() }).unwrap();
        assert_eq!(prepared.targets[0].device.geometry().size_bytes, asked_bytes);
        if guard::is_own(Path::new(&spec)) {
            assert_eq!(prepared.targets[0].contents.unwrap().allocated, 1.0, "it is filled");
        }
    }
}

#[test]
fn files_created_for_an_impossible_run_are_removed() {
    let folder = Folder::new();
    let too_large = job(Load { working_set: Bytes(1 << 30), ..Load::default() });
    let making = PrepareOptions { create_bytes: Some(MIB), ..options() };
    assert!(go(&too_large, &folder.spec("new.dat"), &making).is_err());
    assert!(!Path::new(&folder.spec("new.dat")).exists());
    // The same if filling is stopped.
    let mut stop = |step: Step<'_>| step.phase != "fill";
    let stopped = prepare(&writing(), &[folder.spec("new.dat")], &making, &mut stop);
    assert!(matches!(stopped, Err(LabError::Stopped)));
    assert!(!Path::new(&folder.spec("new.dat")).exists());
    // A file that the lab did not create is not resized.
    fs::write(folder.spec("precious"), b"precious").unwrap();
    assert!(go(&writing(), &folder.spec("precious"), &making).is_err());
    assert_eq!(fs::read(folder.spec("precious")).unwrap(), b"precious");
    for (spec, size) in [("null:", MIB), ("x", 1000), ("x", 0)] {
        let making = PrepareOptions { create_bytes: Some(size), ..options() };
        assert!(matches!(go(&writing(), spec, &making), Err(LabError::BadOptions { .. })), "{spec} {size}");
    }
}

#[test]
fn null_is_neither_checked_nor_inspected() {
    let prepared = go(&writing(), "null:1G", &options()).unwrap();
    assert_eq!((prepared.targets[0].contents, prepared.warnings.len()), (None, 0));
}

#[test]
fn a_target_that_is_not_there_is_named() {
    let folder = Folder::new();
    for job in [writing(), job(Load::default())] {
        let error = go(&job, &folder.spec("nowhere.raw"), &options()).unwrap_err().to_string();
        assert!(error.contains("nowhere.raw"), "{error}");
    }
}

#[test]
fn there_must_be_room_to_fill() {
    let folder = Folder::new();
    // Larger than any disk of a test machine, but small enough for a sparse file.
    let spec = folder.sparse("huge.raw", 8 << 40);
    let error = go(&writing(), &spec, &PrepareOptions { fill: true, ..options() }).unwrap_err();
    assert!(matches!(error, LabError::NoSpaceToFill { .. }), "{error}");
    assert!(error.to_string().contains("use a smaller working set"), "{error}");
}

#[test]
fn contents_are_as_compressible_and_as_repeated_as_asked() {
    let mut buf = vec![1; 1000 * 4096];
    contents_of(Contents::Zero, 1)(0, &mut buf);
    assert!(buf.iter().all(|byte| *byte == 0));
    contents_of(Contents::Mixed { compressible_percent: 25.0, duplicate_percent: 40.0 }, 1)(0, &mut buf);
    let mut seen = std::collections::HashMap::new();
    for block in buf.chunks(4096) {
        assert!(block[3072..].iter().all(|byte| *byte == 0) && block[..3072].iter().any(|byte| *byte != 0));
        *seen.entry(block).or_insert(0) += 1;
    }
    let copies: i32 = seen.values().filter(|count| **count > 1).sum();
    assert!((390..=410).contains(&copies), "{copies} of 1000 blocks are copies");
}

#[test]
fn a_filled_image_reads_back_its_contents() {
    let folder = Folder::new();
    let spec = folder.spec("disk.vhdx");
    create(Path::new(&spec), &CreateRequest { size_bytes: Some(8 * MIB), ..CreateRequest::default() }).unwrap();
    let prepared = go(&job(Load::default()), &spec, &PrepareOptions { fill: true, ..options() }).unwrap();
    let mut found = vec![0; 4096];
    Blocking::open(&*prepared.targets[0].device, Default::default()).unwrap().read(5 * MIB, &mut found).unwrap();
    assert_eq!(data::first_difference(1, 5 * MIB, &found), None);
}

/// Whoever asks for `x.qcow2` gets one, as `create x.qcow2` makes it; a format that cannot be
/// written is refused by its name before there is a file.
#[test]
fn targets_are_made_in_the_format_of_their_name() {
    let folder = Folder::new();
    let making = PrepareOptions { create_bytes: Some(4 * MIB), ..options() };
    for name in ["a.vhd", "a.vhdx", "a.qcow2", "a.vmdk", "a.vdi", "b.VHDX"] {
        let spec = folder.spec(name);
        let prepared = go(&writing(), &spec, &making).unwrap_or_else(|error| panic!("{name}: {error}"));
        let kind = format!("{} dynamic", name[2..].to_lowercase());
        assert_eq!(prepared.targets[0].kind, kind, "{name}");
        assert_eq!(prepared.targets[0].device.geometry().size_bytes, 4 * MIB, "{name}");
        drop(prepared);
        // The length of its file is not the size of the disk.
        go(&writing(), &spec, &making).unwrap_or_else(|error| panic!("{name} again: {error}"));
    }
    for name in ["a.raw", "a.img", "a.dat", "a"] {
        assert_eq!(go(&writing(), &folder.spec(name), &making).unwrap().targets[0].kind, "raw file", "{name}");
    }
    for (name, format) in [("a.qed", "qed"), ("a.dmg", "dmg"), ("disk.vhd.gz", "gzip")] {
        let error = go(&writing(), &folder.spec(name), &making).unwrap_err().to_string();
        assert!(error.contains(&format!("that of {format}, which is not written")), "{error}");
        assert!(!Path::new(&folder.spec(name)).exists(), "{name}");
    }
}
