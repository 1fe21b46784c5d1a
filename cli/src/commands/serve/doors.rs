//! The ways into the disks of one `serve`: NBD, and a vhost-user device.

use crate::exit::{Failure, Outcome};
use diskwright_serve::{
    metrics::{Metrics, Totals},
    nbd::{Address, NbdServer},
    vhost_user::VhostUserServer,
};
use std::sync::Arc;

/// The servers that run. At least one of them is there.
#[derive(Debug)]
pub struct Doors {
    /// The NBD server.
    pub nbd: Option<NbdServer>,
    /// The device for a virtual machine.
    pub vhost_user: Option<VhostUserServer>,
}

impl Doors {
    /// The addresses of the NBD server.
    pub fn addresses(&self) -> &[Address] {
        self.nbd.as_ref().map_or(&[], NbdServer::addresses)
    }

    /// The counters of each server. The first are those that `serve-ctl` shows.
    pub fn metrics(&self) -> impl Iterator<Item = &Arc<Metrics>> {
        let nbd = self.nbd.iter().map(NbdServer::metrics);
        nbd.chain(self.vhost_user.iter().map(VhostUserServer::metrics))
    }

    /// The counters of the first server, for the live line.
    pub fn totals(&self) -> Totals {
        self.metrics().next().map(|metrics| metrics.totals()).unwrap_or_default()
    }

    /// Whether all threads run.
    pub fn is_well(&self) -> bool {
        self.nbd.iter().all(NbdServer::is_well) && self.vhost_user.iter().all(VhostUserServer::is_well)
    }

    /// Stops all servers: requests in flight are finished, and writable disks are flushed.
    ///
    /// # Errors
    /// The first error. All servers are stopped even after an error.
    pub fn stop(self) -> Outcome<()> {
        let failed = |error: &dyn std::fmt::Display| Failure::new(error.to_string());
        let nbd = self.nbd.map_or(Ok(()), |server| server.stop().map_err(|error| failed(&error)));
        let device = self.vhost_user.map_or(Ok(()), |server| server.stop().map_err(|error| failed(&error)));
        nbd.and(device)
    }
}
