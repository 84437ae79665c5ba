//! Signatures over the digest of a manifest, and the file that says whose signatures count.
//!
//! The signed message is the text `sha256:HEX` of the manifest, in the namespace [`NAMESPACE`]. `ssh-keygen -Y sign` makes
//! such a signature with any SSH key, one of an agent or of a hardware token included, and `ssh-keygen -Y verify` checks it.
//! The file of allowed signers has the format of OpenSSH: principals, options, key.

use forkd_oci::digest::Digest;
use ssh_key::{PublicKey, SshSig};

use crate::documents::Documents;
use crate::error::HubError;

/// The namespace of signatures: a signature for another purpose does not count.
pub const NAMESPACE: &str = "forkd.snapshot";

/// The message that is signed.
pub fn message(digest: &Digest) -> String {
    digest.to_string()
}

/// Keys whose signatures count.
#[derive(Debug, Clone, Default)]
pub struct Signers(Vec<Signer>);

#[derive(Debug, Clone)]
struct Signer {
    principals: String,
    key: PublicKey,
}

impl Signers {
    /// Parses a file of allowed signers. A line that cannot be used is an error: a rule that is silently left out would
    /// surprise its author.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut all = Vec::new();
        for (number, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let signer = signer(line).map_err(|error| format!("line {}: {error}", number + 1))?;
            all.extend(signer);
        }
        Ok(Self(all))
    }

    /// The principals of the first signature that is valid and whose key is allowed.
    pub fn check(&self, documents: &Documents) -> Result<String, HubError> {
        let digest = documents.artifact.digest;
        if documents.signatures.is_empty() {
            return Err(HubError::Unsigned { digest });
        }
        let mut reason = String::new();
        for signature in &documents.signatures {
            match self.check_one(&digest, &signature.text) {
                Ok(principals) => return Ok(principals),
                Err(error) => reason = error,
            }
        }
        Err(HubError::Untrusted { digest, reason })
    }

    fn check_one(&self, digest: &Digest, text: &[u8]) -> Result<String, String> {
        let key = verified(digest, text)?;
        let found = self
            .0
            .iter()
            .find(|signer| signer.key.key_data() == key.key_data());
        found
            .map(|signer| signer.principals.clone())
            .ok_or_else(|| {
                let print = key.fingerprint(ssh_key::HashAlg::Sha256);
                format!("the key {print} is not among the allowed signers")
            })
    }
}

/// The key that made a signature, if the signature is valid.
pub fn verified(digest: &Digest, text: &[u8]) -> Result<PublicKey, String> {
    let signature =
        SshSig::from_pem(text).map_err(|error| format!("it does not parse: {error}"))?;
    if signature.namespace() != NAMESPACE {
        return Err("it was made for another purpose".into());
    }
    let key = PublicKey::from(signature.public_key().clone());
    key.verify(NAMESPACE, message(digest).as_bytes(), &signature)
        .map_err(|_| "it does not fit the manifest".to_owned())?;
    Ok(key)
}

/// The fingerprint of the key of each valid signature.
pub fn fingerprints(documents: &Documents) -> Vec<String> {
    let digest = documents.artifact.digest;
    documents
        .signatures
        .iter()
        .filter_map(|signature| verified(&digest, &signature.text).ok())
        .map(|key| key.fingerprint(ssh_key::HashAlg::Sha256).to_string())
        .collect()
}

/// One line: principals, perhaps options, the key. None if its options name other namespaces.
fn signer(line: &str) -> Result<Option<Signer>, String> {
    let (principals, rest) = line
        .split_once(char::is_whitespace)
        .ok_or("it has no key")?;
    let rest = rest.trim_start();
    let (options, key) = if PublicKey::from_openssh(rest).is_ok() {
        ("", rest)
    } else {
        let (options, key) = split_options(rest).ok_or("it has no key that can be read")?;
        (options, key.trim_start())
    };
    let mut quoted = false;
    let options = options.split(|c: char| {
        quoted ^= c == '"';
        c == ',' && !quoted
    });
    for option in options.filter(|option| !option.is_empty()) {
        match option.split_once('=') {
            Some(("namespaces", value)) => {
                let value = value.trim_matches('"');
                if !value.split(',').any(|name| name == NAMESPACE) {
                    return Ok(None);
                }
            }
            // Dates and authorities restrict a key. To ignore them would allow more than the line says.
            _ => return Err(format!("the option {option:?} is not supported")),
        }
    }
    let key = PublicKey::from_openssh(key).map_err(|error| format!("its key: {error}"))?;
    Ok(Some(Signer {
        principals: principals.to_owned(),
        key,
    }))
}

/// Options end at the first blank outside of quotes.
fn split_options(text: &str) -> Option<(&str, &str)> {
    let mut quoted = false;
    let end = text.find(|c: char| {
        quoted ^= c == '"';
        c.is_whitespace() && !quoted
    })?;
    text.split_at_checked(end)
}
