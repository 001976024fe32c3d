//! The one reader of /proc/PID/maps, and the parser of its lines, which smaps has too. A process chooses
//! the names: they may hold spaces, brackets and bytes that are no UTF-8.
//!
//! Only the sampling engine reads its own maps by itself (`dbt::maps`). It runs inside a program that may
//! be stopped in malloc, so it must not allocate.
//!
//! Source: proc_pid_maps(5); `show_map_vma` of Linux 6.18.

use super::Root;
use std::io;
use std::ops::Range;

/// A line of maps: one mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MapsLine {
    /// The addresses of the mapping.
    pub range: Range<u64>,
    /// The four letters, as in `rw-p`.
    pub permissions: [u8; 4],
    /// The place of the first address in the file.
    pub offset_bytes: u64,
    /// Major and minor number of the file's device, in hexadecimal.
    pub device: String,
    /// The file's inode number. It is 0 for anonymous memory and for the kernel's own.
    pub inode: u64,
    /// The sixth field: a path, which begins with a slash, a name of the kernel in brackets, or nothing.
    pub name: String,
}

/// Reads the mappings of a process, ordered by address. A process without memory (a zombie, a kernel
/// thread) has none.
pub fn maps(root: &Root, pid: u32) -> io::Result<Vec<MapsLine>> {
    let text = root.bytes(&format!("/proc/{pid}/maps"))?;
    let broken = |bytes: &[u8]| {
        let line = String::from_utf8_lossy(bytes).into_owned();
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("/proc/{pid}/maps has the line `{line}`"),
        )
    };
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|bytes| line(bytes).ok_or_else(|| broken(bytes))).collect()
}

/// Parses a line of maps or smaps. Returns `None` if the kernel writes no such line.
///
/// `7f…-7f… rw-p 00000000 fe:00 1234   /path with spaces`
pub fn line(bytes: &[u8]) -> Option<MapsLine> {
    let mut words = bytes.splitn(6, |byte| *byte == b' ');
    let mut word = || std::str::from_utf8(words.next()?).ok();
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let (start, end) = word()?.split_once('-')?;
    let range = hex(start)?..hex(end)?;
    let permissions = word()?.as_bytes().try_into().ok()?;
    let offset_bytes = hex(word()?)?;
    let device = word()?.to_string();
    let inode = word()?.parse().ok()?;
    let name = String::from_utf8_lossy(words.next().unwrap_or_default().trim_ascii_start());
    let name = name.into_owned();
    let is_range = !range.is_empty();
    is_range.then_some(MapsLine { range, permissions, offset_bytes, device, inode, name })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &[u8]) -> io::Result<Vec<MapsLine>> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(folder.path().join("proc/7")).unwrap();
        std::fs::write(folder.path().join("proc/7/maps"), text).unwrap();
        maps(&Root::at(folder.path()), 7)
    }

    #[test]
    fn the_name_is_all_of_the_sixth_field() {
        let text = b"\
00400000-00452000 r-xp 00001000 08:02 173521      /usr/bin/a program
7f0000000000-7f0000021000 rw-p 00000000 00:00 0 
7f0000100000-7f0000200000 r--p 00000000 08:02 9                          /home/x [vdso]
7f0000200000-7f0000300000 r--p 00000000 08:02 9                          /SYSV\xff
7ffc0000-7ffe0000 r-xp 00000000 00:00 0           [vdso]
";
        let maps = read(text).unwrap();
        let names: Vec<&str> = maps.iter().map(|line| &*line.name).collect();
        assert_eq!(names, ["/usr/bin/a program", "", "/home/x [vdso]", "/SYSV\u{fffd}", "[vdso]"]);
        assert_eq!((maps[0].range.clone(), maps[0].offset_bytes), (0x40_0000..0x45_2000, 0x1000));
        assert_eq!(
            (&maps[0].permissions, &*maps[0].device, maps[0].inode),
            (b"r-xp", "08:02", 173_521)
        );
    }

    #[test]
    fn nonsense_is_shown() {
        assert_eq!(read(b"").unwrap(), []);
        for text in ["x\n", "2000-1000 r--p 0 0:0 0\n", "1000-2000 rw 0 0:0 0\n", "1000-2000\n"] {
            assert!(
                read(text.as_bytes()).unwrap_err().to_string().contains("/proc/7/maps"),
                "{text}"
            );
        }
        assert!(maps(&Root::default(), u32::MAX).is_err());
    }
}
