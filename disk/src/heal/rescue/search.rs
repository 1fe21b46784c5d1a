//! Finds the blocks that no table entry names, and where they belong.
//!
//! ```text
//!   gaps of the file ─▶ what their contents state ─▶ votes.rs: (payload at P is block b)
//!        ▲                                               │ enough to be a proof?
//!        │                                               ▼
//!        │                   every structure in the piece agrees, no other piece claims b,
//!        │                   and b has no valid entry ─▶ placed
//!        └───── again, as placed blocks tell more of their file systems (at most ROUNDS_MAX)
//! ```
//!
//! A valid table entry wins over a piece that claims its block; the piece is a leftover, with this
//! reason. Two pieces that claim one block are both leftovers, also if one of them was placed in an
//! earlier round. With [`RescueOptions::trust_absent`] an entry that says "no data" is valid too.
//!
//! At the end every placed block is verified once more with all that is known then. What is left
//! in the gaps and is not zero is a leftover: data of the disk, or space that was freed and not
//! cleared. Nothing tells these apart.
//!
//! Only blocks of the image itself tell of its file systems, not those of its parents: what a
//! parent has there may be older.
//!
//! Time: each round reads what the file stores at most 8 times for the votes (a VHD's payload can
//! begin at 8 places within 4 KiB), [`LEARN_PASSES`] times to learn and [`VERIFY_PASSES`] times to
//! verify.

use super::{
    gaps::{SILENT, each_window, has_data, list_leftovers},
    options::RescueOptions,
    outcome::{Leftover, PlacedBlock},
    source::Damaged,
    votes::{Blocks, CONTRADICTS, Claim, SEVERAL, count_votes},
};
use crate::{DiskError, Progress, Result, error::file_error, opening::volumes::examine};
use diskwright_image::salvage::{Fault, Salvaged};
use diskwright_volume::{Anchor, DiskEvidence, PROOF, Sighting, anchors_in};
use std::collections::{BTreeMap, HashMap, HashSet};

const ROUNDS_MAX: usize = 4;
/// How often a round may read what the file stores to learn the file systems.
const LEARN_PASSES: u64 = 4;
/// The least that may be read to learn them.
const LEARN_MIN_BYTES: u64 = 64 << 20;
/// How often a round may read what the file stores to verify claims.
const VERIFY_PASSES: u64 = 4;
/// Most file systems without a partition table.
const ANCHORS_MAX: usize = 1024;

/// The result of a search.
#[derive(Debug, Default)]
pub(super) struct SearchResult {
    pub(super) placed: Vec<PlacedBlock>,
    pub(super) leftovers: Vec<Leftover>,
    pub(super) unlisted_bytes: u64,
    /// Why blocks that the table calls absent may be lost.
    pub(super) doubts: Vec<String>,
}

const SECTORS: &str = "it is not known which of its sectors are the parent's";

type Evidence = BTreeMap<&'static str, u64>;

/// Blocks that were placed, and pieces that were not, with the reason.
#[derive(Debug, Default)]
struct Progressed {
    placed: HashMap<Claim, Evidence>,
    refused: HashMap<u64, &'static str>,
    /// Blocks that several pieces have claimed in some round: none of them is placed later.
    contested: HashSet<u64>,
}

impl Progressed {
    /// Takes a block back.
    fn unplace(&mut self, salvaged: &mut Salvaged, claim: Claim, why: &'static str) -> Result<()> {
        self.placed.remove(&claim);
        self.refused.insert(claim.payload_bytes, why);
        let store = std::sync::Arc::clone(&salvaged.store);
        Ok(salvaged.table.unplace(&*store, claim.block)?)
    }
}

/// Places what can be placed. Marks what is in doubt.
pub(super) fn search(
    damaged: &mut Damaged,
    options: &RescueOptions,
    progress: &mut Progress<'_>,
) -> Result<SearchResult> {
    let mut searched = SearchResult::default();
    if damaged.salvaged.table.is_linear() {
        return Ok(searched);
    }
    // The file is read several times; what is shown does not go back.
    let mut reached_bytes = 0;
    let progress: &mut Progress<'_> = &mut |done, total| {
        reached_bytes = done.max(reached_bytes);
        progress(reached_bytes, total)
    };
    let mut known = Progressed::default();
    let mut anchors = None;
    // The last round places nothing: it only takes back what is contradicted by then.
    for round in 0..=ROUNDS_MAX {
        // Without data in the gaps there is nothing to place.
        if !has_data(&damaged.salvaged, &damaged.salvaged.gaps(), progress)? {
            break;
        }
        if anchors.is_none() {
            anchors = Some(find_anchors(&damaged.salvaged, progress)?);
        }
        let file_systems = learn(damaged, anchors.as_deref().unwrap_or_default(), options)?;
        let places = round < ROUNDS_MAX;
        if !judge(&mut damaged.salvaged, &mut known, &file_systems, (options.trust_absent, places), progress)? {
            break;
        }
    }
    (searched.leftovers, searched.unlisted_bytes) = list_leftovers(&damaged.salvaged, &known.refused, None, progress)?;
    // A leftover may be the bitmap block of a chunk whose entry is lost.
    let unsure: Vec<Claim> =
        known.placed.keys().copied().filter(|claim| damaged.salvaged.may_have_lost_its_bitmap(claim.block)).collect();
    if !searched.leftovers.is_empty() {
        for claim in unsure {
            known.unplace(&mut damaged.salvaged, claim, SECTORS)?;
        }
        let folder = options.leftovers.as_deref().filter(|_| !options.dry_run);
        (searched.leftovers, searched.unlisted_bytes) =
            list_leftovers(&damaged.salvaged, &known.refused, folder, progress)?;
    }
    let block_bytes = damaged.salvaged.info.block_bytes;
    searched.placed = known
        .placed
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

/// One round: judges the placed blocks again, and places more if `places`. Returns whether anything
/// has changed.
fn judge(
    salvaged: &mut Salvaged,
    known: &mut Progressed,
    file_systems: &DiskEvidence,
    (trust_absent, places): (bool, bool),
    progress: &mut Progress<'_>,
) -> Result<bool> {
    // Who was a rival stays one, also if less is known now.
    known.refused.retain(|_, why| *why == SEVERAL);
    let ours: HashSet<u64> = known.placed.keys().map(|claim| claim.block).collect();
    let blocks = Blocks { trust_absent, ours: &ours };
    let votes = count_votes(salvaged, &blocks, file_systems, &mut known.refused, progress)?;
    let mut uncounted = votes.uncounted;
    let mut claims: Vec<(u32, Claim)> =
        votes.counted.into_iter().filter(|(_, sum)| *sum >= PROOF).map(|(claim, sum)| (sum, claim)).collect();
    claims.sort_unstable_by(|one, other| other.cmp(one));
    // Each byte of the gaps is verified for a few claims only: further ones contradict anyway.
    let mut budget_bytes = VERIFY_PASSES * salvaged.stored_bytes().max(salvaged.info.block_bytes);
    let mut stand: Vec<(Claim, Evidence)> = Vec::new();
    for (_, claim) in claims {
        if budget_bytes == 0 {
            // It was not refuted, so no other piece may have its block.
            uncounted.add(claim.block);
            continue;
        }
        match verify(salvaged, claim, file_systems, &mut budget_bytes, progress)? {
            Ok(evidence) => stand.push((claim, evidence)),
            Err(why) => drop(known.refused.insert(claim.payload_bytes, why)),
        }
    }
    let mut changed = false;
    let rivals: HashSet<u64> = stand.iter().map(|(claim, _)| claim.block).collect();
    // Blocks that were placed before are judged again by what is known now.
    for claim in known.placed.keys().copied().collect::<Vec<_>>() {
        let has_rival = uncounted.may_hold(claim.block) || rivals.contains(&claim.block);
        // A placed block was read before, and may be read again in each round.
        let mut unlimited_bytes = u64::MAX;
        let why = match verify(salvaged, claim, file_systems, &mut unlimited_bytes, progress)? {
            _ if has_rival => SEVERAL,
            Err(_) => CONTRADICTS,
            Ok(_) => continue,
        };
        known.unplace(salvaged, claim, why)?;
        known.contested.extend(has_rival.then_some(claim.block));
        changed = true;
    }
    let conflicts = conflicts(salvaged, &stand);
    for (index, (claim, evidence)) in stand.into_iter().enumerate() {
        let conflicts = conflicts.contains(&index) || ours.contains(&claim.block);
        if conflicts || uncounted.may_hold(claim.block) || known.contested.contains(&claim.block) {
            known.contested.insert(claim.block);
            known.refused.insert(claim.payload_bytes, SEVERAL);
        } else if places {
            match salvaged.held_at(claim.block, claim.payload_bytes) {
                Some(held) => {
                    let store = std::sync::Arc::clone(&salvaged.store);
                    salvaged.table.hold(&*store, claim.block, held)?;
                    known.placed.insert(claim, evidence);
                    changed = true;
                }
                None => drop(known.refused.insert(claim.payload_bytes, SECTORS)),
            }
        }
    }
    Ok(changed)
}

/// The claims that have their block or some of their space in common with another one.
fn conflicts(salvaged: &Salvaged, stand: &[(Claim, Evidence)]) -> HashSet<usize> {
    let mut found = HashSet::new();
    let mut by_block: HashMap<u64, usize> = HashMap::new();
    for (index, (claim, _)) in stand.iter().enumerate() {
        if let Some(other) = by_block.insert(claim.block, index) {
            found.extend([index, other]);
        }
    }
    let mut order: Vec<usize> = (0..stand.len()).collect();
    order.sort_unstable_by_key(|&index| stand[index].0);
    // The claim that reaches farthest so far.
    let mut reaching: Option<(usize, u64)> = None;
    for index in order {
        let claim = stand[index].0;
        if let Some((other, other_end)) = reaching
            && claim.payload_bytes - salvaged.lead_bytes() < other_end
        {
            found.extend([index, other]);
        }
        let end = claim.payload_bytes + salvaged.bytes_in_disk(claim.block);
        if reaching.is_none_or(|(_, other_end)| other_end < end) {
            reaching = Some((index, end));
        }
    }
    found
}

/// Why absent blocks may be lost, as sentences.
fn doubts_of(salvaged: &Salvaged, searched: &SearchResult, is_child: bool) -> Vec<String> {
    let bytes: u64 = searched.leftovers.iter().map(|piece| piece.len_bytes).sum::<u64>() + searched.unlisted_bytes;
    let mut doubts: Vec<String> =
        salvaged.doubts.iter().map(|why| format!("Blocks without data may be lost ones: {why}.")).collect();
    if bytes > 0 {
        doubts.push(format!(
            "The file has {bytes} bytes of data that no table entry names and that could not be placed, so a lost block may be taken for one without data{}.",
            if is_child { " (if the table is right there, use `RescueOptions::trust_absent`)" } else { "" }
        ));
    }
    if is_child && salvaged.has_spare_room() {
        doubts.push("The file has unused space, which a block of zeros with a lost entry may have (if the table is right there, use `RescueOptions::trust_absent`).".into());
    }
    doubts
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

fn learn(damaged: &Damaged, anchors: &[Anchor], options: &RescueOptions) -> Result<DiskEvidence> {
    let disk = damaged.own_disk()?;
    let budget_bytes = (LEARN_PASSES * damaged.salvaged.stored_bytes()).max(LEARN_MIN_BYTES);
    let mut file_systems = None;
    examine(&disk, options.source.engine, &mut |_, _| true, &mut |reader| {
        file_systems = Some(DiskEvidence::learn(reader, anchors, budget_bytes));
    })
    .map_err(|error| file_error("read it", &damaged.path, error))?;
    file_systems.ok_or(DiskError::Stopped)
}

/// Looks at every structure of a piece, as if it were this block of the disk. The inner error is
/// the reason against it. Takes what is read from the budget.
fn verify(
    salvaged: &Salvaged,
    claim: Claim,
    file_systems: &DiskEvidence,
    budget_bytes: &mut u64,
    progress: &mut Progress<'_>,
) -> Result<std::result::Result<Evidence, &'static str>> {
    let start_bytes = claim.block * salvaged.info.block_bytes;
    let range = claim.payload_bytes..claim.payload_bytes + salvaged.bytes_in_disk(claim.block);
    let mut evidence = Evidence::new();
    let mut sum = 0_u32;
    let mut contradicts = false;
    each_window(salvaged, &range, claim.payload_bytes, progress, &mut |at, bytes| {
        *budget_bytes = budget_bytes.saturating_sub(bytes.len() as u64);
        file_systems.look(bytes, &mut |seen| {
            let (Sighting::At { within_bytes, .. } | Sighting::Copies { within_bytes }) = seen;
            let here = start_bytes + (at - claim.payload_bytes) + within_bytes as u64;
            if file_systems.holds_copies(here) {
                return;
            }
            match seen {
                Sighting::At { disk_offset_bytes, weight, what, .. } if disk_offset_bytes == here => {
                    *evidence.entry(what).or_default() += 1;
                    sum = sum.saturating_add(weight);
                }
                _ => contradicts = true,
            }
        });
        !contradicts
    })?;
    Ok(match (contradicts, sum >= PROOF) {
        (true, _) => Err(CONTRADICTS),
        (false, false) => Err(SILENT),
        (false, true) => Ok(evidence),
    })
}
