//! Records: fixups, attributes, run lists.

use super::boot::Boot;
use crate::{
    bytes::{le16, le32, le64},
    reason::LeftAlone,
};
use std::ops::Range;

/// A part of a stream that is contiguous on the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// First cluster of the stream.
    pub(super) stream_cluster: u64,
    /// First cluster of the volume; `None` for a hole.
    pub(super) cluster: Option<u64>,
    /// Number of clusters.
    pub(super) clusters: u64,
}

impl Run {
    /// Its bytes in the volume; empty for a hole.
    pub(super) fn bytes(&self, cluster_bytes: u64) -> Range<u64> {
        self.cluster.map_or(0..0, |cluster| cluster * cluster_bytes..(cluster + self.clusters) * cluster_bytes)
    }
}

/// Puts back the bytes that the fixups of a record or of an index block replace: the last two bytes
/// of every 512.
pub(super) fn undo_fixups(bytes: &mut [u8], signature: &[u8; 4], what: &str) -> Result<(), LeftAlone> {
    let wrong = |why: &str| LeftAlone::damaged(format!("{what}: {why}"));
    if bytes.get(..4) != Some(signature) {
        return Err(wrong("no signature"));
    }
    let (at, count) = (usize::from(le16(bytes, 4)), usize::from(le16(bytes, 6)));
    let sectors = bytes.len() / 512;
    if count != sectors + 1 || at < 0x18 || at + 2 * count > 510 {
        return Err(wrong("its fixups have an unknown shape"));
    }
    let mark = le16(bytes, at);
    for sector in 0..sectors {
        let end = 512 * (sector + 1) - 2;
        if le16(bytes, end) != mark {
            return Err(wrong("it was not written completely (torn write)"));
        }
        let original = le16(bytes, at + 2 + 2 * sector);
        bytes[end..end + 2].copy_from_slice(&original.to_le_bytes());
    }
    Ok(())
}

/// An attribute of a record.
#[derive(Clone, Copy)]
pub(super) struct Attribute<'a> {
    pub(super) kind: u32,
    pub(super) flags: u16,
    raw: &'a [u8],
}

impl<'a> Attribute<'a> {
    /// Whether its name is `name` (ASCII); "" stands for no name.
    pub(super) fn is_named(&self, name: &str) -> bool {
        let (len, at) = (usize::from(self.raw[9]), usize::from(le16(self.raw, 10)));
        len == name.len() && self.raw.get(at..at + 2 * len).is_some_and(|bytes| is_text(bytes, name))
    }

    pub(super) fn is_resident(&self) -> bool {
        self.raw[8] == 0
    }

    /// The value of a resident attribute.
    pub(super) fn value(&self) -> Option<&'a [u8]> {
        let (len, at) = (le32(self.raw, 16) as usize, usize::from(le16(self.raw, 20)));
        if self.is_resident() { self.raw.get(at..at.checked_add(len)?) } else { None }
    }

    /// First cluster of the stream that a non-resident attribute maps.
    pub(super) fn lowest_cluster(&self) -> u64 {
        if self.is_resident() { 0 } else { le64(self.raw, 16) }
    }

    /// Data size and initialised size of a non-resident attribute in bytes. They are valid in the
    /// attribute that maps cluster 0.
    pub(super) fn sizes(&self) -> (u64, u64) {
        (le64(self.raw, 48), le64(self.raw, 56))
    }

    /// The runs of a non-resident attribute, each within the volume.
    pub(super) fn runs(&self, boot: &Boot) -> Result<Vec<Run>, LeftAlone> {
        let wrong = |why: &str| LeftAlone::damaged(format!("a run list of NTFS {why}"));
        let mut list = self.raw.get(usize::from(le16(self.raw, 32)).max(64)..).unwrap_or_default();
        let mut runs = Vec::new();
        let mut stream_cluster = self.lowest_cluster();
        let mut cluster = 0_i64;
        while let Some((&header, rest)) = list.split_first().filter(|(header, _)| **header != 0) {
            let (count_len, offset_len) = (usize::from(header & 15), usize::from(header >> 4));
            if !(1..=8).contains(&count_len) || offset_len > 8 || rest.len() < count_len + offset_len {
                return Err(wrong("has a run of unknown shape"));
            }
            let clusters = signed(&rest[..count_len]);
            let place = if offset_len == 0 {
                None
            } else {
                cluster = cluster.checked_add(signed(&rest[count_len..count_len + offset_len])).unwrap_or(-1);
                Some(u64::try_from(cluster).map_err(|_| wrong("points before the volume"))?)
            };
            let clusters = u64::try_from(clusters).ok().filter(|clusters| (1..=boot.clusters).contains(clusters));
            let clusters = clusters.ok_or_else(|| wrong("has a run of impossible length"))?;
            if place.is_some_and(|place| place > boot.clusters - clusters) {
                return Err(wrong("points beyond the volume"));
            }
            runs.push(Run { stream_cluster, cluster: place, clusters });
            stream_cluster = stream_cluster.checked_add(clusters).ok_or_else(|| wrong("is too long"))?;
            list = &rest[count_len + offset_len..];
        }
        // The highest cluster is -1 for a stream without clusters.
        if stream_cluster != le64(self.raw, 24).wrapping_add(1) {
            return Err(wrong("does not have the length that its attribute names"));
        }
        Ok(runs)
    }
}

/// The attributes of a record whose fixups were undone. Ends at the first one of unknown shape.
pub(super) fn attributes(record: &[u8]) -> impl Iterator<Item = Attribute<'_>> {
    let mut at = usize::from(le16(record, 0x14));
    std::iter::from_fn(move || {
        let kind = le32(record, at);
        let len = le32(record, at.checked_add(4)?) as usize;
        let raw = record.get(at..at.checked_add(len)?)?;
        // Shorter than a resident header, or than a non-resident one.
        if kind == u32::MAX || len < 24 || (raw[8] != 0 && len < 64) {
            return None;
        }
        at += len;
        Some(Attribute { kind, flags: le16(raw, 12), raw })
    })
}

/// Whether UTF-16 bytes are this ASCII text; letters of both cases are the same.
pub(super) fn is_text(bytes: &[u8], text: &str) -> bool {
    bytes.len() == 2 * text.len()
        && bytes
            .chunks_exact(2)
            .zip(text.bytes())
            .all(|(unit, byte)| unit[1] == 0 && unit[0].eq_ignore_ascii_case(&byte))
}

/// A little-endian number of 1 to 8 bytes with a sign.
fn signed(bytes: &[u8]) -> i64 {
    let fill = if bytes.last().is_some_and(|last| *last >= 0x80) { 0xff } else { 0 };
    let mut whole = [fill; 8];
    whole[..bytes.len()].copy_from_slice(bytes);
    i64::from_le_bytes(whole)
}
