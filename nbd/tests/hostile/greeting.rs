//! Invalid handshakes.

use crate::fake::{Fake, raw, take};
use diskwright_nbd::{
    NbdDevice,
    wire::{
        BlockSizes, Decoded, Greeting, HandshakeFlags, Info, OptionCode, OptionHeader, ReplyCode, TransmissionFlags,
        handshake, option_reply,
    },
};
use std::io::Write;

/// A server that sends a greeting and answers each option by `option`.
fn handshaker(option: impl Fn(OptionCode, &mut Vec<u8>) + Send + Sync + 'static) -> Fake {
    raw(move |stream| {
        let _ = stream.write_all(&Greeting::encode_newstyle(HandshakeFlags::FIXED_NEWSTYLE));
        let _ = take(stream, 4);
        while let Ok(bytes) = take(stream, OptionHeader::WIRE_BYTES) {
            let Ok(Decoded::Value(header, _)) = OptionHeader::decode(&bytes) else { return };
            let _ = take(stream, header.data_bytes as usize);
            let mut answer = Vec::new();
            option(header.option, &mut answer);
            let _ = stream.write_all(&answer);
        }
    })
}

#[test]
fn invalid_handshakes_are_reported() {
    let said = |server: Fake| NbdDevice::open(&server.uri(), false).unwrap_err().to_string();
    let error = said(raw(|stream| drop(stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n"))));
    assert!(error.contains("expected \"NBDMAGIC\"") && error.contains("not an NBD server"), "{error}");
    let error = said(raw(|_| {}));
    assert!(error.contains("the connection broke while waiting for its greeting"), "{error}");
    let error = said(handshaker(|_, out| out.extend_from_slice(&[7; 20])));
    assert!(error.contains("0x707070707070707"), "{error}");
    let error = said(handshaker(|_, out| option_reply::encode_ack(OptionCode::LIST, out)));
    assert!(error.contains("it answered LIST to EXTENDED_HEADERS"), "{error}");
    let error = said(handshaker(|option, out| {
        let header = diskwright_nbd::wire::OptionReplyHeader { option, code: ReplyCode::ACK, data_bytes: u32::MAX };
        out.extend_from_slice(&header.encode());
    }));
    assert!(error.contains("4294967295 bytes long, at most 65536"), "{error}");
    let error = said(handshaker(|option, out| {
        (0..20_000).for_each(|_| option_reply::encode_server("x", "", out));
        option_reply::encode_ack(option, out);
    }));
    assert!(error.contains("LIST to EXTENDED_HEADERS"), "{error}");
    let go = |size_bytes: u64, sizes: Option<BlockSizes>| {
        handshaker(move |option, out| match option {
            OptionCode::GO => {
                let flags = TransmissionFlags::HAS_FLAGS;
                if size_bytes > 0 {
                    option_reply::encode_info(option, &Info::Export { size_bytes, flags }, out);
                }
                if let Some(sizes) = sizes {
                    option_reply::encode_info(option, &Info::BlockSize(sizes), out);
                }
                option_reply::encode_ack(option, out);
            }
            _ => option_reply::encode_refusal(option, ReplyCode::ERR_UNSUP, "no", out),
        })
    };
    let error = said(go(0, None));
    assert!(error.contains("without sending the size"), "{error}");
    let error = said(go(u64::MAX, None));
    assert!(error.contains("larger than the maximum"), "{error}");
    let odd = BlockSizes { minimum: 4096, preferred: 4096, maximum: u32::MAX };
    let error = said(go(10_000, Some(odd)));
    assert!(error.contains("not a multiple of its minimum block size of 4096"), "{error}");
    let error = said(go(1 << 20, Some(BlockSizes { minimum: 77, ..odd })));
    assert!(error.contains("the minimum block size is 77"), "{error}");
    let error = said(handshaker(|option, out| {
        option_reply::encode_refusal(option, ReplyCode::ERR_POLICY, "not \x07 today", out);
    }));
    assert!(error.contains("refuses GO") && error.contains("(not ? today)"), "{error}");
    let error = said(handshaker(|option, out| option_reply::encode_refusal(option, ReplyCode::ERR_TLS_REQD, "", out)));
    assert!(error.contains("nbds://"), "{error}");
    // An old server closes the connection on EXPORT_NAME.
    let error = said(raw(|stream| {
        let _ = stream.write_all(&Greeting::encode_newstyle(HandshakeFlags::empty()));
        let _ = take(stream, 4 + 16);
    }));
    assert!(error.contains("has no export"), "{error}");
    // A truncated greeting.
    let error = said(raw(|stream| drop(stream.write_all(&handshake::GREETING_MAGIC.to_be_bytes()[..7]))));
    assert!(error.contains("closed the connection"), "{error}");
}
