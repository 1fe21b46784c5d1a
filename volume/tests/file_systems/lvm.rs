//! LVM2, made by its own tools without the kernel's help.

use crate::lab::{MIB, Scratch, damage_each_byte, free_of, have};
use diskwright_volume::{Layout, Place, ReasonKind, ends};

const TOOLS: [&str; 6] = ["losetup", "pvcreate", "vgcreate", "lvcreate", "lvextend", "mke2fs"];

/// A loop device until it is dropped.
struct Loop<'a> {
    scratch: &'a Scratch,
    device: String,
}

impl<'a> Loop<'a> {
    fn new(scratch: &'a Scratch) -> Option<Self> {
        let (status, device) = scratch.try_run("losetup -f --show IMAGE");
        (status == Some(0)).then(|| Self { scratch, device: device.trim().to_owned() })
    }
}

impl Drop for Loop<'_> {
    fn drop(&mut self) {
        self.scratch.run(&format!("losetup -d {}", self.device));
    }
}

/// A physical volume whose logical volume "root" is in two pieces, the second before the first.
fn make(test: &str) -> Option<Scratch> {
    if !have(test, &TOOLS) {
        return None;
    }
    let scratch = Scratch::new(200 * MIB);
    let Some(device) = Loop::new(&scratch) else {
        println!("skipped: {test}: no loop device");
        return None;
    };
    // Only this device, no kernel, no udev.
    let common =
        format!("--devices {} --driverloaded n --config 'activation{{udev_sync=0 udev_rules=0}}'", device.device);
    let group = format!("test{}", std::process::id());
    let (status, text) = scratch.try_run(&format!("pvcreate -q --devices {0} {0}", device.device));
    if status != Some(0) {
        println!("skipped: {test}: {text}");
        return None;
    }
    scratch.run(&format!("vgcreate -q {common} {group} {}", device.device));
    for (name, size) in [("first", "-L 40M"), ("root", "-L 60M"), ("rest", "-l 100%FREE")] {
        scratch.run(&format!("lvcreate -q {common} -an -Zn -Wn -n {name} {size} {group}"));
    }
    scratch.run(&format!("lvremove -q -f {common} {group}/first"));
    scratch.run(&format!("lvextend -q {common} -L 92M {group}/root"));
    drop(device);
    Some(scratch)
}

fn root(layout: &Layout) -> &diskwright_volume::Volume {
    let is_root = |place: &Place| matches!(place, Place::Logical { name, .. } if name == "root");
    layout.volumes.iter().find(|volume| is_root(&volume.place)).unwrap()
}

#[test]
fn a_linear_volume_in_two_pieces_is_seen_through() {
    let Some(scratch) = make("a_linear_volume_in_two_pieces_is_seen_through") else { return };
    let layout = scratch.layout();
    assert_eq!(layout.volumes[0].contents, Some("LVM2 physical volume"));
    assert_eq!(layout.volumes[0].free_bytes, Ok(0));
    let extents = root(&layout).extents.clone();
    assert_eq!(extents.len(), 2);
    assert!(extents[1].disk_offset_bytes < extents[0].disk_offset_bytes, "{extents:?}");
    assert_eq!(root(&layout).free_bytes.clone().unwrap_err().why, ReasonKind::Unknown);

    // An ext4 in it, in the order of the volume.
    let inner = Scratch::new(92 * MIB);
    let folder = inner.files("files", 40);
    inner.run(&format!("mke2fs -q -F -t ext4 -L inside -d {} IMAGE", folder.display()));
    let copy = |from: &Scratch, from_bytes: u64, to: &Scratch, to_bytes: u64, len: u64| {
        to.put(to_bytes, &from.get(from_bytes, len as usize));
    };
    extents
        .iter()
        .for_each(|one| copy(&inner, one.volume_offset_bytes, &scratch, one.disk_offset_bytes, one.len_bytes));
    let layout = scratch.layout();
    let volume = root(&layout);
    assert!(volume.name().ends_with("/root: ext4 'inside'"), "{}", volume.name());
    let free = free_of(&scratch.disk(), volume).unwrap();
    let expected = free_of(&inner.disk(), &inner.layout().volumes[0]).unwrap();
    let sum = |ranges: &[std::ops::Range<u64>]| ranges.iter().map(|range| range.end - range.start).sum::<u64>();
    assert_eq!(sum(&free), sum(&expected));
    assert!(free.iter().all(|range| {
        extents
            .iter()
            .any(|one| one.disk_offset_bytes <= range.start && range.end <= one.disk_offset_bytes + one.len_bytes)
    }));
    scratch.spoil_ranges(&free);
    extents
        .iter()
        .for_each(|one| copy(&scratch, one.disk_offset_bytes, &inner, one.volume_offset_bytes, one.len_bytes));
    inner.run("e2fsck -fn IMAGE");
}

#[test]
fn no_damaged_byte_of_lvm_moves_a_volume() {
    let Some(scratch) = make("no_damaged_byte_of_lvm_moves_a_volume") else { return };
    let layout = scratch.layout();
    let start = root(&layout).extents[0].disk_offset_bytes;
    let inner = Scratch::new(92 * MIB);
    inner.run("mke2fs -q -F -t ext4 -b 4096 -O ^has_journal -N 16 IMAGE");
    scratch.put(start, &inner.get(0, 60 << 20));
    let free = free_of(&scratch.disk(), root(&scratch.layout())).unwrap();
    // The newest text is the one that the area's header names, behind the older ones.
    let header = scratch.get(4096, 512);
    let text = 4096 + u64::from_le_bytes(header[40..48].try_into().unwrap()) as usize;
    let refused = damage_each_byte(scratch.bytes(), &[512..512 + 140, 4096..4096 + 64, text..text + 60], &free, true);
    assert!(refused > 500, "{refused}");
}

/// LVM wants all of the size that it gave the physical volume.
#[test]
fn a_physical_volume_ends_where_lvm_says() {
    let test = "a_physical_volume_ends_where_lvm_says";
    if !have(test, &TOOLS) {
        return;
    }
    let scratch = Scratch::new(96 * MIB);
    let Some(device) = Loop::new(&scratch) else {
        println!("skipped: {test}: no loop device");
        return;
    };
    let size = "--setphysicalvolumesize 64m -y";
    let (status, text) = scratch.try_run(&format!("pvcreate -q {size} --devices {0} {0}", device.device));
    if status != Some(0) {
        println!("skipped: {test}: {text}");
        return;
    }
    let common =
        format!("--devices {} --driverloaded n --config 'activation{{udev_sync=0 udev_rules=0}}'", device.device);
    scratch.run(&format!("vgcreate -q {common} size{} {}", std::process::id(), device.device));
    drop(device);
    let found = ends(&scratch.disk());
    assert_eq!(found.min_bytes, Ok(64 * MIB), "{found:?}");
    assert!(found.refusal(64 * MIB - 512).unwrap().to_string().contains("LVM"), "{found:?}");
}
