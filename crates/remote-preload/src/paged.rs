//! The one region of this process: when it starts, and what is given out of it.

use crate::space::Space;
use crate::{descriptors, say, say_to, threads};
use pagetax_core::units::Bytes;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{Options, RemoteRegion};
use pagetax_remote::preloaded::Settings;
use std::mem::ManuallyDrop;
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
    settings: Settings,
    /// Where stats go, if they are wanted: what stderr was at the start, as some programs close it before they end.
    stats_to: Option<libc::c_int>,
}

/// No thread takes, gives back or drops paged memory while it lives.
pub struct Standstill<'a> {
    _space: MutexGuard<'a, Space>,
    _dropping: MutexGuard<'a, ()>,
}

/// Says what was paged, if that is wanted.
pub fn say_stats() {
    if let Some((paged, to)) = PAGED.get().and_then(|paged| Some((paged, paged.stats_to?))) {
        let resident = Bytes(paged.region.resident_bytes());
        say_to(to, &format!("{resident} resident at the end; {:?}", paged.region.counts()));
    }
}

/// The servers need not wait for this process when it has gone.
pub fn give_up_at_end() {
    if let Some(paged) = PAGED.get() {
        paged.region.drop_at_end();
    }
}

/// Starts if the environment says so. A program that was to be paged and cannot be does not run.
pub fn start_as_told() {
    let settings = match Settings::from_environment() {
        Ok(None) => return,
        Ok(Some(settings)) => settings,
        Err(why) => refuse(&why),
    };
    match Paged::start(&settings) {
        Ok(paged) => {
            // The constructor runs once, so nothing was there before.
            let _ = PAGED.set(paged);
        }
        Err(why) => refuse(&why),
    }
}

fn refuse(why: &str) -> ! {
    say(why);
    // SAFETY: ends the process before main; nothing of the program has run.
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
    fn start(settings: &Settings) -> Result<Paged, String> {
        let store = settings.open_store(Arc::new(say))?;
        let options = Options {
            overcommit: true,
            log: Some(Arc::new(say)),
            spin: settings.spin,
            leaving: settings.leaving,
            keep_awake: settings.keep_awake,
            ..Options::resident(settings.resident.0)
        };
        let region = RemoteRegion::map(store, settings.address_space.0, options);
        let region = ManuallyDrop::new(region.map_err(|error| error.to_string())?);
        let pages = region.len() / PAGE_BYTES;
        let space = Mutex::new(Space::new(pages));
        let (dropping, settings) = (Mutex::default(), settings.clone());
        let stats_to = settings.stats.then(descriptors::stderr_of_ours);
        let paged = Paged { region, space, dropping, settings, stats_to };
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
        let dropping = self.dropping.lock().unwrap_or_else(PoisonError::into_inner);
        Standstill { _space: self.space(), _dropping: dropping }
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
    pub fn restart_in_child(&self) {
        let store = match self.region.is_store_inherited() {
            true => Ok(None),
            false => self.settings.open_store(Arc::new(say)).map(Some),
        };
        let restart =
            |store| self.region.restart_in_child(store).map_err(|error| error.to_string());
        if let Err(why) = store.and_then(restart) {
            refuse(&why);
        }
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
        self.space.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn protect(&self, first: usize, pages: usize, protection: libc::c_int) -> bool {
        let (at, len) = (self.address_of(first), pages * PAGE_BYTES);
        // SAFETY: the range is this region's; a direct system call. What is given out becomes
        // accessible, what is taken back is nobody's.
        unsafe { libc::syscall(libc::SYS_mprotect, at, len, protection) == 0 }
    }

    /// Zeros, or null.
    pub fn map(&self, bytes: usize, align: usize, protection: libc::c_int) -> *mut u8 {
        let Some(pages) = pages_of(bytes) else { return std::ptr::null_mut() };
        let Some(first) = self.space().take(pages, align / PAGE_BYTES) else {
            return std::ptr::null_mut();
        };
        if !self.protect(first, pages, protection) {
            self.space().give(first, pages);
            return std::ptr::null_mut();
        }
        self.address_of(first)
    }

    /// Takes a range back; accesses get SIGSEGV.
    pub fn unmap(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        let first = self.page_of(at);
        self.protect(first, pages, libc::PROT_NONE);
        self.discard(at, bytes);
        self.space().give(first, pages);
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

    /// Makes a range zeros again.
    pub fn discard(&self, at: usize, bytes: usize) {
        let Some(pages) = pages_of(bytes) else { return };
        let _dropping = self.dropping.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: nobody holds references to the region's bytes but the program, which has just asked
        // for them to become zeros.
        unsafe { self.region.discard_shared(self.page_of(at), pages) };
    }

    /// Memory for malloc, whose length is remembered.
    pub fn allocate(&self, bytes: usize, align: usize) -> *mut u8 {
        let at = self.map(bytes, align, libc::PROT_READ | libc::PROT_WRITE);
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

/// Whole pages, of sizes that can be.
fn pages_of(bytes: usize) -> Option<usize> {
    (1..1 << 46).contains(&bytes).then(|| bytes.div_ceil(PAGE_BYTES))
}
