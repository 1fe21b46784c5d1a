//! Deliberate damage of qcow2, VDI and VMDK images, for `repairs.rs`: headers, directories, tables,
//! refcounts and descriptors, field by field. None of these structures has a checksum.

use crate::{
    damage::{Sample, get_u64_be, put},
    repairs::{Damaging, field},
};
use diskwright_disk::{ConvertOptions, CreateRequest, Disk, OpenOptions, convert, create};
use diskwright_image::{DiskType, Format};
use diskwright_store::{Blocking, EngineKind};
use std::path::Path;

const KIB: u64 = 1 << 10;
/// Size of the disks, and of their blocks.
const SIZE: u64 = 512 * KIB;
const BLOCK: u64 = 32 * KIB;
/// The blocks that have data in all images.
const USED: [u64; 4] = [0, 3, 8, 15];

/// A dynamic image and a child, with data in some blocks.
pub fn samples(dir: &Path, format: Format) -> Vec<Sample> {
    let names = match format {
        Format::Qcow2 => ["dynamic.qcow2", "diff.qcow2", "parent.qcow2"],
        Format::Vdi => ["dynamic.vdi", "diff.vdi", "parent.vdi"],
        _ => ["dynamic.vmdk", "diff.vmdk", "parent.vmdk"],
    };
    let [dynamic, diff, parent] = names;
    let made = |name: &'static str, parent: Option<&str>| {
        let path = dir.join(name);
        let request = CreateRequest {
            size_bytes: parent.is_none().then_some(SIZE),
            disk_type: parent.is_none().then_some(DiskType::Dynamic),
            block_bytes: Some(BLOCK as u32),
            parent: parent.map(|name| dir.join(name)),
            ..CreateRequest::default()
        };
        create(&path, &request).unwrap();
        let disk = Disk::open(&path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
        let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
        // A parent has data where its child has none, and other data where it has some.
        let seed = if name.starts_with("parent") { 0x40 } else { 0 };
        let blocks = USED.into_iter().chain((seed > 0).then_some(5));
        for block in blocks {
            io.write(block * BLOCK, &vec![1 + block as u8 + seed; BLOCK as usize], false).unwrap();
        }
        drop(io);
        disk.close().unwrap();
        Sample { name, format, bytes: std::fs::read(&path).unwrap(), path }
    };
    let alone = made(dynamic, None);
    made(parent, None);
    let (name, subformat) = match format {
        Format::Qcow2 => ("packed.qcow2", "compressed"),
        Format::Vmdk => ("packed.vmdk", "streamOptimized"),
        _ => return vec![alone, made(diff, Some(parent))],
    };
    let dest = CreateRequest { subformat: Some(subformat.into()), ..CreateRequest::default() };
    let path = dir.join(name);
    convert(&alone.path, &path, &ConvertOptions { dest, ..ConvertOptions::default() }, &mut |_, _| true).unwrap();
    let packed = Sample { name, format, bytes: std::fs::read(&path).unwrap(), path };
    vec![alone, made(diff, Some(parent)), packed]
}

/// Damages of compressed clusters and grains, and of their entries.
pub fn packed(sample: &Sample) -> Vec<Damaging> {
    let bytes = &sample.bytes;
    let mut all = Vec::new();
    // The places of the entries, and of the data.
    let places: Vec<(usize, usize)> = if sample.format == Format::Qcow2 {
        let l2 = (get_u64_be(bytes, get_u64_be(bytes, 40) as usize) & 0x00ff_ffff_ffff_fe00) as usize;
        // Clusters of 64 KiB.
        let entries = USED.map(|guest| l2 + 8 * (guest as usize / 2));
        entries.map(|at| (at, (get_u64_be(bytes, at) & ((1 << 54) - 1)) as usize)).into()
    } else {
        let directory = u32_le(bytes, bytes.len() - 1024 + 56) * 512;
        let table = u32_le(bytes, directory) * 512;
        let entries = (0..8).map(|grain| table + 4 * grain).filter(|&at| u32_le(bytes, at) > 1);
        entries.map(|at| (at, u32_le(bytes, at) * 512)).collect()
    };
    assert!(places.len() >= 4, "{places:?}");
    let len = if sample.format == Format::Qcow2 { 8 } else { 4 };
    for &(at, data) in &places {
        for (way, within, count) in [("start", 0, 4), ("size", 8, 4), ("data", 14, 6), ("all", 0, 24)] {
            all.push(field(format!("packed data {way}: at {data}"), move |b: &mut Vec<u8>| {
                b[data + within..data + within + count].fill(0x99);
            }));
        }
        all.extend(changed("packed entry", at, len));
        let other = bytes[places[1].0..places[1].0 + len].to_vec();
        all.extend(entries("packed entry", &[at], &[("of another one", other), ("lost", vec![0; len])]));
    }
    all
}

fn u32_le(bytes: &[u8], at: usize) -> usize {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize
}

type Change = fn(&mut [u8]);

/// A structure is changed in several ways.
fn changed(kind: &str, at: usize, len: usize) -> Vec<Damaging> {
    let ways: [(&str, Change); 5] = [
        ("a bit", |b| b[b.len() - 1] ^= 1),
        ("the top bit", |b| b[0] ^= 0x80),
        ("zeros", |b| b.fill(0)),
        ("ones", |b| b.fill(0xff)),
        ("other bytes", |b| (0..).zip(b).for_each(|(index, byte)| *byte = 0x51_u8.wrapping_mul(index + 3))),
    ];
    let all = ways.into_iter().map(|(way, change)| {
        field(format!("{kind}: {way} at {at}"), move |b: &mut Vec<u8>| {
            if let Some(bytes) = b.get_mut(at..at + len) {
                change(bytes);
            }
        })
    });
    all.collect()
}

/// Values of an entry, which are put into one copy of a table or into all.
fn entries(kind: &str, places: &[usize], values: &[(&str, Vec<u8>)]) -> Vec<Damaging> {
    let all = values.iter().map(|(way, value)| {
        let (places, value) = (places.to_vec(), value.clone());
        field(format!("{kind} {way}: at {}", places[0]), move |b: &mut Vec<u8>| {
            places.iter().for_each(|&at| put(b, at, &value));
        })
    });
    all.collect()
}

pub fn qcow2(sample: &Sample) -> Vec<Damaging> {
    let bytes = &sample.bytes;
    let mut all = Vec::new();
    for (at, len) in [
        (0, 4),
        (4, 4),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 8),
        (32, 4),
        (36, 4),
        (40, 8),
        (48, 8),
        (56, 4),
        (60, 4),
        (64, 8),
        (72, 8),
        (80, 8),
        (88, 8),
        (96, 4),
        (100, 4),
        (104, 1),
        (112, 8),
        (120, 8),
    ] {
        let kind = match at {
            8 | 16 => "qcow2 backing file",
            24 => "qcow2 disk size",
            _ => "qcow2 header",
        };
        all.extend(changed(kind, at, len));
    }
    let offset = |at: usize| (get_u64_be(bytes, at) & 0x00ff_ffff_ffff_fe00) as usize;
    let (l1, table) = (offset(40), offset(48));
    let (l2, block) = (offset(l1), offset(table));
    let word = |value: u64| value.to_be_bytes().to_vec();
    let copied = |value: usize| word(1 << 63 | value as u64);
    let end = bytes.len().next_multiple_of(BLOCK as usize);
    for (kind, at, own) in [("L1 entry", l1, l2), ("refcount table entry", table, block)] {
        let flag = |value: usize| if kind == "L1 entry" { copied(value) } else { word(value as u64) };
        all.extend(entries(
            kind,
            &[at],
            &[
                ("beyond the file", flag(1 << 40)),
                ("at the end", flag(end)),
                ("in the header", flag(0)),
                ("on the L1 table", flag(l1)),
                ("on the refcount table", flag(table)),
                ("on the refcount block", flag(block)),
                ("on the L2 table", flag(l2)),
                ("unaligned", flag(own + 512)),
                ("reserved bits", word(1 << 63 | own as u64 | 6)),
                ("lost", word(0)),
                ("without the flag", word(own as u64)),
                ("compressed", word(1 << 62 | own as u64)),
            ],
        ));
    }
    for guest in [0, 1, 3, 8, 15] {
        let at = l2 + 8 * guest;
        let own = offset(at);
        let other = offset(l2 + 8 * 8);
        let kind = if own > 0 { "L2 entry" } else { "unused L2 entry" };
        let mut values = vec![
            ("beyond the file", copied(1 << 40)),
            ("at the end", copied(end)),
            ("in the header", word(1 << 63)),
            ("on the L1 table", copied(l1)),
            ("on the refcount table", copied(table)),
            ("on the refcount block", copied(block)),
            ("on the L2 table", copied(l2)),
            ("reserved bits", word(1 << 63 | own as u64 | 1 << 60)),
            ("compressed, of noise", word(1 << 62 | (other as u64 + 77))),
            ("compressed, beyond the file", word(1 << 62 | 1 << 40)),
            ("zeros beyond the file", word(1 << 63 | 1 << 40 | 1)),
        ];
        if guest != 8 {
            values.push(("of another cluster", copied(other)));
            values.push(("zeros with the space of another cluster", word(1 << 63 | other as u64 | 1)));
        }
        if own > 0 {
            values.push(("unaligned", copied(own + 512)));
            values.push(("lost", word(0)));
            values.push(("zeros", word(1)));
            values.push(("zeros with its space", word(1 << 63 | own as u64 | 1)));
            values.push(("without the flag", word(own as u64)));
            all.push(field(format!("payload: block {guest}"), move |b| b[own + 77] ^= 1));
        }
        all.extend(entries(kind, &[at], &values));
    }
    let clusters = bytes.len().div_ceil(BLOCK as usize);
    for cluster in (0..clusters + 2).step_by(2) {
        let at = block + 2 * cluster;
        all.extend(entries(
            "refcount",
            &[at],
            &[("0", vec![0, 0]), ("2", vec![0, 2]), ("1", vec![0, 1]), ("65535", vec![0xff, 0xff])],
        ));
    }
    all.push(field("the L2 table: zeros", move |b| b[l2..l2 + 128].fill(0)));
    all.push(field("the refcount block: zeros", move |b| b[block..block + 512].fill(0)));
    all.push(field("the refcount table: zeros", move |b| b[table..table + 512].fill(0)));
    all.push(field("dirty and corrupt", |b| b[79] |= 3));
    all.push(field("L2 entries exchanged", move |b| (0..8).for_each(|at| b.swap(l2 + at, l2 + 64 + at))));
    all.push(field("refcounts and the corrupt bit", move |b| {
        b[79] |= 2;
        b[block..block + 64].fill(0);
    }));
    all
}

pub fn vdi(sample: &Sample) -> Vec<Damaging> {
    let bytes = &sample.bytes;
    let mut all = Vec::new();
    for (at, len) in [
        (0, 16),
        (0x40, 4),
        (0x44, 4),
        (0x48, 4),
        (0x4c, 4),
        (0x50, 4),
        (0x54, 16),
        (0x154, 4),
        (0x158, 4),
        (0x15c, 12),
        (0x168, 4),
        (0x170, 8),
        (0x178, 4),
        (0x17c, 4),
        (0x180, 4),
        (0x184, 4),
        (0x188, 16),
        (0x198, 16),
        (0x1a8, 16),
        (0x1b8, 16),
        (0x1e0, 24),
    ] {
        all.extend(changed("VDI header", at, len));
    }
    let map = u32_le(bytes, 0x154);
    let spaces = ((bytes.len() - u32_le(bytes, 0x158)) / BLOCK as usize) as u32;
    let word = |value: u32| value.to_le_bytes().to_vec();
    let own = |block: usize| u32_le(bytes, map + 4 * block) as u32;
    for block in 0..16 {
        let found = own(block);
        let is_used = found < 0xffff_fffe;
        let kind = if is_used { "map entry" } else { "unused map entry" };
        let mut values = vec![
            ("at the end", word(spaces)),
            ("beyond the file", word(spaces + 1000)),
            ("near 2^32", word(0xffff_fffd)),
            ("a top bit", word(found ^ 1 << 31)),
            ("a bit", word(found ^ 1)),
            ("zeros", word(0xffff_fffe)),
        ];
        if block != 8 {
            values.push(("of another block", word(own(8))));
        }
        if is_used {
            values.push(("lost", word(u32::MAX)));
            let at = u32_le(bytes, 0x158) + found as usize * BLOCK as usize;
            all.push(field(format!("payload: block {block}"), move |b| b[at + 77] ^= 1));
        }
        all.extend(entries(kind, &[map + 4 * block], &values));
    }
    for (way, count) in [("one too few", spaces - 1), ("0", 0), ("one too many", spaces + 1), ("many", 1 << 30)] {
        all.extend(entries("count of spaces", &[0x184], &[(way, word(count))]));
    }
    all.push(field("the map: zeros", move |b| b[map..map + 64].fill(0)));
    all.push(field("the map: all unused", move |b| b[map..map + 64].fill(0xff)));
    all.push(field("map entries exchanged", move |b| (0..4).for_each(|at| b.swap(map + at, map + 32 + at))));
    all.push(field("map entries big-endian", move |b| {
        (0..16).for_each(|at| b[map + 4 * at..map + 4 * at + 4].reverse())
    }));
    all
}

pub fn vmdk(sample: &Sample) -> Vec<Damaging> {
    let bytes = &sample.bytes;
    let mut all = Vec::new();
    for (at, len) in [
        (0, 4),
        (4, 4),
        (8, 4),
        (12, 8),
        (20, 8),
        (28, 8),
        (36, 8),
        (44, 4),
        (48, 8),
        (56, 8),
        (64, 8),
        (72, 1),
        (73, 4),
        (77, 2),
        (79, 8),
    ] {
        all.extend(changed(if at == 12 { "VMDK capacity" } else { "sparse header" }, at, len));
    }
    let directories = [56, 48].map(|at| u32_le(bytes, at) * 512);
    let tables = directories.map(|at| u32_le(bytes, at) * 512);
    let sectors = (bytes.len() / 512) as u32;
    let word = |value: u32| value.to_le_bytes().to_vec();
    for (which, places) in [("first", &directories[..1]), ("second", &directories[1..]), ("each", &directories[..])] {
        all.extend(entries(
            &format!("{which} directory entry"),
            places,
            &[
                ("beyond the file", word(sectors + 1000)),
                ("at the end", word(sectors - 1)),
                ("lost", word(0)),
                ("on the header", word(1)),
                ("on a directory", word((directories[0] / 512) as u32)),
                ("on the second directory", word((directories[1] / 512) as u32)),
                ("on the first table", word((tables[0] / 512) as u32)),
                ("on the second table", word((tables[1] / 512) as u32)),
                ("in data", word(u32_le(bytes, tables[0]) as u32)),
                ("near 2^32", word(u32::MAX)),
            ],
        ));
    }
    for grain in [0, 1, 3, 8, 15] {
        let found = u32_le(bytes, tables[0] + 4 * grain) as u32;
        let other = u32_le(bytes, tables[0] + 4 * 8) as u32;
        let both = tables.map(|at| at + 4 * grain);
        for (which, places) in [("first", &both[..1]), ("second", &both[1..]), ("each", &both[..])] {
            let kind = format!("{which} {}grain entry", if found > 0 { "" } else { "unused " });
            let mut values = vec![
                ("beyond the file", word(sectors + 1000)),
                ("at the end", word(sectors - 1)),
                ("on the header", word(1)),
                ("on a directory", word((directories[0] / 512) as u32)),
                ("on a table", word((tables[1] / 512) as u32)),
                ("near 2^32", word(u32::MAX)),
            ];
            if grain != 8 {
                values.push(("of another grain", word(other)));
                values.push(("half in another grain", word(other + 9)));
            }
            if found > 0 {
                values.push(("lost", word(0)));
                values.push(("one sector later", word(found + 1)));
            }
            all.extend(entries(&kind, places, &values));
        }
        if found > 0 {
            all.push(field(format!("payload: block {grain}"), move |b| b[found as usize * 512 + 77] ^= 1));
        }
    }
    for (which, at) in [("first", tables[0]), ("second", tables[1])] {
        all.push(field(format!("the {which} table: zeros"), move |b| b[at..at + 64].fill(0)));
        all.push(field(format!("the {which} table: ones"), move |b| b[at..at + 64].fill(0xff)));
    }
    all.push(field("both tables: zeros", move |b| tables.iter().for_each(|&at| b[at..at + 64].fill(0))));
    for (way, old, new) in [
        ("another CID", "\nCID=", "\nDIC="),
        ("no parentCID", "parentCID=", "parentDIC="),
        ("another parentCID", "parentCID=", "parentCID=1"),
        ("no type", "createType", "typeCreate"),
        ("another kind", "SPARSE", "FLAT  "),
        ("another access", "RW ", "RV "),
        ("another extent", "RW ", "RW 9"),
        ("no first line", "# Disk", "# Disc"),
        ("no hint", "parentFileNameHint", "parentFileNameHant"),
        ("another hint", "parentFileNameHint=\"p", "parentFileNameHint=\"q"),
    ] {
        all.push(field(format!("descriptor: {way}"), move |b| {
            if let Some(at) = b.windows(old.len()).position(|bytes| bytes == old.as_bytes()) {
                put(b, at, new.as_bytes());
            }
        }));
    }
    all.push(field("descriptor: zeros", |b| b[512..1024].fill(0)));
    all.push(field("descriptor: ones", |b| b[512..1024].fill(0xff)));
    all
}
