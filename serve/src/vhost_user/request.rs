//! A descriptor chain as a request of a block device (virtio 1.2, 5.2.6).
//!
//! ```text
//!   readable: type, reserved, sector (16 bytes), then the payload of a write, or a range
//!   writable: the payload of a read or the serial number, then one byte: the status
//! ```
//!
//! Header and payload may be divided into descriptors in any way. A chain without a byte for the
//! status cannot be answered, and ends the connection. Any other mistake is answered.

use super::{
    limits::{SECTOR_BYTES, TRANSFER_BYTES_MAX, ZEROED_SECTORS_MAX},
    memory::{GuestMemory, Place},
    vring::{Chain, Piece, RingError},
};
use diskwright_store::{Operation, Segments};
use virtio_bindings::virtio_blk as blk;

const HEADER_BYTES: u64 = 16;

/// The status byte of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Ok = blk::VIRTIO_BLK_S_OK as isize,
    Failed = blk::VIRTIO_BLK_S_IOERR as isize,
    Unsupported = blk::VIRTIO_BLK_S_UNSUPP as isize,
}

/// What a request asks for.
#[derive(Debug)]
pub(crate) enum Asked {
    /// A read into the payload.
    Read {
        offset_bytes: u64,
    },
    /// A write of the payload.
    Write {
        offset_bytes: u64,
    },
    /// A range to discard or to zero.
    Zero {
        operation: Operation,
        offset_bytes: u64,
        len_bytes: u64,
    },
    Flush,
    /// The serial number.
    Identity,
    /// Answered at once.
    Refused {
        status: Status,
        why: &'static str,
    },
}

/// A request whose memory was found.
#[derive(Debug)]
pub(crate) struct BlockRequest {
    pub(crate) asked: Asked,
    /// The byte for the status.
    pub(crate) status: Place,
}

/// Removes `count` bytes from the front of the pieces. `None` if there are fewer.
fn skip(pieces: &mut Vec<Piece>, count: u64) -> Option<()> {
    let mut left = count;
    let mut gone = 0;
    for piece in pieces.iter_mut() {
        if u64::from(piece.len_bytes) > left {
            piece.address = piece.address.checked_add(left)?;
            piece.len_bytes -= left as u32;
            left = 0;
            break;
        }
        left -= u64::from(piece.len_bytes);
        gone += 1;
    }
    pieces.drain(..gone);
    (left == 0).then_some(())
}

/// Copies bytes from the front of the pieces.
fn peek(memory: &GuestMemory, pieces: &[Piece], out: &mut [u8]) -> Option<()> {
    let mut done = 0;
    for piece in pieces {
        let now = (out.len() - done).min(piece.len_bytes as usize);
        memory.copy_out(piece.address, &mut out[done..done + now])?;
        done += now;
        if done == out.len() {
            return Some(());
        }
    }
    None
}

fn total_bytes(pieces: &[Piece]) -> u64 {
    // At most 1,026 pieces of less than 4 GiB.
    pieces.iter().map(|piece| u64::from(piece.len_bytes)).sum()
}

/// Reads the request of a chain. The memory of its payload is appended to `payload`.
///
/// # Errors
/// [`RingError::NoStatus`].
pub(crate) fn parse(
    memory: &GuestMemory,
    head: u16,
    chain: &mut Chain,
    payload: &mut Segments,
) -> Result<BlockRequest, RingError> {
    let Chain { readable, writable } = chain;
    let last = writable.last_mut().ok_or(RingError::NoStatus { head })?;
    last.len_bytes -= 1;
    let status_address = last.address.checked_add(last.len_bytes.into()).ok_or(RingError::NoStatus { head })?;
    if last.len_bytes == 0 {
        writable.pop();
    }
    let status = memory.byte(status_address).ok_or(RingError::NoStatus { head })?;
    let asked = ask(memory, readable, writable, payload);
    Ok(BlockRequest { asked: asked.unwrap_or_else(|why| Asked::Refused { status: Status::Failed, why }), status })
}

fn ask(
    memory: &GuestMemory,
    readable: &mut Vec<Piece>,
    writable: &[Piece],
    payload: &mut Segments,
) -> Result<Asked, &'static str> {
    let mut header = [0; HEADER_BYTES as usize];
    peek(memory, readable, &mut header).ok_or("its header is too short or outside the guest's memory")?;
    skip(readable, HEADER_BYTES).ok_or("its header ends beyond the last address")?;
    let [t0, t1, t2, t3, _, _, _, _, sector @ ..] = header;
    let kind = u32::from_le_bytes([t0, t1, t2, t3]);
    let offset = || u64::from_le_bytes(sector).checked_mul(SECTOR_BYTES).ok_or("its sector is beyond the last one");
    let mut payload_of = |pieces: &[Piece]| {
        if total_bytes(pieces) > TRANSFER_BYTES_MAX {
            return Err("its payload is too long");
        }
        pieces.iter().try_for_each(|piece| {
            let appended = memory.append(piece.address, piece.len_bytes.into(), payload);
            appended.map_err(|_| "its payload is not in the guest's memory, or in too many pieces")
        })
    };
    match kind {
        blk::VIRTIO_BLK_T_IN => {
            payload_of(writable)?;
            Ok(Asked::Read { offset_bytes: offset()? })
        }
        blk::VIRTIO_BLK_T_OUT => {
            payload_of(readable)?;
            Ok(Asked::Write { offset_bytes: offset()? })
        }
        blk::VIRTIO_BLK_T_FLUSH => Ok(Asked::Flush),
        blk::VIRTIO_BLK_T_GET_ID => {
            payload_of(writable)?;
            Ok(Asked::Identity)
        }
        blk::VIRTIO_BLK_T_DISCARD | blk::VIRTIO_BLK_T_WRITE_ZEROES => {
            let mut range = [0; 16];
            if total_bytes(readable) != range.len() as u64 {
                return Err("it does not name exactly one range");
            }
            peek(memory, readable, &mut range).ok_or("its range is not in the guest's memory")?;
            Ok(zero(kind, range))
        }
        _ => Ok(Asked::Refused { status: Status::Unsupported, why: "its type is not known" }),
    }
}

/// The request for a range (`struct virtio_blk_discard_write_zeroes`).
fn zero(kind: u32, range: [u8; 16]) -> Asked {
    let [sector @ .., c0, c1, c2, c3, f0, f1, f2, f3] = range;
    let count = u32::from_le_bytes([c0, c1, c2, c3]);
    let flags = u32::from_le_bytes([f0, f1, f2, f3]);
    let is_discard = kind == blk::VIRTIO_BLK_T_DISCARD;
    let known = if is_discard { 0 } else { blk::VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP };
    if flags & !known != 0 {
        return Asked::Refused { status: Status::Unsupported, why: "its flags are not known" };
    }
    let Some(offset_bytes) = u64::from_le_bytes(sector).checked_mul(SECTOR_BYTES) else {
        return Asked::Refused { status: Status::Failed, why: "its sector is beyond the last one" };
    };
    if count > ZEROED_SECTORS_MAX {
        return Asked::Refused { status: Status::Failed, why: "its range is too long" };
    }
    // A discarded range reads as zeros too, so a write-zeroes that may unmap is a discard.
    let operation = if is_discard || flags != 0 { Operation::Discard } else { Operation::WriteZeroes };
    Asked::Zero { operation, offset_bytes, len_bytes: u64::from(count) * SECTOR_BYTES }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(lens: &[u32]) -> Vec<Piece> {
        lens.iter()
            .scan(0, |at, &len_bytes| {
                *at += 1000;
                Some(Piece { address: *at, len_bytes })
            })
            .collect()
    }

    #[test]
    fn a_header_may_be_divided() {
        let mut found = pieces(&[5, 11, 100]);
        skip(&mut found, 16).unwrap();
        assert_eq!(found, [Piece { address: 3000, len_bytes: 100 }]);
        let mut found = pieces(&[20, 4]);
        skip(&mut found, 16).unwrap();
        assert_eq!(found, [Piece { address: 1016, len_bytes: 4 }, Piece { address: 2000, len_bytes: 4 }]);
        assert!(skip(&mut pieces(&[15]), 16).is_none());
        let mut at_the_end = vec![Piece { address: u64::MAX - 3, len_bytes: 20 }];
        assert!(skip(&mut at_the_end, 16).is_none());
    }

    #[test]
    fn ranges_are_checked() {
        let range = |sector: u64, count: u32, flags: u32| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&sector.to_le_bytes());
            bytes[8..12].copy_from_slice(&count.to_le_bytes());
            bytes[12..].copy_from_slice(&flags.to_le_bytes());
            bytes
        };
        let operation = |kind, flags| match zero(kind, range(8, 16, flags)) {
            Asked::Zero { operation, offset_bytes: 4096, len_bytes: 8192 } => Some(operation),
            _ => None,
        };
        assert_eq!(operation(blk::VIRTIO_BLK_T_DISCARD, 0), Some(Operation::Discard));
        assert_eq!(operation(blk::VIRTIO_BLK_T_DISCARD, 1), None);
        assert_eq!(operation(blk::VIRTIO_BLK_T_WRITE_ZEROES, 0), Some(Operation::WriteZeroes));
        assert_eq!(operation(blk::VIRTIO_BLK_T_WRITE_ZEROES, 1), Some(Operation::Discard));
        assert_eq!(operation(blk::VIRTIO_BLK_T_WRITE_ZEROES, 2), None);
        for (sector, count) in [(1 << 56, 1), (0, ZEROED_SECTORS_MAX + 1)] {
            let refused = zero(blk::VIRTIO_BLK_T_DISCARD, range(sector, count, 0));
            assert!(matches!(refused, Asked::Refused { status: Status::Failed, .. }), "{refused:?}");
        }
    }
}
