//! Carries a disk through unix sockets without a server: threads read stretches of the disk with
//! O_DIRECT and write them into sockets, whose other ends are read into memory. There is no
//! protocol, no request and no order.
//!
//! A virtual disk is often the host's memory in the end, and gets slower while the guest copies
//! memory; a socket copies twice. The speed here is about what any server can reach.

use diskwright_store::{IoBuf, Slab};
use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::{
        fs::{FileExt, OpenOptionsExt},
        net::UnixStream,
    },
    path::Path,
    thread,
    time::Instant,
};

/// Number of threads that read, and of threads that receive: the requests in flight at the disk.
const LANES: u64 = 8;

/// Carries the first `len_bytes` of a file in pieces of `piece_bytes` (whole pages). Returns the
/// speed in MB/s.
///
/// # Errors
/// Those of the file and of the sockets.
pub(super) fn carry(path: &Path, len_bytes: u64, piece_bytes: usize) -> io::Result<f64> {
    let file = OpenOptions::new().read(true).custom_flags(nix::libc::O_DIRECT).open(path)?;
    // The slab lies in huge pages, so that a piece is one segment to the disk.
    let slab = Slab::new(2 * LANES as usize, piece_bytes);
    let begun = Instant::now();
    let moved_bytes = thread::scope(|scope| {
        let mut ends = Vec::new();
        for (lane, buf) in (0..LANES).zip(slab.take_all()) {
            let (tx, rx) = UnixStream::pair()?;
            let file = &file;
            let sender = scope.spawn(move || send(file, tx, lane, len_bytes, buf));
            ends.push((sender, scope.spawn(move || receive(rx, piece_bytes))));
        }
        let died = || io::Error::other("a thread has died");
        let mut moved_bytes = 0;
        for (sender, receiver) in ends {
            sender.join().map_err(|_| died())??;
            moved_bytes += receiver.join().map_err(|_| died())??;
        }
        Ok::<_, io::Error>(moved_bytes)
    })?;
    Ok(moved_bytes as f64 / 1e6 / begun.elapsed().as_secs_f64())
}

/// Sends every [`LANES`]th piece, beginning with piece `lane`.
fn send(file: &File, mut tx: UnixStream, lane: u64, len_bytes: u64, mut buf: IoBuf) -> io::Result<()> {
    let piece_bytes = buf.len() as u64;
    for start_bytes in (lane * piece_bytes..len_bytes).step_by((LANES * piece_bytes) as usize) {
        let piece = &mut buf[..(len_bytes - start_bytes).min(piece_bytes) as usize];
        file.read_exact_at(piece, start_bytes)?;
        tx.write_all(piece)?;
    }
    Ok(())
}

/// Receives until the other end is closed. Returns the number of bytes.
fn receive(mut rx: UnixStream, piece_bytes: usize) -> io::Result<u64> {
    let mut piece = vec![0; piece_bytes];
    let mut moved_bytes = 0;
    loop {
        match rx.read(&mut piece)? {
            0 => return Ok(moved_bytes),
            len => moved_bytes += len as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_arrives() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("disk");
        std::fs::write(&path, vec![7; 5 << 20]).unwrap();
        let file = File::open(&path).unwrap();
        let (tx, rx) = UnixStream::pair().unwrap();
        let moved = thread::spawn(move || receive(rx, 4096));
        send(&file, tx, 0, (64 << 10) * (LANES + 1), IoBuf::new(64 << 10)).unwrap();
        // Lane 0 has two of the nine pieces.
        assert_eq!(moved.join().unwrap().unwrap(), 2 * (64 << 10));
        match carry(&path, 5 << 20, 256 << 10) {
            Ok(mb_per_s) => assert!(mb_per_s > 0.0),
            // Some file systems have no O_DIRECT.
            Err(error) => assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{error}"),
        }
        assert!(carry(&path, 6 << 20, 256 << 10).is_err(), "the file is shorter");
    }
}
