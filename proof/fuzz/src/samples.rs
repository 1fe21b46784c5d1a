//! Small valid images of every type, in memory.
//!
//! They are created once by our own code, with data in the first, a middle and the last sectors. So
//! tables have entries that are in use and entries that are not. The last sample is a VHDX with a
//! log to replay; its newest BAT page is only in the log.

use diskwright_disk::{Disk, Layer};
use diskwright_image::{CreateOptions, DiskType, Format, ParentLink, probe};
use diskwright_store::{BlockDevice, Blocking, EngineKind, MemoryStore, Store};
use std::sync::{Arc, OnceLock};
use uuid::Uuid;

/// Offset and length of a structure.
pub type Place = (usize, usize);

/// One image.
#[derive(Debug)]
pub struct Sample {
    /// Name, as in "dynamic.vhdx".
    pub name: &'static str,
    /// Its format.
    pub format: Format,
    /// Contents of its file.
    pub bytes: Vec<u8>,
    /// Contents of its parent's file; `None` unless it is a child.
    pub parent: Option<Vec<u8>>,
    /// Its structures, as targets of damage.
    pub places: Vec<Place>,
}

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Offset of the BAT in our VHDX files: after the log and the metadata region.
const VHDX_BAT: usize = 3 * MIB;
const VHDX_PLACES: [Place; 9] = [
    (0, 1024),
    (64 * KIB, 128),
    (128 * KIB, 128),
    (192 * KIB, 256),
    (256 * KIB, 256),
    (MIB, 12 * KIB),
    (2 * MIB, 512),
    (2 * MIB + 64 * KIB, 1024),
    (VHDX_BAT, 256),
];

/// All samples.
///
/// # Panics
/// A sample cannot be created.
pub fn samples() -> &'static [Sample] {
    static SAMPLES: OnceLock<Vec<Sample>> = OnceLock::new();
    SAMPLES.get_or_init(make_all)
}

fn make_all() -> Vec<Sample> {
    let mut all = Vec::new();
    for (name, format, disk_type, size_bytes, block_bytes) in [
        ("fixed.vhd", Format::Vhd, DiskType::Fixed, 64 * KIB, None),
        ("dynamic.vhd", Format::Vhd, DiskType::Dynamic, 512 * KIB, Some(32 << 10)),
        ("differencing.vhd", Format::Vhd, DiskType::Differencing, 512 * KIB, Some(32 << 10)),
        ("fixed.vhdx", Format::Vhdx, DiskType::Fixed, 2 * MIB, Some(1 << 20)),
        ("dynamic.vhdx", Format::Vhdx, DiskType::Dynamic, 4 * MIB, Some(1 << 20)),
        ("differencing.vhdx", Format::Vhdx, DiskType::Differencing, 4 * MIB, Some(1 << 20)),
        ("dynamic.qcow2", Format::Qcow2, DiskType::Dynamic, 512 * KIB, Some(4 << 10)),
        ("differencing.qcow2", Format::Qcow2, DiskType::Differencing, 512 * KIB, Some(4 << 10)),
        ("dynamic.vdi", Format::Vdi, DiskType::Dynamic, 512 * KIB, Some(16 << 10)),
        ("differencing.vdi", Format::Vdi, DiskType::Differencing, 512 * KIB, Some(16 << 10)),
    ] {
        let options = CreateOptions {
            disk_type,
            size_bytes: size_bytes as u64,
            block_bytes,
            logical_sector_bytes: 512,
            physical_sector_bytes: 4096,
            parent: None,
            preallocate: false,
            disk_id: Some(Uuid::from_u128(0x00d1_5c00 + all.len() as u128)),
            own: Default::default(),
        };
        let parent = (disk_type == DiskType::Differencing).then(|| make_parent(name, format, &options));
        let link = parent.as_ref().map(|bytes| link_to(format, bytes));
        let store: Arc<dyn Store> = Arc::new(MemoryStore::new(name));
        create(format, &store, &CreateOptions { parent: link, ..options });
        let (_, bytes) = fill(format, store, parent.as_deref());
        all.push(sample(name, format, bytes, parent));
    }
    let options = CreateOptions {
        disk_type: DiskType::Dynamic,
        size_bytes: 4 << 20,
        block_bytes: Some(1 << 20),
        logical_sector_bytes: 4096,
        physical_sector_bytes: 4096,
        parent: None,
        preallocate: false,
        disk_id: None,
        own: Default::default(),
    };
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new("logged.vhdx"));
    create(Format::Vhdx, &store, &options);
    let (mut flushed, _) = fill(Format::Vhdx, store, None);
    // The flush has also written the BAT page in place. It is removed, so that only the log has it.
    flushed[VHDX_BAT..VHDX_BAT + 4096].fill(0);
    all.push(sample("logged.vhdx", Format::Vhdx, flushed, None));
    all
}

fn sample(name: &'static str, format: Format, bytes: Vec<u8>, parent: Option<Vec<u8>>) -> Sample {
    let len = bytes.len();
    let places = match format {
        Format::Vhdx => VHDX_PLACES.to_vec(),
        // Header, refcount table, refcounts, L1 table, the first L2 tables.
        Format::Qcow2 => {
            [(0, 112), (4096, 64), (8192, 128), (12288, 64), (16384, 256), (20480, 4096), (112, 64)].to_vec()
        }
        Format::Vdi => vec![(64, 448), (512, 256), (0, len.min(8192))],
        _ => vec![(0, 128), (len - 512, 128), (512, 128), (512 + 576, 192), (1536, 256), (0, len.min(8192))],
    };
    Sample { name, format, bytes, parent, places }
}

fn make_parent(name: &str, format: Format, options: &CreateOptions) -> Vec<u8> {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::new(format!("parent-of-{name}")));
    create(format, &store, &CreateOptions { disk_type: DiskType::Dynamic, ..options.clone() });
    fill(format, store, None).1
}

fn link_to(format: Format, parent: &[u8]) -> ParentLink {
    let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("parent", parent.to_vec()));
    let image = probe::open(store, Some(format), false, 512).expect("a parent that was just made");
    ParentLink {
        relative_path: Some(".\\parent".into()),
        absolute_path: Some("C:\\parent".into()),
        name: Some("parent".into()),
        linkage: image.info().linkage_id,
        file_id: image.info().disk_id.filter(|_| format.driver().child_names_file_id),
        modified_seconds: Some(0),
        ..ParentLink::default()
    }
}

fn create(format: Format, store: &Arc<dyn Store>, options: &CreateOptions) {
    let made = format.driver().create(Arc::clone(store), options);
    made.expect("a small image can be made in memory");
}

/// Writes some data. Returns the file's contents after a flush, and after the close.
fn fill(format: Format, store: Arc<dyn Store>, parent: Option<&[u8]>) -> (Vec<u8>, Vec<u8>) {
    let bytes_of = |store: &Arc<dyn Store>| {
        let mut bytes = vec![0; store.len_bytes().expect("a length") as usize];
        store.read_at(&mut bytes, 0).expect("memory can be read");
        bytes
    };
    let disk = open_chain(format, Arc::clone(&store), parent, true).expect("a disk that was just made");
    let size_bytes = disk.geometry().size_bytes;
    let mut io = Blocking::open(&*disk, EngineKind::Sync).expect("a queue");
    for (offset_bytes, len, seed) in [(0, 4096, 1_u8), (size_bytes / 2, 20 * KIB, 2), (size_bytes - 4096, 4096, 3)] {
        let data: Vec<u8> = (0..len).map(|at| (at / 512) as u8 ^ seed | 1).collect();
        io.write(offset_bytes, &data, false).expect("a write to memory");
    }
    io.flush().expect("a flush to memory");
    let flushed = bytes_of(&store);
    drop(io);
    disk.close().expect("a close to memory");
    (flushed, bytes_of(&store))
}

/// Opens an image in memory with its parent, without the checks of paths and identities that are
/// made for files.
///
/// # Errors
/// The error of the open.
pub fn open_chain(
    format: Format,
    top: Arc<dyn Store>,
    parent: Option<&[u8]>,
    writable: bool,
) -> Result<Arc<Disk>, diskwright_disk::DiskError> {
    let mut layers = vec![Layer { path: top.name().to_owned(), image: probe::open(top, Some(format), writable, 512)? }];
    if let Some(bytes) = parent {
        let store: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("parent", bytes.to_vec()));
        layers.push(Layer { path: "parent".into(), image: probe::open(store, Some(format), false, 512)? });
    }
    Ok(Arc::new(Disk::from_layers(layers, Vec::new())?))
}
