//! The thread on which requests to servers wait.
//!
//! One thread for the process, with the runtime of an asynchronous HTTP client. It starts with the
//! first object that is opened, and stays. Work that blocks (the cache's files) goes to the
//! runtime's own pool of threads.

use std::{
    future::Future,
    io,
    sync::{OnceLock, mpsc},
    thread,
};
use tokio::runtime::{Builder, Handle};

/// Threads for the cache's files.
const BLOCKING_THREADS: usize = 8;

static RUNTIME: OnceLock<Handle> = OnceLock::new();

/// The runtime.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn handle() -> io::Result<Handle> {
    if let Some(handle) = RUNTIME.get() {
        return Ok(handle.clone());
    }
    let runtime = Builder::new_current_thread().enable_all().max_blocking_threads(BLOCKING_THREADS).build()?;
    let handle = runtime.handle().clone();
    let mut is_first = false;
    let chosen = RUNTIME.get_or_init(|| {
        is_first = true;
        handle
    });
    if is_first {
        thread::Builder::new().name("objects".into()).spawn(move || runtime.block_on(std::future::pending::<()>()))?;
    }
    Ok(chosen.clone())
}

/// Runs a future on the thread, and waits for its result.
///
/// # Errors
/// The thread cannot be started, or the future has panicked.
pub(crate) fn wait_for<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> io::Result<T> {
    let (sender, receiver) = mpsc::sync_channel(1);
    handle()?.spawn(async move {
        // Nobody waits any more if it fails.
        let _ = sender.send(future.await);
    });
    receiver.recv().map_err(|_| io::Error::other("the thread that reads objects has failed"))
}
