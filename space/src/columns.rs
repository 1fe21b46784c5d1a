//! Columns: slabs of a disk that follow one another lie on different members, so that a sequential
//! stream uses several at once.
//!
//! With *n* columns a new slab avoids the members of the *n - 1* slabs before it; a slab that moves
//! avoids those of its neighbours on both sides. Members that are full, or of the wrong class, are
//! no choice: then slabs are taken where there are some. A pool fills its emptiest members first,
//! so members of one size take turns without columns too.

use crate::{file_state::FileState, slab_table::Slab};
use diskwright_format::space::Copy;

fn members_of(slab: Slab) -> u64 {
    slab.copies().iter().flatten().fold(0, |mask, copy| mask | 1 << copy.member)
}

/// Members that a new slab should avoid, one bit for each. `taken` are the copies of the slabs
/// from `first` on, which are not mapped yet; the new slab follows them.
pub(crate) fn avoided_by_new(file: &FileState, first: u32, taken: &[Vec<Copy>]) -> u64 {
    let before = usize::from(file.columns.saturating_sub(1));
    let lately = taken.iter().rev().take(before).flatten().fold(0, |mask, copy| mask | 1 << copy.member);
    let mapped = before.saturating_sub(taken.len()) as u32;
    (first.saturating_sub(mapped)..first)
        .filter_map(|index| file.table.get(index))
        .fold(lately, |mask, entry| mask | members_of(entry.load()))
}

/// Members that a copy of a mapped slab should avoid.
pub(crate) fn avoided_by_moved(file: &FileState, index: u32) -> u64 {
    let reach = u32::from(file.columns.saturating_sub(1));
    (index.saturating_sub(reach)..=index.saturating_add(reach))
        .filter(|&other| other != index)
        .filter_map(|other| file.table.get(other))
        .fold(0, |mask, entry| mask | members_of(entry.load()))
}

#[cfg(test)]
mod tests {
    use crate::{
        NewFile, Tier,
        tests::{Bench, MIB, SLAB},
    };
    use diskwright_store::{FileRange, LockMode, Store};

    /// The members of each slab of a disk that is written from end to end.
    fn members(sizes: &[u64], columns: u8, slabs: u64) -> Vec<Vec<u8>> {
        let (_bench, pool) = Bench::pool(sizes, 1, SLAB);
        let new = NewFile { len_bytes: slabs * SLAB, copies: 1, columns, tier: Tier::Any };
        pool.create_file("striped", new).unwrap();
        let file = pool.open_file("striped", true, LockMode::None).unwrap();
        for slab in 0..slabs {
            file.allocate(FileRange { offset_bytes: slab * SLAB, len_bytes: SLAB }).unwrap();
        }
        let state = pool.file_named("striped").unwrap();
        let entries = state.table.mapped(0..slabs);
        entries
            .map(|(_, entry)| entry.load().copies().into_iter().flatten().map(|copy| copy.member).collect())
            .collect()
    }

    #[test]
    fn neighbours_lie_on_different_members_while_there_is_room() {
        let sizes = [16 * MIB, 8 * MIB, 8 * MIB];
        // Without columns the largest member is first.
        let plain = members(&sizes, 1, 12);
        assert!(plain.iter().all(|members| members == &[0]), "{plain:?}");
        let striped = members(&sizes, 3, 12);
        assert!(
            striped.windows(3).all(|three| three[0] != three[1] && three[1] != three[2] && three[0] != three[2]),
            "{striped:?}"
        );
        // When the small ones are full, the rest lies on the large one.
        let full = members(&[16 * MIB, 4 * MIB], 2, 40);
        assert_eq!(full.last().unwrap(), &[0]);
        assert!(full[..8].windows(2).all(|two| two[0] != two[1]), "{full:?}");
    }

    #[test]
    fn columns_need_as_many_members_and_are_kept() {
        let (bench, pool) = Bench::pool(&[8 * MIB; 4], 1, SLAB);
        let new = NewFile { len_bytes: SLAB, copies: 2, columns: 3, tier: Tier::Any };
        let error = pool.create_file("three", new).unwrap_err().to_string();
        assert!(error.contains("3 columns of 2 copies need 6 members, and the pool has 4"), "{error}");
        let error = pool.create_file("none", NewFile { columns: 0, ..new }).unwrap_err().to_string();
        assert!(error.contains("0 columns; a disk has 1 to 63"), "{error}");
        pool.create_file("two", NewFile { columns: 2, ..new }).unwrap();
        drop(pool);
        let columns = |name: &str| {
            let status = bench.open().status();
            status.disks.unwrap().iter().find(|disk| disk.name == name).map(|disk| disk.columns)
        };
        assert_eq!((columns("two"), columns("disk")), (Some(2), Some(1)));
    }
}
