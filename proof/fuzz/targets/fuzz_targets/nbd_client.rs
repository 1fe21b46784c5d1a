#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| diskwright_fuzz::peers::nbd_client(data));
