//! New links to parents: what the descriptor records, and what does not fit.

use super::writing::{check, made, open, options, put, text_of};
use crate::{CreateOptions, DiskType, Format, LinkageId, ParentLink};
use diskwright_format::vmdk::{Descriptor, SECTOR_BYTES};
use diskwright_store::{MemoryStore, Store};
use std::sync::Arc;

fn link(path: &str, cid: u32, cid2: Option<u32>) -> ParentLink {
    ParentLink {
        relative_path: Some(path.into()),
        name: Some(path.into()),
        linkage: Some(LinkageId::Cid(cid)),
        linkage2: cid2.map(LinkageId::Cid),
        ..ParentLink::default()
    }
}

fn child(subformat: &str, size_bytes: u64) -> Vec<Arc<dyn Store>> {
    let parent = Some(link(".\\base.vmdk", 0xabcd_ef01, None));
    made(&CreateOptions { disk_type: DiskType::Differencing, parent, ..options(subformat, size_bytes) })
}

fn relink(stores: &[Arc<dyn Store>], new: &ParentLink) -> String {
    let image = open(stores, true);
    let before = image.linkage_id();
    let writer = image.writer().unwrap();
    let told = writer.set_parent_link(new).map_or_else(|error| error.to_string(), |()| String::new());
    assert_eq!(image.linkage_id(), before, "a new link changes no contents");
    let now = image.parent_link().unwrap();
    writer.close().unwrap();
    assert_eq!(open(stores, false).info().parent.as_ref(), Some(&now));
    if told.is_empty() {
        assert_eq!(&now, new);
    }
    told
}

/// Each link replaces the former one: longer and shorter paths, with and without a second identity.
#[test]
fn a_link_is_replaced_in_all_kinds_of_children() {
    for (subformat, size_bytes) in [("monolithicSparse", 4 << 20), ("twoGbMaxExtentSparse", 50 << 30)] {
        let stores = child(subformat, size_bytes);
        let image = open(&stores, true);
        put(&*image, 3, 7);
        image.writer().unwrap().close().unwrap();
        drop(image);
        let extents = open(&stores, false).stores().len();
        for turn in 0..20_u32 {
            let path = format!("{}p.vmdk", "a".repeat(turn as usize * 53 % 230));
            let new = link(&path, turn + 1, (turn % 3 > 0).then_some(turn + 1000));
            assert_eq!(relink(&stores, &new), "", "{subformat}, turn {turn}");
            assert_eq!(check(&stores), [""; 0], "{subformat}");
        }
        let image = open(&stores, false);
        assert_eq!((image.stores().len(), image.size_bytes()), (extents, size_bytes));
        assert_ne!(super::writing::state(&*image, 3), crate::BlockState::Absent);
    }
}

/// QEMU looks for the first `CID` and the first `parentCID` of the text, and drops what is between.
#[test]
fn the_lines_stay_in_the_order_that_qemu_expects() {
    let stores = child("monolithicSparse", 4 << 20);
    assert_eq!(relink(&stores, &link("other.vmdk", 5, Some(6))), "");
    let text = String::from_utf8(text_of(&*stores[0], SECTOR_BYTES)).unwrap();
    let lines: Vec<&str> = text.lines().take(7).collect();
    let at = |start: &str| lines.iter().position(|line| line.starts_with(start)).unwrap();
    let places = ["CID=", "parentCID=00000005", "parentFileNameHint=\"other.vmdk\"", "#parentCID2=00000006"].map(at);
    assert_eq!(places, [2, 3, 4, 5], "{text}");
}

#[test]
fn a_path_keeps_the_spelling_that_it_has() {
    let stores = child("monolithicSparse", 4 << 20);
    let windows = r"..\base\old.vmdk";
    assert_eq!(relink(&stores, &link("base.vmdk", 5, None)), "");
    let text = text_of(&*stores[0], SECTOR_BYTES);
    let text = String::from_utf8(text).unwrap().replacen("\"base.vmdk\"", &format!("\"{windows}\""), 1);
    stores[0].write_at(&text.as_bytes()[..20 * 512], SECTOR_BYTES).unwrap();
    assert_eq!(relink(&stores, &link(windows, 7, None)), "");
    let image = open(&stores, true);
    image.writer().unwrap().set_parent_link(&link(r".\new\disk.vmdk", 7, None)).unwrap();
    assert_eq!(image.parent_link().unwrap().name.as_deref(), Some("new/disk.vmdk"));
}

/// A descriptor of VMware, with many extents: the mark of a merge fits in the place of a comment.
#[test]
fn a_descriptor_that_is_full_gets_a_short_link_and_refuses_a_long_one() {
    let mut text = "# Disk DescriptorFile\nversion=1\nencoding=\"UTF-8\"\nCID=aaaaaaaa\nparentCID=bbbbbbbb\n\
        isNativeSnapshot=\"no\"\ncreateType=\"twoGbMaxExtentSparse\"\nparentFileNameHint=\"disk.vmdk\"\n\
        # Extent description\n"
        .to_owned();
    (1..30).for_each(|number| text += &format!("RW 4192256 SPARSE \"disk-000001-s{number:03}.vmdk\"\n"));
    text += "\n# The Disk Data Base \n#DDB\n\nddb.longContentID = \"11111111111111111111111111111111\"\n";
    let extent = made(&options("monolithicSparse", 4_192_256 * 512)).remove(0);
    let mut bytes = vec![0; extent.len_bytes().unwrap() as usize];
    extent.read_at(&mut bytes, 0).unwrap();
    let head: Arc<dyn Store> = Arc::new(MemoryStore::with_bytes("d.vmdk", text.clone().into_bytes()));
    let extents = (1..30).map(|_| Arc::new(MemoryStore::with_bytes("e.vmdk", bytes.clone())) as Arc<dyn Store>);
    let stores: Vec<Arc<dyn Store>> = [head].into_iter().chain(extents).collect();
    assert_eq!(relink(&stores, &link("disk.vmdk", 1, Some(2))), "");
    let told = relink(&stores, &link("another/folder/of/the/same/host/disk.vmdk", 1, None));
    assert!(told.contains("does not fit into the first 512 bytes"), "{told}");
    assert_eq!(relink(&stores, &link("disk.vmdk", 3, None)), "");
    assert_eq!(text_of(&*stores[0], 512)[..text.len() - 512], text.as_bytes()[512..]);
}

#[test]
fn what_a_descriptor_cannot_record_is_refused_and_changes_nothing() {
    let stores = child("monolithicSparse", 4 << 20);
    let before = text_of(&*stores[0], 0);
    for (new, what) in [
        (link("a\"b.vmdk", 1, None), "cannot be written into a descriptor"),
        (link("", 1, None), "cannot be written into a descriptor"),
        (link(&"a".repeat(500), 1, None), "does not fit"),
        (ParentLink { linkage: None, ..link("a.vmdk", 1, None) }, "no CID"),
    ] {
        let told = relink(&stores, &new);
        assert!(told.contains(what), "{told}");
    }
    assert_eq!(text_of(&*stores[0], 0), before);
    let alone = made(&options("monolithicFlat", 4 << 20));
    let told = open(&alone, true).writer().unwrap().set_parent_link(&link("a.vmdk", 1, None)).unwrap_err().to_string();
    assert!(told.contains("no parent"), "{told}");
}

/// What lies behind the text must never be read as a part of it.
#[test]
fn bytes_behind_the_text_are_cleared_before_it_grows() {
    let stores = child("monolithicSparse", 4 << 20);
    let text = text_of(&*stores[0], SECTOR_BYTES);
    let end = text.iter().position(|&byte| byte == 0).unwrap() as u64;
    stores[0].write_at(&b"parentCID=dddddddd\n".repeat(20), SECTOR_BYTES + end + 1).unwrap();
    assert_eq!(relink(&stores, &link(&"a".repeat(200), 1, None)), "");
    let text = text_of(&*stores[0], SECTOR_BYTES);
    let parsed = Descriptor::parse(&text, 0).unwrap();
    assert_eq!((parsed.parent_cid, Format::Vmdk.driver().parent_link(&*stores[0]).unwrap().is_some()), (1, true));
}
