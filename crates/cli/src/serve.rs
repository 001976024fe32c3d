//! `pagetax serve`: the memory server.

use crate::memory_servers::TlsArgs;
use crate::{exit, output};
use anyhow::{Context, Result, bail};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use pagetax_remote::client::ask;
use pagetax_remote::client::connection::{Endpoint, PORT};
use pagetax_remote::discovery::{self, Announcement};
use pagetax_remote::server::listen::{Options, Server};
use pagetax_remote::server::pool::Limits;
use pagetax_remote::tls::{ClientTls, server_config};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagetax serve --memory 8G                       to programs on this machine
  pagetax serve --memory 8G --listen 0.0.0.0:7070 --announce \\
      --tls-cert me.pem --tls-key me.key --tls-ca ca.pem
                                                  to whom the authority has signed a certificate
  pagetax serve --drain                           send the one on this machine home";

/// How often the server looks whether it should end.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Lend memory to programs on other machines
///
/// Runs until it is told to stop: by SIGTERM or SIGINT, or by --drain. It then takes nothing new
/// and waits for its clients to move their pages to other servers; a second signal ends it at once.
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    /// Memory to lend, with what it takes to find pages in it; never exceeded
    #[arg(long, value_name = "SIZE", default_value = "1G")]
    memory: Bytes,
    /// Where to listen; anywhere but on loopback needs TLS or --insecure
    #[arg(long, value_name = "ADDR", default_value_t = SocketAddr::from((Ipv4Addr::LOCALHOST, PORT)))]
    listen: SocketAddr,
    #[command(flatten)]
    tls: TlsArgs,
    /// Listen to the network without TLS: whoever can reach the port can read what passes
    #[arg(long)]
    insecure: bool,
    /// Answer /health, /metrics (Prometheus) and /report over HTTP
    #[arg(long, value_name = "ADDR")]
    http: Option<SocketAddr>,
    /// Let clients on the local network find this server (mDNS)
    #[arg(long)]
    announce: bool,
    /// Most connections at a time
    #[arg(long, value_name = "N", default_value_t = 256)]
    connections_max: u32,
    /// Most regions of all clients
    #[arg(long, value_name = "N", default_value_t = Limits::default().regions_max)]
    regions_max: u32,
    /// Keep the pages of a client that went away without a word for so long
    #[arg(long, value_name = "TIME", default_value = "60s")]
    linger: Nanos,
    /// What fails as a whole with this server (a rack, a room): clients put the replicas of a page into different
    /// ones, where there are enough. The machine, unless given
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    failure_domain: Option<String>,
    /// When told to stop, wait so long for pages to move
    #[arg(long, value_name = "TIME", default_value = "30s")]
    drain_limit: Nanos,
    /// Tell the server that listens there on this machine to leave, and wait until it has
    #[arg(long)]
    drain: bool,
    /// For --drain: the name in the server's certificate, where it is not the address
    #[arg(long, value_name = "NAME", requires_all = ["drain", "tls_cert"])]
    tls_name: Option<String>,
}

/// `pagetax serve`
pub fn run(args: Args) -> Result<ExitCode> {
    if args.drain {
        drain(&args)?
    } else {
        serve(&args)?
    }
    Ok(exit::FINE.into())
}

fn serve(args: &Args) -> Result<()> {
    if args.memory.0 < 1 << 20 {
        bail!("{} is too little to lend\n  remedy: give --memory 1M or more", args.memory);
    }
    let here = machine_memory();
    if args.memory > here {
        bail!(
            "{} to lend are more than the {here} that this machine has\n  remedy: give --memory less, \
             so that the machine keeps what it needs itself",
            args.memory
        );
    }
    let tls = args.tls.files().map(|files| server_config(&files)).transpose();
    let options = Options {
        limits: Limits {
            memory: args.memory,
            regions_max: args.regions_max,
            connections_max: args.connections_max,
            linger: args.linger,
        },
        tls: tls.context("cannot use TLS")?,
        insecure: args.insecure,
        http: args.http,
        failure_domain: args.failure_domain.clone(),
    };
    let signals = StopSignals::watch().context("cannot watch for signals")?;
    let server = Server::start(args.listen, options)?;
    let announcement = announce(args, &server)?;
    let web = server.http_address().map_or(String::new(), |at| format!(", HTTP on {at}"));
    output::print(&format!("{} to lend on {}{web}\n", args.memory, server.address()))?;
    wait_for_the_end(&server, Duration::from_nanos(args.drain_limit.0), signals)?;
    drop(announcement);
    Ok(())
}

fn machine_memory() -> Bytes {
    let system = rustix::system::sysinfo();
    Bytes(system.totalram * system.mem_unit as u64)
}

fn announce(args: &Args, server: &Server) -> Result<Option<Announcement>> {
    let name = || format!("pagetax-{:08x}", server.pool().epoch as u32);
    let announced = args.announce.then(|| discovery::announce(server.address(), &name()));
    Ok(announced.transpose()?)
}

/// Returns when all pages have moved, or the time for that is over.
fn wait_for_the_end(server: &Server, limit: Duration, signals: StopSignals) -> Result<()> {
    let pool = server.pool();
    while !asked_to_stop() && !pool.is_draining() {
        std::thread::sleep(LOOK_EVERY);
    }
    pool.drain();
    // The next signal is for us alone.
    drop(signals);
    let _signals = StopSignals::watch().context("cannot watch for signals")?;
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
    let name = args.tls_name.clone();
    let tls = args.tls.files().map(|files| ClientTls::new(&files, name)).transpose();
    let mut at = args.listen;
    if at.ip().is_unspecified() {
        at.set_ip(Ipv4Addr::LOCALHOST.into());
    }
    let endpoint = Endpoint::new(&at.to_string(), tls.context("cannot use TLS")?)?;
    ask::drain(&endpoint)?;
    let until = Instant::now() + Duration::from_nanos(args.drain_limit.0);
    while let Ok(report) = ask::report(&endpoint) {
        if Instant::now() >= until {
            bail!(
                "{} pages have not moved yet\n  remedy: start other memory servers for them; the \
                 server goes on draining",
                report.pages_held
            );
        }
        std::thread::sleep(LOOK_EVERY);
    }
    Ok(())
}
