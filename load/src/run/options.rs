//! Options of a run that are not part of the job.

use super::Buffers;
use std::{fmt, sync::Arc, time::Instant};

/// Coordinates a run with the runs of other machines.
pub trait Coordinator: fmt::Debug + Send + Sync {
    /// Called when all threads of a phase have opened their queues; blocks until the others are
    /// ready too. Returns the start of the phase: the threads begin at once, and all times of the
    /// phase count from there. `None`: the phase is not run, and the run ends as stopped.
    fn start(&self) -> Option<Instant>;

    /// Start of the window of a phase that waits for the steady state, from the start of the phase,
    /// nanoseconds. `None` until it is decided. The phase does not decide by itself.
    fn window_start_ns(&self) -> Option<u64>;
}

/// Options of a run that are not part of the job.
#[derive(Debug, Clone)]
pub struct RunOptions {
    /// Continue when requests fail. The run still ends as [`crate::record::End::Failed`].
    pub keep_going: bool,
    /// Record latencies. `false` is for measuring the cost of recording.
    pub record_latency: bool,
    /// Labels for the record.
    pub labels: Vec<(String, String)>,
    /// Buffers that are kept from one run to the next.
    pub buffers: Buffers,
    /// Decides when phases start; `None`: they start when their threads are ready.
    pub coordinator: Option<Arc<dyn Coordinator>>,
}

impl Default for RunOptions {
    fn default() -> Self {
        Self {
            keep_going: false,
            record_latency: true,
            labels: Vec::new(),
            buffers: Buffers::default(),
            coordinator: None,
        }
    }
}
