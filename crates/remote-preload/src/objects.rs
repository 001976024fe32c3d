//! The addresses of the loader, the C library and this library. They identify the caller of a
//! function and the owner of a variable.

use crate::threads::next;
use libc::{c_int, c_void, dl_phdr_info, size_t};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::AtomicUsize;

/// The address ranges of one loaded object.
#[derive(Debug, Default)]
struct Object {
    code: Vec<Range<usize>>,
    variables: Vec<Range<usize>>,
}

/// The loaded objects that matter here.
#[derive(Debug, Default)]
struct Objects {
    loader: Object,
    c_library: Object,
    own: Object,
}

static OBJECTS: OnceLock<Objects> = OnceLock::new();

/// Finds their addresses. This runs once, before the program, because it takes the loader's lock.
pub fn find() {
    static LIST: AtomicUsize = AtomicUsize::new(0);
    let ranges = ObjectRanges {
        // SAFETY: reads the auxiliary vector. Without the entry the result is 0, where nothing is
        // mapped.
        loader: unsafe { libc::getauxval(libc::AT_BASE) as usize },
        c_library: next(c"_IO_list_all", &LIST),
        own: find as fn() as usize,
        found: Objects::default(),
    };
    let mut ranges = ranges;
    // SAFETY: the loader calls `record_object` with each object's description and these addresses,
    // only during this call.
    unsafe { libc::dl_iterate_phdr(Some(record_object), (&raw mut ranges).cast()) };
    let _ = OBJECTS.set(ranges.found);
}

/// An address inside each of the objects, and the objects found so far.
struct ObjectRanges {
    loader: usize,
    c_library: usize,
    own: usize,
    found: Objects,
}

unsafe extern "C" fn record_object(
    info: *mut dl_phdr_info,
    _: size_t,
    ranges: *mut c_void,
) -> c_int {
    // SAFETY: dl_iterate_phdr(3) passes a live description, and `find` its own `ObjectRanges`.
    let (info, ranges) = unsafe { (&*info, &mut *ranges.cast::<ObjectRanges>()) };
    // SAFETY: the loader keeps the program headers of loaded objects mapped.
    let headers = unsafe { std::slice::from_raw_parts(info.dlpi_phdr, info.dlpi_phnum.into()) };
    let mut object = Object::default();
    for header in headers.iter().filter(|header| header.p_type == libc::PT_LOAD) {
        let start = info.dlpi_addr as usize + header.p_vaddr as usize;
        let range = start..start + header.p_memsz as usize;
        if header.p_flags & libc::PF_X != 0 {
            object.code.push(range.clone());
        }
        if header.p_flags & libc::PF_W != 0 {
            object.variables.push(range);
        }
    }
    let holds =
        |at: usize| object.code.iter().chain(&object.variables).any(|range| range.contains(&at));
    if info.dlpi_addr as usize == ranges.loader {
        ranges.found.loader = object;
    } else if holds(ranges.c_library) {
        ranges.found.c_library = object;
    } else if holds(ranges.own) {
        ranges.found.own = object;
    }
    0
}

fn is_code(of: fn(&Objects) -> &Object, at: usize) -> bool {
    OBJECTS.get().is_some_and(|objects| of(objects).code.iter().any(|code| code.contains(&at)))
}

/// Returns true if the caller is the loader.
pub fn is_loader(caller: usize) -> bool {
    is_code(|objects| &objects.loader, caller)
}

/// Returns true if the caller is this library, which includes mimalloc.
pub fn is_own(caller: usize) -> bool {
    is_code(|objects| &objects.own, caller)
}

/// Returns the variables of the loader and of the C library.
pub fn c_variables() -> impl Iterator<Item = Range<usize>> {
    let objects = OBJECTS.get().into_iter();
    objects.flat_map(|objects| {
        objects.loader.variables.iter().chain(&objects.c_library.variables).cloned()
    })
}
