//! A queue of a device: fetches and commits requests on a shared ring.
//!
//! ```text
//! fetch(tag, buf) ─┐                                            ┌─▶ UblkEnd { tag, buf, request }
//!                  ├─▶ SharedRing::wait ─▶ answer, descriptor ──┤
//! commit(tag, ..) ─┘                                            └─▶ UblkEnd { tag, buf, ENODEV }
//!                                                                       the device was stopped
//! ```
//!
//! Descriptors lie in pages shared with the kernel, one for each tag. The kernel writes a
//! descriptor before it ends that tag's fetch, and not again before the commit, so it is read only
//! between the two.
//!
//! Invariants: the kernel owns a tag (its buffer is in `buffers`, and a ring entry is in flight) or
//! the caller does. The ring's thread does everything, because the kernel accepts a queue's
//! commands from one thread only. A fetch cannot be cancelled: buffers that the kernel has when the
//! queue is dropped are leaked. To get them back, stop the device first.

#![allow(unsafe_code)]

use super::layout::{self, DESCRIPTOR_BYTES, UblkDevice, UblkOperation, command};
use crate::{
    IoBuf, SharedRing,
    shared::{Member, RingAnswer},
};
use io_uring::{opcode, squeue, types};
use rustix::{
    fs::{Mode, OFlags},
    io::Errno,
    ioctl::Opcode,
    mm::{MapFlags, ProtFlags},
};
use std::{
    io, mem,
    os::fd::{AsRawFd, OwnedFd},
    ptr::{self, NonNull},
    sync::Arc,
};

/// A request that has arrived, or the end of a tag.
#[derive(Debug)]
pub struct UblkEnd {
    /// Identifies the request among those in flight.
    pub tag: u16,
    /// The buffer of the fetch; for a write, with the payload at its front.
    pub buf: IoBuf,
    /// The request; `None` for an operation that the device does not offer. An error means that no
    /// request will come for this tag any more; it is `ENODEV` if the device was stopped.
    pub request: io::Result<Option<UblkOperation>>,
}

/// The open `/dev/ublkcN` of a device. The kernel lets it be opened once, so all queues share it.
#[derive(Debug, Clone)]
pub struct UblkNode(Arc<OwnedFd>);

impl UblkNode {
    /// Opens the node at `path`.
    ///
    /// # Errors
    /// The error of the system; `EBUSY` if a process has it open.
    pub fn open(path: &str) -> io::Result<Self> {
        Ok(Self(Arc::new(rustix::fs::open(path, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?)))
    }
}

/// A queue of a device; see the module documentation.
#[derive(Debug)]
pub struct UblkQueue {
    member: Member,
    /// Of the device's queues.
    index: u16,
    place: types::Fd,
    flags: squeue::Flags,
    file_index: Option<u32>,
    /// Keeps the descriptor that the entries use open.
    _file: Arc<OwnedFd>,
    descriptors: Descriptors,
    transfer_bytes: usize,
    /// Buffers that the kernel has, by tag.
    buffers: Vec<Option<IoBuf>>,
    mail: Vec<RingAnswer>,
    refused: Vec<UblkEnd>,
}

impl UblkQueue {
    /// Opens the queue `index` of a device that was added and is not started, or whose recovery has
    /// begun.
    ///
    /// # Errors
    /// The descriptors cannot be mapped.
    pub fn open(ring: &SharedRing, node: &UblkNode, device: &UblkDevice, index: u16) -> io::Result<Self> {
        let file = Arc::clone(&node.0);
        let descriptors = Descriptors::map(&file, index, device.queue_depth)?;
        let member = Member::join(ring);
        let file_index = member.ring().register_file(file.as_raw_fd());
        let (place, flags) = match file_index {
            Some(index) => (types::Fd(index as i32), squeue::Flags::FIXED_FILE),
            None => (types::Fd(file.as_raw_fd()), squeue::Flags::empty()),
        };
        let buffers = (0..device.queue_depth).map(|_| None).collect();
        Ok(Self {
            member,
            index,
            place,
            flags,
            file_index,
            _file: file,
            descriptors,
            transfer_bytes: device.transfer_bytes as usize,
            buffers,
            mail: Vec::new(),
            refused: Vec::new(),
        })
    }

    /// Number of tags: the maximum number of requests in flight.
    pub fn depth(&self) -> u16 {
        self.buffers.len() as u16
    }

    /// Fetches the first request of a tag. All tags must be fetched before the device can be
    /// started.
    ///
    /// # Panics
    /// If the tag is out of range or owned by the kernel, or the buffer is smaller than the
    /// device's transfers: programming errors.
    pub fn fetch(&mut self, tag: u16, buf: IoBuf) {
        self.push(command::FETCH, tag, 0, buf);
    }

    /// Ends a request, with the number of bytes transferred (0 if there is no payload) or the
    /// error, and fetches the next request of its tag. The data of a read are at the front of
    /// `buf`, which need not be the buffer of the request.
    ///
    /// # Panics
    /// As [`UblkQueue::fetch`].
    pub fn commit(&mut self, tag: u16, result: Result<u32, Errno>, buf: IoBuf) {
        let result = match result {
            Ok(moved_bytes) => i32::try_from(moved_bytes).expect("a transfer is shorter than 2 GiB"),
            Err(errno) => -errno.raw_os_error(),
        };
        self.push(command::COMMIT_AND_FETCH, tag, result, buf);
    }

    fn push(&mut self, operation: Opcode, tag: u16, result: i32, buf: IoBuf) {
        assert!(buf.len() >= self.transfer_bytes, "a buffer of {} bytes is too small", buf.len());
        let slot = &mut self.buffers[usize::from(tag)];
        assert!(slot.is_none(), "tag {tag} is in use by the kernel");
        let address = buf.address() as u64;
        let entry = opcode::UringCmd16::new(self.place, operation)
            .cmd(layout::io_command(self.index, tag, result, address))
            .build()
            .flags(self.flags)
            .user_data(self.member.user_bits() | u64::from(tag));
        *slot = Some(buf);
        // SAFETY: the entry names the memory of a buffer that is at least as long as the device's
        // longest transfer, according to the kernel. The buffer stays in `buffers`, where no other
        // code reaches it, until the answer has been taken; otherwise `drop` leaks it.
        if let Err(error) = unsafe { self.member.ring().push(&entry) }
            && let Some(buf) = self.buffers[usize::from(tag)].take()
        {
            self.refused.push(UblkEnd { tag, buf, request: Err(error) });
        }
    }

    /// Appends the requests that have arrived and the tags that have ended. Does not wait;
    /// [`SharedRing::wait`] does.
    pub fn reap(&mut self, out: &mut Vec<UblkEnd>) {
        out.append(&mut self.refused);
        let mut mail = mem::take(&mut self.mail);
        self.member.take(&mut mail);
        for &(number, answer) in &mail {
            let tag = number as u16;
            let Some(buf) = self.buffers.get_mut(usize::from(tag)).and_then(Option::take) else { continue };
            let request = match answer {
                0 => Ok(layout::request(&self.descriptors.read(tag))),
                answer if answer < 0 => Err(io::Error::from_raw_os_error(-answer)),
                answer => Err(io::Error::other(format!("the ublk driver answered a fetch with {answer}"))),
            };
            out.push(UblkEnd { tag, buf, request });
        }
        mail.clear();
        self.mail = mail;
    }
}

impl Drop for UblkQueue {
    fn drop(&mut self) {
        if self.buffers.iter().any(Option::is_some) {
            mem::forget(mem::take(&mut self.buffers));
            self.member.abandon();
        }
        if let Some(index) = self.file_index {
            self.member.ring().unregister_file(index);
        }
    }
}

/// The mapped pages of descriptors.
#[derive(Debug)]
struct Descriptors {
    base: NonNull<u8>,
    count: u16,
    len_bytes: usize,
}

impl Descriptors {
    fn map(file: &OwnedFd, index: u16, count: u16) -> io::Result<Self> {
        let len_bytes = (usize::from(count) * DESCRIPTOR_BYTES).next_multiple_of(rustix::param::page_size());
        // SAFETY: a new mapping, at an address that the kernel chooses, of pages that only the
        // kernel writes.
        let base = unsafe {
            rustix::mm::mmap(
                ptr::null_mut(),
                len_bytes,
                ProtFlags::READ,
                MapFlags::SHARED | MapFlags::POPULATE,
                file,
                u64::from(index) * layout::descriptors_stride_bytes(),
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("the ublk driver mapped nothing"))?;
        Ok(Self { base, count, len_bytes })
    }

    /// The descriptor of a tag whose fetch has just ended.
    fn read(&self, tag: u16) -> [u8; DESCRIPTOR_BYTES] {
        assert!(tag < self.count);
        // SAFETY: it lies within the mapping, which lives as long as `self`. The kernel wrote it
        // before it ended the fetch, and the answer was taken from the ring afterwards. The read is
        // volatile because the kernel writes the memory.
        unsafe { self.base.add(usize::from(tag) * DESCRIPTOR_BYTES).cast::<[u8; DESCRIPTOR_BYTES]>().read_volatile() }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped in `map` with this length, and no reference into it exists.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len_bytes) };
    }
}
