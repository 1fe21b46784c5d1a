//! The control channel: other programs of the same user ask the process that has a disk open for
//! writing to do something with it.
//!
//! ```text
//!   RUN_DIR/control/  (mode 0700)
//!     4711-90210.sock            socket of process 4711, mode 0600: one for all of its disks
//!     fe01-1a2b3c ─▶ that socket  a link for each disk: device and inode number of its file
//!     lock                       held while links and sockets are made or removed
//!
//!   client:  file ─▶ device and inode ─▶ link ─▶ socket ─▶ one request, a line of JSON
//!   process: credentials of the peer ─▶ request ─▶ operation ─▶ events, a line of JSON each:
//!            progress ..., then `result` or `error`
//!
//!   message.rs    requests and events          operation.rs  what can be asked for, one table
//!   answer.rs     what answers carry           moving.rs     moves a disk in use
//!   folder.rs     sockets and links by name    channel.rs    the process's side
//!   stream.rs     bounded lines, deadlines     client.rs     the other side
//! ```
//!
//! `serve` and `attach` have a channel for each disk that they have open for writing. A disk that
//! is open read-only can be open in several processes, so its file leads to none of them.
//!
//! # What must hold
//!
//! - A link leads to the process that holds the lock of the image. Only that process makes or
//!   replaces the link of its file, and it removes the link before it gives up the lock. After
//!   `kill -9` a link leads to a socket without a listener; the next channel that is opened
//!   removes both, and a new process that opens the disk replaces the link. The number of an inode
//!   can be given to another file, so the answer counts: the process compares the identity in the
//!   request with the files that it has open *now*.
//! - Only the same user and root are answered, by the credentials of the socket. A client accepts
//!   only a process whose number is in the socket's name, of its own user or root.
//! - A client cannot block a disk. Its request is at most [`message::LINE_BYTES_MAX`] long and must
//!   arrive within a few seconds; answers that it does not read are given up after the same time;
//!   the number of clients is limited. No lock of the disk is held during I/O with a client, and no
//!   I/O of the disk's users passes through this module.
//! - One operation at a time changes a disk; a second one is refused with the name of the first.
//! - Frozen images of a disk have no links, as several processes may have one as a parent. They are
//!   found by the chains that the processes report ([`find_by_frozen`]).
//! - When a client disconnects or the process ends, an operation is stopped only if its rule says
//!   so ([`operation::Rule`]). Any other operation runs to its end, so that it is never left half
//!   done.
//!
//! Locks: `busy` of a disk guards which operation runs on it, `disks` which disks there are, and
//! `state` how the process ends. None is held during an operation or I/O.

mod answer;
mod channel;
mod client;
mod folder;
mod host;
mod message;
mod moving;
mod operation;
mod shared;
mod stream;

pub use answer::{
    ChangedRanges, CommandCount, CompactedInUse, DiskChange, DiskReport, Door, Frozen, Limits, Merged, Moved,
    ProcessReport, Resized, Statistics, TrackedPoint, TrackedRange, Traffic,
};
pub use channel::Channel;
pub use client::{Client, FoundDisk, Listing, Peer, find, find_by_frozen, find_by_name, list};
pub(crate) use folder::{had_open, identity};
pub use host::{Change, DoorKeeper, Freezer, FrozenFileSystems, GetMetrics, Host, HostedDisk, OnChange};
pub(crate) use message::FileId;
pub use message::{Done, NewDisk, NewImage, Operation, VERSION};

use diskwright_store::ErrorCode;
use std::{io, path::PathBuf};

/// Why a request over a control channel was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The folder of the channels cannot be used.
    #[error("{0}")]
    Folder(String),
    /// A file or socket of the channel failed.
    #[error("cannot {doing} {}: {source}", path.display())]
    Socket {
        /// The operation, as in "listen on".
        doing: &'static str,
        /// The socket, link or disk.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The process does not answer as it should.
    #[error("{peer} {what}; if it stays so, end that process")]
    Silent {
        /// The process, as in "diskwright (process 12)".
        peer: String,
        /// What it did instead.
        what: String,
    },
    /// The caller has stopped waiting.
    #[error(
        "stopped; {peer} ends the operation at a point where nothing is half done, and the same command finishes it"
    )]
    Stopped {
        /// The process, as in "diskwright (process 12)".
        peer: String,
    },
    /// The process refused the operation, or the operation failed.
    #[error("{message}")]
    Refused {
        /// Why, for programs.
        code: ErrorCode,
        /// Why, as a sentence.
        message: String,
    },
}

impl ControlError {
    /// Why it failed, for programs to match.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Folder(_) => ErrorCode::PermissionDenied,
            Self::Socket { source, .. } => ErrorCode::of_system(source),
            Self::Silent { .. } => ErrorCode::Connection,
            Self::Stopped { .. } => ErrorCode::Stopped,
            Self::Refused { code, .. } => *code,
        }
    }
}

#[cfg(test)]
mod tests;
