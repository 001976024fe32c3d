//! Mutual TLS 1.3: each side shows a certificate that one authority has signed.
//!
//! Invariant: no other version, no session without a client certificate, no early data (which could
//! be replayed).

use rustls::client::WebPkiServerVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Why TLS cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read or has no such thing in it.
    #[error("cannot read {what} from {path}: {why}; it must be a PEM file")]
    File {
        /// The file.
        path: PathBuf,
        /// What it should have.
        what: &'static str,
        /// What the reader says.
        why: String,
    },
    /// The pieces do not fit together.
    #[error("cannot set up TLS: {0}; check that key and certificate belong together")]
    Setup(String),
    /// The name that the server's certificate should have is no name.
    #[error("`{0}` is neither a host name nor an address")]
    Name(String),
}

/// The files that one side needs, all PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// Its certificate, and those between it and the authority's.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// Certificates of the authority that signs both sides'.
    pub authority: PathBuf,
}

/// What a client needs to speak TLS.
#[derive(Debug, Clone)]
pub struct ClientTls {
    /// For every connection.
    pub config: Arc<ClientConfig>,
    /// That all servers' certificates have; else each has the host that it was addressed by.
    pub server_name: Option<String>,
}

impl ClientTls {
    /// From files.
    ///
    /// # Errors
    /// When they are not what they should be.
    pub fn new(files: &Files, server_name: Option<String>) -> Result<ClientTls, TlsError> {
        let setup = |error: rustls::Error| TlsError::Setup(error.to_string());
        let roots = Arc::new(roots(&files.authority)?);
        let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
            .build()
            .map_err(|error| TlsError::Setup(error.to_string()))?;
        let config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])
            .map_err(setup)?
            .with_webpki_verifier(verifier)
            .with_client_auth_cert(certificates(&files.certificate)?, key(&files.key)?)
            .map_err(setup)?;
        Ok(ClientTls { config: Arc::new(config), server_name })
    }

    /// The name that the certificate of the server at this host must have.
    ///
    /// # Errors
    /// When that is no name.
    pub fn name_of(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = self.server_name.as_deref().unwrap_or(host).to_string();
        ServerName::try_from(name.clone()).map_err(|_| TlsError::Name(name))
    }
}

/// What a server needs to speak TLS.
///
/// # Errors
/// When the files are not what they should be.
pub fn server_config(files: &Files) -> Result<Arc<ServerConfig>, TlsError> {
    let setup = |error: rustls::Error| TlsError::Setup(error.to_string());
    let roots = Arc::new(roots(&files.authority)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|error| TlsError::Setup(error.to_string()))?;
    let config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(setup)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&files.certificate)?, key(&files.key)?)
        .map_err(setup)?;
    Ok(Arc::new(config))
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        let added = roots.add(certificate);
        added.map_err(|error| file_error(path, "an authority's certificate", error))?;
    }
    Ok(roots)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let error = |why: String| file_error(path, "certificates", why);
    let found = CertificateDer::pem_file_iter(path).map_err(|why| error(why.to_string()))?;
    let found: Result<Vec<_>, _> = found.collect();
    let found = found.map_err(|why| error(why.to_string()))?;
    if found.is_empty() {
        return Err(error("it has none".into()));
    }
    Ok(found)
}

fn key(path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
    PrivateKeyDer::from_pem_file(path).map_err(|why| file_error(path, "a private key", why))
}

fn file_error(path: &Path, what: &'static str, why: impl ToString) -> TlsError {
    TlsError::File { path: path.into(), what, why: why.to_string() }
}
