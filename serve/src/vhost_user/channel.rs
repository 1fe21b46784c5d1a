//! The socket of a front-end: messages with descriptors, received piece by piece.
//!
//! A message may arrive in several pieces, and the front-end may stop in the middle of one. So a
//! receive takes what is there and never waits, and no receive reaches beyond the end of a message,
//! since the kernel gives the descriptors of a message with its first byte.

use super::{
    memory::REGIONS_MAX,
    wire::{HEADER_BYTES, Header, Message, WireError},
};
use rustix::{
    io::Errno,
    net::{
        RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
        SendFlags,
    },
};
use std::{
    io::{self, IoSlice, IoSliceMut},
    mem::MaybeUninit,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
};

/// Why nothing more is received from a front-end.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReceiveError {
    #[error("the front-end disconnected")]
    Disconnected,
    #[error("the front-end disconnected within a message")]
    Cut,
    #[error("a message carries more than {REGIONS_MAX} descriptors")]
    TooManyDescriptors,
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("cannot receive from the front-end: {0}")]
    Socket(#[from] io::Error),
}

/// A message and whether its sender asks for a reply.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) code: u32,
    pub(crate) needs_reply: bool,
    pub(crate) message: Message,
}

/// A connection to a front-end.
#[derive(Debug)]
pub(crate) struct Channel {
    socket: OwnedFd,
    /// What was received of the next message.
    bytes: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Channel {
    pub(crate) fn new(socket: OwnedFd) -> Self {
        Self { socket, bytes: Vec::new(), fds: Vec::new() }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Receives what is there. `None` if it is not a whole message yet.
    ///
    /// # Errors
    /// [`ReceiveError`].
    pub(crate) fn receive(&mut self) -> Result<Option<Received>, ReceiveError> {
        loop {
            let header = match self.bytes.first_chunk::<HEADER_BYTES>() {
                Some(bytes) => Some(Header::decode(bytes)?),
                None => None,
            };
            let whole_bytes = header.map_or(HEADER_BYTES, |header| HEADER_BYTES + header.body_bytes);
            if let Some(Header { code, needs_reply, .. }) = header
                && self.bytes.len() == whole_bytes
            {
                let message = Message::decode(code, &self.bytes[HEADER_BYTES..], std::mem::take(&mut self.fds))?;
                self.bytes.clear();
                return Ok(Some(Received { code, needs_reply, message }));
            }
            if !self.receive_up_to(whole_bytes)? {
                return Ok(None);
            }
        }
    }

    /// Receives until `self.bytes` has at most this length. Returns whether anything was there.
    fn receive_up_to(&mut self, whole_bytes: usize) -> Result<bool, ReceiveError> {
        let had = self.bytes.len();
        self.bytes.resize(whole_bytes, 0);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(REGIONS_MAX))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let got =
            rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut self.bytes[had..])], &mut ancillary, flags);
        self.bytes.truncate(had + got.as_ref().map_or(0, |got| got.bytes));
        let got = match got {
            Ok(got) => got,
            Err(Errno::AGAIN | Errno::INTR) => return Ok(false),
            Err(Errno::CONNRESET) => return Err(ReceiveError::Disconnected),
            Err(errno) => return Err(ReceiveError::Socket(errno.into())),
        };
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                self.fds.extend(fds);
            }
        }
        if got.flags.contains(ReturnFlags::CTRUNC) || self.fds.len() > REGIONS_MAX {
            return Err(ReceiveError::TooManyDescriptors);
        }
        match got.bytes {
            0 if had == 0 => Err(ReceiveError::Disconnected),
            0 => Err(ReceiveError::Cut),
            _ => Ok(true),
        }
    }

    /// Sends a message, with at most one descriptor.
    ///
    /// # Errors
    /// The socket's error. A front-end that has not taken its last replies, so that the socket is
    /// full, is one.
    pub(crate) fn send(&self, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        send(self.socket.as_fd(), bytes, fd)
    }
}

/// Sends a message without waiting.
///
/// # Errors
/// As [`Channel::send`].
pub(crate) fn send(socket: BorrowedFd<'_>, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        ancillary.push(SendAncillaryMessage::ScmRights(fds));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, flags)?;
    if sent < bytes.len() {
        return Err(io::Error::new(io::ErrorKind::WouldBlock, "the front-end does not take its replies"));
    }
    Ok(())
}
