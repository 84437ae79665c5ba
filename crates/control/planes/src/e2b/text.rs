//! Texts of the wire: queries, percent encoding, times.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// The pairs of a query string, decoded. At most 64 pairs are read.
pub fn query(text: &str) -> Vec<(String, String)> {
    text.split('&')
        .filter(|pair| !pair.is_empty())
        .take(64)
        .map(|pair| {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            (decode(key, true), decode(value, true))
        })
        .collect()
}

/// The first value of a name.
pub fn value<'a>(query: &'a [(String, String)], name: &str) -> Option<&'a str> {
    let mut found = query.iter().filter(|(key, _)| key == name);
    found.next().map(|(_, value)| value.as_str())
}

/// Decodes `%XX`, and `+` as a space in forms. Bytes that are not UTF-8 are replaced.
pub fn decode(text: &str, form: bool) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        let hex = |byte: u8| char::from(byte).to_digit(16);
        match (first, tail) {
            (b'%', [high, low, after @ ..]) => {
                if let (Some(high), Some(low)) = (hex(*high), hex(*low)) {
                    bytes.push((high * 16 + low) as u8);
                    rest = after;
                } else {
                    bytes.push(first);
                }
            }
            (b'+', _) if form => bytes.push(b' '),
            _ => bytes.push(first),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A time in seconds since the epoch, as RFC 3339.
pub fn time(unix: u64) -> String {
    time_ms(unix.saturating_mul(1000))
}

/// A time in milliseconds since the epoch, as RFC 3339.
pub fn time_ms(unix_ms: u64) -> String {
    // The formatter knows years up to 9999.
    const LAST: u64 = 253_402_300_799_000;
    let at = UNIX_EPOCH + Duration::from_millis(unix_ms.min(LAST));
    humantime::format_rfc3339_millis(at).to_string()
}

/// Reads a time of RFC 3339 in UTC, in seconds since the epoch.
pub fn parse_time(text: &str) -> Option<u64> {
    Some(parse_time_ms(text)? / 1000)
}

/// Reads a time of RFC 3339 in UTC, in milliseconds since the epoch.
pub fn parse_time_ms(text: &str) -> Option<u64> {
    let text = text
        .strip_suffix("+00:00")
        .or_else(|| text.strip_suffix(" 00:00"))
        .map_or_else(|| text.to_owned(), |bare| format!("{bare}Z"));
    let at: SystemTime = humantime::parse_rfc3339(&text).ok()?;
    u64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queries_are_decoded_once() {
        let found = query("metadata=grp%3Da%252520b&x=a+b&flag&bad=%zz%");
        assert_eq!(value(&found, "metadata"), Some("grp=a%2520b"));
        assert_eq!(value(&found, "x"), Some("a b"));
        assert_eq!(value(&found, "flag"), Some(""));
        assert_eq!(value(&found, "bad"), Some("%zz%"));
        assert_eq!(value(&found, "none"), None);
    }

    #[test]
    fn times_are_read_and_written() {
        assert_eq!(time(0), "1970-01-01T00:00:00.000Z");
        assert_eq!(time(u64::MAX), "9999-12-31T23:59:59.000Z");
        for text in [
            "1970-01-01T00:00:05Z",
            "1970-01-01T00:00:05.5+00:00",
            "1970-01-01T00:00:05.123456Z",
        ] {
            assert_eq!(parse_time(text), Some(5), "{text}");
        }
        assert_eq!(parse_time_ms("1970-01-01T00:00:05.5Z"), Some(5500));
        assert_eq!(parse_time("yesterday"), None);
    }
}
