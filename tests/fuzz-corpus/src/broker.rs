//! Fuzz target for the broker of secrets: the requests of a guest.

use forkd_broker::request::{Injected, Injections, RequestReader};
use forkd_net_proto::broker::Refusal;

use crate::input::Input;

const HEADER: &str = "x-secret";
const VALUE: &str = "value-of-the-secret";
const PLACEHOLDER: &str = "fkd_00000000000000000000000000000000";

fn secrets(placeholder: bool) -> Injections {
    let placeholder = placeholder.then(|| PLACEHOLDER.to_owned());
    Injections {
        placeholders: placeholder.iter().cloned().collect(),
        headers: vec![Injected {
            header: HEADER.parse().expect("a header"),
            value: VALUE.to_owned().into(),
            placeholder,
        }],
    }
}

/// Everything that goes up, the number of requests, and why it ended.
fn read(data: &[u8], step: usize, placeholder: bool) -> (Vec<u8>, u64, Option<Refusal>) {
    let mut reader = RequestReader::new("a.example".parse().expect("a host"));
    let (mut input, mut output, mut requests) = (Vec::new(), Vec::new(), 0);
    for part in data.chunks(step) {
        input.extend_from_slice(part);
        match reader.advance(&mut input, &mut output, &mut || Ok(secrets(placeholder))) {
            Ok(more) => requests += more,
            Err(reason) => return (output, requests, Some(reason)),
        }
    }
    (output, requests, None)
}

/// Requests of a guest. The way in which bytes arrive changes nothing, and no request goes up without its secret.
pub(crate) fn requests(data: &[u8]) {
    let mut input = Input::new(data);
    let flags = input.u8();
    let rest = input.rest();
    let placeholder = flags & 1 == 1;
    let whole = read(rest, rest.len().max(1), placeholder);
    let parts = read(rest, usize::from(flags >> 1).max(1), placeholder);
    assert_eq!(whole.2, parts.2, "another reason in parts");
    if whole.2.is_none() {
        assert_eq!(whole.0, parts.0, "other bytes in parts");
        assert_eq!(whole.1, parts.1, "another number of requests in parts");
    }
    let text = String::from_utf8_lossy(&parts.0);
    let found = text.matches(VALUE).count() as u64;
    assert!(found >= parts.1, "a request without its secret went up");
}
