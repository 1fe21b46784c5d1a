//! Finds the blocks that no table entry names, and where they belong.
//!
//! ```text
//!   gaps of the file ─▶ pieces.rs: what their contents state ─▶ votes: (payload at P, block b)
//!        ▲                                                          │ enough to be a proof?
//!        │                                                          ▼
//!        │                              every structure in the piece agrees, and no other piece
//!        │                              claims b, and b has no valid entry ─▶ placed
//!        └───── again, as placed blocks tell more of their file systems (at most ROUNDS_MAX)
//! ```
//!
//! At the end every placed block is verified once more with all that is known then. What is left
//! in the gaps and is not zero is a leftover: data of the disk, or space that was freed and not
//! cleared. Nothing tells these apart.

use super::{
    options::RescueOptions,
    outcome::{Leftover, PlacedBlock},
    source::Damaged,
};
use crate::{DiskError, Progress, Result, error::file_error, volumes::examine};
use diskwright_image::salvage::{Fault, Salvaged, read_what_can_be};
use diskwright_store::{all_zero, is_full};
use diskwright_volume::{Anchor, PROOF, Seen, Witness, anchors_in};
use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    ops::Range,
    path::Path,
};

/// Bytes that are looked at at once.
const WINDOW_BYTES: u64 = 1 << 20;
/// Unit of structures: no block of a file system that is understood is larger, and none lies across
/// two such units of a payload block.
const UNIT_BYTES: u64 = 4096;
const ROUNDS_MAX: usize = 4;
/// Most votes that are counted.
const VOTES_MAX: usize = 1 << 20;
/// Most file systems without a partition table.
const ANCHORS_MAX: usize = 1024;
/// Most leftovers that are listed.
const LEFTOVERS_MAX: usize = 65_536;

/// The result of a search.
#[derive(Debug, Default)]
pub(super) struct Searched {
    pub(super) placed: Vec<PlacedBlock>,
    pub(super) leftovers: Vec<Leftover>,
    pub(super) unlisted_bytes: u64,
    /// Why blocks that the table calls absent may be lost.
    pub(super) doubts: Vec<String>,
}

const SILENT: &str = "nothing in it states where it belongs";
const CONTRADICTS: &str = "its structures contradict each other";
const SEVERAL: &str = "several pieces claim the same place";
const OCCUPIED: &str = "the place that it claims has a valid table entry";
const SECTORS: &str = "it is not known which of its sectors are the parent's";

/// Where a piece of the file may belong.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Claim {
    payload_bytes: u64,
    block: u64,
}

/// Places what can be placed. Marks what is in doubt.
pub(super) fn search(damaged: &mut Damaged, options: &RescueOptions, progress: &mut Progress<'_>) -> Result<Searched> {
    let mut searched = Searched::default();
    if damaged.salvaged.table.is_linear() {
        return Ok(searched);
    }
    // The file is read several times; what is shown does not go back.
    let mut reached_bytes = 0;
    let progress: &mut Progress<'_> = &mut |done, total| {
        reached_bytes = done.max(reached_bytes);
        progress(reached_bytes, total)
    };
    let mut anchors = Vec::new();
    let mut refused = HashMap::new();
    let mut known = HashMap::new();
    for round in 0..ROUNDS_MAX {
        let gaps = damaged.salvaged.gaps();
        // Without data in the gaps there is nothing to place.
        if !has_data(&damaged.salvaged, &gaps, progress)? {
            break;
        }
        if round == 0 {
            anchors = find_anchors(&damaged.salvaged, progress)?;
        }
        let witness = learn(damaged, &anchors, options)?;
        refused.clear();
        let votes = count_votes(&damaged.salvaged, &gaps, &witness, &mut refused, progress)?;
        let found = verify_all(&damaged.salvaged, votes, &witness, &mut refused);
        // Blocks that were placed before are judged again by what is known now.
        let wrong: Vec<Claim> =
            known.keys().copied().filter(|&claim| verify(&damaged.salvaged, claim, &witness).is_err()).collect();
        for claim in &wrong {
            known.remove(claim);
            refused.insert(claim.payload_bytes, CONTRADICTS);
            damaged.salvaged.table.unplace(&*damaged.salvaged.store, claim.block)?;
        }
        let mut is_new = !wrong.is_empty();
        for (claim, evidence) in found {
            match damaged.salvaged.held_at(claim.block, claim.payload_bytes) {
                Some(held) => {
                    let store = std::sync::Arc::clone(&damaged.salvaged.store);
                    damaged.salvaged.table.hold(&*store, claim.block, held)?;
                    known.insert(claim, evidence);
                    is_new = true;
                }
                None => drop(refused.insert(claim.payload_bytes, SECTORS)),
            }
        }
        if !is_new {
            break;
        }
    }
    list_leftovers(&damaged.salvaged, &refused, None, &mut searched, progress)?;
    // A leftover may be the bitmap block of a chunk whose entry is lost.
    let unsure: Vec<Claim> =
        known.keys().copied().filter(|claim| damaged.salvaged.may_have_lost_its_bitmap(claim.block)).collect();
    if !searched.leftovers.is_empty() {
        for claim in unsure {
            known.remove(&claim);
            refused.insert(claim.payload_bytes, SECTORS);
            damaged.salvaged.table.unplace(&*damaged.salvaged.store, claim.block)?;
        }
        searched = Searched::default();
        list_leftovers(&damaged.salvaged, &refused, options.leftovers.as_deref(), &mut searched, progress)?;
    }
    let block_bytes = damaged.salvaged.info.block_bytes;
    searched.placed = known
        .into_iter()
        .map(|(claim, evidence)| PlacedBlock {
            offset_bytes: claim.block * block_bytes,
            len_bytes: damaged.salvaged.bytes_in_disk(claim.block),
            file_offset_bytes: claim.payload_bytes,
            evidence: evidence.into_iter().collect(),
        })
        .collect();
    searched.placed.sort_unstable_by_key(|placed| placed.offset_bytes);
    searched.doubts = doubts_of(&damaged.salvaged, &searched, damaged.is_child());
    if damaged.is_child() && !searched.doubts.is_empty() && !options.trust_absent {
        damaged.salvaged.table.doubt_absent(Fault::Doubted);
        // Bitmaps are changed through the log, like table entries.
        damaged.salvaged.doubts_bitmaps = !damaged.salvaged.doubts.is_empty();
    }
    Ok(searched)
}

/// Why absent blocks may be lost, as sentences.
fn doubts_of(salvaged: &Salvaged, searched: &Searched, is_child: bool) -> Vec<String> {
    let bytes: u64 = searched.leftovers.iter().map(|piece| piece.len_bytes).sum::<u64>() + searched.unlisted_bytes;
    let mut doubts: Vec<String> =
        salvaged.doubts.iter().map(|why| format!("Blocks without data may be lost ones: {why}.")).collect();
    if bytes > 0 {
        doubts.push(format!(
            "The file has {bytes} bytes of data that no table entry names and that could not be placed, so a lost block may be taken for one without data{}.",
            if is_child { " (if the table is right there, use `RescueOptions::trust_absent`)" } else { "" }
        ));
    }
    if is_child && salvaged.has_room_between() {
        doubts.push("The file has unused space between its blocks, which a block of zeros with a lost entry may have (if the table is right there, use `RescueOptions::trust_absent`).".into());
    }
    doubts
}

/// Whether any gap holds data.
fn has_data(salvaged: &Salvaged, gaps: &[Range<u64>], progress: &mut Progress<'_>) -> Result<bool> {
    let mut found = false;
    for gap in gaps {
        each_window(salvaged, gap, gap.start, progress, &mut |_, bytes| {
            found |= !all_zero(bytes);
            !found
        })?;
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Reads a range of the file from `from` on in windows, without its holes. Windows begin at
/// multiples of [`UNIT_BYTES`] from `from`. Bytes that cannot be read are zeros. `visit` answers
/// whether to go on.
fn each_window(
    salvaged: &Salvaged,
    range: &Range<u64>,
    from: u64,
    progress: &mut Progress<'_>,
    visit: &mut dyn FnMut(u64, &[u8]) -> bool,
) -> Result<()> {
    let store = &*salvaged.store;
    let mut buf = vec![0; WINDOW_BYTES.min(range.end.saturating_sub(from)) as usize];
    let mut at = from;
    while at < range.end {
        // A store that cannot name its holes has none.
        if let Ok(data) = store.next_data(at) {
            match data {
                Some(data) if data.offset_bytes < range.end => {
                    at = at.max(data.offset_bytes - (data.offset_bytes.saturating_sub(from)) % UNIT_BYTES);
                }
                _ => break,
            }
        }
        if !progress(at, salvaged.file_bytes) {
            return Err(DiskError::Stopped);
        }
        let len = (range.end - at).min(WINDOW_BYTES) as usize;
        let bytes = &mut buf[..len];
        bytes.fill(0);
        read_what_can_be(store, at, bytes);
        if !visit(at, bytes) {
            break;
        }
        at += len as u64;
    }
    Ok(())
}

/// Places on the disk where a file system begins, by superblocks in blocks with valid entries. The
/// partition table may be lost.
fn find_anchors(salvaged: &Salvaged, progress: &mut Progress<'_>) -> Result<Vec<Anchor>> {
    let mut found: BTreeMap<Anchor, u64> = BTreeMap::new();
    let block_bytes = salvaged.info.block_bytes;
    let places: Vec<(u64, u64)> = salvaged.table.places().collect();
    for (block, payload_bytes) in places {
        let range = payload_bytes..(payload_bytes + salvaged.bytes_in_disk(block)).min(salvaged.file_bytes);
        each_window(salvaged, &range, payload_bytes, progress, &mut |at, bytes| {
            anchors_in(bytes, block * block_bytes + (at - payload_bytes), &mut |anchor| {
                if found.len() < ANCHORS_MAX || found.contains_key(&anchor) {
                    *found.entry(anchor).or_default() += 1;
                }
            });
            true
        })?;
    }
    // Those with most superblocks first, as only so many file systems are looked for.
    let mut anchors: Vec<(Anchor, u64)> = found.into_iter().collect();
    anchors.sort_by_key(|&(_, count)| std::cmp::Reverse(count));
    Ok(anchors.into_iter().map(|(anchor, _)| anchor).collect())
}

fn learn(damaged: &Damaged, anchors: &[Anchor], options: &RescueOptions) -> Result<Witness> {
    let disk = damaged.disk()?;
    let mut witness = None;
    examine(&disk, options.source.engine, &mut |_, _| true, &mut |reader| {
        witness = Some(Witness::learn(reader, anchors));
    })
    .map_err(|error| file_error("read it", &damaged.path, error))?;
    witness.ok_or(DiskError::Stopped)
}

/// Distances of payload from a multiple of [`UNIT_BYTES`] in the file.
fn phases(salvaged: &Salvaged) -> Vec<u64> {
    let alignment = salvaged.payload_alignment_bytes;
    if alignment.is_multiple_of(UNIT_BYTES) {
        return vec![0];
    }
    let mut counted: HashMap<u64, u64> = HashMap::new();
    for (_, payload_bytes) in salvaged.table.places() {
        *counted.entry(payload_bytes % UNIT_BYTES).or_default() += 1;
    }
    if counted.is_empty() {
        return (0..UNIT_BYTES).step_by(alignment.max(512) as usize).collect();
    }
    let mut phases: Vec<u64> = counted.into_keys().collect();
    phases.sort_unstable();
    phases
}

/// Where a structure says that its payload block begins in the file, and which block it is.
fn claim_of(block_bytes: u64, at: u64, within_bytes: usize, disk_offset_bytes: u64) -> Option<Claim> {
    let payload_bytes = (at + within_bytes as u64).checked_sub(disk_offset_bytes % block_bytes)?;
    Some(Claim { payload_bytes, block: disk_offset_bytes / block_bytes })
}

/// Counts what the structures in the gaps claim.
fn count_votes(
    salvaged: &Salvaged,
    gaps: &[Range<u64>],
    witness: &Witness,
    refused: &mut HashMap<u64, &'static str>,
    progress: &mut Progress<'_>,
) -> Result<HashMap<Claim, u32>> {
    let mut votes: HashMap<Claim, u32> = HashMap::new();
    let block_bytes = salvaged.info.block_bytes;
    let phases = phases(salvaged);
    for gap in gaps {
        for phase in &phases {
            let from = gap.start + (phase + UNIT_BYTES - gap.start % UNIT_BYTES) % UNIT_BYTES;
            each_window(salvaged, gap, from, progress, &mut |at, bytes| {
                witness.look(bytes, &mut |seen| {
                    let Seen::At { within_bytes, disk_offset_bytes, weight, .. } = seen else { return };
                    let Some(claim) = claim_of(block_bytes, at, within_bytes, disk_offset_bytes) else { return };
                    if !fits(salvaged, gap, claim) {
                        return;
                    }
                    if !salvaged.table.is_lost_or_absent(claim.block) {
                        refused.insert(claim.payload_bytes, OCCUPIED);
                        return;
                    }
                    if votes.len() < VOTES_MAX || votes.contains_key(&claim) {
                        let sum = votes.entry(claim).or_default();
                        *sum = sum.saturating_add(weight);
                    }
                });
                true
            })?;
        }
    }
    votes.retain(|_, sum| *sum >= PROOF);
    Ok(votes)
}

/// Whether a piece at that place lies in the gap and is aligned.
fn fits(salvaged: &Salvaged, gap: &Range<u64>, claim: Claim) -> bool {
    let start = claim.payload_bytes.checked_sub(salvaged.lead_bytes());
    let end = claim.payload_bytes.checked_add(salvaged.bytes_in_disk(claim.block));
    claim.block < salvaged.table.count()
        && claim.payload_bytes.is_multiple_of(salvaged.payload_alignment_bytes)
        && start.is_some_and(|start| gap.start <= start)
        && end.is_some_and(|end| end <= gap.end)
}

type Evidence = BTreeMap<&'static str, u64>;

/// The claims that stand: no structure contradicts, no other claim is for the same block or space.
fn verify_all(
    salvaged: &Salvaged,
    votes: HashMap<Claim, u32>,
    witness: &Witness,
    refused: &mut HashMap<u64, &'static str>,
) -> Vec<(Claim, Evidence)> {
    let mut claims: Vec<(u32, Claim)> = votes.into_iter().map(|(claim, sum)| (sum, claim)).collect();
    claims.sort_unstable_by(|one, other| other.cmp(one));
    // Each byte of the gaps is verified for a few claims only: further ones contradict anyway.
    let mut budget_bytes = 4 * salvaged.file_bytes;
    let mut stand: Vec<(Claim, Evidence)> = Vec::new();
    for (_, claim) in claims {
        let len = salvaged.bytes_in_disk(claim.block);
        let Some(left) = budget_bytes.checked_sub(len) else { break };
        budget_bytes = left;
        match verify(salvaged, claim, witness) {
            Ok(evidence) => stand.push((claim, evidence)),
            Err(why) => drop(refused.insert(claim.payload_bytes, why)),
        }
    }
    let mut conflicts: HashSet<usize> = HashSet::new();
    for key in [true, false] {
        let mut order: Vec<usize> = (0..stand.len()).collect();
        order.sort_unstable_by_key(|&index| {
            let claim = stand[index].0;
            if key { (claim.block, claim.payload_bytes) } else { (claim.payload_bytes, claim.block) }
        });
        for pair in order.windows(2) {
            let (one, other) = (stand[pair[0]].0, stand[pair[1]].0);
            let end = one.payload_bytes + salvaged.bytes_in_disk(one.block);
            let same = if key { one.block == other.block } else { other.payload_bytes - salvaged.lead_bytes() < end };
            if same {
                conflicts.extend(pair);
            }
        }
    }
    let mut index = 0;
    stand.retain(|(claim, _)| {
        let stays = !conflicts.contains(&index);
        index += 1;
        if !stays {
            refused.insert(claim.payload_bytes, SEVERAL);
        }
        stays
    });
    stand
}

/// Looks at every structure of a piece, as if it were this block of the disk.
fn verify(salvaged: &Salvaged, claim: Claim, witness: &Witness) -> Result<Evidence, &'static str> {
    let start_bytes = claim.block * salvaged.info.block_bytes;
    let range = claim.payload_bytes..claim.payload_bytes + salvaged.bytes_in_disk(claim.block);
    let mut evidence = Evidence::new();
    let mut sum = 0_u32;
    let mut contradicts = false;
    let read = each_window(salvaged, &range, claim.payload_bytes, &mut |_, _| true, &mut |at, bytes| {
        witness.look(bytes, &mut |seen| {
            let (Seen::At { within_bytes, .. } | Seen::Copies { within_bytes }) = seen;
            let here = start_bytes + (at - claim.payload_bytes) + within_bytes as u64;
            if witness.holds_copies(here) {
                return;
            }
            match seen {
                Seen::At { disk_offset_bytes, weight, what, .. } if disk_offset_bytes == here => {
                    *evidence.entry(what).or_default() += 1;
                    sum = sum.saturating_add(weight);
                }
                _ => contradicts = true,
            }
        });
        !contradicts
    });
    match read {
        Err(_) => Err(SILENT),
        Ok(()) if contradicts => Err(CONTRADICTS),
        Ok(()) if sum < PROOF => Err(SILENT),
        Ok(()) => Ok(evidence),
    }
}

/// Lists the data that is left in the gaps, and writes it into a folder if the user wants it.
fn list_leftovers(
    salvaged: &Salvaged,
    refused: &HashMap<u64, &'static str>,
    folder: Option<&Path>,
    searched: &mut Searched,
    progress: &mut Progress<'_>,
) -> Result<()> {
    let mut refused: Vec<(u64, &'static str)> = refused.iter().map(|(&at, &why)| (at, why)).collect();
    refused.sort_unstable();
    let reason = |range: &Range<u64>| {
        let from = refused.partition_point(|&(at, _)| at < range.start);
        refused.get(from).filter(|&&(at, _)| at < range.end).map_or(SILENT, |&(_, why)| why)
    };
    if let Some(folder) = folder {
        fs::create_dir_all(folder).map_err(|error| file_error("create it", folder, error))?;
    }
    // A piece is as long as a payload block at most, so that each has its own reason.
    let most_bytes = salvaged.info.block_bytes.max(WINDOW_BYTES);
    for gap in salvaged.gaps() {
        let mut run: Option<Range<u64>> = None;
        let mut runs = Vec::new();
        each_window(salvaged, &gap, gap.start, progress, &mut |at, bytes| {
            for (index, unit) in bytes.chunks(UNIT_BYTES as usize).enumerate() {
                if all_zero(unit) {
                    continue;
                }
                let start = at + index as u64 * UNIT_BYTES;
                let end = start + unit.len() as u64;
                match &mut run {
                    // Zeros between data of one block belong to it.
                    Some(run) if end - run.start <= most_bytes => run.end = end,
                    other => runs.extend(other.replace(start..end)),
                }
            }
            true
        })?;
        runs.extend(run);
        for range in runs {
            let len_bytes = range.end - range.start;
            if let Some(folder) = folder {
                save(salvaged, &range, folder)?;
            }
            if searched.leftovers.len() >= LEFTOVERS_MAX {
                searched.unlisted_bytes += len_bytes;
                continue;
            }
            let reason = reason(&range);
            searched.leftovers.push(Leftover { file_offset_bytes: range.start, len_bytes, reason });
        }
    }
    Ok(())
}

/// Writes a piece of the file into a file of its own. Bytes that cannot be read are zeros.
fn save(salvaged: &Salvaged, range: &Range<u64>, folder: &Path) -> Result<()> {
    let path = folder.join(format!("{:016x}.bin", range.start));
    let mut bytes = vec![0; (range.end - range.start).min(256 << 20) as usize];
    read_what_can_be(&*salvaged.store, range.start, &mut bytes);
    let created = fs::OpenOptions::new().write(true).create_new(true).open(&path);
    created.and_then(|mut file| std::io::Write::write_all(&mut file, &bytes)).map_err(|error| {
        let doing = if is_full(&error) { "save a leftover (the file system is full)" } else { "save a leftover" };
        file_error(doing, &path, error)
    })
}
