//! `pagetax servers`: what memory servers hold, and for whom.

use crate::exit;
use crate::memory_servers::ServersArgs;
use crate::output::{self, documents::Outputs, text};
use anyhow::{Result, bail};
use pagetax_core::units::{Bytes, Nanos};
use pagetax_host::sys::signal::{StopSignals, asked_to_stop};
use pagetax_remote::client::ask;
use pagetax_remote::client::connection::Endpoint;
use pagetax_remote::discovery::Finder;
use pagetax_remote::documents::{ServerAnswer, Servers};
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::server::pool::{ClientReport, ServerReport};
use pagetax_remote::store::StoreError;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::time::{Duration, Instant};

const EXAMPLES: &str = "\
Examples:
  pagetax servers                            the one on this machine
  pagetax servers --servers a,b:7071         those, live on a terminal
  pagetax servers --discover --once          those on the local network, once
  pagetax servers --servers a,b --json       as a document";

/// How long to look for announced servers.
const DISCOVERY: Duration = Duration::from_secs(1);

/// Show memory servers and their clients, live
#[derive(Debug, clap::Args)]
#[command(before_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    servers: ServersArgs,
    /// Print once, also on a terminal
    #[arg(long)]
    once: bool,
    /// Time between two looks at the servers
    #[arg(long, value_name = "TIME", default_value = "1s")]
    every: Nanos,
    #[command(flatten)]
    outputs: Outputs<Servers>,
}

/// Runs `pagetax servers`. The exit code is 0 if all of them answered.
pub fn run(args: Args) -> Result<ExitCode> {
    let endpoints = endpoints(&args.servers)?;
    let first = look(&endpoints);
    if !args.outputs.is_wanted() && !args.once && std::io::stdout().is_terminal() {
        live(&endpoints, first, Duration::from_nanos(args.every.0))?;
        return Ok(exit::FINE.into());
    }
    let first = Servers { servers: first };
    args.outputs.print(&first, |first| table(&first.servers, None))?;
    let answered = first.servers.iter().all(|seen| seen.report.is_some());
    Ok(if answered { exit::FINE } else { exit::UNMET }.into())
}

fn endpoints(args: &ServersArgs) -> Result<Vec<Endpoint>> {
    let mut labels = args.named().to_vec();
    if args.discover() {
        let mut finder = Finder::new()?;
        labels.extend(finder.poll(DISCOVERY).announced.iter().map(ToString::to_string));
        if labels.is_empty() {
            bail!(
                "no memory server answers on the local network\n  hint: start one with `pagetax \
                 serve --announce`, or name it with --servers"
            );
        }
    } else if labels.is_empty() {
        labels.push("127.0.0.1".into());
    }
    let tls = args.tls()?;
    let endpoints: Result<_, StoreError> =
        labels.iter().map(|label| Endpoint::new(label, tls.clone())).collect();
    Ok(endpoints?)
}

fn look(endpoints: &[Endpoint]) -> Vec<ServerAnswer> {
    let seen = |endpoint: &Endpoint| match ask::report(endpoint) {
        Ok(report) => {
            ServerAnswer { server: endpoint.label.clone(), report: Some(report), error: None }
        }
        Err(error) => ServerAnswer {
            server: endpoint.label.clone(),
            report: None,
            error: Some(error.to_string()),
        },
    };
    endpoints.iter().map(seen).collect()
}

fn live(endpoints: &[Endpoint], first: Vec<ServerAnswer>, every: Duration) -> Result<()> {
    let _signals = StopSignals::watch()?;
    let (mut before, mut at) = (first, Instant::now());
    let mut text = table(&before, None);
    while !asked_to_stop() {
        // Clears the screen and begins at its top.
        output::print(&format!("\x1b[H\x1b[2J{text}"))?;
        std::thread::sleep(every);
        let (now, seen) = (Instant::now(), look(endpoints));
        text = table(&seen, Some((&before, now - at)));
        (before, at) = (seen, now);
    }
    Ok(())
}

fn table(seen: &[ServerAnswer], before: Option<(&[ServerAnswer], Duration)>) -> String {
    let headings = ["server", "state", "held", "of", "in /s", "out /s", "refused", "connections"];
    let rows = seen.iter().enumerate().map(|(index, seen)| {
        let earlier = before.and_then(|(all, time)| Some((all[index].report.as_ref()?, time)));
        server_row(seen, earlier)
    });
    let mut out = text::table(&headings, &[2, 3, 4, 5, 6, 7], rows.collect());
    let clients: Vec<Vec<String>> = seen.iter().flat_map(client_rows).collect();
    if !clients.is_empty() {
        let headings = ["client", "program", "server", "regions", "held", "in", "out"];
        out += "\n";
        out += &text::table(&headings, &[3, 4, 5, 6], clients);
    }
    for seen in seen.iter().filter_map(|seen| seen.error.as_ref()) {
        out += &format!("\n  {seen}\n");
    }
    out
}

fn pages(count: u64) -> String {
    Bytes(count * PAGE_BYTES as u64).to_string()
}

fn server_row(seen: &ServerAnswer, earlier: Option<(&ServerReport, Duration)>) -> Vec<String> {
    let Some(report) = &seen.report else {
        let missing = || text::MISSING.to_string();
        let mut row = vec![seen.server.clone(), "no answer".into()];
        row.extend((0..6).map(|_| missing()));
        return row;
    };
    let rate = |total: fn(&ServerReport) -> u64| match earlier {
        Some((before, time)) if before.epoch == report.epoch => {
            let pages = total(report).saturating_sub(total(before));
            text::count((pages as f64 / time.as_secs_f64()) as u64)
        }
        _ => text::MISSING.into(),
    };
    vec![
        seen.server.clone(),
        if report.draining { "draining" } else { "up" }.into(),
        pages(report.pages_held),
        pages(report.pages_total),
        rate(|report| report.pages_in_total),
        rate(|report| report.pages_out_total),
        text::count(report.requests_refused_total),
        report.connections.to_string(),
    ]
}

fn client_rows(seen: &ServerAnswer) -> Vec<Vec<String>> {
    let clients = seen.report.iter().flat_map(|report| &report.clients);
    let row = |client: &ClientReport| {
        vec![
            format!("{} {}", client.address, client.pid),
            client.name.clone(),
            seen.server.clone(),
            client.regions.to_string(),
            pages(client.pages_held),
            text::count(client.pages_in_total),
            text::count(client.pages_out_total),
        ]
    };
    clients.map(row).collect()
}
