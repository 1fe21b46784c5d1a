//! Devices whose knee is known, for tests: queueing models, with noise.

use super::Sample;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// What a device does with a load.
pub trait Device {
    /// IOPS and mean latency (s) with `load` requests in flight.
    fn at(&self, load: f64) -> (f64, f64);
}

/// No variation at all: `servers` at once, each in `service_s`, behind a way of `way_s`. Little's
/// knee is exact: N* = (way + service) / (service / servers).
pub struct Clockwork {
    pub servers: f64,
    pub service_s: f64,
    pub way_s: f64,
}

impl Clockwork {
    pub fn knee(&self) -> f64 {
        (self.way_s + self.service_s) * self.servers / self.service_s
    }
}

impl Device for Clockwork {
    fn at(&self, load: f64) -> (f64, f64) {
        let iops = (load / (self.way_s + self.service_s)).min(self.servers / self.service_s);
        (iops, load / iops)
    }
}

/// The machine repairman (M/M/c//N): service times are exponential, and so is the way. Solved
/// exactly, by its balance equations.
pub struct Queueing {
    pub servers: u32,
    pub service_s: f64,
    pub way_s: f64,
}

impl Device for Queueing {
    fn at(&self, load: f64) -> (f64, f64) {
        let n = load.round() as u32;
        if self.way_s == 0.0 {
            // Nobody is ever on the way.
            let iops = f64::from(n.min(self.servers)) / self.service_s;
            return (iops, load / iops);
        }
        // Share of the time with k requests at the device; the rest are on their way.
        let mut weights = vec![1.0_f64];
        for k in 1..=n {
            let arriving = f64::from(n - k + 1) / self.way_s;
            let leaving = f64::from(k.min(self.servers)) / self.service_s;
            weights.push(weights[k as usize - 1] * arriving / leaving);
        }
        let all: f64 = weights.iter().sum();
        let busy: f64 =
            weights.iter().enumerate().map(|(k, w)| w / all * f64::from((k as u32).min(self.servers))).sum();
        let iops = busy / self.service_s;
        (iops, load / iops)
    }
}

/// Random numbers of a normal distribution.
struct Chance(Xoshiro256PlusPlus);

impl Chance {
    fn with_seed(seed: u64) -> Self {
        Self(Xoshiro256PlusPlus::seed_from_u64(seed))
    }

    fn uniform(&mut self) -> f64 {
        ((self.0.next_u64() >> 11) as f64 + 0.5) / (1_u64 << 53) as f64
    }

    fn normal(&mut self) -> f64 {
        (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

/// How a machine scatters.
#[derive(Clone, Copy, Default)]
pub struct Scatter {
    /// Of each window.
    pub window: f64,
    /// Of each round, over all loads alike.
    pub round: f64,
    /// Share of windows in which something else takes a third of the machine.
    pub spoilt: f64,
}

/// `rounds` rounds of each load.
pub fn sweep(device: &dyn Device, loads: &[f64], rounds: usize, scatter: Scatter, seed: u64) -> Vec<Vec<Sample>> {
    let mut chance = Chance::with_seed(seed);
    let mut cells = vec![Vec::with_capacity(rounds); loads.len()];
    for _ in 0..rounds {
        let drift = scatter.round * chance.normal();
        for (cell, load) in cells.iter_mut().zip(loads) {
            let (iops, mean_s) = device.at(*load);
            let mut noise = drift + scatter.window * chance.normal();
            if chance.uniform() < scatter.spoilt {
                noise -= 0.4;
            }
            let tail = scatter.window * 2.0 * chance.normal();
            cell.push(Sample {
                iops: iops * noise.exp(),
                // Little's law holds of what is measured too.
                mean_ns: mean_s * 1e9 / noise.exp(),
                p99_ns: mean_s * 3e9 / noise.exp() * tail.exp(),
            });
        }
    }
    cells
}
