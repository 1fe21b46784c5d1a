//! Rescue of qcow2, VDI and VMDK images whose own structures are damaged: what one structure has
//! lost, another one tells, and what none tells is lost.

use crate::rescuing::{MIB, Table, folder, image, noise, path_of, rescued, same_as, tool};
use diskwright_disk::{ConvertOptions, CreateRequest, RescueOptions, Rescued, convert, rescue};
use diskwright_image::{DiskType, Format};
use proptest::prelude::*;
use std::{fs, path::Path};

const FORMATS: [Format; 3] = [Format::Vdi, Format::Qcow2, Format::Vmdk];
const BLOCK: u64 = MIB;
const BLOCKS: u64 = 10;

type Harm = fn(&mut Vec<u8>);

/// Every third block reads as zeros.
fn contents(seed: u64) -> Vec<u8> {
    let mut contents = noise(seed, BLOCKS * BLOCK);
    for block in (0..BLOCKS).filter(|block| block % 3 == 1) {
        contents[(block * BLOCK) as usize..((block + 1) * BLOCK) as usize].fill(0);
    }
    contents
}

/// What a user knows of a disk whose header is lost.
fn told() -> RescueOptions {
    RescueOptions {
        size_bytes: Some(BLOCKS * BLOCK),
        block_bytes: Some(BLOCK as u32),
        no_parent: true,
        ..RescueOptions::default()
    }
}

fn u32_le(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

fn u64_be(bytes: &[u8], at: usize) -> usize {
    (u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) & 0x00ff_ffff_ffff_fe00) as usize
}

/// The directories of a VMDK, the first one first.
fn directories(bytes: &[u8]) -> [usize; 2] {
    [56, 48].map(|at| u32_le(bytes, at) * 512)
}

#[track_caller]
fn after(format: Format, harm: Harm, options: &RescueOptions) -> (Rescued, Vec<u8>, Vec<u8>) {
    let dir = folder();
    let path = path_of(dir.path(), "disk", format);
    let model = contents(31);
    image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
    let mut bytes = fs::read(&path).unwrap();
    harm(&mut bytes);
    fs::write(&path, bytes).unwrap();
    let (found, copy) = rescued(dir.path(), &path, options);
    same_as(&found, &copy, &model);
    (found, copy, model)
}

#[test]
fn what_another_structure_tells_is_not_lost() {
    let plain = RescueOptions::default();
    let cases: [(&str, Format, Harm, &RescueOptions); 17] = [
        ("the signature", Format::Vdi, |b| b[0x40..0x44].fill(0), &plain),
        ("version, header length and kind", Format::Vdi, |b| b[0x44..0x50].fill(0xff), &told()),
        ("the places of map and data", Format::Vdi, |b| b[0x154..0x15c].fill(0x11), &plain),
        ("the header", Format::Vdi, |b| b[..512].fill(0), &told()),
        ("the magic number", Format::Qcow2, |b| b[..4].fill(0), &plain),
        ("the extensions", Format::Qcow2, |b| b[112..512].fill(0xee), &plain),
        ("the corrupt and the dirty bit", Format::Qcow2, |b| b[79] |= 3, &plain),
        (
            "the refcounts",
            Format::Qcow2,
            |b| {
                let at = u64_be(b, u64_be(b, 48));
                b[at..at + 64].fill(0)
            },
            &plain,
        ),
        ("the header", Format::Vmdk, |b| b[..512].fill(0), &told()),
        (
            "the first directory",
            Format::Vmdk,
            |b| {
                let at = directories(b)[0];
                b[at..at + 512].fill(0)
            },
            &plain,
        ),
        (
            "the second directory",
            Format::Vmdk,
            |b| {
                let at = directories(b)[1];
                b[at..at + 512].fill(9)
            },
            &plain,
        ),
        (
            "the first table",
            Format::Vmdk,
            |b| {
                let at = Table::of(Format::Vmdk, b).offsets[0];
                b[at..at + 2048].fill(0)
            },
            &plain,
        ),
        (
            "the second table",
            Format::Vmdk,
            |b| {
                let at = Table::of(Format::Vmdk, b).offsets[1];
                b[at..at + 2048].fill(0xd7)
            },
            &plain,
        ),
        (
            "the first table, noise",
            Format::Vmdk,
            |b| {
                let at = Table::of(Format::Vmdk, b).offsets[0];
                b[at..at + 2048].copy_from_slice(&noise(5, 2048));
            },
            &plain,
        ),
        ("the places of the directories", Format::Vmdk, |b| b[48..64].fill(0), &told()),
        ("the start of the descriptor", Format::Vmdk, |b| b[512..540].fill(0xff), &plain),
        (
            "the extents of the descriptor",
            Format::Vmdk,
            |b| {
                let at = b.windows(3).position(|three| three == b"RW ").unwrap();
                b[at..at + 20].fill(0xff);
            },
            &plain,
        ),
    ];
    for (what, format, harm, options) in cases {
        let (found, copy, model) = after(format, harm, options);
        let data = model.chunks(BLOCK as usize).filter(|block| block.iter().any(|byte| *byte != 0)).count() as u64;
        assert_eq!(found.data_bytes, data * BLOCK, "{format}, {what}: {found:?}");
        assert!(copy == model && found.lost_bytes == 0, "{format}, {what}: {found:?}");
    }
}

/// What only the damaged structure knew is lost, and said to be.
#[test]
fn what_no_structure_tells_is_lost() {
    let cases: [(&str, Format, Harm, bool); 8] = [
        (
            "header and map",
            Format::Vdi,
            |b| {
                let at = u32_le(b, 0x154);
                b[at..at + 8].fill(0);
                b[..512].fill(0)
            },
            true,
        ),
        (
            "two entries with one space",
            Format::Vdi,
            |b| {
                let at = u32_le(b, 0x154);
                b.copy_within(at..at + 4, at + 8)
            },
            false,
        ),
        (
            "the L1 entry, beyond the file",
            Format::Qcow2,
            |b| {
                let at = u64_be(b, 40);
                b[at + 2] = 0x55
            },
            true,
        ),
        (
            "the L1 entry, into the refcount table",
            Format::Qcow2,
            |b| {
                let at = u64_be(b, 40);
                b[at..at + 8].copy_from_slice(&(1_u64 << 63 | 1 << 20).to_be_bytes())
            },
            true,
        ),
        (
            "the L1 entry, into data",
            Format::Qcow2,
            |b| {
                let at = u64_be(b, 40);
                let data = u64_be(b, u64_be(b, at) + 16) as u64;
                b[at..at + 8].copy_from_slice(&(1_u64 << 63 | data).to_be_bytes());
            },
            true,
        ),
        (
            "the L2 table, noise",
            Format::Qcow2,
            |b| {
                let at = u64_be(b, u64_be(b, 40));
                b[at..at + 512].copy_from_slice(&noise(6, 512))
            },
            true,
        ),
        (
            "both directories",
            Format::Vmdk,
            |b| {
                for at in directories(b) {
                    b[at..at + 4].fill(0xff)
                }
            },
            true,
        ),
        (
            "copies of a table that differ",
            Format::Vmdk,
            |b| {
                let table = Table::of(Format::Vmdk, b);
                let entry = table.entry(b, 2).to_vec();
                let end = (b.len() / 512) as u32 - 8;
                b[table.offsets[1] + 8..table.offsets[1] + 12].copy_from_slice(&end.to_le_bytes());
                assert_eq!(table.entry(b, 2), entry);
            },
            false,
        ),
    ];
    for (what, format, harm, all) in cases {
        println!("{format}: {what}");
        let options = if what.starts_with("header") { told() } else { RescueOptions::default() };
        let (found, ..) = after(format, harm, &options);
        assert!(found.lost_bytes > 0, "{format}, {what}: {found:?}");
        assert_eq!(found.data_bytes == 0, all, "{format}, {what}: {found:?}");
    }
}

/// Without its header an image asks for what only the header knew, by the option that tells it.
#[test]
fn what_the_user_can_name_is_asked_for() {
    for format in FORMATS {
        let dir = folder();
        let path = path_of(dir.path(), "disk", format);
        image(&path, Some(BLOCK as u32), DiskType::Dynamic, &contents(33));
        let mut bytes = fs::read(&path).unwrap();
        let descriptor = if format == Format::Vmdk { 20 * 512 } else { 0 };
        bytes[..512 + descriptor].fill(0);
        fs::write(&path, bytes).unwrap();
        let mut options = RescueOptions::default();
        let dest = dir.path().join("dest.raw");
        for option in ["block_bytes", "size_bytes"] {
            let error = rescue(&path, &dest, &options, &mut |_, _| true).unwrap_err().to_string();
            assert!(error.contains(&format!("`RescueOptions::{option}`")), "{format}: {error}");
            match option {
                "block_bytes" => options.block_bytes = Some(BLOCK as u32),
                _ => options.size_bytes = Some(BLOCKS * BLOCK),
            }
        }
        let (found, copy) = rescued(dir.path(), &path, &options);
        same_as(&found, &copy, &contents(33));
        assert!(found.data_bytes > 0 && found.zero_bytes == 0, "{format}: it may have a parent: {found:?}");
    }
}

/// Structures that have no second copy in the file, each with the range of its bytes.
fn structures(format: Format, bytes: &[u8]) -> Vec<std::ops::Range<usize>> {
    let table = Table::of(format, bytes);
    let tables = table.offsets.iter().map(|&at| at..at + 512);
    match format {
        Format::Vdi => tables.chain(Some(0..512)).collect(),
        Format::Qcow2 => {
            let at = [0, u64_be(bytes, 40), u64_be(bytes, 48), u64_be(bytes, u64_be(bytes, 48))];
            tables.chain(at.map(|at| at..at + 512)).collect()
        }
        _ => tables.chain([0..512, 512..1024, 1024..1536]).chain(directories(bytes).map(|at| at..at + 512)).collect(),
    }
}

/// Damages one sector of a structure.
fn damage_sector(bytes: &mut [u8], structures: &[std::ops::Range<usize>], (which, how, seed): (usize, usize, u64)) {
    let range = structures[which % structures.len()].clone();
    match how {
        0 => bytes[range].fill(0),
        1 => bytes[range].fill(0xff),
        2 => bytes[range].copy_from_slice(&noise(seed, 512)),
        // Another structure, or payload.
        3 => {
            let from = structures[(seed % structures.len() as u64) as usize].start;
            bytes.copy_within(from..from + 512, range.start);
        }
        4 => {
            let from = seed as usize % (bytes.len() / 512 - 1) * 512;
            bytes.copy_within(from..from + 512, range.start);
        }
        // The second half.
        _ => bytes[range.start + 256..range.end].fill((seed & 0xff) as u8),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, ..ProptestConfig::default() })]

    /// Whatever becomes of one or two structures, nothing that is called readable is wrong.
    #[test]
    fn nothing_is_placed_wrongly(
        seed: u64,
        which in 0..FORMATS.len(),
        is_child: bool,
        harms in prop::collection::vec((0_usize..8, 0_usize..6, any::<u64>()), 1..3),
    ) {
        let (dir, format) = (folder(), FORMATS[which]);
        let path = path_of(dir.path(), "disk", format);
        let mut model = contents(seed);
        if is_child {
            let parent = path_of(dir.path(), "parent", format);
            let below = noise(!seed, BLOCKS * BLOCK);
            image(&parent, Some(BLOCK as u32), DiskType::Dynamic, &below);
            let request = CreateRequest { parent: Some(parent), ..Default::default() };
            diskwright_disk::create(&path, &request).unwrap();
            crate::rescuing::write(&path, &model);
            for (to, from) in model.chunks_mut(BLOCK as usize).zip(below.chunks(BLOCK as usize)) {
                if to.iter().all(|byte| *byte == 0) {
                    to.copy_from_slice(from);
                }
            }
        } else {
            image(&path, Some(BLOCK as u32), DiskType::Dynamic, &model);
        }
        let mut bytes = fs::read(&path).unwrap();
        let sound = structures(format, &bytes);
        for harm in harms {
            damage_sector(&mut bytes, &sound, harm);
        }
        fs::write(&path, bytes).unwrap();
        let options = RescueOptions { no_parent: false, ..told() };
        let dest = dir.path().join("dest.raw");
        match rescue(&path, &dest, &options, &mut |_, _| true) {
            // A header that was exchanged for another one that is valid may name another size.
            Ok(found) if found.size_bytes == BLOCKS * BLOCK => same_as(&found, &fs::read(&dest).unwrap(), &model),
            Ok(_) | Err(_) => {}
        }
    }
}

/// Images that qemu-img made, with all that this program does not make itself.
#[test]
fn images_of_qemu_are_read_whole_and_keep_what_is_sound() {
    let dir = folder();
    let dir = dir.path();
    let size = 6 * MIB;
    let mut model = contents(35);
    model.truncate(size as usize);
    model[(MIB / 2) as usize..MIB as usize].fill(7);
    fs::write(dir.join("model.raw"), &model).unwrap();
    let kinds = [
        ("zlib.qcow2", "qcow2", "-c"),
        ("zstd.qcow2", "qcow2", "-c -o compression_type=zstd"),
        ("old.qcow2", "qcow2", "-o compat=0.10"),
        ("small.qcow2", "qcow2", "-o cluster_size=4k,refcount_bits=1"),
        ("extended.qcow2", "qcow2", "-o extended_l2=on"),
        ("plain.vmdk", "vmdk", "-o adapter_type=lsilogic"),
        ("stream.vmdk", "vmdk", "-o subformat=streamOptimized"),
        ("plain.vdi", "vdi", "-o static=off"),
    ];
    for (name, format, options) in kinds {
        if tool(dir, &format!("qemu-img convert -O {format} {options} model.raw {name}")).is_none() {
            return;
        }
        let path = dir.join(name);
        if name == "small.qcow2" {
            tool(dir, &format!("qemu-img bitmap --add {name} marks"));
        } else if name == "old.qcow2" {
            tool(dir, &format!("qemu-img snapshot -c before {name}"));
            tool(dir, "qemu-img bench -q -w -c 4 -S 65536 -s 65536 --pattern 9 -f qcow2 old.qcow2");
            tool(dir, "qemu-img convert -O raw old.qcow2 old.raw");
            let (found, copy) = rescued(dir, &path, &RescueOptions::default());
            assert!(copy == fs::read(dir.join("old.raw")).unwrap() && found.is_whole(), "{name}: {found:?}");
            continue;
        }
        let (found, copy) = rescued(dir, &path, &RescueOptions::default());
        same_as(&found, &copy, &model);
        assert!(found.is_whole() && found.leftovers.is_empty(), "{name}: {found:?}");
        let sound = fs::read(&path).unwrap();
        // Cut anywhere, nothing is wrong.
        for part in 1..8 {
            fs::write(&path, &sound[..sound.len() * part / 8 / 512 * 512]).unwrap();
            let dest = dir.join("cut.raw");
            let _ = fs::remove_file(&dest);
            if let Ok(found) = rescue(&path, &dest, &RescueOptions::default(), &mut |_, _| true) {
                same_as(&found, &fs::read(&dest).unwrap(), &model);
                assert!(!found.is_whole(), "{name}, {part}/8");
                // Grains of a stream name themselves.
                let least = if name == "stream.vmdk" && part > 4 { size / 4 } else { 0 };
                assert!(found.data_bytes >= least, "{name}, {part}/8: {found:?}");
            }
        }
    }
}

/// A stream without its header, without a table, or with markers that name another grain.
#[test]
fn grains_of_a_stream_are_found_by_their_markers() {
    let dir = folder();
    let dir = dir.path();
    let model = contents(36);
    fs::write(dir.join("model.raw"), &model).unwrap();
    // The directory is behind the grains, as VMware puts it. (QEMU puts it before them.)
    let dest = CreateRequest { subformat: Some("streamOptimized".into()), ..CreateRequest::default() };
    let options = ConvertOptions { dest, ..ConvertOptions::default() };
    convert(dir.join("model.raw"), dir.join("sound.vmdk"), &options, &mut |_, _| true).unwrap();
    let sound = fs::read(dir.join("sound.vmdk")).unwrap();
    let footer = sound.len() - 1024;
    let directory = u32_le(&sound, footer + 56) * 512;
    let table = u32_le(&sound, directory) * 512;
    let first = u32_le(&sound, table) * 512;
    let check = |what: &str, bytes: Vec<u8>, lost: u64| {
        let path = dir.join("damaged.vmdk");
        fs::write(&path, bytes).unwrap();
        let options = RescueOptions { block_bytes: Some(64 << 10), ..RescueOptions::default() };
        let (found, copy) = rescued(dir, &path, &options);
        same_as(&found, &copy, &model);
        let data = model.chunks(64 << 10).filter(|grain| grain.iter().any(|byte| *byte != 0)).count() as u64;
        assert_eq!(found.data_bytes, data * (64 << 10) - lost, "{what}: {found:?}");
    };
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = sound.clone();
        change(&mut bytes);
        bytes
    };
    check("sound", sound.clone(), 0);
    check("no header", with(&|b| b[..512].fill(0)), 0);
    check("no footer", with(&|b| b.truncate(footer - 512)), 0);
    check(
        "no header and no footer",
        with(&|b| {
            b.truncate(footer - 512);
            b[..512].fill(0)
        }),
        0,
    );
    check("no table", with(&|b| b[table..table + 2048].fill(0)), 0);
    check(
        "two entries exchanged",
        with(&|b| {
            let (one, other) = (u32_le(b, table), u32_le(b, table + 4));
            b[table..table + 4].copy_from_slice(&(other as u32).to_le_bytes());
            b[table + 4..table + 8].copy_from_slice(&(one as u32).to_le_bytes());
        }),
        0,
    );
    check(
        "a grain that is damaged",
        with(&|b| {
            b[table..table + 4].fill(0);
            b[first + 100] ^= 0x55
        }),
        64 << 10,
    );
    check("a marker that names another grain", with(&|b| b[first + 1] ^= 0x40), 64 << 10);
}

/// A disk in several files is rescued file by file, and that is told.
#[test]
fn the_files_of_a_disk_are_rescued_one_by_one() {
    let dir = folder();
    let dir: &Path = dir.path();
    let model = contents(37);
    fs::write(dir.join("model.raw"), &model).unwrap();
    if tool(dir, "qemu-img convert -O vmdk -o subformat=twoGbMaxExtentSparse model.raw disk.vmdk").is_none() {
        return;
    }
    let error = rescue(dir.join("disk.vmdk"), dir.join("no.raw"), &RescueOptions::default(), &mut |_, _| true);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("by its descriptor") && error.contains("rescue each file"), "{error}");
    let part = dir.join("disk-s001.vmdk");
    let (found, copy) = rescued(dir, &part, &RescueOptions::default());
    same_as(&found, &copy, &model);
    assert!(found.lost_bytes > 0, "nothing in this file says that the disk has no parent");
    let (found, copy) = rescued(dir, &part, &RescueOptions { no_parent: true, ..RescueOptions::default() });
    same_as(&found, &copy, &model);
    assert!(found.is_whole(), "{found:?}");
}
