//! Controllers: what the connections of one host share, whichever worker they are on.
//!
//! ```text
//!   Connect of the admin queue ─▶ Shared::create ─▶ Controller ◀─ Connect of an I/O queue
//!   the admin connection ends, or the controller is disabled ─▶ its I/O queues end at their tick
//! ```
//!
//! Locks: the table of [`Shared`] for a lookup or a change, [`Controller::queues`] likewise. No
//! code holds both.

use crate::Keyring;
use diskwright_nvme::wire::{ConnectData, DISCOVERY_NQN, fabrics::property};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
};

/// Maximum number of I/O queues of a controller.
pub(super) const QUEUES_MAX: u16 = 32;

/// Maximum number of entries of a queue.
pub(super) const ENTRIES_MAX: u16 = 128;

/// What all workers of a server share.
#[derive(Debug)]
pub(crate) struct Shared {
    /// NQN of the subsystem.
    pub(super) subsystem: String,
    /// `None` lets every host in.
    pub(super) secrets: Option<Arc<Keyring>>,
    controllers: Mutex<BTreeMap<u16, Arc<Controller>>>,
}

impl Shared {
    pub(super) fn new(subsystem: &str, secrets: Option<Arc<Keyring>>) -> Self {
        Self { subsystem: subsystem.to_owned(), secrets, controllers: Mutex::default() }
    }

    /// A new controller, of the storage or the discovery subsystem. `None` if all ids are in use.
    pub(super) fn create(&self, data: &ConnectData, keep_alive_ms: u32) -> Option<Arc<Controller>> {
        let mut controllers = self.controllers.lock().unwrap_or_else(PoisonError::into_inner);
        // A new id is larger than all in use, so that a late connection of a controller that has
        // ended does not find another one.
        let next = controllers.last_key_value().map_or(1, |(&id, _)| id + 1);
        let id = (next..0xfff0).chain(1..0xfff0).find(|id| !controllers.contains_key(id))?;
        let controller = Arc::new(Controller {
            id,
            is_discovery: data.subsystem == DISCOVERY_NQN,
            host: data.host.clone(),
            host_id: data.host_id,
            keep_alive_ms: AtomicU32::new(keep_alive_ms),
            configuration: AtomicU32::new(0),
            enabled: AtomicU32::new(0),
            has_ended: AtomicBool::new(false),
            has_traffic: AtomicBool::new(false),
            queues: Mutex::default(),
        });
        controllers.insert(id, Arc::clone(&controller));
        Some(controller)
    }

    pub(super) fn find(&self, id: u16) -> Option<Arc<Controller>> {
        self.controllers.lock().unwrap_or_else(PoisonError::into_inner).get(&id).cloned()
    }

    /// The admin connection of a controller has ended.
    pub(super) fn end(&self, controller: &Controller) {
        controller.has_ended.store(true, Relaxed);
        self.controllers.lock().unwrap_or_else(PoisonError::into_inner).remove(&controller.id);
    }
}

/// A controller.
#[derive(Debug)]
pub(super) struct Controller {
    pub(super) id: u16,
    pub(super) is_discovery: bool,
    /// NQN of the host.
    pub(super) host: String,
    pub(super) host_id: [u8; 16],
    /// The host must send a command within this time; 0 means that it need not.
    pub(super) keep_alive_ms: AtomicU32,
    configuration: AtomicU32,
    /// How often the controller was enabled. An I/O queue belongs to one of these times.
    enabled: AtomicU32,
    has_ended: AtomicBool,
    /// Whether a command came since the last tick of the admin queue.
    has_traffic: AtomicBool,
    /// The ids of the I/O queues that are connected.
    queues: Mutex<BTreeSet<u16>>,
}

impl Controller {
    /// The property "controller configuration".
    pub(super) fn configuration(&self) -> u32 {
        self.configuration.load(Relaxed)
    }

    /// Sets the configuration, and so enables or disables the controller.
    pub(super) fn configure(&self, value: u32) {
        let before = self.configuration.swap(value, Relaxed);
        if before & property::ENABLE == 0 && value & property::ENABLE != 0 {
            self.enabled.fetch_add(1, Relaxed);
        }
    }

    /// The property "controller status". A shutdown is complete at once: every write that was
    /// completed is the disk's, and disks are flushed when the server stops.
    pub(super) fn status(&self) -> u32 {
        let configuration = self.configuration();
        let shutdown = configuration & property::SHUTDOWN != 0;
        configuration & property::ENABLE | if shutdown { property::SHUTDOWN_COMPLETE } else { 0 }
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status() & property::READY != 0
    }

    /// Adds an I/O queue. Returns the time of the controller that it belongs to; `None` if the id
    /// is in use.
    pub(super) fn add_queue(&self, queue: u16) -> Option<u32> {
        let added = self.queues.lock().unwrap_or_else(PoisonError::into_inner).insert(queue);
        added.then(|| self.enabled.load(Relaxed))
    }

    pub(super) fn remove_queue(&self, queue: u16) {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner).remove(&queue);
    }

    /// Whether an I/O queue of this time must end.
    pub(super) fn has_left(&self, time: u32) -> bool {
        self.has_ended.load(Relaxed) || !self.is_ready() || self.enabled.load(Relaxed) != time
    }

    /// A command came on one of the queues.
    pub(super) fn note_traffic(&self) {
        // The load keeps the cache line shared while it is set.
        if !self.has_traffic.load(Relaxed) {
            self.has_traffic.store(true, Relaxed);
        }
    }

    /// Whether a command came since this was last called.
    pub(super) fn take_traffic(&self) -> bool {
        self.has_traffic.swap(false, Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data() -> ConnectData {
        let subsystem = "nqn.2026-01.org.example:disks".to_owned();
        ConnectData { host_id: [1; 16], controller: 0xffff, subsystem, host: "nqn.2026-01.org.example:host".to_owned() }
    }

    #[test]
    fn ids_are_not_reused_while_larger_ones_are_free() {
        let shared = Shared::new("nqn.2026-01.org.example:disks", None);
        let (first, second) = (shared.create(&data(), 0).unwrap(), shared.create(&data(), 0).unwrap());
        assert_eq!((first.id, second.id), (1, 2));
        shared.end(&first);
        assert!(shared.find(1).is_none() && first.has_left(0));
        assert_eq!(shared.create(&data(), 0).unwrap().id, 3);
    }

    #[test]
    fn queues_end_with_the_time_in_which_their_controller_was_enabled() {
        let shared = Shared::new("nqn.2026-01.org.example:disks", None);
        let controller = shared.create(&data(), 0).unwrap();
        assert!(!controller.is_ready());
        controller.configure(property::ENABLE);
        let time = controller.add_queue(1).unwrap();
        assert!(controller.is_ready() && !controller.has_left(time) && controller.add_queue(1).is_none());
        controller.configure(0);
        assert!(controller.has_left(time));
        controller.configure(property::ENABLE);
        assert!(controller.has_left(time), "the queue is of an earlier time");
        controller.remove_queue(1);
        let time = controller.add_queue(1).unwrap();
        controller.configure(property::ENABLE | 1 << 14);
        assert_eq!(controller.status(), property::READY | property::SHUTDOWN_COMPLETE);
        assert!(!controller.has_left(time));
    }
}
