//! Which memory servers a command uses, and how: the options that several subcommands share.

use anyhow::{Context, Result, anyhow};
use pagetax_core::units::Nanos;
use pagetax_remote::preloaded::ServerSettings;
use pagetax_remote::tls::{ClientTls, Files};
use std::path::PathBuf;
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
    /// Certificate of the authority that signs both sides' certificates (PEM)
    #[arg(long, value_name = "FILE", requires = "tls_cert")]
    tls_ca: Option<PathBuf>,
}

impl TlsArgs {
    /// Returns the files, if TLS is asked for.
    pub fn files(&self) -> Option<Files> {
        Some(Files {
            certificate: self.tls_cert.clone()?,
            key: self.tls_key.clone()?,
            authority: self.tls_ca.clone()?,
        })
    }
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
        let files = self.tls.files();
        let tls = files.map(|files| ClientTls::new(&files, self.tls_name.clone())).transpose();
        tls.context("cannot use TLS")
    }

    /// Returns the files of TLS by absolute paths, and the name in the certificates.
    ///
    /// # Errors
    /// If a file is missing.
    pub fn tls_files(&self) -> Result<(Option<Files>, Option<String>)> {
        let absolute = |path: PathBuf| {
            let found = path.canonicalize();
            found.with_context(|| format!("cannot find {}", path.display()))
        };
        let files = self.tls.files().map(|files| -> Result<Files> {
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
#[derive(Debug, Clone, Default, clap::Args)]
pub struct CopiesArgs {
    #[command(flatten)]
    servers: ServersArgs,

    /// Copies of each page, on as many servers: with 2, one of them may fail
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=3))]
    copies: u8,

    /// Use servers beyond this machine without TLS: everybody on the network can read and change the
    /// program's memory
    #[arg(long)]
    insecure: bool,

    /// The time for which an access to memory waits if no server with its page answers; then it fails
    /// (SIGBUS)
    #[arg(long, value_name = "TIME", default_value = "30s")]
    unreachable: Nanos,
}

impl CopiesArgs {
    /// Returns the servers, if any are named or discovered.
    ///
    /// # Errors
    /// If copies are asked for without servers, or a file of TLS is missing.
    pub fn servers(&self) -> Result<Option<ServerSettings>> {
        let (named, discover) = (self.servers.named().to_vec(), self.servers.discover());
        if named.is_empty() && !discover {
            if self.copies > 1 {
                return Err(anyhow!(
                    "copies are kept on servers, and none is given\n  hint: add --servers or --discover"
                ));
            }
            return Ok(None);
        }
        let (tls, tls_name) = self.servers.tls_files()?;
        Ok(Some(ServerSettings {
            named,
            discover,
            copies: self.copies.into(),
            unreachable: Duration::from_nanos(self.unreachable.0),
            tls,
            tls_name,
            insecure: self.insecure,
        }))
    }
}
