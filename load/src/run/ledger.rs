//! The conductor's book: what all threads counted, added up by thread for the window, by interval
//! for the series, and by tick for those who watch.
//!
//! ```text
//!   Cut ─┬─ lies in the window? ─▶ Totals of its thread and target
//!        ├─▶ Scatter of its thread and target (scatter.rs)
//!        ├─▶ interval of the series, closed when every thread has passed it
//!        └─▶ tick, forgotten after a second or two                                 ─▶ Snapshot
//! ```
//!
//! A bin never crosses a boundary (see `thread`), so it belongs to one interval, and to the window
//! or not, by when it began.
//!
//! **Under a rate** requests and bytes go by when they ended, and response times by when their
//! requests were due, in the window and in the series alike: a stall shows in the latencies of the
//! interval in which it was felt, and in the rate of the interval in which nothing ended. An
//! interval stays open until all requests that were due in it have ended, or until [`OPEN_MAX`] are
//! open; a latency that comes even later changes the longest latency of its interval only. The
//! window's latencies are exact in any case.
//!
//! **A series has an end.** A run of a week at a second for each point would have six hundred
//! thousand of them. When there are [`POINTS_MAX`], each two neighbours become one of twice the
//! length, and so it goes on: rates, means and maxima stay exact, and of the percentiles of two
//! points the longer is kept, so that nothing looks better than it was.
//!
//! Invariant: memory does not grow with the length of the run, once the series is full.

use crate::{
    record::{IopsStdDev, SeriesPoint},
    run::{
        histogram::Sum,
        lane::Undone,
        scatter::Scatter,
        tally::{Tally, Totals},
        thread::Cut,
        ticks::Ticks,
    },
};
use std::{collections::BTreeMap, ops::Range};

/// Most points of a series, an even number: a day and a half at a second each, in 10 MiB.
pub const POINTS_MAX: usize = 1 << 17;
/// Most intervals that wait for requests which were due in them.
const OPEN_MAX: usize = 256;
/// Most different times that requests which were not made are entered with, for each thread and
/// target.
const GROUPS_MAX: u64 = 10_000;
/// How far back a snapshot looks.
const LOOK_BACK_NS: u64 = 1_000_000_000;

/// Everything in a stretch of time.
#[derive(Debug, Default)]
struct Stretch {
    read_ios: u64,
    read_bytes: u64,
    write_ios: u64,
    write_bytes: u64,
    latency: Sum,
}

impl Stretch {
    fn is_empty(&self) -> bool {
        self.read_ios == 0 && self.write_ios == 0
    }

    fn add(&mut self, tally: &Tally) {
        let Tally { reads, writes, .. } = tally;
        self.read_ios += reads.ios;
        self.read_bytes += reads.bytes;
        self.write_ios += writes.ios;
        self.write_bytes += writes.bytes;
        self.latency.add(reads.latency());
        self.latency.add(writes.latency());
    }

    fn merge(&mut self, other: &Self) {
        self.read_ios += other.read_ios;
        self.read_bytes += other.read_bytes;
        self.write_ios += other.write_ios;
        self.write_bytes += other.write_bytes;
        self.latency.merge(&other.latency);
    }

    fn point(&self, start_ns: u64, len_ns: u64) -> SeriesPoint {
        SeriesPoint {
            start_ns,
            len_ns,
            read_ios: self.read_ios,
            read_bytes: self.read_bytes,
            write_ios: self.write_ios,
            write_bytes: self.write_bytes,
            mean_ns: self.latency.mean_ns(),
            p50_ns: self.latency.quantile_ns(0.5),
            p99_ns: self.latency.quantile_ns(0.99),
            max_ns: self.latency.max_ns(),
        }
    }
}

/// Two neighbours as one.
fn joined(first: &SeriesPoint, second: &SeriesPoint) -> SeriesPoint {
    let ios = |point: &SeriesPoint| (point.read_ios + point.write_ios) as f64;
    let weight = ios(first) + ios(second);
    let sum_ns = first.mean_ns * ios(first) + second.mean_ns * ios(second);
    SeriesPoint {
        start_ns: first.start_ns,
        len_ns: first.len_ns + second.len_ns,
        read_ios: first.read_ios + second.read_ios,
        read_bytes: first.read_bytes + second.read_bytes,
        write_ios: first.write_ios + second.write_ios,
        write_bytes: first.write_bytes + second.write_bytes,
        // Under a rate there may be latencies of requests that ended elsewhere.
        mean_ns: if weight > 0.0 { sum_ns / weight } else { f64::midpoint(first.mean_ns, second.mean_ns) },
        p50_ns: first.p50_ns.max(second.p50_ns),
        p99_ns: first.p99_ns.max(second.p99_ns),
        max_ns: first.max_ns.max(second.max_ns),
    }
}

/// What was going on lately.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Lately {
    pub(crate) iops: f64,
    pub(crate) mb_per_s: f64,
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Ledger {
    interval_ns: u64,
    points_max: usize,
    tick_of: Ticks,
    totals: Vec<Vec<Totals>>,
    /// As the job asks for them, however long those of the series have become.
    asked_interval_ns: u64,
    scatters: Vec<Vec<Scatter>>,
    /// How far each thread has come.
    until_ns: Vec<u64>,
    /// Up to when all requests of each thread that were due have ended.
    settled_ns: Vec<u64>,
    /// By number, those that are not closed.
    open: BTreeMap<u64, Stretch>,
    series: Vec<SeriesPoint>,
    /// By start.
    ticks: BTreeMap<u64, Stretch>,
}

impl Ledger {
    /// For threads with so many targets each.
    pub(crate) fn new(targets_of_threads: &[usize], interval_ns: u64, tick_of: Ticks) -> Self {
        Self {
            interval_ns: interval_ns.max(1),
            points_max: POINTS_MAX,
            tick_of,
            totals: targets_of_threads.iter().map(|targets| vec![Totals::default(); *targets]).collect(),
            asked_interval_ns: interval_ns.max(1),
            scatters: targets_of_threads.iter().map(|targets| vec![Scatter::default(); *targets]).collect(),
            until_ns: vec![0; targets_of_threads.len()],
            settled_ns: vec![0; targets_of_threads.len()],
            open: BTreeMap::new(),
            series: Vec::new(),
            ticks: BTreeMap::new(),
        }
    }

    /// Enters a bin. `window` is the measured part of the phase.
    pub(crate) fn enter(&mut self, cut: &Cut, window: &Range<u64>) {
        for (tally, scatter) in cut.tallies.iter().zip(&mut self.scatters[cut.thread]) {
            let counts = [tally.reads.ios, tally.writes.ios];
            scatter.add(cut.from_ns..cut.until_ns, counts, self.asked_interval_ns, window);
        }
        // Before any is closed: whoever follows the series has seen the points that become one.
        if self.series.len() >= self.points_max && self.series.len().is_multiple_of(2) {
            self.join();
        }
        let interval = self.open.entry(cut.from_ns / self.interval_ns).or_default();
        let tick = self.ticks.entry(self.tick_of.start_of(cut.from_ns)).or_default();
        for (tally, totals) in cut.tallies.iter().zip(&mut self.totals[cut.thread]) {
            interval.add(tally);
            tick.add(tally);
            if window.contains(&cut.from_ns) {
                totals.add(tally);
            }
            for late in &tally.late {
                tick.latency.add_many(late.response_ns, 1);
                if window.contains(&late.intended_ns) {
                    totals.add_responses(late.response_ns, 1, late.is_read);
                }
            }
        }
        for late in cut.tallies.iter().flat_map(|tally| &tally.late) {
            self.add_late(late.intended_ns, late.response_ns, 1);
        }
        for (lane, undone) in cut.undone.iter().enumerate() {
            self.add_undone(cut.thread, lane, undone);
        }
        self.until_ns[cut.thread] = cut.until_ns;
        self.settled_ns[cut.thread] = cut.settled_ns;
        let all_until_ns = self.all_until_ns();
        let all_settled_ns = self.settled_ns.iter().copied().min().unwrap_or(0).min(all_until_ns);
        while let Some(number) = self.open.first_key_value().map(|(number, _)| *number) {
            let end_ns = (number + 1).saturating_mul(self.interval_ns);
            if end_ns > all_until_ns || end_ns > all_settled_ns && self.open.len() <= OPEN_MAX {
                break;
            }
            if let Some((number, stretch)) = self.open.pop_first() {
                self.close(number, &stretch, self.interval_ns);
            }
        }
        while let Some(entry) = self.ticks.first_entry()
            && entry.key() + 2 * LOOK_BACK_NS + self.tick_of.longest_ns() < cut.from_ns
        {
            entry.remove();
        }
    }

    /// Enters a response time of `count` requests that were due in an earlier bin.
    fn add_late(&mut self, intended_ns: u64, response_ns: u64, count: u64) {
        let number = intended_ns / self.interval_ns;
        match usize::try_from(number).ok().and_then(|number| self.series.get_mut(number)) {
            Some(closed) => closed.max_ns = closed.max_ns.max(response_ns),
            None => self.open.entry(number).or_default().latency.add_many(response_ns, count),
        }
    }

    /// Enters what a thread leaves undone on its target number `lane`. Of very many requests,
    /// neighbours count with one time.
    fn add_undone(&mut self, thread: usize, lane: usize, undone: &Undone) {
        let Undone { overdue, unfinished, read_share, waited_until_ns } = undone;
        self.totals[thread][lane].overdue += overdue.count + unfinished;
        let Some(waited_until_ns) = waited_until_ns else { return };
        let groups = overdue.count.min(GROUPS_MAX);
        let first_of = |group: u64| (u128::from(overdue.count) * u128::from(group) / u128::from(groups.max(1))) as u64;
        let reads_before = |number: u64| (number as f64 * read_share).round() as u64;
        for group in 0..groups {
            let (first, end) = (first_of(group), first_of(group + 1));
            let intended_ns = overdue.intended_ns(first + (end - first) / 2);
            let waited_ns = waited_until_ns.saturating_sub(intended_ns);
            let reads = reads_before(end).saturating_sub(reads_before(first)).min(end - first);
            for (count, is_read) in [(reads, true), (end - first - reads, false)] {
                if count > 0 {
                    self.totals[thread][lane].add_responses(waited_ns, count, is_read);
                    self.add_late(intended_ns, waited_ns, count);
                }
            }
        }
    }

    /// A thread has ended: nothing waits for it any more.
    pub(crate) fn ended(&mut self, thread: usize) {
        (self.until_ns[thread], self.settled_ns[thread]) = (u64::MAX, u64::MAX);
    }

    /// Makes one point of two, and intervals twice as long.
    fn join(&mut self) {
        for number in 0..self.series.len() / 2 {
            self.series[number] = joined(&self.series[2 * number], &self.series[2 * number + 1]);
        }
        self.series.truncate(self.series.len() / 2);
        self.interval_ns *= 2;
        for (number, stretch) in std::mem::take(&mut self.open) {
            self.open.entry(number / 2).or_default().merge(&stretch);
        }
    }

    fn close(&mut self, number: u64, stretch: &Stretch, len_ns: u64) {
        // Intervals in which nothing at all was heard of stand in the series too: that is what a
        // stall looks like.
        while (self.series.len() as u64) < number {
            let start_ns = self.series.len() as u64 * self.interval_ns;
            self.series.push(Stretch::default().point(start_ns, self.interval_ns));
        }
        self.series.push(stretch.point(number * self.interval_ns, len_ns));
    }

    /// How long an interval of the series is by now.
    pub(crate) fn interval_ns(&self) -> u64 {
        self.interval_ns
    }

    /// The series as far as all threads have come.
    pub(crate) fn series(&self) -> &[SeriesPoint] {
        &self.series
    }

    /// How far all threads have come.
    fn all_until_ns(&self) -> u64 {
        self.until_ns.iter().copied().min().unwrap_or(0)
    }

    /// What was going on in the second before `now_ns`, in whole ticks. A tick that is over but
    /// whose count is still on its way from a thread is left out, for at most the length of a tick:
    /// a thread that says nothing for longer is blocked by its target.
    pub(crate) fn lately(&self, now_ns: u64) -> Lately {
        let longest_ns = self.tick_of.longest_ns();
        let seen_ns = self.all_until_ns().max(now_ns.saturating_sub(longest_ns)).min(now_ns);
        let until_ns = self.tick_of.start_of(seen_ns);
        let from_ns = until_ns.saturating_sub(LOOK_BACK_NS.max(longest_ns));
        let from_ns = match self.tick_of.start_of(from_ns) {
            start_ns if start_ns == from_ns => from_ns,
            _ => self.tick_of.end_of(from_ns),
        };
        let (mut ios, mut bytes, mut latency) = (0, 0, Sum::default());
        for stretch in self.ticks.range(from_ns..until_ns.max(from_ns)).map(|(_, stretch)| stretch) {
            ios += stretch.read_ios + stretch.write_ios;
            bytes += stretch.read_bytes + stretch.write_bytes;
            latency.merge(&stretch.latency);
        }
        let span_ns = until_ns.saturating_sub(from_ns).max(1) as f64;
        Lately {
            iops: ios as f64 * 1e9 / span_ns,
            mb_per_s: bytes as f64 * 1e3 / span_ns,
            p50_ns: latency.quantile_ns(0.5),
            p99_ns: latency.quantile_ns(0.99),
        }
    }

    /// How the rates scattered, by thread and target.
    pub(crate) fn iops_std_devs(&self) -> Vec<Vec<Option<IopsStdDev>>> {
        let of = |scatters: &Vec<Scatter>| scatters.iter().map(|one| one.std_dev(self.asked_interval_ns)).collect();
        self.scatters.iter().map(of).collect()
    }

    /// The window's totals by thread and target, and the series until `end_ns`.
    pub(crate) fn finish(mut self, end_ns: u64) -> (Vec<Vec<Totals>>, Vec<SeriesPoint>) {
        for (number, stretch) in std::mem::take(&mut self.open) {
            let start_ns = number * self.interval_ns;
            // A bin that began at the very end and holds nothing is no interval: its rate would be
            // 0 for no time.
            if start_ns < end_ns || !stretch.is_empty() {
                self.close(number, &stretch, end_ns.saturating_sub(start_ns).clamp(1, self.interval_ns));
            }
        }
        // A target that stalls at the end has intervals of which no thread has said anything.
        while let start_ns = (self.series.len() as u64).saturating_mul(self.interval_ns)
            && start_ns < end_ns
        {
            self.series.push(Stretch::default().point(start_ns, (end_ns - start_ns).min(self.interval_ns)));
        }
        (self.totals, self.series)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: u64 = 1_000_000_000;
    const ALL: Range<u64> = 0..u64::MAX;

    fn cut(thread: usize, from_ns: u64, until_ns: u64, latencies: &[u64]) -> Cut {
        let mut tally = Tally::new(false);
        for latency_ns in latencies {
            tally.reads.ios += 1;
            tally.reads.bytes += 4096;
            tally.reads.service.record(*latency_ns);
        }
        Cut { thread, from_ns, until_ns, settled_ns: until_ns, tallies: vec![tally], undone: Vec::new() }
    }

    fn ledger(threads: usize) -> Ledger {
        Ledger::new(&vec![1; threads], S, Ticks::new(S))
    }

    #[test]
    fn an_interval_is_closed_when_all_threads_have_passed_it() {
        let mut ledger = ledger(2);
        ledger.enter(&cut(0, 0, S, &[10]), &ALL);
        ledger.enter(&cut(0, S, 2 * S, &[20]), &ALL);
        assert_eq!(ledger.series().len(), 0);
        ledger.enter(&cut(1, 0, S, &[30, 40]), &ALL);
        assert_eq!(ledger.series().len(), 1);
        let (totals, series) = ledger.finish(S + S / 2);
        assert_eq!(series.iter().map(|point| (point.start_ns, point.read_ios)).collect::<Vec<_>>(), [(0, 3), (S, 1)]);
        assert_eq!((series[0].p50_ns, series[0].max_ns, series[1].len_ns), (30, 40, S / 2));
        assert_eq!(totals.iter().map(|thread| thread[0].record().0.ios).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn each_thread_has_the_scatter_of_its_own_intervals() {
        let mut ledger = ledger(2);
        for second in 0..4 {
            // The first thread is unsteady, the second makes up for it: together they are steady.
            let (first, second_thread) = if second % 2 == 0 { (1, 3) } else { (3, 1) };
            ledger.enter(&cut(0, second * S, (second + 1) * S, &vec![10; first]), &(0..4 * S));
            ledger.enter(&cut(1, second * S, (second + 1) * S, &vec![10; second_thread]), &(0..4 * S));
        }
        for thread in ledger.iops_std_devs() {
            assert_eq!(thread, [Some(IopsStdDev { reads: 1.0, writes: 0.0, both: 1.0 })]);
        }
        assert!(ledger.series().iter().all(|point| point.read_ios == 4));
    }

    #[test]
    fn a_stall_stands_in_the_series() {
        let mut ledger = ledger(1);
        ledger.enter(&cut(0, 0, S, &[10]), &(0..0));
        ledger.enter(&cut(0, 4 * S, 5 * S, &[4 * S]), &(0..0));
        let (totals, series) = ledger.finish(5 * S);
        assert_eq!(series.iter().map(|point| point.read_ios).collect::<Vec<_>>(), [1, 0, 0, 0, 1]);
        assert_eq!(totals[0][0].record().0.ios, 0, "it was not in the window");
    }

    #[test]
    fn the_last_interval_has_its_true_length() {
        // A second and a half in intervals of 700 ms, a request each millisecond, in the bins that
        // a thread makes of them.
        let (ms, interval_ns, end_ns) = (1_000_000, 700_000_000, 1_500_000_000);
        let ticks = Ticks::new(interval_ns);
        let mut ledger = Ledger::new(&[1], interval_ns, ticks);
        let mut from_ns = 0;
        while from_ns < end_ns {
            let until_ns = ticks.end_of(from_ns).min(end_ns);
            let ios = (until_ns.div_ceil(ms) - from_ns.div_ceil(ms)) as usize;
            ledger.enter(&cut(0, from_ns, until_ns, &vec![10; ios]), &ALL);
            from_ns = until_ns;
        }
        let (_, series) = ledger.finish(end_ns);
        let points: Vec<_> = series.iter().map(|point| (point.start_ns, point.len_ns, point.read_ios)).collect();
        assert_eq!(
            points,
            [(0, interval_ns, 700), (interval_ns, interval_ns, 700), (2 * interval_ns, 100 * ms, 100)],
            "1,000 IOPS in each, by its own length"
        );
    }

    #[test]
    fn the_series_ends_where_the_load_ends() {
        // A bin that begins at the end and holds nothing is no interval.
        let mut ended = ledger(1);
        ended.enter(&cut(0, 0, S, &[10]), &ALL);
        ended.enter(&cut(0, S, S, &[]), &ALL);
        assert_eq!(ended.finish(S).1.len(), 1);
        // A target that stalls at the end leaves empty intervals until the end.
        let mut stalled = ledger(1);
        stalled.enter(&cut(0, 0, 2 * S + S / 2, &[10]), &ALL);
        let lengths: Vec<u64> = stalled.finish(2 * S + S / 2).1.iter().map(|point| point.len_ns).collect();
        assert_eq!(lengths, [S, S, S / 2]);
    }

    #[test]
    fn a_count_that_is_on_its_way_is_not_an_idle_target() {
        let mut ledger = ledger(1);
        for tick in 0..4 {
            ledger.enter(&cut(0, tick * S / 4, (tick + 1) * S / 4, &[100; 5]), &ALL);
        }
        assert_eq!(ledger.lately(S + S / 4 + 1).iops, 20.0, "the tick that ended just now is not known yet");
        assert_eq!(ledger.lately(S + S / 2 + 1).iops, 15.0, "a thread that says nothing for longer stands still");
    }

    #[test]
    fn a_series_that_is_full_goes_on_with_longer_intervals() {
        for threads in [1, 2] {
            let mut ledger = Ledger { points_max: 8, ..ledger(threads) };
            let mut rounds = crate::steady::Rounds::new(4 * S);
            let mut figures = Vec::new();
            for second in 0..100 {
                for thread in 0..threads {
                    // One thread is ahead of the other, so that an interval is open when two become
                    // one.
                    let second = if thread == 0 { second + 1 } else { second };
                    ledger.enter(&cut(thread, second * S, (second + 1) * S, &[10 + second; 3]), &ALL);
                }
                figures.extend(rounds.follow(ledger.series()));
                assert!(ledger.series().len() <= 9, "{}", ledger.series().len());
            }
            let interval_ns = ledger.interval_ns();
            assert_eq!(interval_ns, 16 * S);
            let (totals, series) = ledger.finish(101 * S);
            let all: u64 = series.iter().map(|point| point.read_ios).sum();
            assert_eq!(all, 300 * threads as u64);
            assert_eq!(totals.iter().map(|thread| thread[0].record().0.ios).sum::<u64>(), all);
            for (number, point) in series.iter().enumerate() {
                assert_eq!(point.start_ns, number as u64 * interval_ns);
                let last = (point.start_ns + point.len_ns) / S;
                assert_eq!((point.max_ns, point.p99_ns), (10 + last - 1, 10 + last - 1), "{threads} {number}");
            }
            // Every second had the same rate, however long its round was in the end; only the first
            // second differs.
            let steady = figures.iter().filter(|figure| (**figure - 3.0 * threads as f64).abs() < 1e-9).count();
            assert!(steady + 1 >= figures.len() && steady >= 5, "{figures:?}");
        }
    }

    #[test]
    fn lately_is_the_last_second_of_whole_ticks() {
        let mut ledger = ledger(1);
        for tick in 0..12 {
            ledger.enter(&cut(0, tick * S / 4, (tick + 1) * S / 4, &[100; 5]), &ALL);
        }
        let lately = ledger.lately(2 * S + S / 10);
        assert_eq!((lately.iops, lately.p50_ns), (20.0, 100));
        assert_eq!(lately.mb_per_s, 20.0 * 4096.0 / 1e6);
        assert_eq!(ledger.lately(20 * S), Lately::default());
        assert_eq!(ledger.lately(0), Lately::default());
        assert!(ledger.ticks.len() < 12);
    }
}
