//! The control device: adds, configures, starts, stops and deletes devices.
//!
//! A command is an entry of 128 bytes on a small ring of its own, since the ring of the queues has
//! entries of 64. The kernel executes it in a worker thread, and the calling thread waits. Some
//! commands take long: starting a device ends when its partitions have been read (before Linux
//! 7.0), which its server must serve meanwhile; stopping ends when dirty data has been written. The
//! thread that starts or stops a device must therefore not be the one that serves it.
//!
//! While a command runs, the kernel reads and writes a payload of 64 bytes. The payload is in a
//! box, which is leaked if the command is given up.

#![allow(unsafe_code)]

use super::layout::{
    self, COMMAND_BYTES, FEATURE_IOCTL_ENCODE, FEATURE_UPDATE_SIZE, FEATURES_BYTES, PAYLOAD_BYTES, UblkDevice,
    UblkFacts, command,
};
use crate::Geometry;
use io_uring::{IoUring, cqueue, opcode, squeue, types};
use nix::libc;
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    ioctl::Opcode,
};
use std::{
    io,
    os::fd::{AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

/// Path of the control device.
pub const UBLK_CONTROL: &str = "/dev/ublk-control";

/// How long a command may take. The kernel gives up on the requests of a dead server after 30 s.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(90);

/// Device number that means "any free number".
const ANY: u32 = u32::MAX;

type Payload = Box<[u8; PAYLOAD_BYTES]>;

/// A handle to the control device; see the module documentation.
pub struct UblkControl {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    file: OwnedFd,
    /// Feature bits of the driver.
    features: u64,
    /// Number of the last command, which distinguishes its answer from a late one.
    commands: u64,
}

impl std::fmt::Debug for UblkControl {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UblkControl").field("commands", &self.commands).finish_non_exhaustive()
    }
}

impl UblkControl {
    /// Opens the control device and checks the driver's version.
    ///
    /// # Errors
    /// `NotFound` if there is no driver, `PermissionDenied` without the necessary rights,
    /// `Unsupported` if the driver is too old.
    pub fn open() -> io::Result<Self> {
        let file = rustix::fs::open(UBLK_CONTROL, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let ring = IoUring::builder().build(4)?;
        let mut control = Self { ring, file, features: 0, commands: 0 };
        let too_old =
            || io::Error::new(io::ErrorKind::Unsupported, "its ublk driver is too old; Linux 6.5 or later is needed");
        let (_, features) = control
            .run(command::GET_FEATURES, ANY, Some((Payload::new([0; PAYLOAD_BYTES]), FEATURES_BYTES)), 0)
            .map_err(|error| match Errno::from_io_error(&error) {
                Some(Errno::PERM | Errno::ACCESS) => error,
                _ => too_old(),
            })?;
        let word: [u8; 8] = features[..8].try_into().expect("eight bytes");
        control.features = u64::from_ne_bytes(word);
        if control.features & FEATURE_IOCTL_ENCODE == 0 {
            return Err(too_old());
        }
        Ok(control)
    }

    /// Adds a device with a free number and returns the number. `/dev/ublkcN` then appears. From
    /// Linux 7.0 the kernel does not scan it for partitions: a guest wrote the table.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn add(&mut self, device: &UblkDevice) -> io::Result<u32> {
        let payload = Payload::new(layout::device_info(device, self.features));
        let (_, said) = self.run(command::ADD_DEVICE, ANY, Some((payload, PAYLOAD_BYTES as u16)), 0)?;
        let facts = layout::facts(&said).ok_or_else(nonsense)?;
        Ok(facts.number)
    }

    /// Sets sizes and attributes of a device that is not started.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn describe(&mut self, number: u32, geometry: &Geometry, transfer_bytes: u32) -> io::Result<()> {
        let payload = Payload::new(layout::parameters(geometry, transfer_bytes));
        self.run(command::SET_PARAMETERS, number, Some((payload, PAYLOAD_BYTES as u16)), 0).map(drop)
    }

    /// Starts a device whose queue the process `server` serves. `/dev/ublkbN` appears, and its
    /// partitions are read.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn start(&mut self, number: u32, server: u32) -> io::Result<()> {
        self.run(command::START_DEVICE, number, None, server.into()).map(drop)
    }

    /// Begins to give a device whose server has died to another one. That one then opens its queue
    /// and fetches every tag.
    ///
    /// # Errors
    /// `EBUSY` until the kernel has seen the end of the former server; otherwise the kernel's
    /// error.
    pub fn start_recovery(&mut self, number: u32) -> io::Result<()> {
        self.run(command::START_RECOVERY, number, None, 0).map(drop)
    }

    /// Gives the device to the process `server`, which has fetched every tag. Requests that waited
    /// go on; those that were in flight are made again.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn end_recovery(&mut self, number: u32, server: u32) -> io::Result<()> {
        self.run(command::END_RECOVERY, number, None, server.into()).map(drop)
    }

    /// Changes the size of a device. Its server need not do anything.
    ///
    /// # Errors
    /// `Unsupported` if the driver cannot do this (before Linux 6.16); otherwise the kernel's
    /// error.
    pub fn update_size(&mut self, number: u32, size_bytes: u64) -> io::Result<()> {
        if self.features & FEATURE_UPDATE_SIZE == 0 {
            let what = "its ublk driver cannot change the size of a device; Linux 6.16 or later is needed";
            return Err(io::Error::new(io::ErrorKind::Unsupported, what));
        }
        self.run(command::UPDATE_SIZE, number, None, layout::size_in_sectors(size_bytes)).map(drop)
    }

    /// Stops a device: dirty data is written, `/dev/ublkbN` disappears, and every fetch ends with
    /// ENODEV.
    ///
    /// # Errors
    /// The kernel's error; `ENODEV` if the device does not exist.
    pub fn stop(&mut self, number: u32) -> io::Result<()> {
        self.run(command::STOP_DEVICE, number, None, 0).map(drop)
    }

    /// Stops and deletes a device, and waits until no process has its `/dev/ublkcN` open.
    ///
    /// # Errors
    /// The kernel's error; `ENODEV` if the device does not exist.
    pub fn delete(&mut self, number: u32) -> io::Result<()> {
        self.run(command::DELETE_DEVICE, number, None, 0).map(drop)
    }

    /// Queries a device.
    ///
    /// # Errors
    /// `ENODEV` if the device does not exist.
    pub fn facts(&mut self, number: u32) -> io::Result<UblkFacts> {
        let payload = Payload::new([0; PAYLOAD_BYTES]);
        let (_, said) = self.run(command::GET_DEVICE_INFO, number, Some((payload, PAYLOAD_BYTES as u16)), 0)?;
        layout::facts(&said).ok_or_else(nonsense)
    }

    /// Runs a command. Returns its result and the final contents of the payload.
    fn run(
        &mut self,
        operation: Opcode,
        number: u32,
        payload: Option<(Payload, u16)>,
        data: u64,
    ) -> io::Result<(i32, [u8; PAYLOAD_BYTES])> {
        self.commands += 1;
        let number_of_command = self.commands;
        let (mut payload, len_bytes) = match payload {
            Some((payload, len_bytes)) => (Some(payload), len_bytes),
            None => (None, 0),
        };
        let address = payload.as_mut().map(|payload| (payload.as_mut_ptr() as u64, len_bytes));
        let bytes: [u8; COMMAND_BYTES] = layout::control_command(number, address, data);
        let entry = opcode::UringCmd80::new(types::Fd(self.file.as_raw_fd()), operation)
            .cmd(bytes)
            .build()
            .user_data(number_of_command);
        // SAFETY: the entry names the payload, which holds at least `len_bytes` and is kept below
        // until the answer has come, or leaked. The file stays open as long as the ring.
        unsafe { self.ring.submission().push(&entry) }.map_err(io::Error::other)?;
        match self.wait(number_of_command) {
            Ok(result) if result < 0 => Err(io::Error::from_raw_os_error(-result)),
            Ok(result) => Ok((result, payload.map_or([0; PAYLOAD_BYTES], |payload| *payload))),
            Err(error) => {
                // The command may still be running.
                std::mem::forget(payload);
                Err(error)
            }
        }
    }

    fn wait(&mut self, wanted: u64) -> io::Result<i32> {
        let start = Instant::now();
        loop {
            let left = COMMAND_TIMEOUT.saturating_sub(start.elapsed());
            let time = types::Timespec::from(left);
            match self.ring.submitter().submit_with_args(1, &types::SubmitArgs::new().timespec(&time)) {
                Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => return Err(error),
                _ => {}
            }
            // Answers to commands that were given up are discarded.
            if let Some(answer) = self.ring.completion().find(|answer| answer.user_data() == wanted) {
                return Ok(answer.result());
            }
            if left.is_zero() {
                let what = format!("the kernel's ublk driver has not answered for {} s", COMMAND_TIMEOUT.as_secs());
                return Err(io::Error::new(io::ErrorKind::TimedOut, what));
            }
        }
    }
}

fn nonsense() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the ublk driver sent an invalid answer")
}
