//! Simulated devices whose knee is known, for tests: queueing models with noise.

use super::Sample;
use rand_xoshiro::{
    Xoshiro256PlusPlus,
    rand_core::{Rng, SeedableRng},
};

/// A simulated device.
pub trait Device {
    /// IOPS and mean latency in seconds with `load` requests in flight.
    fn at(&self, load: f64) -> (f64, f64);
}

/// A device with constant service times: `servers` requests at once, each in `service_s`, after a
/// delay of `delay_s` before service. Little's knee is exact:
/// N* = (delay + service) / (service / servers).
pub struct Deterministic {
    pub servers: f64,
    pub service_s: f64,
    pub delay_s: f64,
}

impl Deterministic {
    pub fn knee(&self) -> f64 {
        (self.delay_s + self.service_s) * self.servers / self.service_s
    }
}

impl Device for Deterministic {
    fn at(&self, load: f64) -> (f64, f64) {
        let iops = (load / (self.delay_s + self.service_s)).min(self.servers / self.service_s);
        (iops, load / iops)
    }
}

/// The machine repairman model (M/M/c//N): service times and delays are exponential. Solved exactly
/// by its balance equations.
pub struct Queueing {
    pub servers: u32,
    pub service_s: f64,
    pub delay_s: f64,
}

impl Device for Queueing {
    fn at(&self, load: f64) -> (f64, f64) {
        let n = load.round() as u32;
        if self.delay_s == 0.0 {
            // No request is ever in the delay.
            let iops = f64::from(n.min(self.servers)) / self.service_s;
            return (iops, load / iops);
        }
        // Share of the time with k requests at the device; the others are in the delay.
        let mut weights = vec![1.0_f64];
        for k in 1..=n {
            let arriving = f64::from(n - k + 1) / self.delay_s;
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

/// Uniform and normal random numbers.
struct Random(Xoshiro256PlusPlus);

impl Random {
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

/// The noise of a machine.
#[derive(Clone, Copy, Default)]
pub struct Scatter {
    /// Relative standard deviation of each window.
    pub window: f64,
    /// Relative standard deviation of each round, the same for all loads of the round.
    pub round: f64,
    /// Share of windows that other load slows down by a third.
    pub spoilt: f64,
}

/// Samples of `rounds` rounds of each load.
pub fn sweep(device: &dyn Device, loads: &[f64], rounds: usize, scatter: Scatter, seed: u64) -> Vec<Vec<Sample>> {
    let mut random = Random::with_seed(seed);
    let mut cells = vec![Vec::with_capacity(rounds); loads.len()];
    for _ in 0..rounds {
        let drift = scatter.round * random.normal();
        for (cell, load) in cells.iter_mut().zip(loads) {
            let (iops, mean_s) = device.at(*load);
            let mut noise = drift + scatter.window * random.normal();
            if random.uniform() < scatter.spoilt {
                noise -= 0.4;
            }
            let tail = scatter.window * 2.0 * random.normal();
            cell.push(Sample {
                iops: iops * noise.exp(),
                // Little's law: IOPS times mean latency stays the load.
                mean_ns: mean_s * 1e9 / noise.exp(),
                p99_ns: mean_s * 3e9 / noise.exp() * tail.exp(),
            });
        }
    }
    cells
}
