//! The load and throughput of each device below a mirrored space, computed as in the Storage Spaces
//! paper.
//!
//! ```text
//!   amplification      = reads x 1 + writes x copies        (shares from 0 to 1)
//!   queue depth/device = files x threads x depth x amplification / devices
//!   IOPS/device        = IOPS / devices                  (the guest's, as in the paper's graphs)
//!   MB/s/device        = MB/s x amplification / devices  (the device's, as in its Table 5)
//! ```

use serde::{Deserialize, Serialize};

/// The mirrored array below the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ArrayOptions {
    /// Copies of the data that the space keeps: 2 for a two-way mirror. At least 1.
    pub copies: u32,
    /// Devices of the array. At least 1.
    pub devices: u32,
}

/// Load and throughput of each device of the array.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct ArrayFigures {
    /// Transfers to devices per request, on average.
    pub amplification: f64,
    /// Requests in flight on each device.
    pub depth_per_device: f64,
    /// The guest's requests per second, divided by the number of devices.
    pub iops_per_device: f64,
    /// Throughput of each device in MB/s (10^6 bytes), copies included.
    pub mb_per_s_per_device: f64,
}

impl ArrayOptions {
    /// Transfers to devices per request, if `read_share` (0 to 1) of the requests are reads.
    pub fn amplification(&self, read_share: f64) -> f64 {
        let reads = read_share.clamp(0.0, 1.0);
        reads + (1.0 - reads) * f64::from(self.copies)
    }

    /// The figures per device of a cell with `depth` requests in flight in total.
    pub fn figures(&self, read_share: f64, depth: u64, iops: f64, mb_per_s: f64) -> ArrayFigures {
        let amplification = self.amplification(read_share);
        let devices = f64::from(self.devices.max(1));
        ArrayFigures {
            amplification,
            depth_per_device: depth as f64 * amplification / devices,
            iops_per_device: iops / devices,
            mb_per_s_per_device: mb_per_s * amplification / devices,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // The paper's figures, from the paper's settings.
    #[test]
    fn the_papers_own_examples() {
        let space = ArrayOptions { copies: 2, devices: 8 };
        let close = |ours: f64, papers: f64| assert!((ours - papers).abs() < 1e-9, "{ours} instead of {papers}");
        // "queue depth/SSD = 96 * 1.3 / 8 = 15.6", one file, 8 threads, 12 outstanding, 30 %
        // writes.
        let random = space.figures(0.7, 8 * 12, 55_232.28, 431.50);
        close(random.amplification, 1.3);
        close(random.depth_per_device, 15.6);
        close(random.iops_per_device, 6_904.035);
        // Table 5: reads at 31 outstanding, writes at 15.
        let reads = space.figures(1.0, 31, 2_899.93, 1_449.96);
        close(reads.depth_per_device, 3.875);
        close(reads.mb_per_s_per_device, 181.245);
        let writes = space.figures(0.0, 15, 724.66, 362.33);
        close(writes.depth_per_device, 3.75);
        close(writes.mb_per_s_per_device, 90.5825);
    }
}
