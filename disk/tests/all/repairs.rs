//! Deliberate damage in some hundred kinds and places of each format. For each of them:
//!
//! - What a read refuses or gets wrong is not called sound, unless the format has no means to know
//!   it. Those kinds are in [`UNKNOWABLE`] and in docs/reliability.md.
//! - After a repair every byte that was readable is readable and the same; with accepted losses
//!   every byte outside of the ranges that were reported.
//! - The undo restores the file exactly.

use crate::{
    damage::{
        BAT, BITMAP_ENTRY, FILE_PARAMETERS, HEADERS, KIB, LOG, METADATA, MIB, REGION_TABLES, Sample, get_u32_be,
        get_u64_be, get_u64_le, put, reseal, samples, seal, sum,
    },
    damaged_tables, semantic_damages,
};
use diskwright_disk::{Disk, OpenOptions, RepairOptions, Repaired, check, repair, undo_repair};
use diskwright_image::{DiskType, Format, Severity};
use diskwright_store::{BlockDevice, Blocking, EngineKind, FileStore, Store};
use std::{
    collections::{BTreeMap, BTreeSet},
    os::unix::fs::FileExt,
    path::Path,
};
use tempfile::TempDir;

/// Kinds of damage that make reads wrong and that no structure of the format shows, and the image
/// in which they are tested, or all. docs/reliability.md lists them.
const UNKNOWABLE: &[(&str, &str)] = &[
    ("", "payload"),
    ("", "table entries exchanged"),
    ("", "table entry one sector later"),
    ("", "entry at a free place"),
    ("", "entries rotated"),
    ("", "BAT entries rotated"),
    ("", "disk size"),
    ("", "log of payload"),
    ("diff.vhdx", "log of the table"),
    ("diff.", "sector bitmap"),
    ("", "BAT entry undefined"),
    ("", "BAT entry zero with a place"),
    ("fixed.vhdx", "BAT entry lost"),
    ("fixed.vhdx", "BAT entry of another block"),
    ("fixed.vhdx", "BAT entry unmapped beyond the file"),
    ("fixed.vhdx", "the table"),
    ("fixed.vhdx", "log of the table"),
    ("fixed.vhdx", "BAT entries big-endian"),
    ("logged.vhdx", "block size"),
    ("logged.vhdx", "second header sealed"),
    ("logged.vhdx", "both headers sealed"),
    ("logged.vhdx", "log sealed"),
    ("", "L2 entries exchanged"),
    ("", "L2 entry zeros with its space"),
    ("", "qcow2 disk size"),
    ("diff.qcow2", "qcow2 backing file"),
    ("", "map entries exchanged"),
    ("diff.vdi", "unused map entry a bit"),
    ("diff.vdi", "unused map entry zeros"),
    ("", "VMDK capacity"),
    ("packed", "packed entry of another one"),
    ("packed", "packed entry lost"),
    ("packed", "packed entry"),
];

/// Kinds of damage of qcow2, VDI and VMDK that no repair removes: of what says what disk it is.
const NOT_REPAIRED: &[&str] = &[
    "qcow2 header",
    "qcow2 backing file",
    "qcow2 disk size",
    "VDI header",
    "sparse header",
    "VMDK capacity",
    "descriptor",
    "cut",
    "longer",
];

/// A kind and a place, and the damage.
pub type Damaging = (String, Box<dyn Fn(&mut Vec<u8>)>);

/// Bytes that are read by one call.
const PIECE: usize = 16 << 10;

/// What each piece of the disk reads as; `None` where a read fails. Empty if it cannot be opened.
fn read_pieces(path: &Path) -> (u64, Vec<Option<Vec<u8>>>) {
    let Ok(disk) = Disk::open(path, &OpenOptions::default()) else { return (0, Vec::new()) };
    let size = disk.geometry().size_bytes;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    let pieces = (0..size.min(8 * MIB as u64)).step_by(PIECE).map(|at| {
        let mut bytes = vec![0; PIECE.min((size - at) as usize)];
        io.read(at, &mut bytes).is_ok().then_some(bytes)
    });
    let pieces = pieces.collect();
    drop(io);
    (size, pieces)
}

const ZEROS: [u8; 4096] = [0; 4096];

/// Pages of a file that are not zero, and its length.
#[derive(Clone, PartialEq)]
struct Contents {
    len: usize,
    pages: BTreeMap<usize, Vec<u8>>,
}

impl Contents {
    fn of(bytes: &[u8]) -> Self {
        let pages = bytes.chunks(4096).enumerate().filter(|(_, page)| **page != ZEROS[..page.len()]);
        Self { len: bytes.len(), pages: pages.map(|(index, page)| (index * 4096, page.to_vec())).collect() }
    }

    /// Skips holes, so that the tests of large, nearly empty files are fast.
    fn read(path: &Path) -> Self {
        let store = FileStore::open(path, &Default::default()).unwrap();
        let len = store.len_bytes().unwrap() as usize;
        let mut pages = BTreeMap::new();
        let mut at = 0;
        while let Some(data) = store.next_data(at).unwrap() {
            let end = data.offset_bytes + data.len_bytes;
            for offset in (data.offset_bytes / 4096 * 4096..end).step_by(4096) {
                let mut page = vec![0; 4096.min(len - offset as usize)];
                store.read_at(&mut page, offset).unwrap();
                if page != ZEROS[..page.len()] {
                    pages.insert(offset as usize, page);
                }
            }
            at = end;
        }
        Self { len, pages }
    }

    fn write(&self, path: &Path) {
        let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
        file.set_len(0).unwrap();
        file.set_len(self.len as u64).unwrap();
        self.pages.iter().for_each(|(&at, page)| file.write_all_at(page, at as u64).unwrap());
    }
}

fn memory_dir() -> TempDir {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { tempfile::tempdir_in(shared).unwrap() } else { tempfile::tempdir().unwrap() }
}

fn mended(path: &Path, format: Format, accept_loss: bool) -> Result<Repaired, String> {
    let open = OpenOptions { format: Some(format), ..OpenOptions::default() };
    let options = RepairOptions { open, accept_loss, ..RepairOptions::default() };
    repair(path, &options, &mut |_, _| true).map_err(|error| error.to_string())
}

/// What became of the kinds of damage.
#[derive(Default)]
struct Tally {
    cases: usize,
    /// Reads are refused or wrong.
    harmful: usize,
    /// Of these, those after whose repair without loss everything reads right again.
    restored: usize,
    /// Of these, those that lost something.
    gave_up: usize,
    /// The kinds after whose repair with losses the image is still damaged.
    unsound: BTreeSet<String>,
    /// The kinds of [`UNKNOWABLE`] that were met.
    silent: BTreeSet<(&'static str, String)>,
    failures: Vec<String>,
}

impl Tally {
    fn case(
        &mut self,
        sample: &Sample,
        model: &[Option<Vec<u8>>],
        size: u64,
        kind: &str,
        damage: &dyn Fn(&mut Vec<u8>),
    ) {
        let mut bytes = sample.bytes.clone();
        damage(&mut bytes);
        if bytes == sample.bytes {
            return;
        }
        let damaged = Contents::of(&bytes);
        damaged.write(&sample.path);
        self.cases += 1;
        let path = &sample.path;
        let before = read_pieces(path);
        let is_right = before.0 == size && before.1 == model;
        let checked = || {
            let options = OpenOptions { format: Some(sample.format), ..OpenOptions::default() };
            check(path, &options).map_err(|error| error.to_string())
        };
        let sound =
            checked().is_ok_and(|found| found.broken_link.is_none() && found.report.worst() < Some(Severity::Leak));
        let name = format!("{}, {kind}", sample.name);
        if !is_right {
            self.harmful += 1;
            let general = kind.split(':').next().unwrap();
            if sound && UNKNOWABLE.iter().any(|(of, known)| sample.name.starts_with(of) && *known == general) {
                self.silent.insert((sample.name, general.to_owned()));
            } else if sound {
                self.failures.push(format!("{name}: sound, but it reads wrongly"));
            }
        }
        let mut states = vec![damaged];
        for accept_loss in [false, true] {
            let done = match mended(path, sample.format, accept_loss) {
                Ok(done) => done,
                Err(_) if Contents::read(path) == *states.last().unwrap() => continue,
                Err(error) => {
                    self.failures.push(format!("{name}: a failed repair has changed the file: {error}"));
                    continue;
                }
            };
            if done.undo_file.is_some() {
                states.push(Contents::read(path));
            } else if Contents::read(path) != *states.last().unwrap() {
                self.failures.push(format!("{name}: changed without an undo file"));
            }
            let after = read_pieces(path);
            let is_lost = |index: usize| {
                let (start, end) = ((index * PIECE) as u64, ((index + 1) * PIECE) as u64);
                done.lost.iter().any(|range| range.start < end && start < range.end)
            };
            for (index, piece) in before.1.iter().enumerate().filter(|(_, piece)| piece.is_some()) {
                if after.1.get(index) != Some(piece) && !is_lost(index) {
                    let what = format!("{:?} to {:?}", done.before.findings, done.steps);
                    self.failures.push(format!(
                        "{name}: after the repair (loss {accept_loss}) piece {index} is another: {what}"
                    ));
                    break;
                }
            }
            if !accept_loss && !done.lost.is_empty() {
                self.failures.push(format!("{name}: lost without consent: {:?}", done.lost));
            }
            let is_sound = done.after.worst() < Some(Severity::Leak);
            let again = checked().map(|found| found.report.worst());
            if again.as_ref().ok() != Some(&done.after.worst()) {
                self.failures.push(format!("{name}: {:?} was promised, the check says {again:?}", done.after.worst()));
            }
            if is_sound && after.1.iter().any(Option::is_none) {
                self.failures.push(format!("{name}: repaired and sound, but a read fails"));
            }
            let is_restored = is_sound && after.0 == size && after.1 == model;
            self.restored += usize::from(is_restored && !is_right && !accept_loss);
            self.gave_up += usize::from(accept_loss && !done.lost.is_empty());
            if accept_loss && !is_sound {
                self.unsound.insert(kind.split(':').next().unwrap().to_owned());
            }
        }
        while let Some(_changed) = states.pop().filter(|_| !states.is_empty()) {
            if let Err(error) = undo_repair(path, &RepairOptions::default()) {
                self.failures.push(format!("{name}: {error}"));
                break;
            }
            if Contents::read(path) != *states.last().unwrap() {
                self.failures.push(format!("{name}: the undo has not restored the file"));
            }
        }
        let mut left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().flatten().collect();
        left.retain(|entry| entry.file_name().to_string_lossy().contains(".undo"));
        for entry in left {
            self.failures.push(format!("{name}: {:?} is left", entry.file_name()));
            std::fs::remove_file(entry.path()).unwrap();
        }
    }
}

pub fn field(kind: impl Into<String>, damage: impl Fn(&mut Vec<u8>) + 'static) -> Damaging {
    (kind.into(), Box::new(damage))
}

/// Truncated and lengthened files.
fn lengths(len: usize) -> Vec<Damaging> {
    let mut all = Vec::new();
    let cuts = [1, 100, 511, 512, 513, 1024, 1535, 4096, 32 * KIB, 64 * KIB, 100_000, MIB - 1, MIB, MIB + 1, 2 * MIB];
    for back in cuts.into_iter().filter(|&back| back < len) {
        all.push(field(format!("cut: by {back}"), move |b| b.truncate(b.len() - back)));
    }
    for more in [1, 100, 511, 512, 4096, 64 * KIB, MIB, MIB + 7] {
        all.push(field(format!("longer: by {more} zeros"), move |b| b.resize(b.len() + more, 0)));
        all.push(field(format!("longer: by {more} bytes"), move |b| b.resize(b.len() + more, 0xa5)));
    }
    all
}

/// Changes some bytes of a structure.
type Change = fn(&mut [u8]);

/// Bytes `at..at + len` of the structure at `base` are changed in several ways; `seal` repairs its
/// checksum.
fn changed(
    kind: &str,
    base: &'static [usize],
    at: usize,
    len: usize,
    seal: Option<fn(&mut Vec<u8>, usize)>,
) -> Vec<Damaging> {
    let ways: [(&str, Change); 4] = [
        ("a bit", |b| b[b.len() - 1] ^= 1),
        ("the top bit", |b| b[0] ^= 0x80),
        ("zeros", |b| b.fill(0)),
        ("ones", |b| b.fill(0xff)),
    ];
    let mut all = Vec::new();
    for (way, change) in ways {
        let name = if seal.is_some() { "sealed" } else { "torn" };
        all.push(field(format!("{kind} {name}: {way} at {at}"), move |b| {
            for &start in base {
                if let Some(bytes) = b.get_mut(start + at..start + at + len) {
                    change(bytes);
                    if let Some(seal) = seal {
                        seal(b, start);
                    }
                }
            }
        }));
    }
    all
}

const TAIL: usize = usize::MAX;

fn vhd_damages(sample: &Sample, disk_type: DiskType) -> Vec<Damaging> {
    let mut all = lengths(sample.bytes.len());
    let fields = [
        (0, 8),
        (8, 4),
        (12, 4),
        (16, 8),
        (24, 4),
        (28, 4),
        (40, 8),
        (48, 8),
        (56, 4),
        (60, 4),
        (64, 4),
        (68, 16),
        (84, 1),
        (200, 8),
    ];
    let is_fixed = disk_type == DiskType::Fixed;
    // The footers: at the end, its copy, both. A child has them like any other disk with blocks.
    let is_child = disk_type == DiskType::Differencing;
    for (which, places) in
        [("footer at the end", vec![TAIL]), ("footer copy", vec![0]), ("both footers", vec![0, TAIL])]
    {
        if is_fixed && which != "footer at the end" || is_child && which != "both footers" {
            continue;
        }
        for (at, len) in fields {
            for sealed in [false, true] {
                for (way, change) in
                    [("a bit", (|b: &mut [u8]| b[0] ^= 1) as fn(&mut [u8])), ("ones", |b| b.fill(0xff))]
                {
                    let places = places.clone();
                    let name = if sealed { "sealed" } else { "torn" };
                    all.push(field(format!("{which} {name}: {way} at {at}"), move |b| {
                        for &place in &places {
                            let start = if place == TAIL { b.len() - 512 } else { place };
                            change(&mut b[start + at..start + at + len]);
                            if sealed {
                                sum(b, start, 512, 64);
                            }
                        }
                    }));
                }
            }
        }
        let places = places.clone();
        all.push(field(format!("{which} gone"), move |b| {
            for &place in &places {
                let start = if place == TAIL { b.len() - 512 } else { place };
                b[start..start + 512].fill(0);
            }
        }));
    }
    if is_fixed {
        return all;
    }
    const HEADER: &[usize] = &[512];
    let seal_header: fn(&mut Vec<u8>, usize) = |b, start| sum(b, start, 1024, 36);
    for (at, len) in [
        (0, 8),
        (8, 8),
        (16, 8),
        (24, 4),
        (28, 4),
        (32, 4),
        (36, 4),
        (40, 16),
        (56, 4),
        (64, 8),
        (576, 4),
        (584, 4),
        (592, 8),
        (800, 8),
    ] {
        all.extend(changed("header", HEADER, at, len, None));
        all.extend(changed("header", HEADER, at, len, Some(seal_header)));
    }
    let table = get_u64_be(&sample.bytes, 512 + 16) as usize;
    let len = sample.bytes.len() as u32 / 512;
    for block in [0, 1, 3, 8, 15] {
        let entry = get_u32_be(&sample.bytes, table + 4 * block);
        let other = get_u32_be(&sample.bytes, table + 4 * 8);
        let is_used = entry != u32::MAX;
        let kind = if is_used { "table entry" } else { "unused table entry" };
        let mut values = vec![
            ("beyond the file", 0x0fff_ffff),
            ("at the end", len - 1),
            ("cut by the end", len - 20),
            ("on the footer", 0),
            ("on the header", 1),
            ("on the table", (table / 512) as u32),
            ("near 2^32", 0xffff_fffe),
        ];
        if block != 8 {
            values.push(("of another block", other));
            values.push(("half in another block", other + 9));
        }
        if is_used {
            values.push(("one sector later", entry + 1));
            values.push(("lost", u32::MAX));
            values.push(("a top bit", entry ^ 1 << 31));
        }
        for (way, value) in values {
            all.push(field(format!("{kind} {way}: block {block}"), move |b| {
                put(b, table + 4 * block, &value.to_be_bytes())
            }));
        }
        if is_used {
            let at = entry as usize * 512;
            for (way, byte) in [("zeros", 0u8), ("ones", 0xff), ("a bit", 1)] {
                all.push(field(format!("sector bitmap: {way} in that of block {block}"), move |b| match byte {
                    1 => b[at] ^= 0x40,
                    byte => b[at..at + 512].fill(byte),
                }));
            }
            all.push(field(format!("payload: block {block}"), move |b| b[at + 512 + 77] ^= 1));
        }
    }
    all.push(field("table entries exchanged", move |b| {
        let (one, other) = (get_u32_be(b, table), get_u32_be(b, table + 32));
        put(b, table, &other.to_be_bytes());
        put(b, table + 32, &one.to_be_bytes());
    }));
    all.push(field("the table: zeros", move |b| b[table..table + 64].fill(0)));
    all.push(field("the table: all unused", move |b| b[table..table + 64].fill(0xff)));
    // Space that nothing refers to, before the first block.
    all.push(field("the table and both footers", move |b| {
        b[table..table + 64].fill(0);
        b[..512].fill(0);
    }));
    all
}

fn vhdx_damages(sample: &Sample, disk_type: DiskType) -> Vec<Damaging> {
    let mut all = lengths(sample.bytes.len());
    if disk_type == DiskType::Dynamic && sample.name != "logged.vhdx" {
        all.extend(vhdx_structure_damages());
    }
    all.extend(vhdx_table_damages(sample, disk_type));
    all
}

/// Damages of headers, region tables and metadata, which are alike in all types.
fn vhdx_structure_damages() -> Vec<Damaging> {
    let mut all = Vec::new();
    let seal_header: fn(&mut Vec<u8>, usize) = |b, start| seal(b, start, 4096);
    let seal_regions: fn(&mut Vec<u8>, usize) = |b, start| seal(b, start, 64 * KIB);
    const FIRST: &[usize] = &[HEADERS[0]];
    const SECOND: &[usize] = &[HEADERS[1]];
    for (kind, places) in [("first header", FIRST), ("second header", SECOND), ("both headers", &HEADERS[..])] {
        for (at, len) in
            [(0, 4), (4, 4), (8, 8), (16, 16), (32, 16), (48, 16), (64, 2), (66, 2), (68, 4), (72, 8), (2000, 8)]
        {
            let ways = changed(kind, places, at, len, None);
            all.extend(ways.into_iter().take(2));
            all.extend(changed(kind, places, at, len, Some(seal_header)).into_iter().skip(1));
        }
    }
    const FIRST_TABLE: &[usize] = &[REGION_TABLES[0]];
    const SECOND_TABLE: &[usize] = &[REGION_TABLES[1]];
    for (kind, places) in [
        ("first region table", FIRST_TABLE),
        ("second region table", SECOND_TABLE),
        ("both region tables", &REGION_TABLES[..]),
    ] {
        for (at, len) in
            [(0, 4), (4, 4), (8, 4), (16, 16), (32, 8), (40, 4), (44, 4), (48, 16), (64, 8), (72, 4), (60_000, 4)]
        {
            all.extend(changed(kind, places, at, len, None).into_iter().take(1));
            all.extend(changed(kind, places, at, len, Some(seal_regions)).into_iter().skip(1));
        }
    }
    const TABLE: &[usize] = &[METADATA];
    for at in [0, 8, 10, 32, 48, 52, 56, 64, 80, 84, 88, 96, 112, 116, 128, 160, 176] {
        all.extend(changed("metadata table", TABLE, at, 4, None));
    }
    const ITEMS: &[usize] = &[FILE_PARAMETERS];
    for (at, len) in
        [(0, 4), (4, 4), (8, 8), (16, 16), (32, 4), (36, 4), (40, 16), (56, 2), (58, 2), (64, 4), (68, 4), (72, 4)]
    {
        all.extend(changed("metadata items", ITEMS, at, len, None));
    }
    all.extend(changed("file identifier", &[0], 0, 8, None));
    all
}

/// Damages of the block allocation table, of what it refers to, and of the log.
fn vhdx_table_damages(sample: &Sample, disk_type: DiskType) -> Vec<Damaging> {
    let mut all = Vec::new();
    let end = sample.bytes.len() as u64 >> 20;
    let entry = |mib: u64, state: u64| mib << 20 | state;
    for block in 0..4 {
        let at = BAT + 8 * block;
        let found = get_u64_le(&sample.bytes, at);
        let other = get_u64_le(&sample.bytes, BAT + 16);
        let is_used = found & 7 >= 6;
        let kind = if is_used { "BAT entry" } else { "unused BAT entry" };
        let mut values = vec![
            ("beyond the file", entry(1 << 20, 6)),
            ("at the end", entry(end, 6)),
            ("on the headers", entry(0, 6)),
            ("on the log", entry(1, 6)),
            ("on the metadata", entry(2, 6)),
            ("on the table", entry(3, 7)),
            ("near 2^64", u64::MAX << 20 | 6),
            ("state 4", found & !7 | 4),
            ("state 5", found & !7 | 5),
            ("reserved bits", found | 0xfff0),
            ("unmapped beyond the file", entry(1 << 20, 3)),
            ("zero with a place", found & !7 | 2),
        ];
        if block != 2 {
            values.push(("of another block", other));
        }
        if block != 2 && other & 7 >= 6 {
            values.push(("without data at another block", other & !7 | 3));
        }
        if is_used {
            values.push(("lost", 0));
            values.push(("other present state", found ^ 1));
            values.push(("undefined", found & !7 | 1));
            values.push(("a top bit", found ^ 1 << 63));
        }
        for (way, value) in values {
            all.push(field(format!("{kind} {way}: block {block}"), move |b| put(b, at, &value.to_le_bytes())));
        }
        if is_used {
            let place = (found >> 20 << 20) as usize;
            all.push(field(format!("payload: block {block}"), move |b| b[place + 77] ^= 1));
        }
    }
    for (way, value) in [
        ("lost", 0),
        ("beyond the file", entry(1 << 20, 6)),
        ("state 3", entry(9, 3)),
        ("state 7", get_u64_le(&sample.bytes, BITMAP_ENTRY) | 7),
        ("on the log", entry(1, 6)),
        ("of a block", get_u64_le(&sample.bytes, BAT)),
        ("reserved bits", get_u64_le(&sample.bytes, BITMAP_ENTRY) | 0xff0),
    ] {
        all.push(field(format!("bitmap entry {way}"), move |b| put(b, BITMAP_ENTRY, &u64::to_le_bytes(value))));
    }
    if disk_type == DiskType::Differencing {
        let place = (get_u64_le(&sample.bytes, BITMAP_ENTRY) >> 20 << 20) as usize;
        all.push(field("sector bitmap: zeros", move |b| b[place..place + 1024].fill(0)));
        all.push(field("sector bitmap: a bit", move |b| b[place] ^= 0x80));
    }
    all.push(field("the table: zeros", |b| b[BAT..BAT + 64].fill(0)));
    if sample.name == "logged.vhdx" {
        for at in [48, 64] {
            all.extend(changed("second header", &[HEADERS[1]], at, 16, Some(|b, start| seal(b, start, 4096))));
            all.extend(changed("both headers", &HEADERS, at, 16, Some(|b, start| seal(b, start, 4096))));
        }
        for at in [0, 4, 8, 12, 16, 24, 32, 48, 56, 64, 72, 80, 4096, 4100, 5000, 8188] {
            all.push(field(format!("log torn: a bit at {at}"), move |b| b[LOG + at] ^= 1));
            all.push(field(format!("log sealed: a bit at {at}"), move |b| {
                b[LOG + at] ^= 1;
                reseal(b, Format::Vhdx);
            }));
        }
        all.push(field("log gone", |b| b[LOG..LOG + 64 * KIB].fill(0)));
    }
    all
}

/// Gives a child other data than its parent has, so that it matters which of them is read.
fn unlike_its_parent(sample: &mut Sample) {
    let disk = Disk::open(&sample.path, &OpenOptions { writable: true, ..OpenOptions::default() }).unwrap();
    let mut io = Blocking::open(&*disk, EngineKind::Sync).unwrap();
    for offset in [0, disk.geometry().size_bytes / 2] {
        io.write(offset, &[0xc3; 4096], false).unwrap();
    }
    drop(io);
    disk.close().unwrap();
    sample.bytes = std::fs::read(&sample.path).unwrap();
}

fn all_damages(format: Format) {
    let dir = memory_dir();
    let mut tallies: BTreeMap<&str, Tally> = BTreeMap::new();
    let has_checksums = matches!(format, Format::Vhd | Format::Vhdx);
    let mut samples = match has_checksums {
        true => samples(dir.path()).into_iter().filter(|sample| sample.format == format).collect(),
        false => damaged_tables::samples(dir.path(), format),
    };
    for sample in &mut samples {
        if has_checksums && sample.name.starts_with("diff.") {
            unlike_its_parent(sample);
        }
        let (size, model) = read_pieces(&sample.path);
        assert!(!model.is_empty() && model.iter().all(Option::is_some));
        let disk_type = match sample.name.split('.').next().unwrap() {
            "fixed" => DiskType::Fixed,
            "diff" => DiskType::Differencing,
            _ => DiskType::Dynamic,
        };
        let mut damages = match format {
            Format::Vhd => vhd_damages(sample, disk_type),
            Format::Vhdx => vhdx_damages(sample, disk_type),
            _ => lengths(sample.bytes.len()),
        };
        damages.extend(match format {
            Format::Vhd => semantic_damages::vhd(sample, disk_type),
            Format::Vhdx => semantic_damages::vhdx(sample, disk_type),
            Format::Qcow2 | Format::Vmdk if sample.name.starts_with("packed") => damaged_tables::packed(sample),
            Format::Qcow2 => damaged_tables::qcow2(sample),
            Format::Vdi => damaged_tables::vdi(sample),
            _ => damaged_tables::vmdk(sample),
        });
        let tally = tallies.entry(sample.name).or_default();
        for (kind, damage) in &damages {
            tally.case(sample, &model, size, kind, damage);
        }
        std::fs::write(&sample.path, &sample.bytes).unwrap();
    }
    let mut failures = Vec::new();
    let mut silent = BTreeSet::new();
    let mut cases = 0;
    for (name, tally) in tallies {
        println!(
            "{name}: {} kinds of damage, {} harmful; {} repaired without loss, {} with losses; not repaired: {:?}",
            tally.cases, tally.harmful, tally.restored, tally.gave_up, tally.unsound
        );
        cases += tally.cases;
        failures.extend(tally.failures);
        if !has_checksums {
            let stays = tally.unsound.iter().filter(|kind| !NOT_REPAIRED.contains(&kind.as_str()));
            failures.extend(stays.map(|kind| format!("{name}, {kind}: damaged after a repair with losses")));
        }
        silent.extend(tally.silent);
    }
    println!("silent: {silent:#?}");
    assert!(failures.is_empty(), "{} failures:\n{}", failures.len(), failures.join("\n"));
    assert!(cases >= 300, "{cases}");
}

#[test]
fn damages_of_vhds() {
    all_damages(Format::Vhd);
}

#[test]
fn damages_of_vhdxs() {
    all_damages(Format::Vhdx);
}

#[test]
fn damages_of_qcow2s() {
    all_damages(Format::Qcow2);
}

#[test]
fn damages_of_vdis() {
    all_damages(Format::Vdi);
}

#[test]
fn damages_of_vmdks() {
    all_damages(Format::Vmdk);
}
