//! Files: records by number, and streams whose pieces may lie in several records.
//!
//! The MFT maps itself: the first piece of its run list is in its own record 0, and each further
//! piece is in a record that the pieces before have made readable.

use super::{
    boot::Boot,
    numbers::{DATA, MFT},
    record::{Run, attributes, is_text, undo_fixups},
};
use crate::{
    bytes::{le16, le32, le64},
    read::Window,
    reason::LeftAlone,
};

const ATTRIBUTE_LIST: u32 = 0x20;
/// NTFS does not make longer attribute lists.
const LIST_BYTES_MAX: u64 = 256 << 10;
/// The lower 48 bits of a reference are the number of the record.
const RECORD_MASK: u64 = (1 << 48) - 1;
const IN_USE: u16 = 1;
/// Compressed, encrypted: flags under which bytes are not what the clusters hold.
const TRANSFORMED: u16 = 0x00ff | 0x4000;

/// The files of a volume.
pub(super) struct Files<'a> {
    pub(super) window: Window<'a>,
    pub(super) boot: Boot,
    mft: Vec<Run>,
}

/// Contents of an attribute.
pub(super) struct Stream {
    resident: Option<Vec<u8>>,
    runs: Vec<Run>,
    pub(super) data_bytes: u64,
    /// Bytes from here on read as zeros.
    pub(super) initialized_bytes: u64,
}

impl Stream {
    pub(super) fn resident(&self) -> Option<&[u8]> {
        self.resident.as_deref()
    }

    pub(super) fn runs(&self) -> &[Run] {
        &self.runs
    }
}

impl<'a> Files<'a> {
    pub(super) fn open(window: Window<'a>, boot: Boot) -> Result<Self, LeftAlone> {
        // Until record 0 has been read, the MFT is the cluster that the boot sector names, and
        // those after it as far as record 0 reaches.
        let clusters = (boot.record_bytes as u64).div_ceil(boot.cluster_bytes);
        if clusters > boot.clusters - boot.mft_cluster {
            return Err(LeftAlone::damaged("the MFT begins at the end of the volume"));
        }
        let first = Run { stream_cluster: 0, cluster: Some(boot.mft_cluster), clusters };
        let mut files = Self { window, boot, mft: vec![first] };
        let mut stream = None;
        for (number, lowest) in files.pieces(MFT, DATA, "")? {
            files.append(&mut stream, (number, lowest), MFT, DATA, "")?;
            let runs = stream.as_ref().map_or(&[][..], |stream: &Stream| stream.runs());
            let known = if lowest == 0 { 0 } else { files.mft.len() };
            files.mft.truncate(known);
            files.mft.extend_from_slice(runs.get(known..).unwrap_or_default());
            if files.mft.first().and_then(|run| run.cluster) != Some(boot.mft_cluster) {
                return Err(LeftAlone::damaged("the MFT does not begin where the boot sector says"));
            }
        }
        Ok(files)
    }

    /// Where the MFT lies.
    pub(super) fn mft_runs(&self) -> &[Run] {
        &self.mft
    }

    /// An attribute of a file, by type and name. `None` if the file does not have it.
    pub(super) fn stream(&self, number: u64, kind: u32, name: &str) -> Result<Option<Stream>, LeftAlone> {
        let mut stream = None;
        for piece in self.pieces(number, kind, name)? {
            self.append(&mut stream, piece, number, kind, name)?;
        }
        Ok(stream)
    }

    /// Reads bytes of a stream; they must be within what is initialised.
    pub(super) fn read(&self, stream: &Stream, offset_bytes: u64, buf: &mut [u8]) -> Result<(), LeftAlone> {
        let end = offset_bytes.checked_add(buf.len() as u64);
        if end.is_none_or(|end| end > stream.initialized_bytes || end > stream.data_bytes) {
            return Err(LeftAlone::damaged("a system file of NTFS is too short"));
        }
        if let Some(value) = &stream.resident {
            let start = offset_bytes as usize;
            buf.copy_from_slice(&value[start..start + buf.len()]);
            return Ok(());
        }
        self.read_runs(&stream.runs, offset_bytes, buf)
    }

    fn read_runs(&self, runs: &[Run], offset_bytes: u64, buf: &mut [u8]) -> Result<(), LeftAlone> {
        let cluster_bytes = self.boot.cluster_bytes;
        let mut done = 0_usize;
        while done < buf.len() {
            let at = offset_bytes + done as u64;
            let index = runs.partition_point(|run| run.stream_cluster <= at / cluster_bytes);
            let run = index
                .checked_sub(1)
                .map(|index| runs[index])
                .filter(|run| at / cluster_bytes - run.stream_cluster < run.clusters);
            let Some((run, cluster)) = run.and_then(|run| Some((run, run.cluster?))) else {
                return Err(LeftAlone::damaged("a system file of NTFS has a hole"));
            };
            let into = at - run.stream_cluster * cluster_bytes;
            let take = (run.clusters * cluster_bytes - into).min((buf.len() - done) as u64) as usize;
            self.window.read(cluster * cluster_bytes + into, &mut buf[done..done + take])?;
            done += take;
        }
        Ok(())
    }

    /// A record in use, with its fixups undone.
    pub(super) fn record(&self, number: u64) -> Result<Vec<u8>, LeftAlone> {
        let mut record = vec![0; self.boot.record_bytes];
        let offset_bytes = number.checked_mul(self.boot.record_bytes as u64);
        let offset_bytes = offset_bytes.ok_or_else(|| LeftAlone::damaged(format!("record {number} of the MFT")))?;
        self.read_runs(&self.mft, offset_bytes, &mut record)?;
        undo_fixups(&mut record, b"FILE", &format!("record {number} of the MFT"))?;
        if le16(&record, 0x16) & IN_USE == 0 {
            return Err(LeftAlone::damaged(format!("record {number} of the MFT is not in use")));
        }
        Ok(record)
    }

    /// The records that hold pieces of an attribute, each with the first cluster of its piece.
    fn pieces(&self, number: u64, kind: u32, name: &str) -> Result<Vec<(u64, u64)>, LeftAlone> {
        let record = self.record(number)?;
        let Some(list) = attributes(&record).find(|attribute| attribute.kind == ATTRIBUTE_LIST) else {
            let own = attributes(&record).filter(|one| one.kind == kind && one.is_named(name));
            return Ok(own.map(|attribute| (number, attribute.lowest_cluster())).collect());
        };
        let list = match list.value() {
            Some(value) => value.to_vec(),
            None => {
                let (data_bytes, _) = list.sizes();
                if data_bytes > LIST_BYTES_MAX {
                    return Err(LeftAlone::damaged(format!("an attribute list of {data_bytes} bytes")));
                }
                let mut bytes = vec![0; data_bytes as usize];
                self.read_runs(&list.runs(&self.boot)?, 0, &mut bytes)?;
                bytes
            }
        };
        let mut pieces = Vec::new();
        let mut rest = list.as_slice();
        while rest.len() >= 26 {
            let len = usize::from(le16(rest, 4));
            let Some(entry) = rest.get(..len).filter(|entry| entry.len() >= 26) else {
                return Err(LeftAlone::damaged("an attribute list has an entry of unknown shape"));
            };
            let (name_len, name_at) = (usize::from(entry[6]), usize::from(entry[7]));
            let named = entry.get(name_at..name_at + 2 * name_len).is_some_and(|bytes| is_text(bytes, name));
            if le32(entry, 0) == kind && named {
                pieces.push((le64(entry, 16) & RECORD_MASK, le64(entry, 8)));
            }
            rest = &rest[len..];
        }
        Ok(pieces)
    }

    /// Appends the piece of an attribute that is in one record.
    fn append(
        &self,
        stream: &mut Option<Stream>,
        (number, lowest): (u64, u64),
        base: u64,
        kind: u32,
        name: &str,
    ) -> Result<(), LeftAlone> {
        let record = self.record(number)?;
        let wrong = |why: &str| LeftAlone::damaged(format!("file {base} of the MFT: {why}"));
        if number != base && le64(&record, 0x20) & RECORD_MASK != base {
            return Err(wrong("a further record belongs to another file"));
        }
        let mut all = attributes(&record);
        let found = all.find(|one| one.kind == kind && one.lowest_cluster() == lowest && one.is_named(name));
        let attribute = found.ok_or_else(|| wrong("an attribute is not in the record that lists it"))?;
        if attribute.flags & TRANSFORMED != 0 {
            return Err(wrong("it is compressed or encrypted"));
        }
        if attribute.is_resident() {
            let value = attribute.value().ok_or_else(|| wrong("an attribute ends beyond its record"))?;
            let len = value.len() as u64;
            let made =
                Stream { resident: Some(value.to_vec()), runs: Vec::new(), data_bytes: len, initialized_bytes: len };
            return if stream.replace(made).is_some() { Err(wrong("an attribute is there twice")) } else { Ok(()) };
        }
        let runs = attribute.runs(&self.boot)?;
        match stream {
            None if lowest == 0 => {
                let (data_bytes, initialized_bytes) = attribute.sizes();
                *stream = Some(Stream { resident: None, runs, data_bytes, initialized_bytes });
            }
            Some(before) if before.resident.is_none() => {
                let end = before.runs.last().map_or(0, |run| run.stream_cluster + run.clusters);
                if end != lowest {
                    return Err(wrong("its run lists do not follow each other"));
                }
                before.runs.extend(runs);
            }
            _ => return Err(wrong("its first run list is missing")),
        }
        // No cluster has two places in a stream, so a stream has no more clusters than the volume.
        let runs = stream.as_ref().map_or(&[][..], |stream| stream.runs());
        if runs.last().is_some_and(|run| run.stream_cluster + run.clusters > self.boot.clusters) {
            return Err(wrong("it is larger than the volume"));
        }
        Ok(())
    }
}
