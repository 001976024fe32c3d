//! Runs plans on models with TLBs.

use pagetax_core::cause::Account;
use pagetax_core::machine::Machine;
use pagetax_core::plan::*;
use pagetax_core::report::{Recording, Run};
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::model::Model;

/// A complete run with its report.
pub struct Ran {
    pub report: Run,
}

/// The figures of a phase that the tests check.
pub struct PhaseFigures {
    pub ns: u64,
    pub miss_ratio: f64,
}

impl Ran {
    pub fn last_phase(&self) -> PhaseFigures {
        let phase = self.report.phases.last().expect("a phase");
        let ns = phase.end_ns - phase.start_ns;
        let budget = self.report.budget.as_ref().expect("a budget");
        assert_eq!(Account::ALL.map(|account| budget.unexplained_ns(account)), [0, 0]);
        let count = |id: &str| phase.counters[id].value.expect("counted") as f64;
        PhaseFigures { ns, miss_ratio: count("tlb_miss_count") / count("access_count") }
    }
}

/// Returns a plan that fills a region and then reads it at random.
pub fn gather(region: &str, bytes: u64, page: &str, count: u64) -> Plan {
    let region = Region {
        name: region.into(),
        backing: Backing::Anon,
        bytes,
        page_size: page.parse().expect("a page size"),
        advice: Vec::new(),
        mapped_at_start: true,
        place: None,
    };
    let touch = |access, pattern, count| {
        Op::Touch(Touch { region: RegionId(0), access, pattern, count, grain_bytes: 8, seed: 1 })
    };
    let fill = touch(Access::Write, Pattern::Strided { stride_bytes: 4096 }, bytes / 4096);
    let phases = [("fill", fill), ("gather", touch(Access::Read, Pattern::Uniform, count))];
    let phase = |(name, op): (&str, Op)| Phase {
        name: name.into(),
        client_kind: ClientKind::Main,
        clients: 1,
        repeat: 1,
        time: None,
        rate: None,
        parent_wake: None,
        ops: vec![op],
    };
    Plan {
        job: JobIdentity {
            name: "tlb-gather".into(),
            params: Default::default(),
            machine_params: Default::default(),
            seed: 1,
        },
        regions: vec![region],
        phases: phases.into_iter().map(phase).collect(),
        measure: Measure { interval: None, fault_latency: false },
        native: Native::default(),
    }
}

/// Runs the plan to its end.
pub fn run(model: &Model, plan: &Plan) -> Ran {
    let machine = SimMachine::new(model.clone()).expect("a machine");
    let mut out = Recording::new(plan, &machine.spec());
    machine.run(plan, &mut out).expect("a whole run");
    Ran { report: out.finish() }
}
