//! A thread of a server: it builds what it runs by itself, because a ring belongs to the thread
//! that made it, and it is reached through its [`Inbox`].
//!
//! ```text
//!   start ─▶ thread: make(inbox) ─▶ told that it runs ─▶ run(made) ─▶ end(stop message), joined
//! ```

use crate::inbox::Inbox;
use std::{
    io,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
};

/// Why a thread of a server could not start, or ended early.
#[derive(Debug, thiserror::Error)]
pub enum ThreadError {
    /// io_uring is not available.
    #[error(
        "cannot set up the server's io_uring: {source}; the server needs Linux 5.11 or newer with io_uring enabled (check sysctl kernel.io_uring_disabled and seccomp filters)"
    )]
    Ring {
        /// The cause.
        source: io::Error,
    },
    /// The thread could not be started.
    #[error("cannot start a thread of the server: {source}")]
    Start {
        /// The cause.
        source: io::Error,
    },
    /// The thread ended with an error or a panic.
    #[error("a thread of the server ended early: {what}; its clients were cut off")]
    Died {
        /// The error, or that it panicked.
        what: String,
    },
}

/// A running thread and its messages.
#[derive(Debug)]
pub(crate) struct ServerThread<M> {
    inbox: Arc<Inbox<M>>,
    thread: JoinHandle<io::Result<()>>,
}

impl<M: Send + 'static> ServerThread<M> {
    /// Starts a thread and waits until it has built what it will run.
    ///
    /// # Errors
    /// [`ThreadError`].
    pub(crate) fn start<T>(
        name: &str,
        make: impl FnOnce(Arc<Inbox<M>>) -> io::Result<T> + Send + 'static,
        run: impl FnOnce(T) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, ThreadError> {
        Self::start_with(Self::new_inbox()?, name, make, run)
    }

    /// An inbox for a thread that others must know before it starts.
    ///
    /// # Errors
    /// [`ThreadError::Start`].
    pub(crate) fn new_inbox() -> Result<Arc<Inbox<M>>, ThreadError> {
        Ok(Arc::new(Inbox::new().map_err(|source| ThreadError::Start { source })?))
    }

    /// As [`ServerThread::start`], for a thread whose inbox is there already.
    ///
    /// # Errors
    /// [`ThreadError`].
    pub(crate) fn start_with<T>(
        inbox: Arc<Inbox<M>>,
        name: &str,
        make: impl FnOnce(Arc<Inbox<M>>) -> io::Result<T> + Send + 'static,
        run: impl FnOnce(T) -> io::Result<()> + Send + 'static,
    ) -> Result<Self, ThreadError> {
        let (tell, told) = mpsc::sync_channel(1);
        let theirs = Arc::clone(&inbox);
        let thread = thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                let made = match make(theirs) {
                    Ok(made) => made,
                    Err(error) => {
                        let _ = tell.send(Err(error));
                        return Ok(());
                    }
                };
                let _ = tell.send(Ok(()));
                run(made).inspect_err(|error| tracing::error!(%error, "a thread of the server failed"))
            })
            .map_err(|source| ThreadError::Start { source })?;
        match told.recv() {
            Ok(Ok(())) => Ok(Self { inbox, thread }),
            Ok(Err(source)) => Err(ThreadError::Ring { source }),
            Err(_) => Err(ThreadError::Died { what: "it panicked while it was starting".into() }),
        }
    }

    pub(crate) fn inbox(&self) -> &Arc<Inbox<M>> {
        &self.inbox
    }

    pub(crate) fn is_finished(&self) -> bool {
        self.thread.is_finished()
    }

    /// Sends the message that ends the thread, and waits for its end.
    ///
    /// # Errors
    /// [`ThreadError::Died`] if it had ended with an error.
    pub(crate) fn end(self, stop: M) -> Result<(), ThreadError> {
        self.inbox.put(stop);
        let what = match self.thread.join() {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "it panicked".into(),
        };
        Err(ThreadError::Died { what })
    }
}
