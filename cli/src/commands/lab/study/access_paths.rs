//! `diskwright lab study access-paths`.

use super::guest::GuestArgs;
use crate::{
    commands::{
        experiment::{self, ExperimentArgs},
        lab::agents::AgentsArgs,
    },
    context::Context,
    exit::{self, Outcome},
    sizes,
};
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use diskwright_lab::{
    network::NetworkSpec,
    study::access_paths::{self, AccessPath, AccessPathsOptions, AgentServer, AgentsChoice},
    targets::Container,
};
use std::io::Write;

/// Arguments of `lab study access-paths`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-access-paths-TIME.json in the current folder]"
    )),
    mut_arg("agent", |arg| arg
        .help("Agent with some of the clients, by the address that it prints (may be repeated). A name may stand before it.")),
    mut_arg("lost_after", |arg| arg.requires("agent")),
    mut_arg("identity", |arg| arg.requires("agent")),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a fifth of it (at most 30 s) warm-up. [default: 30s; 600ms with --quick]"
    )),
    after_help = "\
Reaches one disk in several ways: in process (= 100), over NBD, NVMe/TCP and iSCSI, and as an \
attached block device; for comparison a raw file in process and with qemu-nbd. From a virtual machine \
(QEMU), on a scale of its own: as a vhost-user disk (= 100), over NVMe/TCP, iSCSI and SMB. From other \
machines, on a third scale: the agents of a fleet over NBD (= 100), NVMe/TCP and iSCSI. The load is \
that of NetApp's paper on SMB 3.0, iSCSI and FC: twenty clients with 2, 4 and 6 outstanding requests \
each, 8K random, 70 % reads. Reports requests per second, response times, and the CPU time of client \
and server. Every cell begins with the disk as it was filled; in the virtual machine and by agents every way does. \
A quick study measures the virtual machine once, and not over the network. Ways that need root, \
a missing program or a missing kernel are skipped. Use a release build.

The paper's cell length and rounds: --cell 930s --rounds 2.

NETWORK  As root, the ways over TCP are measured over loopback and over an emulated network: a \
virtual Ethernet with a round trip and a rate (tc: netem; without netem only the rate).

KERNEL  --kernel DIR with vmlinuz and lib/modules/VERSION; else the folder DISKWRIGHT_GUEST_DIR; \
else ~/.cache/diskwright/guest; else this machine's kernel in /boot.

AGENTS  Start an agent on each machine with the command line that --agent-command prints, and give \
the address that it prints with --agent. The twenty clients are spread over the agents: with 20 agents \
each is one client. The disk with its test data is served without TLS at --agent-server, and what \
agents write is dropped. If an agent fails, the rounds before are saved.

EXIT CODES  0 done; 1 it could not be measured, or an agent failed; 130 stopped (whole rounds are saved; servers, devices \
and scratch files are removed)

EXAMPLES
  sudo diskwright lab study access-paths --quick
  sudo diskwright lab study access-paths --network rtt=2ms,rate=1G
  diskwright lab study access-paths --dir /mnt/nvme --disk vhd-dynamic \\
      --size 20G --no-guest
  diskwright lab study access-paths --quick --only nvme-tcp,iscsi
  diskwright lab study access-paths --agent-server 10.0.0.1 --agent-command
  diskwright lab study access-paths --only agent-nbd,agent-nvme \\
      --agent-server 10.0.0.1 --agent db1:7407#3f2a.../91bc... \\
      --agent db2:7407#77e0.../5d21...
  diskwright lab report diskwright-access-paths-*.json -o paths.html"
)]
pub struct AccessPathsArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Format and type of the disk.
    #[arg(long, value_enum, default_value_t = Disk::VhdxDynamic)]
    disk: Disk,
    /// Size of the disk. [default: 16G; 256M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    /// Measure these ways alone, and what they are compared with.
    #[arg(long, value_name = "WAY", value_delimiter = ',', value_parser = way_parser())]
    only: Vec<String>,
    /// Round trip and rate of the emulated network, in bits per second; or none.
    #[arg(long, value_name = "SPEC", default_value = "rtt=200us,rate=10G", value_parser = network)]
    network: Network,
    /// Measure nothing in a virtual machine.
    #[arg(long, conflicts_with_all = ["kernel", "accelerator"])]
    no_guest: bool,
    #[command(flatten)]
    guest: GuestArgs,
    #[command(flatten)]
    agents: AgentsArgs,
    /// Where the servers listen for agents. With a port this port and the next two are used, else
    /// the usual ones of NBD, NVMe/TCP and iSCSI.
    #[arg(long, value_name = "HOST[:PORT]", default_value_t = AgentServer::default(), help_heading = "Agents")]
    agent_server: AgentServer,
    /// Print the command line with which an agent is started for this study.
    #[arg(long, help_heading = "Agents")]
    agent_command: bool,
}

/// The ways by their words.
fn way_parser() -> PossibleValuesParser {
    PossibleValuesParser::new(AccessPath::ALL.map(AccessPath::word))
}

/// A network, or none.
#[derive(Debug, Clone, Copy)]
struct Network(Option<NetworkSpec>);

fn network(text: &str) -> Result<Network, String> {
    if text == "none" { Ok(Network(None)) } else { text.parse().map(|spec| Network(Some(spec))) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Disk {
    /// A fully allocated dynamic VHDX.
    VhdxDynamic,
    /// A fixed VHDX.
    VhdxFixed,
    /// A fully allocated dynamic VHD.
    VhdDynamic,
    /// A fixed VHD.
    VhdFixed,
    /// A raw file.
    Raw,
}

impl Disk {
    fn container(self) -> Container {
        match self {
            Self::VhdxDynamic => Container::VhdxDynamic,
            Self::VhdxFixed => Container::VhdxFixed,
            Self::VhdDynamic => Container::VhdDynamic,
            Self::VhdFixed => Container::VhdFixed,
            Self::Raw => Container::Raw,
        }
    }
}

/// The agents; `None` if none is named.
fn agents(args: &AccessPathsArgs) -> Outcome<Option<AgentsChoice>> {
    let server = args.agent_server.clone();
    let agents = args.agents.of_study(&[], false)?;
    Ok(agents.map(|agents| AgentsChoice { wanted: agents.wanted, fleet: agents.options, server }))
}

pub fn run(context: &mut Context, args: &AccessPathsArgs) -> Outcome {
    if args.agent_command {
        // A shell would take the question mark of a URI as a pattern.
        let targets: Vec<String> = args.agent_server.targets().iter().map(|target| format!("'{target}'")).collect();
        let line = format!("diskwright lab agent --listen 0.0.0.0:7407 --destroy-data {}", targets.join(" "));
        writeln!(context.out, "{line}")?;
        return Ok(exit::OK);
    }
    let options = AccessPathsOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        disk: Some(args.disk.container()),
        program: Some(AccessPathsOptions::own_program()?),
        only: AccessPath::ALL.into_iter().filter(|way| args.only.iter().any(|word| word == way.word())).collect(),
        network: args.network.0,
        agents: agents(args)?,
        guest: if args.no_guest { None } else { Some(args.guest.choice()?) },
    };
    let mut steps = context.steps();
    let report = access_paths::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
