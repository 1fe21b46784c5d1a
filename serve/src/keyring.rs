//! Secrets that can be replaced while servers run.
//!
//! The servers of a process share one [`Keyring`]. A client that connects is asked by the secrets
//! of that moment; sessions that exist go on.

use crate::secrets::Secrets;
use std::sync::{Arc, PoisonError, RwLock};

/// See the module.
#[derive(Debug)]
pub struct Keyring(RwLock<Arc<Secrets>>);

impl Keyring {
    /// With these secrets at first.
    pub fn new(secrets: Secrets) -> Self {
        Self(RwLock::new(Arc::new(secrets)))
    }

    /// The secrets of now.
    pub fn current(&self) -> Arc<Secrets> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Uses these secrets for all clients that connect from now on. For an NVMe/TCP server they
    /// must have passed [`nvme::check_keys`](crate::nvme::check_keys).
    pub fn replace(&self, secrets: Secrets) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(secrets);
    }
}
