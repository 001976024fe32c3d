//! `pagetax serve`: the memory server.

use crate::memory_servers::TlsArgs;
use crate::{exit, output};
use anyhow::{Context, Result, bail};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_host::procfs::{Root, memory_limit};
use pagetax_host::sys::signal::{ServiceSignals, asked_to_reload, asked_to_stop};
use pagetax_remote::client::connection::PORT;
use pagetax_remote::discovery::{self, Announcement};
use pagetax_remote::server::admin;
use pagetax_remote::server::listen::{Server, ServerOptions};
use pagetax_remote::server::pool::Limits;
use pagetax_remote::tls::{Files, FilesVersion, server_config};
use rustix::process::{DumpableBehavior, Resource, getrlimit, set_dumpable_behavior, setrlimit};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant, SystemTime};

const EXAMPLES: &str = "\
Examples:
  pagetax serve --memory 8G                       to programs on this machine
  pagetax serve --memory 8G --listen 0.0.0.0:7070 --announce \\
      --tls-cert me.pem --tls-key me.key --tls-ca ca.pem
                                                  to whom the authority has signed a certificate
  pagetax serve --drain                           send the one on this machine home";

/// How often the server looks whether it should end.
const LOOK_EVERY: Duration = Duration::from_millis(50);
/// How often it looks whether its certificates have changed.
const LOOK_FOR_FILES_EVERY: Duration = Duration::from_secs(5);
/// How long before a certificate expires the server begins to say so.
const EXPIRES_SOON: Duration = Duration::from_secs(14 * 24 * 3600);
/// How often it says so.
const SAY_EVERY: Duration = Duration::from_secs(24 * 3600);
/// The least memory that the process takes beside the lent memory: its code, threads and small buffers.
const OWN_BYTES: u64 = 32 << 20;

/// Lend memory to programs on other machines
///
/// Runs until SIGTERM, SIGINT or --drain stops it. It then takes nothing new
/// and waits for its clients to move their pages to other servers; a second signal ends it at once.
/// SIGHUP makes it read its certificates again, as it does when they change.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Memory to lend, with what it takes to find pages in it and to send them; never exceeded. The process
    /// itself takes some MiB more, and 40 KiB for each connection
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    memory: Bytes,
    /// The address to listen on; anything but loopback needs TLS or --insecure
    #[arg(long, value_name = "ADDR", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
    /// Listen to the network without TLS: everybody who can reach the port can read the traffic
    #[arg(long)]
    insecure: bool,
    /// Answer /health, /metrics (Prometheus) and /report over HTTP; anywhere but on loopback over HTTPS with
    /// the same certificates, or with --insecure
    #[arg(long, value_name = "ADDR")]
    http: Option<SocketAddr>,
    /// Let clients on the local network find this server (mDNS)
    #[arg(long)]
    announce: bool,
    /// Most connections at a time; the last eighth is for those who have pages here
    #[arg(long, value_name = "N", default_value_t = Limits::default().connections_max)]
    connections_max: u32,
    /// Most connections of one client: of a certificate, or without TLS of an address
    #[arg(long, value_name = "N", default_value_t = Limits::default().client_connections_max)]
    client_connections_max: u32,
    /// Most memory for the pages of one client; all of it, unless given
    #[arg(long, value_name = "SIZE")]
    client_memory: Option<Bytes>,
    /// Most regions of one client: a program has one, a job or a program of your own several
    #[arg(long, value_name = "N", default_value_t = Limits::default().client_regions_max)]
    client_regions_max: u32,
    /// Most regions of all clients
    #[arg(long, value_name = "N", default_value_t = Limits::default().regions_max)]
    regions_max: u32,
    /// Keep the pages of a client that went away without a word for so long
    #[arg(long, value_name = "TIME", default_value = "60s")]
    linger: Nanos,
    /// Keep the pages of a silent client, whose machine is suspended or unreachable, for so long. Not less
    /// than --linger
    #[arg(long, value_name = "TIME", default_value = "10min")]
    linger_silent: Nanos,
    /// The failure domain of this server, such as a rack or a room. Clients put the replicas of a page into
    /// different domains if they can [default: the machine]
    #[arg(
        long,
        visible_alias = "zone",
        value_name = "NAME",
        value_parser = clap::builder::NonEmptyStringValueParser::new()
    )]
    failure_domain: Option<String>,
    /// Wait so long for pages to move before the server stops
    #[arg(long, value_name = "TIME", default_value = "30s")]
    drain_limit: Nanos,
    /// Tell the server that listens there on this machine to leave, and wait until it has; for its own user
    /// and root
    #[arg(long)]
    drain: bool,
}

/// Runs `pagetax serve`.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.drain {
        drain(&args)?;
    } else {
        serve(&args)?
    }
    Ok(exit::FINE.into())
}

fn serve(args: &Args) -> Result<()> {
    if args.memory.0 < 1 << 20 {
        bail!("{} is too little to lend\n  hint: give --memory 1M or more", args.memory);
    }
    check_memory(args.memory)?;
    keep_to_ourselves()?;
    let files = args.tls.files()?;
    let tls = files.as_ref().map(server_config).transpose();
    let options = ServerOptions {
        limits: Limits {
            memory: args.memory,
            regions_max: args.regions_max,
            connections_max: args.connections_max,
            client_memory: args.client_memory,
            client_regions_max: args.client_regions_max,
            client_connections_max: args.client_connections_max,
            linger: args.linger,
            linger_silent: args.linger_silent,
        },
        tls: tls.context("cannot use TLS")?,
        insecure: args.insecure,
        http: args.http,
        failure_domain: args.failure_domain.clone(),
    };
    let signals = ServiceSignals::watch().context("cannot watch for signals")?;
    let server = Server::start(args.listen, options)?;
    let announcement = announce(args, &server)?;
    let web = server.http_address().map_or(String::new(), |at| format!(", HTTP on {at}"));
    output::print(&format!("{} to lend on {}{web}\n", args.memory, server.address()))?;
    if !server.can_be_drained() {
        say(
            "--drain will not reach this server: another process has its name; send it SIGTERM instead",
        );
    }
    let certificates = files.map(Certificates::new);
    wait_for_the_end(&server, Duration::from_nanos(args.drain_limit.0), signals, certificates)?;
    drop(announcement);
    Ok(())
}

/// Refuses more than there can be: the kernel would end the server, with all pages, when it comes to that.
fn check_memory(memory: Bytes) -> Result<()> {
    let system = rustix::system::sysinfo();
    let machine = Bytes(system.totalram * system.mem_unit as u64);
    if memory > machine {
        bail!(
            "{memory} to lend are more than the {machine} that this machine has\n  hint: give --memory less, \
             so that the machine keeps what it needs itself"
        );
    }
    match memory_limit(&Root::default(), std::process::id()) {
        Some(limit) if memory.0.saturating_add(OWN_BYTES) > limit => bail!(
            "{memory} to lend, and {} for the server itself, are more than the {} that its cgroup may have\n  \
             hint: give --memory less, or raise the cgroup's limit",
            Bytes(OWN_BYTES),
            Bytes(limit)
        ),
        _ => Ok(()),
    }
}

/// Keeps pages of others out of core dumps and of debuggers of the same user. Raises the limit of file
/// descriptors, as a connection takes two.
fn keep_to_ourselves() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cannot forbid core dumps")?;
    let mut files = getrlimit(Resource::Nofile);
    files.current = files.maximum;
    // Fewer are a lower limit on connections, no fault.
    let _ = setrlimit(Resource::Nofile, files);
    Ok(())
}

fn say(line: &str) {
    eprintln!("pagetax serve: {line}");
}

/// The files for TLS of a running server.
struct Certificates {
    files: Files,
    version: Option<FilesVersion>,
    next_look: Instant,
    next_word: Instant,
}

impl Certificates {
    fn new(files: Files) -> Certificates {
        let (version, now) = (files.version(), Instant::now());
        Certificates { files, version, next_look: now, next_word: now }
    }

    /// Reads them again if they have changed or a reload was asked for, and warns before they expire.
    fn look(&mut self, server: &Server) {
        let (is_asked, now) = (asked_to_reload(), Instant::now());
        if is_asked || now >= self.next_look {
            self.next_look = now + LOOK_FOR_FILES_EVERY;
            let version = self.files.version();
            if is_asked || (version.is_some() && version != self.version) {
                self.version = version;
                self.next_word = now;
                match server_config(&self.files) {
                    Ok(config) => {
                        server.set_tls(config);
                        say("new connections use the certificates as they are now");
                    }
                    Err(error) => say(&format!("{error}; the old certificates stay in use")),
                }
            }
        }
        if now >= self.next_word {
            self.next_word = now + SAY_EVERY;
            if let Ok((path, expires)) = self.files.first_expiry()
                && let Some(warning) = expiry_warning(SystemTime::now(), expires)
            {
                say(&format!("the certificate in {} {warning}", path.display()));
            }
        }
    }
}

/// Returns the warning about a certificate that expires then; nothing while there is time.
fn expiry_warning(now: SystemTime, expires: SystemTime) -> Option<String> {
    const REMEDY: &str = "put a new one in its place, which is read without a restart";
    match expires.duration_since(now) {
        Err(_) => Some(format!("has expired, so that nobody can connect; {REMEDY}")),
        Ok(left) if left < EXPIRES_SOON => {
            Some(format!("expires in {} hours; {REMEDY}", left.as_secs() / 3600))
        }
        Ok(_) => None,
    }
}

fn announce(args: &Args, server: &Server) -> Result<Option<Announcement>> {
    let name = || format!("pagetax-{:08x}", server.pool().epoch as u32);
    let announced = args.announce.then(|| discovery::announce(server.address(), &name()));
    Ok(announced.transpose()?)
}

/// Returns when all pages have moved, or the time for that is over.
fn wait_for_the_end(
    server: &Server,
    limit: Duration,
    signals: ServiceSignals,
    mut certificates: Option<Certificates>,
) -> Result<()> {
    let pool = server.pool();
    while !asked_to_stop() && !pool.is_draining() {
        certificates.iter_mut().for_each(|files| files.look(server));
        std::thread::sleep(LOOK_EVERY);
    }
    pool.drain();
    // The next signal is for us alone.
    drop(signals);
    let _signals = ServiceSignals::watch().context("cannot watch for signals")?;
    let until = Instant::now() + limit;
    while pool.pages_held() > 0 && Instant::now() < until && !asked_to_stop() {
        std::thread::sleep(LOOK_EVERY);
    }
    match pool.pages_held() {
        0 => {}
        left => eprintln!("pagetax serve: {left} pages had not moved and are lost"),
    }
    Ok(())
}

fn drain(args: &Args) -> Result<()> {
    Ok(admin::drain(args.listen, Duration::from_nanos(args.drain_limit.0))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificates_that_are_about_to_expire_are_told() {
        let now = SystemTime::now();
        let warning = |in_s: u64| expiry_warning(now, now + Duration::from_secs(in_s));
        assert_eq!(warning(15 * 24 * 3600), None);
        assert!(warning(3600 * 30).unwrap().contains("in 30 hours"));
        let past = expiry_warning(now, now - Duration::from_secs(1));
        assert!(past.unwrap().contains("has expired"));
    }
}
