//! Changes lines of a descriptor so that one write of one sector is the whole change.
//!
//! ```text
//!   sector        │ CID, parentCID, hint │ RW 8 FLAT "a" │ ddb.x, ddb.y │ dd│b.z, ddb.w
//!   1  tail       │ ...                                                 │ dd│b.z, ddb.w, ddb.y
//!   2  sector     │ CID, parentCID, a longer hint │ RW 8 FLAT "a" │ ddb.x │ dd│b.z, ddb.w, ddb.y
//! ```
//!
//! Lines that lie completely in the sector may change. A shorter text is filled up with comments
//! of blanks, and a longer one uses such comments again. If that is not enough, lines of the disk
//! database and comments get a copy at the end of the text first: a line that is there twice with
//! one value means the same as once. All sectors behind keep their bytes.
//!
//! What must hold: before, between and after the two writes the text is complete and valid for
//! every program, however it reads it. The tail must be durable before the sector is written.

use super::SECTOR_BYTES;
use std::ops::Range;

const SECTOR: usize = SECTOR_BYTES as usize;
/// The longest comment that fills a sector up.
const BLANK_MAX: usize = 64;

/// A change in two writes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// What is appended to the text first; often empty.
    pub tail: Vec<u8>,
    /// Where the sector begins in the text, a multiple of 512.
    pub start: usize,
    /// The new bytes of the sector.
    pub sector: [u8; SECTOR],
}

/// The lines of a text that lie completely in one sector. Each has its line end.
type Lines = Vec<Vec<u8>>;

/// The length of a text in bytes: it ends at a byte 0, or with the buffer.
pub fn len_of(text: &[u8]) -> usize {
    text.iter().position(|&byte| byte == 0).unwrap_or(text.len())
}

/// Plans a change of the lines in the sector at `start` by `change`, which returns whether it found
/// what it changes. The text begins at the start of a sector of its file. `None` if `change`
/// refuses, or the changed lines do not fit into the sector.
pub fn plan(text: &[u8], start: usize, change: impl FnOnce(&mut Lines) -> bool) -> Option<Change> {
    let text = &text[..len_of(text)];
    let end = start.checked_add(SECTOR)?;
    let mut tail = Vec::new();
    if !text.is_empty() && !text.ends_with(b"\n") {
        tail.push(b'\n');
    }
    // A file does not get a longer end and other bytes before it by one write.
    tail.extend(blank(end.saturating_sub(text.len() + tail.len())));
    let filled = [text, &tail].concat();
    let old = filled.get(start..end)?;
    let is_line_start = start == 0 || filled[start - 1] == b'\n';
    let first = if is_line_start { 0 } else { old.iter().position(|&byte| byte == b'\n')? + 1 };
    let last = old.iter().rposition(|&byte| byte == b'\n')? + 1;
    let room = last.checked_sub(first)?;
    let mut lines: Lines = old[first..last].split_inclusive(|&byte| byte == b'\n').map(<[u8]>::to_vec).collect();
    if !change(&mut lines) {
        return None;
    }
    let mut excess = lines.iter().map(Vec::len).sum::<usize>().saturating_sub(room);
    if excess > 0 {
        lines.retain(|line| !is_blank(line));
        excess = lines.iter().map(Vec::len).sum::<usize>().saturating_sub(room);
    }
    let mut moved = Vec::new();
    for at in (0..lines.len()).rev() {
        if excess > 0 && may_move(&lines[at]) {
            let line = lines.remove(at);
            excess = excess.saturating_sub(line.len());
            // A change that was cut short has left a copy already.
            if !filled[end..].split_inclusive(|&byte| byte == b'\n').any(|other| other == line) {
                moved.push(line);
            }
        }
    }
    if excess > 0 {
        return None;
    }
    tail.extend(moved.into_iter().rev().flatten());
    let new = lines.concat();
    let fill = blank(room - new.len());
    let bytes = [&old[..first], &new, &fill, &old[last..]].concat();
    Some(Change { tail, start, sector: bytes.try_into().ok()? })
}

/// Plans to replace the bytes in `range`, which lie in one line, by `new`. `None` if they do not
/// fit into the sector in which the range begins.
pub fn replace(text: &[u8], range: Range<usize>, new: &[u8]) -> Option<Change> {
    let start = range.start / SECTOR * SECTOR;
    let line_start = text[..range.start].iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let line_end = range.end + text[range.end..].iter().position(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let old_line = &text[line_start..line_end];
    let new_line = [&text[line_start..range.start], new, &text[range.end..line_end]].concat();
    let planned = plan(text, start, |lines| {
        let found = lines.iter().rposition(|line| line == old_line);
        if let Some(at) = found {
            lines[at] = new_line;
        }
        found.is_some()
    });
    // A line that continues in the next sector keeps its length.
    planned.or_else(|| {
        let end = start + SECTOR;
        let fits = range.len() == new.len() && range.end <= end && len_of(text) >= end;
        let mut sector: [u8; SECTOR] = text.get(start..end).filter(|_| fits)?.try_into().ok()?;
        sector[range.start - start..range.end - start].copy_from_slice(new);
        Some(Change { tail: Vec::new(), start, sector })
    })
}

/// Comments of this length together with their line ends. They are short, so that little is lost
/// for a later change where one of them lies in two sectors.
pub fn blank(len: usize) -> Vec<u8> {
    let mut lines = vec![b' '; len];
    for line in lines.chunks_mut(BLANK_MAX) {
        line[0] = b'#';
        line[line.len() - 1] = b'\n';
    }
    lines
}

/// Whether a line says nothing.
fn is_blank(line: &[u8]) -> bool {
    matches!(line.trim_ascii(), b"" | b"#")
}

/// Whether a line means the same at the end of the text. The first line does not, and comments with
/// an equals sign may be one that a program reads.
fn may_move(line: &[u8]) -> bool {
    let line = line.trim_ascii();
    let is_database = line.get(..4).is_some_and(|start| start.eq_ignore_ascii_case(b"ddb."));
    let is_comment = line.starts_with(b"#") && !line.contains(&b'=') && !super::is_descriptor(line);
    is_database || is_comment
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmdk::{Descriptor, edit};
    use proptest::prelude::*;

    fn text(hint: &str, extents: usize) -> Vec<u8> {
        let mut text = format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=9abcdef0\nparentFileNameHint=\"{hint}\"\ncreateType=\"twoGbMaxExtentSparse\"\n\n# Extent description\n"
        );
        (0..extents).for_each(|number| text += &format!("RW 4192256 SPARSE \"a-s{number:03}.vmdk\"\n"));
        text += "\n# The Disk Data Base\n#DDB\n\n";
        for key in ["virtualHWVersion", "geometry.cylinders", "geometry.heads", "geometry.sectors", "adapterType"] {
            text += &format!("ddb.{key} = \"{}\"\n", key.len());
        }
        text.into_bytes()
    }

    fn with_hint(hint: &str) -> impl FnOnce(&mut Lines) -> bool + '_ {
        move |lines| {
            edit::set_line(lines, "parentFileNameHint", Some(&format!("\"{hint}\"")), "parentCID");
            true
        }
    }

    fn applied(text: &[u8], change: &Change) -> (Vec<u8>, Vec<u8>) {
        let appended = [&text[..len_of(text)], &change.tail].concat();
        let mut done = appended.clone();
        done[change.start..change.start + SECTOR].copy_from_slice(&change.sector);
        (appended, done)
    }

    /// What programs read of a text, without the order of the database.
    fn read(text: &[u8]) -> (Descriptor, Vec<String>) {
        let parsed = Descriptor::parse(text, 0).unwrap();
        let values = ["createType", "parentFileNameHint", "ddb.geometry.heads", "ddb.adapterType"];
        let values = values.iter().map(|key| parsed.get(key).unwrap().to_owned()).collect();
        (parsed, values)
    }

    proptest! {
        #[test]
        fn the_text_is_whole_before_and_after_the_sector(
            old in "[a-z]{1,300}", new in "[a-z]{1,300}", extents in 1..20_usize,
        ) {
            let text = text(&old, extents);
            if let Some(change) = plan(&text, 0, with_hint(&new)) {
                let (between, after) = applied(&text, &change);
                let (was, mut values) = read(&text);
                prop_assert_eq!(&read(&between).0.extents, &was.extents);
                prop_assert_eq!(&read(&between).1, &values);
                values[1].clone_from(&new);
                prop_assert_eq!(&read(&after).1, &values);
                prop_assert_eq!(read(&after).0.extents, was.extents);
                prop_assert_eq!(&after[SECTOR..], &between[SECTOR..]);
            }
        }

        #[test]
        fn any_text_is_changed_or_refused(text in proptest::collection::vec(any::<u8>(), 0..1500), start in 0..3_usize) {
            if let Some(change) = plan(&text, start * SECTOR, with_hint("x")) {
                let (_, after) = applied(&text, &change);
                prop_assert!(after.len() >= change.start + SECTOR);
            }
        }
    }

    #[test]
    fn a_change_that_fits_is_one_write() {
        let text = text("base.vmdk", 9);
        let change = plan(&text, 0, with_hint("b.vmdk")).unwrap();
        assert_eq!(change.tail, b"");
        let (_, after) = applied(&text, &change);
        assert_eq!(after.len(), text.len());
        let again = plan(&after, 0, with_hint("base.vmdk")).unwrap();
        assert_eq!((again.tail.len(), read(&applied(&after, &again).1).1[1].as_str()), (0, "base.vmdk"));
    }

    #[test]
    fn a_longer_line_moves_the_database_to_the_end_once() {
        let text = text("base.vmdk", 3);
        let hint = "a".repeat(150);
        let change = plan(&text, 0, with_hint(&hint)).unwrap();
        assert!(String::from_utf8(change.tail.clone()).unwrap().contains("\nddb."));
        // A power cut after the first write: the lines are there already.
        let (between, _) = applied(&text, &change);
        assert_eq!(plan(&between, 0, with_hint(&hint)).unwrap().tail, b"");
    }

    #[test]
    fn what_does_not_fit_and_what_is_not_there_is_refused() {
        assert_eq!(plan(&text("base.vmdk", 3), 0, with_hint(&"a".repeat(400))), None);
        assert_eq!(plan(&text("base.vmdk", 3), 0, |_| false), None);
        // All lines of the sector are extents, which cannot move.
        assert_eq!(plan(&text("base.vmdk", 30), 0, with_hint(&"a".repeat(100))), None);
    }

    /// The last extent's length, wherever its line lies and whatever its number of digits.
    #[test]
    fn a_length_changes_in_its_sector() {
        for extents in 1..40 {
            let text = text("base.vmdk", extents);
            let range = edit::last_length(&text).unwrap();
            for new in ["5192256", "64192256"] {
                let Some(change) = replace(&text, range.clone(), new.as_bytes()) else { continue };
                let (_, after) = applied(&text, &change);
                let (was, now) = (read(&text), read(&after));
                assert_eq!((now.1, now.0.extents.len()), (was.1, extents));
                assert_eq!(now.0.extents.last().unwrap().sectors.to_string(), new);
                assert_eq!(now.0.extents[..extents - 1], was.0.extents[..extents - 1]);
            }
            let is_split = range.start / SECTOR != range.end / SECTOR;
            assert!(is_split || replace(&text, range, b"5192256").is_some(), "{extents} extents");
        }
    }

    #[test]
    fn a_short_text_is_first_made_as_long_as_a_sector() {
        let text = b"# Disk DescriptorFile\nCID=1\nparentCID=2\ncreateType=\"x\"\nRW 8 ZERO\0\0\0";
        let change = plan(text, 0, with_hint("x")).unwrap();
        let (between, after) = applied(text, &change);
        assert_eq!((between.len(), after.len()), (SECTOR, SECTOR));
        assert_eq!(Descriptor::parse(&after, 0).unwrap().parent_hint(), Some("x"));
    }
}
