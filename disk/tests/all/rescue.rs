//! Rescue of images whose tables are damaged, against a model that knows what was lost.

use crate::rescuing::{MIB, Table, folder, image, noise, path_of, rescued, same_as, tool, write, write_all};
use diskwright_disk::{CreateRequest, DiskError, OpenOptions, RangeKind, RescueOptions, create, rescue};
use diskwright_image::{DiskType, Format};
use diskwright_store::{
    FileSystem, Files, LocalFiles, OpenError, Store,
    testing::{ForwardingFileSystem, ForwardingStore},
};
use proptest::prelude::*;
use std::{fs, io, path::Path, sync::Arc};

const FORMATS: [Format; 5] = [Format::Vhdx, Format::Vhd, Format::Vdi, Format::Qcow2, Format::Vmdk];
const BLOCK: u64 = MIB;
const BLOCKS: u64 = 12;

/// What becomes of an entry.
#[derive(Debug, Clone, Copy)]
enum Harm {
    None,
    /// The entry says that the block has no space.
    Wiped,
    /// The entry points beyond the file.
    Garbled,
    /// The entry has the value of the next one.
    Copied,
}

fn harms() -> impl Strategy<Value = Vec<Harm>> {
    let harm =
        prop_oneof![4 => Just(Harm::None), 1 => Just(Harm::Wiped), 1 => Just(Harm::Garbled), 1 => Just(Harm::Copied)];
    prop::collection::vec(harm, BLOCKS as usize)
}

/// Every second block but the last three has data.
fn contents(seed: u64) -> Vec<u8> {
    let mut contents = noise(seed, BLOCKS * BLOCK);
    for block in (0..BLOCKS).filter(|block| block % 3 == 2) {
        contents[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(0);
    }
    contents
}

/// Damages the entries, and returns the blocks whose data no valid entry names any more.
fn damage(path: &Path, format: Format, harms: &[Harm]) -> Vec<u64> {
    let mut bytes = fs::read(path).unwrap();
    let table = Table::of(format, &bytes);
    let had: Vec<bool> = (0..BLOCKS).map(|block| table.has_space(&bytes, block)).collect();
    let mut lost = Vec::new();
    for (block, harm) in (0..).zip(harms) {
        match harm {
            Harm::None => continue,
            Harm::Wiped => table.wipe(&mut bytes, block),
            Harm::Garbled => table.garble(&mut bytes, block),
            // Two entries name the same space. (If the other one is damaged too, nothing
            // contradicts the wrong one: no reader can know that it is wrong.)
            Harm::Copied if !matches!(harms.get((block as usize + 1) % BLOCKS as usize), None | Some(Harm::None)) => {
                continue;
            }
            Harm::Copied => {
                let next = table.entry(&bytes, (block + 1) % BLOCKS).to_vec();
                table.set(&mut bytes, block, &next);
            }
        }
        if had[block as usize] {
            lost.push(block);
        }
    }
    fs::write(path, bytes).unwrap();
    lost
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    /// What is called readable is what was written, whatever was done to the table.
    #[test]
    fn no_block_is_ever_wrong(seed: u64, harms in harms(), which in 0_usize..FORMATS.len()) {
        let (dir, format) = (folder(), FORMATS[which]);
        let path = path_of(dir.path(), "disk", format);
        let model = contents(seed);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let lost = damage(&path, format, &harms);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        same_as(&found, &copy, &model);
        // Data without an entry is always found in the file, and named.
        prop_assert_eq!(!lost.is_empty() || found.lost_bytes > 0, !found.is_whole() || !found.leftovers.is_empty());
        for block in lost {
            let kind = found.ranges.iter().find(|range| range.offset_bytes + range.len_bytes > block * BLOCK).unwrap().kind;
            prop_assert!(matches!(kind, RangeKind::Lost | RangeKind::Doubted), "block {}: {:?}", block, kind);
        }
    }

    /// A lost block of a child never shows its parent's data.
    #[test]
    fn a_child_never_shows_stale_data(seed: u64, harms in harms(), which in 0_usize..FORMATS.len()) {
        let (dir, format) = (folder(), FORMATS[which]);
        let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
        let mut model = noise(!seed, BLOCKS * BLOCK);
        image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &model);
        create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
        let own = contents(seed);
        write(&child, &own);
        for (to, from) in model.chunks_mut(BLOCK as usize).zip(own.chunks(BLOCK as usize)) {
            if from.iter().any(|byte| *byte != 0) {
                to.copy_from_slice(from);
            }
        }
        damage(&child, format, &harms);
        let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
        same_as(&found, &copy, &model);
        prop_assert_eq!(found.doubted_bytes, 0, "what a child may have lost is lost");
    }
}

/// A sound image is copied whole, through its log too.
#[test]
fn a_sound_image_is_copied_whole() {
    for format in FORMATS {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        let model = contents(1);
        image(&path, None, DiskType::Dynamic, &model);
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        same_as(&found, &copy, &model);
        assert!(found.is_whole() && found.leftovers.is_empty() && found.placed.is_empty(), "{format}: {found:?}");
        assert!(found.remarks.is_empty(), "{format}: {:?}", found.remarks);
        // A qcow2 has no fixed type, and a fixed VMDK has no tables.
        if matches!(format, Format::Qcow2 | Format::Vmdk) {
            continue;
        }
        let fixed = path_of(dir.path(), "fixed", format);
        image(&fixed, None, DiskType::Fixed, &model);
        let (found, copy) = rescued(dir.path(), &fixed, &RescueOptions::default());
        same_as(&found, &copy, &model);
        assert!(found.is_whole(), "{format}: {found:?}");
    }
}

/// Either copy of each structure is enough.
#[test]
fn one_copy_of_each_structure_is_enough() {
    type Harm = (&'static str, Format, fn(&mut Vec<u8>));
    let cases: [Harm; 9] = [
        ("file identifier", Format::Vhdx, |bytes| bytes[..512].fill(0)),
        ("first header", Format::Vhdx, |bytes| bytes[64 << 10..68 << 10].fill(0)),
        ("second header", Format::Vhdx, |bytes| bytes[128 << 10..132 << 10].fill(0)),
        ("first region table", Format::Vhdx, |bytes| bytes[192 << 10..256 << 10].fill(0)),
        ("second region table", Format::Vhdx, |bytes| bytes[256 << 10..320 << 10].fill(0)),
        ("both region tables", Format::Vhdx, |bytes| bytes[192 << 10..320 << 10].fill(0)),
        ("footer", Format::Vhd, |bytes| bytes.truncate(bytes.len() - 512)),
        ("copy of the footer", Format::Vhd, |bytes| bytes[..512].fill(0)),
        ("both footers", Format::Vhd, |bytes| {
            bytes[..512].fill(0);
            bytes.truncate(bytes.len() - 512);
        }),
    ];
    for (what, format, harm) in cases {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        let model = contents(2);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let mut bytes = fs::read(&path).unwrap();
        harm(&mut bytes);
        fs::write(&path, bytes).unwrap();
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        same_as(&found, &copy, &model);
        assert!(found.is_whole(), "{what}: {found:?}");
        assert!(!found.remarks.is_empty() || what == "second region table", "{what}");
    }
}

/// Without the metadata of a VHDX the user names what is lost.
#[test]
fn lost_metadata_are_named_by_the_user() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhdx);
    let model = contents(3);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
    let mut bytes = fs::read(&path).unwrap();
    bytes[2 << 20..3 << 20].fill(0);
    fs::write(&path, bytes).unwrap();
    let mut options = RescueOptions::default();
    let dest = dir.path().join("dest.raw");
    for option in ["block_bytes", "size_bytes"] {
        let error = rescue(&path, &dest, &options, &mut |_, _| true).unwrap_err().to_string();
        assert!(error.contains(&format!("`RescueOptions::{option}`")), "{error}");
        assert!(!dest.exists());
        match option {
            "block_bytes" => options.block_bytes = Some(BLOCK as u32),
            _ => options.size_bytes = Some(BLOCKS * BLOCK),
        }
    }
    let (found, copy) = rescued(dir.path(), &path, &options);
    same_as(&found, &copy, &model);
    assert!(!found.is_whole(), "it may be a child, whose parent has the rest");
    options.no_parent = true;
    let (found, copy) = rescued(dir.path(), &path, &options);
    same_as(&found, &copy, &model);
    assert!(found.is_whole());
}

/// A fixed VHD that lost its footer is read with the size that the user names; what was cut is
/// lost.
#[test]
fn a_fixed_vhd_without_its_footer() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhd);
    let model = noise(4, 6 * MIB);
    image(&path, None, DiskType::Fixed, &model);
    let held = 4 * MIB + 512 * 3;
    fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(held).unwrap();
    let dest = dir.path().join("dest.raw");
    let error = rescue(&path, &dest, &RescueOptions::default(), &mut |_, _| true).unwrap_err().to_string();
    assert!(error.contains("`RescueOptions::size_bytes`"), "{error}");
    let options = RescueOptions { size_bytes: Some(6 * MIB), ..RescueOptions::default() };
    let (found, copy) = rescued(dir.path(), &path, &options);
    same_as(&found, &copy, &model);
    assert_eq!((found.data_bytes, found.lost_bytes), (held, 6 * MIB - held));
}

/// A file that was cut loses what lay behind the cut, to the sector.
#[test]
fn a_truncated_file_loses_what_was_cut() {
    for format in FORMATS {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        let model = noise(5, BLOCKS * BLOCK);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        let held = 9 * MIB + 512 * 5;
        fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(held).unwrap();
        let (found, copy) = rescued(dir.path(), &path, &RescueOptions::default());
        same_as(&found, &copy, &model);
        assert!(found.data_bytes > 4 * MIB && found.lost_bytes > 0, "{format}: {found:?}");
        assert_eq!((found.doubted_bytes, found.data_bytes % 512), (0, 0), "{format}");
        assert!(found.data_bytes % BLOCK != 0, "{format}: a part of a block is kept");
    }
}

/// A child whose parent is gone keeps its own blocks; the parent's are lost.
#[test]
fn a_child_without_its_parent_keeps_its_own_blocks() {
    for format in FORMATS {
        let dir = folder();
        let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
        image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &noise(6, BLOCKS * BLOCK));
        create(&child, &CreateRequest { parent: Some(parent.clone()), ..CreateRequest::default() }).unwrap();
        let own = contents(7);
        write(&child, &own);
        fs::remove_file(parent).unwrap();
        let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
        same_as(&found, &copy, &own);
        assert_eq!(found.lost_bytes, BLOCKS / 3 * BLOCK, "{format}");
        assert!(found.remarks.iter().any(|remark| remark.contains("its parent was not found")), "{:?}", found.remarks);
    }
}

/// A wiped entry of a block of zeros: nothing in the file is data, but the parent's data there are
/// old.
#[test]
fn a_wiped_block_of_zeros_is_lost_too() {
    for format in FORMATS {
        let dir = folder();
        let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
        let base = noise(20, BLOCKS * BLOCK);
        image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &base);
        create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
        let mut own = contents(21);
        own[BLOCK as usize..2 * BLOCK as usize].fill(0);
        // Data, then zeros over them: the block keeps its space.
        write(&child, &contents(21)[..(5 * BLOCK) as usize]);
        write_all(&child, &own[..(5 * BLOCK) as usize]);
        let mut bytes = fs::read(&child).unwrap();
        let table = Table::of(format, &bytes);
        assert!(table.has_space(&bytes, 1), "{format}");
        table.wipe(&mut bytes, 1);
        fs::write(&child, bytes).unwrap();
        let (found, copy) = rescued(dir.path(), &child, &RescueOptions::default());
        assert!(copy[BLOCK as usize..2 * BLOCK as usize].iter().all(|byte| *byte == 0), "{format}: stale data");
        let range = found.ranges.iter().find(|range| range.offset_bytes + range.len_bytes > BLOCK).unwrap();
        assert_eq!(range.kind, RangeKind::Lost, "{format}: {:?}", found.ranges);
    }
}

/// An image with data that no entry names, in which the user trusts the table.
#[test]
fn the_user_can_trust_the_table() {
    let dir = folder();
    let format = Format::Vhdx;
    let (parent, child) = (path_of(dir.path(), "parent", format), path_of(dir.path(), "child", format));
    let base = noise(8, BLOCKS * BLOCK);
    image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &base);
    create(&child, &CreateRequest { parent: Some(parent), ..CreateRequest::default() }).unwrap();
    write(&child, &contents(9)[..(4 * BLOCK) as usize]);
    let mut bytes = fs::read(&child).unwrap();
    let table = Table::of(format, &bytes);
    table.wipe(&mut bytes, 1);
    fs::write(&child, bytes).unwrap();
    let (found, _) = rescued(dir.path(), &child, &RescueOptions::default());
    assert_eq!(found.data_bytes, 2 * BLOCK, "only what has a valid entry");
    let (found, copy) = rescued(dir.path(), &child, &RescueOptions { trust_absent: true, ..RescueOptions::default() });
    assert_eq!((found.lost_bytes, found.leftovers.len()), (0, 1));
    assert!(copy[BLOCK as usize..(2 * BLOCK) as usize] == base[BLOCK as usize..(2 * BLOCK) as usize]);
}

/// Leftovers are saved, one file each.
#[test]
fn leftovers_are_saved() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhdx);
    let model = contents(10);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
    damage(&path, Format::Vhdx, &[Harm::Garbled, Harm::None, Harm::None, Harm::Wiped]);
    let saved = dir.path().join("leftovers");
    let (found, _) =
        rescued(dir.path(), &path, &RescueOptions { leftovers: Some(saved.clone()), ..RescueOptions::default() });
    assert_eq!(found.leftovers.len(), 2);
    for (piece, block) in found.leftovers.iter().zip([0, 3]) {
        let bytes = fs::read(saved.join(format!("{:016x}.bin", piece.file_offset_bytes))).unwrap();
        assert!(bytes == model[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize]);
    }
}

/// A file of which some sectors cannot be read.
#[derive(Debug)]
struct BadSectors {
    inner: Arc<dyn Store>,
    every: u64,
}

impl ForwardingStore for BadSectors {
    fn inner(&self) -> &dyn Store {
        &*self.inner
    }

    fn read_at(&self, buf: &mut [u8], offset_bytes: u64) -> io::Result<()> {
        let end = offset_bytes + buf.len() as u64;
        // One sector of every so many, from a MiB on.
        let first = offset_bytes - offset_bytes % self.every;
        let is_hit = |bad: u64| bad >= MIB && bad < end && offset_bytes < bad + 512;
        if is_hit(first) || is_hit(first + self.every) {
            return Err(io::Error::from_raw_os_error(5));
        }
        self.inner.read_at(buf, offset_bytes)
    }
}

/// A file system whose files have such sectors.
#[derive(Debug)]
struct FailingDisk(u64);

impl ForwardingFileSystem for FailingDisk {
    fn open(&self, path: &Path, options: &diskwright_store::OpenOptions) -> Result<Arc<dyn Store>, OpenError> {
        Ok(Arc::new(BadSectors { inner: LocalFiles.open(path, options)?, every: self.0 }))
    }
}

/// A read error of the source costs the sectors that cannot be read, and nothing else.
#[test]
fn read_errors_are_lost_ranges() {
    for (format, every) in [(Format::Vhdx, 640 << 10), (Format::Vhd, 640 << 10), (Format::Raw, 96 << 10)] {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        let model = noise(11, BLOCKS * BLOCK);
        let (block, disk_type) =
            if format == Format::Raw { (None, DiskType::Fixed) } else { (Some(BLOCK as u32), DiskType::Dynamic) };
        image(&path, block, disk_type, &model);
        let files = Files::new(Arc::new(FailingDisk(every)));
        let options =
            RescueOptions { source: OpenOptions { files, ..OpenOptions::default() }, ..RescueOptions::default() };
        let (found, copy) = rescued(dir.path(), &path, &options);
        same_as(&found, &copy, &model);
        assert!(found.lost_bytes > 0, "{format}: no sector was lost");
        assert!(found.lost_bytes <= BLOCKS * BLOCK / every * 512 + 8 * BLOCK, "{format}: {}", found.lost_bytes);
        assert!(found.data_bytes > 0, "{format}");
        if format == Format::Raw {
            assert_eq!(found.lost_bytes % 512, 0);
            assert!(found.lost_bytes <= BLOCKS * BLOCK / every * 512 + 512);
        }
    }
}

/// The result is a sound image of any format; other programs read it.
#[test]
fn other_programs_read_the_result() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhd);
    let model = contents(12);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
    damage(&path, Format::Vhd, &[Harm::None, Harm::Garbled]);
    let mut expected = model;
    expected[BLOCK as usize..2 * BLOCK as usize].fill(0);
    for (name, theirs) in [("new.vhdx", "vhdx"), ("new.vhd", "vpc")] {
        rescue(&path, dir.path().join(name), &RescueOptions::default(), &mut |_, _| true).unwrap();
        if tool(dir.path(), &format!("qemu-img convert -f {theirs} -O raw {name} theirs.raw")).is_some() {
            let read = fs::read(dir.path().join("theirs.raw")).unwrap();
            assert!(
                read[..expected.len()] == expected && read[expected.len()..].iter().all(|byte| *byte == 0),
                "{name}"
            );
        }
    }
}

/// A rescue that is stopped leaves nothing, and one never replaces a file.
#[test]
fn nothing_is_left_or_replaced() {
    let dir = folder();
    let path = path_of(dir.path(), "disk", Format::Vhdx);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &contents(13));
    damage(&path, Format::Vhdx, &[Harm::Garbled]);
    let dest = dir.path().join("dest.vhdx");
    for stop_at in [0, 1, 5, 9] {
        let mut calls = 0;
        let mut progress = |_, _| {
            calls += 1;
            calls <= stop_at
        };
        let stopped = rescue(&path, &dest, &RescueOptions::default(), &mut progress).unwrap_err();
        assert!(matches!(stopped, DiskError::Stopped), "{stopped}");
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1, "stopped at {stop_at}");
    }
    fs::write(&dest, b"mine").unwrap();
    let error = rescue(&path, &dest, &RescueOptions::default(), &mut |_, _| true).unwrap_err();
    assert!(matches!(error, DiskError::Exists { .. }), "{error}");
    assert_eq!(fs::read(&dest).unwrap(), b"mine");
}

/// Hostile files end in bounded time, with an error or with a copy of the size that they name.
#[test]
fn hostile_files_are_rescued_or_refused() {
    for format in FORMATS {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &contents(14)[..(2 * BLOCK) as usize]);
        let sound = fs::read(&path).unwrap();
        let entries = Table::of(format, &sound).offsets;
        let mut tables: Vec<(usize, usize)> = entries.iter().map(|&at| (at, at + 64)).collect();
        match format {
            Format::Vhd => tables.extend([(0, 2048), (2048, 4096)]),
            Format::Vhdx => tables.extend([
                (64 << 10, 320 << 10),
                (2 << 20, (2 << 20) + 1024),
                ((2 << 20) + (64 << 10), (2 << 20) + (65 << 10)),
            ]),
            // The header; the refcount table, a refcount block, the L1 table.
            Format::Qcow2 => tables.extend([0, 1 << 20, 2 << 20, 3 << 20].map(|at| (at, at + 112))),
            // The header, the descriptor and the directories.
            _ => tables.push((0, entries[0].min(16 << 10))),
        }
        let mut random = 88_172_645_463_325_252_u64;
        for round in 0..60 {
            let mut bytes = sound.clone();
            for _ in 0..1 + round % 4 {
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let (start, end) = tables[random as usize % tables.len()];
                let at = start + (random >> 16) as usize % (end - start);
                bytes[at] ^= 1 << (random >> 60 & 7);
            }
            fs::write(&path, bytes).unwrap();
            let dest = dir.path().join("dest.vhdx");
            let _ = fs::remove_file(&dest);
            if let Ok(found) = rescue(&path, &dest, &RescueOptions::default(), &mut |_, _| true) {
                assert!(found.data_bytes <= sound.len() as u64, "{format}, round {round}: {found:?}");
            }
        }
    }
}
