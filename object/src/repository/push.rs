//! Pushes a disk: reads it, sends the chunks that are not there, and publishes its manifest.
//!
//! ```text
//!   plan ─▶ numbers ─▶ threads: read ─▶ zeros? ─▶ digest ─▶ there? ─▶ compress ─▶ send ─┐
//!                                                                   manifest ◀── chunks ◀┘
//! ```
//!
//! The disk must not change meanwhile. A push that was broken off is made again under the same
//! name, and finds the chunks that it has sent.

use super::{
    chunk::{Packer, digest_of},
    keys::{Digest, bad_name},
    manifest::{CHUNK_BYTES, Chunk, DISK_BYTES_MAX, Facts, Manifest, chunk_bytes},
    plan::{Changed, Plan, plan},
    prune,
    remote::Remote,
    session::{Session, exists},
};
use crate::error::{ObjectError, Result};
use diskwright_store::{BlockDevice, Blocking, EngineKind, all_zero};
use std::{
    collections::BTreeMap,
    io,
    path::Path,
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Sender, channel},
    },
    thread,
};

/// Threads that read, compress and send. Most of the time they wait for the server.
const THREADS: usize = 8;

/// How a disk is pushed.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// How the disk is read.
    pub engine: EngineKind,
    /// Chunks that are read, compressed and sent at the same time.
    pub threads: usize,
    /// Name of the disk's file, without its folder.
    pub source: String,
    /// Seconds since 1970.
    pub now: u64,
    /// The point of the disk's change tracking that was started for this push.
    pub point: Option<String>,
    /// A disk of the repository, and what may differ from it.
    pub base: Option<(String, Changed)>,
}

impl Default for PushOptions {
    fn default() -> Self {
        Self { engine: EngineKind::Auto, threads: THREADS, source: String::new(), now: 0, point: None, base: None }
    }
}

/// What a push has done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Tells the contents of the disk from all others.
    pub contents_id: Digest,
    /// Size of the disk in bytes.
    pub size_bytes: u64,
    /// Chunks that hold data.
    pub chunks: u64,
    /// Bytes of the disk that were read.
    pub read_bytes: u64,
    /// Chunks that were sent.
    pub sent: u64,
    /// The bytes of their objects, and of the manifest.
    pub sent_bytes: u64,
}

/// What a thread reports.
struct Done {
    number: u64,
    /// The chunk; `None` if it has only zeros.
    chunk: Option<Chunk>,
    /// Length of its object, if it was sent.
    sent_bytes: Option<u64>,
}

/// Pushes a disk under a name. `progress` gets the bytes that were read and those that are to be
/// read, and returns whether to go on. `None` if it was stopped.
///
/// # Errors
/// [`ObjectError::Exists`], [`ObjectError::NoRepository`]; the server's errors; that the disk
/// cannot be read.
pub fn push(
    remote: &dyn Remote,
    name: &str,
    device: &dyn BlockDevice,
    options: &PushOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<Pushed>> {
    if let Some(why) = bad_name(name) {
        return Err(ObjectError::BadName { name: remote.name_of(name), why });
    }
    let geometry = device.geometry();
    if geometry.size_bytes == 0 || geometry.size_bytes > DISK_BYTES_MAX {
        let what = format!("the disk has {} bytes, and 1 sector to 64 TiB can be pushed", geometry.size_bytes);
        return Err(ObjectError::NoRepository { name: remote.name_of(name), what });
    }
    if remote.get(name, 1)?.is_some() {
        return Err(exists(remote, name));
    }
    let base = options.base.as_ref().map(|(base, changed)| Ok((prune::disk(remote, base)?, changed))).transpose()?;
    let session = Session::begin(remote)?;
    let sent = send(&session, device, base.as_ref().map(|(base, changed)| (base, *changed)), options, progress);
    let (chunks, mut pushed) = match sent {
        Ok(Some(sent)) => sent,
        Ok(None) => {
            session.end();
            return Ok(None);
        }
        Err(error) => {
            session.end();
            return Err(error);
        }
    };
    let facts = Facts {
        size_bytes: geometry.size_bytes,
        logical_sector_bytes: geometry.logical_sector_bytes,
        physical_sector_bytes: geometry.physical_sector_bytes,
        push: session.id.to_string(),
        source: options.source.clone(),
        pushed: options.now,
        base: options.base.as_ref().map(|(base, _)| base.clone()),
        point: options.point.clone(),
    };
    let manifest = Manifest::new(facts, chunks);
    let bytes = manifest.to_bytes();
    pushed.sent_bytes += bytes.len() as u64;
    (pushed.contents_id, pushed.chunks) = (manifest.contents_id(), manifest.chunks().len() as u64);
    session.publish(name, &bytes)?;
    Ok(Some(pushed))
}

/// Sends the chunks. Returns all chunks of the disk.
fn send(
    session: &Session<'_>,
    device: &dyn BlockDevice,
    base: Option<(&Manifest, &Changed)>,
    options: &PushOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<Option<(BTreeMap<u64, Chunk>, Pushed)>> {
    let size_bytes = device.geometry().size_bytes;
    let Plan { kept: mut chunks, read } =
        plan(device, base, session).map_err(|source| unreadable(&options.source, source))?;
    let total_bytes: u64 = read.iter().map(|&number| chunk_bytes(size_bytes, number) as u64).sum();
    let mut pushed = Pushed { contents_id: [0; 32], size_bytes, chunks: 0, read_bytes: 0, sent: 0, sent_bytes: 0 };
    let (next, is_over) = (AtomicUsize::new(0), AtomicBool::new(false));
    let stopped = thread::scope(|scope| {
        let (sender, receiver) = channel();
        for _ in 0..options.threads.max(1).min(read.len()) {
            let (sender, read, next, is_over) = (sender.clone(), &read, &next, &is_over);
            scope.spawn(move || work(session, device, options, (read, next, is_over), &sender));
        }
        drop(sender);
        let mut result = Ok(false);
        for done in receiver {
            match done {
                Ok(Done { number, chunk, sent_bytes }) => {
                    pushed.read_bytes += chunk_bytes(size_bytes, number) as u64;
                    pushed.sent += u64::from(sent_bytes.is_some());
                    pushed.sent_bytes += sent_bytes.unwrap_or(0);
                    chunks.extend(chunk.map(|chunk| (number, chunk)));
                    if !is_over.load(Ordering::Relaxed) && !progress(pushed.read_bytes, total_bytes) {
                        is_over.store(true, Ordering::Relaxed);
                        result = Ok(true);
                    }
                }
                Err(error) => {
                    is_over.store(true, Ordering::Relaxed);
                    // The first error is the one that is told.
                    result = result.and(Err(error));
                }
            }
        }
        result
    })?;
    Ok((!stopped).then_some((chunks, pushed)))
}

fn unreadable(source_name: &str, source: io::Error) -> ObjectError {
    ObjectError::local("read", Path::new(source_name), source)
}

/// A thread: takes chunks that are to be read until there are none.
fn work(
    session: &Session<'_>,
    device: &dyn BlockDevice,
    options: &PushOptions,
    (read, next, is_over): (&[u64], &AtomicUsize, &AtomicBool),
    sender: &Sender<Result<Done>>,
) {
    let worked = (|| -> Result<()> {
        let failed = |source| unreadable(&options.source, source);
        let mut queue = Blocking::open(device, options.engine).map_err(failed)?;
        let mut packer = Packer::new().map_err(failed)?;
        let size_bytes = device.geometry().size_bytes;
        let mut memory = vec![0; size_bytes.min(CHUNK_BYTES) as usize];
        while let Some(&number) = read.get(next.fetch_add(1, Ordering::Relaxed)) {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            session.give_sign()?;
            let bytes = &mut memory[..chunk_bytes(size_bytes, number)];
            queue.read(number * CHUNK_BYTES, bytes).map_err(failed)?;
            let mut done = Done { number, chunk: None, sent_bytes: None };
            if !all_zero(bytes) {
                let digest = digest_of(bytes);
                done.chunk = session.find_or_claim(&digest);
                if done.chunk.is_none() {
                    let chunk = session.send(digest, || packer.pack(bytes).map_err(failed))?;
                    done.sent_bytes = Some(chunk.object_bytes.into());
                    done.chunk = Some(chunk);
                }
            }
            if sender.send(Ok(done)).is_err() {
                break;
            }
        }
        Ok(())
    })();
    if let Err(error) = worked {
        // Nobody listens any more if that fails.
        let _ = sender.send(Err(error));
    }
}
