//! Merges: random chains against what each image read before, names that are kept, children,
//! refusals, and merges that were stopped.

use crate::common::{Kind, Step, Twin, read_all, write};
use diskwright_disk::{
    CreateRequest, Disk, DiskError, KeptName, MergeOptions, Merged, NewSize, OpenOptions, ParentPolicy, ResizeOptions,
    check, create, merge, resize,
};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{Blocking, EngineKind};
use proptest::prelude::*;
use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn child(parent: &Path, name: &str) -> PathBuf {
    let path = parent.with_file_name(name);
    create(&path, &CreateRequest { parent: Some(parent.to_owned()), ..CreateRequest::default() }).unwrap();
    path
}

fn sound(path: &Path) {
    let checked = check(path, &OpenOptions::default()).unwrap();
    assert!(checked.report.worst() < Some(Severity::Corrupt), "{}: {:?}", path.display(), checked.report.findings);
    assert!(checked.broken_link.is_none(), "{}: {:?}", path.display(), checked.broken_link);
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn plain(path: &Path) -> diskwright_disk::Result<Merged> {
    merge(path, &MergeOptions::default(), &mut |_, _| true)
}

fn steps(size_sectors: u64) -> impl Strategy<Value = Vec<Step>> {
    let range = (0..size_sectors, prop_oneof![1..24_u64, 1..6000_u64]);
    let step = prop_oneof![
        6 => (range.clone(), any::<u8>())
            .prop_map(|((sector, sectors), seed)| Step::Write { sector, sectors, seed: seed | 1, fua: false }),
        2 => range.clone().prop_map(|(sector, sectors)| Step::Zero { sector, sectors }),
        2 => range.prop_map(|(sector, sectors)| Step::Discard { sector, sectors }),
        2 => Just(Step::Child),
    ];
    prop::collection::vec(step, 4..30)
}

/// Random chains; then merges of any image into any of its ancestors, until one image is left.
fn run(format: Format, block_bytes: u32, cases: u32) {
    let kind = Kind::new(format, DiskType::Differencing, Some(block_bytes));
    let size_bytes = 8 * MIB;
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        cases,
        max_shrink_iters: 100,
        failure_persistence: None,
        ..ProptestConfig::default()
    });
    let strategy = (steps(size_bytes / 512), prop::collection::vec((any::<u8>(), any::<u8>(), any::<bool>()), 8));
    runner
        .run(&strategy, |(steps, merges)| {
            let mut twin = Twin::new(kind, size_bytes);
            steps.into_iter().for_each(|step| twin.apply(step));
            twin.close();
            let mut chain: Vec<(PathBuf, Vec<u8>)> =
                twin.chain.iter().map(|path| (path.canonicalize().unwrap(), read_all(path))).collect();
            assert_eq!(chain.last().unwrap().1, twin.model);
            for (upper, lower, keeps_childs) in merges {
                if chain.len() < 2 {
                    break;
                }
                let upper = 1 + usize::from(upper) % (chain.len() - 1);
                let lower = usize::from(lower) % upper;
                let options = MergeOptions {
                    into: Some(chain[lower].0.clone()),
                    keep: if keeps_childs { KeptName::Childs } else { KeptName::Parents },
                    ..MergeOptions::default()
                };
                let done = merge(&chain[upper].0, &options, &mut |_, _| true).unwrap();
                assert_eq!(done.relinked, chain.get(upper + 1).map(|(path, _)| path.clone()).as_slice());
                let held = chain[upper].1.clone();
                chain.splice(lower..=upper, [(done.disk.clone(), held)]);
                for (path, held) in &chain {
                    assert!(read_all(path) == *held, "{} reads otherwise", path.display());
                    sound(path);
                }
                assert_eq!(files(twin.dir.path()).len(), chain.len());
            }
            // What is left can be written, also above an image that was merged into.
            let (top, held) = chain.last_mut().unwrap();
            write(top, 12 * 512, 7, 4096);
            held[12 * 512..12 * 512 + 4096].fill(7);
            assert!(read_all(top) == *held);
            Ok(())
        })
        .unwrap();
}

/// d gets another link when c is merged into b. e has recorded when d was last changed.
#[test]
fn a_new_link_keeps_the_time_that_children_of_a_vhd_have_recorded() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(format!("{name}.vhd"));
    let mut parent = None;
    for name in ["a", "b", "c", "d"] {
        let request = CreateRequest { size_bytes: Some(8 * MIB), parent, ..CreateRequest::default() };
        create(path(name), &request).unwrap();
        parent = Some(path(name));
    }
    let an_hour_ago = SystemTime::now() - Duration::from_secs(3600);
    fs::File::options().write(true).open(path("d")).unwrap().set_modified(an_hour_ago).unwrap();
    create(path("e"), &CreateRequest { parent, ..CreateRequest::default() }).unwrap();
    let done = plain(&path("c")).unwrap();
    assert_eq!(done.relinked, [path("d").canonicalize().unwrap()]);
    write(&path("e"), 0, 7, 4096);
}

#[test]
fn any_image_into_any_ancestor_vhd() {
    run(Format::Vhd, 16 << 10, 24);
}

#[test]
fn any_image_into_any_ancestor_vhdx() {
    run(Format::Vhdx, 1 << 20, 24);
}

fn pair(extension: &str) -> (TempDir, PathBuf, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let base = dir.path().canonicalize().unwrap().join(format!("base.{extension}"));
    create(&base, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    write(&base, 0, 1, 65536);
    let top = child(&base, &format!("top.{extension}"));
    write(&top, 4096, 2, 4096);
    (dir, base, top)
}

#[test]
fn a_dry_run_changes_nothing() {
    for extension in ["vhd", "vhdx"] {
        let (dir, base, top) = pair(extension);
        let held = (fs::read(&base).unwrap(), fs::read(&top).unwrap());
        let options = MergeOptions { dry_run: true, ..MergeOptions::default() };
        let would = merge(&top, &options, &mut |_, _| true).unwrap();
        assert_eq!((would.disk.as_path(), &would.merged[..]), (base.as_path(), &[top.clone()][..]));
        assert_eq!((would.data_bytes, would.copied_bytes, would.growth_bytes), (4096, 0, 0));
        assert!((fs::read(&base).unwrap(), fs::read(&top).unwrap()) == held);
        let done = plain(&top).unwrap();
        assert_eq!((done.data_bytes, done.copied_bytes + done.cloned_bytes), (4096, 4096));
        assert_eq!(files(dir.path()), [format!("base.{extension}")]);
        assert_eq!(read_all(&base)[4096], 2);
    }
}

#[test]
fn a_larger_child_enlarges_its_parent() {
    for extension in ["vhd", "vhdx"] {
        let (_dir, base, top) = pair(extension);
        let larger = ResizeOptions { size: NewSize::Bytes(32 * MIB), ..ResizeOptions::default() };
        resize(&top, &larger, &mut |_, _| true).unwrap();
        write(&top, 31 * MIB, 9, 4096);
        assert_eq!(plain(&top).unwrap().size_bytes, (16 * MIB, 32 * MIB));
        let held = read_all(&base);
        assert_eq!((held.len() as u64, held[31 * MIB as usize], held[0]), (32 * MIB, 9, 1));
    }
}

#[test]
fn a_child_without_data_and_a_fixed_parent() {
    let dir = tempfile::tempdir().unwrap();
    for extension in ["vhd", "vhdx"] {
        let base = dir.path().canonicalize().unwrap().join(format!("fixed.{extension}"));
        let request =
            CreateRequest { size_bytes: Some(4 * MIB), disk_type: Some(DiskType::Fixed), ..CreateRequest::default() };
        create(&base, &request).unwrap();
        write(&base, 0, 3, 4096);
        let empty = child(&base, &format!("empty.{extension}"));
        assert_eq!(plain(&empty).unwrap().data_bytes, 0);
        let top = child(&base, &format!("top.{extension}"));
        write(&top, MIB, 4, 4096);
        assert_eq!(plain(&top).unwrap().growth_bytes, 0);
        let held = read_all(&base);
        assert_eq!((held[0], held[MIB as usize]), (3, 4));
        sound(&base);
    }
}

#[test]
fn other_children_of_the_target_refuse_it() {
    for extension in ["vhd", "vhdx"] {
        let (dir, base, top) = pair(extension);
        let upper = child(&top, &format!("upper.{extension}"));
        write(&upper, 0, 5, 512);
        let sibling = child(&top, &format!("sibling.{extension}"));
        let into = MergeOptions { into: Some(base.clone()), ..MergeOptions::default() };
        let error = merge(&upper, &into, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains(&*sibling.to_string_lossy()), "{error}");
        assert_eq!(read_all(&sibling)[4096], 2);
        // Children of the image that is merged do not.
        let done = plain(&top).unwrap();
        assert_eq!(done.relinked, [sibling.clone(), upper.clone()]);
        assert_eq!((read_all(&sibling)[4096], read_all(&upper)[0]), (2, 5));
        write(&upper, 0, 6, 512);
        fs::remove_file(&sibling).unwrap();
        // A child in another folder is found where the caller says so.
        let elsewhere = dir.path().join("elsewhere");
        fs::create_dir(&elsewhere).unwrap();
        let far = elsewhere.join(format!("far.{extension}"));
        create(&far, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
        let options = MergeOptions { search_dirs: vec![elsewhere], ..MergeOptions::default() };
        let error = merge(&upper, &options, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("far."), "{error}");
    }
}

#[test]
fn bad_requests_change_nothing() {
    let (dir, base, top) = pair("vhdx");
    let names = files(dir.path());
    let held = (fs::read(&base).unwrap(), fs::read(&top).unwrap());
    let into = |path: &Path| MergeOptions { into: Some(path.to_owned()), ..MergeOptions::default() };
    let says = |result: diskwright_disk::Result<Merged>, text: &str| {
        let error = result.unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        error
    };
    says(plain(&base), "no parent");
    says(merge(&top, &into(&top), &mut |_, _| true), "into itself");
    let other = base.with_file_name("other.vhdx");
    create(&other, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    says(merge(&top, &into(&other), &mut |_, _| true), "not among its ancestors");
    fs::remove_file(&other).unwrap();
    let open = Disk::open(&top, &OpenOptions::default()).unwrap();
    assert!(matches!(plain(&top).unwrap_err(), DiskError::InUse { .. }));
    drop(open);
    // A child that is smaller than its parent.
    let big = dir.path().canonicalize().unwrap().join("big.vhdx");
    create(&big, &CreateRequest { size_bytes: Some(16 * MIB), ..CreateRequest::default() }).unwrap();
    let small = big.with_file_name("small.vhdx");
    let request = CreateRequest { parent: Some(big), size_bytes: Some(8 * MIB), ..CreateRequest::default() };
    create(&small, &request).unwrap();
    says(plain(&small), "larger disk");
    assert!((fs::read(&base).unwrap(), fs::read(&top).unwrap()) == held);
    assert_eq!(names.len() + 2, files(dir.path()).len());
}

/// A search for other children that had to stop proves nothing.
#[test]
fn too_many_images_in_the_folder_refuse_it() {
    for extension in ["vhd", "vhdx"] {
        let (dir, base, top) = pair(extension);
        let held = (fs::read(&base).unwrap(), fs::read(&top).unwrap());
        let many: Vec<_> = (0..4100).map(|number| dir.path().join(format!("n{number}.{extension}"))).collect();
        many.iter().for_each(|path| fs::write(path, b"").unwrap());
        let disk = Disk::open(&top, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        let in_use = disk.absorb(&diskwright_disk::AbsorbOptions::default(), &mut |_, _| true).unwrap_err();
        disk.close().unwrap();
        drop(disk);
        for error in [plain(&top).unwrap_err(), in_use] {
            assert!(error.to_string().contains("could not be checked for children"), "{error}");
        }
        assert!((fs::read(&base).unwrap(), fs::read(&top).unwrap()) == held);
        many.iter().for_each(|path| fs::remove_file(path).unwrap());
        plain(&top).unwrap();
    }
}

/// A merge that is stopped at any moment leaves a child that reads as before, and the same call
/// finishes it.
#[test]
fn a_stopped_merge_is_finished_by_the_same_call() {
    for extension in ["vhd", "vhdx"] {
        let (dir, base, top) = pair(extension);
        for block in 0..16 {
            write(&top, block * MIB + 8192, 10 + block as u8, 8192);
        }
        let upper = child(&top, &format!("upper.{extension}"));
        write(&upper, 0, 5, 512);
        let (before, above) = (read_all(&top), read_all(&upper));
        let error = merge(&top, &MergeOptions::default(), &mut |_, _| false).unwrap_err();
        assert!(matches!(error, DiskError::Stopped), "{error}");
        assert!(read_all(&top) == before && read_all(&upper) == above);
        write(&upper, 0, 5, 512);
        plain(&top).unwrap();
        assert!(read_all(&base) == before && read_all(&upper) == above);
        assert_eq!(files(dir.path()), [format!("base.{extension}"), format!("upper.{extension}")]);
    }
}

/// After the mark the child is only removed: what was written to its children since is kept, and it
/// cannot be written itself.
#[test]
fn a_child_that_was_merged_cannot_be_written() {
    for extension in ["vhd", "vhdx"] {
        let (dir, base, top) = pair(extension);
        let copy = top.with_extension("kept");
        fs::copy(&top, &copy).unwrap();
        let (identity, link) = {
            plain(&top).unwrap();
            let disk = Disk::open(&base, &OpenOptions::default()).unwrap();
            let identity = disk.layers()[0].image.linkage_id().unwrap();
            fs::rename(&copy, &top).unwrap();
            let options = OpenOptions { scope: diskwright_disk::ChainScope::Top, ..OpenOptions::default() };
            let info = Disk::open(&top, &options).unwrap().layers()[0].image.info().clone();
            (identity, info)
        };
        // As after a cut before the removal.
        let mut marked = link.parent.clone().unwrap();
        marked.linkage = Some(identity);
        marked.linkage2 = link
            .linkage_id
            .map(|id| uuid::Uuid::from_u128(id.to_uuid().as_u128() ^ identity.to_uuid().as_u128()).into());
        marked.modified_seconds = marked.modified_seconds.map(|_| 1);
        let store = diskwright_store::FileStore::open(
            &top,
            &diskwright_store::OpenOptions { writable: true, ..Default::default() },
        )
        .unwrap();
        let image = link.format.driver().open(std::sync::Arc::new(store), true, 512).unwrap();
        image.writer().unwrap().set_parent_link(&marked).unwrap();
        image.writer().unwrap().close().unwrap();
        drop(image);
        let writing = OpenOptions { writable: true, ..OpenOptions::default() };
        let error = Disk::open(&top, &writing).unwrap_err().to_string();
        assert!(error.contains("merge was interrupted"), "{error}");
        let warned = Disk::open(&top, &OpenOptions::default()).unwrap();
        assert!(warned.warnings().iter().any(|warning| warning.contains("merge was interrupted")));
        drop(warned);
        // The parent has other children by now, and they are written.
        let later = child(&base, &format!("later.{extension}"));
        write(&later, 0, 8, 512);
        let held = read_all(&later);
        let done = plain(&top).unwrap();
        assert_eq!((done.data_bytes, done.copied_bytes), (0, 0));
        assert!(read_all(&later) == held);
        assert_eq!(files(dir.path()), [format!("base.{extension}"), format!("later.{extension}")]);
    }
}

/// Needs root.
#[test]
fn too_little_space_and_a_read_only_folder_change_nothing() {
    let small = match crate::small_fs::Small::new("ext4", 160 * MIB) {
        Ok(small) => small,
        Err(what) => return println!("skipped: a merge on a full file system: {what}"),
    };
    let base = small.mount.canonicalize().unwrap().join("base.vhdx");
    create(&base, &CreateRequest { size_bytes: Some(64 * MIB), ..CreateRequest::default() }).unwrap();
    let top = child(&base, "top.vhdx");
    write(&top, 0, 3, 40 << 20);
    let held = (fs::read(&base).unwrap(), fs::read(&top).unwrap());
    crate::small_fs::eat_all(&small.mount.join("filler"));
    let error = plain(&top).unwrap_err().to_string();
    assert!(error.contains("needs about 40 MiB") && error.contains("are free"), "{error}");
    fs::remove_file(small.mount.join("filler")).unwrap();
    let remount = |how: &str| {
        let done = std::process::Command::new("mount").args(["-o", how]).arg(&small.mount).status().unwrap();
        assert!(done.success(), "{how}");
    };
    remount("remount,ro");
    let error = plain(&top).unwrap_err();
    assert_eq!(error.code().as_str(), "read_only", "{error}");
    remount("remount,rw");
    assert!((fs::read(&base).unwrap(), fs::read(&top).unwrap()) == held);
    plain(&top).unwrap();
    assert_eq!(read_all(&base)[40 * MIB as usize - 1], 3);
}

#[test]
fn folders_and_names_of_all_kinds() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().canonicalize().unwrap();
    let (below, above) = (root.join("eine Ablage"), root.join("eine Ablage/ünten"));
    fs::create_dir_all(&above).unwrap();
    let base = below.join(format!("{}.vhdx", "b".repeat(250)));
    create(&base, &CreateRequest { size_bytes: Some(4 * MIB), ..CreateRequest::default() }).unwrap();
    let top = above.join("größer als vorher.vhdx");
    create(&top, &CreateRequest { parent: Some(base.clone()), ..CreateRequest::default() }).unwrap();
    let open =
        OpenOptions { parents: ParentPolicy { allow_any: true, ..ParentPolicy::default() }, ..OpenOptions::default() };
    {
        let disk = Disk::open(&top, &OpenOptions { writable: true, ..open.clone() }).unwrap();
        Blocking::open(&*disk, EngineKind::Auto).unwrap().write(0, &[7; 512], false).unwrap();
    }
    let keep = MergeOptions { keep: KeptName::Childs, open: open.clone(), ..MergeOptions::default() };
    let error = merge(&top, &keep, &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("different folders"), "{error}");
    merge(&top, &MergeOptions { open, ..MergeOptions::default() }, &mut |_, _| true).unwrap();
    assert_eq!((read_all(&base)[0], top.exists()), (7, false));
}
