#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    forkd_fuzz_targets::run("broker_requests", data);
});
