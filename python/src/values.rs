//! What functions return: frozen objects with attributes, sizes in bytes.

use crate::error::{for_convert_keywords, for_keywords};
use diskwright_lib::{CheckReport, ConvertOutcome, ExtentKind, Layer as LibraryLayer, Opened, Severity};
use pyo3::prelude::*;
use std::path::PathBuf;

/// A range of the disk and what is there.
#[pyclass(frozen, get_all, eq, module = "diskwright")]
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Extent {
    /// First byte on the disk.
    start: u64,
    /// Length in bytes.
    pub(crate) length: u64,
    /// `data`, `zero`, `unallocated` or `damaged`.
    kind: &'static str,
    /// The layer that decided: 0 is the top.
    depth: u32,
    /// Where in the layer's file the bytes lie, for `data`.
    offset: Option<u64>,
    file: u16,
}

impl Extent {
    /// Whether `next` goes on where this one ends, on the disk and in the file.
    pub(crate) fn continues_in(&self, next: &Self) -> bool {
        let same = (self.kind, self.depth, self.file) == (next.kind, next.depth, next.file);
        same && self.start + self.length == next.start && self.offset.map(|offset| offset + self.length) == next.offset
    }
}

impl From<diskwright_lib::Extent> for Extent {
    fn from(extent: diskwright_lib::Extent) -> Self {
        let kind = match extent.kind {
            ExtentKind::Data => "data",
            ExtentKind::Zero => "zero",
            ExtentKind::Unallocated => "unallocated",
            ExtentKind::Damaged => "damaged",
        };
        Self {
            start: extent.offset_bytes,
            length: extent.len_bytes,
            kind,
            depth: extent.depth,
            offset: extent.file_offset_bytes,
            file: extent.file,
        }
    }
}

#[pymethods]
impl Extent {
    fn __repr__(&self) -> String {
        let Self { start, length, kind, depth, offset, .. } = self;
        let offset = offset.map_or("None".into(), |offset| offset.to_string());
        format!("Extent(start={start}, length={length}, kind='{kind}', depth={depth}, offset={offset})")
    }
}

/// One image of a chain.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    path: PathBuf,
    /// `raw`, `vhd` or `vhdx`.
    format: String,
    /// `fixed`, `dynamic` or `differencing`.
    disk_type: String,
    /// Size of the virtual disk.
    size: u64,
    /// Payload block; `None` where the format has none.
    block_size: Option<u64>,
    sector_size: u32,
    /// Bytes that its files occupy, where the system reports it.
    allocated: Option<u64>,
    creator: String,
    /// VHD unique id, VHDX virtual disk id.
    disk_id: Option<String>,
    /// Peculiarities of the file, a sentence each.
    remarks: Vec<String>,
}

impl From<&LibraryLayer> for Layer {
    fn from(layer: &LibraryLayer) -> Self {
        let info = layer.image.info();
        Self {
            path: layer.path.clone(),
            format: info.format.to_string(),
            disk_type: info.disk_type.to_string(),
            size: layer.image.size_bytes(),
            block_size: info.has_blocks.then_some(info.block_bytes),
            sector_size: info.logical_sector_bytes,
            allocated: layer.allocated_bytes().ok(),
            creator: info.creator.clone(),
            disk_id: info.disk_id.map(|id| id.to_string()),
            remarks: info.remarks.clone(),
        }
    }
}

#[pymethods]
impl Layer {
    fn __repr__(&self) -> String {
        format!("Layer({}: {}, {}, {} bytes)", self.path.display(), self.format, self.disk_type, self.size)
    }
}

/// The images of a chain, the top first.
pub(crate) fn layers_of(opened: &Opened) -> Vec<Layer> {
    opened.disk().map(|disk| disk.layers().iter().map(Layer::from).collect()).unwrap_or_default()
}

/// A disk and its chain.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Info {
    size: u64,
    sector_size: u32,
    physical_sector_size: u32,
    /// The images, the top first, as far as the chain can be followed; none for an export.
    layers: Vec<Layer>,
    /// Why the chain ends before its base; `None` where it does not.
    broken_link: Option<String>,
    /// The code of that error.
    broken_link_code: Option<&'static str>,
    warnings: Vec<String>,
}

impl Info {
    pub(crate) fn of(opened: &Opened) -> Self {
        let geometry = opened.device().geometry();
        let broken = opened.disk().and_then(|disk| disk.broken_link());
        Self {
            size: geometry.size_bytes,
            sector_size: geometry.logical_sector_bytes,
            physical_sector_size: geometry.physical_sector_bytes,
            layers: layers_of(opened),
            broken_link: broken.map(for_keywords),
            broken_link_code: broken.map(|error| error.code().as_str()),
            warnings: opened.warnings().iter().map(for_keywords).collect(),
        }
    }
}

#[pymethods]
impl Info {
    fn __repr__(&self) -> String {
        format!("Info({} bytes, {} layers)", self.size, self.layers.len())
    }
}

/// Something that a check found.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Finding {
    /// `note`, `leak` or `corrupt`.
    severity: &'static str,
    /// Offset of the structure in the file, in bytes.
    offset: u64,
    message: String,
    /// The structure that is not as the format demands.
    structure: String,
    found: String,
    expected: String,
    /// `not needed`, `repairable without loss`, `costs data` or `cannot`.
    repair: &'static str,
    /// The range of the disk that a repair gives up: its first byte, and the first one after it.
    costs: Option<(u64, u64)>,
}

#[pymethods]
impl Finding {
    fn __repr__(&self) -> String {
        format!("Finding({} at {}: {})", self.severity, self.offset, self.message)
    }
}

/// What a check found in one image.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Checked {
    /// Whether the disk can be read: nothing is corrupt, and no link is broken.
    sound: bool,
    format: String,
    findings: Vec<Finding>,
    allocated_blocks: u64,
    total_blocks: u64,
    /// Bytes of the file that nothing refers to.
    leaked: u64,
    broken_link: Option<String>,
    broken_link_code: Option<&'static str>,
    warnings: Vec<String>,
}

impl From<diskwright_lib::Checked> for Checked {
    fn from(checked: diskwright_lib::Checked) -> Self {
        let sound = checked.is_sound();
        let CheckReport { findings, allocated_blocks, total_blocks, leaked_bytes } = checked.report;
        let findings = findings
            .into_iter()
            .map(|finding| Finding {
                severity: match finding.severity {
                    Severity::Note => "note",
                    Severity::Leak => "leak",
                    Severity::Corrupt => "corrupt",
                },
                offset: finding.offset_bytes,
                message: for_keywords(finding.message),
                structure: finding.structure,
                found: for_keywords(finding.found),
                expected: for_keywords(finding.expected),
                repair: finding.repair.as_str(),
                costs: finding.costs.map(|range| (range.start, range.end)),
            })
            .collect();
        Self {
            sound,
            format: checked.format.to_string(),
            findings,
            allocated_blocks,
            total_blocks,
            leaked: leaked_bytes,
            broken_link: checked.broken_link.as_ref().map(for_keywords),
            broken_link_code: checked.broken_link.map(|error| error.code().as_str()),
            warnings: checked.warnings.iter().map(for_keywords).collect(),
        }
    }
}

#[pymethods]
impl Checked {
    fn __repr__(&self) -> String {
        format!("Checked({}, sound={}, {} findings)", self.format, self.sound, self.findings.len())
    }
}

/// A range of the source that could not be copied, and is zero in the copy.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct LostRange {
    start: u64,
    length: u64,
    /// Why the range could not be read.
    reason: String,
}

impl LostRange {
    pub(crate) fn new(start: u64, length: u64, reason: String) -> Self {
        Self { start, length, reason }
    }
}

/// What a conversion did.
#[pyclass(frozen, get_all, module = "diskwright")]
#[derive(Debug, Clone)]
pub(crate) struct Converted {
    size: u64,
    /// Size of the copy.
    dest_size: u64,
    /// `MBR` or `GPT`, if the partition table was changed for another size.
    changed_table: Option<String>,
    /// Whether the copy has the disk id of the source.
    kept_disk_id: bool,
    /// Whether the children of the source accept the copy as their parent.
    kept_linkage_id: bool,
    /// Bytes read and written.
    copied: u64,
    /// Bytes shared with the source by the file system.
    shared: u64,
    /// Bytes that read as zeros and were skipped.
    zeros: u64,
    /// Bytes read back and found the same.
    verified: u64,
    /// Bytes that the source has and cannot give, with `skip_damaged`.
    lost_bytes: u64,
    lost: Vec<LostRange>,
    warnings: Vec<String>,
}

impl From<ConvertOutcome> for Converted {
    fn from(outcome: ConvertOutcome) -> Self {
        Self {
            size: outcome.size_bytes,
            dest_size: outcome.dest_bytes,
            changed_table: outcome.table.map(|table| table.to_string()),
            kept_disk_id: outcome.kept_disk_id,
            kept_linkage_id: outcome.kept_linkage_id,
            copied: outcome.copied_bytes,
            shared: outcome.cloned_bytes,
            zeros: outcome.zero_bytes,
            verified: outcome.verified_bytes,
            lost_bytes: outcome.lost.bytes,
            lost: outcome
                .lost
                .ranges
                .into_iter()
                .map(|range| LostRange {
                    start: range.offset_bytes,
                    length: range.len_bytes,
                    reason: for_convert_keywords(range.reason),
                })
                .collect(),
            warnings: outcome.warnings.iter().map(for_convert_keywords).collect(),
        }
    }
}

#[pymethods]
impl Converted {
    fn __repr__(&self) -> String {
        let Self { size, copied, shared, zeros, .. } = self;
        format!("Converted({size} bytes: {copied} copied, {shared} shared, {zeros} zeros)")
    }
}
