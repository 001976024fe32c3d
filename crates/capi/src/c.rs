//! The C functions. include/pagetax.h documents each of them.

use crate::{AdviceError, Part, Request, advise, information, page_sizes};
use pagetax_interpose::system;
use std::ffi::{c_int, c_uint, c_void};

const MC_HAT_ADVISE: c_int = 7;
const MHA_MAPSIZE_VA: c_uint = 1;
const MHA_MAPSIZE_BSSBRK: c_uint = 2;
const MHA_MAPSIZE_STACK: c_uint = 4;
const MEMINFO_SHIFT: u32 = 16;
const MAX_MEMINFO_CNT: usize = 256;
const MAX_MEMINFO_REQ: usize = 31;

/// `struct memcntl_mha`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Mha {
    cmd: c_uint,
    flags: c_uint,
    page_bytes: usize,
}

fn failed(errno: c_int) -> c_int {
    system::set_errno(errno);
    -1
}

/// Does what memcntl(2) of Solaris 9 does.
///
/// # Safety
/// For MC_HAT_ADVISE, the argument is null or points to a `struct memcntl_mha`.
#[unsafe(no_mangle)]
unsafe extern "C" fn memcntl(
    address: *mut c_void,
    len: usize,
    command: c_int,
    arg: *mut c_void,
    attributes: c_int,
    mask: c_int,
) -> c_int {
    if command != MC_HAT_ADVISE || arg.is_null() || attributes != 0 || mask != 0 {
        return failed(libc::EINVAL);
    }
    // SAFETY: not null; the caller promised what it points to. It need not be aligned.
    let mha = unsafe { arg.cast::<Mha>().read_unaligned() };
    let whole = address.is_null() && len == 0;
    let part = match mha.cmd {
        MHA_MAPSIZE_VA => Part::Range(address as usize, len),
        MHA_MAPSIZE_BSSBRK if whole => Part::Heap,
        MHA_MAPSIZE_STACK if whole => Part::Stack,
        _ => return failed(libc::EINVAL),
    };
    if mha.flags != 0 {
        return failed(libc::EINVAL);
    }
    advise(part, mha.page_bytes).map_or_else(|error: AdviceError| failed(error.errno()), |()| 0)
}

/// Returns the number of page sizes, and the sizes themselves: getpagesizes(3C).
///
/// # Safety
/// The array is null or has room for `count` sizes.
#[unsafe(no_mangle)]
unsafe extern "C" fn getpagesizes(sizes: *mut usize, count: c_int) -> c_int {
    let found = page_sizes();
    match (usize::try_from(count), sizes.is_null()) {
        (Ok(0), true) => found.len() as c_int,
        (Ok(room), false) => {
            let written = found.len().min(room);
            for (place, size) in found.into_iter().take(written).enumerate() {
                // SAFETY: place < written ≤ room.
                unsafe { sizes.add(place).write(size) };
            }
            written as c_int
        }
        _ => failed(libc::EINVAL),
    }
}

fn request(code: c_uint) -> Option<Request> {
    Some(match code >> MEMINFO_SHIFT {
        1 => Request::Physical,
        2 => Request::Node,
        3 => Request::PageBytes,
        4 => Request::ReplicaCount,
        5 | 6 => Request::Replica,
        7 => Request::NodeOfPhysical,
        _ => return None,
    })
}

/// Does what meminfo(2) of Solaris 9 does.
///
/// # Safety
/// The arrays hold `address_count` addresses and `request_count` requests; there is room for the
/// product of both, and for `address_count` words of validity.
#[unsafe(no_mangle)]
unsafe extern "C" fn meminfo(
    addresses: *const u64,
    address_count: c_int,
    requests: *const c_uint,
    request_count: c_int,
    data: *mut u64,
    validity: *mut c_uint,
) -> c_int {
    let (Ok(addresses_len), Ok(requests_len)) =
        (usize::try_from(address_count), usize::try_from(request_count))
    else {
        return failed(libc::EINVAL);
    };
    let sizes_hold = (1..=MAX_MEMINFO_CNT).contains(&addresses_len)
        && (1..=MAX_MEMINFO_REQ).contains(&requests_len);
    let null = addresses.is_null() || requests.is_null() || data.is_null() || validity.is_null();
    if !sizes_hold {
        return failed(libc::EINVAL);
    }
    if null {
        return failed(libc::EFAULT);
    }
    // SAFETY: not null; the caller promised the lengths.
    let (addresses, codes) = unsafe {
        (
            std::slice::from_raw_parts(addresses, addresses_len),
            std::slice::from_raw_parts(requests, requests_len),
        )
    };
    let Some(requests) = codes.iter().map(|code| request(*code)).collect::<Option<Vec<_>>>() else {
        return failed(libc::EINVAL);
    };
    for (row, answers) in information(addresses, &requests).into_iter().enumerate() {
        let mut valid = c_uint::from(answers.is_good);
        for (column, value) in answers.values.iter().enumerate() {
            valid |= c_uint::from(value.is_some()) << (column + 1);
            // SAFETY: row < addresses_len and column < requests_len: within the promised room.
            unsafe { data.add(row * requests_len + column).write(value.unwrap_or(0)) };
        }
        // SAFETY: row < addresses_len.
        unsafe { validity.add(row).write(valid) };
    }
    0
}
