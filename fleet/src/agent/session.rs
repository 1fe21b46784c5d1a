//! One connection of a controller: its first message, and then order after order.
//!
//! A connection that is silent for [`SILENT`] is closed. A controller looks more often than that.

use super::{
    desk::{Desk, SILENT},
    event::{Event, Events},
};
use crate::{
    clock,
    identity::Fingerprint,
    link::Link,
    message::{Answer, Ask, Hello, SCHEMA, Welcome},
    trust::{Token, Trust},
    wire::{ASK_BYTES_MAX, WireError},
};
use diskwright_load::machine::{self, Machine, Versions};
use std::time::Duration;

/// Time for the first message.
const FIRST: Duration = Duration::from_secs(10);

/// The first message of the side that dials.
pub(crate) fn hello(token: Option<&Token>, instance: &str) -> Hello {
    Hello {
        instance: instance.to_owned(),
        schema: SCHEMA.into(),
        version: Versions::detect().diskwright,
        token: token.map(|token| token.reveal().to_owned()),
    }
}

/// Why a peer with this first message is not understood.
///
/// # Errors
/// A sentence for the peer.
pub(crate) fn understands(hello: &Hello) -> Result<(), String> {
    let version = Versions::detect().diskwright;
    if hello.schema != SCHEMA {
        return Err(format!("it speaks {}, and this program speaks {SCHEMA}; use the same version", hello.schema));
    }
    if hello.version != version {
        return Err(format!(
            "it is version {}, and this program is version {version}; use the same version, because figures of \
             different ones cannot be added",
            hello.version
        ));
    }
    Ok(())
}

/// Serves a connection to its end. Without `trust` the peer is admitted: this side has dialled it.
pub(super) fn serve(desk: &Desk, mut link: Link, trust: Option<&Trust>, events: &Events) {
    let Some(number) = welcome(desk, &mut link, trust, events) else { return };
    let peer = link.peer;
    while desk.is_current(number) {
        let asked = link.receive::<Ask>(ASK_BYTES_MAX);
        let received_ns = clock::now_ns();
        let answer = match asked {
            Ok(_) if !desk.is_current(number) => break,
            Ok(ask) => answer(desk, ask, (peer, received_ns), events),
            Err(WireError::NotUnderstood(error)) => {
                let _ = link.send(&Answer::Refused { why: format!("the message cannot be understood: {error}") });
                break;
            }
            Err(_) => break,
        };
        if link.send(&answer).is_err() {
            break;
        }
    }
    desk.close_session(number);
}

/// Answers the first message. Returns the number of the session.
fn welcome(desk: &Desk, link: &mut Link, trust: Option<&Trust>, events: &Events) -> Option<u64> {
    link.set_patience(FIRST).ok()?;
    let hello = match link.receive(ASK_BYTES_MAX) {
        Ok(Ask::Hello(hello)) => Ok(hello),
        Ok(_) => Err("the first message must be hello".to_owned()),
        Err(WireError::NotUnderstood(error)) => Err(format!("the message cannot be understood: {error}")),
        // A probe of the port, or a peer that refuses this fingerprint.
        Err(_) => return None,
    };
    let peer = link.peer;
    let admitted = hello.and_then(|hello| {
        // Trust first: a stranger learns nothing about this program.
        trust.map_or(Ok(()), |trust| trust.admit(peer, hello.token.as_deref()))?;
        understands(&hello)?;
        Ok(desk.open_session(peer, &hello.instance))
    });
    match admitted {
        Ok(Ok((number, run))) => {
            let welcome = Welcome {
                schema: SCHEMA.into(),
                versions: Versions::detect(),
                machine: Machine::detect(),
                boot_id: machine::boot_id(),
                targets: desk.allowed(),
                run,
            };
            events(Event::Admitted(peer));
            let told = link.set_patience(SILENT).and_then(|()| link.send(&Answer::Welcome(Box::new(welcome))));
            if told.is_err() {
                desk.close_session(number);
                return None;
            }
            Some(number)
        }
        Ok(Err(why)) => {
            let _ = link.send(&Answer::Busy { why });
            None
        }
        Err(why) => {
            events(Event::Refused(format!("the peer with the fingerprint {peer}: {why}")));
            let _ = link.send(&Answer::Refused { why });
            None
        }
    }
}

/// Carries an order out.
pub(crate) fn answer(desk: &Desk, ask: Ask, (peer, received_ns): (Fingerprint, u64), events: &Events) -> Answer {
    match ask {
        Ask::Hello(_) => Answer::Refused { why: "hello is the first message, and only the first".into() },
        Ask::Clock { .. } => Answer::Clock { received_ns, answered_ns: clock::now_ns() },
        Ask::Prepare(task) => {
            let run = task.run.clone();
            let answer = desk.prepare(peer, *task);
            if answer == Answer::Done {
                events(Event::Begun(run));
            }
            answer
        }
        Ask::Arm(arm) => desk.arm(*arm),
        Ask::Start { at, at_ns } => desk.start(&at, at_ns),
        Ask::Window { at, start_ns } => desk.window(&at, start_ns),
        Ask::Look { known, interval, wait_ms } => {
            Answer::State(Box::new(desk.look(known, interval, Duration::from_millis(wait_ms.into()))))
        }
        Ask::Take { at } => desk.take(&at),
        Ask::Forget { run } => desk.forget(&run),
        Ask::Stop { run } => desk.stop(&run),
        Ask::Finish { run } => desk.finish(&run),
    }
}
