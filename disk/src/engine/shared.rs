//! State shared by a disk and its queues.
//!
//! ```text
//!   Shared ─┬─ current    the chain, swapped as a whole; fetched again when the epoch changes
//!           ├─ mutation   one mutex: words of the map, commits, claims of blocks
//!           ├─ epochs     when freed space can be reused, and when an old chain is out of use
//!           └─ flusher, loader, recycler   background threads that do blocking I/O
//! ```
//!
//! No I/O happens under the mutation lock: [`LockedMutation`] checks it in every test. I/O that a
//! plan needs is [`Work`](crate::engine::work::Work), done without the lock. Lock order:
//! `changing`, mutation, `current`, then the locks inside an image.
//!
//! Invariant: the chain is changed only under the mutation lock, and is published in `current`
//! before the epoch changes. So a request that is counted later sees the new chain, and a grace
//! period waits for all requests that may not.

use crate::{
    DiskError, Result,
    engine::track::identity::close_tracks,
    engine::{
        background::{BackgroundWorker, NewJobs},
        chain::{Chain, Member},
        epoch::{Epochs, GracePeriod},
        guard::{Poison, guarded},
        mutation::{Mutation, Period},
    },
};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    ExternalTicket, NoIo,
    resize::SizeWatchers,
    sync::{Mutex, MutexGuard, thread},
};
use std::{
    io,
    ops::{Deref, DerefMut},
    sync::{Arc, PoisonError},
};

/// Whether the disk is closed, and how many queues are open.
#[derive(Debug, Default)]
struct CloseState {
    closed: bool,
    queues: usize,
}

/// A job for a worker.
pub(crate) type Job = Box<dyn FnOnce(&Arc<Shared>) + Send>;

/// State shared by a disk and its queues.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) epochs: Epochs,
    flusher: BackgroundWorker<Shared, ExternalTicket>,
    loader: BackgroundWorker<Shared, Job>,
    recycler: BackgroundWorker<Shared, Job>,
    /// [`OpenOptions::detect_zeroes`](crate::OpenOptions::detect_zeroes). Always false for a fixed
    /// disk.
    pub(crate) detect_zeroes: bool,
    mutation: Mutex<Mutation>,
    current: Mutex<Arc<Chain>>,
    /// Held during a change of the chain, from before the image is changed until the old chain is
    /// out of use.
    changing: Mutex<()>,
    pub(crate) poison: Poison,
    closing: Mutex<CloseState>,
    pub(crate) watchers: SizeWatchers,
    pub(crate) warnings: Vec<String>,
    /// Why the chain was not opened down to its base.
    pub(crate) broken: Option<DiskError>,
}

/// The mutation lock, held. A blocking call to a store panics meanwhile, with debug assertions.
#[derive(Debug)]
pub(crate) struct LockedMutation<'a> {
    mutation: MutexGuard<'a, Mutation>,
    _no_io: NoIo,
}

impl Deref for LockedMutation<'_> {
    type Target = Mutation;

    fn deref(&self) -> &Mutation {
        &self.mutation
    }
}

impl DerefMut for LockedMutation<'_> {
    fn deref_mut(&mut self) -> &mut Mutation {
        &mut self.mutation
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(chain: Chain, warnings: Vec<String>) -> Self {
        let chain = Arc::new(chain);
        Self {
            epochs: Epochs::default(),
            flusher: BackgroundWorker::new("flusher", flush_for),
            loader: BackgroundWorker::new("loader", do_jobs),
            recycler: BackgroundWorker::new("recycler", do_jobs),
            detect_zeroes: false,
            current: Mutex::new(Arc::clone(&chain)),
            changing: Mutex::new(()),
            mutation: Mutex::new(Mutation::new(chain)),
            poison: Poison::default(),
            closing: Mutex::default(),
            watchers: SizeWatchers::default(),
            warnings,
            broken: None,
        }
    }

    /// Takes the mutation lock, even after a panic in another thread. Such a panic poisons the disk
    /// (`guard.rs`), but reads continue.
    pub(crate) fn lock(&self) -> LockedMutation<'_> {
        LockedMutation { mutation: lock(&self.mutation), _no_io: NoIo::begin() }
    }

    /// The chain that new requests use.
    pub(crate) fn chain(&self) -> Arc<Chain> {
        Arc::clone(&lock(&self.current))
    }

    /// Replaces the current chain. Requests that use the old chain may still be in flight: see
    /// [`Shared::wait_for_grace`].
    pub(crate) fn publish(&self, mutation: &mut Mutation, chain: Chain) {
        let chain = Arc::new(chain);
        if !Arc::ptr_eq(&chain.map, &mutation.chain.map) {
            // Queues with the old chain must not find anything in its map from now on, as commits
            // to the new chain do not change that map.
            mutation.chain.map.clear();
            mutation.mixed.start_over();
        }
        mutation.chain = Arc::clone(&chain);
        *lock(&self.current) = chain;
    }

    /// Serialises changes of the chain. Must be taken before the mutation lock.
    pub(crate) fn begin_change(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }

    /// Waits until every request that was counted before this call, and the work it passed to the
    /// workers, has ended. Must not be called by a thread with requests in flight, nor by a worker.
    ///
    /// # Errors
    /// If a request was lost, as it is unknown when it ends.
    pub(crate) fn wait_for_grace(self: &Arc<Self>) -> io::Result<()> {
        let grace = self.begin_grace(|_| {})?;
        self.wait_for(grace)
    }

    /// Begins a grace period when no other one runs. `change` is called once, under the mutation
    /// lock, at the moment at which the period begins: a request that is planned later has been
    /// counted before, or sees the change and is counted later.
    ///
    /// # Errors
    /// As [`Shared::wait_for_grace`]; `change` was not called then.
    pub(crate) fn begin_grace(self: &Arc<Self>, change: impl FnOnce(&mut Mutation)) -> io::Result<GracePeriod> {
        loop {
            let mut mutation = self.lock();
            self.try_recycle(&mut mutation);
            if mutation.grace.is_none() {
                change(&mut mutation);
                let grace = self.epochs.begin_grace();
                mutation.grace = Some(Period { grace, recycles: Vec::new() });
                return Ok(grace);
            }
            drop(mutation);
            self.pause()?;
        }
    }

    /// Waits for the end of a grace period, as [`Shared::wait_for_grace`].
    pub(crate) fn wait_for(self: &Arc<Self>, grace: GracePeriod) -> io::Result<()> {
        while !self.epochs.grace_over(grace) {
            self.pause()?;
        }
        self.try_recycle(&mut self.lock());
        // A request is counted until the loader has its work.
        self.loader.settle();
        self.recycler.settle();
        Ok(())
    }

    /// Waits a moment for requests in flight.
    ///
    /// # Errors
    /// If a request was lost.
    pub(crate) fn pause(&self) -> io::Result<()> {
        pause();
        if self.epochs.is_stuck() {
            return Err(io::Error::other(
                "an earlier request of this disk was never answered, and may still be under way: close the disk, check it, open it again",
            ));
        }
        Ok(())
    }

    /// Fails once a sync of the disk, or of an image of `chain` that takes writes, has failed.
    pub(crate) fn check_poison(&self, chain: &Chain) -> io::Result<()> {
        if self.poison.is_set() {
            return Err(io::Error::other(
                "an earlier flush of this disk failed, so nothing can be called durable any more: close it, check it, open it again",
            ));
        }
        // An image also syncs when it allocates space for a block.
        for writer in chain.written().iter().filter_map(|member| member.image.writer()) {
            writer.check_syncs()?;
        }
        Ok(())
    }

    /// Passes a job to the loader.
    pub(crate) fn request_work(self: &Arc<Self>, job: Job) {
        self.loader.request(self, job);
    }

    /// Requests a flush. The flusher completes the ticket afterwards.
    pub(crate) fn request_flush(self: &Arc<Self>, ticket: ExternalTicket) {
        self.flusher.request(self, ticket);
    }

    /// Flushes payload and metadata of the top, of a parent that absorbs it, and of a former top
    /// that is not closed yet: the lowest first. Blocks on I/O.
    pub(crate) fn flush_blocking(self: &Arc<Self>) -> io::Result<()> {
        let chain = self.chain();
        self.check_poison(&chain)?;
        let mut freed = Vec::new();
        for member in chain.members().iter().rev().filter(|member| !member.is_at_rest) {
            let generation = self.flush_member(member)?;
            if chain.takes_writes(member.id) {
                freed.push((member.clone(), generation));
            }
        }
        // A sync by a queue may have failed meanwhile, and the kernel may have dropped pages that
        // this flush did not see.
        self.check_poison(&chain)?;
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::FreedBeforeTheFlush) {
            for (member, generation) in &mut freed {
                *generation = member.writer()?.freed_generation();
            }
        }
        self.recycle_after_grace(freed);
        Ok(())
    }

    /// Flushes one image. Returns the generation of freed space whose removal is durable now.
    /// Blocks on I/O.
    pub(crate) fn flush_member(&self, member: &Member) -> io::Result<u64> {
        let Some(writer) = member.image.writer() else { return Ok(0) };
        let generation = writer.freed_generation();
        writer.flush().map_err(io::Error::from).inspect_err(|error| {
            // A table that found no space on the file system stays in memory, and the next flush
            // writes it. (If a sync failed for lack of space, the image itself fails from now on.)
            if !diskwright_store::is_full(error) {
                self.poison.set();
            }
        })?;
        Ok(generation)
    }

    /// Begins a grace period after which space that images have freed up to these generations is
    /// used again. Does nothing if another period runs: a later flush comes back to it.
    pub(crate) fn recycle_after_grace(self: &Arc<Self>, freed: Vec<(Member, u64)>) {
        let mut mutation = self.lock();
        self.try_recycle(&mut mutation);
        if mutation.grace.is_some() {
            return;
        }
        let is_new = |(member, generation): &(Member, u64)| {
            mutation.chain.takes_writes(member.id)
                && *generation > mutation.recycled.get(&member.id).copied().unwrap_or(0)
        };
        let recycles: Vec<_> = freed.into_iter().filter(is_new).collect();
        if !recycles.is_empty() {
            mutation.grace = Some(Period { grace: self.epochs.begin_grace(), recycles });
            self.try_recycle(&mut mutation);
        }
    }

    /// If the grace period is over, passes the freed space to the recycler, as the file system may
    /// be slow.
    pub(crate) fn try_recycle(self: &Arc<Self>, mutation: &mut Mutation) {
        let Some(over) = mutation.grace.take_if(|period| self.epochs.grace_over(period.grace)) else { return };
        for (member, generation) in over.recycles {
            mutation.recycled.insert(member.id, generation);
            let recycle = move |shared: &Arc<Self>| {
                // After a panic the disk is poisoned, and the space stays unused until the disk is
                // reopened.
                let _ = guarded(&shared.poison, || {
                    if let Some(writer) = member.image.writer() {
                        writer.recycle(generation);
                    }
                    Ok(())
                });
            };
            self.recycler.request(self, Box::new(recycle));
        }
    }

    /// Waits until the workers have done all requested jobs and hold no reference to the disk. Must
    /// not be called by a worker.
    pub(crate) fn settle_workers(&self) {
        self.flusher.settle();
        self.loader.settle();
        self.recycler.settle();
        if let Some(view) = &self.chain().track {
            view.tracker.settle();
        }
    }

    /// Marks a range that is about to be changed without a queue, durably. May block on I/O; the
    /// caller must not hold a lock.
    pub(crate) fn mark_changed(&self, offset_bytes: u64, len_bytes: u64) -> io::Result<()> {
        while let Some(view) = &self.chain().track {
            if view.pass_blocking(offset_bytes, len_bytes)? {
                break;
            }
        }
        Ok(())
    }

    /// Begins to write the top image. If changes are tracked, their file names the image's coming
    /// identity before. Blocks on I/O; the caller must not hold a lock.
    pub(crate) fn begin_writing(&self) -> io::Result<()> {
        let chain = self.chain();
        if let Some(view) = &chain.track {
            view.tracker.lock().open()?;
        }
        chain.top().begin_writing()
    }

    /// Counts a queue that is being opened.
    ///
    /// # Errors
    /// If the disk was closed.
    pub(crate) fn queue_opens(&self) -> io::Result<()> {
        let mut closing = lock(&self.closing);
        if closing.closed {
            return Err(io::Error::other("the disk was closed; open it again"));
        }
        closing.queues += 1;
        Ok(())
    }

    /// Whether a queue is open.
    pub(crate) fn has_queues(&self) -> bool {
        lock(&self.closing).queues > 0
    }

    /// Ends the count of a queue.
    pub(crate) fn queue_closed(&self) {
        lock(&self.closing).queues -= 1;
    }

    /// Closes the disk if no queue is open. A failed close, for example on a full file system, can
    /// be retried.
    pub(crate) fn close(&self, settle: bool) -> Result<()> {
        let mut closing = lock(&self.closing);
        let chain = self.chain();
        if closing.queues > 0 {
            return Err(DiskError::BadOptions {
                what: format!("{}: the disk cannot be closed while queues are open", chain.layers()[0].path.display()),
                hint: "drop the queues first".into(),
            });
        }
        if closing.closed {
            return Ok(());
        }
        if settle {
            self.settle_workers();
        }
        // Former tops were closed when another image joined. They must not be written: a child may
        // have recorded when its parent was last changed. A parent that could not be closed after
        // it had absorbed blocks is closed before its child.
        let written = chain.members().iter().zip(chain.layers().iter()).filter(|(member, _)| !member.is_at_rest);
        for (member, layer) in written.rev() {
            let Some(writer) = member.image.writer() else { continue };
            self.check_poison(&chain).map_err(|source| DiskError::File {
                doing: "close the disk cleanly",
                path: layer.path.clone(),
                source,
            })?;
            writer.fill_gaps()?;
            writer.close()?;
        }
        close_tracks(&chain)?;
        closing.closed = true;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Errors are dropped here; a caller that needs them calls `Disk::close`. No worker has a
        // job, as each holds the disk while it works.
        let _ = self.close(false);
    }
}

fn pause() {
    #[cfg(not(feature = "shuttle"))]
    thread::sleep(std::time::Duration::from_micros(200));
    #[cfg(feature = "shuttle")]
    thread::yield_now();
}

fn do_jobs(shared: &Arc<Shared>, jobs: Vec<Job>, _since: NewJobs<'_, Job>) {
    jobs.into_iter().for_each(|job| job(shared));
}

/// One flush for all tickets that were requested before it began.
fn flush_for(shared: &Arc<Shared>, tickets: Vec<ExternalTicket>, since: NewJobs<'_, ExternalTicket>) {
    let result = guarded(&shared.poison, || shared.flush_blocking());
    let mut tickets = tickets;
    #[cfg(feature = "shuttle")]
    if is_broken(Rule::AnsweredByALaterCycle) {
        tickets.append(&mut since());
    }
    let _ = since;
    for ticket in tickets.drain(..) {
        ticket.complete(same(&result));
    }
}

/// A copy of a result. Errors cannot be cloned, but their kind and text can.
fn same(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => Err(io::Error::new(error.kind(), error.to_string())),
        },
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests;
