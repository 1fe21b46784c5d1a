//! Carries out one command of `io` in pieces, so that memory does not depend on the length of the
//! range.

use super::words::Command;
use crate::signals::Patience;
use diskwright_store::Blocking;
use std::{
    fmt,
    io::{self, Write},
};

const PIECE_BYTES: u64 = 1 << 20;
const DUMP_COLUMNS: usize = 16;

/// What a command did.
#[derive(Debug, Default)]
pub struct Transfer {
    verb: &'static str,
    /// First byte of the range.
    pub offset_bytes: u64,
    /// Length of the range in bytes.
    pub len_bytes: u64,
    /// Where a read first differed from its pattern, and the byte found there.
    pub first_difference: Option<(u64, u8)>,
}

/// As qemu-io prints it.
impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.len_bytes {
            0 => f.write_str(self.verb),
            len => write!(f, "{} {len}/{len} bytes at offset {}", self.verb, self.offset_bytes),
        }
    }
}

/// Carries out `command`. A dump goes to `out`. A signal ends the command between two pieces.
///
/// # Errors
/// A sentence, when the disk refuses or fails.
pub fn carry_out(
    queue: &mut Blocking,
    command: &Command,
    out: &mut dyn Write,
    may_dump: bool,
    patience: &Patience,
) -> Result<Transfer, String> {
    let sentence = |error: io::Error| error.to_string();
    match *command {
        Command::Read { offset_bytes, len_bytes, pattern, dump } => {
            check_range(queue, offset_bytes, len_bytes)?;
            let mut transfer = Transfer { verb: "read", offset_bytes, len_bytes, first_difference: None };
            let mut buf = vec![0; PIECE_BYTES.min(len_bytes) as usize];
            for (at_bytes, piece_bytes) in pieces(offset_bytes, len_bytes) {
                if patience.should_stop() {
                    break;
                }
                let piece = &mut buf[..piece_bytes];
                queue.read(at_bytes, piece).map_err(sentence)?;
                if let Some(pattern) = pattern
                    && transfer.first_difference.is_none()
                {
                    let differs = piece.iter().position(|&byte| byte != pattern);
                    transfer.first_difference = differs.map(|index| (at_bytes + index as u64, piece[index]));
                }
                if dump && may_dump {
                    hex_dump(out, at_bytes, piece).map_err(sentence)?;
                }
            }
            Ok(transfer)
        }
        Command::Write { offset_bytes, len_bytes, pattern, fua } => {
            check_range(queue, offset_bytes, len_bytes)?;
            match pattern {
                Some(pattern) => {
                    let buf = vec![pattern; PIECE_BYTES.min(len_bytes) as usize];
                    for (at_bytes, piece_bytes) in pieces(offset_bytes, len_bytes) {
                        if patience.should_stop() {
                            break;
                        }
                        queue.write(at_bytes, &buf[..piece_bytes], fua).map_err(sentence)?;
                    }
                }
                None => {
                    queue.write_zeroes(offset_bytes, len_bytes).map_err(sentence)?;
                    // A blocking queue has no FUA for zeroes; a flush makes them durable too.
                    if fua {
                        queue.flush().map_err(sentence)?;
                    }
                }
            }
            Ok(Transfer { verb: "wrote", offset_bytes, len_bytes, first_difference: None })
        }
        Command::Discard { offset_bytes, len_bytes } => {
            queue.discard(offset_bytes, len_bytes).map_err(sentence)?;
            Ok(Transfer { verb: "discard", offset_bytes, len_bytes, first_difference: None })
        }
        Command::Flush => {
            queue.flush().map_err(sentence)?;
            Ok(Transfer { verb: "flush", ..Transfer::default() })
        }
    }
}

// Refuses the whole range at once: a write that fails at its last piece would have written all the
// others.
fn check_range(queue: &Blocking, offset_bytes: u64, len_bytes: u64) -> Result<(), String> {
    let geometry = queue.geometry();
    let sector_bytes = u64::from(geometry.logical_sector_bytes);
    for (what, bytes) in [("offset", offset_bytes), ("length", len_bytes)] {
        if bytes % sector_bytes != 0 {
            return Err(format!("the {what} {bytes} is not a multiple of the disk's sector of {sector_bytes} bytes"));
        }
    }
    if offset_bytes.checked_add(len_bytes).is_none_or(|end_bytes| end_bytes > geometry.size_bytes) {
        return Err(format!(
            "offset {offset_bytes} and length {len_bytes} reach beyond the disk's end at {}",
            geometry.size_bytes
        ));
    }
    Ok(())
}

fn pieces(offset_bytes: u64, len_bytes: u64) -> impl Iterator<Item = (u64, usize)> {
    (0..len_bytes.div_ceil(PIECE_BYTES)).map(move |index| {
        let done_bytes = index * PIECE_BYTES;
        (offset_bytes + done_bytes, (len_bytes - done_bytes).min(PIECE_BYTES) as usize)
    })
}

fn hex_dump(out: &mut dyn Write, offset_bytes: u64, bytes: &[u8]) -> io::Result<()> {
    for (index, line) in bytes.chunks(DUMP_COLUMNS).enumerate() {
        let hex: Vec<String> = line.iter().map(|byte| format!("{byte:02x}")).collect();
        let text: String =
            line.iter().map(|&byte| if byte.is_ascii_graphic() { char::from(byte) } else { '.' }).collect();
        writeln!(out, "{:08x}:  {}  {text}", offset_bytes + (index * DUMP_COLUMNS) as u64, hex.join(" "))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_range() {
        let all: Vec<_> = pieces(512, 2 * PIECE_BYTES + 512).collect();
        assert_eq!(
            all,
            [(512, PIECE_BYTES as usize), (512 + PIECE_BYTES, PIECE_BYTES as usize), (512 + 2 * PIECE_BYTES, 512)]
        );
        assert_eq!(pieces(0, 0).count(), 0);
    }

    #[test]
    fn a_dump_looks_like_qemu_ios() {
        let mut out = Vec::new();
        hex_dump(&mut out, 0x200, b"conectix\0\x01\x02ABCDE").unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "00000200:  63 6f 6e 65 63 74 69 78 00 01 02 41 42 43 44 45  conectix...ABCDE\n"
        );
    }
}
