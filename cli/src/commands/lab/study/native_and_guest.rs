//! `diskwright lab study native-and-guest`.

use super::guest::GuestArgs;
use crate::{
    commands::experiment::{self, ExperimentArgs},
    context::Context,
    exit::Outcome,
    sizes,
};
use clap::Args;
use diskwright_lab::study::native_and_guest::{self, NativeAndGuestOptions};

/// Arguments of `lab study native-and-guest`.
#[derive(Debug, Args)]
#[command(
    mut_arg("output", |arg| arg.help(
        "File for the result. [default: diskwright-native-and-guest-TIME.json in the current folder]"
    )),
    mut_arg("rounds", |arg| arg.help("Rounds of each cell. [default: 5; 3 with --quick]")),
    mut_arg("cell", |arg| arg.help(
        "Time per cell, a sixth of it (at most 1 s) warm-up. [default: 10s; 400ms with --quick]"
    )),
    after_help = "\
Measures a raw file, a fixed VHD and a dynamic VHDX on this host and in a virtual machine (QEMU, \
vhost-user-blk), as the paper on VHD performance does with Hyper-V. Both ways lead to the same open \
disk, so to the same blocks. A disk that completes every request at once shows the limit of the \
virtual machine. The guest boots a kernel with this program and no other software.

Where KVM does not work, QEMU emulates the guest's processor. Its IOPS are those of the emulation \
then, and the verdict compares what does not depend on the guest's speed: CPU time of the server, and \
the requests that reach it.

KERNEL  --kernel DIR with vmlinuz and lib/modules/VERSION; else the folder DISKWRIGHT_GUEST_DIR; \
else ~/.cache/diskwright/guest; else this machine's kernel in /boot.

EXIT CODES  0 done; 1 it could not be measured; 130 stopped (whole rounds are saved; the guest and \
scratch files are removed)

EXAMPLES
  diskwright lab study native-and-guest --quick
  diskwright lab study native-and-guest --dir /mnt/nvme --size 40G \\
      --kernel ~/guest
  diskwright lab report diskwright-native-and-guest-*.json -o guest.html"
)]
pub struct NativeAndGuestArgs {
    #[command(flatten)]
    experiment: ExperimentArgs,
    /// Size of each disk. [default: 8G; 256M with --quick]
    #[arg(long, value_name = "SIZE", value_parser = sizes::parse)]
    size: Option<u64>,
    #[command(flatten)]
    guest: GuestArgs,
}

pub fn run(context: &mut Context, args: &NativeAndGuestArgs) -> Outcome {
    let options = NativeAndGuestOptions {
        study: args.experiment.study(&context.global),
        size_bytes: args.size,
        guest: args.guest.choice()?,
    };
    let mut steps = context.steps();
    let report = native_and_guest::run(&options, &mut steps);
    drop(steps);
    experiment::conclude(context, report)
}
