//! The one region of this process: when it starts, and what is given out of it.

use crate::agent::{self, say};
use crate::space::Space;
use crate::{local, private, stderr, threads};
use pagetax_core::units::Bytes;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{PagerOptions, RemoteRegion, Serving, UffdError, probe};
use pagetax_remote::preloaded::Settings;
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

static PAGED: OnceLock<Paged> = OnceLock::new();

/// Exit status of wrappers that could not do their own part, as of env(1) and others.
const CANNOT: libc::c_int = 125;

/// The region and who has what of it.
pub struct Paged {
    /// Never dropped: the program may touch it to its last instruction.
    region: ManuallyDrop<RemoteRegion>,
    space: Mutex<Space>,
    /// Held while pages are dropped.
    dropping: Mutex<()>,
    /// Pages that are not paged any more: the program has mapped something else over them.
    replaced: Mutex<Vec<Range<usize>>>,
    settings: Settings,
    /// The program has locked memory: it may free it without unlocking it.
    has_locked: AtomicBool,
    /// The kernel has refused a mapping more.
    is_out_of_maps: AtomicBool,
}

/// No thread takes, gives back or drops paged memory while it lives.
pub struct Standstill<'a> {
    _space: MutexGuard<'a, Space>,
    _replaced: MutexGuard<'a, Vec<Range<usize>>>,
    _dropping: MutexGuard<'a, ()>,
    _local: MutexGuard<'static, local::Local>,
}

/// Says what was paged, if that is wanted; and the servers need not wait for this process when it has gone.
pub fn end() {
    let Some(paged) = PAGED.get() else { return };
    agent::run(|| {
        if paged.settings.stats {
            let resident = Bytes(paged.region.resident_bytes());
            say(&format!("{resident} resident at the end; {:?}", paged.region.counts()));
        }
        paged.region.drop_at_end();
    });
}

/// Starts if the environment says so. A program that was to be paged and cannot be does not run. What it starts as
/// another user, who has no right to page, runs as it would without us.
pub fn start_as_told() {
    let settings = match Settings::from_environment() {
        Ok(None) => return,
        Ok(Some(settings)) => settings,
        Err(why) => refuse(&why),
    };
    if let Some(why) = is_not_its_right(&settings) {
        stderr::write_line(&format!("this process is not paged: {why}"));
        return;
    }
    let keep_stderr = settings.stats;
    let started = agent::start(keep_stderr).and_then(|()| {
        let started = agent::run(move || Paged::start(settings));
        started.unwrap_or_else(|| Err("the agent thread ended".into()))
    });
    match started {
        Ok(paged) => {
            // The constructor runs once, so nothing was there before.
            let _ = PAGED.set(paged);
        }
        Err(why) => refuse(&why),
    }
}

/// Why a process further down may not page, though the program may.
fn is_not_its_right(settings: &Settings) -> Option<UffdError> {
    let probed = settings.is_descendant().then(|| probe(false, Serving::Thread))?;
    probed.err().filter(|error| matches!(error, UffdError::NotAllowed { .. }))
}

/// Ends a process that cannot have its memory, with a line: nothing of the program has run, or only its fork.
pub fn refuse(why: &str) -> ! {
    stderr::write_line(why);
    // SAFETY: ends the process without its handlers.
    unsafe { libc::_exit(CANNOT) }
}

/// The paged memory, for the program's threads once it is there; none for the pager's own.
pub fn paged() -> Option<&'static Paged> {
    PAGED.get().filter(|_| !threads::is_internal())
}

/// The paged memory that an address lies in.
pub fn paged_at(at: *const u8) -> Option<&'static Paged> {
    PAGED.get().filter(|paged| paged.contains(at as usize))
}

impl Paged {
    fn start(settings: Settings) -> Result<Paged, String> {
        let settings = Settings { embedded: settings.embedded.min(private::room()), ..settings };
        let store = settings.open_store(Arc::new(say))?;
        let options = PagerOptions {
            overcommit: true,
            log: Some(Arc::new(say)),
            spin: settings.spin,
            eviction_method: settings.eviction_method,
            keep_awake: settings.keep_awake,
            ..PagerOptions::resident(settings.resident.0)
        };
        let region = RemoteRegion::map(store, settings.address_space.0, options);
        let region = ManuallyDrop::new(region.map_err(|error| error.to_string())?);
        let pages = region.len() / PAGE_BYTES;
        let space = Mutex::new(Space::new(pages));
        let (dropping, replaced) = (Mutex::default(), Mutex::default());
        let (has_locked, is_out_of_maps) = (AtomicBool::new(false), AtomicBool::new(false));
        let paged =
            Paged { region, space, dropping, replaced, settings, has_locked, is_out_of_maps };
        match paged.protect(0, pages, libc::PROT_NONE) {
            true => Ok(paged),
            false => Err(format!("cannot protect {} of addresses", paged.settings.address_space)),
        }
    }

    fn start_address(&self) -> usize {
        self.region.as_ptr() as usize
    }

    /// Whether a child of a fork could have the memory.
    pub fn can_fork(&self) -> bool {
        self.region.can_fork()
    }

    /// Whether a page is in memory, while the pager stands still.
    pub fn is_here(&self, at: *const u8) -> bool {
        self.region.is_here(at)
    }

    /// Waits for other threads, and keeps them out.
    pub fn stand_still(&self) -> Standstill<'_> {
        let (local, dropping, replaced) =
            (local::hold(), lock(&self.dropping), lock(&self.replaced));
        Standstill { _space: self.space(), _replaced: replaced, _dropping: dropping, _local: local }
    }

    /// Whether children of a fork have the store, too.
    pub fn is_store_inherited(&self) -> bool {
        self.region.is_store_inherited()
    }

    /// Stops evicting, until [`Self::resume_evicting`].
    pub fn stop_evicting(&self) {
        self.region.stop_evicting();
    }

    /// Takes back one [`Self::stop_evicting`].
    pub fn resume_evicting(&self) {
        self.region.resume_evicting();
    }

    /// Stops the pager; whether a child will have the memory.
    pub fn before_fork(&self) -> bool {
        self.region.before_fork()
    }

    /// Goes on in the parent.
    pub fn after_fork(&self) {
        self.region.after_fork();
    }

    /// Goes on in the child, or it does not go on.
    pub fn restart_in_child(&'static self) {
        let restarted = agent::start(self.settings.stats).and_then(|()| {
            let restarted = agent::run(|| self.restart());
            restarted.unwrap_or_else(|| Err("the agent thread ended".into()))
        });
        if let Err(why) = restarted {
            refuse(&why);
        }
    }

    fn restart(&self) -> Result<(), String> {
        let store = match self.region.is_store_inherited() {
            true => None,
            false => Some(self.settings.open_store(Arc::new(say))?),
        };
        self.region.restart_in_child(store).map_err(|error| error.to_string())
    }

    /// Whether an address is paged.
    pub fn contains(&self, at: usize) -> bool {
        at.wrapping_sub(self.start_address()) < self.region.len()
    }

    /// Whether all of a range is.
    pub fn contains_all(&self, at: usize, bytes: usize) -> bool {
        self.contains(at) && bytes <= self.start_address() + self.region.len() - at
    }

    fn page_of(&self, at: usize) -> usize {
        (at - self.start_address()) / PAGE_BYTES
    }

    fn address_of(&self, page: usize) -> *mut u8 {
        self.region.as_ptr().wrapping_add(page * PAGE_BYTES)
    }

    fn space(&self) -> MutexGuard<'_, Space> {
        lock(&self.space)
    }

    fn protect(&self, first: usize, pages: usize, protection: libc::c_int) -> bool {
        let (at, len) = (self.address_of(first), pages * PAGE_BYTES);
        // SAFETY: the range is this region's; a direct system call. What is given out becomes
        // accessible, what is taken back is nobody's.
        unsafe { libc::syscall(libc::SYS_mprotect, at, len, protection) == 0 }
    }

    /// Gives out zeros, with room to grow if that is wanted; or null.
    pub fn map(
        &self,
        bytes: usize,
        align: usize,
        protection: libc::c_int,
        to_grow: bool,
    ) -> *mut u8 {
        let Some(pages) = pages_of(bytes) else { return std::ptr::null_mut() };
        let align = align / PAGE_BYTES;
        let taken = match to_grow {
            true => self.space().take_to_grow(pages, align),
            false => self.space().take(pages, align),
        };
        let Some(first) = taken else { return std::ptr::null_mut() };
        if !self.protect(first, pages, protection) {
            self.space().give(first, pages);
            if !self.is_out_of_maps.swap(true, Relaxed) {
                say(
                    "the kernel allows no more mappings (vm.max_map_count): some memory stays local",
                );
            }
            return std::ptr::null_mut();
        }
        self.address_of(first)
    }

    /// Whether the kernel has refused a mapping more in the region.
    pub fn is_out_of_maps(&self) -> bool {
        self.is_out_of_maps.load(Relaxed)
    }

    /// Notes that the program locks memory.
    pub fn note_lock(&self) {
        self.has_locked.store(true, Relaxed);
    }

    /// Takes a range back; accesses get SIGSEGV.
    pub fn unmap(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        let first = self.page_of(at);
        for (part, is_paged) in self.parts(first..first + pages) {
            match is_paged {
                true => self.unmap_paged(part),
                // Whatever the program has put there goes; these addresses are not paged again.
                false => self.map_nothing(part),
            }
        }
    }

    fn unmap_paged(&self, pages: Range<usize>) {
        static SAID: AtomicBool = AtomicBool::new(false);
        let (at, bytes) = (self.address_of(pages.start) as usize, pages.len() * PAGE_BYTES);
        if self.has_locked.load(Relaxed) {
            unlock(at, bytes);
        }
        // Where the kernel allows no more mappings, nobody is told of an access after this.
        self.protect(pages.start, pages.len(), libc::PROT_NONE);
        if self.discard(at, bytes) {
            self.space().give(pages.start, pages.len());
        } else if !SAID.swap(true, Relaxed) {
            // Its bytes would be found by whoever gets it next.
            say("memory that was freed cannot be dropped, and is not given out again");
        }
    }

    fn map_nothing(&self, pages: Range<usize>) {
        let (at, bytes) = (self.address_of(pages.start), pages.len() * PAGE_BYTES);
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
        // SAFETY: replaces a mapping that the program gives back.
        unsafe { libc::syscall(libc::SYS_mmap, at, bytes, libc::PROT_NONE, flags, -1, 0) };
    }

    /// Keeps others from a range that the program uses at its own wish, also where it was free.
    pub fn claim(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        self.space().claim(self.page_of(at), pages);
    }

    /// Has the program map something else over a range, by `map`. From then on it is not paged.
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
            self.region.give_up(first, pages);
            lock(&self.replaced).push(first..first + pages);
        }
        made
    }

    /// Cuts a range into parts that are paged, and parts that are something else.
    fn parts(&self, pages: Range<usize>) -> Vec<(Range<usize>, bool)> {
        let mut parts = vec![(pages, true)];
        for replaced in lock(&self.replaced).iter() {
            parts = parts.into_iter().flat_map(|part| cut(part, replaced)).collect();
        }
        parts
    }

    /// Whether all of a range is paged, and none of it was replaced.
    pub fn is_paged(&self, at: usize, bytes: usize) -> bool {
        let first = self.page_of(at);
        pages_of(bytes).is_some_and(|pages| {
            self.parts(first..first + pages).into_iter().all(|(_, is_paged)| is_paged)
        })
    }

    /// Makes a range end later, where it is.
    pub fn grow(&self, at: usize, bytes_before: usize, bytes: usize) -> bool {
        let (Some(before), Some(pages)) = (pages_of(bytes_before), pages_of(bytes)) else {
            return false;
        };
        let end = self.page_of(at) + before;
        // Range and protection are of one owner, who has asked for this.
        self.space().grow(end, pages - before)
            && self.protect(end, pages - before, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Makes a range zeros again, locked or not, as the program asks for other memory there. False if that
    /// cannot be.
    pub fn discard(&self, at: usize, bytes: usize) -> bool {
        self.discard_unlocked(at, bytes) || {
            unlock(at, bytes);
            self.discard_unlocked(at, bytes)
        }
    }

    /// Makes a range zeros again; false if some of it is locked.
    pub fn discard_unlocked(&self, at: usize, bytes: usize) -> bool {
        let Some(pages) = pages_of(bytes) else { return true };
        let _dropping = lock(&self.dropping);
        // SAFETY: nobody holds references to the region's bytes but the program, which has just asked
        // for them to become zeros.
        unsafe { self.region.discard_shared(self.page_of(at), pages) }
    }

    /// Memory for malloc, whose length is remembered.
    pub fn allocate(&self, bytes: usize, align: usize, to_grow: bool) -> *mut u8 {
        let at = self.map(bytes, align, libc::PROT_READ | libc::PROT_WRITE, to_grow);
        if let (false, Some(pages)) = (at.is_null(), pages_of(bytes)) {
            self.space().note(self.page_of(at as usize), pages);
        }
        at
    }

    /// Bytes of what [`Self::allocate`] gave out at this address, if it did.
    pub fn allocated(&self, at: *const u8) -> Option<usize> {
        // Nothing else is that well aligned but by chance; this saves the lock.
        if !(at as usize).is_multiple_of(PAGE_BYTES) {
            return None;
        }
        Some(self.space().noted(self.page_of(at as usize))? * PAGE_BYTES)
    }

    /// Frees what [`Self::allocate`] gave out; false if it did not.
    pub fn free(&self, at: *mut u8) -> bool {
        if !(at as usize).is_multiple_of(PAGE_BYTES) {
            return false;
        }
        let pages = self.space().forget(self.page_of(at as usize));
        if let Some(pages) = pages {
            self.unmap(at as usize, pages * PAGE_BYTES);
        }
        pages.is_some()
    }

    /// Changes the length where it is; false if that cannot be.
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

/// munlock(2): an error only means that nothing was locked.
fn unlock(at: usize, bytes: usize) {
    // SAFETY: a direct system call that changes no bytes.
    unsafe { libc::syscall(libc::SYS_munlock, at, bytes) };
}

/// A lock whose holder panicked still guards whole values.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Cuts out of a part what was replaced.
fn cut(part: (Range<usize>, bool), replaced: &Range<usize>) -> Vec<(Range<usize>, bool)> {
    let (pages, is_paged) = part;
    let from = replaced.start.clamp(pages.start, pages.end);
    let to = replaced.end.clamp(from, pages.end);
    let cut = [(pages.start..from, is_paged), (from..to, false), (to..pages.end, is_paged)];
    cut.into_iter().filter(|(pages, _)| !pages.is_empty()).collect()
}

/// Whole pages, of sizes that can be.
fn pages_of(bytes: usize) -> Option<usize> {
    (1..1 << 46).contains(&bytes).then(|| bytes.div_ceil(PAGE_BYTES))
}
