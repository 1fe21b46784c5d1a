//! The machine of a result: processor, memory, kernel, file system, device, versions.
//!
//! The facts are read from `/proc`, `/sys`, `/etc/os-release`, uname and statvfs. A fact that the
//! system does not provide is left empty, never guessed.

use diskwright_stats::numbers::bytes;
use rustix::fs::statvfs;
use serde::{Deserialize, Serialize};
use std::{
    fmt, fs,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
    time::Instant,
};

/// The machine on which a result was measured.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Machine {
    /// Model name of the processor, from `/proc/cpuinfo`.
    pub cpu_model: String,
    /// Number of processors that this process may use.
    pub logical_cpus: usize,
    /// Memory of the machine.
    pub memory_bytes: u64,
    /// Kernel name and release.
    pub kernel: String,
    /// `PRETTY_NAME` of `/etc/os-release`.
    pub operating_system: String,
    /// The kernel's clock source. A source such as `hpet` is slow to read: see
    /// [`Warning::SlowClock`](crate::warning::Warning::SlowClock).
    pub clock_source: String,
    /// Load average over the last minute, before the run.
    pub load_average: f64,
}

impl Machine {
    /// Reads the facts of this machine.
    pub fn detect() -> Self {
        let uname = rustix::system::uname();
        Self {
            cpu_model: cpu_model(&read("/proc/cpuinfo")),
            logical_cpus: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: memory_bytes(&read("/proc/meminfo")),
            kernel: format!("{} {}", uname.sysname().to_string_lossy(), uname.release().to_string_lossy()),
            operating_system: os_name(&read("/etc/os-release")),
            clock_source: read("/sys/devices/system/clocksource/clocksource0/current_clocksource").trim().to_owned(),
            load_average: read("/proc/loadavg").split(' ').next().and_then(|load| load.parse().ok()).unwrap_or(0.0),
        }
    }
}

/// "2 x Some CPU, 16 GiB, Linux 6.1".
impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} x {}, {}, {}", self.logical_cpus, self.cpu_model, bytes(self.memory_bytes), self.kernel)
    }
}

/// The file system and device of a target.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Place {
    /// Canonical path of the target.
    pub path: PathBuf,
    /// Type of the file system, such as `ext4`.
    pub file_system: String,
    /// Mount point of the file system.
    pub mount_point: PathBuf,
    /// Mount options.
    pub mount_options: String,
    /// The mounted device, such as `/dev/vda1`.
    pub device: String,
    /// The I/O scheduler of the device; `None` where it has none.
    pub scheduler: Option<String>,
    /// Free space for this user, before the run.
    pub free_bytes: u64,
}

impl Place {
    /// Finds the file system of `path`, which must exist. A block device has no file system: the
    /// device is the path itself.
    pub fn detect(path: &Path) -> Self {
        let real = path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if let Some(place) = Self::of_device(&real) {
            return place;
        }
        let mounted = mount_of(&read("/proc/self/mountinfo"), &real).unwrap_or_default();
        Self {
            scheduler: scheduler_of(&mounted.device_number),
            free_bytes: free_bytes(&real),
            path: real,
            file_system: mounted.file_system,
            mount_point: mounted.mount_point,
            mount_options: mounted.options,
            device: mounted.device,
        }
    }
}

/// "ext4 on /dev/vda".
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.file_system, self.device)
    }
}

impl Place {
    /// The record of a block device; `None` when `real` is not one.
    fn of_device(real: &Path) -> Option<Self> {
        let found = rustix::fs::stat(real).ok()?;
        if !rustix::fs::FileType::from_raw_mode(found.st_mode).is_block_device() {
            return None;
        }
        let number = format!("{}:{}", rustix::fs::major(found.st_rdev), rustix::fs::minor(found.st_rdev));
        Some(Self {
            scheduler: scheduler_of(&number),
            path: real.to_owned(),
            file_system: "no file system".into(),
            device: real.display().to_string(),
            ..Self::default()
        })
    }
}

/// Free space for this user on the file system of `path`; 0 when the system call fails.
pub fn free_bytes(path: &Path) -> u64 {
    statvfs(path).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Versions of the programs of a measurement.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
pub struct Versions {
    /// Version of Diskwright.
    pub diskwright: String,
    /// Whether Diskwright was built with optimisation. Figures of a debug build are not comparable.
    pub optimised: bool,
    /// Output of `qemu-img --version`; `None` where QEMU was not measured.
    pub qemu: Option<String>,
}

impl Versions {
    /// The version of this program.
    pub fn detect() -> Self {
        Self { diskwright: env!("CARGO_PKG_VERSION").into(), optimised: !cfg!(debug_assertions), qemu: None }
    }
}

/// Measures the CPU time of the machine that is not of this process.
#[derive(Debug, Clone, Copy)]
pub struct OtherLoad {
    start: Instant,
    busy_ticks: u64,
    stolen_ticks: u64,
    own_ns: u64,
}

/// `/proc/stat` counts in hundredths of a second, whatever the kernel's own tick (USER_HZ).
const TICK_NS: u64 = 10_000_000;

impl OtherLoad {
    /// Starts the measurement.
    pub fn watch() -> Self {
        let (busy_ticks, stolen_ticks) = cpu_ticks(&read("/proc/stat"));
        Self { start: Instant::now(), busy_ticks, stolen_ticks, own_ns: crate::clock::CpuTime::of_process().total_ns() }
    }

    /// Mean number of processors since the start that were busy with other programs and kernel
    /// threads, and mean number that the hypervisor gave to other guests (steal time).
    pub fn since(&self) -> (f64, f64) {
        let (busy_ticks, stolen_ticks) = cpu_ticks(&read("/proc/stat"));
        let wall_ns = (self.start.elapsed().as_nanos() as f64).max(1.0);
        let own_ns = crate::clock::CpuTime::of_process().total_ns().saturating_sub(self.own_ns);
        let busy_ns = busy_ticks.saturating_sub(self.busy_ticks).saturating_mul(TICK_NS);
        let stolen_ns = stolen_ticks.saturating_sub(self.stolen_ticks).saturating_mul(TICK_NS);
        (busy_ns.saturating_sub(own_ns) as f64 / wall_ns, stolen_ns as f64 / wall_ns)
    }
}

/// Whether DAMON evicts idle pages from the page cache, as some cloud providers set it up. Data
/// that were read long ago are then not cached any more, even when memory is free.
pub fn takes_idle_pages() -> bool {
    takes_idle_pages_by(Path::new("/sys"))
}

fn takes_idle_pages_by(sys: &Path) -> bool {
    let entries = |dir: PathBuf| fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.path());
    let is = |path: PathBuf, word: &str| read(path).trim() == word;
    is(sys.join("module/damon_reclaim/parameters/enabled"), "Y")
        || entries(sys.join("kernel/mm/damon/admin/kdamonds"))
            .filter(|kdamond| is(kdamond.join("state"), "on"))
            .flat_map(|kdamond| entries(kdamond.join("contexts")))
            .flat_map(|context| entries(context.join("schemes")))
            .any(|scheme| is(scheme.join("action"), "pageout"))
}

/// What tells this machine from others as long as it runs; empty where the kernel does not say.
/// Containers have that of their machine, guests have their own.
pub fn boot_id() -> String {
    read("/proc/sys/kernel/random/boot_id").trim().to_owned()
}

/// Resident memory of this process in bytes: current and peak.
///
/// The kernel keeps both figures per processor and records its peak from an inexact sum, so its
/// peak can be lower than a current figure that was read before. The peak returned here never is.
pub fn resident_bytes() -> (u64, u64) {
    static HIGHEST_BYTES: AtomicU64 = AtomicU64::new(0);
    let status = read("/proc/self/status");
    let now_bytes = kib_field(&status, "VmRSS:") << 10;
    let highest_bytes = now_bytes.max(kib_field(&status, "VmHWM:") << 10);
    (now_bytes, HIGHEST_BYTES.fetch_max(highest_bytes, Ordering::Relaxed).max(highest_bytes))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn cpu_model(cpuinfo: &str) -> String {
    let value = |key: &str| cpuinfo.lines().find(|line| line.starts_with(key)).and_then(|line| line.split_once(':'));
    value("model name").or_else(|| value("CPU part")).map_or_else(String::new, |(_, model)| model.trim().to_owned())
}

fn kib_field(text: &str, key: &str) -> u64 {
    let line = text.lines().find(|line| line.starts_with(key));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse().ok()).unwrap_or(0)
}

fn memory_bytes(meminfo: &str) -> u64 {
    kib_field(meminfo, "MemTotal:") << 10
}

fn os_name(os_release: &str) -> String {
    let line = os_release.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    line.map_or_else(String::new, |name| name.trim_matches('"').to_owned())
}

/// Busy and stolen ticks of all processors. Guest time is part of user time, and iowait counts as
/// idle.
fn cpu_ticks(stat: &str) -> (u64, u64) {
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .filter_map(|field| field.parse().ok())
        .collect();
    let at = |index: usize| fields.get(index).copied().unwrap_or(0);
    (at(0) + at(1) + at(2) + at(5) + at(6), at(7))
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mounted {
    device_number: String,
    mount_point: PathBuf,
    options: String,
    file_system: String,
    device: String,
}

/// The mount that contains `path`: the longest mount point that is a prefix of it; of equal ones
/// the last, which hides the others.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mounted> {
    let mut best: Option<Mounted> = None;
    for line in mountinfo.lines() {
        let Some((left, right)) = line.split_once(" - ") else { continue };
        let (left, right): (Vec<&str>, Vec<&str>) = (left.split(' ').collect(), right.split(' ').collect());
        let (Some(number), Some(mount_point), Some(options)) = (left.get(2), left.get(4), left.get(5)) else {
            continue;
        };
        let mount_point = PathBuf::from(unescape(mount_point));
        let longer = |best: &Mounted| mount_point.components().count() >= best.mount_point.components().count();
        if path.starts_with(&mount_point) && best.as_ref().is_none_or(longer) {
            best = Some(Mounted {
                device_number: (*number).to_owned(),
                mount_point,
                options: (*options).to_owned(),
                file_system: right.first().copied().unwrap_or_default().to_owned(),
                device: unescape(right.get(1).copied().unwrap_or_default()),
            });
        }
    }
    best
}

/// Decodes the escapes of `/proc/self/mountinfo`: `\040` for a space, `\011`, `\134`.
pub fn unescape(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

/// The active scheduler (in brackets) of the device, or of the disk of the partition.
fn scheduler_of(device_number: &str) -> Option<String> {
    let block = Path::new("/sys/dev/block").join(device_number).canonicalize().ok()?;
    let text = [block.as_path(), block.parent()?]
        .iter()
        .find_map(|folder| fs::read_to_string(folder.join("queue/scheduler")).ok())?;
    selected(&text)
}

fn selected(choices: &str) -> Option<String> {
    let (_, rest) = choices.split_once('[')?;
    Some(rest.split_once(']')?.0.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
40 27 7:0 / /mnt/my\\040disk rw,noatime - xfs /dev/loop0 rw
41 27 7:1 / /mnt/my\\040disk rw - btrfs /dev/loop1 rw
42 27 0:33 / /mnt/my rw - tmpfs tmpfs rw";

    #[test]
    fn the_longest_and_latest_mount_is_selected() {
        let at = |path: &str| mount_of(MOUNTS, Path::new(path)).unwrap();
        assert_eq!((at("/home/x").file_system.as_str(), at("/home/x").device.as_str()), ("ext4", "/dev/vda"));
        assert_eq!(at("/mnt/my disk/a").file_system, "btrfs");
        // As a path, "/mnt/my" is not a prefix of "/mnt/mydisk".
        assert_eq!(at("/mnt/mydisk").file_system, "ext4");
        assert_eq!(at("/mnt/my/x").file_system, "tmpfs");
    }

    #[test]
    fn fields_of_proc_files_are_parsed() {
        assert_eq!(cpu_model("processor\t: 0\nmodel name\t: Some CPU @ 2GHz\n"), "Some CPU @ 2GHz");
        assert_eq!(memory_bytes("MemTotal:       24684096 kB\nMemFree: 1 kB"), 24_684_096 << 10);
        assert_eq!(os_name("NAME=x\nPRETTY_NAME=\"Debian 12\"\n"), "Debian 12");
        assert_eq!(selected("none [mq-deadline] kyber\n").as_deref(), Some("mq-deadline"));
        assert_eq!(selected("none"), None);
        assert_eq!(cpu_ticks("cpu  10 2 30 400 50 6 7 8 9 0\ncpu0 1"), (55, 8));
        assert_eq!(cpu_ticks(""), (0, 0));
    }

    #[test]
    fn eviction_of_idle_pages_is_detected_from_sysfs() {
        let sys = tempfile::tempdir().unwrap();
        let says = |path: &str, word: &str| {
            let path = sys.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{word}\n")).unwrap();
        };
        let takes = || takes_idle_pages_by(sys.path());
        assert!(!takes(), "a kernel without DAMON");
        says("kernel/mm/damon/admin/kdamonds/nr_kdamonds", "1");
        says("kernel/mm/damon/admin/kdamonds/0/state", "on");
        says("kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/0/action", "stat");
        says("module/damon_reclaim/parameters/enabled", "N");
        assert!(!takes(), "the scheme only collects statistics");
        says("kernel/mm/damon/admin/kdamonds/0/contexts/0/schemes/1/action", "pageout");
        assert!(takes());
        says("kernel/mm/damon/admin/kdamonds/0/state", "off");
        assert!(!takes(), "the daemon is off");
        says("module/damon_reclaim/parameters/enabled", "Y");
        assert!(takes());
    }

    #[test]
    fn this_machine_has_a_processor_memory_and_a_file_system() {
        let machine = Machine::detect();
        assert!(machine.logical_cpus > 0 && machine.memory_bytes > 0 && machine.kernel.starts_with("Linux "));
        let place = Place::detect(&std::env::temp_dir());
        assert!(!place.file_system.is_empty() && place.path.starts_with(&place.mount_point), "{place:?}");
        let (now, peak) = resident_bytes();
        let (later, later_peak) = resident_bytes();
        assert!(now > 0 && peak >= now && later_peak >= peak && later_peak >= later);
    }
}
