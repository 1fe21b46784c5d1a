//! Workers: background threads of a disk that do blocking I/O, so that queues need not.
//!
//! A disk has three workers. The *flusher* makes metadata durable. The *loader* reads tables and
//! fills blocks for resting requests. The *recycler* returns freed space to the file system. A
//! queue with a shared ring passes them the work that would block, and they complete the tickets of
//! its requests.
//!
//! ```text
//!   request ─▶ channel ─▶ thread: all queued jobs in one call of `handle` ─▶ tickets completed
//! ```
//!
//! The first job of a worker starts its thread. The thread holds only a weak reference to the disk
//! and ends with it. Jobs left at that time are dropped, which completes their tickets with an
//! error.

#[cfg(feature = "shuttle")]
use diskwright_store::sync::broken::{Rule, is_broken};
use diskwright_store::sync::{
    mpsc::{Receiver, Sender, channel},
    thread,
};
use std::sync::{Arc, OnceLock, Weak};

/// Takes the jobs that were requested since the call of `handle` began.
pub(crate) type NewJobs<'a, Job> = &'a mut dyn FnMut() -> Vec<Job>;

/// Does queued jobs for a disk.
pub(crate) type Handle<Disk, Job> = fn(&Arc<Disk>, Vec<Job>, NewJobs<'_, Job>);

enum Item<Job> {
    Job(Job),
    /// Answered when all earlier jobs are done.
    Settle(Sender<()>),
}

/// A background thread of a disk.
pub(crate) struct BackgroundWorker<Disk, Job> {
    name: &'static str,
    handle: Handle<Disk, Job>,
    sender: OnceLock<Sender<Item<Job>>>,
}

impl<Disk, Job> std::fmt::Debug for BackgroundWorker<Disk, Job> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "BackgroundWorker({})", self.name)
    }
}

impl<Disk: Send + Sync + 'static, Job: Send + 'static> BackgroundWorker<Disk, Job> {
    /// A worker with this thread name. `handle` gets the queued jobs, and a function that takes
    /// jobs requested since.
    pub(crate) fn new(name: &'static str, handle: Handle<Disk, Job>) -> Self {
        Self { name, handle, sender: OnceLock::new() }
    }

    /// Requests a job. If no thread can be started, the calling thread does it.
    pub(crate) fn request(&self, disk: &Arc<Disk>, job: Job) {
        if self.sender.get().is_none() {
            let (sender, receiver) = channel();
            // Of several concurrent callers one starts the thread.
            if self.sender.set(sender).is_ok() {
                let (disk, handle) = (Arc::downgrade(disk), self.handle);
                // If the thread does not start, the receiver is dropped with the closure, and the
                // send below fails.
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

    /// Waits until all earlier jobs are done. Must not be called by the worker itself.
    pub(crate) fn settle(&self) {
        let Some(sender) = self.sender.get() else { return };
        let (answer, answered) = channel();
        if sender.send(Item::Settle(answer)).is_ok() {
            // An error means that the thread has ended, so it has no job.
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
            // The waiting thread may have ended.
            let _ = answer.send(());
        }
    }
}
