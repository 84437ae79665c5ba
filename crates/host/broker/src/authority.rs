//! The certificate authority of the host, and the TLS settings of both sides.
//!
//! Guests trust the certificate of the authority. The broker answers for a host with a certificate that it makes for
//! that name, and only for names in rules of a sandbox. Certificates are kept for a day and valid for a week.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use forkd_net_proto::broker::Authority;
use forkd_types::DomainName;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa,
    Issuer, KeyPair, KeyUsagePurpose,
};
use rustls::client::Resumption;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::server::NoServerSessionStorage;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use thiserror::Error;
use zeroize::Zeroizing;

const NAME: &str = "forkd secrets of this host";
const DAY: Duration = Duration::from_secs(24 * 3600);
/// A guest whose clock is late must still accept a certificate.
const BEFORE: Duration = DAY;
const LEAF_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);
const CA_LIFE: Duration = Duration::from_secs(3650 * 24 * 3600);
/// Hosts whose certificates are kept.
const MAX_KEPT: usize = 256;
const HTTP: &[u8] = b"http/1.1";

/// Why certificates cannot be made or checked.
#[derive(Debug, Error)]
pub enum AuthorityError {
    #[error("cannot make a certificate")]
    Certificate(#[from] rcgen::Error),
    #[error("TLS cannot be set up")]
    Tls(#[from] rustls::Error),
    #[error("cannot read the certificates in {}", path.display())]
    Roots {
        path: PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
}

/// Makes certificates for hosts.
pub struct Signer {
    provider: Arc<CryptoProvider>,
    issuer: Issuer<'static, KeyPair>,
    certificate: CertificateDer<'static>,
    /// The key of every certificate that this process makes.
    leaf: KeyPair,
    kept: HashMap<DomainName, (Arc<ServerConfig>, Instant)>,
}

/// The one provider of cryptography.
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::aws_lc_rs::default_provider())
}

/// A new authority.
pub fn make() -> Result<Authority, AuthorityError> {
    let key = KeyPair::generate()?;
    let certificate = authority_params(true).self_signed(&key)?;
    Ok(Authority {
        key: Zeroizing::new(key.serialize_der()),
        certificate: certificate.der().to_vec(),
    })
}

/// The same for every authority but for the dates, which matter when its certificate is made.
fn authority_params(dated: bool) -> CertificateParams {
    let mut params = CertificateParams::default();
    let mut name = DistinguishedName::new();
    name.push(DnType::CommonName, NAME);
    params.distinguished_name = name;
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    if dated {
        let now = SystemTime::now();
        params.not_before = (now - BEFORE).into();
        params.not_after = (now + CA_LIFE).into();
    }
    params
}

impl Signer {
    pub fn new(authority: &Authority) -> Result<Self, AuthorityError> {
        let key = KeyPair::try_from(authority.key.as_slice())?;
        Ok(Self {
            provider: provider(),
            issuer: Issuer::new(authority_params(false), key),
            certificate: authority.certificate.clone().into(),
            leaf: KeyPair::generate()?,
            kept: HashMap::new(),
        })
    }

    /// The certificate of the authority.
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }

    /// The settings by which the broker answers for a host.
    pub fn answers_for(&mut self, host: &DomainName) -> Result<Arc<ServerConfig>, AuthorityError> {
        let now = Instant::now();
        self.kept
            .retain(|_, (_, made)| now.saturating_duration_since(*made) < DAY);
        if let Some((config, _)) = self.kept.get(host) {
            return Ok(Arc::clone(config));
        }
        let mut params = CertificateParams::new(vec![host.to_string()])?;
        params.distinguished_name = DistinguishedName::new();
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let date = SystemTime::now();
        params.not_before = (date - BEFORE).into();
        params.not_after = (date + LEAF_LIFE).into();
        let made = params.signed_by(&self.leaf, &self.issuer)?;
        let key = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.leaf.serialize_der()));
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(vec![made.der().clone(), self.certificate.clone()], key)?;
        config.alpn_protocols = vec![HTTP.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        let config = Arc::new(config);
        if self.kept.len() >= MAX_KEPT {
            self.kept.clear();
        }
        self.kept.insert(host.clone(), (Arc::clone(&config), now));
        Ok(config)
    }
}

/// The settings by which the broker checks hosts: the roots of this host and those in `more`. Sessions are not resumed:
/// a session of one sandbox must not serve another.
pub fn upstream(more: &[PathBuf]) -> Result<Arc<ClientConfig>, AuthorityError> {
    let mut roots = RootCertStore::empty();
    // A host without roots can have its own in `more`; without any, every connection is refused.
    roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
    for path in more {
        let failed = |source| AuthorityError::Roots {
            path: path.clone(),
            source,
        };
        for certificate in CertificateDer::pem_file_iter(path).map_err(failed)? {
            roots.add(certificate.map_err(failed)?)?;
        }
    }
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![HTTP.to_vec()];
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustls::client::WebPkiServerVerifier;
    use rustls::client::danger::ServerCertVerifier;
    use rustls::pki_types::{ServerName, UnixTime};

    #[test]
    fn a_certificate_is_valid_for_its_name_under_its_authority_alone() {
        let (own, other) = (make().unwrap(), make().unwrap());
        // A later process has the authority from the store.
        let mut signer = Signer::new(&own).unwrap();
        let host: DomainName = "api.example".parse().unwrap();
        let config = signer.answers_for(&host).unwrap();
        assert!(Arc::ptr_eq(&config, &signer.answers_for(&host).unwrap()));
        let mut params = CertificateParams::new(vec![host.to_string()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        let leaf = params.signed_by(&signer.leaf, &signer.issuer).unwrap();
        let accepts = |authority: &Authority, name: &str| {
            let mut roots = RootCertStore::empty();
            roots.add(authority.certificate.clone().into()).unwrap();
            let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
                .build()
                .unwrap();
            let name = ServerName::try_from(name.to_owned()).unwrap();
            verifier
                .verify_server_cert(leaf.der(), &[], &name, &[], UnixTime::now())
                .is_ok()
        };
        assert!(accepts(&own, "api.example"));
        assert!(!accepts(&own, "other.example"));
        assert!(!accepts(&other, "api.example"));
        assert!(!format!("{own:?}").contains(&format!("{:?}", own.key)));
    }
}
