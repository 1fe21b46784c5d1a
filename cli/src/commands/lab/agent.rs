//! `diskwright lab agent`: makes load on this machine for the controller of a fleet.
//!
//! ```text
//!   targets and what may be done to them ─▶ LabKeeper ─┐
//!   key and certificate, pins or a token ──────────────┼─▶ Agent ─▶ serves until a signal comes
//!   --listen, --connect or --vsock ────────────────────┘
//! ```
//!
//! The address for the plan goes to standard output before the first controller can connect. What
//! happens goes to standard error.

use super::{agents::identity, words};
use crate::{
    context::Context,
    describe::printable,
    exit::{self, Failure, Outcome},
    json::Document,
};
use clap::Args;
use diskwright_fleet::{
    address::{ANY_CID, Address, PORT, Place},
    agent::{Agent, Event, Events},
    identity::Fingerprint,
    trust::{Token, Trust},
};
use diskwright_lab::{
    fleet::{LabKeeper, TargetOfAgent},
    open::OpenHow,
    prepare::PrepareOptions,
};
use diskwright_load::job::Bytes;
use schemars::JsonSchema;
use serde::Serialize;
use std::{
    io::Write,
    path::PathBuf,
    sync::{Arc, Mutex, mpsc},
    thread,
    time::Duration,
};

/// How often it is looked whether a signal has come.
const LOOK: Duration = Duration::from_millis(100);

/// Arguments of `lab agent`.
#[derive(Debug, Args)]
#[command(after_help = "\
The agent prints its address with the fingerprint of its certificate, and a token that is good once. \
Give this line to `lab fleet`. With --controller no token is made: only the controller with that \
fingerprint (`lab fleet --fingerprint` prints it) is admitted.

A controller can only choose among the TARGETs that are named here. It cannot write them with \
--read-only, and it cannot overwrite data without --destroy-data.

EXIT CODES  0 ended by a signal; 1 it could not start

EXAMPLES
  diskwright lab agent --listen 0.0.0.0:7407 data=/dev/nvme1n1 --read-only
  diskwright lab agent --listen 0.0.0.0:7407 test.dat --create-size 16G
  diskwright lab agent --connect CONTROLLER:7408#FINGERPRINT/TOKEN \\
      disk=/dev/vdb --destroy-data
  diskwright lab agent --vsock 7407 /dev/vdb")]
pub struct AgentArgs {
    /// Target that may be measured, with a name for plans (may be repeated). [default name: the
    /// target itself]
    #[arg(required = true, value_name = "[NAME=]TARGET")]
    targets: Vec<String>,
    /// Where to listen for a controller. [default: 127.0.0.1:7407]
    #[arg(long, value_name = "HOST[:PORT]", conflicts_with_all = ["connect", "vsock"])]
    listen: Option<String>,
    /// Connect to a controller that listens, by the address that it prints.
    #[arg(long, value_name = "ADDRESS", conflicts_with = "vsock")]
    connect: Option<String>,
    /// Listen on this port of virtual sockets, for the host of this virtual machine. On the host,
    /// put the virtual machine's CID in place of CID in the address.
    #[arg(long, value_name = "PORT")]
    vsock: Option<u32>,
    /// Admit the controller with this fingerprint (may be repeated), and no other one.
    #[arg(long, value_name = "FINGERPRINT")]
    controller: Vec<String>,
    /// Create targets that do not exist, with this size.
    #[arg(long, value_name = "SIZE", value_parser = words::size)]
    create_size: Option<Bytes>,
    /// Allow data on the targets to be overwritten.
    #[arg(long, conflicts_with = "read_only")]
    destroy_data: bool,
    /// Allow reading only.
    #[arg(long)]
    read_only: bool,
    /// File with the key and the certificate, made if missing. [default: in the user's state
    /// folder]
    #[arg(long, value_name = "FILE")]
    identity: Option<PathBuf>,
}

/// Where a controller reaches the agent.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The address for a plan, with the token if there is one.
    address: Option<String>,
    /// SHA-256 of the agent's certificate.
    fingerprint: String,
    /// Names of the targets.
    targets: Vec<String>,
}

impl Document for Report {
    const SCHEMA: &'static str = "diskwright.lab.agent/1";
}

/// Serves controllers until a signal comes.
pub fn run(context: &mut Context, args: &AgentArgs) -> Outcome {
    let targets: Vec<TargetOfAgent> = args.targets.iter().map(|text| named(text)).collect();
    if let Some(twice) = targets.iter().enumerate().find_map(|(number, target)| {
        targets[..number].iter().find(|other| other.name == target.name).map(|_| &target.name)
    }) {
        return Err(Failure::usage(format!("two targets are called {twice}; put a name before each: NAME=TARGET")));
    }
    let options = PrepareOptions {
        create_bytes: args.create_size.map(|size| size.0),
        fill: false,
        destroy_data: args.destroy_data,
        open: OpenHow { disk: context.global.open_options(false), ..OpenHow::default() },
    };
    let identity = identity(args.identity.as_deref(), "agent")?;
    let pinned: Vec<Fingerprint> =
        args.controller.iter().map(|text| text.parse().map_err(Failure::usage)).collect::<Outcome<_>>()?;
    let token = if pinned.is_empty() && args.connect.is_none() { Some(Token::random()?) } else { None };
    let trust = Trust::new(pinned, token.clone().into_iter().collect());
    let (events, inbox) = mpsc::channel();
    let events = Mutex::new(events);
    let events: Events = Arc::new(move |event| {
        let _ = events.lock().unwrap_or_else(std::sync::PoisonError::into_inner).send(event);
    });
    let names = targets.iter().map(|target| target.name.clone()).collect();
    let keeper = Box::new(LabKeeper::new(targets, !args.read_only, options));
    // Before the agent can be reached, so that a signal closes its targets.
    let patience = context.signals.patient();
    let agent = Agent::new(identity.clone(), trust, keeper, events);
    let address = begin(args, &agent, token.as_ref())?;
    let report = Report { address, fingerprint: identity.fingerprint.to_string(), targets: names };
    if context.global.json {
        context.print_json(&report)?;
    } else {
        match &report.address {
            Some(address) => writeln!(context.out, "{address}")?,
            None => writeln!(context.out, "fingerprint {}", report.fingerprint)?,
        }
    }
    context.out.flush()?;
    while !patience.should_stop() {
        if let Ok(event) = inbox.recv_timeout(LOOK) {
            context.warn(&printable(&sentence(&event)));
        }
    }
    agent.end();
    Ok(exit::OK)
}

/// Starts to listen or to connect, in a thread. Returns the address for the plan.
fn begin(args: &AgentArgs, agent: &Agent, token: Option<&Token>) -> Outcome<Option<String>> {
    if let Some(controller) = &args.connect {
        let controller: Address = controller.parse()?;
        let agent = agent.clone();
        thread::spawn(move || agent.dial(&controller));
        return Ok(None);
    }
    let place = match (&args.listen, args.vsock) {
        (_, Some(port)) => Place::Vsock(ANY_CID, port),
        (Some(text), None) => text.parse().map_err(|what| Failure::usage(format!("{text}: {what}")))?,
        (None, None) => Place::Tcp("127.0.0.1".into(), PORT),
    };
    let door = agent.door(&place)?;
    let shown = match door.place()? {
        // A controller needs a name for this machine.
        Place::Tcp(host, port) if ["0.0.0.0", "::"].contains(&host.as_str()) => {
            Place::Tcp(rustix::system::uname().nodename().to_string_lossy().into_owned(), port)
        }
        place => place,
    };
    let listening = agent.clone();
    thread::spawn(move || listening.listen(&door));
    let token = token.map(|token| format!("/{}", token.reveal())).unwrap_or_default();
    Ok(Some(format!("{shown}#{}{token}", agent.fingerprint())))
}

fn named(text: &str) -> TargetOfAgent {
    let (name, spec) = match text.split_once('=') {
        Some((name, spec)) if !name.is_empty() && !name.contains(['/', ':']) => (name, spec),
        _ => (text, text),
    };
    TargetOfAgent { name: name.to_owned(), spec: spec.to_owned() }
}

fn sentence(event: &Event) -> String {
    match event {
        Event::Admitted(peer) => format!("the controller {peer} is connected"),
        Event::Refused(why) => format!("a connection was refused: {why}"),
        Event::Begun(run) => format!("run {run} begins"),
        Event::Ended(None) => "the run is over, and the targets are closed".into(),
        Event::Ended(Some(why)) => format!("the run has failed, and the targets are closed: {why}"),
        Event::Unreachable(why) => format!("{why}; trying again"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_may_have_a_name() {
        let of = |text: &str| named(text);
        for (text, name, spec) in [
            ("data=/dev/vdb", "data", "/dev/vdb"),
            ("/dev/vdb", "/dev/vdb", "/dev/vdb"),
            ("nbd://host/a=b", "nbd://host/a=b", "nbd://host/a=b"),
            ("a=b=c", "a", "b=c"),
            ("null:", "null:", "null:"),
        ] {
            assert_eq!((of(text).name.as_str(), of(text).spec.as_str()), (name, spec));
        }
    }
}
