//! Every decoder of the NBD protocol, on any bytes. What is accepted and can be encoded is encoded
//! and decoded again, and must be the same.

use diskwright_nbd::wire::{
    Answering, Chunk, ChunkFlags, ChunkKind, ClientFlags, ClientOption, Decoded, ExportSummary, Framing, Greeting,
    OptionCode, OptionHeader, OptionReply, OptionReplyHeader, ReplyCode, ReplyHeader, RequestHeader, option,
    option_reply,
};
use std::hint::black_box;

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// The first byte says which decoder; for those that are told a kind, the next four bytes say
/// which.
pub fn nbd_wire(data: &[u8]) {
    let Some((&which, bytes)) = data.split_first() else { return };
    match which % 11 {
        0 => {
            if let Ok(Decoded::Value(Greeting::Newstyle(flags), taken)) = Greeting::decode(bytes) {
                assert_eq!((Greeting::encode_newstyle(flags)[..].as_ref(), taken), (&bytes[..taken], taken));
            }
        }
        1 => {
            if let Decoded::Value(flags, _) = ClientFlags::decode(bytes) {
                assert_eq!(ClientFlags::decode(&flags.encode()), Decoded::Value(flags, ClientFlags::WIRE_BYTES));
            }
        }
        2 => {
            if let Ok(Decoded::Value(header, taken)) = OptionHeader::decode(bytes) {
                assert_eq!(OptionHeader::decode(&header.encode()), Ok(Decoded::Value(header, taken)));
            }
        }
        3 => {
            if let Ok(Decoded::Value(header, taken)) = OptionReplyHeader::decode(bytes) {
                assert_eq!(OptionReplyHeader::decode(&header.encode()), Ok(Decoded::Value(header, taken)));
            }
        }
        4 => drop(black_box(ExportSummary::decode(bytes, which & 0x80 != 0))),
        5 => with_number(bytes, |number, rest| an_option(OptionCode(number % 13), rest)),
        6 => with_number(bytes, |number, rest| a_reply(ReplyCode((number % 12) | (number & 0x8000_0000)), rest)),
        7 => {
            for framing in FRAMINGS {
                let Ok(Decoded::Value(request, taken)) = RequestHeader::decode(bytes, framing) else { continue };
                assert!(request.payload_bytes(framing) == 0 || request.payload_bytes(framing) == request.len_bytes);
                let mut again = Vec::new();
                request.encode(framing, &mut again);
                let Ok(Decoded::Value(same, _)) = RequestHeader::decode(&again, framing) else {
                    panic!("a request that was encoded does not decode: {request:?}");
                };
                let key =
                    |request: RequestHeader| (request.command, request.cookie, request.offset_bytes, request.len_bytes);
                assert_eq!((key(same), taken), (key(request), again.len()));
            }
        }
        8 => FRAMINGS.into_iter().for_each(|framing| drop(black_box(ReplyHeader::decode(bytes, framing)))),
        9 => with_number(bytes, |number, rest| {
            if let Ok(Chunk::BlockStatus(status)) = Chunk::parse(ChunkKind(number as u16), rest) {
                assert!(status.descriptors.count() <= rest.len() / 8);
            }
        }),
        _ => with_number(bytes, |number, rest| {
            // What we say we understand.
            let framing = FRAMINGS[number as usize % 3];
            let answering = Answering { framing, cookie: number.into(), offset_bytes: 0 };
            let header = answering.chunk(ChunkFlags::DONE, ChunkKind(number as u16), rest.len() as u32);
            if framing != Framing::Simple {
                let Ok(Decoded::Value(found, _)) = ReplyHeader::decode(&header, framing) else {
                    panic!("a chunk's header that was encoded does not decode");
                };
                assert_eq!(found.cookie(), u64::from(number));
            }
        }),
    }
}

fn with_number(bytes: &[u8], decode: impl FnOnce(u32, &[u8])) {
    if let Some((number, rest)) = bytes.split_first_chunk() {
        decode(u32::from_be_bytes(*number), rest);
    }
}

/// The data of an option, as a server takes it.
fn an_option(code: OptionCode, data: &[u8]) {
    let mut again = Vec::new();
    match ClientOption::parse(code, data) {
        Ok(ClientOption::Go(query) | ClientOption::Info(query)) => {
            let infos: Vec<u16> = query.infos().collect();
            option::encode_export(code, query.name, &infos, &mut again);
        }
        Ok(ClientOption::SetContexts(query) | ClientOption::ListContexts(query)) => {
            let queries: Vec<&str> = query.queries().collect();
            option::encode_contexts(code, query.name, &queries, &mut again);
        }
        _ => return,
    }
    assert_eq!(&again[OptionHeader::WIRE_BYTES..], data, "{code} is not the same when it is encoded again");
}

/// The data of a reply, as a client takes it.
fn a_reply(code: ReplyCode, data: &[u8]) {
    let mut again = Vec::new();
    match OptionReply::parse(code, data) {
        // A description that is no text is dropped.
        Ok(OptionReply::Server { name, description }) if !description.is_empty() => {
            option_reply::encode_server(name, description, &mut again);
        }
        Ok(OptionReply::Context { id, name }) => {
            option_reply::encode_context(OptionCode::SET_META_CONTEXT, id, name, &mut again);
        }
        _ => return,
    }
    assert_eq!(&again[OptionReplyHeader::WIRE_BYTES..], data, "{code:?} is not the same when it is encoded again");
}
