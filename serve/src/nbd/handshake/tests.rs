use super::*;
use diskwright_nbd::wire::{INFO_BLOCK_SIZE, INFO_EXPORT, OptionReply, OptionReplyHeader, TransmissionFlags, option};
use diskwright_store::{MemoryStore, RawDevice};
use proptest::prelude::*;

fn exports() -> Arc<Exports> {
    Arc::new(Exports::new(vec![export("one", true, 512), export("two", false, 512)]).unwrap())
}

fn export(name: &str, writable: bool, sector_bytes: u32) -> Export {
    let store = Arc::new(MemoryStore::with_bytes("m", vec![0; 1 << 20]));
    let device = Arc::new(RawDevice::new(store, writable, sector_bytes).unwrap());
    Export { name: name.into(), description: format!("the disk {name}"), device }
}

fn handshake(tls: TlsNeed) -> Handshake {
    Handshake::new(exports(), tls)
}

const FLAGS: [u8; 4] = [0, 0, 0, 3];

/// The client's flags, followed by what `build` appends.
fn bytes(build: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = FLAGS.to_vec();
    build(&mut out);
    out
}

/// Runs the handshake over all of `bytes`. Returns the replies as text, and what follows.
fn run(handshake: &mut Handshake, bytes: &[u8]) -> (Vec<String>, HandshakeStep) {
    let mut out = Vec::new();
    let (taken, next) = handshake.step(bytes, &mut out).unwrap();
    assert_eq!(taken, bytes.len());
    (told(&out), next)
}

fn told(mut rest: &[u8]) -> Vec<String> {
    let mut told = Vec::new();
    while !rest.is_empty() {
        let Decoded::Value(header, used) = OptionReplyHeader::decode(rest).unwrap() else { panic!("cut") };
        let end = used + header.data_bytes as usize;
        let reply = OptionReply::parse(header.code, &rest[used..end]).unwrap();
        told.push(format!("{} {reply:?}", header.option));
        rest = &rest[end..];
    }
    told
}

#[test]
fn a_typical_client_gets_its_session() {
    let mut handshake = handshake(TlsNeed::No);
    let asked = bytes(|out| {
        option::encode_plain(OptionCode::STRUCTURED_REPLY, &[], out);
        option::encode_contexts(OptionCode::SET_META_CONTEXT, "two", &[CONTEXT_ALLOCATION, "x:y", CONTEXT_DEPTH], out);
        option::encode_export(OptionCode::GO, "two", &[INFO_NAME, INFO_DESCRIPTION, INFO_BLOCK_SIZE], out);
    });
    let (told, next) = run(&mut handshake, &asked);
    let contexts = Contexts { allocation: true, depth: true, ..Contexts::default() };
    let expected = Session { export: 1, framing: Framing::Structured, contexts, may_be_unaligned: false };
    assert_eq!(next, HandshakeStep::Transmit(expected));
    assert_eq!(told.len(), 9, "{told:#?}");
    assert!(told[1].contains("base:allocation") && told[2].contains("qemu:allocation-depth"), "{told:#?}");
    assert!(told[4].contains("READ_ONLY") && told[4].contains("SEND_DF"), "{told:#?}");
    assert!(told.iter().any(|one| one.contains("the disk two")) && told[8] == "GO Ack", "{told:#?}");
}

#[test]
fn replies_do_not_depend_on_how_the_bytes_are_split() {
    let asked = bytes(|out| {
        option::encode_plain(OptionCode::LIST, &[], out);
        option::encode_plain(OptionCode(77), b"whatever", out);
        option::encode_export(OptionCode::INFO, "nobody", &[], out);
        option::encode_plain(OptionCode::EXTENDED_HEADERS, &[], out);
        option::encode_plain(OptionCode::STRUCTURED_REPLY, &[], out);
        option::encode_export(OptionCode::GO, "one", &[INFO_EXPORT], out);
    });
    let mut whole = Vec::new();
    let (taken, next) = handshake(TlsNeed::No).step(&asked, &mut whole).unwrap();
    assert_eq!(taken, asked.len());
    let told = told(&whole);
    assert!(told[3].contains("does not know") && told[4].contains("no export \\\"nobody\\\""), "{told:#?}");
    assert!(told[6].contains("Refused"), "structured replies after extended headers: {told:#?}");
    let contexts = Contexts::default();
    let expected = Session { export: 0, framing: Framing::Extended, contexts, may_be_unaligned: false };
    assert_eq!(next, HandshakeStep::Transmit(expected));
    for cut in 0..asked.len() {
        let (mut handshake, mut out) = (handshake(TlsNeed::No), Vec::new());
        let (taken, first) = handshake.step(&asked[..cut], &mut out).unwrap();
        assert_eq!(first, HandshakeStep::More, "cut at {cut}");
        let (_, second) = handshake.step(&asked[taken..], &mut out).unwrap();
        assert!(second == next && out == whole, "cut at {cut}");
    }
}

#[test]
fn export_name_starts_a_session_or_ends_the_connection() {
    let asked = bytes(|out| option::encode_plain(OptionCode::EXPORT_NAME, b"one", out));
    let mut out = Vec::new();
    let (_, next) = handshake(TlsNeed::No).step(&asked, &mut out).unwrap();
    assert!(matches!(next, HandshakeStep::Transmit(Session { export: 0, framing: Framing::Simple, .. })));
    let Decoded::Value(summary, 10) = ExportSummary::decode(&out, true) else { panic!("{out:?}") };
    assert_eq!(summary.size_bytes, 1 << 20);
    assert!(!summary.flags.intersects(TransmissionFlags::SEND_DF | TransmissionFlags::READ_ONLY));
    let mut padded = Vec::new();
    let old = [&[0, 0, 0, 1][..], &asked[4..]].concat();
    handshake(TlsNeed::No).step(&old, &mut padded).unwrap();
    assert_eq!(padded.len(), 134, "without NO_ZEROES there are 124 bytes of padding");
    let asked = bytes(|out| option::encode_plain(OptionCode::EXPORT_NAME, b"three", out));
    let error = handshake(TlsNeed::No).step(&asked, &mut out).unwrap_err();
    assert!(matches!(error, HandshakeError::UnknownExport { .. }), "{error}");
}

#[test]
fn a_client_that_did_not_ask_for_large_blocks_is_served_and_marked() {
    let exports = Arc::new(Exports::new(vec![export("small", true, 512), export("large", true, 4096)]).unwrap());
    let may_be_unaligned = |build: &dyn Fn(&mut Vec<u8>)| {
        let asked = bytes(build);
        let next = Handshake::new(Arc::clone(&exports), TlsNeed::No).step(&asked, &mut Vec::new()).unwrap().1;
        let HandshakeStep::Transmit(session) = next else { panic!("{next:?}") };
        session.may_be_unaligned
    };
    let go =
        |name, infos: &'static [u16]| move |out: &mut Vec<u8>| option::encode_export(OptionCode::GO, name, infos, out);
    let export_name = |name: &'static str| {
        move |out: &mut Vec<u8>| option::encode_plain(OptionCode::EXPORT_NAME, name.as_bytes(), out)
    };
    assert!(
        may_be_unaligned(&go("large", &[]))
            && may_be_unaligned(&go("large", &[INFO_NAME]))
            && may_be_unaligned(&export_name("large"))
    );
    assert!(!may_be_unaligned(&go("large", &[INFO_NAME, INFO_BLOCK_SIZE])));
    assert!(!may_be_unaligned(&go("small", &[])) && !may_be_unaligned(&export_name("small")));
    // An INFO for the same export counts; one for another export does not.
    for (first, expected) in [("large", false), ("small", true)] {
        let found = may_be_unaligned(&|out| {
            option::encode_export(OptionCode::INFO, first, &[INFO_BLOCK_SIZE], out);
            option::encode_plain(OptionCode::EXPORT_NAME, b"large", out);
        });
        assert_eq!(found, expected, "after INFO for {first}");
    }
}

#[test]
fn contexts_apply_only_to_the_export_they_were_set_for() {
    let mut handshake = handshake(TlsNeed::No);
    let asked = bytes(|out| {
        option::encode_contexts(OptionCode::SET_META_CONTEXT, "one", &[CONTEXT_ALLOCATION], out);
        option::encode_plain(OptionCode::STRUCTURED_REPLY, &[], out);
        option::encode_contexts(OptionCode::LIST_META_CONTEXT, "one", &[], out);
        option::encode_contexts(OptionCode::LIST_META_CONTEXT, "one", &["qemu:"], out);
        option::encode_contexts(OptionCode::SET_META_CONTEXT, "one", &[CONTEXT_ALLOCATION], out);
        option::encode_export(OptionCode::GO, "two", &[], out);
    });
    let (told, next) = run(&mut handshake, &asked);
    assert!(told[0].contains("need structured replies"), "{told:#?}");
    assert_eq!(told.iter().filter(|one| one.contains("LIST_META_CONTEXT Context")).count(), 3, "{told:#?}");
    let HandshakeStep::Transmit(session) = next else { panic!("{next:?}") };
    assert_eq!((session.export, session.contexts), (1, Contexts::default()));
}

#[test]
fn without_required_tls_all_options_are_refused() {
    let mut within = handshake(TlsNeed::Must);
    let asked = bytes(|out| {
        option::encode_plain(OptionCode::LIST, &[], out);
        option::encode_export(OptionCode::GO, "one", &[], out);
        option::encode_plain(OptionCode::STRUCTURED_REPLY, &[], out);
        option::encode_plain(OptionCode::STARTTLS, &[], out);
    });
    let (told, next) = run(&mut within, &asked);
    assert!(told[..3].iter().all(|one| one.contains("requires TLS first")), "{told:#?}");
    assert_eq!((told[3].as_str(), next), ("STARTTLS Ack", HandshakeStep::StartTls));
    // Within TLS the client flags are not sent again.
    let mut again = Vec::new();
    option::encode_plain(OptionCode::STARTTLS, &[], &mut again);
    option::encode_export(OptionCode::GO, "one", &[], &mut again);
    let (told, next) = run(&mut within, &again);
    assert!(told[0].contains("Refused"), "{told:#?}");
    assert!(matches!(next, HandshakeStep::Transmit(Session { framing: Framing::Simple, .. })), "{next:?}");

    let export_name = bytes(|out| option::encode_plain(OptionCode::EXPORT_NAME, b"one", out));
    let error = handshake(TlsNeed::Must).step(&export_name, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, HandshakeError::TlsRequired));
    let injected = bytes(|out| {
        option::encode_plain(OptionCode::STARTTLS, &[], out);
        option::encode_plain(OptionCode::LIST, &[], out);
    });
    let error = handshake(TlsNeed::May).step(&injected, &mut Vec::new()).unwrap_err();
    assert!(matches!(error, HandshakeError::Injected(16)), "{error}");
    let (told, _) = run(&mut handshake(TlsNeed::No), &injected);
    assert!(told[0].contains("no certificates"), "{told:#?}");
}

#[test]
fn invalid_bytes_end_the_session() {
    let mut out = Vec::new();
    for flags in [[0, 0, 0, 0], [0, 0, 0, 7], [0xff; 4]] {
        assert!(matches!(handshake(TlsNeed::No).step(&flags, &mut out), Err(HandshakeError::ClientFlags(_))));
    }
    let wrong_magic = bytes(|out| out.extend_from_slice(&[0x55; 16]));
    assert!(matches!(handshake(TlsNeed::No).step(&wrong_magic, &mut out), Err(HandshakeError::Wire(_))));
    let huge = bytes(|out| {
        out.extend_from_slice(&OptionHeader { option: OptionCode::GO, data_bytes: u32::MAX }.encode());
    });
    let error = handshake(TlsNeed::No).step(&huge, &mut out).unwrap_err();
    assert!(matches!(error, HandshakeError::Wire(WireError::TooLong { .. })), "{error}");
    let mangled = bytes(|out| option::encode_plain(OptionCode::GO, &[0, 0, 0, 200, b'x', 0, 0], out));
    let (told, next) = run(&mut handshake(TlsNeed::No), &mangled);
    assert!(told[0].contains("Refused") && next == HandshakeStep::More, "{told:#?}");
    let abort = bytes(|out| option::encode_plain(OptionCode::ABORT, &[], out));
    assert_eq!(run(&mut handshake(TlsNeed::No), &abort).1, HandshakeStep::Bye);
}

proptest! {
    #[test]
    fn random_bytes_cause_no_panic_and_no_endless_replies(
        tail in prop::collection::vec(any::<u8>(), 0..300),
        options in prop::collection::vec((0u32..14, prop::collection::vec(any::<u8>(), 0..40)), 0..6),
    ) {
        let asked = bytes(|out| {
            options.iter().for_each(|(code, data)| option::encode_plain(OptionCode(*code), data, out));
            out.extend_from_slice(&tail);
        });
        for tls in [TlsNeed::No, TlsNeed::May, TlsNeed::Must] {
            let mut out = Vec::new();
            if let Ok((taken, _)) = handshake(tls).step(&asked, &mut out) {
                prop_assert!(taken <= asked.len());
            }
            prop_assert!(out.len() <= 1000 * (1 + asked.len() / 16));
        }
    }
}
