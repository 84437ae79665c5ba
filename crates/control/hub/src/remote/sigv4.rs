//! Signatures of requests to object stores: AWS Signature Version 4.
//!
//! A request is signed with the hash of its body. The body of a blob has the hash that names it, so the store compares
//! a blob with its name when the blob arrives.

use forkd_oci::auth::Secret;
use forkd_oci::digest::Digest;
use sha2::{Digest as _, Sha256};

const BLOCK: usize = 64;

/// A request that is signed. No header but these is part of the signature.
#[derive(Debug)]
pub struct Request<'a> {
    pub method: &'a str,
    /// Host and port, as the header `host` has them.
    pub host: &'a str,
    /// The path, escaped.
    pub path: &'a str,
    /// Hash of the body.
    pub payload: &'a Digest,
    /// Time in UTC: `20130524T000000Z`.
    pub time: &'a str,
    pub region: &'a str,
    pub id: &'a str,
    pub secret: &'a Secret,
    pub token: Option<&'a Secret>,
}

impl Request<'_> {
    /// The value of the header `authorization`.
    pub fn authorization(&self) -> String {
        let day = self.time.get(..8).unwrap_or_default();
        let scope = format!("{day}/{}/s3/aws4_request", self.region);
        let payload = self.payload.hex();
        let mut headers = vec![
            ("host", self.host),
            ("x-amz-content-sha256", &payload),
            ("x-amz-date", self.time),
        ];
        if let Some(token) = self.token {
            headers.push(("x-amz-security-token", token.reveal()));
        }
        let names: Vec<&str> = headers.iter().map(|(name, _)| *name).collect();
        let names = names.join(";");
        let lines: String = headers
            .iter()
            .map(|(name, value)| format!("{name}:{}\n", value.trim()))
            .collect();
        let canonical = format!(
            "{}\n{}\n\n{lines}\n{names}\n{payload}",
            self.method, self.path
        );
        let text = format!(
            "AWS4-HMAC-SHA256\n{}\n{scope}\n{}",
            self.time,
            Digest::of(canonical.as_bytes()).hex()
        );
        let first = format!("AWS4{}", self.secret.reveal());
        let key = [day, self.region, "s3", "aws4_request"]
            .iter()
            .fold(first.into_bytes(), |key, part| {
                hmac(&key, part.as_bytes()).to_vec()
            });
        let signature = Digest::from_bytes(hmac(&key, text.as_bytes())).hex();
        format!(
            "AWS4-HMAC-SHA256 Credential={}/{scope}, SignedHeaders={names}, Signature={signature}",
            self.id
        )
    }
}

/// HMAC with SHA-256, RFC 2104.
fn hmac(key: &[u8], message: &[u8]) -> [u8; 32] {
    let mut block = [0; BLOCK];
    let hashed: [u8; 32];
    let key = if key.len() > BLOCK {
        hashed = Sha256::digest(key).into();
        &hashed[..]
    } else {
        key
    };
    for (to, from) in block.iter_mut().zip(key) {
        *to = *from;
    }
    let padded = |with: u8| block.map(|byte| byte ^ with);
    let inner = Sha256::new()
        .chain_update(padded(0x36))
        .chain_update(message)
        .finalize();
    let outer = Sha256::new()
        .chain_update(padded(0x5c))
        .chain_update(inner)
        .finalize();
    outer.into()
}

/// A path in the form that a signature covers: every byte but letters, digits, `-._~` and `/` is escaped.
pub fn escape(path: &str) -> String {
    let mut out = String::with_capacity(path.len());
    for byte in path.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, cases 1, 2 and 6.
    #[test]
    fn hmac_agrees_with_the_rfc() {
        let hex = |key: &[u8], text: &[u8]| Digest::from_bytes(hmac(key, text)).hex();
        assert_eq!(
            hex(&[0x0b; 20], b"Hi There"),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"
        );
        assert_eq!(
            hex(b"Jefe", b"what do ya want for nothing?"),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"
        );
        assert_eq!(
            hex(
                &[0xaa; 131],
                b"Test Using Larger Than Block-Size Key - Hash Key First"
            ),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54"
        );
    }

    #[test]
    fn a_request_has_one_signature_for_each_of_its_parts() {
        let payload = Digest::of(b"");
        let (secret, token) = (Secret::new("key".into()), Secret::new("t".into()));
        let request = |path: &str, time: &str, token| {
            Request {
                method: "GET",
                host: "127.0.0.1:9000",
                path,
                payload: &payload,
                time,
                region: "us-east-1",
                id: "ID",
                secret: &secret,
                token,
            }
            .authorization()
        };
        let first = request("/bucket/a", "20130524T000000Z", None);
        assert!(
            first.starts_with(
                "AWS4-HMAC-SHA256 Credential=ID/20130524/us-east-1/s3/aws4_request, \
                 SignedHeaders=host;x-amz-content-sha256;x-amz-date, Signature="
            ),
            "{first}"
        );
        assert_ne!(first, request("/bucket/b", "20130524T000000Z", None));
        assert_ne!(first, request("/bucket/a", "20130525T000000Z", None));
        let with = request("/bucket/a", "20130524T000000Z", Some(&token));
        assert!(with.contains("x-amz-security-token"), "{with}");
        assert_eq!(escape("/a b/é~"), "/a%20b/%C3%A9~");
    }
}
