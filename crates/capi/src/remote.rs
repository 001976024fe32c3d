//! Regions of network memory for C. include/pagetax.h documents each function.
//!
//! Invariant: an address names a region only from its map to its unmap; any other is EINVAL.

use pagetax_interpose::system;
use pagetax_remote::page::PAGE_BYTES;
use pagetax_remote::pager::{Log, PagerError, PagerOptions, RemoteRegion, Serving, UffdError};
use pagetax_remote::preloaded::{EngineSettings, ServerSettings, StoreSettings};
use pagetax_remote::store::StoreError;
use pagetax_remote::store::redis::EngineTls;
use pagetax_remote::tls::Files;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const OVERCOMMIT: c_uint = 1;
const DISCOVER: c_uint = 2;
const USER_MODE_ONLY: c_uint = 4;
const IN_PLACE: c_uint = 8;
const INSECURE: c_uint = 16;
const COMPRESS_TLS: c_uint = 32;

/// `struct pagetax_remote_options`.
#[repr(C)]
struct RemoteOptions {
    resident: usize,
    servers: *const c_char,
    copies: c_uint,
    flags: c_uint,
    tls_certificate: *const c_char,
    tls_key: *const c_char,
    tls_authority: *const c_char,
    tls_name: *const c_char,
    log: Option<unsafe extern "C" fn(line: *const c_char)>,
}

/// `struct pagetax_remote_counts`.
#[repr(C)]
struct RemoteCounts {
    faults: u64,
    page_ins: u64,
    page_outs: u64,
    resident_bytes: u64,
}

static REGIONS: Mutex<BTreeMap<usize, Arc<RemoteRegion>>> = Mutex::new(BTreeMap::new());

thread_local! {
    static WHY: RefCell<CString> = RefCell::default();
}

fn regions() -> MutexGuard<'static, BTreeMap<usize, Arc<RemoteRegion>>> {
    REGIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn fail(errno: c_int, why: &str) {
    // Messages contain no null bytes.
    WHY.set(CString::new(why).unwrap_or_default());
    system::set_errno(errno);
}

fn region(address: *mut c_void) -> Option<Arc<RemoteRegion>> {
    let found = regions().get(&(address as usize)).cloned();
    if found.is_none() {
        fail(
            libc::EINVAL,
            "no region begins at this address; hint: pass the address that pagetax_remote_map returned",
        );
    }
    found
}

/// Copies a C string; none if it is null.
///
/// # Safety
/// The argument is null or ends in a null byte.
unsafe fn text(text: *const c_char) -> Option<String> {
    // SAFETY: not null; else as the caller promises.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}

/// Returns the store: inside the process, unless the options name or discover servers. An incomplete TLS
/// configuration is an error: otherwise pages would be sent in the clear.
///
/// # Safety
/// As for [`text`], for each string.
unsafe fn store(options: &RemoteOptions) -> Result<StoreSettings, (c_int, String)> {
    // SAFETY: as the caller promises.
    let [named, certificate, key, authority, tls_name] = unsafe {
        [
            text(options.servers),
            text(options.tls_certificate),
            text(options.tls_key),
            text(options.tls_authority),
            text(options.tls_name),
        ]
    };
    let discover = options.flags & DISCOVER != 0;
    let path = |name: Option<String>| name.map(PathBuf::from);
    let copies = options.copies.max(1) as usize;
    let unreachable = pagetax_remote::client::cluster::UNREACHABLE;
    let insecure = options.flags & INSECURE != 0;
    if let Some(url) = named.as_ref().filter(|named| named.contains("://")) {
        let client = path(certificate).zip(path(key));
        let tls = EngineTls { authority: path(authority), client };
        let url = url.clone();
        return Ok(StoreSettings::Engine(EngineSettings {
            url,
            copies,
            unreachable,
            tls,
            insecure,
        }));
    }
    let tls = match (path(certificate), path(key), path(authority)) {
        (Some(certificate), Some(key), Some(authority)) => {
            Some(Files { certificate, key, authority })
        }
        (None, None, None) if tls_name.is_none() => None,
        _ => {
            let why = "TLS needs tls_cert, tls_key and tls_ca; hint: set all three, or none and no tls_name";
            return Err((libc::EINVAL, why.into()));
        }
    };
    if named.is_none() && !discover {
        return Ok(StoreSettings::default());
    }
    let named = named.unwrap_or_default();
    Ok(StoreSettings::Servers(ServerSettings {
        named: named.split(',').filter(|name| !name.is_empty()).map(String::from).collect(),
        discover,
        copies,
        unreachable,
        tls,
        tls_name,
        insecure,
        compress_tls: options.flags & COMPRESS_TLS != 0,
    }))
}

/// Returns a log that calls the program's function. Without one, lines are dropped: a library does not print.
fn log_of(options: &RemoteOptions) -> Log {
    let Some(log) = options.log else { return Arc::new(|_| {}) };
    Arc::new(move |line| {
        let line = CString::new(line).unwrap_or_default();
        // SAFETY: the program's function, of the type that the header declares; the line ends in a null byte.
        unsafe { log(line.as_ptr()) };
    })
}

/// Maps a region, or returns errno and the reason.
///
/// # Safety
/// As for [`store`].
unsafe fn map(bytes: usize, options: &RemoteOptions) -> Result<*mut c_void, (c_int, String)> {
    // SAFETY: as the caller promises.
    let settings = unsafe { store(options) }?;
    let log = log_of(options);
    let store = settings.open(Some(log.clone())).map_err(|why| (libc::EHOSTUNREACH, why))?;
    let in_place = options.flags & IN_PLACE != 0;
    let paged = PagerOptions {
        serving: if in_place { Serving::InPlace } else { Serving::Thread },
        overcommit: options.flags & OVERCOMMIT != 0,
        user_mode_only: options.flags & USER_MODE_ONLY != 0,
        log: Some(log),
        ..PagerOptions::resident(options.resident as u64)
    };
    let mapped = RemoteRegion::map(store, bytes as u64, paged);
    let region = mapped.map_err(|error| (errno_of(&error), error.to_string()))?;
    let address = region.as_ptr();
    regions().insert(address as usize, Arc::new(region));
    Ok(address.cast())
}

fn errno_of(error: &PagerError) -> c_int {
    match error {
        PagerError::Size { .. } => libc::EINVAL,
        PagerError::Uffd(UffdError::TooOld) => libc::ENOSYS,
        PagerError::Uffd(error) => error.errno().unwrap_or(libc::EAGAIN),
        PagerError::System { source, .. } => source.raw_os_error().unwrap_or(libc::EAGAIN),
        PagerError::Store(StoreError::Full { .. }) => libc::ENOMEM,
        PagerError::Store(_) => libc::EHOSTUNREACH,
    }
}

/// Maps a region of network memory; pagetax.h has the contract.
///
/// # Safety
/// The options are null or point to a `struct pagetax_remote_options`, whose strings end in null bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn pagetax_remote_map(
    bytes: usize,
    options: *const RemoteOptions,
) -> *mut c_void {
    const KNOWN: c_uint =
        OVERCOMMIT | DISCOVER | USER_MODE_ONLY | IN_PLACE | INSECURE | COMPRESS_TLS;
    // SAFETY: as the caller promises.
    let options = unsafe { options.as_ref() };
    let Some(options) = options.filter(|options| options.flags & !KNOWN == 0) else {
        fail(
            libc::EINVAL,
            "options are null, or flags has unknown bits; hint: use the PAGETAX_REMOTE_ constants",
        );
        return std::ptr::null_mut();
    };
    // SAFETY: as the caller promises.
    unsafe { map(bytes, options) }.unwrap_or_else(|(errno, why)| {
        fail(errno, &why);
        std::ptr::null_mut()
    })
}

#[unsafe(no_mangle)]
extern "C" fn pagetax_remote_unmap(address: *mut c_void) -> c_int {
    let removed = regions().remove(&(address as usize));
    match removed {
        Some(_) => 0,
        None => {
            fail(
                libc::EINVAL,
                "no region begins at this address; hint: pass the address that pagetax_remote_map returned",
            );
            -1
        }
    }
}

/// Discards the content of whole pages of a region.
///
/// # Safety
/// No reference to the bytes of the range is in use.
#[unsafe(no_mangle)]
unsafe extern "C" fn pagetax_remote_discard(
    address: *mut c_void,
    offset: usize,
    bytes: usize,
) -> c_int {
    let Some(region) = region(address) else { return -1 };
    let end = offset.checked_add(bytes).filter(|end| *end <= region.len());
    let Some(end) = end.filter(|_| (offset | bytes).is_multiple_of(PAGE_BYTES)) else {
        fail(libc::EINVAL, "offset and bytes must be whole pages inside the region");
        return -1;
    };
    // SAFETY: inside; as the caller promises.
    unsafe { region.discard_shared(offset / PAGE_BYTES, (end - offset) / PAGE_BYTES) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn pagetax_remote_evict(address: *mut c_void) -> c_int {
    let Some(region) = region(address) else { return -1 };
    region.evict_all();
    0
}

/// Reads the counts of a region's pager.
///
/// # Safety
/// The argument points to room for a `struct pagetax_remote_counts`.
#[unsafe(no_mangle)]
unsafe extern "C" fn pagetax_remote_count(
    address: *mut c_void,
    counts: *mut RemoteCounts,
) -> c_int {
    let Some(region) = region(address) else { return -1 };
    let now = region.counts();
    let counted = RemoteCounts {
        faults: now.fault_count,
        page_ins: now.page_in_count,
        page_outs: now.page_out_count,
        resident_bytes: region.resident_bytes(),
    };
    // SAFETY: as the caller promises.
    unsafe { counts.write(counted) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn pagetax_remote_error() -> *const c_char {
    // The string stays valid until the thread's next failure.
    WHY.with_borrow(|why| why.as_ptr())
}
