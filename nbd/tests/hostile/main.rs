//! A server that lies, stalls or vanishes: each way ends in an error that says so, and never in a
//! panic, a hang or a heap of memory.

mod answers;
mod fake;
mod greeting;
mod vanishing;
