//! The simulation equals an oracle: the same program runs under all engines, and under Valgrind's lackey,
//! which lists every access for the oracle.
//!
//! The oracle is a list of pages for each set. It has no filter, no runs and no packed orders.

mod common;

use common::{compile, has_programs, has_sampler, record_part};
use object::{Object, ObjectSymbol};
use pagetax_core::page_size::MemoryPart::{Anon, Data, Heap, Stack, Text};
use pagetax_core::page_size::{PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use pagetax_recorder::config::{MachineConfig, PagePolicy};
use pagetax_recorder::engine::EngineKind;
use pagetax_recorder::simulate::Simulation;
use pagetax_sim::models;
use std::collections::VecDeque;
use std::path::Path;
use std::process::Command;

/// One array of true LRU sets.
struct Array {
    sets: Vec<VecDeque<u64>>,
    ways: usize,
}

impl Array {
    fn new(entries: usize, ways: usize) -> Array {
        Array { sets: vec![VecDeque::new(); entries / ways], ways }
    }

    /// Looks a page up and fills its set; true if it was a hit.
    fn hit(&mut self, page: u64, tag: u64) -> bool {
        let index = page as usize % self.sets.len();
        let set = &mut self.sets[index];
        let found = set.iter().position(|known| *known == tag);
        if let Some(at) = found {
            set.remove(at);
        }
        set.push_front(tag);
        set.truncate(self.ways);
        found.is_some()
    }
}

/// The TLBs of sim:x86-64-calibrated for one page size.
struct Oracle {
    shift: u32,
    first: Array,
    second: Array,
    code: Array,
    /// Data accesses that missed the first level only, and those that missed both.
    missed: [u64; 2],
    code_walks: u64,
    instructions: u64,
    accesses: u64,
}

impl Oracle {
    fn new(shift: u32) -> Oracle {
        let first = if shift == 12 { Array::new(64, 4) } else { Array::new(32, 4) };
        Oracle {
            shift,
            first,
            second: Array::new(2048, 16),
            code: Array::new(256, 8),
            missed: [0; 2],
            code_walks: 0,
            instructions: 0,
            accesses: 0,
        }
    }

    fn pages(address: u64, size: u64, shift: u32) -> impl Iterator<Item = u64> {
        let (first, last) = (address >> shift, (address + size - 1) >> shift);
        [first].into_iter().chain((last != first).then_some(last))
    }

    fn data(&mut self, address: u64, size: u64) {
        self.accesses += 1;
        for page in Oracle::pages(address, size, self.shift) {
            if !self.first.hit(page, page) {
                self.missed[usize::from(!self.second.hit(page, page))] += 1;
            }
        }
    }

    fn fetch(&mut self, address: u64, size: u64) {
        self.instructions += 1;
        for page in Oracle::pages(address, size, 12) {
            self.code_walks += u64::from(!self.code.hit(page, page));
        }
    }

    /// Simulates a line of `valgrind --tool=lackey --trace-mem=yes`.
    fn line(&mut self, line: &str) {
        let Some((kind, place)) = line.trim_start().split_once(' ') else { return };
        let Some((address, size)) = place.trim().split_once(',') else { return };
        let (Ok(address), Ok(size)) = (u64::from_str_radix(address, 16), size.parse()) else {
            return;
        };
        match kind {
            "I" => self.fetch(address, size),
            "L" | "S" => self.data(address, size),
            "M" => {
                self.data(address, size);
                self.data(address, size);
            }
            _ => {}
        }
    }
}

/// Runs a program under lackey and simulates its list, or the part between two instructions.
fn lackey(program: &Path, part: Option<[u64; 2]>) -> [Oracle; 2] {
    let log = tempfile::NamedTempFile::new().unwrap();
    let status = Command::new("valgrind")
        .args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no", "-q"])
        .arg(format!("--log-file={}", log.path().display()))
        .arg(program)
        .status()
        .unwrap();
    assert_eq!(status.code(), Some(42), "the program's own status");
    let text = std::fs::read_to_string(log.path()).unwrap();
    [12, 21].map(|shift| {
        let mut oracle = Oracle::new(shift);
        part_of(&text, part).for_each(|line| oracle.line(line));
        assert!(oracle.accesses > 100_000, "lackey saw little:\n{}", &text[..text.len().min(500)]);
        oracle
    })
}

fn part_of(text: &str, part: Option<[u64; 2]>) -> impl Iterator<Item = &str> {
    let is_at = |line: &str, at: u64| line.starts_with(&format!("I  {at:08x},"));
    let line_of = |at: u64| text.lines().position(|line| is_at(line, at));
    let bounds =
        part.map(|part| part.map(|at| line_of(at).expect("an instruction of the program")));
    let [first, last] = bounds.unwrap_or([0, usize::MAX - 1]);
    text.lines().take(last + 1).skip(first)
}

/// Returns the address of a symbol.
fn address_of(program: &Path, name: &str) -> u64 {
    let bytes = std::fs::read(program).unwrap();
    let file = object::File::parse(&*bytes).unwrap();
    file.symbol_by_name(name).unwrap().address()
}

fn simulated(engine: EngineKind, program: &Path) -> Simulation {
    let model = models::find("x86-64-calibrated").unwrap();
    let all =
        |size| PartSizes::of(&[Heap, Stack, Anon, Text, Data], PageSizeRequest::preferred(size));
    let configs = [PageSize::K4, PageSize::M2]
        .map(|size| MachineConfig::new(&model, PagePolicy::Sizes(all(size))).unwrap());
    let mut simulation = Simulation::new(configs.into());
    let filters = simulation.filters();
    let is_a_burst = engine == EngineKind::Native;
    let ended = record_part(engine, program, &mut simulation, filters, is_a_burst);
    assert_eq!(ended.exit.shell_code(), 42, "{}", ended.log);
    simulation
}

fn compare(engine: EngineKind, exact_counts: bool) {
    if !has_programs(&["cc", "valgrind"])
        || (engine == EngineKind::Qemu && !has_programs(&["qemu-x86_64"]))
    {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program =
        compile("oracle.c", &["-O1", "-static", "-nostdlib", "-fno-pie", "-no-pie"], folder.path());
    let loaded_twice = exact_counts.then_some(0);
    agree(engine, loaded_twice, &lackey(&program, None), &simulated(engine, &program));
}

/// Compares a simulation with the oracle. Instructions and accesses must be equal, but for `exact_but` loads
/// that only Valgrind makes.
fn agree(
    engine: EngineKind,
    exact_but: Option<u64>,
    oracles: &[Oracle; 2],
    simulation: &Simulation,
) {
    let [thread] = simulation.threads() else { panic!("{} threads", simulation.threads().len()) };
    if let Some(more) = exact_but {
        let counted = (thread.instruction_count, thread.access_count + more);
        assert_eq!(counted, (oracles[0].instructions, oracles[0].accesses));
    }
    for (oracle, cpu) in oracles.iter().zip(&thread.cpus) {
        let size = PageSize::new(1 << oracle.shift).unwrap();
        let counts = cpu.translation.data().counts(size);
        assert_eq!(counts[1..], oracle.missed, "data, {size}, {engine}");
        let walks = cpu.translation.instructions().walks(PageSize::K4);
        assert_eq!(walks, oracle.code_walks, "code, {engine}");
        assert!(oracle.missed.iter().all(|count| *count > 0), "{size}: too easy a program");
        assert!(oracle.code_walks > 0);
    }
}

#[test]
fn valgrind_counts_as_the_oracle_does() {
    compare(EngineKind::Valgrind, true);
}

#[test]
fn qemu_counts_as_the_oracle_does() {
    compare(EngineKind::Qemu, false);
}

/// Records one burst between two instructions.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_native_burst_counts_as_the_oracle_does() {
    if !has_programs(&["cc", "valgrind"]) || !has_sampler() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let program =
        compile("oracle.c", &["-O1", "-fno-pie", "-no-pie", "-DIN_A_BURST"], folder.path());
    let part = ["burst_begins", "burst_ends"].map(|name| address_of(&program, name));
    // SAFETY: no other test of this file reads this variable, and no library of ours does.
    unsafe { std::env::set_var("PAGETAX_SAMPLER_STRESS", BURSTS_ON_REQUEST) };
    let simulation = simulated(EngineKind::Native, &program);
    // Valgrind loads the operand of a locked exchange twice.
    let locked = (0..6000).filter(|i| i % 64 == 0).count() as u64;
    agree(EngineKind::Native, Some(locked), &lackey(&program, Some(part)), &simulation);
}

/// The longest interval between bursts and the longest burst: none begins by itself.
const BURSTS_ON_REQUEST: &str = "1000000000000000000:1000000000000000000";
