//! The regions of a plan as real memory: made, mapped, advised, locked and unmapped.
//!
//! Invariant: backing files have no name once they are made (O_TMPFILE, or unlinked at once). So nothing
//! stays behind however the process ends.

use super::call_times::{CallTimes, TimedCall};
use super::network::Network;
use super::pace::{Halt, Pace};
use super::touch::{ClientRepeat, lay_links, touch};
use crate::pages::base_page;
use crate::sys::mapping::{OwnedMapping, Request, Source};
use crate::sys::place::AddressPlace;
use pagetax_core::access::pattern_word;
use pagetax_core::page_size::{How, PageSizeRequest};
use pagetax_core::plan::{Advice, Backing, Op, Pattern, Plan, Region, RegionId, Touch};
use rustix::fs::{Advice as FileAdvice, MemfdFlags, fadvise, memfd_create};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// All regions of a plan. Clones share the mappings, as threads do; the last clone to drop one unmaps
/// it.
#[derive(Clone)]
pub struct Memory {
    regions: Vec<Held>,
    locked_bytes: u64,
    locked_bytes_max: u64,
    call_times: CallTimes,
}

/// A region and its file, pager and mapping, as far as they exist.
#[derive(Clone)]
struct Held {
    region: Region,
    pattern_seed: u64,
    writable: bool,
    file: Option<Arc<File>>,
    /// The mapping of network memory, which its pager serves from the set-up on.
    paged: Option<Arc<OwnedMapping>>,
    mapping: Option<Arc<OwnedMapping>>,
    /// The address range that it shares with other regions.
    place: Option<Arc<AddressPlace>>,
    /// The seed and grain of the chase whose links the region holds.
    links: Option<(u64, u64)>,
    locked: bool,
}

impl Memory {
    /// Makes the backing files and starts the pagers of network memory; maps nothing else yet. The
    /// pagers' threads start here so that no measurement of the job includes them. Errors name the
    /// region.
    pub fn make(
        plan: &Plan,
        mut network: Option<&mut Network>,
        goes_on: &dyn Fn() -> bool,
    ) -> Result<Memory, (RegionId, io::Error)> {
        let mut regions: Vec<Held> = Vec::with_capacity(plan.regions.len());
        for (index, region) in plan.regions.iter().enumerate() {
            let id = RegionId(index);
            let pattern_seed = plan.pattern_seed(id);
            let filled = plan.is_file_filled(id);
            let file = make_file(region, pattern_seed, filled, goes_on).map_err(|e| (id, e))?;
            let paged = network.as_mut().map(|network| network.map(region)).transpose();
            let paged = paged.map_err(|e| (id, e))?.flatten();
            let place = match region.place {
                Some(first) if first.0 < index => regions[first.0].place.clone(),
                Some(_) => Some(Arc::new(reserve(region).map_err(|e| (id, e))?)),
                None => None,
            };
            regions.push(Held {
                region: region.clone(),
                pattern_seed,
                writable: plan.is_written(id),
                file: file.map(Arc::new),
                paged: paged.map(|pager| Arc::new(OwnedMapping::of_pager(pager))),
                mapping: None,
                place,
                links: None,
                locked: false,
            });
        }
        let call_times = CallTimes::default();
        Ok(Memory { regions, locked_bytes: 0, locked_bytes_max: 0, call_times })
    }

    /// Maps the regions that are mapped at the start.
    pub fn map_first(&mut self) -> Result<(), (RegionId, io::Error)> {
        for index in 0..self.regions.len() {
            if self.regions[index].region.mapped_at_start {
                self.map(RegionId(index)).map_err(|e| (RegionId(index), e))?;
            }
        }
        Ok(())
    }

    /// Returns the mapping of a region; `None` while it is not mapped.
    pub fn mapping(&self, id: RegionId) -> Option<&OwnedMapping> {
        self.regions[id.0].mapping.as_deref()
    }

    /// Returns the most bytes that this clone had locked at once.
    pub fn locked_bytes_max(&self) -> u64 {
        self.locked_bytes_max
    }

    /// Returns the times of calls so far, which clones share.
    pub fn call_times(&self) -> CallTimes {
        self.call_times.clone()
    }

    /// Applies an operation to memory.
    pub fn apply(&mut self, op: &Op, turn: ClientRepeat, pace: &mut Pace<'_>) -> Result<(), Halt> {
        match op {
            Op::Map(id) => self.map(*id)?,
            Op::Unmap(id) => self.unmap(*id),
            Op::Lock { region, chunk_bytes } => self.lock(*region, *chunk_bytes, pace)?,
            Op::Unlock(id) => self.unlock(*id)?,
            Op::Advise { region, advice } => self.advise(*region, *advice)?,
            Op::Touch(t) => return self.touch(t, turn, pace),
            // `guard` refuses replays before anything runs.
            Op::Replay(_) | Op::Sleep(_) | Op::Barrier => {}
        }
        Ok(())
    }

    fn map(&mut self, id: RegionId) -> io::Result<()> {
        let held = &mut self.regions[id.0];
        if held.paged.is_some() {
            held.mapping = held.paged.clone();
            return Ok(());
        }
        let request = request(&held.region, held.file.as_deref(), held.writable);
        let mapping = match &held.place {
            Some(place) => OwnedMapping::new_in(request, place)?,
            None => OwnedMapping::new(request)?,
        };
        if let Some(advice) = page_size_advice(held.region.page_size) {
            // Kernels without THP refuse this; the preflight check has warned.
            let _ = mapping.advise(advice);
        }
        for advice in &held.region.advice {
            mapping.advise(madv(*advice))?;
        }
        held.mapping = Some(Arc::new(mapping));
        held.links = None;
        Ok(())
    }

    fn unmap(&mut self, id: RegionId) {
        self.note_unlocked(id);
        let held = &mut self.regions[id.0];
        (held.mapping, held.links) = (None, None);
    }

    fn note_unlocked(&mut self, id: RegionId) {
        let held = &mut self.regions[id.0];
        if std::mem::take(&mut held.locked) {
            self.locked_bytes -= held.mapping.as_ref().map_or(0, |m| m.len() as u64);
        }
    }

    fn lock(&mut self, id: RegionId, chunk: u64, pace: &Pace<'_>) -> Result<(), Halt> {
        self.note_unlocked(id);
        let mapping = mapped(&self.regions[id.0])?.clone();
        let mut locked = 0;
        while locked < mapping.len() {
            let chunk = (chunk.max(1) as usize).min(mapping.len() - locked);
            self.call_times.time(TimedCall::Lock, || mapping.lock(locked, chunk))?;
            locked += chunk;
            pace.between_operations()?;
        }
        self.regions[id.0].locked = true;
        self.locked_bytes += locked as u64;
        self.locked_bytes_max = self.locked_bytes_max.max(self.locked_bytes);
        Ok(())
    }

    fn unlock(&mut self, id: RegionId) -> io::Result<()> {
        mapped(&self.regions[id.0])?.unlock()?;
        self.note_unlocked(id);
        Ok(())
    }

    fn advise(&mut self, id: RegionId, advice: Advice) -> io::Result<()> {
        let held = &mut self.regions[id.0];
        if matches!(advice, Advice::Dontneed | Advice::Free) {
            held.links = None;
        }
        let mapping = mapped(held)?;
        self.call_times.time(TimedCall::Advise, || mapping.advise(madv(advice)))
    }

    fn touch(&mut self, t: &Touch, turn: ClientRepeat, pace: &mut Pace<'_>) -> Result<(), Halt> {
        self.lay_links_for(t)?;
        let held = &mut self.regions[t.region.0];
        if t.access.writes() {
            held.links = None;
        }
        let held = &*held;
        touch(t, held.region.bytes, mapped(held)?, held.pattern_seed, turn, pace)
    }

    /// Writes the links of a chase, unless the region already holds them.
    pub fn lay_links_for(&mut self, t: &Touch) -> io::Result<()> {
        let held = &mut self.regions[t.region.0];
        let links = Some((t.seed, t.grain_bytes));
        if t.pattern == Pattern::PointerChase && held.links != links {
            lay_links(t, held.region.bytes, mapped(held)?);
            held.links = links;
        }
        Ok(())
    }

    /// Flips the lowest bit of a byte of the first region, so that tests can provoke a mismatch.
    pub fn flip_byte(&self, offset: u64) {
        if let Some(mapping) = self.regions.first().and_then(|held| held.mapping.as_ref()) {
            mapping.store(offset, mapping.load(offset) ^ 1 << (offset % 8 * 8));
        }
    }
}

fn mapped(held: &Held) -> io::Result<&Arc<OwnedMapping>> {
    held.mapping.as_ref().ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))
}

/// Returns the directory for files whose job names none. It avoids /tmp, which is often a tmpfs.
pub fn file_directory(directory: Option<&str>) -> PathBuf {
    match directory {
        Some(directory) => directory.into(),
        None if Path::new("/var/tmp").is_dir() => "/var/tmp".into(),
        None => std::env::temp_dir(),
    }
}

/// Makes the file behind a region, if it has one.
fn make_file(
    region: &Region,
    pattern_seed: u64,
    filled: bool,
    goes_on: &dyn Fn() -> bool,
) -> io::Result<Option<File>> {
    let len = mapping_len(region);
    match &region.backing {
        Backing::File { directory, .. } => {
            let file = tempfile::tempfile_in(file_directory(directory.as_deref()))?;
            file.set_len(len)?;
            if filled {
                fill(&file, pattern_seed, len, goes_on)?;
            }
            Ok(Some(file))
        }
        // Shared memory that is mapped later must be the same for every client that maps it.
        Backing::Memfd => memfd(region, len).map(Some),
        Backing::Shared if !region.mapped_at_start => memfd(region, len).map(Some),
        Backing::Shared | Backing::Anon | Backing::Remote { .. } => Ok(None),
    }
}

fn memfd(region: &Region, len: u64) -> io::Result<File> {
    let flags = match region.page_size {
        PageSizeRequest::Size(size, How::Hugetlb) => {
            let size = size.shift() << libc::MAP_HUGE_SHIFT;
            MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(size)
        }
        _ => MemfdFlags::empty(),
    };
    let file = File::from(memfd_create("pagetax", flags | MemfdFlags::CLOEXEC)?);
    file.set_len(len)?;
    Ok(file)
}

/// Writes the pattern to storage and drops it from the page cache, so that reads go to the device.
fn fill(file: &File, seed: u64, len: u64, goes_on: &dyn Fn() -> bool) -> io::Result<()> {
    const BLOCK: u64 = 1 << 20;
    let mut writer = BufWriter::with_capacity(BLOCK as usize, file);
    for offset in (0..len).step_by(8) {
        if offset % BLOCK == 0 && !goes_on() {
            return Err(io::ErrorKind::Interrupted.into());
        }
        writer.write_all(&pattern_word(seed, offset).to_ne_bytes())?;
    }
    writer.flush()?;
    file.sync_data()?;
    Ok(fadvise(file, 0, None, FileAdvice::DontNeed)?)
}

/// Returns the length of a region's mapping in bytes: whole pages of the size it must have.
pub fn mapping_len(region: &Region) -> u64 {
    let page = match region.page_size {
        PageSizeRequest::Size(size, How::Hugetlb) => size.bytes(),
        _ => rustix::param::page_size() as u64,
    };
    region.bytes.max(1).next_multiple_of(page)
}

fn request<'a>(region: &Region, file: Option<&'a File>, writable: bool) -> Request<'a> {
    let base = rustix::param::page_size();
    let (align, hugetlb) = match region.page_size {
        PageSizeRequest::Size(size, How::Hugetlb) => {
            (size.bytes() as usize, Some(size.bytes() as usize))
        }
        PageSizeRequest::Size(size, _) => (size.bytes() as usize, None),
        PageSizeRequest::Default | PageSizeRequest::Base => (base, None),
    };
    let source = match (&region.backing, file) {
        (Backing::File { private, .. }, Some(file)) => {
            Source::File { file, private: *private, writable }
        }
        (_, Some(file)) => Source::File { file, private: false, writable },
        (Backing::Shared, None) => Source::Shared,
        (_, None) => Source::Anon,
    };
    Request { source, len: mapping_len(region) as usize, align, hugetlb }
}

/// Reserves the addresses of a region and of those that follow it there.
fn reserve(region: &Region) -> io::Result<AddressPlace> {
    AddressPlace::reserve(mapping_len(region) as usize, request(region, None, false).align)
}

/// Returns the madvise(2) advice that requests the region's page size.
fn page_size_advice(request: PageSizeRequest) -> Option<i32> {
    match request {
        PageSizeRequest::Base => Some(libc::MADV_NOHUGEPAGE),
        PageSizeRequest::Default | PageSizeRequest::Size(_, How::Hugetlb) => None,
        PageSizeRequest::Size(size, _) if size > base_page() => Some(libc::MADV_HUGEPAGE),
        PageSizeRequest::Size(..) => Some(libc::MADV_NOHUGEPAGE),
    }
}

fn madv(advice: Advice) -> i32 {
    match advice {
        Advice::Normal => libc::MADV_NORMAL,
        Advice::Random => libc::MADV_RANDOM,
        Advice::Sequential => libc::MADV_SEQUENTIAL,
        Advice::Willneed => libc::MADV_WILLNEED,
        Advice::Dontneed => libc::MADV_DONTNEED,
        Advice::Free => libc::MADV_FREE,
        Advice::Cold => libc::MADV_COLD,
        Advice::Pageout => libc::MADV_PAGEOUT,
        Advice::Hugepage => libc::MADV_HUGEPAGE,
        Advice::Nohugepage => libc::MADV_NOHUGEPAGE,
        Advice::Collapse => libc::MADV_COLLAPSE,
        Advice::PopulateRead => libc::MADV_POPULATE_READ,
        Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
    }
}
