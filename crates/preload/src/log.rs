//! Error messages: appended to MPSSERRFILE, or sent to syslog as user.err. They never go to the program's
//! standard error.

use crate::program::Process;
use pagetax_interpose::system::Decimal;
use std::ffi::CStr;

/// The length of the longest message, in bytes; the rest is cut off.
const MESSAGE_BYTES_MAX: usize = 1024;

/// The destination of messages.
pub struct Log {
    file: Option<libc::c_int>,
    name: &'static [u8],
}

impl Log {
    /// Opens the file that MPSSERRFILE names. If that fails, this message and all later ones go to syslog.
    pub fn open(process: &Process) -> Log {
        let mut log = Log { file: None, name: b"libpagetax_preload" };
        if let Some(path) = process.variable(b"MPSSERRFILE=") {
            let flags = libc::O_WRONLY | libc::O_APPEND | libc::O_CREAT | libc::O_CLOEXEC;
            // SAFETY: the path ends in null.
            let fd = unsafe { libc::open(path.as_ptr(), flags, 0o644) };
            match fd {
                0.. => log.file = Some(fd),
                _ => log.line(&[b"cannot open ", path.to_bytes()]),
            }
        }
        log
    }

    /// Logs one line, made of parts.
    pub fn line(&self, parts: &[&[u8]]) {
        let mut message = Message { bytes: [0; MESSAGE_BYTES_MAX], len: 0 };
        if self.file.is_none() {
            message.push(b"<11>"); // user.err
        }
        message.push(self.name);
        message.push(b"[");
        message.push(Decimal::of(u64::from(std::process::id())).digits());
        message.push(b"]: ");
        parts.iter().for_each(|part| message.push(part));
        match self.file {
            Some(fd) => {
                message.push(b"\n");
                // SAFETY: the bytes are initialised. A failed write is ignored: there is nowhere to report
                // it.
                unsafe { libc::write(fd, message.bytes.as_ptr().cast(), message.len) };
            }
            None => send_to_syslog(&message, c"/dev/log"),
        }
    }

    /// Closes the descriptor, so that the program gets the same descriptor numbers as without us.
    pub fn close(self) {
        if let Some(fd) = self.file {
            // SAFETY: opened by `open` and not used elsewhere.
            unsafe { libc::close(fd) };
        }
    }
}

/// Sends a message to syslog. libc's syslog would allocate and keep a descriptor.
fn send_to_syslog(message: &Message, path: &CStr) {
    // SAFETY: the address is zeroed and then holds a short path with its null. The descriptor is closed at
    // the end and not used elsewhere.
    unsafe {
        let fd = libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0);
        if fd < 0 {
            return;
        }
        let mut address: libc::sockaddr_un = std::mem::zeroed();
        address.sun_family = libc::AF_UNIX as libc::sa_family_t;
        for (to, from) in address.sun_path.iter_mut().zip(path.to_bytes()) {
            *to = *from as libc::c_char;
        }
        let size = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        let (bytes, to) = (message.bytes.as_ptr().cast(), (&raw const address).cast());
        libc::sendto(fd, bytes, message.len, flags, to, size);
        libc::close(fd);
    }
}

struct Message {
    bytes: [u8; MESSAGE_BYTES_MAX],
    len: usize,
}

impl Message {
    fn push(&mut self, part: &[u8]) {
        for byte in part {
            if let Some(place) = self.bytes.get_mut(self.len) {
                *place = *byte;
                self.len += 1;
            }
        }
    }
}
