use super::*;
use proptest::prelude::*;

#[test]
fn names_are_checked() {
    for name in [
        "iqn.2026-11.org.example:disk.1",
        "iqn.1991-05.com.microsoft:host",
        "eui.02004567a425678d",
        "naa.52004567ba64678d",
        "naa.62004567ba64678d0123456789abcdef",
    ] {
        assert_eq!(check_name(name), Ok(()), "{name}");
    }
    for name in [
        "",
        "iqn.",
        "iqn.2026-11",
        "iqn.2026-11.",
        "iqn.2026-11.:x",
        "iqn.26-11.org.example",
        "iqn.2026-11.org.Example",
        "iqn.2026-11.org.example disk",
        "eui.123",
        "naa.52004567ba64678",
        "disk",
    ] {
        assert!(check_name(name).is_err(), "{name}");
    }
    assert!(check_name(&format!("iqn.2026-11.org.{}", "a".repeat(220))).is_err());
}

#[test]
fn text_is_split_into_keys() {
    let mut out = Vec::new();
    text::put(&mut out, "A", "1=2");
    text::put(&mut out, "B", "");
    assert_eq!(out, b"A=1=2\0B=\0");
    assert_eq!(text::pairs(&out).collect::<Result<Vec<_>, _>>(), Ok(vec![("A", "1=2"), ("B", "")]));
    assert_eq!(text::pairs(b"A\0").next(), Some(Err(text::TextError::NoPair)));
    assert_eq!(text::pairs(b"=1\0").next(), Some(Err(text::TextError::NoPair)));
    assert_eq!(text::pairs(b"\xff=1\0").next(), Some(Err(text::TextError::NotUtf8)));
    assert_eq!((text::number("512"), text::number("0x10"), text::number("-1")), (Some(512), Some(16), None));
}

#[test]
fn binary_values_have_two_notations() {
    assert_eq!(text::binary("0x0aFF"), Some(vec![10, 255]));
    assert_eq!(text::binary("0xAFF"), Some(vec![10, 255]));
    assert_eq!(text::binary("0bZm9vYg=="), Some(b"foob".to_vec()));
    assert_eq!(text::binary("0bZm9vYmE="), Some(b"fooba".to_vec()));
    for wrong in ["", "0x", "0b", "0xg", "0b*", "12", &format!("0x{}", "0".repeat(4096))] {
        assert_eq!(text::binary(wrong), None, "{wrong}");
    }
    assert_eq!(text::hex(&[0, 0xaf]), "0x00af");
}

#[test]
fn a_command_is_where_the_standard_has_it() {
    let mut bytes = [0; HEADER_BYTES];
    bytes[0] = 0x01;
    bytes[1] = 0xc1;
    bytes[4] = 2;
    bytes[7] = 9;
    bytes[9] = 3;
    bytes[16..20].copy_from_slice(&7_u32.to_be_bytes());
    bytes[20..24].copy_from_slice(&4096_u32.to_be_bytes());
    bytes[32] = 0x28;
    let header = Header::decode(&bytes);
    assert_eq!((header.opcode, header.is_immediate), (Some(Opcode::ScsiCommand), false));
    assert_eq!((header.more_header_bytes, header.data_bytes, header.tag), (8, 9, 7));
    assert_eq!(crate::scsi::unit_of(header.lun), Some(3));
    let command = ScsiCommand::decode(&bytes);
    assert_eq!((command.is_final, command.reads, command.writes), (true, true, false));
    assert_eq!((command.expected_bytes, command.cdb[0]), (4096, 0x28));
}

#[test]
fn differences_of_length_are_told() {
    assert_eq!(Residual::of(512, 512), Residual::None);
    assert_eq!(Residual::of(512, 0), Residual::Overflow(512));
    assert_eq!(Residual::of(512, 10000), Residual::Underflow(9488));
    assert_eq!(Residual::of(u64::MAX, 1), Residual::Overflow(u32::MAX));
    let counters = Counters { stat_sn: 1, expected_cmd_sn: 2, max_cmd_sn: 3 };
    let reply =
        ScsiReply { tag: 9, is_carried_out: true, status: 2, residual: Residual::Underflow(5), expected_data_sn: 0 };
    let bytes = reply.encode(counters, 20);
    assert_eq!((bytes[0], bytes[1], bytes[3], bytes[7]), (0x21, 0x82, 2, 20));
    assert_eq!(bytes[24..48], [0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
}

#[test]
fn padding_fills_up_to_four_bytes() {
    assert_eq!([0, 1, 2, 3, 4, 5].map(padding_of), [0, 3, 2, 1, 0, 3]);
}

proptest! {
    #[test]
    fn any_bytes_are_decoded_without_a_panic(bytes in prop::array::uniform32(any::<u8>()), more in any::<[u8; 16]>()) {
        let mut header = [0; HEADER_BYTES];
        header[..32].copy_from_slice(&bytes);
        header[32..].copy_from_slice(&more);
        let decoded = Header::decode(&header);
        prop_assert!(decoded.data_bytes < 1 << 24 && decoded.more_header_bytes <= 1020);
        LoginRequest::decode(&header);
        DataOut::decode(&header);
        TaskFunction::decode(&header);
        let command = ScsiCommand::decode(&header);
        let _ = crate::scsi::Command::decode(&command.cdb);
        let _ = crate::scsi::unmap::ranges(&header);
        let _ = text::pairs(&header).count();
        crate::scsi::unit_of(decoded.lun);
    }
}
