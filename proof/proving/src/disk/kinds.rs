//! The kinds of disks that are tested.

use super::{Backing, ByQemu, Changes, Damage, DiskCase, Front};
use crate::{contents::SECTOR_BYTES, ledger::Window};
use diskwright_image::{DiskType, Format};

/// All kinds of disks that are tested with power cuts.
pub fn all() -> Vec<DiskCase> {
    let kind = |name, format, disk_type, block_bytes: u32, size_bytes: u64, blocks: &[u64]| {
        let has_blocks = block_bytes > 0;
        let unit = if has_blocks { u64::from(block_bytes) } else { 64 << 10 };
        let window = |&block: &u64| {
            let first = block * unit / SECTOR_BYTES;
            Window { first, count: (unit / SECTOR_BYTES).min(size_bytes / SECTOR_BYTES - first) }
        };
        DiskCase {
            name,
            format,
            disk_type,
            block_bytes: has_blocks.then_some(block_bytes),
            subformat: None,
            sector_bytes: 512,
            size_bytes,
            windows: blocks.iter().map(window).collect(),
            libvhdi_safe: false,
            churns: false,
            damage: None,
            backing: Backing::File,
            changes: Changes::None,
            sweeps: false,
            front: Front::Queue,
            steps: 24,
            broken_rule: None,
        }
    };
    let cowd = |name, disk_type, size_bytes, windows: &[u64]| DiskCase {
        subformat: Some("vmfsSparse"),
        windows: windows_at(windows, 16),
        ..kind(name, Format::Vmdk, disk_type, 512, size_bytes, &[])
    };
    let (kib, mib, gib) = (1_u32 << 10, 1_u32 << 20, 1_u64 << 30);
    let m = u64::from(mib);
    vec![
        kind("raw", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31]),
        DiskCase {
            damage: Some(Damage::PartialSector),
            ..kind("raw, ending in a sector", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 31])
        },
        kind("vhd fixed", Format::Vhd, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31]),
        // The table has several sectors.
        kind("vhd dynamic 16K", Format::Vhd, DiskType::Dynamic, 16 * kib, 8 * m, &[0, 1, 2, 127, 128, 300, 301, 511]),
        DiskCase {
            churns: true,
            ..kind("vhd dynamic 16K, churning", Format::Vhd, DiskType::Dynamic, 16 * kib, 4 * m, &[0, 1, 2, 3, 200])
        },
        kind("vhd dynamic 512K", Format::Vhd, DiskType::Dynamic, 512 * kib, 64 * m + 512, &[0, 1, 3, 128]),
        kind("vhd dynamic 2M", Format::Vhd, DiskType::Dynamic, 2 * mib, 32 * m, &[0, 2, 15]),
        DiskCase {
            damage: Some(Damage::FooterCopy),
            ..kind(
                "vhd dynamic 16K, copy of footer lost",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 130, 255],
            )
        },
        kind(
            "vhd differencing 16K",
            Format::Vhd,
            DiskType::Differencing,
            16 * kib,
            8 * m,
            &[0, 1, 2, 127, 128, 300, 511],
        ),
        kind("vhd differencing 2M", Format::Vhd, DiskType::Differencing, 2 * mib, 16 * m, &[0, 1, 7]),
        DiskCase {
            libvhdi_safe: true,
            ..kind(
                "vhd differencing 512K, for libvhdi",
                Format::Vhd,
                DiskType::Differencing,
                512 * kib,
                8 * m,
                &[0, 1, 2, 15],
            )
        },
        kind("vhdx fixed 1M", Format::Vhdx, DiskType::Fixed, mib, 4 * m, &[0, 1, 3]),
        kind("vhdx dynamic 1M", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 30, 63]),
        DiskCase {
            churns: true,
            ..kind("vhdx dynamic 1M, churning", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 3, 40])
        },
        // The table has more than a page, so pages can be lost independently.
        kind("vhdx dynamic 1M, 2 GiB", Format::Vhdx, DiskType::Dynamic, mib, 2 * gib, &[0, 1, 600, 1500, 2047]),
        DiskCase {
            sector_bytes: 4096,
            ..kind("vhdx dynamic 2M, 4K sectors", Format::Vhdx, DiskType::Dynamic, 2 * mib, 32 * m, &[0, 1, 15])
        },
        kind("vhdx dynamic 32M", Format::Vhdx, DiskType::Dynamic, 32 * mib, gib, &[]),
        // Three chunks, so that the entries of a block and of its bitmap are in different pages.
        kind("vhdx differencing 1M", Format::Vhdx, DiskType::Differencing, mib, 10 * gib, &[0, 1, 4095, 4096, 9000]),
        DiskCase {
            churns: true,
            ..kind(
                "vhdx differencing 1M, churning",
                Format::Vhdx,
                DiskType::Differencing,
                mib,
                64 * m,
                &[0, 1, 2, 3, 40],
            )
        },
        DiskCase {
            sector_bytes: 4096,
            ..kind(
                "vhdx differencing 2M, 4K sectors",
                Format::Vhdx,
                DiskType::Differencing,
                2 * mib,
                32 * m,
                &[0, 1, 15],
            )
        },
        DiskCase {
            libvhdi_safe: true,
            ..kind("vhdx differencing 1M, for libvhdi", Format::Vhdx, DiskType::Differencing, mib, 8 * m, &[0, 1, 7])
        },
        kind("vmdk flat", Format::Vmdk, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31]),
        // Two grain tables.
        kind("vmdk sparse 8K", Format::Vmdk, DiskType::Dynamic, 8 * kib, 8 * m, &[0, 1, 2, 127, 128, 511, 512, 1023]),
        DiskCase {
            churns: true,
            ..kind("vmdk sparse 8K, churning", Format::Vmdk, DiskType::Dynamic, 8 * kib, 8 * m, &[0, 1, 2, 3, 512])
        },
        kind("vmdk child 64K", Format::Vmdk, DiskType::Differencing, 64 * kib, 64 * m, &[0, 1, 2, 511, 512, 1023]),
        // A cluster of metadata has 64 L2 entries, 256 refcounts.
        kind("qcow2 512", Format::Qcow2, DiskType::Dynamic, 512, 2 * m, &[0, 1, 2, 63, 64, 600, 1000, 2047]),
        kind("qcow2 64K", Format::Qcow2, DiskType::Dynamic, 64 * kib, 64 * m, &[0, 1, 2, 511, 512, 1023]),
        DiskCase {
            churns: true,
            ..kind("qcow2 4K, churning", Format::Qcow2, DiskType::Dynamic, 4 * kib, 8 * m, &[0, 1, 2, 3, 512])
        },
        kind("qcow2 child 8K", Format::Qcow2, DiskType::Differencing, 8 * kib, 32 * m, &[0, 1, 2, 1023, 1024, 4095]),
        kind("vdi fixed 1M", Format::Vdi, DiskType::Fixed, mib, 4 * m, &[0, 1, 3]),
        DiskCase {
            churns: true,
            ..kind("vdi dynamic 1M, churning", Format::Vdi, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 3, 40])
        },
        // Two pages of the block map.
        kind("vdi dynamic 8K", Format::Vdi, DiskType::Dynamic, 8 * kib, 16 * m, &[0, 1, 2, 127, 128, 1023, 1024, 2047]),
        DiskCase {
            churns: true,
            ..kind("vdi dynamic 8K, churning", Format::Vdi, DiskType::Dynamic, 8 * kib, 16 * m, &[0, 1, 2, 3, 1024])
        },
        kind("vdi child 64K", Format::Vdi, DiskType::Differencing, 64 * kib, 128 * m, &[0, 1, 2, 1023, 1024, 2047]),
        served(kind("raw, over NBD", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31])),
        served(kind(
            "vhd differencing 16K, over NBD",
            Format::Vhd,
            DiskType::Differencing,
            16 * kib,
            8 * m,
            &[0, 1, 2, 128, 511],
        )),
        served(kind("vhdx dynamic 1M, over NBD", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 30, 63])),
        served(kind("vhdx differencing 1M, over NBD", Format::Vhdx, DiskType::Differencing, mib, 64 * m, &[0, 1, 40])),
        target(kind("raw, over NVMe", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31])),
        target(kind("vhdx dynamic 1M, over NVMe", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 30, 63])),
        target(kind("vhdx differencing 1M, over NVMe", Format::Vhdx, DiskType::Differencing, mib, 64 * m, &[0, 1, 40])),
        unit(kind("raw, over iSCSI", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31])),
        unit(kind("vhdx dynamic 1M, over iSCSI", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 2, 30, 63])),
        unit(kind("vhdx differencing 1M, over iSCSI", Format::Vhdx, DiskType::Differencing, mib, 64 * m, &[0, 1, 40])),
        virtual_disk(kind("raw, over vhost-user", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31])),
        virtual_disk(kind(
            "vhd differencing 16K, over vhost-user",
            Format::Vhd,
            DiskType::Differencing,
            16 * kib,
            8 * m,
            &[0, 1, 2, 128, 511],
        )),
        virtual_disk(kind(
            "vhdx dynamic 1M, over vhost-user",
            Format::Vhdx,
            DiskType::Dynamic,
            mib,
            64 * m,
            &[0, 1, 2, 30, 63],
        )),
        virtual_disk(kind(
            "vhdx differencing 1M, over vhost-user",
            Format::Vhdx,
            DiskType::Differencing,
            mib,
            64 * m,
            &[0, 1, 40],
        )),
        // Each window lies in two files, so that a write has a part in both.
        DiskCase {
            backing: Backing::Parts(&[640 << 10, 192 << 10, 1216 << 10]),
            windows: [0, 1280 - 64, 1664 - 64, 4096 - 128].map(|first| Window { first, count: 128 }).into(),
            ..kind("raw in three parts", Format::Raw, DiskType::Fixed, 0, 2 * m, &[])
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 256 << 10 },
            ..kind("raw, growing", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 3, 5, 12, 31])
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 256 << 10 },
            ..kind(
                "vhd dynamic 16K, growing",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                2 * m,
                &[0, 1, 15, 16, 40, 127],
            )
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 512 << 10 },
            windows: windows_of_64k(&[0, 7, 8, 15, 16, 40, 63]),
            ..kind("vhdx dynamic 1M, growing", Format::Vhdx, DiskType::Dynamic, mib, 4 * m, &[])
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 256 << 10 },
            ..kind("vmdk flat, growing", Format::Vmdk, DiskType::Fixed, 0, 2 * m, &[0, 1, 3, 5, 12, 31])
        },
        // The 129th grain table does not fit into the first sector of the directories.
        DiskCase {
            changes: Changes::Grows { from_bytes: (512 << 20) - (256 << 10) },
            ..kind(
                "vmdk sparse 8K, growing",
                Format::Vmdk,
                DiskType::Dynamic,
                8 * kib,
                514 * m,
                &[0, 1, 65_502, 65_504, 65_535, 65_536, 65_640, 65_780],
            )
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 256 << 10 },
            ..kind(
                "vdi dynamic 16K, growing",
                Format::Vdi,
                DiskType::Dynamic,
                16 * kib,
                2 * m,
                &[0, 1, 15, 16, 40, 127],
            )
        },
        DiskCase {
            changes: Changes::Snapshots,
            ..kind(
                "vdi dynamic 16K, with snapshots",
                Format::Vdi,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind(
                "vdi child 16K, compacted in use",
                Format::Vdi,
                DiskType::Differencing,
                16 * kib,
                4 * m,
                &[0, 1, 2, 255],
            )
        },
        DiskCase {
            changes: Changes::Relinks,
            ..kind(
                "vdi child 16K, relinked",
                Format::Vdi,
                DiskType::Differencing,
                16 * kib,
                4 * m,
                &[0, 1, 127, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::Snapshots,
            ..kind(
                "vhd dynamic 16K, with snapshots",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 2, 127, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::Snapshots,
            ..kind("vhdx dynamic 1M, with snapshots", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 40])
        },
        DiskCase {
            changes: Changes::FrozenInUse,
            ..kind("vhd dynamic 16K, frozen in use", Format::Vhd, DiskType::Dynamic, 16 * kib, 4 * m, &[0, 1, 128, 255])
        },
        DiskCase {
            changes: Changes::FrozenInUse,
            ..kind("vhdx dynamic 1M, frozen in use", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 40])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind(
                "vhd dynamic 16K, compacted in use",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 2, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            ..kind(
                "vhd differencing 16K, compacted in use",
                Format::Vhd,
                DiskType::Differencing,
                16 * kib,
                4 * m,
                &[0, 1, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind("vhdx dynamic 1M, compacted in use", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 40])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind(
                "vhdx differencing 1M, compacted in use",
                Format::Vhdx,
                DiskType::Differencing,
                mib,
                64 * m,
                &[0, 1, 40],
            )
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind(
                "vhd dynamic 16K, absorbed in use",
                Format::Vhd,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind("vhdx dynamic 1M, absorbed in use", Format::Vhdx, DiskType::Dynamic, mib, 64 * m, &[0, 1, 40])
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind(
                "vmdk sparse 8K, absorbed in use",
                Format::Vmdk,
                DiskType::Dynamic,
                8 * kib,
                4 * m,
                &[0, 1, 256, 511],
            )
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind(
                "vmdk child 64K, absorbed in use",
                Format::Vmdk,
                DiskType::Differencing,
                64 * kib,
                40 * m,
                &[0, 1, 511, 512],
            )
        },
        DiskCase {
            changes: Changes::MergedInUse,
            steps: 40,
            ..kind(
                "vmdk child 64K, merged in use",
                Format::Vmdk,
                DiskType::Differencing,
                64 * kib,
                40 * m,
                &[0, 1, 511],
            )
        },
        DiskCase {
            changes: Changes::MergedInUse,
            steps: 40,
            ..kind("vhd dynamic 16K, merged in use", Format::Vhd, DiskType::Dynamic, 16 * kib, 4 * m, &[0, 1, 128, 255])
        },
        DiskCase {
            changes: Changes::MergedInUse,
            steps: 40,
            ..kind(
                "vhdx differencing 1M, merged in use",
                Format::Vhdx,
                DiskType::Differencing,
                mib,
                64 * m,
                &[0, 1, 40],
            )
        },
        DiskCase {
            changes: Changes::Relinks,
            ..kind(
                "vhd differencing 16K, relinked",
                Format::Vhd,
                DiskType::Differencing,
                16 * kib,
                4 * m,
                &[0, 1, 2, 127, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::Relinks,
            ..kind("vhdx differencing 1M, relinked", Format::Vhdx, DiskType::Differencing, mib, 64 * m, &[0, 1, 40])
        },
        DiskCase {
            changes: Changes::Grows { from_bytes: 256 << 10 },
            ..kind("qcow2 512, growing", Format::Qcow2, DiskType::Dynamic, 512, 4 * m, &[0, 1, 63, 64, 600, 4000, 8191])
        },
        DiskCase {
            changes: Changes::Snapshots,
            ..kind("qcow2 4K, with snapshots", Format::Qcow2, DiskType::Dynamic, 4 * kib, 4 * m, &[0, 1, 2, 511, 512])
        },
        DiskCase {
            changes: Changes::FrozenInUse,
            ..kind("qcow2 4K, frozen in use", Format::Qcow2, DiskType::Dynamic, 4 * kib, 4 * m, &[0, 1, 511, 512])
        },
        DiskCase {
            changes: Changes::FrozenInUse,
            ..kind("vmdk sparse 8K, frozen in use", Format::Vmdk, DiskType::Dynamic, 8 * kib, 4 * m, &[0, 1, 128, 255])
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind("qcow2 4K, absorbed in use", Format::Qcow2, DiskType::Dynamic, 4 * kib, 4 * m, &[0, 1, 511, 512])
        },
        DiskCase {
            changes: Changes::MergedInUse,
            steps: 40,
            ..kind("qcow2 4K, merged in use", Format::Qcow2, DiskType::Dynamic, 4 * kib, 4 * m, &[0, 1, 511, 512])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind("qcow2 4K, compacted in use", Format::Qcow2, DiskType::Dynamic, 4 * kib, 4 * m, &[0, 1, 2, 511, 512])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            ..kind(
                "qcow2 child 8K, compacted in use",
                Format::Qcow2,
                DiskType::Differencing,
                8 * kib,
                4 * m,
                &[0, 1, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::Relinks,
            ..kind(
                "vmdk child 64K, relinked",
                Format::Vmdk,
                DiskType::Differencing,
                64 * kib,
                64 * m,
                &[0, 1, 511, 512],
            )
        },
        DiskCase {
            backing: Backing::Packed,
            ..kind(
                "packed 16K, over a parent",
                Format::Raw,
                DiskType::Dynamic,
                16 * kib,
                8 * m,
                &[0, 1, 2, 3, 64, 65, 511],
            )
        },
        // Each window begins in an L2 table that a snapshot has too.
        DiskCase {
            backing: Backing::ByQemu(ByQemu::Snapshot),
            ..kind(
                "qcow2 4K, with an internal snapshot",
                Format::Qcow2,
                DiskType::Dynamic,
                4 * kib,
                8 * m,
                &[0, 1, 2, 3, 511, 512, 513, 1024],
            )
        },
        DiskCase {
            backing: Backing::ByQemu(ByQemu::Snapshot),
            churns: true,
            ..kind(
                "qcow2 16K, with an internal snapshot, churning",
                Format::Qcow2,
                DiskType::Dynamic,
                16 * kib,
                8 * m,
                &[0, 1, 2, 3],
            )
        },
        // Subclusters of 512 bytes, and L2 tables of 1,024 clusters.
        DiskCase {
            backing: Backing::ByQemu(ByQemu::Subclusters),
            ..kind(
                "qcow2 16K, with subclusters",
                Format::Qcow2,
                DiskType::Dynamic,
                16 * kib,
                32 * m,
                &[0, 1, 2, 3, 1023, 1024, 2047],
            )
        },
        DiskCase {
            backing: Backing::ByQemu(ByQemu::Subclusters),
            churns: true,
            ..kind(
                "qcow2 64K, with subclusters, churning",
                Format::Qcow2,
                DiskType::Dynamic,
                64 * kib,
                8 * m,
                &[0, 1, 2, 3],
            )
        },
        DiskCase {
            backing: Backing::ByQemu(ByQemu::DataFile),
            ..kind(
                "qcow2 4K, with a data file",
                Format::Qcow2,
                DiskType::Dynamic,
                4 * kib,
                8 * m,
                &[0, 1, 2, 3, 511, 512, 513, 1024],
            )
        },
        // More blocks than are zeroed without releasing the lock.
        DiskCase {
            sweeps: true,
            ..kind(
                "vhd dynamic 4K, swept",
                Format::Vhd,
                DiskType::Dynamic,
                4 * kib,
                2100 * 4096,
                &[0, 1, 1023, 1024, 1025, 2048, 2099],
            )
        },
        late(kind("raw, late", Format::Raw, DiskType::Fixed, 0, 2 * m, &[0, 1, 17, 31])),
        late(kind("vhd dynamic 16K, late", Format::Vhd, DiskType::Dynamic, 16 * kib, 8 * m, &[0, 1, 2, 128, 511])),
        late(kind("vhdx differencing 1M, late", Format::Vhdx, DiskType::Differencing, mib, 64 * m, &[0, 1, 40])),
        // Grains of a sector, and the ends of two tables.
        cowd("vmdk cowd 512", DiskType::Dynamic, 4 * m, &[0, 48, 4080, 8176]),
        DiskCase { churns: true, ..cowd("vmdk cowd 512, churning", DiskType::Dynamic, 4 * m, &[0, 16, 4080]) },
        cowd("vmdk cowd child 512", DiskType::Differencing, 4 * m, &[0, 48, 4080, 8176]),
        // The 129th grain table does not fit into the first sector of the directory.
        DiskCase {
            changes: Changes::Grows { from_bytes: (256 << 20) - (128 << 10) },
            ..cowd(
                "vmdk cowd 512, growing",
                DiskType::Dynamic,
                258 * m,
                &[0, 523_888, 524_016, 524_272, 524_288, 528_368],
            )
        },
        // The descriptor, and two extents, of which one window has both.
        DiskCase {
            subformat: Some("twoGbMaxExtentSparse"),
            windows: windows_at(&[0, 4_192_128, 4_192_192, 4_192_256, 4_194_240], 64),
            ..kind("vmdk in two extents 64K", Format::Vmdk, DiskType::Dynamic, 64 * kib, 2 * gib, &[])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind("vmdk sparse 8K, compacted in use", Format::Vmdk, DiskType::Dynamic, 8 * kib, 4 * m, &[0, 1, 2, 511])
        },
        DiskCase {
            changes: Changes::CompactedInUse,
            churns: true,
            ..cowd("vmdk cowd child 512, compacted in use", DiskType::Differencing, 4 * m, &[0, 16, 4080])
        },
        DiskCase {
            changes: Changes::Snapshots,
            ..kind("vmdk sparse 8K, with snapshots", Format::Vmdk, DiskType::Dynamic, 8 * kib, 4 * m, &[0, 1, 511])
        },
        DiskCase {
            changes: Changes::FrozenInUse,
            ..kind("vdi dynamic 16K, frozen in use", Format::Vdi, DiskType::Dynamic, 16 * kib, 4 * m, &[0, 1, 128, 255])
        },
        DiskCase {
            changes: Changes::AbsorbedInUse,
            ..kind(
                "vdi dynamic 16K, absorbed in use",
                Format::Vdi,
                DiskType::Dynamic,
                16 * kib,
                4 * m,
                &[0, 1, 128, 255],
            )
        },
        DiskCase {
            changes: Changes::MergedInUse,
            steps: 40,
            ..kind("vdi dynamic 16K, merged in use", Format::Vdi, DiskType::Dynamic, 16 * kib, 4 * m, &[0, 1, 128, 255])
        },
        // The room for the block map ends at 1 GiB. Then a longer map takes the first blocks'
        // place, and the next one the place before.
        DiskCase {
            changes: Changes::Grows { from_bytes: gib - (256 << 10) },
            windows: windows_at(&[0, 40, 2048, 2_096_600, 2_097_136, 2_105_344, 2_129_904], 16),
            ..kind("vdi dynamic 4K, growing", Format::Vdi, DiskType::Dynamic, 4 * kib, gib + 16 * m, &[])
        },
        DiskCase {
            backing: Backing::ByQemu(ByQemu::Subclusters),
            changes: Changes::CompactedInUse,
            churns: true,
            ..kind(
                "qcow2 64K, with subclusters, compacted in use",
                Format::Qcow2,
                DiskType::Dynamic,
                64 * kib,
                8 * m,
                &[0, 1, 2, 40],
            )
        },
        served(kind("vmdk child 64K, over NBD", Format::Vmdk, DiskType::Differencing, 64 * kib, 64 * m, &[0, 1, 512])),
        served(kind("qcow2 child 8K, over NBD", Format::Qcow2, DiskType::Differencing, 8 * kib, 32 * m, &[0, 1, 1024])),
        served(kind("vdi child 64K, over NBD", Format::Vdi, DiskType::Differencing, 64 * kib, 128 * m, &[0, 1, 1024])),
        late(kind("vmdk child 64K, late", Format::Vmdk, DiskType::Differencing, 64 * kib, 64 * m, &[0, 1, 512])),
        late(kind("qcow2 child 8K, late", Format::Qcow2, DiskType::Differencing, 8 * kib, 32 * m, &[0, 1, 1024])),
        late(kind("vdi child 64K, late", Format::Vdi, DiskType::Differencing, 64 * kib, 128 * m, &[0, 1, 1024])),
    ]
    .into_iter()
    .map(|case| {
        // The blocks are so large that only their edges are watched.
        if case.windows.is_empty() {
            let windows = [0, 65_536 - 64, 65_536, 65_536 * 5].map(|first| Window { first, count: 128 });
            return DiskCase { windows: windows.into(), ..case };
        }
        case
    })
    .collect()
}

/// The same case behind an NBD server.
fn served(case: DiskCase) -> DiskCase {
    DiskCase { front: Front::Nbd, ..case }
}

/// The same case behind an NVMe/TCP target.
fn target(case: DiskCase) -> DiskCase {
    DiskCase { front: Front::Nvme, ..case }
}

/// The same case behind an iSCSI target.
fn unit(case: DiskCase) -> DiskCase {
    DiskCase { front: Front::Iscsi, ..case }
}

/// The same case as the disk of a virtual machine.
fn virtual_disk(case: DiskCase) -> DiskCase {
    DiskCase { front: Front::VhostUser, ..case }
}

/// The same case in a store that answers late.
fn late(case: DiskCase) -> DiskCase {
    DiskCase { backing: Backing::Late, ..case }
}

/// The kind with this name.
///
/// # Panics
/// There is no such kind.
pub fn named(name: &str) -> DiskCase {
    let found = all().into_iter().find(|case| case.name == name);
    found.unwrap_or_else(|| panic!("there is no kind of disk named {name}"))
}

/// Windows of `count` sectors. Those of a child begin at multiples of 16 sectors, where its parent
/// has data. Those of a disk that grows cross no multiple of 64 KiB, so that a disk of any size
/// contains each completely or not at all.
fn windows_at(sectors: &[u64], count: u64) -> Vec<Window> {
    sectors.iter().map(|&first| Window { first, count }).collect()
}

/// Windows of 64 KiB, so that a disk whose size is a multiple of that contains each completely or
/// not at all.
fn windows_of_64k(numbers: &[u64]) -> Vec<Window> {
    const SECTORS: u64 = (64 << 10) / SECTOR_BYTES;
    numbers.iter().map(|number| Window { first: number * SECTORS, count: SECTORS }).collect()
}
