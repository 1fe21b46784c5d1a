//! One load from many machines: agents that make it, a controller that leads them, and what they
//! measured, merged.
//!
//! ```text
//!   plan ─▶ controller ──TLS──▶ agent: opens, checks and fills its targets ─▶ ready
//!              │  └────────────▶ agent                                          │
//!              │ clocks are compared, all start at the same time                │
//!              ▼                                                                ▼
//!        intervals of all, added ◀──────────────────────────────────────── they measure
//!              └─▶ Run: the threads of all agents, as if one machine had measured
//! ```
//!
//! | module | content |
//! |---|---|
//! | [`identity`], [`trust`] | keys and fingerprints; who may give orders |
//! | [`address`] | where a peer listens, and its fingerprint |
//! | [`wire`], [`link`] | messages; connections |
//! | [`message`] | what is asked and answered |
//! | [`clock`] | the offset between the clocks of two machines |
//! | [`agent`] | the program that makes load |
//! | [`controller`] | the program that leads agents |
//! | [`merge`] | the records of the agents as one |
//!
//! **Who decides what.** What an agent may touch is said on its own command line, never by the
//! controller: which targets there are, whether they may be written and data overwritten. A
//! controller chooses among them.
//!
//! **Nothing is measured twice and nothing is lost in silence.** Agents keep a record until the
//! controller has it on its disk. A lost agent is in the result, with the time until which its
//! figures are there.

pub mod address;
pub mod agent;
pub mod clock;
pub mod controller;
mod error;
pub mod identity;
pub mod link;
pub mod merge;
pub mod message;
#[cfg(feature = "testing")]
pub mod testing;
pub mod trust;
#[cfg(any(test, feature = "testing"))]
pub mod uneven;
pub mod wire;

pub use error::{FleetError, Result};

#[cfg(test)]
mod tests;
