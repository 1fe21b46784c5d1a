//! The load and the figures of the paper.

/// Clients; the paper has twenty virtual machines.
pub const CLIENTS: u32 = 20;

/// The paper's three loads: name, and outstanding requests of each client (section 4.6, table 7).
pub const LOADS: [(&str, u32); 3] = [("light", 2), ("medium", 4), ("heavy", 6)];

/// "All protocols perform within 9% of one another" in throughput, and within 10 % in latency
/// (section 5). The charts' figures are not in the paper's text.
pub const PAPER_WITHIN: (f64, f64) = (0.09, 0.10);
