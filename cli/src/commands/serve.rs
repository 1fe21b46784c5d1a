//! `diskwright serve [NAME=]FILE[,format=FORMAT]...`: serves disks by NBD, or one disk to a virtual
//! machine by vhost-user, until a signal comes.
//!
//! ```text
//!   FILEs ─▶ disks (read-only, or with a temporary child) ─▶ exports ─┐
//!   --nbd, LISTEN_FDS ─▶ listeners ───────────────────────────────────┼─▶ NbdServer ─▶ READY=1 ─┐
//!   --tls-certificates ─▶ rustls ─────────────────────────────────────┘                         │
//!   --vhost-user ─▶ socket ─────────────────────────────────▶ VhostUserServer ─▶ (the same) ────┤
//!   wait: SIGHUP reads the certificates again; SIGTERM, Ctrl-C: finish, flush, close  ◀─────────┘
//! ```
//!
//! Both doors may be open for one disk (`doors.rs`): each has queues of its own on it.
//!
//! Exports and addresses go to standard output before the first client can connect. The log goes to
//! standard error.

mod args;
mod config;
mod doors;
mod live;
mod log;
mod word;

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    sizes::Human,
    switches,
};
pub use args::ServeArgs;
use config::Config;
use diskwright_disk::{Disk, DiskError, Layer, Movable, Opened};
use diskwright_nbd::tls::TlsError;
use diskwright_serve::{
    control::{Channel, Host, HostedDisk},
    ephemeral,
    nbd::{Address, Export, Listener, NbdServer, ServerOptions},
    scrape::{Page, Scrape},
    vhost_user::{VhostUserOptions, VhostUserServer},
};
use diskwright_store::{BlockDevice, LimitedDevice, RateLimiter};
use doors::Doors;
use live::LiveLine;
use schemars::JsonSchema;
use sd_notify::NotifyState;
use serde::Serialize;
use std::{
    fmt::Write as _,
    io::Write as _,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use word::DiskWord;

/// Interval at which the live line is drawn and the server is looked at.
const TICK: Duration = Duration::from_millis(500);

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
    /// The socket of the vhost-user device.
    vhost_user: Option<String>,
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
    check_doors(args)?;
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
    let nbd = match listeners.is_empty() {
        true => None,
        false => Some(NbdServer::start(exports, listeners, options).map_err(sentence)?),
    };
    let vhost_user = match (&args.vhost_user, &served[..]) {
        (Some(socket), [disk]) => {
            let listener = Listener::bind(&Address::Unix(socket.clone())).map_err(sentence)?;
            let options = VhostUserOptions { name: disk.name.clone(), queues: args.vhost_queues };
            Some(VhostUserServer::start(disk.device(), listener, options).map_err(sentence)?)
        }
        _ => None,
    };
    let server = Doors { nbd, vhost_user };
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
            live.show(&server.totals());
        }
    }
    drop(live);
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping");
    channel.iter().for_each(Channel::close_gate);
    let mut ended = server.stop();
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
fn reload_config(file: &Path, config: Option<&Config>, server: &Doors, served: &[Served]) -> Option<Config> {
    let newer = match config::read(file) {
        Ok(newer) => newer,
        Err(error) => {
            tracing::error!("configuration not reloaded; the old one stays in use: {error}");
            return None;
        }
    };
    let restart = config.map(|config| config.needs_restart(&newer)).unwrap_or_default();
    let client_limits = newer.args.client_limit.unwrap_or_default();
    server.nbd.iter().for_each(|nbd| nbd.set_client_limits(client_limits));
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

fn reload_certificates(args: &ServeArgs, server: &Doors) {
    match certificates(args) {
        Ok(Some(tls)) => {
            server.nbd.iter().for_each(|nbd| nbd.set_tls(Arc::clone(&tls)));
            tracing::info!("certificates reloaded");
        }
        Ok(None) => tracing::info!("no certificates to reload: the server has none"),
        Err(error) => tracing::error!(%error, "certificates not reloaded; the old ones stay in use"),
    }
}

/// The control channel, if a disk is open for writing. Without it the disks are served all the
/// same.
fn open_channel(context: &Context, server: &Doors, served: &[Served]) -> Option<Channel> {
    let held = served.iter().map(|Served { name, disk, limiter, .. }| HostedDisk {
        name: name.clone(),
        disk: Arc::clone(disk),
        limiter: Arc::clone(limiter),
    });
    let signals = context.signals.clone();
    let host = Host {
        command: "serve",
        metrics: server.metrics().next().cloned(),
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

/// Refuses what the doors that are asked for cannot do.
fn check_doors(args: &ServeArgs) -> Outcome<()> {
    if args.vhost_user.is_none() {
        return Ok(());
    }
    if args.disks.len() != 1 {
        return Err(Failure::usage(
            "--vhost-user serves one disk, since a socket is one disk of the machine; start a server for each",
        ));
    }
    let about_nbd = args.tls_certificates.is_some()
        || !args.allow.is_empty()
        || args.insecure_writes
        || args.client_limit.is_some();
    if args.nbd.is_empty() && about_nbd {
        return Err(Failure::usage(
            "--tls-certificates, --allow, --client-limit and --insecure-writes are about NBD, which is not served: add --nbd ADDRESS",
        ));
    }
    Ok(())
}

fn listen(args: &ServeArgs) -> Outcome<Vec<Listener>> {
    let mut listeners = Vec::new();
    for address in &args.nbd {
        listeners.push(Listener::bind(address).map_err(sentence)?);
    }
    if listeners.is_empty() {
        listeners = Listener::handed_over().map_err(sentence)?;
    }
    if listeners.is_empty() && args.vhost_user.is_none() {
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
    server: &Doors,
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
        let vhost_user = server.vhost_user.as_ref().map(|device| device.address().to_string());
        context.print_json(&Report { addresses, vhost_user, metrics, exports })?;
    } else if !context.global.quiet {
        for export in &exports {
            let how = match export {
                ExportReport { ephemeral: true, .. } => ", writes are dropped at the end",
                ExportReport { read_only: true, .. } => ", read-only",
                _ => "",
            };
            writeln!(context.text(), "{}: {}{how}", printable(&export.file), Human(export.virtual_size))?;
            for uri in &export.uris {
                writeln!(context.out, "  {uri}")?;
            }
        }
        if let Some(device) = &server.vhost_user {
            let socket = device.address().to_string();
            writeln!(context.text(), "  vhost-user: {} ({} queues)", printable(&socket), args.vhost_queues)?;
        }
        if let Some(metrics) = metrics {
            writeln!(context.out, "metrics: http://{}/metrics", printable(&metrics))?;
        }
    }
    context.out.flush()?;
    Ok(())
}

/// The server's metrics, and for each export its size and the space of its file.
fn page(server: &Doors, served: &[Served]) -> Page {
    let metrics: Vec<_> = server.metrics().cloned().collect();
    let disks: Vec<(String, Arc<Movable>)> =
        served.iter().map(|served| (label(&served.name), Arc::clone(&served.disk))).collect();
    Arc::new(move || {
        let mut out: String = metrics.iter().map(|one| one.prometheus()).collect();
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
}
