//! streamOptimized VMDKs and OVAs as a user makes them; qemu-img, libvmdk, tar and Python read
//! them.

use crate::{
    common::Workshop,
    resize::{have, tool},
};
use serde_json::{Value, json};
use std::{fs, os::unix::fs::FileExt};

/// A raw disk with data that compress in different ways, and a length that ends within a grain.
fn raw(shop: &Workshop) {
    let mut bytes = vec![0_u8; (70 << 20) + 512];
    let mut random = 1_u64;
    for byte in &mut bytes[1 << 20..3 << 20] {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        *byte = (random >> 56) as u8;
    }
    let mut text = String::new();
    while text.len() < 1 << 20 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        text += &format!("{:x} ", (random >> 50) * 7919);
    }
    bytes[40 << 20..41 << 20].copy_from_slice(&text.as_bytes()[..1 << 20]);
    *bytes.last_mut().unwrap() = 9;
    fs::write(shop.path("disk.raw"), bytes).unwrap();
}

#[test]
fn other_programs_read_a_stream() {
    let shop = Workshop::new();
    raw(&shop);
    let done = shop.json("convert disk.raw disk.vmdk --subformat streamOptimized");
    assert_eq!(done["virtual_size"], (70 << 20) + 512);
    assert_eq!(done["stream_file_size"], fs::metadata(shop.path("disk.vmdk")).unwrap().len());
    let copied = done["copied_bytes"].as_u64().unwrap();
    assert_eq!(copied + done["zero_bytes"].as_u64().unwrap(), (70 << 20) + 512);
    assert!((3 << 20..4 << 20).contains(&copied), "{done}");
    assert!(done["warnings"].to_string().contains("not a multiple of 64 KiB"), "{done}");
    assert!(fs::metadata(shop.path("disk.vmdk")).unwrap().len() < 3 << 20);
    shop.ok("compare disk.raw disk.vmdk");
    shop.ok("convert disk.vmdk back.vhdx --verify");
    shop.ok("compare disk.raw back.vhdx");
    if have(&["qemu-img"]) {
        tool(&shop, "qemu-img compare -f raw -F vmdk disk.raw disk.vmdk", "").unwrap();
        let info: Value =
            serde_json::from_str(&tool(&shop, "qemu-img info --output=json disk.vmdk", "").unwrap()).unwrap();
        assert_eq!(info["format-specific"]["data"]["create-type"], "streamOptimized", "{info}");
    }
    if have(&["vmdkinfo"]) {
        let said = tool(&shop, "vmdkinfo disk.vmdk", "").unwrap();
        assert!(said.contains("Stream optimized") && said.contains("73400832 bytes"), "{said}");
    }
    let small = shop.json("convert disk.raw small.vmdk --subformat STREAMOPTIMIZED --compress-level 12 --quiet");
    let large = shop.json("convert disk.raw large.vmdk --subformat streamOptimized --compress-level 1 --verify");
    assert_eq!(large["verified"], true);
    assert!(small["stream_file_size"].as_u64() < large["stream_file_size"].as_u64());
    shop.fails(1, "convert disk.raw small.vmdk --subformat streamOptimized");
    shop.fails(2, "convert disk.raw other.vmdk --subformat streamOptimized --type fixed");
    shop.fails(2, "convert disk.raw other.vmdk --subformat streamOptimized --compress-level 0");
    assert!(!shop.path("other.vmdk").exists() && !shop.path("other.vmdk.partial").exists());
}

/// A strict reader of OVA: tar, names, the schema of OVF 1.1 (DSP8023 1.1.0) as far as one machine
/// uses it, references and digests. The schema is applied to damaged envelopes too.
const READER: &str = r#"
import hashlib, re, sys, tarfile, xml.etree.ElementTree as xml
OVF = "{http://schemas.dmtf.org/ovf/envelope/1}"
RASD = "{http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData}"
VSSD = "{http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData}"

# A pattern for each type of the schema.
TEXT, WORD, NUMBER, SHORT, TRUTH, URI = r"(?s).*", r"\S(.*\S)?", r"\d{1,20}", r"\d{1,5}", r"true|false|0|1", r"\S+"

# Children in their order, with the least and the most of each; attributes, of which those with "!"
# are required; and whether elements of other spaces may follow.
def kind(children=(), attributes={}, text=None, open=False):
    return {"children": children, "attributes": attributes, "text": text, "open": open}
ANY = 10**9
MESSAGE = kind(attributes={"msgid": WORD}, text=TEXT)
def settings(space, names):
    return [(space + name, kind(text=pattern), least, most) for name, pattern, least, most in names]
ITEM = kind(settings(RASD, [
    ("Address", TEXT, 0, 1), ("AddressOnParent", TEXT, 0, 1), ("AllocationUnits", TEXT, 0, 1),
    ("AutomaticAllocation", TRUTH, 0, 1), ("AutomaticDeallocation", TRUTH, 0, 1), ("Caption", TEXT, 0, 1),
    ("ChangeableType", SHORT, 0, 1), ("ConfigurationName", TEXT, 0, 1), ("Connection", TEXT, 0, ANY),
    ("ConsumerVisibility", SHORT, 0, 1), ("Description", TEXT, 0, 1), ("ElementName", TEXT, 1, 1),
    ("Generation", NUMBER, 0, 1), ("HostResource", TEXT, 0, ANY), ("InstanceID", TEXT, 1, 1),
    ("Limit", NUMBER, 0, 1), ("MappingBehavior", SHORT, 0, 1), ("OtherResourceType", TEXT, 0, 1),
    ("Parent", TEXT, 0, 1), ("PoolID", TEXT, 0, 1), ("Reservation", NUMBER, 0, 1),
    ("ResourceSubType", TEXT, 0, 1), ("ResourceType", SHORT, 1, 1), ("VirtualQuantity", NUMBER, 0, 1),
    ("VirtualQuantityUnits", TEXT, 0, 1), ("Weight", SHORT, 0, 1)]),
    {"required": TRUTH, "configuration": WORD, "bound": WORD}, open=True)
SYSTEM = kind(settings(VSSD, [
    ("AutomaticRecoveryAction", SHORT, 0, 1), ("AutomaticShutdownAction", SHORT, 0, 1),
    ("AutomaticStartupAction", SHORT, 0, 1), ("AutomaticStartupActionDelay", TEXT, 0, 1),
    ("AutomaticStartupActionSequenceNumber", SHORT, 0, 1), ("Caption", TEXT, 0, 1),
    ("ConfigurationDataRoot", TEXT, 0, 1), ("ConfigurationFile", TEXT, 0, 1), ("ConfigurationID", TEXT, 0, 1),
    ("CreationTime", TEXT, 0, 1), ("Description", TEXT, 0, 1), ("ElementName", TEXT, 1, 1),
    ("Generation", NUMBER, 0, 1), ("InstanceID", TEXT, 1, 1), ("LogDataRoot", TEXT, 0, 1),
    ("Notes", TEXT, 0, ANY), ("RecoveryFile", TEXT, 0, 1), ("SnapshotDataRoot", TEXT, 0, 1),
    ("SuspendDataRoot", TEXT, 0, 1), ("SwapFileDataRoot", TEXT, 0, 1), ("VirtualSystemIdentifier", TEXT, 0, 1),
    ("VirtualSystemType", TEXT, 0, 1)]), open=True)
def section(children, attributes={}, open=True):
    return kind([(OVF + "Info", MESSAGE, 1, 1)] + children, {"required": TRUTH, **attributes}, open=open)
HARDWARE = section([(OVF + "System", SYSTEM, 0, 1), (OVF + "Item", ITEM, 0, ANY)], {"id": WORD, "transport": TEXT})
OPERATING = section([(OVF + "Description", MESSAGE, 0, 1)], {"id!": SHORT, "version": TEXT})
ENVELOPE = kind([
    (OVF + "References", kind([(OVF + "File", kind(attributes={
        "id!": WORD, "href!": TEXT, "size": NUMBER, "compression": WORD, "chunkSize": NUMBER}), 0, ANY)]), 1, 1),
    (OVF + "DiskSection", section([(OVF + "Disk", kind(attributes={
        "diskId!": WORD, "fileRef": WORD, "capacity!": TEXT, "capacityAllocationUnits": TEXT, "format": URI,
        "populatedSize": NUMBER, "parentRef": WORD}), 0, ANY)]), 0, 1),
    (OVF + "NetworkSection", section([(OVF + "Network", kind(
        [(OVF + "Description", MESSAGE, 0, 1)], {"name!": TEXT}), 0, ANY)]), 0, 1),
    (OVF + "VirtualSystem", kind([
        (OVF + "Info", MESSAGE, 1, 1), (OVF + "Name", MESSAGE, 0, 1),
        (OVF + "OperatingSystemSection", OPERATING, 0, 1), (OVF + "VirtualHardwareSection", HARDWARE, 0, ANY)],
        {"id!": WORD}), 1, 1)])

def check(element, rule):
    where = element.tag
    known = {OVF + name.rstrip("!"): pattern for name, pattern in rule["attributes"].items()}
    for name, value in element.attrib.items():
        # The schema admits attributes of other spaces.
        if name.startswith(OVF) or not name.startswith("{"):
            assert name in known and re.fullmatch(known[name], value), f"{where}: attribute {name}={value!r}"
    for name in rule["attributes"]:
        assert not name.endswith("!") or OVF + name[:-1] in element.attrib, f"{where}: no {name}"
    text = (element.text or "") + "".join(child.tail or "" for child in element)
    if rule["text"] is None:
        assert not text.strip(), f"{where}: text {text!r}"
    else:
        assert re.fullmatch(rule["text"], text) and len(element) == 0, f"{where}: {text!r}"
    children = list(element)
    for tag, inner, least, most in rule["children"]:
        count = 0
        while children and children[0].tag == tag:
            check(children.pop(0), inner)
            count += 1
        assert least <= count <= most, f"{where}: {count} of {tag}"
    spaces = (OVF, RASD, VSSD)
    assert all(rule["open"] and not child.tag.startswith(spaces) for child in children), f"{where}: {children}"

def check_text(text):
    envelope = xml.fromstring(text)
    assert envelope.tag == OVF + "Envelope"
    check(envelope, ENVELOPE)
    return envelope

raw = open(sys.argv[1], "rb").read()
assert raw[257:265] == b"ustar\x0000" and len(raw) % 512 == 0 and raw[-1024:] == bytes(1024)
with tarfile.open(sys.argv[1]) as tar:
    members = tar.getmembers()
    names = [member.name for member in members]
    assert all(member.isreg() for member in members)
    contents = {member.name: tar.extractfile(member).read() for member in members}
assert [name.rsplit(".")[-1] for name in names] == ["ovf", "mf", "vmdk"], names
envelope = check_text(contents[names[0]])
damages = [
    (b"<Info>A virtual machine</Info>", b""), (b' ovf:diskId="vmdisk1"', b""), (b'ovf:size="', b'ovf:size="x'),
    (b"<rasd:InstanceID>4</rasd:InstanceID>", b""), (b"<rasd:ResourceType>17", b"<rasd:ResourceType>hard disk"),
    (b"<Network ", b"<Network ovf:colour='red' "), (b"<References>", b"<References>text"),
    (b'ovf:id="102"', b'ovf:id="64-bit"'), (b"</System>", b"</System><System/>"),
    (b"<rasd:Caption>Hard disk 1</rasd:Caption>", b""), (b"<rasd:Parent>3</rasd:Parent>", b"<rasd:Depth>3</rasd:Depth>"),
]
for old, new in damages:
    assert old in contents[names[0]], old
    broken = contents[names[0]].replace(old, new)
    if old == b"<rasd:Caption>Hard disk 1</rasd:Caption>":
        broken = broken.replace(b"</rasd:ResourceType>", b"</rasd:ResourceType><rasd:Caption>late</rasd:Caption>")
    try:
        check_text(broken)
    except AssertionError:
        continue
    raise SystemExit(f"the schema takes {new!r} in place of {old!r}")
order = [child.tag.replace(OVF, "") for child in envelope]
assert order == ["References", "DiskSection", "NetworkSection", "VirtualSystem"], order
for section in envelope.iter():
    if section.tag.endswith("Section"):
        assert section[0].tag == OVF + "Info", section.tag
[file] = envelope.find(OVF + "References")
assert file.get(OVF + "href") == names[2]
assert int(file.get(OVF + "size")) == len(contents[names[2]])
[disk] = envelope.findall(f"{OVF}DiskSection/{OVF}Disk")
assert disk.get(OVF + "fileRef") == file.get(OVF + "id")
assert disk.get(OVF + "format").endswith("vmdk.html#streamOptimized")
assert disk.get(OVF + "capacityAllocationUnits") == "byte"
hardware = envelope.find(f"{OVF}VirtualSystem/{OVF}VirtualHardwareSection")
items = hardware.findall(OVF + "Item")
for item in items:
    tags = [child.tag for child in item]
    assert tags == sorted(tags) and len(tags) == len(set(tags)), tags
ids = [item.find(RASD + "InstanceID").text for item in items]
assert len(ids) == len(set(ids))
[hard_disk] = [item for item in items if item.find(RASD + "ResourceType").text == "17"]
assert hard_disk.find(RASD + "HostResource").text == "ovf:/disk/" + disk.get(OVF + "diskId")
assert hard_disk.find(RASD + "Parent").text in ids
lines = contents[names[1]].decode().splitlines()
digests = {name: hashlib.sha256(contents[name]).hexdigest() for name in (names[0], names[2])}
assert lines == [f"SHA256({name})= {digest}" for name, digest in digests.items()], lines
print(disk.get(OVF + "capacity"))
"#;

#[test]
fn an_ova_is_one_for_a_strict_reader() {
    let shop = Workshop::new();
    raw(&shop);
    shop.ok("convert disk.raw disk.vhdx");
    let done = shop.json("convert disk.vhdx 'My & machine.ova' --verify");
    assert_eq!(done["verified"], true);
    assert_eq!(done["stream_file_size"], fs::metadata(shop.path("My & machine.ova")).unwrap().len());
    fs::rename(shop.path("My & machine.ova"), shop.path("machine.ova")).unwrap();
    fs::write(shop.path("reader.py"), READER).unwrap();
    if have(&["python3"]) {
        let said = tool(&shop, "/usr/bin/python3 reader.py machine.ova", "").unwrap();
        assert_eq!(said.trim(), ((70 << 20) + 512).to_string());
    }
    if have(&["tar", "qemu-img"]) {
        tool(&shop, "tar xf machine.ova", "").unwrap();
        fs::rename(shop.path("My & machine-disk1.vmdk"), shop.path("inside.vmdk")).unwrap();
        tool(&shop, "qemu-img compare -f raw -F vmdk disk.raw inside.vmdk", "").unwrap();
    }
    shop.ok("compare disk.raw machine.ova");
    shop.ok("convert machine.ova out.vhdx --verify");
    shop.ok("compare disk.raw out.vhdx");
    let info = shop.json("info machine.ova --verify");
    assert_eq!((&info["verified"], &info["remarks"], &info["missing"]), (&json!(true), &json!([]), &json!([])));
    assert_eq!(info["machines"][0]["name"], "My & machine");
    assert_eq!(info["disks"][0]["virtual_size"], (70 << 20) + 512);
    assert_eq!(info["files"][2]["digest"], "ok");
    assert!(shop.ok("info machine.ova").contains("disk 1"));
    // A changed byte in the disk.
    let at = info["files"][2]["offset"].as_u64().unwrap() + 70_000;
    let file = fs::File::options().write(true).open(shop.path("machine.ova")).unwrap();
    file.write_all_at(b"changed", at).unwrap();
    let ended = shop.run("info machine.ova --verify --json");
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    let info: Value = serde_json::from_str(&ended.stdout).unwrap();
    assert_eq!((&info["verified"], &info["files"][2]["digest"]), (&json!(false), &json!("wrong")));
    shop.fails(2, "info disk.vhdx --verify");
}

/// The rules of a place that do not hold.
fn broken(shop: &Workshop, disk: &str, place: &str) -> String {
    let ended = shop.run(&format!("info {disk} --vmware --json"));
    assert_eq!(ended.code, Some(3), "{ended:#?}");
    let report: Value = serde_json::from_str(&ended.stdout).unwrap();
    let places = report["places"].as_array().unwrap();
    let rules = places.iter().find(|found| found["place"] == place).unwrap()["rules"].as_array().unwrap();
    let is_broken = |rule: &&Value| rule["verdict"] == "not ok";
    rules.iter().filter(is_broken).map(|rule| rule["rule"].as_str().unwrap()).collect::<Vec<_>>().join(" ")
}

#[test]
fn each_place_of_vmware_says_what_it_takes() {
    let shop = Workshop::new();
    shop.ok("create disk.vhdx --size 8M");
    shop.ok("convert disk.vhdx stream.vmdk --subformat streamOptimized");
    let mut kinds = vec![("disk.vhdx", ["format"; 4]), ("stream.vmdk", ["kind", "kind", "", ""])];
    if have(&["qemu-img"]) {
        for name in ["monolithicSparse", "monolithicFlat", "twoGbMaxExtentSparse"] {
            tool(&shop, &format!("qemu-img create -f vmdk -o subformat={name} {name}.vmdk 8M"), "").unwrap();
        }
        kinds.push(("monolithicSparse.vmdk", ["kind", "", "", "kind"]));
        kinds.push(("monolithicFlat.vmdk", ["kind", "", "", "kind"]));
        kinds.push(("twoGbMaxExtentSparse.vmdk", ["kind", "", "", "kind"]));
    }
    for (disk, expected) in kinds {
        for (place, expected) in ["esxi", "workstation", "virtualbox", "ovf"].into_iter().zip(expected) {
            assert_eq!(broken(&shop, disk, place), expected, "{disk}: {place}");
        }
    }
    let said = shop.run("info stream.vmdk --vmware").stdout;
    assert!(said.contains("streamOptimized") && said.contains(".ova"), "{said}");
}

#[test]
fn disks_inside_an_ova_are_read_in_place() {
    if !have(&["tar"]) {
        return;
    }
    let shop = Workshop::new();
    for (name, byte) in [("one", 1), ("two", 2)] {
        shop.ok(&format!("create {name}.vhdx --size 8M"));
        shop.ok(&format!("io {name}.vhdx -c 'write -P {byte} 1M 64K'"));
    }
    let ovf = "<Envelope xmlns='http://schemas.dmtf.org/ovf/envelope/1'><References>\
        <File id='a' href='one.vhdx'/><File id='b' href='two.vhdx'/><File id='c' href='three.vhdx' compression='gzip'/></References>\
        <DiskSection><Disk diskId='first' fileRef='a' capacity='8388608'/><Disk diskId='second' fileRef='b' capacity='8388608'/>\
        <Disk diskId='third' fileRef='c' capacity='1'/></DiskSection></Envelope>";
    fs::write(shop.path("vm.ovf"), ovf).unwrap();
    tool(&shop, "tar cf vm.ova vm.ovf one.vhdx two.vhdx", "").unwrap();
    let said = shop.fails(2, "convert vm.ova copy.raw");
    assert!(said.contains("it has 3 disks: 1 (one.vhdx), 2 (two.vhdx)") && said.contains("--disk"), "{said}");
    for (disk, name) in [("1", "one"), ("second", "two"), ("two.vhdx", "two")] {
        shop.ok(&format!("compare {name}.vhdx vm.ova --disk {disk}"));
        shop.ok(&format!("convert vm.ova copy.vhd --disk {disk} --verify"));
        shop.ok(&format!("compare {name}.vhdx copy.vhd"));
        fs::remove_file(shop.path("copy.vhd")).unwrap();
    }
    let info = shop.json("info vm.ova --disk 2");
    assert_eq!((&info["format"], &info["virtual_size"]), (&json!("vhdx"), &json!(8 << 20)));
    let said = shop.fails(1, "convert vm.ova copy.raw --disk third");
    assert!(said.contains("compressed as a whole (gzip)"), "{said}");
    let info = shop.json("info vm.ova");
    assert!(info["remarks"].to_string().contains("no manifest"), "{info}");
    assert_eq!(shop.run("info vm.ova --verify").code, Some(3));
    assert!(shop.fails(1, "resize vm.ova 1G").contains("ova"));
}
