//! Replies: how the result of a request is sent in each framing.

use super::{
    connection::{Connection, State},
    dispatch::Dispatcher,
    flights::{ClientRequest, Contents},
    outbox::Share,
    pool::PIECE_BYTES,
};
use diskwright_nbd::wire::{ChunkFlags, Command, EncodedHeader, ErrorCode, Framing, reply::simple};
use std::io;

impl Dispatcher {
    /// Puts the reply to a request into the outbox. The contents are sent after a successful read
    /// and given back to the pool otherwise.
    pub(crate) fn reply(
        &mut self,
        conn: &mut Connection,
        asked: &ClientRequest,
        result: io::Result<()>,
        contents: Contents,
    ) {
        if conn.state == State::Closing {
            conn.share.sub(Share::of(asked.held_bytes()));
            return contents.into_bufs().for_each(|buf| self.pool.give(buf));
        }
        match result {
            Ok(()) if asked.command == Command::READ => {
                let header = contents_header(asked);
                let mut left_bytes = asked.len_bytes as usize;
                for (index, buf) in contents.into_bufs().enumerate() {
                    let now = left_bytes.min(PIECE_BYTES);
                    left_bytes -= now;
                    if index == 0 {
                        conn.outbox.put_contents(&header, buf, now);
                    } else {
                        conn.outbox.put_more(buf, now);
                    }
                }
                self.count(conn, asked, None);
            }
            result => {
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                let code = result.as_ref().err().map(ErrorCode::from_io);
                match result {
                    Ok(()) => conn.outbox.put(&done_header(asked), &mut self.pool),
                    Err(error) => self.put_error(conn, asked, &error),
                }
                self.count(conn, asked, code);
            }
        }
    }

    fn put_error(&mut self, conn: &mut Connection, asked: &ClientRequest, error: &io::Error) {
        let code = ErrorCode::from_io(error);
        let name = &self.exports.get(asked.export as usize).name;
        let ClientRequest { command, offset_bytes, len_bytes, framing, .. } = *asked;
        if code == ErrorCode::EIO || code == ErrorCode::ENOSPC && command != Command::READ {
            tracing::warn!(export = %name, peer = %conn.peer, %command, offset_bytes, len_bytes, %error, "a request failed");
        } else {
            tracing::debug!(export = %name, peer = %conn.peer, %command, offset_bytes, len_bytes, %error, "a request was refused");
        }
        let in_chunks = match framing {
            Framing::Simple => false,
            Framing::Structured => matches!(command, Command::READ | Command::BLOCK_STATUS),
            Framing::Extended => true,
        };
        if !in_chunks {
            return conn.outbox.put(&simple(asked.cookie, code), &mut self.pool);
        }
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        asked.answering().error(code, &error.to_string(), None, &mut answer);
        conn.outbox.put(&answer, &mut self.pool);
        self.scratch = answer;
    }
}

/// The header before the data of a read.
fn contents_header(asked: &ClientRequest) -> EncodedHeader {
    match asked.framing {
        Framing::Simple => simple(asked.cookie, ErrorCode::NONE),
        Framing::Structured | Framing::Extended => {
            asked.answering().data(ChunkFlags::DONE, asked.offset_bytes, asked.len_bytes as u32)
        }
    }
}

/// The reply to a request without data.
fn done_header(asked: &ClientRequest) -> EncodedHeader {
    match asked.framing {
        Framing::Simple | Framing::Structured => simple(asked.cookie, ErrorCode::NONE),
        Framing::Extended => asked.answering().done(),
    }
}
