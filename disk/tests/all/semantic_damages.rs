//! Damage that is well-formed: every checksum is right, and what the structures say is not.
//!
//! Two structures that fit another disk or another time, ranges that overlap by a sector, lists
//! with two entries for one thing, a log that writes where no log may. `repairs.rs` judges them
//! like all others.

use crate::{
    damage::{
        BAT, DISK_SIZE, FILE_PARAMETERS, HEADERS, KIB, LOCATOR, LOG, LOGICAL_SECTOR, METADATA, MIB, REGION_TABLES,
        Sample, get_u32_be, get_u64_be, get_u64_le, put, seal, sum,
    },
    repairs::{Damaging, field},
};
use diskwright_image::DiskType;

const FOOTER: usize = 512;

/// A change of a structure's bytes.
type Change = fn(&mut [u8]);
/// The same, with the size of the disk in bytes.
type ChangeOfSize = fn(&mut [u8], u64);
/// A change that was made for one sample.
type OwnChange = Box<dyn Fn(&mut [u8])>;

/// The identity of another disk or file.
const OTHER_ID: [u8; 16] = [0x5a; 16];

/// A footer with right checksum at `at`, made by `change` from the one that is there.
fn footer(bytes: &mut [u8], at: usize, change: impl Fn(&mut [u8])) {
    change(&mut bytes[at..at + FOOTER]);
    sum(bytes, at, FOOTER, 64);
}

/// Both footers, or the only one of a fixed disk.
fn footers_at(bytes: &[u8]) -> Vec<(&'static str, usize)> {
    let tail = bytes.len() - FOOTER;
    if bytes[..8] == *b"conectix" { vec![("copy", 0), ("end", tail)] } else { vec![("end", tail)] }
}

pub fn vhd(sample: &Sample, disk_type: DiskType) -> Vec<Damaging> {
    let mut all = Vec::new();
    let bytes = &sample.bytes;
    let size = get_u64_be(bytes, bytes.len() - FOOTER + 48);
    let of_another: [(&str, ChangeOfSize); 6] = [
        ("of another disk", |f, _| {
            f[68..84].copy_from_slice(&OTHER_ID);
            f[24..28].fill(7);
        }),
        ("of a larger disk", |f, size| {
            f[68..84].copy_from_slice(&OTHER_ID);
            f[48..56].copy_from_slice(&(size * 2).to_be_bytes());
        }),
        ("of a smaller disk", |f, size| {
            f[68..84].copy_from_slice(&OTHER_ID);
            f[48..56].copy_from_slice(&(size / 2).to_be_bytes());
        }),
        ("of a fixed disk", |f, _| {
            f[16..24].fill(0xff);
            f[60..64].copy_from_slice(&2_u32.to_be_bytes());
        }),
        ("with its header in the payload", |f, _| f[16..24].copy_from_slice(&8192_u64.to_be_bytes())),
        ("with its header at 0", |f, _| f[16..24].fill(0)),
    ];
    for (name, at) in footers_at(bytes) {
        for (way, change) in of_another {
            all.push(field(format!("footer {name} {way}"), move |b| footer(b, at, |f| change(f, size))));
        }
    }
    if disk_type == DiskType::Fixed {
        return all;
    }
    for (way, change) in of_another {
        all.push(field(format!("footers {way}"), move |b| {
            footers_at(b).into_iter().for_each(|(_, at)| footer(b, at, |f| change(f, size)));
        }));
    }
    all.push(field("footers exchanged, of different disks", |b| {
        let tail = b.len() - FOOTER;
        footer(b, 0, |f| f[68..84].fill(1));
        footer(b, tail, |f| f[68..84].fill(2));
    }));
    all.extend(vhd_headers(sample));
    all.extend(vhd_places(sample));
    if disk_type == DiskType::Differencing {
        all.extend(vhd_links());
    }
    all
}

/// Fields of the dynamic header with values that another disk may have.
fn vhd_headers(sample: &Sample) -> Vec<Damaging> {
    let in_header = |kind: &str, at: usize, value: Vec<u8>| {
        field(format!("header {kind}"), move |b: &mut Vec<u8>| {
            put(b, 512 + at, &value);
            sum(b, 512, 1024, 36);
        })
    };
    let table = get_u64_be(&sample.bytes, 512 + 16);
    let entries = get_u32_be(&sample.bytes, 512 + 28);
    let block = get_u32_be(&sample.bytes, 512 + 32);
    let mut all = Vec::new();
    for (way, at) in [
        ("on the footer copy", 0),
        ("on the header", 512),
        ("one sector later", table + 512),
        ("in a block", u64::from(get_u32_be(&sample.bytes, table as usize)) * 512),
        ("in the payload", u64::from(get_u32_be(&sample.bytes, table as usize)) * 512 + 4096),
        ("at the footer", sample.bytes.len() as u64 - 512),
        ("not at a sector", table + 4),
    ] {
        all.push(in_header(&format!("with the table {way}"), 16, at.to_be_bytes().to_vec()));
    }
    for (way, count) in
        [("half", entries / 2), ("one", 1), ("no", 0), ("twice as many", entries * 2), ("2^31", 1 << 31)]
    {
        all.push(in_header(&format!("with {way} entries"), 28, count.to_be_bytes().to_vec()));
    }
    for (way, bytes) in [("half", block / 2), ("twice", block * 2), ("three times", block * 3), ("no", 0), ("512", 512)]
    {
        all.push(in_header(&format!("with {way} block size"), 32, bytes.to_be_bytes().to_vec()));
    }
    all
}

/// Entries that lead nearly to the right place.
fn vhd_places(sample: &Sample) -> Vec<Damaging> {
    let mut all = Vec::new();
    let table = get_u64_be(&sample.bytes, 512 + 16) as usize;
    let block = get_u32_be(&sample.bytes, 512 + 32);
    let sectors = (sample.bytes.len() / 512) as u32;
    let entry = |index: usize| get_u32_be(&sample.bytes, table + 4 * index);
    let piece = 1 + block / 512;
    let (first, other) = (entry(0), entry(8));
    for (way, index, value) in [
        ("overlaps another by one sector at its end", 0, other - piece + 1),
        ("overlaps another by one sector at its begin", 0, other + piece - 1),
        ("overlaps another by one sector, unused", 3, first + piece - 1),
        ("ends one sector behind the file's data", 15, sectors - piece),
        ("ends one sector behind the file", 15, sectors - piece + 1),
        ("has its bitmap in the table's sector", 0, (table / 512) as u32),
        ("has its bitmap on the footer", 15, sectors - 1),
        ("has its bitmap at the end of the file", 15, sectors),
        ("of the next block, unused", 1, first + 1),
    ] {
        all.push(field(format!("entry {way}: block {index}"), move |b| {
            put(b, table + 4 * index, &value.to_be_bytes())
        }));
    }
    for (way, index, value) in [
        ("one sector earlier", 0, first - 1),
        ("one sector earlier", 15, entry(15) - 1),
        ("behind the table", 0, (table / 512 + 1) as u32),
    ] {
        let kind = format!("entry at a free place: {way}, block {index}");
        all.push(field(kind, move |b| put(b, table + 4 * index, &value.to_be_bytes())));
    }
    all.push(field("entries all in one place", move |b| {
        for index in 0..16 {
            put(b, table + 4 * index, &first.to_be_bytes());
        }
    }));
    all.push(field("entries little-endian", move |b| {
        for index in 0..16 {
            b[table + 4 * index..table + 4 * index + 4].reverse();
        }
    }));
    all.push(field("entries rotated", move |b| b[table..table + 64].rotate_left(4)));
    all
}

/// Parent locators, and what the header says of the parent.
fn vhd_links() -> Vec<Damaging> {
    let mut all = Vec::new();
    let header = 512;
    let sealed = |kind: String, change: OwnChange| {
        field(kind, move |b: &mut Vec<u8>| {
            change(b);
            sum(b, 512, 1024, 36);
        })
    };
    for (way, at, value) in [
        ("id of another disk", 40, OTHER_ID.to_vec()),
        ("id of zeros", 40, vec![0; 16]),
        ("time of another", 56, vec![0x11; 4]),
        ("name that is no UTF-16", 64, vec![0xd8, 0x00, 0xd8, 0x00]),
        ("empty name", 64, vec![0; 512]),
    ] {
        all.push(sealed(format!("link {way}"), Box::new(move |b| put(b, header + at, &value))));
    }
    for index in 0..3 {
        let at = header + 576 + 24 * index;
        for (way, offset, value) in [
            ("unknown code", 0, b"Zz9y".to_vec()),
            ("space on the table", 16, 1536_u64.to_be_bytes().to_vec()),
            ("space on the header", 16, 512_u64.to_be_bytes().to_vec()),
            ("space at 0", 16, 0_u64.to_be_bytes().to_vec()),
            ("space beyond the file", 16, (1_u64 << 40).to_be_bytes().to_vec()),
            ("space near 2^64", 16, u64::MAX.to_be_bytes().to_vec()),
            ("length 2^32", 8, u32::MAX.to_be_bytes().to_vec()),
            ("odd length", 8, 3_u32.to_be_bytes().to_vec()),
            ("length 0", 8, 0_u32.to_be_bytes().to_vec()),
            ("longer than its space", 8, 100_000_u32.to_be_bytes().to_vec()),
            ("space 0", 4, 0_u32.to_be_bytes().to_vec()),
            ("space of 2 GiB", 4, (1_u32 << 31).to_be_bytes().to_vec()),
        ] {
            all.push(sealed(format!("locator {index} {way}"), Box::new(move |b| put(b, at + offset, &value))));
        }
        all.push(field(format!("locator {index} with zeros in its path"), move |b| {
            let place = get_u64_be(b, at + 16) as usize;
            if let Some(path) = b.get_mut(place..place + 64) {
                path.fill(0);
            }
        }));
    }
    all.push(sealed(
        "locators: one code twice, the first to a wrong place".into(),
        Box::new(|b| {
            let second: Vec<u8> = b[header_entry(1)..header_entry(1) + 24].to_vec();
            put(b, header_entry(2), &second);
            put(b, header_entry(1) + 16, &1536_u64.to_be_bytes());
        }),
    ));
    all.push(sealed("locators all gone".into(), Box::new(|b| b[header_entry(0)..header_entry(8)].fill(0))));
    all.push(sealed(
        "locators all in one place".into(),
        Box::new(|b| {
            let place: Vec<u8> = b[header_entry(0) + 16..header_entry(0) + 24].to_vec();
            (1..8).for_each(|index| put(b, header_entry(index) + 16, &place));
        }),
    ));
    all
}

fn header_entry(index: usize) -> usize {
    512 + 576 + 24 * index
}

pub fn vhdx(sample: &Sample, disk_type: DiskType) -> Vec<Damaging> {
    let mut all = Vec::new();
    all.extend(vhdx_headers());
    all.extend(vhdx_regions());
    all.extend(vhdx_metadata());
    if sample.name != "logged.vhdx" {
        // Another log in its place is another history, which nothing tells from the true one.
        all.extend(vhdx_logs(sample));
    }
    all.extend(vhdx_places(sample));
    if disk_type == DiskType::Differencing {
        all.extend(vhdx_links());
    }
    all
}

/// Makes a header, with right checksum, from the current one.
fn header(bytes: &mut [u8], index: usize, change: impl Fn(&mut [u8])) {
    let at = HEADERS[index];
    change(&mut bytes[at..at + 4096]);
    seal(bytes, at, 4096);
}

fn vhdx_headers() -> Vec<Damaging> {
    let mut all = Vec::new();
    let newest = |b: &[u8]| {
        let number = |index: usize| get_u64_le(b, HEADERS[index] + 8);
        number(0).max(number(1))
    };
    let of_another: [(&str, Change); 10] = [
        ("of another file", |h| h[16..48].copy_from_slice(&[OTHER_ID, OTHER_ID].concat())),
        ("with a log on the table", |h| h[72..80].copy_from_slice(&(BAT as u64).to_le_bytes())),
        ("with a log on the metadata", |h| h[72..80].copy_from_slice(&(METADATA as u64).to_le_bytes())),
        ("with a log on a block", |h| h[72..80].copy_from_slice(&(4 * MIB as u64).to_le_bytes())),
        ("with a log beyond the file", |h| h[72..80].copy_from_slice(&(1_u64 << 40).to_le_bytes())),
        ("with a log at 0", |h| h[72..80].fill(0)),
        ("with a log up to the payload", |h| h[68..72].copy_from_slice(&(5 * MIB as u32).to_le_bytes())),
        ("with no log", |h| h[68..72].fill(0)),
        ("with a named log", |h| h[48..64].fill(0x77)),
        ("of version 0", |h| h[66..68].fill(0)),
    ];
    for (way, change) in of_another {
        for index in [0, 1] {
            // The newer of the two, whichever it was.
            all.push(field(format!("header {index} newer, {way}"), move |b| {
                let number = newest(b) + 1;
                header(b, index, |h| {
                    h[8..16].copy_from_slice(&number.to_le_bytes());
                    change(h);
                });
            }));
        }
        all.push(field(format!("headers {way}"), move |b| {
            header(b, 0, change);
            header(b, 1, change);
        }));
    }
    all.push(field("headers with one number, of different files", move |b| {
        let number = newest(b);
        for index in [0, 1] {
            header(b, index, |h| {
                h[8..16].copy_from_slice(&number.to_le_bytes());
                h[16..32].fill(index as u8 + 1);
            });
        }
    }));
    all.push(field("headers with the greatest number", move |b| {
        header(b, 0, |h| h[8..16].fill(0xff));
        header(b, 1, |h| h[8..16].fill(0xff));
    }));
    all.push(field("headers exchanged", |b| {
        let (one, other) = (b[HEADERS[0]..HEADERS[0] + 4096].to_vec(), b[HEADERS[1]..HEADERS[1] + 4096].to_vec());
        put(b, HEADERS[0], &other);
        put(b, HEADERS[1], &one);
    }));
    all
}

/// Entries of the region table: the BAT's and the metadata's, in this order.
fn region(kind: &str, tables: &'static [usize], change: impl Fn(&mut [u8]) + 'static) -> Damaging {
    field(kind, move |b| {
        for &at in tables {
            change(&mut b[at..at + 64 * KIB]);
            seal(b, at, 64 * KIB);
        }
    })
}

fn vhdx_regions() -> Vec<Damaging> {
    let mut all = Vec::new();
    const ONE: &[usize] = &[REGION_TABLES[0]];
    const OTHER: &[usize] = &[REGION_TABLES[1]];
    for (which, tables) in [("first", ONE), ("second", OTHER), ("both", &REGION_TABLES[..])] {
        for entry in [0, 1] {
            let at = 16 + 32 * entry;
            let mut change = |way: &str, offset: usize, value: Vec<u8>| {
                let kind = format!("region tables, {which}: entry {entry} {way}");
                all.push(region(&kind, tables, move |t| put(t, at + offset, &value)));
            };
            change("on the log", 16, (LOG as u64).to_le_bytes().to_vec());
            change("on the metadata", 16, (METADATA as u64).to_le_bytes().to_vec());
            change("on the BAT", 16, (BAT as u64).to_le_bytes().to_vec());
            change("on a block", 16, (4 * MIB as u64).to_le_bytes().to_vec());
            change("on the headers", 16, 0_u64.to_le_bytes().to_vec());
            change("beyond the file", 16, (1_u64 << 40).to_le_bytes().to_vec());
            change("not at a MiB", 16, (3 * MIB as u64 + 4096).to_le_bytes().to_vec());
            change("empty", 24, 0_u32.to_le_bytes().to_vec());
            change("two MiB long", 24, (2 * MIB as u32).to_le_bytes().to_vec());
            change("not of MiBs", 24, 4096_u32.to_le_bytes().to_vec());
            change("4 GiB long", 24, 0xfff0_0000_u32.to_le_bytes().to_vec());
        }
        all.push(region(&format!("region tables, {which}: the BAT twice"), tables, |t| {
            let entry = t[16..48].to_vec();
            put(t, 80, &entry);
            t[8] = 3;
        }));
        all.push(region(&format!("region tables, {which}: an unknown region that is required"), tables, |t| {
            t[80..96].fill(9);
            put(t, 96, &(4 * MIB as u64).to_le_bytes());
            put(t, 104, &(MIB as u32).to_le_bytes());
            put(t, 108, &[1, 0, 0, 0]);
            t[8] = 3;
        }));
        all.push(region(&format!("region tables, {which}: an unknown region on a block"), tables, |t| {
            t[80..96].fill(9);
            put(t, 96, &(4 * MIB as u64).to_le_bytes());
            put(t, 104, &(MIB as u32).to_le_bytes());
            put(t, 108, &[0; 4]);
            t[8] = 3;
        }));
        all.push(region(&format!("region tables, {which}: exchanged entries"), tables, |t| {
            let (one, other) = (t[16..32].to_vec(), t[48..64].to_vec());
            put(t, 16, &other);
            put(t, 48, &one);
        }));
    }
    all
}

fn vhdx_metadata() -> Vec<Damaging> {
    let mut all = Vec::new();
    let entry = |index: usize| METADATA + 32 + 32 * index;
    for index in 0..5 {
        for (way, offset, value) in [
            ("in the table", 16, 100_u32.to_le_bytes().to_vec()),
            ("at the end of the region", 16, (MIB as u32 - 4).to_le_bytes().to_vec()),
            ("behind the region", 16, (MIB as u32).to_le_bytes().to_vec()),
            ("on the next item", 16, (64 * KIB as u32 + 8).to_le_bytes().to_vec()),
            ("without length", 20, 0_u32.to_le_bytes().to_vec()),
            ("of a MiB", 20, (MIB as u32).to_le_bytes().to_vec()),
            ("of 1 byte", 20, 1_u32.to_le_bytes().to_vec()),
            ("of a user", 24, 7_u32.to_le_bytes().to_vec()),
        ] {
            all.push(field(format!("metadata entry {index} {way}"), move |b| put(b, entry(index) + offset, &value)));
        }
        all.push(field(format!("metadata entry {index} twice"), move |b| {
            let copy = b[entry(index)..entry(index) + 32].to_vec();
            let count = usize::from(b[METADATA + 10]);
            put(b, entry(count), &copy);
            b[METADATA + 10] += 1;
        }));
        all.push(field(format!("metadata entry {index} twice, the second elsewhere"), move |b| {
            let copy = b[entry(index)..entry(index) + 32].to_vec();
            let count = usize::from(b[METADATA + 10]);
            put(b, entry(count), &copy);
            put(b, entry(count) + 16, &(128 * KIB as u32).to_le_bytes());
            b[METADATA + 10] += 1;
        }));
    }
    all.push(field("metadata entries exchanged", move |b| {
        let (one, other) = (b[entry(1)..entry(1) + 16].to_vec(), b[entry(2)..entry(2) + 16].to_vec());
        put(b, entry(1), &other);
        put(b, entry(2), &one);
    }));
    for (way, at, value) in [
        ("block size: half", FILE_PARAMETERS, (MIB as u32 / 2).to_le_bytes().to_vec()),
        ("block size: twice", FILE_PARAMETERS, (2 * MIB as u32).to_le_bytes().to_vec()),
        ("block size: 256 MiB", FILE_PARAMETERS, (256 * MIB as u32).to_le_bytes().to_vec()),
        ("block size: three MiB", FILE_PARAMETERS, (3 * MIB as u32).to_le_bytes().to_vec()),
        ("parameters: a child", FILE_PARAMETERS + 4, vec![2]),
        ("parameters: no child", FILE_PARAMETERS + 4, vec![0]),
        ("parameters: fixed", FILE_PARAMETERS + 4, vec![1]),
        ("parameters: a fixed child", FILE_PARAMETERS + 4, vec![3]),
        ("disk size: twice", DISK_SIZE, (8 * MIB as u64).to_le_bytes().to_vec()),
        ("disk size: half", DISK_SIZE, (2 * MIB as u64).to_le_bytes().to_vec()),
        ("disk size: a sector less", DISK_SIZE, (4 * MIB as u64 - 512).to_le_bytes().to_vec()),
        ("disk size: no whole sectors", DISK_SIZE, (4 * MIB as u64 - 7).to_le_bytes().to_vec()),
        ("disk size: 64 TiB", DISK_SIZE, (64_u64 << 40).to_le_bytes().to_vec()),
        ("disk size: 0", DISK_SIZE, vec![0; 8]),
        ("sector size: 4096", LOGICAL_SECTOR, 4096_u32.to_le_bytes().to_vec()),
        ("sector size: 1024", LOGICAL_SECTOR, 1024_u32.to_le_bytes().to_vec()),
    ] {
        all.push(field(way, move |b| put(b, at, &value)));
    }
    all
}

/// What one descriptor of a log entry does.
enum Logged {
    /// A sector with this byte everywhere.
    Data(u8),
    /// So many zeros.
    Zeros(u64),
}

/// Puts one valid entry into the log and names it in both headers.
fn log(b: &mut [u8], descriptors: &[(u64, Logged)], change: impl Fn(&mut [u8])) {
    const NUMBER: u64 = 5;
    let name = [0x3c; 16];
    let data = descriptors.iter().filter(|(_, what)| matches!(what, Logged::Data(_))).count();
    let mut entry = vec![0; 4096 * (1 + data)];
    let len = entry.len() as u32;
    put(&mut entry, 0, b"loge");
    put(&mut entry, 8, &len.to_le_bytes());
    put(&mut entry, 16, &NUMBER.to_le_bytes());
    put(&mut entry, 24, &(descriptors.len() as u32).to_le_bytes());
    put(&mut entry, 32, &name);
    let file = (b.len() as u64).to_le_bytes();
    put(&mut entry, 48, &file);
    put(&mut entry, 56, &file);
    let mut sector = 4096;
    for (index, (offset, what)) in descriptors.iter().enumerate() {
        let at = 64 + 32 * index;
        match what {
            Logged::Data(byte) => {
                put(&mut entry, at, b"desc");
                entry[at + 4..at + 16].fill(*byte);
                put(&mut entry, sector, b"data");
                put(&mut entry, sector + 4, &((NUMBER >> 32) as u32).to_le_bytes());
                entry[sector + 8..sector + 4092].fill(*byte);
                put(&mut entry, sector + 4092, &(NUMBER as u32).to_le_bytes());
                sector += 4096;
            }
            Logged::Zeros(len) => {
                put(&mut entry, at, b"zero");
                put(&mut entry, at + 8, &len.to_le_bytes());
            }
        }
        put(&mut entry, at + 16, &offset.to_le_bytes());
        put(&mut entry, at + 24, &NUMBER.to_le_bytes());
    }
    change(&mut entry);
    put(b, LOG, &entry);
    seal(b, LOG, entry.len());
    for index in [0, 1] {
        header(b, index, |h| h[48..64].copy_from_slice(&name));
    }
}

fn vhdx_logs(sample: &Sample) -> Vec<Damaging> {
    let mut all = Vec::new();
    let end = sample.bytes.len() as u64;
    for (way, at) in [
        ("the identifier", 0),
        ("a header", HEADERS[0] as u64),
        ("a region table", REGION_TABLES[0] as u64),
        ("the log", LOG as u64 + 64 * KIB as u64),
        ("its own entry", LOG as u64),
        ("the metadata table", METADATA as u64),
        ("the metadata items", FILE_PARAMETERS as u64),
        ("the table", BAT as u64),
        ("a block", 4 * MIB as u64),
        ("the end of the file", end - 4096),
        ("behind the file", end),
        ("far behind the file", 1 << 42),
        ("no sector", BAT as u64 + 100),
        ("near 2^64", u64::MAX - 4095),
    ] {
        let kind = match way {
            "a block" | "the end of the file" => "log of payload",
            "the table" => "log of the table",
            _ => "log",
        };
        all.push(field(format!("{kind}: writes ones to {way}"), move |b| log(b, &[(at, Logged::Data(0xff))], |_| {})));
        all.push(field(format!("{kind}: writes sevens to {way}"), move |b| log(b, &[(at, Logged::Data(7))], |_| {})));
        for len in [4096, 1 << 20, 1 << 50] {
            all.push(field(format!("{kind}: {len} zeros at {way}"), move |b| {
                log(b, &[(at, Logged::Zeros(len))], |_| {});
            }));
        }
    }
    let harmless = || [(BAT as u64 + 512 * KIB as u64, Logged::Zeros(4096))];
    let changed: [(&str, Change); 11] = [
        ("nothing odd", |_| {}),
        ("a tail elsewhere", |e| e[12..16].copy_from_slice(&8192_u32.to_le_bytes())),
        ("a tail beyond the log", |e| e[12..16].copy_from_slice(&(2 * MIB as u32).to_le_bytes())),
        ("more descriptors than it holds", |e| e[24..28].copy_from_slice(&127_u32.to_le_bytes())),
        ("2^32 descriptors", |e| e[24..28].fill(0xff)),
        ("no descriptor", |e| e[24..28].fill(0)),
        ("another number in its descriptor", |e| e[64 + 24] ^= 1),
        ("number 0", |e| e[16..24].fill(0)),
        ("a longer file", |e| e[48..64].fill(0x11)),
        ("a shorter file", |e| {
            e[48..56].copy_from_slice(&(3 * MIB as u64).to_le_bytes());
            e[56..64].copy_from_slice(&(3 * MIB as u64).to_le_bytes());
        }),
        ("an unknown descriptor", |e| e[64..68].copy_from_slice(b"what")),
    ];
    for (way, change) in changed {
        all.push(field(format!("log with {way}"), move |b| log(b, &harmless(), change)));
    }
    all.push(field("log: two descriptors of one sector", |b| {
        let at = BAT as u64 + 512 * KIB as u64;
        log(b, &[(at, Logged::Data(1)), (at, Logged::Data(2))], |_| {});
    }));
    all.push(field("log: zeros over a sector that it writes", |b| {
        let at = BAT as u64 + 512 * KIB as u64;
        log(b, &[(at, Logged::Data(1)), (at, Logged::Zeros(8192))], |_| {});
    }));
    all
}

fn vhdx_places(sample: &Sample) -> Vec<Damaging> {
    let mut all = Vec::new();
    let end = sample.bytes.len() as u64 >> 20;
    for (way, block, value) in [
        ("the last MiB, partly", 0, end - 1),
        ("the first MiB behind the file", 0, end),
        ("behind 128 TiB", 0, 1 << 27),
        ("2^44 - 1", 0, (1 << 44) - 1),
    ] {
        for state in [6, 7, 1, 2, 3] {
            all.push(field(format!("BAT entry in {way}, state {state}: block {block}"), move |b| {
                put(b, BAT + 8 * block, &(value << 20 | state).to_le_bytes());
            }));
        }
    }
    all.push(field("BAT entries rotated", move |b| b[BAT..BAT + 32].rotate_left(8)));
    all.push(field("BAT entries big-endian", move |b| (0..4).for_each(|i| b[BAT + 8 * i..BAT + 8 * i + 8].reverse())));
    let first = get_u64_le(&sample.bytes, BAT).to_le_bytes();
    all.push(field("BAT entries all in one place", move |b| {
        (0..4).for_each(|index| put(b, BAT + 8 * index, &first));
    }));
    all.push(field("BAT entries partly present", move |b| {
        (0..4).for_each(|index| b[BAT + 8 * index] = b[BAT + 8 * index] & !7 | 7);
    }));
    all
}

/// The parent locator of a VHDX: a list of keys and values.
fn vhdx_links() -> Vec<Damaging> {
    let mut all = Vec::new();
    let count = |b: &[u8]| usize::from(u16::from_le_bytes([b[LOCATOR + 18], b[LOCATOR + 19]]));
    for (way, at, value) in [
        ("of another type", 0, OTHER_ID.to_vec()),
        ("without entries", 18, vec![0, 0]),
        ("with one entry", 18, vec![1, 0]),
        ("with 65535 entries", 18, vec![0xff, 0xff]),
    ] {
        all.push(field(format!("locator {way}"), move |b| put(b, LOCATOR + at, &value)));
    }
    for index in 0..4 {
        let at = LOCATOR + 20 + 12 * index;
        for (way, offset, value) in [
            ("key far away", 0, (1_u32 << 20).to_le_bytes().to_vec()),
            ("key near 2^32", 0, u32::MAX.to_le_bytes().to_vec()),
            ("key on the list", 0, 4_u32.to_le_bytes().to_vec()),
            ("value far away", 4, (1_u32 << 20).to_le_bytes().to_vec()),
            ("value on the list", 4, 4_u32.to_le_bytes().to_vec()),
            ("value at 0", 4, 0_u32.to_le_bytes().to_vec()),
            ("empty key", 8, vec![0, 0]),
            ("odd key", 8, vec![5, 0]),
            ("empty value", 10, vec![0, 0]),
            ("odd value", 10, vec![7, 0]),
            ("value of 64 KiB", 10, vec![0xfe, 0xff]),
        ] {
            all.push(field(format!("locator entry {index} {way}"), move |b| {
                if index < count(b) {
                    put(b, at + offset, &value);
                }
            }));
        }
        all.push(field(format!("locator entry {index} in place of the next"), move |b| {
            if index + 1 < count(b) {
                let entry = b[at..at + 12].to_vec();
                put(b, at + 12, &entry);
            }
        }));
        all.push(field(format!("locator entry {index} has the next key"), move |b| {
            if index + 1 < count(b) {
                let (offset, len) = (b[at + 12..at + 16].to_vec(), b[at + 20..at + 22].to_vec());
                put(b, at, &offset);
                put(b, at + 8, &len);
            }
        }));
        all.push(field(format!("locator entry {index} has the next value"), move |b| {
            if index + 1 < count(b) {
                let (offset, len) = (b[at + 16..at + 20].to_vec(), b[at + 22..at + 24].to_vec());
                put(b, at + 4, &offset);
                put(b, at + 10, &len);
            }
        }));
    }
    all
}
