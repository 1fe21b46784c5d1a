//! throwaway
use diskwright_lab::{job::*, run::*};
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let cache = match args[2].as_str() {
        "direct" => Caching::Direct,
        _ => Caching::Cached,
    };
    let target = open(&args[1], &OpenHow { cache, ..OpenHow::default() }).unwrap();
    let qd: u32 = args[3].parse().unwrap();
    let secs: u64 = args[4].parse().unwrap();
    let lat = args.get(5).is_none_or(|a| a != "nolat");
    let load = Load { queue_depth: qd, ..Load::default() };
    let mut job = Job::simple("x", load, Span::from_millis(300), Span::from_secs(secs));
    job.cache = cache;
    let run = run(&job, &[target], &RunOptions { record_latency: lat, ..RunOptions::default() }, &Unwatched).unwrap();
    let p = &run.phases[0];
    let t = p.total();
    println!(
        "iops {:.0} cpu/io {:.0} ns (user {:.0} sys {:.0}) mean {:.0} p50 {:?} p99 {:?} depth {:.1} {:?}",
        p.iops(),
        p.cpu_ns_per_io(),
        p.cpu.process_user_ns as f64 / t.both.ios as f64,
        p.cpu.process_system_ns as f64 / t.both.ios as f64,
        t.both.service.mean_ns(),
        t.both.service.quantile_ns(0.5),
        t.both.service.quantile_ns(0.99),
        p.depth_reached(),
        run.end
    );
    for w in &run.warnings {
        println!("! {w}");
    }
}
