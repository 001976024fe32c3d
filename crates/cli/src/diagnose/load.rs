//! `pagetax diagnose --load LINE -- SERVER`: trials of a server, compared by a figure of its load.

use anyhow::{Result, anyhow, bail};
use pagetax_core::diagnosis::Basis;
use pagetax_core::load::Metric;
use pagetax_core::units::Nanos;
use pagetax_host::measure::trial::{Ready, ServerProbe, Service};
use std::time::Duration;

/// The load of a server.
#[derive(Debug, Default, clap::Args)]
pub struct LoadArgs {
    /// The command is a server: a line of a shell that loads it once it is ready. Each run ends with it
    #[arg(long, value_name = "LINE", conflicts_with_all = ["side_by_side", "pids", "all"])]
    load: Option<String>,

    /// Sign that the server is ready: the port at which it listens, output:REGEX for a line that it prints,
    /// or command:LINE that succeeds
    #[arg(long, value_name = "PORT|WHAT", requires = "load")]
    ready: Option<String>,

    /// The longest time until the server is ready
    #[arg(long, value_name = "TIME", default_value = "1min", requires = "load")]
    ready_limit: Nanos,

    /// The longest time of the load
    #[arg(long, value_name = "TIME", default_value = "10min", requires = "load")]
    load_limit: Nanos,

    /// The figure of the load to compare by: throughput, p50, p99 or p999 of redis-benchmark, wrk, pgbench,
    /// memtier_benchmark or fio; less:REGEX or more:REGEX for a number in the output, in brackets
    #[arg(long, value_name = "FIGURE", default_value = "throughput", requires = "load")]
    metric: String,

    /// Send requests of our own while it is loaded: http://HOST:PORT/PATH or redis://HOST:PORT. The metrics
    /// p50, p99 and p999 are then those of these requests
    #[arg(long, value_name = "URL", requires = "load")]
    probe: Option<String>,

    /// The number of these requests in a second
    #[arg(long, value_name = "NUMBER", default_value_t = 1000, requires = "probe",
          value_parser = clap::value_parser!(u32).range(1..))]
    probe_rate: u32,

    /// A line of a shell to run in the middle of each load, such as `redis-cli bgsave`
    #[arg(long, value_name = "LINE", requires = "load")]
    event: Option<String>,
}

impl LoadArgs {
    /// Returns the load, if there is one.
    pub fn service(&self, command: &[std::ffi::OsString]) -> Result<Option<Service>> {
        let Some(load) = &self.load else { return Ok(None) };
        if command.is_empty() {
            bail!("--load loads a server\n  hint: name it after --, as in -- redis-server");
        }
        let ready = self.ready.as_ref().ok_or_else(|| {
            anyhow!("--load needs --ready\n  hint: name the server's port, as in --ready 6379")
        })?;
        let ready =
            Ready::parse(ready).map_err(|hint| anyhow!("--ready {ready}\n  hint: {hint}"))?;
        let metric = Metric::parse(&self.metric)
            .map_err(|hint| anyhow!("--metric {}\n  hint: {hint}", self.metric))?;
        let probe = self.probe.as_ref().map(|url| {
            ServerProbe::parse(url, self.probe_rate)
                .map_err(|hint| anyhow!("--probe {url}\n  hint: {hint}"))
        });
        Ok(Some(Service {
            ready,
            ready_limit: Duration::from_nanos(self.ready_limit.0),
            load: load.clone(),
            load_limit: Duration::from_nanos(self.load_limit.0),
            event: self.event.clone(),
            probe: probe.transpose()?,
            metric,
            load_time: None,
        }))
    }
}

/// Returns the basis of comparisons: it is known before the runs only for a load.
pub fn basis(service: Option<&Service>) -> Basis {
    service.map_or(Basis::Elapsed, |service| Basis::Load(service.metric.figure))
}
