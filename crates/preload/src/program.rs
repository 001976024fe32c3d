//! The process that is about to run main: its arguments, environment and executable.

use crate::config::Program;
use std::ffi::CStr;

/// The strings of the process, which live as long as it does.
pub struct Process {
    argv: *const *const libc::c_char,
    envp: *const *const libc::c_char,
    exe: [u8; libc::PATH_MAX as usize + 1],
}

impl Process {
    /// Reads the executable's path. Returns none if that fails (no /proc).
    ///
    /// # Safety
    /// Both arguments must be arrays that end in null, of strings that live as long as the process.
    pub unsafe fn of_main(
        argv: *const *const libc::c_char,
        envp: *const *const libc::c_char,
    ) -> Option<Process> {
        let mut process = Process { argv, envp, exe: [0; libc::PATH_MAX as usize + 1] };
        let buffer = process.exe.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most PATH_MAX bytes; the last byte stays null.
        let len =
            unsafe { libc::readlink(c"/proc/self/exe".as_ptr(), buffer, libc::PATH_MAX as usize) };
        (len > 0).then_some(process)
    }

    /// Returns true for set-id programs, which are left alone.
    pub fn is_secure(&self) -> bool {
        // SAFETY: getauxval has no preconditions.
        unsafe { libc::getauxval(libc::AT_SECURE) != 0 }
    }

    /// Returns false if there is certainly nothing to do: no variable is set, and the default file does not
    /// exist.
    pub fn asks_for_anything(&self) -> bool {
        self.environment().any(|entry| entry.to_bytes().starts_with(b"MPSS"))
            // SAFETY: the path is a constant that ends in null.
            || unsafe { libc::access(c"/etc/mpss.conf".as_ptr(), libc::R_OK) == 0 }
    }

    /// Returns the executable's path.
    pub fn exe(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.exe).unwrap_or(c"")
    }

    /// Returns the environment's entries, `NAME=value`.
    pub fn environment(&self) -> impl Iterator<Item = &'static CStr> {
        strings(self.envp)
    }

    /// Returns the value of the first entry that begins with `name` (which ends in `=`).
    pub fn variable(&self, name: &[u8]) -> Option<&'static CStr> {
        let entry = self.environment().find(|entry| entry.to_bytes().starts_with(name))?;
        entry.to_bytes_with_nul().get(name.len()..).and_then(|v| CStr::from_bytes_with_nul(v).ok())
    }
}

/// Returns the strings of an array that ends in null.
fn strings(array: *const *const libc::c_char) -> impl Iterator<Item = &'static CStr> {
    let mut next = array;
    std::iter::from_fn(move || {
        // SAFETY: the caller of `Process::of_main` promised an array that ends in null, and the iterator
        // stops there. The strings live as long as the process.
        unsafe {
            let string = *next;
            if string.is_null() {
                return None;
            }
            next = next.add(1);
            Some(CStr::from_ptr(string))
        }
    })
}

/// Calls fnmatch(3) with a pattern that does not end in null. A pattern too long for the buffer matches
/// nothing.
fn glob(pattern: &[u8], text: &CStr) -> bool {
    let mut buffer = [0u8; libc::PATH_MAX as usize + 1];
    match buffer.get_mut(..pattern.len()) {
        Some(start) if start.len() < libc::PATH_MAX as usize => start.copy_from_slice(pattern),
        _ => return false,
    }
    // SAFETY: both strings end in null.
    unsafe { libc::fnmatch(buffer.as_ptr().cast(), text.as_ptr(), 0) == 0 }
}

impl Program for Process {
    fn is(&self, pattern: &[u8]) -> bool {
        let full = self.exe();
        if pattern.starts_with(b"/") {
            return glob(pattern, full);
        }
        let bytes = full.to_bytes_with_nul();
        let start = bytes.iter().rposition(|byte| *byte == b'/').map_or(0, |slash| slash + 1);
        let base = bytes.get(start..).and_then(|base| CStr::from_bytes_with_nul(base).ok());
        base.is_some_and(|base| glob(pattern, base))
    }

    fn has_argument(&self, pattern: &[u8]) -> bool {
        strings(self.argv).skip(1).any(|argument| glob(pattern, argument))
    }
}
