use super::*;
use proptest::prelude::*;

/// A message as the kernel sends it.
pub(crate) fn message(opcode: u32, unique: u64, node: u64, arguments: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(((IN_HEADER_BYTES + arguments.len()) as u32).to_ne_bytes());
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(unique.to_ne_bytes());
    bytes.extend(node.to_ne_bytes());
    bytes.extend([0; 16]);
    bytes.extend(arguments);
    bytes
}

pub(crate) fn read(unique: u64, offset_bytes: u64, size_bytes: u32) -> Vec<u8> {
    let mut arguments = vec![0; 40];
    arguments[8..16].copy_from_slice(&offset_bytes.to_ne_bytes());
    arguments[16..20].copy_from_slice(&size_bytes.to_ne_bytes());
    message(opcode::READ, unique, ROOT, &arguments)
}

pub(crate) fn write(unique: u64, offset_bytes: u64, payload: &[u8]) -> Vec<u8> {
    let mut arguments = vec![0; 40];
    arguments[8..16].copy_from_slice(&offset_bytes.to_ne_bytes());
    arguments[16..20].copy_from_slice(&(payload.len() as u32).to_ne_bytes());
    arguments.extend(payload);
    message(opcode::WRITE, unique, ROOT, &arguments)
}

pub(crate) fn fallocate(unique: u64, offset_bytes: u64, len_bytes: u64, mode: u32) -> Vec<u8> {
    let mut arguments = vec![0; 8];
    arguments.extend(offset_bytes.to_ne_bytes());
    arguments.extend(len_bytes.to_ne_bytes());
    arguments.extend(mode.to_ne_bytes());
    arguments.extend([0; 4]);
    message(opcode::FALLOCATE, unique, ROOT, &arguments)
}

pub(crate) fn fsync(unique: u64) -> Vec<u8> {
    message(opcode::FSYNC, unique, ROOT, &[0; 16])
}

pub(crate) fn lseek(unique: u64, offset_bytes: u64, whence: u32) -> Vec<u8> {
    let mut arguments = vec![0; 8];
    arguments.extend(offset_bytes.to_ne_bytes());
    arguments.extend(whence.to_ne_bytes());
    arguments.extend([0; 4]);
    message(opcode::LSEEK, unique, ROOT, &arguments)
}

#[test]
fn messages_of_the_kernel_are_parsed() {
    let bytes = write(5, 4096, b"abc");
    let (header, message) = parse(&bytes).unwrap();
    assert_eq!(header, Header { opcode: 16, unique: 5, node: 1 });
    assert_eq!(message, Message::Write { offset_bytes: 4096, size_bytes: 3 });
    assert_eq!(parse(&read(6, 1 << 40, 512)).unwrap().1, Message::Read { offset_bytes: 1 << 40, size_bytes: 512 });
    let bytes = fallocate(7, 1, 2, 3);
    assert_eq!(parse(&bytes).unwrap().1, Message::Fallocate { offset_bytes: 1, len_bytes: 2, mode: 3 });
    assert_eq!(parse(&fsync(8)).unwrap().1, Message::Fsync);
    assert_eq!(parse(&tests::message(1, 9, 1, b"disk\0")).unwrap().1, Message::Lookup { name: b"disk" });
    assert_eq!(parse(&tests::message(9999, 9, 1, b"")).unwrap().1, Message::Other);
}

#[test]
fn init_of_old_and_new_kernels() {
    let words = |words: &[u32]| words.iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    let parsed = |arguments: &[u8]| match parse(&message(opcode::INIT, 1, 0, arguments)).unwrap().1 {
        Message::Init { minor, flags, .. } => (minor, flags),
        other => panic!("{other:?}"),
    };
    assert_eq!(parsed(&words(&[7, 31, 0, 1])), (31, 1));
    assert_eq!(parsed(&words(&[7, 31, 0, 1, 16])), (31, 1), "flags2 counts only with INIT_EXT");
    let extended = 1 << 30 | 1;
    assert_eq!(parsed(&words(&[7, 45, 0, extended, 16])), (45, 16 << 32 | u64::from(extended)));
    assert_eq!(parsed(&words(&[8, 0])), (0, 0));
}

#[test]
fn a_message_of_the_wrong_length_is_refused() {
    let mut bytes = write(5, 0, &[1; 512]);
    bytes.pop();
    assert_eq!(parse(&bytes), Err(WireError { len_bytes: bytes.len(), opcode: 16 }));
    // A write whose payload is not as long as its size field says.
    let mut bytes = write(5, 0, &[1; 512]);
    bytes[IN_HEADER_BYTES + 16..][..4].copy_from_slice(&513u32.to_ne_bytes());
    assert!(parse(&bytes).is_err());
    assert_eq!(parse(&[]), Err(WireError { len_bytes: 0, opcode: 0 }));
    // A name without its final zero.
    assert!(parse(&message(opcode::LOOKUP, 1, 1, b"disk")).is_err());
}

#[test]
fn replies_have_the_size_of_the_kernels_structures() {
    let mut buf = [0xaa; 4096];
    let of = Attributes {
        node: 1,
        size_bytes: 1000,
        mode: 0o100_600,
        links: 1,
        uid: 2,
        gid: 3,
        time_seconds: 4,
        unit_bytes: 4096,
    };
    let accepted = Accepted {
        minor: 39,
        max_readahead_bytes: 0,
        flags: 1,
        max_background: 2,
        congestion_threshold: 1,
        max_write_bytes: 4096,
        max_pages: 1,
    };
    type Put<'a> = &'a dyn Fn(&mut Answer<'_>);
    let cases: [(usize, Put<'_>); 7] = [
        (104, &|answer| answer.attr_out(&of)),
        (128, &|answer| answer.entry_out(&of)),
        (16, &|answer| answer.open_out(1)),
        (8, &|answer| answer.write_out(1)),
        (8, &|answer| answer.lseek_out(1)),
        (80, &|answer| answer.statfs_out(1 << 20, 4096)),
        (64, &|answer| answer.init_out(&accepted)),
    ];
    for (body_bytes, put) in cases {
        let mut answer = Answer::new(&mut buf);
        put(&mut answer);
        assert_eq!(answer.end(77), 16 + body_bytes);
        assert_eq!(buf[..4], ((16 + body_bytes) as u32).to_ne_bytes());
        assert_eq!(buf[8..16], 77u64.to_ne_bytes());
    }
}

#[test]
fn errors_are_negative() {
    let mut buf = [0; 16];
    put_header(&mut buf, 0, Err(Errno::NOSPC), 3);
    assert_eq!(buf[4..8], (-28i32).to_ne_bytes());
}

proptest! {
    #[test]
    fn random_bytes_cause_no_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), opcode in 0u32..60, honest: bool) {
        let mut bytes = bytes;
        if honest && bytes.len() >= 8 {
            let len = bytes.len() as u32;
            bytes[..4].copy_from_slice(&len.to_ne_bytes());
            bytes[4..8].copy_from_slice(&opcode.to_ne_bytes());
        }
        if let Ok((_, Message::Write { size_bytes, .. })) = parse(&bytes) {
            prop_assert_eq!(bytes.len(), IN_HEADER_BYTES + WRITE_IN_BYTES + size_bytes as usize);
        }
    }
}
