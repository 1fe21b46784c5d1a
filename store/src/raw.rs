//! placeholder: helper writes
/// A raw device.
#[derive(Debug)]
pub struct RawDevice;
