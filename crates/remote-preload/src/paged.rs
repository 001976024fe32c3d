//! The one paged region of this process: its start, and the memory allocated from it.

use crate::agent::{self, log};
use crate::space::Space;
use crate::{local, private, stderr, threads};
use pagetax_core::units::Bytes;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{
    Log, PagerOptions, RemoteRegion, Serving, StoreInChild, UffdError, probe,
};
use pagetax_remote::preloaded::{Settings, StoreSettings};
use pagetax_remote::store::ChildStore;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

static PAGED: OnceLock<Paged> = OnceLock::new();

/// The exit status of a wrapper that could not do its own part, as of env(1).
const CANNOT: libc::c_int = 125;

/// The fraction (1/16) of the resident memory that freed blocks of malloc may keep…
const KEPT_FRACTION: usize = 16;
/// …and the most of it (8 MiB), in pages. A recording, which has no such memory, keeps as much.
const KEPT_PAGES_MAX: usize = (8 << 20) / PAGE_BYTES;

/// The region, and the allocations in it.
pub struct Paged {
    /// The address of the first byte.
    start: usize,
    pages: usize,
    /// The region, which is never dropped: the program may touch it until its last instruction. None if
    /// only the layout is wanted.
    region: Option<ManuallyDrop<RemoteRegion>>,
    space: Mutex<Space>,
    /// A lock that is held while pages are dropped.
    dropping: Mutex<()>,
    /// Pages that are no longer paged, because the program mapped something else over them.
    replaced: Mutex<Vec<Range<usize>>>,
    settings: Settings,
    /// True once the program has locked memory. It may free such memory without unlocking it.
    has_locked: AtomicBool,
    /// True once the kernel has refused a mapping in the region.
    is_out_of_mappings: AtomicBool,
}

/// A guard: while it lives, no thread allocates, frees or drops paged memory.
pub struct Quiesced<'a> {
    _space: MutexGuard<'a, Space>,
    _replaced: MutexGuard<'a, Vec<Range<usize>>>,
    _dropping: MutexGuard<'a, ()>,
    _local: MutexGuard<'static, local::Local>,
}

/// Logs the counts if `--stats` asks for them. Lets the servers drop the region as soon as this
/// process has gone.
pub fn end() {
    let Some(paged) = PAGED.get() else { return };
    let Some(region) = &paged.region else { return };
    agent::run(|| {
        let counts = region.counts();
        // A shell's many short children have nothing to report.
        if paged.settings.stats && (counts.evicted_count > 0 || !paged.settings.is_descendant()) {
            let resident = Bytes(region.resident_bytes());
            log(&format!(
                "process {}: {resident} resident at the end; {counts}",
                std::process::id()
            ));
        }
        region.drop_at_end();
    });
}

/// Starts the pager if the environment asks for it. A program that was to be paged and cannot be
/// does not run. A descendant that runs as another user without the right to page runs unpaged.
pub fn start_if_configured() {
    let settings = match Settings::from_environment() {
        Ok(None) => return,
        Ok(Some(settings)) => settings,
        Err(why) => refuse(&why),
    };
    let started = match settings.is_layout_only {
        true => Paged::unpaged(settings),
        false => {
            if let Some(why) = missing_right(&settings) {
                stderr::write_line(&format!("this process is not paged: {why}"));
                return;
            }
            let keep_stderr = settings.stats;
            agent::start(keep_stderr).and_then(|()| {
                let started = agent::run(move || Paged::start(settings));
                started.unwrap_or_else(|| Err("the agent thread ended".into()))
            })
        }
    };
    match started {
        Ok(paged) => {
            // The constructor runs once, so nothing was there before.
            let _ = PAGED.set(paged);
        }
        Err(why) => refuse(&why),
    }
}

/// Returns the error if a descendant may not page, although the program itself may.
fn missing_right(settings: &Settings) -> Option<UffdError> {
    let probed = settings.is_descendant().then(|| probe(false, Serving::Thread))?;
    probed.err().filter(|error| matches!(error, UffdError::NotAllowed { .. }))
}

/// Ends a process that cannot have its memory, with a line. No code of the program has run yet,
/// except its fork.
pub fn refuse(why: &str) -> ! {
    stderr::write_line(why);
    // SAFETY: ends the process without its handlers.
    unsafe { libc::_exit(CANNOT) }
}

/// Returns the paged memory, once it exists. Returns `None` to the pager's own threads.
pub fn paged() -> Option<&'static Paged> {
    PAGED.get().filter(|_| !threads::is_internal())
}

/// Returns the paged memory if an address lies in it.
pub fn paged_at(at: *const u8) -> Option<&'static Paged> {
    PAGED.get().filter(|paged| paged.contains(at as usize))
}

fn logger() -> Log {
    Arc::new(log)
}

impl Paged {
    fn start(settings: Settings) -> Result<Paged, String> {
        let settings = match settings.store {
            StoreSettings::Inside(bytes) => {
                let store = StoreSettings::Inside(bytes.min(private::room()));
                Settings { store, ..settings }
            }
            _ => settings,
        };
        let options = PagerOptions {
            overcommit: true,
            log: Some(logger()),
            spin: settings.spin,
            eviction_method: settings.eviction_method,
            keep_awake: settings.keep_awake,
            ..PagerOptions::resident(settings.resident.0)
        };
        let store = settings.open_store(&logger())?;
        let region = RemoteRegion::map(store, settings.address_space.0, options);
        let region = ManuallyDrop::new(region.map_err(|error| error.to_string())?);
        let (start, pages) = (region.as_ptr() as usize, region.len() / PAGE_BYTES);
        Paged::over(start, pages, Some(region), settings)
    }

    /// Lays out memory that is not paged.
    fn unpaged(settings: Settings) -> Result<Paged, String> {
        let (start, bytes) = local::reserve(settings.address_space.0 as usize)
            .ok_or_else(|| format!("cannot reserve {} of addresses", settings.address_space))?;
        Paged::over(start, bytes / PAGE_BYTES, None, settings)
    }

    fn over(
        start: usize,
        pages: usize,
        region: Option<ManuallyDrop<RemoteRegion>>,
        settings: Settings,
    ) -> Result<Paged, String> {
        let paged = Paged {
            start,
            pages,
            region,
            space: Mutex::new(Space::new(pages)),
            dropping: Mutex::default(),
            replaced: Mutex::default(),
            settings,
            has_locked: AtomicBool::new(false),
            is_out_of_mappings: AtomicBool::new(false),
        };
        match paged.protect(0, pages, libc::PROT_NONE) {
            true => Ok(paged),
            false => Err(format!("cannot protect {} of addresses", paged.settings.address_space)),
        }
    }

    /// Returns true if nothing is paged, because only the addresses are wanted.
    pub fn is_layout_only(&self) -> bool {
        self.region.is_none()
    }

    /// Returns true if a child of a fork could have the memory.
    pub fn can_fork(&self) -> bool {
        self.region.as_ref().is_none_or(|region| region.can_fork())
    }

    /// Returns true if a page is resident. The answer lasts while the pager is quiescent.
    pub fn is_resident(&self, at: *const u8) -> bool {
        self.region.as_ref().is_none_or(|region| region.is_resident(at))
    }

    /// Waits until no other thread changes allocations, and keeps them out.
    pub fn quiesce(&self) -> Quiesced<'_> {
        let (local, dropping, replaced) =
            (local::hold(), lock(&self.dropping), lock(&self.replaced));
        Quiesced { _space: self.space(), _replaced: replaced, _dropping: dropping, _local: local }
    }

    /// Returns true if children of a fork have the store too.
    pub fn is_store_inherited(&self) -> bool {
        self.region.as_ref().is_none_or(|region| region.is_store_inherited())
    }

    /// Stops evicting, until [`Self::resume_evicting`].
    pub fn stop_evicting(&self) {
        if let Some(region) = &self.region {
            region.stop_evicting();
        }
    }

    /// Undoes one [`Self::stop_evicting`].
    pub fn resume_evicting(&self) {
        if let Some(region) = &self.region {
            region.resume_evicting();
        }
    }

    /// Keeps the pages that are in the store for the child of one fork. Evicting is stopped by now.
    pub fn fork_store(&'static self) -> Result<ChildStore, String> {
        let region = self.region.as_ref().ok_or("it has no store")?;
        let forked = agent::run(|| region.fork_store().map_err(|error| error.to_string()));
        forked.unwrap_or_else(|| Err("the agent thread ended".into()))
    }

    /// Stops the pager. Returns true if the child will have the memory.
    pub fn before_fork(&self, has_child_store: bool) -> bool {
        self.region.as_ref().is_none_or(|region| region.before_fork(has_child_store))
    }

    /// Lets the pager go on in the parent.
    pub fn after_fork(&self) {
        if let Some(region) = &self.region {
            region.after_fork();
        }
    }

    /// Restarts the pager in a forked child, or ends the child.
    pub fn restart_in_child(&'static self, child_store: Option<ChildStore>) {
        let Some(region) = &self.region else { return };
        let restarted = agent::start(self.settings.stats).and_then(|()| {
            let restarted = agent::run(|| self.restart(region, child_store));
            restarted.unwrap_or_else(|| Err("the agent thread ended".into()))
        });
        if let Err(why) = restarted {
            refuse(&why);
        }
    }

    fn restart(
        &self,
        region: &RemoteRegion,
        child_store: Option<ChildStore>,
    ) -> Result<(), String> {
        let store = match child_store {
            _ if region.is_store_inherited() => StoreInChild::Inherited,
            Some(open) => StoreInChild::WithPages(open().map_err(|error| error.to_string())?),
            None => StoreInChild::Empty(self.settings.open_store(&logger())?),
        };
        region.restart_in_child(store).map_err(|error| error.to_string())
    }

    /// Returns true if an address lies in the region.
    pub fn contains(&self, at: usize) -> bool {
        at.wrapping_sub(self.start) < self.pages * PAGE_BYTES
    }

    /// Returns true if a whole range lies in the region.
    pub fn contains_all(&self, at: usize, bytes: usize) -> bool {
        self.contains(at) && bytes <= self.start + self.pages * PAGE_BYTES - at
    }

    fn page_of(&self, at: usize) -> usize {
        (at - self.start) / PAGE_BYTES
    }

    fn address_of(&self, page: usize) -> *mut u8 {
        (self.start + page * PAGE_BYTES) as *mut u8
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }

    fn protect(&self, first: usize, pages: usize, protection: libc::c_int) -> bool {
        let (at, len) = (self.address_of(first), pages * PAGE_BYTES);
        // SAFETY: the range is this region's; a direct system call. An allocated range becomes
        // accessible, and no code uses a freed one.
        unsafe { libc::syscall(libc::SYS_mprotect, at, len, protection) == 0 }
    }

    /// Allocates zeros, with room to grow if `to_grow`. Returns null if there is no room.
    pub fn map(
        &self,
        bytes: usize,
        align: usize,
        protection: libc::c_int,
        to_grow: bool,
    ) -> *mut u8 {
        let Some(pages) = pages_of(bytes) else { return std::ptr::null_mut() };
        let align = align / PAGE_BYTES;
        let take = || match to_grow {
            true => self.space().take_to_grow(pages, align),
            false => self.space().take(pages, align),
        };
        let taken = take().or_else(|| if self.free_kept() { take() } else { None });
        let Some(first) = taken else { return std::ptr::null_mut() };
        if !self.protect(first, pages, protection) {
            self.space().give(first, pages);
            if !self.is_out_of_mappings.swap(true, Relaxed) {
                log(
                    "the kernel allows no more mappings (vm.max_map_count): some memory stays local",
                );
            }
            return std::ptr::null_mut();
        }
        self.address_of(first)
    }

    /// Returns true once the kernel has refused a mapping in the region.
    pub fn is_out_of_mappings(&self) -> bool {
        self.is_out_of_mappings.load(Relaxed)
    }

    /// Records that the program locks memory.
    pub fn note_lock(&self) {
        self.has_locked.store(true, Relaxed);
    }

    /// Frees a range. Accesses get SIGSEGV from then on.
    pub fn unmap(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        let first = self.page_of(at);
        for (part, is_paged) in self.parts(first..first + pages) {
            match is_paged {
                true => self.unmap_paged(part),
                // The mapping of the program goes; these addresses are not paged again.
                false => self.map_nothing(part),
            }
        }
    }

    fn unmap_paged(&self, pages: Range<usize>) {
        static WAS_LOGGED: AtomicBool = AtomicBool::new(false);
        let (at, bytes) = (self.address_of(pages.start) as usize, pages.len() * PAGE_BYTES);
        if self.has_locked.load(Relaxed) {
            unlock(at, bytes);
        }
        // Without this protection (no more mappings allowed), later accesses get zeros instead of
        // SIGSEGV.
        self.protect(pages.start, pages.len(), libc::PROT_NONE);
        if self.discard(at, bytes) {
            self.space().give(pages.start, pages.len());
        } else if !WAS_LOGGED.swap(true, Relaxed) {
            // The next owner would find its bytes.
            log("memory that was freed cannot be dropped, and is not given out again");
        }
    }

    fn map_nothing(&self, pages: Range<usize>) {
        let (at, bytes) = (self.address_of(pages.start), pages.len() * PAGE_BYTES);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: replaces a mapping that the program has freed.
        unsafe { libc::syscall(libc::SYS_mmap, at, bytes, libc::PROT_NONE, flags, -1, 0) };
    }

    /// Allocates a range at an address that the program chose, as far as it is free.
    pub fn claim(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        self.space().claim(self.page_of(at), pages);
    }

    /// Maps something else over a range by `map`. The range is not paged from then on.
    pub fn replace(
        &self,
        at: usize,
        bytes: usize,
        map: impl FnOnce() -> *mut libc::c_void,
    ) -> *mut libc::c_void {
        let Some(pages) = pages_of(bytes) else { return map() };
        let first = self.page_of(at);
        if !self.discard(at, bytes) {
            return crate::fail(libc::ENOMEM, libc::MAP_FAILED);
        }
        let _dropping = lock(&self.dropping);
        let made = map();
        if made != libc::MAP_FAILED {
            if let Some(region) = &self.region {
                region.stop_paging(first, pages);
            }
            lock(&self.replaced).push(first..first + pages);
        }
        made
    }

    /// Splits a range into parts. Each is marked true if it is still paged.
    fn parts(&self, pages: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut parts = vec![(pages, true)];
        for replaced in lock(&self.replaced).iter() {
            parts = parts.into_iter().flat_map(|part| cut(part, replaced)).collect();
        }
        parts
    }

    /// Returns true if a whole range is paged, with no part replaced.
    pub fn is_paged(&self, at: usize, bytes: usize) -> bool {
        let first = self.page_of(at);
        pages_of(bytes).is_some_and(|pages| {
            self.parts(first..first + pages).into_iter().all(|(_, is_paged)| is_paged)
        })
    }

    /// Extends a range in place. Returns false if there is no room.
    pub fn grow(&self, at: usize, bytes_before: usize, bytes: usize) -> bool {
        let (Some(before), Some(pages)) = (pages_of(bytes_before), pages_of(bytes)) else {
            return false;
        };
        let end = self.page_of(at) + before;
        // No other thread changes the protection: the owner of the range has asked for this.
        self.space().grow(end, pages - before)
            && self.protect(end, pages - before, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Makes a range zeros again, even if it is locked, because the program asks for other memory
    /// there. Returns false if that fails.
    pub fn discard(&self, at: usize, bytes: usize) -> bool {
        self.discard_unlocked(at, bytes) || {
            unlock(at, bytes);
            self.discard_unlocked(at, bytes)
        }
    }

    /// Makes a range zeros again. Returns false if a part of it is locked.
    pub fn discard_unlocked(&self, at: usize, bytes: usize) -> bool {
        let Some(pages) = pages_of(bytes) else { return true };
        let _dropping = lock(&self.dropping);
        let Some(region) = &self.region else { return discard_unpaged(at, bytes) };
        // SAFETY: only the program holds references to the region's bytes, and it has just asked
        // for zeros.
        unsafe { region.discard_shared(self.page_of(at), pages) }
    }

    /// Allocates a block for malloc, and records its length.
    pub fn allocate(&self, bytes: usize, align: usize, to_grow: bool) -> *mut u8 {
        let at = self.map(bytes, align, libc::PROT_READ | libc::PROT_WRITE, to_grow);
        if let (false, Some(pages)) = (at.is_null(), pages_of(bytes)) {
            self.space().note(self.page_of(at as usize), pages);
        }
        at
    }

    /// Allocates a block for malloc from the freed ones of this length, which have their pages. Its bytes are
    /// those of the freed block.
    pub fn reuse(&self, bytes: usize, align: usize) -> Option<*mut u8> {
        let pages = pages_of(bytes)?;
        let first = self.space().take_kept(pages, align / PAGE_BYTES)?;
        let at = self.address_of(first);
        // A page-in for bytes that nobody wants costs more than zeros. The program may have protected it.
        let is_usable = self.is_resident(at) && !self.has_special_pages();
        if !is_usable || !self.protect(first, pages, libc::PROT_READ | libc::PROT_WRITE) {
            self.unmap(at as usize, pages * PAGE_BYTES);
            return None;
        }
        self.space().note(first, pages);
        Some(at)
    }

    /// Frees the blocks that [`Self::reuse`] would take. Returns true if there were any.
    fn free_kept(&self) -> bool {
        let kept = self.space().take_all_kept();
        for (first, pages) in &kept {
            self.unmap(self.address_of(*first) as usize, pages * PAGE_BYTES);
        }
        !kept.is_empty()
    }

    /// Returns true if freed pages may be locked, or may be no longer paged.
    fn has_special_pages(&self) -> bool {
        self.has_locked.load(Relaxed) || !lock(&self.replaced).is_empty()
    }

    /// Returns the size of a block of [`Self::allocate`], if the address is one.
    pub fn allocated(&self, at: *const u8) -> Option<usize> {
        // Other blocks are rarely aligned to a page; this saves the lock.
        if !(at as usize).is_multiple_of(PAGE_BYTES) {
            return None;
        }
        Some(self.space().noted(self.page_of(at as usize))? * PAGE_BYTES)
    }

    /// Frees a block of [`Self::allocate`]. Returns false if the address is not one.
    pub fn free(&self, at: *mut u8) -> bool {
        if !(at as usize).is_multiple_of(PAGE_BYTES) {
            return false;
        }
        let resident = self.settings.resident.0 as usize / PAGE_BYTES;
        let kept_max = match (self.has_special_pages(), self.is_layout_only()) {
            (true, _) => 0,
            (false, true) => KEPT_PAGES_MAX,
            (false, false) => KEPT_PAGES_MAX.min(resident / KEPT_FRACTION),
        };
        let freed = self.space().forget(self.page_of(at as usize), kept_max);
        for (first, pages) in freed.iter().flatten() {
            self.unmap(self.address_of(*first) as usize, pages * PAGE_BYTES);
        }
        freed.is_some()
    }

    /// Resizes a block in place. Returns false if that is impossible.
    pub fn resize(&self, at: *mut u8, before: usize, bytes: usize) -> bool {
        let Some(pages) = pages_of(bytes) else { return false };
        let bytes = pages * PAGE_BYTES;
        if bytes < before {
            self.unmap(at as usize + bytes, before - bytes);
        } else if !self.grow(at as usize, before, bytes) {
            return false;
        }
        self.space().note(self.page_of(at as usize), pages);
        true
    }
}

/// Makes memory that is not paged zeros again. Returns false if a part of it is locked.
fn discard_unpaged(at: usize, bytes: usize) -> bool {
    // SAFETY: a direct system call. Only the program holds references to these bytes, and it has just
    // asked for zeros.
    unsafe { libc::syscall(libc::SYS_madvise, at, bytes, libc::MADV_DONTNEED) == 0 }
}

/// Unlocks memory. An error only means that nothing was locked.
fn unlock(at: usize, bytes: usize) {
    // SAFETY: a direct system call that changes no bytes.
    unsafe { libc::syscall(libc::SYS_munlock, at, bytes) };
}

/// Locks a mutex even if it is poisoned: its value is whole between calls.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Splits a part around the pages that were replaced.
fn cut(part: (Range<usize>, bool), replaced: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let (pages, is_paged) = part;
    let from = replaced.start.clamp(pages.start, pages.end);
    let to = replaced.end.clamp(from, pages.end);
    let cut = [(pages.start..from, is_paged), (from..to, false), (to..pages.end, is_paged)];
    cut.into_iter().filter(|(pages, _)| !pages.is_empty()).collect()
}

/// Returns the number of pages, if the size is possible.
fn pages_of(bytes: usize) -> Option<usize> {
    (1..1 << 46).contains(&bytes).then(|| bytes.div_ceil(PAGE_BYTES))
}
