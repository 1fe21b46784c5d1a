//! Does the I/O that a plan needs first, without the mutation lock, and the commits after the
//! payload is in place.
//!
//! ```text
//!   plan ─▶ Work ─▶ by the queue's thread, or by the loader while the request rests ─▶ plan again
//!        ─▶ Ready ─▶ the engine ─▶ settle: commits, release of blocks
//! ```
//!
//! Tables are read with the chain that is current when the recording of changes begins. The chain
//! of the plan may lack an image that has joined since. What was written to that image before the
//! recording began would never be shown.
//!
//! Work that changes the file of the top image may run while another image joins on top. It ends
//! before [`Disk::push_layer`](crate::Disk::push_layer) closes the former top: a request is counted
//! in its epoch until the loader has its work, and a grace period waits for both.

use crate::{
    engine::{
        chain::{Chain, Member},
        claims::Key,
        guard::guarded,
        holes::next_known,
        map::{LayerId, Owner, Run, fold, push_joined},
        plan::{self, Pending},
        shared::{Job, LockedMutation, Shared},
        work::{Decoded, Work},
    },
    error,
};
use diskwright_image::Commit;
use diskwright_store::ExternalTicket;
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use std::{io, sync::Arc};

/// Maximum number of bytes copied at once by a copy-up.
const COPY_BYTES: u64 = 1 << 20;

/// The loader's job for a resting request: does `work` for the chain of the plan, then completes
/// the request's ticket.
pub(crate) fn load(chain: Arc<Chain>, work: Work, ticket: ExternalTicket) -> Job {
    Box::new(move |shared| ticket.complete(guarded(&shared.poison, || shared.carry_out(&chain, &work))))
}

impl Shared {
    /// Does a plan's work. May block on I/O; the caller must not hold a lock.
    pub(crate) fn carry_out(&self, chain: &Arc<Chain>, work: &Work) -> io::Result<()> {
        match work {
            Work::Begin { layer } => written(chain, *layer)?.begin_writing(),
            Work::Fold { page } => self.folded(chain, *page, true).map(drop),
            Work::Decide { unit } => self.decide(chain, *unit),
            Work::Prepare { layer, blocks } => Ok(written(chain, *layer)?.writer()?.prepare(blocks.clone())?),
            Work::CopyUp { layer, block } => {
                let exclusion = Exclusion { shared: self, key: (*layer, *block) };
                let copied = self.copy_up(chain, *layer, *block);
                drop(exclusion);
                copied
            }
            Work::ExplainDamage { layer, offset_bytes } => Err(chain.damage(*layer, *offset_bytes)),
            Work::Decompress { layer, block, into } => decompress(chain, *layer, *block, into),
        }
    }

    /// Begins to record changes, for a read of the tables of the current chain, which is returned.
    /// `None` if it has another map than `chain`.
    fn begin_reading(&self, chain: &Arc<Chain>) -> Option<(Arc<Chain>, LockedMutation<'_>)> {
        let mutation = self.lock();
        let now = Arc::clone(&mutation.chain);
        #[cfg(feature = "shuttle")]
        let now = if is_broken(Rule::TablesOfTheCurrentChain) { Arc::clone(chain) } else { now };
        Arc::ptr_eq(&now.map, &chain.map).then_some((now, mutation))
    }

    /// Folds a page and returns the owners of its units, with a chain that knows them. `keep`
    /// installs the page in the map. `None` if the chain has a new map by now, whose changes were
    /// not recorded here.
    fn folded(&self, chain: &Arc<Chain>, page: u64, keep: bool) -> io::Result<Option<(Arc<Chain>, Vec<Owner>)>> {
        loop {
            let Some((chain, mut mutation)) = self.begin_reading(chain) else { return Ok(None) };
            let begun = mutation.mixed.begin_fold(page);
            drop(mutation);
            // Every begin needs an end, even if the read panics. Otherwise changes of the page
            // would be recorded for ever.
            let mut folded = guarded(&self.poison, || fold::fold_page(&chain, page).map_err(error::to_io));
            let mut mutation = self.lock();
            let current = Arc::ptr_eq(&chain.map, &mutation.chain.map);
            let owners = folded.as_mut().ok().filter(|_| current);
            let good = mutation.mixed.end_fold(&chain.map, page, begun, owners);
            let owners = folded?;
            if !current {
                return Ok(None);
            }
            if good {
                if keep {
                    chain.map.install(page, &owners);
                }
                return Ok(Some((chain, owners)));
            }
        }
    }

    /// Decides a unit and caches the result, unless a change meanwhile prevents that: then the next
    /// plan asks for it again.
    fn decide(&self, chain: &Arc<Chain>, unit: u64) -> io::Result<()> {
        let Some((chain, mut mutation)) = self.begin_reading(chain) else { return Ok(()) };
        // The unit's owner may be known by now, or its page dropped.
        let Some(Owner::Lazy { layer }) = chain.map.word(unit) else { return Ok(()) };
        let begun = mutation.mixed.begin_decide(unit);
        drop(mutation);
        let decided = guarded(&self.poison, || fold::decide(&chain, unit, layer).map_err(error::to_io));
        let mut mutation = self.lock();
        let current = Arc::ptr_eq(&chain.map, &mutation.chain.map);
        let (runs, result) = match decided {
            Ok(runs) => (Some(runs).filter(|_| current), Ok(())),
            Err(error) => (None, Err(error)),
        };
        mutation.mixed.end_decide(&chain.map, unit, begun, runs);
        result
    }

    /// The runs of a range, for callers that may block. Returns a chain that knows all their ids.
    pub(crate) fn runs_blocking(&self, start: u64, end: u64, runs: &mut Vec<Run>) -> io::Result<Arc<Chain>> {
        runs.clear();
        let mut at = start;
        loop {
            let (chain, next) = {
                let mutation = self.lock();
                let next = plan::owned_runs(&mutation, at, end, runs);
                (Arc::clone(&mutation.chain), next)
            };
            let Some(work) = next else { return Ok(chain) };
            // Continue from here instead of starting over: a range can have more runs than the
            // cache holds, so its first runs may be dropped before its last ones are known.
            at = runs.last().map_or(start, Run::end_bytes);
            self.carry_out(&chain, &work)?;
        }
    }

    /// The runs of a range, for a walk over the whole disk. Pages that are not in memory are folded
    /// but not installed, so that a walk over 64 TiB does not evict other pages. Returns a chain
    /// that knows all ids in the runs.
    pub(crate) fn walk(
        &self,
        mut chain: Arc<Chain>,
        start: u64,
        end: u64,
        out: &mut Vec<Run>,
    ) -> io::Result<Arc<Chain>> {
        let mut at = start;
        while at < end {
            let map = Arc::clone(&chain.map);
            let page = map.page_of(at);
            let stop = map.page_end_bytes(page).min(end);
            if !map.is_resident(page) {
                // Most pages of a nearly empty disk need not be folded.
                let known = next_known(chain.layers(), at, end).map_err(error::to_io)?;
                let now = self.chain();
                if !Arc::ptr_eq(&now, &chain) {
                    // A layer has joined or left, or another image object has its place: the tables
                    // that were read may be out of date.
                    chain = now;
                    continue;
                }
                if known > at {
                    push_joined(out, Run { start_bytes: at, len_bytes: known - at, owner: Owner::Absent });
                    at = known;
                    continue;
                }
            }
            if map.is_resident(page) {
                let mut runs = Vec::new();
                // A layer may have joined meanwhile and own some of the runs.
                chain = self.runs_blocking(at, stop, &mut runs)?;
                runs.into_iter().for_each(|run| push_joined(out, run));
                at = stop;
            } else {
                (chain, at) = self.walk_page(&chain, page, at, stop, out)?;
            }
        }
        Ok(chain)
    }

    /// Walks `at..stop` of a page. Returns a chain that knows all ids in the runs, and the offset
    /// reached: `at` if the chain has a new map by now.
    fn walk_page(
        &self,
        chain: &Arc<Chain>,
        page: u64,
        at: u64,
        stop: u64,
        out: &mut Vec<Run>,
    ) -> io::Result<(Arc<Chain>, u64)> {
        let Some((folded, owners)) = self.folded(chain, page, false)? else { return Ok((self.chain(), at)) };
        let mut newest = Arc::clone(&folded);
        let (first_unit, _) = chain.map.units_of_page(page);
        for (unit, owner) in (first_unit..).zip(owners) {
            let (unit_start, unit_end) = chain.map.unit_range(unit);
            let (from, to) = (unit_start.max(at), unit_end.min(stop));
            if from >= to {
                continue;
            }
            if let Owner::Lazy { layer } = owner {
                let mut runs = Vec::new();
                newest = match self.decide_in_passing(&folded, unit, layer)? {
                    Some((now, decided)) => {
                        runs.extend(decided.iter().filter_map(|run| plan::clip(run, from, to)));
                        now
                    }
                    None => self.runs_blocking(from, to, &mut runs)?,
                };
                runs.into_iter().for_each(|run| push_joined(out, run));
            } else {
                let owner = owner.advanced(from - unit_start);
                push_joined(out, Run { start_bytes: from, len_bytes: to - from, owner });
            }
        }
        Ok((newest, stop))
    }

    /// The runs of a unit whose word in `chain` is lazy from `layer` down, with a chain that knows
    /// them. Nothing is cached. `None` if something changed meanwhile.
    fn decide_in_passing(
        &self,
        chain: &Arc<Chain>,
        unit: u64,
        layer: LayerId,
    ) -> io::Result<Option<(Arc<Chain>, Vec<Run>)>> {
        let Some((now, mut mutation)) = self.begin_reading(chain) else { return Ok(None) };
        let begun = mutation.mixed.begin_decide(unit);
        drop(mutation);
        // An image that has joined may own a part.
        let layer = if Arc::ptr_eq(&now, chain) { layer } else { now.top().id };
        let runs = guarded(&self.poison, || fold::decide(&now, unit, layer).map_err(error::to_io));
        let mut mutation = self.lock();
        let good = mutation.mixed.end_decide_in_passing(unit, begun);
        let current = Arc::ptr_eq(&now.map, &mutation.chain.map);
        Ok(Some((now, runs?)).filter(|_| good && current))
    }

    /// Commits a change, for callers that may block.
    pub(crate) fn commit_blocking(&self, member: &Member, block: u64, change: Commit) -> io::Result<()> {
        loop {
            if self.lock().commit(member, block, change)?.is_some() {
                return Ok(());
            }
            member.writer()?.prepare(block..block + 1)?;
        }
    }

    /// Commits the changes of a request whose payload is in place, and releases its blocks. After
    /// an error only releases them.
    pub(crate) fn settle(&self, pending: &Pending, result: io::Result<()>) -> io::Result<()> {
        let Some(member) = &pending.member else { return result };
        let outcome = guarded(&self.poison, || {
            result?;
            pending.commits.iter().try_for_each(|&(block, change)| self.commit_blocking(member, block, change))?;
            let writer = member.writer()?;
            pending.initialised.iter().for_each(|&block| writer.initialised(block));
            Ok(())
        });
        let mut mutation = self.lock();
        for &block in pending.commits.iter().map(|(block, _)| block).chain(&pending.initialised) {
            mutation.claims.release((member.id, block));
        }
        outcome
    }

    /// Copy-up: fills a block from the layers below, so that the layer has all its sectors. The
    /// caller has excluded the block. Reads of the block in flight use the old mapping.
    pub(crate) fn copy_up(&self, chain: &Arc<Chain>, layer: LayerId, block: u64) -> io::Result<()> {
        let top = written(chain, layer)?;
        let (start, end) = top.block_range(block, chain.geometry.size_bytes);
        let mut runs = Vec::new();
        let now = self.runs_blocking(start, end, &mut runs)?;
        if !now.takes_writes(layer) || now.geometry != chain.geometry {
            // An image has joined on top, or the last block has grown: the request is planned
            // again.
            return Ok(());
        }
        let chain = &now;
        let reservation = top.writer()?.reserve_waiting(block)?;
        let store = top.image.stores().get(usize::from(reservation.store)).unwrap_or(top.image.store());
        if let Some((offset_bytes, bytes)) = &reservation.init {
            store.write_at(bytes, *offset_bytes)?;
            top.writer()?.initialised(block);
        }
        let mut buf = vec![0; (end - start).min(COPY_BYTES) as usize];
        let mut decoded: Option<(LayerId, u64, Decoded)> = None;
        for run in runs {
            let place = reservation.offset_bytes + (run.start_bytes - start);
            let own = top.source(reservation.store);
            if run.owner == (Owner::Data { source: own, offset_bytes: place }) {
                continue;
            }
            for at in (run.start_bytes..run.end_bytes()).step_by(COPY_BYTES as usize) {
                let buf = &mut buf[..(run.end_bytes() - at).min(COPY_BYTES) as usize];
                match run.owner.advanced(at - run.start_bytes) {
                    Owner::Data { source, offset_bytes } => {
                        let source =
                            chain.source(source).ok_or_else(|| io::Error::other("a layer has left the chain"))?;
                        source.read_at(buf, offset_bytes)?;
                    }
                    Owner::Damaged { layer } => return Err(chain.damage(layer, at)),
                    Owner::Compressed { layer } => {
                        let member = chain.member(layer).unwrap_or(top);
                        let compressed_block = at / member.block_bytes;
                        let cell = match &decoded {
                            Some((of_layer, of_block, cell)) if (*of_layer, *of_block) == (layer, compressed_block) => {
                                Arc::clone(cell)
                            }
                            _ => {
                                let cell = Decoded::default();
                                decompress(chain, layer, compressed_block, &cell)?;
                                decoded = Some((layer, compressed_block, Arc::clone(&cell)));
                                cell
                            }
                        };
                        let within = (at % member.block_bytes) as usize;
                        let bytes = cell.get().and_then(|bytes| bytes.get(within..within + buf.len()));
                        buf.copy_from_slice(bytes.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?);
                    }
                    Owner::Zero { .. } | Owner::Absent | Owner::Lazy { .. } => buf.fill(0),
                }
                store.write_at(buf, place + (at - run.start_bytes))?;
            }
        }
        self.commit_blocking(top, block, Commit::Whole)
    }
}

/// The layer that takes writes, by its id.
fn written(chain: &Chain, layer: LayerId) -> io::Result<&Member> {
    chain.member(layer).ok_or_else(|| io::Error::other("a layer has left the chain"))
}

fn decompress(chain: &Chain, layer: LayerId, block: u64, into: &Decoded) -> io::Result<()> {
    let member = chain.member(layer).ok_or_else(|| io::Error::other("a layer has left the chain"))?;
    let (start, end) = member.block_range(block, member.size_bytes);
    let mut bytes = vec![0; (end - start) as usize].into_boxed_slice();
    member.image.read_compressed(block, 0, &mut bytes)?;
    // Another thread may have set the same bytes first.
    let _ = into.set(bytes);
    Ok(())
}

/// Ends the exclusion of a block on drop, also after an error or a panic.
struct Exclusion<'a> {
    shared: &'a Shared,
    key: Key,
}

impl Drop for Exclusion<'_> {
    fn drop(&mut self) {
        self.shared.lock().claims.end_exclusion(self.key);
    }
}
