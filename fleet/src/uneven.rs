//! A network with uneven delays before an agent, for tests and benchmarks of clocks.

use crate::address::{Address, Place};
use std::{
    io::{self, Read, Write},
    net::{Shutdown, TcpListener, TcpStream},
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

/// Pseudorandom delays, the same in each process.
static DELAYS: AtomicU64 = AtomicU64::new(1);

/// Passes bytes on, each piece after a delay of up to `most_us` microseconds.
fn pass(mut from: TcpStream, mut to: TcpStream, most_us: u64) {
    let mut piece = [0; 16 << 10];
    while let Ok(len @ 1..) = from.read(&mut piece) {
        let mixed = DELAYS.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
        let drawn = (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 33;
        thread::sleep(Duration::from_micros(drawn % most_us.max(1)));
        if to.write_all(&piece[..len]).is_err() {
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}

/// Begins a network before an agent that listens by TCP. The ways there and back take up to this
/// many microseconds. Returns the address on this side. It lives as long as the process.
///
/// # Errors
/// The system's error.
pub fn network(before: &Address, there_us: u64, back_us: u64) -> io::Result<Address> {
    let Place::Tcp(host, port) = before.place.clone() else { return Err(io::ErrorKind::Unsupported.into()) };
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let own = listener.local_addr()?.port();
    thread::spawn(move || {
        for one in listener.incoming().flatten() {
            let Ok(other) = TcpStream::connect((host.as_str(), port)) else { return };
            let (Ok(from), Ok(to)) = (one.try_clone(), other.try_clone()) else { return };
            let _ = (one.set_nodelay(true), other.set_nodelay(true));
            thread::spawn(move || pass(from, to, there_us));
            thread::spawn(move || pass(other, one, back_us));
        }
    });
    Ok(Address { place: Place::Tcp("127.0.0.1".into(), own), ..before.clone() })
}
