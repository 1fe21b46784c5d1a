//! Writes an envelope: one machine with one disk, in OVF 1.1.
//!
//! The hardware is what both VMware and VirtualBox create. Each device is the one that the most
//! guests have a driver for:
//!
//! - The disk's controller is LSI Logic SAS. SATA: VMware and VirtualBox name it differently, and
//!   each refuses the other's name. LSI Logic parallel: Windows has no driver since version 8.
//!   Paravirtual SCSI: Windows has no driver, and VirtualBox does not have the device.
//! - The network card is an E1000. VirtualBox does not have VMXNET3.
//! - The firmware is the one from which the disk starts: a disk with an EFI system partition does
//!   not start by BIOS.
//!
//! Elements of an `<Item>` stand in alphabetical order, as the schema of RASD demands. `Caption` is
//! there beside `ElementName`, because VirtualBox takes names from it.

use quick_xml::escape::escape;
use std::fmt::Write;

/// Number of processors and memory of the machine.
const PROCESSORS: u32 = 2;
const MEMORY_MIB: u32 = 4096;
/// The first hardware version of VMware that ESXi 5.5 and Workstation 10 have.
const HARDWARE: &str = "vmx-10";
const STREAM_OPTIMIZED: &str = "http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized";
const SPACES: [(&str, &str); 6] = [
    ("xmlns", "http://schemas.dmtf.org/ovf/envelope/1"),
    ("xmlns:ovf", "http://schemas.dmtf.org/ovf/envelope/1"),
    ("xmlns:rasd", "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData"),
    ("xmlns:vssd", "http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_VirtualSystemSettingData"),
    ("xmlns:vmw", "http://www.vmware.com/schema/ovf"),
    ("xmlns:xsi", "http://www.w3.org/2001/XMLSchema-instance"),
];

/// A machine with one disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Appliance {
    /// Name of the machine.
    pub name: String,
    /// File of the disk, a streamOptimized VMDK.
    pub disk_file: String,
    /// Length of that file in bytes.
    pub disk_file_bytes: u64,
    /// Virtual size of the disk in bytes.
    pub capacity_bytes: u64,
    /// Bytes of the disk that hold data.
    pub populated_bytes: u64,
    /// Whether the machine starts by UEFI. Otherwise by BIOS.
    pub is_uefi: bool,
}

/// The values of an item, in the order of the schema. Empty ones are left out.
#[derive(Default)]
struct Item {
    address: &'static str,
    address_on_parent: &'static str,
    units: &'static str,
    automatic: &'static str,
    caption: &'static str,
    connection: &'static str,
    description: &'static str,
    host_resource: &'static str,
    instance: u32,
    parent: &'static str,
    subtype: &'static str,
    kind: u32,
    quantity: String,
}

impl Item {
    fn write(&self, out: &mut String) {
        let (instance, kind) = (self.instance.to_string(), self.kind.to_string());
        let values = [
            ("Address", self.address),
            ("AddressOnParent", self.address_on_parent),
            ("AllocationUnits", self.units),
            ("AutomaticAllocation", self.automatic),
            ("Caption", self.caption),
            ("Connection", self.connection),
            ("Description", self.description),
            ("ElementName", self.caption),
            ("HostResource", self.host_resource),
            ("InstanceID", &instance),
            ("Parent", self.parent),
            ("ResourceSubType", self.subtype),
            ("ResourceType", &kind),
            ("VirtualQuantity", &self.quantity),
        ];
        out.push_str("      <Item>\n");
        for (name, value) in values.into_iter().filter(|(_, value)| !value.is_empty()) {
            let _ = writeln!(out, "        <rasd:{name}>{}</rasd:{name}>", escape(value));
        }
        out.push_str("      </Item>\n");
    }
}

impl Appliance {
    /// The envelope as a text.
    pub fn to_text(&self) -> String {
        let mut out = String::from("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<Envelope");
        for (name, uri) in SPACES {
            let _ = write!(out, " {name}=\"{uri}\"");
        }
        let (name, file) = (escape(self.name.as_str()), escape(self.disk_file.as_str()));
        let _ = write!(
            out,
            ">
  <References>
    <File ovf:href=\"{file}\" ovf:id=\"file1\" ovf:size=\"{size}\"/>
  </References>
  <DiskSection>
    <Info>Virtual disk information</Info>
    <Disk ovf:capacity=\"{capacity}\" ovf:capacityAllocationUnits=\"byte\" ovf:diskId=\"vmdisk1\" ovf:fileRef=\"file1\" ovf:format=\"{STREAM_OPTIMIZED}\" ovf:populatedSize=\"{populated}\"/>
  </DiskSection>
  <NetworkSection>
    <Info>The list of logical networks</Info>
    <Network ovf:name=\"VM Network\">
      <Description>The network of the virtual machine</Description>
    </Network>
  </NetworkSection>
  <VirtualSystem ovf:id=\"vm\">
    <Info>A virtual machine</Info>
    <Name>{name}</Name>
    <OperatingSystemSection ovf:id=\"102\" vmw:osType=\"otherGuest64\">
      <Info>The operating system</Info>
      <Description>Other 64-bit</Description>
    </OperatingSystemSection>
    <VirtualHardwareSection>
      <Info>Virtual hardware requirements</Info>
      <System>
        <vssd:ElementName>Virtual Hardware Family</vssd:ElementName>
        <vssd:InstanceID>0</vssd:InstanceID>
        <vssd:VirtualSystemIdentifier>{name}</vssd:VirtualSystemIdentifier>
        <vssd:VirtualSystemType>{HARDWARE}</vssd:VirtualSystemType>
      </System>
",
            size = self.disk_file_bytes,
            capacity = self.capacity_bytes,
            populated = self.populated_bytes,
        );
        for item in items() {
            item.write(&mut out);
        }
        let firmware = if self.is_uefi { "efi" } else { "bios" };
        let _ = write!(
            out,
            "      <vmw:Config ovf:required=\"false\" vmw:key=\"firmware\" vmw:value=\"{firmware}\"/>
    </VirtualHardwareSection>
  </VirtualSystem>
</Envelope>
"
        );
        out
    }

    /// Length of the longest text that another length of the file and of the data would give.
    pub fn text_max_bytes(&self) -> usize {
        Self { disk_file_bytes: u64::MAX, populated_bytes: u64::MAX, ..self.clone() }.to_text().len()
    }
}

fn items() -> [Item; 5] {
    [
        Item {
            units: "hertz * 10^6",
            caption: "2 virtual CPUs",
            description: "Number of virtual CPUs",
            instance: 1,
            kind: 3,
            quantity: PROCESSORS.to_string(),
            ..Item::default()
        },
        Item {
            units: "byte * 2^20",
            caption: "4096 MB of memory",
            description: "Memory size",
            instance: 2,
            kind: 4,
            quantity: MEMORY_MIB.to_string(),
            ..Item::default()
        },
        Item {
            address: "0",
            caption: "SCSI controller 0",
            description: "SCSI controller",
            instance: 3,
            subtype: "lsilogicsas",
            kind: 6,
            ..Item::default()
        },
        Item {
            address_on_parent: "0",
            caption: "Hard disk 1",
            description: "Hard disk",
            host_resource: "ovf:/disk/vmdisk1",
            instance: 4,
            parent: "3",
            kind: 17,
            ..Item::default()
        },
        Item {
            automatic: "true",
            caption: "Network adapter 1",
            connection: "VM Network",
            description: "E1000 network adapter",
            instance: 5,
            subtype: "E1000",
            kind: 10,
            ..Item::default()
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ovf::Envelope;

    fn appliance() -> Appliance {
        Appliance {
            name: "a <b> & \"c\"".into(),
            disk_file: "a & b-disk1.vmdk".into(),
            disk_file_bytes: 123_456,
            capacity_bytes: 40 << 30,
            populated_bytes: 2 << 30,
            is_uefi: true,
        }
    }

    #[test]
    fn the_reader_reads_what_was_written() {
        let written = appliance();
        let envelope = Envelope::parse(written.to_text().as_bytes()).unwrap();
        let [disk] = &envelope.disks[..] else { panic!("{:?}", envelope.disks) };
        let file = envelope.file_of(disk).unwrap();
        assert_eq!((file.href.as_str(), file.size_bytes), ("a & b-disk1.vmdk", Some(123_456)));
        assert_eq!((disk.capacity_bytes, disk.format.as_str()), (Some(40 << 30), STREAM_OPTIMIZED));
        let [system] = &envelope.systems[..] else { panic!("{:?}", envelope.systems) };
        assert_eq!(system.name.as_deref(), Some("a <b> & \"c\""));
        assert_eq!((system.processors, system.memory_bytes), (Some(2), Some(4 << 30)));
    }

    #[test]
    fn values_stand_in_the_order_of_the_schema() {
        for item in items() {
            let mut text = String::new();
            item.write(&mut text);
            let names: Vec<&str> =
                text.lines().filter_map(|line| line.trim().strip_prefix("<rasd:")?.split('>').next()).collect();
            let mut sorted = names.clone();
            sorted.sort_unstable();
            assert_eq!(names, sorted);
            for needed in ["ElementName", "InstanceID", "ResourceType"] {
                assert!(names.contains(&needed), "{needed}");
            }
        }
    }

    #[test]
    fn no_other_length_gives_a_longer_text() {
        let appliance = appliance();
        assert!(appliance.text_max_bytes() > appliance.to_text().len());
        let longest = Appliance { disk_file_bytes: u64::MAX, populated_bytes: u64::MAX, ..appliance.clone() };
        assert_eq!(longest.to_text().len(), appliance.text_max_bytes());
    }
}
