//! The messages of the FUSE kernel protocol (`linux/fuse.h`, version 7): bytes to values, values to
//! bytes, and nothing else.
//!
//! ```text
//!   from the kernel   | header 40 | arguments of the operation | payload of a write, or a name |
//!   to the kernel     | header 16 | arguments of the answer    | payload of a read             |
//! ```
//!
//! All integers are in the byte order of the machine. Structures may grow at their end with later
//! minor versions, so a reader takes what it knows and leaves the rest. The kernel is not an enemy,
//! but what it passes on came from any program, so nothing here trusts a length: what does not fit
//! is [`WireError`], and no value leads to an allocation.

use rustix::io::Errno;

/// The version of the protocol that is spoken.
pub const MAJOR: u32 = 7;
/// The youngest minor version whose structures are known here.
pub const MINOR: u32 = 39;

/// `struct fuse_in_header`.
pub const IN_HEADER_BYTES: usize = 40;
/// `struct fuse_out_header`.
pub const OUT_HEADER_BYTES: usize = 16;
/// `struct fuse_write_in`.
pub const WRITE_IN_BYTES: usize = 40;

/// The node of the mount point.
pub const ROOT: u64 = 1;

/// Flags of INIT (`FUSE_*`), those above bit 31 travel in `flags2`.
pub mod init {
    /// Several reads of one file at the same time.
    pub const ASYNC_READ: u64 = 1 << 0;
    /// Writes of more than a page.
    pub const BIG_WRITES: u64 = 1 << 5;
    /// Direct reads and writes need not wait for each other.
    pub const ASYNC_DIO: u64 = 1 << 15;
    /// Look-ups and listings of one directory at the same time.
    pub const PARALLEL_DIROPS: u64 = 1 << 18;
    /// `max_pages` of the answer counts.
    pub const MAX_PAGES: u64 = 1 << 22;
    /// OPENDIR may be answered by ENOSYS once, and is not asked for again.
    pub const NO_OPENDIR_SUPPORT: u64 = 1 << 24;
    /// `flags2` counts.
    pub const INIT_EXT: u64 = 1 << 30;
    /// A file open for direct I/O may be mapped as shared memory.
    pub const DIRECT_IO_ALLOW_MMAP: u64 = 1 << 36;
}

/// Flags of the answer to OPEN (`FOPEN_*`).
pub mod opened {
    /// Past the page cache.
    pub const DIRECT_IO: u32 = 1 << 0;
    /// Direct writes of one file at the same time.
    pub const PARALLEL_DIRECT_WRITES: u32 = 1 << 6;
}

/// Flags of SETATTR (`FATTR_*`): which of the attributes it sets.
pub mod attribute {
    /// Permissions.
    pub const MODE: u32 = 1 << 0;
    /// Owner.
    pub const UID: u32 = 1 << 1;
    /// Group.
    pub const GID: u32 = 1 << 2;
    /// Length.
    pub const SIZE: u32 = 1 << 3;
    /// It comes from an open file (`ftruncate`), not from a path or from `O_TRUNC`.
    pub const FH: u32 = 1 << 6;
}

/// A message that is not as the protocol says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "the kernel's message of {len_bytes} bytes (operation {opcode}) is too short or says another length; this kernel's FUSE is not understood"
)]
pub struct WireError {
    /// Bytes received.
    pub len_bytes: usize,
    /// The operation, or 0 when not even the header is there.
    pub opcode: u32,
}

/// `struct fuse_in_header`: who asks what of which node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// The operation.
    pub opcode: u32,
    /// Names the request in its answer.
    pub unique: u64,
    /// The node.
    pub node: u64,
}

/// What the kernel asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// The first message: which version and which features.
    Init {
        /// Of the kernel.
        major: u32,
        /// Of the kernel.
        minor: u32,
        /// Bytes that it would read ahead.
        max_readahead_bytes: u32,
        /// See [`init`].
        flags: u64,
    },
    /// A name in a directory.
    Lookup {
        /// Without the final zero.
        name: &'a [u8],
    },
    /// The kernel has forgotten a node, or many; not answered.
    Forget,
    /// Attributes of a node.
    GetAttr,
    /// Change attributes.
    SetAttr {
        /// See [`attribute`].
        valid: u32,
        /// The new length.
        size_bytes: u64,
    },
    /// Open a file.
    Open {
        /// Those of open(2).
        flags: u32,
    },
    /// List a directory.
    ReadDir {
        /// Where the last listing stopped.
        cookie: u64,
        /// Most bytes of the answer.
        size_bytes: u32,
    },
    /// Bytes of a file.
    Read {
        /// First byte.
        offset_bytes: u64,
        /// How many.
        size_bytes: u32,
    },
    /// Bytes into a file; they follow the arguments.
    Write {
        /// First byte.
        offset_bytes: u64,
        /// How many. The message holds as many.
        size_bytes: u32,
    },
    /// Make durable.
    Fsync,
    /// Punch a hole, zero, reserve: fallocate(2).
    Fallocate {
        /// First byte.
        offset_bytes: u64,
        /// How many.
        len_bytes: u64,
        /// Those of fallocate(2).
        mode: u32,
    },
    /// The next data or hole.
    Lseek {
        /// From where.
        offset_bytes: u64,
        /// Those of lseek(2).
        whence: u32,
    },
    /// Sizes of the file system.
    StatFs,
    /// The last descriptor of an open file is closed.
    Release,
    /// Somebody no longer waits for a request; not answered.
    Interrupt,
    /// Unmounted.
    Destroy,
    /// Anything else.
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

/// What is left of a message.
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

    /// Up to the final zero, which must be there.
    fn name(&mut self) -> Option<&'a [u8]> {
        let end = self.0.iter().position(|&byte| byte == 0)?;
        Some(&self.0[..end])
    }
}

/// Reads a message. A write's payload is what follows the first [`IN_HEADER_BYTES`] +
/// [`WRITE_IN_BYTES`].
///
/// # Errors
/// When it is shorter than its operation needs, or than it says itself.
pub fn parse(bytes: &[u8]) -> Result<(Header, Message<'_>), WireError> {
    let bad = |opcode| WireError { len_bytes: bytes.len(), opcode };
    let mut fields = Fields(bytes);
    let (len_bytes, header) = header(&mut fields).ok_or(bad(0))?;
    if len_bytes as usize != bytes.len() {
        return Err(bad(header.opcode));
    }
    // The rest of the header: uid, gid, pid, and the length of extensions that nobody has asked
    // for.
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

/// `struct fuse_attr`: what stat(2) tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attributes {
    /// Node and inode number.
    pub node: u64,
    /// Length.
    pub size_bytes: u64,
    /// Kind and permissions, as in `st_mode`.
    pub mode: u32,
    /// Names of it.
    pub links: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// All its times, in seconds since 1970.
    pub time_seconds: u64,
    /// Unit that is good to transfer.
    pub unit_bytes: u32,
}

/// How long the kernel may keep names: for good, as they never change. Attributes it may not keep:
/// the disk may grow. They are asked for when a file is opened or looked at, and not when it is
/// read or written.
const VALID_SECONDS: u64 = 365 * 24 * 3600;

/// An answer under construction, at the front of a buffer. What does not fit is left out, and the
/// header then tells a shorter length, so the buffer is at least a page.
#[derive(Debug)]
pub struct Answer<'a> {
    buf: &'a mut [u8],
    len: usize,
}

impl<'a> Answer<'a> {
    /// Begins behind the room for the header.
    pub fn new(buf: &'a mut [u8]) -> Self {
        Self { buf, len: OUT_HEADER_BYTES }
    }

    /// Writes the header, and says how long the whole is.
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

    /// `struct fuse_statfs_out`: `size_bytes` in units of `unit_bytes`, none of them free, one
    /// file.
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

    /// One `struct fuse_dirent`. `false` when there is no room for it within `limit_bytes` of
    /// answer behind the header.
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

/// What the answer to INIT says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Accepted {
    /// Of the protocol.
    pub minor: u32,
    /// As the kernel offered.
    pub max_readahead_bytes: u32,
    /// See [`init`].
    pub flags: u64,
    /// Requests in flight on whose completion nobody waits.
    pub max_background: u16,
    /// Of these, how many make the kernel hold back.
    pub congestion_threshold: u16,
    /// Largest write.
    pub max_write_bytes: u32,
    /// Largest request, in pages of 4096 bytes.
    pub max_pages: u16,
}

/// Writes `struct fuse_out_header` at the front of `buf`, for an answer with `body_bytes` behind
/// it.
///
/// # Panics
/// When `buf` is shorter than the header.
pub fn put_header(buf: &mut [u8], body_bytes: usize, result: Result<(), Errno>, unique: u64) {
    let error = result.err().map_or(0, |errno| -errno.raw_os_error());
    buf[..4].copy_from_slice(&((OUT_HEADER_BYTES + body_bytes) as u32).to_ne_bytes());
    buf[4..8].copy_from_slice(&error.to_ne_bytes());
    buf[8..16].copy_from_slice(&unique.to_ne_bytes());
}

#[cfg(test)]
pub(crate) mod tests;
