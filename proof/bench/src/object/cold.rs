//! A cold cache: which requests random reads cost, and how fast a sequential reader is beside the
//! client library alone.

use super::{
    gateway,
    gateway::{BUCKET, DELAY, KEY, MIB, NAME, SEED},
    make_cold, open,
};
use crate::turns::in_turns;
use diskwright_lab::{
    LabError, Result,
    acceptance::{Bar, Check, Context, RowOutcome},
    progress::Progress,
    rounds::Window,
};
use diskwright_object::{BLOCK_BYTES, Settings};
use diskwright_stats::numbers::bytes;
use diskwright_store::{BlockDevice, CacheMode, EngineKind, IoBuf, QueueOptions, Request};
use object_store::{ObjectStore, ObjectStoreExt, aws::AmazonS3Builder, path::Path as ObjectPath};
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};
use std::{collections::BTreeSet, io, path::Path, sync::Arc, time::Instant};
use tokio::task::JoinSet;

const QUEUE_DEPTH: usize = 32;
/// Requests of the sequential readers under way, of 1 MiB each.
const PARALLEL: usize = 16;

/// Reads ranges by a queue, as many at once as it is deep.
fn read_all(device: &dyn BlockDevice, depth: usize, ranges: impl Iterator<Item = (u64, usize)>) -> io::Result<()> {
    let options = QueueOptions { depth, engine: EngineKind::Auto, slab: None, ring: None };
    let mut queue = device.open_queue(&options)?;
    let (mut done, mut free) = (Vec::new(), Vec::new());
    for (offset_bytes, len) in ranges {
        while queue.in_flight() >= depth {
            queue.reap(1, &mut done)?;
            take(&mut done, &mut free)?;
        }
        let buf = free.pop().unwrap_or_else(|| IoBuf::new(len));
        queue
            .push(Request::read(offset_bytes, len, buf, 0))
            .map_err(|refused| io::Error::other(refused.reason.to_string()))?;
    }
    while queue.in_flight() > 0 {
        queue.reap(1, &mut done)?;
        take(&mut done, &mut free)?;
    }
    Ok(())
}

fn take(done: &mut Vec<diskwright_store::Completion>, free: &mut Vec<IoBuf>) -> io::Result<()> {
    done.drain(..).try_for_each(|ended| {
        ended.result?;
        free.extend(ended.buf);
        Ok(())
    })
}

/// Random reads of 4 KiB: one request for each MiB that is touched.
pub(crate) fn random(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(256, 1024) * MIB;
    let gateway = match gateway(context, size_bytes)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("requests of random reads", why)),
    };
    let settings = gateway.settings();
    let rounds = context.rounds(context.pick(1, 5));
    let reads = size_bytes / MIB;
    let (mut asked, mut twice, mut iops) = (Vec::new(), Vec::new(), Vec::new());
    in_turns("cold reads", &["S3"], (rounds, SEED), progress, &mut |Window { round, .. }, _| {
        make_cold(&settings)?;
        let (_files, device) = open(&settings, CacheMode::PageCache)?;
        gateway.take_asked();
        let mut rng = Xoshiro256PlusPlus::seed_from_u64(SEED + round as u64);
        let offsets: Vec<u64> = (0..reads).map(|_| rng.next_u64() % (size_bytes / 4096) * 4096).collect();
        let begun = Instant::now();
        read_all(&*device, QUEUE_DEPTH, offsets.iter().map(|&offset_bytes| (offset_bytes, 4096)))
            .map_err(LabError::file("read", Path::new(NAME)))?;
        iops.push(reads as f64 / begun.elapsed().as_secs_f64());
        let touched: BTreeSet<u64> = offsets.iter().map(|offset_bytes| offset_bytes / BLOCK_BYTES).collect();
        let requests = gateway.take_asked();
        let blocks = |range: &std::ops::Range<u64>| range.start / BLOCK_BYTES..range.end.div_ceil(BLOCK_BYTES);
        let fetched: Vec<u64> = requests.iter().flat_map(blocks).collect();
        let different: BTreeSet<u64> = fetched.iter().copied().collect();
        asked.push(requests.len() as f64 / touched.len() as f64);
        twice.push((fetched.len() - different.len()) as f64);
        Ok(())
    })?;
    let checks = vec![
        Check::absolute("requests for each MiB that is touched", "", &asked, Bar::AtMost(1.0)),
        Check::absolute("MiB that are fetched twice", "", &twice, Bar::AtMost(0.0)),
    ];
    let rates = iops.iter().map(|iops| format!("{iops:.0}")).collect::<Vec<_>>().join(", ");
    let notes = vec![format!(
        "{reads} reads of 4 KiB at random places of an object of {}, QD {QUEUE_DEPTH}, an empty cache; versitygw on this machine, {DELAY:?} added to each request; {rates} reads a second",
        bytes(size_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

/// A sequential reader beside the client library with as many requests under way.
pub(crate) fn sequential(context: &Context<'_>, progress: &mut dyn Progress) -> Result<RowOutcome> {
    let size_bytes = context.pick(256, 1024) * MIB;
    let gateway = match gateway(context, size_bytes)? {
        Ok(gateway) => gateway,
        Err(why) => return Ok(RowOutcome::skipped("a sequential reader", why)),
    };
    let settings = gateway.settings();
    let rounds = context.rounds(context.pick(2, 9));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(LabError::file("start a thread for", Path::new(NAME)))?;
    let library = library(&settings).map_err(LabError::file("open", Path::new(NAME)))?;
    let mut rates: [Vec<f64>; 2] = Default::default();
    in_turns("sequential", &["S3 as a disk", "object_store"], (rounds, SEED), progress, &mut |window, _| {
        let begun = match window.cell {
            0 => {
                make_cold(&settings)?;
                let (_files, device) = open(&settings, CacheMode::PageCache)?;
                let begun = Instant::now();
                let ranges = (0..size_bytes).step_by(MIB as usize).map(|offset_bytes| (offset_bytes, MIB as usize));
                read_all(&*device, PARALLEL, ranges).map_err(LabError::file("read", Path::new(NAME)))?;
                begun
            }
            _ => {
                let begun = Instant::now();
                let read = runtime.block_on(read_by_library(Arc::clone(&library), size_bytes));
                read.map_err(LabError::file("read", Path::new(NAME)))?;
                begun
            }
        };
        rates[window.cell].push(size_bytes as f64 / begun.elapsed().as_secs_f64());
        Ok(())
    })?;
    let checks = vec![Check::ratio("a sequential reader", "B/s", &rates[0], &rates[1], Bar::AtLeast(0.9))];
    let notes = vec![format!(
        "{}, 1 MiB at a time, {PARALLEL} requests under way; ours also writes the cache, with checksums; versitygw on this machine, {DELAY:?} added to each request",
        bytes(size_bytes)
    )];
    Ok(RowOutcome { checks, notes, ..RowOutcome::default() })
}

/// The client library, as a program would use it.
fn library(settings: &Settings) -> io::Result<Arc<dyn ObjectStore>> {
    let get = |name: &str| settings.aws.get(name).unwrap_or_default().to_owned();
    // It needs one for every client, also without TLS. Another part of the program may have set it.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let store = AmazonS3Builder::new()
        .with_bucket_name(BUCKET)
        .with_endpoint(get("AWS_ENDPOINT_URL"))
        .with_access_key_id(get("AWS_ACCESS_KEY_ID"))
        .with_secret_access_key(get("AWS_SECRET_ACCESS_KEY"))
        .with_region(get("AWS_REGION"))
        .with_allow_http(true)
        .build();
    Ok(Arc::new(store.map_err(io::Error::other)?))
}

async fn read_by_library(store: Arc<dyn ObjectStore>, size_bytes: u64) -> io::Result<()> {
    let mut under_way = JoinSet::new();
    for start in (0..size_bytes).step_by(MIB as usize) {
        if under_way.len() == PARALLEL {
            check(under_way.join_next().await)?;
        }
        let store = Arc::clone(&store);
        under_way.spawn(async move {
            let found = store.get_range(&ObjectPath::from(KEY), start..start + MIB).await;
            found.map(|bytes| bytes.len()).map_err(io::Error::other)
        });
    }
    while let Some(ended) = under_way.join_next().await {
        check(Some(ended))?;
    }
    Ok(())
}

fn check(ended: Option<Result<io::Result<usize>, tokio::task::JoinError>>) -> io::Result<()> {
    match ended {
        Some(Ok(Ok(len))) if len as u64 == MIB => Ok(()),
        Some(Ok(Ok(_))) | None => Err(io::ErrorKind::UnexpectedEof.into()),
        Some(Ok(Err(error))) => Err(error),
        Some(Err(error)) => Err(io::Error::other(error)),
    }
}
