//! `diskwright serve [NAME=]FILE[,format=FORMAT]...`: serves disks by NBD, NVMe/TCP and iSCSI, and
//! to virtual machines by vhost-user, until a signal comes.
//!
//! ```text
//!   FILEs ─▶ disks (read-only, or with a temporary child) ─▶ exports ─┐
//!   --nbd, --nvme, --iscsi, LISTEN_FDS ─▶ listeners ──────────────────┼─▶ Server ─▶ READY=1 ─┐
//!   --tls-certificates ─▶ rustls ─────────────────────────────────────┘                      │
//!   --vhost-user ─▶ socket ─────────────────────────────────▶ VhostUserServer ─▶ (the same) ─┤
//!   wait: SIGHUP reads files again; SIGTERM, Ctrl-C: finish, flush, close  ◀─────────────────┘
//! ```
//!
//! Any mix of doors may be open for a disk (`doors.rs`): each has queues of its own on it.
//!
//! Exports and addresses go to standard output before the first client can connect. The log goes to
//! standard error.

mod args;
mod config;
mod disks;
mod doors;
mod live;
mod log;
mod machine;
mod names;
mod word;

use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::{self, Document},
    sizes::Human,
    switches,
};
pub use args::{ServeArgs, VHOST_QUEUES};
use config::Config;
use disks::{Opener, Served};
use diskwright_disk::Disk;
use diskwright_nbd::tls::TlsError;
use diskwright_serve::{
    Keyring,
    control::{Channel, DoorKeeper, Host},
    iscsi,
    metrics::{Metrics, label},
    nbd,
    net::{Address, Listener, ServerOptions},
    nvme,
    reservations::ReservationTable,
    scrape::{Page, Scrape},
};
use diskwright_store::{BlockDevice, secrets::Secrets};
use doors::{Doors, Network};
use live::LiveLine;
use schemars::JsonSchema;
use sd_notify::NotifyState;
use serde::Serialize;
use std::{fmt::Write as _, io::Write as _, path::Path, sync::Arc, time::Duration};
pub use word::DiskWord;

/// Interval at which the live line is drawn and the server is looked at.
const TICK: Duration = Duration::from_millis(500);

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
    /// Where NVMe hosts find it, one for each address: its subsystem, and its namespace.
    nvme: Vec<String>,
    /// Where iSCSI initiators find it, one for each address: its target, and its logical unit.
    iscsi: Vec<String>,
    /// The sockets at which it is the disk of a virtual machine.
    vhost_user: Vec<String>,
    /// Warnings, a sentence each.
    warnings: Vec<String>,
}

/// What `serve --json` prints once clients can connect.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The addresses on which the NBD server listens.
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
    check_doors(args)?;
    let opener = Opener::of(&context.global, args);
    let mut served = Vec::new();
    for word in &args.disks {
        let disk = opener.open(word.clone(), &served)?;
        disk.disk.disk().warnings().iter().for_each(|warning| context.warn(warning));
        served.push(disk);
    }
    let tls = certificates(args).map_err(sentence)?;
    let listeners = listen(args)?;
    let nvme_listeners = bind(&args.nvme)?;
    let iscsi_listeners = bind(&args.iscsi)?;
    let description = args.description.clone().unwrap_or_default();
    let exports: Vec<_> = served.iter().map(|served| doors::export(served, &description)).collect();
    let reservations = Arc::new(match &args.reservations {
        Some(dir) => ReservationTable::kept_in(dir),
        None => ReservationTable::default(),
    });
    served.iter().try_for_each(|served| reservations.load(&served.name)).map_err(sentence)?;
    let secrets = args.secrets.as_deref().map(Secrets::read).transpose().map_err(sentence)?;
    let keyring = secrets.map(|secrets| Arc::new(Keyring::new(secrets)));
    let options = ServerOptions {
        workers: args.threads.unwrap_or(0).into(),
        connections_max: args.connections,
        requests_max: args.requests,
        client_limits: args.client_limit.unwrap_or_default(),
        tls,
        tls_on_unix: args.tls_on_unix,
        allowed: args.allow.clone(),
        insecure_writes: args.insecure_writes,
        secrets: keyring.clone(),
        reservations: Arc::clone(&reservations),
        ..ServerOptions::default()
    };
    let mut servers = Vec::new();
    let without_tls = ServerOptions { tls: None, ..options.clone() };
    // First, because it claims bytes of disks, which the others must know before they write.
    if let Some(target) = names::target_of(args) {
        let server = iscsi::start(&target, exports.clone(), iscsi_listeners, without_tls.clone());
        servers.push((Network::Iscsi, server.map_err(sentence)?));
    }
    if let Some(subsystem) = names::subsystem_of(args) {
        let server = nvme::start(&subsystem, exports.clone(), nvme_listeners, without_tls);
        servers.push((Network::Nvme, server.map_err(sentence)?));
    }
    if !listeners.is_empty() {
        servers.push((Network::Nbd, nbd::start(exports, listeners, options).map_err(sentence)?));
    }
    let server = Arc::new(Doors::of(opener, description, reservations, served, servers));
    for word in &args.vhost_user {
        let disk = &args.disks[word.disk_among(&args.disks)?];
        server.open_for_machine(&disk.name, &word.socket, args.vhost_queues)?;
    }
    let scrape = match &args.metrics {
        Some(address) => Some(Scrape::start(address, page(Arc::clone(&server))).map_err(sentence)?),
        None => None,
    };
    let channel = open_channel(context, &server);
    announce(context, args, &server, scrape.as_ref())?;
    notify(&[NotifyState::Ready]);
    let mut live = args.progress.then(LiveLine::new);
    while !patience.should_stop() && server.is_well() {
        patience.sleep(if live.is_some() { TICK } else { 4 * TICK });
        if patience.was_hung_up() {
            let newer = file.and_then(|file| reload_config(file, config.as_ref(), &server));
            reload_certificates(newer.as_ref().map_or(args, |newer| &newer.args), &server);
            if let Some((keyring, path)) = keyring.as_deref().zip(args.secrets.as_deref()) {
                reload_secrets(path, keyring, !server.addresses(Network::Nvme).is_empty());
            }
        }
        if let Some(live) = &mut live {
            live.show(&server.totals());
        }
    }
    drop(live);
    notify(&[NotifyState::Stopping]);
    tracing::info!("stopping");
    channel.iter().for_each(Channel::close_gate);
    let ended = server.stop();
    drop(scrape);
    if let Some(channel) = channel {
        channel.end(ended.as_ref().copied().map_err(ToString::to_string));
    }
    ended?;
    tracing::info!("stopped");
    Ok(exit::OK)
}

/// Reads the configuration again, and replaces the limits.
fn reload_config(file: &Path, config: Option<&Config>, server: &Doors) -> Option<Config> {
    let newer = match config::read(file) {
        Ok(newer) => newer,
        Err(error) => {
            tracing::error!("configuration not reloaded; the old one stays in use: {error}");
            return None;
        }
    };
    let restart = config.map(|config| config.needs_restart(&newer)).unwrap_or_default();
    let client_limits = newer.args.client_limit.unwrap_or_default();
    server.set_client_limits(client_limits);
    if !restart.iter().any(|key| key == config::DISK) {
        let disks = server.disks();
        for (word, limits) in newer.args.disks.iter().zip(newer.limits()) {
            // Limits that stay keep what was reserved. A disk may have been removed.
            let served = disks.iter().find(|served| served.name == word.name);
            if let Some(served) = served.filter(|served| served.limiter.limits() != limits) {
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
            server.set_tls(&tls);
            tracing::info!("certificates reloaded");
        }
        Ok(None) => tracing::info!("no certificates to reload: the server has none"),
        Err(error) => tracing::error!(%error, "certificates not reloaded; the old ones stay in use"),
    }
}

/// `has_hosts`: the secrets are also those of NVMe hosts.
fn reload_secrets(path: &Path, keyring: &Keyring, has_hosts: bool) {
    let read = Secrets::read(path).map_err(|error| error.to_string()).and_then(|secrets| {
        let checked = if has_hosts { nvme::check_keys(&secrets) } else { Ok(()) };
        checked.map(|()| secrets).map_err(|error| error.to_string())
    });
    match read {
        Ok(secrets) => {
            keyring.replace(secrets);
            tracing::info!("secrets reloaded");
        }
        Err(error) => tracing::error!("secrets not reloaded; the old ones stay in use: {error}"),
    }
}

/// The control channel, if a disk is open for writing. Without it the disks are served all the
/// same.
fn open_channel(context: &Context, server: &Arc<Doors>) -> Option<Channel> {
    let held = server.disks().iter().map(Served::hosted).collect();
    let counted = Arc::clone(server);
    let signals = context.signals.clone();
    let host = Host {
        command: "serve",
        metrics: Box::new(move || counted.metrics()),
        doors: Ok(Arc::clone(server) as Arc<dyn DoorKeeper>),
        on_drain: Ok(Box::new(move || signals.stop())),
        freezer: None,
        on_change: None,
    };
    Channel::open(held, host).unwrap_or_else(|error| {
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

fn certificates(args: &ServeArgs) -> Result<Option<Arc<rustls::ServerConfig>>, TlsError> {
    let Some(dir) = &args.tls_certificates else { return Ok(None) };
    diskwright_nbd::tls::server(dir, !args.tls_any_client).map(Some)
}

/// Refuses what the doors that are asked for cannot do.
fn check_doors(args: &ServeArgs) -> Outcome<()> {
    args.vhost_user.iter().try_for_each(|word| word.disk_among(&args.disks).map(drop))?;
    let nbd_is_served = !args.nbd.is_empty() || !args.has_other_doors();
    if !nbd_is_served && args.tls_certificates.is_some() {
        return Err(Failure::usage("--tls-certificates is about NBD, which is not served: add --nbd ADDRESS"));
    }
    if args.secrets.is_some() && args.nvme.is_empty() && args.iscsi.is_empty() {
        let sentence =
            "--secrets is about NVMe/TCP and iSCSI, which are not served: add --nvme ADDRESS or --iscsi ADDRESS";
        return Err(Failure::usage(sentence));
    }
    let about_network = !args.allow.is_empty() || args.insecure_writes || args.client_limit.is_some();
    if !nbd_is_served && args.nvme.is_empty() && args.iscsi.is_empty() && about_network {
        return Err(Failure::usage(
            "--allow, --client-limit and --insecure-writes are about the network, where nothing is served: add --nbd ADDRESS, --nvme ADDRESS or --iscsi ADDRESS",
        ));
    }
    Ok(())
}

fn bind(addresses: &[Address]) -> Outcome<Vec<Listener>> {
    addresses.iter().map(|address| Listener::bind(address).map_err(sentence)).collect()
}

fn listen(args: &ServeArgs) -> Outcome<Vec<Listener>> {
    let mut listeners = bind(&args.nbd)?;
    if listeners.is_empty() {
        listeners = Listener::handed_over().map_err(sentence)?;
    }
    if listeners.is_empty() && !args.has_other_doors() {
        listeners.push(Listener::bind(&Address::Unix(names::usual_socket())).map_err(sentence)?);
    }
    Ok(listeners)
}

fn announce(context: &mut Context, args: &ServeArgs, server: &Doors, scrape: Option<&Scrape>) -> Outcome<()> {
    let addresses = server.addresses(Network::Nbd);
    let (nvme, iscsi) = (server.addresses(Network::Nvme), server.addresses(Network::Iscsi));
    let (subsystem, target) =
        (names::subsystem_of(args).unwrap_or_default(), names::target_of(args).unwrap_or_default());
    let exports: Vec<ExportReport> = server
        .disks()
        .iter()
        .zip(0..)
        .map(|(Served { name, path, disk, .. }, lun)| {
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
                uris: addresses.iter().map(|address| names::uri(address, name, tls(address))).collect(),
                nvme: nvme.iter().map(|address| names::nvme_uri(address, &subsystem, lun + 1)).collect(),
                iscsi: iscsi.iter().map(|address| names::iscsi_uri(address, &target, lun)).collect(),
                vhost_user: server.sockets_of(name).iter().map(|(socket, _)| json::path(socket)).collect(),
                warnings: switches::all_with_switches(disk.disk().warnings()),
            }
        })
        .collect();
    let metrics = scrape.map(|scrape| scrape.address().to_string());
    if context.global.json {
        let addresses = addresses.iter().map(ToString::to_string).collect();
        context.print_json(&Report { addresses, metrics, exports })?;
    } else if !context.global.quiet {
        for export in &exports {
            let how = match export {
                ExportReport { ephemeral: true, .. } => ", writes are dropped at the end",
                ExportReport { read_only: true, .. } => ", read-only",
                _ => "",
            };
            writeln!(context.text(), "{}: {}{how}", printable(&export.file), Human(export.virtual_size))?;
            for uri in export.uris.iter().chain(&export.nvme).chain(&export.iscsi) {
                writeln!(context.out, "  {uri}")?;
            }
            for (socket, queues) in server.sockets_of(&export.name) {
                writeln!(context.text(), "  vhost-user: {} ({queues} queues)", printable(&json::path(&socket)))?;
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
fn page(server: Arc<Doors>) -> Page {
    Arc::new(move || {
        let mut out = Metrics::prometheus(&server.metrics());
        let disks = server.disks();
        let mut gauge = |name: &str, help: &str, of: &dyn Fn(&Disk) -> Option<u64>| {
            let _ = writeln!(out, "# HELP {name} {help}\n# TYPE {name} gauge");
            for Served { name: export, disk, .. } in &disks {
                if let Some(value) = of(&disk.disk()) {
                    let _ = writeln!(out, "{name}{{export=\"{}\"}} {value}", label(export));
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
