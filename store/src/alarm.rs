//! An alarm that wakes the thread of a queue that holds requests back.
//!
//! A queue on a shared ring must not sleep itself. It sets the alarm, and the ring wakes the
//! worker, which reaps its queues.

use crate::{SharedRing, Streams, streams::StreamEnd};
use std::time::Duration;

/// Wakes the thread that waits for a shared ring.
#[derive(Debug)]
pub struct Alarm {
    streams: Streams,
    is_set: bool,
    ends: Vec<StreamEnd>,
}

impl Alarm {
    /// An alarm on `ring`.
    pub fn new(ring: &SharedRing) -> Self {
        Self { streams: Streams::new(ring), is_set: false, ends: Vec::new() }
    }

    /// Whether it was set and has not been taken since it went off.
    pub fn is_set(&self) -> bool {
        self.is_set
    }

    /// Sets the alarm, unless it is set.
    pub fn set(&mut self, after: Duration) {
        if !self.is_set {
            self.is_set = true;
            self.streams.timer(after, 0);
        }
    }

    /// Takes the alarm's answer from the ring, which does not sleep while it holds one.
    pub fn take(&mut self) {
        self.streams.reap(&mut self.ends);
        if self.ends.drain(..).count() > 0 {
            self.is_set = false;
        }
    }
}
