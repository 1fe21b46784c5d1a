use super::*;
use diskwright_store::IoBuf;
use std::{
    cell::{Cell, RefCell},
    collections::VecDeque,
    rc::Rc,
};

/// A disk whose requests end when the test says so: all that it has at the time of a reap, up to
/// `may_end`.
#[derive(Debug, Default)]
struct Slow {
    has: Rc<RefCell<VecDeque<u64>>>,
    may_end: Rc<Cell<usize>>,
    refuses: bool,
}

impl BlockQueue for Slow {
    fn depth(&self) -> usize {
        4
    }
    fn in_flight(&self) -> usize {
        self.has.borrow().len()
    }
    fn push(&mut self, request: Request) -> Result<(), Box<PushError>> {
        if self.refuses {
            return Err(Box::new(PushError { request, reason: io::ErrorKind::InvalidInput.into() }));
        }
        self.has.borrow_mut().push_back(request.tag);
        Ok(())
    }
    fn reap(&mut self, at_least: usize, out: &mut Vec<Completion>) -> io::Result<()> {
        let mut has = self.has.borrow_mut();
        let count = has.len().min(self.may_end.get()).max(at_least);
        self.may_end.set(self.may_end.get().saturating_sub(count));
        out.extend(has.drain(..count).map(|tag| Completion { tag, buf: None, segments: None, result: Ok(()) }));
        Ok(())
    }
}

/// The tags of the requests that a disk has, and how many of these may end.
type Within = (Rc<RefCell<VecDeque<u64>>>, Rc<Cell<usize>>);

/// A queue of a disk with these claims.
fn queue(claims: &Arc<Claims>) -> (ClaimedQueue, Within) {
    let disk = Slow::default();
    let inside = (Rc::clone(&disk.has), Rc::clone(&disk.may_end));
    (ClaimedQueue::over(Box::new(disk), Arc::clone(claims), None, true), inside)
}

fn used() -> Arc<Claims> {
    let claims = Arc::new(Claims::default());
    claims.note(Noted::All);
    claims
}

fn write(offset_bytes: u64, tag: u64) -> Request {
    Request::write(offset_bytes, 512, IoBuf::new(512), tag)
}

fn reaped(queue: &mut ClaimedQueue, at_least: usize) -> Vec<u64> {
    let mut out = Vec::new();
    queue.reap(at_least, &mut out).unwrap();
    out.iter().map(|completion| completion.tag).collect()
}

#[test]
fn bytes_are_claimed_once() {
    let claims = used();
    let claim = claims.claim(512..1024).unwrap();
    assert!(claims.claim(0..513).is_none() && claims.claim(1023..2048).is_none());
    assert!(claims.claim(0..512).is_some() && claims.claim(1024..1025).is_some());
    drop(claim);
    assert!(claims.claim(600..700).is_some() && claims.lock().claimed.is_empty());
    assert_eq!(claims.count.load(SeqCst), 0);
}

#[test]
fn bytes_that_are_being_written_are_not_claimed() {
    let claims = used();
    let ((mut one, (_, may_end)), (mut other, _)) = (queue(&claims), queue(&claims));
    one.push(write(512, 1)).unwrap();
    other.push(Request::discard(4096, 4096, 1)).unwrap();
    other.push(Request::read(0, 512, IoBuf::new(512), 2)).unwrap();
    assert!(claims.claim(0..1024).is_none() && claims.claim(8191..8192).is_none());
    assert!(claims.claim(0..512).is_some(), "a read is in no way");
    assert!(claims.have_outsiders_writes());
    may_end.set(1);
    assert_eq!(reaped(&mut one, 0), [1]);
    assert!(claims.claim(0..1024).is_some());
    // Nothing is left of a queue that was closed.
    drop(other);
    assert!(claims.claim(8191..8192).is_some() && !claims.have_outsiders_writes());
}

#[test]
fn a_write_of_claimed_bytes_waits() {
    let claims = used();
    let (mut queue, (has, may_end)) = queue(&claims);
    let claim = claims.claim(0..4096).unwrap();
    queue.push(write(512, 1)).unwrap();
    queue.push(write(4096, 2)).unwrap();
    queue.push(Request::write_zeroes(0, 8192, 3)).unwrap();
    assert_eq!((&*has.borrow(), queue.in_flight()), (&VecDeque::from([2]), 3));
    may_end.set(8);
    assert_eq!(reaped(&mut queue, 0), [2]);
    queue.push_claimed(write(0, 4), Arc::clone(&claim)).unwrap();
    // The command was given up, but its write is in flight.
    drop(claim);
    may_end.set(0);
    assert_eq!(reaped(&mut queue, 0), [0; 0]);
    assert_eq!(*has.borrow(), [4]);
    may_end.set(1);
    assert_eq!(reaped(&mut queue, 0), [4]);
    assert_eq!(reaped(&mut queue, 2), [1, 3]);
    assert!(claims.claim(0..8192).is_some());
}

#[test]
fn a_full_queue_refuses_and_a_refused_write_is_not_noted() {
    let claims = used();
    let (mut queue, _) = queue(&claims);
    let claim = claims.claim(0..4096).unwrap();
    (0..4).for_each(|tag| queue.push(write(0, tag)).unwrap());
    assert_eq!(queue.push(write(8192, 4)).unwrap_err().reason.kind(), io::ErrorKind::WouldBlock);
    drop(claim);
    assert_eq!(reaped(&mut queue, 4), [0, 1, 2, 3]);

    let refusing = Slow { refuses: true, ..Slow::default() };
    let mut queue = ClaimedQueue::over(Box::new(refusing), Arc::clone(&claims), None, true);
    assert!(queue.push(write(0, 1)).is_err());
    let claim = claims.claim(0..4096).unwrap();
    assert!(queue.push_claimed(write(0, 1), Arc::clone(&claim)).is_err());
    // A held write that is refused afterwards ends with the error.
    queue.push(write(0, 2)).unwrap();
    drop(claim);
    let mut out = Vec::new();
    queue.reap(1, &mut out).unwrap();
    assert!(out[0].tag == 2 && out[0].result.is_err() && queue.in_flight() == 0);
}

#[test]
fn only_what_the_doors_need_is_noted() {
    let claims = Arc::new(Claims::default());
    let (mut outsiders, _) = queue(&claims);
    let mut others = ClaimedQueue::over(Box::new(Slow::default()), Arc::clone(&claims), None, false);
    let mut noted = |tag: u64| {
        outsiders.push(write(0, tag)).unwrap();
        others.push(write(0, tag)).unwrap();
        (outsiders.noted, others.noted)
    };
    assert_eq!(noted(1), (0, 0));
    claims.note(Noted::Outsiders);
    assert_eq!(noted(2), (1, 0));
    claims.note(Noted::All);
    claims.note(Noted::Outsiders);
    assert_eq!(noted(3), (2, 1));
}

/// Commands on many threads add one to a number, which they read and write with the lock free in
/// between. No addition is lost.
#[test]
fn additions_on_many_threads_are_not_lost() {
    let claims = used();
    let counter = Mutex::new(0_u32);
    let (threads, rounds) = (4, 500);
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                for _ in 0..rounds {
                    let claim = loop {
                        match claims.claim(0..512) {
                            Some(claim) => break claim,
                            None => thread::yield_now(),
                        }
                    };
                    let found = *counter.lock().unwrap();
                    thread::yield_now();
                    *counter.lock().unwrap() = found + 1;
                    drop(claim);
                }
            });
        }
    });
    assert_eq!(*counter.lock().unwrap(), threads * rounds);
}

#[test]
fn a_watch_is_told_of_writes() {
    let claims = used();
    let (mut queue, (_, may_end)) = queue(&claims);
    queue.push(write(512, 1)).unwrap();
    assert!(claims.watch(vec![0..512, 1000..1001]).is_none(), "it is being written");
    may_end.set(9);
    assert_eq!(reaped(&mut queue, 0), [1]);
    let watches = [0..512, 512..1024, 4096..8192].map(|range| claims.watch(vec![9 << 20..10 << 20, range]).unwrap());
    queue.push(write(512, 1)).unwrap();
    queue.push(Request::read(0, 512, IoBuf::new(512), 2)).unwrap();
    assert_eq!(watches.each_ref().map(|watch| watch.has_changed()), [false, true, false]);
    let claim = claims.claim(4096..4608).unwrap();
    assert!(claims.watch(vec![4500..4501, 9..10]).is_none(), "a command may write it");
    queue.push_claimed(write(4096, 3), claim).unwrap();
    assert_eq!(watches.each_ref().map(|watch| watch.has_changed()), [false, true, true]);
    drop(watches);
    assert_eq!(reaped(&mut queue, 0), [1, 2, 3]);
    assert!(claims.lock().watches.is_empty() && claims.count.load(SeqCst) == 0);
}
