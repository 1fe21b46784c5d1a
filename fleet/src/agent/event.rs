//! What the program that starts an agent is told.

use crate::identity::Fingerprint;
use std::sync::Arc;

/// What an agent tells the one who started it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// A controller was admitted.
    Admitted(Fingerprint),
    /// A peer was refused.
    Refused(String),
    /// A run has begun.
    Begun(String),
    /// The run is over, or was given up; why, if it failed.
    Ended(Option<String>),
    /// The controller cannot be reached; it is tried again.
    Unreachable(String),
}

/// Receives events.
pub type Events = Arc<dyn Fn(Event) + Send + Sync>;
