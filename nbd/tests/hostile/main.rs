//! A server that violates the protocol, stalls or disappears. Every case must end in a clear error,
//! without a panic, a hang or excessive memory.

mod answers;
mod fake;
mod greeting;
mod vanishing;
