//! Code and data of files on huge pages by force: an anonymous copy takes the place of the file's
//! pages, at the same addresses, in one mremap(2) of the target itself. [`restore`] undoes it for code: it
//! maps the file again.
//!
//! The copy loses the file's name and is no longer shared with other processes. Code does not
//! change, so it is copied while the target runs; data is copied while all its threads stand still. They
//! stand still for the move of either, and it is made only if the mapping is still the one that was copied:
//! another would be overwritten.

use super::change::{Cause, Outcome};
use super::inject::{Injector, Session, Stops};
use super::parts::part_of;
use super::target::{Refusal, Target};
use crate::pages::pagemap::{Mapping, PageMap, Segment};
use crate::procfs::{MapsLine, Root, maps};
use crate::sys::remote;
use pagetax_core::page_size::{MemoryPart, PageSizeRequest, PartSizes};
use pagetax_core::units::PageSize;
use rustix::process::Pid;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

/// So much is moved at once, to bound the stop (up to 1.4 ms for each huge page) and the memory that
/// is needed twice.
const CODE_BYTES_MAX: u64 = 8 << 20;
/// Copied while nothing runs, at some 2 GiB/s.
const DATA_BYTES_MAX: u64 = 4 << 20;

/// A stretch of a mapping that takes whole huge pages.
struct Stretch {
    range: Range<u64>,
    part: MemoryPart,
    protection: u64,
    /// Copied only when nothing runs.
    changes: bool,
    /// The mapping that it lies in.
    mapping: MapsLine,
}

/// Moves code and data to huge pages, where `advice` requests them and they are not there yet.
pub fn apply(
    target: &Target,
    map: &PageMap,
    advice: &PartSizes,
    huge: PageSize,
) -> Result<Outcome, Refusal> {
    let mut outcome = Outcome::default();
    let wanted = |mapping: &&Mapping| {
        let file = matches!(mapping.segment, Segment::Text | Segment::Data);
        let part = part_of(advice, mapping).filter(|_| file);
        part.is_some_and(|part| advice.get(part) == Some(PageSizeRequest::preferred(huge)))
    };
    let lines = maps(&Root::default(), map.pid).map_err(|e| Refusal::System(e.to_string()))?;
    let line = |mapping: &Mapping| {
        let same = |line: &&MapsLine| line.range == (mapping.start.0..mapping.end.0);
        lines.iter().find(same).cloned()
    };
    let mappings = map.mappings.iter().filter(wanted);
    // A mapping that has changed since the map was read is left to the next time.
    let mappings = mappings.filter_map(|mapping| Some((mapping, line(mapping)?)));
    let stretches: Vec<Stretch> =
        mappings.flat_map(|(mapping, line)| stretches(mapping, &line, huge)).collect();
    if stretches.is_empty() {
        return Ok(outcome);
    }
    let injector = Injector::open(target.pid())?;
    for stretch in &stretches {
        let bytes = stretch.range.end - stretch.range.start;
        match replace(target.pid(), &injector, stretch, huge, &mut outcome.stops) {
            Ok(()) => *outcome.changed_bytes.entry(stretch.part).or_default() += bytes,
            Err(error) => outcome.fail(stretch.part, Cause::of(&error), bytes),
        }
    }
    Ok(outcome)
}

/// Returns the stretches of a mapping that could be huge pages and are not, in bounded pieces.
fn stretches(mapping: &Mapping, line: &MapsLine, huge: PageSize) -> Vec<Stretch> {
    let size = huge.bytes();
    let changes = mapping.segment == Segment::Data;
    let (part, most) = if changes {
        (MemoryPart::Data, DATA_BYTES_MAX)
    } else {
        (MemoryPart::Text, CODE_BYTES_MAX)
    };
    let first = mapping.start.0.next_multiple_of(size);
    let last = mapping.end.0 / size * size;
    let is_huge = |start: u64| {
        let mut runs = mapping.runs.iter();
        runs.any(|r| r.page == Some(huge) && r.start.0 <= start && start < r.end.0)
    };
    let mut all: Vec<Stretch> = Vec::new();
    for start in (first..last.max(first)).step_by(size as usize).filter(|start| !is_huge(*start)) {
        match all.last_mut() {
            Some(s) if s.range.end == start && start + size - s.range.start <= most => {
                s.range.end = start + size;
            }
            _ => all.push(Stretch {
                range: start..start + size,
                part,
                protection: protection(mapping),
                changes,
                mapping: line.clone(),
            }),
        }
    }
    all
}

fn protection(mapping: &Mapping) -> u64 {
    let bit = |has: bool, bit: i32| if has { bit as u64 } else { 0 };
    bit(mapping.read, libc::PROT_READ)
        | bit(mapping.write, libc::PROT_WRITE)
        | bit(mapping.execute, libc::PROT_EXEC)
}

fn replace(
    pid: Pid,
    injector: &Injector,
    stretch: &Stretch,
    huge: PageSize,
    stops: &mut Stops,
) -> io::Result<()> {
    let len = stretch.range.end - stretch.range.start;
    let room = injector.session(stops, |session| TargetMemory::make(session, len, huge))??;
    let mut buffer = vec![0; len as usize];
    let mut copied = || copy(pid, stretch.range.start, room.place, &mut buffer);
    let before = if stretch.changes { Ok(()) } else { copied() };
    let moved = before.and_then(|()| {
        all_stopped(pid, &mut Vec::new(), stops, &mut |session| {
            stretch.is_there(pid)?;
            if stretch.changes {
                copied()?;
            }
            room.move_to(session, stretch)
        })
    });
    if moved.is_err() {
        // It may be gone altogether, and the room with it.
        let _ = injector.session(stops, |session| room.give_up(session));
    }
    moved
}

impl Stretch {
    /// Checks that its mapping is there as it was, at least where the stretch is. Other pieces may have moved
    /// already.
    fn is_there(&self, pid: Pid) -> io::Result<()> {
        let lines = maps(&Root::default(), pid.as_raw_nonzero().get() as u32)?;
        let same_file = |line: &MapsLine| {
            let place = |line: &MapsLine| line.range.start.wrapping_sub(line.offset_bytes);
            let (now, then) = (line, &self.mapping);
            (now.permissions, &now.device, now.inode)
                == (then.permissions, &then.device, then.inode)
                && place(now) == place(then)
        };
        let holds = |line: &MapsLine| {
            line.range.start <= self.range.start && self.range.end <= line.range.end
        };
        let is_there = lines.iter().any(|line| holds(line) && same_file(line));
        // As of a call for memory that is gone.
        if is_there { Ok(()) } else { Err(io::Error::from_raw_os_error(libc::EFAULT)) }
    }
}

/// Code that was copied, and the file that it came from.
struct CopiedCode {
    mapping: MapsLine,
    path: PathBuf,
    file: File,
    offset: u64,
    protection: u64,
}

/// Maps the file again in the place of code that was moved, where `advice` names code. Returns the changes
/// and the starts of the mappings that it replaced. A copy is known by a neighbour of the file that it was
/// cut from, and by the same bytes in the file. Other anonymous code (compiled at run time) is left alone.
pub fn restore(
    target: &Target,
    map: &PageMap,
    advice: &PartSizes,
) -> Result<(Outcome, Vec<u64>), Refusal> {
    let (mut outcome, mut restored) = (Outcome::default(), Vec::new());
    let lines = maps(&Root::default(), map.pid).map_err(|e| Refusal::System(e.to_string()))?;
    for mapping in &map.mappings {
        let is_code = part_of(advice, mapping) == Some(MemoryPart::Text) && mapping.inode == 0;
        let at = lines.iter().position(|l| l.range == (mapping.start.0..mapping.end.0));
        let Some(at) = at.filter(|_| is_code) else { continue };
        let code = match copied_code(map.pid, &lines, at) {
            Ok(Some(code)) => code,
            Ok(None) => continue,
            Err(_) => {
                outcome.fail(MemoryPart::Text, Cause::NoFile, mapping.bytes());
                continue;
            }
        };
        let code = CopiedCode { protection: protection(mapping), ..code };
        let done = all_stopped(target.pid(), &mut Vec::new(), &mut outcome.stops, &mut |session| {
            code.map_file(session, target.pid())
        });
        match done {
            Ok(()) => {
                *outcome.changed_bytes.entry(MemoryPart::Text).or_default() += mapping.bytes();
                restored.push(mapping.start.0);
            }
            Err(error) => outcome.fail(MemoryPart::Text, Cause::of(&error), mapping.bytes()),
        }
    }
    Ok((outcome, restored))
}

/// Returns the code at `lines[at]` if it is a copy of a file's; an error if its file is gone or replaced.
fn copied_code(pid: u32, lines: &[MapsLine], at: usize) -> io::Result<Option<CopiedCode>> {
    let mapping = &lines[at];
    let neighbours = [at.checked_sub(1), Some(at + 1)];
    let mut neighbours = neighbours.into_iter().flatten().filter_map(|at| lines.get(at));
    let touches = |line: &&MapsLine| {
        let is_next =
            line.range.end == mapping.range.start || mapping.range.end == line.range.start;
        is_next && line.inode != 0
    };
    let Some(neighbour) = neighbours.find(touches) else { return Ok(None) };
    let place = neighbour.range.start.wrapping_sub(neighbour.offset_bytes);
    let offset = mapping.range.start.wrapping_sub(place);
    // The process may see another root than we do.
    let file = File::open(format!("/proc/{pid}/root{}", neighbour.name))?;
    if file.metadata()?.ino() != neighbour.inode {
        return Err(io::ErrorKind::NotFound.into());
    }
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let same = is_same(&memory, &file, &mapping.range, offset)?;
    Ok(same.then(|| CopiedCode {
        mapping: mapping.clone(),
        path: PathBuf::from(&neighbour.name),
        file,
        offset,
        protection: 0,
    }))
}

/// Returns true if memory holds what a file has from `offset` on.
fn is_same(memory: &File, file: &File, range: &Range<u64>, offset: u64) -> io::Result<bool> {
    const STEP: u64 = 1 << 20;
    let (mut of_memory, mut of_file) = (vec![0; STEP as usize], vec![0; STEP as usize]);
    for at in range.clone().step_by(STEP as usize) {
        let len = STEP.min(range.end - at) as usize;
        memory.read_exact_at(&mut of_memory[..len], at)?;
        let read = file.read_exact_at(&mut of_file[..len], offset.wrapping_add(at - range.start));
        if read.is_err() || of_memory[..len] != of_file[..len] {
            return Ok(false);
        }
    }
    Ok(true)
}

impl CopiedCode {
    /// Has the stopped process map its file, if its mapping is still the one that was compared.
    fn map_file(&self, session: &mut Session<'_>, pid: Pid) -> io::Result<()> {
        let lines = maps(&Root::default(), pid.as_raw_nonzero().get() as u32)?;
        if !lines.contains(&self.mapping) {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        let path = [self.path.as_os_str().as_bytes(), b"\0"].concat();
        let len = path.len() as u64;
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let room = session.call(libc::SYS_mmap, [0, len, protection, flags, u64::MAX, 0])?;
        let opened = remote::write(pid, room, &path).and_then(|()| {
            let flags = (libc::O_RDONLY | libc::O_CLOEXEC) as u64;
            session.call(libc::SYS_openat, [libc::AT_FDCWD as u64, room, flags, 0, 0, 0])
        });
        let mapped = opened.and_then(|fd| {
            let mapped = self.map_opened(session, pid, fd);
            session.call(libc::SYS_close, [fd, 0, 0, 0, 0, 0])?;
            mapped
        });
        session.call(libc::SYS_munmap, [room, len, 0, 0, 0, 0])?;
        mapped
    }

    fn map_opened(&self, session: &mut Session<'_>, pid: Pid, fd: u64) -> io::Result<()> {
        let opened = std::fs::metadata(format!("/proc/{}/fd/{fd}", pid.as_raw_nonzero()))?;
        let compared = self.file.metadata()?;
        if (opened.dev(), opened.ino()) != (compared.dev(), compared.ino()) {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        let Range { start, end } = self.mapping.range;
        let flags = (libc::MAP_PRIVATE | libc::MAP_FIXED) as u64;
        let arguments = [start, end - start, self.protection, flags, fd, self.offset];
        session.call(libc::SYS_mmap, arguments).map(drop)
    }
}

fn copy(pid: Pid, from: u64, to: u64, buffer: &mut [u8]) -> io::Result<()> {
    remote::read(pid, from, buffer)?;
    remote::write(pid, to, buffer)
}

/// Fresh memory of the target, with a huge page's slack around an aligned place.
struct TargetMemory {
    start: u64,
    len: u64,
    place: u64,
    place_len: u64,
}

impl TargetMemory {
    fn make(session: &mut Session<'_>, place_len: u64, huge: PageSize) -> io::Result<TargetMemory> {
        let len = place_len + huge.bytes();
        let protection = (libc::PROT_READ | libc::PROT_WRITE) as u64;
        let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
        let start = session.call(libc::SYS_mmap, [0, len, protection, flags, u64::MAX, 0])?;
        let room =
            TargetMemory { start, len, place: start.next_multiple_of(huge.bytes()), place_len };
        match session.advise(room.place, place_len, libc::MADV_HUGEPAGE) {
            Ok(()) => Ok(room),
            Err(error) => {
                room.give_up(session)?;
                Err(error)
            }
        }
    }

    /// Puts it in the place of the stretch and gives the slack back.
    fn move_to(&self, session: &mut Session<'_>, stretch: &Stretch) -> io::Result<()> {
        let len = self.place_len;
        // Huge where advice is not followed, too; if there is no memory for it, nothing is lost.
        let _ = session.advise(self.place, len, libc::MADV_COLLAPSE);
        session.call(libc::SYS_mprotect, [self.place, len, stretch.protection, 0, 0, 0])?;
        let flags = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
        session.call(libc::SYS_mremap, [self.place, len, len, flags, stretch.range.start, 0])?;
        let end = self.start + self.len;
        for (start, end) in [(self.start, self.place), (self.place + len, end)] {
            if start < end {
                session.call(libc::SYS_munmap, [start, end - start, 0, 0, 0, 0])?;
            }
        }
        Ok(())
    }

    fn give_up(&self, session: &mut Session<'_>) -> io::Result<()> {
        session.call(libc::SYS_munmap, [self.start, self.len, 0, 0, 0, 0]).map(drop)
    }
}

/// Stops all threads, one inside the other, also those that came meanwhile; the last makes calls.
fn all_stopped(
    pid: Pid,
    stopped: &mut Vec<Pid>,
    stops: &mut Stops,
    work: &mut (dyn FnMut(&mut Session<'_>) -> io::Result<()> + Send),
) -> io::Result<()> {
    let next = Injector::threads(pid)?.into_iter().find(|tid| !stopped.contains(tid));
    let next = next.ok_or(io::ErrorKind::NotFound)?;
    let mut inner = Stops::default();
    let result = Injector::of_thread(pid, next)?.session(stops, |session| {
        stopped.push(next);
        let all = Injector::threads(pid)?.iter().all(|tid| stopped.contains(tid));
        if all { work(session) } else { all_stopped(pid, stopped, &mut inner, work) }
    })?;
    stops.all.extend(inner.all);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mapping_that_took_the_place_of_the_copied_one_is_not_overwritten() {
        let own = rustix::process::getpid();
        let lines = maps(&Root::default(), own.as_raw_nonzero().get() as u32).unwrap();
        let mapping = lines.into_iter().find(|line| line.permissions == *b"r-xp").unwrap();
        let stretch = |range: Range<u64>, mapping: MapsLine| Stretch {
            range,
            part: MemoryPart::Text,
            protection: 0,
            changes: false,
            mapping,
        };
        let range = mapping.range.clone();
        stretch(range.clone(), mapping.clone()).is_there(own).unwrap();
        let gone = |range: Range<u64>, mapping: MapsLine| {
            let error = stretch(range, mapping).is_there(own).unwrap_err();
            assert_eq!(Cause::of(&error), Cause::Gone);
        };
        gone(range.start - 4096..range.end, mapping.clone());
        // Another file, another part of it, and the same with other rights.
        gone(range.clone(), MapsLine { inode: mapping.inode + 1, ..mapping.clone() });
        let offset_bytes = mapping.offset_bytes + 4096;
        gone(range.clone(), MapsLine { offset_bytes, ..mapping.clone() });
        gone(range, MapsLine { permissions: *b"r--p", ..mapping });
    }
}
