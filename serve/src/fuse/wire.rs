//! The messages of the FUSE kernel protocol (`linux/fuse.h`, version 7): decoding and encoding.
//!
//! ```text
//!   from the kernel   | header 40 | arguments of the operation | payload of a write, or a name |
//!   to the kernel     | header 16 | arguments of the reply     | payload of a read             |
//! ```
//!
//! Integers have the byte order of the machine. Later minor versions append fields to structures,
//! so the decoder reads the fields that it knows and ignores the rest. The kernel passes on what
//! any program has asked for, so no length is trusted: a message that does not fit is a
//! [`WireError`], and no field leads to an allocation.

use rustix::io::Errno;

/// Major version of the protocol.
pub const MAJOR: u32 = 7;
/// The newest minor version whose structures are known here.
pub const MINOR: u32 = 39;

/// `struct fuse_in_header`.
pub const IN_HEADER_BYTES: usize = 40;
/// `struct fuse_out_header`.
pub const OUT_HEADER_BYTES: usize = 16;
/// `struct fuse_write_in`.
pub const WRITE_IN_BYTES: usize = 40;

/// The node id of the mount point.
pub const ROOT: u64 = 1;

/// Flags of INIT (`FUSE_*`). Those above bit 31 are sent in `flags2`.
pub mod init {
    /// Several reads of one file may run at the same time.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// Writes may be longer than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Direct reads and writes may run at the same time.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Look-ups and listings of one directory may run at the same time.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// `max_pages` of the reply is valid.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// OPENDIR may be refused with ENOSYS once; the kernel then no longer sends it.
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    /// `flags2` is valid.
    pub const INIT_EXT: u64 = 1 << 30;
    /// Files opened for direct I/O may be mapped shared.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// Flags of the reply to OPEN (`FOPEN_*`).
pub mod opened {
    /// Bypass the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Direct writes of one file may run at the same time.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Flags of SETATTR (`FATTR_*`): the attributes to set.
pub mod attribute {
    pub const MODE: u32 = 1 << 0;
    pub const UID: u32 = 1 << 1;
    pub const GID: u32 = 1 << 2;
    pub const SIZE: u32 = 1 << 3;
    /// The request comes from an open file (`ftruncate`), not from a path or from `O_TRUNC`.
    pub const FH: u32 = 1 << 6;
}

/// A message whose length does not fit its operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kernel sent a FUSE message of {len_bytes} bytes (operation {opcode}) whose length field or arguments do not fit that length; this kernel is not supported"
)]
pub struct WireError {
    pub len_bytes: usize,
    /// The operation code; 0 if the header is incomplete.
    pub opcode: u32,
}

/// `struct fuse_in_header`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The operation code.
    pub opcode: u32,
    /// Id of the request, repeated in its reply.
    pub unique: u64,
    /// The node id.
    pub node: u64,
}

/// A decoded message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// The first message: the kernel's version and features.
    Init {
        /// Major version of the kernel.
        major: u32,
        /// Minor version of the kernel.
        minor: u32,
        /// The kernel's read-ahead.
        max_readahead_bytes: u32,
        /// See [`init`].
        flags: u64,
    },
    /// Look up a name in a directory.
    Lookup {
        /// Without the final zero.
        name: &'a [u8],
    },
    /// The kernel dropped one or more nodes from its cache. No reply.
    Forget,
    /// Read the attributes of a node.
    GetAttr,
    /// Change attributes.
    SetAttr {
        /// Which attributes to set, see [`attribute`].
        valid: u32,
        /// The new length.
        size_bytes: u64,
    },
    /// Open a file.
    Open {
        /// Flags of open(2).
        flags: u32,
    },
    /// List a directory.
    ReadDir {
        /// Position after the last entry of the last listing.
        cookie: u64,
        /// Maximum bytes of the reply.
        size_bytes: u32,
    },
    /// Read from a file.
    Read { offset_bytes: u64, size_bytes: u32 },
    /// Write to a file. The payload follows the arguments.
    Write {
        offset_bytes: u64,
        /// Length of the payload.
        size_bytes: u32,
    },
    /// Make all completed writes durable.
    Fsync,
    /// Punch a hole or zero a range: fallocate(2).
    Fallocate {
        offset_bytes: u64,
        len_bytes: u64,
        /// Flags of fallocate(2).
        mode: u32,
    },
    /// Find the next data or hole.
    Lseek {
        /// Where the search starts.
        offset_bytes: u64,
        /// SEEK_DATA or SEEK_HOLE of lseek(2).
        whence: u32,
    },
    /// Sizes of the file system.
    StatFs,
    /// The last descriptor of an open file is closed.
    Release,
    /// A program was interrupted and no longer waits for a request. No reply.
    Interrupt,
    /// The file system was unmounted.
    Destroy,
    /// Any other operation.
    Other,
}

mod opcode {
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const INIT: u32 = 26;
    pub const READDIR: u32 = 28;
    pub const INTERRUPT: u32 = 36;
    pub const DESTROY: u32 = 38;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// The bytes of a message that are not decoded yet.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_ne_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_ne_bytes)
    }

    /// A string, without its final zero. `None` if there is no final zero.
    fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        Some(&self.0[..end])
    }
}

/// Decodes a message. The payload of a write follows the first [`IN_HEADER_BYTES`] +
/// [`WRITE_IN_BYTES`].
///
/// # Errors
/// The message is shorter than its operation needs, or its length field is wrong.
pub fn parse(bytes: &[u8]) -> Result<(Header, Message<'_>), WireError> {
    let bad = |opcode| WireError { len_bytes: bytes.len(), opcode };
    let mut fields = Fields(bytes);
    let (len_bytes, header) = header(&mut fields).ok_or(bad(0))?;
    if len_bytes as usize != bytes.len() {
        return Err(bad(header.opcode));
    }
    // The rest of the header: uid, gid, pid, and the length of extensions, which are not
    // negotiated.
    fields.take::<16>().ok_or(bad(header.opcode))?;
    let message = arguments(header.opcode, fields).ok_or(bad(header.opcode))?;
    Ok((header, message))
}

fn header(fields: &mut Fields<'_>) -> Option<(u32, Header)> {
    let len_bytes = fields.u32()?;
    let opcode = fields.u32()?;
    Some((len_bytes, Header { opcode, unique: fields.u64()?, node: fields.u64()? }))
}

fn arguments(opcode: u32, mut fields: Fields<'_>) -> Option<Message<'_>> {
    Some(match opcode {
        opcode::INIT => {
            let (major, minor, max_readahead_bytes) = (fields.u32()?, fields.u32()?, fields.u32().unwrap_or(0));
            let low = fields.u32().unwrap_or(0);
            let high = if u64::from(low) & init::INIT_EXT != 0 { fields.u32().unwrap_or(0) } else { 0 };
            Message::Init { major, minor, max_readahead_bytes, flags: u64::from(high) << 32 | u64::from(low) }
        }
        opcode::LOOKUP => Message::Lookup { name: fields.name()? },
        opcode::FORGET | opcode::BATCH_FORGET => Message::Forget,
        opcode::GETATTR => Message::GetAttr,
        opcode::SETATTR => {
            let valid = fields.u32()?;
            fields.take::<12>()?; // padding, file handle
            Message::SetAttr { valid, size_bytes: fields.u64()? }
        }
        opcode::OPEN => Message::Open { flags: fields.u32()? },
        opcode::READDIR => {
            fields.u64()?; // file handle
            Message::ReadDir { cookie: fields.u64()?, size_bytes: fields.u32()? }
        }
        opcode::READ => {
            fields.u64()?;
            Message::Read { offset_bytes: fields.u64()?, size_bytes: fields.u32()? }
        }
        opcode::WRITE => {
            fields.u64()?;
            let (offset_bytes, size_bytes) = (fields.u64()?, fields.u32()?);
            fields.take::<{ WRITE_IN_BYTES - 20 }>()?;
            if fields.0.len() != size_bytes as usize {
                return None;
            }
            Message::Write { offset_bytes, size_bytes }
        }
        opcode::STATFS => Message::StatFs,
        opcode::RELEASE => Message::Release,
        opcode::FSYNC => Message::Fsync,
        opcode::INTERRUPT => Message::Interrupt,
        opcode::DESTROY => Message::Destroy,
        opcode::FALLOCATE => {
            fields.u64()?;
            Message::Fallocate { offset_bytes: fields.u64()?, len_bytes: fields.u64()?, mode: fields.u32()? }
        }
        opcode::LSEEK => {
            fields.u64()?;
            Message::Lseek { offset_bytes: fields.u64()?, whence: fields.u32()? }
        }
        _ => Message::Other,
    })
}

/// `struct fuse_attr`: the attributes of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Node and inode number.
    pub node: u64,
    pub size_bytes: u64,
    /// File type and permissions, as in `st_mode`.
    pub mode: u32,
    pub links: u32,
    pub uid: u32,
    pub gid: u32,
    /// All time stamps, in seconds since 1970.
    pub time_seconds: u64,
    /// Preferred transfer unit.
    pub unit_bytes: u32,
}

/// How long the kernel may cache names: practically for ever, because they never change. It may not
/// cache attributes, because the disk may grow: it asks for them when a file is opened or stat'ed,
/// not when it is read or written.
const VALID_SECONDS: u64 = 365 * 24 * 3600;

/// A reply that is being encoded at the front of a buffer. Fields that do not fit are dropped, so
/// the buffer must have at least a page.
#[derive(Debug)]
pub struct Answer<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> Answer<'a> {
    /// Begins after the room for the header.
    pub fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: OUT_HEADER_BYTES }
    }

    /// Writes the header. Returns the length of the reply.
    pub fn end(self, unique: u64) -> usize {
        put_header(self.buf, self.len - OUT_HEADER_BYTES, Ok(()), unique);
        self.len
    }

    fn put(&mut self, bytes: &[u8]) {
        if let Some(room) = self.buf.get_mut(self.len..self.len + bytes.len()) {
            room.copy_from_slice(bytes);
            self.len += bytes.len();
        }
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_ne_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_ne_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_ne_bytes());
    }

    fn attributes(&mut self, of: &Attributes) {
        self.u64(of.node);
        self.u64(of.size_bytes);
        self.u64(of.size_bytes.div_ceil(512));
        for _ in 0..3 {
            self.u64(of.time_seconds);
        }
        for _ in 0..3 {
            self.u32(0); // nanoseconds
        }
        for value in [of.mode, of.links, of.uid, of.gid, 0, of.unit_bytes, 0] {
            self.u32(value);
        }
    }

    /// `struct fuse_attr_out`.
    pub fn attr_out(&mut self, of: &Attributes) {
        self.u64(0);
        self.u64(0);
        self.attributes(of);
    }

    /// `struct fuse_entry_out`.
    pub fn entry_out(&mut self, of: &Attributes) {
        for value in [of.node, 0, VALID_SECONDS, 0, 0] {
            self.u64(value);
        }
        self.attributes(of);
    }

    /// `struct fuse_open_out`.
    pub fn open_out(&mut self, flags: u32) {
        self.u64(0);
        self.u32(flags);
        self.u32(0);
    }

    /// `struct fuse_write_out`.
    pub fn write_out(&mut self, size_bytes: u32) {
        self.u32(size_bytes);
        self.u32(0);
    }

    /// `struct fuse_lseek_out`.
    pub fn lseek_out(&mut self, offset_bytes: u64) {
        self.u64(offset_bytes);
    }

    /// `struct fuse_statfs_out`: a file system of `size_bytes` with one file and no free space.
    /// `unit_bytes` is the block size.
    pub fn statfs_out(&mut self, size_bytes: u64, unit_bytes: u32) {
        for value in [size_bytes / u64::from(unit_bytes), 0, 0, 1, 0] {
            self.u64(value);
        }
        for value in [unit_bytes, 255, unit_bytes, 0, 0, 0, 0, 0, 0, 0] {
            self.u32(value);
        }
    }

    /// `struct fuse_init_out`.
    pub fn init_out(&mut self, accepted: &Accepted) {
        self.u32(MAJOR);
        self.u32(accepted.minor);
        self.u32(accepted.max_readahead_bytes);
        self.u32(accepted.flags as u32);
        self.u16(accepted.max_background);
        self.u16(accepted.congestion_threshold);
        self.u32(accepted.max_write_bytes);
        self.u32(1); // nanoseconds: granularity of times
        self.u16(accepted.max_pages);
        self.u16(0);
        self.u32((accepted.flags >> 32) as u32);
        for _ in 0..7 {
            self.u32(0);
        }
    }

    /// Appends one `struct fuse_dirent`. Returns `false` if it does not fit into the buffer or into
    /// `limit_bytes` after the header.
    pub fn entry(&mut self, limit_bytes: u32, node: u64, next_cookie: u64, mode: u32, name: &[u8]) -> bool {
        let padded_bytes = (24 + name.len()).next_multiple_of(8);
        let end = self.len + padded_bytes;
        if end > self.buf.len() || end - OUT_HEADER_BYTES > limit_bytes as usize {
            return false;
        }
        self.u64(node);
        self.u64(next_cookie);
        self.u32(name.len() as u32);
        self.u32(mode >> 12);
        self.put(name);
        self.put(&[0; 8][..padded_bytes - 24 - name.len()]);
        true
    }
}

/// Parameters of the reply to INIT.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Minor version that is used.
    pub minor: u32,
    /// Read-ahead as offered by the kernel.
    pub max_readahead_bytes: u32,
    /// See [`init`].
    pub flags: u64,
    /// Maximum number of background requests in flight.
    pub max_background: u16,
    /// Number of background requests from which on the kernel throttles.
    pub congestion_threshold: u16,
    /// Largest write in bytes.
    pub max_write_bytes: u32,
    /// Largest request, in pages of 4096 bytes.
    pub max_pages: u16,
}

/// Writes `struct fuse_out_header` at the front of `buf`, for a reply with `body_bytes` after the
/// header.
///
/// # Panics
/// `buf` is shorter than the header.
pub fn put_header(buf: &mut [u8], body_bytes: usize, result: Result<(), Errno>, unique: u64) {
    let error = result.err().map_or(0, |errno| -errno.raw_os_error());
    buf[..4].copy_from_slice(&((OUT_HEADER_BYTES + body_bytes) as u32).to_ne_bytes());
    buf[4..8].copy_from_slice(&error.to_ne_bytes());
    buf[8..16].copy_from_slice(&unique.to_ne_bytes());
}

#[cfg(test)]
pub(crate) mod tests;
