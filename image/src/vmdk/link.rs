//! The link of a child to its parent, as the descriptor records it.
//!
//! ```text
//!   CID=0ab4e1f7
//!   parentCID=dc338103                      the identity that the parent must have
//!   parentFileNameHint="base.vmdk"          one path, relative to the child's folder or absolute
//!   #parentCID2=77de01aa                    only while a merge is under way: it may have this one
//! ```
//!
//! All of these lines lie in the first sector of the text, so one write of that sector replaces
//! the link ([`one_sector`]): a power cut leaves the old link or the new one, each whole. QEMU
//! reads the first `CID` and the first `parentCID` of the text, so their order stays. Only
//! `parentCID` counts for other programs: while a merge is under way they may refuse the child, and
//! never read wrong data.
//!
//! Rejected: a second text in a spare place, to which the header of a sparse extent points. QEMU
//! reads the text at sector 1 whatever the header says, and a descriptor in a file of its own has
//! no header.

use super::text::LINKAGE2_KEY;
use crate::{LinkageId, ParentLink};
use diskwright_format::vmdk::{Descriptor, edit, one_sector};

/// A refusal: what, and what to do.
type Refusal = (String, &'static str);

/// What the descriptor can record of a link.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Link {
    pub cid: u32,
    pub cid2: Option<u32>,
    pub hint: String,
}

impl Link {
    /// `present` is the path that the descriptor has now. It keeps its spelling if it stays.
    pub fn of(link: &ParentLink, present: Option<&str>) -> Result<Self, Refusal> {
        let Some(cid) = link.linkage.and_then(LinkageId::cid) else {
            return Err(("the parent has no CID".into(), "use a VMDK as the parent"));
        };
        let paths = [&link.relative_path, &link.absolute_path, &link.name];
        let path = paths.into_iter().flatten().find(|path| !path.is_empty());
        let path = path.map_or("", String::as_str);
        let written = || path.strip_prefix(".\\").unwrap_or(path).replace('\\', "/");
        let hint = if present == Some(path) { path.to_owned() } else { written() };
        if hint.is_empty() || hint.chars().any(|c| c == '"' || c.is_control()) {
            let what = format!("the path {hint:?} of the parent cannot be written into a descriptor");
            return Err((what, "use a name without quotation marks and control characters"));
        }
        let cid2 = link.linkage2.and_then(LinkageId::cid);
        Ok(Self { cid, cid2, hint })
    }

    /// The change of the text that records this link instead of the present one.
    pub fn change(&self, text: &[u8]) -> Result<one_sector::Change, Refusal> {
        let records = |key: &str, lines: &[Vec<u8>]| edit::line_start(&lines.concat(), key).is_some();
        let change = one_sector::plan(text, 0, |lines| {
            // A line elsewhere would be a second one, or would not change at the same moment.
            let is_here = |key| records(key, lines) || edit::line_start(text, key).is_none();
            if !records("parentCID", lines) || !is_here("parentFileNameHint") || !is_here(LINKAGE2_KEY) {
                return false;
            }
            let cid = |cid| format!("{cid:08x}");
            edit::set_line(lines, "parentCID", Some(&cid(self.cid)), "CID");
            edit::set_line(lines, "parentFileNameHint", Some(&format!("\"{}\"", self.hint)), "parentCID");
            edit::set_line(lines, LINKAGE2_KEY, self.cid2.map(cid).as_deref(), "parentFileNameHint");
            true
        });
        change.ok_or_else(|| {
            let what =
                "the new link does not fit into the first 512 bytes of the descriptor, which are changed by one write";
            (what.into(), "move the parent to a shorter path, or convert the disk to a new one")
        })
    }

    /// The link that a text records.
    pub fn read(text: &[u8]) -> Option<ParentLink> {
        super::text::link_of(&Descriptor::parse(text, 0).ok()?)
    }
}
