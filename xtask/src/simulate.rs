//! `cargo xtask simulate`: many clients and memory servers on a virtual clock, as no lab here has them
//! (crates/remote/tests/simulation). Without options it plays the table of docs/internals/scale.md.

use crate::{book, shell};
use anyhow::{Context, Result, bail};
use serde_json::Value;

const PAGE: &str = "cargo xtask simulate";
const TEST: &[&str] =
    &["test", "--quiet", "--release", "--package", "pagetax-remote", "--test", "simulation", "--"];

#[derive(clap::Args)]
pub struct Args {
    /// Clients that page; without it, the table of docs/internals/scale.md
    #[arg(long)]
    clients: Option<u32>,
    /// Memory servers; a client uses at most 64 of them, drawn at random
    #[arg(long, default_value_t = 200)]
    servers: u32,
    /// Racks, over which servers are spread evenly
    #[arg(long, default_value_t = 20)]
    racks: u32,
    /// Memory of each client on servers, in MiB
    #[arg(long, default_value_t = 32)]
    mebibytes: u32,
    /// Replicas of each page
    #[arg(long, default_value_t = 2)]
    copies: u32,
    /// All servers of a rack die, instead of one server
    #[arg(long, conflicts_with = "late_packets")]
    rack_failure: bool,
    /// No server dies, but a quarter of all packets is late by up to 400 ms
    #[arg(long)]
    late_packets: bool,
    /// Write the table into docs/internals/scale.md
    #[arg(long, conflicts_with = "clients")]
    write: bool,
}

/// Clients, servers, racks, MiB of each client, failure.
const SCALES: &[(u32, u32, u32, u32, &str)] = &[
    (10, 200, 20, 32, "rack"),
    (30, 200, 20, 32, "rack"),
    (100, 200, 20, 32, "rack"),
    (300, 200, 20, 32, "rack"),
    (1000, 200, 20, 32, "rack"),
    (1000, 200, 20, 32, "server"),
    (1000, 200, 20, 32, "late-packets"),
    (100, 200, 20, 256, "rack"),
    (1000, 20, 20, 32, "server"),
];

pub fn run(args: &Args) -> Result<()> {
    let failure = match (args.rack_failure, args.late_packets) {
        (true, _) => "rack",
        (_, true) => "late-packets",
        _ => "server",
    };
    let asked = args
        .clients
        .map(|clients| [(clients, args.servers, args.racks, args.mebibytes, failure)].to_vec());
    let mut rows = Vec::new();
    let mut lost = 0;
    for (clients, servers, racks, mebibytes, failure) in asked.unwrap_or(SCALES.to_vec()) {
        let copies = args.copies;
        let text = format!(
            "clients={clients} servers={servers} racks={racks} chunks={mebibytes} copies={copies} \
             failure={failure}"
        );
        eprintln!("simulate: {text}");
        let seen = played("scale::as_asked", &text)?;
        lost += seen["lost"].as_u64().context("no number of lost pages")?;
        rows.push(row(&seen, failure, mebibytes)?);
    }
    let headings = [
        "clients",
        "servers",
        "each",
        "dies",
        "fullest",
        "clients a server",
        "noticed",
        "all copies",
        "copied",
        "page-in before",
        "after",
        "false alarms",
        "lost",
    ];
    let tables = played("scale::tables", "")?;
    let said = format!(
        "{}\nTables: {} bytes in a client for each GiB on servers, {} in a server for each region without pages.",
        book::table(&headings, &rows),
        tables["client_bytes_per_gib"],
        tables["server_bytes_per_region"],
    );
    println!("{said}");
    if args.write {
        book::write(PAGE, &said)?;
    }
    if lost > 0 && args.copies > 1 {
        bail!("{lost} pages are lost though each had copies in {} racks", args.copies);
    }
    Ok(())
}

/// Runs a test that prints a line of JSON.
fn played(name: &str, scale: &str) -> Result<Value> {
    let mut test = shell::cargo_command(TEST);
    test.args(["--ignored", "--exact", name, "--nocapture"]).env("PAGETAX_SCALE", scale);
    let said = shell::output(&mut test)?;
    let line = said.lines().find(|line| line.starts_with('{'));
    Ok(serde_json::from_str(line.with_context(|| format!("{name} printed no result"))?)?)
}

/// Returns the cells of a row; what was not measured is a dash.
fn row(seen: &Value, failure: &str, mebibytes: u32) -> Result<Vec<String>> {
    let whole = |name: &str| seen[name].as_u64().map(|n| n.to_string()).context(name.to_string());
    let pair = |name: &str, unit: f64, digits: usize, mark: &str| {
        let [Some(usual), Some(worst)] = [0, 1].map(|nth| seen[name][nth].as_f64()) else {
            bail!("no {name}");
        };
        Ok(format!("{:.digits$}, {:.digits$} {mark}", usual / unit, worst / unit))
    };
    let dies = failure != "late-packets";
    let if_dies = |cell: String| if dies { cell } else { "–".into() };
    let copied = seen["repaired_bytes"].as_f64().context("repaired_bytes")? / 1e9;
    Ok(vec![
        whole("clients")?,
        whole("servers")?,
        format!("{mebibytes}M"),
        if dies { failure.into() } else { "none; late packets".into() },
        format!("{:.2}", seen["fullest"].as_f64().context("fullest")?),
        whole("clients_of_a_server")?,
        if_dies(pair("noticed_ms", 1.0, 0, "ms")?),
        if_dies(format!(
            "{}; {} of {}",
            pair("repaired_ms", 1e3, 1, "s")?,
            whole("repaired_count")?,
            whole("affected")?
        )),
        if_dies(format!("{copied:.1} GB")),
        pair("page_in_before_ms", 1.0, 2, "ms")?,
        pair("page_in_after_ms", 1.0, 2, "ms")?,
        if dies { "–".into() } else { whole("false_alarms")? },
        whole("lost")?,
    ])
}
