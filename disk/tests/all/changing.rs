//! Chains that change while they are in use: a layer is pushed on top, a disk grows, the map is
//! smaller than the disk.
//!
//! Threads write stamped sectors and remember the last one. No acknowledged write may be lost,
//! whatever changes meanwhile.

use crate::images::new_layer;
use diskwright_disk::{Disk, Layer};
use diskwright_image::{DiskType, Format, probe};
use diskwright_store::{
    BlockDevice, Blocking, Completion, EngineKind, IoBuf, QueueOptions, Request, SharedRing, resize::SizeWatcher,
};
use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

const MIB: u64 = 1 << 20;
const SECTOR: u64 = 512;

/// Random numbers with a fixed seed.
struct Dice(u64);

impl Dice {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

/// Writes and reads at random in its own share of the disk until `stop` is set. Returns the
/// expected contents of every written sector.
fn stamp(disk: &Disk, share: std::ops::Range<u64>, seed: u64, stop: &AtomicBool, ring: bool) -> HashMap<u64, u8> {
    let shared = ring.then(|| SharedRing::new(64, None).unwrap());
    let mut queue =
        disk.open_queue(&QueueOptions { depth: 8, ring: shared.as_ref(), ..QueueOptions::default() }).unwrap();
    let mut dice = Dice(seed);
    let mut held = HashMap::new();
    let mut done: Vec<Completion> = Vec::new();
    let mut run = |request: Request| {
        queue.push(request).map_err(|error| error.reason).unwrap();
        queue.reap(1, &mut done).unwrap();
        let completion = done.pop().unwrap();
        completion.result.unwrap();
        completion.buf
    };
    let mut stamp = 0u8;
    while !stop.load(Ordering::Relaxed) {
        let count = 1 + dice.below(16);
        let sector = share.start + dice.below(share.end - share.start - count);
        let (offset_bytes, len_bytes) = (sector * SECTOR, count * SECTOR);
        match dice.below(12) {
            0..6 => {
                stamp = stamp.wrapping_add(1);
                let mut buf = IoBuf::new(len_bytes as usize);
                buf.fill(stamp);
                run(Request { fua: dice.below(16) == 0, ..Request::write(offset_bytes, len_bytes as usize, buf, 0) });
                held.extend((sector..sector + count).map(|at| (at, stamp)));
            }
            6..10 => {
                let buf =
                    run(Request::read(offset_bytes, len_bytes as usize, IoBuf::new(len_bytes as usize), 0)).unwrap();
                for at in sector..sector + count {
                    let wanted = held.get(&at).copied().unwrap_or(0);
                    let found = &buf[((at - sector) * SECTOR) as usize..][..SECTOR as usize];
                    assert!(found.iter().all(|&byte| byte == wanted), "sector {at}: {} for {wanted}", found[0]);
                }
            }
            10 => {
                run(Request::discard(offset_bytes, len_bytes, 0));
                held.extend((sector..sector + count).map(|at| (at, 0)));
            }
            _ => drop(run(Request::flush(0))),
        }
    }
    held
}

fn verify(disk: &Disk, held: &HashMap<u64, u8>) {
    let mut reader = Blocking::open(disk, EngineKind::Auto).unwrap();
    let mut found = [0; SECTOR as usize];
    for (&sector, &wanted) in held {
        reader.read(sector * SECTOR, &mut found).unwrap();
        assert!(found.iter().all(|&byte| byte == wanted), "sector {sector}: {} for {wanted}", found[0]);
    }
}

/// Runs writers on a disk while `change` changes it, and checks all contents afterwards.
fn while_in_use(disk: &Disk, sectors: u64, change: impl FnOnce(&Disk)) {
    let stop = AtomicBool::new(false);
    let half = sectors / 2;
    let held: Vec<_> = thread::scope(|scope| {
        let stampers: Vec<_> = [(0..half, 1, false), (half..sectors, 2, true)]
            .into_iter()
            .map(|(share, seed, ring)| {
                scope.spawn({
                    let stop = &stop;
                    move || stamp(disk, share, seed, stop, ring)
                })
            })
            .collect();
        change(disk);
        stop.store(true, Ordering::Relaxed);
        stampers.into_iter().map(|stamper| stamper.join().unwrap()).collect()
    });
    held.iter().for_each(|held| verify(disk, held));
}

fn pause() {
    thread::sleep(std::time::Duration::from_millis(60));
}

fn layers_join(format: Format, block_bytes: [u32; 3]) {
    let size_bytes = 16 * MIB;
    let base = new_layer("base", format, DiskType::Dynamic, size_bytes, block_bytes[0]);
    let disk = Disk::from_layers(vec![base], Vec::new()).unwrap();
    while_in_use(&disk, size_bytes / SECTOR, |disk| {
        for (name, block_bytes) in ["first", "second"].into_iter().zip(&block_bytes[1..]) {
            pause();
            let below = disk.layers();
            disk.push_layer(new_layer(name, format, DiskType::Differencing, size_bytes, *block_bytes)).unwrap();
            assert!(!below[0].image.writer().unwrap().is_dirty(), "the former top is durable");
            assert_eq!(disk.layers().len(), below.len() + 1);
        }
        pause();
    });
    disk.close().unwrap();
}

#[test]
fn vhdx_layers_are_pushed_on_top_while_the_disk_is_written() {
    layers_join(Format::Vhdx, [MIB as u32; 3]);
}

#[test]
fn layers_with_smaller_blocks_get_a_new_map() {
    layers_join(Format::Vhdx, [4 * MIB as u32, 2 * MIB as u32, MIB as u32]);
    layers_join(Format::Vhd, [1 << 20, 1 << 16, 1 << 14]);
}

#[test]
fn a_former_top_is_no_longer_written() {
    let size_bytes = 8 * MIB;
    let base = new_layer("base", Format::Vhdx, DiskType::Dynamic, size_bytes, MIB as u32);
    let below = Arc::clone(base.image.store());
    let disk = Disk::from_layers(vec![base], Vec::new()).unwrap();
    let mut writer = Blocking::open(&disk, EngineKind::Auto).unwrap();
    writer.write(0, &[1; 4096], false).unwrap();
    disk.push_layer(new_layer("top", Format::Vhdx, DiskType::Differencing, size_bytes, MIB as u32)).unwrap();
    let mut before = vec![0; below.len_bytes().unwrap() as usize];
    below.read_at(&mut before, 0).unwrap();
    writer.write(0, &[2; 512], false).unwrap();
    writer.write(MIB, &[3; 4096], true).unwrap();
    writer.discard(2 * MIB, MIB).unwrap();
    let mut after = vec![0; below.len_bytes().unwrap() as usize];
    below.read_at(&mut after, 0).unwrap();
    assert!(before == after, "the former top has changed");
    let mut found = [0; 4096];
    writer.read(0, &mut found).unwrap();
    assert!(found[..512].iter().all(|&byte| byte == 2) && found[512..].iter().all(|&byte| byte == 1));
}

#[test]
fn only_a_fitting_image_can_be_pushed_on_top() {
    let size_bytes = 8 * MIB;
    let base = new_layer("base", Format::Vhdx, DiskType::Dynamic, size_bytes, MIB as u32);
    let disk = Disk::from_layers(vec![base], Vec::new()).unwrap();
    for (disk_type, size_bytes) in [(DiskType::Dynamic, size_bytes), (DiskType::Differencing, 2 * size_bytes)] {
        let error = disk.push_layer(new_layer("top", Format::Vhdx, disk_type, size_bytes, MIB as u32)).unwrap_err();
        assert!(error.to_string().starts_with("top: cannot go on top of a disk that is open"), "{error}");
    }
    assert_eq!(disk.layers().len(), 1);
}

/// Grows a disk in steps while it is written, and checks the new range and the image afterwards.
fn grows(name: &str, layers: Vec<Layer>, sizes: [u64; 3]) {
    let store = Arc::clone(layers[0].image.store());
    let format = layers[0].image.info().format;
    let disk = Disk::from_layers(layers, Vec::new()).unwrap();
    let size_bytes = disk.geometry().size_bytes;
    let heard = Arc::new(Mutex::new(Vec::new()));
    let watcher: Arc<SizeWatcher> = {
        let heard = Arc::clone(&heard);
        Arc::new(move |size_bytes| heard.lock().unwrap().push(size_bytes))
    };
    disk.watch_size(&watcher);
    let mut early = Blocking::open(&disk, EngineKind::Auto).unwrap();
    assert!(early.write(size_bytes, &[1; 512], false).is_err(), "{name}: beyond the end");
    while_in_use(&disk, size_bytes / SECTOR, |disk| {
        let mut present_bytes = size_bytes;
        for size_bytes in sizes {
            pause();
            disk.grow(size_bytes).unwrap();
            assert_eq!(disk.geometry().size_bytes, size_bytes, "{name}");
            let mut found = [1; 512];
            for at in [present_bytes, (present_bytes + size_bytes) / 1024 * 512, size_bytes - 512] {
                early.read(at, &mut found).unwrap();
                assert_eq!(found, [0; 512], "{name} at {at}");
            }
            early.write(present_bytes, &[3; 512], false).unwrap();
            present_bytes = size_bytes;
        }
    });
    let [first, .., last] = sizes;
    early.write(last - 512, &[2; 512], false).unwrap();
    assert!(early.write(last, &[1; 512], false).is_err(), "{name}: beyond the new end");
    let error = disk.grow(first).unwrap_err().to_string();
    assert!(error.contains(&format!("of {last} bytes to {first} bytes while")), "{name}: {error}");
    assert_eq!(*heard.lock().unwrap(), sizes, "{name}: size watchers are notified");
    drop(early);
    disk.close().unwrap();
    let again = probe::open(store, Some(format), false, 512).unwrap();
    assert_eq!(again.size_bytes(), last, "{name}: opened again");
    let again = Disk::from_layers(vec![Layer { path: name.into(), image: again }], Vec::new()).unwrap();
    let mut reader = Blocking::open(&again, EngineKind::Auto).unwrap();
    let mut found = [1; 512];
    for (at, wanted) in [(size_bytes, 3), (first, 3), (last - 512, 2), (last - 1024, 0)] {
        reader.read(at, &mut found).unwrap();
        assert_eq!(found, [wanted; 512], "{name} opened again, at {at}");
    }
}

#[test]
fn a_disk_grows_while_it_is_written() {
    let size_bytes = 4 * MIB;
    let sizes = [5 * MIB, 8 * MIB, 200 * MIB];
    grows("raw", vec![new_layer("raw", Format::Raw, DiskType::Fixed, size_bytes, 0)], sizes);
}

#[test]
fn images_of_all_formats_grow_while_they_are_written() {
    for (format, disk_type, block_bytes) in [
        (Format::Vhdx, DiskType::Fixed, 1 << 20),
        (Format::Vhdx, DiskType::Dynamic, 1 << 20),
        (Format::Vhd, DiskType::Fixed, 2 << 20),
        (Format::Vhd, DiskType::Dynamic, 64 << 10),
    ] {
        // The disk ends within a block.
        let image = new_layer("image", format, disk_type, 5 * MIB - 4096, block_bytes);
        grows(&format!("{disk_type} {format}"), vec![image], [5 * MIB, 9 * MIB + 512, 40 * MIB]);
    }
}

#[test]
fn children_grow_beyond_their_parents() {
    for (format, block_bytes) in [(Format::Vhdx, 1 << 20), (Format::Vhd, 64 << 10)] {
        let size_bytes = 5 * MIB - 4096;
        let top = new_layer("top", format, DiskType::Differencing, size_bytes, block_bytes);
        let base = new_layer("base", format, DiskType::Dynamic, size_bytes, block_bytes);
        grows(&format!("differencing {format}"), vec![top, base], [5 * MIB, 9 * MIB + 512, 40 * MIB]);
    }
}

/// A BAT region of 1 MiB has entries for 128 GiB in blocks of 1 MiB. The table moves while the disk
/// is written.
#[test]
fn a_vhdx_whose_table_must_move_grows_while_it_is_written() {
    let size_bytes = 16 * MIB;
    let disk = vec![new_layer("large", Format::Vhdx, DiskType::Dynamic, size_bytes, MIB as u32)];
    grows("large", disk, [200 << 30, 400 << 30, 1 << 40]);
}

/// The parent's data beyond the end of a smaller child was never on that disk.
#[test]
fn a_child_does_not_grow_over_a_larger_parent() {
    let top = new_layer("top", Format::Vhdx, DiskType::Differencing, 4 * MIB, MIB as u32);
    let base = new_layer("base", Format::Vhdx, DiskType::Dynamic, 8 * MIB, MIB as u32);
    let disk = Disk::from_layers(vec![top, base], Vec::new()).unwrap();
    let error = disk.grow(6 * MIB).unwrap_err().to_string();
    assert!(error.contains("its parent base has 8388608 bytes"), "{error}");
    assert_eq!(disk.geometry().size_bytes, 4 * MIB);
    disk.close().unwrap();
}
