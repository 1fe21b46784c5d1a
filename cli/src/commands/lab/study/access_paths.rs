//! `diskwright lab study access-paths`.

use super::guest::GuestArgs;
use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    sizes,
};
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use diskwright_lab::{
    network::NetworkSpec,
    study::access_paths::{self, AccessPath, AccessPathsOptions},
    targets::Container,
};

/// Arguments of `lab study access-paths`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-access-paths-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a fifth of it (at most 30 s) warm-up. [default: 30s; 600ms with --quick]"
    )),
    after_help = "\
Reaches one disk in several ways: in process (= 100), over NBD, NVMe/TCP and iSCSI, and as an \
attached block device; for comparison a raw file in process and with qemu-nbd. From a virtual machine \
(QEMU), on a scale of its own: as a vhost-user disk (= 100), over NVMe/TCP, iSCSI and SMB. The load is \
that of NetApp's paper on SMB 3.0, iSCSI and FC: twenty clients with 2, 4 and 6 outstanding requests \
each, 8K random, 70 % reads. Reports requests per second, response times, and the CPU time of client \
and server. Every cell begins with the disk as it was filled; in the virtual machine every way does. \
A quick study measures the virtual machine once, and not over the network. Ways that need root, \
a missing program or a missing kernel are skipped. Use a release build.

The paper's cell length and rounds: --cell 930s --rounds 2.

NETWORK  As root, the ways over TCP are measured over loopback and over an emulated network: a \
virtual Ethernet with a round trip and a rate (tc: netem; without netem only the rate).

KERNEL  --kernel DIR with vmlinuz and lib/modules/VERSION; else the folder DISKWRIGHT_GUEST_DIR; \
else ~/.cache/diskwright/guest; else this machine's kernel in /boot.

EXIT CODES  0 done; 1 it could not be measured; 130 stopped (whole rounds are saved; servers, devices \
and scratch files are removed)

EXAMPLES
  sudo diskwright lab study access-paths --quick
  sudo diskwright lab study access-paths --network rtt=2ms,rate=1G
  diskwright lab study access-paths --dir /mnt/nvme --disk vhd-dynamic \\
      --size 20G --no-guest
  diskwright lab study access-paths --quick --only nvme-tcp,iscsi
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

pub fn run(context: &mut Context, args: &AccessPathsArgs) -> Outcome {
    let options = AccessPathsOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        disk: Some(args.disk.container()),
        program: Some(AccessPathsOptions::own_program()?),
        only: AccessPath::ALL.into_iter().filter(|way| args.only.iter().any(|word| word == way.word())).collect(),
        network: args.network.0,
        guest: if args.no_guest { None } else { Some(args.guest.choice()?) },
    };
    let mut steps = context.steps();
    let report = access_paths::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
