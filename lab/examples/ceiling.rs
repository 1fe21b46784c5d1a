use diskwright_lab::{generator::*, null::NullDevice, workload::*};
use std::time::Duration;
fn main() {
    for depth in [1, 32, 256] {
        let w = Workload::new(Pattern::Random, Direction::Read, 4096, depth);
        let until = Until::Elapsed { warm_up: Duration::from_millis(100), measured: Duration::from_millis(1000) };
        let m = Generator::for_workload(&w, 1).unwrap().run("null", &NullDevice::new(1 << 40), &w, until, Default::default(), 1).unwrap();
        println!("QD {depth}: {:.1} ns/IO, {:.2} M IOPS, {:?}", 1e9 / m.iops(), m.iops() / 1e6, m.latency);
    }
}
