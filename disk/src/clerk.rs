//! Threads that wait for the disk, so that queues need not.
//!
//! A disk has three clerks: the *flusher* makes metadata durable, the *loader* reads tables and
//! fills blocks for requests that wait for that, the *recycler* gives space back to the file
//! system. A queue that shares its ring with others hands them what would wait; the tickets of its
//! requests are completed when that is done.
//!
//! ```text
//!   request ─▶ channel ─▶ thread: all jobs that have gathered, in one call of `handle` ─▶ tickets completed
//! ```
//!
//! A clerk's thread is started by its first job, holds only a weak reference to the disk, and ends
//! with it. Jobs that are left then are dropped, which completes their tickets with an error.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::sync::{
    mpsc::{Receiver, Sender, channel},
    thread,
};
use std::sync::{Arc, OnceLock, Weak};

/// Takes the jobs that have come since a call began.
pub(crate) type Since<'a, Job> = &'a mut dyn FnMut() -> Vec<Job>;

/// Does jobs for a disk.
pub(crate) type Handle<Disk, Job> = fn(&Arc<Disk>, Vec<Job>, Since<'_, Job>);

enum Item<Job> {
    Job(Job),
    /// Answered when everything before it has been done.
    Settle(Sender<()>),
}

/// One of a disk's clerks.
pub(crate) struct Clerk<Disk, Job> {
    name: &'static str,
    handle: Handle<Disk, Job>,
    sender: OnceLock<Sender<Item<Job>>>,
}

impl<Disk, Job> std::fmt::Debug for Clerk<Disk, Job> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Clerk({})", self.name)
    }
}

impl<Disk: Send + Sync + 'static, Job: Send + 'static> Clerk<Disk, Job> {
    /// A clerk whose thread has this name. `handle` is given the jobs that have gathered, and a way
    /// to take those that have come since.
    pub(crate) fn new(name: &'static str, handle: Handle<Disk, Job>) -> Self {
        Self { name, handle, sender: OnceLock::new() }
    }

    /// Has a job done. Where no thread can be started, the calling thread does it.
    pub(crate) fn request(&self, disk: &Arc<Disk>, job: Job) {
        if self.sender.get().is_none() {
            let (sender, receiver) = channel();
            // Of several who are here at once, one starts the thread.
            if self.sender.set(sender).is_ok() {
                let (disk, handle) = (Arc::downgrade(disk), self.handle);
                // Should it not start, the receiver is dropped with the closure, and sending fails
                // below.
                let _ = thread::Builder::new().name(self.name.into()).spawn(move || run(&disk, &receiver, handle));
            }
        }
        let Some(sender) = self.sender.get() else { return };
        if let Err(unsent) = sender.send(Item::Job(job))
            && let Item::Job(job) = unsent.0
        {
            (self.handle)(disk, vec![job], &mut Vec::new);
        }
    }

    /// Waits until everything that was requested before has been done. Not to be called by the
    /// clerk itself.
    pub(crate) fn settle(&self) {
        let Some(sender) = self.sender.get() else { return };
        let (answer, answered) = channel();
        if sender.send(Item::Settle(answer)).is_ok() {
            // An error says that the thread has ended, and with it all that it did.
            let _ = answered.recv();
        }
    }
}

fn run<Disk, Job>(disk: &Weak<Disk>, receiver: &Receiver<Item<Job>>, handle: Handle<Disk, Job>) {
    let mut settling: Vec<Sender<()>> = Vec::new();
    while let Ok(first) = receiver.recv() {
        let mut jobs = Vec::new();
        let mut sort = |item, jobs: &mut Vec<Job>| match item {
            Item::Job(job) => jobs.push(job),
            Item::Settle(answer) => settling.push(answer),
        };
        sort(first, &mut jobs);
        receiver.try_iter().for_each(|item| sort(item, &mut jobs));
        #[cfg(feature = "shuttle")]
        if is_broken(Rule::EveryJobIsDone) && jobs.len() > 1 {
            std::mem::forget(jobs.pop());
        }
        if !jobs.is_empty()
            && let Some(disk) = disk.upgrade()
        {
            let mut since = || {
                let mut later = Vec::new();
                receiver.try_iter().for_each(|item| sort(item, &mut later));
                later
            };
            handle(&disk, jobs, &mut since);
        }
        for answer in settling.drain(..) {
            // Who asked may have gone.
            let _ = answer.send(());
        }
    }
}
