//! The agent: makes load on its machine as a controller tells it, on the targets that its own
//! command line allows.
//!
//! ```text
//!   connections (session.rs) ──orders──▶ Desk (desk.rs) ◀──takes orders── worker (work.rs)
//!                             ◀─state───                 ──stage, intervals──▶
//! ```
//!
//! | file | content |
//! |---|---|
//! | `desk.rs` | what the agent does and holds, behind one lock; what is refused |
//! | `session.rs` | one connection of a controller |
//! | `keeper.rs`, `event.rs` | what the program that starts an agent provides and is told |
//! | `work.rs` | prepares targets and runs jobs, in a thread of its own |
//!
//! One controller is served at a time, also if several have the same identity. If its connection is
//! lost, a phase that runs goes on to its
//! end and its record is kept, and the same controller can come back, also as a new process. After
//! [`ORPHANED`] without a controller a run is given up, and another controller may come.

pub(crate) mod desk;
mod event;
mod keeper;
pub(crate) mod session;
mod work;

pub use desk::ORPHANED;
pub use event::{Event, Events};
pub use keeper::{Keeper, Prepared, Preparing};
pub(crate) use session::{hello, understands};

use crate::{
    address::{Address, Place},
    clock,
    error::{FleetError, Result},
    identity::{Fingerprint, Identity},
    link::{Door, Link},
    message::Answer,
    trust::Trust,
    wire::ASK_BYTES_MAX,
};
use desk::Desk;
use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

/// Connections that are served at the same time, those without an admitted peer included.
const LINKS_MAX: usize = 16;
/// Time between two attempts to reach a controller.
const AGAIN: Duration = Duration::from_secs(1);

/// What tells a program from others with the same identity.
pub(crate) fn new_instance() -> String {
    static NUMBER: AtomicUsize = AtomicUsize::new(0);
    format!("{}-{}-{}", std::process::id(), clock::now_ns(), NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// An agent; see the module documentation.
#[derive(Clone)]
pub struct Agent {
    identity: Identity,
    trust: Arc<Trust>,
    desk: Arc<Desk>,
    events: Events,
    /// Tells this program from others with the same identity.
    instance: String,
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Agent {}", self.identity.fingerprint)
    }
}

impl Agent {
    /// An agent that nobody can reach yet. It gives a run up that is without a controller for
    /// [`ORPHANED`].
    pub fn new(identity: Identity, trust: Trust, keeper: Box<dyn Keeper>, events: Events) -> Self {
        Self::with_patience(identity, trust, keeper, events, ORPHANED)
    }

    /// Like [`Agent::new`], with another time after which a run is given up.
    pub fn with_patience(
        identity: Identity,
        trust: Trust,
        keeper: Box<dyn Keeper>,
        events: Events,
        orphaned: Duration,
    ) -> Self {
        let desk = Arc::new(Desk::new(keeper.allowed(), orphaned));
        let worker = (Arc::clone(&desk), Arc::clone(&events));
        thread::spawn(move || work::work(&worker.0, keeper, &worker.1));
        Self { identity, trust: Arc::new(trust), desk, events, instance: new_instance() }
    }

    /// Serves controllers that connect, until [`Agent::end`].
    ///
    /// # Errors
    /// The system's error.
    pub fn listen(&self, door: &Door) -> io::Result<()> {
        let links = Arc::new(AtomicUsize::new(0));
        loop {
            let waiting = door.wait()?;
            if self.desk.is_ended() {
                return Ok(());
            }
            if links.load(Ordering::Relaxed) >= LINKS_MAX {
                continue;
            }
            links.fetch_add(1, Ordering::Relaxed);
            let (agent, links) = (self.clone(), Arc::clone(&links));
            thread::spawn(move || {
                match waiting.greet() {
                    Ok(link) => session::serve(&agent.desk, link, Some(&agent.trust), &agent.events),
                    Err(error) => (agent.events)(Event::Refused(format!("no TLS 1.3 connection: {error}"))),
                }
                links.fetch_sub(1, Ordering::Relaxed);
            });
        }
    }

    /// Connects to a controller that listens, again and again until [`Agent::end`].
    ///
    /// # Errors
    /// The identity cannot be used.
    pub fn dial(&self, controller: &Address) -> Result<()> {
        let mut last = String::new();
        while !self.desk.is_ended() {
            match self.introduce(controller) {
                Ok(link) => {
                    last.clear();
                    session::serve(&self.desk, link, None, &self.events);
                }
                Err(error) => {
                    let why = error.to_string();
                    if why != last {
                        (self.events)(Event::Unreachable(why.clone()));
                        last = why;
                    }
                }
            }
            self.desk.rest(AGAIN);
        }
        Ok(())
    }

    /// Connects to a controller and is admitted by it.
    fn introduce(&self, controller: &Address) -> Result<Link> {
        let mut link = Link::dial(&self.identity, controller)?;
        let name = || controller.place.to_string();
        let lost = |source| FleetError::Lost { name: name(), source };
        link.send(&hello(controller.token.as_ref(), &self.instance)).map_err(|error| lost(error.into()))?;
        match link.receive(ASK_BYTES_MAX).map_err(lost)? {
            Answer::Done => Ok(link),
            Answer::Refused { why } => Err(FleetError::Refused { name: name(), why }),
            _ => Err(FleetError::Protocol { name: name(), what: "a wrong answer to hello".into() }),
        }
    }

    /// Stops a phase that runs, closes the targets, and ends [`Agent::listen`] at its next
    /// connection. Returns when the targets are closed.
    pub fn end(&self) {
        self.desk.end();
    }

    /// Its fingerprint.
    pub fn fingerprint(&self) -> Fingerprint {
        self.identity.fingerprint
    }

    /// Opens a door with the identity of the agent.
    ///
    /// # Errors
    /// As [`Door::open`].
    pub fn door(&self, place: &Place) -> Result<Door> {
        Door::open(&self.identity, place)
    }
}
