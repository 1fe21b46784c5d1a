//! Changes of a descriptor in place: the text keeps its length, and every other byte stays.
//!
//! ```text
//!   CID=dc338103            ─▶  CID=0ab4e1f7               replace_value
//!   changeTrackPath="x"     ─▶  #hangeTrackPath="x"        comment_out
//! ```
//!
//! What must hold: a change of one value within one sector is written by one sector, so a power cut
//! leaves the old text or the new one.

use super::Extent;
use std::ops::Range;

/// Replaces the value of a key, without its quotation marks, in every line that has the key.
/// Returns whether all lines were changed: a value of another length than `value` is left alone.
pub fn replace_value(text: &mut [u8], key: &str, value: &str) -> bool {
    let places = places(text, key);
    let fits = !places.is_empty() && places.iter().all(|(_, range)| range.len() == value.len());
    if fits {
        places.into_iter().for_each(|(_, range)| text[range].copy_from_slice(value.as_bytes()));
    }
    fits
}

/// The value of a key, without quotation marks, in the first line that has the key.
pub fn value<'a>(text: &'a [u8], key: &str) -> Option<&'a str> {
    let (_, range) = places(text, key).into_iter().next()?;
    std::str::from_utf8(&text[range]).ok()
}

/// Makes every line with this key a comment.
pub fn comment_out(text: &mut [u8], key: &str) {
    places(text, key).into_iter().for_each(|(start, _)| text[start] = b'#');
}

/// Gives a key a value in lines that have their line ends, written as `value` is, or removes it. A
/// new line follows the one with the key `after`. Other lines with the key are removed.
pub fn set_line(lines: &mut Vec<Vec<u8>>, key: &str, value: Option<&str>, after: &str) {
    let place = lines.iter().position(|line| !places(line, key).is_empty());
    let old = place.map(|at| lines[at].clone());
    lines.retain(|line| places(line, key).is_empty());
    let Some(value) = value else { return };
    let after = || lines.iter().position(|line| !places(line, after).is_empty()).map(|at| at + 1);
    let at = place.or_else(after).unwrap_or(lines.len()).min(lines.len());
    // The old line's way to write it stays: the case of the key, blanks, the line end.
    let old = old.unwrap_or_else(|| format!("{key}=\n").into_bytes());
    let equals = old.iter().position(|&byte| byte == b'=').map_or(old.len(), |at| at + 1);
    let blanks = old[equals..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
    let end: &[u8] = if old.ends_with(b"\r\n") { b"\r\n" } else { b"\n" };
    lines.insert(at, [&old[..equals + blanks], value.as_bytes(), end].concat());
}

/// The range of the value of a key, without quotation marks, in the first line that has the key.
pub fn value_range(text: &[u8], key: &str) -> Option<Range<usize>> {
    Some(places(text, key).into_iter().next()?.1)
}

/// The range of the length of the last extent, in sectors; `None` without an extent.
pub fn last_length(text: &[u8]) -> Option<Range<usize>> {
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    let (mut start, mut found) = (0, None);
    for line in text[..end].split(|&byte| byte == b'\n') {
        let line_start = start;
        start += line.len() + 1;
        let is_extent = std::str::from_utf8(line).is_ok_and(|line| matches!(Extent::parse(line.trim()), Some(Ok(_))));
        if is_extent {
            let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
            let access = line.len() - line.trim_ascii_start().len();
            let access_end = access + line[access..].iter().position(blank)?;
            let first = access_end + line[access_end..].iter().position(|byte| !blank(byte))?;
            let len = line[first..].iter().position(blank)?;
            found = Some(line_start + first..line_start + first + len);
        }
    }
    found
}

/// Where the first line with the key begins in the text; `None` without one.
pub fn line_start(text: &[u8], key: &str) -> Option<usize> {
    places(text, key).first().map(|(start, _)| *start)
}

/// For each line with the key: where the key begins, and the range of its value.
fn places(text: &[u8], key: &str) -> Vec<(usize, Range<usize>)> {
    let end = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    let (mut found, mut start) = (Vec::new(), 0);
    for line in text[..end].split(|&byte| byte == b'\n') {
        let line_start = start;
        start += line.len() + 1;
        let Some(equals) = line.iter().position(|&byte| byte == b'=') else { continue };
        let (name, value) = (&line[..equals], &line[equals + 1..]);
        if !name.trim_ascii().eq_ignore_ascii_case(key.as_bytes()) {
            continue;
        }
        let key_start = line_start + (name.len() - name.trim_ascii_start().len());
        let mut value_start = line_start + equals + 1 + (value.len() - value.trim_ascii_start().len());
        let mut value = value.trim_ascii();
        if let Some(inner) = value.strip_prefix(b"\"").and_then(|rest| rest.strip_suffix(b"\"")) {
            (value, value_start) = (inner, value_start + 1);
        }
        found.push((key_start, value_start..value_start + value.len()));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vmdk::Descriptor;

    const TEXT: &str = "# Disk DescriptorFile\r\nversion=1\r\n# CID=00000000\r\nCID=dc338103\r\nparentCID=ffffffff\r\n\
        createType=\"monolithicSparse\"\r\n cid = dc338103 \r\nRW 8 SPARSE \"a.vmdk\"\r\n\
        changeTrackPath=\"a-ctk.vmdk\"\r\nddb.longContentID = \"0123456789abcdef\"\r\n\0CID=77777777\n";

    #[test]
    fn a_value_changes_in_every_line_that_has_its_key_and_nothing_else() {
        let mut text = TEXT.as_bytes().to_vec();
        assert!(replace_value(&mut text, "CID", "0ab4e1f7"));
        assert_eq!(String::from_utf8(text.clone()).unwrap(), TEXT.replace("dc338103", "0ab4e1f7"));
        assert_eq!(Descriptor::parse(&text, 0).unwrap().cid, 0x0ab4_e1f7);
        assert_eq!(value(&text, "ddb.longcontentid"), Some("0123456789abcdef"));
    }

    #[test]
    fn another_length_and_a_missing_key_change_nothing() {
        let mut text = TEXT.as_bytes().to_vec();
        assert!(!replace_value(&mut text, "CID", "1"));
        assert!(!replace_value(&mut text, "ddb.uuid", "1"));
        assert_eq!(text, TEXT.as_bytes());
    }

    #[test]
    fn the_length_of_the_last_extent_is_found() {
        let text = "RW 8 SPARSE \"a\"\n# RW 1 ZERO\n\t rw  \t77 FLAT \"RW 3 ZERO\" 0\r\nRW x\n\0RW 9 ZERO\n";
        assert_eq!(&text[last_length(text.as_bytes()).unwrap()], "77");
        assert_eq!(last_length(b"CID=1\nRW"), None);
        assert_eq!(&TEXT[value_range(TEXT.as_bytes(), "version").unwrap()], "1");
    }

    #[test]
    fn a_key_that_is_commented_out_is_not_read_any_more() {
        let mut text = TEXT.as_bytes().to_vec();
        comment_out(&mut text, "changeTrackPath");
        assert_eq!(String::from_utf8(text.clone()).unwrap(), TEXT.replace("change", "#hange"));
        assert_eq!(Descriptor::parse(&text, 0).unwrap().get("changeTrackPath"), None);
    }
}
