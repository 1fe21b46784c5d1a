//! Requests whose payload is a list of segments, as far as they differ from requests with one
//! buffer.
//!
//! Plans count bytes of the payload, and the engine finds the memory of each
//! (`store/src/buffer/segments.rs`), so planning is the same. Two things differ: a request that
//! needs no plan has several parts, and the payload must be read only once, because a guest may
//! change its memory meanwhile.

use super::{
    DiskQueue,
    task::{Cookie, DURABLE, RequestState},
};
use crate::engine::{epoch::Parity, map::SourceId, plan::Pending};
use diskwright_image::ImageWriter;
use diskwright_store::{Operation, Request};

impl DiskQueue {
    /// Starts a read or write of several segments whose file offset the map knows.
    pub(super) fn transfer_pieces(
        &mut self,
        mut request: Request,
        parity: Option<Parity>,
        source: SourceId,
        offset_bytes: u64,
    ) {
        let (tag, range, segments) = (request.tag, request.buf_range(), request.segments.take());
        let is_write = request.operation == Operation::Write;
        let fua = is_write && request.fua;
        let ready = if fua { self.shared.check_poison(&self.chain) } else { Ok(()) };
        let image = self.chain.written_with(source);
        let dirty = image.is_some_and(|image| image.image.writer().is_some_and(ImageWriter::is_dirty));
        // For several parts one flush is cheaper than one RWF_DSYNC each.
        let flush_after = fua && (dirty || segments.as_ref().is_some_and(|segments| segments.count() > 1));
        let kept = if flush_after {
            self.keep(RequestState::Parts(Pending { flush_after, ..Pending::default() }, None))
        } else {
            u64::from(fua) * DURABLE
        };
        let slot = self.begin(tag, Cookie::new(parity, kept), (None, segments));
        match ready.and_then(|()| self.target(source)) {
            Ok(target) if is_write => self.engine.write(&slot, target, offset_bytes, range, fua && !flush_after),
            Ok(target) => self.engine.read(&slot, target, offset_bytes, range),
            Err(error) => self.engine.fail(&slot, error),
        }
        self.engine.end(slot);
    }
}
