//! Adds up the counts of all threads: by thread for the window, by interval for the time series,
//! and by tick for snapshots.
//!
//! ```text
//!   Cut ─┬─ in the window? ─▶ Totals of its thread and target
//!        ├─▶ RateDeviation of its thread and target (rate_deviation.rs)
//!        ├─▶ interval of the series, closed when every thread has passed it
//!        └─▶ tick, deleted after two seconds ─▶ Snapshot
//! ```
//!
//! A bin never crosses a boundary (see `thread`). Its start decides to which interval it belongs,
//! and whether it is in the window.
//!
//! **Under a rate** requests and bytes count where they completed, and response times count where
//! their requests were due, in the window and in the series. A stall therefore shows in the
//! latencies of the intervals in which its requests were due, and as a rate of 0 in the intervals
//! in which no request completed. An interval stays open until all requests that were due in it
//! have completed, or until [`OPEN_MAX`] intervals are open. A latency that comes later changes
//! only the longest latency of its interval. The latencies of the window are always exact.
//!
//! **The length of a series is bounded.** A run of a week with one point per second would have six
//! hundred thousand points. When there are [`POINTS_MAX`], two neighbours become one point of twice
//! the length. Rates, means and maxima stay exact. Of the percentiles of two points the higher one
//! is kept, so that no latency is understated.
//!
//! Invariant: once the series is full, memory does not grow with the length of the run.

use crate::{
    record::{IntervalRecord, IopsStdDev, SeriesPoint, SideRecord},
    run::{
        histogram::HistogramSum,
        lane::Undone,
        rate_deviation::RateDeviation,
        tally::{DirectionTally, Late, Tally, Totals},
        thread::Cut,
        ticks::Ticks,
    },
};
use std::{collections::BTreeMap, ops::Range};

/// Maximum number of points of a series, an even number: a day and a half with one point per
/// second, in 10 MiB.
pub const POINTS_MAX: usize = 1 << 17;
/// Maximum number of intervals that wait for requests which were due in them.
const OPEN_MAX: usize = 256;
/// Maximum number of groups into which the overdue requests of a thread and target are divided. The
/// requests of a group count with one response time.
const GROUPS_MAX: u64 = 10_000;
/// Time that the figures of a snapshot cover.
const LOOK_BACK_NS: u64 = 1_000_000_000;

/// Reads or writes of an interval or a tick, over all threads.
#[derive(Debug, Default)]
struct Side {
    ios: u64,
    bytes: u64,
    latency: HistogramSum,
}

impl Side {
    fn add(&mut self, tally: &DirectionTally) {
        self.ios += tally.ios;
        self.bytes += tally.bytes;
        self.latency.add(tally.latency());
    }

    fn merge(&mut self, other: &Self) {
        self.ios += other.ios;
        self.bytes += other.bytes;
        self.latency.merge(&other.latency);
    }

    fn record(&self) -> SideRecord {
        SideRecord { ios: self.ios, bytes: self.bytes, latency: self.latency.record() }
    }
}

/// Counts and latencies of an interval or a tick, over all threads.
#[derive(Debug, Default)]
struct Interval {
    reads: Side,
    writes: Side,
}

impl Interval {
    fn is_empty(&self) -> bool {
        self.reads.ios == 0 && self.writes.ios == 0
    }

    fn add(&mut self, tally: &Tally) {
        self.reads.add(&tally.reads);
        self.writes.add(&tally.writes);
    }

    fn merge(&mut self, other: &Self) {
        self.reads.merge(&other.reads);
        self.writes.merge(&other.writes);
    }

    /// The side of reads, or of writes.
    fn side(&mut self, is_read: bool) -> &mut Side {
        if is_read { &mut self.reads } else { &mut self.writes }
    }

    fn point(&self, start_ns: u64, len_ns: u64) -> SeriesPoint {
        let mut latency = self.reads.latency.clone();
        latency.merge(&self.writes.latency);
        SeriesPoint {
            start_ns,
            len_ns,
            read_ios: self.reads.ios,
            read_bytes: self.reads.bytes,
            write_ios: self.writes.ios,
            write_bytes: self.writes.bytes,
            mean_ns: latency.mean_ns(),
            p50_ns: latency.quantile_ns(0.5),
            p99_ns: latency.quantile_ns(0.99),
            max_ns: latency.max_ns(),
        }
    }
}

/// Joins two consecutive points into one.
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
        // Under a rate a point may have latencies of requests that completed in another interval.
        mean_ns: if weight > 0.0 { sum_ns / weight } else { f64::midpoint(first.mean_ns, second.mean_ns) },
        p50_ns: first.p50_ns.max(second.p50_ns),
        p99_ns: first.p99_ns.max(second.p99_ns),
        max_ns: first.max_ns.max(second.max_ns),
    }
}

/// Rate and latencies of the last second.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Recent {
    pub(crate) iops: f64,
    pub(crate) mb_per_s: f64,
    pub(crate) p50_ns: u64,
    pub(crate) p99_ns: u64,
}

/// The sums of a phase.
#[derive(Debug)]
pub(crate) struct Aggregator {
    interval_ns: u64,
    points_max: usize,
    tick_of: Ticks,
    totals: Vec<Vec<Totals>>,
    /// The interval of the job. That of the series may have become longer.
    asked_interval_ns: u64,
    deviations: Vec<Vec<RateDeviation>>,
    /// End of the last bin of each thread.
    until_ns: Vec<u64>,
    /// All requests of each thread that were due before this time have completed.
    settled_ns: Vec<u64>,
    /// Intervals that are not closed, by number.
    open: BTreeMap<u64, Interval>,
    series: Vec<SeriesPoint>,
    /// Recent ticks, by start.
    ticks: BTreeMap<u64, Interval>,
    /// Intervals that were closed and not taken yet; `None` if nobody takes them.
    closed: Option<Vec<IntervalRecord>>,
}

impl Aggregator {
    /// Sums for threads with the given numbers of targets.
    pub(crate) fn new(targets_of_threads: &[usize], interval_ns: u64, tick_of: Ticks) -> Self {
        Self {
            interval_ns: interval_ns.max(1),
            points_max: POINTS_MAX,
            tick_of,
            totals: targets_of_threads.iter().map(|targets| vec![Totals::default(); *targets]).collect(),
            asked_interval_ns: interval_ns.max(1),
            deviations: targets_of_threads.iter().map(|targets| vec![RateDeviation::default(); *targets]).collect(),
            until_ns: vec![0; targets_of_threads.len()],
            settled_ns: vec![0; targets_of_threads.len()],
            open: BTreeMap::new(),
            series: Vec::new(),
            ticks: BTreeMap::new(),
            closed: None,
        }
    }

    /// Keeps closed intervals with their histograms until they are taken.
    pub(crate) fn keep_intervals(&mut self) {
        self.closed = Some(Vec::new());
    }

    /// Takes the intervals that were closed since the last call.
    pub(crate) fn take_closed(&mut self) -> Vec<IntervalRecord> {
        self.closed.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Adds a bin. `window` is the measured part of the phase.
    pub(crate) fn enter(&mut self, cut: &Cut, window: &Range<u64>) {
        for (tally, deviation) in cut.tallies.iter().zip(&mut self.deviations[cut.thread]) {
            let counts = [tally.reads.ios, tally.writes.ios];
            deviation.add(cut.from_ns..cut.until_ns, counts, self.asked_interval_ns, window);
        }
        // Before a point is added, so that `steady::Rounds` has seen all points that are joined.
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
                tick.side(late.is_read).latency.add_many(late.response_ns, 1);
                if window.contains(&late.intended_ns) {
                    totals.add_responses(late.response_ns, 1, late.is_read);
                }
            }
        }
        for late in cut.tallies.iter().flat_map(|tally| &tally.late) {
            self.add_late(late, 1);
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
            if let Some((number, interval)) = self.open.pop_first() {
                self.close(number, &interval, self.interval_ns);
            }
        }
        while let Some(entry) = self.ticks.first_entry()
            && entry.key() + 2 * LOOK_BACK_NS + self.tick_of.longest_ns() < cut.from_ns
        {
            entry.remove();
        }
    }

    /// Adds a response time of `count` requests that were due in an earlier bin.
    fn add_late(&mut self, late: &Late, count: u64) {
        let number = late.intended_ns / self.interval_ns;
        match usize::try_from(number).ok().and_then(|number| self.series.get_mut(number)) {
            Some(closed) => closed.max_ns = closed.max_ns.max(late.response_ns),
            None => {
                let interval = self.open.entry(number).or_default();
                interval.side(late.is_read).latency.add_many(late.response_ns, count);
            }
        }
    }

    /// Adds the requests that a thread did not make or complete on its target number `lane`. More
    /// than [`GROUPS_MAX`] requests are divided into groups with one response time each.
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
                    self.add_late(&Late { intended_ns, response_ns: waited_ns, is_read }, count);
                }
            }
        }
    }

    /// Records that a thread has ended, so that no interval waits for it.
    pub(crate) fn ended(&mut self, thread: usize) {
        (self.until_ns[thread], self.settled_ns[thread]) = (u64::MAX, u64::MAX);
    }

    /// Joins the points of the series in pairs and doubles the interval.
    fn join(&mut self) {
        for number in 0..self.series.len() / 2 {
            self.series[number] = joined(&self.series[2 * number], &self.series[2 * number + 1]);
        }
        self.series.truncate(self.series.len() / 2);
        self.interval_ns *= 2;
        for (number, interval) in std::mem::take(&mut self.open) {
            self.open.entry(number / 2).or_default().merge(&interval);
        }
    }

    fn close(&mut self, number: u64, interval: &Interval, len_ns: u64) {
        // An interval without a bin is a stall, and is a point of the series with a rate of 0.
        while (self.series.len() as u64) < number {
            let start_ns = self.series.len() as u64 * self.interval_ns;
            self.series.push(Interval::default().point(start_ns, self.interval_ns));
        }
        let start_ns = number * self.interval_ns;
        self.series.push(interval.point(start_ns, len_ns));
        if let Some(closed) = &mut self.closed {
            let (reads, writes) = (interval.reads.record(), interval.writes.record());
            closed.push(IntervalRecord { start_ns, len_ns, reads, writes });
        }
    }

    /// Current length of an interval of the series.
    pub(crate) fn interval_ns(&self) -> u64 {
        self.interval_ns
    }

    /// The points that all threads have passed.
    pub(crate) fn series(&self) -> &[SeriesPoint] {
        &self.series
    }

    /// End of the last bin of the slowest thread.
    fn all_until_ns(&self) -> u64 {
        self.until_ns.iter().copied().min().unwrap_or(0)
    }

    /// Rate and latencies of the second before `now_ns`, in whole ticks. A tick that has ended and
    /// of which a thread has not sent its counts yet is left out, for at most the length of a tick:
    /// a thread that sends nothing for longer is blocked by its target.
    pub(crate) fn recent(&self, now_ns: u64) -> Recent {
        let longest_ns = self.tick_of.longest_ns();
        let seen_ns = self.all_until_ns().max(now_ns.saturating_sub(longest_ns)).min(now_ns);
        let until_ns = self.tick_of.start_of(seen_ns);
        let from_ns = until_ns.saturating_sub(LOOK_BACK_NS.max(longest_ns));
        let from_ns = match self.tick_of.start_of(from_ns) {
            start_ns if start_ns == from_ns => from_ns,
            _ => self.tick_of.end_of(from_ns),
        };
        let (mut ios, mut bytes, mut latency) = (0, 0, HistogramSum::default());
        for interval in self.ticks.range(from_ns..until_ns.max(from_ns)).map(|(_, interval)| interval) {
            ios += interval.reads.ios + interval.writes.ios;
            bytes += interval.reads.bytes + interval.writes.bytes;
            latency.merge(&interval.reads.latency);
            latency.merge(&interval.writes.latency);
        }
        let span_ns = until_ns.saturating_sub(from_ns).max(1) as f64;
        Recent {
            iops: ios as f64 * 1e9 / span_ns,
            mb_per_s: bytes as f64 * 1e3 / span_ns,
            p50_ns: latency.quantile_ns(0.5),
            p99_ns: latency.quantile_ns(0.99),
        }
    }

    /// Standard deviation of the request rate, by thread and target.
    pub(crate) fn iops_std_devs(&self) -> Vec<Vec<Option<IopsStdDev>>> {
        let of = |deviations: &Vec<RateDeviation>| {
            deviations.iter().map(|one| one.std_dev(self.asked_interval_ns)).collect()
        };
        self.deviations.iter().map(of).collect()
    }

    /// The totals of the window by thread and target, the series until `end_ns`, and the intervals
    /// that were closed and not taken.
    pub(crate) fn finish(mut self, end_ns: u64) -> (Vec<Vec<Totals>>, Vec<SeriesPoint>, Vec<IntervalRecord>) {
        for (number, interval) in std::mem::take(&mut self.open) {
            let start_ns = number * self.interval_ns;
            // An empty bin that starts at the end is not an interval: it would have a rate of 0.
            if start_ns < end_ns || !interval.is_empty() {
                self.close(number, &interval, end_ns.saturating_sub(start_ns).clamp(1, self.interval_ns));
            }
        }
        // A target that stalls at the end has intervals without a bin.
        while let start_ns = (self.series.len() as u64).saturating_mul(self.interval_ns)
            && start_ns < end_ns
        {
            self.series.push(Interval::default().point(start_ns, (end_ns - start_ns).min(self.interval_ns)));
        }
        let closed = self.take_closed();
        (self.totals, self.series, closed)
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

    fn aggregator(threads: usize) -> Aggregator {
        Aggregator::new(&vec![1; threads], S, Ticks::new(S))
    }

    #[test]
    fn an_interval_is_closed_when_all_threads_have_passed_it() {
        let mut aggregator = aggregator(2);
        aggregator.enter(&cut(0, 0, S, &[10]), &ALL);
        aggregator.enter(&cut(0, S, 2 * S, &[20]), &ALL);
        assert_eq!(aggregator.series().len(), 0);
        aggregator.enter(&cut(1, 0, S, &[30, 40]), &ALL);
        assert_eq!(aggregator.series().len(), 1);
        let (totals, series, _) = aggregator.finish(S + S / 2);
        assert_eq!(series.iter().map(|point| (point.start_ns, point.read_ios)).collect::<Vec<_>>(), [(0, 3), (S, 1)]);
        assert_eq!((series[0].p50_ns, series[0].max_ns, series[1].len_ns), (30, 40, S / 2));
        assert_eq!(totals.iter().map(|thread| thread[0].record().0.ios).collect::<Vec<_>>(), [2, 2]);
    }

    #[test]
    fn each_thread_has_the_deviation_of_its_own_intervals() {
        let mut aggregator = aggregator(2);
        for second in 0..4 {
            // Each thread varies; their sum is constant.
            let (first, second_thread) = if second % 2 == 0 { (1, 3) } else { (3, 1) };
            aggregator.enter(&cut(0, second * S, (second + 1) * S, &vec![10; first]), &(0..4 * S));
            aggregator.enter(&cut(1, second * S, (second + 1) * S, &vec![10; second_thread]), &(0..4 * S));
        }
        for thread in aggregator.iops_std_devs() {
            assert_eq!(thread, [Some(IopsStdDev { reads: 1.0, writes: 0.0, both: 1.0 })]);
        }
        assert!(aggregator.series().iter().all(|point| point.read_ios == 4));
    }

    #[test]
    fn a_stall_is_in_the_series() {
        let mut aggregator = aggregator(1);
        aggregator.enter(&cut(0, 0, S, &[10]), &(0..0));
        aggregator.enter(&cut(0, 4 * S, 5 * S, &[4 * S]), &(0..0));
        let (totals, series, _) = aggregator.finish(5 * S);
        assert_eq!(series.iter().map(|point| point.read_ios).collect::<Vec<_>>(), [1, 0, 0, 0, 1]);
        assert_eq!(totals[0][0].record().0.ios, 0, "the stall was not in the window");
    }

    #[test]
    fn the_last_interval_has_its_true_length() {
        // 1.5 s in intervals of 700 ms, a request per millisecond, in the bins of a thread.
        let (ms, interval_ns, end_ns) = (1_000_000, 700_000_000, 1_500_000_000);
        let ticks = Ticks::new(interval_ns);
        let mut aggregator = Aggregator::new(&[1], interval_ns, ticks);
        let mut from_ns = 0;
        while from_ns < end_ns {
            let until_ns = ticks.end_of(from_ns).min(end_ns);
            let ios = (until_ns.div_ceil(ms) - from_ns.div_ceil(ms)) as usize;
            aggregator.enter(&cut(0, from_ns, until_ns, &vec![10; ios]), &ALL);
            from_ns = until_ns;
        }
        let (_, series, _) = aggregator.finish(end_ns);
        let points: Vec<_> = series.iter().map(|point| (point.start_ns, point.len_ns, point.read_ios)).collect();
        assert_eq!(
            points,
            [(0, interval_ns, 700), (interval_ns, interval_ns, 700), (2 * interval_ns, 100 * ms, 100)],
            "each interval has 1,000 IOPS by its own length"
        );
    }

    #[test]
    fn the_series_ends_where_the_load_ends() {
        // An empty bin that starts at the end is not an interval.
        let mut ended = aggregator(1);
        ended.enter(&cut(0, 0, S, &[10]), &ALL);
        ended.enter(&cut(0, S, S, &[]), &ALL);
        assert_eq!(ended.finish(S).1.len(), 1);
        // A target that stalls at the end leaves empty intervals until the end.
        let mut stalled = aggregator(1);
        stalled.enter(&cut(0, 0, 2 * S + S / 2, &[10]), &ALL);
        let lengths: Vec<u64> = stalled.finish(2 * S + S / 2).1.iter().map(|point| point.len_ns).collect();
        assert_eq!(lengths, [S, S, S / 2]);
    }

    #[test]
    fn a_tick_whose_counts_are_missing_does_not_count_as_idle() {
        let mut aggregator = aggregator(1);
        for tick in 0..4 {
            aggregator.enter(&cut(0, tick * S / 4, (tick + 1) * S / 4, &[100; 5]), &ALL);
        }
        assert_eq!(aggregator.recent(S + S / 4 + 1).iops, 20.0, "the counts of the last tick are not there yet");
        assert_eq!(aggregator.recent(S + S / 2 + 1).iops, 15.0, "a thread that sends nothing for longer is blocked");
    }

    #[test]
    fn a_full_series_continues_with_longer_intervals() {
        for threads in [1, 2] {
            let mut aggregator = Aggregator { points_max: 8, ..aggregator(threads) };
            let mut rounds = crate::steady::Rounds::new(4 * S);
            let mut figures = Vec::new();
            for second in 0..100 {
                for thread in 0..threads {
                    // One thread is ahead, so that an interval is open when points are joined.
                    let second = if thread == 0 { second + 1 } else { second };
                    aggregator.enter(&cut(thread, second * S, (second + 1) * S, &[10 + second; 3]), &ALL);
                }
                figures.extend(rounds.follow(aggregator.series()));
                assert!(aggregator.series().len() <= 9, "{}", aggregator.series().len());
            }
            let interval_ns = aggregator.interval_ns();
            assert_eq!(interval_ns, 16 * S);
            let (totals, series, _) = aggregator.finish(101 * S);
            let all: u64 = series.iter().map(|point| point.read_ios).sum();
            assert_eq!(all, 300 * threads as u64);
            assert_eq!(totals.iter().map(|thread| thread[0].record().0.ios).sum::<u64>(), all);
            for (number, point) in series.iter().enumerate() {
                assert_eq!(point.start_ns, number as u64 * interval_ns);
                let last = (point.start_ns + point.len_ns) / S;
                assert_eq!((point.max_ns, point.p99_ns), (10 + last - 1, 10 + last - 1), "{threads} {number}");
            }
            // All rounds have the same rate but for the first.
            let steady = figures.iter().filter(|figure| (**figure - 3.0 * threads as f64).abs() < 1e-9).count();
            assert!(steady + 1 >= figures.len() && steady >= 5, "{figures:?}");
        }
    }

    #[test]
    fn recent_figures_cover_the_last_second_in_whole_ticks() {
        let mut aggregator = aggregator(1);
        for tick in 0..12 {
            aggregator.enter(&cut(0, tick * S / 4, (tick + 1) * S / 4, &[100; 5]), &ALL);
        }
        let recent = aggregator.recent(2 * S + S / 10);
        assert_eq!((recent.iops, recent.p50_ns), (20.0, 100));
        assert_eq!(recent.mb_per_s, 20.0 * 4096.0 / 1e6);
        assert_eq!(aggregator.recent(20 * S), Recent::default());
        assert_eq!(aggregator.recent(0), Recent::default());
        assert!(aggregator.ticks.len() < 12);
    }
}
