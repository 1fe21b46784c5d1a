//! Limits of a disk and of a connection. Only lower bounds of time are checked: a busy machine may
//! be slower, never faster.

use crate::common::{memory, serve};
use diskwright_nbd::wire::{Command, CommandFlags, Framing};
use diskwright_serve::net::ServerOptions;
use diskwright_store::{LimitedDevice, RateLimiter, RateLimits};
use std::{
    io::Write as _,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

fn per_second(iops: u64, bytes_per_second: u64) -> RateLimits {
    RateLimits { iops, bytes_per_second, iops_burst: u64::from(iops > 0), burst_bytes: u64::from(bytes_per_second > 0) }
}

#[test]
fn a_limited_disk_serves_all_its_clients_together_no_faster() {
    let limiter = Arc::new(RateLimiter::new(per_second(1000, 0)));
    let device = Arc::new(LimitedDevice::new(memory(1 << 20, true), Arc::clone(&limiter)));
    let Some(mut served) = serve(vec![("m", device)], ServerOptions::default()) else { return };
    let began = Instant::now();
    thread::scope(|scope| {
        for _ in 0..4 {
            let mut client = served.client().go("m", Framing::Structured, &[]);
            scope.spawn(move || {
                for block in 0..25 {
                    client.send(Command::READ, block * 4096, 4096);
                }
                (0..25).for_each(|_| drop(client.reply(4096).unwrap()));
            });
        }
    });
    assert!(began.elapsed() >= Duration::from_millis(99), "100 requests took {:?}", began.elapsed());
    let delayed = limiter.delayed();
    assert!((1..=99).contains(&delayed), "{delayed}");
    // Without limits the same connections are served at once, and requests that wait end with the
    // server.
    limiter.set(RateLimits::default());
    let mut client = served.client().go("m", Framing::Simple, &[]);
    (0..1000).for_each(|_| drop(client.read(0, 4096).unwrap()));
    assert_eq!(limiter.delayed(), delayed);
    limiter.set(per_second(20, 0));
    for _ in 0..5 {
        client.send(Command::READ, 0, 4096);
    }
    client.reply(4096).unwrap();
    served.stop().unwrap();
}

#[test]
fn a_limited_connection_does_not_slow_down_another_one() {
    let options = ServerOptions { workers: 1, client_limits: per_second(0, 256 << 10), ..ServerOptions::default() };
    let Some(served) = serve(vec![("m", memory(4 << 20, true))], options) else { return };
    let began = Instant::now();
    // A write that is longer than the burst, and what follows it in the same message.
    let mut greedy = served.client().go("m", Framing::Extended, &[]);
    let mut batch = greedy.request(Command::WRITE, CommandFlags::PAYLOAD_LEN, 0, 256 << 10);
    batch.extend(vec![7; 256 << 10]);
    for _ in 0..2 {
        batch.extend(greedy.request(Command::WRITE, CommandFlags::PAYLOAD_LEN, 0, 4096));
        batch.extend([9; 4096]);
    }
    let mut writer = greedy.stream.try_clone().unwrap();
    let sender = thread::spawn(move || writer.write_all(&batch).unwrap());
    greedy.reply(0).unwrap();
    let mut modest = served.client().go("m", Framing::Simple, &[]);
    let read = modest.read(0, 512).unwrap();
    let modest_took = began.elapsed();
    if modest_took < Duration::from_millis(900) {
        assert!(read == [7; 512], "the next write of the first client is taken too early");
    }
    greedy.reply(0).unwrap();
    greedy.reply(0).unwrap();
    sender.join().unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    assert!(modest_took < began.elapsed());
    greedy.ask(Command::FLUSH, CommandFlags::empty(), 0, 0).unwrap();
    greedy.send(Command::DISCONNECT, 0, 0);
    assert!(greedy.is_hung_up());
}
