//! Wrong answers, errors, answers in tiny pieces, and random messages.

use crate::fake::{SIZE, answers, fake, honest, raw, read, shake_hands, status, take};
use diskwright_nbd::wire::{
    Answering, ChunkFlags, ChunkKind, Decoded, Descriptor, ErrorCode, Framing, RequestHeader, reply,
};
use diskwright_store::{BlockDevice, Blocking, EngineKind, IoBuf, QueueOptions, Request};
use proptest::prelude::*;
use std::{
    io::{self, Write},
    sync::atomic::Ordering,
    thread,
    time::Duration,
};

#[test]
fn the_fake_server_can_answer_correctly() {
    for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
        let server = fake(framing, honest);
        let device = server.open();
        assert_eq!(device.export().framing, framing);
        assert!(read(&device).unwrap().iter().all(|&byte| byte == 0x5a));
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        queue.write(0, &[1; 4096], true).unwrap();
        queue.write_zeroes(0, SIZE).unwrap();
        queue.flush().unwrap();
        status(&device).unwrap();
    }
}

#[test]
fn invalid_answers_end_the_connection_with_a_clear_error() {
    use Framing::{Extended, Simple, Structured};
    type MakeAnswer = fn(&RequestHeader, Answering, &mut Vec<u8>);
    let reads: &[(&str, Framing, MakeAnswer)] = &[
        ("not in flight", Simple, |r, _, out| out.extend_from_slice(&reply::simple(!r.cookie, ErrorCode::NONE))),
        ("not in flight", Extended, |r, a, out| {
            out.extend_from_slice(&Answering { cookie: r.cookie ^ 1, ..a }.done());
        }),
        ("begins with 0x41414141", Structured, |_, _, out| out.extend_from_slice(&[0x41; 64])),
        ("begins with 0x67446698", Extended, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE));
        }),
        ("simple reply to a READ", Structured, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE));
        }),
        ("bytes from 4096 on are missing", Structured, |_, a, out| out.extend_from_slice(&a.done())),
        ("bytes from 8192 on are missing", Structured, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 4096, out);
            out.extend_from_slice(&a.done());
        }),
        ("same bytes twice", Structured, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 4096, out);
            a.hole(ChunkFlags::DONE, r.offset_bytes + 4095, 512, out);
        }),
        ("at offset 0 in answer", Structured, |_, a, out| a.hole(ChunkFlags::DONE, 0, 4096, out)),
        ("in answer to a READ from 4096", Structured, |r, a, out| {
            a.hole(ChunkFlags::DONE, r.offset_bytes, u32::MAX, out);
        }),
        ("in answer to a READ from 4096", Structured, |_, a, out| a.hole(ChunkFlags::DONE, u64::MAX, 2, out)),
        ("in answer to a READ from 4096", Extended, |_, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, u64::MAX - 5, 512));
        }),
        ("data chunk of 4294967295 bytes", Structured, |r, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, r.offset_bytes, u32::MAX));
        }),
        ("data chunk of 8 bytes", Structured, |r, a, out| {
            out.extend_from_slice(&a.data(ChunkFlags::DONE, r.offset_bytes, 0));
        }),
        ("at most 12 are accepted", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::BLOCK_STATUS, u32::MAX));
        }),
        ("at most 4160 are accepted", Extended, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::ERROR, u32::MAX));
        }),
        ("not the last", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::empty(), ChunkKind::NONE, 0));
        }),
        ("kind of a chunk is 9", Structured, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind(9), 0));
        }),
        ("is not in flight", Structured, |r, a, out| {
            a.hole(ChunkFlags::DONE, r.offset_bytes, 8192, out);
            a.hole(ChunkFlags::DONE, r.offset_bytes, 8192, out);
        }),
    ];
    for (word, framing, make) in reads {
        let server = answers(*framing, *make);
        let device = server.open();
        // If the wrong message follows a valid answer, the next request detects it.
        let mut queue = Blocking::open(&device, EngineKind::Auto).unwrap();
        let mut bytes = vec![0; 8192];
        let error = (0..2).try_for_each(|_| queue.read(4096, &mut bytes)).unwrap_err();
        assert!(error.to_string().contains(word), "{word}: {error}");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{word}");
    }
    let statuses: &[(&str, Framing, MakeAnswer)] = &[
        ("without a status", Structured, |_, a, out| out.extend_from_slice(&a.done())),
        ("without a status", Structured, |r, _, out| out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::NONE))),
        ("not negotiated", Structured, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 8, &[Descriptor { len_bytes: 512, status: 0 }], out);
        }),
        ("empty or beyond", Extended, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 7, &[Descriptor { len_bytes: 0, status: 0 }], out);
        }),
        ("empty or beyond", Structured, |_, a, out| {
            a.block_status(ChunkFlags::DONE, 7, &[Descriptor { len_bytes: SIZE, status: 0 }; 2], out);
        }),
        ("one context twice", Structured, |_, a, out| {
            let all = [Descriptor { len_bytes: 512, status: 0 }];
            a.block_status(ChunkFlags::empty(), 7, &all, out);
            a.block_status(ChunkFlags::DONE, 7, &all, out);
        }),
        ("are accepted", Extended, |_, a, out| {
            out.extend_from_slice(&a.chunk(ChunkFlags::DONE, ChunkKind::BLOCK_STATUS_EXT, u32::MAX));
        }),
        ("chunk for another command", Structured, |r, a, out| a.hole(ChunkFlags::DONE, r.offset_bytes, 512, out)),
    ];
    for (word, framing, make) in statuses {
        let error = status(&answers(*framing, *make).open()).unwrap_err();
        assert!(error.to_string().contains(word), "{word}: {error}");
    }
}

#[test]
fn errors_of_the_server_in_all_their_forms() {
    type MakeAnswer = fn(&RequestHeader, Answering, &mut Vec<u8>);
    let all: &[(&str, Framing, io::ErrorKind, MakeAnswer)] = &[
        ("at 4096 with input/output", Framing::Simple, io::ErrorKind::Other, |r, _, out| {
            out.extend_from_slice(&reply::simple(r.cookie, ErrorCode::EIO));
        }),
        ("no memory? (ENOMEM) (tough ?[2J luck)", Framing::Structured, io::ErrorKind::OutOfMemory, |_, a, out| {
            a.error(ErrorCode::ENOMEM, "tough \x1b[2J luck", None, out);
        }),
        ("at 8191 with", Framing::Extended, io::ErrorKind::InvalidInput, |r, a, out| {
            a.hole(ChunkFlags::empty(), r.offset_bytes, 512, out);
            a.error(ErrorCode(4711), "", Some(8191), out);
        }),
        ("shutting down", Framing::Structured, io::ErrorKind::ConnectionAborted, |_, a, out| {
            a.error(ErrorCode::ESHUTDOWN, "", None, out);
        }),
    ];
    for (word, framing, kind, make) in all {
        let server = answers(*framing, *make);
        let device = server.open();
        for _ in 0..2 {
            let error = read(&device).unwrap_err();
            let word = word.replace("no memory? ", "");
            assert!(error.to_string().contains(&word), "{word}: {error}");
            assert_eq!(error.kind(), *kind);
        }
        // The connection stays open.
        assert_eq!(server.taken.load(Ordering::SeqCst), 1, "{word}");
    }
}

#[test]
fn answers_may_arrive_in_any_pieces() {
    // A read in small pieces, out of order, with each byte sent separately.
    let server = fake(Framing::Structured, |request, framing, stream| {
        let answering = Answering::to(request, framing);
        let mut bytes = Vec::new();
        for piece in [3u64, 0, 2, 1, 5, 4, 7, 6, 8, 10, 9, 11, 15, 14, 13, 12] {
            let at = request.offset_bytes + piece * 512;
            if piece % 3 == 0 {
                answering.hole(ChunkFlags::empty(), at, 512, &mut bytes);
            } else {
                bytes.extend_from_slice(&answering.data(ChunkFlags::empty(), at, 512));
                bytes.resize(bytes.len() + 512, piece as u8);
            }
        }
        bytes.extend_from_slice(&answering.done());
        bytes.chunks(1).all(|byte| stream.write_all(byte).is_ok())
    });
    let found = read(&server.open()).unwrap();
    for (piece, bytes) in found.chunks(512).enumerate() {
        let expected = if piece % 3 == 0 { 0 } else { piece as u8 };
        assert!(bytes.iter().all(|&byte| byte == expected), "piece {piece}");
    }
}

#[test]
fn an_error_before_the_payload_is_sent_keeps_the_buffer_in_use() {
    // The server answers after the header and reads the payload afterwards.
    let server = raw(|stream| {
        if shake_hands(stream, Framing::Structured).is_err() {
            return;
        }
        for turn in 0..2 {
            let Ok(bytes) = take(stream, RequestHeader::COMPACT_BYTES) else { return };
            let Ok(Decoded::Value(request, _)) = RequestHeader::decode(&bytes, Framing::Structured) else { return };
            let _ = stream.write_all(&reply::simple(request.cookie, ErrorCode::ENOSPC));
            thread::sleep(Duration::from_millis(50 * turn));
            let _ = take(stream, request.len_bytes as usize);
        }
        let _ = take(stream, 1);
    });
    let device = server.open();
    let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
    let mut done = Vec::new();
    for _ in 0..2 {
        queue.push(Request::write(0, SIZE as usize, IoBuf::new(SIZE as usize), 1)).unwrap();
        queue.reap(1, &mut done).unwrap();
        let completion = done.pop().unwrap();
        assert_eq!(completion.result.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(completion.buf.unwrap().len(), SIZE as usize);
    }
}

/// Messages of a server, valid and invalid, for requests that exist and that do not.
fn babble() -> impl Strategy<Value = Vec<u8>> {
    let chunk = (any::<bool>(), 0u16..8, any::<bool>(), 0u64..3, 0u64..20_000, prop::collection::vec(0u8..3, 0..40))
        .prop_map(|(done, kind, error, cookie, offset, payload)| {
            let answering = Answering { framing: Framing::Structured, cookie: cookie << 32, offset_bytes: 0 };
            let flags = if done { ChunkFlags::DONE } else { ChunkFlags::empty() };
            let kind = ChunkKind(kind | if error { 0x8000 } else { 0 });
            let mut bytes = answering.chunk(flags, kind, payload.len() as u32 + 8).to_vec();
            bytes.extend_from_slice(&offset.to_be_bytes());
            bytes.extend_from_slice(&payload);
            bytes
        });
    let simple = (0u64..3, 0u32..30).prop_map(|(cookie, error)| reply::simple(cookie << 32, ErrorCode(error)).to_vec());
    let noise = prop::collection::vec(any::<u8>(), 0..64);
    let message = prop_oneof![6 => chunk, 2 => simple, 1 => noise];
    prop::collection::vec(message, 0..8).prop_map(|messages| messages.concat())
}

#[test]
fn every_request_ends_whatever_a_server_sends() {
    proptest!(ProptestConfig::with_cases(64), |(bytes in babble(), cut in 1usize..50)| {
        // All messages at the first request, then the end of the connection.
        let server = fake(Framing::Structured, move |_, _, stream| {
            bytes.chunks(cut).for_each(|piece| drop(stream.write_all(piece)));
            false
        });
        let device = server.open();
        let mut queue = device.open_queue(&QueueOptions::default()).unwrap();
        queue.push(Request::read(4096, 8192, IoBuf::new(8192), 0)).unwrap();
        queue.push(Request::write(0, 4096, IoBuf::new(4096), 1)).unwrap();
        let mut done = Vec::new();
        while queue.in_flight() > 0 {
            queue.reap(1, &mut done).unwrap();
        }
        prop_assert_eq!(done.len(), 2);
        prop_assert!(done.iter().all(|completion| completion.buf.is_some()));
        let _ = status(&device);
    });
}
