//! A connection that breaks at every step of the protocol: for a while, for the agent's life, or
//! because the controller died.
//!
//! A relay between controller and agent counts the pieces that the controller sends. TLS hides the
//! messages, but each message is one piece, so all steps are met.

use super::{agent, agent_with_patience, fleet, go_on, job, options, wanted};
use crate::{
    Result,
    address::{Address, Place},
    controller::{Entrance, Fleet, FleetOptions, OnLoss, Wanted, Way},
    identity::Identity,
    trust::{Token, Trust},
};
use diskwright_load::record::{End, Run};
use std::{
    io::{Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

/// A relay before an agent, which breaks all connections when the controller has sent so many
/// pieces.
struct Relay {
    address: Address,
    left: Arc<AtomicU64>,
    is_down: Arc<AtomicBool>,
}

impl Relay {
    fn before(agent: &Address, pieces: u64) -> Self {
        let Place::Tcp(host, port) = agent.place.clone() else { panic!() };
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let own = listener.local_addr().unwrap().port();
        let (left, is_down) = (Arc::new(AtomicU64::new(pieces)), Arc::new(AtomicBool::new(false)));
        let (counted, down) = (Arc::clone(&left), Arc::clone(&is_down));
        thread::spawn(move || {
            for one in listener.incoming().flatten() {
                if down.load(Ordering::Relaxed) {
                    continue;
                }
                let other = TcpStream::connect((host.as_str(), port)).unwrap();
                one.set_nodelay(true).unwrap();
                other.set_nodelay(true).unwrap();
                let (mut from, mut to) = (one.try_clone().unwrap(), other.try_clone().unwrap());
                let (counted, down) = (Arc::clone(&counted), Arc::clone(&down));
                thread::spawn(move || {
                    let mut piece = [0; 32 << 10];
                    while let Ok(len @ 1..) = from.read(&mut piece) {
                        if counted.load(Ordering::Relaxed) == 0 {
                            down.store(true, Ordering::Relaxed);
                        }
                        counted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).ok();
                        if down.load(Ordering::Relaxed) || to.write_all(&piece[..len]).is_err() {
                            break;
                        }
                    }
                    let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
                });
                let (mut back, mut to_controller) = (other, one);
                thread::spawn(move || {
                    let mut piece = [0; 32 << 10];
                    while let Ok(len @ 1..) = back.read(&mut piece) {
                        if to_controller.write_all(&piece[..len]).is_err() {
                            break;
                        }
                    }
                    let _ = (back.shutdown(Shutdown::Both), to_controller.shutdown(Shutdown::Both));
                });
            }
        });
        let address = Address { place: Place::Tcp("127.0.0.1".into(), own), ..agent.clone() };
        Self { address, left, is_down }
    }

    /// Whether the connection broke.
    fn has_broken(&self) -> bool {
        self.is_down.load(Ordering::Relaxed)
    }

    /// Lets connections through again, for ever.
    fn mend(&self) {
        self.left.store(u64::MAX, Ordering::Relaxed);
        self.is_down.store(false, Ordering::Relaxed);
    }
}

/// Connects, prepares, measures and finishes.
fn all_of_it(run: &str, addresses: [&Address; 2], options: FleetOptions) -> Result<Run> {
    let job = job(0, 300);
    let wanted = [wanted("a0", addresses[0]), wanted("a1", addresses[1])];
    let mut fleet = Fleet::connect(run, &wanted, options, None)?;
    fleet.prepare(&|_| job.clone(), false, &|_, _, _, _| true)?;
    let measured = fleet.measure(2, &|_| job.clone(), &go_on)?;
    fleet.kept();
    fleet.finish();
    Ok(measured)
}

/// Pieces after which connections break: each one until the connection is never broken, but for the
/// many of the comparison of clocks.
fn steps() -> impl Iterator<Item = u64> {
    (0..5).chain([12]).chain(18..36).chain([40, 48, 56])
}

#[test]
fn an_agent_that_dies_at_any_step_is_told_and_the_other_one_is_free_again() {
    let own = Identity::temporary().unwrap();
    let first = agent(&[own.fingerprint]);
    let mut outcomes = (0, 0, 0);
    for step in steps() {
        let second = agent_with_patience(Trust::new(vec![own.fingerprint], Vec::new()), Duration::from_millis(300));
        let relay = Relay::before(&second.address, step);
        let options = FleetOptions { lost_after: Duration::from_millis(300), on_loss: OnLoss::GoOn, ..options(&own) };
        let begun = Instant::now();
        match all_of_it(&format!("r{step}"), [&first.address, &relay.address], options) {
            Err(error) => {
                assert!(relay.has_broken(), "step {step}: {error}");
                outcomes.0 += 1;
            }
            Ok(run) if run.head.end == End::Complete => outcomes.2 += 1,
            Ok(run) => {
                let lost = &run.fleet.as_ref().unwrap().lost;
                assert_eq!(lost.iter().map(|loss| loss.agent).collect::<Vec<_>>(), [1], "step {step}");
                outcomes.1 += 1;
            }
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "step {step} took {:?}", begun.elapsed());
        // The agent that lives serves the next run; the other one has closed its targets.
        let again = Instant::now();
        let is_closed = || *second.closed.lock().unwrap() == second.begun();
        while !is_closed() && again.elapsed() < Duration::from_secs(30) {
            thread::sleep(Duration::from_millis(20));
        }
        assert!(is_closed(), "step {step}: a run that nobody leads is given up");
    }
    assert!(outcomes.0 > 3 && outcomes.1 > 3 && outcomes.2 > 0, "all ends were met: {outcomes:?}");
    assert_eq!(*first.closed.lock().unwrap(), first.begun());
}

#[test]
fn a_network_that_is_down_for_a_while_at_any_step_costs_nothing() {
    let own = Identity::temporary().unwrap();
    let agents = [agent(&[own.fingerprint]), agent(&[own.fingerprint])];
    for step in steps().step_by(3) {
        let relay = Arc::new(Relay::before(&agents[1].address, step));
        let mends = Arc::clone(&relay);
        let mender = thread::spawn(move || {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(6) {
                if mends.has_broken() {
                    thread::sleep(Duration::from_millis(100));
                    mends.mend();
                    return;
                }
                thread::sleep(Duration::from_millis(5));
            }
        });
        let options = FleetOptions { lost_after: Duration::from_secs(5), ..options(&own) };
        match all_of_it(&format!("s{step}"), [&agents[0].address, &relay.address], options) {
            Ok(run) => assert_eq!(run.head.end, End::Complete, "step {step}: {:?}", run.head.warnings),
            // The first connection is not tried again: the user sees the mistake at once.
            Err(error) => assert!(step < 4, "step {step}: {error}"),
        }
        mender.join().unwrap();
        assert!(relay.left.load(Ordering::Relaxed) > 0);
    }
}

#[test]
fn a_controller_that_dies_at_any_step_is_followed_by_one_that_goes_on() {
    let own = Identity::temporary().unwrap();
    let agents = vec![agent(&[own.fingerprint]), agent(&[own.fingerprint])];
    for step in steps().step_by(2) {
        let relays = [Relay::before(&agents[0].address, step), Relay::before(&agents[1].address, step)];
        let run = format!("t{step}");
        let dying = FleetOptions { lost_after: Duration::from_millis(100), ..options(&own) };
        let _ = all_of_it(&run, [&relays[0].address, &relays[1].address], dying);
        let mut next =
            fleet(&run, &agents, options(&own), &job(0, 300)).unwrap_or_else(|error| panic!("{step}: {error}"));
        let measured = super::measure(&mut next, &job(0, 300)).unwrap();
        assert_eq!(measured.head.end, End::Complete, "step {step}: {:?}", measured.head.warnings);
        next.kept();
        next.finish();
    }
    for agent in &agents {
        assert_eq!(*agent.closed.lock().unwrap(), agent.begun());
    }
}

#[test]
fn an_agent_that_dials_comes_back_after_a_break() {
    let own = Identity::temporary().unwrap();
    let token = Token::random().unwrap();
    let trust = Trust::new(Vec::new(), vec![token.clone()]);
    let refused = Arc::new(AtomicU64::new(0));
    let counted = Arc::clone(&refused);
    let tell = Box::new(move |_: String| {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let entrance = Entrance::open(&own, &Place::Tcp("127.0.0.1".into(), 0), trust, tell).unwrap();
    let address = Address { place: entrance.place().clone(), fingerprint: own.fingerprint, token: None };
    // Without a token it is refused, and the user is told.
    let stranger = agent(&[]);
    let (dialling, to) = (stranger.agent.clone(), address.clone());
    thread::spawn(move || dialling.dial(&to));
    let begun = Instant::now();
    while refused.load(Ordering::Relaxed) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20));
        thread::sleep(Duration::from_millis(10));
    }
    stranger.agent.end();
    let started = agent(&[]);
    let relay = Arc::new(Relay::before(&address, u64::MAX));
    let (dialling, to) = (started.agent.clone(), Address { token: Some(token), ..relay.address.clone() });
    thread::spawn(move || dialling.dial(&to));
    let wanted = Wanted { name: "a".into(), group: "all".into(), way: Way::Await, targets: Vec::new() };
    let options = FleetOptions { lost_after: Duration::from_secs(20), ..options(&own) };
    let mut fleet = Fleet::connect("r", &[wanted], options, Some(&entrance)).unwrap();
    let job = job(0, 2000);
    fleet.prepare(&|_| job.clone(), false, &|_, _, _, _| true).unwrap();
    let breaks = Arc::clone(&relay);
    let breaker = thread::spawn(move || {
        thread::sleep(Duration::from_millis(700));
        breaks.left.store(0, Ordering::Relaxed);
        while !breaks.has_broken() {
            thread::sleep(Duration::from_millis(5));
        }
        thread::sleep(Duration::from_millis(100));
        breaks.mend();
    });
    let run = fleet.measure(1, &|_| job.clone(), &go_on).unwrap();
    fleet.finish();
    breaker.join().unwrap();
    assert_eq!((run.head.end, run.phases[0].window_ns), (End::Complete, 2_000_000_000));
}
