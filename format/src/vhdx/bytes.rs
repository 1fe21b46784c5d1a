//! Little-endian fields at byte offsets. Reading beyond the end returns zeros, writing beyond it
//! does nothing: callers have checked the length, and hostile input must not cause a panic.

use super::Invalid;
use uuid::Uuid;

pub(super) fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    if let Some(found) = at.checked_add(N).and_then(|end| bytes.get(at..end)) {
        out.copy_from_slice(found);
    }
    out
}

pub(super) fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(array(bytes, at))
}

pub(super) fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

pub(super) fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

/// A GUID in the mixed byte order of Windows.
pub(super) fn get_guid(bytes: &[u8], at: usize) -> Uuid {
    Uuid::from_bytes_le(array(bytes, at))
}

pub(super) fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = at.checked_add(value.len()).and_then(|end| bytes.get_mut(at..end)) {
        place.copy_from_slice(value);
    }
}

/// CRC-32C of `bytes`, with the four bytes at `field` counted as zeros.
pub(super) fn crc_without(bytes: &[u8], field: usize) -> u32 {
    let (before, rest) = bytes.split_at(field.min(bytes.len()));
    let after = rest.get(4..).unwrap_or(&[]);
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]), after)
}

/// Checks an ASCII signature.
pub(super) fn signature(structure: &'static str, bytes: &[u8], at: usize, expected: &[u8]) -> Result<(), Invalid> {
    let found = at.checked_add(expected.len()).and_then(|end| bytes.get(at..end)).unwrap_or(&[]);
    if found == expected {
        return Ok(());
    }
    Err(Invalid::new(
        structure,
        at as u64,
        format!("signature \"{}\"", found.escape_ascii()),
        format!("\"{}\"", expected.escape_ascii()),
    ))
}

/// Checks the CRC-32C of all of `bytes`, which is stored at `field`.
pub(super) fn checksum(structure: &'static str, bytes: &[u8], field: usize) -> Result<(), Invalid> {
    let (stored, computed) = (get_u32(bytes, field), crc_without(bytes, field));
    if stored == computed {
        return Ok(());
    }
    Err(Invalid::new(structure, field as u64, format!("checksum {stored:#010x}"), format!("{computed:#010x}")))
}
