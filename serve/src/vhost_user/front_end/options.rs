//! How the test front-end uses the device, and where its guest's memory begins.

/// Where the guest's memory begins, for the guest and for the front-end.
pub(super) const GUEST_BASE: u64 = 0x4000_0000;
pub(super) const USER_BASE: u64 = 0x7f00_0000_0000;

/// How a front-end uses the device.
#[derive(Debug, Clone, Copy, Default)]
pub struct FrontOptions {
    /// Number of virtqueues.
    pub queues: usize,
    /// Requests in flight on each.
    pub depth: usize,
    /// Bytes of a request's payload in the guest's memory.
    pub payload_bytes: usize,
    /// Do not negotiate `F_FLUSH`: each write is durable.
    pub without_flush: bool,
    /// Do not negotiate `EVENT_IDX`.
    pub without_event_index: bool,
    /// Use an indirect table for each request.
    pub indirect: bool,
    /// Offset of payloads within their page, to test unaligned memory.
    pub payload_offset: usize,
    /// Leave payloads in the guest's memory: what is written is arbitrary, and what is read is not
    /// copied to the request's buffer. For benchmarks.
    pub leaves_payload: bool,
    /// Ask for memory that records requests in flight.
    pub records_in_flight: bool,
}
