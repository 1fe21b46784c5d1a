//! Fleets: one load from many machines. The protocol, the clocks and the merging are those of
//! [`diskwright_fleet`]; here are the targets of an agent, and the plan of a controller.

mod agents;
mod keeper;
mod plan;

pub use agents::{Agents, OneLoad};
pub use keeper::{LabKeeper, TargetOfAgent};
pub use plan::{Group, Plan};
