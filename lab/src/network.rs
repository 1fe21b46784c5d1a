//! Emulated networks, because loopback has neither delay nor a limited rate.
//!
//! ```text
//!   Network      this network namespace                     a namespace of its own
//!                clients ─ 198.18.x.1 ═══ virtual Ethernet ═══ 198.18.x.2 ─ servers
//!                              └ queueing discipline    queueing discipline ┘
//!
//!   GuestLink    this network namespace                     a virtual machine
//!                servers ─ 198.19.x.1 ═════ tap device ═════ 198.19.x.2 ─ clients
//!                              └ queueing discipline    queueing discipline ┘
//! ```
//!
//! Packets of each direction wait in a queueing discipline for the delay and for the rate: `netem`,
//! or `tbf` where the kernel has no `netem`. `tbf` limits the rate only, and the network says so
//! ([`Network::has_delay`]). A guest's kernel is a distribution's, which has `netem`, so the guest
//! delays its own packets by the whole round trip.
//!
//! The addresses are those for benchmarks of networks (RFC 2544), four of them for each process.
//! The programs `ip` and `tc` set it up, as root. Dropping a network removes its namespace and its
//! devices.

use crate::peer;
use diskwright_stats::units::Span;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use std::{
    ffi::OsStr,
    fmt, fs,
    net::Ipv4Addr,
    path::Path,
    process::{Command, Stdio},
    str::FromStr,
};

/// The first of the addresses for a network.
const NETWORK_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// The first of the addresses for the link of a guest.
const LINK_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 0);
/// Name of a namespace, before the process id.
const NAME: &str = "diskwright-";
/// Name of a device, before the process id. A device's name has 15 characters at most.
const DEVICE: &str = "dw";
/// End of the name of a tap device.
const TAP: &str = "t";

/// Delay and rate of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct NetworkSpec {
    /// Time of a round trip without load, nanoseconds.
    pub round_trip_ns: u64,
    /// Rate of each direction, bits per second.
    pub rate_bits_per_s: u64,
}

impl Default for NetworkSpec {
    /// 10 Gbit/s, as in the paper, and the round trip between two machines of one data centre.
    fn default() -> Self {
        Self { round_trip_ns: 200_000, rate_bits_per_s: 10_000_000_000 }
    }
}

impl fmt::Display for NetworkSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let round_trip = diskwright_stats::numbers::duration(self.round_trip_ns as f64);
        let rate = diskwright_stats::numbers::figure(self.rate_bits_per_s as f64 / 1e6);
        write!(f, "round trip {round_trip}, {rate} Mbit/s")
    }
}

impl FromStr for NetworkSpec {
    type Err = String;

    /// Reads `rtt=1ms,rate=1G`. What is left out is the default's.
    fn from_str(text: &str) -> Result<Self, String> {
        let mut spec = Self::default();
        for part in text.split(',') {
            match part.split_once('=') {
                Some(("rtt", value)) => {
                    spec.round_trip_ns = value.parse::<Span>()?.as_nanos();
                }
                Some(("rate", value)) => spec.rate_bits_per_s = rate(value)?,
                _ => return Err(format!("{part:?} is neither rtt=TIME nor rate=BITS, as in rtt=1ms,rate=1G")),
            }
        }
        if spec.round_trip_ns > 10_000_000_000 {
            return Err("a round trip of more than 10 s".into());
        }
        Ok(spec)
    }
}

impl NetworkSpec {
    /// The arguments of `tc` that give a device a queueing discipline with a delay and the rate.
    pub(crate) fn discipline(&self, device: &str, delay_ns: u64) -> Vec<String> {
        let (delay, rate) = (format!("{}us", delay_ns / 1000), format!("{}bit", self.rate_bits_per_s));
        // The limit has room for the packets that are under way at the highest rate.
        words(&["qdisc", "add", "dev", device, "root", "netem", "delay", &delay, "rate", &rate, "limit", "100000"])
    }

    /// The arguments of `tc` that limit the rate alone.
    fn rate_only(&self, device: &str) -> Vec<String> {
        let rate = format!("{}bit", self.rate_bits_per_s);
        // The burst has room for the largest packets that the devices hand over.
        words(&["qdisc", "add", "dev", device, "root", "tbf", "rate", &rate, "burst", "512kb", "latency", "50ms"])
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

/// Reads a rate in bits per second: `100M`, `2.5G`. Units are powers of 1000, as for networks.
fn rate(text: &str) -> Result<u64, String> {
    let usage = || format!("{text:?} is not a rate in bits per second of at least 1M; write 100M, 1G or 2.5G");
    let (number, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1e3),
        Some((at, 'm' | 'M')) => (&text[..at], 1e6),
        Some((at, 'g' | 'G')) => (&text[..at], 1e9),
        _ => (text, 1.0),
    };
    let bits = number.parse::<f64>().map_err(|_| usage())? * factor;
    if (1e6..=1e12).contains(&bits) { Ok(bits as u64) } else { Err(usage()) }
}

/// A network between this network namespace and one for servers.
#[derive(Debug)]
pub struct Network {
    namespace: String,
    server: Ipv4Addr,
    has_delay: bool,
}

impl Network {
    /// Sets the network up.
    ///
    /// # Errors
    /// A sentence that says why this machine cannot have one.
    pub fn start(spec: &NetworkSpec) -> Result<Self, String> {
        need_tools()?;
        remove_left_over();
        let pid = std::process::id();
        let namespace = format!("{NAME}{pid}");
        let (near, far) = (format!("{DEVICE}{pid}a"), format!("{DEVICE}{pid}b"));
        tool("ip", &["netns", "add", &namespace])?;
        // From here on dropping it removes the namespace, which removes both devices.
        let mut network = Self { namespace, server: address(NETWORK_ADDRESS, 2), has_delay: true };
        let inside = &network.namespace;
        let here = format!("{}/30", address(NETWORK_ADDRESS, 1));
        let there = format!("{}/30", network.server);
        tool("ip", &["link", "add", &near, "type", "veth", "peer", "name", &far, "netns", inside])?;
        tool("ip", &["address", "add", &here, "dev", &near])?;
        tool("ip", &["link", "set", &near, "up"])?;
        tool("ip", &["-n", inside, "address", "add", &there, "dev", &far])?;
        tool("ip", &["-n", inside, "link", "set", &far, "up"])?;
        tool("ip", &["-n", inside, "link", "set", "lo", "up"])?;
        let delay_ns = spec.round_trip_ns / 2;
        for (place, device) in [(&[][..], &near), (&["-n", inside][..], &far)] {
            let discipline = |words: &[String]| {
                let words: Vec<&str> = words.iter().map(String::as_str).collect();
                tool("tc", &[place, &words].concat())
            };
            if discipline(&spec.discipline(device, delay_ns)).is_err() {
                network.has_delay = false;
                discipline(&spec.rate_only(device))?;
            }
        }
        Ok(network)
    }

    /// Address of the servers.
    pub fn server(&self) -> Ipv4Addr {
        self.server
    }

    /// Whether packets are delayed. If not, only the rate is limited.
    pub fn has_delay(&self) -> bool {
        self.has_delay
    }

    /// Cuts the network, or joins it again: no packet comes through, and no connection is told.
    ///
    /// # Errors
    /// A sentence.
    pub fn cut(&self, is_cut: bool) -> Result<(), String> {
        let near = format!("{DEVICE}{}a", std::process::id());
        tool("ip", &["link", "set", &near, if is_cut { "down" } else { "up" }])
    }

    /// The command that runs a program in the servers' namespace, without its arguments. The
    /// process becomes the program.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(peer::find("ip").unwrap_or_else(|| "ip".into()));
        command.args(["netns", "exec", &self.namespace]).arg(program);
        command
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        // The next network that is set up removes what is left over.
        let _ = tool("ip", &["netns", "delete", &self.namespace]);
    }
}

/// A tap device: the link of a virtual machine to this host.
#[derive(Debug)]
pub struct GuestLink {
    tap: String,
}

impl GuestLink {
    /// Sets the link up. `spec` limits the rate of packets to the guest; those from the guest wait
    /// in the guest.
    ///
    /// # Errors
    /// A sentence that says why this machine cannot have one.
    pub fn start(spec: Option<&NetworkSpec>) -> Result<Self, String> {
        need_tools()?;
        remove_left_over();
        let link = Self { tap: format!("{DEVICE}{}{TAP}", std::process::id()) };
        tool("ip", &["tuntap", "add", "dev", &link.tap, "mode", "tap"])?;
        tool("ip", &["address", "add", &format!("{}/30", link.host()), "dev", &link.tap])?;
        tool("ip", &["link", "set", &link.tap, "up"])?;
        if let Some(spec) = spec {
            let words = spec.rate_only(&link.tap);
            tool("tc", &words.iter().map(String::as_str).collect::<Vec<_>>())?;
        }
        Ok(link)
    }

    /// Name of the device.
    pub fn tap(&self) -> &str {
        &self.tap
    }

    /// Address of this host.
    pub fn host(&self) -> Ipv4Addr {
        address(LINK_ADDRESS, 1)
    }

    /// Address of the guest, with the length of its prefix.
    pub fn guest(&self) -> String {
        format!("{}/30", address(LINK_ADDRESS, 2))
    }
}

impl Drop for GuestLink {
    fn drop(&mut self) {
        // Nothing is lost with a device that stays: it has no program behind it.
        let _ = tool("ip", &["link", "delete", &self.tap]);
    }
}

/// An address among the four of this process. `first` is that of process 0.
fn address(first: Ipv4Addr, last: u32) -> Ipv4Addr {
    let number = std::process::id() % (1 << 14);
    Ipv4Addr::from(u32::from(first) + (number << 2) + last)
}

/// Why no network can be set up.
fn need_tools() -> Result<(), String> {
    if !nix::unistd::geteuid().is_root() {
        return Err("an emulated network needs root (use sudo)".into());
    }
    match ["ip", "tc"].into_iter().find(|program| peer::find(program).is_none()) {
        Some(program) => Err(peer::missing(program, "iproute2")),
        None => Ok(()),
    }
}

/// Removes the namespaces and tap devices of processes that were killed.
fn remove_left_over() {
    let names = |folder: &str| -> Vec<String> {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    };
    let is_left = |pid: &str| pid.parse::<u32>().is_ok_and(|pid| !Path::new("/proc").join(pid.to_string()).exists());
    // Another study may remove them at the same time.
    for name in names("/run/netns") {
        if name.strip_prefix(NAME).is_some_and(is_left) {
            end_servers_in(&name);
            let _ = tool("ip", &["netns", "delete", &name]);
        }
    }
    for name in names("/sys/class/net") {
        if name.strip_prefix(DEVICE).and_then(|rest| rest.strip_suffix(TAP)).is_some_and(is_left) {
            let _ = tool("ip", &["link", "delete", &name]);
        }
    }
}

/// Ends the servers that a killed process has left in a namespace, which would keep it.
fn end_servers_in(namespace: &str) {
    let listed =
        Command::new(peer::find("ip").unwrap_or_else(|| "ip".into())).args(["netns", "pids", namespace]).output();
    let listed = listed.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    for pid in listed.lines().filter_map(|line| line.trim().parse().ok()) {
        // It may have ended meanwhile.
        let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
    }
}

/// Runs one of the programs. The error says what it printed.
fn tool(program: &str, words: &[&str]) -> Result<(), String> {
    let mut command = Command::new(peer::find(program).unwrap_or_else(|| program.into()));
    let output = command.args(words).stdin(Stdio::null()).output().map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", words.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::Read,
        net::TcpStream,
        time::{Duration, Instant},
    };

    #[test]
    fn a_network_is_written_as_delay_and_rate() {
        let spec: NetworkSpec = "rtt=1ms,rate=2.5G".parse().unwrap();
        assert_eq!(spec, NetworkSpec { round_trip_ns: 1_000_000, rate_bits_per_s: 2_500_000_000 });
        assert_eq!("rate=100M".parse::<NetworkSpec>().unwrap().round_trip_ns, NetworkSpec::default().round_trip_ns);
        assert_eq!(spec.to_string(), "round trip 1.00 ms, 2,500 Mbit/s");
        for wrong in ["", "rtt", "rtt=11s", "rate=0", "rate=10", "rate=x", "rate=NaN", "rate=inf", "speed=1G"] {
            assert!(wrong.parse::<NetworkSpec>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn what_a_killed_process_has_left_is_removed() {
        if let Err(why) = need_tools() {
            return println!("skipped: what a killed process has left: {why}");
        }
        let mut ended = Command::new("true").spawn().unwrap();
        let pid = ended.id();
        ended.wait().unwrap();
        let (namespace, tap) = (format!("{NAME}{pid}"), format!("{DEVICE}{pid}{TAP}"));
        for made in
            [tool("ip", &["netns", "add", &namespace]), tool("ip", &["tuntap", "add", "dev", &tap, "mode", "tap"])]
        {
            if let Err(why) = made {
                return println!("skipped: what a killed process has left: {why}");
            }
        }
        let link = GuestLink::start(None).unwrap();
        let exists = |tap: &str| Path::new("/sys/class/net").join(tap).exists();
        assert!(!Path::new("/run/netns").join(&namespace).exists() && !exists(&tap));
        let own = link.tap().to_owned();
        assert!(exists(&own));
        drop(link);
        assert!(!exists(&own));
    }

    #[test]
    fn a_server_inside_is_reached_no_faster_than_the_rate() {
        let spec = NetworkSpec { round_trip_ns: 20_000_000, rate_bits_per_s: 80_000_000 };
        let network = match Network::start(&spec) {
            Ok(network) => network,
            Err(why) => return println!("skipped: an emulated network: {why}"),
        };
        let Some(python) = peer::find("python3") else { return println!("skipped: python3 is not installed") };
        const BYTES: usize = 2 << 20;
        let script = format!(
            "import socket; s = socket.create_server(('{}', 7)); c, _ = s.accept(); c.sendall(bytes({BYTES}))",
            network.server()
        );
        let mut server = network.command(python).args(["-c", &script]).spawn().unwrap();
        let patience = Instant::now();
        let mut client = loop {
            let begun = Instant::now();
            match TcpStream::connect((network.server(), 7)) {
                // A connection takes a round trip.
                Ok(client) => {
                    assert!(!network.has_delay() || begun.elapsed() >= Duration::from_millis(20));
                    break client;
                }
                Err(error) => assert!(patience.elapsed() < Duration::from_secs(30), "{error}"),
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if !network.has_delay() {
            println!("skipped: the delay of a network: the kernel has no netem");
        }
        let begun = Instant::now();
        let mut read = Vec::new();
        client.read_to_end(&mut read).unwrap();
        server.wait().unwrap();
        // 10 MB/s need 200 ms; the burst of 512 KiB goes at once.
        assert!(read.len() == BYTES && begun.elapsed() > Duration::from_millis(100), "{:?}", begun.elapsed());
        let namespace = Path::new("/run/netns").join(&network.namespace);
        assert!(namespace.exists());
        drop(network);
        assert!(!namespace.exists());
    }
}
