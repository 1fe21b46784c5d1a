//! INQUIRY: what a logical unit is (SPC-4, 6.6 and 7.8; SBC-3, 6.6).

use super::{
    Sense, copy,
    designator::{ASCII, BINARY, Designator},
};
use crate::{put, put_text};

/// The vendor in standard data.
pub const VENDOR: &str = "DISKWRGT";
/// The product in standard data.
pub const PRODUCT: &str = "Virtual disk";

/// Maximum blocks of one COMPARE AND WRITE.
pub const COMPARE_BLOCKS_MAX: u8 = 128;
/// Maximum range descriptors of one UNMAP.
pub const UNMAP_RANGES_MAX: u32 = 256;

/// Version descriptors: SAM-5, SPC-4, SBC-3, iSCSI.
const VERSIONS: [u16; 4] = [0x00a0, 0x0460, 0x04c0, 0x0960];

/// A logical unit as its pages tell it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// Its size in blocks.
    pub blocks: u64,
    /// Length of a block, in bytes.
    pub block_bytes: u32,
    /// Power of 2 of the logical blocks in a physical one.
    pub physical_exponent: u8,
    /// Whether it may be written.
    pub is_read_only: bool,
    /// What identifies the disk.
    pub id: [u8; 16],
    /// The iSCSI name of the target.
    pub target: String,
    /// The version of the program.
    pub revision: &'static str,
    /// Maximum bytes of one read or write.
    pub transfer_bytes_max: u64,
    /// Bytes from which on a longer read or write is not faster.
    pub transfer_bytes_best: u64,
    /// Maximum bytes that a token stands for.
    pub token_bytes_max: u64,
    /// Bytes of one copy by a token at most.
    pub token_bytes_best: u64,
}

impl Described {
    /// The serial number: the identity as hexadecimal digits.
    pub fn serial(&self) -> String {
        self.id.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Standard data.
    pub fn standard(&self) -> Vec<u8> {
        let mut out = standard(0, self.revision);
        // Implicit ALUA, and copies (3PC).
        out[5] = 0x10 | 0x08;
        out
    }

    /// A page of vital product data.
    ///
    /// # Errors
    /// The page is not supported.
    pub fn page(&self, page: u8) -> Result<Vec<u8>, Sense> {
        let body = match page {
            0x00 => vec![0x00, 0x80, 0x83, 0x86, 0x8f, 0xb0, 0xb1, 0xb2],
            0x80 => self.serial().into_bytes(),
            0x83 => self.identification(),
            // Simple tasks, and a cache that is volatile.
            0x86 => {
                let mut body = vec![0; 60];
                (body[1], body[2]) = (0x01, 0x01);
                body
            }
            0x8f => {
                let blocks = |bytes: u64| bytes / u64::from(self.block_bytes.max(1));
                copy::page(blocks(self.token_bytes_max), blocks(self.token_bytes_best))
            }
            0xb0 => self.limits(),
            0xb1 => {
                let mut body = vec![0; 60];
                // It does not rotate.
                put(&mut body, 0, &1_u16.to_be_bytes());
                body
            }
            // UNMAP and WRITE SAME unmap; unmapped blocks read as zeros; thin.
            0xb2 => vec![0, 0x80 | 0x40 | 0x20 | 0x04, 0x02, 0],
            _ => return Err(Sense::INVALID_FIELD),
        };
        let mut out = vec![0, page];
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(body);
        Ok(out)
    }

    /// What names the logical unit: an NAA identifier, and one of this vendor.
    pub fn designators(&self) -> [Designator; 2] {
        // NAA 3: assigned locally.
        let mut naa: [u8; 8] = crate::array(&self.id, 0);
        naa[0] = naa[0] & 0x0f | 0x30;
        let mut vendor = format!("{VENDOR:<8}").into_bytes();
        vendor.extend(self.serial().into_bytes());
        [
            Designator { code_set: BINARY, kind: 0x03, value: naa.to_vec() },
            Designator { code_set: ASCII, kind: 0x01, value: vendor },
        ]
    }

    fn identification(&self) -> Vec<u8> {
        const UTF8: u8 = 3;
        const ISCSI: u8 = 5 << 4;
        let mut out = Vec::new();
        let mut add = |set: u8, kind: u8, value: &[u8]| {
            out.extend([set, kind, 0, value.len() as u8]);
            out.extend(value);
        };
        for Designator { code_set, kind, value } in self.designators() {
            add(code_set, kind, &value);
        }
        // The port: its relative id, its group, its name.
        add(ISCSI | BINARY, 0x80 | 0x10 | 0x04, &[0, 0, 0, 1]);
        add(ISCSI | BINARY, 0x80 | 0x10 | 0x05, &[0, 0, 0, 1]);
        let mut name = format!("{},t,0x0001", self.target).into_bytes();
        name.push(0);
        name.resize(name.len().next_multiple_of(4), 0);
        add(ISCSI | UTF8, 0x80 | 0x10 | 0x08, &name);
        out
    }

    fn limits(&self) -> Vec<u8> {
        let mut body = vec![0; 60];
        let blocks = |bytes: u64| ((bytes / u64::from(self.block_bytes.max(1))) as u32).to_be_bytes();
        let physical_blocks = 1_u32 << self.physical_exponent.min(16);
        body[1] = COMPARE_BLOCKS_MAX;
        put(&mut body, 2, &(physical_blocks as u16).to_be_bytes());
        put(&mut body, 4, &blocks(self.transfer_bytes_max));
        put(&mut body, 8, &blocks(self.transfer_bytes_best));
        put(&mut body, 16, &u32::MAX.to_be_bytes());
        put(&mut body, 20, &UNMAP_RANGES_MAX.to_be_bytes());
        put(&mut body, 24, &physical_blocks.to_be_bytes());
        put(&mut body, 28, &0x8000_0000_u32.to_be_bytes());
        put(&mut body, 32, &self.same_blocks_max().to_be_bytes());
        body
    }

    /// Maximum blocks of one WRITE SAME: 4 GiB less one block.
    pub fn same_blocks_max(&self) -> u64 {
        (1 << 32) / u64::from(self.block_bytes.max(1)) - 1
    }
}

/// Standard data of a logical unit that does not exist.
pub fn absent(revision: &str) -> Vec<u8> {
    standard(0x7f, revision)
}

fn standard(kind: u8, revision: &str) -> Vec<u8> {
    let mut out = vec![0; 96];
    // SPC-4, the response format of today, command queueing.
    (out[0], out[2], out[3], out[7]) = (kind, 0x06, 0x12, 0x02);
    out[4] = (out.len() - 5) as u8;
    put_text(&mut out, 8, 8, VENDOR, b' ');
    put_text(&mut out, 16, 16, PRODUCT, b' ');
    put_text(&mut out, 32, 4, revision, b' ');
    for (at, version) in VERSIONS.iter().enumerate() {
        put(&mut out, 58 + 2 * at, &version.to_be_bytes());
    }
    out
}
