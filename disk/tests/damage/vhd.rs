//! Kinds of damage of a VHD.

use super::{
    Told::{Error, Finding, Refusal},
    *,
};

pub fn cases() -> Vec<Case> {
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
        ("fixed.vhd", "size near 2^64", |b| in_footers(b, 48, &u64::MAX.to_be_bytes()), Error(&["footer"])),
        ("fixed.vhd", "size 0", |b| in_footers(b, 48, &[0; 8]), Error(&["size of 0 bytes", "at least one sector"])),
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
        ("dynamic.vhd", "size 0", |b| in_footers(b, 48, &[0; 8]), Error(&["size of 0 bytes", "at least one sector"])),
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
        ("dynamic.vhd", "size near 2^64", |b| in_footers(b, 48, &u64::MAX.to_be_bytes()), Error(&["expected"])),
        (
            "dynamic.vhd",
            "header beyond the file",
            |b| in_footers(b, 16, &(1_u64 << 40).to_be_bytes()),
            Error(&["header at offset 1099511627776"]),
        ),
        ("dynamic.vhd", "header near 2^64", |b| in_footers(b, 16, &(u64::MAX - 511).to_be_bytes()), Error(&["header"])),
        ("dynamic.vhd", "header on the footer", |b| in_footers(b, 16, &[0; 8]), Error(&["header"])),
        ("dynamic.vhd", "header cookie", |b| in_header(b, 0, b"cxsparce"), Error(&["cxsparse"])),
        ("dynamic.vhd", "header checksum", |b| b[512 + 900] ^= 1, Error(&["checksum"])),
        ("dynamic.vhd", "header version", |b| in_header(b, 24, &0x7_0000_u32.to_be_bytes()), Error(&["version"])),
        ("dynamic.vhd", "block of 0", |b| in_header(b, 32, &[0; 4]), Error(&["block"])),
        ("dynamic.vhd", "block of 3 MiB", |b| in_header(b, 32, &(3_u32 << 20).to_be_bytes()), Error(&["power of two"])),
        ("dynamic.vhd", "block of 256", |b| in_header(b, 32, &256_u32.to_be_bytes()), Error(&["block"])),
        ("dynamic.vhd", "no table entries", |b| in_header(b, 28, &[0; 4]), Error(&["0 entries", "at least 16"])),
        ("dynamic.vhd", "table beyond the file", |b| in_header(b, 16, &(1_u64 << 40).to_be_bytes()), Error(&["table"])),
        ("dynamic.vhd", "table near 2^64", |b| in_header(b, 16, &(u64::MAX - 511).to_be_bytes()), Error(&["table"])),
        ("dynamic.vhd", "table unaligned", |b| in_header(b, 16, &4097_u64.to_be_bytes()), Error(&["multiple of 512"])),
        (
            "dynamic.vhd",
            "table on the header",
            |b| in_header(b, 16, &1024_u64.to_be_bytes()),
            Error(&["does not overlap"]),
        ),
        (
            "dynamic.vhd",
            "block beyond the file",
            |b| put_entry(b, 3, 0x0fff_ffff),
            Error(&["block", "inside the file"]),
        ),
        ("dynamic.vhd", "block near 2^64", |b| put_entry(b, 3, 0xffff_fffe), Error(&["block", "inside the file"])),
        ("dynamic.vhd", "block on the header", |b| put_entry(b, 3, 1), Error(&["does not overlap the image's tables"])),
        (
            "dynamic.vhd",
            "block on the table",
            |b| {
                let at = get_u64_be(b, 512 + 16) / 512;
                put_entry(b, 3, at as u32)
            },
            Error(&["does not overlap"]),
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
        (
            "diff.vhd",
            "no locators",
            |b| in_header(b, 576, &[0; 192]),
            Finding(Severity::Note, &["the user must name the parent"]),
        ),
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
