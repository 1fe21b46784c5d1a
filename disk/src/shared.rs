//! What a disk and its queues share.
//!
//! ```text
//!   Shared ─┬─ current    the chain: swapped as one, fetched again by each queue when the epoch has moved on
//!           ├─ mutation   one mutex: words of the map, commits, claims of blocks
//!           ├─ epochs     when freed space can be used again, and when an old chain is out of use
//!           └─ flusher, loader, recycler   threads that wait for the disk
//! ```
//!
//! Nothing waits for the disk while it holds the mutation lock. What must wait is [`Work`](crate::work::Work), done without the lock.
//! Lock order: `retired` of a layer (`chain.rs`), then mutation, then `current`, then whatever an image locks inside.
//!
//! Invariant: the chain is changed only under the mutation lock, and published in `current` before the epoch moves on. So a
//! request that was counted in after that sees the new chain, and a grace period waits for those that may not.

use crate::{
    DiskError, Result,
    chain::{Chain, Member},
    claims::Claims,
    clerk::{Clerk, Since},
    epoch::{Epochs, Grace},
    map::Mixed,
    work::{self, LoadJob},
};
use diskwright_image::{BlockState, Commit};
#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::{
    ExternalTicket,
    sync::{
        Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
        thread,
    },
};
use std::{
    io,
    sync::{Arc, PoisonError},
};

/// What the mutation lock guards.
#[derive(Debug)]
pub(crate) struct Mutation {
    pub(crate) chain: Arc<Chain>,
    pub(crate) mixed: Mixed,
    pub(crate) claims: Claims,
    /// The grace period under way, and what may be recycled after it.
    grace: Option<(Grace, Member, u64)>,
    recycled_generation: u64,
}

impl Mutation {
    /// Changes the mapping of a block, and what is known of it. `None` says that the image must be prepared first.
    pub(crate) fn commit(&mut self, member: &Member, block: u64, change: Commit) -> io::Result<Option<BlockState>> {
        let Some(state) = member.writer()?.commit(block, change)? else { return Ok(None) };
        let chain = Arc::clone(&self.chain);
        self.mixed.changed(&chain, member, block, change, state);
        Ok(Some(state))
    }
}

/// Whether the disk is closed, and what keeps it from being closed.
#[derive(Debug, Default)]
struct Closing {
    closed: bool,
    queues: usize,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) epochs: Epochs,
    flusher: Clerk<ExternalTicket>,
    pub(crate) loader: Clerk<LoadJob>,
    recycler: Clerk<(Member, u64)>,
    /// [`OpenOptions::detect_zeroes`](crate::OpenOptions::detect_zeroes), on a disk that grows.
    pub(crate) detect_zeroes: bool,
    mutation: Mutex<Mutation>,
    current: Mutex<Arc<Chain>>,
    /// Set for good when a sync failed, or when it is unknown what the kernel still writes: nothing can be called durable any more.
    poisoned: AtomicBool,
    closing: Mutex<Closing>,
    pub(crate) warnings: Vec<String>,
    /// Why the chain ends before its base.
    pub(crate) broken: Option<DiskError>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    pub(crate) fn new(chain: Chain, warnings: Vec<String>) -> Self {
        let chain = Arc::new(chain);
        Self {
            epochs: Epochs::default(),
            flusher: Clerk::new("flusher", flush_for),
            loader: Clerk::new("loader", work::load_for),
            recycler: Clerk::new("recycler", recycle_for),
            detect_zeroes: false,
            current: Mutex::new(Arc::clone(&chain)),
            mutation: Mutex::new(Mutation {
                chain,
                mixed: Mixed::default(),
                claims: Claims::default(),
                grace: None,
                recycled_generation: 0,
            }),
            poisoned: AtomicBool::new(false),
            closing: Mutex::default(),
            warnings,
            broken: None,
        }
    }

    /// Takes the mutation lock. A panic elsewhere poisons the disk (`guard.rs`), not the lock: reads go on.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Mutation> {
        lock(&self.mutation)
    }

    /// The chain as it is now.
    pub(crate) fn chain(&self) -> Arc<Chain> {
        Arc::clone(&lock(&self.current))
    }

    /// Puts another chain in the place of this one. Requests that look things up in the old chain may still be in flight: see
    /// [`Shared::wait_for_grace`].
    pub(crate) fn publish(&self, mutation: &mut Mutation, chain: Chain) {
        let chain = Arc::new(chain);
        if !Arc::ptr_eq(&chain.map, &mutation.chain.map) {
            // Queues that still have the old chain must not find anything in its map from now on: commits of the new chain do not
            // reach it.
            mutation.chain.map.clear();
            mutation.mixed.start_over();
        }
        if chain.top().id != mutation.chain.top().id {
            mutation.recycled_generation = 0;
        }
        mutation.chain = Arc::clone(&chain);
        *lock(&self.current) = chain;
    }

    /// Waits until every request that was counted in before this call has ended. Not to be called by a thread that has requests
    /// in flight.
    pub(crate) fn wait_for_grace(&self) {
        let grace = loop {
            let mut mutation = self.lock();
            self.recycle_if_over(None, &mut mutation);
            if mutation.grace.is_none() {
                break self.epochs.begin_grace();
            }
            drop(mutation);
            pause();
        };
        while !self.epochs.grace_over(grace) {
            pause();
        }
    }

    /// Waits until all space has been given back whose grace period is over.
    pub(crate) fn settle_recycler(&self) {
        self.recycler.settle();
    }

    /// Nothing can be called durable from now on.
    pub(crate) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// Fails once a sync has failed, of the disk's or of its image's.
    pub(crate) fn check_poison(&self, top: &Member) -> io::Result<()> {
        if self.poisoned.load(Ordering::Acquire) {
            return Err(io::Error::other(
                "an earlier flush of this disk failed, so nothing can be called durable any more: close it, check it, open it again",
            ));
        }
        // An image also syncs while it makes room for a block.
        if let Some(writer) = top.image.writer() {
            writer.check_syncs()?;
        }
        Ok(())
    }

    /// Has a flush done by the flusher, and the ticket completed then.
    pub(crate) fn request_flush(self: &Arc<Self>, ticket: ExternalTicket) {
        self.flusher.request(self, ticket);
    }

    /// Makes payload and metadata durable, blocking: of the top, and of a layer below that was the top a moment ago.
    pub(crate) fn flush_blocking(self: &Arc<Self>) -> io::Result<()> {
        let chain = self.chain();
        self.check_poison(chain.top())?;
        let top = chain.top();
        let mut freed = 0;
        for member in chain.members().iter().rev() {
            let Some(writer) = member.image.writer() else { continue };
            let generation = writer.freed_generation();
            if let Err(error) = writer.flush().map_err(io::Error::from) {
                // A table that found no space is still in memory, and goes out with the next flush. (Where it was a sync that found
                // none, the image refuses by itself from now on.)
                if !diskwright_store::is_full(&error) {
                    self.poison();
                }
                return Err(error);
            }
            if member.id == top.id {
                freed = generation;
            }
        }
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::FreedBeforeTheFlush) {
            freed = top.writer()?.freed_generation();
        }
        let mut mutation = self.lock();
        self.recycle_if_over(Some(self), &mut mutation);
        if mutation.grace.is_none() && freed > mutation.recycled_generation && mutation.chain.top().id == top.id {
            mutation.grace = Some((self.epochs.begin_grace(), top.clone(), freed));
            self.recycle_if_over(Some(self), &mut mutation);
        }
        Ok(())
    }

    /// Has space given back to the image if its grace period is over. The recycler does it, for a file system may take its time.
    pub(crate) fn try_recycle(self: &Arc<Self>, mutation: &mut Mutation) {
        if mutation.grace.is_some() {
            self.recycle_if_over(Some(self), mutation);
        }
    }

    fn recycle_if_over(&self, this: Option<&Arc<Self>>, mutation: &mut Mutation) {
        let Some((grace, member, generation)) = mutation.grace.take_if(|(grace, ..)| self.epochs.grace_over(*grace))
        else {
            return;
        };
        let _ = grace;
        mutation.recycled_generation = generation;
        match this {
            Some(this) => this.recycler.request(this, (member, generation)),
            // Whoever waits for a grace period may wait for this too.
            None => recycle(&member, generation),
        }
    }

    /// A queue is going to be opened.
    ///
    /// # Errors
    /// When the disk was closed.
    pub(crate) fn queue_opens(&self) -> io::Result<()> {
        let mut closing = lock(&self.closing);
        if closing.closed {
            return Err(io::Error::other("the disk was closed; open it again"));
        }
        closing.queues += 1;
        Ok(())
    }

    /// A queue is gone.
    pub(crate) fn queue_closed(&self) {
        lock(&self.closing).queues -= 1;
    }

    /// Closes the disk, if no queue is open. A close that failed, perhaps for want of space, can be tried again.
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
            self.flusher.settle();
            self.loader.settle();
            self.recycler.settle();
        }
        if let Some(writer) = chain.top().image.writer() {
            self.check_poison(chain.top()).map_err(|source| DiskError::File {
                doing: "close the disk cleanly",
                path: chain.layers()[0].path.clone(),
                source,
            })?;
            writer.close()?;
        }
        closing.closed = true;
        Ok(())
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Nobody is left to be told of a failure; whoever must know calls `Disk::close`. The clerks have nothing in hand: each holds
        // the disk while it works.
        let _ = self.close(false);
    }
}

fn pause() {
    #[cfg(not(feature = "shuttle"))]
    thread::sleep(std::time::Duration::from_micros(200));
    #[cfg(feature = "shuttle")]
    thread::yield_now();
}

fn recycle(member: &Member, generation: u64) {
    if let Some(writer) = member.image.writer() {
        writer.recycle(generation);
    }
}

fn recycle_for(_shared: &Arc<Shared>, jobs: Vec<(Member, u64)>, _since: Since<'_, (Member, u64)>) {
    jobs.iter().for_each(|(member, generation)| recycle(member, *generation));
}

/// One flush for all who have asked before it began.
fn flush_for(shared: &Arc<Shared>, tickets: Vec<ExternalTicket>, since: Since<'_, ExternalTicket>) {
    let result = shared.flush_blocking();
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

/// The same result once more: errors cannot be cloned, but their kind and words can.
fn same(result: &io::Result<()>) -> io::Result<()> {
    match result {
        Ok(()) => Ok(()),
        Err(error) => match error.raw_os_error() {
            Some(code) => Err(io::Error::from_raw_os_error(code)),
            None => Err(io::Error::new(error.kind(), error.to_string())),
        },
    }
}
