//! Where agents that dial the controller come in.
//!
//! An agent sends its first message, is admitted by its fingerprint or its token, and then waits
//! until the controller asks. An agent whose connection broke comes in again and is given to the
//! one who misses it.

use crate::{
    address::Place,
    agent,
    error::Result,
    identity::{Fingerprint, Identity},
    link::{Door, Link, Waiting},
    message::{Answer, Hello},
    trust::Trust,
    wire::ASK_BYTES_MAX,
};
use std::{
    collections::HashSet,
    fmt, io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

/// Time for the first message.
const FIRST: Duration = Duration::from_secs(10);

/// Receives a sentence about each peer that was refused.
pub type Refused = Box<dyn Fn(String) + Send + Sync>;

/// Takes in agents that dial; see the module documentation.
pub struct Entrance {
    place: Place,
    trust: Trust,
    refused: Refused,
    inner: Mutex<Inner>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Inner {
    /// Links, each with the instance of its agent.
    arrived: Vec<(Link, String)>,
    /// Agents that were given out, which are not given out as new ones.
    known: HashSet<(Fingerprint, String)>,
}

impl fmt::Debug for Entrance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Entrance at {}", self.place)
    }
}

impl Entrance {
    /// Listens at a place, and admits by `trust`. `refused` is told of peers that are not admitted.
    ///
    /// # Errors
    /// As [`Door::open`].
    pub fn open(own: &Identity, place: &Place, trust: Trust, refused: Refused) -> Result<Arc<Self>> {
        let door = Door::open(own, place)?;
        let place = door.place().unwrap_or_else(|_| place.clone());
        let entrance =
            Arc::new(Self { place, trust, refused, inner: Mutex::new(Inner::default()), changed: Condvar::new() });
        let weak = Arc::downgrade(&entrance);
        thread::spawn(move || {
            while let Ok(waiting) = door.wait() {
                let Some(entrance) = weak.upgrade() else { return };
                thread::spawn(move || entrance.take_in(waiting));
            }
        });
        Ok(entrance)
    }

    /// Where it listens.
    pub fn place(&self) -> &Place {
        &self.place
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take_in(&self, waiting: Waiting) {
        let Ok(mut link) = waiting.greet() else { return };
        if link.set_patience(FIRST).is_err() {
            return;
        }
        let admitted = match link.receive::<Hello>(ASK_BYTES_MAX) {
            Ok(hello) => self
                .trust
                .admit(link.peer, hello.token.as_deref())
                .and_then(|()| agent::understands(&hello))
                .map(|()| hello.instance),
            Err(error) => Err(error.to_string()),
        };
        let answer = match &admitted {
            Ok(_) => Answer::Done,
            Err(why) => Answer::Refused { why: why.clone() },
        };
        let sent = link.send(&answer);
        let mut inner = self.lock();
        match admitted {
            Err(why) => {
                drop(inner);
                (self.refused)(format!("the peer with the fingerprint {}: {why}", link.peer));
            }
            Ok(instance) if sent.is_ok() => {
                // A newer connection of an agent replaces an older one that nobody has taken.
                inner.arrived.retain(|(other, of)| other.peer != link.peer || *of != instance);
                inner.arrived.push((link, instance));
                self.changed.notify_all();
            }
            Ok(_) => {}
        }
    }

    /// The next agent that comes in: this one, or any that was not given out. Returns its link and
    /// its instance.
    ///
    /// # Errors
    /// `TimedOut`: none came.
    pub fn next(&self, who: Option<(Fingerprint, &str)>, most: Duration) -> io::Result<(Link, String)> {
        let until = Instant::now() + most;
        let mut inner = self.lock();
        loop {
            let known = &inner.known;
            let fits = |(link, instance): &(Link, String)| match who {
                Some(who) => who == (link.peer, instance.as_str()),
                None => !known.contains(&(link.peer, instance.clone())),
            };
            if let Some(place) = inner.arrived.iter().position(fits) {
                let (link, instance) = inner.arrived.swap_remove(place);
                inner.known.insert((link.peer, instance.clone()));
                return Ok((link, instance));
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            inner = self.changed.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
