//! The thread that has a disk's queue.
//!
//! A queue belongs to the thread that opened it, and a Python object may be used from any thread.
//! So each open disk has a thread of its own, which carries out one request after the other. That
//! also makes a change of a part of a sector whole: nothing comes between its read and its write.
//!
//! ```text
//!   Python thread, without the GIL ── job ──▶ worker: DiskStream ── answer ──▶ Python thread
//! ```

use diskwright_lib::{BlockDevice, DiskStream};
use std::{
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

type Job = Box<dyn FnOnce(&mut DiskStream) + Send>;

/// Sends requests to a worker. The worker ends when all senders are gone.
#[derive(Clone)]
pub(crate) struct Requests(mpsc::Sender<Job>);

/// Starts a worker for `device`. It closes its queue before it ends.
///
/// # Errors
/// Where no thread or no queue can be had.
pub(crate) fn start(device: Arc<dyn BlockDevice>) -> io::Result<(Requests, JoinHandle<()>)> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let (tell, told) = mpsc::channel();
    let thread = thread::Builder::new().name("diskwright".into()).spawn(move || {
        let mut stream = match DiskStream::open(device) {
            Ok(stream) => stream,
            Err(error) => return drop(tell.send(Err(error))),
        };
        drop(tell.send(Ok(())));
        jobs.into_iter().for_each(|job| job(&mut stream));
    })?;
    told.recv().unwrap_or_else(|_| Err(gone()))?;
    Ok((Requests(sender), thread))
}

impl Requests {
    /// Has `work` done by the worker, and waits for its answer.
    ///
    /// # Errors
    /// Those of `work`.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut DiskStream) -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let (tell, told) = mpsc::channel();
        self.0.send(Box::new(move |stream| drop(tell.send(work(stream))))).map_err(|_| gone())?;
        told.recv().unwrap_or_else(|_| Err(gone()))
    }
}

fn gone() -> io::Error {
    io::Error::other("the thread of this disk has ended early; close the disk, and see what stands on standard error")
}
