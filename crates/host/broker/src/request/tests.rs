//! Requests that are rewritten, and those that are refused.

use super::*;
use proptest::prelude::*;

const PLACEHOLDER: &str = "fkd_0123456789abcdef0123456789abcdef";

fn whole() -> Injections {
    Injections {
        headers: vec![Injected {
            header: "authorization".parse().unwrap(),
            value: Zeroizing::new("Bearer sk-1".to_owned()),
            placeholder: None,
        }],
        placeholders: Vec::new(),
    }
}

fn placeholder() -> Injections {
    Injections {
        headers: vec![Injected {
            header: "authorization".parse().unwrap(),
            value: Zeroizing::new("sk-1".to_owned()),
            placeholder: Some(PLACEHOLDER.to_owned()),
        }],
        placeholders: vec![PLACEHOLDER.to_owned(), "fkd_of_another_host".to_owned()],
    }
}

/// Reads bytes in parts of `step` bytes.
fn read_in(bytes: &[u8], step: usize, secrets: &Injections) -> Result<(String, u64), Refusal> {
    let mut reader = RequestReader::new("api.example".parse().unwrap());
    let (mut input, mut output, mut requests) = (Vec::new(), Vec::new(), 0);
    for part in bytes.chunks(step) {
        input.extend_from_slice(part);
        requests += reader.advance(&mut input, &mut output, &mut || Ok(secrets.clone()))?;
    }
    Ok((String::from_utf8(output).unwrap(), requests))
}

fn read(text: &str, secrets: &Injections) -> Result<String, Refusal> {
    let all = read_in(text.as_bytes(), text.len().max(1), secrets);
    for step in [1, 3, 7] {
        assert_eq!(read_in(text.as_bytes(), step, secrets), all, "{text}");
    }
    all.map(|(output, _)| output)
}

fn refused(text: &str) -> Refusal {
    read(text, &whole()).unwrap_err()
}

fn head(lines: &str) -> String {
    format!("GET / HTTP/1.1\r\nHost: api.example\r\n{lines}\r\n")
}

#[test]
fn the_header_is_replaced_in_every_request_of_a_connection() {
    let body = "POST /a?b HTTP/1.1\r\nHOST: API.example:443\r\nauthorization: mine\r\nAUTHORIZATION: too\r\n\
                Content-Length: 5\r\n\r\nGET /";
    let chunks = "PUT / HTTP/1.1\r\nHost: api.example\r\nTransfer-Encoding: chunked\r\n\r\n\
                  3\r\nabc\r\n00A\r\n0123456789\r\n0\r\n\r\n";
    let text = format!("{body}{chunks}{}", head("X: y\r\n"));
    let (output, requests) = read_in(text.as_bytes(), 4, &whole()).unwrap();
    assert_eq!(requests, 3);
    assert_eq!(output.matches("Bearer sk-1").count(), 3);
    assert!(
        !output.contains("mine") && !output.contains("too"),
        "{output}"
    );
    let end = "\r\n\r\n3\r\nabc\r\na\r\n0123456789\r\n0\r\n\r\nGET / HTTP/1.1\r\n";
    assert!(output.contains(end), "{output}");
    let first = output.split("PUT").next().unwrap();
    assert!(first.ends_with("\r\n\r\nGET /"), "{first}");
}

#[test]
fn a_placeholder_is_replaced_in_its_header_alone() {
    let secrets = placeholder();
    let text = head(&format!("Authorization: Bearer {PLACEHOLDER}\r\n"));
    let output = read(&text, &secrets).unwrap();
    assert!(
        output.contains("Authorization: Bearer sk-1\r\n"),
        "{output}"
    );
    for (lines, reason) in [
        (String::new(), Refusal::NoPlaceholder),
        (
            "Authorization: Bearer other\r\n".to_owned(),
            Refusal::NoPlaceholder,
        ),
        (
            format!("Authorization: {PLACEHOLDER}\r\nauthorization: {PLACEHOLDER}\r\n"),
            Refusal::NoPlaceholder,
        ),
        (
            format!("Authorization: {PLACEHOLDER}{PLACEHOLDER}\r\n"),
            Refusal::PlaceholderElsewhere,
        ),
        (
            format!("X-Other: {PLACEHOLDER}\r\n"),
            Refusal::PlaceholderElsewhere,
        ),
        (
            format!("Authorization: {PLACEHOLDER}\r\nX: fkd_of_another_host\r\n"),
            Refusal::PlaceholderElsewhere,
        ),
    ] {
        assert_eq!(read(&head(&lines), &secrets), Err(reason), "{lines}");
    }
    let path = format!("GET /?key={PLACEHOLDER} HTTP/1.1\r\nHost: api.example\r\n\r\n");
    assert_eq!(read(&path, &secrets), Err(Refusal::PlaceholderElsewhere));
}

#[test]
fn another_host_and_another_protocol_are_refused() {
    for text in [
        "GET / HTTP/1.1\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example.evil.example\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example:8443\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: api.example\r\nHost: evil.example\r\n\r\n",
        "GET https://evil.example/ HTTP/1.1\r\nHost: api.example\r\n\r\n",
    ] {
        assert_eq!(refused(text), Refusal::WrongHost, "{text}");
    }
    assert_eq!(
        refused("CONNECT evil.example:443 HTTP/1.1\r\nHost: api.example\r\n\r\n"),
        Refusal::Upgrade
    );
    assert_eq!(refused(&head("Upgrade: websocket\r\n")), Refusal::Upgrade);
    for text in [
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "GET / HTTP/1.0\r\nHost: api.example\r\n\r\n",
        "\u{16}\u{3}\u{1}\0",
        &head("Connection: close, Authorization\r\n"),
    ] {
        assert_eq!(refused(text), Refusal::NotHttp, "{text}");
    }
    let long = format!("GET /{} HTTP/1.1\r\n", "a".repeat(MAX_HEAD));
    let all = read_in(long.as_bytes(), long.len(), &whole());
    assert_eq!(all, Err(Refusal::NotHttp));
}

#[test]
fn a_length_that_can_be_read_in_two_ways_is_refused() {
    for lines in [
        "Content-Length: 1\r\nContent-Length: 1\r\n",
        "Content-Length: +1\r\n",
        "Content-Length: 1, 1\r\n",
        "Content-Length:\r\n",
        "Content-Length: 9999999999999999999999\r\n",
        "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: gzip, chunked\r\n",
        "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        "Transfer-Encoding: identity\r\n",
        "Transfer-Encoding : chunked\r\n",
    ] {
        assert_eq!(refused(&head(lines)), Refusal::NotHttp, "{lines}");
    }
    for body in [
        "1;a=b\r\nx\r\n0\r\n\r\n",
        "1\nx\r\n0\r\n\r\n",
        "-1\r\nx\r\n0\r\n\r\n",
        "\r\n",
        "fffffffffffffffff\r\n",
        "1\r\nxy\r\n0\r\n\r\n",
        "0\r\nAuthorization: mine\r\n\r\n",
    ] {
        let text = format!("{}{body}", head("Transfer-Encoding: chunked\r\n"));
        assert_eq!(refused(&text), Refusal::NotHttp, "{body}");
    }
}

#[test]
fn without_its_secret_no_byte_of_a_request_goes_up() {
    let mut reader = RequestReader::new("api.example".parse().unwrap());
    let (mut input, mut output) = (head("").into_bytes(), Vec::new());
    let missing = reader.advance(&mut input, &mut output, &mut || Err(Refusal::NoSecret));
    assert_eq!((missing, output.len()), (Err(Refusal::NoSecret), 0));
    assert!(!format!("{:?}", whole()).contains("sk-1"));
}

proptest! {
    #[test]
    fn any_bytes_are_survived(bytes in prop::collection::vec(any::<u8>(), 0..600), chunked: bool, step in 1usize..40) {
        let start = if chunked { head("Transfer-Encoding: chunked\r\n") } else { head("Content-Length: 7\r\n") };
        let bytes = [start.as_bytes(), &bytes].concat();
        let mut reader = RequestReader::new("api.example".parse().unwrap());
        let (mut input, mut output) = (Vec::new(), Vec::new());
        for part in bytes.chunks(step) {
            input.extend_from_slice(part);
            if reader.advance(&mut input, &mut output, &mut || Ok(whole())).is_err() {
                break;
            }
        }
        // Every head that went up has exactly one header with the secret.
        let text = String::from_utf8_lossy(&output);
        prop_assert!(text.matches("authorization: Bearer sk-1\r\n").count() >= 1);
        prop_assert!(output.len() <= bytes.len() * 2 + 64);
    }
}
