//! The address of a Redis or Valkey store: `valkey://user:password@host:port,…` and its certificates.
//!
//! Invariant: neither the user nor the password is part of any text that is shown.

use crate::store::StoreError;
use crate::tls::TlsError;
use redis::io::tcp::TcpSettings;
use redis::{
    Client, ClientTlsConfig, Connection, ConnectionAddr, ConnectionInfo, IntoConnectionInfo,
    RedisResult, TlsCertificates,
};
use std::net::{IpAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The schemes, and whether they ask for TLS.
const SCHEMES: [(&str, bool); 4] =
    [("valkey", false), ("redis", false), ("valkeys", true), ("rediss", true)];
/// The variables that valkey-cli and redis-cli take a password from.
const PASSWORDS: [&str; 2] = ["VALKEYCLI_AUTH", "REDISCLI_AUTH"];
const PORT: u16 = 6379;

/// The PEM files for TLS. Without an authority, those that the system trusts count.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EngineTls {
    /// The certificate of the authority that signed the servers' certificates.
    pub authority: Option<PathBuf>,
    /// The client's certificate and its key, for servers that ask for them.
    pub client: Option<(PathBuf, PathBuf)>,
}

impl EngineTls {
    fn read(&self) -> Result<TlsCertificates, TlsError> {
        let read = |path: &Path| {
            std::fs::read(path).map_err(|error| TlsError::File {
                path: path.into(),
                what: "a certificate or key",
                why: error.to_string(),
            })
        };
        let client = self.client.as_ref().map(|(certificate, key)| {
            Ok(ClientTlsConfig { client_cert: read(certificate)?, client_key: read(key)? })
        });
        Ok(TlsCertificates {
            client_tls: client.transpose()?,
            root_cert: self.authority.as_deref().map(read).transpose()?,
        })
    }
}

/// The addresses of one server, or of servers of one cluster, and what it takes to connect to them.
#[derive(Clone)]
pub(super) struct Address {
    nodes: Vec<(String, u16)>,
    user: Option<String>,
    password: Option<String>,
    certificates: Option<TlsCertificates>,
    timeout: Duration,
}

impl Address {
    /// Reads `SCHEME://[[USER]:PASSWORD@]HOST[:PORT],…`. Without a password, those variables count that
    /// the engines' own clients read.
    pub fn parse(url: &str, tls: &EngineTls, timeout: Duration) -> Result<Address, StoreError> {
        let refused = |why: &str| StoreError::Refused {
            server: "the address of the store".into(),
            why: format!("{why}; write valkey://HOST:PORT,… or, for TLS, valkeys://HOST:PORT,…"),
        };
        let (scheme, rest) = url.split_once("://").ok_or_else(|| refused("it has no ://"))?;
        let known = SCHEMES.iter().find(|(known, _)| *known == scheme);
        let (_, is_tls) = known.ok_or_else(|| refused("its scheme is not known"))?;
        let (login, hosts) = rest.rsplit_once('@').unwrap_or(("", rest));
        let hosts = hosts.trim_end_matches('/');
        // The library knows how passwords are encoded.
        let login = format!("redis://{login}@localhost").into_connection_info();
        let login =
            login.map_err(|_| refused("its user or password is not encoded as in a URL"))?;
        // What stands for a host may be a password, where the @ is missing.
        let nodes: Option<Vec<_>> = hosts.split(',').map(host_and_port).collect();
        let nodes = nodes.ok_or_else(|| refused("it needs a host, or a host and a port"))?;
        let certificates = is_tls.then(|| tls.read()).transpose();
        let in_variable = || PASSWORDS.iter().find_map(|name| std::env::var(name).ok());
        let password = login.redis_settings().password().map(String::from).or_else(in_variable);
        Ok(Address {
            nodes,
            user: login.redis_settings().username().map(String::from),
            password,
            certificates: certificates.map_err(|error| refused(&error.to_string()))?,
            timeout,
        })
    }

    /// Returns the hosts and ports, as they may be shown.
    pub fn label(&self) -> String {
        let shown = |(host, port): &(String, u16)| format!("{host}:{port}");
        self.nodes.iter().map(shown).collect::<Vec<_>>().join(",")
    }

    /// Returns this address with another server of the same cluster alone.
    pub fn of_node(&self, host: &str, port: u16) -> Address {
        Address { nodes: vec![(host.into(), port)], ..self.clone() }
    }

    /// Returns this address with another timeout.
    pub fn within(self, timeout: Duration) -> Address {
        Address { timeout, ..self }
    }

    pub fn is_tls(&self) -> bool {
        self.certificates.is_some()
    }

    /// Returns true if all servers are on this machine. A host that cannot be resolved is not.
    pub fn is_loopback(&self) -> bool {
        let is_local = |(host, port): &(String, u16)| {
            let addresses = (host.as_str(), *port).to_socket_addrs();
            addresses.is_ok_and(|mut all| all.all(|one| one.ip().to_canonical().is_loopback()))
        };
        self.nodes.iter().all(is_local)
    }

    fn info(&self, (host, port): &(String, u16)) -> RedisResult<ConnectionInfo> {
        let (host, port) = (host.clone(), *port);
        let address = match self.certificates {
            None => ConnectionAddr::Tcp(host, port),
            Some(_) => ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None },
        };
        let info = address.into_connection_info()?;
        let mut login = info.redis_settings().clone();
        if let Some(user) = &self.user {
            login = login.set_username(user);
        }
        if let Some(password) = &self.password {
            login = login.set_password(password);
        }
        // Without it, each page-in would wait for the kernel to gather more to send.
        let tcp = TcpSettings::default().set_nodelay(true);
        Ok(info.set_redis_settings(login).set_tcp_settings(tcp))
    }

    /// Connects to the first server that answers.
    pub fn connect(&self) -> RedisResult<Connection> {
        let mut connected = Err(redis::RedisError::from(std::io::Error::other("no address")));
        for node in &self.nodes {
            let info = self.info(node)?;
            let client = match &self.certificates {
                None => Client::open(info)?,
                Some(certificates) => Client::build_with_tls(info, certificates.clone())?,
            };
            connected = client.get_connection_with_timeout(self.timeout);
            if connected.is_ok() {
                break;
            }
        }
        let connection = connected?;
        connection.set_read_timeout(Some(self.timeout))?;
        connection.set_write_timeout(Some(self.timeout))?;
        Ok(connection)
    }
}

/// Splits `host`, `host:port`, `[address]` or `[address]:port`.
pub(super) fn host_and_port(text: &str) -> Option<(String, u16)> {
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some((address.to_string(), PORT));
    }
    let (host, port) = match text.rsplit_once(':') {
        Some((host, port)) if !port.ends_with(']') => (host, port.parse().ok()?),
        _ => (text, PORT),
    };
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let is_host = !host.is_empty() && !host.contains(['/', '?', '#', ' ', '@']);
    is_host.then(|| (host.to_string(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(url: &str) -> Result<Address, String> {
        let parsed = Address::parse(url, &EngineTls::default(), Duration::from_secs(1));
        parsed.map_err(|error| error.to_string())
    }

    #[test]
    fn addresses_of_one_server_and_of_a_cluster() {
        let one = parse("valkey://me:p%40ss@a").unwrap();
        assert_eq!((one.label().as_str(), one.user.as_deref()), ("a:6379", Some("me")));
        assert_eq!(one.password.as_deref(), Some("p@ss"));
        let many = parse("rediss://a:1,b:2,[::1]:3,::1").unwrap();
        assert_eq!(many.label(), "a:1,b:2,::1:3,::1:6379");
        assert!(many.is_tls() && !one.is_tls());
        assert_eq!(one.of_node("b", 7).label(), "b:7");
        assert_eq!(parse("redis://127.0.0.1:1/").unwrap().label(), "127.0.0.1:1");
        assert!(parse("redis://127.0.0.1,127.0.0.2").unwrap().is_loopback());
        assert!(!parse("redis://127.0.0.1,192.0.2.1").unwrap().is_loopback());
    }

    #[test]
    fn a_wrong_address_is_refused_without_its_password() {
        let wrong = [
            "http://:secret@a",
            "a:1",
            "valkey://",
            "valkey://:secret@a:x",
            "redis://:secret@a/b",
            "redis://:secret",
        ];
        for url in wrong {
            let refused = parse(url).err().unwrap_or_else(|| panic!("{url} was taken"));
            assert!(refused.contains("valkey://HOST") && !refused.contains("secret"), "{refused}");
        }
    }
}
