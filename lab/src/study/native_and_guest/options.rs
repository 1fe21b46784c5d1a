use crate::{guest::GuestChoice, study::StudyOptions};

/// Options of the study.
#[derive(Debug, Clone)]
pub struct NativeAndGuestOptions {
    /// Default: 5 rounds, 3 if quick; cells of 10 s, 0.4 s if quick.
    pub study: StudyOptions,
    /// Size of each disk, rounded up to a multiple of 32 MiB. Default: 8 GiB, 256 MiB if quick.
    pub size_bytes: Option<u64>,
    /// The guest.
    pub guest: GuestChoice,
}
