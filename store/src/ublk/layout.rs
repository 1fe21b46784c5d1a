//! The structs of `linux/ublk_cmd.h` as bytes, and their conversion to and from Rust values. Pure.

use crate::{Geometry, Operation};
use rustix::ioctl::{Opcode, opcode};

/// Sizes of `struct ublksrv_ctrl_cmd`, `struct ublksrv_io_cmd` and `struct ublksrv_io_desc`.
pub(super) const CONTROL_COMMAND_BYTES: usize = 32;
pub(super) const IO_COMMAND_BYTES: usize = 16;
pub(super) const DESCRIPTOR_BYTES: usize = 24;
/// Room for a command in an entry of 128 bytes.
pub(super) const COMMAND_BYTES: usize = 80;
/// Size of `struct ublksrv_ctrl_dev_info`, and of the part of `struct ublk_params` that is set
/// here.
pub(super) const PAYLOAD_BYTES: usize = 64;
/// Size of the feature bits.
pub(super) const FEATURES_BYTES: u16 = 8;

/// Maximum number of requests in flight that the kernel allows (`UBLK_MAX_QUEUE_DEPTH`).
const QUEUE_DEPTH_MAX: u16 = 4096;
/// Maximum length of one transfer (`UBLK_IO_BUF_BITS`).
const TRANSFER_BYTES_MAX: u32 = 32 << 20;

const GROUP: u8 = b'u';

pub(super) mod command {
    use super::*;
    type Control = [u8; CONTROL_COMMAND_BYTES];
    type Io = [u8; IO_COMMAND_BYTES];

    pub(in crate::ublk) const GET_DEVICE_INFO: Opcode = opcode::read::<Control>(GROUP, 0x02);
    pub(in crate::ublk) const ADD_DEVICE: Opcode = opcode::read_write::<Control>(GROUP, 0x04);
    pub(in crate::ublk) const DELETE_DEVICE: Opcode = opcode::read_write::<Control>(GROUP, 0x05);
    pub(in crate::ublk) const START_DEVICE: Opcode = opcode::read_write::<Control>(GROUP, 0x06);
    pub(in crate::ublk) const STOP_DEVICE: Opcode = opcode::read_write::<Control>(GROUP, 0x07);
    pub(in crate::ublk) const SET_PARAMETERS: Opcode = opcode::read_write::<Control>(GROUP, 0x08);
    pub(in crate::ublk) const START_RECOVERY: Opcode = opcode::read_write::<Control>(GROUP, 0x10);
    pub(in crate::ublk) const END_RECOVERY: Opcode = opcode::read_write::<Control>(GROUP, 0x11);
    pub(in crate::ublk) const UPDATE_SIZE: Opcode = opcode::read_write::<Control>(GROUP, 0x15);
    pub(in crate::ublk) const GET_FEATURES: Opcode = opcode::read::<Control>(GROUP, 0x13);
    pub(in crate::ublk) const FETCH: Opcode = opcode::read_write::<Io>(GROUP, 0x20);
    pub(in crate::ublk) const COMMIT_AND_FETCH: Opcode = opcode::read_write::<Io>(GROUP, 0x21);
}

/// `UBLK_F_USER_RECOVERY` and `UBLK_F_USER_RECOVERY_REISSUE`: the device outlives its server, and
/// requests in flight go to the next one.
const FEATURES_RECOVERY: u64 = 1 << 3 | 1 << 4;

/// `UBLK_F_CMD_IOCTL_ENCODE`.
pub(super) const FEATURE_IOCTL_ENCODE: u64 = 1 << 6;

/// `UBLK_F_NO_AUTO_PART_SCAN`, from Linux 7.0.
pub(super) const FEATURE_NO_PARTITION_SCAN: u64 = 1 << 18;

/// `UBLK_F_UPDATE_SIZE`, from Linux 6.16.
pub(super) const FEATURE_UPDATE_SIZE: u64 = 1 << 10;

/// The size of a device for [`command::UPDATE_SIZE`]: in sectors of 512 bytes.
pub(super) fn size_in_sectors(size_bytes: u64) -> u64 {
    size_bytes / SECTOR_BYTES
}

/// Operation codes in a descriptor.
mod operation {
    pub(super) const READ: u8 = 0;
    pub(super) const WRITE: u8 = 1;
    pub(super) const FLUSH: u8 = 2;
    pub(super) const DISCARD: u8 = 3;
    pub(super) const WRITE_ZEROES: u8 = 5;
}

const IO_FORCE_UNIT_ACCESS: u32 = 1 << 13;
const IO_KEEP_SPACE: u32 = 1 << 15;

const ATTRIBUTE_READ_ONLY: u32 = 1;
const ATTRIBUTE_VOLATILE_CACHE: u32 = 1 << 2;
const ATTRIBUTE_FORCE_UNIT_ACCESS: u32 = 1 << 3;

const PARAMETERS_BASIC: u32 = 1;
const PARAMETERS_DISCARD: u32 = 1 << 1;

/// `UBLK_S_DEV_DEAD`: added but not started. Other states are live, or live without a server.
const STATE_DEAD: u16 = 0;
/// `UBLK_S_DEV_QUIESCED`: started, and its server has died.
const STATE_QUIESCED: u16 = 2;

/// Distance of the descriptors of two queues in the mapping of `/dev/ublkcN`: room for the largest
/// queue, in whole pages.
pub(super) fn descriptors_stride_bytes() -> u64 {
    (u64::from(QUEUE_DEPTH_MAX) * DESCRIPTOR_BYTES as u64).next_multiple_of(rustix::param::page_size() as u64)
}

/// The unit of lengths and offsets, whatever the device's sector size.
const SECTOR_BYTES: u64 = 512;

/// Maximum length of a discard: parts of the kernel count bytes in 32 bits.
const DISCARD_SECTORS_MAX: u64 = (u32::MAX >> 9) as u64;

/// Parameters for adding a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkDevice {
    /// Number of queues, each served by a thread.
    pub queues: u16,
    /// Maximum number of requests in flight on each queue.
    pub queue_depth: u16,
    /// Maximum length of one transfer: a multiple of the page size.
    pub transfer_bytes: u32,
    /// Any number but 0, which identifies the device to the program that added it.
    pub mark: u64,
    /// Whether the device outlives its server: requests wait for the next one. Otherwise they fail.
    pub outlives_server: bool,
}

/// The kernel's information on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkFacts {
    /// The device number.
    pub number: u32,
    /// The parameters with which it was added.
    pub device: UblkDevice,
    /// Whether `/dev/ublkbN` exists.
    pub is_started: bool,
    /// Whether it is started and waits for another server.
    pub is_quiesced: bool,
}

/// A request from the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UblkOperation {
    /// What to do. Write-zeroes that may free space becomes a discard, which reads as zeros here.
    pub operation: Operation,
    /// First byte.
    pub offset_bytes: u64,
    /// Length in bytes.
    pub len_bytes: u64,
    /// Whether to complete the request only when it is durable.
    pub fua: bool,
}

/// `struct ublksrv_ctrl_cmd`, padded to the room in an entry.
pub(super) fn control_command(number: u32, payload: Option<(u64, u16)>, data: u64) -> [u8; COMMAND_BYTES] {
    let (address, len_bytes) = payload.unwrap_or_default();
    let mut bytes = [0; COMMAND_BYTES];
    put(&mut bytes, 0, &number.to_ne_bytes());
    // No queue: the command is for the whole device.
    put(&mut bytes, 4, &u16::MAX.to_ne_bytes());
    put(&mut bytes, 6, &len_bytes.to_ne_bytes());
    put(&mut bytes, 8, &address.to_ne_bytes());
    put(&mut bytes, 16, &data.to_ne_bytes());
    bytes
}

/// `struct ublksrv_io_cmd`.
pub(super) fn io_command(queue: u16, tag: u16, result: i32, address: u64) -> [u8; IO_COMMAND_BYTES] {
    let mut bytes = [0; IO_COMMAND_BYTES];
    put(&mut bytes, 0, &queue.to_ne_bytes());
    put(&mut bytes, 2, &tag.to_ne_bytes());
    put(&mut bytes, 4, &result.to_ne_bytes());
    put(&mut bytes, 8, &address.to_ne_bytes());
    bytes
}

/// `struct ublksrv_ctrl_dev_info` for a new device with any free number. `driver`: the feature bits
/// of the driver.
pub(super) fn device_info(device: &UblkDevice, driver: u64) -> [u8; PAYLOAD_BYTES] {
    let mut bytes = [0; PAYLOAD_BYTES];
    put(&mut bytes, 0, &device.queues.to_ne_bytes());
    put(&mut bytes, 2, &device.queue_depth.to_ne_bytes());
    put(&mut bytes, 8, &device.transfer_bytes.to_ne_bytes());
    put(&mut bytes, 12, &u32::MAX.to_ne_bytes());
    let recovery = if device.outlives_server { FEATURES_RECOVERY } else { 0 };
    let features = FEATURE_IOCTL_ENCODE | recovery | driver & FEATURE_NO_PARTITION_SCAN;
    put(&mut bytes, 24, &features.to_ne_bytes());
    put(&mut bytes, 32, &device.mark.to_ne_bytes());
    bytes
}

/// Decodes the kernel's answer; `None` if a value is out of range.
pub(super) fn facts(bytes: &[u8; PAYLOAD_BYTES]) -> Option<UblkFacts> {
    let device = UblkDevice {
        queues: u16::from_ne_bytes(get(bytes, 0)),
        queue_depth: u16::from_ne_bytes(get(bytes, 2)),
        transfer_bytes: u32::from_ne_bytes(get(bytes, 8)),
        mark: u64::from_ne_bytes(get(bytes, 32)),
        outlives_server: u64::from_ne_bytes(get(bytes, 24)) & FEATURES_RECOVERY == FEATURES_RECOVERY,
    };
    let state = u16::from_ne_bytes(get(bytes, 4));
    let is_possible = device.queues > 0
        && (1..=QUEUE_DEPTH_MAX).contains(&device.queue_depth)
        && device.transfer_bytes <= TRANSFER_BYTES_MAX;
    is_possible.then(|| UblkFacts {
        number: u32::from_ne_bytes(get(bytes, 12)),
        device,
        is_started: state != STATE_DEAD,
        is_quiesced: state == STATE_QUIESCED,
    })
}

/// The beginning of `struct ublk_params`: basic parameters and those of discards. `transfer_bytes`
/// as given when the device was added.
pub(super) fn parameters(geometry: &Geometry, transfer_bytes: u32) -> [u8; PAYLOAD_BYTES] {
    /// Where the discard parameters end; what follows is not sent.
    const LEN_BYTES: u32 = 60;
    let mut attributes = ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FORCE_UNIT_ACCESS;
    if geometry.read_only {
        attributes |= ATTRIBUTE_READ_ONLY;
    }
    let shift = |bytes: u32| bytes.max(SECTOR_BYTES as u32).ilog2() as u8;
    let logical = shift(geometry.logical_sector_bytes);
    let physical = shift(geometry.physical_sector_bytes).max(logical);
    let sector_mask = u64::from(geometry.logical_sector_bytes) / SECTOR_BYTES - 1;
    let zero_sectors = if geometry.read_only { 0 } else { (DISCARD_SECTORS_MAX & !sector_mask) as u32 };
    let mut bytes = [0; PAYLOAD_BYTES];
    put(&mut bytes, 0, &LEN_BYTES.to_ne_bytes());
    put(&mut bytes, 4, &(PARAMETERS_BASIC | PARAMETERS_DISCARD).to_ne_bytes());
    put(&mut bytes, 8, &attributes.to_ne_bytes());
    // Shifts of the logical and physical sector, then of optimal and minimum transfer size.
    put(&mut bytes, 12, &[logical, physical, physical, physical]);
    put(&mut bytes, 16, &(transfer_bytes >> 9).to_ne_bytes());
    put(&mut bytes, 24, &(geometry.size_bytes / SECTOR_BYTES).to_ne_bytes());
    put(&mut bytes, 44, &(1u32 << physical).to_ne_bytes());
    put(&mut bytes, 48, &zero_sectors.to_ne_bytes());
    put(&mut bytes, 52, &zero_sectors.to_ne_bytes());
    put(&mut bytes, 56, &1u16.to_ne_bytes());
    bytes
}

/// Decodes `struct ublksrv_io_desc`; `None` for an operation that the device does not offer.
pub(super) fn request(bytes: &[u8; DESCRIPTOR_BYTES]) -> Option<UblkOperation> {
    let word = u32::from_ne_bytes(get(bytes, 0));
    let operation = match word as u8 {
        operation::READ => Operation::Read,
        operation::WRITE => Operation::Write,
        // Its range has no meaning; Linux 6.12 sets the last sector.
        operation::FLUSH => {
            return Some(UblkOperation { operation: Operation::Flush, offset_bytes: 0, len_bytes: 0, fua: false });
        }
        operation::DISCARD => Operation::Discard,
        operation::WRITE_ZEROES if word & IO_KEEP_SPACE != 0 => Operation::WriteZeroes,
        operation::WRITE_ZEROES => Operation::Discard,
        _ => return None,
    };
    Some(UblkOperation {
        operation,
        offset_bytes: u64::from_ne_bytes(get(bytes, 8)).checked_mul(SECTOR_BYTES)?,
        len_bytes: u64::from(u32::from_ne_bytes(get(bytes, 4))) * SECTOR_BYTES,
        fua: word & IO_FORCE_UNIT_ACCESS != 0,
    })
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..][..value.len()].copy_from_slice(value);
}

fn get<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut value = [0; N];
    value.copy_from_slice(&bytes[at..][..N]);
    value
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: UblkDevice = UblkDevice {
        queues: 2,
        queue_depth: 128,
        transfer_bytes: 256 << 10,
        mark: 0x1234_5678_9abc_def0,
        outlives_server: true,
    };

    fn descriptor(word: u32, sectors: u32, first: u64) -> [u8; DESCRIPTOR_BYTES] {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        put(&mut bytes, 0, &word.to_ne_bytes());
        put(&mut bytes, 4, &sectors.to_ne_bytes());
        put(&mut bytes, 8, &first.to_ne_bytes());
        bytes
    }

    #[test]
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    fn command_codes_match_the_kernel() {
        assert_eq!(command::ADD_DEVICE, 0xC020_7504);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(command::UPDATE_SIZE, 0xC020_7515);
        assert_eq!((command::START_RECOVERY, command::END_RECOVERY), (0xC020_7510, 0xC020_7511));
        assert_eq!(command::FETCH, 0xC010_7520);
    }

    #[test]
    fn a_fetch_names_its_queue_and_its_tag() {
        let bytes = io_command(3, 7, -5, 0x1000);
        assert_eq!((u16::from_ne_bytes(get(&bytes, 0)), u16::from_ne_bytes(get(&bytes, 2))), (3, 7));
        assert_eq!((i32::from_ne_bytes(get(&bytes, 4)), u64::from_ne_bytes(get(&bytes, 8))), (-5, 0x1000));
        assert_eq!(descriptors_stride_bytes() % rustix::param::page_size() as u64, 0);
        assert!(descriptors_stride_bytes() >= 4096 * 24);
    }

    /// `ublk_ctrl_set_size` reads the new size from the command's first data word, in sectors of
    /// 512 bytes.
    #[test]
    fn a_new_size_is_sent_in_sectors() {
        let bytes = control_command(7, None, size_in_sectors(3 << 30));
        assert_eq!(u32::from_ne_bytes(get(&bytes, 0)), 7);
        assert_eq!(u16::from_ne_bytes(get(&bytes, 4)), u16::MAX);
        assert_eq!(u64::from_ne_bytes(get(&bytes, 8)), 0, "no payload");
        assert_eq!(u64::from_ne_bytes(get(&bytes, 16)), (3 << 30) / 512);
    }

    #[test]
    fn device_parameters_survive_encoding() {
        let mut bytes = device_info(&DEVICE, u64::MAX);
        assert_eq!(u64::from_ne_bytes(get(&bytes, 24)), 1 << 18 | 1 << 6 | 1 << 4 | 1 << 3);
        put(&mut bytes, 12, &7u32.to_ne_bytes());
        assert_eq!(facts(&bytes), Some(UblkFacts { number: 7, device: DEVICE, is_started: false, is_quiesced: false }));
        let state = |bytes: &mut [u8; PAYLOAD_BYTES], state: u16| {
            put(bytes, 4, &state.to_ne_bytes());
            facts(bytes).map(|facts| (facts.is_started, facts.is_quiesced)).unwrap()
        };
        assert_eq!((state(&mut bytes, 1), state(&mut bytes, 2)), ((true, false), (true, true)));
        let dies_with_it = UblkDevice { outlives_server: false, ..DEVICE };
        assert_eq!(facts(&device_info(&dies_with_it, 0)).unwrap().device, dies_with_it);
        put(&mut bytes, 2, &0u16.to_ne_bytes());
        assert_eq!(facts(&bytes), None, "a queue depth of 0");
    }

    #[test]
    fn geometry_becomes_device_parameters() {
        let mut geometry =
            Geometry { size_bytes: 3 << 30, logical_sector_bytes: 512, physical_sector_bytes: 4096, read_only: false };
        let bytes = parameters(&geometry, DEVICE.transfer_bytes);
        assert_eq!(bytes[12..16], [9, 12, 12, 12]);
        assert_eq!(u32::from_ne_bytes(get(&bytes, 8)), 0b1100);
        assert_eq!(u32::from_ne_bytes(get(&bytes, 16)), 512);
        assert_eq!(u64::from_ne_bytes(get(&bytes, 24)), (3 << 30) / 512);
        assert_eq!(u32::from_ne_bytes(get(&bytes, 48)), u32::MAX >> 9);
        geometry = Geometry { logical_sector_bytes: 4096, read_only: true, ..geometry };
        let bytes = parameters(&geometry, DEVICE.transfer_bytes);
        assert_eq!((bytes[12], u32::from_ne_bytes(get(&bytes, 8)) & 1), (12, 1));
        assert_eq!(u32::from_ne_bytes(get(&bytes, 48)), 0, "a read-only device has no discard");
        geometry.read_only = false;
        let bytes = parameters(&geometry, DEVICE.transfer_bytes);
        assert_eq!(u32::from_ne_bytes(get(&bytes, 48)) % 8, 0, "whole sectors");
    }

    #[test]
    fn requests_are_decoded() {
        let asked = |word, sectors, first| request(&descriptor(word, sectors, first)).map(|it| (it.operation, it.fua));
        assert_eq!(asked(0, 8, 16), Some((Operation::Read, false)));
        assert_eq!(asked(1 | IO_FORCE_UNIT_ACCESS | 1 << 11, 8, 16), Some((Operation::Write, true)));
        assert_eq!(asked(2, 0, u64::MAX), Some((Operation::Flush, false)));
        assert_eq!(asked(3, 8, 0), Some((Operation::Discard, false)));
        assert_eq!(asked(5, 8, 0), Some((Operation::Discard, false)));
        assert_eq!(asked(5 | IO_KEEP_SPACE, 8, 0), Some((Operation::WriteZeroes, false)));
        assert_eq!(asked(13, 8, 0), None, "a zone append");
        assert_eq!(asked(0, 8, u64::MAX / 8), None, "the offset overflows");
        let read = request(&descriptor(0, 8, 16)).unwrap();
        assert_eq!((read.offset_bytes, read.len_bytes), (8192, 4096));
    }
}
