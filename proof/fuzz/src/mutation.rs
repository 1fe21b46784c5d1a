//! Damage to chosen structures of an image.
//!
//! A fuzzer that flips random bits mostly tests checksums. So an input is a list of edits. Each
//! edit changes a field of a structure of the sample, both given by number, to a value as in
//! hostile files. A flag of the input tells whether the checksums are repaired afterwards, so that
//! the damage reaches the code behind them.

use crate::samples::Sample;
use arbitrary::Arbitrary;
use diskwright_image::Format;

/// The decoded input of a fuzzer.
#[derive(Debug, Clone, Arbitrary)]
pub struct Mutation {
    /// Index of the sample, modulo the number of samples.
    pub sample: u8,
    /// The changes.
    pub edits: Vec<Edit>,
    /// Whether the checksums are repaired.
    pub seal: bool,
    /// Length of the truncated file, in 65,536ths of its length; 65,535 keeps the whole file.
    pub cut: u16,
}

/// One change of a field.
#[derive(Debug, Clone, Arbitrary)]
pub struct Edit {
    /// Index of the structure, modulo their number.
    pub place: u8,
    /// Offset of the field in the structure.
    pub offset: u16,
    /// Width of the field: 1, 2, 4 or 8 bytes, as `1 << (width % 4)`.
    pub width: u8,
    /// The new value.
    pub value: Value,
}

/// Values as in hostile files.
#[derive(Debug, Clone, Copy, Arbitrary)]
pub enum Value {
    /// Any value.
    Any(u64),
    /// A small number.
    Small(u8),
    /// A power of two, plus or minus a small number.
    NearPower(u8, i8),
    /// A number of MiB with low bits, as in a BAT entry.
    Mebibytes(u16, u8),
    /// The present value, plus or minus a small number.
    Nudge(i8),
}

impl Value {
    /// The new value of a field that has the value `found`.
    pub fn of(self, found: u64) -> u64 {
        match self {
            Self::Any(value) => value,
            Self::Small(value) => u64::from(value),
            Self::NearPower(power, by) => (1_u64 << (power % 64)).wrapping_add_signed(i64::from(by)),
            Self::Mebibytes(mebibytes, low) => u64::from(mebibytes) << 20 | u64::from(low & 7),
            Self::Nudge(by) => found.wrapping_add_signed(i64::from(by)),
        }
    }
}

/// Maximum number of edits of one input. Further ones are ignored.
const EDITS_MAX: usize = 8;

impl Mutation {
    /// The sample to damage.
    pub fn sample<'a>(&self, samples: &'a [Sample]) -> &'a Sample {
        &samples[usize::from(self.sample) % samples.len()]
    }

    /// The damaged file.
    pub fn apply(&self, sample: &Sample) -> Vec<u8> {
        let mut bytes = sample.bytes.clone();
        for edit in self.edits.iter().take(EDITS_MAX) {
            edit.apply(sample, &mut bytes);
        }
        if self.seal {
            seal(sample.format, &mut bytes);
        }
        if self.cut < u16::MAX {
            let kept = (bytes.len() as u64 * u64::from(self.cut)) >> 16;
            bytes.truncate(kept as usize);
        }
        bytes
    }
}

impl Edit {
    /// Changes the field in the file.
    pub fn apply(&self, sample: &Sample, bytes: &mut [u8]) {
        let (start, len) = sample.places[usize::from(self.place) % sample.places.len()];
        let width = 1_usize << (self.width % 4);
        // Nearly all fields are aligned to their width.
        let at = start + usize::from(self.offset) % len / width * width;
        let Some(field) = bytes.get_mut(at..at + width) else { return };
        let big_endian = matches!(sample.format, Format::Vhd | Format::Qcow2);
        let mut whole = [0; 8];
        if big_endian {
            whole[8 - width..].copy_from_slice(field);
        } else {
            whole[..width].copy_from_slice(field);
        }
        let found = if big_endian { u64::from_be_bytes(whole) } else { u64::from_le_bytes(whole) };
        let value = self.value.of(found);
        if big_endian {
            field.copy_from_slice(&value.to_be_bytes()[8 - width..]);
        } else {
            field.copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }
}

/// Repairs the checksums of all structures.
fn seal(format: Format, bytes: &mut [u8]) {
    if format == Format::Vhd {
        let len = bytes.len();
        for start in [Some(0), len.checked_sub(512)].into_iter().flatten() {
            if bytes.get(start..start + 8).is_some_and(|cookie| cookie == b"conectix") {
                seal_vhd(bytes, start, 512, 64);
            }
        }
        if bytes.get(512..520).is_some_and(|cookie| cookie == b"cxsparse") {
            seal_vhd(bytes, 512, 1024, 36);
        }
        return;
    }
    if format != Format::Vhdx {
        return;
    }
    for (start, len) in [(64 << 10, 4096), (128 << 10, 4096), (192 << 10, 64 << 10), (256 << 10, 64 << 10)] {
        seal_vhdx(bytes, start, len);
    }
    let log = 1 << 20;
    let entry_len =
        bytes.get(log + 8..log + 12).map_or(0, |field| u32::from_le_bytes(field.try_into().unwrap_or_default()));
    if (4096..=1 << 20).contains(&entry_len) {
        seal_vhdx(bytes, log, entry_len as usize);
    }
}

fn seal_vhd(bytes: &mut [u8], start: usize, len: usize, field: usize) {
    let Some(structure) = bytes.get_mut(start..start + len) else { return };
    structure[field..field + 4].fill(0);
    let sum = structure.iter().fold(0_u32, |sum, byte| sum.wrapping_add(u32::from(*byte)));
    structure[field..field + 4].copy_from_slice(&(!sum).to_be_bytes());
}

fn seal_vhdx(bytes: &mut [u8], start: usize, len: usize) {
    let Some(structure) = bytes.get_mut(start..start + len) else { return };
    structure[4..8].fill(0);
    let sum = crc32c::crc32c(structure);
    structure[4..8].copy_from_slice(&sum.to_le_bytes());
}
