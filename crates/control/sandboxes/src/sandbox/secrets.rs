//! Secrets of one sandbox: its rules in the broker, and the trust of its guest in the certificate of the broker.
//!
//! The guest gets a certificate and placeholders, and never a value.

use std::collections::BTreeMap;

use base64::Engine;
use forkd_guest_proto::WriteRequest;

use super::owner::SandboxOwner;
use crate::agent_limits;
use crate::error::Error;
use crate::ops::secrets;
use crate::state::SandboxRecord;

/// The certificates that programs of the guest trust: those of its image, and that of the broker.
const BUNDLE: &str = "/etc/forkd/ca-bundle.pem";
/// Where images have their certificates.
const OF_IMAGE: [&str; 4] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
    "/etc/ssl/ca-bundle.pem",
];
const MAX_BUNDLE: usize = 4 << 20;
/// Variables by which programs find their certificates.
const VARIABLES: [&str; 6] = [
    "SSL_CERT_FILE",
    "CURL_CA_BUNDLE",
    "REQUESTS_CA_BUNDLE",
    "NODE_EXTRA_CA_CERTS",
    "GIT_SSL_CAINFO",
    "AWS_CA_BUNDLE",
];

impl SandboxRecord {
    /// The environment of programs in the guest: that of the request, placeholders, and the way to the certificates.
    pub fn environment(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        if !self.network.inject.is_empty() {
            all.extend(VARIABLES.map(|name| (name.to_owned(), BUNDLE.to_owned())));
        }
        for inject in &self.network.inject {
            if let (Some(name), Some(placeholder)) = (&inject.env, &inject.placeholder) {
                all.insert(name.clone(), placeholder.clone());
            }
        }
        all.extend(self.env.clone());
        all
    }
}

impl SandboxOwner {
    /// Gives the broker the rules of the record. Without any, it forgets the sandbox.
    pub(super) async fn provide_secrets(&self) -> Result<(), Error> {
        secrets::provide(&self.app, &self.sandbox.record()).await
    }

    /// Makes the guest trust the broker, if the policy has an injection.
    pub(super) async fn trust_broker(&self) -> Result<(), Error> {
        if self.sandbox.record().network.inject.is_empty() {
            return Ok(());
        }
        let own = pem(&secrets::certificate(&self.app).await?);
        let what = format!(
            "sandbox {} could not trust the broker of secrets",
            self.sandbox.id
        );
        let client = self.sandbox.agent().await?;
        let calls = client.by(agent_limits::answer());
        let mut bundle = Vec::new();
        for path in OF_IMAGE {
            // An image without certificates trusts the broker alone.
            if let Ok(found) = calls.read_file(path, MAX_BUNDLE).await {
                bundle = found;
                bundle.push(b'\n');
                break;
            }
        }
        bundle.extend_from_slice(own.as_bytes());
        let request = WriteRequest {
            path: BUNDLE.to_owned(),
            mode: Some(0o644),
            create: true,
            truncate: true,
            atomic: true,
            parents: true,
            ..WriteRequest::default()
        };
        let written = calls.write_file(request, &bundle).await;
        written.map(drop).map_err(Error::agent(what))
    }
}

fn pem(der: &[u8]) -> String {
    let text = base64::engine::general_purpose::STANDARD.encode(der);
    let lines: Vec<&str> = text
        .as_bytes()
        .chunks(64)
        .filter_map(|line| std::str::from_utf8(line).ok())
        .collect();
    let body = lines.join("\n");
    format!("-----BEGIN CERTIFICATE-----\n{body}\n-----END CERTIFICATE-----\n")
}
