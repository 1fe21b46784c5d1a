//! Damaged VMDKs: the descriptor, the header, directories and grain tables; and descriptors of
//! lines that a fuzzer chooses.
//!
//! ```text
//!   input ─▶ a sample, its fields damaged, lines of its text replaced ─▶ check, read, write,
//!            another link, a larger size ─▶ opened again
//! ```
//!
//! The promises are those of all images (`lib.rs`). A new link and a new size are refused, or the
//! file shows them when it is opened again; the contents stay.

use crate::{
    bounded::BoundedStore,
    mutation::{Edit, Mutation},
    samples::Sample,
    session::{bytes_of, put, read, salvage},
};
use arbitrary::{Arbitrary, Unstructured};
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
}

/// The first file of each sample, and the contents of the further files, which stay whole.
struct VmdkFiles {
    sample: Sample,
    further: Vec<Vec<u8>>,
}

/// Kinds: type, and where the text begins.
const KINDS: [(&str, DiskType, usize); 5] = [
    ("monolithicSparse", DiskType::Dynamic, 512),
    ("monolithicSparse", DiskType::Differencing, 512),
    ("monolithicFlat", DiskType::Fixed, 0),
    ("twoGbMaxExtentSparse", DiskType::Differencing, 0),
    ("twoGbMaxExtentFlat", DiskType::Fixed, 0),
];

fn families() -> &'static [VmdkFiles] {
    static FAMILIES: OnceLock<Vec<VmdkFiles>> = OnceLock::new();
    FAMILIES.get_or_init(|| KINDS.iter().map(family).collect())
}

fn family(&(subformat, disk_type, text): &(&'static str, DiskType, usize)) -> VmdkFiles {
    let parent = ParentLink {
        relative_path: Some(".\\parent.vmdk".into()),
        linkage: Some(LinkageId::Cid(0x1234_5678)),
        ..ParentLink::default()
    };
    let options = CreateOptions {
        disk_type,
        size_bytes: SIZE_BYTES,
        block_bytes: (disk_type != DiskType::Fixed).then_some(8192),
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
    VmdkFiles {
        sample: Sample { name: subformat, format: Format::Vmdk, bytes, parent: None, places },
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
    let VmdkFiles { sample, further } = &families()[number];
    let mut bytes = Mutation { seal: false, ..input.mutation.clone() }.apply(sample);
    replace_lines(&mut bytes, KINDS[number].2, &input.lines);
    for edit in input.late.iter().take(2) {
        edit.apply(sample, &mut bytes);
    }
    let driver = Format::Vmdk.driver();
    let stores: Vec<Arc<dyn Store>> = std::iter::once(&bytes)
        .chain(further)
        .map(|contents| BoundedStore::holding("d.vmdk", contents.clone()))
        .collect();
    let check = || {
        let stores: Vec<_> = stores.iter().cloned().map(Some).collect();
        driver.check_files(&stores).is_ok_and(|report| report.worst() < Some(Severity::Corrupt))
    };
    let _ = driver.parent_link(&*stores[0]);
    salvage(Format::Vmdk, &stores[0], (8192, SIZE_BYTES));
    let was_sound = check();
    let states = match driver.open_files(stores.clone(), false, 512) {
        Ok(image) => read(&*image),
        Err(error) => Err(error.to_string()),
    };
    assert!(bytes_of(&*stores[0]) == bytes, "reading changed the file");
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
            };
            let done = run(&input).unwrap_or_else(|| panic!("{kind} cannot be written"));
            assert_eq!(done.size_bytes, SIZE_BYTES + 2000 * 512, "{kind}");
            let cid2 = done.link.and_then(|link| link.linkage2);
            assert_eq!(cid2.is_some(), *disk_type == DiskType::Differencing, "{kind}");
        }
    }
}
