//! The engine with a kernel that does little: pages are filled on demand at a fixed cost, files
//! after a wait, and a daemon runs now and then.

use super::*;
use crate::hardware::accesses::Accesses;
use crate::hardware::flat::Flat;
use crate::hardware::{PageTables, Pte};
use crate::historic::kernel::{KernelReport, Step};
use crate::historic::sched::scheduler;
use crate::model::Model;
use pagetax_core::cause::Account;
use pagetax_core::machine::{MachineKind, MachineSpec, Unmet};
use pagetax_core::page_size::PageSizeRequest;
use pagetax_core::plan::*;
use pagetax_core::report::{Recording, Run};
use pagetax_core::units::{Bytes, Nanos, PageSize};
use proptest::prelude::*;

const MINOR: CounterId = CounterId::of("minor_fault_count");
const MAJOR: CounterId = CounterId::of("major_fault_count");
const MS: u64 = 1_000_000;

struct PlainKernel {
    file_from: u64,
    next: u64,
    lengths: BTreeMap<usize, (u64, u64)>,
    daemon: bool,
}

impl PlainKernel {
    fn fill(&mut self, hw: &mut Flat, cx: &mut Cx<'_>, space: SpaceId, address: u64) {
        cx.charge(CpuRow::MinorFault, 10_000);
        if address >= self.file_from {
            cx.count(MAJOR, 1);
            cx.wait(Wait::Until(cx.now() + 20 * MS), WallRow::PageIn);
        } else {
            cx.count(MINOR, 1);
        }
        hw.load(space, Pte { address: address & !4095, size: PageSize::K4, writable: true });
    }
}

impl Kernel<Flat> for PlainKernel {
    fn unmet_requirements(&self, _plan: &Plan) -> Vec<Unmet> {
        Vec::new()
    }
    fn call_ns(&self) -> u64 {
        1_000
    }
    fn counters(&self) -> &'static [CounterId] {
        &[MINOR, MAJOR]
    }
    fn begin(&mut self, _hw: &mut Flat, cx: &mut Cx<'_>, _space: SpaceId) -> Step {
        cx.charge(CpuRow::OtherKernel, MS);
        Step::Finished
    }
    fn map(
        &mut self,
        _hw: &mut Flat,
        _cx: &mut Cx<'_>,
        _space: SpaceId,
        id: RegionId,
        region: &Region,
    ) -> u64 {
        let base = self.next;
        self.next += region.bytes.next_multiple_of(4096);
        if matches!(region.backing, Backing::File { .. }) {
            self.file_from = self.file_from.min(base);
        }
        self.lengths.insert(id.0, (base, region.bytes));
        base
    }
    fn unmap(&mut self, hw: &mut Flat, _cx: &mut Cx<'_>, space: SpaceId, id: RegionId) {
        let (base, bytes) = self.lengths[&id.0];
        hw.unload(space, base, bytes);
    }
    fn lock(
        &mut self,
        hw: &mut Flat,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        offset: u64,
        bytes: u64,
    ) -> u64 {
        self.fill(hw, cx, space, self.lengths[&id.0].0 + offset);
        bytes.min(4096)
    }
    fn unlock(&mut self, _hw: &mut Flat, _cx: &mut Cx<'_>, _space: SpaceId, _id: RegionId) {}
    fn advise(
        &mut self,
        hw: &mut Flat,
        cx: &mut Cx<'_>,
        space: SpaceId,
        id: RegionId,
        advice: Advice,
    ) {
        if advice == Advice::Dontneed {
            self.unmap(hw, cx, space, id);
        }
    }
    fn fault(&mut self, hw: &mut Flat, cx: &mut Cx<'_>, space: SpaceId, accesses: &mut Accesses) {
        self.fill(hw, cx, space, accesses.next_address());
    }
    fn fork(&mut self, _hw: &mut Flat, cx: &mut Cx<'_>, _parent: SpaceId, _child: SpaceId) {
        cx.charge(CpuRow::OtherKernel, 5 * MS);
    }
    fn exit(&mut self, _hw: &mut Flat, cx: &mut Cx<'_>, _space: SpaceId) -> Step {
        cx.charge(CpuRow::OtherKernel, MS);
        Step::Finished
    }
    fn switch(&mut self, _hw: &mut Flat, cx: &mut Cx<'_>, _space: Option<SpaceId>) {
        cx.charge(CpuRow::OtherKernel, 50_000);
    }
    fn threads(&self) -> &'static [&'static str] {
        if self.daemon { &["daemon"] } else { &[] }
    }
    fn run_thread(&mut self, _hw: &mut Flat, cx: &mut Cx<'_>, _thread: usize) {
        cx.charge(CpuRow::Reclaim, 3 * MS);
        cx.wait(Wait::Until(cx.now() + 30 * MS), WallRow::Sleep);
    }
    fn kernel_report(&self, _hw: &Flat, _tally: &Tally) -> KernelReport {
        KernelReport::default()
    }
}

fn model(scheduler: &str, cpus: u32) -> Model {
    let constant = |name: &str, value: &str, unit: &str| {
        format!("{name} = {{ value = {value}, unit = \"{unit}\", source = \"assumed: test\" }}\n")
    };
    let text = [
        "title = \"test\"\nkernel = \"none\"\n[machine]\n".to_string(),
        constant("memory", "64", "MiB"),
        constant("page", "4", "KiB"),
        constant("cpus", &cpus.to_string(), "CPUs"),
        constant("tick", "10", "ms"),
        constant("quantum", "100", "ms"),
        constant("scheduler", &format!("\"{scheduler}\""), "policy"),
        "[access]\n".to_string(),
        constant("time", "1.5", "us"),
    ];
    Model::parse("test", &text.concat(), |_| None).unwrap()
}

fn region(name: &str, bytes: u64, backing: Backing) -> Region {
    let page_size = PageSizeRequest::Default;
    Region {
        name: name.into(),
        backing,
        bytes,
        page_size,
        advice: vec![],
        mapped_at_start: true,
        place: None,
    }
}

fn sweep(count: u64) -> Op {
    let pattern = Pattern::Strided { stride_bytes: 4096 };
    let (region, access) = (RegionId(0), Access::Write);
    Op::Touch(Touch { region, access, pattern, count, grain_bytes: 8, seed: 3 })
}

fn phase(client_kind: ClientKind, clients: u32, ops: Vec<Op>) -> Phase {
    let (repeat, time, rate, parent_wake) = (1, None, None, None);
    Phase { name: "work".into(), client_kind, clients, repeat, time, rate, parent_wake, ops }
}

fn plan(regions: Vec<Region>, phases: Vec<Phase>) -> Plan {
    let job = JobIdentity {
        name: "test".into(),
        params: BTreeMap::new(),
        machine_params: BTreeMap::new(),
        seed: 1,
    };
    let measure = Measure { interval: Some(Nanos(50 * MS)), fault_latency: true };
    Plan { job, regions, phases, measure, native: Native::default() }
}

fn small() -> Region {
    region("r", 16 * 4096, Backing::Anon)
}

fn run(plan: &Plan, scheduler_name: &str, cpus: u32, daemon: bool) -> (Run, Result<(), RunError>) {
    let model = model(scheduler_name, cpus);
    let settings = Settings::load(&model).unwrap();
    let spec = MachineSpec {
        name: "test".into(),
        kind: MachineKind::Sim,
        validated_jobs: Vec::new(),
        memory: Bytes(64 << 20),
        base_page: PageSize::K4,
        page_sizes: vec![PageSize::K4],
        cpus,
        job_params: BTreeMap::new(),
    };
    let mut recording = Recording::new(plan, &spec);
    let kernel = PlainKernel { file_from: u64::MAX, next: 4096, lengths: BTreeMap::new(), daemon };
    let parts = Parts {
        settings: &settings,
        caps: Caps { wall_ns: 1000 * SECOND_NS, steps: 1_000_000, ..Caps::default() },
        hardware: Flat::new(PageSize::K4),
        kernel,
        scheduler: scheduler(&model).unwrap(),
    };
    let end = Engine::run(parts, plan, &mut recording);
    (recording.finish(), end)
}

fn counter(run: &Run, id: &str) -> u64 {
    run.counters[id].value.unwrap()
}

fn wall_row(run: &Run, id: &str) -> u64 {
    let budget = run.budget.as_ref().unwrap();
    budget.row(id).unwrap().ns.unwrap()
}

#[test]
fn a_sweep_takes_its_faults_and_its_accesses() {
    let mut work = phase(ClientKind::Main, 1, vec![sweep(16)]);
    work.repeat = 1000;
    let (run, end) = run(&plan(vec![small()], vec![work]), "round-robin", 1, false);
    end.unwrap();
    assert_eq!((counter(&run, "access_count"), counter(&run, "minor_fault_count")), (16_000, 16));
    let switch_begin_exit = 50_000 + 2 * MS;
    assert_eq!(run.wall_ns, switch_begin_exit + 16 * 10_000 + 16_000 * 1_500);
    assert_eq!(counter(&run, "user_ns"), 16_000 * 1_500);
}

#[test]
fn clients_share_a_cpu_and_use_several() {
    let work = || phase(ClientKind::Processes, 4, vec![sweep(160_000)]);
    let wall = |cpus| {
        let (run, end) = run(&plan(vec![small()], vec![work()]), "fair", cpus, false);
        end.unwrap();
        assert_eq!(counter(&run, "access_count"), 640_000);
        run.wall_ns as f64 / 240e6
    };
    assert!((4.0..4.4).contains(&wall(1)), "{}", wall(1));
    assert!((1.0..1.2).contains(&wall(4)), "{}", wall(4));
}

#[test]
fn parents_that_poll_take_one_child_a_wake() {
    let mut work = phase(ClientKind::Processes, 3, vec![sweep(16)]);
    work.parent_wake = Some(Nanos(40 * MS));
    let (run, end) = run(&plan(vec![small()], vec![work]), "4.3bsd-feedback", 1, false);
    end.unwrap();
    // Three wakes, each four ticks after the last tick before it; the start takes part of one more.
    assert!((120 * MS..140 * MS).contains(&run.wall_ns), "{}", run.wall_ns);
    assert!(wall_row(&run, "sleep") > 100 * MS);
}

#[test]
fn waiting_is_booked_under_its_row() {
    let file = region("f", 4 * 4096, Backing::File { directory: None, private: false });
    let lock = Op::Lock { region: RegionId(0), chunk_bytes: 8192 };
    let ops = vec![lock, Op::Sleep(Nanos(15 * MS)), Op::Unlock(RegionId(0))];
    let work = phase(ClientKind::Main, 1, ops);
    let (run, end) = run(&plan(vec![file], vec![work]), "fair", 1, false);
    end.unwrap();
    assert_eq!(counter(&run, "major_fault_count"), 4);
    assert_eq!(wall_row(&run, "page_in"), 80 * MS);
    assert!((15 * MS..25 * MS).contains(&wall_row(&run, "sleep")));
}

#[test]
fn rates_and_times_hold() {
    let mut paced = phase(ClientKind::Main, 1, vec![sweep(1 << 40)]);
    (paced.rate, paced.time) = (Some(2000.0), Some(Nanos(500 * MS)));
    let mut timed = phase(ClientKind::Threads, 2, vec![sweep(1 << 40), Op::Barrier]);
    timed.time = Some(Nanos(500 * MS));
    let (run, end) = run(&plan(vec![small()], vec![paced, timed]), "fair", 1, false);
    end.unwrap();
    let accesses: Vec<_> =
        run.phases.iter().map(|phase| phase.counters["access_count"].value.unwrap()).collect();
    assert!((980..=1001).contains(&accesses[0]), "{accesses:?}");
    assert!((320_000..335_000).contains(&accesses[1]), "{accesses:?}");
}

#[test]
fn daemons_are_not_the_jobs_time() {
    let work = phase(ClientKind::Main, 1, vec![sweep(160_000)]);
    let (run, end) = run(&plan(vec![small()], vec![work]), "round-robin", 1, true);
    end.unwrap();
    assert!(counter(&run, "kernel_daemon_ns") >= 6 * MS);
    assert_eq!(wall_row(&run, "run_queue") + wall_row(&run, "running"), run.wall_ns);
    assert!(wall_row(&run, "run_queue") >= 6 * MS);
    assert!(run.series.columns["access_count"].len() >= 4);
}

#[test]
fn endless_runs_come_to_a_cap() {
    let work = phase(ClientKind::Main, 1, vec![Op::Sleep(Nanos(2000 * SECOND_NS))]);
    let (_, end) = run(&plan(vec![small()], vec![work]), "fair", 1, true);
    assert!(matches!(end, Err(RunError::Capped(ref text)) if text.contains("1000 s")), "{end:?}");
    let ops = vec![Op::Advise { region: RegionId(0), advice: Advice::Normal }];
    let mut jam = phase(ClientKind::Main, 1, ops);
    jam.repeat = u64::MAX;
    let (_, end) = run(&plan(vec![small()], vec![jam]), "fair", 1, false);
    assert!(matches!(end, Err(RunError::Capped(ref text)) if text.contains("steps")), "{end:?}");
}

#[test]
fn touching_what_is_not_mapped_is_an_error() {
    let mut absent = small();
    absent.mapped_at_start = false;
    let work = phase(ClientKind::Main, 1, vec![sweep(16)]);
    let (_, end) = run(&plan(vec![absent], vec![work]), "fair", 1, false);
    assert!(end.unwrap_err().to_string().contains("not mapped"));
}

fn any_phase() -> impl Strategy<Value = Phase> {
    let kinds = prop_oneof![
        Just((ClientKind::Main, 1)),
        (2u32..5).prop_map(|n| (ClientKind::Processes, n)),
        (2u32..5).prop_map(|n| (ClientKind::Threads, n)),
    ];
    let op = prop_oneof![
        (1u64..100_000).prop_map(sweep),
        Just(Op::Barrier),
        (1u64..50).prop_map(|ms| Op::Sleep(Nanos(ms * MS))),
        Just(Op::Advise { region: RegionId(0), advice: Advice::Dontneed }),
    ];
    let wake = proptest::option::of((10u64..60).prop_map(|ms| Nanos(ms * MS)));
    (kinds, proptest::collection::vec(op, 1..4), 1u64..4, wake).prop_map(
        |((kind, clients), ops, repeat, parent_wake)| {
            let parent_wake = parent_wake.filter(|_| kind == ClientKind::Processes);
            Phase { repeat, parent_wake, ..phase(kind, clients, ops) }
        },
    )
}

proptest! {
    #[test]
    fn nothing_is_left_unexplained(
        phases in proptest::collection::vec(any_phase(), 1..3),
        scheduler in prop_oneof![Just("fair"), Just("round-robin"), Just("4.3bsd-feedback")],
        cpus in 1u32..4,
        daemon: bool,
    ) {
        let plan = plan(vec![small()], phases);
        let (first, end) = run(&plan, scheduler, cpus, daemon);
        prop_assert!(end.is_ok(), "{:?}", end);
        let budget = first.budget.clone().unwrap();
        prop_assert_eq!(Account::ALL.map(|account| budget.unexplained_ns(account)), [0, 0]);
        prop_assert_eq!(budget.total_ns(Account::Wall), first.wall_ns);
        let cpu = counter(&first, "user_ns") + counter(&first, "kernel_ns");
        prop_assert_eq!(budget.total_ns(Account::Cpu), cpu);
        prop_assert!(cpu <= first.wall_ns * u64::from(cpus));
        let planned: u64 = plan.phases.iter().map(|phase| {
            let touches = phase.ops.iter().map(|op| if let Op::Touch(t) = op { t.count } else { 0 });
            touches.sum::<u64>() * phase.repeat * u64::from(phase.clients)
        }).sum();
        prop_assert_eq!(counter(&first, "access_count"), planned);
        let (second, _) = run(&plan, scheduler, cpus, daemon);
        prop_assert_eq!(first, second);
    }
}
