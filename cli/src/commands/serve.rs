//! `diskwright serve [NAME=]FILE[,format=FORMAT]...`: serves disks by NBD until a signal comes.
//!
//! ```text
//!   FILEs ─▶ disks (read-only, or with a temporary child) ─▶ exports ─┐
//!   --nbd, LISTEN_FDS ─▶ listeners ───────────────────────────────────┼─▶ NbdServer ─▶ READY=1 ─┐
//!   --tls-certificates ─▶ rustls ─────────────────────────────────────┘                         │
//!   wait: SIGHUP reads the certificates again; SIGTERM, Ctrl-C: finish, flush, close  ◀─────────┘
//! ```
//!
//! Exports and addresses go to standard output before the first client can connect. The log goes to
//! standard error.

mod config;
mod live;
mod log;
mod word;

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    limits,
    options::{self, SnapshotArgs},
    sizes::Human,
    switches,
};
use clap::Args;
use config::Config;
use diskwright_disk::{Disk, DiskError, Layer, Movable, Opened};
use diskwright_nbd::tls::TlsError;
use diskwright_serve::{
    control::{Channel, Host, HostedDisk},
    ephemeral,
    nbd::{Address, Export, Listener, NbdServer, ServerOptions, export},
    scrape::{Page, Scrape},
};
use diskwright_store::{BlockDevice, LimitedDevice, RateLimiter, RateLimits};
use ipnet::IpNet;
use live::LiveLine;
use schemars::JsonSchema;
use sd_notify::NotifyState;
use serde::Serialize;
use std::{
    fmt::Write as _,
    io::Write as _,
    net::IpAddr,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use word::DiskWord;

/// Interval at which the live line is drawn and the server is looked at.
const TICK: Duration = Duration::from_millis(500);

/// Arguments of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
An ADDRESS is the path of a unix socket (with a slash, or unix:PATH), PORT (on 127.0.0.1), or HOST:PORT; [::1]:PORT for IPv6. Without --nbd the \
sockets that systemd hands over (LISTEN_FDS) are used, or else a unix socket in the run-time folder, whose path is printed. Only the owner can \
connect to a unix socket.

A disk is exported under NAME, or the name of its file; a client that asks for no name gets the only one. A FILE with = in its name is written \
with a folder before it: ./a=b.vhdx. FORMAT (raw, vhd, vhdx, qcow2, vdi, vmdk) is the format of one disk, --format that of all others. A writable disk needs it if \
its extension names no format (.img) and its contents look like an image.

TLS: the folder holds ca-cert.pem, server-cert.pem and server-key.pem, as for qemu and libnbd. With it, clients on TCP must use TLS and show a \
certificate that the CA vouches for. SIGHUP reads the folder again.

serve-ctl reaches disks that are served for writing: statistics, limit, resize, snapshot, merge, compact, move, and their end (drain).

LIMITS are iops (requests per second) and bytes (of reads and writes per second). After a pause a tenth of a second's may start at once, or iops-burst=N and bytes-burst=SIZE. \
The requests above wait; flushes never do. serve-ctl changes the limits of a disk.

A FILE.toml has the options as keys, and a table for each disk: file, and name, format, limit and read-only if needed. Paths are relative to the working directory. \
SIGHUP reads it again: limits are replaced; what else has changed needs a restart, and the log says what.

  nbd = [\"10809\"]
  tls-certificates = \"/etc/pki/diskwright\"
  [[disk]]
  name = \"db\"
  file = \"/disks/db.vhdx\"
  limit = \"iops=500,bytes=20M\"

SIGTERM or Ctrl-C: requests in flight are finished, everything is flushed, and the exit code is 0. A second signal ends the server at once (130).

EXAMPLES
  diskwright serve disk.vhdx --nbd /tmp/disk.sock
  nbdinfo 'nbd+unix:///?socket=/tmp/disk.sock'
  diskwright serve golden.vhdx --ephemeral --nbd 10809
  diskwright serve db=db.vhdx log=log.vhd --nbd 0.0.0.0:10809 \\
      --tls-certificates /etc/pki/diskwright --allow 10.0.0.0/8
  diskwright serve db=guest.img,format=raw log.vhdx --nbd 10809
  diskwright serve disk.raw --read-only --nbd /tmp/d.sock --metrics 9100 \\
      --progress
  diskwright serve a.vhdx b.vhdx --nbd 10809 --limit iops=2000,bytes=100M
  diskwright serve --config /etc/diskwright/serve.toml")]
pub struct ServeArgs {
    /// The disks: each may have a name before it and its format behind it.
    #[arg(value_name = "[NAME=]FILE[,format=FORMAT]", required_unless_present = "config", value_parser = DiskWord::parse)]
    disks: Vec<DiskWord>,
    /// Take the disks and all options of serve from this file.
    #[arg(long, value_name = "FILE.toml", conflicts_with_all = config::IN_FILE)]
    config: Option<PathBuf>,
    /// Listen at this address (may be repeated).
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    nbd: Vec<Address>,
    /// Refuse writes.
    #[arg(long, short)]
    read_only: bool,
    #[command(flatten)]
    of: SnapshotArgs,
    /// Take writes, but drop them at the end: the disks themselves are opened read-only.
    #[arg(long, conflicts_with = "read_only")]
    ephemeral: bool,
    /// Keep the writes of --ephemeral in DIR. [default: $TMPDIR, or /var/tmp]
    #[arg(long, value_name = "DIR", requires = "ephemeral")]
    ephemeral_dir: Option<PathBuf>,
    /// Description of the disks for clients (4096 bytes at most).
    #[arg(long, value_name = "TEXT", value_parser = description)]
    description: Option<String>,
    /// Use TLS, with the certificates in DIR.
    #[arg(long, value_name = "DIR")]
    tls_certificates: Option<PathBuf>,
    /// Accept clients without a certificate.
    #[arg(long, requires = "tls_certificates")]
    tls_any_client: bool,
    /// Require TLS on unix sockets too.
    #[arg(long, requires = "tls_certificates")]
    tls_on_unix: bool,
    /// Accept TCP clients from NETWORK only (may be repeated): 192.168.1.0/24, or one address.
    #[arg(long, value_name = "NETWORK", value_parser = network)]
    allow: Vec<IpNet>,
    /// Serve writable disks on TCP without TLS.
    #[arg(long)]
    insecure_writes: bool,
    /// Maximum number of connections at a time.
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().connections_max, value_parser = options::at_least_one)]
    connections: usize,
    /// Maximum number of requests in flight for each connection.
    #[arg(long, value_name = "N", default_value_t = ServerOptions::default().requests_max, value_parser = clap::value_parser!(u32).range(1..=4096))]
    requests: u32,
    /// Serve each disk no faster than this.
    #[arg(long, value_name = limits::VALUE_NAME, value_parser = limits::parse)]
    limit: Option<RateLimits>,
    /// Serve each connection no faster than this.
    #[arg(long, value_name = limits::VALUE_NAME, value_parser = limits::parse)]
    client_limit: Option<RateLimits>,
    /// Threads that serve. [default: one for each processor, at most 8]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=256))]
    threads: Option<u16>,
    /// Serve metrics for Prometheus at this address, under /metrics.
    #[arg(long, value_name = "ADDRESS", value_parser = address)]
    metrics: Option<Address>,
    /// Format of the log.
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = log::Format::Text)]
    log_format: log::Format,
    /// Lowest level that is logged. [default: info; warn with --quiet]
    #[arg(long, value_enum, value_name = "LEVEL")]
    log_level: Option<log::Level>,
    /// Show connections, rates and latencies in one line that is updated.
    #[arg(long)]
    progress: bool,
}

fn address(text: &str) -> Result<Address, String> {
    Address::parse(text).map_err(|error| error.to_string())
}

fn description(text: &str) -> Result<String, String> {
    export::check_description(text).map(|()| text.to_owned()).map_err(|error| error.to_string())
}

fn network(text: &str) -> Result<IpNet, String> {
    let one = || text.parse::<IpAddr>().map(IpNet::from);
    text.parse::<IpNet>().or_else(|_| one()).map_err(|_| "write for example 192.168.1.0/24 or ::1".into())
}

/// One disk that is served.
#[derive(Debug)]
struct Served {
    name: String,
    path: PathBuf,
    disk: Arc<Movable>,
    limiter: Arc<RateLimiter>,
}

impl Served {
    /// The disk within its limits.
    fn device(&self) -> Arc<dyn BlockDevice> {
        Arc::new(LimitedDevice::new(Arc::clone(&self.disk) as Arc<dyn BlockDevice>, Arc::clone(&self.limiter)))
    }
}

/// A disk that is served.
#[derive(Debug, Serialize, JsonSchema)]
pub struct ExportReport {
    /// The export name.
    name: String,
    /// The image.
    file: String,
    /// Size of the disk in bytes.
    virtual_size: u64,
    /// Whether writes are refused.
    read_only: bool,
    /// Whether writes are dropped when the server ends.
    ephemeral: bool,
    /// Where clients find it, one for each address.
    uris: Vec<String>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

/// What `serve --json` prints once clients can connect.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The addresses on which the server listens.
    addresses: Vec<String>,
    /// The address of the metrics page.
    metrics: Option<String>,
    /// The disks.
    exports: Vec<ExportReport>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.serve/1";
}

/// Serves until a signal comes.
pub fn run(context: &mut Context, args: &ServeArgs) -> Outcome {
    let file = args.config.as_deref();
    let config = file.map(config::read).transpose()?;
    let args = config.as_ref().map_or(args, |config| &config.args);
    let patience = context.signals.patient();
    patience.listen_for_hangups();
    log::start(args.log_format, args.log_level, context.global.quiet);
    let served = open_disks(context, args)?;
    let tls = certificates(args).map_err(sentence)?;
    let listeners = listen(args)?;
    let exports = served
        .iter()
        .map(|served| Export {
            name: served.name.clone(),
            description: args.description.clone().unwrap_or_default(),
            device: served.device(),
        })
        .collect();
    let options = ServerOptions {
        workers: args.threads.unwrap_or(0).into(),
        connections_max: args.connections,
        requests_max: args.requests,
        client_limits: args.client_limit.unwrap_or_default(),
        tls,
        tls_on_unix: args.tls_on_unix,
        allowed: args.allow.clone(),
        insecure_writes: args.insecure_writes,
        ..ServerOptions::default()
    };
    let server = NbdServer::start(exports, listeners, options).map_err(sentence)?;
    let scrape = match &args.metrics {
        Some(address) => Some(Scrape::start(address, page(&server, &served)).map_err(sentence)?),
        None => None,
    };
    let channel = open_channel(context, &server, &served);
    announce(context, args, &server, &served, scrape.as_ref())?;
    notify(&[NotifyState::Ready]);
    let mut live = args.progress.then(LiveLine::new);
    while !patience.should_stop() && server.is_well() {
        patience.sleep(if live.is_some() { TICK } else { 4 * TICK });
        if patience.was_hung_up() {
            let newer = file.and_then(|file| reload_config(file, config.as_ref(), &server, &served));
            reload_certificates(newer.as_ref().map_or(args, |newer| &newer.args), &server);
        }
        if let Some(live) = &mut live {
            live.show(&server.metrics().totals());
        }
    }
    drop(live);
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping");
    channel.iter().for_each(Channel::close_gate);
    let mut ended = server.stop().map_err(sentence);
    drop(scrape);
    for Served { disk, .. } in served {
        ended = ended.and(disk.close().map_err(Failure::from));
    }
    if let Some(channel) = channel {
        channel.end(ended.as_ref().copied().map_err(ToString::to_string));
    }
    ended?;
    tracing::info!("stopped");
    Ok(exit::OK)
}

/// Reads the configuration again, and replaces the limits.
fn reload_config(file: &Path, config: Option<&Config>, server: &NbdServer, served: &[Served]) -> Option<Config> {
    let newer = match config::read(file) {
        Ok(newer) => newer,
        Err(error) => {
            tracing::error!("configuration not reloaded; the old one stays in use: {error}");
            return None;
        }
    };
    let restart = config.map(|config| config.needs_restart(&newer)).unwrap_or_default();
    server.set_client_limits(newer.args.client_limit.unwrap_or_default());
    if !restart.iter().any(|key| key == config::DISK) {
        for (served, limits) in served.iter().zip(newer.limits()) {
            // Limits that stay keep what was reserved.
            if served.limiter.limits() != limits {
                served.limiter.set(limits);
            }
        }
    }
    if restart.is_empty() {
        tracing::info!("configuration reloaded");
    } else {
        tracing::warn!("configuration reloaded, but what has changed of these needs a restart: {}", restart.join(", "));
    }
    Some(newer)
}

fn reload_certificates(args: &ServeArgs, server: &NbdServer) {
    match certificates(args) {
        Ok(Some(tls)) => {
            server.set_tls(tls);
            tracing::info!("certificates reloaded");
        }
        Ok(None) => tracing::info!("no certificates to reload: the server has none"),
        Err(error) => tracing::error!(%error, "certificates not reloaded; the old ones stay in use"),
    }
}

/// The control channel, if a disk is open for writing. Without it the disks are served all the
/// same.
fn open_channel(context: &Context, server: &NbdServer, served: &[Served]) -> Option<Channel> {
    let held = served.iter().map(|Served { name, disk, limiter, .. }| HostedDisk {
        name: name.clone(),
        disk: Arc::clone(disk),
        limiter: Arc::clone(limiter),
    });
    let signals = context.signals.clone();
    let host = Host {
        command: "serve",
        metrics: Some(Arc::clone(server.metrics())),
        on_drain: Ok(Box::new(move || signals.stop())),
        freezer: None,
        on_move: None,
    };
    Channel::open(held.collect(), host).unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot make a control channel, so serve-ctl does not reach these disks");
        None
    })
}

fn sentence(error: impl std::error::Error) -> Failure {
    Failure::new(error.to_string())
}

/// Notifies the service manager. A failure is logged, and the server goes on.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

fn open_disks(context: &mut Context, args: &ServeArgs) -> Outcome<Vec<Served>> {
    let mut served = Vec::new();
    for DiskWord { name, path, format, limit, read_only } in args.disks.iter().cloned() {
        let read_only = read_only.unwrap_or(args.read_only);
        let mut options = context.global.open_options(!read_only && !args.ephemeral);
        options.format = format.or(options.format);
        options.snapshot.clone_from(&args.of.snapshot);
        let mut disk = Opened::image(&path, &options, "serve").map_err(|error| {
            let twice = || served_already(&error, &path, &served).map(Failure::usage);
            twice().unwrap_or_else(|| error.into())
        })?;
        disk.warnings().iter().for_each(|warning| context.warn(warning));
        if args.ephemeral {
            let dir = args.ephemeral_dir.clone().unwrap_or_else(ephemeral::default_dir);
            disk = ephemeral::on_top_of(&disk, &dir, options.cache).map_err(sentence)?;
        }
        let limiter = Arc::new(RateLimiter::new(limit.or(args.limit).unwrap_or_default()));
        served.push(Served { name, path, disk: Arc::new(Movable::new(disk)), limiter });
    }
    Ok(served)
}

/// A sentence for a file that cannot be locked because this command has it open: the file was named
/// twice, or is in the chain of another disk of this command.
fn served_already(error: &DiskError, path: &Path, served: &[Served]) -> Option<String> {
    let DiskError::InUse { path: locked, .. } = error else { return None };
    let identity = |file: &Path| std::fs::metadata(file).ok().map(|found| (found.dev(), found.ino()));
    let wanted = identity(locked)?;
    for Served { path: other, disk, .. } in served {
        let is_it = |layer: &Layer| identity(&layer.path) == Some(wanted);
        match disk.disk().layers().iter().position(is_it) {
            Some(0) if identity(path) == Some(wanted) => {
                return Some(format!(
                    "{}: named twice in this command; name it once, or serve it --read-only under two names",
                    path.display()
                ));
            }
            Some(_) => {
                return Some(format!(
                    "{}: {} is in use by this command itself, which serves {} too; serve one of them, or both --read-only",
                    path.display(),
                    locked.display(),
                    other.display()
                ));
            }
            None => {}
        }
    }
    None
}

fn certificates(args: &ServeArgs) -> Result<Option<Arc<rustls::ServerConfig>>, TlsError> {
    let Some(dir) = &args.tls_certificates else { return Ok(None) };
    diskwright_nbd::tls::server(dir, !args.tls_any_client).map(Some)
}

fn listen(args: &ServeArgs) -> Outcome<Vec<Listener>> {
    let mut listeners = Vec::new();
    for address in &args.nbd {
        listeners.push(Listener::bind(address).map_err(sentence)?);
    }
    if listeners.is_empty() {
        listeners = Listener::handed_over().map_err(sentence)?;
    }
    if listeners.is_empty() {
        listeners.push(Listener::bind(&Address::Unix(usual_socket())).map_err(sentence)?);
    }
    Ok(listeners)
}

/// The default socket, in the run-time folder of the user, or of the system for root.
fn usual_socket() -> PathBuf {
    let dir = match std::env::var_os("XDG_RUNTIME_DIR") {
        Some(dir) if !dir.is_empty() => PathBuf::from(dir),
        _ if rustix::process::geteuid().is_root() => PathBuf::from("/run"),
        _ => std::env::temp_dir(),
    };
    dir.join(format!("diskwright-nbd-{}.sock", std::process::id()))
}

/// The URI of an export at an address.
fn uri(address: &Address, name: &str, tls: bool) -> String {
    let name = percent(name);
    match address {
        Address::Unix(path) => {
            let path = std::path::absolute(path).unwrap_or_else(|_| path.clone());
            let scheme = if tls { "nbds+unix" } else { "nbd+unix" };
            format!("{scheme}:///{name}?socket={}", percent(&path.to_string_lossy()))
        }
        Address::Tcp(..) => format!("{}://{address}/{name}", if tls { "nbds" } else { "nbd" }),
    }
}

/// Percent-encodes all but the characters that a path or a query may hold.
fn percent(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/:@".contains(&byte) {
            out.push(byte.into());
        } else {
            let _ = write!(out, "%{byte:02X}");
        }
    }
    out
}

fn announce(
    context: &mut Context,
    args: &ServeArgs,
    server: &NbdServer,
    served: &[Served],
    scrape: Option<&Scrape>,
) -> Outcome<()> {
    let exports: Vec<ExportReport> = served
        .iter()
        .map(|Served { name, path, disk, .. }| {
            let tls = |address: &Address| {
                args.tls_certificates.is_some() && (args.tls_on_unix || matches!(address, Address::Tcp(..)))
            };
            let geometry = disk.geometry();
            ExportReport {
                name: name.clone(),
                file: json::path(path),
                virtual_size: geometry.size_bytes,
                read_only: geometry.read_only,
                ephemeral: args.ephemeral,
                uris: server.addresses().iter().map(|address| uri(address, name, tls(address))).collect(),
                warnings: switches::all_with_switches(disk.disk().warnings()),
            }
        })
        .collect();
    let metrics = scrape.map(|scrape| scrape.address().to_string());
    if context.global.json {
        let addresses = server.addresses().iter().map(ToString::to_string).collect();
        context.print_json(&Report { addresses, metrics, exports })?;
    } else if !context.global.quiet {
        for export in &exports {
            let how = match export {
                ExportReport { ephemeral: true, .. } => ", writes are dropped at the end",
                ExportReport { read_only: true, .. } => ", read-only",
                _ => "",
            };
            writeln!(context.out, "{}: {}{how}", printable(&export.file), Human(export.virtual_size))?;
            for uri in &export.uris {
                writeln!(context.out, "  {uri}")?;
            }
        }
        if let Some(metrics) = metrics {
            writeln!(context.out, "metrics: http://{}/metrics", printable(&metrics))?;
        }
    }
    context.out.flush()?;
    Ok(())
}

/// The server's metrics, and for each export its size and the space of its file.
fn page(server: &NbdServer, served: &[Served]) -> Page {
    let metrics = Arc::clone(server.metrics());
    let disks: Vec<(String, Arc<Movable>)> =
        served.iter().map(|served| (label(&served.name), Arc::clone(&served.disk))).collect();
    Arc::new(move || {
        let mut out = metrics.prometheus();
        let mut gauge = |name: &str, help: &str, of: &dyn Fn(&Disk) -> Option<u64>| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
            for (export, disk) in &disks {
                if let Some(value) = of(&disk.disk()) {
                    let _ = writeln!(out, "{name}{{export=\"{export}\"}} {value}");
                }
            }
        };
        gauge("diskwright_export_size_bytes", "Size that clients see.", &|disk| Some(disk.geometry().size_bytes));
        gauge("diskwright_export_allocated_bytes", "Space that the files of the top image take.", &|disk| {
            disk.layers().first()?.allocated_bytes().ok()
        });
        out
    })
}

/// Escaped as the value of a label.
fn label(name: &str) -> String {
    name.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_can_be_given_to_clients() {
        let unix = Address::Unix("/run/a b.sock".into());
        assert_eq!(uri(&unix, "d&x", false), "nbd+unix:///d%26x?socket=/run/a%20b.sock");
        assert_eq!(uri(&Address::Tcp("::1".into(), 7), "disk", true), "nbds://[::1]:7/disk");
        assert_eq!(label("a\"b\\"), "a\\\"b\\\\");
    }

    #[test]
    fn what_the_protocol_cannot_carry_is_wrong_usage() {
        let (longest, longer) = ("a".repeat(4096), "a".repeat(4097));
        assert_eq!(description(&longest), Ok(longest.clone()));
        let error = description(&longer).unwrap_err();
        assert!(error.contains("at most 4096 bytes"), "{error}");
    }

    #[test]
    fn networks_and_single_addresses_are_read() {
        assert_eq!(network("10.0.0.0/8").unwrap().to_string(), "10.0.0.0/8");
        assert_eq!(network("::1").unwrap().to_string(), "::1/128");
        assert!(network("10.0.0.0/33").is_err() && network("host").is_err());
    }
}
