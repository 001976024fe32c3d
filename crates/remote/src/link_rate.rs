//! The rate of a TCP connection, as the kernel measures it (`TCP_INFO`).
#![allow(unsafe_code)]

use std::net::TcpStream;
use std::os::fd::AsRawFd;

/// The offset of `tcpi_delivery_rate_app_limited` in the kernel's `struct tcp_info`; its lowest bit.
const APP_LIMITED_AT: usize = 7;
/// The offset of `tcpi_delivery_rate`, in bytes per second, a `u64`.
const DELIVERY_RATE_AT: usize = 160;
const INFO_BYTES: usize = DELIVERY_RATE_AT + 8;

/// Returns the time in ns in which a byte went through the connection lately. Returns `None` before
/// it was busy with what this side sent, and on a system that does not tell.
pub fn ns_per_byte(socket: &TcpStream) -> Option<f64> {
    let (mut info, mut len) = ([0u8; INFO_BYTES], INFO_BYTES as libc::socklen_t);
    // SAFETY: the kernel writes at most `len` bytes of `info`, and their number to `len`.
    let done = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr().cast(),
            &mut len,
        )
    };
    let is_whole = done == 0 && len as usize == INFO_BYTES;
    let rate: [u8; 8] = info[DELIVERY_RATE_AT..].try_into().ok()?;
    let bytes_per_s = u64::from_ne_bytes(rate);
    // A sender that has nothing to send shows its own rate, not that of the link.
    let is_of_link = info[APP_LIMITED_AT] & 1 == 0;
    (is_whole && is_of_link && bytes_per_s > 0).then(|| 1e9 / bytes_per_s as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpListener;

    #[test]
    fn a_connection_that_was_busy_has_a_rate() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut far = listener.accept().unwrap().0;
        let reader = std::thread::spawn(move || far.read_to_end(&mut Vec::new()));
        let all = vec![1; 32 << 20];
        near.write_all(&all).unwrap();
        let ns = ns_per_byte(&near).expect("32 MiB keep a connection busy");
        assert!((1e-3..1e3).contains(&ns), "{ns} ns for a byte");
        drop(near);
        assert_eq!(reader.join().unwrap().unwrap(), all.len());
    }
}
