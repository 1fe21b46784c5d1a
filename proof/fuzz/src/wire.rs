//! All decoders of the NBD protocol. A value that is accepted and can be encoded must decode to the
//! same value again.

use diskwright_nbd::wire::{
    Answering, Chunk, ChunkFlags, ChunkKind, ClientFlags, ClientOption, Decoded, ExportSummary, Framing, Greeting,
    OptionCode, OptionHeader, OptionReply, OptionReplyHeader, ReplyCode, ReplyHeader, RequestHeader, option,
    option_reply,
};
use std::hint::black_box;

const FRAMINGS: [Framing; 3] = [Framing::Simple, Framing::Structured, Framing::Extended];

/// The fuzz target. The first byte chooses the decoder. For some decoders the next four bytes
/// choose the kind of message.
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
                    panic!("an encoded request does not decode: {request:?}");
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
            // The headers that we send ourselves.
            let framing = FRAMINGS[number as usize % 3];
            let answering = Answering { framing, cookie: number.into(), offset_bytes: 0 };
            let header = answering.chunk(ChunkFlags::DONE, ChunkKind(number as u16), rest.len() as u32);
            if framing != Framing::Simple {
                let Ok(Decoded::Value(found, _)) = ReplyHeader::decode(&header, framing) else {
                    panic!("an encoded chunk header does not decode");
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

/// Decodes the data of an option, as a server does.
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
    assert_eq!(&again[OptionHeader::WIRE_BYTES..], data, "{code} changes when it is encoded again");
}

/// Decodes the data of an option reply, as a client does.
fn a_reply(code: ReplyCode, data: &[u8]) {
    let mut again = Vec::new();
    match OptionReply::parse(code, data) {
        // A description that is not UTF-8 is dropped.
        Ok(OptionReply::Server { name, description }) if !description.is_empty() => {
            option_reply::encode_server(name, description, &mut again);
        }
        Ok(OptionReply::Context { id, name }) => {
            option_reply::encode_context(OptionCode::SET_META_CONTEXT, id, name, &mut again);
        }
        _ => return,
    }
    assert_eq!(&again[OptionReplyHeader::WIRE_BYTES..], data, "{code:?} changes when it is encoded again");
}
