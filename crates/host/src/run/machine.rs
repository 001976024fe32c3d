//! The machines `host` and `null`.

use super::execution::Execution;
use super::lockable::job_params;
use super::network::Network;
use crate::measure::environment::environment;
use crate::measure::perf::{FaultLatency, NoLatency};
use crate::pages::PageSettings;
use crate::procfs::Root;
use crate::run::guard::{Limits, Room, check, check_network, check_replays};
use crate::sys::signal::StopSignals;
use pagetax_core::machine::{Machine, MachineKind, MachineSpec, RunError, Sink, Unmet};
use pagetax_core::network_memory::NetworkMemory;
use pagetax_core::plan::Plan;
use pagetax_core::report::Warning;
use pagetax_core::units::Bytes;
use std::sync::Arc;

/// Makes the network memory of one run. The argument is the memory of this process that pages may take.
pub type OpenNetwork = Arc<dyn Fn(Bytes) -> Arc<dyn NetworkMemory> + Send + Sync>;

/// The machine that this process runs on.
#[derive(Clone, Default)]
pub struct HostMachine {
    limits: Limits,
    open_network: Option<OpenNetwork>,
}

impl HostMachine {
    /// Creates the machine with these limits instead of the default ones.
    pub fn with_limits(limits: Limits) -> HostMachine {
        HostMachine { limits, ..HostMachine::default() }
    }

    /// Runs jobs with network memory, too. Without this call, the machine refuses them.
    pub fn with_network(mut self, open: OpenNetwork) -> HostMachine {
        self.open_network = Some(open);
        self
    }

    fn network(&self) -> Option<Network> {
        let free = |room: Room| room.available_bytes.saturating_sub(room.guard_bytes(&self.limits));
        let room = Bytes(Room::read(&Root::default()).map_or(u64::MAX, free));
        self.open_network.as_ref().map(|open| Network::new(open(room)))
    }
}

impl Machine for HostMachine {
    fn spec(&self) -> MachineSpec {
        spec("host", MachineKind::Host, &self.limits)
    }

    fn limits(&self, plan: &Plan) -> Vec<Unmet> {
        let mut unmet = check(plan, &self.limits, &Root::default(), &PageSettings::host());
        if self.open_network.is_none() {
            unmet.extend(check_network(plan));
        }
        unmet
    }

    fn execute(&self, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        let latency = match plan.measure.fault_latency.then(FaultLatency::start) {
            Some(Ok(latency)) => Some(latency),
            Some(Err(NoLatency { what: text, remedy })) => {
                out.warning(Warning { id: "no_fault_latency".into(), text, remedy });
                None
            }
            None => None,
        };
        let result = run(plan, Some((self.limits, self.network())), out);
        if let Some(latency) = latency {
            latency.finish().report(out);
        }
        result
    }
}

/// The harness without memory: the same phases, clients and streams, but nothing is mapped or touched.
#[derive(Debug, Clone, Copy, Default)]
pub struct NullMachine;

impl Machine for NullMachine {
    fn spec(&self) -> MachineSpec {
        spec("null", MachineKind::Null, &Limits::default())
    }

    fn limits(&self, plan: &Plan) -> Vec<Unmet> {
        check_replays(plan).into_iter().collect()
    }

    fn execute(&self, plan: &Plan, out: &mut dyn Sink) -> Result<(), RunError> {
        run(plan, None, out)
    }
}

/// Runs the plan on real memory within the limits, or on none.
fn run(
    plan: &Plan,
    memory: Option<(Limits, Option<Network>)>,
    out: &mut dyn Sink,
) -> Result<(), RunError> {
    out.environment(environment(&Root::default()));
    let _signals = StopSignals::watch()
        .map_err(|error| super::failure::refusal("watching for signals", &error))?;
    Execution::set_up(plan, memory, out)?.run()
}

fn spec(name: &str, kind: MachineKind, limits: &Limits) -> MachineSpec {
    let memory_bytes = Room::read(&Root::default()).map_or(0, |room| room.total_bytes);
    let lockable_bytes_max = memory_bytes as f64 * limits.lock_share_max;
    let pages = PageSettings::host();
    let base_page = crate::pages::base_page();
    let mut page_sizes = vec![base_page];
    page_sizes.extend(pages.sizes());
    MachineSpec {
        name: name.into(),
        kind,
        validated_jobs: Vec::new(),
        memory: Bytes(memory_bytes),
        base_page,
        page_sizes,
        cpus: std::thread::available_parallelism().map_or(1, |n| n.get() as u32),
        job_params: job_params(lockable_bytes_max as u64),
    }
}
