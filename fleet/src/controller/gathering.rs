//! The intervals of all agents, added as they come.
//!
//! ```text
//!   agent 0: │ 0 │ 1 │ 2 │ 3 │        an interval is added when all agents have sent it:
//!   agent 1: │ 0 │ 1 │ 2 │             0, 1 and 2 here
//!   agent 2: │ 0 │ 1 │ 2 │ 3 │ 4 │
//! ```
//!
//! All phases start at the same time, so interval `n` is the same time on all agents, within the
//! error of the clocks. Histograms are added, percentiles are computed of the sum.
//!
//! The sums of each agent over the window grow only while all agents are there. If one is lost,
//! they end at the same interval for all: these are the figures of the time in which all were
//! active.
//!
//! Invariant: the counts of an agent never exceed its part of [`SUM_MAX`], whatever it sends.

use super::options::AGENTS_MAX;
use diskwright_load::{
    record::{IntervalRecord, SUM_MAX, SeriesPoint, SideRecord, check_interval},
    run::POINTS_MAX,
};
use std::{collections::VecDeque, ops::Range};

/// Whether intervals of an agent are waited for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartState {
    Active,
    /// It has sent all its intervals.
    Done,
    /// Its intervals do not count any more.
    Lost,
}

/// What is kept of an agent.
#[derive(Debug)]
struct Part {
    waiting: VecDeque<IntervalRecord>,
    /// End of its last interval.
    until_ns: u64,
    left: u64,
    state: PartState,
    /// All its intervals, for the record of an agent that does not come to the end.
    sent: Vec<SeriesPoint>,
    /// Its sums over the window, while all agents were there.
    reads: SideRecord,
    writes: SideRecord,
}

/// See the module documentation.
#[derive(Debug)]
pub(crate) struct Gathering {
    parts: Vec<Part>,
    window: Option<Range<u64>>,
    series: Vec<SeriesPoint>,
    /// The part of the window in which all agents were there.
    common_ns: Option<Range<u64>>,
    is_complete: bool,
}

fn add(sum: &mut SideRecord, more: &SideRecord) {
    sum.ios += more.ios;
    sum.bytes += more.bytes;
    sum.latency.add(&more.latency);
}

impl Gathering {
    /// Nothing yet, of this number of agents.
    pub(crate) fn new(agents: usize, window: Option<Range<u64>>) -> Self {
        let part = || Part {
            waiting: VecDeque::new(),
            until_ns: 0,
            left: SUM_MAX / AGENTS_MAX as u64,
            state: PartState::Active,
            sent: Vec::new(),
            reads: SideRecord::default(),
            writes: SideRecord::default(),
        };
        Self {
            parts: (0..agents).map(|_| part()).collect(),
            window,
            series: Vec::new(),
            common_ns: None,
            is_complete: true,
        }
    }

    /// Sets the window of a phase that waited for the steady state.
    pub(crate) fn set_window(&mut self, window: Range<u64>) {
        self.window.get_or_insert(window);
    }

    /// Adds an interval of an agent.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(crate) fn push(&mut self, agent: usize, interval: IntervalRecord) -> Result<(), String> {
        let part = &mut self.parts[agent];
        check_interval(&interval, &mut part.left)?;
        if interval.start_ns < part.until_ns || interval.len_ns == 0 {
            return Err("intervals that overlap".into());
        }
        part.until_ns = interval.start_ns + interval.len_ns;
        if part.sent.len() < POINTS_MAX {
            part.sent.push(point(interval.start_ns, interval.len_ns, &interval.reads, &interval.writes));
        }
        part.waiting.push_back(interval);
        self.add_up();
        Ok(())
    }

    /// An agent was lost in an earlier phase, and is not one of those that are added.
    pub(crate) fn leave_out(&mut self, agent: usize) {
        self.parts[agent].state = PartState::Lost;
    }

    /// An agent has sent all its intervals.
    pub(crate) fn done(&mut self, agent: usize) {
        self.parts[agent].state = PartState::Done;
        self.add_up();
    }

    /// An agent is lost, or has ended before the others. Returns the end of the time in which all
    /// were there.
    pub(crate) fn lose(&mut self, agent: usize) -> u64 {
        let part = &mut self.parts[agent];
        part.state = PartState::Lost;
        part.waiting.clear();
        self.is_complete = false;
        let until_ns = self.series.last().map_or(0, |point| point.start_ns + point.len_ns);
        self.add_up();
        until_ns
    }

    /// Adds the intervals that all agents have sent.
    fn add_up(&mut self) {
        loop {
            if self.parts.iter().any(|part| part.state == PartState::Active && part.waiting.is_empty()) {
                return;
            }
            let first = |part: &Part| part.waiting.front().map(|interval| interval.start_ns);
            let Some(start_ns) = self.parts.iter().filter_map(first).min() else { return };
            let (mut reads, mut writes, mut len_ns) = (SideRecord::default(), SideRecord::default(), 0);
            let is_complete = self.is_complete;
            let mut in_window = None;
            for part in &mut self.parts {
                if first(part) != Some(start_ns) {
                    continue;
                }
                let Some(interval) = part.waiting.pop_front() else { continue };
                len_ns = len_ns.max(interval.len_ns);
                let span = start_ns..start_ns + interval.len_ns;
                let is_in =
                    self.window.as_ref().is_some_and(|window| window.start <= span.start && span.end <= window.end);
                if is_complete && is_in {
                    add(&mut part.reads, &interval.reads);
                    add(&mut part.writes, &interval.writes);
                    in_window = Some(span);
                }
                add(&mut reads, &interval.reads);
                add(&mut writes, &interval.writes);
            }
            if let Some(span) = in_window {
                let start = self.common_ns.as_ref().map_or(span.start, |common| common.start);
                self.common_ns = Some(start..span.end);
            }
            self.series.push(point(start_ns, len_ns, &reads, &writes));
        }
    }

    /// The sum of all agents, interval by interval.
    pub(crate) fn series(&self) -> &[SeriesPoint] {
        &self.series
    }

    /// The intervals that each agent has sent.
    pub(crate) fn sent(&self) -> Vec<Vec<SeriesPoint>> {
        self.parts.iter().map(|part| part.sent.clone()).collect()
    }

    /// The part of the window in which all agents were there, and the reads and writes of each
    /// agent in it.
    pub(crate) fn common(&self) -> (Range<u64>, Vec<(SideRecord, SideRecord)>) {
        let sums = self.parts.iter().map(|part| (part.reads.clone(), part.writes.clone())).collect();
        (self.common_ns.clone().unwrap_or(0..0), sums)
    }
}

fn point(start_ns: u64, len_ns: u64, reads: &SideRecord, writes: &SideRecord) -> SeriesPoint {
    let mut latency = reads.latency.clone();
    latency.add(&writes.latency);
    let quantile = |share: f64| latency.quantile_ns(share).unwrap_or(0);
    SeriesPoint {
        start_ns,
        len_ns,
        read_ios: reads.ios,
        read_bytes: reads.bytes,
        write_ios: writes.ios,
        write_bytes: writes.bytes,
        mean_ns: latency.mean_ns(),
        p50_ns: quantile(0.5),
        p99_ns: quantile(0.99),
        max_ns: latency.max_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use diskwright_load::record::LatencyRecord;

    const S: u64 = 1_000_000_000;

    fn interval(number: u64, latencies: &[u64]) -> IntervalRecord {
        let mut latency = LatencyRecord::default();
        for ns in latencies {
            let one = LatencyRecord {
                count: 1,
                sum_ns: *ns as f64,
                sum_of_squares: 0.0,
                min_ns: *ns,
                max_ns: *ns,
                buckets: vec![(*ns, 1)],
            };
            latency.add(&one);
        }
        let reads = SideRecord { ios: latencies.len() as u64, bytes: latencies.len() as u64 * 4096, latency };
        IntervalRecord { start_ns: number * S, len_ns: S, reads, writes: SideRecord::default() }
    }

    #[test]
    fn an_interval_is_added_when_all_agents_have_sent_it() {
        let mut gathering = Gathering::new(2, Some(S..3 * S));
        for number in 0..4 {
            gathering.push(0, interval(number, &[10])).unwrap();
        }
        assert!(gathering.series().is_empty());
        for number in 0..3 {
            gathering.push(1, interval(number, &[30, 50])).unwrap();
        }
        let points: Vec<_> =
            gathering.series().iter().map(|point| (point.read_ios, point.p50_ns, point.max_ns)).collect();
        assert_eq!(points, [(3, 30, 50); 3], "percentiles are those of the sum");
        let (common_ns, sums) = gathering.common();
        assert_eq!((common_ns, sums[0].0.ios, sums[1].0.ios), (S..3 * S, 2, 4));
    }

    #[test]
    fn the_figures_of_all_end_with_a_loss_and_the_series_goes_on() {
        let mut gathering = Gathering::new(2, Some(0..10 * S));
        for number in 0..3 {
            gathering.push(0, interval(number, &[10])).unwrap();
        }
        for number in 0..5 {
            gathering.push(1, interval(number, &[30])).unwrap();
        }
        assert_eq!(gathering.lose(0), 3 * S);
        let rates = |points: &[SeriesPoint]| points.iter().map(|point| point.read_ios).collect::<Vec<_>>();
        assert_eq!(rates(gathering.series()), [2, 2, 2, 1, 1]);
        let sent = gathering.sent();
        assert_eq!((rates(&sent[0]), rates(&sent[1])), (vec![1; 3], vec![1; 5]), "also those of the lost one");
        let (common_ns, sums) = gathering.common();
        assert_eq!((common_ns, sums[0].0.ios, sums[1].0.ios), (0..3 * S, 3, 3));
    }

    #[test]
    fn an_agent_that_is_done_is_not_waited_for() {
        let mut gathering = Gathering::new(2, Some(0..2 * S));
        for number in 0..2 {
            gathering.push(0, interval(number, &[10])).unwrap();
        }
        gathering.done(0);
        for number in 0..3 {
            gathering.push(1, interval(number, &[30])).unwrap();
        }
        let rates: Vec<u64> = gathering.series().iter().map(|point| point.read_ios).collect();
        assert_eq!((rates, gathering.common().0), (vec![2, 2, 1], 0..2 * S));
    }

    #[test]
    fn what_an_agent_invents_is_refused() {
        let mut gathering = Gathering::new(1, None);
        gathering.push(0, interval(3, &[1])).unwrap();
        gathering.push(0, interval(3, &[1])).unwrap_err();
        gathering.push(0, interval(2, &[1])).unwrap_err();
        let huge = IntervalRecord { start_ns: u64::MAX, ..interval(0, &[1]) };
        gathering.push(0, huge).unwrap_err();
        let many = SideRecord { ios: u64::MAX, ..SideRecord::default() };
        gathering.push(0, IntervalRecord { reads: many, ..interval(7, &[]) }).unwrap_err();
        let mut false_sum = interval(8, &[1]);
        false_sum.reads.latency.count = 5;
        gathering.push(0, false_sum).unwrap_err();
        assert_eq!(gathering.series().len(), 1);
    }
}
