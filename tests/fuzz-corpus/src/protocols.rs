//! Fuzz targets for the messages between processes.
//!
//! A message that decodes must encode to a message that decodes to the same value.

use forkd_guest_proto::{
    Control, Decoder, Event, ExecResult, Hello, Outcome, frame, parse_request,
};
use forkd_vmm_proto::{FromVmm, PageMap, Request, decode, encode};
use serde::{Serialize, de::DeserializeOwned};

use crate::input::Input;

/// Messages between daemon and VMM.
pub(crate) fn vmm(data: &[u8]) {
    fn both_ways<T: Serialize + DeserializeOwned + PartialEq>(data: &[u8]) {
        let Ok(message) = decode::<T>(data) else {
            return;
        };
        let bytes = encode(&message).expect("what came in a packet fits one");
        assert!(decode::<T>(&bytes).is_ok_and(|again| again == message));
    }
    both_ways::<Request>(data);
    both_ways::<FromVmm>(data);
    if let Ok(map) = PageMap::decode(data) {
        let bytes = map.encode();
        assert!(PageMap::decode(&bytes).is_ok());
    }
}

/// Frames between host and agent. A stream yields the same frames in any segmentation.
pub(crate) fn guest(data: &[u8]) {
    let mut input = Input::new(data);
    let step = usize::from(input.u8()) + 1;
    let stream = input.rest();
    let whole = frames(stream, stream.len().max(1));
    let pieces = frames(stream, step);
    assert!(
        whole == pieces,
        "the frames depend on how the stream is cut"
    );
    for frame in &whole {
        let again = frame::encode(frame.stream, frame.kind, frame.channel, &frame.payload);
        assert!(frames(&again, again.len()) == std::slice::from_ref(frame));
        let _ = parse_request(&frame.payload);
        let _ = serde_json::from_slice::<Hello>(&frame.payload);
        let _ = serde_json::from_slice::<Event>(&frame.payload);
        let _ = serde_json::from_slice::<Control>(&frame.payload);
        let _ = serde_json::from_slice::<Outcome<ExecResult>>(&frame.payload);
        let _ = frame.credit();
    }
}

fn frames(stream: &[u8], step: usize) -> Vec<frame::Frame> {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    for piece in stream.chunks(step) {
        let mut rest = piece;
        loop {
            match decoder.next(&mut rest) {
                Ok(Some(frame)) => frames.push(frame),
                Ok(None) => break,
                Err(_) => return frames,
            }
        }
    }
    frames
}
