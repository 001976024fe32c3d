//! Traces are read as they were written, also when they are cut anywhere or damaged.

use super::code::{Decoder, Encoder, Step};
use super::index::{BlockInfo, Index, Numbers, PageRun};
use super::*;
use crate::pages::{AccessKind, PageObserver, Thread};
use crate::places::Segment;
use crate::stream::MemoryUse;
use pagetax_core::replay::{Change, Recorded, ThreadTotals};
use proptest::prelude::*;

fn head() -> Head {
    Head {
        command: vec!["a".into(), "b c".into()],
        recorded_by: "test".into(),
        architecture: "x86_64".into(),
        dropped: DROPPED.into(),
        allocator: None,
    }
}

/// The events that an observer received, in order.
#[derive(Debug, Default, PartialEq, Clone)]
struct ObservedSteps {
    steps: Vec<(Thread, Step)>,
    found: Vec<(u32, u64, Segment)>,
    totals: ThreadTotals,
}

impl PageObserver for ObservedSteps {
    fn change(&mut self, thread: Thread, kind: AccessKind, page: u64) {
        self.steps.push((thread, Step::Change(kind, page)));
    }
    fn ran(&mut self, _: Thread, instructions: u64, accesses: u64) {
        self.totals.instruction_count += instructions;
        self.totals.access_count += accesses;
    }
    fn found(&mut self, process: u32, page: u64, segment: Segment) {
        self.found.push((process, page, segment));
    }
    fn gone(&mut self, thread: Thread, pages: std::ops::Range<u64>) {
        self.steps.push((thread, Step::Gone(pages)));
    }
    fn memory_use(&mut self, thread: Thread, how: MemoryUse, pages: std::ops::Range<u64>) {
        self.steps.push((thread, Step::MemoryUse(how, pages)));
    }
}

/// Reports the pages of two threads in two processes.
fn play(pages: &mut impl PageObserver, changes: u64) {
    let threads = [Thread { number: 0, process: 0 }, Thread { number: 1, process: 1 }];
    let kinds = [AccessKind::Load, AccessKind::DependentLoad, AccessKind::Store, AccessKind::Fetch];
    for n in 0..changes {
        let thread = threads[(n / 1000 % 2) as usize];
        let page = 0x7000_0000 + n * n % 5003 + (n % 3) * 1_000_000;
        if n < 50 {
            pages.found(thread.process, page, Segment::Anon);
        }
        pages.change(thread, kinds[(n % 4) as usize], page);
        if n % 7000 == 0 {
            pages.gone(thread, page..page + 5);
            for how in [MemoryUse::Read, MemoryUse::Written, MemoryUse::Dropped, MemoryUse::Zeros] {
                pages.memory_use(thread, how, page..page + 3);
            }
        }
        pages.ran(thread, 9, 4);
    }
}

fn write(path: &Path, changes: u64) -> ObservedSteps {
    let mut original = ObservedSteps::default();
    play(&mut original, changes);
    let mut writer = TraceWriter::create(path, &head()).unwrap();
    play(&mut writer, changes);
    let (bytes, totals) = writer.finish().unwrap();
    assert_eq!(bytes, path.metadata().unwrap().len());
    assert_eq!(totals.access_count, 4 * changes);
    original
}

fn read(trace: &Trace) -> ObservedSteps {
    let mut original = ObservedSteps::default();
    trace.replay(&mut original, |_| true).unwrap();
    original
}

/// Returns the steps of a thread: a trace keeps the order within a thread, not between threads.
fn of_thread(original: &ObservedSteps, number: u32) -> Vec<&Step> {
    original
        .steps
        .iter()
        .filter(|(thread, _)| thread.number == number)
        .map(|(_, step)| step)
        .collect()
}

#[test]
fn a_trace_tells_what_it_was_told() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ptt");
    let original = write(&path, 300_000);
    assert!(is_trace(&path));
    let trace = Trace::open(&path).unwrap();
    assert_eq!((&trace.head, trace.notes.len()), (&head(), 0));
    let again = read(&trace);
    assert!(trace.blocks() > 4);
    for thread in [0, 1] {
        assert!(of_thread(&original, thread) == of_thread(&again, thread), "thread {thread}");
    }
    assert_eq!(again.found, original.found);
    assert_eq!(trace.totals().instruction_count, original.totals.instruction_count);
    let bytes = path.metadata().unwrap().len();
    assert!(bytes < 5 * 300_000, "{bytes} bytes");
}

#[test]
fn wherever_it_is_cut_what_is_whole_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let (path, cut) = (folder.path().join("a.ptt"), folder.path().join("cut.ptt"));
    let original = write(&path, 200_000);
    let whole = std::fs::read(&path).unwrap();
    let mut blocks_before = usize::MAX;
    for part in (0..whole.len()).rev().step_by(whole.len() / 40) {
        std::fs::write(&cut, &whole[..part]).unwrap();
        match Trace::open(&cut) {
            Ok(trace) => {
                assert!(part == whole.len() || trace.notes[0].contains("cut or damaged"));
                assert!(trace.blocks() <= blocks_before);
                blocks_before = trace.blocks();
                let again = read(&trace);
                for thread in [0, 1] {
                    let (again, original) =
                        (of_thread(&again, thread), of_thread(&original, thread));
                    assert!(original.starts_with(&again), "cut at {part}, thread {thread}");
                }
            }
            Err(error) => {
                let text = error.to_string();
                assert!(part < 200 && text.contains("is no trace"), "{part}: {text}");
            }
        }
    }
    assert_eq!(blocks_before, 0, "the last cut leaves none");
}

#[test]
fn a_damaged_block_ends_its_thread_and_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ptt");
    write(&path, 300_000);
    let trace = Trace::open(&path).unwrap();
    let second = trace.index.blocks.iter().filter(|block| block.thread == 0).nth(1).unwrap();
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[second.offset as usize + 200] ^= 1;
    std::fs::write(&path, &bytes).unwrap();
    let trace = Trace::open(&path).unwrap();
    assert!(trace.notes.is_empty(), "the index is whole");
    let error = trace.replay(&mut ObservedSteps::default(), |_| true).unwrap_err();
    assert!(matches!(error, TraceError::Damaged(..)), "{error}");
    let replay = Replayable::new(trace).unwrap();
    assert!(replay.trace().notes[0].contains("damaged"), "{:?}", replay.trace().notes);
    assert!(replay.block(0, 0).is_some() && replay.block(0, 1).is_none());
    assert!(replay.block(1, 1).is_some());
}

#[test]
fn a_replay_keeps_neighbours_and_sizes() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ptt");
    let thread = Thread::default();
    let mut writer = TraceWriter::create(&path, &head()).unwrap();
    // Two adjacent pages in different pieces, and one page far below.
    for page in [0x7fff_fbff, 0x7fff_fc00, 0x400] {
        writer.found(0, page, Segment::Anon);
        writer.change(thread, AccessKind::Load, page);
        writer.change(thread, AccessKind::Fetch, page);
    }
    writer.ran(thread, 30, 12);
    writer.finish().unwrap();
    let replay = Replayable::new(Trace::open(&path).unwrap()).unwrap();
    assert_eq!(replay.bytes(), 3 * (4 << 20));
    let totals = replay.threads()[0];
    assert_eq!((totals.page_change_count, totals.access_count), (3, 12));
    assert_eq!(totals.fetch_change_count, 3);
    let changes = replay.block(0, 0).unwrap();
    let both = |offset| [false, true].map(|is_fetch| Change { offset, is_fetch });
    assert_eq!(changes, [(8 << 20) - 4096, 8 << 20, 0].map(both).concat());
}

#[test]
fn other_files_are_refused_with_a_word() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ptt");
    let refused = |bytes: &[u8]| {
        std::fs::write(&path, bytes).unwrap();
        Trace::open(&path).unwrap_err().to_string()
    };
    assert!(refused(b"").contains("does not begin with a trace's magic number"));
    assert!(refused(b"name = \"job\"\n").contains("does not begin with a trace's magic number"));
    assert!(refused(b"pttrace\n\x09\0\0\0").contains("version 9"));
    assert!(refused(b"pttrace\n\x01\0\0\0garbage").contains("head is damaged"));
    assert!(Trace::open(folder.path()).unwrap_err().to_string().contains("regular file"));
    assert!(!is_trace(folder.path()) && !is_trace(Path::new("/nonexistent")));
}

/// Writes a file of a head, these frames, and an index if there is one.
fn crafted(path: &Path, blocks: &[Vec<u8>], index: Option<&Index>) {
    let mut file = MAGIC.to_vec();
    file.extend(VERSION.to_le_bytes());
    file.extend(frame::pack(frame::HEAD, &serde_json::to_vec(&head()).unwrap()));
    blocks.iter().for_each(|block| file.extend(block));
    if let Some(index) = index {
        let offset = file.len() as u64;
        file.extend(frame::pack(frame::INDEX, &index.encode()));
        file.extend(offset.to_le_bytes());
        file.extend(super::read::TRAILER);
    }
    std::fs::write(path, file).unwrap();
}

/// An observer that fails the test if it receives more events than a short file can have.
#[derive(Default)]
struct Counted(u64);

impl PageObserver for Counted {
    fn change(&mut self, _: Thread, _: AccessKind, _: u64) {}
    fn ran(&mut self, _: Thread, _: u64, _: u64) {}
    fn found(&mut self, _: u32, _: u64, _: Segment) {
        self.0 += 1;
        assert!(self.0 < 10 << 20, "a file of some hundred bytes names no more");
    }
    fn gone(&mut self, _: Thread, _: std::ops::Range<u64>) {}
}

#[test]
fn a_short_file_names_few_pages() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.ptt");
    let all = PageRun { process: 0, first: 0, pages: 1 << 36, segment: Segment::Anon };
    let mut numbers = Numbers::default();
    numbers.put_info(&BlockInfo::default());
    numbers.put_runs(&[all]);
    let block = frame::pack(frame::BLOCK, &numbers.0);
    let replay = |trace: &Trace| trace.replay(&mut Counted::default(), |_| true);

    // An index, or a block without index, that names all of memory.
    crafted(&path, std::slice::from_ref(&block), None);
    let trace = Trace::open(&path).unwrap();
    assert_eq!((trace.blocks(), trace.notes.len()), (0, 1));
    let index = Index { blocks: vec![], found: vec![all] };
    crafted(&path, &[], Some(&index));
    let trace = Trace::open(&path).unwrap();
    assert!(trace.notes[0].contains("cut or damaged"));
    assert_eq!(Replayable::new(trace).unwrap().bytes(), 0);

    // An index that names a block which has no steps.
    crafted(&path, &[], None);
    let offset = path.metadata().unwrap().len();
    let info = BlockInfo { offset, ..BlockInfo::default() };
    crafted(
        &path,
        std::slice::from_ref(&block),
        Some(&Index { blocks: vec![info], found: vec![] }),
    );
    let trace = Trace::open(&path).unwrap();
    assert_eq!(trace.blocks(), 1);
    assert!(matches!(replay(&trace), Err(TraceError::Damaged(..))));

    // An index that names the same block many times.
    let blocks = vec![info; 100_000];
    crafted(&path, &[block], Some(&Index { blocks, found: vec![] }));
    assert!(Trace::open(&path).unwrap().notes[0].contains("cut or damaged"));
}

#[test]
fn a_frame_that_says_it_unpacks_to_a_gibibyte_is_damaged() {
    let mut packed = frame::pack(frame::BLOCK, &[0; 1000]);
    assert!(frame::unpack(&mut &packed[..]).unwrap().is_some());
    packed[4..8].copy_from_slice(&(1u32 << 30).to_le_bytes());
    assert!(frame::unpack(&mut &packed[..]).unwrap().is_none());
}

proptest! {
    #[test]
    fn steps_come_back(
        steps in proptest::collection::vec((0usize..4, prop_oneof![0u64..40, any::<u64>()]), 0..400),
    ) {
        let kinds = [AccessKind::Load, AccessKind::DependentLoad, AccessKind::Store, AccessKind::Fetch];
        let mut encoder = Encoder::default();
        // A page of all ones lies in no address space.
        let steps: Vec<_> = steps.iter().map(|(kind, page)| (kinds[*kind], page >> 12)).collect();
        steps.iter().for_each(|(kind, page)| encoder.change(*kind, *page));
        let bytes = encoder.take();
        let again: Vec<_> = Decoder::new(&bytes).collect();
        let steps: Vec<_> = steps.into_iter().map(|(kind, page)| Step::Change(kind, page)).collect();
        prop_assert_eq!(again, steps);
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(Decoder::new(&bytes).count() <= bytes.len());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.ptt");
        let mut file = MAGIC.to_vec();
        file.extend(VERSION.to_le_bytes());
        file.extend(frame::pack(frame::HEAD, &serde_json::to_vec(&head()).unwrap()));
        file.extend(frame::pack(frame::BLOCK, &bytes));
        std::fs::write(&path, &file).unwrap();
        let trace = Trace::open(&path).unwrap();
        // A damaged file must not name many pages.
        let _ = trace.replay(&mut ObservedSteps::default(), |_| true);
        let _ = Replayable::new(trace);
    }
}
