//! Mutual TLS 1.3: each side shows a certificate that one authority has signed.
//!
//! Invariants: no other version, no session without a client certificate, and no early data, which
//! could be replayed. No session is resumed: each connection proves its certificate anew, so an
//! expired certificate admits nobody. Files that change are read again.

use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{NoServerSessionStorage, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};
use x509_cert::Certificate;
use x509_cert::der::Decode;

/// A failure to set up TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read, or lacks the expected item.
    #[error("cannot read {what} from {path}: {why}; it must be a PEM file")]
    File {
        /// The path of the unusable file.
        path: PathBuf,
        /// The item that the file should contain.
        what: &'static str,
        /// The error message of the parser.
        why: String,
    },
    /// Key and certificate do not fit together, or another setting is invalid.
    #[error("cannot set up TLS: {0}; check that key and certificate belong together")]
    Setup(String),
    /// The name that the server's certificate should have is invalid.
    #[error("`{0}` is neither a host name nor an address")]
    Name(String),
}

/// The files that one side needs, all PEM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Files {
    /// The certificate of this side, and those between it and the authority's.
    pub certificate: PathBuf,
    /// The key of the certificate.
    pub key: PathBuf,
    /// The certificates of the authority that signs the certificates of both sides.
    pub authority: PathBuf,
}

/// The identity of one version of the files: device, inode and modification time of each.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilesVersion([(u64, u64, i64, i64); 3]);

impl Files {
    /// Returns the current version, or `None` while one of the files is missing.
    pub fn version(&self) -> Option<FilesVersion> {
        let of = |path: &Path| {
            let found = std::fs::metadata(path).ok()?;
            Some((found.dev(), found.ino(), found.mtime(), found.mtime_nsec()))
        };
        Some(FilesVersion([of(&self.certificate)?, of(&self.key)?, of(&self.authority)?]))
    }

    /// Returns the file with the certificate that expires first, of our own and the authority's,
    /// and the time.
    ///
    /// # Errors
    /// If a file has no certificates.
    pub fn first_expiry(&self) -> Result<(&Path, SystemTime), TlsError> {
        let ours = (self.certificate.as_path(), expiry(&self.certificate)?);
        let authority = (self.authority.as_path(), expiry(&self.authority)?);
        Ok(if authority.1 < ours.1 { authority } else { ours })
    }
}

/// Returns the time at which the first certificate of a file expires.
fn expiry(path: &Path) -> Result<SystemTime, TlsError> {
    let mut first = Duration::MAX;
    for certificate in certificates(path)? {
        let read = Certificate::from_der(&certificate);
        let read = read.map_err(|why| file_error(path, "a certificate", why))?;
        first = first.min(read.tbs_certificate.validity.not_after.to_unix_duration());
    }
    Ok(SystemTime::UNIX_EPOCH + first)
}

/// A client's settings for TLS.
#[derive(Debug, Clone)]
pub struct ClientTls {
    current: Arc<Mutex<Current>>,
    /// The name in the certificates of all servers. If `None`, each has the host by which it was
    /// addressed.
    pub server_name: Option<String>,
}

/// The configuration, and the files that it came from, if any.
#[derive(Debug, Clone)]
struct Current {
    config: Arc<ClientConfig>,
    files: Option<(Files, Option<FilesVersion>)>,
}

impl ClientTls {
    /// Reads the configuration from files, and reads them again when they change.
    ///
    /// # Errors
    /// If a file cannot be read or is invalid.
    pub fn new(files: &Files, server_name: Option<String>) -> Result<ClientTls, TlsError> {
        let version = files.version();
        let (config, files) = (client_config(files)?, Some((files.clone(), version)));
        Ok(ClientTls { current: Arc::new(Mutex::new(Current { config, files })), server_name })
    }

    /// Wraps a configuration that the caller made.
    pub fn with_config(config: Arc<ClientConfig>, server_name: Option<String>) -> ClientTls {
        ClientTls { current: Arc::new(Mutex::new(Current { config, files: None })), server_name }
    }

    /// Returns the same settings with a lock of their own, for the child of a fork: another thread may
    /// hold this one while the process forks.
    pub(crate) fn detached(&self) -> ClientTls {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ClientTls { current: Arc::new(Mutex::new(current)), server_name: self.server_name.clone() }
    }

    /// Returns the configuration for a new connection. Changed files that are invalid leave the old
    /// configuration: they may be half written.
    pub fn config(&self) -> Arc<ClientConfig> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((files, version)) = &mut current.files {
            let now = files.version();
            if now.is_some()
                && now != *version
                && let Ok(config) = client_config(files)
            {
                *version = now;
                current.config = config;
            }
        }
        current.config.clone()
    }

    /// Returns the name that the certificate of the server at this host must have.
    ///
    /// # Errors
    /// If that is no valid name.
    pub fn name_of(&self, host: &str) -> Result<ServerName<'static>, TlsError> {
        let name = self.server_name.as_deref().unwrap_or(host).to_string();
        ServerName::try_from(name.clone()).map_err(|_| TlsError::Name(name))
    }
}

fn client_config(files: &Files) -> Result<Arc<ClientConfig>, TlsError> {
    let setup = |error: rustls::Error| TlsError::Setup(error.to_string());
    let roots = Arc::new(roots(&files.authority)?);
    let verifier = WebPkiServerVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|error| TlsError::Setup(error.to_string()))?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(setup)?
        .with_webpki_verifier(verifier)
        .with_client_auth_cert(certificates(&files.certificate)?, key(&files.key)?)
        .map_err(setup)?;
    config.resumption = Resumption::disabled();
    Ok(Arc::new(config))
}

/// Returns a server's configuration for TLS, read from files.
///
/// # Errors
/// If a file cannot be read or is invalid.
pub fn server_config(files: &Files) -> Result<Arc<ServerConfig>, TlsError> {
    let setup = |error: rustls::Error| TlsError::Setup(error.to_string());
    let roots = Arc::new(roots(&files.authority)?);
    let verifier = WebPkiClientVerifier::builder_with_provider(roots, provider())
        .build()
        .map_err(|error| TlsError::Setup(error.to_string()))?;
    let mut config = ServerConfig::builder_with_provider(provider())
        .with_protocol_versions(&[&TLS13])
        .map_err(setup)?
        .with_client_cert_verifier(verifier)
        .with_single_cert(certificates(&files.certificate)?, key(&files.key)?)
        .map_err(setup)?;
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
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
