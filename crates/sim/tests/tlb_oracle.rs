//! Whole machines with TLBs against a reference that performs one access after the other. The
//! reference keeps page tables, TLBs and translation storage buffers as plain maps and lists, and
//! does nothing in runs.

use pagetax_core::access::{Offsets, Rng};
use pagetax_core::machine::Machine;
use pagetax_core::page_size::PageSizeRequest;
use pagetax_core::plan::*;
use pagetax_core::report::Recording;
use pagetax_sim::historic::machine::SimMachine;
use pagetax_sim::model::Model;
use pagetax_sim::models;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The counts that both must agree on in every phase.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Counts {
    accesses: u64,
    tlb_misses: u64,
    minor_faults: u64,
}

/// A TLB array: each set holds (shift, page), oldest first.
struct Array {
    sets: Vec<Vec<(u32, u64)>>,
    ways: usize,
    shifts: Vec<u32>,
    fallback: bool,
    /// The page-size shift that a programmable array holds now.
    programmed: Option<u32>,
}

impl Array {
    fn load(model: &Model, table: &str) -> Array {
        let optional =
            |key| if model.has(table, key) { model.count(table, key).unwrap() } else { 0 };
        let flag = |key| model.has(table, key) && model.flag(table, key).unwrap();
        let entries = model.count(table, "entries").unwrap();
        let ways = if model.has(table, "ways") { optional("ways") } else { entries };
        let sizes = model.text(table, "page_sizes").unwrap();
        let shifts: Vec<u32> = sizes.split(' ').map(shift_of).collect();
        Array {
            sets: vec![Vec::new(); (entries / ways) as usize],
            ways: (ways - optional("locked")) as usize,
            programmed: flag("programmable").then_some(shifts[0]),
            fallback: flag("fallback"),
            shifts,
        }
    }

    fn holds(&self, shift: u32) -> bool {
        self.programmed.map_or(self.shifts.contains(&shift), |held| held == shift)
    }

    fn probe(&mut self, shift: u32, page: u64) -> bool {
        let place = page as usize % self.sets.len();
        let set = &mut self.sets[place];
        let found = set.iter().position(|entry| *entry == (shift, page));
        if let Some(at) = found {
            let entry = set.remove(at);
            set.push(entry);
        }
        found.is_some()
    }

    fn fill(&mut self, shift: u32, page: u64) {
        let place = page as usize % self.sets.len();
        let set = &mut self.sets[place];
        if set.len() == self.ways {
            set.remove(0);
        }
        set.push((shift, page));
    }
}

fn shift_of(size: &str) -> u32 {
    size.parse::<pagetax_core::units::PageSize>().unwrap().shift()
}

struct Level {
    arrays: Vec<Array>,
    rng: Rng,
}

impl Level {
    fn all(model: &Model) -> Vec<Level> {
        let arrays = |level: u32| {
            let names = ('a'..'i').map(|array| format!("dtlb_{level}{array}"));
            let names = names.filter(|name| model.has_table(name));
            names.map(|name| Array::load(model, &name)).collect::<Vec<_>>()
        };
        let levels = (1..=4).map(arrays).filter(|arrays| !arrays.is_empty());
        levels.map(|arrays| Level { rng: Rng::new(arrays.len() as u64), arrays }).collect()
    }

    fn touch(&mut self, shift: u32, page: u64) -> bool {
        let first = |array: &&usize| !self.arrays[**array].fallback;
        let holders: Vec<usize> =
            (0..self.arrays.len()).filter(|array| self.arrays[*array].holds(shift)).collect();
        let mut asked: Vec<usize> = holders.iter().filter(first).copied().collect();
        if asked.is_empty() {
            asked = holders;
        }
        if asked.iter().any(|array| self.arrays[*array].probe(shift, page)) {
            return true;
        }
        let chosen = match asked.len() {
            0 => return false,
            1 => asked[0],
            count => asked[self.rng.below(count as u64) as usize],
        };
        self.arrays[chosen].fill(shift, page);
        false
    }

    /// Programs all programmable arrays except the first for a size, if they can hold it.
    fn program(&mut self, large: u32) {
        for array in self.arrays.iter_mut().filter(|array| array.programmed.is_some()).skip(1) {
            if array.shifts.contains(&large) && array.programmed != Some(large) {
                array.programmed = Some(large);
                array.sets.iter_mut().for_each(Vec::clear);
            }
        }
    }
}

/// A region's addresses, and the shift of the page size that it wants.
#[derive(Debug, Clone, Copy)]
struct OracleArea {
    base: u64,
    end: u64,
    wanted: u32,
}

struct Slow {
    levels: Vec<Level>,
    areas: Vec<OracleArea>,
    /// Log2 of the page size, by address.
    pages: BTreeMap<u64, u32>,
    base_shift: u32,
    /// The number of large pages from which a process gets a TLB of their size. None on machines
    /// without the rule.
    large_pages_min: Option<u64>,
    counts: Counts,
}

impl Slow {
    fn new(model: &Model, plan: &Plan) -> Slow {
        let base_shift = model.page_size("machine", "page").unwrap().shift();
        let is_solaris = model.kernel == "solaris";
        let mut end = if is_solaris { 0xff00_0000 } else { 1 << 32 };
        let area = |region: &Region| {
            let wanted = match region.page_size {
                PageSizeRequest::Size(size, _) => size.shift(),
                _ => base_shift,
            };
            let up = |bytes: u64, shift: u32| bytes.next_multiple_of(1 << shift);
            if !is_solaris {
                let base = up(end, 21);
                end = base + up(region.bytes, base_shift);
                return OracleArea { base, end, wanted };
            }
            if region.name == "heap" {
                return OracleArea {
                    base: 0x2_2000,
                    end: up(0x2_2000 + region.bytes, wanted),
                    wanted,
                };
            }
            let top = end;
            end = (end - up(region.bytes, wanted)) >> wanted << wanted;
            OracleArea { base: end, end: (end + up(region.bytes, wanted)).min(top), wanted }
        };
        let large = |key| model.count("tlb", key).unwrap();
        Slow {
            levels: Level::all(model),
            areas: plan.regions.iter().map(area).collect(),
            pages: BTreeMap::new(),
            base_shift,
            large_pages_min: is_solaris.then(|| large("large_pages_min")),
            counts: Counts::default(),
        }
    }

    fn page(&self, address: u64) -> Option<(u64, u32)> {
        let (start, shift) = self.pages.range(..=address).next_back()?;
        (address < start + (1 << shift)).then_some((*start, *shift))
    }

    /// Maps the wanted page if all of it is inside the area, otherwise a base page.
    fn fault(&mut self, area: OracleArea, address: u64) {
        self.counts.minor_faults += 1;
        let start = address >> area.wanted << area.wanted;
        let inside = start >= area.base && start + (1 << area.wanted) <= area.end;
        let shift = if inside { area.wanted } else { self.base_shift };
        self.pages.insert(address >> shift << shift, shift);
        let Some(min) = self.large_pages_min else { return };
        let mut large: BTreeMap<u32, u64> = BTreeMap::new();
        for shift in self.pages.values().filter(|shift| **shift > self.base_shift) {
            *large.entry(*shift).or_default() += 1;
        }
        let enough = large.into_iter().filter(|(_, count)| *count >= min);
        if let Some((shift, _)) = enough.max_by_key(|(shift, count)| (*count, *shift)) {
            self.levels.iter_mut().for_each(|level| level.program(shift));
        }
    }

    fn access(&mut self, area: OracleArea, address: u64) {
        if self.page(address).is_none() {
            self.fault(area, address);
        }
        let (start, shift) = self.page(address).expect("it has just been mapped");
        self.counts.accesses += 1;
        let hit = self.levels.iter_mut().any(|level| level.touch(shift, start >> shift));
        self.counts.tlb_misses += u64::from(!hit);
    }

    fn phase(&mut self, plan: &Plan, phase: &Phase) -> Counts {
        let before = self.counts;
        for repeat in 0..phase.repeat {
            for op in &phase.ops {
                let Op::Touch(touch) = op else { panic!("touches only") };
                let (area, bytes) = (self.areas[touch.region.0], plan.region(touch.region).bytes);
                for run in touch.runs(bytes) {
                    for nth in 0..run.count {
                        self.access(area, area.base + run.first + nth * run.stride);
                    }
                }
                if let Some(mut random) = touch.random(bytes, 0, repeat) {
                    for _ in 0..touch.count {
                        self.access(area, area.base + random.next_offset());
                    }
                }
            }
        }
        Counts {
            accesses: self.counts.accesses - before.accesses,
            tlb_misses: self.counts.tlb_misses - before.tlb_misses,
            minor_faults: self.counts.minor_faults - before.minor_faults,
        }
    }
}

/// A phase in numbers: region, pattern, stride, accesses, repeats, stores.
type Drawn = (usize, u8, u64, u64, u64, bool);

fn plan(regions: &[(u64, Option<&str>)], phases: &[Drawn]) -> Plan {
    let region = |(index, (bytes, page)): (usize, &(u64, Option<&str>))| Region {
        name: if index == 0 { "heap".into() } else { format!("mapping {index}") },
        backing: Backing::Anon,
        bytes: *bytes,
        page_size: page.map_or(PageSizeRequest::Default, |size| size.parse().unwrap()),
        advice: Vec::new(),
        mapped_at_start: true,
        place: None,
    };
    let regions: Vec<Region> = regions.iter().enumerate().map(region).collect();
    let phase = |(index, drawn): (usize, &Drawn)| {
        let (which, pattern, stride_bytes, count, repeat, writes) = *drawn;
        let pattern = match pattern {
            0 => Pattern::Uniform,
            1 => Pattern::PointerChase,
            2 => Pattern::Zipf { theta: 0.9 },
            _ => Pattern::Strided { stride_bytes: stride_bytes.next_multiple_of(8) },
        };
        let can_write = pattern != Pattern::PointerChase;
        let access = if writes && can_write { Access::Write } else { Access::Read };
        let region = RegionId(which % regions.len());
        let touch = Touch { region, access, pattern, count, grain_bytes: 8, seed: index as u64 };
        Phase {
            name: format!("phase {index}"),
            client_kind: ClientKind::Main,
            clients: 1,
            repeat,
            time: None,
            rate: None,
            parent_wake: None,
            ops: vec![Op::Touch(touch)],
        }
    };
    Plan {
        job: JobIdentity {
            name: "small".into(),
            params: Default::default(),
            machine_params: Default::default(),
            seed: 1,
        },
        phases: phases.iter().enumerate().map(phase).collect(),
        regions,
        measure: Measure { interval: None, fault_latency: false },
        native: Native::default(),
    }
}

/// Runs both and compares each phase. Returns the TLB misses, which show that the run was not
/// trivial.
fn compare(machine: &str, plan: &Plan) -> u64 {
    let model = models::find(machine).unwrap();
    let mut slow = Slow::new(&model, plan);
    let fast = SimMachine::new(model).unwrap();
    let mut recording = Recording::new(plan, &fast.spec());
    fast.run(plan, &mut recording).unwrap();
    let report = recording.finish();
    assert_eq!(report.phases.len(), plan.phases.len());
    for (phase, ran) in plan.phases.iter().zip(&report.phases) {
        let count = |id: &str| ran.counters[id].value.unwrap();
        let fast = Counts {
            accesses: count("access_count"),
            tlb_misses: count("tlb_miss_count"),
            minor_faults: count("minor_fault_count"),
        };
        assert_eq!(fast, slow.phase(plan, phase), "{machine}, {}: {plan:?}", phase.name);
    }
    slow.counts.tlb_misses
}

const ULTRASPARCS: [&str; 3] = ["ultrasparc-2-450", "ultrasparc-3-750", "ultrasparc-3plus-900"];

#[test]
fn large_pages_program_a_tlb_in_the_middle_of_a_sweep() {
    let regions = [(128 << 20, Some("4M")), (3 << 20, Some("64K")), (2 << 20, None)];
    let phases = [
        (0, 9, 65536, 2048, 2, true),
        (1, 9, 4096, 700, 3, true),
        (0, 0, 0, 4000, 1, false),
        (2, 1, 0, 3000, 2, true),
    ];
    let plan = plan(&regions, &phases);
    let misses = ULTRASPARCS.map(|machine| compare(machine, &plan));
    assert!(misses[1] > misses[2] && misses[2] > 500, "{misses:?}");
}

#[test]
fn huge_pages_beside_base_pages() {
    let regions = [(20 << 20, Some("2M")), (12 << 20, None)];
    let phases = [
        (1, 9, 1000, 20_000, 2, true),
        (0, 0, 0, 5000, 2, true),
        (1, 0, 0, 5000, 1, false),
        (1, 2, 0, 5000, 1, false),
    ];
    assert!(compare("x86-64-calibrated", &plan(&regions, &phases)) > 3000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn runs_count_what_single_accesses_count(
        machine in 0usize..4,
        regions in proptest::collection::vec((1u64..40 << 20, 0usize..3), 1..4),
        phases in proptest::collection::vec(
            (0usize..3, 0u8..8, 1u64..30_000, 1u64..3000, 1u64..4, any::<bool>()),
            1..5,
        ),
    ) {
        let (machine, sizes) = match machine {
            3 => ("x86-64-calibrated", [None, Some("2M"), Some("2M")]),
            sparc => (ULTRASPARCS[sparc], [None, Some("64K"), Some("4M")]),
        };
        let regions: Vec<_> =
            regions.iter().map(|(bytes, size)| (bytes.next_multiple_of(8), sizes[*size])).collect();
        compare(machine, &plan(&regions, &phases));
    }
}
