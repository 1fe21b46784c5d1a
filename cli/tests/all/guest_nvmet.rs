//! Our NVMe/TCP target beside that of the kernel, in a guest: the same slow device, one request at
//! a time. What each adds to the device's own latency, and what each asks of the device.
//!
//! The guest is emulated, so its processor is some 50 times slower than a real one. The device
//! (null_blk with a timer) takes 50 ms for each request, so that software costs beside it what it
//! costs beside a device of 1 ms. dm-delay would hide differences: it ends requests at a tick of
//! the clock, 4 ms apart.
//!
//! Latencies on a machine that runs other tests too tell little. The promise (1.1 times nvmet's) is
//! asked for by `./test --long` only.

use crate::guest_machine::Guest;
use std::collections::BTreeMap;

const MODULES: [&str; 5] = ["configfs", "null_blk", "nvmet", "nvmet_tcp", "nvme_tcp"];

/// fio's requests in each run, which take 3 s.
const REQUESTS: u64 = 64;

const SCRIPT: &str = r#"
ip link set lo up || ifconfig lo up
mkdir -p /config /etc/nvme; mount -t configfs none /config
mkdir /config/nullb/slow; cd /config/nullb/slow; echo 2 > irqmode; echo 50000000 > completion_nsec; echo 64 > size; echo 1 > memory_backed; echo 1 > power
slow=/dev/slow
cd /
echo nqn.2014-08.org.nvmexpress:uuid:01234567-89ab-cdef-0123-456789abcdef > /etc/nvme/hostnqn
echo 01234567-89ab-cdef-0123-456789abcdef > /etc/nvme/hostid
cd /config/nvmet
mkdir subsystems/nqn.2026-01.org.example:kernel; cd subsystems/nqn.2026-01.org.example:kernel
echo 1 > attr_allow_any_host; mkdir namespaces/1; echo -n $slow > namespaces/1/device_path
cd /config/nvmet; mkdir ports/1; cd ports/1
echo ipv4 > addr_adrfam; echo tcp > addr_trtype; echo 127.0.0.1 > addr_traddr; echo 4420 > addr_trsvcid
ln -s /config/nvmet/subsystems/nqn.2026-01.org.example:kernel subsystems/kernel
cd /
counts() { awk '{print $1 + $5, $3 + $7}' /sys/block/${slow#/dev/}/stat; }
# The device's requests and sectors of each run, and its mean latency.
measure() {
  for rw in randread randwrite; do
    before=$(counts)
    /programs/fio --name=m --filename=$2 --direct=1 --ioengine=psync --rw=$rw --bs=4k --number_ios=REQUESTS --size=32M --randseed=5 --norandommap --output-format=json > /tmp/fio 2>&1 || { cat /tmp/fio; false; }
    mean=$(grep -A12 '"clat_ns"' /tmp/fio | sed -n 's/.*"mean" : \([0-9.]*\).*/\1/p' | sort -n | tail -n 1)
    echo GUEST: $1 $rw $mean $before $(counts)
  done
}
device() { sleep 1; ls /dev/nvme*n1; }
measure device $slow
echo 1 > /config/nvmet/subsystems/nqn.2026-01.org.example:kernel/namespaces/1/enable
/programs/nvme connect -t tcp -a 127.0.0.1 -s 4420 -n nqn.2026-01.org.example:kernel -i 1 >/tmp/log 2>&1 || { cat /tmp/log; false; }
measure kernel $(device)
/programs/nvme disconnect -n nqn.2026-01.org.example:kernel >/dev/null
echo 0 > /config/nvmet/subsystems/nqn.2026-01.org.example:kernel/namespaces/1/enable
/programs/diskwright serve $slow --format raw --cache direct --nvme 127.0.0.1:4421 --nvme-subsystem nqn.2026-01.org.example:ours --insecure-writes --threads 1 >/tmp/serve 2>&1 &
server=$!
i=0; until grep -q 4421 /tmp/serve; do i=$((i+1)); [ $i -lt 100 ] || { cat /tmp/serve; false; }; sleep 0.2; done
/programs/nvme connect-all -t tcp -a 127.0.0.1 -s 4421 -i 1 >/tmp/log 2>&1 || { cat /tmp/log; cat /tmp/serve; false; }
measure ours $(device)
/programs/nvme disconnect -n nqn.2026-01.org.example:ours >/dev/null
kill $server; wait $server || true
"#;

/// One run of fio.
#[derive(Debug, Clone, Copy)]
struct Run {
    mean_ms: f64,
    /// Requests of the device.
    requests: u64,
    sectors: u64,
}

#[test]
fn the_targets_of_nvme_over_tcp_ask_the_same_of_a_slow_device() {
    let Some(guest) = Guest::new(&MODULES, &["fio", "nvme"]) else { return };
    guest.add_own_program();
    let Some(console) = guest.run(&SCRIPT.replace("REQUESTS", &REQUESTS.to_string())) else { return };
    let mut runs: BTreeMap<(String, String), Vec<Run>> = BTreeMap::new();
    for line in console.lines().filter_map(|line| line.split_once("GUEST: ")) {
        let words: Vec<&str> = line.1.split_whitespace().collect();
        let [who, what, mean_ns, counts @ ..] = &words[..] else { continue };
        let counts: Vec<u64> = counts.iter().filter_map(|word| word.parse().ok()).collect();
        let (Ok(mean_ns), [requests, sectors, requests_then, sectors_then]) = (mean_ns.parse::<f64>(), &counts[..])
        else {
            continue;
        };
        let run = Run { mean_ms: mean_ns / 1e6, requests: requests_then - requests, sectors: sectors_then - sectors };
        runs.entry(((*what).to_owned(), (*who).to_owned())).or_default().push(run);
    }
    assert_eq!(runs.len(), 6, "{console}");
    for what in ["randread", "randwrite"] {
        let of = |who: &str| runs[&(what.to_owned(), who.to_owned())].clone();
        let best = |who: &str| of(who).into_iter().map(|run| run.mean_ms).fold(f64::INFINITY, f64::min);
        let (device, kernel, ours) = (best("device"), best("kernel"), best("ours"));
        println!(
            "{what}: device {device:.2} ms, nvmet {kernel:.2} ms, ours {ours:.2} ms: {:.3} of nvmet's",
            ours / kernel
        );
        let most = if std::env::var_os("DISKWRIGHT_GUESTS").is_some() { 1.1 } else { 2.0 };
        assert!(ours <= most * kernel, "{what}: {:?} and {:?}", of("ours"), of("kernel"));
        for run in of("ours").into_iter().chain(of("kernel")) {
            assert_eq!((run.requests, run.sectors), (REQUESTS, REQUESTS * 8), "{what}: {run:?}");
        }
    }
}
