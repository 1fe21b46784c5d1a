//! Tests of the tests: each rule that prevents data loss is broken on purpose, and the machinery
//! must catch it within a few seeds. The rules are those of ARCHITECTURE.md, "What must hold at
//! every instant", and of the formats' own modules.

use diskwright_proving::{
    campaign::hunt,
    command, compacting,
    crowd::Crowd,
    disk, faulty, life, merge,
    mutation::{Mutation, Phase},
    resized_copies,
    rule_breaker::BrokenRule,
    sample::Sample,
    sizes, space,
    stage::Case,
};

/// Number of seeds within which a broken rule must be caught.
const SEEDS: u64 = 16;
/// Steps of a run: enough for several flushes in a session.
const STEPS: u64 = 50;

fn must_be_caught<C: Case>(rule: &str, case: &C, mutation: Option<Mutation>) {
    let name = case.name();
    match hunt(case, mutation, SEEDS) {
        Some((seed, how)) => {
            println!("mutations: caught: {rule} ({name}, seed {seed}): {}", how.lines().next().unwrap_or_default());
        }
        None => panic!("the rule \"{rule}\" is broken in {name}, and {SEEDS} seeds did not catch it"),
    }
}

fn broken_below(rule: &str, case: &str, mutation: Mutation) {
    must_be_caught(rule, &disk::DiskCase { steps: STEPS, ..disk::named(case) }, Some(mutation));
}

fn broken_above(rule: &str, case: &str, broken_rule: BrokenRule) {
    must_be_caught(rule, &disk::DiskCase { steps: STEPS, broken_rule: Some(broken_rule), ..disk::named(case) }, None);
}

#[test]
fn without_a_broken_rule_nothing_is_caught() {
    for case in disk::all().into_iter().filter(can_play) {
        if let Some((seed, how)) = hunt(&case, None, 1) {
            panic!("{}, seed {seed}: {how}", case.name);
        }
    }
}

#[test]
fn flushed_data_is_durable() {
    for case in [
        "raw",
        "vhd fixed",
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vmdk flat",
        "vmdk sparse 8K",
        "vmdk child 64K",
        "qcow2 64K",
        "qcow2 child 8K",
        "vdi dynamic 8K",
        "vdi child 64K",
    ] {
        broken_below("a flush makes durable", case, Mutation::NotDurable(Phase::Flush));
        broken_below("a close makes durable", case, Mutation::NotDurable(Phase::Close));
        broken_below("a write with FUA is durable when it ends", case, Mutation::NotDurable(Phase::DurableWrite));
    }
    for case in [
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vmdk sparse 8K",
        "vmdk child 64K",
        "qcow2 64K",
        "qcow2 child 8K",
        "vdi dynamic 8K",
        "vdi child 64K",
    ] {
        broken_above("a flush makes tables durable", case, BrokenRule::FlushesPayloadOnly);
    }
}

#[test]
fn flushed_data_is_durable_with_several_queues() {
    for (case, block_bytes) in [("vhd dynamic 16K", 64 << 10), ("vhdx differencing 1M", 1 << 20)] {
        let kind = disk::DiskCase { broken_rule: Some(BrokenRule::FlushesPayloadOnly), ..disk::named(case) };
        must_be_caught("a flush makes tables durable, with several queues", &Crowd::on(kind, block_bytes, 24), None);
    }
}

#[test]
fn a_failed_sync_is_not_retried() {
    for case in [
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M",
        "vhdx differencing 1M",
        "vmdk sparse 8K",
        "vmdk child 64K",
        "qcow2 64K",
        "qcow2 child 8K",
        "vdi dynamic 8K",
        "vdi child 64K",
    ] {
        let broken = disk::DiskCase { broken_rule: Some(BrokenRule::FailedSyncForgotten), ..disk::named(case) };
        match faulty::hunt(&broken, Sample::ALL) {
            Err(how) => println!("mutations: caught: after a failed sync nothing is durable ({case}): {how}"),
            Ok(tally) => panic!("a failed sync is retried in {case}, and {tally:?} did not catch it"),
        }
    }
}

/// Prints that the case is skipped if this machine lacks something that it needs.
fn can_play(case: &disk::DiskCase) -> bool {
    let missing = case.missing();
    if let Some(what) = &missing {
        println!("skipped: broken rules of {}: {what}", case.name);
    }
    missing.is_none()
}

#[test]
fn a_server_passes_flushes_and_fua_on() {
    for case in [
        "raw, over NBD",
        "vhdx dynamic 1M, over NBD",
        "raw, over NVMe",
        "vhdx dynamic 1M, over NVMe",
        "raw, over iSCSI",
        "vhdx dynamic 1M, over iSCSI",
    ] {
        if can_play(&disk::named(case)) {
            broken_below("a flush over the network makes durable", case, Mutation::NotDurable(Phase::Flush));
            broken_above("a server passes flushes on", case, BrokenRule::ServerForgetsFlush);
            broken_above("a server passes FUA on", case, BrokenRule::ServerForgetsFua);
        }
    }
    // A virtual disk has no FUA: a flush follows such a write.
    for case in ["raw, over vhost-user", "vhdx dynamic 1M, over vhost-user"] {
        if can_play(&disk::named(case)) {
            broken_below("a flush over vhost-user makes durable", case, Mutation::NotDurable(Phase::Flush));
            broken_above("a device passes flushes on", case, BrokenRule::ServerForgetsFlush);
        }
    }
}

#[test]
fn payload_is_durable_before_its_mapping() {
    // In a VHDX or VMDK without a parent only reused space shows the difference: fresh space reads
    // as zeros, as the block did before.
    for case in [
        "vhd dynamic 16K",
        "vhd differencing 16K",
        "vhdx dynamic 1M, churning",
        "vhdx differencing 1M",
        "vmdk child 64K",
        "qcow2 child 8K",
        "vdi child 64K",
    ] {
        broken_below("payload before mapping", case, Mutation::Unordered(Phase::Flush, 1));
    }
}

#[test]
fn refcounts_are_durable_before_what_they_count() {
    // The check of the image says what a lower refcount than references is.
    for case in ["qcow2 512", "qcow2 64K", "qcow2 4K, churning"] {
        broken_below("refcounts before entries", case, Mutation::Unordered(Phase::Flush, 1));
    }
}

#[test]
fn the_bitmap_is_durable_before_the_bat_of_a_dynamic_vhd() {
    broken_above("a new block has its bitmap", "vhd dynamic 16K", BrokenRule::NoFirstBitmap);
}

#[test]
fn a_log_entry_is_durable_before_its_pages() {
    for case in ["vhdx dynamic 1M, 2 GiB", "vhdx differencing 1M"] {
        broken_below(
            "log entry before page, and before the header names it",
            case,
            Mutation::Unordered(Phase::Flush, 2),
        );
    }
}

#[test]
fn pages_are_durable_before_the_log_is_emptied() {
    for case in ["vhdx dynamic 1M", "vhdx differencing 1M"] {
        broken_below("replay is durable before the log is emptied", case, Mutation::Disordered(Phase::Open));
        broken_below("pages are durable before the log is emptied", case, Mutation::Disordered(Phase::Close));
    }
}

#[test]
fn freed_space_is_not_reused_before_its_removal_is_durable() {
    for case in [
        "vhd dynamic 16K, churning",
        "vhdx dynamic 1M, churning",
        "vhdx differencing 1M, churning",
        "vmdk sparse 8K, churning",
        "qcow2 4K, churning",
        "vdi dynamic 8K, churning",
    ] {
        broken_above("freed space is not reused at once", case, BrokenRule::RecycleAtOnce);
    }
}

#[test]
fn allocated_space_reads_as_zeros() {
    for case in [
        "vhd dynamic 16K",
        "vhdx dynamic 1M",
        "vmdk sparse 8K, churning",
        "qcow2 4K, churning",
        "vdi dynamic 8K, churning",
    ] {
        broken_below("space is zeroed before it is reused", case, Mutation::NoZeroing);
    }
    broken_below("slack of an earlier crash is cut off first", "vhdx dynamic 1M", Mutation::NoCutting);
}

#[test]
fn identities_change_before_bytes_do() {
    for case in ["vhdx dynamic 1M", "vhdx fixed 1M", "vhdx differencing 1M"] {
        broken_below("FileWriteGuid before the first write", case, Mutation::Disordered(Phase::FirstWrite));
        broken_above("DataWriteGuid before the first visible write", case, BrokenRule::NoBeginWriting);
    }
    for case in ["vdi fixed 1M", "vdi child 64K"] {
        broken_above("uuidModify before the first visible write", case, BrokenRule::NoBeginWriting);
    }
    for case in ["vmdk sparse 8K", "vmdk child 64K"] {
        broken_above("CID before the first visible write", case, BrokenRule::NoBeginWriting);
    }
}

#[test]
fn the_copy_of_the_footer_is_durable_before_the_tail_moves() {
    let case = "vhd dynamic 16K, copy of footer lost";
    broken_below("the copy is repaired", case, Mutation::NoFirstSector);
    broken_below("the copy is durable before the tail moves", case, Mutation::Unordered(Phase::FirstWrite, 1));
}

#[test]
fn a_child_records_zeros_and_sectors() {
    for case in ["vhdx differencing 1M", "vdi child 64K"] {
        broken_above("zeros hide the parent", case, BrokenRule::ZeroesForgotten);
    }
    for case in ["vhd differencing 16K", "vhdx differencing 1M"] {
        broken_above("written sectors hide the parent", case, BrokenRule::SectorsForgotten);
        broken_above("other sectors show the parent", case, BrokenRule::SectorsMadeWhole);
    }
}

#[test]
fn commands_make_files_and_names_durable_in_order() {
    for case in command::creations() {
        must_be_caught("a new name is durable", &case, Some(Mutation::NoDirectorySync));
        must_be_caught("a new image is durable", &case, Some(Mutation::NotDurable(Phase::Command)));
    }
    for case in command::conversions() {
        must_be_caught("a copy's name is durable", &case, Some(Mutation::NoDirectorySync));
        must_be_caught("a copy is durable before it has its name", &case, Some(Mutation::Disordered(Phase::Command)));
    }
    for case in resized_copies::resized_copies() {
        must_be_caught("a copy's name is durable", &case, Some(Mutation::NoDirectorySync));
        must_be_caught("a copy is durable before it has its name", &case, Some(Mutation::Disordered(Phase::Command)));
    }
    for case in life::snapshots() {
        must_be_caught("the new names are durable", &case, Some(Mutation::NoDirectorySync));
        must_be_caught("a new child is durable", &case, Some(Mutation::NotDurable(Phase::Command)));
    }
}

#[test]
fn merges_are_durable_in_order() {
    for case in merge::merges() {
        must_be_caught("a merge is durable", &case, Some(Mutation::NotDurable(Phase::Command)));
        must_be_caught(
            "a merged child goes when its parent has all data",
            &case,
            Some(Mutation::Disordered(Phase::Command)),
        );
        must_be_caught("a merged child's removal is durable", &case, Some(Mutation::NoDirectorySync));
    }
}

#[test]
fn a_moved_block_is_durable_before_its_mapping() {
    for case in compacting::compactions() {
        let broken = Some(Mutation::Disordered(Phase::Command));
        must_be_caught("a copy is durable before its mapping, and that before the space is reused", &case, broken);
    }
}

#[test]
fn a_new_size_is_durable_in_order() {
    for case in sizes::resizes() {
        must_be_caught("a new size is durable", &case, Some(Mutation::NotDurable(Phase::Command)));
        must_be_caught(
            "one copy of the table is whole at every instant",
            &case,
            Some(Mutation::Disordered(Phase::Command)),
        );
    }
}

#[test]
fn a_disk_of_several_files_is_durable_in_all_of_them() {
    for case in ["raw in three parts", "packed 16K, over a parent"] {
        let phases = [("a flush", Phase::Flush), ("a close", Phase::Close), ("a write with FUA", Phase::DurableWrite)];
        for (what, phase) in phases {
            broken_below(&format!("{what} reaches every file"), case, Mutation::FirstFileOnly(phase));
        }
    }
}

#[test]
fn snapshots_and_growth_are_durable() {
    for case in ["vhd dynamic 16K, with snapshots", "vhdx dynamic 1M, with snapshots"] {
        broken_below(
            "a former top is durable when another image was added",
            case,
            Mutation::NotDurable(Phase::Snapshot),
        );
        broken_below("the name of an added image is durable", case, Mutation::NoDirectorySync);
    }
    for case in ["vhd dynamic 16K, frozen in use", "vhdx dynamic 1M, frozen in use"] {
        broken_below("a frozen image and the new child are durable", case, Mutation::NotDurable(Phase::Snapshot));
        broken_below("the names of a disk frozen in use are durable", case, Mutation::NoDirectorySync);
    }
    for case in
        ["vhd dynamic 16K, absorbed in use", "vhdx dynamic 1M, absorbed in use", "vmdk child 64K, absorbed in use"]
    {
        broken_below("a merge in use is durable", case, Mutation::NotDurable(Phase::Absorb));
        broken_below("the parent is durable before the top loses a block", case, Mutation::Disordered(Phase::Absorb));
    }
    for case in
        ["vhd dynamic 16K, merged in use", "vhdx differencing 1M, merged in use", "vmdk child 64K, merged in use"]
    {
        broken_below("a merge of a disk in use is durable", case, Mutation::NotDurable(Phase::Merge));
        broken_below("a child that is merged in use goes last", case, Mutation::Disordered(Phase::Merge));
    }
    for case in ["raw, growing", "vmdk flat, growing", "vmdk sparse 8K, growing"] {
        broken_below("a new size is durable", case, Mutation::NotDurable(Phase::Grow));
    }
    let case = "vmdk sparse 8K, growing";
    broken_below("tables and directories are durable before the header", case, Mutation::Disordered(Phase::Grow));
}

#[test]
fn a_new_link_to_the_parent_is_durable_and_whole() {
    for case in ["vhd differencing 16K, relinked", "vhdx differencing 1M, relinked", "vmdk child 64K, relinked"] {
        broken_below("a new link is durable", case, Mutation::NotDurable(Phase::Relink));
    }
    let case = "vhd differencing 16K, relinked";
    broken_below("a new header is durable before the footer names it", case, Mutation::Disordered(Phase::Relink));
    let case = "vmdk child 64K, relinked";
    broken_below(
        "lines that moved are durable before their sector loses them",
        case,
        Mutation::Disordered(Phase::Relink),
    );
}

#[test]
fn blocks_are_filled_before_a_part_is_written() {
    let case = "packed 16K, over a parent";
    broken_above("a block that is written in part is filled first", case, BrokenRule::NeverFills);
    broken_above("zeros hide a packed block and a parent", case, BrokenRule::ZeroesForgotten);
    broken_below("a filled block is durable before its entry", case, Mutation::Unordered(Phase::Flush, 1));
    let crowd =
        Crowd::on(disk::DiskCase { broken_rule: Some(BrokenRule::NeverFills), ..disk::named(case) }, 64 << 10, 24);
    must_be_caught("a block that is written in part is filled first, with several queues", &crowd, None);
}

#[test]
fn every_stage_of_a_large_discard_is_recorded() {
    broken_above("zeros are recorded in every stage", "vhd dynamic 4K, swept", BrokenRule::ZeroesForgotten);
}

#[test]
fn late_answers_come_after_the_operation() {
    for case in ["raw, late", "vhd dynamic 16K, late", "vhdx differencing 1M, late"] {
        if can_play(&disk::named(case)) {
            broken_below("a late answer to a flush makes durable", case, Mutation::NotDurable(Phase::Flush));
            broken_below("an answer comes after the write was carried out", case, Mutation::AnsweredTooEarly);
        }
    }
}

#[test]
fn a_pool_of_members_keeps_its_orders() {
    let case = |name: &str| {
        let all = space::all();
        *all.iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"))
    };
    for (rule, name, mutation) in [
        ("flushed data is durable", "space, one member", Mutation::NotDurable(Phase::Flush)),
        ("flushed data is durable on every copy", "space, two copies", Mutation::FirstFileOnly(Phase::Flush)),
        ("writes with FUA are durable", "space, two copies", Mutation::NotDurable(Phase::DurableWrite)),
        ("a closed pool is durable", "space, one member", Mutation::NotDurable(Phase::Close)),
        ("slabs are clean after a sync only", "space, two copies", Mutation::FirstFileOnly(Phase::Close)),
        ("a new slab is zeros before the map names it", "space, one member", Mutation::Unordered(Phase::Command, 1)),
        ("the journal before the payload", "space, one member", Mutation::NotDurable(Phase::Command)),
        ("new slabs are zeroed", "space, churning", Mutation::NoZeroing),
        ("a moved copy before the map names it", "space, tiers", Mutation::Unordered(Phase::Migrate, 1)),
        ("checksums before the seal", "space, one member", Mutation::NotDurable(Phase::Scrub)),
        ("checksums of every copy before the seal", "space, two copies", Mutation::FirstFileOnly(Phase::Scrub)),
        ("what is in the cache is durable", "space, a cache", Mutation::NotDurable(Phase::Flush)),
        ("and on every copy", "space, a cache", Mutation::FirstFileOnly(Phase::Flush)),
        ("destaged before the place is free", "space, a cache, churning", Mutation::Disordered(Phase::Destage)),
        ("destaged on every copy", "space, a cache", Mutation::FirstFileOnly(Phase::Destage)),
        ("forgotten before the log is passed", "space, a cache", Mutation::Unordered(Phase::Command, 2)),
    ] {
        must_be_caught(rule, &case(name), Some(mutation));
    }
}
