//! Reads an envelope, element by element.
//!
//! Names are compared without their prefixes: the elements that are kept have names that no other
//! namespace of OVF uses at the same place. Nothing is kept of elements that are passed over, so
//! memory is bounded by the text and by the limits of the lists.

use super::{OVF_ITEMS_MAX, OVF_MAX_BYTES, OvfError, quoted};
use quick_xml::{
    Reader, XmlVersion,
    escape::resolve_predefined_entity,
    events::{BytesStart, Event},
};

const STRUCTURE: &str = "OVF envelope";
const DEPTH_MAX: usize = 64;
/// Texts are cut after this length.
const TEXT_MAX_BYTES: usize = 1024;
/// What the namespace of every version that is read begins with.
const NAMESPACE: &str = "http://schemas.dmtf.org/ovf/envelope/";

/// A file of the package.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OvfFile {
    /// Id of the file, by which other sections name it.
    pub id: String,
    /// File name or URL.
    pub href: String,
    /// Length of the file in bytes.
    pub size_bytes: Option<u64>,
    /// How it is compressed as a whole: `gzip`. Empty and `identity` are `None`.
    pub compression: Option<String>,
    /// Length of the pieces into which it is cut.
    pub chunk_bytes: Option<u64>,
}

/// A virtual disk of the package.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OvfDisk {
    /// Id of the disk, by which other sections name it.
    pub id: String,
    /// The file that has its contents; `None` for an empty disk.
    pub file_ref: Option<String>,
    /// Its virtual size in bytes; `None` if the text gives it by a property or in unknown units.
    pub capacity_bytes: Option<u64>,
    /// URI of its format.
    pub format: String,
    /// The disk on which it depends.
    pub parent_ref: Option<String>,
}

/// A virtual machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OvfSystem {
    /// Id of the machine.
    pub id: String,
    /// Name of the machine.
    pub name: Option<String>,
    /// The operating system, as the text describes it.
    pub operating_system: Option<String>,
    /// Number of processors.
    pub processors: Option<u64>,
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
}

/// What an envelope says of disks and machines.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Envelope {
    /// The version of the namespace: 1 or 2.
    pub version: u32,
    /// The files.
    pub files: Vec<OvfFile>,
    /// The disks.
    pub disks: Vec<OvfDisk>,
    /// The machines.
    pub systems: Vec<OvfSystem>,
}

/// An item of the hardware, while it is read.
#[derive(Debug, Default)]
struct Item {
    kind: String,
    quantity: String,
    units: String,
}

impl Envelope {
    /// Parses an envelope.
    ///
    /// # Errors
    /// For a text that is longer than [`OVF_MAX_BYTES`], not UTF-8 or not well formed, for a
    /// document type, for another root or an unknown version, and for more than 4,096 items of a
    /// kind.
    pub fn parse(bytes: &[u8]) -> Result<Self, OvfError> {
        let text = std::str::from_utf8(bytes)
            .map_err(|error| wrong(1, format!("bytes that are no UTF-8, from {}", error.valid_up_to()), "UTF-8"))?;
        if text.len() as u64 > OVF_MAX_BYTES {
            return Err(wrong(1, format!("a text of {} bytes", text.len()), "at most 4 MiB"));
        }
        Parser { text, ..Parser::default() }.run()
    }

    /// The file of a disk.
    pub fn file_of(&self, disk: &OvfDisk) -> Option<&OvfFile> {
        let file_ref = disk.file_ref.as_ref()?;
        self.files.iter().find(|file| file.id == *file_ref)
    }
}

fn wrong(line: usize, found: impl Into<String>, expected: &str) -> OvfError {
    OvfError { structure: STRUCTURE, line, found: found.into(), expected: expected.into() }
}

#[derive(Default)]
struct Parser<'a> {
    text: &'a str,
    envelope: Envelope,
    /// Local names of the open elements.
    path: Vec<String>,
    /// Text of the innermost element.
    content: String,
    item: Item,
    /// Position up to which lines were counted, and the line there, from 0.
    counted: (usize, usize),
}

impl Parser<'_> {
    fn run(mut self) -> Result<Envelope, OvfError> {
        let mut reader = Reader::from_str(self.text);
        let mut is_complete = false;
        loop {
            let line = self.line_at(reader.buffer_position());
            let event = reader.read_event().map_err(|error| {
                let line = self.line_at(reader.error_position());
                wrong(line, error.to_string(), "well-formed XML")
            })?;
            match event {
                Event::Start(start) => {
                    if is_complete {
                        return Err(wrong(line, "a second root element", "one <Envelope>"));
                    }
                    self.open(&start, line)?;
                }
                Event::Empty(start) => {
                    if is_complete {
                        return Err(wrong(line, "a second root element", "one <Envelope>"));
                    }
                    self.open(&start, line)?;
                    self.close();
                }
                Event::End(_) => {
                    self.close();
                    is_complete = self.path.is_empty();
                }
                Event::Text(piece) => self.append(&piece.decode().unwrap_or_default()),
                Event::CData(piece) => self.append(&piece.decode().unwrap_or_default()),
                Event::GeneralRef(reference) => {
                    let character = reference.resolve_char_ref().ok().flatten().map(String::from);
                    let name = reference.decode().unwrap_or_default();
                    let resolved = character.or_else(|| resolve_predefined_entity(&name).map(str::to_owned));
                    let unknown = || wrong(line, format!("the entity {}", quoted(&name)), "one of those of XML itself");
                    self.append(&resolved.ok_or_else(unknown)?);
                }
                Event::DocType(_) => return Err(wrong(line, "a document type", "<Envelope>")),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof if is_complete => return Ok(self.envelope),
                Event::Eof => return Err(wrong(line, "the end of the text", "a complete <Envelope>")),
            }
        }
    }

    /// The line of a position, counted from 1. Positions only grow.
    fn line_at(&mut self, position: u64) -> usize {
        let (from, lines) = self.counted;
        let to = usize::try_from(position).unwrap_or(usize::MAX).clamp(from, self.text.len());
        let more = self.text.as_bytes()[from..to].iter().filter(|byte| **byte == b'\n').count();
        self.counted = (to, lines + more);
        lines + more + 1
    }

    fn append(&mut self, piece: &str) {
        if self.content.len() < TEXT_MAX_BYTES {
            let room = TEXT_MAX_BYTES - self.content.len();
            let cut = (0..=room.min(piece.len())).rev().find(|at| piece.is_char_boundary(*at)).unwrap_or(0);
            self.content.push_str(&piece[..cut]);
        }
    }

    fn open(&mut self, start: &BytesStart<'_>, line: usize) -> Result<(), OvfError> {
        let name = String::from_utf8_lossy(start.local_name().as_ref()).into_owned();
        let mut attributes = Vec::new();
        for attribute in start.attributes() {
            let unreadable = |found: String| wrong(line, format!("<{name}> with {found}"), "well-formed XML");
            let attribute = attribute.map_err(|error| unreadable(error.to_string()))?;
            let value =
                attribute.normalized_value(XmlVersion::Implicit1_0).map_err(|error| unreadable(error.to_string()))?;
            let key = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
            attributes.push((key, value.into_owned()));
        }
        let get = |wanted: &str| {
            let is_it = |key: &str| key.rsplit(':').next() == Some(wanted);
            attributes.iter().find(|(key, _)| is_it(key)).map(|(_, value)| value.clone())
        };
        let number = |wanted: &str| get(wanted).and_then(|value| value.trim().parse::<u64>().ok());
        if self.path.is_empty() {
            let namespaces = attributes.iter().filter(|(key, _)| key.starts_with("xmlns")).map(|(_, value)| value);
            let version = namespaces.filter_map(|value| value.strip_prefix(NAMESPACE)).next().map(str::to_owned);
            self.envelope.version = match (name.as_str(), version.as_deref()) {
                ("Envelope", Some("1")) => 1,
                ("Envelope", Some("2")) => 2,
                ("Envelope", Some(other)) => {
                    return Err(wrong(line, format!("version {} of OVF", quoted(other)), "version 1 or 2"));
                }
                ("Envelope", None) => {
                    return Err(wrong(line, "an <Envelope> of another namespace (OVF 0.9?)", "that of OVF 1 or 2"));
                }
                _ => return Err(wrong(line, format!("<{}>", quoted(&name)), "<Envelope>")),
            };
        }
        if self.path.len() == DEPTH_MAX {
            return Err(wrong(line, format!("elements that nest {DEPTH_MAX} deep"), "an envelope"));
        }
        let envelope = &mut self.envelope;
        let parent = self.path.last().map_or("", String::as_str);
        match (parent, name.as_str()) {
            ("References", "File") => envelope.files.push(OvfFile {
                id: get("id").unwrap_or_default(),
                href: get("href").unwrap_or_default(),
                size_bytes: number("size"),
                compression: get("compression").filter(|how| !matches!(how.as_str(), "" | "identity")),
                chunk_bytes: number("chunkSize").filter(|bytes| *bytes > 0),
            }),
            ("DiskSection", "Disk") => {
                let units = get("capacityAllocationUnits");
                let capacity_bytes = number("capacity")
                    .and_then(|count| count.checked_mul(units.as_deref().map_or(Some(1), unit_bytes)?));
                envelope.disks.push(OvfDisk {
                    id: get("diskId").unwrap_or_default(),
                    file_ref: get("fileRef").filter(|file| !file.is_empty()),
                    capacity_bytes,
                    format: get("format").unwrap_or_default(),
                    parent_ref: get("parentRef").filter(|parent| !parent.is_empty()),
                });
            }
            (_, "VirtualSystem") => {
                envelope.systems.push(OvfSystem { id: get("id").unwrap_or_default(), ..OvfSystem::default() });
            }
            (_, "Item") => self.item = Item::default(),
            _ => {}
        }
        let longest = envelope.files.len().max(envelope.disks.len()).max(envelope.systems.len());
        if longest > OVF_ITEMS_MAX {
            return Err(wrong(line, format!("more than {OVF_ITEMS_MAX} of <{name}>"), "fewer"));
        }
        self.path.push(name);
        self.content.clear();
        Ok(())
    }

    fn close(&mut self) {
        let text = self.content.trim().to_owned();
        if let Some(system) = self.envelope.systems.last_mut() {
            // Whether the innermost open elements have these names, the innermost last.
            let ends = |names: &[&str]| {
                self.path.len() >= names.len() && self.path[self.path.len() - names.len()..].iter().eq(names)
            };
            if ends(&["VirtualSystem", "Name"]) {
                system.name = Some(text);
            } else if ends(&["OperatingSystemSection", "Description"]) {
                system.operating_system = Some(text).filter(|text| !text.is_empty());
            } else if ends(&["Item", "ResourceType"]) {
                self.item.kind = text;
            } else if ends(&["Item", "VirtualQuantity"]) {
                self.item.quantity = text;
            } else if ends(&["Item", "AllocationUnits"]) {
                self.item.units = text;
            } else if ends(&["Item"]) {
                let quantity = self.item.quantity.parse::<u64>().ok();
                match self.item.kind.as_str() {
                    "3" => system.processors = quantity,
                    "4" => {
                        let unit = unit_bytes(&self.item.units);
                        system.memory_bytes = quantity.and_then(|quantity| quantity.checked_mul(unit?));
                    }
                    _ => {}
                }
            }
        }
        self.content.clear();
        self.path.pop();
    }
}

/// Length of an allocation unit in bytes: `byte * 2^20`, or a word of older texts.
fn unit_bytes(units: &str) -> Option<u64> {
    let plain: String = units.chars().filter(|c| !c.is_whitespace()).collect::<String>().to_ascii_lowercase();
    match plain.as_str() {
        "" | "byte" | "bytes" => return Some(1),
        "kilobytes" | "kb" => return Some(1 << 10),
        "megabytes" | "mb" => return Some(1 << 20),
        "gigabytes" | "gb" => return Some(1 << 30),
        _ => {}
    }
    let (base, exponent) = plain.strip_prefix("byte*")?.split_once('^')?;
    base.parse::<u64>().ok()?.checked_pow(exponent.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXT: &str = r#"<?xml version="1.0"?>
<!-- a comment -->
<ovf:Envelope xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:rasd="http://x">
  <ovf:References>
    <ovf:File ovf:href="a &amp; b.vmdk" ovf:id="f1" ovf:size="1234"/>
    <ovf:File ovf:href="c.vmdk.gz" ovf:id="f2" ovf:compression="gzip" ovf:chunkSize="1000"></ovf:File>
  </ovf:References>
  <ovf:DiskSection><ovf:Info>Disks</ovf:Info>
    <ovf:Disk ovf:capacity="8" ovf:capacityAllocationUnits="byte * 2^30" ovf:diskId="d1" ovf:fileRef="f1" ovf:format="x#streamOptimized"/>
    <ovf:Disk ovf:capacity="${size}" ovf:diskId="d2"/>
  </ovf:DiskSection>
  <ovf:VirtualSystem ovf:id="vm">
    <ovf:Name>A &lt;machine&gt;</ovf:Name>
    <ovf:OperatingSystemSection ovf:id="101"><ovf:Description>Linux</ovf:Description></ovf:OperatingSystemSection>
    <ovf:VirtualHardwareSection>
      <ovf:Item><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></ovf:Item>
      <ovf:Item><rasd:AllocationUnits>MegaBytes</rasd:AllocationUnits><rasd:ResourceType>4</rasd:ResourceType><rasd:VirtualQuantity>512</rasd:VirtualQuantity></ovf:Item>
    </ovf:VirtualHardwareSection>
  </ovf:VirtualSystem>
</ovf:Envelope>
"#;

    #[test]
    fn files_disks_and_machines_are_read() {
        let envelope = Envelope::parse(TEXT.as_bytes()).unwrap();
        assert_eq!(envelope.version, 1);
        assert_eq!((envelope.files[0].href.as_str(), envelope.files[0].size_bytes), ("a & b.vmdk", Some(1234)));
        assert_eq!(envelope.files[1].compression.as_deref(), Some("gzip"));
        assert_eq!(envelope.files[1].chunk_bytes, Some(1000));
        let [first, second] = &envelope.disks[..] else { panic!("{:?}", envelope.disks) };
        assert_eq!((first.capacity_bytes, envelope.file_of(first)), (Some(8 << 30), Some(&envelope.files[0])));
        assert_eq!((second.capacity_bytes, envelope.file_of(second)), (None, None));
        let expected = OvfSystem {
            id: "vm".into(),
            name: Some("A <machine>".into()),
            operating_system: Some("Linux".into()),
            processors: Some(2),
            memory_bytes: Some(512 << 20),
        };
        assert_eq!(envelope.systems, [expected]);
    }

    #[test]
    fn hostile_and_foreign_texts_are_refused_with_the_line() {
        let bomb = "<!DOCTYPE x [<!ENTITY a \"aaaa\"><!ENTITY b \"&a;&a;\">]>\n";
        let nested = TEXT.replace("<ovf:Info>Disks</ovf:Info>", &("<a>".repeat(80) + &"</a>".repeat(80)));
        let many = TEXT.replace("<ovf:References>", &("<ovf:References>".to_owned() + &"<File/>".repeat(5000)));
        for (text, line, what) in [
            (format!("{bomb}{TEXT}"), 1, "a document type"),
            (nested, 8, "nest 64 deep"),
            (many, 4, "more than 4096 of <File>"),
            (TEXT.replace("envelope/1", "envelope/7"), 3, "version \"7\""),
            (TEXT.replace("schemas.dmtf.org/ovf/envelope/1", "www.vmware.com/schema/ovf/1/envelope"), 3, "OVF 0.9"),
            (TEXT.replace("ovf:Envelope", "ovf:Other"), 3, "<\"Other\">"),
            (TEXT.replace("A &lt;", "A &b;"), 13, "the entity \"b\""),
            (TEXT.replace("</ovf:Envelope>", ""), 21, "the end of the text"),
            (TEXT.replace("</ovf:References>", ""), 20, ""),
        ] {
            let error = Envelope::parse(text.as_bytes()).unwrap_err();
            assert!(error.found.contains(what), "{error}");
            assert_eq!(error.line, line, "{error}");
        }
        assert!(Envelope::parse(&[0xff, 0xfe, b'<', 0]).unwrap_err().found.contains("UTF-8"));
        assert!(Envelope::parse(&vec![b' '; OVF_MAX_BYTES as usize + 1]).unwrap_err().found.contains("4194305"));
    }

    #[test]
    fn units() {
        for (text, bytes) in [
            ("byte", Some(1)),
            ("byte * 2^20", Some(1 << 20)),
            ("byte*10^3", Some(1000)),
            ("GigaBytes", Some(1 << 30)),
            ("", Some(1)),
            ("byte * 2^64", None),
            ("hours", None),
        ] {
            assert_eq!(unit_bytes(text), bytes, "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_changed_text_is_read_or_refused(at in any::<prop::sample::Index>(), piece in "[<>&;/a\"= \\PC]{0,8}") {
            let at = at.index(TEXT.len());
            let _ = Envelope::parse((TEXT[..at].to_owned() + &piece + &TEXT[at..]).as_bytes());
            let _ = Envelope::parse((TEXT[..at].to_owned() + &piece).as_bytes());
        }
    }
}
