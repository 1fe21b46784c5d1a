//! Messages survive encoding and decoding; no bytes cause a panic; decoding does not depend on
//! where the bytes are split.

use super::{chunk, option, option_reply, reply, *};
use proptest::prelude::*;
use std::fmt::Debug;

/// Passes ever longer prefixes of `bytes` to `decode`. It must ask for more bytes until the message
/// is complete, never for more than that, and then return the same value as for all bytes.
fn split_anywhere<T: PartialEq + Debug>(bytes: &[u8], decode: impl Fn(&[u8]) -> Result<Decoded<T>, WireError>) -> T {
    let whole = decode(bytes).unwrap();
    let Decoded::Value(_, taken) = whole else { panic!("{whole:?} of a whole message") };
    for there in 0..taken {
        match decode(&bytes[..there]) {
            Ok(Decoded::Need(more)) => assert!(more > 0 && there + more <= taken, "{there} of {taken}: needs {more}"),
            other => panic!("{there} of {taken}: {other:?}"),
        }
    }
    assert_eq!(decode(&bytes[..taken]).unwrap(), whole);
    match whole {
        Decoded::Value(value, _) => value,
        Decoded::Need(_) => unreachable!("matched above"),
    }
}

fn framing() -> impl Strategy<Value = Framing> {
    prop_oneof![Just(Framing::Simple), Just(Framing::Structured), Just(Framing::Extended)]
}

fn chunked() -> impl Strategy<Value = Framing> {
    prop_oneof![Just(Framing::Structured), Just(Framing::Extended)]
}

/// Splits a chunk into header and payload, as a client does.
fn take_chunk(bytes: &[u8], framing: Framing) -> (ReplyHeader, &[u8]) {
    let header = split_anywhere(bytes, |bytes| ReplyHeader::decode(bytes, framing));
    let ReplyHeader::Chunk { payload_bytes, .. } = header else { panic!("{header:?}") };
    let payload = &bytes[bytes.len() - payload_bytes as usize..];
    (header, payload)
}

proptest! {
    #[test]
    fn greetings(flags: u16, size_bytes: u64, export: u16, no_zeroes: bool, client: u32) {
        let flags = HandshakeFlags::from_bits_retain(flags);
        prop_assert_eq!(split_anywhere(&Greeting::encode_newstyle(flags), Greeting::decode), Greeting::Newstyle(flags));
        let summary = ExportSummary { size_bytes, flags: TransmissionFlags::from_bits_retain(export) };
        let mut bytes = Vec::new();
        summary.encode(no_zeroes, &mut bytes);
        prop_assert_eq!(bytes.len(), if no_zeroes { 10 } else { 134 });
        prop_assert_eq!(split_anywhere(&bytes, |bytes| Ok(ExportSummary::decode(bytes, no_zeroes))), summary);
        let client = ClientFlags::from_bits_retain(client);
        prop_assert_eq!(split_anywhere(&client.encode(), |bytes| Ok(ClientFlags::decode(bytes))), client);
    }

    #[test]
    fn headers_of_options(option: u32, code: u32, data_bytes: u32) {
        let header = OptionHeader { option: OptionCode(option), data_bytes };
        prop_assert_eq!(split_anywhere(&header.encode(), OptionHeader::decode), header);
        let header = OptionReplyHeader { option: OptionCode(option), code: ReplyCode(code), data_bytes };
        prop_assert_eq!(split_anywhere(&header.encode(), OptionReplyHeader::decode), header);
    }

    #[test]
    fn queries_of_exports(name in "\\PC{0,40}", infos in prop::collection::vec(any::<u16>(), 0..9), go: bool) {
        let code = if go { OptionCode::GO } else { OptionCode::INFO };
        let mut bytes = Vec::new();
        option::encode_export(code, &name, &infos, &mut bytes);
        let header = split_anywhere(&bytes, OptionHeader::decode);
        let data = &bytes[OptionHeader::WIRE_BYTES..];
        prop_assert_eq!(header, OptionHeader { option: code, data_bytes: data.len() as u32 });
        match ClientOption::parse(header.option, data).unwrap() {
            ClientOption::Go(query) | ClientOption::Info(query) => {
                prop_assert_eq!(query.name, name);
                prop_assert_eq!(query.infos().collect::<Vec<_>>(), infos);
            }
            other => prop_assert!(false, "{:?}", other),
        }
        for cut in 0..data.len() {
            prop_assert!(ClientOption::parse(header.option, &data[..cut]).is_err());
        }
    }

    #[test]
    fn queries_of_contexts(name in "\\PC{0,40}", queries in prop::collection::vec("[a-z]{1,6}:\\PC{0,9}", 0..6)) {
        let borrowed: Vec<&str> = queries.iter().map(String::as_str).collect();
        let mut bytes = Vec::new();
        option::encode_contexts(OptionCode::SET_META_CONTEXT, &name, &borrowed, &mut bytes);
        let data = &bytes[OptionHeader::WIRE_BYTES..];
        match ClientOption::parse(OptionCode::SET_META_CONTEXT, data).unwrap() {
            ClientOption::SetContexts(query) => {
                prop_assert_eq!(query.name, name);
                prop_assert_eq!(query.queries().collect::<Vec<_>>(), borrowed);
            }
            other => prop_assert!(false, "{:?}", other),
        }
    }

    #[test]
    fn replies_to_options(name in "\\PC{0,40}", text in "\\PC{0,40}", id: u32, size_bytes: u64, flags: u16, sizes: [u32; 3]) {
        let flags = TransmissionFlags::from_bits_retain(flags);
        let block_size = BlockSizes { minimum: sizes[0], preferred: sizes[1], maximum: sizes[2] };
        let infos = [
            Info::Export { size_bytes, flags },
            Info::Name(&name),
            Info::Description(&text),
            Info::BlockSize(block_size),
            Info::Unknown(77),
        ];
        let mut bytes = Vec::new();
        option_reply::encode_server(&name, &text, &mut bytes);
        option_reply::encode_context(OptionCode::LIST, id, &name, &mut bytes);
        infos.iter().for_each(|info| option_reply::encode_info(OptionCode::LIST, info, &mut bytes));
        option_reply::encode_refusal(OptionCode::LIST, ReplyCode::ERR_POLICY, &text, &mut bytes);
        option_reply::encode_ack(OptionCode::LIST, &mut bytes);
        let mut expected = vec![
            OptionReply::Server { name: &name, description: &text },
            OptionReply::Context { id, name: &name },
        ];
        expected.extend(infos.into_iter().map(OptionReply::Info));
        expected.push(OptionReply::Refused { code: ReplyCode::ERR_POLICY, message: &text });
        expected.push(OptionReply::Ack);
        let mut rest = &bytes[..];
        for expected in expected {
            let header = split_anywhere(rest, OptionReplyHeader::decode);
            prop_assert_eq!(header.option, OptionCode::LIST);
            let (data, behind) = rest[OptionReplyHeader::WIRE_BYTES..].split_at(header.data_bytes as usize);
            prop_assert_eq!(OptionReply::parse(header.code, data).unwrap(), expected);
            rest = behind;
        }
        prop_assert!(rest.is_empty());
    }

    #[test]
    fn requests(framing in framing(), flags in 0u16..32, command in 0u16..9, cookie: u64, offset_bytes: u64, len_bytes: u32) {
        let request = RequestHeader {
            flags: CommandFlags::from_bits_retain(flags),
            command: Command(command),
            cookie,
            offset_bytes,
            len_bytes: len_bytes.into(),
        };
        let mut bytes = Vec::new();
        request.encode(framing, &mut bytes);
        prop_assert_eq!(bytes.len(), RequestHeader::wire_bytes(framing));
        let decoded = split_anywhere(&bytes, |bytes| RequestHeader::decode(bytes, framing));
        let writes = request.command == Command::WRITE;
        prop_assert_eq!(decoded.payload_bytes(framing), if writes { u64::from(len_bytes) } else { 0 });
        prop_assert_eq!(decoded.flags.contains(CommandFlags::PAYLOAD_LEN), writes && framing == Framing::Extended);
        let flags = decoded.flags - CommandFlags::PAYLOAD_LEN;
        prop_assert_eq!(RequestHeader { flags, ..decoded }, request);
    }

    #[test]
    fn simple_replies(error: u32, cookie: u64, structured: bool) {
        let framing = if structured { Framing::Structured } else { Framing::Simple };
        let error = ErrorCode(error);
        let header = split_anywhere(&reply::simple(cookie, error), |bytes| ReplyHeader::decode(bytes, framing));
        prop_assert_eq!(header, ReplyHeader::Simple { error, cookie });
    }

    #[test]
    fn data_chunks(framing in chunked(), done: bool, cookie: u64, offset_bytes: u64, at_bytes: u64, data_bytes in 1u32..1 << 26) {
        let flags = if done { ChunkFlags::DONE } else { ChunkFlags::empty() };
        let bytes = Answering { framing, cookie, offset_bytes }.data(flags, at_bytes, data_bytes);
        let header = split_anywhere(&bytes, |bytes| ReplyHeader::decode(bytes, framing));
        prop_assert_eq!(header, ReplyHeader::Chunk {
            flags,
            kind: ChunkKind::OFFSET_DATA,
            cookie,
            offset_bytes: (framing == Framing::Extended).then_some(offset_bytes),
            payload_bytes: u64::from(data_bytes) + 8,
        });
        prop_assert_eq!(chunk::data_offset(*bytes.last_chunk().unwrap()), at_bytes);
    }

    #[test]
    fn other_chunks(framing in chunked(), cookie: u64, at_bytes: u64, len_bytes in 1u32.., code in 1u32.., text in "\\PC{0,40}", has_offset: bool) {
        let mut bytes = Vec::new();
        let answering = Answering { framing, cookie, offset_bytes: 7 };
        answering.hole(ChunkFlags::DONE, at_bytes, len_bytes, &mut bytes);
        let (header, payload) = take_chunk(&bytes, framing);
        prop_assert_eq!(header.cookie(), cookie);
        prop_assert_eq!(Chunk::parse(ChunkKind::OFFSET_HOLE, payload).unwrap(), Chunk::Hole { offset_bytes: at_bytes, len_bytes });
        let offset_bytes = has_offset.then_some(at_bytes);
        let code = ErrorCode(code);
        bytes.clear();
        answering.error(code, &text, offset_bytes, &mut bytes);
        let (header, payload) = take_chunk(&bytes, framing);
        let ReplyHeader::Chunk { kind, .. } = header else { panic!("{header:?}") };
        prop_assert_eq!(Chunk::parse(kind, payload).unwrap(), Chunk::Error { code, message: &text, offset_bytes });
        for cut in 0..payload.len() {
            prop_assert!(Chunk::parse(kind, &payload[..cut]).is_err());
        }
    }

    #[test]
    fn block_status(framing in chunked(), id: u32, runs in prop::collection::vec((1u64..1 << 34, 0u64..4), 1..20)) {
        let runs: Vec<Descriptor> = runs.into_iter().map(|(len_bytes, status)| Descriptor { len_bytes, status }).collect();
        let mut bytes = Vec::new();
        Answering { framing, cookie: 5, offset_bytes: 7 }.block_status(ChunkFlags::DONE, id, &runs, &mut bytes);
        let (header, payload) = take_chunk(&bytes, framing);
        let ReplyHeader::Chunk { kind, .. } = header else { panic!("{header:?}") };
        let Chunk::BlockStatus(status) = Chunk::parse(kind, payload).unwrap() else { panic!("{kind:?}") };
        prop_assert_eq!(status.context_id, id);
        let told: Vec<Descriptor> = status.descriptors.collect();
        if framing == Framing::Extended {
            prop_assert_eq!(told, runs);
        } else {
            // The first run that is too long is truncated and the last; all runs before it are
            // complete.
            let (last, before) = told.split_last().unwrap();
            prop_assert_eq!(before, &runs[..before.len()]);
            prop_assert_eq!(last.status, runs[before.len()].status);
            prop_assert!(last.len_bytes == runs[before.len()].len_bytes || last.len_bytes == 0xffff_0000);
            prop_assert!(told.len() == runs.len() || last.len_bytes == 0xffff_0000);
        }
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), number: u32, small in 0u32..12, framing in framing()) {
        let _ = (Greeting::decode(&bytes), ClientFlags::decode(&bytes), ExportSummary::decode(&bytes, number % 2 == 0));
        let _ = (OptionHeader::decode(&bytes), OptionReplyHeader::decode(&bytes));
        let _ = (RequestHeader::decode(&bytes, framing), ReplyHeader::decode(&bytes, framing));
        for number in [number, small, small | 0x8000_0000] {
            if let Ok(ClientOption::ListContexts(query) | ClientOption::SetContexts(query)) =
                ClientOption::parse(OptionCode(number), &bytes)
            {
                prop_assert!(query.queries().count() <= bytes.len());
            }
            let _ = OptionReply::parse(ReplyCode(number), &bytes);
            let _ = ErrorCode(number).kind();
        }
        for kind in [number as u16, small as u16, small as u16 | 0x8000] {
            if let Ok(Chunk::BlockStatus(status)) = Chunk::parse(ChunkKind(kind), &bytes) {
                prop_assert!(status.descriptors.count() > 0);
            }
        }
    }

    #[test]
    fn a_wrong_magic_number_names_the_expected_one(first: u8, rest in prop::collection::vec(any::<u8>(), 31..32)) {
        let bytes: Vec<u8> = std::iter::once(first).chain(rest).collect();
        if let Err(error) = RequestHeader::decode(&bytes, Framing::Simple) {
            prop_assert!(error.to_string().contains("expected 0x25609513"), "{}", error);
        }
        if let Err(error) = ReplyHeader::decode(&bytes, Framing::Extended) {
            prop_assert!(error.to_string().contains("expected 0x6e8a278c"), "{}", error);
        }
    }
}

#[test]
fn an_oldstyle_greeting_contains_the_export() {
    let mut bytes = handshake::GREETING_MAGIC.to_be_bytes().to_vec();
    bytes.extend_from_slice(&handshake::OLDSTYLE_MAGIC.to_be_bytes());
    bytes.extend_from_slice(&(1u64 << 30).to_be_bytes());
    bytes.extend_from_slice(&3u32.to_be_bytes());
    bytes.extend_from_slice(&[0; 124]);
    let flags = TransmissionFlags::HAS_FLAGS | TransmissionFlags::READ_ONLY;
    let summary = ExportSummary { size_bytes: 1 << 30, flags };
    assert_eq!(split_anywhere(&bytes, Greeting::decode), Greeting::Oldstyle(summary));
}

#[test]
fn framings_do_not_mix() {
    let simple = reply::simple(1, ErrorCode::NONE);
    assert!(ReplyHeader::decode(&simple, Framing::Extended).is_err());
    let structured = Answering { framing: Framing::Structured, cookie: 1, offset_bytes: 0 }.done();
    assert!(ReplyHeader::decode(&structured, Framing::Simple).is_err());
    assert!(ReplyHeader::decode(&structured, Framing::Extended).is_err());
    let extended = Answering { framing: Framing::Extended, cookie: 1, offset_bytes: 0 }.done();
    assert!(ReplyHeader::decode(&extended, Framing::Structured).is_err());
}

#[test]
fn invalid_chunks_are_refused() {
    for (kind, payload) in [
        (ChunkKind::NONE, &[0][..]),
        (ChunkKind::OFFSET_HOLE, &[0; 12]),
        (ChunkKind::OFFSET_HOLE, &[1; 13]),
        (ChunkKind::BLOCK_STATUS, &[0; 4]),
        (ChunkKind::BLOCK_STATUS, &[0; 13]),
        (ChunkKind::BLOCK_STATUS_EXT, &[0; 8]),
        (ChunkKind::BLOCK_STATUS_EXT, &[1; 24]),
        (ChunkKind(3), &[]),
        (ChunkKind::ERROR, &[0; 5]),
        (ChunkKind::ERROR_OFFSET, &[0; 13]),
    ] {
        assert!(Chunk::parse(kind, payload).is_err(), "{kind:?} of {} bytes", payload.len());
    }
    // An unknown kind of error is an error; so is an error with code 0.
    let unknown = Chunk::parse(ChunkKind(0x8123), &[0, 0, 0, 5, 0, 0, 9, 9]).unwrap();
    assert_eq!(unknown, Chunk::Error { code: ErrorCode::EIO, message: "", offset_bytes: None });
    let none = Chunk::parse(ChunkKind::ERROR, &[0; 6]).unwrap();
    assert_eq!(none, Chunk::Error { code: ErrorCode::EINVAL, message: "", offset_bytes: None });
}

#[test]
fn invalid_block_sizes_are_refused() {
    let ok = BlockSizes { minimum: 4096, preferred: 65536, maximum: u32::MAX };
    assert!(ok.check().is_ok() && BlockSizes::DEFAULT.check().is_ok());
    for wrong in [
        BlockSizes { minimum: 0, ..ok },
        BlockSizes { minimum: 3000, ..ok },
        BlockSizes { minimum: 1 << 17, preferred: 1 << 17, ..ok },
        BlockSizes { preferred: 256, minimum: 1, ..ok },
        BlockSizes { preferred: 512, ..ok },
        BlockSizes { maximum: 4096, ..ok },
        BlockSizes { maximum: 65537, ..ok },
    ] {
        assert!(wrong.check().is_err(), "{wrong:?}");
    }
}

#[test]
fn strings_are_text() {
    for (name, ok) in [(&b"disk"[..], true), (b"", true), (b"a\0b", false), (b"\xff", false), (&[b'a'; 4097], false)] {
        assert_eq!(ClientOption::parse(OptionCode::EXPORT_NAME, name).is_ok(), ok, "{name:?}");
    }
}

#[test]
fn error_codes_survive_conversion() {
    use std::io::{Error, ErrorKind};
    for code in
        [ErrorCode::EPERM, ErrorCode::EIO, ErrorCode::ENOMEM, ErrorCode::EINVAL, ErrorCode::ENOSPC, ErrorCode::ENOTSUP]
    {
        assert_eq!(ErrorCode::from_io(&Error::new(code.kind(), "x")), code);
    }
    for (errno, code) in [
        (1, ErrorCode::EPERM),
        (5, ErrorCode::EIO),
        (27, ErrorCode::ENOSPC),
        (28, ErrorCode::ENOSPC),
        (30, ErrorCode::EPERM),
        (75, ErrorCode::EOVERFLOW),
        (95, ErrorCode::ENOTSUP),
        (108, ErrorCode::ESHUTDOWN),
        (122, ErrorCode::ENOSPC),
    ] {
        assert_eq!(ErrorCode::from_io(&Error::from_raw_os_error(errno)), code, "errno {errno}");
    }
    assert_eq!(ErrorCode::from_io(&Error::from(ErrorKind::ReadOnlyFilesystem)), ErrorCode::EPERM);
    assert_eq!(ErrorCode(4711).kind(), ErrorKind::InvalidInput);
}
