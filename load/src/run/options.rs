//! Options of a run that are not part of the job.

use super::Buffers;

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
}

impl Default for RunOptions {
    fn default() -> Self {
        Self { keep_going: false, record_latency: true, labels: Vec::new(), buffers: Buffers::default() }
    }
}
