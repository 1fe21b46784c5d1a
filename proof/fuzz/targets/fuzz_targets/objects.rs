#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| diskwright_fuzz::objects::objects(data));
