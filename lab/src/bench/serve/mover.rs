//! Bytes from one thread to another over a unix socket, at a rate: what any server of blocks does beside reading its disk.
//!
//! A disk that is the machine's memory in the end, as a virtual one is, gets slower while somebody else copies. What the disk still gives beside this is
//! the most that a server can get out of it.

use std::{
    io::{self, Read, Write},
    os::unix::net::UnixStream,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

/// Pieces that go in turns, so that they come out of memory rather than out of a processor's cache, as with many requests in flight.
const AREA_BYTES: usize = 64 << 20;

/// How long the sender sleeps when it is ahead.
const PAUSE: Duration = Duration::from_micros(100);

/// See the module.
#[derive(Debug)]
pub(super) struct Mover {
    stop: Arc<AtomicBool>,
    sender: JoinHandle<io::Result<f64>>,
    receiver: JoinHandle<io::Result<()>>,
}

impl Mover {
    /// Begins to move `mb_per_s` in pieces of `piece_bytes`, or as much of that as can be done.
    ///
    /// # Errors
    /// There are no sockets left.
    pub(super) fn start(mb_per_s: f64, piece_bytes: usize) -> io::Result<Self> {
        let (mut tx, mut rx) = UnixStream::pair()?;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let sender = thread::spawn(move || {
            let area = vec![0x5a; AREA_BYTES];
            let (begun, mut sent_bytes) = (Instant::now(), 0.0);
            for piece in area.chunks_exact(piece_bytes).cycle() {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                while sent_bytes > begun.elapsed().as_secs_f64() * mb_per_s * 1e6 && !stopped.load(Ordering::Relaxed) {
                    thread::sleep(PAUSE);
                }
                tx.write_all(piece)?;
                sent_bytes += piece.len() as f64;
            }
            Ok(sent_bytes / 1e6 / begun.elapsed().as_secs_f64())
        });
        let receiver = thread::spawn(move || {
            let mut area = vec![0; AREA_BYTES];
            loop {
                for piece in area.chunks_exact_mut(piece_bytes) {
                    if rx.read(piece)? == 0 {
                        return Ok(());
                    }
                }
            }
        });
        Ok(Self { stop, sender, receiver })
    }

    /// Ends it, and says how many MB a second were moved.
    ///
    /// # Errors
    /// What a socket said.
    pub(super) fn stop(self) -> io::Result<f64> {
        self.stop.store(true, Ordering::Relaxed);
        let died = || io::Error::other("a thread has died");
        let moved = self.sender.join().map_err(|_| died()).flatten();
        let received = self.receiver.join().map_err(|_| died()).flatten();
        received.and(moved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_keeps_to_its_rate() {
        let mover = Mover::start(50.0, 256 << 10).unwrap();
        thread::sleep(Duration::from_millis(300));
        let moved = mover.stop().unwrap();
        assert!((5.0..=52.0).contains(&moved), "{moved} MB/s");
    }
}
