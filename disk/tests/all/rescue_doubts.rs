//! Rescue where the image does not say what is right: whether it has a parent, which of two pieces
//! is a block, and tables that claim more than the file has.

use crate::rescuing::{MIB, Table, folder, image, noise, path_of, rescued, same_as, tool, write};
use diskwright_disk::{CreateRequest, DiskError, RangeKind, RescueOptions, Rescued, create, rescue};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    FileSystem, Files, LocalFiles, OpenError, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use std::{
    fs, io,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};
use tempfile::TempDir;

const FORMATS: [Format; 2] = [Format::Vhdx, Format::Vhd];
const BLOCK: u64 = MIB;
const BLOCKS: u64 = 8;

/// A parent full of noise, and a child with these contents, in a folder.
fn family(format: Format, own: &[u8], name: &str) -> (TempDir, PathBuf, PathBuf, Vec<u8>) {
    let dir = folder();
    let (parent, child) = (path_of(dir.path(), "parent", format), dir.path().join(name));
    let mut model = noise(3, BLOCKS * BLOCK);
    image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &model);
    create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
    write(&child, own);
    for (to, from) in model.chunks_mut(64 << 10).zip(own.chunks(64 << 10)) {
        if from.iter().any(|byte| *byte != 0) {
            to.copy_from_slice(from);
        }
    }
    (dir, parent, child, model)
}

/// Destroys all records of whether the image has a parent.
fn forget_the_parent(path: &Path, format: Format) {
    let mut bytes = fs::read(path).unwrap();
    if format == Format::Vhdx {
        bytes[2 << 20..3 << 20].fill(0);
    } else {
        let end = bytes.len() - 512;
        bytes[..512 + 1024].fill(0);
        bytes[end..].fill(0);
    }
    fs::write(path, bytes).unwrap();
}

fn told() -> RescueOptions {
    RescueOptions { size_bytes: Some(BLOCKS * BLOCK), block_bytes: Some(BLOCK as u32), ..RescueOptions::default() }
}

fn lost(found: &Rescued) -> Vec<&str> {
    found.ranges.iter().filter_map(|range| range.reason.as_deref()).collect()
}

/// Blocks 1 and 4 are written wholly.
fn two_blocks() -> Vec<u8> {
    let mut own = vec![0; (BLOCKS * BLOCK) as usize];
    for block in [1, 4] {
        let range = (block * BLOCK) as usize..((block + 1) * BLOCK) as usize;
        own[range].copy_from_slice(&noise(block + 50, BLOCK));
    }
    own
}

/// A VHDX that has lost its metadata and has no block that is partially present: a child and a disk
/// without a parent look the same. What may be the parent's is lost, and that is told.
#[test]
fn what_may_be_a_parents_is_lost_and_told() {
    let (format, nothing) = (Format::Vhdx, vec![0; (BLOCKS * BLOCK) as usize]);
    let (dir, parent, child, model) = family(format, &nothing, "child.vhdx");
    forget_the_parent(&child, format);
    let (found, copy) = rescued(dir.path(), &child, &told());
    same_as(&found, &copy, &model);
    assert_eq!((found.lost_bytes, found.zero_bytes), (BLOCKS * BLOCK, 0));
    assert!(lost(&found).iter().all(|reason| reason.contains("may be a parent's")), "{:?}", found.ranges);
    let remarks = found.remarks.join(" ");
    assert!(remarks.contains("`RescueOptions::parent`") && remarks.contains("`RescueOptions::no_parent`"), "{remarks}");
    // The user knows the parent, and then everything is there.
    let options = RescueOptions { parent: Some(parent), ..told() };
    let (found, copy) = rescued(dir.path(), &child, &options);
    same_as(&found, &copy, &model);
    assert!(found.is_whole() && found.remarks.iter().any(|remark| remark.contains("right one")), "{found:?}");
    // Or knows that there is none.
    let (found, copy) = rescued(dir.path(), &child, &RescueOptions { no_parent: true, ..told() });
    same_as(&found, &copy, &nothing);
    assert!(found.is_whole());
}

/// The name of a child, and a sector bitmap in the table, say that there is a parent.
#[test]
fn names_and_tables_say_that_there_is_a_parent() {
    let mut part = vec![0; (BLOCKS * BLOCK) as usize];
    part[..64 << 10].copy_from_slice(&noise(9, 64 << 10));
    for (name, own) in [("child.avhdx", two_blocks()), ("child.vhdx", part)] {
        let (dir, _, child, model) = family(Format::Vhdx, &own, name);
        forget_the_parent(&child, Format::Vhdx);
        let (found, copy) = rescued(dir.path(), &child, &told());
        same_as(&found, &copy, &model);
        assert!(found.lost_bytes > 0 && found.zero_bytes == 0 && found.doubted_bytes == 0, "{name}: {found:?}");
        assert!(lost(&found).iter().all(|reason| reason.contains("parent")), "{name}: {:?}", lost(&found));
    }
    // The table wins over what the user says.
    let mut part = vec![0; (BLOCKS * BLOCK) as usize];
    part[..64 << 10].copy_from_slice(&noise(9, 64 << 10));
    let (dir, _, child, _) = family(Format::Vhdx, &part, "child.vhdx");
    forget_the_parent(&child, Format::Vhdx);
    let options = RescueOptions { no_parent: true, ..told() };
    let error = rescue(&child, dir.path().join("dest.raw"), &options, &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("has a parent"), "{error}");
}

/// Without footers and header a VHD may be a child: nothing is zeros in silence.
#[test]
fn a_vhd_without_footers_and_header_may_be_a_child() {
    for name in ["child.vhd", "child.avhd"] {
        let (dir, _, child, model) = family(Format::Vhd, &two_blocks(), name);
        forget_the_parent(&child, Format::Vhd);
        let (found, copy) = rescued(dir.path(), &child, &told());
        same_as(&found, &copy, &model);
        assert_eq!(found.lost_bytes, BLOCKS * BLOCK, "{name}: {found:?}");
    }
}

#[test]
fn a_parent_that_contradicts_the_records_is_refused() {
    for format in FORMATS {
        let (dir, parent, child, model) = family(format, &two_blocks(), &format!("child.{format}"));
        let dest = dir.path().join("dest.raw");
        let told = |path: &Path, options: &RescueOptions| {
            let error = rescue(path, &dest, options, &mut |_, _| true).unwrap_err();
            assert!(!dest.exists());
            error
        };
        let named = |parent: &Path| RescueOptions { parent: Some(parent.to_owned()), ..RescueOptions::default() };
        assert!(told(&parent, &named(&child)).to_string().contains("has no parent"));
        assert!(told(&child, &named(&child)).to_string().contains("its own parent"));
        let none = RescueOptions { no_parent: true, ..RescueOptions::default() };
        assert!(told(&child, &none).to_string().contains("has a parent"));
        let other = path_of(dir.path(), "other", format);
        image(&other, Some(BLOCK as u32), DiskType::Dynamic, &noise(4, BLOCKS * BLOCK));
        assert!(matches!(told(&child, &named(&other)), DiskError::ParentChanged { .. }));
        // The parent lies elsewhere by now.
        let moved = dir.path().join(format!("moved.{format}"));
        fs::rename(&parent, &moved).unwrap();
        let (found, copy) = rescued(dir.path(), &child, &named(&moved));
        same_as(&found, &copy, &model);
        assert!(found.is_whole(), "{format}: {found:?}");
    }
}

/// A small ext4 that fills the disk, of one group; its first block has all metadata.
fn ext4(dir: &Path, blocks: u64) -> Option<Vec<u8>> {
    fs::create_dir_all(dir.join("files/folder")).unwrap();
    for index in 0..40 {
        fs::write(dir.join(format!("files/folder/file-{index}")), noise(index, 5000)).unwrap();
    }
    fs::File::create(dir.join("fs.raw")).unwrap().set_len(blocks * BLOCK).unwrap();
    tool(dir, "mke2fs -q -F -t ext4 -b 1024 -I 256 -N 128 -O ^has_journal,^resize_inode -E nodiscard -d files fs.raw")?;
    Some(fs::read(dir.join("fs.raw")).unwrap())
}

fn wipe(path: &Path, format: Format, blocks: impl Iterator<Item = u64>) {
    let mut bytes = fs::read(path).unwrap();
    let table = Table::of(format, &bytes);
    blocks.for_each(|block| table.wipe(&mut bytes, block));
    fs::write(path, bytes).unwrap();
}

/// A second piece that claims a block, but only by what the first one tells of its file system:
/// neither is placed.
#[test]
fn a_late_second_claimant_is_not_ignored() {
    let dir = folder();
    let Some(model) = ext4(dir.path(), BLOCKS) else { return };
    let path = path_of(dir.path(), "disk", Format::Vhdx);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
    wipe(&path, Format::Vhdx, 0..BLOCKS);
    let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
    same_as(&found, &copy, &model);
    assert!(found.placed.iter().any(|placed| placed.offset_bytes == 0), "{:?}", found.placed);
    // The same block without its superblock, and with another file name.
    let mut rival = model[..BLOCK as usize].to_vec();
    rival[1024..2048].fill(0);
    let file = fs::File::options().write(true).open(&path).unwrap();
    let end = file.metadata().unwrap().len().next_multiple_of(MIB);
    file.write_all_at(&rival, end).unwrap();
    let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
    same_as(&found, &copy, &model);
    assert!(found.placed.iter().all(|placed| placed.offset_bytes != 0), "{:?}", found.placed);
    let several = found.leftovers.iter().filter(|left| left.reason.contains("several pieces")).count();
    assert!(several >= 2, "{:?}", found.leftovers);
}

/// An entry that is trusted is no place for a piece.
#[test]
fn a_trusted_table_gives_no_place() {
    let dir = folder();
    let Some(model) = ext4(dir.path(), BLOCKS) else { return };
    for format in FORMATS {
        let path = path_of(dir.path(), "disk", format);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        wipe(&path, format, 0..1);
        let (found, _) = rescued(dir.path(), &path, &RescueOptions::default());
        assert_eq!(found.placed.len(), 1, "{format}: {:?}", found.leftovers);
        let options = RescueOptions { trust_absent: true, ..RescueOptions::default() };
        let (found, copy) = rescued(dir.path(), &path, &options);
        assert!(found.placed.is_empty(), "{format}: {:?}", found.placed);
        assert!(copy[..BLOCK as usize].iter().all(|byte| *byte == 0));
        assert!(found.leftovers.iter().any(|left| left.reason.contains("trusted")), "{:?}", found.leftovers);
    }
}

/// The parent of a child has older metadata: it must not say where a block of the child belongs.
#[test]
fn a_parent_proves_nothing_for_its_child() {
    let dir = folder();
    let Some(model) = ext4(dir.path(), BLOCKS) else { return };
    for format in FORMATS {
        let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
        image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &model);
        create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
        // The first block without its superblock: only the parent's tells of the file system.
        let mut own = model[..BLOCK as usize].to_vec();
        own[..2048].fill(0);
        own[2048..4096].fill(1);
        write(&child, &own);
        wipe(&child, format, 0..1);
        let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
        assert!(found.placed.is_empty(), "{format}: {:?}", found.placed);
        assert!(copy[..BLOCK as usize].iter().all(|byte| *byte == 0), "{format}: stale data");
    }
}

/// Files whose reads are counted.
#[derive(Debug, Default)]
struct Counting {
    reads: Arc<AtomicU64>,
}

#[derive(Debug)]
struct CountedStore {
    inner: Arc<dyn Store>,
    reads: Arc<AtomicU64>,
}

impl ForwardingStore for CountedStore {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        self.reads.fetch_add(1, Ordering::Relaxed);
        self.inner.read_at(buf, offset_bytes)
    }
}

impl ForwardingFileSystem for Counting {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(CountedStore { inner: LocalFiles.open(path, options)?, reads: Arc::clone(&self.reads) }))
    }
}

/// Rescues with counted reads of the source.
fn counted(dir: &Path, path: &Path) -> (Result<Rescued, DiskError>, u64) {
    let files = Counting::default();
    let reads = Arc::clone(&files.reads);
    let mut options = RescueOptions::default();
    options.source.files = Files::new(Arc::new(files));
    let dest = dir.join("dest.vhdx");
    let _ = fs::remove_file(&dest);
    let found = rescue(path, &dest, &options, &mut |_, _| true);
    (found, reads.load(Ordering::Relaxed))
}

/// A VHD of a few KiB that claims a disk of `size_bytes` in blocks of `block_bytes`.
fn claiming(path: &Path, size_bytes: u64, block_bytes: u32) {
    let request =
        CreateRequest { size_bytes: Some(MIB), disk_type: Some(DiskType::Dynamic), ..CreateRequest::default() };
    create(path, &request).unwrap();
    let mut bytes = fs::read(path).unwrap();
    let seal = |bytes: &mut [u8], field: usize| {
        bytes[field..field + 4].fill(0);
        let sum = !bytes.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
        bytes[field..field + 4].copy_from_slice(&sum.to_be_bytes());
    };
    let end = bytes.len() - 512;
    for footer in [0, end] {
        bytes[footer + 40..footer + 48].copy_from_slice(&size_bytes.to_be_bytes());
        bytes[footer + 48..footer + 56].copy_from_slice(&size_bytes.to_be_bytes());
        seal(&mut bytes[footer..footer + 512], 64);
    }
    let blocks = u32::try_from(size_bytes / u64::from(block_bytes)).unwrap();
    bytes[512 + 28..512 + 32].copy_from_slice(&blocks.to_be_bytes());
    bytes[512 + 32..512 + 36].copy_from_slice(&block_bytes.to_be_bytes());
    seal(&mut bytes[512..1536], 36);
    fs::write(path, bytes).unwrap();
}

/// What is read depends on the file's length, not on what its tables claim.
#[test]
fn a_small_file_costs_few_reads_whatever_it_claims() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhd);
    claiming(&path, 32 << 30, 512);
    let (found, reads) = counted(dir.path(), &path);
    let found = found.unwrap();
    assert_eq!(found.size_bytes, 32 << 30);
    assert!(found.lost_bytes > 31 << 30, "{} lost", found.lost_bytes);
    assert!(found.ranges.iter().any(|range| range.kind == RangeKind::Lost));
    assert!(reads < 2000, "{reads} reads");
    fs::remove_file(&path).unwrap();
    claiming(&path, 2000 << 30, 512);
    let (found, reads) = counted(dir.path(), &path);
    assert!(found.unwrap_err().to_string().contains("blocks of 512 bytes"));
    assert!(reads < 2000, "{reads} reads");
}

/// A leftover is saved whole, however long it is.
#[test]
fn a_long_leftover_is_saved_whole() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhd);
    claiming(&path, 1 << 30, 512 << 20);
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    let end = file.metadata().unwrap().len();
    file.write_all_at(&[7; 4096], end).unwrap();
    file.write_all_at(&[8; 4096], end + 300 * MIB).unwrap();
    let pieces = dir.path().join("pieces");
    let options = RescueOptions { leftovers: Some(pieces.clone()), ..RescueOptions::default() };
    let found = rescue(&path, dir.path().join("dest.vhdx"), &options, &mut |_, _| true).unwrap();
    let left = found.leftovers.iter().find(|left| left.len_bytes > 256 * MIB).expect("one long piece");
    let saved = fs::File::open(pieces.join(format!("{:016x}.bin", left.file_offset_bytes))).unwrap();
    assert_eq!(saved.metadata().unwrap().len(), left.len_bytes);
    let mut last = [0; 4096];
    saved.read_exact_at(&mut last, left.len_bytes - 4096).unwrap();
    assert_eq!(last, [8; 4096]);
}
