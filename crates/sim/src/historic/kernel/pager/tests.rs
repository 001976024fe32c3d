use super::*;
use crate::hardware::flat::Flat;
use crate::hardware::{Mmu, Stop};
use crate::historic::cx::{Latencies, RunState};
use crate::historic::engine::{Caps, Engine, Parts, Settings};
use crate::historic::kernel::replacement::ReplacementPolicy;
use crate::historic::store::network::tests::model as network;
use crate::model::Model;
use memory::MemoryModel;
use pagetax_core::access::Rng;
use pagetax_core::cause::Account;
use pagetax_core::job::Job;
use pagetax_core::machine::{MachineKind, MachineSpec};
use pagetax_core::network_memory::Serving;
use pagetax_core::page_size::PageSizeRequest;
use pagetax_core::plan::{Access, Backing, Pattern, Touch};
use pagetax_core::report::{Recording, Run};
use pagetax_core::units::PageSize;

const PAGE: u64 = 8192;
const REGION: RegionId = RegionId(0);
const PARENT: SpaceId = SpaceId(0);
const CHILD: SpaceId = SpaceId(1);

/// A client with a job of one region, without an engine.
struct Client {
    pager: Pager,
    hw: Flat,
    run_state: RunState,
    base: u64,
    waits: Vec<(Wait, WallRow)>,
}

impl Client {
    fn new(resident_pages_max: u32, pages: u64, backing: Backing) -> Self {
        let page = PageSize::new(PAGE).unwrap();
        let memory = MemoryModel {
            page_bytes: PAGE,
            resident_pages_max,
            replacement: ReplacementPolicy::Fifo,
            zero_fill_ns_min: 30_000,
            zero_fill_jitter_ns_mean: 20_000,
            network: network(&[64 * PAGE]),
        };
        let model =
            PagerModel { page, memory, soft_fault_ns: 5, copy_ns: 7, fork_ns: 11, switch_ns: 13 };
        let run_state =
            RunState { tally: Tally::new(), latencies: Latencies::default(), rng: Rng::new(1) };
        let (pager, hw) = (Pager::new(model), Flat::new(page));
        let mut client = Client { pager, hw, run_state, base: 0, waits: Vec::new() };
        let region = Region {
            name: "region".into(),
            backing,
            bytes: pages * PAGE,
            page_size: PageSizeRequest::Default,
            advice: Vec::new(),
            mapped_at_start: true,
            place: None,
        };
        client.base = client.call(|pager, hw, cx| pager.map(hw, cx, PARENT, REGION, &region));
        client
    }

    fn call<R>(&mut self, f: impl FnOnce(&mut Pager, &mut Flat, &mut Cx<'_>) -> R) -> R {
        let mut cx = Cx::new(0, u64::MAX, 0, &mut self.run_state);
        let result = f(&mut self.pager, &mut self.hw, &mut cx);
        self.waits.extend(cx.wait);
        assert_eq!(cx.failure, None);
        result
    }

    /// Touches the first `pages` once each. Returns the numbers of major and minor faults.
    fn touch(&mut self, space: SpaceId, access: Access, pages: u64) -> (u64, u64) {
        let counts = |client: &Client| {
            let tally = &client.run_state.tally;
            (tally.get(MAJOR_FAULTS), tally.get(MINOR_FAULTS))
        };
        let before = counts(self);
        let pattern = Pattern::Strided { stride_bytes: PAGE };
        let touch =
            Touch { region: REGION, access, pattern, count: pages, grain_bytes: 8, seed: 1 };
        let place = crate::hardware::accesses::TouchSite {
            base: self.base,
            bytes: pages * PAGE,
            page_bytes: PAGE,
            client: 0,
            repeat: 0,
        };
        let mut accesses = Accesses::new(&touch, place, 1);
        while self.hw.touch(0, space, &mut accesses, u64::MAX).stop == Stop::Fault {
            self.call(|pager, hw, cx| pager.fault(hw, cx, space, &mut accesses));
        }
        let after = counts(self);
        (after.0 - before.0, after.1 - before.1)
    }
}

#[test]
fn what_both_had_before_the_fork_survives_what_one_writes_after() {
    let mut client = Client::new(4, 4, Backing::Anon);
    client.touch(PARENT, Access::Write, 4);
    client.call(|pager, hw, cx| pager.fork(hw, cx, PARENT, CHILD));
    client.touch(PARENT, Access::Write, 4);
    assert_eq!(client.run_state.tally.get(COW_FAULTS), 4);
    client.touch(PARENT, Access::Write, 4);
    assert_eq!(client.run_state.tally.get(COW_FAULTS), 4);
    let (from_servers, zeros) = client.touch(CHILD, Access::Read, 4);
    assert_eq!((from_servers, zeros), (4, 0));
    client.call(|pager, hw, cx| pager.exit(hw, cx, PARENT));
    client.touch(CHILD, Access::Write, 4);
    assert_eq!(client.run_state.tally.get(COW_FAULTS), 4);
    client.call(|pager, hw, cx| pager.exit(hw, cx, CHILD));
    assert_eq!(client.pager.memory.resident_pages(), 0);
    assert_eq!(client.pager.memory.server_pages(), [(0, 64)]);
}

#[test]
fn shared_memory_is_one_for_all() {
    let mut client = Client::new(4, 8, Backing::Shared);
    client.call(|pager, hw, cx| pager.fork(hw, cx, PARENT, CHILD));
    client.touch(CHILD, Access::Write, 8);
    assert_eq!(client.touch(PARENT, Access::Read, 8), (8, 0));
    assert_eq!(client.run_state.tally.get(COW_FAULTS), 0);
}

#[test]
fn locked_pages_stay() {
    let mut client = Client::new(4, 8, Backing::Anon);
    for page in 0..3 {
        let bytes = 8 * PAGE - page * PAGE;
        let lock = |pager: &mut Pager, hw: &mut Flat, cx: &mut Cx<'_>| {
            pager.lock(hw, cx, PARENT, REGION, page * PAGE, bytes)
        };
        assert_eq!(client.call(lock), PAGE);
    }
    client.touch(PARENT, Access::Write, 8);
    assert_eq!(client.touch(PARENT, Access::Read, 3), (0, 0));
    assert_eq!(client.run_state.tally.get(LOCKED_BYTES), 3 * PAGE);
    client.call(|pager, hw, cx| Kernel::<Flat>::unlock(pager, hw, cx, PARENT, REGION));
    client.touch(PARENT, Access::Read, 8);
    assert!(client.touch(PARENT, Access::Read, 3).0 > 0);
}

#[test]
fn a_job_that_wants_less_in_memory_has_less() {
    let remote =
        |pages: u64| Backing::Remote { resident_bytes: pages * PAGE, serving: Serving::Thread };
    let resident = |pages: u64| {
        let mut client = Client::new(4, 8, remote(pages));
        client.touch(PARENT, Access::Write, 8);
        client.pager.memory.resident_pages()
    };
    assert_eq!([2, 4, 100].map(resident), [2, 4, 4], "and never more than the machine has");
}

#[test]
fn memory_that_is_not_needed_is_zeros_again() {
    let mut client = Client::new(4, 4, Backing::Anon);
    client.touch(PARENT, Access::Write, 4);
    client.call(|pager, hw, cx| pager.advise(hw, cx, PARENT, REGION, Advice::Dontneed));
    assert_eq!(client.pager.memory.resident_pages(), 0);
    assert_eq!(client.touch(PARENT, Access::Read, 4), (0, 4));
}

#[test]
fn the_search_for_servers_is_waited_for_once() {
    let mut client = Client::new(4, 8, Backing::Anon);
    client.touch(PARENT, Access::Write, 8);
    let [(Wait::Until(end), WallRow::Throttle)] = client.waits[..] else {
        panic!("{:?}", client.waits);
    };
    assert!((4_000_000_000..4_001_000_000).contains(&end));
}

#[test]
fn latencies_of_an_interval_are_its_own() {
    let mut client = Client::new(4, 4, Backing::Anon);
    client.touch(PARENT, Access::Write, 4);
    let mut sample = || {
        let mut values = Vec::new();
        client.pager.sample(&client.hw, &mut values);
        values
    };
    let values = sample();
    assert_eq!(
        values.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
        ["fault_latency_ns_min", "fault_latency_ns_mean"]
    );
    assert!(values[0].1 >= 30_000 && values[0].1 < values[1].1 && values[1].1 <= 70_000);
    assert!(sample().is_empty());
}

/// Runs mmap3 on the Alpha of the NMS report with all sizes a sixteenth: rates stay the same, times
/// shrink.
fn small_mmap3() -> Run {
    let text = include_str!("../../../../../../machines/alpha-nms.toml");
    let mut model = Model::parse("alpha-nms", text, |_| None).unwrap();
    model.set("paging", "resident_pages", 28_000 / 16).unwrap();
    model.set("network", "server_memory", 700 / 16).unwrap();
    let settings = Settings::load(&model).unwrap();
    let kernel = Pager::new(PagerModel::read(&model, settings.page).unwrap());
    let scheduler = crate::historic::sched::scheduler(&model).unwrap();
    model.finish().unwrap();
    let spec = MachineSpec {
        name: model.name.clone(),
        kind: MachineKind::Sim,
        validated_jobs: model.validated_jobs.clone(),
        memory: settings.memory,
        base_page: settings.page,
        page_sizes: vec![settings.page],
        cpus: settings.cpus,
        job_params: model.job_params.clone(),
    };
    let params = [("size", "75M"), ("random", "5000")].map(|(k, v)| (k.into(), v.into()));
    let job = Job::builtin("mmap3").unwrap();
    let plan = job.resolve(&params.into_iter().collect(), &spec, None).unwrap();
    assert!(Kernel::<Flat>::unmet_requirements(&kernel, &plan).is_empty());
    let mut recording = Recording::new(&plan, &spec);
    let hardware = Flat::new(settings.page);
    let parts = Parts { settings: &settings, caps: Caps::default(), hardware, kernel, scheduler };
    Engine::run(parts, &plan, &mut recording).unwrap();
    recording.finish()
}

#[test]
fn the_published_rates_come_out() {
    let run = small_mmap3();
    let seconds =
        |phase: usize| (run.phases[phase].end_ns - run.phases[phase].start_ns) as f64 / 1e9;
    let initialise = 4.0 + 1750.0 / 3700.0 + (9600.0 - 1750.0) / 1400.0;
    assert!((seconds(0) / initialise - 1.0).abs() < 0.02, "{}", seconds(0));
    let verify = 1750.0 / 1000.0 + (9600.0 - 1750.0) / 1800.0;
    assert!((seconds(1) / verify - 1.0).abs() < 0.02, "{}", seconds(1));
    let page_in = &run.latency["page_in"];
    assert!(page_in.min_ns.abs_diff(230_000) < 1_000 && page_in.mean_ns.abs_diff(300_000) < 15_000);
    let budget = run.budget.unwrap();
    assert_eq!(Account::ALL.map(|account| budget.unexplained_ns(account)), [0, 0]);
    assert_eq!(run.tables[0].title, "memory servers at the end");
}

#[test]
fn what_does_not_fit_is_refused_before_it_runs() {
    let text = include_str!("../../../../../../machines/alpha-nms.toml");
    let model = Model::parse("alpha-nms", text, |_| None).unwrap();
    let page = Settings::load(&model).unwrap().page;
    let pager = Pager::new(PagerModel::read(&model, page).unwrap());
    let job = |size: &str| {
        let text = format!(
            "name = \"big\"\n[[region]]\nname = \"r\"\nsize = \"{size}\"\n\
             [[phase]]\nname = \"p\"\nops = [{{ lock = \"r\" }}]"
        );
        let spec = MachineSpec {
            name: "alpha-nms".into(),
            kind: MachineKind::Sim,
            validated_jobs: Vec::new(),
            memory: Bytes(256 << 20),
            base_page: page,
            page_sizes: vec![page],
            cpus: 1,
            job_params: Default::default(),
        };
        Job::parse(&text, "big.toml").unwrap().resolve(&Default::default(), &spec, None).unwrap()
    };
    let fatal = |size: &str| {
        let unmet = Kernel::<Flat>::unmet_requirements(&pager, &job(size));
        unmet.iter().filter(|unmet| unmet.fatal).count()
    };
    assert_eq!((fatal("200M"), fatal("300M"), fatal("2G")), (0, 1, 2));
}
