//! Kinds of damage of a VHDX, including its log.

use super::{
    Told::{Error, Finding, Refusal},
    *,
};

/// A payload entry: an offset in MiB, and a state.
fn entry(mib: u64, state: u64) -> [u8; 8] {
    (mib << 20 | state).to_le_bytes()
}

pub fn cases() -> Vec<Case> {
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
            Finding(Severity::Note, &["the other header is valid"]),
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
            "log near 2^64",
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
            "region near 2^64",
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
            Error(&["do not overlap"]),
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
        ("dynamic.vhdx", "item near 2^64", |b| put(b, METADATA + 48, &u32::MAX.to_le_bytes()), Error(&["item"])),
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
        ("dynamic.vhdx", "size near 2^64", |b| put(b, DISK_SIZE, &u64::MAX.to_le_bytes()), Error(&["64 TiB"])),
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
            "block near 2^64",
            |b| put(b, BAT + 8, &(u64::MAX << 20 | 6).to_le_bytes()),
            Error(&["BAT entry"]),
        ),
        ("dynamic.vhdx", "block at 0", |b| put(b, BAT + 8, &entry(0, 6)), Error(&["BAT entry", "does not overlap"])),
        (
            "dynamic.vhdx",
            "block on the metadata",
            |b| put(b, BAT + 8, &entry(2, 6)),
            Error(&["BAT entry", "does not overlap"]),
        ),
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
            Finding(Severity::Note, &["partially present"]),
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
            "file shorter than the log requires",
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
        ("logged.vhdx", "the file cut", |b| b.truncate(4 * MIB), Error(&["log", "truncated"])),
    ]
}
