//! Which memory servers a command uses, and how: the options that several subcommands share.

use anyhow::{Context, Result, bail};
use pagetax_core::units::Nanos;
use pagetax_remote::preloaded::{EngineSettings, ServerSettings, StoreSettings};
use pagetax_remote::store::redis::EngineTls;
use pagetax_remote::tls::{ClientTls, Files};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Files for mutual TLS
#[derive(Debug, Clone, Default, clap::Args)]
pub struct TlsArgs {
    /// Our certificate, and those up to the authority's (PEM)
    #[arg(long, value_name = "FILE", requires_all = ["tls_key", "tls_ca"])]
    tls_cert: Option<PathBuf>,
    /// The key of our certificate (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_key: Option<PathBuf>,
    /// Certificate of the authority that signs both sides' certificates (PEM). Alone, it is for a --store
    /// whose servers ask for no certificate
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
}

impl TlsArgs {
    /// Returns the files for mutual TLS, if it is asked for.
    ///
    /// # Errors
    /// If there is an authority alone.
    pub fn files(&self) -> Result<Option<Files>> {
        Ok(match (self.tls_cert.clone(), self.tls_key.clone(), self.tls_ca.clone()) {
            (Some(certificate), Some(key), Some(authority)) => {
                Some(Files { certificate, key, authority })
            }
            (None, None, None) => None,
            _ => bail!(
                "memory servers and their clients show certificates to each other\n  hint: add --tls-cert and \
                 --tls-key to --tls-ca"
            ),
        })
    }

    /// Returns the files for a store of another kind, by absolute paths.
    fn of_engine(&self) -> Result<EngineTls> {
        let client = self.tls_cert.as_ref().zip(self.tls_key.as_ref());
        let client =
            client.map(|(certificate, key)| anyhow::Ok((absolute(certificate)?, absolute(key)?)));
        Ok(EngineTls {
            authority: self.tls_ca.as_deref().map(absolute).transpose()?,
            client: client.transpose()?,
        })
    }
}

fn absolute(path: impl AsRef<Path>) -> Result<PathBuf> {
    let path = path.as_ref();
    path.canonicalize().with_context(|| format!("cannot find {}", path.display()))
}

/// Memory servers to use
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ServersArgs {
    /// Memory servers: hosts, with ports unless they listen on 7070
    #[arg(long, value_name = "HOST[:PORT],…", value_delimiter = ',',
          value_parser = clap::builder::NonEmptyStringValueParser::new())]
    servers: Vec<String>,
    /// Find memory servers on the local network (mDNS)
    #[arg(long)]
    discover: bool,
    #[command(flatten)]
    tls: TlsArgs,
    /// Name in the servers' certificates, where it is not the host that they are addressed by
    #[arg(long, value_name = "NAME", requires = "tls_cert")]
    tls_name: Option<String>,
}

impl ServersArgs {
    /// Hosts and ports that were named.
    pub fn named(&self) -> &[String] {
        &self.servers
    }

    /// Returns true if servers are to be looked for.
    pub fn discover(&self) -> bool {
        self.discover
    }

    /// Reads the files of TLS, if it is asked for.
    ///
    /// # Errors
    /// If a file is missing or malformed.
    pub fn tls(&self) -> Result<Option<ClientTls>> {
        let files = self.tls.files()?;
        let tls = files.map(|files| ClientTls::new(&files, self.tls_name.clone())).transpose();
        tls.context("cannot use TLS")
    }

    /// Returns the files of TLS by absolute paths, and the name in the certificates.
    ///
    /// # Errors
    /// If a file is missing.
    pub fn tls_files(&self) -> Result<(Option<Files>, Option<String>)> {
        let files = self.tls.files()?.map(|files| -> Result<Files> {
            Ok(Files {
                certificate: absolute(files.certificate)?,
                key: absolute(files.key)?,
                authority: absolute(files.authority)?,
            })
        });
        Ok((files.transpose()?, self.tls_name.clone()))
    }
}

/// Memory servers for pages, and how many copies to keep
#[derive(Clone, Default, clap::Args)]
pub struct CopiesArgs {
    #[command(flatten)]
    servers: ServersArgs,

    /// A Valkey or Redis server or cluster that runs already, instead of memory servers:
    /// valkey://[[USER]:PASSWORD@]HOST[:PORT],… or valkeys:// for TLS. Without a password, VALKEYCLI_AUTH or
    /// REDISCLI_AUTH counts, which other users of this machine do not see
    #[arg(long, value_name = "URL",
          conflicts_with_all = ["servers", "discover", "tls_name"])]
    store: Option<String>,

    /// Copies of each page, on as many servers: with 2, one of them may fail
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    copies: u8,

    /// Use servers beyond this machine without TLS: everybody on the network can read and change the
    /// program's memory
    #[arg(long)]
    insecure: bool,

    /// Compress writes over slow links with TLS, too: the sizes on the network then tell how well pages
    /// compress
    #[arg(long)]
    compress_tls: bool,

    /// The time for which an access to memory waits if no server with its page answers; then it fails
    /// (SIGBUS)
    #[arg(long, value_name = "TIME", default_value = "30s")]
    unreachable: Nanos,
}

impl std::fmt::Debug for CopiesArgs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The address of a store may have a password.
        f.debug_struct("CopiesArgs").field("servers", &self.servers).finish_non_exhaustive()
    }
}

impl CopiesArgs {
    /// Returns the store that is named; the process itself if none is.
    ///
    /// # Errors
    /// If copies are asked for without servers, or a file of TLS is missing.
    pub fn store(&self) -> Result<StoreSettings> {
        let (named, discover) = (self.servers.named().to_vec(), self.servers.discover());
        let (copies, unreachable) = (self.copies.into(), Duration::from_nanos(self.unreachable.0));
        if let Some(url) = &self.store {
            return Ok(StoreSettings::Engine(EngineSettings {
                url: url.clone(),
                copies,
                unreachable,
                tls: self.servers.tls.of_engine()?,
                insecure: self.insecure,
            }));
        }
        if named.is_empty() && !discover {
            if self.copies > 1 {
                bail!(
                    "copies are kept on servers, and none is given\n  hint: add --servers, --discover or --store"
                );
            }
            return Ok(StoreSettings::default());
        }
        let (tls, tls_name) = self.servers.tls_files()?;
        Ok(StoreSettings::Servers(ServerSettings {
            named,
            discover,
            copies,
            unreachable,
            tls,
            tls_name,
            insecure: self.insecure,
            compress_tls: self.compress_tls,
        }))
    }
}
