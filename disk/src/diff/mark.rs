//! The identity of a copy while changes are applied to it.
//!
//! ```text
//!   base X ─▶ between X and Y ─▶ changes, flushed ─▶ result Y
//! ```
//!
//! The contents are then neither those of the base nor those of the result. So the copy has a third
//! identity, which is made of both: no child of either accepts it, no other export applies to it,
//! and the same export recognises it and goes on. A program that writes to a VHDX meanwhile gives
//! it another identity, and the copy is refused then.

use diskwright_image::LinkageId;
use uuid::Uuid;

/// Makes the mark of two identities differ from both, also if they are equal.
const MARK: u128 = 0x6469_7366_6a61_4d6b_9c57_1f0e_d7a3_42b5;

/// The identity of a copy of `base` to which changes are applied that make it `result`.
pub(super) fn between(base: LinkageId, result: LinkageId) -> LinkageId {
    base.combined(result, MARK)
}

/// The mark as an identity of the kind of `present`, which the copy has. Its format cannot record
/// one of the kind of the base and the result.
pub(super) fn of_kind(present: LinkageId, mark: LinkageId) -> LinkageId {
    let empty = if present.cid().is_some() { LinkageId::Cid(0) } else { LinkageId::Guid(Uuid::nil()) };
    empty.combined(mark, MARK)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_neither_of_them_and_knows_the_order() {
        let (a, b) = (LinkageId::from(Uuid::from_u128(1)), LinkageId::from(Uuid::from_u128(0x1234_5678)));
        for (base, result) in [(a, b), (b, a), (a, a), (b, b)] {
            let mark = between(base, result);
            assert!(mark != base && mark != result && !mark.to_uuid().is_nil());
        }
        assert_ne!(between(a, b), between(b, a));
    }

    #[test]
    fn it_has_the_kind_of_the_copy() {
        let (guid, cid) = (LinkageId::from(Uuid::from_u128(0x1234_5678)), LinkageId::Cid(7));
        assert!(of_kind(cid, guid).is_kind_of(cid) && of_kind(guid, cid).is_kind_of(guid));
        assert_eq!(of_kind(cid, guid), of_kind(LinkageId::Cid(8), guid));
        assert_ne!(of_kind(cid, guid), of_kind(cid, LinkageId::from(Uuid::from_u128(1))));
    }
}
