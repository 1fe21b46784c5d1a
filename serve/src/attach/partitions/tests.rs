use super::*;
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

fn read_all(disk: &[u8], sector_bytes: u32) -> Vec<Partition> {
    partitions(disk.len() as u64, sector_bytes, &mut |offset, buf: &mut [u8]| {
        let at = offset as usize;
        buf.copy_from_slice(disk.get(at..at + buf.len()).ok_or(io::ErrorKind::UnexpectedEof)?);
        Ok(())
    })
    .expect("nothing is read beyond the disk")
}

fn put_record(disk: &mut [u8], sector: usize, index: usize, kind: u8, start: u32, len: u32) {
    let at = sector * 512 + 446 + 16 * index;
    disk[at + 4] = kind;
    disk[at + 8..at + 12].copy_from_slice(&start.to_le_bytes());
    disk[at + 12..at + 16].copy_from_slice(&len.to_le_bytes());
    disk[sector * 512 + 510..sector * 512 + 512].copy_from_slice(&[0x55, 0xaa]);
}

fn put_gpt(disk: &mut [u8], sector_bytes: usize, header_sector: usize, table_sector: usize, ranges: &[(u64, u64)]) {
    let mut table = vec![0; 128 * 128];
    for (entry, (first, last)) in table.chunks_exact_mut(128).zip(ranges) {
        entry[..16].fill(7);
        entry[32..40].copy_from_slice(&first.to_le_bytes());
        entry[40..48].copy_from_slice(&last.to_le_bytes());
    }
    let mut header = vec![0; 92];
    header[..8].copy_from_slice(b"EFI PART");
    header[12..16].copy_from_slice(&92u32.to_le_bytes());
    header[24..32].copy_from_slice(&(header_sector as u64).to_le_bytes());
    header[72..80].copy_from_slice(&(table_sector as u64).to_le_bytes());
    header[80..84].copy_from_slice(&128u32.to_le_bytes());
    header[84..88].copy_from_slice(&128u32.to_le_bytes());
    header[88..92].copy_from_slice(&crc32fast::hash(&table).to_le_bytes());
    let crc = crc32fast::hash(&header);
    header[16..20].copy_from_slice(&crc.to_le_bytes());
    disk[header_sector * sector_bytes..][..92].copy_from_slice(&header);
    disk[table_sector * sector_bytes..][..table.len()].copy_from_slice(&table);
}

#[test]
fn an_mbr_with_logical_partitions() {
    let mut disk = vec![0; 4 * MIB as usize];
    put_record(&mut disk, 0, 0, 0x83, 2048, 1024);
    put_record(&mut disk, 0, 2, 0x05, 4096, 4096);
    put_record(&mut disk, 4096, 0, 0x83, 1, 99);
    put_record(&mut disk, 4096, 1, 0x05, 200, 100);
    put_record(&mut disk, 4296, 0, 0x82, 2, 50);
    let found: Vec<_> =
        read_all(&disk, 512).iter().map(|p| (p.number, p.start_bytes / 512, p.len_bytes / 512)).collect();
    assert_eq!(found, [(1, 2048, 1024), (5, 4097, 99), (6, 4298, 50)]);
}

#[test]
fn a_circular_chain_of_logical_partitions_ends() {
    let mut disk = vec![0; 4 * MIB as usize];
    put_record(&mut disk, 0, 0, 0x05, 4096, 4096);
    put_record(&mut disk, 4096, 0, 0x83, 1, 99);
    put_record(&mut disk, 4096, 1, 0x05, 0, 100);
    assert_eq!(read_all(&disk, 512).len(), 1);
}

#[test]
fn a_gpt_and_its_backup() {
    for sector_bytes in [512, 4096] {
        let mut disk = vec![0; 4 * MIB as usize];
        put_record(&mut disk, 0, 0, 0xee, 1, u32::MAX);
        let sectors = disk.len() / sector_bytes;
        let ranges = [(100, 199), (0, 0), (300, 300)];
        put_gpt(&mut disk, sector_bytes, 1, 2, &ranges);
        put_gpt(&mut disk, sector_bytes, sectors - 1, sectors - 40, &ranges);
        let unit = sector_bytes as u64;
        let expected = [
            Partition { number: 1, start_bytes: 100 * unit, len_bytes: 100 * unit },
            Partition { number: 3, start_bytes: 300 * unit, len_bytes: unit },
        ];
        assert_eq!(read_all(&disk, sector_bytes as u32), expected);
        disk[sector_bytes + 80] ^= 1;
        assert_eq!(read_all(&disk, sector_bytes as u32), expected, "from the backup table");
        let at = disk.len() - sector_bytes + 80;
        disk[at] ^= 1;
        assert_eq!(read_all(&disk, sector_bytes as u32), [], "both tables are damaged");
    }
}

#[test]
fn sectors_that_are_not_a_partition_table() {
    assert_eq!(read_all(&[0; 2 * 512], 512), []);
    assert_eq!(read_all(&[0; 512], 512), []);
    // A FAT file system on the whole disk has the same signature at the end of its first sector.
    let mut disk = vec![0; MIB as usize];
    put_record(&mut disk, 0, 0, 0x83, 8, 8);
    assert_eq!(read_all(&disk, 512).len(), 1);
    disk[0x36..0x3b].copy_from_slice(b"FAT16");
    assert_eq!(read_all(&disk, 512), []);
    // Boot code in place of a partition's boot flag.
    disk[0x36..0x3b].fill(0);
    disk[446] = 0x33;
    assert_eq!(read_all(&disk, 512), []);
}

#[test]
fn partitions_lie_on_the_disk() {
    let mut disk = vec![0; MIB as usize];
    put_record(&mut disk, 0, 0, 0x83, 2047, 2);
    put_record(&mut disk, 0, 1, 0x83, 0, 2);
    put_record(&mut disk, 0, 2, 0x83, u32::MAX, u32::MAX);
    put_record(&mut disk, 0, 3, 0x83, 2047, 1);
    assert_eq!(read_all(&disk, 512), [Partition { number: 4, start_bytes: 2047 * 512, len_bytes: 512 }]);
}

proptest! {
    #[test]
    fn random_tables_give_only_valid_partitions(
        start in prop::collection::vec(any::<u8>(), 2048),
        kinds in prop::collection::vec(prop::sample::select(vec![0u8, 5, 0x83, 0xee]), 4),
    ) {
        let mut disk = start;
        disk.resize(64 << 10, 0);
        for (index, kind) in kinds.into_iter().enumerate() {
            disk[446 + 16 * index] = 0;
            disk[446 + 16 * index + 4] = kind;
        }
        disk[510..512].copy_from_slice(&[0x55, 0xaa]);
        disk[512..520].copy_from_slice(b"EFI PART");
        for partition in read_all(&disk, 512) {
            prop_assert!(partition.start_bytes > 0 && partition.len_bytes > 0);
            prop_assert!(partition.start_bytes + partition.len_bytes <= disk.len() as u64);
        }
    }
}
