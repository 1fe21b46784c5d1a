//! Files that are damaged, one way at a time: each gets one error that names the file, the place, what was found there and
//! what was expected, or (where the disk can still be read) a finding of the check. The file stays as it was.

mod damage;

use damage::*;
use diskwright_disk::{Disk, OpenOptions};
use diskwright_image::{Format, Severity};
use std::path::Path;
use tempfile::tempdir;

type Damage = fn(&mut Vec<u8>);

/// What a user must be told.
enum Told {
    /// Opening or reading fails; the words are in the error, besides the file, the offset and what was expected.
    Error(&'static [&'static str]),
    /// It fails without an offset: the whole file is not what it should be, or asks for what there is not.
    Refusal(&'static [&'static str]),
    /// It can be read, and the check has a finding at least as bad, with these words.
    Finding(Severity, &'static [&'static str]),
}
use Told::{Error, Finding, Refusal};

fn vhd_cases() -> Vec<(&'static str, &'static str, Damage, Told)> {
    vec![
        ("fixed.vhd", "no footer", |b| b.truncate(64 * KIB), Refusal(&["was the file copied completely?"])),
        (
            "fixed.vhd",
            "cut in the middle",
            |b| {
                b.drain(..32 * KIB);
            },
            Error(&["footer", "32768"]),
        ),
        (
            "fixed.vhd",
            "footer checksum",
            |b| {
                let at = b.len() - 400;
                b[at] ^= 1
            },
            Error(&["footer", "checksum"]),
        ),
        (
            "fixed.vhd",
            "size above the file",
            |b| in_footers(b, 48, &(1_u64 << 40).to_be_bytes()),
            Error(&["footer", "1099511627776"]),
        ),
        (
            "fixed.vhd",
            "size at the end of the world",
            |b| in_footers(b, 48, &u64::MAX.to_be_bytes()),
            Error(&["footer"]),
        ),
        ("fixed.vhd", "size 0", |b| in_footers(b, 48, &[0; 8]), Refusal(&["size of 0 bytes", "expected"])),
        ("fixed.vhd", "unknown type", |b| in_footers(b, 60, &9_u32.to_be_bytes()), Error(&["type 9"])),
        ("fixed.vhd", "version 2", |b| in_footers(b, 12, &0x2_0000_u32.to_be_bytes()), Error(&["version"])),
        (
            "dynamic.vhd",
            "no cookies",
            |b| {
                in_footers(b, 0, b"connectx");
            },
            Refusal(&["conectix"]),
        ),
        (
            "dynamic.vhd",
            "both checksums",
            |b| {
                let at = b.len() - 1;
                b[at] ^= 1;
                b[511] ^= 1
            },
            Error(&["footer", "checksum"]),
        ),
        (
            "dynamic.vhd",
            "the tail cut off",
            |b| {
                let len = b.len();
                b.truncate(len - 512)
            },
            Finding(Severity::Note, &["footer at the end"]),
        ),
        ("dynamic.vhd", "the copy gone", |b| b[..512].fill(0), Finding(Severity::Corrupt, &["copy of the footer"])),
        (
            "dynamic.vhd",
            "half of it",
            |b| {
                let len = b.len();
                b.truncate(len / 2)
            },
            Error(&["block", "inside the file"]),
        ),
        ("dynamic.vhd", "only footer and header", |b| b.truncate(1536), Error(&["table"])),
        ("dynamic.vhd", "size 0", |b| in_footers(b, 48, &[0; 8]), Refusal(&["size of 0 bytes", "expected"])),
        (
            "dynamic.vhd",
            "size above the table",
            |b| in_footers(b, 48, &(1_u64 << 40).to_be_bytes()),
            Error(&["header", "entries"]),
        ),
        (
            "dynamic.vhd",
            "size above the format",
            |b| {
                in_header(b, 28, &u32::MAX.to_be_bytes());
                in_header(b, 32, &(1_u32 << 31).to_be_bytes());
                in_footers(b, 48, &(3_u64 << 40).to_be_bytes())
            },
            Refusal(&["3298534883328", "expected", "2190433320960"]),
        ),
        (
            "dynamic.vhd",
            "size at the end of the world",
            |b| in_footers(b, 48, &u64::MAX.to_be_bytes()),
            Error(&["expected"]),
        ),
        (
            "dynamic.vhd",
            "header beyond the file",
            |b| in_footers(b, 16, &(1_u64 << 40).to_be_bytes()),
            Error(&["header at offset 1099511627776"]),
        ),
        (
            "dynamic.vhd",
            "header at the end of the world",
            |b| in_footers(b, 16, &(u64::MAX - 511).to_be_bytes()),
            Error(&["header"]),
        ),
        ("dynamic.vhd", "header on the footer", |b| in_footers(b, 16, &[0; 8]), Error(&["header"])),
        ("dynamic.vhd", "header cookie", |b| in_header(b, 0, b"cxsparce"), Error(&["cxsparse"])),
        ("dynamic.vhd", "header checksum", |b| b[512 + 900] ^= 1, Error(&["checksum"])),
        ("dynamic.vhd", "header version", |b| in_header(b, 24, &0x7_0000_u32.to_be_bytes()), Error(&["version"])),
        ("dynamic.vhd", "block of 0", |b| in_header(b, 32, &[0; 4]), Error(&["block"])),
        ("dynamic.vhd", "block of 3 MiB", |b| in_header(b, 32, &(3_u32 << 20).to_be_bytes()), Error(&["power of two"])),
        ("dynamic.vhd", "block of 256", |b| in_header(b, 32, &256_u32.to_be_bytes()), Error(&["block"])),
        ("dynamic.vhd", "no table entries", |b| in_header(b, 28, &[0; 4]), Error(&["0 entries", "at least 16"])),
        ("dynamic.vhd", "table beyond the file", |b| in_header(b, 16, &(1_u64 << 40).to_be_bytes()), Error(&["table"])),
        (
            "dynamic.vhd",
            "table at the end of the world",
            |b| in_header(b, 16, &(u64::MAX - 511).to_be_bytes()),
            Error(&["table"]),
        ),
        ("dynamic.vhd", "table unaligned", |b| in_header(b, 16, &4097_u64.to_be_bytes()), Error(&["multiple of 512"])),
        ("dynamic.vhd", "table on the header", |b| in_header(b, 16, &1024_u64.to_be_bytes()), Error(&["clear of"])),
        (
            "dynamic.vhd",
            "block beyond the file",
            |b| put_entry(b, 3, 0x0fff_ffff),
            Error(&["block", "inside the file"]),
        ),
        (
            "dynamic.vhd",
            "block at the end of the world",
            |b| put_entry(b, 3, 0xffff_fffe),
            Error(&["block", "inside the file"]),
        ),
        ("dynamic.vhd", "block on the header", |b| put_entry(b, 3, 1), Error(&["clear of the image's own tables"])),
        (
            "dynamic.vhd",
            "block on the table",
            |b| {
                let at = get_u64_be(b, 512 + 16) / 512;
                put_entry(b, 3, at as u32)
            },
            Error(&["clear of"]),
        ),
        (
            "dynamic.vhd",
            "two blocks in one place",
            |b| {
                let first = table_entry(b, 0);
                put_entry(b, 3, first)
            },
            Finding(Severity::Corrupt, &["overlap"]),
        ),
        (
            "dynamic.vhd",
            "two blocks half in one place",
            |b| {
                let first = table_entry(b, 0);
                put_entry(b, 3, first + 16)
            },
            Finding(Severity::Corrupt, &["overlap"]),
        ),
        ("diff.vhd", "no locators", |b| in_header(b, 576, &[0; 192]), Finding(Severity::Note, &["named by hand"])),
        (
            "diff.vhd",
            "locator beyond the file",
            |b| in_header(b, 576 + 16, &(1_u64 << 40).to_be_bytes()),
            Finding(Severity::Corrupt, &["locator", "beyond the file"]),
        ),
        (
            "diff.vhd",
            "locator of 4 GiB",
            |b| in_header(b, 576 + 8, &u32::MAX.to_be_bytes()),
            Finding(Severity::Corrupt, &["locator"]),
        ),
        (
            "diff.vhd",
            "another parent's id",
            |b| in_header(b, 40, &[7; 16]),
            Refusal(&["parent.vhd", "identity", "07070707"]),
        ),
        ("diff.vhd", "block beyond the file", |b| put_entry(b, 3, 0x0fff_ffff), Error(&["block", "inside the file"])),
    ]
}

fn table_entry(bytes: &[u8], block: usize) -> u32 {
    get_u32_be(bytes, get_u64_be(bytes, 512 + 16) as usize + 4 * block)
}

fn put_entry(bytes: &mut [u8], block: usize, entry: u32) {
    let at = get_u64_be(bytes, 512 + 16) as usize + 4 * block;
    put(bytes, at, &entry.to_be_bytes());
}

/// A payload entry: a place in MiB, and a state.
fn entry(mib: u64, state: u64) -> [u8; 8] {
    (mib << 20 | state).to_le_bytes()
}

fn vhdx_cases() -> Vec<(&'static str, &'static str, Damage, Told)> {
    vec![
        ("dynamic.vhdx", "no signature", |b| b[0] = b'V', Refusal(&["vhdxfile"])),
        ("dynamic.vhdx", "half of it", |b| b.truncate(4 * MIB + 1), Error(&["BAT entry", "copied completely"])),
        ("dynamic.vhdx", "cut in the BAT", |b| b.truncate(BAT), Error(&["BAT region"])),
        ("dynamic.vhdx", "cut in the metadata", |b| b.truncate(METADATA + 5), Error(&["metadata table"])),
        ("dynamic.vhdx", "only the header section", |b| b.truncate(MIB), Error(&[])),
        ("dynamic.vhdx", "only the identifier", |b| b.truncate(700), Error(&["header"])),
        (
            "dynamic.vhdx",
            "both header checksums",
            |b| HEADERS.iter().for_each(|at| b[at + 99] ^= 1),
            Error(&["header", "checksum"]),
        ),
        (
            "dynamic.vhdx",
            "one header",
            |b| b[HEADERS[0] + 99] ^= 1,
            Finding(Severity::Note, &["the other header is good"]),
        ),
        (
            "dynamic.vhdx",
            "two headers alike in number only",
            |b| {
                in_headers(b, 8, &7_u64.to_le_bytes());
                put(b, HEADERS[0] + 16, &[5; 16]);
                seal(b, HEADERS[0], 4096)
            },
            Error(&["sequence number 7"]),
        ),
        ("dynamic.vhdx", "version 2", |b| in_headers(b, 66, &2_u16.to_le_bytes()), Refusal(&["version 2"])),
        ("dynamic.vhdx", "no log, and named", |b| in_headers(b, 48, &[9; 16]), Error(&["log", "0 valid entries"])),
        (
            "dynamic.vhdx",
            "log of a later version",
            |b| {
                in_headers(b, 48, &[9; 16]);
                in_headers(b, 64, &3_u16.to_le_bytes())
            },
            Refusal(&["log version 3"]),
        ),
        (
            "dynamic.vhdx",
            "log of 0 bytes",
            |b| {
                in_headers(b, 48, &[9; 16]);
                in_headers(b, 68, &[0; 4])
            },
            Error(&["log length 0"]),
        ),
        (
            "dynamic.vhdx",
            "log unaligned",
            |b| {
                in_headers(b, 48, &[9; 16]);
                in_headers(b, 72, &(MIB as u64 + 4096).to_le_bytes())
            },
            Error(&["log offset"]),
        ),
        (
            "dynamic.vhdx",
            "log at the end of the world",
            |b| {
                in_headers(b, 48, &[9; 16]);
                in_headers(b, 72, &(u64::MAX << 20).to_le_bytes())
            },
            Error(&["log"]),
        ),
        (
            "dynamic.vhdx",
            "log of 4 GiB",
            |b| {
                in_headers(b, 48, &[9; 16]);
                in_headers(b, 68, &(u32::MAX << 20).to_le_bytes())
            },
            Error(&["log that ends"]),
        ),
        (
            "dynamic.vhdx",
            "both region tables",
            |b| REGION_TABLES.iter().for_each(|at| b[at + 60_000] ^= 1),
            Error(&["region table", "checksum"]),
        ),
        (
            "dynamic.vhdx",
            "one region table",
            |b| b[REGION_TABLES[0] + 60_000] ^= 1,
            Finding(Severity::Note, &["the other copy is good"]),
        ),
        ("dynamic.vhdx", "3000 regions", |b| in_regions(b, 8, &3000_u32.to_le_bytes()), Error(&["3000 entries"])),
        ("dynamic.vhdx", "no regions", |b| in_regions(b, 8, &[0; 4]), Error(&["region", "no such region"])),
        (
            "dynamic.vhdx",
            "region unaligned",
            |b| in_regions(b, 16 + 16, &(BAT as u64 + 512).to_le_bytes()),
            Error(&["multiple of 1 MiB"]),
        ),
        (
            "dynamic.vhdx",
            "region at the end of the world",
            |b| in_regions(b, 16 + 16, &(u64::MAX << 20).to_le_bytes()),
            Error(&["region"]),
        ),
        (
            "dynamic.vhdx",
            "region beyond the file",
            |b| in_regions(b, 16 + 16, &(1_u64 << 40).to_le_bytes()),
            Error(&["BAT region"]),
        ),
        ("dynamic.vhdx", "region of 0 bytes", |b| in_regions(b, 16 + 24, &[0; 4]), Error(&["0 bytes"])),
        (
            "dynamic.vhdx",
            "regions in one place",
            |b| in_regions(b, 16 + 16, &(METADATA as u64).to_le_bytes()),
            Error(&["region", "beyond"]),
        ),
        (
            "dynamic.vhdx",
            "region in the log",
            |b| in_regions(b, 16 + 16, &(LOG as u64).to_le_bytes()),
            Error(&["apart from each other"]),
        ),
        (
            "dynamic.vhdx",
            "an unknown region, required",
            |b| {
                in_regions(b, 8, &3_u32.to_le_bytes());
                in_regions(b, 80, &[3; 16]);
                in_regions(b, 96, &(64_u64 << 20).to_le_bytes());
                in_regions(b, 104, &(1_u32 << 20).to_le_bytes());
                in_regions(b, 108, &1_u32.to_le_bytes())
            },
            Refusal(&["03030303", "required"]),
        ),
        ("dynamic.vhdx", "no metadata", |b| b[METADATA] = b'M', Error(&["metadata table"])),
        (
            "dynamic.vhdx",
            "3000 metadata items",
            |b| put(b, METADATA + 10, &3000_u16.to_le_bytes()),
            Error(&["3000 entries"]),
        ),
        ("dynamic.vhdx", "no metadata items", |b| put(b, METADATA + 10, &[0; 2]), Error(&["no such metadata item"])),
        ("dynamic.vhdx", "item in the table", |b| put(b, METADATA + 48, &100_u32.to_le_bytes()), Error(&["item"])),
        (
            "dynamic.vhdx",
            "item beyond the region",
            |b| put(b, METADATA + 48, &(MIB as u32 - 4).to_le_bytes()),
            Error(&["item"]),
        ),
        (
            "dynamic.vhdx",
            "item at the end of the world",
            |b| put(b, METADATA + 48, &u32::MAX.to_le_bytes()),
            Error(&["item"]),
        ),
        ("dynamic.vhdx", "item of 4 GiB", |b| put(b, METADATA + 52, &u32::MAX.to_le_bytes()), Error(&["item"])),
        (
            "dynamic.vhdx",
            "item too short",
            |b| put(b, METADATA + 52, &4_u32.to_le_bytes()),
            Error(&["file parameters", "4 bytes"]),
        ),
        (
            "dynamic.vhdx",
            "an item twice",
            |b| {
                let id = b[METADATA + 32..METADATA + 48].to_vec();
                put(b, METADATA + 64, &id)
            },
            Error(&["twice"]),
        ),
        (
            "dynamic.vhdx",
            "an unknown item, required",
            |b| put(b, METADATA + 32, &[3; 16]),
            Refusal(&["03030303", "required"]),
        ),
        ("dynamic.vhdx", "block of 0", |b| put(b, FILE_PARAMETERS, &[0; 4]), Error(&["block size of 0"])),
        (
            "dynamic.vhdx",
            "block of 3 MiB",
            |b| put(b, FILE_PARAMETERS, &(3_u32 << 20).to_le_bytes()),
            Error(&["block size of 3145728"]),
        ),
        (
            "dynamic.vhdx",
            "block of 512 MiB",
            |b| put(b, FILE_PARAMETERS, &(512_u32 << 20).to_le_bytes()),
            Error(&["256 MiB"]),
        ),
        ("dynamic.vhdx", "size 0", |b| put(b, DISK_SIZE, &[0; 8]), Error(&["virtual disk size", "0 bytes"])),
        (
            "dynamic.vhdx",
            "size above the format",
            |b| put(b, DISK_SIZE, &((64_u64 << 40) + 512).to_le_bytes()),
            Error(&["64 TiB"]),
        ),
        (
            "dynamic.vhdx",
            "size at the end of the world",
            |b| put(b, DISK_SIZE, &u64::MAX.to_le_bytes()),
            Error(&["64 TiB"]),
        ),
        (
            "dynamic.vhdx",
            "size above the BAT",
            |b| put(b, DISK_SIZE, &(64_u64 << 40).to_le_bytes()),
            Error(&["BAT region"]),
        ),
        (
            "dynamic.vhdx",
            "size between sectors",
            |b| put(b, DISK_SIZE, &1000_u64.to_le_bytes()),
            Error(&["multiple of 512"]),
        ),
        (
            "dynamic.vhdx",
            "logical sector of 1024",
            |b| put(b, LOGICAL_SECTOR, &1024_u32.to_le_bytes()),
            Error(&["logical sector size"]),
        ),
        (
            "dynamic.vhdx",
            "physical sector of 1000",
            |b| put(b, PHYSICAL_SECTOR, &1000_u32.to_le_bytes()),
            Error(&["physical sector size"]),
        ),
        ("dynamic.vhdx", "state 4", |b| put(b, BAT + 8, &entry(0, 4)), Error(&["BAT entry", "state 4"])),
        (
            "dynamic.vhdx",
            "block beyond the file",
            |b| put(b, BAT + 8, &entry(1 << 20, 6)),
            Error(&["BAT entry", "1099511627776"]),
        ),
        (
            "dynamic.vhdx",
            "block at the end of the world",
            |b| put(b, BAT + 8, &(u64::MAX << 20 | 6).to_le_bytes()),
            Error(&["BAT entry"]),
        ),
        ("dynamic.vhdx", "block at 0", |b| put(b, BAT + 8, &entry(0, 6)), Error(&["BAT entry", "clear of"])),
        ("dynamic.vhdx", "block on the metadata", |b| put(b, BAT + 8, &entry(2, 6)), Error(&["BAT entry", "clear of"])),
        (
            "dynamic.vhdx",
            "block unaligned",
            |b| b[BAT + 1] |= 1 << 4,
            Finding(Severity::Corrupt, &["reserved bits 0x1000"]),
        ),
        (
            "dynamic.vhdx",
            "two blocks in one place",
            |b| {
                let first = get_u64_le(b, BAT);
                put(b, BAT + 8, &first.to_le_bytes())
            },
            Finding(Severity::Corrupt, &["inside the block"]),
        ),
        (
            "dynamic.vhdx",
            "a partial block without parent",
            |b| {
                let first = get_u64_le(b, BAT) | 7;
                put(b, BAT, &first.to_le_bytes())
            },
            Error(&["partially present"]),
        ),
        (
            "diff.vhdx",
            "no bitmap for a partial block",
            |b| put(b, BITMAP_ENTRY, &[0; 8]),
            Error(&["no sector bitmap block"]),
        ),
        ("diff.vhdx", "bitmap beyond the file", |b| put(b, BITMAP_ENTRY, &entry(1 << 20, 6)), Error(&["BAT entry"])),
        ("diff.vhdx", "bitmap of state 3", |b| put(b, BITMAP_ENTRY, &entry(9, 3)), Error(&["BAT entry", "state 3"])),
        ("diff.vhdx", "locator of another type", |b| put(b, LOCATOR, &[3; 16]), Refusal(&["03030303"])),
        (
            "diff.vhdx",
            "locator with 9999 entries",
            |b| put(b, LOCATOR + 18, &9999_u16.to_le_bytes()),
            Error(&["parent locator", "9999"]),
        ),
        ("diff.vhdx", "locator without entries", |b| put(b, LOCATOR + 18, &[0; 2]), Error(&["no parent_linkage"])),
        (
            "diff.vhdx",
            "locator key beyond it",
            |b| put(b, LOCATOR + 20, &u32::MAX.to_le_bytes()),
            Error(&["parent locator"]),
        ),
        (
            "diff.vhdx",
            "linkage that is no id",
            |b| {
                let at = u32::from_le_bytes(b[LOCATOR + 24..LOCATOR + 28].try_into().unwrap()) as usize;
                put(b, LOCATOR + at + 4, b"?")
            },
            Error(&["parent_linkage"]),
        ),
        ("logged.vhdx", "entry torn", |b| b[LOG + 4096 + 77] ^= 1, Error(&["log", "0 valid entries"])),
        (
            "logged.vhdx",
            "entry's sector torn, checksum right",
            |b| {
                b[LOG + 8192 - 1] ^= 1;
                reseal(b, Format::Vhdx)
            },
            Error(&["log", "0 valid entries"]),
        ),
        (
            "logged.vhdx",
            "entry of another log",
            |b| {
                put(b, LOG + 32, &[7; 16]);
                reseal(b, Format::Vhdx)
            },
            Error(&["log", "0 valid entries"]),
        ),
        (
            "logged.vhdx",
            "tail elsewhere",
            |b| {
                put(b, LOG + 12, &8192_u32.to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["log", "no complete sequence"]),
        ),
        ("logged.vhdx", "length beyond the log", |b| put(b, LOG + 8, &(16_u32 << 20).to_le_bytes()), Error(&["log"])),
        ("logged.vhdx", "2^32 descriptors", |b| put(b, LOG + 24, &u32::MAX.to_le_bytes()), Error(&["log"])),
        (
            "logged.vhdx",
            "file shorter than the log was promised",
            |b| {
                put(b, LOG + 48, &(1_u64 << 30).to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["log", "1073741824"]),
        ),
        (
            "logged.vhdx",
            "file to become huge",
            |b| {
                put(b, LOG + 56, &(u64::MAX << 20).to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["last file offset"]),
        ),
        (
            "logged.vhdx",
            "a change of the headers",
            |b| {
                put(b, LOG + 64 + 16, &(64_u64 << 10).to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["log descriptor"]),
        ),
        (
            "logged.vhdx",
            "a change of the log",
            |b| {
                put(b, LOG + 64 + 16, &(LOG as u64).to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["log descriptor"]),
        ),
        (
            "logged.vhdx",
            "a change beyond the file",
            |b| {
                put(b, LOG + 64 + 16, &(1_u64 << 45).to_le_bytes());
                reseal(b, Format::Vhdx)
            },
            Error(&["log descriptor"]),
        ),
        ("logged.vhdx", "the file cut", |b| b.truncate(4 * MIB), Error(&["log", "cut"])),
    ]
}

/// Opens for writing and closes, as it is; says whether it could be opened.
fn open_for_writing(path: &Path) -> bool {
    let opened = Disk::open(path, &OpenOptions { writable: true, ..OpenOptions::default() });
    opened.map(|disk| disk.close().unwrap()).is_ok()
}

fn contains_all(text: &str, words: &[&str]) -> bool {
    words.iter().all(|word| text.contains(word))
}

fn tells_what_was_expected(text: &str) -> bool {
    text.contains("found") && text.contains("expected") || text.contains("ends too early: was it copied completely?")
}

fn has_offset(text: &str) -> bool {
    text.split("offset ").skip(1).any(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
}

fn judge(sample: &Sample, told: &Told) -> Result<(), String> {
    let read = read_all(&sample.path, &OpenOptions::default());
    let checked = check(&sample.path, sample.format);
    let found = |severity: Severity, words: &[&str]| {
        checked.as_ref().is_ok_and(|report| {
            report.findings.iter().any(|finding| finding.severity >= severity && contains_all(&finding.message, words))
        })
    };
    let name = sample.path.to_str().unwrap();
    match told {
        Error(words) => {
            let error = read.err().ok_or("it reads without an error")?;
            if !contains_all(&error, words)
                || !error.contains(name)
                || !has_offset(&error)
                || !tells_what_was_expected(&error)
            {
                return Err(format!("the error does not say it all: {error}"));
            }
            if checked.is_ok() && !found(Severity::Corrupt, &[]) {
                return Err(format!("the check finds nothing: {checked:?}"));
            }
        }
        Refusal(words) => {
            let error = read.err().ok_or("it reads without an error")?;
            if !contains_all(&error, words) || !error.contains(name) {
                return Err(format!("the error does not say it all: {error}"));
            }
        }
        Finding(severity, words) => {
            read.map_err(|error| format!("it does not read: {error}"))?;
            if !found(*severity, words) {
                return Err(format!("the check does not find it: {checked:?}"));
            }
        }
    }
    Ok(())
}

#[test]
fn each_damage_is_told_and_changes_nothing() {
    let dir = tempdir().unwrap();
    let samples = samples(dir.path());
    let mut failures = Vec::new();
    for (name, what, damage, told) in vhd_cases().into_iter().chain(vhdx_cases()) {
        let sample = samples.iter().find(|sample| sample.name == name).unwrap();
        let mut bytes = sample.bytes.clone();
        damage(&mut bytes);
        assert!(bytes != sample.bytes, "{name}, {what}: nothing is damaged");
        std::fs::write(&sample.path, &bytes).unwrap();
        if let Err(failure) = judge(sample, &told) {
            failures.push(format!("{name}, {what}: {failure}"));
        }
        if std::fs::read(&sample.path).unwrap() != bytes {
            failures.push(format!("{name}, {what}: reading has changed the file"));
        }
        let replays = name == "logged.vhdx";
        let opened = open_for_writing(&sample.path);
        if std::fs::read(&sample.path).unwrap() != bytes && !(opened && replays) {
            failures.push(format!("{name}, {what}: opening for writing has changed the file (opened: {opened})"));
        }
        std::fs::write(&sample.path, &sample.bytes).unwrap();
    }
    assert!(failures.is_empty(), "{} cases:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn sound_samples_are_sound() {
    let dir = tempdir().unwrap();
    for sample in samples(dir.path()) {
        read_all(&sample.path, &OpenOptions::default()).unwrap();
        let report = check(&sample.path, sample.format).unwrap();
        assert!(report.worst() <= Some(Severity::Note), "{}: {report:?}", sample.name);
        assert!(std::fs::read(&sample.path).unwrap() == sample.bytes, "{}", sample.name);
    }
}

#[test]
fn a_file_cut_anywhere_is_never_read_wrongly() {
    let dir = tempdir().unwrap();
    for sample in samples(dir.path()).into_iter().filter(|sample| sample.format != Format::Raw) {
        let whole = whole_disk(&sample.path).unwrap();
        let len = sample.bytes.len();
        let cuts = [0, 1, 7, 511, 512, 513, 1535, 1536, 4096, 65535, 192 * KIB, MIB, METADATA + 31, BAT + 8];
        let from_end = [1, 511, 512, 513, 1024, 4096, 32 * KIB, MIB - 1, MIB, MIB + 1];
        for cut in cuts.into_iter().chain(from_end.map(|back| len.saturating_sub(back))).filter(|&cut| cut < len) {
            std::fs::write(&sample.path, &sample.bytes[..cut]).unwrap();
            if let Ok(found) = whole_disk(&sample.path) {
                assert!(found == whole, "{} of {cut} bytes is read wrongly", sample.name);
            }
            assert!(open_for_writing(&sample.path) || std::fs::read(&sample.path).unwrap() == sample.bytes[..cut]);
        }
        std::fs::write(&sample.path, &sample.bytes).unwrap();
    }
}

fn whole_disk(path: &Path) -> Result<Vec<u8>, String> {
    use diskwright_store::{BlockDevice, Blocking, EngineKind};
    let disk = Disk::open(path, &OpenOptions::default()).map_err(|error| error.to_string())?;
    let mut bytes = vec![0; disk.geometry().size_bytes as usize];
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
    io.read(0, &mut bytes).map_err(|error| error.to_string())?;
    Ok(bytes)
}
