//! The fuzz targets: bytes in, a panic if a promise is broken.

use crate::{
    bounded::BoundedStore,
    fleet, iscsi, locators,
    mutation::Mutation,
    nvme, objects, ova, peers,
    samples::{Sample, open_chain, samples},
    space, tables, vhost, vmdk, volumes, wire,
};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_disk::{Disk, Layer};
use diskwright_format::{vhd, vhdx};
use diskwright_image::{
    BlockState, CheckReport, Format, Image, ImageError, ParentLink, Severity, probe, repair_image,
    salvage::{SalvageHints, SalvagedImage},
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, Store};
use std::sync::Arc;

/// A fuzz target.
pub type Body = fn(&[u8]);

/// All targets by name. The names are also those of the binaries and of the corpus folders.
pub const TARGETS: [(&str, Body); 27] = [
    ("parsers", parsers),
    ("open_any", open_any),
    ("open_damaged", open_damaged),
    ("replay_log", replay_log),
    ("write_damaged", write_damaged),
    ("locators", locators::locators),
    ("nbd_wire", wire::nbd_wire),
    ("nbd_server", peers::nbd_server),
    ("nbd_client", peers::nbd_client),
    ("iscsi_wire", iscsi::iscsi_wire),
    ("iscsi_target", iscsi::iscsi_target),
    ("iscsi_initiator", iscsi::iscsi_initiator),
    ("fleet_agent", fleet::fleet_agent),
    ("fleet_controller", fleet::fleet_controller),
    ("nvme_wire", nvme::nvme_wire),
    ("nvme_target", nvme::nvme_target),
    ("nvme_host", nvme::nvme_host),
    ("vhost_messages", vhost::vhost_messages),
    ("vhost_ring", vhost::vhost_ring),
    ("volumes", volumes::volumes),
    ("objects", objects::objects),
    ("ova", ova::ova),
    ("vmdk", vmdk::vmdk),
    ("qcow2", tables::qcow2),
    ("vdi", tables::vdi),
    ("heal_damaged", heal_damaged),
    ("space", space::space),
];

/// Maximum bytes that are read at each end of a disk, because damage may make it huge.
const READ_MOST_BYTES: u64 = 8 << 20;

/// All parsers of on-disk structures; the first byte chooses one. An accepted structure that can be
/// encoded must decode to the same value again.
pub fn parsers(data: &[u8]) {
    let Some((which, bytes)) = data.split_first() else { return };
    match which % 12 {
        0 => {
            if let Ok(footer) = vhd::Footer::parse(bytes, 0) {
                assert_eq!(vhd::Footer::parse(&footer.to_bytes(), 0).as_ref(), Ok(&footer));
            }
        }
        1 => drop(vhd::DynamicHeader::parse(bytes, 512)),
        2 => drop(vhdx::FileIdentifier::parse(bytes)),
        3 => {
            if let Ok(header) = vhdx::Header::parse(bytes) {
                assert_eq!(vhdx::Header::parse(&header.to_bytes()).as_ref(), Ok(&header));
            }
        }
        4 => drop(vhdx::RegionTable::parse(bytes)),
        5 => drop(vhdx::MetadataTable::parse(bytes, 1 << 20)),
        6 => drop(vhdx::FileParameters::parse(bytes)),
        7 => drop(vhdx::ParentLocator::parse(bytes)),
        8 => drop(vhdx::LogEntryHeader::parse(bytes)),
        9 => drop(vhdx::Descriptor::parse(bytes, 1)),
        10 => {
            for entry in vhd_locators(bytes) {
                drop(entry);
            }
        }
        _ => {
            for word in bytes.chunks_exact(8) {
                let entry = vhdx::BatEntry::from_le_bytes(word.try_into().unwrap_or_default());
                drop((entry.payload_state(), entry.bitmap_state()));
            }
        }
    }
}

/// Decodes the locators of a header from the bytes after it.
fn vhd_locators(bytes: &[u8]) -> Vec<Option<vhd::LocatorData>> {
    let Some((header, data)) = bytes.split_at_checked(vhd::HEADER_BYTES) else { return Vec::new() };
    let Ok(header) = vhd::DynamicHeader::parse(header, 512) else { return Vec::new() };
    header.locators.iter().map(|entry| entry.decode(&data[..data.len().min(vhd::MAX_LOCATOR_BYTES as usize)])).collect()
}

/// Opens the bytes as an image.
pub fn open_any(data: &[u8]) {
    let store = || BoundedStore::holding("any", data.to_vec());
    for format in [None, Some(Format::Vhd), Some(Format::Vhdx)] {
        let checked = probe::check(store(), format).map(|(_, report)| report);
        if let Ok(image) = probe::open(store(), format, false, 512) {
            let format = image.info().format;
            drop(image);
            let read = read_all(format, store(), None);
            agree(checked.as_ref().ok(), &read, "any");
        }
    }
}

/// Checks and reads a damaged sample.
pub fn open_damaged(data: &[u8]) {
    with_damage(data, |sample, bytes| {
        let store = BoundedStore::holding(sample.name, bytes.to_vec());
        let checked = probe::check(Arc::clone(&store), Some(sample.format)).map(|(_, report)| report);
        let read = read_all(sample.format, Arc::clone(&store), sample.parent.as_deref());
        agree(checked.as_ref().ok(), &read, sample.name);
        let mut after = vec![0; bytes.len()];
        store.read_at(&mut after, 0).expect("memory can be read");
        assert!(
            after == bytes && store.len_bytes().ok() == Some(bytes.len() as u64),
            "{}: reading changed the file",
            sample.name
        );
    });
}

/// Opens a damaged VHDX with a log for writing. Replay in memory and in the file must agree.
pub fn replay_log(data: &[u8]) {
    let Ok(mut mutation) = Mutation::arbitrary(&mut Unstructured::new(data)) else { return };
    mutation.sample = (samples().len() - 1) as u8;
    let sample = mutation.sample(samples());
    let bytes = mutation.apply(sample);
    let store = |bytes: &[u8]| BoundedStore::holding(sample.name, bytes.to_vec());
    let in_memory = states(&store(&bytes), false);
    let on_file = store(&bytes);
    let replayed = states(&on_file, true);
    if let (Ok(in_memory), Ok(replayed)) = (&in_memory, &replayed) {
        assert_eq!(in_memory, replayed, "replay in memory and on the file differ");
        // Dropped after the replay without a close: the log is empty, and the states are the same.
        assert_eq!(states(&on_file, false).as_ref().ok(), Some(replayed), "replaying twice differs");
    }
}

/// The states of the first blocks.
fn states(store: &Arc<dyn Store>, writable: bool) -> Result<Vec<BlockState>, String> {
    let image = probe::open(Arc::clone(store), Some(Format::Vhdx), writable, 512).map_err(|error| error.to_string())?;
    let mut states = vec![BlockState::Absent; 64];
    image.block_states(0, &mut states).map_err(|error| error.to_string())?;
    Ok(states)
}

/// Writes to a damaged sample, flushes, closes and reopens it. A sound image must stay sound and
/// return the data.
pub fn write_damaged(data: &[u8]) {
    with_damage(data, |sample, bytes| {
        let store = BoundedStore::holding(sample.name, bytes.to_vec());
        let was_sound =
            probe::check(Arc::clone(&store), Some(sample.format)).is_ok_and(|(_, report)| is_sound(&report));
        let written = write_some(sample, &store);
        // A sound disk may be larger than the maximum length of its store.
        let full = written.as_ref().is_err_and(|error| error.contains("no storage space"));
        // A sound image may have a feature with which it is only read, or a bit that says that it
        // was not closed.
        let refused = written.as_ref().is_err_and(|error| error.contains("is not supported"));
        if full || refused {
            return;
        }
        if let (true, Err(error)) = (was_sound, &written) {
            panic!("{}: check finds it sound, but writing fails: {error}", sample.name);
        }
        if was_sound {
            let (_, report) =
                probe::check(Arc::clone(&store), Some(sample.format)).expect("a sound file after a write");
            assert!(is_sound(&report), "{}: writing has corrupted it: {:?}", sample.name, report.findings);
        }
    });
}

/// Repairs a damaged sample, without losses and with them: what the repair calls sound can be read.
/// Then reads what can be salvaged of the damaged file.
pub fn heal_damaged(data: &[u8]) {
    with_damage(data, |sample, bytes| {
        let store = || BoundedStore::holding(sample.name, bytes.to_vec());
        for accept_loss in [false, true] {
            let repaired = store();
            let report = repair_image(sample.format, &repaired, accept_loss, &mut |_| true).ok().flatten();
            if report.is_some() {
                agree(report.as_ref(), &read_all(sample.format, repaired, sample.parent.as_deref()), sample.name);
            }
        }
        let Ok(salvaged) = sample.format.driver().salvage(store(), &SalvageHints::default()) else { return };
        let image: Arc<dyn Image> = Arc::new(SalvagedImage::new(Arc::new(salvaged)));
        let Ok(disk) = Disk::from_layers(vec![Layer { path: sample.name.into(), image }], Vec::new()) else { return };
        let Ok(mut io) = Blocking::open(&disk, EngineKind::Sync) else { return };
        let mut piece = vec![0; 64 << 10];
        for at in (0..disk.geometry().size_bytes.min(READ_MOST_BYTES)).step_by(piece.len()) {
            // Lost blocks are errors.
            let len = piece.len().min((disk.geometry().size_bytes - at) as usize);
            let _ = io.read(at, &mut piece[..len]);
        }
    });
}

fn write_some(sample: &Sample, store: &Arc<dyn Store>) -> Result<(), String> {
    let text = |error: std::io::Error| error.to_string();
    let disk = open_chain(sample.format, Arc::clone(store), sample.parent.as_deref(), true)
        .map_err(|error| error.to_string())?;
    let linked = relink(&*disk.layers()[0].image)?;
    let geometry = disk.geometry();
    let sector = u64::from(geometry.logical_sector_bytes);
    let sectors = geometry.size_bytes / sector;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
    let pattern = vec![0xA5_u8; sector as usize];
    let places = [0, 1, sectors / 3, sectors / 2, sectors.saturating_sub(1)].map(|at| at.min(sectors - 1) * sector);
    for place in places {
        io.write(place, &pattern, false).map_err(text)?;
    }
    io.write_zeroes(places[2], sector).map_err(text)?;
    io.discard(places[3], sector).map_err(text)?;
    io.flush().map_err(text)?;
    drop(io);
    disk.close().map_err(|error| error.to_string())?;
    let disk = open_chain(sample.format, Arc::clone(store), sample.parent.as_deref(), false)
        .map_err(|error| error.to_string())?;
    if linked.is_some() {
        assert_eq!(disk.layers()[0].image.parent_link(), linked, "{}: another link than the new one", sample.name);
    }
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(text)?;
    let mut back = vec![0; sector as usize];
    for place in [places[0], places[4]] {
        io.read(place, &mut back).map_err(text)?;
        let zeroed = place == places[2] || place == places[3];
        assert!(zeroed || back == pattern, "{}: the data written at {place} cannot be read back", sample.name);
    }
    Ok(())
}

/// Gives a child another link to its parent; `None` if there is no parent, or no room for the link.
fn relink(image: &dyn Image) -> Result<Option<ParentLink>, String> {
    let (Some(old), Some(writer)) = (image.parent_link(), image.writer()) else { return Ok(None) };
    let link = ParentLink { absolute_path: Some("\\another folder\\parent".repeat(20)), ..old };
    match writer.set_parent_link(&link) {
        Ok(()) => Ok(image.parent_link()),
        // A damaged path is refused as well.
        Err(ImageError::BadParentLink { .. }) => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

fn with_damage(data: &[u8], body: impl FnOnce(&Sample, &[u8])) {
    let Ok(mutation) = Mutation::arbitrary(&mut Unstructured::new(data)) else { return };
    let sample = mutation.sample(samples());
    body(sample, &mutation.apply(sample));
}

fn is_sound(report: &CheckReport) -> bool {
    report.worst() < Some(Severity::Corrupt)
}

/// An image that check finds sound must be readable without an error. One exception: a child whose
/// record of its parent's format is missing or names an unknown one is sound by itself, and the
/// error says what the user must do.
fn agree(checked: Option<&CheckReport>, read: &Result<(), String>, name: &str) {
    if let (Some(report), Err(error)) = (checked, read)
        && is_sound(report)
        && !error.contains("whose format the image does not record")
        && !(error.contains("the backing file") && error.contains("is not supported; convert the backing file"))
    {
        panic!("{name}: check finds it sound, but reading fails: {error}");
    }
}

/// Opens read-only and reads the first and the last bytes.
fn read_all(format: Format, store: Arc<dyn Store>, parent: Option<&[u8]>) -> Result<(), String> {
    let disk = open_chain(format, store, parent, false).map_err(|error| error.to_string())?;
    let size_bytes = disk.geometry().size_bytes;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).map_err(|error| error.to_string())?;
    let mut piece = vec![0; 1 << 20];
    let head = size_bytes.min(READ_MOST_BYTES);
    for range in [0..head, size_bytes.saturating_sub(READ_MOST_BYTES).max(head)..size_bytes] {
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(piece.len() as u64) as usize;
            io.read(at, &mut piece[..len]).map_err(|error| error.to_string())?;
            at += len as u64;
        }
    }
    let mut extents = Vec::new();
    disk.extents(0, head, &mut extents).map_err(|error| error.to_string())
}
