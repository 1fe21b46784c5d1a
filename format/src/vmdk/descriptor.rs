//! The descriptor: a text with the identity of a disk, its extents and its "disk database".
//!
//! ```text
//!   # Disk DescriptorFile            comments and empty lines are kept as they are
//!   version=1
//!   CID=dc338103                     changes with the contents
//!   parentCID=ffffffff               none, or the CID that the parent must have
//!   parentFileNameHint="base.vmdk"   only with a parent
//!   createType="monolithicSparse"
//!   RW 20480 SPARSE "q.vmdk"         access, sectors, kind, file, for flat kinds its first sector
//!   ddb.adapterType = "ide"
//! ```
//!
//! Programs differ in line ends, in blanks around `=`, in the case of keys, and in the order of
//! sections: all are read. [`Descriptor::set`] changes one line and keeps all others byte by byte,
//! so what this program does not know survives a write. The text is UTF-8, which covers ASCII;
//! other encodings are refused where a byte differs from ASCII, because a wrong file name could
//! lead to another file.

use super::VmdkError;

/// The longest descriptor that is read, in bytes.
pub const DESCRIPTOR_MAX_BYTES: u64 = 1 << 20;
/// The most extents of a disk.
pub const EXTENTS_MAX: usize = 4096;
/// The `parentCID` of a disk without a parent.
pub const NO_PARENT: u32 = 0xffff_ffff;

/// The first line of a descriptor, in any case.
const FIRST_LINE: &str = "# disk descriptorfile";
const STRUCTURE: &str = "descriptor";

/// Who may use an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Readable and writable.
    ReadWrite,
    /// Readable.
    ReadOnly,
    /// Neither: its sectors read as zeros, and are not written.
    None,
}

/// How an extent's file holds its sectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Sector by sector, hosted products.
    Flat,
    /// Directory and grain tables ([`super::SparseHeader`]).
    Sparse,
    /// No file: zeros.
    Zero,
    /// Sector by sector, on VMFS.
    Vmfs,
    /// COWD: the redo log of ESX.
    VmfsSparse,
    /// A raw device mapping in virtual compatibility.
    VmfsRdm,
    /// A raw device mapping in physical compatibility.
    VmfsRaw,
    /// The space-efficient sparse extent of ESXi.
    SeSparse,
}

/// The words of the kinds, as VMware writes them.
const KINDS: [(&str, ExtentKind); 8] = [
    ("FLAT", ExtentKind::Flat),
    ("SPARSE", ExtentKind::Sparse),
    ("ZERO", ExtentKind::Zero),
    ("VMFS", ExtentKind::Vmfs),
    ("VMFSSPARSE", ExtentKind::VmfsSparse),
    ("VMFSRDM", ExtentKind::VmfsRdm),
    ("VMFSRAW", ExtentKind::VmfsRaw),
    ("SESPARSE", ExtentKind::SeSparse),
];

/// The words of the accesses.
const ACCESSES: [(&str, Access); 3] =
    [("RW", Access::ReadWrite), ("RDONLY", Access::ReadOnly), ("NOACCESS", Access::None)];

/// A part of the disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Extent {
    /// Who may use it.
    pub access: Access,
    /// Its length in sectors of 512 bytes.
    pub sectors: u64,
    /// How its file holds the sectors.
    pub kind: ExtentKind,
    /// Its file; `None` for [`ExtentKind::Zero`].
    pub file: Option<String>,
    /// The first sector in the file, for flat kinds.
    pub first_sector: u64,
}

impl Extent {
    /// The extent as a line.
    pub fn to_line(&self) -> String {
        let word = |(word, _): &(&'static str, _)| *word;
        let access = ACCESSES.iter().find(|row| row.1 == self.access).map_or("RW", |(word, _)| word);
        let kind = KINDS.iter().find(|row| row.1 == self.kind).map_or("FLAT", word);
        let mut line = format!("{access} {} {kind}", self.sectors);
        if let Some(file) = &self.file {
            line += &format!(" \"{file}\"");
            if matches!(self.kind, ExtentKind::Flat | ExtentKind::Vmfs) {
                line += &format!(" {}", self.first_sector);
            }
        }
        line
    }

    /// Parses a line that begins with an access; `None` if it does not.
    pub(super) fn parse(line: &str) -> Option<Result<Self, (String, &'static str)>> {
        let (access, rest) = line.split_once([' ', '\t'])?;
        let access = ACCESSES.iter().find(|row| row.0.eq_ignore_ascii_case(access))?.1;
        Some(Self::parse_rest(access, rest.trim_start()))
    }

    fn parse_rest(access: Access, rest: &str) -> Result<Self, (String, &'static str)> {
        let wrong = |found: &str, expected| Err((format!("{found:?}"), expected));
        let (sectors, rest) = word(rest);
        let Ok(sectors) = sectors.parse::<u64>() else {
            return wrong(sectors, "the extent's length in sectors");
        };
        if sectors > 1 << 54 {
            return wrong(&sectors.to_string(), "an extent of at most 2^54 sectors");
        }
        let (kind, rest) = word(rest);
        let Some((_, kind)) = KINDS.iter().find(|row| row.0.eq_ignore_ascii_case(kind)) else {
            return wrong(
                kind,
                "the kind of the extent: FLAT, SPARSE, ZERO, VMFS, VMFSSPARSE, VMFSRDM, VMFSRAW or SESPARSE",
            );
        };
        let mut extent = Self { access, sectors, kind: *kind, file: None, first_sector: 0 };
        if *kind == ExtentKind::Zero {
            return Ok(extent);
        }
        let Some((file, rest)) = rest.strip_prefix('"').and_then(|rest| rest.split_once('"')) else {
            return wrong(rest, "the extent's file name in quotation marks");
        };
        if file.is_empty() || file.contains('\0') {
            return wrong(file, "a file name");
        }
        extent.file = Some(file.to_owned());
        let (first, _) = word(rest.trim_start());
        if !first.is_empty() {
            let Ok(first) = first.parse::<u64>() else {
                return wrong(first, "the extent's first sector in its file");
            };
            if first > 1 << 54 {
                return wrong(&first.to_string(), "a first sector below 2^54");
            }
            extent.first_sector = first;
        }
        Ok(extent)
    }
}

/// The first word and what follows it.
fn word(text: &str) -> (&str, &str) {
    match text.split_once([' ', '\t']) {
        Some((word, rest)) => (word, rest.trim_start()),
        None => (text, ""),
    }
}

/// A descriptor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// The lines without their ends.
    lines: Vec<String>,
    line_end: &'static str,
    /// Identity of the contents.
    pub cid: u32,
    /// The CID that the parent must have; [`NO_PARENT`] for none.
    pub parent_cid: u32,
    /// The kind of disk, as the file spells it: `monolithicSparse`, `vmfs` ...
    pub create_type: String,
    /// The parts of the disk, in their order.
    pub extents: Vec<Extent>,
}

/// What can be read of a damaged descriptor: the lines that are whole.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Fragments {
    /// `parentCID`; `None` if no line has it, or several have different ones.
    pub parent_cid: Option<u32>,
    /// `parentFileNameHint`.
    pub parent_hint: Option<String>,
    /// Whether `createType` is `streamOptimized`.
    pub is_stream: bool,
    /// Length in sectors of the only extent.
    pub sectors: Option<u64>,
}

impl Fragments {
    /// Reads the lines of a text that may be damaged anywhere.
    pub fn of(bytes: &[u8]) -> Self {
        let lines: Vec<&str> = bytes
            .split(|byte| matches!(byte, b'\n' | b'\r' | 0))
            .filter_map(|line| std::str::from_utf8(line).ok())
            .collect();
        fn only<T: PartialEq>(mut found: impl Iterator<Item = T>) -> Option<T> {
            let first = found.next()?;
            found.all(|other| other == first).then_some(first)
        }
        let values = |key: &'static str| lines.iter().filter_map(move |line| value_of(line, key));
        let cid = only(values("parentCID")).filter(|text| text.len() == 8);
        let mut extents = lines.iter().filter_map(|line| Extent::parse(line.trim())?.ok());
        let sectors = extents.next().filter(|_| extents.next().is_none()).map(|extent| extent.sectors);
        Self {
            parent_cid: cid.and_then(|text| u32::from_str_radix(text, 16).ok()),
            parent_hint: only(values("parentFileNameHint")).map(str::to_owned),
            is_stream: only(values("createType")) == Some("streamOptimized"),
            sectors: sectors.filter(|&sectors| sectors > 0),
        }
    }
}

/// Whether the bytes begin like a descriptor.
pub fn is_descriptor(bytes: &[u8]) -> bool {
    let first = bytes.get(..FIRST_LINE.len()).unwrap_or_default();
    first.eq_ignore_ascii_case(FIRST_LINE.as_bytes())
}

impl Descriptor {
    /// Parses a descriptor that begins at `offset_bytes` of its file and ends at a byte 0 or at the
    /// end of `bytes`.
    ///
    /// # Errors
    /// For a text that is longer than [`DESCRIPTOR_MAX_BYTES`] or no UTF-8, for another version
    /// than 1 to 3, for a missing or wrong CID, type or extent, for a key that is there twice with
    /// two values, and for more than [`EXTENTS_MAX`] extents.
    pub fn parse(bytes: &[u8], offset_bytes: u64) -> Result<Self, VmdkError> {
        let fail = |at: usize, found: String, expected: &str| VmdkError {
            structure: STRUCTURE,
            offset_bytes: offset_bytes.saturating_add(at as u64),
            found,
            expected: expected.into(),
        };
        let bytes = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        if bytes.len() as u64 > DESCRIPTOR_MAX_BYTES {
            return Err(fail(0, format!("a text of {} bytes", bytes.len()), "at most 1 MiB"));
        }
        let text = std::str::from_utf8(bytes).map_err(|error| {
            fail(error.valid_up_to(), "a byte that is not UTF-8".into(), "a descriptor in ASCII or UTF-8")
        })?;
        if !is_descriptor(bytes) {
            let first = text.lines().next().unwrap_or_default();
            let first: String = first.chars().take(40).collect();
            return Err(fail(0, format!("{first:?}"), "\"# Disk DescriptorFile\""));
        }
        let line_end = if text.contains("\r\n") { "\r\n" } else { "\n" };
        let lines: Vec<String> = text.split('\n').map(|line| line.trim_end_matches('\r').to_owned()).collect();
        let mut parsed =
            Self { lines, line_end, cid: 0, parent_cid: NO_PARENT, create_type: String::new(), extents: Vec::new() };
        let mut at = 0;
        for line in text.split('\n') {
            if let Some(extent) = Extent::parse(line.trim()) {
                parsed.extents.push(extent.map_err(|(found, expected)| fail(at, found, expected))?);
                if parsed.extents.len() > EXTENTS_MAX {
                    return Err(fail(at, format!("more than {EXTENTS_MAX} extents"), "fewer"));
                }
            }
            at += line.len() + 1;
        }
        for (key, expected) in [("version", "1"), ("CID", "one CID"), ("parentCID", "one parentCID")] {
            let mut values = parsed.values(key);
            let first = values.next();
            if let Some(other) = values.find(|value| Some(*value) != first) {
                return Err(fail(0, format!("{key} {first:?} and {other:?}"), expected));
            }
        }
        let hex = |key: &str| match parsed.get(key) {
            None => Ok(None),
            Some(text) => match u32::from_str_radix(text, 16) {
                Ok(value) if text.len() <= 8 => Ok(Some(value)),
                _ => Err(fail(0, format!("{key}={text:?}"), "a number of 8 hexadecimal digits")),
            },
        };
        let version = parsed.get("version").unwrap_or("1");
        if !matches!(version, "1" | "2" | "3") {
            return Err(fail(0, format!("version={version:?}"), "version 1, 2 or 3"));
        }
        let cid = hex("CID")?.ok_or_else(|| fail(0, "no CID".into(), "CID=xxxxxxxx"))?;
        let parent_cid = hex("parentCID")?.unwrap_or(NO_PARENT);
        let create_type = parsed.get("createType").ok_or_else(|| fail(0, "no createType".into(), "createType=..."))?;
        let create_type = create_type.to_owned();
        if parsed.extents.is_empty() {
            return Err(fail(0, "no extent".into(), "a line such as: RW 20480 SPARSE \"disk.vmdk\""));
        }
        Ok(Self { cid, parent_cid, create_type, ..parsed })
    }

    /// A new descriptor with these extents and values of the disk database.
    pub fn new(cid: u32, create_type: &str, extents: Vec<Extent>, database: &[(&str, String)]) -> Self {
        let mut lines: Vec<String> = ["# Disk DescriptorFile", "version=1"].map(String::from).to_vec();
        lines.extend([format!("CID={cid:08x}"), format!("parentCID={NO_PARENT:08x}")]);
        lines.extend([format!("createType=\"{create_type}\""), String::new(), "# Extent description".into()]);
        lines.extend(extents.iter().map(Extent::to_line));
        lines.extend([String::new(), "# The Disk Data Base".into(), "#DDB".into(), String::new()]);
        lines.extend(database.iter().map(|(key, value)| format!("{key} = \"{value}\"")));
        lines.push(String::new());
        Self { lines, line_end: "\n", cid, parent_cid: NO_PARENT, create_type: create_type.into(), extents }
    }

    /// The text.
    pub fn to_text(&self) -> String {
        self.lines.join(self.line_end)
    }

    /// The value of a key, without quotation marks; keys are compared without case.
    pub fn get(&self, key: &str) -> Option<&str> {
        self.values(key).next()
    }

    /// The value of a key that begins with `#`, which other programs read as a comment.
    pub fn in_comment(&self, key: &str) -> Option<&str> {
        self.lines
            .iter()
            .find_map(|line| line.split_once('=').filter(|(found, _)| found.trim() == key))
            .map(|(_, value)| value.trim())
    }

    fn values(&self, key: &str) -> impl Iterator<Item = &str> {
        self.lines.iter().filter_map(move |line| value_of(line, key))
    }

    /// The name of the parent's descriptor, as this disk records it.
    pub fn parent_hint(&self) -> Option<&str> {
        self.get("parentFileNameHint")
    }

    /// The length of the disk in sectors; `None` if the sum exceeds 64 bits.
    pub fn sectors(&self) -> Option<u64> {
        self.extents.iter().try_fold(0_u64, |sum, extent| sum.checked_add(extent.sectors))
    }

    /// Sets `CID`.
    pub fn set_cid(&mut self, cid: u32) {
        self.cid = cid;
        self.set("CID", &format!("{cid:08x}"));
    }

    /// Names a parent, or none.
    pub fn set_parent(&mut self, parent: Option<(u32, &str)>) {
        self.parent_cid = parent.map_or(NO_PARENT, |(cid, _)| cid);
        self.set("parentCID", &format!("{:08x}", self.parent_cid));
        match parent {
            Some((_, hint)) => self.set("parentFileNameHint", &format!("\"{hint}\"")),
            None => self.lines.retain(|line| value_of(line, "parentFileNameHint").is_none()),
        }
    }

    /// Gives a key a value, written as `value` is, with its quotation marks if it has any. A key
    /// that is not there yet follows `parentCID`, or for the disk database the last line.
    pub fn set(&mut self, key: &str, value: &str) {
        if let Some(line) = self.lines.iter_mut().find(|line| value_of(line, key).is_some()) {
            let equals = line.find('=').map_or(line.len(), |at| at + 1);
            let blanks = line[equals..].len() - line[equals..].trim_start().len();
            line.truncate(equals + blanks);
            line.push_str(value);
            return;
        }
        let is_database = key.starts_with("ddb.");
        let after = self.lines.iter().position(|line| value_of(line, "parentCID").is_some());
        let place = match (is_database, after) {
            (false, Some(at)) => at + 1,
            _ => self.lines.iter().rposition(|line| !line.is_empty()).map_or(0, |at| at + 1),
        };
        let equals = if is_database { " = " } else { "=" };
        self.lines.insert(place, format!("{key}{equals}{value}"));
    }
}

/// The value in a line, if it is that of the key.
fn value_of<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let line = line.trim();
    if line.starts_with('#') {
        return None;
    }
    let (found, value) = line.split_once('=')?;
    let value = value.trim();
    let unquoted = value.strip_prefix('"').and_then(|rest| rest.strip_suffix('"')).unwrap_or(value);
    found.trim_end().eq_ignore_ascii_case(key).then_some(unquoted)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn whole_lines_of_a_damaged_descriptor_are_read() {
        let text = b"\xff\xfe Descr\xffptorFile\nparentCID=00c0ffee\r\nparentFileNameHint=\"a.vmdk\"\n\
                     createType=\"streamOptimized\"\nRW 640 SPARSE \"x.vmdk\"\n\0\0garbage";
        let found = Fragments::of(text);
        let expected = Fragments {
            parent_cid: Some(0x00c0_ffee),
            parent_hint: Some("a.vmdk".into()),
            is_stream: true,
            sectors: Some(640),
        };
        assert_eq!(found, expected);
        let twice = [&text[..], b"\nparentCID=ffffffff\nRW 1 ZERO"].concat();
        let found = Fragments::of(&twice);
        assert_eq!((found.parent_cid, found.sectors), (None, None), "lines contradict each other");
    }

    const OF_QEMU: &str = "# Disk DescriptorFile\nversion=1\nCID=2299f617\nparentCID=ffffffff\n\
        createType=\"twoGbMaxExtentSparse\"\n\n# Extent description\nRW 4194304 SPARSE \"q2-s001.vmdk\"\n\
        RW 2097152 SPARSE \"q2-s002.vmdk\"\n\n# The Disk Data Base\n#DDB\n\nddb.virtualHWVersion = \"4\"\n\
        ddb.geometry.cylinders = \"6241\"\nddb.adapterType = \"ide\"\n";

    fn parse(text: &str) -> Result<Descriptor, VmdkError> {
        Descriptor::parse(text.as_bytes(), 512)
    }

    #[test]
    fn a_descriptor_of_qemu_img() {
        let parsed = parse(OF_QEMU).unwrap();
        assert_eq!((parsed.cid, parsed.parent_cid), (0x2299_f617, NO_PARENT));
        assert_eq!(parsed.create_type, "twoGbMaxExtentSparse");
        assert_eq!(parsed.sectors(), Some(6 << 20));
        assert_eq!(parsed.extents[1].file.as_deref(), Some("q2-s002.vmdk"));
        assert_eq!(parsed.get("DDB.AdapterType"), Some("ide"));
        assert_eq!(parsed.to_text(), OF_QEMU);
    }

    #[test]
    fn line_ends_blanks_case_and_padding_do_not_matter() {
        let text = "# disk descriptorfile\r\nVersion = 1\r\ncid = fffffffe\r\nPARENTCID=12345678 \r\n\
            parentFileNameHint=\"a b.vmdk\"\r\ncreateType = vmfs\r\n  rw 8 vmfs \"x y-flat.vmdk\" 0\r\n\
            NOACCESS 63 ZERO\r\nRDONLY 9 FLAT \"\\\\.\\PhysicalDrive0\" 63 1 2\r\n\0\0\0junk";
        let parsed = parse(text).unwrap();
        assert_eq!((parsed.cid, parsed.parent_cid), (0xffff_fffe, 0x1234_5678));
        assert_eq!((parsed.parent_hint(), &*parsed.create_type), (Some("a b.vmdk"), "vmfs"));
        let extents: Vec<_> = parsed.extents.iter().map(Extent::to_line).collect();
        let expected =
            ["RW 8 VMFS \"x y-flat.vmdk\" 0", "NOACCESS 63 ZERO", "RDONLY 9 FLAT \"\\\\.\\PhysicalDrive0\" 63"];
        assert_eq!(extents, expected);
        assert!(text.starts_with(&parsed.to_text()));
    }

    #[test]
    fn one_value_changes_and_all_other_bytes_stay() {
        let mut changed = parse(OF_QEMU).unwrap();
        changed.set_cid(0xabc);
        assert_eq!(changed.to_text(), OF_QEMU.replace("2299f617", "00000abc"));
        changed.set("ddb.adapterType", "\"lsilogic\"");
        changed.set("ddb.thinProvisioned", "\"1\"");
        changed.set_parent(Some((7, "base.vmdk")));
        let again = parse(&changed.to_text()).unwrap();
        assert_eq!((again.cid, again.parent_cid, again.parent_hint()), (0xabc, 7, Some("base.vmdk")));
        assert_eq!((again.get("ddb.adaptertype"), again.get("ddb.thinprovisioned")), (Some("lsilogic"), Some("1")));
        changed.set_parent(None);
        changed.set_cid(0x2299_f617);
        changed.set("ddb.adapterType", "\"ide\"");
        assert_eq!(changed.to_text(), OF_QEMU.replace("\"ide\"\n", "\"ide\"\nddb.thinProvisioned = \"1\"\n"));
    }

    #[test]
    fn a_new_descriptor_is_read_again() {
        let extent = Extent {
            access: Access::ReadWrite,
            sectors: 99,
            kind: ExtentKind::Sparse,
            file: Some("ä.vmdk".into()),
            first_sector: 0,
        };
        let new = Descriptor::new(1, "monolithicSparse", vec![extent], &[("ddb.adapterType", "lsilogic".into())]);
        assert_eq!(parse(&new.to_text()).unwrap(), new);
    }

    #[test]
    fn wrong_texts_are_refused_by_name() {
        let refused = |from: &str, to: &str, what: &str| {
            let error = parse(&OF_QEMU.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        };
        refused("# Disk", "# disc", "expected \"# Disk DescriptorFile\"");
        refused("version=1", "version=4", "version 1, 2 or 3");
        refused("CID=2299f617\n", "", "no CID");
        refused("CID=2299f617", "CID=2299f6170", "8 hexadecimal digits");
        refused("CID=2299f617", "CID=1\nCID=2", "one CID");
        refused("createType", "type", "no createType");
        refused("RW 4194304 SPARSE", "RW 4194304 SPARS", "kind of the extent");
        refused("RW 4194304", "RW -1", "length in sectors");
        refused("RW 4194304", "RW 99999999999999999", "2^54");
        refused("\"q2-s001.vmdk\"", "q2-s001.vmdk", "quotation marks");
        refused("\"q2-s001.vmdk\"", "\"\"", "a file name");
        refused("RW ", "# RW ", "no extent");
        let many = OF_QEMU.to_owned() + &"RW 1 ZERO\n".repeat(EXTENTS_MAX);
        assert!(parse(&many).unwrap_err().to_string().contains("more than 4096 extents"));
        let long = OF_QEMU.to_owned() + &"#".repeat(DESCRIPTOR_MAX_BYTES as usize);
        assert!(parse(&long).unwrap_err().to_string().contains("at most 1 MiB"));
        let mut bytes = OF_QEMU.as_bytes().to_vec();
        bytes[150] = 0xe4;
        let error = Descriptor::parse(&bytes, 512).unwrap_err();
        assert_eq!(error.offset_bytes, 512 + 150, "{error}");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused(text in "(# Disk DescriptorFile\n)?(([A-Za-z.]{0,9}[= ]{0,2}[\"0-9a-zA-Z ]{0,12}\r?\n)|(RW [0-9]{0,20} (FLAT|ZERO) \"?[a-z]{0,3}\"? ?[0-9]{0,3}\n)){0,9}") {
            if let Ok(parsed) = parse(&text) {
                prop_assert_eq!(parse(&parsed.to_text()).unwrap(), parsed);
            }
        }
    }
}
