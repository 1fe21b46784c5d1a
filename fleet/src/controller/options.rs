//! Options of a fleet, and the agents of a plan.

use crate::{address::Address, identity::Identity};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Agents of a fleet at most. The checks of their numbers rely on it.
pub const AGENTS_MAX: usize = 256;

/// What happens when an agent is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnLoss {
    /// The others are stopped.
    #[default]
    Stop,
    /// The others go on to the end of their phase.
    GoOn,
}

/// Options of a fleet.
#[derive(Debug, Clone)]
pub struct FleetOptions {
    /// The controller's key and certificate.
    pub identity: Identity,
    /// How long an agent may be silent before it counts as lost.
    pub lost_after: Duration,
    /// What happens then.
    pub on_loss: OnLoss,
    /// Go on when requests fail.
    pub keep_going: bool,
    /// Labels for the record.
    pub labels: Vec<(String, String)>,
}

/// How an agent is reached.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Way {
    /// The controller dials.
    Dial(Address),
    /// The agent dials and is taken in by an [`Entrance`](super::Entrance).
    Await,
}

/// An agent of a plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Name in results.
    pub name: String,
    /// Group of the plan.
    pub group: String,
    /// How the controller reaches the agent.
    pub way: Way,
    /// Names of targets. Empty: all that the agent allows.
    pub targets: Vec<String>,
}
