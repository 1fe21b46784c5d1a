//! Another server for a ublk device whose server has died.
//!
//! ```text
//!   server dies ─▶ the kernel keeps the device, and its requests wait
//!     ─▶ was anything lost? (`ublk/risk.rs`) ─ yes ─▶ the disk is detached by force
//!     ─▶ start recovery ─▶ server process: opens the image, fetches every tag ─▶ end recovery
//!     ─▶ requests that waited go on, those that were in flight are made again
//! ```
//!
//! A request that was in flight may have been carried out by the former server, and is carried out
//! again. Writes, zeroes and discards may be repeated: the file system that sent them has not been
//! told that they ended, and does not send another one for the same range until then.
//!
//! The name of the image may lead to another file by now, because a user has replaced it. So the
//! file must be the one that was attached, or one that the former server has published as its own
//! (`control/folder.rs`).
//!
//! A server that dies again soon after it took over is not replaced: the same request would
//! probably kill the next one.

use super::{
    error::AttachError,
    process::Process,
    record::AttachMethod,
    setup::{self, Start},
    supervisor::Attached,
    wait_until,
};
use crate::{
    control,
    ublk::{self, FoundDevice, UblkError},
};
use rustix::io::Errno;
use std::time::{Duration, Instant};

/// How long the kernel may take to see that the former server has ended.
const END_PATIENCE: Duration = Duration::from_secs(10);
/// A server that dies within this time after it took over is not replaced.
const SOON: Duration = Duration::from_secs(10);

impl Attached {
    /// Gives the device to another server. `how` is how the former one ended.
    ///
    /// # Errors
    /// A phrase why this cannot be done; `None` if the device does not outlive its server. The disk
    /// must be detached then.
    pub(super) fn recover(&mut self, how: &str) -> Result<(), Option<String>> {
        let outlives = self.record.by == AttachMethod::Ublk && self.record.device.is_some() && !self.record.ephemeral;
        if !outlives || self.closed.is_some() {
            return Err(None);
        }
        if self.recovered_at.is_some_and(|at| at.elapsed() < SOON) {
            return Err(Some(format!("it had taken over from another one less than {} s before", SOON.as_secs())));
        }
        if !ublk::is_safe(&self.home.risk()) {
            return Err(Some("completed writes to new blocks were lost with it".into()));
        }
        if !self.is_same_image() {
            let sentence = format!("{} is another file now", self.record.file.display());
            return Err(Some(sentence));
        }
        tracing::warn!("the server process {how}; another one takes the device over");
        self.take_over().map_err(|error| Some(format!("no other one could take over: {error}")))?;
        self.recovered_at = Some(Instant::now());
        Ok(())
    }

    /// Whether the name of the image still leads to what the former server had open: the file that
    /// was attached, or the one that a snapshot, a merge or a move has put in its place meanwhile.
    fn is_same_image(&self) -> bool {
        let file = &self.record.file;
        let is_first = self.identity.is_some() && control::identity(file).ok() == self.identity;
        is_first || self.record.server.is_some_and(|server| control::had_open(file, server))
    }

    fn take_over(&mut self) -> Result<(), AttachError> {
        let failed = |doing| move |source| UblkError::Device { doing, source };
        let mut control = ublk::control()?;
        let mark = self.record.ublk_mark.unwrap_or_default();
        let gone = || failed("find")(Errno::NODEV.into());
        let FoundDevice { number, .. } = FoundDevice::by_mark(&mut control, mark)?.ok_or_else(gone)?;
        let mut begun = Ok(());
        wait_until(END_PATIENCE, || {
            begun = control.start_recovery(number);
            !begun.as_ref().is_err_and(|error| Errno::from_io_error(error) == Some(Errno::BUSY))
        });
        begun.map_err(failed("recover"))?;
        self.closing = false;
        self.child =
            setup::start_server(&self.home, &self.record, Start::TakesOver(self.limits), &self.server, &self.sender)?;
        self.record.server = Process::of(self.child.id());
        self.home.write(&self.record)?;
        self.wait_for_server()?;
        let ended = control.end_recovery(number, self.child.id());
        Ok(ended.map_err(failed("recover"))?)
    }
}
