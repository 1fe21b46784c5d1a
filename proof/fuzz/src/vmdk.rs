//! Damaged VMDKs: the descriptor, the header, directories and grain tables, compressed grains; and
//! descriptors of lines that a fuzzer chooses.
//!
//! ```text
//!   input ─▶ a sample, its fields damaged, lines of its text replaced, its first extent damaged
//!            ─▶ check, read, write, another link, a larger size ─▶ opened again
//! ```
//!
//! The promises are those of all images (`lib.rs`). A new link and a new size are refused, or the
//! file shows them when it is opened again; the contents stay. A stream is only read.

use crate::{
    bounded::BoundedStore,
    mutation::{Edit, Mutation},
    samples::Sample,
    session::{bytes_of, put, read, salvage},
};
use arbitrary::{Arbitrary, Unstructured};
use diskwright_format::vmdk::{
    Access, Descriptor, Extent, ExtentKind, STREAM_GRAIN_BYTES, SeSparseGrain, SeSparseHeader, StreamWriter,
    sesparse_directory_entry, sesparse_volatile_header,
};
use diskwright_image::{
    BlockState, CreateOptions, DiskType, Format, FormatOptions, Image, ImageError, LinkageId, ParentLink, Severity,
};
use diskwright_store::{MemoryStore, Store};
use std::sync::{Arc, OnceLock};

/// Length of the samples' disks in bytes.
const SIZE_BYTES: u64 = 5 << 20;
/// The most that a disk grows in one run: tables of some KiB.
const GROWTH_MAX_BYTES: u64 = 2 << 20;
/// Most lines that are replaced.
const LINES_MAX: usize = 6;

/// A line of a descriptor.
#[derive(Debug, Clone, Copy, Arbitrary)]
enum Line {
    Cid(u32),
    ParentCid(u32),
    ParentCid2(u32),
    Hint(u8),
    Type(bool),
    Extent { kind: u8, sectors: u32, first: u16 },
    Geometry(u32),
    Comment(u8),
    Empty,
    Nul,
}

impl Line {
    fn text(self) -> String {
        match self {
            Self::Cid(cid) => format!("CID={cid:x}"),
            Self::ParentCid(cid) => format!("parentCID={cid:08x}"),
            Self::ParentCid2(cid) => format!("#parentCID2={cid:08x}"),
            Self::Hint(len) => format!("parentFileNameHint=\"{}\"", "p".repeat(len.into())),
            Self::Type(is_split) => format!("createType=\"{}\"", if is_split { "twoGbMaxExtentFlat" } else { "x" }),
            Self::Extent { kind, sectors, first } => {
                let kind = ["FLAT", "SPARSE", "ZERO", "VMFS", "VMFSSPARSE", "SESPARSE"][usize::from(kind % 6)];
                format!("RW {sectors} {kind} \"d.vmdk\" {first}")
            }
            Self::Geometry(cylinders) => format!("ddb.geometry.cylinders = \"{cylinders}\""),
            Self::Comment(len) => format!("#{}", " ".repeat(len.into())),
            Self::Empty => String::new(),
            Self::Nul => "\0".into(),
        }
    }
}

/// The input.
#[derive(Debug, Arbitrary)]
struct Input {
    mutation: Mutation,
    /// Lines, and which lines of the text they replace.
    lines: Vec<(u8, Line)>,
    /// Damage after the lines were replaced.
    late: Vec<Edit>,
    hint_len: u16,
    cid2: Option<u32>,
    growth_sectors: u32,
    /// Damage of the first further file.
    extent: Vec<Edit>,
}

/// The first file of each sample, and the contents of the further files, of which the first one is
/// damaged too.
struct VmdkFiles {
    sample: Sample,
    extent: Option<Sample>,
    further: Vec<Vec<u8>>,
}

/// The kinds that are only read.
const STREAM: &str = "streamOptimized";
const SESPARSE: &str = "seSparse";
/// Most changes of an extent.
const EXTENT_EDITS_MAX: usize = 8;
/// Where the header of a COWD extent says whether it was closed.
const COWD_UNCLEAN: usize = 1640;

/// Kinds: type, and where the text begins.
const KINDS: [(&str, DiskType, usize); 9] = [
    ("monolithicSparse", DiskType::Dynamic, 512),
    ("monolithicSparse", DiskType::Differencing, 512),
    ("monolithicFlat", DiskType::Fixed, 0),
    ("twoGbMaxExtentSparse", DiskType::Differencing, 0),
    ("twoGbMaxExtentFlat", DiskType::Fixed, 0),
    ("vmfsSparse", DiskType::Dynamic, 0),
    ("vmfsSparse", DiskType::Differencing, 0),
    (STREAM, DiskType::Dynamic, 512),
    (SESPARSE, DiskType::Dynamic, 0),
];

fn families() -> &'static [VmdkFiles] {
    static FAMILIES: OnceLock<Vec<VmdkFiles>> = OnceLock::new();
    FAMILIES.get_or_init(|| KINDS.iter().map(family).collect())
}

/// A grain as a stream of RFC 1950 whose blocks are stored.
fn packed(bytes: &[u8]) -> Vec<u8> {
    let (mut sums, mut out) = ((1_u32, 0_u32), vec![0x78, 0x01]);
    for byte in bytes {
        sums.0 = (sums.0 + u32::from(*byte)) % 65_521;
        sums.1 = (sums.1 + sums.0) % 65_521;
    }
    let pieces: Vec<&[u8]> = bytes.chunks(40_000).collect();
    for (number, piece) in (1..).zip(&pieces) {
        let len = piece.len() as u16;
        out.push(u8::from(number == pieces.len()));
        out.extend(len.to_le_bytes());
        out.extend((!len).to_le_bytes());
        out.extend_from_slice(piece);
    }
    out.extend((sums.1 << 16 | sums.0).to_be_bytes());
    out
}

/// A stream with three grains.
fn stream() -> VmdkFiles {
    let sectors = SIZE_BYTES / 512;
    let extent = Extent {
        access: Access::ReadWrite,
        sectors,
        kind: ExtentKind::Sparse,
        file: Some("d.vmdk".into()),
        first_sector: 0,
    };
    let mut bytes = Vec::new();
    let descriptor = Descriptor::new(1, STREAM, vec![extent], &[]);
    let mut writer = StreamWriter::new(sectors, &descriptor, &mut bytes).expect("a small disk");
    let mut grains = Vec::new();
    for grain in [0, 3, 79] {
        grains.push(bytes.len());
        writer.grain(grain, &packed(&[grain as u8 + 1; STREAM_GRAIN_BYTES as usize]), &mut bytes).expect("in order");
    }
    let end = bytes.len();
    writer.finish(&mut bytes);
    let places = vec![
        (0, 80),
        (512, 512),
        (grains[0], 32),
        (grains[1], 32),
        (grains[2], 32),
        (grains[0] + 40_000, 32),
        (end, 512),
        (end + 512, 1024),
        (bytes.len() - 2048, 2048),
    ];
    let sample = Sample { name: STREAM, format: Format::Vmdk, bytes, parent: None, places };
    VmdkFiles { sample, extent: None, further: Vec::new() }
}

/// An SESPARSE extent with two grains of data and one of zeros.
fn sesparse() -> VmdkFiles {
    let sectors = SIZE_BYTES / 512;
    let header = SeSparseHeader {
        capacity_sectors: sectors,
        flags: 0,
        volatile_sector: 1,
        directory: (2, 1),
        tables_sector: 8,
        grains_sector: 72,
    };
    let mut bytes = vec![0; 72 * 512 + 2 * 4096];
    let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
    put(0, &header.to_bytes());
    put(512, &sesparse_volatile_header());
    put(1024, &sesparse_directory_entry(0).to_le_bytes());
    let grains = [(0, SeSparseGrain::Number(1)), (3, SeSparseGrain::Number(0)), (5, SeSparseGrain::Zero)];
    grains.iter().for_each(|(grain, entry)| put(4096 + grain * 8, &entry.encode().to_le_bytes()));
    let extent = Extent {
        access: Access::ReadWrite,
        sectors,
        kind: ExtentKind::SeSparse,
        file: Some("e.vmdk".into()),
        first_sector: 0,
    };
    let text = Descriptor::new(1, SESPARSE, vec![extent], &[]).to_text().into_bytes();
    let places = vec![(0, 256), (512, 32), (1024, 16), (4096, 64), (4096, 8192)];
    VmdkFiles {
        extent: Some(Sample { name: "e", format: Format::Vmdk, bytes: bytes.clone(), parent: None, places }),
        further: vec![bytes],
        sample: Sample {
            name: SESPARSE,
            format: Format::Vmdk,
            places: vec![(0, 128), (0, text.len())],
            bytes: text,
            parent: None,
        },
    }
}

fn family(&(subformat, disk_type, text): &(&'static str, DiskType, usize)) -> VmdkFiles {
    match subformat {
        STREAM => return stream(),
        SESPARSE => return sesparse(),
        _ => {}
    }
    let parent = ParentLink {
        relative_path: Some(".\\parent.vmdk".into()),
        linkage: Some(LinkageId::Cid(0x1234_5678)),
        ..ParentLink::default()
    };
    let options = CreateOptions {
        disk_type,
        size_bytes: SIZE_BYTES,
        block_bytes: (disk_type != DiskType::Fixed).then_some(if subformat == "vmfsSparse" { 512 } else { 8192 }),
        logical_sector_bytes: 512,
        physical_sector_bytes: 512,
        parent: (disk_type == DiskType::Differencing).then_some(parent),
        preallocate: false,
        disk_id: None,
        own: FormatOptions { subformat: Some(subformat.into()), file_name: "d.vmdk".into(), device: None },
    };
    let driver = Format::Vmdk.driver();
    let count = driver.further_files(&options).expect("sound options").len() + 1;
    let stores: Vec<Arc<dyn Store>> =
        (0..count).map(|_| Arc::new(MemoryStore::new("d.vmdk")) as Arc<dyn Store>).collect();
    driver.create_files(stores.clone(), &options).expect("a small image can be made in memory");
    let image = driver.open_files(stores.clone(), true, 512).expect("an image that was just made");
    let writer = image.writer().expect("it is open for writing");
    for block in [0, 3, 639] {
        put(&*image, writer, block).expect("a write to memory");
    }
    writer.close().expect("a close to memory");
    let mut contents: Vec<Vec<u8>> = stores.iter().map(|store| bytes_of(&**store)).collect();
    let bytes = contents.remove(0);
    // Header, text, the redundant directory and its tables, the directory and its tables.
    let tables = 21 * 512;
    let places = if text > 0 {
        vec![(0, 80), (text, 512), (text, 1024), (tables, 512), (tables + 512, 64), (tables, 8192)]
    } else {
        vec![(0, 128), (0, 512), (0, bytes.len())]
    };
    let extent = contents.first().map(|bytes| Sample {
        name: "extent",
        format: Format::Vmdk,
        bytes: bytes.clone(),
        parent: None,
        // Header, directory, first table, and what may lie behind them.
        places: vec![(0, 80), (COWD_UNCLEAN, 16), (512, 64), (2048, 64), (2560, 64), (1024, 128), (2560, 8192)],
    });
    VmdkFiles {
        sample: Sample { name: subformat, format: Format::Vmdk, bytes, parent: None, places },
        extent,
        further: contents,
    }
}

/// The text of the sample with other lines.
fn replace_lines(bytes: &mut Vec<u8>, start: usize, lines: &[(u8, Line)]) {
    if lines.is_empty() || bytes.len() < start {
        return;
    }
    let space = if start > 0 { (start + 20 * 512).min(bytes.len()) } else { bytes.len() };
    let end = bytes[start..space].iter().position(|&byte| byte == 0).map_or(space, |len| start + len);
    let mut text: Vec<Vec<u8>> = bytes[start..end].split(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    for (at, line) in lines.iter().take(LINES_MAX) {
        let at = usize::from(*at) % text.len();
        text[at] = line.text().into_bytes();
    }
    let mut new = text.join(&b'\n');
    if start > 0 {
        new.resize(space - start, 0);
    }
    bytes.splice(start..space, new);
}

/// The fuzz target: see the module.
pub fn vmdk(data: &[u8]) {
    if let Ok(input) = Input::arbitrary(&mut Unstructured::new(data)) {
        run(&input);
    }
}

/// Returns what was done to the image if it could be written.
fn run(input: &Input) -> Option<Done> {
    let number = usize::from(input.mutation.sample) % KINDS.len();
    let VmdkFiles { sample, extent, further } = &families()[number];
    let mut bytes = Mutation { seal: false, ..input.mutation.clone() }.apply(sample);
    replace_lines(&mut bytes, KINDS[number].2, &input.lines);
    for edit in input.late.iter().take(2) {
        edit.apply(sample, &mut bytes);
    }
    let mut further = further.clone();
    if let (Some(extent), Some(bytes)) = (extent, further.first_mut()) {
        input.extent.iter().take(EXTENT_EDITS_MAX).for_each(|edit| edit.apply(extent, bytes));
    }
    let driver = Format::Vmdk.driver();
    let stores: Vec<Arc<dyn Store>> = std::iter::once(&bytes)
        .chain(&further)
        .map(|contents| BoundedStore::holding("d.vmdk", contents.clone()))
        .collect();
    let check = || {
        let stores: Vec<_> = stores.iter().cloned().map(Some).collect();
        driver.check_files(&stores).is_ok_and(|report| report.worst() < Some(Severity::Corrupt))
    };
    let _ = driver.parent_link(&*stores[0]);
    salvage(Format::Vmdk, &stores[0], (if sample.name == STREAM { 65_536 } else { 8192 }, SIZE_BYTES));
    let was_sound = check();
    let states = match driver.open_files(stores.clone(), false, 512) {
        Ok(image) => read(&*image),
        Err(error) => Err(error.to_string()),
    };
    let files = std::iter::once(&bytes).chain(&further);
    assert!(files.zip(&stores).all(|(bytes, store)| bytes_of(&**store) == *bytes), "reading changed a file");
    if let (Err(error), true) = (&states, was_sound) {
        panic!("check finds it sound, but reading fails: {error}");
    }
    let image = driver.open_files(stores.clone(), true, 512).ok()?;
    let changed = change(&*image, input);
    drop(image);
    let done = changed.ok()?;
    let again = driver.open_files(stores.clone(), false, 512).expect("an image that was written and closed");
    assert_eq!(again.size_bytes(), done.size_bytes, "another size than the new one");
    if done.link.is_some() {
        assert_eq!(again.info().parent, done.link, "another link than the new one");
    }
    assert!(!was_sound || check(), "writing has corrupted it");
    if let (Ok(before), true) = (states, was_sound) {
        let after = read(&*again).expect("a sound image can be read");
        let kept = before.iter().zip(&after).filter(|(before, _)| matches!(before, BlockState::Data { .. }));
        assert!(kept.into_iter().all(|(before, after)| before == after), "a block has lost its place");
    }
    Some(done)
}

/// What a session has done.
struct Done {
    size_bytes: u64,
    /// The new link, if there is one.
    link: Option<ParentLink>,
}

/// A session: an identity, a link, a size, some blocks.
fn change(image: &dyn Image, input: &Input) -> Result<Done, ImageError> {
    let writer = image.writer().expect("it is open for writing");
    writer.begin_writing()?;
    let old = image.parent_link().unwrap_or_default();
    let link = ParentLink {
        relative_path: Some("n".repeat(usize::from(input.hint_len) % 600)),
        linkage: old.linkage.or(Some(LinkageId::Cid(1))),
        linkage2: input.cid2.map(LinkageId::Cid),
        ..ParentLink::default()
    };
    let linked = match writer.set_parent_link(&link) {
        Ok(()) => image.parent_link(),
        Err(ImageError::BadParentLink { .. }) => None,
        Err(error) => return Err(error),
    };
    put(image, writer, 0)?;
    let wanted = image.size_bytes() + u64::from(input.growth_sectors) * 512 % GROWTH_MAX_BYTES;
    match writer.resize(wanted) {
        Ok(()) => assert_eq!(image.size_bytes(), wanted),
        Err(ImageError::Unsupported { .. }) => {}
        Err(error) => return Err(error),
    }
    put(image, writer, u64::MAX)?;
    writer.flush()?;
    writer.close()?;
    Ok(Done { size_bytes: image.size_bytes(), link: linked })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stores_of(files: &VmdkFiles) -> Vec<Arc<dyn Store>> {
        let all = std::iter::once(&files.sample.bytes).chain(&files.further);
        all.map(|bytes| Arc::new(MemoryStore::with_bytes("d.vmdk", bytes.clone())) as Arc<dyn Store>).collect()
    }

    /// Sound samples are written, get a link and grow: so the damaged ones test that code.
    #[test]
    fn the_samples_reach_all_code() {
        for (number, (kind, disk_type, _)) in KINDS.iter().enumerate() {
            let mutation = Mutation { sample: number as u8, edits: Vec::new(), seal: false, cut: u16::MAX };
            let input = Input {
                mutation,
                lines: vec![(1, Line::Comment(9))],
                late: Vec::new(),
                hint_len: 200,
                cid2: Some(7),
                growth_sectors: 2000,
                extent: Vec::new(),
            };
            if [STREAM, SESPARSE].contains(kind) {
                assert!(run(&input).is_none(), "{kind} is not written");
                let stores = stores_of(&families()[number]);
                let states = read(&*Format::Vmdk.driver().open_files(stores, false, 512).unwrap()).unwrap();
                assert_eq!(states.iter().filter(|&&state| state != BlockState::Absent).count(), 3, "{kind}");
                continue;
            }
            let done = run(&input).unwrap_or_else(|| panic!("{kind} cannot be written"));
            assert_eq!(done.size_bytes, SIZE_BYTES + 2000 * 512, "{kind}");
            let cid2 = done.link.and_then(|link| link.linkage2);
            assert_eq!(cid2.is_some(), *disk_type == DiskType::Differencing, "{kind}");
        }
    }
}
