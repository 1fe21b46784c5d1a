//! Replies: how the result of a request is sent in each framing.

use super::requests::{Asked, Nbd};
use crate::net::{
    connection::Connection,
    core::Core,
    flights::{ClientRequest, Contents},
    pool::PIECE_BYTES,
};
use diskwright_nbd::wire::{ChunkFlags, Command, EncodedHeader, ErrorCode, Framing, reply::simple};
use std::io;

impl Core<Nbd> {
    /// Puts the reply to a request into the outbox. The contents are sent after a successful read
    /// and given back to the pool otherwise.
    pub(crate) fn put_reply(
        &mut self,
        conn: &mut Connection<Nbd>,
        asked: &ClientRequest<Asked>,
        result: io::Result<()>,
        contents: Contents,
    ) {
        let failed = result.is_err();
        match result {
            Ok(()) if asked.own.command == Command::READ => {
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
            }
            result => {
                contents.into_bufs().for_each(|buf| self.pool.give(buf));
                match result {
                    Ok(()) => conn.outbox.put(&done_header(asked), &mut self.pool),
                    Err(error) => self.put_error(conn, asked, &error),
                }
            }
        }
        self.count(conn, asked, failed);
    }

    fn put_error(&mut self, conn: &mut Connection<Nbd>, asked: &ClientRequest<Asked>, error: &io::Error) {
        let code = ErrorCode::from_io(error);
        let name = &self.exports.get(asked.export as usize).name;
        let ClientRequest { offset_bytes, len_bytes, own: Asked { framing, command, cookie }, .. } = *asked;
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
            return conn.outbox.put(&simple(cookie, code), &mut self.pool);
        }
        let mut answer = std::mem::take(&mut self.scratch);
        answer.clear();
        asked.answering().error(code, &error.to_string(), None, &mut answer);
        conn.outbox.put(&answer, &mut self.pool);
        self.scratch = answer;
    }
}

/// The header before the data of a read.
fn contents_header(asked: &ClientRequest<Asked>) -> EncodedHeader {
    match asked.own.framing {
        Framing::Simple => simple(asked.own.cookie, ErrorCode::NONE),
        Framing::Structured | Framing::Extended => {
            asked.answering().data(ChunkFlags::DONE, asked.offset_bytes, asked.len_bytes as u32)
        }
    }
}

/// The reply to a request without data.
fn done_header(asked: &ClientRequest<Asked>) -> EncodedHeader {
    match asked.own.framing {
        Framing::Simple | Framing::Structured => simple(asked.own.cookie, ErrorCode::NONE),
        Framing::Extended => asked.answering().done(),
    }
}
