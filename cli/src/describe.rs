//! An image as text and as JSON: what `info` prints of each layer, and `create` of the new disk.
//! inner.rs describes what the image holds beside its disk.

mod inner;

pub use crate::printable::{printable, printable_lines};

use crate::{
    json,
    sizes::{Exact, Human},
    switches::{all_with_switches, with_switches},
    table::Fields,
    timestamp,
};
use diskwright_disk::Layer;
use diskwright_image::{ImageInfo, LinkageId, LogState, ParentLink};
use diskwright_store::{DeviceId, Store};
use inner::{BitmapDescription, SnapshotDescription, StorageSnapshotDescription};
use schemars::JsonSchema;
use serde::Serialize;
use std::sync::Arc;
use uuid::Uuid;

/// One image, for JSON. Sizes are bytes; ids have no braces.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct Description {
    /// Path as opened.
    pub file: String,
    /// `raw`, `vhd`, `vhdx`, `vmdk`, `vdi`, `qcow2`.
    pub format: String,
    /// `fixed`, `dynamic`, `differencing`.
    #[serde(rename = "type")]
    pub disk_type: String,
    /// Kind of image within the format, as the file spells it (VMDK).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub subformat: Option<String>,
    /// Size of the disk, as a guest sees it.
    pub virtual_size: u64,
    /// Space that the files take together, if the system reports it.
    pub size_on_disk: Option<u64>,
    /// Length of the files together.
    pub file_size: Option<u64>,
    /// The files in the order of the disk, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<FileDescription>,
    /// Size of a payload block, for formats that have blocks.
    pub block_size: Option<u64>,
    /// Logical sector size.
    pub logical_sector_size: u32,
    /// Physical sector size.
    pub physical_sector_size: u32,
    /// Program that created the image.
    pub creator: String,
    /// Time of creation, where it is recorded.
    pub created: Option<String>,
    /// VHD unique id, VHDX virtual disk id, VMDK `ddb.uuid`, VDI id of the file.
    pub disk_id: Option<Uuid>,
    /// Identifier by which children name the image.
    pub linkage_id: Option<String>,
    /// VHDX FileWriteGuid.
    pub file_write_id: Option<Uuid>,
    /// The parent, as the image records it.
    pub parent: Option<ParentDescription>,
    /// State of the log (VHDX).
    pub log: LogDescription,
    /// Power of two that divides the file offsets of all payload.
    pub payload_alignment: u32,
    /// Snapshots of the file, which its storage keeps (RBD).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub storage_snapshots: Vec<StorageSnapshotDescription>,
    /// Internal snapshots (qcow2).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub snapshots: Vec<SnapshotDescription>,
    /// Bitmaps of written ranges (qcow2).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bitmaps: Vec<BitmapDescription>,
    /// Remarks, a sentence each.
    pub remarks: Vec<String>,
}

/// One of several files of an image, for JSON.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct FileDescription {
    /// Path of the file.
    file: String,
    /// Length of the file in bytes.
    file_size: Option<u64>,
    /// Space that the file occupies, in bytes.
    size_on_disk: Option<u64>,
    /// What makes a block device recognisable; missing for a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
}

/// A parent as stored in its child.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ParentDescription {
    /// Path relative to the child.
    relative_path: Option<String>,
    /// Path that begins with the GUID of a Windows volume.
    volume_path: Option<String>,
    /// Absolute path, as the system that wrote it names files.
    absolute_path: Option<String>,
    /// File name (VHD).
    name: Option<String>,
    /// The id of the parent's file, by which it is found (VDI).
    #[serde(skip_serializing_if = "Option::is_none")]
    file_id: Option<String>,
    /// The id that the parent must have.
    #[serde(skip_serializing_if = "Option::is_none")]
    linkage: Option<String>,
    /// A second id that the parent may have instead (`parent_linkage2` of VHDX).
    linkage2: Option<String>,
    /// Format of the parent, where the image records it.
    #[serde(skip_serializing_if = "Option::is_none")]
    parent_format: Option<String>,
    /// When the parent was last changed (VHD).
    modified: Option<String>,
}

/// State of the log.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct LogDescription {
    /// `none` (the format has no log), `clean` or `replayed`.
    state: &'static str,
    /// Log entries that this open has replayed.
    replayed_entries: u32,
}

impl From<&ParentLink> for ParentDescription {
    fn from(link: &ParentLink) -> Self {
        Self {
            relative_path: link.relative_path.clone(),
            volume_path: link.volume_path.clone(),
            absolute_path: link.absolute_path.clone(),
            name: link.name.clone(),
            file_id: link.file_id.map(|id| id.braced().to_string()),
            linkage: link.linkage.map(|id| id.to_string()),
            linkage2: link.linkage2.map(|id| id.to_string()),
            parent_format: link.format.map(|format| format.to_string()),
            modified: link.modified_seconds.map(timestamp::utc_from_2000),
        }
    }
}

/// What makes a block device recognisable; `None` for a file.
fn device_of(store: &dyn Store) -> Option<String> {
    let (number, _) = store.identity().filter(|_| store.is_block_device())?;
    let DeviceId { serial, wwn, .. } = DeviceId::of(number, 0);
    let named = [("world wide name", wwn), ("serial number", serial)];
    let named: Vec<_> = named.into_iter().filter_map(|(what, text)| Some(format!("{what} {}", text?))).collect();
    Some(if named.is_empty() { "recognised by its size only".into() } else { named.join(", ") })
}

impl From<&Layer> for Description {
    fn from(layer: &Layer) -> Self {
        let info: &ImageInfo = layer.image.info();
        let stores = layer.image.stores();
        let describe = |(index, store): (u16, &Arc<dyn Store>)| FileDescription {
            file: json::path(layer.file_path(index)),
            file_size: store.len_bytes().ok(),
            size_on_disk: store.allocated_bytes().ok(),
            device: device_of(&**store),
        };
        let (state, replayed_entries) = match info.log {
            LogState::None => ("none", 0),
            LogState::Clean => ("clean", 0),
            LogState::Replayed { entries } => ("replayed", entries),
        };
        let mut remarks = all_with_switches(&info.remarks);
        let storage_snapshots = layer.image.store().snapshots().unwrap_or_else(|error| {
            remarks.push(format!("the snapshots of the storage cannot be listed: {error}"));
            Vec::new()
        });
        Self {
            file: json::path(&layer.path),
            format: info.format.to_string(),
            disk_type: info.disk_type.to_string(),
            subformat: info.subformat.clone(),
            virtual_size: info.size_bytes,
            size_on_disk: layer.allocated_bytes().ok(),
            file_size: layer.files_len_bytes().ok(),
            files: if stores.len() > 1 { (0..).zip(stores).map(describe).collect() } else { Vec::new() },
            block_size: info.has_blocks.then_some(info.block_bytes),
            logical_sector_size: info.logical_sector_bytes,
            physical_sector_size: info.physical_sector_bytes,
            creator: info.creator.clone(),
            created: info.created_seconds.map(timestamp::utc_from_2000),
            disk_id: info.disk_id,
            linkage_id: info.linkage_id.map(|id| id.to_string()),
            file_write_id: info.file_write_id,
            parent: info.parent.as_ref().map(ParentDescription::from),
            log: LogDescription { state, replayed_entries },
            payload_alignment: info.payload_alignment_bytes,
            storage_snapshots: storage_snapshots.iter().map(StorageSnapshotDescription::from).collect(),
            snapshots: layer.image.snapshots().iter().map(SnapshotDescription::from).collect(),
            bitmaps: layer.image.bitmaps().iter().map(BitmapDescription::from).collect(),
            remarks,
        }
    }
}

impl Description {
    /// `vhdx, dynamic`.
    pub fn kind(&self) -> String {
        format!("{}, {}", self.format, self.disk_type)
    }

    /// Space on disk, for people.
    pub fn size_on_disk_text(&self) -> String {
        self.size_on_disk.map_or_else(|| "unknown".into(), |bytes| Human(bytes).to_string())
    }

    /// Adds everything to `fields`; `parent_state` goes below the parent.
    pub fn add_to(&self, fields: &mut Fields, parent_state: Option<&str>) {
        fields.add("file", printable(&self.file));
        fields.add("format", &self.format);
        fields.add("type", &self.disk_type);
        if let Some(subformat) = &self.subformat {
            fields.add("subformat", printable(subformat));
        }
        fields.add("virtual size", Exact(self.virtual_size));
        if let Some(bytes) = self.size_on_disk {
            fields.add("size on disk", Exact(bytes));
        }
        if let Some(bytes) = self.file_size {
            fields.add(if self.files.is_empty() { "file length" } else { "length of the files" }, Exact(bytes));
        }
        for (index, file) in self.files.iter().enumerate() {
            let label = if index == 0 { format!("{} files", self.files.len()) } else { String::new() };
            let size = file.file_size.map_or_else(|| "unknown".into(), |bytes| Exact(bytes).to_string());
            fields.add(&label, format!("{}  {size}", printable(&file.file)));
            if let Some(device) = &file.device {
                fields.add("", format!("  a device: {}", printable(device)));
            }
        }
        if let Some(bytes) = self.block_size {
            fields.add("block size", Human(bytes));
        }
        fields.add(
            "sector size",
            format!("{} bytes logical, {} physical", self.logical_sector_size, self.physical_sector_size),
        );
        if !self.creator.is_empty() {
            fields.add("creator", printable(&self.creator));
        }
        if let Some(created) = &self.created {
            fields.add("created", created);
        }
        for (label, id) in [
            ("disk id", self.disk_id.map(|id| id.braced().to_string())),
            ("identity for children", self.linkage_id.as_deref().map(shown_id)),
            ("file write id", self.file_write_id.map(|id| id.braced().to_string())),
        ] {
            if let Some(id) = id {
                fields.add(label, id);
            }
        }
        if let Some(parent) = &self.parent {
            parent.add_to(fields);
        }
        if let Some(state) = parent_state {
            fields.add("parent state", printable(&with_switches(state)));
        }
        match (self.log.state, self.log.replayed_entries) {
            ("none", _) => {}
            ("replayed", entries) => fields
                .add("log", format!("{entries} entries, replayed in memory; a writable open replays them in the file")),
            (state, _) => fields.add("log", state),
        }
        fields.add("payload alignment", Human(self.payload_alignment.into()));
        inner::add_to(fields, &self.storage_snapshots, &self.snapshots, &self.bitmaps);
        for (index, remark) in self.remarks.iter().enumerate() {
            fields.add(if index == 0 { "remarks" } else { "" }, printable(remark));
        }
    }
}

impl ParentDescription {
    fn add_to(&self, fields: &mut Fields) {
        let names = [
            ("relative", &self.relative_path),
            ("volume", &self.volume_path),
            ("absolute", &self.absolute_path),
            ("name", &self.name),
        ];
        let mut label = "parent as stored";
        for (kind, name) in names {
            if let Some(name) = name {
                fields.add(label, format!("{kind:8}  {}", printable(name)));
                label = "";
            }
        }
        if let Some(file_id) = &self.file_id {
            fields.add(label, format!("file id   {}", shown_id(file_id)));
            label = "";
        }
        if let Some(linkage) = &self.linkage {
            fields.add(label, format!("identity  {}", shown_id(linkage)));
        }
        if let Some(linkage2) = &self.linkage2 {
            fields.add("", format!("or        {}", shown_id(linkage2)));
        }
        if let Some(format) = &self.parent_format {
            fields.add("", format!("format    {format}"));
        }
        if let Some(modified) = &self.modified {
            fields.add("", format!("modified  {modified}"));
        }
    }
}

/// An identity as people read it: a GUID in braces.
fn shown_id(text: &str) -> String {
    text.parse::<LinkageId>().map_or_else(|_| text.to_owned(), |id| format!("{id:#}"))
}
