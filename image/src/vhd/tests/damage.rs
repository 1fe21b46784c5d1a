//! An invalid BAT entry damages its own block and no other.

use super::*;
use crate::ImageError;

const BLOCK: u64 = 8192;

/// A disk of 16 blocks with data in blocks 0 and 2, whose entry of block 1 is `entry`.
fn damaged(disk_type: DiskType, entry: u32) -> Arc<SparseStore> {
    let store = created(disk_type, 16 * BLOCK, BLOCK as u32);
    let disk = TestDisk::open(store.clone(), true, vec![9; 16 * BLOCK as usize]);
    disk.write(0, &[1; 512]);
    disk.write(2 * BLOCK, &[2; BLOCK as usize]);
    disk.close();
    store.write_at(&entry.to_be_bytes(), header(&store).table_offset + 4).unwrap();
    store
}

#[test]
fn one_invalid_entry_damages_one_block() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        for (entry, found) in [(1 << 30, "a block that ends at offset"), (1, "a block at offset 512")] {
            for writable in [false, true] {
                let store = damaged(disk_type, entry);
                let place = header(&store).table_offset + 4;
                let disk = TestDisk::open(store, writable, vec![9; 16 * BLOCK as usize]);
                let mut states = [BlockState::Absent; 16];
                disk.image.block_states(0, &mut states).unwrap();
                let wrong: Vec<usize> = (0..16).filter(|&block| states[block] == BlockState::Damaged).collect();
                assert_eq!(wrong, [1], "{disk_type} {entry}");
                assert_eq!(disk.read(0, 512), [1; 512]);
                assert_eq!(disk.read(2 * BLOCK, 512), [2; 512]);
                let told = disk.image.damage(1).unwrap();
                assert!(
                    matches!(&told, ImageError::Corrupt { offset_bytes, found: what, .. }
                        if *offset_bytes == place && what.starts_with(found)),
                    "{told}"
                );
                assert!(disk.image.damage(2).is_err(), "an intact block has no damage to explain");
            }
        }
    }
}

#[test]
fn with_a_damaged_entry_blocks_can_be_overwritten_but_not_allocated() {
    for disk_type in [DiskType::Dynamic, DiskType::Differencing] {
        let store = damaged(disk_type, 1 << 30);
        let disk = TestDisk::open(store.clone(), true, vec![9; 16 * BLOCK as usize]);
        let writer = disk.image.writer().unwrap();
        disk.write(1024, &[5; 512]);
        disk.write(2 * BLOCK + 512, &[6; 512]);
        assert!(matches!(writer.reserve_waiting(7), Err(ImageError::Corrupt { .. })), "a new block");
        assert!(
            writer.reserve_waiting(1).is_err() && writer.commit_waiting(1, Commit::Whole).is_err(),
            "the damaged block"
        );
        writer.flush().unwrap();
        disk.close();
        let again = TestDisk::open(store, false, vec![9; 16 * BLOCK as usize]);
        let found = [0, 1024, 2 * BLOCK, 2 * BLOCK + 512].map(|at| again.read(at, 512)[0]);
        assert_eq!(found, [1, 5, 2, 6]);
        assert_eq!(again.state(1), BlockState::Damaged);
    }
}
