//! The table of all rows.

use crate::{
    allocate, chains, check, clones, compact, convert, discard, expand, fleet, large, merge, object, populated, rbd,
    rescue, serve, sesparse, space, tracking, vmdk,
};
use diskwright_lab::{acceptance::Row, selftest};

/// The rows about disks and servers.
const OWN: [Row; 66] = [
    Row {
        name: "workloads",
        title: "populated dynamic and differencing disks against the same blocks used as a raw file, 16 workloads, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU in 126 of 128 comparisons",
        measure: populated::workloads,
    },
    Row {
        name: "workloads-vmdk",
        title: "populated VMDKs against the same blocks used as a raw file, 16 workloads, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU",
        measure: populated::workloads_vmdk,
    },
    Row {
        name: "workloads-qcow2",
        title: "populated qcow2 and VDI against the same blocks used as a raw file, 16 workloads, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU",
        measure: populated::workloads_others,
    },
    Row {
        name: "page-cache",
        title: "populated disks against the raw file, 4K random read from the page cache, which reading has filled: 0.95 of the IOPS",
        measure: populated::page_cache,
    },
    Row {
        name: "space",
        title: "a pool of one member, written lately, against the same range of the member used as a raw file, 16 workloads, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU",
        measure: space::workloads,
    },
    Row {
        name: "space-sums",
        title: "reads with checksums from a pool of one member, written lately, against the same range of the member with the same checksums computed, O_DIRECT, QD 32: 0.95 of the IOPS, 1.10 of the CPU",
        measure: space::with_checksums,
    },
    Row {
        name: "space-mirror",
        title: "two copies on two files against btrfs raid1, 4K random write with a flush every 32: twice the IOPS; 4K random read: 1.0",
        measure: space::against_btrfs,
    },
    Row {
        name: "space-burst",
        title: "a burst of 512 MiB of 4K random writes into the write-back cache before a tier of 150 IOPS, against the fast member alone: 0.8 of the IOPS; a full cache against the slow member alone: twice the 99th percentile of the latency",
        measure: space::burst,
    },
    Row {
        name: "space-tiers",
        title: "the share of the requests that the fast member serves after `space optimize`, zipf 1.2, a tenth of the disk: within 3 points of the prediction, 0.97 of the best placement's",
        measure: space::predicted_share,
    },
    Row {
        name: "space-dm-cache",
        title: "requests to the slow member per 1,000 of a zipf load, against dm-cache (smq) in one guest, a tenth of the disk fast: fewer; after a power cut the share of the fast member within a second: 0.97 of the one before",
        measure: space::against_dm_cache,
    },
    Row {
        name: "open-space",
        title: "opening a pool of 10 TiB with all slabs mapped: under 200 ms and 250 MiB",
        measure: space::large,
    },
    Row {
        name: "s3-random",
        title: "4K random reads from S3 with an empty cache, 5 ms added: one request for each MiB that is touched, none twice",
        measure: object::random,
    },
    Row {
        name: "s3-sequential",
        title: "a sequential reader of S3 with an empty cache, 5 ms added, against the client library alone with as many requests: 0.9 of the speed",
        measure: object::sequential,
    },
    Row {
        name: "s3-warm",
        title: "4K random reads from the cache of an object against a local file, O_DIRECT, QD 32: 0.95 of the IOPS",
        measure: object::warm,
    },
    Row {
        name: "s3-children",
        title: "a hundred programs read through children of one image in S3: each MiB of it is fetched once",
        measure: object::hundred,
    },
    Row {
        name: "s3-boot",
        title: "a boot of Debian 12 through a child of an image in S3, with the ranges of another boot prefetched: fetches at most 1.3 times the bytes that it reads",
        measure: object::boot,
    },
    Row {
        name: "s3-push",
        title: "a second push of a disk of which 1 % has changed: sends at most 2 % of its bytes, and reads only what has changed",
        measure: object::second,
    },
    Row {
        name: "rbd",
        title: "4K random read and write of an RBD image at QD 32 against fio's rbd engine: 0.95 of the IOPS, no more CPU per I/O",
        measure: rbd::raw,
    },
    Row {
        name: "rbd-nbd",
        title: "an RBD image served by NBD, 4K random read and write at QD 32 against qemu-nbd on another one: 1.2 times the IOPS",
        measure: rbd::served,
    },
    Row {
        name: "rbd-vhdx",
        title: "4K random read and write of a populated VHDX inside an RBD image against a raw RBD image: 0.95 of the IOPS",
        measure: rbd::vhdx,
    },
    Row {
        name: "fleet",
        title: "eight agents on this machine against one generator with eight threads, 4K random read from the page cache: the same IOPS; the controller: a hundredth of a core",
        measure: fleet::eight,
    },
    Row {
        name: "fleet-many",
        title: "200 agents on this machine: from the plan to the start under 5 s, the controller under 256 MiB",
        measure: fleet::many,
    },
    Row {
        name: "fleet-clock",
        title: "the offset between clocks over a network with uneven delays of up to 5 ms: within the stated error in 99 of 100 tries",
        measure: fleet::clocks,
    },
    Row {
        name: "resync",
        title: "opening a pool after a power cut with 1 GiB dirty: under 2 s, and only these slabs are compared",
        measure: space::resync,
    },
    Row {
        name: "chain",
        title: "chain of 1,024 disks against a chain of one, 4K random and 64K sequential read: 0.95",
        measure: chains::reads,
    },
    Row {
        name: "open-chain",
        title: "opening a chain of 1,024 disks of 40 GiB: under 1 s and 256 MiB",
        measure: chains::open,
    },
    Row {
        name: "diff",
        title: "what changed above the base in a chain of 100 disks of 40 GiB: under 1 s, without reading payload",
        measure: chains::diff,
    },
    Row {
        name: "clones",
        title: "opening 1,000 clones of one golden image in one process: under 2 s, under 1 GiB",
        measure: clones::open,
    },
    Row {
        name: "open-large",
        title: "opening a VHDX of 64 TiB and reading one block: under 50 ms and 32 MiB",
        measure: large::open,
    },
    Row {
        name: "check",
        title: "checking a dynamic disk of 1 TiB with space for all its blocks: under 2 s",
        measure: check::allocated,
    },
    Row {
        name: "map-memory",
        title: "64 TiB touched everywhere at random, a VHDX in blocks of 1 MiB and a qcow2 in clusters of 64 KiB: the memory of the map within what is asked for",
        measure: large::map_memory,
    },
    Row {
        name: "discard",
        title: "4K random read at QD 8 while another queue discards 1 TiB of allocated blocks: at most twice the p99",
        measure: discard::beside_reads,
    },
    Row {
        name: "allocate",
        title: "4 KiB into each of many unallocated 2 MiB blocks, then a flush, against qemu-io: 20 times as fast on VHDX, 6 on VHD",
        measure: allocate::blocks,
    },
    Row {
        name: "random-write",
        title: "4K random write at QD 32 into an empty dynamic VHDX against a preallocated raw file: 0.90",
        measure: allocate::random_writes,
    },
    Row {
        name: "random-write-qcow2",
        title: "4K random write at QD 32 into an empty qcow2 against a preallocated raw file: 0.90",
        measure: allocate::random_writes_qcow2,
    },
    Row {
        name: "tracking",
        title: "change tracking switched on against off, 4K random write at QD 32 from the first write on: 0.97 of the IOPS",
        measure: tracking::random_writes,
    },
    Row {
        name: "create-fixed",
        title: "creating a fixed disk of 40 GiB with its space allocated: under 1 s",
        measure: large::create_fixed,
    },
    Row {
        name: "expand",
        title: "enlarging a disk of any format and type, to 64 TiB: under 1 s",
        measure: expand::any_amount,
    },
    Row {
        name: "convert",
        title: "convert raw to dynamic VHDX and back against qemu-img: 1.2 times as fast, less CPU",
        measure: convert::copied,
    },
    Row {
        name: "reflink",
        title: "convert on XFS with reflinks against qemu-img: 20 times as fast",
        measure: convert::shared,
    },
    Row {
        name: "stream-optimized",
        title: "convert raw to streamOptimized VMDK on all processors against qemu-img, which uses one, at the same level: 2.5 times as fast, less CPU",
        measure: vmdk::packed,
    },
    Row {
        name: "from-stream-optimized",
        title: "convert streamOptimized VMDK to raw against qemu-img: 1.5 times as fast",
        measure: vmdk::unpacked,
    },
    Row {
        name: "monolithic-sparse",
        title: "convert raw to monolithicSparse VMDK and back against qemu-img: 1.2 times as fast, less CPU",
        measure: vmdk::sparse,
    },
    Row {
        name: "sesparse",
        title: "reading a chain with an SESPARSE redo log against the flat file, 4K random and 64K sequential read: 0.9",
        measure: sesparse::reads,
    },
    Row {
        name: "convert-qcow2",
        title: "convert raw to qcow2 and back against qemu-img: 1.2 times as fast, less CPU",
        measure: vmdk::qcow2,
    },
    Row {
        name: "compressed-qcow2",
        title: "convert raw to compressed qcow2 on all processors against qemu-img -c: 2.5 times as fast as with one thread, 1.2 times as fast as with -W -m 16",
        measure: vmdk::packed_qcow2,
    },
    Row {
        name: "merge",
        title: "merging 4 GiB of changed data into the parent against cp of 4 GiB: 0.8 of the speed",
        measure: merge::copied,
    },
    Row {
        name: "merge-reflink",
        title: "merging on XFS with reflinks against merging by copying: 20 times as fast",
        measure: merge::shared,
    },
    Row {
        name: "compact-ext4",
        title: "compacting a dynamic VHDX of 64 GiB with ext4, 40 GiB allocated and 5 GiB in use: under 10 s, within 3 % of the smallest possible file",
        measure: compact::ext4,
    },
    Row {
        name: "compact-ntfs",
        title: "compacting a dynamic VHDX of 64 GiB with NTFS, 40 GiB allocated and 5 GiB in use: under 10 s, within 3 % of the smallest possible file",
        measure: compact::ntfs,
    },
    Row {
        name: "compact-xfs",
        title: "compacting a dynamic VHDX of 64 GiB with XFS, 40 GiB allocated and 5 GiB in use: under 10 s, within 3 % of the smallest possible file",
        measure: compact::xfs,
    },
    Row {
        name: "rescue",
        title: "rescue of a disk with a third of its block table destroyed, half of it an ext4: every block that has superblocks or inodes in use is placed, none wrongly",
        measure: rescue::placed,
    },
    Row {
        name: "nbd-io",
        title: "served by NBD, 4K random read and write at QD 32 from fio over a unix socket, populated dynamic VHDX against qemu-nbd on a raw file: 1.3 times the IOPS, 0.6 of the server's CPU per I/O",
        measure: serve::io::populated,
    },
    Row {
        name: "nbd-vhd",
        title: "served by NBD, 4K random write to a dynamic VHD against qemu-nbd: 8 times the IOPS",
        measure: serve::io::vhd,
    },
    Row {
        name: "nbd-qcow2",
        title: "served by NBD, 4K random read and write of a populated qcow2 against qemu-nbd on another one: 1.3 and 2 times the IOPS",
        measure: serve::io::qcow2,
    },
    Row {
        name: "nbd-empty",
        title: "served by NBD, 4K random write into an empty dynamic VHDX against qemu-nbd on an empty qcow2: 1.5 times the IOPS",
        measure: serve::io::empty,
    },
    Row {
        name: "nbd-cache",
        title: "served by NBD, 4K random read from the page cache over four connections: 1.2 times the better of nbdkit and qemu-nbd",
        measure: serve::io::page_cache,
    },
    Row {
        name: "nbd-copy",
        title: "nbdcopy of a VHDX of 4 GiB to null: the disk's own speed, 1.2 times qemu-nbd",
        measure: serve::copy::nbdcopy,
    },
    Row {
        name: "nbd-two",
        title: "served by NBD, 4K random read at QD 32, two clients and two workers against one of each: 1.8 times the IOPS",
        measure: serve::io::two_clients,
    },
    Row {
        name: "nbd-crowd",
        title: "served by NBD, 1,000 connections with one request each in flight, 32 disks: no client waits longer than 3 times the median",
        measure: serve::crowd::fairness,
    },
    Row {
        name: "nvme-io",
        title: "served by NVMe/TCP, 4K random read and write at QD 32 over loopback, populated dynamic VHDX against our NBD: 1.0 of the IOPS, no more CPU per I/O on either side",
        measure: serve::nvme::against_nbd,
    },
    Row {
        name: "iscsi-io",
        title: "served by iSCSI, iscsi-perf at QD 32 over loopback, populated dynamic VHDX against tgtd on a raw file: 1.5 times the IOPS, 0.7 of the server's CPU per I/O",
        measure: serve::iscsi::against_tgtd,
    },
    Row {
        name: "vhost-user",
        title: "a virtual machine's disk by vhost-user, 4K random read and write at QD 32 from one queue, populated dynamic VHDX against qemu-storage-daemon on a raw file: 1.3 times the IOPS, 0.7 of the server's CPU per I/O",
        measure: serve::vhost::one_queue,
    },
    Row {
        name: "live-snapshot",
        title: "a snapshot of a disk that is served by NBD, while a client writes 4K at random at QD 8: its longest request is less than 10 ms longer than without",
        measure: serve::snapshot::pause,
    },
    Row {
        name: "live-merge",
        title: "merging 4 GiB of changed data of a disk that is served by NBD, while a client reads 4K at random at QD 8: it keeps 0.7 of its IOPS, and the merge has 0.1 of the speed of cp",
        measure: serve::merge::beside_a_client,
    },
    Row {
        name: "attach",
        title: "attached by FUSE and loop, 4K random read at QD 32, against qemu-storage-daemon on a raw file: 1.5 times, and what fio writes at any depth comes back",
        measure: serve::attach::fuse_and_loop,
    },
];

/// All rows, in the order in which they run.
pub(crate) fn all() -> Vec<Row> {
    OWN.into_iter().chain(selftest::ROWS).chain([selftest::AGREEMENT]).collect()
}

/// The row with this name.
pub(crate) fn by_name(name: &str) -> Option<Row> {
    all().into_iter().find(|row| row.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn every_row_is_selected_by_its_own_name() {
        let names: HashSet<&str> = all().iter().map(|row| row.name).collect();
        assert_eq!(names.len(), all().len());
        assert!(names.iter().all(|name| by_name(name).is_some_and(|row| row.name == *name)));
        assert!(by_name("nothing").is_none());
    }
}
